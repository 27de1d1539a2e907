//! Runs checked plans on a device: each rank compiles a kernel of its program (`plan/cuda.rs`), for one element type
//! and operation, when a call first needs it.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::{Error, Result, Stream};

use super::plan_kernel;
use crate::ReduceOp;
use crate::call::Arguments;
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::launch_config::LaunchConfig;
use crate::cuda::kernel::spec::THREADS;
use crate::cuda::layout::params::{CallParams, MAX_PEER_BLOCKS, MAX_RANKS, PlanWork};
use crate::plan::schedule::Schedule;
use crate::plan::{CheckedPlan, Collective, Protocol};

/// Most peer blocks of a call: more than [`MAX_STAGE_BLOCKS`](crate::cuda::layout::control::MAX_STAGE_BLOCKS), as programs were
/// not measured with fewer.
const MAX_BLOCKS: u32 = 128;
/// Most worker blocks of a call in the LL protocol.
const MAX_LL_BLOCKS: u32 = 264;
/// Chunks that a rank's program may move or reduce on a device: its kernel has code for each.
const MAX_READS: usize = 4096;
/// Chunks that an operation may reduce on a device: a thread holds a vector of each.
const MAX_SOURCES: usize = 64;
/// Flags that a rank raises on one peer at most: kernels pack their numbers into 12 bits.
const MAX_FLAGS: u32 = 1 << 12;
/// Flags of peer blocks that the control block has for each index and rank: `FLAG_KINDS` in `symmpool/impl/peer_blocks.cuh`.
const FLAG_KINDS: u32 = 4;
/// A stage has about a fourth of what a block has in all, but no fewer vectors than this, unless scratch has less room:
/// what flags cost would show.
const MIN_STAGE_VECTORS: u64 = 2048;
/// Vectors in a line of 128 bytes, of which slices consist.
const LINE: u64 = 8;

/// The vectors of a call's longest chunk, divided among peer blocks and into stages.
fn divide(schedule: &Schedule, half: u64, vectors: u64, wanted: u32) -> Option<(u32, PlanWork)> {
    let slots = u64::from(schedule.plain_slots);
    let longest = |blocks: u32| vectors.div_ceil(LINE).div_ceil(blocks.into()).max(1) * LINE;
    // Vectors that a slice may have if so many stages have room for all blocks.
    let room = |blocks: u32, stages: u64| match slots {
        0 => u64::MAX,
        _ => half / 16 / slots / u64::from(blocks) / stages / LINE * LINE,
    };
    let mut blocks = wanted;
    while room(blocks, 1) < LINE && blocks > 1 {
        blocks /= 2;
    }
    if room(blocks, 1) < LINE {
        return None;
    }
    let whole = longest(blocks);
    let fourth = whole.div_ceil(4 * LINE) * LINE;
    let each = if schedule.overlaps { fourth.max(MIN_STAGE_VECTORS).min(whole) } else { whole };
    // With one slot more than a stage has levels, nobody waits for a slot that was just freed.
    let span = u64::from(schedule.last_scratch) + 1;
    let most = whole.div_ceil(each).min(span + 1);
    let at_once = (1..=most)
        .rev()
        .find(|stages| room(blocks, *stages) >= each.min(MIN_STAGE_VECTORS))
        .unwrap_or(1);
    let each =
        each.min(room(blocks, at_once)).min(u64::from(u32::MAX / 2 / LINE as u32 * LINE as u32));
    let stages = whole.div_ceil(each);
    let interval = if slots == 0 || stages <= at_once { 1 } else { span.div_ceil(at_once) };
    let at_once = if slots == 0 { stages } else { at_once };
    let work = PlanWork {
        vectors,
        each: each as u32,
        stages: u32::try_from(stages).ok()?,
        slots: u32::try_from(at_once).ok()?,
        interval: interval as u32,
        ..PlanWork::default()
    };
    Some((blocks, work))
}

/// The launches of a call in the LL protocol: each takes `most` vectors of every chunk. There is room for some, else the
/// call is refused before.
fn ll_launches(most: u64, work: PlanWork) -> impl Iterator<Item = PlanWork> {
    (0..work.vectors.div_ceil(most.max(LINE))).map(move |nth| {
        let begin = nth * most;
        let vectors = most.min(work.vectors - begin);
        PlanWork { begin: 16 * begin, vectors, stages: 1, slots: 1, interval: 1, ..work }
    })
}

impl CudaEngine {
    /// Runs a plan for `count` elements of each part; of one's own collective, for an input of `count` elements.
    ///
    /// # Errors
    ///
    /// The errors of `HostEngine::run_plan`; `is_unsupported` also for programs that are too long for a kernel.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the elements of the plan's parts.
    pub(crate) unsafe fn run_plan(
        &mut self,
        checked: &CheckedPlan,
        arguments: &Arguments,
        stream: Stream,
    ) -> Result<()> {
        self.begin(stream)?;
        let work = match self.prepare_plan(checked, arguments) {
            Ok(work) => work,
            Err(why) => return Err(self.decline(why, stream)),
        };
        let call = arguments.describe(checked);
        if arguments.count == 0 {
            return self.handshake_only(call, stream);
        }
        let (rank, world, plan) = (self.rank(), self.world(), checked.plan());
        self.note_algorithm(&plan.name, None);
        let of_plan = (rank + world - arguments.root) % world;
        let of = (arguments.dtype, arguments.op);
        let key = plan_kernel::key(checked, world, of_plan, of, self.kernels().budget().shares());
        let schedule = checked.schedule();
        let source = || plan_kernel::source(checked, of_plan);
        let kernel = match self.generated_kernel(key, source) {
            Ok(kernel) => kernel,
            Err(why) => return Err(self.decline(why, stream)),
        };
        let params = CallParams {
            input: self.address(arguments.input),
            output: self.address(arguments.output),
            root: arguments.root,
            ..CallParams::of(&call)
        };
        if plan.protocol == Protocol::Ll {
            for work in ll_launches(self.ll_room(schedule), work) {
                let threads = match work.vectors {
                    0..=16_384 => 64,
                    16_385..=65_536 => 256,
                    _ => THREADS,
                };
                let most = plan.blocks.unwrap_or(MAX_LL_BLOCKS).min(MAX_LL_BLOCKS);
                let config = LaunchConfig::new(&kernel, work.vectors, threads, most);
                let blocks = config.worker_blocks();
                let longest = work.vectors.div_ceil(LINE).div_ceil(blocks.into()).max(1) * LINE;
                let work = PlanWork { each: longest as u32, ..work };
                let params = CallParams { peer_blocks: blocks, ..params };
                let grid = (config.blocks, config.threads);
                // SAFETY: the caller promised that the plan's parts are there until the stream has done the call; the
                // plan's proof says that what the kernel accesses is within the buffers of the ranks' parts. Its kernel
                // takes such work.
                unsafe { self.launch_with_work(kernel, grid, &params, &work, stream) }?;
            }
            return Ok(());
        }
        let alone = kernel.alone();
        let flags = MAX_PEER_BLOCKS * FLAG_KINDS / (schedule.flags + 1);
        let most =
            plan.blocks.unwrap_or(MAX_BLOCKS).min(MAX_BLOCKS).min(flags).min(kernel.sm_count - 1);
        let whole = LaunchConfig::new(&alone, work.vectors, THREADS, most.max(1));
        let half = self.control.plan_scratch_bytes / 2;
        let divided = divide(schedule, half, work.vectors, whole.worker_blocks());
        let Some((blocks, divided)) = divided else {
            let why = self.little_scratch(checked);
            return Err(self.decline(why, stream));
        };
        let work = PlanWork { part: work.part, chunk: work.chunk, ..divided };
        let whole = LaunchConfig { blocks: blocks + 1, ..whole };
        let config = whole.within_budget(&kernel);
        tracing::debug!(name = plan.name, ?config, ?work, "plan");
        let params = CallParams {
            description: *call.peer_blocks(blocks).words(),
            peer_blocks: blocks,
            ..params
        };
        // SAFETY: the caller promised that the plan's parts are there until the stream has done the call; the plan's
        // proof says that what the kernel accesses is within the buffers of the ranks' parts. Its kernel takes such
        // work.
        unsafe {
            self.launch_with_work(kernel, (config.blocks, config.threads), &params, &work, stream)
        }
    }

    /// Vectors of a chunk that one launch in the LL protocol can take; zero if the inbox or scratch is too small.
    fn ll_room(&self, schedule: &Schedule) -> u64 {
        let inbox = self.control.ll_vectors() / u64::from(schedule.ll_slots.max(1));
        let plain = self.control.plan_scratch_bytes / 32 / u64::from(schedule.plain_slots.max(1));
        // Slices are whole lines, so there may be a line more for each block.
        let plain = plain.saturating_sub(u64::from(MAX_LL_BLOCKS) * LINE);
        let vectors = if schedule.plain_slots == 0 { inbox } else { inbox.min(plain) };
        vectors / LINE * LINE
    }

    /// Refuses a plan whose chunks have no room in this communicator's memory, however few elements they have.
    fn check_room(&self, checked: &CheckedPlan) -> Result<()> {
        let schedule = checked.schedule();
        if checked.plan().protocol == Protocol::Ll {
            if self.ll_room(schedule) > 0 {
                return Ok(());
            }
            return Err(Error::invalid_argument(format!(
                "the algorithm {} on rank {}: its {} chunks do not fit the communicator's inbox; raise \
                 device_memory_bytes",
                checked.plan().name,
                self.rank(),
                schedule.ll_slots
            )));
        }
        let half = self.control.plan_scratch_bytes / 2;
        divide(schedule, half, 1, 1).map(drop).ok_or_else(|| self.little_scratch(checked))
    }

    fn little_scratch(&self, checked: &CheckedPlan) -> Error {
        Error::invalid_argument(format!(
            "the algorithm {} on rank {}: {} bytes of scratch are too few for its {} chunks; raise device_memory_bytes",
            checked.plan().name,
            self.rank(),
            self.control.plan_scratch_bytes / 2,
            checked.schedule().plain_slots
        ))
    }

    /// Refuses a call that the plan cannot serve.
    pub(crate) fn check_plan(&self, checked: &CheckedPlan, arguments: &Arguments) -> Result<()> {
        self.prepare_plan(checked, arguments).map(drop)
    }

    /// Checks a call's arguments, and finds how long its parts and chunks are.
    fn prepare_plan(&self, checked: &CheckedPlan, arguments: &Arguments) -> Result<PlanWork> {
        let (rank, world) = (self.rank(), self.world());
        let chunks = arguments.check(checked, rank, world)?;
        let plan = checked.plan();
        if checked.divides_last && arguments.op == ReduceOp::Avg {
            return Err(Error::unsupported(format!(
                "the algorithm {} on rank {rank}: other results are made of the sums of some, which devices cannot \
                 divide at the end; use sum, and divide its outputs",
                plan.name
            )));
        }
        self.check_room(checked)?;
        let (name, size) = (&plan.name, arguments.dtype.size() as u64);
        if plan.collective.reduces() && !arguments.dtype.is_reduced() {
            return Err(arguments.dtype.only_moved(plan.collective.name(), rank));
        }
        if world > MAX_RANKS {
            return Err(Error::unsupported(format!("{world} ranks on devices")));
        }
        let schedule = checked.schedule();
        let reads = (0..world).map(|rank| schedule.reads(rank));
        let (all, sources) =
            reads.fold((0, 0), |most, reads| (reads.0.max(most.0), reads.1.max(most.1)));
        if all > MAX_READS || sources > MAX_SOURCES || schedule.flags >= MAX_FLAGS {
            return Err(Error::unsupported(format!(
                "the algorithm {name} on rank {rank}: a rank moves or reduces {all} chunks, up to {sources} at once, and \
                 signals a peer {} times; on devices {MAX_READS}, {MAX_SOURCES} and {} are possible",
                schedule.flags,
                MAX_FLAGS - 1
            )));
        }
        let too_long = || {
            Error::invalid_argument(format!(
                "the algorithm {name} of {} {} on rank {rank}: no memory is that long",
                arguments.count,
                arguments.dtype.name()
            ))
        };
        let bytes = |length: Option<usize>| {
            let bytes = (length? as u64).checked_mul(size)?;
            Some(bytes).filter(|bytes| *bytes <= self.pool_stride())
        };
        let [inputs, outputs] = checked.lengths(rank, arguments.count).map(bytes);
        let (inputs, outputs) = (inputs.ok_or_else(too_long)?, outputs.ok_or_else(too_long)?);
        // Others than the root of a broadcast have no data to begin with.
        let is_idle = plan.collective == Collective::Broadcast && rank != arguments.root;
        let inputs = if is_idle { 0 } else { inputs };
        let (from, to) = (self.address(arguments.input), self.address(arguments.output));
        let part = chunks.count as u64 * size;
        let own = u64::from(rank) * part;
        let (from_begin, to_begin) = match plan.collective {
            Collective::AllGather => (from, to.saturating_add(own)),
            Collective::ReduceScatter => (from.saturating_add(own), to),
            _ => (from, to),
        };
        if inputs > 0 && outputs > 0 {
            if from_begin == to_begin {
                Arguments::check_in_place(checked, rank)?;
            } else if from < to.saturating_add(outputs) && to < from.saturating_add(inputs) {
                return Err(Error::invalid_argument(format!(
                    "the algorithm {name} on rank {rank}: input [{from:#x}, +{inputs}) and output [{to:#x}, \
                     +{outputs}) overlap without being in place"
                )));
            }
        }
        let chunk = chunks.each as u64 * size;
        Ok(PlanWork { part, chunk, vectors: chunk.min(part).div_ceil(16), ..PlanWork::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::testing::plans;

    #[test]
    fn stages_fit_scratch_and_cover_every_vector() {
        for world in [2, 4, 8] {
            for checked in plans(world) {
                let schedule = checked.schedule();
                let slots = u64::from(schedule.plain_slots);
                for half in [64 << 10, 256 << 10, 16 << 20] {
                    for vectors in (0..40).map(|power| (1 << power) * 5 / 4) {
                        for wanted in [1, 3, 131] {
                            let divided = divide(schedule, half, vectors, wanted);
                            // `check_room` refuses just the plans that no call has room for.
                            let has_room = divide(schedule, half, 1, 1).is_some();
                            assert_eq!(divided.is_some(), has_room, "{vectors} in {half}");
                            let Some((blocks, work)) = divided else {
                                assert!(slots * 128 > half, "{slots} chunks of a line fit");
                                continue;
                            };
                            let (each, at_once) = (u64::from(work.each), u64::from(work.slots));
                            let longest =
                                vectors.div_ceil(LINE).div_ceil(blocks.into()).max(1) * LINE;
                            assert!(each * u64::from(work.stages) >= longest);
                            assert!(blocks <= wanted && each.is_multiple_of(LINE) && each > 0);
                            if slots == 0 {
                                continue;
                            }
                            assert!(16 * each * slots * at_once * u64::from(blocks) <= half);
                            // A slot is free before it is needed again.
                            let last = u64::from(schedule.last_scratch);
                            let apart = at_once * u64::from(work.interval);
                            assert!(work.stages <= work.slots || apart > last);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn launches_in_ll_take_every_vector_once() {
        for most in [LINE, 3 * LINE, 1 << 20] {
            for vectors in [0, 1, LINE, 3 * LINE, 1000, (1 << 20) + 1] {
                let work = PlanWork { vectors, ..PlanWork::default() };
                let mut next = 0;
                for launch in ll_launches(most, work) {
                    assert_eq!(launch.begin, 16 * next);
                    assert!((1..=most).contains(&launch.vectors));
                    next += launch.vectors;
                }
                assert_eq!(next, vectors);
            }
        }
    }
}
