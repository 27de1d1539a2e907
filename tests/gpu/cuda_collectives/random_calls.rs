//! Random programs on devices, compared with the reference interpreter: first calls and later ones, around every expiry of
//! flags, captured and replayed, in place on some ranks, through little scratch.

use std::time::Instant;

use symmpool_allocator::testing::SplitMix64;
use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::plan::reference::ChunkLayout;
use symmpool_collectives::plan::{CheckedPlan, Collective};
use symmpool_collectives::{
    Algorithm, Communicator, CommunicatorOptions, DType, ReduceOp, Request,
};

use crate::cuda::{CallGraph, download, stream, upload};
use crate::random_plans::calls::{Boundaries, RandomCall, cases, differs, inputs};
use crate::random_plans::schedules::outputs;
use crate::random_plans::{ProgramKind, program};
use crate::{ORDINARY, Options};

/// Bytes of a rank's input or output, at most, and room for them.
const MAX_BYTES: usize = 600 << 10;
const ROOM: usize = 700 << 10;
/// Programs that are compiled before any of them runs.
const BATCH: usize = 64;
/// Calls of each program, of which the last one is captured, too.
const CALLS: usize = 6;
const FENCE: u8 = 0xa5;
const FENCE_BYTES: usize = 64;
/// The first epochs of communicators: the first call, and calls around those in which old flags expire.
const EPOCHS: [u32; 3] = [1, (1 << 30) - 9, u32::MAX - 11];

/// A program that the check passes, and its calls. All of them need one kernel.
struct Work {
    number: u64,
    algorithm: Algorithm,
    cases: Vec<RandomCall>,
    seed: u64,
}

impl Work {
    fn checked(&self) -> &CheckedPlan {
        self.algorithm.plan().expect("made of a plan")
    }
}

struct Random<'a> {
    pool: &'a Pool,
    comm: Communicator,
    windows: [Block<u8>; 2],
    ordinary: [Block<u8>; 2],
    stream: Stream,
    cases: u64,
    wrong: u64,
}

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let ordinary = pool.lane(ORDINARY)?;
    let windows = [pool.alloc(ROOM)?, pool.alloc(ROOM)?];
    let ordinary = [ordinary.alloc(ROOM)?, ordinary.alloc(ROOM)?];
    pool.commit()?;
    let mut random = Random {
        pool,
        comm: communicator(pool, options, 1)?,
        windows,
        ordinary,
        stream: stream(pool)?,
        cases: 0,
        wrong: 0,
    };
    let began = Instant::now();
    let (mut number, mut done) = (0, 0);
    while done < options.programs {
        let mut works = Vec::new();
        while works.len() < BATCH && done + (works.len() as u64) < options.programs {
            works.extend(work(options.seed, number, pool.world()));
            number += 1;
        }
        random.compile(&works, options.compilers);
        let compiled = began.elapsed();
        for (nth, work) in works.iter().enumerate() {
            if nth.is_multiple_of(8) {
                let epoch = EPOCHS[(done as usize + nth / 8) % EPOCHS.len()];
                random.comm = communicator(pool, options, epoch)?;
            }
            random.program(work)?;
        }
        done += works.len() as u64;
        if pool.rank() == 0 {
            let (cases, wrong, took) = (random.cases, random.wrong, began.elapsed());
            println!(
                "random_plans: {done} programs of {number}, {cases} calls, {wrong} wrong, after {took:.1?} (compiled \
                 after {compiled:.1?})"
            );
        }
    }
    Ok((random.cases, random.wrong))
}

/// A communicator with little scratch, so that calls go through it in stages.
fn communicator(pool: &Pool, options: &Options, first_epoch: u32) -> Result<Communicator> {
    let with = CommunicatorOptions {
        device_scratch_bytes: Some(1 << 20),
        first_epoch,
        ..options.communicator()
    };
    Communicator::with_options(pool, &with)
}

/// The program of a number with its calls, if the check passes it.
fn work(seed: u64, number: u64, world: u32) -> Option<Work> {
    let kind = if number.is_multiple_of(4) { ProgramKind::Mistaken } else { ProgramKind::Right };
    let (_, plan) = program(seed, number, Some(world), Some(kind));
    let algorithm = Algorithm::from_plan(plan).ok()?;
    let checked = algorithm.plan().expect("made of a plan");
    let mut random = SplitMix64::for_participant(seed, !number);
    let boundaries = Boundaries {
        // A half of a communicator's scratch, of which plans have a part.
        scratch: 256 << 10,
        chunks: vec![128, 1024, 4096, 32 << 10, 64 << 10, 128 << 10],
        most: MAX_BYTES,
    };
    let mut cases = cases(checked, &mut random, CALLS, &boundaries);
    let (dtype, op, root) = (cases[0].dtype, cases[0].op, cases[0].root);
    let is_integer = matches!(dtype, DType::I32 | DType::I64 | DType::U8);
    // Devices refuse averages that divide at the end, and partial sums of integers are not divided.
    let op = if op == ReduceOp::Avg && (is_integer || number.is_multiple_of(2)) {
        ReduceOp::Sum
    } else {
        op
    };
    for case in &mut cases {
        let size = case.dtype.size();
        // The call has as many bytes as before.
        case.count = case.count * size / dtype.size();
        if let Collective::Custom { .. } = checked.plan().collective {
            case.count -= case.count % checked.plan().chunks as usize;
        }
        (case.dtype, case.op, case.root) = (dtype, op, root);
        if checked.in_place().is_err() {
            case.in_place.fill(false);
        }
        // Where peers reach buffers, these lie at one offset on all ranks.
        let reached = checked.needs_input_window() || checked.needs_output_window();
        if reached && case.in_place.contains(&false) {
            case.in_place.fill(false);
        }
    }
    cases.retain(|case| ChunkLayout::of_call(checked, case.count, dtype.size()).is_some());
    Some(Work { number, cases, seed: random.next(), algorithm })
}

impl Random<'_> {
    fn compile(&self, works: &[Work], threads: usize) {
        let first = |work: &Work| {
            let case = work.cases.first()?;
            Some((work.algorithm.clone(), case.dtype, case.op, case.root))
        };
        let calls: Vec<_> = works.iter().filter_map(first).collect();
        self.comm.compile_ahead(&calls, threads);
    }

    fn program(&mut self, work: &Work) -> Result<()> {
        let checked = work.checked();
        for (nth, case) in work.cases.iter().enumerate() {
            let Some(layout) = ChunkLayout::of_call(checked, case.count, case.dtype.size()) else {
                continue;
            };
            let plan = checked.plan();
            let data = inputs(plan, case, &layout, SplitMix64::at(work.seed, nth as u64));
            let found = outputs(plan, case, layout, &data, work.seed);
            let (wanted, divides_last) = match found {
                Ok(found) => found,
                Err(stopped) => {
                    self.report(work, case, &format!("the interpreter stopped: {stopped:?}"));
                    return Ok(());
                }
            };
            // Devices refuse averages of sums of which other results are made.
            if divides_last {
                return Ok(());
            }
            let is_last = nth + 1 == work.cases.len();
            self.call(work, case, (&data, &wanted), nth, is_last)?;
        }
        Ok(())
    }

    /// Makes a call, and captures and replays it, too, if it is to be `captured`.
    fn call(
        &mut self,
        work: &Work,
        case: &RandomCall,
        (data, wanted): (&[Vec<u8>], &[Vec<u8>]),
        nth: usize,
        captured: bool,
    ) -> Result<()> {
        let checked = work.checked();
        let plan = checked.plan();
        let (world, rank) = (plan.world, self.pool.rank());
        let of_plan = (rank + world - case.root) % world;
        let is_in_place = case.in_place[of_plan as usize];
        let (from, to) = self.places(checked, case, is_in_place, nth);
        let size = case.dtype.size();
        let (input, wanted) = (&data[of_plan as usize], &wanted[of_plan as usize]);
        let RandomCall { count, dtype, op, root, .. } = *case;
        let run = |comm: &Communicator, stream: &Stream| {
            let (to, from) = (to as *mut u8, from as *const u8);
            // SAFETY: both ranges lie in blocks with room for them, which nothing else uses.
            unsafe {
                comm.call(
                    &Request::at(&work.algorithm, to, from, count, dtype).op(op).root(root),
                    stream,
                )
            }
        };
        let graph = match captured {
            true => {
                let twice = || {
                    run(&self.comm, &self.stream)?;
                    run(&self.comm, &self.stream)
                };
                // In place, the second call would take what the first one left.
                let once = || run(&self.comm, &self.stream);
                let in_place = case.in_place.contains(&true);
                let captured = if in_place {
                    CallGraph::capture(self.pool, self.stream, once)
                } else {
                    CallGraph::capture(self.pool, self.stream, twice)
                };
                Some(captured?)
            }
            false => None,
        };
        for round in 0..if captured { 4 } else { 1 } {
            let begin = FENCE_BYTES as u64;
            let span = wanted.len().max(input.len()) + 2 * FENCE_BYTES;
            let lowest = from.min(to);
            if is_in_place {
                upload(self.pool, lowest - begin, &vec![FENCE; span])?;
            } else {
                upload(self.pool, to - begin, &vec![FENCE; wanted.len() + 2 * FENCE_BYTES])?;
                upload(self.pool, from - begin, &vec![FENCE; input.len() + 2 * FENCE_BYTES])?;
            }
            upload(self.pool, from, input)?;
            match &graph {
                Some(graph) if round % 2 == 1 => graph.launch(self.pool, self.stream)?,
                _ => run(&self.comm, &self.stream)?,
            }
            self.comm.synchronize(&self.stream)?;
            self.cases += 1;
            let got = download(self.pool, to - begin, wanted.len() + 2 * FENCE_BYTES)?;
            let result = &got[FENCE_BYTES..FENCE_BYTES + wanted.len()];
            let name = if round % 2 == 1 { "replayed" } else { "called" };
            if let Some(at) = differs(result, wanted, dtype, plan.collective.reduces()) {
                let of = |bytes: &[u8]| bytes[at * size..(at + 1) * size].to_vec();
                let (found, right) = (of(result), of(wanted));
                self.report(
                    work,
                    case,
                    &format!("{name}: element {at} is {found:?} and should be {right:?}"),
                );
            }
            let is_fence = |bytes: &[u8]| bytes.iter().all(|byte| *byte == FENCE);
            let fences =
                is_fence(&got[..FENCE_BYTES]) && is_fence(&got[FENCE_BYTES + wanted.len()..]);
            if !is_in_place {
                if !fences {
                    self.report(work, case, &format!("{name}: wrote outside of the output"));
                }
                let kept = download(self.pool, from - begin, input.len() + 2 * FENCE_BYTES)?;
                let behind = &kept[FENCE_BYTES + input.len()..];
                if kept[FENCE_BYTES..FENCE_BYTES + input.len()] != input[..] || !is_fence(behind) {
                    self.report(work, case, &format!("{name}: wrote to the input, or behind it"));
                }
            }
        }
        graph.map_or(Ok(()), |graph| graph.destroy(self.pool))
    }

    /// Where a call's input and output begin.
    fn places(
        &self,
        checked: &CheckedPlan,
        case: &RandomCall,
        in_place: bool,
        nth: usize,
    ) -> (u64, u64) {
        let size = case.dtype.size() as u64;
        let needs_windows = checked.needs_input_window() || checked.needs_output_window();
        let [one, two] =
            if needs_windows || nth.is_multiple_of(2) { &self.windows } else { &self.ordinary };
        // Most data is aligned to vectors.
        let skew = if nth % 3 == 1 { size * (1 + nth as u64 % 5) } else { 0 };
        let begin = 4 * FENCE_BYTES as u64;
        let (from, to) = (one.address() + begin + skew, two.address() + begin + 3 * skew);
        let own = u64::from(self.pool.rank()) * case.count as u64 * size;
        match (in_place, &checked.plan().collective) {
            (false, _) => (from, to),
            (true, Collective::AllGather) => (from + own, from),
            (true, Collective::ReduceScatter) => (from, from + own),
            (true, _) => (from, from),
        }
    }

    fn report(&mut self, work: &Work, case: &RandomCall, why: &str) {
        self.wrong += 1;
        if self.wrong < 6 {
            let (rank, number) = (self.pool.rank(), work.number);
            let program = work.checked().plan().to_json();
            println!("rank {rank}: program {number}, {case:?}: {why}\n{program}");
        }
    }
}
