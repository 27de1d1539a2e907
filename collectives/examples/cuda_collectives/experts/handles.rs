//! Handles that a program has written to, or that are of the other layout: errors, and no access out of bounds.

use symmpool_allocator::Result;
use symmpool_collectives::{CombineAt, DType, DispatchAt, ExpertLayout};

use super::model::{Routing, encode};
use super::{Buffer, Check};
use crate::cuda::{download, upload};

impl Check<'_> {
    /// Writes a number into each part of a handle that calls take indices from, by turns, and combines and dispatches
    /// with it. Every rank does so, and none waits for what another one leaves out.
    pub(super) fn wrong_handles(
        &mut self,
        buffer: &Buffer<'_>,
        tokens: usize,
        seed: u64,
    ) -> Result<()> {
        let (shape, world, rank) = (buffer.shape(), self.pool.world(), self.pool.rank());
        let routing = Routing::of(seed, world, &shape, &vec![tokens; world as usize]);
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
                    let good =
                        found.as_ref().is_err_and(symmpool_allocator::Error::is_invalid_argument)
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
        // Nothing of that is left behind.
        let call = DispatchAt { ids_dtype: DType::I64, ..self.put(&routing, &shape, seed)? };
        self.put_ids(&routing)?;
        self.dispatch(buffer, 0, &call)?;
        let input = buffer.received().rows.cast_const();
        let back = CombineAt {
            input,
            input_rows: buffer.capacity(false, 1),
            output: self.result.as_ptr().cast(),
            tokens,
            weights: std::ptr::null(),
            by_expert: false,
            more: 0,
        };
        self.combine(buffer, 0, &back)?;
        self.settle(buffer)?;
        let wanted = encode(shape.dtype, routing.combined(rank, seed, shape.hidden, false));
        let got = download(self.pool, self.result.address(), wanted.len())?;
        self.judge("sums after wrong handles", &got, &wanted);
        Ok(())
    }
}
