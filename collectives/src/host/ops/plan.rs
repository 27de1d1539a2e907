//! Runs checked plans in host memory, one thread a rank.
//!
//! Every operation is element by element, and chunks of different buffers correspond at equal distances from their
//! beginnings. So a plan can run over any range of its chunks on its own: over pieces that fit scratch, one after the
//! other, and, between two signals, over tiles that stay in the caches.

#![allow(unsafe_code)] // hands raw buffers to the kernels

use symmpool_allocator::{Error, Result};

use crate::call::Arguments;
use crate::call::plan_call::{ChunkSizes, LINE};
use crate::host::HostEngine;
use crate::host::kernels::{ReduceFn, copy};
use crate::host::layout::place::{Data, InPlace};
use crate::plan::{Buffer, Cell, CheckedPlan, Collective, Item, PlanStep};
use crate::types::place::Place;
use crate::{DType, ReduceOp};

/// Bytes of a chunk that operations between two signals run over together, so that what one writes another finds in
/// the first or second cache.
const TILE: usize = 32 << 10;
/// Where a rank's buffers of a call lie.
struct Buffers<'a> {
    engine: &'a HostEngine,
    chunks: ChunkSizes,
    from: *const u8,
    to: *mut u8,
    /// The window offsets of input and output, where they are windows.
    windows: (Option<u64>, Option<u64>),
    /// Rank of the call that is rank 0 of the plan.
    root: u32,
    /// Bytes of scratch that each chunk has.
    room: usize,
}

impl Buffers<'_> {
    /// The address of a chunk, `at` bytes into it. Of scratch, pieces lie one over the other: they begin at 0.
    fn address(&self, cell: Cell, at: usize, in_piece: usize) -> *mut u8 {
        let rank = real_rank(cell.rank, self.root, self.engine.world());
        let own = rank == self.engine.rank();
        let start = || self.chunks.start(cell.index) + at;
        match (cell.buffer, self.windows) {
            (Buffer::Scratch, _) => {
                let scratch = self.engine.scratch(rank);
                scratch.wrapping_add(cell.index as usize * self.room + in_piece)
            }
            (Buffer::Input, _) if own => self.from.cast_mut().wrapping_add(start()),
            (Buffer::Output, _) if own => self.to.wrapping_add(start()),
            (Buffer::Input, (Some(offset), _)) | (Buffer::Output, (_, Some(offset))) => {
                self.engine.window(rank, offset).wrapping_add(start())
            }
            // Calls whose plan reaches into peers' memory that is no window are declined before.
            (Buffer::Input, _) => self.from.cast_mut(),
            (Buffer::Output, _) => self.to,
        }
    }
}

/// The rank of the communicator that a rank of the plan is.
fn real_rank(rank: u32, root: u32, world: u32) -> u32 {
    (rank + root) % world
}

/// Values that a call needs, found from its arguments.
struct Prepared {
    data: Data,
    chunks: ChunkSizes,
    loops: Loops,
    /// Bytes of scratch that each chunk has.
    room: usize,
}

impl HostEngine {
    /// Runs a plan for `count` elements of each part (see [`Plan::input_parts`](crate::plan::Plan::input_parts)); of
    /// one's own collective, for an input of `count` elements. `op` matters for collectives that reduce, `root` for a
    /// broadcast.
    ///
    /// # Errors
    ///
    /// `is_diverged`, on every rank, if ranks make different calls, or with another algorithm under the name;
    /// `is_invalid_argument` if the plan is for another number of ranks, buffers overlap or do not fit, the elements
    /// do not divide as the plan needs it, or scratch is too small; `is_unsupported` if buffers must be windows and
    /// are not, and for averages of integers by partial sums; `is_timeout` or `is_peer_lost` if a rank does not make
    /// the call.
    ///
    /// # Safety
    ///
    /// `input` is readable and `output` writable for the elements of the plan's parts, and nobody else accesses
    /// either, in any rank's slot if it is a window, until the call returns on every rank.
    #[allow(clippy::too_many_arguments)] // a call has these arguments
    pub unsafe fn run_plan(
        &mut self,
        checked: &CheckedPlan,
        input: Place,
        output: Place,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        root: u32,
    ) -> Result<()> {
        let arguments = Arguments { input, output, count, dtype, op, root };
        // SAFETY: the caller promised that input and output are there for these arguments until the call returns on
        // every rank.
        unsafe { self.run_plan_for(checked, &arguments) }
    }

    /// Runs a plan like [`HostEngine::run_plan`], with its arguments as one value.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`HostEngine::run_plan`].
    pub(crate) unsafe fn run_plan_for(
        &mut self,
        checked: &CheckedPlan,
        arguments: &Arguments,
    ) -> Result<()> {
        self.ready()?;
        let Arguments { input, output, count, root, .. } = *arguments;
        let prepared = self.prepare(checked, arguments);
        let Prepared { data, chunks, loops, room } = self.or_decline(prepared)?;
        let plan = checked.plan();
        if self.rehearses_by(|| &plan.name) {
            return Ok(());
        }
        let call = arguments.describe(checked);
        self.handshake(&call)?;
        if count == 0 {
            return Ok(());
        }
        let offset = |place: Place| match place {
            Place::Window(offset) => Some(offset),
            Place::Unregistered(_) => None,
        };
        let windows = (offset(input), offset(output));
        let me = (self.rank() + self.world() - root) % self.world();
        let mut sources = std::mem::take(&mut self.sources);
        let piece = if plan.scratch == 0 { chunks.each } else { room / chunks.size };
        let mut begin = 0;
        while begin < chunks.each {
            if begin > 0 {
                // Scratch is written anew only when all ranks have finished the piece before.
                self.step()?;
            }
            let end = (begin + piece).min(chunks.each);
            let mut left = checked.steps[me as usize].as_slice();
            let mut phase = 0;
            while let Some((first, rest)) = left.split_first() {
                phase += 1;
                let peer = |peer: u32| real_rank(peer, root, self.world());
                match first {
                    PlanStep::Signal { peer: to, channel } => {
                        self.signal_in_plan(peer(*to), *channel);
                    }
                    PlanStep::Wait { peer: of, channel } => {
                        self.wait_in_plan(peer(*of), *channel, phase)?;
                    }
                    PlanStep::Barrier => self.step()?,
                    PlanStep::Reduce(_) | PlanStep::Divide { .. } => {
                        let is_signal = |step: &PlanStep| {
                            !matches!(step, PlanStep::Reduce(_) | PlanStep::Divide { .. })
                        };
                        let items = left.iter().position(is_signal).unwrap_or(left.len());
                        let buffers = Buffers {
                            engine: self,
                            chunks,
                            from: data.from,
                            to: data.to,
                            windows,
                            root,
                            room,
                        };
                        // SAFETY: the caller promised that input and output are there for these arguments; `new` was
                        // promised that windows are mapped in every slot. The plan's proof says that what this rank
                        // accesses between two signals is accessed by no other rank meanwhile, and is within the
                        // buffers.
                        unsafe {
                            run_items(&buffers, &left[..items], begin..end, &loops, &mut sources);
                        }
                        left = &left[items..];
                        continue;
                    }
                }
                left = rest;
            }
            begin = end;
        }
        self.sources = sources;
        Ok(())
    }

    /// Refuses a call that the plan cannot serve.
    pub(crate) fn check_plan(&self, checked: &CheckedPlan, arguments: &Arguments) -> Result<()> {
        self.prepare(checked, arguments).map(drop)
    }

    /// Checks a call's arguments, and finds what it needs.
    fn prepare(&self, checked: &CheckedPlan, arguments: &Arguments) -> Result<Prepared> {
        let Arguments { input, output, count, dtype, op, root } = *arguments;
        let plan = checked.plan();
        let (name, rank, world) = (&plan.name, self.rank(), self.world());
        let size = dtype.size();
        let chunks = arguments.check(checked, rank, world)?;
        let loops = self.loops(checked, dtype, op)?;
        let room = match plan.scratch {
            0 => 0,
            scratch => self.scratch_bytes() / scratch as usize / LINE * LINE,
        };
        if plan.scratch > 0 && room == 0 {
            return Err(Error::invalid_argument(format!(
                "the algorithm {name} on rank {rank}: {} bytes of scratch are too few for its {} chunks; raise \
                 scratch_bytes to {} or more",
                self.scratch_bytes(),
                plan.scratch,
                (plan.scratch as usize * LINE).next_multiple_of(256)
            )));
        }
        let bytes = |length: Option<usize>| length.and_then(|length| length.checked_mul(size));
        let [inputs, output_bytes] = checked.lengths(rank, count).map(bytes);
        let own = bytes(count.checked_mul(rank as usize)).unwrap_or(0);
        let in_place = match plan.collective {
            Collective::AllGather => InPlace::InputAt(own),
            Collective::ReduceScatter => InPlace::OutputAt(own),
            _ => InPlace::OutputAt(0),
        };
        // Others than the root of a broadcast have no data to begin with.
        let has_data = plan.collective != Collective::Broadcast || rank == root;
        let input_bytes = if has_data { inputs } else { Some(0) };
        let data = self.resolve((input, input_bytes), (output, output_bytes), in_place)?;
        let has_both = input_bytes != Some(0) && output_bytes != Some(0);
        if data.in_place && has_both {
            Arguments::check_in_place(checked, rank)?;
        }
        Ok(Prepared { data, chunks, loops, room })
    }

    /// The loops over elements that a call runs.
    fn loops(&self, checked: &CheckedPlan, dtype: DType, op: ReduceOp) -> Result<Loops> {
        let plan = checked.plan();
        if !plan.collective.reduces() {
            return Ok(Loops { average: None, reduce: None });
        }
        let rank = self.rank();
        let find = |op| {
            self.reduce_loop(dtype, op)
                .ok_or_else(|| dtype.only_moved(plan.collective.name(), rank))
                .map(Some)
        };
        match op {
            ReduceOp::Avg => Ok(Loops { average: find(op)?, reduce: find(ReduceOp::Sum)? }),
            _ => Ok(Loops { average: None, reduce: find(op)? }),
        }
    }
}

/// The loops over elements that a call runs.
#[derive(Clone, Copy)]
struct Loops {
    /// Reduces by sum and divides, for averages.
    average: Option<ReduceFn>,
    /// Reduces, without a division.
    reduce: Option<ReduceFn>,
}

/// Runs operations between two signals, over elements `range` of their chunks.
///
/// # Safety
///
/// The places of the items are readable and writable for these elements, and nobody else accesses them meanwhile.
unsafe fn run_items(
    buffers: &Buffers<'_>,
    steps: &[PlanStep],
    range: std::ops::Range<usize>,
    loops: &Loops,
    sources: &mut Vec<*const u8>,
) {
    let size = buffers.chunks.size;
    let mut begin = range.start;
    while begin < range.end {
        let end = (begin + TILE / size).min(range.end);
        for step in steps {
            let address =
                |cell: &Cell| buffers.address(*cell, begin * size, (begin - range.start) * size);
            let count_of = |index_in_part: u32| {
                end.min(buffers.chunks.length(index_in_part as usize)).saturating_sub(begin)
            };
            let Item { dst, srcs, index_in_part, divisor } = match step {
                PlanStep::Reduce(item) => item,
                PlanStep::Divide { cell, index_in_part, by } => {
                    let (to, count) = (address(cell), count_of(*index_in_part));
                    if let (Some(divide), 1..) = (loops.average, count) {
                        // SAFETY: the caller promised that the place is readable and writable; the destination is the
                        // source.
                        unsafe { divide(&[to], &[to], count, *by as usize) };
                    }
                    continue;
                }
                PlanStep::Signal { .. } | PlanStep::Wait { .. } | PlanStep::Barrier => continue,
            };
            let count = count_of(*index_in_part);
            if count == 0 {
                continue;
            }
            let to = address(dst);
            if let [src] = srcs.as_slice() {
                let from = address(src);
                if from != to {
                    // SAFETY: the caller promised that both places are there; the check has found that chunks are
                    // equal or do not overlap.
                    unsafe { copy(from, to, count * size) };
                }
                continue;
            }
            sources.clear();
            sources.extend(srcs.iter().map(|src| address(src).cast_const()));
            let average = loops.average.filter(|_| *divisor > 1);
            if let Some(reduce) = average.or(loops.reduce) {
                // SAFETY: the caller promised that all places are there; the check has found that the destination is
                // one of the sources or overlaps none.
                unsafe { reduce(sources, &[to], count, *divisor as usize) };
            }
        }
        begin = end;
    }
}
