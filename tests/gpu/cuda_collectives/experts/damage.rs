//! Random numbers in handles. Whatever a program has written there, calls end with a typed error and access nothing but what
//! they were given, and the next right calls have right sums.

use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::ptr::NonNull;
use std::time::Duration;

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Block, Error, Pool, Result};
use symmpool_collectives::{
    CombineAt, Communicator, CommunicatorOptions, DType, DispatchAt, ExpertBuffer, ExpertLayout,
    ExpertShape, ReduceOp,
};

use super::model::TokenRouting;
use super::{BorrowedBuffer, Check, POISON};
use crate::Options;
use crate::cuda::{download, upload};
use crate::oracle::random;

/// Bytes on both sides of a buffer's memory that are nobody's, and behind all else: a multiple of what blocks begin at.
const BEYOND: usize = 4096;

/// Shapes: experts of each rank, experts of a token, tokens. All of the first go through inboxes.
const SHAPES: [(u32, u32, usize); 2] = [(3, 3, 9), (4, 2, 700)];

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let mut check = Check::new(pool)?;
    let mut closed = 0;
    for (local, top_k, max_tokens) in SHAPES {
        let (experts, dtype, capacity) = (local * pool.world(), DType::Bf16, None);
        let shape = ExpertShape { hidden: 64, experts, top_k, max_tokens, dtype, capacity };
        let region = ExpertBuffer::<&Communicator>::region_bytes(shape, pool.rank(), pool.world())?;
        let region = pool.lane("windows")?.alloc_bytes(region + 2 * BEYOND, 4096, check.stream)?;
        pool.commit()?;
        let mut damage = Damage { check: &mut check, options, region, meeting: meeting(pool)? };
        closed += damage.calls(shape, options.few(60, 6))?;
    }
    if pool.rank() == 0 {
        let (cases, wrong) = (check.cases, check.wrong);
        println!("handles: {cases} cases, {closed} communicators closed, {wrong} wrong");
    }
    Ok((check.cases, check.wrong))
}

/// A communicator that no wrong handle closes, by which ranks tell each other how calls ended.
fn meeting(pool: &Pool) -> Result<Communicator> {
    let usual = CommunicatorOptions { concurrent: Some(1), ..Default::default() };
    Communicator::with_options(pool, &usual)
}

struct Damage<'a, 'b> {
    check: &'a mut Check<'b>,
    options: &'a Options,
    /// The memory of buffers, which is guarded on both sides.
    region: Block<u8>,
    meeting: Communicator,
}

impl Damage<'_, '_> {
    /// Damages the handles of so many calls. Returns how many communicators a missing row has closed.
    fn calls(&mut self, shape: ExpertShape, count: u64) -> Result<u64> {
        // Rows may be missing, so some calls take as long as the timeout. Tools and emulated devices make others slow.
        let timeout = Duration::from_secs(if self.options.quick { 4 } else { 1 });
        let usual = CommunicatorOptions { timeout, ..self.options.communicator() };
        let (mut comm, mut closed) = (None, 0);
        for nth in 0..count {
            let seed = random(self.options.seed ^ 31, 100 * shape.max_tokens as u64 + nth);
            let used = match comm.take() {
                Some(used) => used,
                None => Communicator::with_options(self.check.pool, &usual)?,
            };
            let region = self.region.as_ptr().wrapping_add(BEYOND);
            // SAFETY: the region has that many bytes behind those in front, and stays.
            let buffer = unsafe { ExpertBuffer::at(&used, shape, None, region) }?;
            if self.call(&buffer, seed)? {
                closed += 1;
            } else {
                drop(buffer);
                comm = Some(used);
            }
        }
        Ok(closed)
    }

    /// Damages one handle on every rank, and calls by it. Whether the communicator of some rank is closed.
    fn call(&mut self, buffer: &BorrowedBuffer<'_>, seed: u64) -> Result<bool> {
        let (shape, world, rank) =
            (buffer.shape(), self.check.pool.world(), self.check.pool.rank());
        let routing = TokenRouting::random(seed, world, &shape);
        // Every rank makes the same call; what it writes is its own.
        let (by_expert, known) = (seed & 1 == 0, seed & 2 == 0);
        let own = random(seed, 60 + u64::from(rank));
        let what = format!("{shape:?}, by_expert={by_expert}, known={known}, seed {seed}");
        let layout = match by_expert {
            false => ExpertLayout::ByRank,
            true => ExpertLayout::ByExpert {
                output: self.check.output.as_ptr().cast(),
                scales: std::ptr::null_mut(),
                capacity: buffer.capacity(true, 1),
                alignment: 1,
            },
        };
        let guards = Guards::put(self, buffer)?;
        let call = DispatchAt { layout, ..self.check.put(&routing, &shape, seed)? };
        self.check.dispatch(buffer, 0, &call)?;
        self.check.settle(buffer)?;
        let written = self.write_numbers(buffer, call.tokens, own)?;
        let made = if known {
            let again = DispatchAt { known: true, ids: std::ptr::null(), ..call };
            self.check.dispatch(buffer, 0, &again)
        } else {
            let back = CombineAt {
                input: self.check.rows.as_ptr().cast_const().cast(),
                input_rows: buffer.capacity(by_expert, 1),
                output: self.check.result.as_ptr().cast(),
                tokens: call.tokens,
                weights: std::ptr::null(),
                by_expert,
                more: 0,
            };
            self.check.combine(buffer, 0, &back)
        };
        let ended = made.and_then(|()| self.check.settle(buffer));
        let is_closed = |error: &Error| error.is_timeout() || error.is_peer_lost();
        let closed = ended.as_ref().is_err_and(is_closed);
        // A number of rows by expert may be one for which there is no room.
        let is_typed = |error: &Error| error.is_invalid_argument() || error.is_overflow();
        let typed = closed || ended.as_ref().err().is_none_or(is_typed);
        self.check.judge(&format!("{what}, {written:?}: {ended:?}"), &[typed], &[true]);
        // Peers of a rank that is closed may have ended their call, but not the next one.
        let any_closed = self.any(closed)?;
        for nth in 0..if any_closed { 0 } else { 3 } {
            let next = TokenRouting::random(seed + nth, world, &shape);
            self.check.right_call(buffer, (&next, seed + nth), None, &what)?;
        }
        let changed = guards.changed(self)?;
        self.check.judge(&format!("bytes beyond, {what}, {written:?}"), &changed, &[]);
        Ok(any_closed)
    }

    /// Writes one to four numbers into the handle. Returns where in it, and which.
    fn write_numbers(
        &self,
        buffer: &BorrowedBuffer<'_>,
        tokens: usize,
        seed: u64,
    ) -> Result<Vec<(usize, i32)>> {
        let (parts, shape) = (buffer.handle_parts(), buffer.shape());
        let (pool, world) = (self.check.pool, self.check.pool.world() as usize);
        let rows = buffer.capacity(false, 1);
        let handle = self.check.handles[0].address();
        let received = super::numbers(&download(pool, handle + parts.head as u64, 4)?)[0] as usize;
        // Parts that kernels take indices and counts from, as far as a call of so many tokens and rows reads them.
        let all = [
            (parts.head, 4),
            (parts.source_offsets, world + 1),
            (parts.bases, world),
            (parts.source_tokens, world),
            (parts.positions, tokens * world),
            (parts.positions, tokens * world),
            (parts.chunks, 130),
            (parts.places, received * shape.top_k as usize),
            (parts.places, received * shape.top_k as usize),
        ];
        let some: Vec<(usize, usize)> = all.into_iter().filter(|(_, count)| *count > 0).collect();
        let mut written = Vec::new();
        for nth in 0..1 + seed % 4 {
            let number = |which: u64| random(seed, 10 * nth + which);
            let (begin, count) = some[number(0) as usize % some.len()];
            let at = begin + 4 * (number(1) as usize % count);
            let place = handle + at as u64;
            let found = super::numbers(&download(pool, place, 4)?)[0];
            let new = match number(2) % 8 {
                0 => -1,
                1 => found.wrapping_sub(1),
                2 => found.wrapping_add(1),
                3 => 1 << 30,
                4 => i32::MIN,
                5 => (number(3) % (rows as u64 + 2)) as i32,
                6 => (number(3) % (shape.max_tokens as u64 + 2)) as i32,
                _ => number(3) as i32,
            };
            upload(pool, place, &new.to_le_bytes())?;
            written.push((at, new));
        }
        Ok(written)
    }

    /// Whether this is so on any rank.
    fn any(&self, here: bool) -> Result<bool> {
        let at = self.check.scales.as_ptr();
        upload(self.check.pool, at as u64, &[u8::from(here); 16])?;
        // SAFETY: the block has these bytes, and nothing else uses them.
        unsafe {
            self.meeting.all_reduce_at(at, at, 16, DType::U8, ReduceOp::Max, &self.check.stream)
        }?;
        self.meeting.synchronize(&self.check.stream)?;
        Ok(download(self.check.pool, at as u64, 1)?[0] != 0)
    }
}

/// Bytes beside and behind what calls are given. They are compared afterwards; the process of an emulated device ends where
/// a kernel reads or writes them.
struct Guards {
    emulated: Option<unsafe extern "C" fn(u64, u64) -> c_int>,
    /// Where they begin, of which the first `BEYOND` are compared, and how many there are.
    ranges: Vec<(u64, usize)>,
}

impl Guards {
    fn put(damage: &Damage<'_, '_>, buffer: &BorrowedBuffer<'_>) -> Result<Self> {
        let (check, shape) = (&*damage.check, buffer.shape());
        let (tokens, row) = (shape.max_tokens, shape.hidden * shape.dtype.size());
        let (top_k, rows) = (shape.top_k as usize, buffer.capacity(true, 1));
        let blocks = [
            (&check.input, tokens * row),
            (&check.ids, tokens * top_k * 8),
            (&check.weights, tokens * top_k * 4),
            (&check.output, rows * row),
            (&check.scales, 16),
            (&check.rows, rows * row),
            (&check.result, tokens * row),
            (&check.handles[0], buffer.handle_parts().bytes),
            (&check.handles[1], 0),
        ];
        let mut ranges: Vec<(u64, usize)> = blocks
            .into_iter()
            .map(|(block, used)| (block.address() + used as u64, block.len() - used))
            .collect();
        // Those of a buffer's memory are written from other ranks too, each of which has it elsewhere.
        let (pool, region) = (check.pool, &damage.region);
        let own = pool.layout().address(pool.rank(), 0);
        let ends = [region.address(), region.address() + (region.len() - BEYOND) as u64];
        ranges.extend(ends.map(|at| (at, BEYOND)));
        for &(at, bytes) in &ranges {
            upload(pool, at, &vec![POISON; bytes.min(BEYOND)])?;
        }
        let emulated = CudaDriver::function("emulatedGuard").ok().map(|address| {
            // SAFETY: the emulator's function of this name has this type.
            unsafe {
                transmute::<NonNull<c_void>, unsafe extern "C" fn(u64, u64) -> c_int>(address)
            }
        });
        let guards = Self { emulated, ranges };
        for &(at, bytes) in &guards.ranges {
            guards.guard(at, bytes as u64);
        }
        for peer in (0..pool.world()).filter(|peer| *peer != pool.rank()) {
            let theirs = pool.layout().address(peer, 0);
            for at in ends {
                guards.guard(at.wrapping_add(theirs).wrapping_sub(own), BEYOND as u64);
            }
        }
        Ok(guards)
    }

    fn guard(&self, at: u64, bytes: u64) {
        if let Some(guard) = self.emulated {
            // SAFETY: takes two numbers.
            let count = unsafe { guard(at, bytes) };
            assert!(count >= 0, "room for guards");
        }
    }

    /// Which bytes were written, as places in the ranges.
    fn changed(self, damage: &Damage<'_, '_>) -> Result<Vec<(usize, usize)>> {
        let mut found = Vec::new();
        for (nth, &(at, bytes)) in self.ranges.iter().enumerate() {
            let now = download(damage.check.pool, at, bytes.min(BEYOND))?;
            found.extend(now.iter().position(|byte| *byte != POISON).map(|byte| (nth, byte)));
        }
        Ok(found)
    }
}

impl Drop for Guards {
    fn drop(&mut self) {
        self.guard(0, 0);
    }
}
