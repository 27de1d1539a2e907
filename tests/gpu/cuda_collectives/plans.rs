//! Checks of collectives that programs bring along: plans, compiled for devices.

#[path = "../../../collectives/tests/host/plans/builder.rs"]
mod builder;
pub(crate) mod faults;
mod model;
#[path = "../../../collectives/tests/host/plans/more_programs.rs"]
mod more_programs;
mod odd;
#[path = "../../../collectives/tests/host/plans/odd_programs.rs"]
mod odd_programs;
#[path = "../../../collectives/tests/host/plans/programs.rs"]
mod programs;

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::plan::{Collective, Plan};
use symmpool_collectives::{
    Algorithm, Communicator, CommunicatorOptions, DType, ReduceOp, Request,
};

use crate::cuda::{CallGraph, download, stream, upload};
use crate::oracle::{differs, input, random};
use crate::{ORDINARY, Options};

/// Room for the longest input or output of a call, and any alignment.
const ROOM: usize = 6 << 20;
/// Elements of a part: no scratch holds the last ones at once.
const COUNTS: [usize; 9] = [0, 1, 3, 64, 1000, 4097, 16_411, 131_099, 400_000];
const QUICK_COUNTS: [usize; 4] = [0, 1, 1000, 140_003];

struct Buffers {
    windows: [Block<u8>; 2],
    ordinary: [Block<u8>; 2],
}

struct Plans<'a> {
    pool: &'a Pool,
    options: &'a Options,
    comm: Communicator,
    buffers: Buffers,
    stream: Stream,
    cases: u64,
    wrong: u64,
}

/// One call.
#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: DType,
    op: ReduceOp,
    count: usize,
    root: u32,
    in_place: bool,
    windows: bool,
    /// How many bytes behind an aligned address the data begins.
    shifts: (usize, usize),
}

/// Every program.
pub(crate) fn all(world: u32) -> Vec<Plan> {
    let mut all = programs::all(world);
    all.append(&mut more_programs::all(world));
    all.append(&mut more_programs::in_ll(world));
    all
}

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let mut plans = Plans::new(pool, options)?;
    plans.programs(all(pool.world()))?;
    plans.graphs()?;
    plans.refusals()?;
    Ok((plans.cases, plans.wrong))
}

/// Programs and calls that do what usual ones do not.
pub(crate) fn run_odd(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let mut plans = Plans::new(pool, options)?;
    plans.first_calls()?;
    plans.programs(odd_programs::all(pool.world()))?;
    plans.broadcasts_without_an_input()?;
    plans.in_place_on_one_rank()?;
    Ok((plans.cases, plans.wrong))
}

impl<'a> Plans<'a> {
    fn new(pool: &'a Pool, options: &'a Options) -> Result<Self> {
        let ordinary = pool.lane(ORDINARY)?;
        let buffers = Buffers {
            windows: [pool.alloc(ROOM)?, pool.alloc(ROOM)?],
            ordinary: [ordinary.alloc(ROOM)?, ordinary.alloc(ROOM)?],
        };
        pool.commit()?;
        // Little scratch, so that calls go through it in stages.
        let communicator =
            CommunicatorOptions { device_scratch_bytes: Some(1 << 20), ..options.communicator() };
        let comm = Communicator::with_options(pool, &communicator)?;
        let stream = stream(pool)?;
        Ok(Self { pool, options, comm, buffers, stream, cases: 0, wrong: 0 })
    }

    fn programs(&mut self, plans: Vec<Plan>) -> Result<()> {
        for mut plan in plans {
            // Some are called as built-in algorithms are, whose names nothing else may have.
            let name = plan.name.clone();
            plan.name = format!("own_{name}");
            let algorithm = Algorithm::from_plan(plan).expect("a right program");
            self.comm.register(algorithm.clone())?;
            let (cases, wrong) = (self.cases, self.wrong);
            self.program(&algorithm)?;
            if self.pool.rank() == 0 {
                let (cases, wrong) = (self.cases - cases, self.wrong - wrong);
                println!("plan {name}: {cases} cases, {wrong} wrong");
            }
        }
        Ok(())
    }

    /// Calls of one program with the types and operations that it has, and of many sizes.
    fn program(&mut self, algorithm: &Algorithm) -> Result<()> {
        let checked = std::sync::Arc::clone(algorithm.plan().expect("a plan"));
        let plan = checked.plan();
        // Averages are exact only where all is reduced at once.
        let reduces_once = plan.programs.iter().flatten().all(|each| {
            let srcs = match &each.operation {
                symmpool_collectives::plan::Operation::Reduce { srcs, .. } => srcs.len(),
                _ => plan.world as usize,
            };
            srcs == plan.world as usize
        });
        let quick = [(DType::Bf16, ReduceOp::Sum), (DType::F32, ReduceOp::Avg)];
        let more = [
            (DType::F64, ReduceOp::Sum),
            (DType::F16, ReduceOp::Max),
            (DType::I32, ReduceOp::Prod),
            (DType::I64, ReduceOp::Avg),
            (DType::U8, ReduceOp::Min),
            (DType::F8E4m3, ReduceOp::Sum),
        ];
        let kinds = quick.into_iter().chain(more.into_iter().filter(|_| !self.options.quick));
        let counts: &[usize] = if self.options.quick { &QUICK_COUNTS } else { &COUNTS };
        for (nth, (dtype, op)) in kinds.enumerate() {
            let reduces = plan.collective.reduces();
            // One type is enough where bytes are only moved.
            if (op == ReduceOp::Avg && !reduces_once) || (nth > 1 && !reduces) {
                continue;
            }
            for (which, count) in counts.iter().copied().enumerate() {
                let is_custom = matches!(plan.collective, Collective::Custom { .. });
                let divides = algorithm.constraints().map_or(1, |found| found.multiple_of);
                let count = count.next_multiple_of(divides as usize);
                let parts = plan.input_parts().max(plan.output_parts()) as usize;
                if count * parts * dtype.size() + 64 > ROOM {
                    continue;
                }
                let number = random(self.options.seed, self.cases);
                let shift = |by: u32| match number >> by & 3 {
                    0 | 1 => 0,
                    2 => dtype.size(),
                    _ => (number >> (by + 2) & 7) as usize * dtype.size(),
                };
                let needs_windows = checked.needs_input_window() || checked.needs_output_window();
                let root = if plan.collective == Collective::Broadcast {
                    (nth + which) as u32 % plan.world
                } else {
                    0
                };
                let in_place = which % 2 == 1 && checked.in_place().is_ok();
                let case = Case {
                    dtype,
                    op,
                    count,
                    root,
                    in_place,
                    windows: needs_windows || which % 3 == 0,
                    shifts: if is_custom && in_place { (0, 0) } else { (shift(8), shift(16)) },
                };
                self.call(algorithm, case, number)?;
                if which % 2 == 0 {
                    self.built_in_call()?;
                }
            }
        }
        Ok(())
    }

    fn places(&self, case: &Case, plan: &Plan) -> (u64, u64) {
        let [input, output] =
            if case.windows { &self.buffers.windows } else { &self.buffers.ordinary };
        let (from, to) =
            (input.address() + case.shifts.0 as u64, output.address() + case.shifts.1 as u64);
        let own = u64::from(self.pool.rank()) * (case.count * case.dtype.size()) as u64;
        match (case.in_place, &plan.collective) {
            (false, _) => (from, to),
            (true, Collective::AllGather) => (from + own, from),
            (true, Collective::ReduceScatter) => (from, from + own),
            (true, _) => (from, from),
        }
    }

    /// Makes a call and compares what it leaves with the model.
    fn call(&mut self, algorithm: &Algorithm, case: Case, seed: u64) -> Result<()> {
        let checked = std::sync::Arc::clone(algorithm.plan().expect("a plan"));
        let (plan, rank) = (checked.plan(), self.pool.rank());
        let Case { dtype, op, count, root, .. } = case;
        let [inputs, outputs] = checked.lengths(rank, count).map(|length| length.expect("short"));
        let (from, to) = self.places(&case, plan);
        let all: Vec<Vec<u8>> =
            (0..self.pool.world()).map(|rank| input(seed, rank, dtype, inputs)).collect();
        let length = outputs * dtype.size();
        upload(self.pool, to, &vec![0xa5; length + 16])?;
        upload(self.pool, from, &all[rank as usize])?;
        // SAFETY: both ranges lie in blocks with room for them, which nothing else uses.
        unsafe {
            self.comm.call(
                &Request::at(algorithm, to as *mut u8, from as *const u8, count, dtype)
                    .op(op)
                    .root(root),
                &self.stream,
            )
        }?;
        self.comm.synchronize(&self.stream)?;
        let equal = algorithm.constraints().is_some_and(|found| found.multiple_of > 1);
        let equal = equal || matches!(plan.collective, Collective::Custom { .. });
        let wanted = model::output(plan, &all, rank, (dtype, op), root, equal);
        let got = download(self.pool, to, length + 16)?;
        let name = algorithm.name();
        // In place, an input that is longer goes on behind its output.
        let goes_on = case.in_place && inputs > outputs;
        if !goes_on && got[length..].iter().any(|byte| *byte != 0xa5) {
            self.wrong += 1;
            println!("rank {rank}: {name} {case:?}: wrote past the end");
        }
        self.judge(&format!("{name} {case:?}"), &got[..length], &wanted, dtype);
        Ok(())
    }

    fn judge(&mut self, what: &str, got: &[u8], wanted: &[u8], dtype: DType) {
        self.cases += 1;
        let Some(at) = differs(got, wanted, dtype) else { return };
        self.wrong += 1;
        if self.wrong < 20 {
            let of = |bytes: &[u8]| bytes[at * dtype.size()..][..dtype.size()].to_vec();
            let (rank, found, right) = (self.pool.rank(), of(got), of(wanted));
            println!("rank {rank}: {what}: element {at} is {found:?} and should be {right:?}");
        }
    }

    /// A built-in all-reduce between calls of plans: they take turns in the same flags and inboxes.
    fn built_in_call(&mut self) -> Result<()> {
        let (rank, world, seed) = (self.pool.rank(), self.pool.world(), self.cases);
        let count = 1 + random(self.options.seed, seed) as usize % 20_000;
        let all: Vec<Vec<u8>> =
            (0..world).map(|rank| input(seed, rank, DType::I32, count)).collect();
        let at = self.buffers.windows[0].address();
        upload(self.pool, at, &all[rank as usize])?;
        // SAFETY: both ranges lie in blocks with room for them, which nothing else uses.
        unsafe {
            self.comm.all_reduce_at(
                at as *mut u8,
                at as *const u8,
                count,
                DType::I32,
                ReduceOp::Sum,
                &self.stream,
            )
        }?;
        self.comm.synchronize(&self.stream)?;
        let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
        let wanted = crate::oracle::reduce(&all, DType::I32, ReduceOp::Sum);
        let got = download(self.pool, at, wanted.len())?;
        self.judge("a built-in all-reduce between plans", &got, &wanted, DType::I32);
        Ok(())
    }

    /// S2, S8: a first call is captured, and replayed in turn with others.
    fn graphs(&mut self) -> Result<()> {
        let world = self.pool.world();
        let all = [programs::two_shot(world), more_programs::in_ll(world).swap_remove(0)];
        let algorithms = all.map(|plan| Algorithm::from_plan(plan).expect("a right program"));
        let (count, dtype, op) = (70_001, DType::F32, ReduceOp::Sum);
        let [input_at, output_at] = [0, 1].map(|nth: usize| self.buffers.windows[nth].address());
        let comm = Communicator::with_options(self.pool, &self.options.communicator())?;
        let call = |algorithm: &Algorithm, stream: &Stream| {
            let (to, from) = (output_at as *mut u8, input_at as *const u8);
            // SAFETY: both ranges lie in blocks with room for them, which nothing else uses.
            unsafe { comm.call(&Request::at(algorithm, to, from, count, dtype).op(op), stream) }
        };
        let mut graphs = Vec::new();
        for algorithm in &algorithms {
            graphs.push(CallGraph::capture(self.pool, self.stream, || {
                call(algorithm, &self.stream)?;
                call(algorithm, &self.stream)
            })?);
        }
        for round in 0..self.options.few(30, 6) {
            let data: Vec<Vec<u8>> =
                (0..world).map(|rank| input(round, rank, dtype, count)).collect();
            upload(self.pool, input_at, &data[self.pool.rank() as usize])?;
            upload(self.pool, output_at, &vec![0xa5; 4 * count])?;
            let which = random(self.options.seed, round) as usize % 2;
            graphs[which].launch(self.pool, self.stream)?;
            if round % 3 == 0 {
                call(&algorithms[1 - which], &self.stream)?;
            }
            comm.synchronize(&self.stream)?;
            let data: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
            let got = download(self.pool, output_at, 4 * count)?;
            let wanted = crate::oracle::reduce(&data, dtype, op);
            self.judge(&format!("round {round} of graphs of plans"), &got, &wanted, dtype);
        }
        graphs.into_iter().try_for_each(|graph| graph.destroy(self.pool))
    }

    /// Calls that cannot be made are errors on all ranks, and fail the communicator.
    fn refusals(&mut self) -> Result<()> {
        let world = self.pool.world();
        let plan = programs::two_shot(world);
        let algorithm = Algorithm::from_plan(plan).expect("a right program");
        let [input, output] = &self.buffers.ordinary;
        let comm = Communicator::with_options(self.pool, &self.options.communicator())?;
        // SAFETY: the call is refused before anything is accessed.
        let refused = unsafe {
            comm.call(
                &Request::at(
                    &algorithm,
                    output.address() as *mut u8,
                    input.address() as *const u8,
                    8,
                    DType::F32,
                ),
                &self.stream,
            )
        };
        self.cases += 1;
        let error = crate::expect_error(refused, "a plan that needs windows, without them")?;
        if !error.is_unsupported() || !error.to_string().contains("window") {
            self.wrong += 1;
            println!("rank {}: {error}", self.pool.rank());
        }
        Ok(())
    }
}
