//! Checks communicators whose memory grows: before each kind of call that has use for it, on all ranks or on none, with graphs
//! that were captured before and after it, and with the errors of other calls where ranks differ.
//!
//! `captures` checks first large calls that are captured, `no_room` devices without room, and `crossed` growths that meet.

mod captures;
mod crossed;
mod no_room;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use symmpool_allocator::{Block, CONTROL_LANE, Error, Pool, Result, Stream};
use symmpool_collectives::{
    CallShape, Communicator, CommunicatorOptions, DType, ReduceOp, Request, Selector,
    StandardCollective,
};

use crate::cuda::{CallGraph, download, stream, upload};
use crate::oracle::{differs, finite, random, reduce};
use crate::{INTERRUPTED, MAX_LATE, ORDINARY, Options, expect_error};

/// More than a communicator has for small calls, and no more than it may have after it has grown.
const SMALL: u64 = 16 << 20;
const GROWN: u64 = 405 << 20;
/// Elements of a part: of small calls, which use each part of an inbox and each parity, and of a large one.
const FEW: [usize; 7] = [1000, 1, 4096, 20_000, 77, 1000, 4096];
const MANY: usize = 300_011;
const DTYPE: DType = DType::F32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GrowingCall {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    AllToAll,
    /// Equal ones.
    Splits,
}

const KINDS: [GrowingCall; 6] = [
    GrowingCall::AllReduce,
    GrowingCall::ReduceScatter,
    GrowingCall::AllGather,
    GrowingCall::Broadcast,
    GrowingCall::AllToAll,
    GrowingCall::Splits,
];

/// A selector that always chooses one algorithm, and counts warnings.
struct Chooses {
    name: Option<&'static str>,
    warned: Arc<AtomicU64>,
}

impl Selector for Chooses {
    fn select(&self, _: &CallShape) -> Result<Option<String>> {
        Ok(self.name.map(str::to_owned))
    }

    fn warn(&self, why: &Error) {
        println!("{why}");
        self.warned.fetch_add(1, Ordering::Relaxed);
    }
}

struct GrowthChecks<'a> {
    pool: &'a Pool,
    options: CommunicatorOptions,
    comm: Communicator,
    stream: Stream,
    input: Block<u8>,
    output: Block<u8>,
    cases: u64,
    wrong: u64,
    seed: u64,
}

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let options_that_grow =
        CommunicatorOptions { device_memory_grows: true, ..options.communicator() };
    let (mut cases, mut wrong) = (0, 0);
    let bytes = (MANY + 16) * DTYPE.size() * pool.world() as usize;
    for lane in [pool.lane("windows")?, pool.lane(ORDINARY)?] {
        let mut growth = GrowthChecks {
            pool,
            comm: Communicator::with_options(pool, &options_that_grow)?,
            options: options_that_grow.clone(),
            stream: stream(pool)?,
            input: lane.alloc(bytes)?,
            output: lane.alloc(bytes)?,
            cases: 0,
            wrong: 0,
            seed: options.seed,
        };
        for kind in KINDS {
            growth.grows_before(kind)?;
        }
        growth.keeps_one_sided_operations_off()?;
        growth.grows_for_named_algorithms()?;
        growth.grows_for_equal_parts_and_splits()?;
        growth.old_flags_expire_in_both_areas()?;
        growth.late_reports_leave_the_next_call_alone()?;
        growth.choices_of_a_selector_have_the_memory()?;
        growth.says_which_ranks_differ()?;
        growth.says_which_rank_is_late()?;
        growth.can_be_interrupted()?;
        growth.captures()?;
        if lane.name() == ORDINARY {
            growth.has_no_room()?;
            growth.crosses()?;
        }
        cases += growth.cases;
        wrong += growth.wrong;
    }
    if pool.rank() == 0 {
        println!("growth: {cases} cases, {wrong} wrong");
    }
    Ok((cases, wrong))
}

impl GrowthChecks<'_> {
    /// Makes a new communicator, behind or in front of the memory that the last one gives back.
    fn renew(&mut self) -> Result<()> {
        if self.cases % 2 == 1 {
            let little =
                CommunicatorOptions { device_memory_bytes: Some(8 << 20), ..self.options.clone() };
            self.comm = Communicator::with_options(self.pool, &little)?;
        }
        self.comm = Communicator::with_options(self.pool, &self.options)?;
        self.check("a new communicator is small", self.comm.memory().total <= SMALL);
        Ok(())
    }

    fn check(&mut self, what: &str, holds: bool) {
        self.cases += 1;
        if !holds {
            self.wrong += 1;
            println!("rank {}: not so: {what}; {:?}", self.pool.rank(), self.comm.memory());
        }
    }

    /// Memory is taken before the large call of a kind, and all calls before and after it are right.
    fn grows_before(&mut self, kind: GrowingCall) -> Result<()> {
        self.renew()?;
        // The last ones nearly fill an inbox.
        let most = (750 << 10) / DTYPE.size() / self.pool.world() as usize;
        for count in FEW.into_iter().chain([most, most]) {
            self.case(GrowingCall::AllReduce, count)?;
            self.case(GrowingCall::AllGather, count)?;
            self.case(GrowingCall::Broadcast, count)?;
        }
        self.check("small calls take no memory", self.comm.memory().total <= SMALL);
        let count = match kind {
            // Large whatever the parts are.
            GrowingCall::AllToAll | GrowingCall::Splits => 8,
            GrowingCall::Broadcast => MANY * 2,
            _ => MANY,
        };
        self.case(kind, count)?;
        let total = self.comm.memory().total;
        self.check(&format!("{kind:?} takes memory"), (SMALL + 1..=GROWN).contains(&total));
        for count in FEW {
            self.case(GrowingCall::AllReduce, count)?;
            self.case(GrowingCall::ReduceScatter, count)?;
        }
        for other in KINDS {
            self.case(other, MANY)?;
        }
        self.check("memory is taken once", self.comm.memory().total == total);
        Ok(())
    }

    /// One-sided operations do not reach the communicator's memory, wherever it lies in the windows of its lane.
    fn keeps_one_sided_operations_off(&mut self) -> Result<()> {
        const STEP: u64 = 16 << 20;
        let windows = self.pool.windows();
        let of_lane = windows.list().iter().filter(|window| window.lane == CONTROL_LANE);
        let places = of_lane.flat_map(|window| {
            (window.offset..window.offset + window.bytes).step_by(STEP as usize)
        });
        let (me, world) = (self.pool.rank(), self.pool.world());
        let source = self.pool.alloc::<u8>(16)?;
        let refused = places.filter(|offset| {
            let to = self.pool.layout().address(me, *offset) as *mut u8;
            let (from, peer) = (source.as_ptr().cast_const(), (me + 1) % world);
            // SAFETY: nobody uses what communicators had that are gone; it is filled before it is used again.
            let put = unsafe { self.comm.put_at(to, from, 16, peer, &self.stream) };
            put.is_err_and(|error| error.to_string().contains("the communicator's own memory"))
        });
        let (refused, own) = (refused.count() as u64, self.comm.memory().total / STEP);
        self.check(&format!("{refused} of {own} places are refused"), refused.abs_diff(own) <= 3);
        self.comm.synchronize(&self.stream)
    }

    /// Algorithms with smaller inboxes than those that calls choose by themselves.
    fn grows_for_named_algorithms(&mut self) -> Result<()> {
        let count = 900_000 / DTYPE.size() / self.pool.world() as usize;
        for name in ["one_shot_ll", "one_shot_ll128", "one_shot_lamport", "two_shot_ll"] {
            self.renew()?;
            self.case_by(GrowingCall::AllReduce, count, |growth| {
                let (to, from) = (growth.output.as_ptr(), growth.input.as_ptr().cast_const());
                let (collective, sum) = (StandardCollective::AllReduce, ReduceOp::Sum);
                // SAFETY: both blocks have room for as many parts as there are ranks, and nothing else uses them.
                unsafe {
                    growth.comm.call(
                        &Request::at(collective, to, from, count, DTYPE).op(sum).algorithm(name),
                        &growth.stream,
                    )
                }
            })?;
            self.check(&format!("{name} takes memory"), self.comm.memory().total > SMALL);
        }
        Ok(())
    }

    /// Some ranks pass splits, and others make the call of equal parts.
    fn grows_for_equal_parts_and_splits(&mut self) -> Result<()> {
        self.renew()?;
        let kind = if self.pool.rank() == 0 { GrowingCall::AllToAll } else { GrowingCall::Splits };
        for count in [1000, 1000] {
            self.case(kind, count)?;
        }
        self.check("both take memory", self.comm.memory().total > SMALL);
        Ok(())
    }

    /// Numbers of calls begin anew while calls are made in both areas, in graphs and outside.
    fn old_flags_expire_in_both_areas(&mut self) -> Result<()> {
        for first_epoch in [(1 << 30) - 6, u32::MAX - 6] {
            self.renew()?;
            let options = CommunicatorOptions { first_epoch, ..self.options.clone() };
            self.comm = Communicator::with_options(self.pool, &options)?;
            let small = CallGraph::capture(self.pool, self.stream, || {
                self.call(GrowingCall::AllReduce, 4096)
            })?;
            self.case(GrowingCall::AllReduce, MANY)?;
            let large = CallGraph::capture(self.pool, self.stream, || {
                self.call(GrowingCall::AllReduce, MANY)
            })?;
            for turn in 0..6 {
                self.case_by(GrowingCall::AllReduce, 4096, |growth| {
                    small.launch(growth.pool, growth.stream)
                })?;
                if turn % 2 == 0 {
                    self.case_by(GrowingCall::AllReduce, MANY, |growth| {
                        large.launch(growth.pool, growth.stream)
                    })?;
                }
                self.case(GrowingCall::Broadcast, if turn % 3 == 0 { MANY * 2 } else { 500 })?;
            }
            small.destroy(self.pool)?;
            large.destroy(self.pool)?;
        }
        Ok(())
    }

    /// Checks that a late report of a call that all ranks refused in a capture leaves the next call in its memory.
    /// Rank 0 reports it by synchronizing, the others in front of that call.
    fn late_reports_leave_the_next_call_alone(&mut self) -> Result<()> {
        self.renew()?;
        self.case(GrowingCall::AllReduce, MANY)?;
        let wrong = || {
            let (to, from) = (self.output.address() as *mut u8, self.output.as_ptr().cast_const());
            // SAFETY: its buffers overlap, so it is refused before anything is touched.
            unsafe {
                self.comm.all_reduce_at(
                    to.wrapping_add(DTYPE.size()),
                    from,
                    64,
                    DTYPE,
                    ReduceOp::Sum,
                    &self.stream,
                )
            }
        };
        let captured = CallGraph::capture(self.pool, self.stream, wrong);
        self.check("a capture with a wrong call ends in an error", captured.is_err());
        if self.pool.rank() == 0 {
            self.comm.synchronize(&self.stream)?;
        }
        self.case(GrowingCall::AllReduce, MANY)?;
        self.case(GrowingCall::AllReduce, 1000)
    }

    /// Large calls by a selector's choice have the memory for large calls, also where it leaves the choice to the rule.
    fn choices_of_a_selector_have_the_memory(&mut self) -> Result<()> {
        for name in [None, Some("one_shot_lamport")] {
            self.renew()?;
            let warned = Arc::new(AtomicU64::new(0));
            let selector = Chooses { name, warned: Arc::clone(&warned) };
            self.comm.select(StandardCollective::AllReduce, Some(Arc::new(selector)));
            for count in [1000, MANY, MANY] {
                self.case(GrowingCall::AllReduce, count)?;
            }
            self.check("a selector's call takes memory", self.comm.memory().total > SMALL);
            let warnings = warned.load(Ordering::Relaxed);
            self.check(&format!("{name:?} serves in that memory"), warnings == 0);
        }
        Ok(())
    }

    /// Ranks that make different calls get the same kind of error as without growth, at once.
    fn says_which_ranks_differ(&mut self) -> Result<()> {
        let first = self.pool.rank() == 0;
        for (mine, others) in
            [((MANY, "large"), (MANY + 1, "large")), ((MANY, "large"), (8, "small"))]
        {
            self.renew()?;
            let (count, size) = if first { mine } else { others };
            let begun = Instant::now();
            let called = self.call(GrowingCall::AllReduce, count);
            let ended = called.and_then(|()| self.comm.synchronize(&self.stream));
            let error = expect_error(ended, "calls of different sizes")?;
            let named = error.is_diverged() && error.to_string().contains(&MANY.to_string());
            self.check(&format!("{size}: {error}"), named);
            let patience = self.options.timeout / 2;
            self.check("at once", begun.elapsed() < patience.max(Duration::from_secs(5)));
        }
        self.renew()
    }

    /// A rank that does not come to the first large call is named as in other calls, and gets an error when it comes.
    fn says_which_rank_is_late(&mut self) -> Result<()> {
        self.renew()?;
        self.case(GrowingCall::AllReduce, 1000)?;
        let (late, timeout) = (self.pool.world() - 1, Duration::from_secs(2));
        self.comm.set_timeout(timeout)?;
        if self.pool.rank() == late {
            std::thread::sleep(2 * timeout);
        }
        let begun = Instant::now();
        let called = self.call(GrowingCall::AllReduce, MANY);
        let error = expect_error(called, "a call to which a rank comes late")?;
        let named = error.is_timeout() && error.to_string().contains(&format!("rank {late}"));
        self.check(&format!("who is late: {error}"), named);
        self.check("in time", begun.elapsed() < 2 * timeout + MAX_LATE);
        self.renew()
    }

    /// A wait for the others in a first large call ends by Ctrl-C, and they get an error too.
    fn can_be_interrupted(&mut self) -> Result<()> {
        self.renew()?;
        self.case(GrowingCall::AllReduce, 1000)?;
        let (rank, last, timeout) =
            (self.pool.rank(), self.pool.world() - 1, Duration::from_secs(2));
        self.comm.set_timeout(timeout)?;
        if rank == last {
            std::thread::sleep(timeout / 2);
        }
        let begun = Instant::now();
        let interrupt = (rank == 0).then(|| {
            std::thread::spawn(move || {
                std::thread::sleep(timeout / 10);
                INTERRUPTED.store(true, Ordering::Relaxed);
            })
        });
        let error =
            expect_error(self.call(GrowingCall::AllReduce, MANY), "a call that is interrupted")?;
        if let Some(interrupt) = interrupt {
            interrupt.join().expect("no panic");
            INTERRUPTED.store(false, Ordering::Relaxed);
            let again = expect_error(self.call(GrowingCall::AllReduce, 8), "a call after it")?;
            let stopped = error.is_interrupted() && again.is_interrupted();
            self.check(&format!("interrupted: {error}"), stopped);
            self.check("soon", begun.elapsed() < timeout / 2);
        } else {
            let told = error.to_string().contains("rank 0 failed in the middle of a call");
            self.check(&format!("without rank 0: {error}"), told);
            self.check("in time", begun.elapsed() < timeout + MAX_LATE);
        }
        self.renew()
    }

    /// Puts the call on the stream.
    fn call(&self, kind: GrowingCall, count: usize) -> Result<()> {
        let (to, from) = (self.output.as_ptr(), self.input.as_ptr().cast_const());
        let (comm, stream, sum) = (&self.comm, &self.stream, ReduceOp::Sum);
        let sizes = vec![count; self.pool.world() as usize];
        match kind {
            // SAFETY: both blocks have room for as many parts as there are ranks, and nothing else uses them; so it is
            // below.
            GrowingCall::AllReduce => unsafe {
                comm.all_reduce_at(to, from, count, DTYPE, sum, stream)
            },
            // SAFETY: both blocks have room for as many parts as there are ranks, and nothing else uses them.
            GrowingCall::ReduceScatter => unsafe {
                comm.reduce_scatter_at(to, from, count, DTYPE, sum, stream)
            },
            // SAFETY: both blocks have room for as many parts as there are ranks, and nothing else uses them.
            GrowingCall::AllGather => unsafe { comm.all_gather_at(to, from, count, DTYPE, stream) },
            // SAFETY: both blocks have room for as many parts as there are ranks, and nothing else uses them.
            GrowingCall::Broadcast => unsafe { comm.broadcast_at(to, count, DTYPE, 0, stream) },
            // SAFETY: both blocks have room for as many parts as there are ranks, and nothing else uses them.
            GrowingCall::AllToAll => unsafe { comm.all_to_all_at(to, from, count, DTYPE, stream) },
            // SAFETY: both blocks have room for as many parts as there are ranks, and nothing else uses them.
            GrowingCall::Splits => unsafe {
                comm.all_to_all_v_at(to, from, &sizes, &sizes, DTYPE, stream)
            },
        }
    }

    fn case(&mut self, kind: GrowingCall, count: usize) -> Result<()> {
        self.case_by(kind, count, |growth| growth.call(kind, count))
    }

    /// Fills the input, has `make` put the call on the stream, and compares the output.
    fn case_by(
        &mut self,
        kind: GrowingCall,
        count: usize,
        make: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<()> {
        let (rank, world) = (self.pool.rank() as usize, self.pool.world());
        let parts = match kind {
            GrowingCall::AllReduce | GrowingCall::AllGather | GrowingCall::Broadcast => 1,
            GrowingCall::ReduceScatter | GrowingCall::AllToAll | GrowingCall::Splits => {
                world as usize
            }
        };
        let seed = random(self.seed, self.cases);
        let inputs: Vec<Vec<u8>> =
            (0..world).map(|rank| finite(seed, rank, DTYPE, parts * count)).collect();
        let bytes = count * DTYPE.size();
        let own = |input: &Vec<u8>| input[rank * bytes..(rank + 1) * bytes].to_vec();
        let of = |inputs: &[Vec<u8>]| {
            let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
            reduce(&slices, DTYPE, ReduceOp::Sum)
        };
        let wanted: Vec<u8> = match kind {
            GrowingCall::AllReduce => of(&inputs),
            GrowingCall::ReduceScatter => of(&inputs.iter().map(own).collect::<Vec<_>>()),
            GrowingCall::AllGather => inputs.concat(),
            GrowingCall::Broadcast => inputs[0].clone(),
            GrowingCall::AllToAll | GrowingCall::Splits => inputs.iter().flat_map(own).collect(),
        };
        upload(self.pool, self.output.address(), &vec![0xa5; wanted.len()])?;
        upload(self.pool, self.input.address(), &inputs[rank])?;
        if kind == GrowingCall::Broadcast {
            upload(self.pool, self.output.address(), &inputs[rank])?;
        }
        make(self)?;
        self.comm.synchronize(&self.stream)?;
        let got = download(self.pool, self.output.address(), wanted.len())?;
        let differs = differs(&got, &wanted, DTYPE);
        self.check(&format!("{kind:?} of {count} is right: {differs:?}"), differs.is_none());
        Ok(())
    }
}
