//! Handles that a program has written to, or that are of the other layout: errors, and no access out of bounds.

use std::time::Duration;

use symmpool_allocator::{Error, Result};
use symmpool_collectives::{CombineAt, DType, DispatchAt, ExpertLayout};

use super::model::{TokenRouting, encode};
use super::{BorrowedBuffer, Check};
use crate::cuda::{download, upload};

/// How late a rank comes.
const LATE: Duration = Duration::from_millis(50);

impl Check<'_> {
    /// Writes a number into each part of a handle that calls take indices from, by turns, and combines and dispatches
    /// with it. Every rank does so, and none waits for what another one leaves out.
    pub(super) fn wrong_handles(
        &mut self,
        buffer: &BorrowedBuffer<'_>,
        tokens: usize,
        seed: u64,
    ) -> Result<()> {
        let (shape, world) = (buffer.shape(), self.pool.world());
        let routing = TokenRouting::of(seed, world, &shape, &vec![tokens; world as usize]);
        let parts = buffer.handle_parts();
        let cases = [
            ("places", parts.places, 1 << 30, true),
            ("places", parts.places, -7, true),
            ("positions", parts.positions, 1 << 30, false),
            ("positions", parts.positions, -7, false),
            ("received rows", parts.head, 1 << 30, false),
            ("tokens", parts.head + 4, 1, false),
            ("layout", parts.head + 12, 0, false),
        ];
        for by_expert in [false, true] {
            let layout = match by_expert {
                false => ExpertLayout::ByRank,
                true => ExpertLayout::ByExpert {
                    output: self.output.as_ptr().cast(),
                    scales: std::ptr::null_mut(),
                    capacity: buffer.capacity(true, 1),
                    alignment: 1,
                },
            };
            let rows = buffer.capacity(by_expert, 1);
            let back = CombineAt {
                input: self.rows.as_ptr().cast_const().cast(),
                input_rows: rows,
                output: self.result.as_ptr().cast(),
                tokens,
                weights: std::ptr::null(),
                by_expert,
                more: 0,
            };
            for (what, at, number, only_by_expert) in cases {
                for known in [false, true] {
                    // A row that is not sent is one that its receiver waits for.
                    if (only_by_expert && !by_expert) || (known && at == parts.positions) {
                        continue;
                    }
                    let call = DispatchAt {
                        layout,
                        ids_dtype: DType::I64,
                        ..self.put(&routing, &shape, seed)?
                    };
                    self.put_ids(&routing)?;
                    self.dispatch(buffer, 0, &call)?;
                    self.settle(buffer)?;
                    let number: i32 = number;
                    upload(
                        self.pool,
                        self.handles[0].address() + at as u64,
                        &number.to_le_bytes(),
                    )?;
                    if known {
                        let again = DispatchAt { known: true, ids: std::ptr::null(), ..call };
                        self.dispatch(buffer, 0, &again)?;
                    } else {
                        self.combine(buffer, 0, &back)?;
                    }
                    let found = self.settle(buffer);
                    // A dispatch by a handle may place rows anywhere in an output that has room.
                    let good = found.as_ref().is_err_and(Error::is_invalid_argument)
                        || (known && only_by_expert);
                    let which = format!("{tokens} tokens, by_expert={by_expert}, known={known}");
                    self.judge(
                        &format!("{what}={number} in a handle, {which}: {found:?}"),
                        &[good],
                        &[true],
                    );
                }
            }
            // Rows that lie otherwise.
            let call =
                DispatchAt { layout, ids_dtype: DType::I64, ..self.put(&routing, &shape, seed)? };
            self.put_ids(&routing)?;
            self.dispatch(buffer, 0, &call)?;
            let other = CombineAt { by_expert: !by_expert, ..back };
            self.combine(buffer, 0, &other)?;
            let found = self.settle(buffer);
            let good = found.as_ref().is_err_and(|error| {
                error.is_invalid_argument() && error.to_string().contains("the other layout")
            });
            self.judge(&format!("a handle of the other layout: {found:?}"), &[good], &[true]);
        }
        self.nothing_is_left(buffer, tokens, seed)
    }

    /// A call whose handle says that fewer rows come than do leaves none of them for the next right call, also where the
    /// rows that belong to that one arrive late.
    fn nothing_is_left(
        &mut self,
        buffer: &BorrowedBuffer<'_>,
        tokens: usize,
        seed: u64,
    ) -> Result<()> {
        let (world, rank, parts) = (self.pool.world(), self.pool.rank(), buffer.handle_parts());
        // Where the handle becomes wrong, what of the number there, and whether a combine uses it.
        type Damage = (usize, fn(i32) -> i32, bool);
        let of_peer = |token: usize| {
            let peer = (rank + 1) % world;
            parts.positions + 4 * (token * world as usize + peer as usize)
        };
        // The last rank takes one of its own rows for one of the rank before it, or the other way round.
        let own_rows = parts.source_offsets + 4 * (world as usize - 1);
        let is_last = rank == world - 1;
        let cases: [Damage; 6] = [
            (of_peer(0), |_| 1 << 30, true),
            (of_peer(tokens / 2), |_| -7, true),
            (of_peer(0), |_| -1, true),
            (of_peer(tokens - 1), |_| 1 << 30, true),
            (own_rows, if is_last { |begin| begin + 1 } else { |begin| begin }, true),
            (own_rows, if is_last { |begin| begin - 1 } else { |begin| begin }, false),
        ];
        let shape = buffer.shape();
        let routing_of =
            |seed| TokenRouting::of(seed, world, &shape, &vec![tokens; world as usize]);
        let (first, next) = (routing_of(seed), routing_of(seed + 1));
        for (which, (at, change, combines)) in cases.into_iter().enumerate() {
            for late in 0..world {
                let what = format!("{tokens} tokens, wrong handle {which}, rank {late} late");
                self.right_call(buffer, (&first, seed), None, "before it")?;
                let place = self.handles[0].address() + at as u64;
                let found = download(self.pool, place, 4)?;
                let found = i32::from_le_bytes(found.try_into().expect("four bytes"));
                // A token that goes nowhere, and a rank without rows, have nothing that could be wrong.
                if found >= 0 && (combines || found > 0) {
                    upload(self.pool, place, &change(found).to_le_bytes())?;
                }
                if combines {
                    let back = self.combine_of(buffer, tokens);
                    self.combine(buffer, 0, &back)?;
                } else {
                    let call = self.put(&first, &shape, seed)?;
                    let again = DispatchAt { known: true, ids: std::ptr::null(), ..call };
                    self.dispatch(buffer, 0, &again)?;
                }
                // It is an error or not, but ends.
                let ended = self.settle(buffer);
                let right = ended.as_ref().err().is_none_or(Error::is_invalid_argument);
                self.judge(&format!("{what}: {ended:?}"), &[right], &[true]);
                // Two calls later the same half of the inboxes is used again, by a dispatch and by a combine.
                for more in 0..2 {
                    self.right_call(buffer, (&next, seed + 1), Some(late), &what)?;
                    if more == 0 {
                        buffer.communicator().barrier(&self.stream)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn combine_of(&self, buffer: &BorrowedBuffer<'_>, tokens: usize) -> CombineAt {
        CombineAt {
            input: buffer.received().rows.cast_const(),
            input_rows: buffer.capacity(false, 1),
            output: self.result.as_ptr().cast(),
            tokens,
            weights: std::ptr::null(),
            by_expert: false,
            more: 0,
        }
    }

    /// A dispatch and a combine, to both of which that rank comes late.
    pub(super) fn right_call(
        &mut self,
        buffer: &BorrowedBuffer<'_>,
        (routing, seed): (&TokenRouting, u64),
        late: Option<u32>,
        what: &str,
    ) -> Result<()> {
        let (shape, rank) = (buffer.shape(), self.pool.rank());
        let call = DispatchAt { ids_dtype: DType::I64, ..self.put(routing, &shape, seed)? };
        self.put_ids(routing)?;
        self.settle(buffer)?;
        let wait = || {
            if late == Some(rank) {
                std::thread::sleep(LATE);
            }
        };
        wait();
        self.dispatch(buffer, 0, &call)?;
        self.settle(buffer)?;
        wait();
        let back = self.combine_of(buffer, call.tokens);
        self.combine(buffer, 0, &back)?;
        self.settle(buffer)?;
        let wanted = encode(shape.dtype, routing.combined(rank, seed, shape.hidden, false));
        let got = download(self.pool, self.result.address(), wanted.len())?;
        self.judge(&format!("sums, {what}"), &got, &wanted);
        Ok(())
    }
}
