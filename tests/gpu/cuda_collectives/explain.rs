//! Checks what communicators say of calls before they make them: it is what they then launch, whatever was captured before, and
//! whichever other communicators there are. And the order of calls that programs make costs a call nothing, but where
//! `ORDERS` says so.
//!
//! Emulated devices tell what was launched. On others the second part runs alone.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::ptr::NonNull;

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Block, CONTROL_LANE, Pool, Result, Stream};
use symmpool_collectives::{
    Algorithm, CallPlan, Communicator, CommunicatorOptions, DType, Explanation, ReduceOp, Request,
    StandardCollective,
};

use crate::cuda::{CallGraph, driver, stream};
use crate::{ORDINARY, Options, native, plans};

const DTYPE: DType = DType::Bf16;
/// Bytes of a rank's part: of LL, of Lamport's protocol, and of a large call.
const SIZES: [usize; 3] = [4 << 10, 96 << 10, 1 << 20];

/// The kernels that an emulated device was given.
#[derive(Clone, Copy)]
struct Launched(unsafe extern "C" fn(*mut u32, c_int) -> c_int);

impl Launched {
    fn find() -> Option<Self> {
        let address: NonNull<c_void> = CudaDriver::function("emulatedLaunched").ok()?;
        // SAFETY: the emulator's function of this name has this type.
        Some(Self(unsafe {
            transmute::<NonNull<c_void>, unsafe extern "C" fn(*mut u32, c_int) -> c_int>(address)
        }))
    }

    /// Blocks and threads of each since the last request.
    fn take(self) -> Vec<(u32, u32)> {
        let mut pairs = vec![[0_u32; 2]; 4096];
        // SAFETY: there is room for so many pairs.
        let count = unsafe { (self.0)(pairs.as_mut_ptr().cast(), pairs.len() as c_int) };
        pairs.truncate(count as usize);
        pairs.into_iter().map(|[blocks, threads]| (blocks, threads)).collect()
    }
}

struct Explains<'a> {
    pool: &'a Pool,
    options: CommunicatorOptions,
    launched: Option<Launched>,
    stream: Stream,
    input: Block<u8>,
    output: Block<u8>,
    cases: u64,
    wrong: u64,
    /// How a fresh communicator makes calls, by collective and bytes of a part.
    fresh: BTreeMap<(&'static str, usize), CallPlan>,
}

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let (mut cases, mut wrong) = (0, 0);
    let mut all = Vec::new();
    let lanes = [("windows", pool.lane("windows")?), ("ordinary memory", pool.lane(ORDINARY)?)];
    for (memory, lane) in lanes {
        let bytes = SIZES[2] * pool.world() as usize;
        let mut explains = Explains {
            pool,
            options: CommunicatorOptions { concurrent: None, ..options.communicator() },
            launched: Launched::find(),
            stream: stream(pool)?,
            input: lane.alloc(bytes)?,
            output: lane.alloc(bytes)?,
            cases: 0,
            wrong: 0,
            fresh: BTreeMap::new(),
        };
        pool.commit()?;
        if all.is_empty() && options.emulated {
            explains.a_device_without_room()?;
        }
        explains.names_what_is_launched(memory)?;
        explains.bad_arguments_are_refused_here_alone()?;
        explains.orders(memory, &ORDERS)?;
        all.push((memory, explains));
    }
    for (memory, mut explains) in all {
        explains.orders(memory, &LAST_ORDERS)?;
        cases += explains.cases;
        wrong += explains.wrong;
    }
    if pool.rank() == 0 {
        println!("explain: {cases} cases, {wrong} wrong");
    }
    Ok((cases, wrong))
}

impl Explains<'_> {
    fn check(&mut self, what: impl FnOnce() -> String, holds: bool) {
        self.cases += 1;
        if !holds {
            self.wrong += 1;
            println!("rank {}: not so: {}", self.pool.rank(), what());
        }
    }

    fn explain(
        &self,
        comm: &Communicator,
        (collective, algorithm): (StandardCollective, Option<&str>),
        bytes: usize,
    ) -> Result<Explanation> {
        let (to, from) = (self.output.as_ptr(), self.input.as_ptr().cast_const());
        let (count, sum) = (bytes / DTYPE.size(), ReduceOp::Sum);
        // SAFETY: nothing is read or written.
        let request = unsafe { Request::at(collective, to, from, count, DTYPE) };
        comm.explain(&request.op(sum).algorithm(algorithm), &self.stream)
    }

    fn call(
        &self,
        comm: &Communicator,
        (collective, algorithm): (StandardCollective, Option<&str>),
        bytes: usize,
    ) -> Result<()> {
        let (to, from) = (self.output.as_ptr(), self.input.as_ptr().cast_const());
        let (count, sum) = (bytes / DTYPE.size(), ReduceOp::Sum);
        // SAFETY: both blocks are as long as the parts of all ranks, and nothing else uses them.
        unsafe {
            comm.call(
                &Request::at(collective, to, from, count, DTYPE).op(sum).algorithm(algorithm),
                &self.stream,
            )
        }
    }

    /// Checks that a call launches what its explanation says, and that explaining launches nothing.
    fn names_what_is_launched(&mut self, memory: &str) -> Result<()> {
        let Some(launched) = self.launched else { return Ok(()) };
        let usual = self.options.clone();
        let options = [
            ("", usual.clone()),
            (", grows", CommunicatorOptions { device_memory_grows: true, ..usual.clone() }),
            (", 3 SMs", CommunicatorOptions { sm_budget: Some(3), ..usual.clone() }),
            (", one of three", CommunicatorOptions { concurrent: Some(3), ..usual.clone() }),
            (", beside compute", CommunicatorOptions { beside_compute: true, ..usual }),
        ];
        for (which, options) in options {
            for collective in StandardCollective::ALL {
                let comm = Communicator::with_options(self.pool, &options)?;
                let named = match collective {
                    StandardCollective::AllReduce => "two_shot_pipeline",
                    StandardCollective::ReduceScatter => "pipeline",
                    StandardCollective::AllToAll | StandardCollective::AllGather => "direct",
                    StandardCollective::Broadcast => "ll",
                };
                for (bytes, algorithm) in
                    SIZES.map(|bytes| (bytes, None)).into_iter().chain([(SIZES[1], Some(named))])
                {
                    let call = (collective, algorithm);
                    let what =
                        format!("{} of {bytes}, {algorithm:?}, {memory}{which}", collective.name());
                    self.compares(&comm, call, bytes, &what, launched)?;
                }
            }
        }
        self.programs(memory, launched)
    }

    /// Checks the same of a program's own algorithms: plans, one of which takes several launches, and a kernel.
    fn programs(&mut self, memory: &str, launched: Launched) -> Result<()> {
        let comm = Communicator::with_options(self.pool, &self.options)?;
        let plans = plans::all(self.pool.world()).into_iter();
        let plans = plans
            .filter(|plan| ["two_shot", "two_shot_in_scratch_ll"].contains(&plan.name.as_str()));
        let plans = plans.map(|mut plan| {
            // A built-in algorithm has the name.
            plan.name.insert_str(0, "my_");
            Algorithm::from_plan(plan).expect("a right program")
        });
        let kernels = native::kernels().into_iter().filter(|kernel| kernel.name == "my_all_reduce");
        let kernels = kernels.map(|kernel| Algorithm::native(kernel).expect("a right kernel"));
        for algorithm in plans.chain(kernels) {
            let name = algorithm.name().to_owned();
            comm.register(algorithm)?;
            let call = (StandardCollective::AllReduce, Some(name.as_str()));
            // Kernels of programs may need windows.
            if self.explain(&comm, call, SIZES[1]).is_err_and(|why| why.is_unsupported()) {
                continue;
            }
            self.compares(&comm, call, SIZES[1], &format!("{name}, {memory}"), launched)?;
        }
        Ok(())
    }

    fn compares(
        &mut self,
        comm: &Communicator,
        call: (StandardCollective, Option<&str>),
        bytes: usize,
        what: &str,
        launched: Launched,
    ) -> Result<()> {
        let before = comm.memory();
        launched.take();
        let mut said = self.explain(comm, call, bytes)?;
        let again = self.explain(comm, call, bytes)?;
        self.check(|| format!("{what}: the same twice"), said == again);
        let quiet = launched.take().is_empty() && comm.memory() == before;
        self.check(|| format!("{what}: saying so changes nothing"), quiet);
        self.call(comm, call, bytes)?;
        let first = launched.take();
        comm.synchronize(&self.stream)?;
        let takes = comm.memory().total - before.total;
        self.check(|| format!("{what}: takes {takes}, {said}"), (said.takes > 0) == (takes > 0));
        if !said.now.is_known {
            // The first call has loaded its kernels.
            said = self.explain(comm, call, bytes)?;
            self.check(|| format!("{what}: kernels are loaded, {said}"), said.now.is_known);
        }
        // Ranks wait for each other before they take memory.
        let own = &first[first.len().saturating_sub(said.now.launches.len())..];
        let whole = said.takes > 0 || takes > 0 || own.len() == first.len();
        let right = whole && own == said.now.launches;
        self.check(|| format!("{what}: launched {first:?}, {said:?}"), right);
        // The explanation holds in a graph too.
        let mut in_graph = None;
        let graph = CallGraph::capture(self.pool, self.stream, || {
            let said = self.explain(comm, call, bytes);
            launched.take();
            self.call(comm, call, bytes)?;
            in_graph = Some((said?, launched.take()));
            Ok(())
        })?;
        graph.destroy(self.pool)?;
        let (said, found) = in_graph.expect("captured");
        let right = found == said.now.launches;
        self.check(|| format!("{what}: captured {found:?}, {said:?}"), right);
        Ok(())
    }

    /// A device has no room for the memory of large calls: that is said before a call, and by the communicator after it.
    fn a_device_without_room(&mut self) -> Result<()> {
        let options = CommunicatorOptions { device_memory_grows: true, ..self.options.clone() };
        let comm = Communicator::with_options(self.pool, &options)?;
        let control = self.pool.lane(CONTROL_LANE)?.stats()?;
        if control.reserved - control.allocated > 64 << 20 {
            println!("explain: skipped, as former communicators have left room for memory to grow");
            return Ok(());
        }
        let call = (StandardCollective::AllReduce, None);
        let said = self.explain(&comm, call, SIZES[2])?;
        self.check(|| format!("there is room: {said}"), said.takes > 0 && said.memory == "large");
        let free = driver(self.pool).memory_info()?.0;
        // The last rank alone is full.
        let is_full = self.pool.rank() == self.pool.world() - 1;
        let bytes = free.saturating_sub(100 << 20) as usize;
        let lane = self.pool.lane(ORDINARY)?;
        let taken = is_full.then(|| lane.alloc_bytes(bytes, 512, Stream::DEFAULT)).transpose()?;
        let said = self.explain(&comm, call, SIZES[2])?;
        let names_it =
            said.kept_by.len() == 1 && said.kept_by[0].contains("bytes of the device are free");
        let right = if is_full { said.takes == 0 && names_it } else { said.takes > 0 };
        self.check(|| format!("one rank has no room: {said}"), right);
        self.check(|| "nobody has found it yet".to_owned(), !comm.take_shortage());
        self.call(&comm, call, SIZES[2])?;
        comm.synchronize(&self.stream)?;
        let memory = comm.memory();
        self.check(|| format!("{memory:?} is wanted"), memory.wanted > 0);
        let shortages = [comm.take_shortage(), comm.take_shortage()];
        self.check(|| format!("{shortages:?}: it is said once"), shortages == [true, false]);
        let said = self.explain(&comm, call, SIZES[2])?;
        let right =
            said.memory == "small" && said.kept_by.iter().any(|why| why.contains("tried again"));
        self.check(|| format!("it is tried again later: {said}"), right);
        if let Some(taken) = taken {
            taken.free_unordered()?;
            lane.trim()?;
        }
        Ok(())
    }

    /// Checks that a call which would be refused has an error here, of which no other rank hears.
    fn bad_arguments_are_refused_here_alone(&mut self) -> Result<()> {
        let comm = Communicator::with_options(self.pool, &self.options)?;
        let (at, stream) = (self.input.as_ptr(), self.stream);
        let reduce = StandardCollective::AllReduce;
        let explain = |algorithm, to, from: *mut u8, dtype, root, collective| {
            // SAFETY: nothing is read or written.
            let request = unsafe { Request::at(collective, to, from, 64, dtype) };
            comm.explain(&request.root(root).algorithm(algorithm), &stream)
        };
        let overlap = explain(None, at.wrapping_add(16), at, DTYPE, 0, reduce);
        let unknown = explain(Some("none"), at, at, DTYPE, 0, reduce);
        let moved = explain(None, at, at, DType::Bool, 0, reduce);
        let root = explain(None, at, at, DTYPE, 99, StandardCollective::Broadcast);
        let all = [overlap, unknown, moved, root];
        // One rank asks, and the calls of all go on.
        for (nth, asked) in all.into_iter().enumerate() {
            let right =
                asked.as_ref().is_err_and(|why| why.is_invalid_argument() || why.is_unsupported());
            self.check(|| format!("bad argument {nth}: {asked:?}"), right);
        }
        if self.pool.rank() == 0 {
            let overlap = explain(None, at.wrapping_add(16), at, DTYPE, 0, reduce);
            self.check(|| "one rank is refused".to_owned(), overlap.is_err());
        }
        self.call(&comm, (reduce, None), SIZES[0])?;
        let ended = comm.synchronize(&self.stream);
        self.check(|| format!("{ended:?} after refusals"), ended.is_ok());
        Ok(())
    }
}

/// Preparation of a process for the call that is looked at, and the communicators that rest meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    Nothing,
    /// A small call is captured first.
    SmallCaptured,
    /// So many communicators have captured a call, and rest.
    Resting(usize),
    /// Another communicator has a call in the same graph.
    SameGraph,
    /// Messages of the same communicator.
    Messages,
    /// A graph of the same communicator is replayed, with eager calls in between.
    Eager,
    /// Another communicator has made small calls, in a graph that was replayed and outside.
    OtherParallelism,
}

/// Share of the SMs that is left for a call of a new communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SmsLeft {
    All,
    /// The wide grid of one of so many communicators.
    OneOf(u32),
    /// Two thirds: other libraries may need the rest.
    TwoThirds,
}

impl SmsLeft {
    /// Most blocks of a kernel on a device of so many SMs.
    fn blocks(self, sms: u32) -> u32 {
        match self {
            Self::All => u32::MAX,
            Self::OneOf(communicators) => {
                let narrow = (2 * sms / 11 / (communicators - 1)).max(2) * (communicators - 1);
                (sms - sms / 16 - narrow).max(2)
            }
            Self::TwoThirds => (2 * sms / 3).max(2),
        }
    }
}

/// Orders of calls, and what they leave to a captured call.
///
/// TODAY: beside communicators that rest in graphs, kernels have most SMs and not all. Where the budget's rule changes, these rows
/// become `SmsLeft::All`.
const ORDERS: [(Before, SmsLeft); 8] = [
    (Before::Nothing, SmsLeft::All),
    (Before::SmallCaptured, SmsLeft::All),
    (Before::Resting(1), SmsLeft::OneOf(2)),
    (Before::Resting(3), SmsLeft::OneOf(4)),
    (Before::Resting(7), SmsLeft::OneOf(8)),
    (Before::SameGraph, SmsLeft::OneOf(2)),
    (Before::Eager, SmsLeft::All),
    (Before::OtherParallelism, SmsLeft::OneOf(2)),
];

/// Those that come after all others.
///
/// TODAY: from its first message on a process leaves a third of the SMs to others, for ever.
const LAST_ORDERS: [(Before, SmsLeft); 1] = [(Before::Messages, SmsLeft::TwoThirds)];

const KINDS: [StandardCollective; 4] = [
    StandardCollective::AllReduce,
    StandardCollective::ReduceScatter,
    StandardCollective::AllGather,
    StandardCollective::AllToAll,
];

impl Explains<'_> {
    /// A new communicator for each order, kind and size, whose call is compared with that of a fresh one.
    fn orders(&mut self, memory: &str, orders: &[(Before, SmsLeft)]) -> Result<()> {
        for collective in KINDS {
            for bytes in SIZES {
                for &(before, left) in orders {
                    let said = self.in_order(before, (collective, None), bytes)?;
                    let key = (collective.name(), bytes);
                    let fresh = self.fresh.entry(key).or_insert_with(|| said.now.clone()).clone();
                    let what =
                        format!("{} of {bytes}, {memory}, {before:?}: {said}", collective.name());
                    self.as_expected(&what, left, &fresh, &said);
                }
            }
        }
        Ok(())
    }

    fn as_expected(&mut self, what: &str, left: SmsLeft, fresh: &CallPlan, said: &Explanation) {
        let same_way = said.now.algorithm == fresh.algorithm && said.now.is_known;
        self.check(|| format!("the algorithm of a fresh call, {fresh:?}; {what}"), same_way);
        match left {
            SmsLeft::All => {
                let right = said.now == *fresh;
                self.check(|| format!("as a fresh call, {fresh:?}; {what}"), right);
                self.check(|| format!("nothing is in its way; {what}"), said.kept_by.is_empty());
            }
            _ => {
                let most = left.blocks(said.device_sms.expect("a device"));
                let few = said.now.blocks().is_some_and(|blocks| blocks <= most);
                // Small calls are held back no less: their kernels no longer start early.
                let is_slower = said.now != *fresh && !said.now.starts_early;
                let is_said = said.kept_by.len() == 1 && said.best == *fresh;
                self.check(|| format!("{most} blocks; {what}"), few && is_slower);
                self.check(|| format!("what keeps it is said; {what}"), is_said);
            }
        }
    }

    /// Returns the explanation of a call that is captured after this.
    fn in_order(
        &self,
        before: Before,
        call: (StandardCollective, Option<&str>),
        bytes: usize,
    ) -> Result<Explanation> {
        let options = CommunicatorOptions { device_memory_grows: true, ..self.options.clone() };
        let new = || Communicator::with_options(self.pool, &options);
        let small = (StandardCollective::AllReduce, None);
        let resting = match before {
            Before::Resting(count) => count,
            Before::SameGraph | Before::OtherParallelism => 1,
            _ => 0,
        };
        let others = (0..resting).map(|_| new()).collect::<Result<Vec<_>>>()?;
        let comm = new()?;
        let captured = |comm: &Communicator| {
            CallGraph::capture(self.pool, self.stream, || self.call(comm, small, SIZES[0]))
        };
        let mut graphs = Vec::new();
        match before {
            Before::Nothing | Before::SameGraph => {}
            Before::SmallCaptured => graphs.push(captured(&comm)?),
            Before::Resting(_) => {
                for other in &others {
                    graphs.push(captured(other)?);
                }
            }
            Before::OtherParallelism => {
                let graph = captured(&others[0])?;
                graph.launch(self.pool, self.stream)?;
                self.call(&others[0], small, SIZES[0])?;
                graphs.push(graph);
            }
            Before::Messages => {
                let (rank, world) = (self.pool.rank(), self.pool.world());
                let (next, last) = ((rank + 1) % world, (rank + world - 1) % world);
                let (to, from) = (self.output.as_ptr(), self.input.as_ptr().cast_const());
                // SAFETY: both blocks are longer, and nothing else uses them.
                unsafe { comm.send_at(from, 64, DTYPE, next, &self.stream) }?;
                // SAFETY: both blocks are longer, and nothing else uses them.
                unsafe { comm.recv_at(to, 64, DTYPE, last, &self.stream) }?;
            }
            Before::Eager => {
                let graph = captured(&comm)?;
                graph.launch(self.pool, self.stream)?;
                self.call(&comm, small, SIZES[0])?;
                graph.launch(self.pool, self.stream)?;
                graphs.push(graph);
            }
        }
        // Programs make a call once before they capture it, and so does this.
        self.call(&comm, call, bytes)?;
        comm.synchronize(&self.stream)?;
        let mut said = None;
        let graph = CallGraph::capture(self.pool, self.stream, || {
            if before == Before::SameGraph {
                self.call(&others[0], small, SIZES[0])?;
            }
            said = Some(self.explain(&comm, call, bytes)?);
            self.call(&comm, call, bytes)
        })?;
        graphs.push(graph);
        for graph in graphs {
            graph.destroy(self.pool)?;
        }
        Ok(said.expect("captured"))
    }
}
