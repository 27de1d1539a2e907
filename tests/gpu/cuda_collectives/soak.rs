//! Makes many calls back to back: all-reduces of random sizes and algorithms, all-to-alls with other splits in
//! every call, which lie in the device's memory, dispatches to experts and combines, and replays of graphs of all these.
//!
//! The host waits for the device only now and then. In one of so many calls, every byte is compared, on
//! the device, before the next call writes there. Inputs begin at another place in every all-reduce, so the result
//! of an earlier call is never right.

mod equal;
mod experts;

use std::sync::Arc;
use std::time::{Duration, Instant};

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    AllReduceAlgorithm, AllToAllAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp,
    SplitRows, SplitsAt,
};

use crate::Options;
use crate::cuda::{CallGraph, stream, upload};
use crate::matrix::{Matrix, bytes};
use crate::oracle::{finite, random, reduce};
use crate::tools::Tools;
use equal::Equal;
use experts::Experts;

/// Elements of the longest call.
const MAX_COUNT: usize = 300_000;
/// Additional elements of calls that copy engines carry, which are at least 1 MiB long.
const COPIED: usize = 600_000;
/// Most elements by which the beginning of an input is shifted.
const SHIFTS: usize = 1024;
const DTYPE: DType = DType::Bf16;
/// How many graphs there are, and how many pairs of an all-reduce and an all-to-all each has, one of which has experts
/// behind it.
const GRAPHS: u64 = 12;
const PAIRS: u64 = 6;
/// Errors inside the first graph have this number, which is no call's.
const GRAPH: u64 = 1 << 40;
/// How many calls are made between two synchronizations.
const BETWEEN: u64 = 1 << 16;
/// One of so many calls is a long all-to-all of equal parts.
const EQUAL: u64 = 256;
/// One of so many calls is for experts.
const EXPERTS: u64 = 16;

struct Soak<'a> {
    pool: &'a Pool,
    options: &'a Options,
    stream: Stream,
    tools: Tools<'a>,
    comms: Vec<(AllReduceAlgorithm, Arc<Communicator>)>,
    from: Block<u8>,
    to: Block<u8>,
    /// The sum of all ranks' inputs.
    wanted: Block<u8>,
    exchanges: Option<Exchanges>,
    equal: Option<Equal>,
    experts: Option<Experts>,
    /// All-reduces, all-to-alls, calls for experts, and how many of all these were in graphs.
    calls: [u64; 4],
    checked: u64,
}

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<bool> {
    let room = MAX_COUNT + COPIED + SHIFTS;
    let (from, to) = (pool.alloc::<u8>(2 * room)?, pool.alloc::<u8>(2 * room)?);
    let wanted = pool.alloc::<u8>(2 * room)?;
    let all: Vec<Vec<u8>> =
        (0..pool.world()).map(|rank| finite(options.seed, rank, DTYPE, room)).collect();
    let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
    upload(pool, from.address(), all[pool.rank() as usize])?;
    upload(pool, wanted.address(), &reduce(&all, DTYPE, ReduceOp::Sum))?;
    let (exchanges, equal) = match options.wants("all_to_all") {
        true => (Some(Exchanges::new(pool, options.seed)?), Some(Equal::new(pool, options.seed)?)),
        false => (None, None),
    };
    pool.commit()?;
    let comms = communicators(pool, options)?;
    let experts = match (options.wants("experts"), &comms[..]) {
        (true, [(_, first), .., (_, last)]) => {
            Some(Experts::new(pool, [first, last], options.seed)?)
        }
        _ => None,
    };
    pool.commit()?;
    let soak = Soak {
        pool,
        options,
        stream: stream(pool)?,
        tools: Tools::new(pool)?,
        comms,
        from,
        to,
        wanted,
        exchanges,
        equal,
        experts,
        calls: [0; 4],
        checked: 0,
    };
    soak.run()
}

/// A graph, and how many of its calls are for experts.
struct SoakGraph {
    graph: CallGraph,
    routed: u64,
}

/// A communicator for every requested algorithm of devices.
fn communicators(
    pool: &Pool,
    options: &Options,
) -> Result<Vec<(AllReduceAlgorithm, Arc<Communicator>)>> {
    let all = options.wants("all_reduce");
    let named = |algorithm: &AllReduceAlgorithm| {
        *algorithm != AllReduceAlgorithm::CubeMesh && (options.wants(algorithm.name()) || all)
    };
    let mut algorithms: Vec<_> = AllReduceAlgorithm::ALL.into_iter().filter(named).collect();
    if algorithms.is_empty() {
        algorithms.push(AllReduceAlgorithm::Auto);
    }
    let make = |(nth, algorithm): (usize, AllReduceAlgorithm)| {
        let options = CommunicatorOptions {
            algorithm,
            all_to_all: AllToAllAlgorithm::ALL[nth % AllToAllAlgorithm::ALL.len()],
            device_scratch_bytes: Some(4 << 20),
            ..options.communicator()
        };
        Ok((algorithm, Arc::new(Communicator::with_options(pool, &options)?)))
    };
    algorithms.into_iter().enumerate().map(make).collect()
}

impl Soak<'_> {
    fn run(mut self) -> Result<bool> {
        let graphs = if self.options.wants("graphs") { self.graphs()? } else { Vec::new() };
        let began = Instant::now();
        let (mut call, mut looked, mut said) = (0, 0, began);
        while call < self.options.calls {
            let number = random(self.options.seed, call);
            // Several calls on one communicator, then a change to another one.
            let which = (random(self.options.seed, call / 50) >> 3) as usize % self.comms.len();
            let check = number.is_multiple_of(self.options.every);
            if !graphs.is_empty() && (number >> 16).is_multiple_of(64) {
                call += self.replay(&graphs, call, number)?;
            } else if self.equal.is_some() && (number >> 32).is_multiple_of(EQUAL) {
                self.equal_parts(which, call, number, check)?;
                call += 1;
            } else if self.experts.is_some() && (number >> 52).is_multiple_of(EXPERTS) {
                call += self.route(call, number, check)?;
            } else if self.exchanges.is_some() && (number >> 20).is_multiple_of(4) {
                self.exchange(which, call, number, check)?;
                call += 1;
            } else {
                self.all_reduce(which, call, number, check)?;
                call += 1;
            }
            if call - looked >= BETWEEN || call >= self.options.calls {
                looked = call;
                self.look()?;
                let (wrong, _) = self.tools.found()?;
                if self.pool.rank() == 0 && said.elapsed() > Duration::from_secs(5) {
                    said = Instant::now();
                    let rate = call as f64 / began.elapsed().as_secs_f64();
                    println!("{call} calls, {rate:.0} a second, {wrong} bytes wrong");
                }
            }
        }
        self.look()?;
        let (wrong, first) = self.tools.found()?;
        let seconds = began.elapsed().as_secs_f64();
        let [reduced, exchanged, routed, replayed] = self.calls;
        let first = first.map_or(String::new(), |name| match name.checked_sub(GRAPH) {
            Some(nth) => format!(", in graph {nth}"),
            None => format!(", first of call {name}"),
        });
        println!(
            "rank {}: {call} calls in {seconds:.1} s, {:.0} a second: {reduced} all-reduces, \
             {exchanged} all-to-alls and {routed} for experts, of these {replayed} in graphs; every byte of {} \
             checked on the device, {wrong} bytes wrong{first}",
            self.pool.rank(),
            call as f64 / seconds,
            self.checked,
        );
        for recorded in graphs {
            recorded.graph.destroy(self.pool)?;
        }
        Ok(wrong == 0)
    }

    /// Returns an error if a call has failed on the device.
    fn look(&self) -> Result<()> {
        self.comms.iter().try_for_each(|(_, comm)| comm.synchronize(&self.stream))
    }

    /// An all-reduce whose size and shift depend on `number`; `check` says whether it is compared.
    fn all_reduce(&mut self, which: usize, call: u64, number: u64, check: bool) -> Result<()> {
        let (algorithm, comm) = &self.comms[which];
        // Most calls are small.
        let count = 1 + (number >> 8) as usize % (MAX_COUNT >> (number >> 60));
        let copied = algorithm.checked().is_some_and(|checked| checked.cases.by_copies);
        let count = count + if copied { COPIED } else { 0 };
        // Most inputs are aligned.
        let odd = (number >> 34).is_multiple_of(8);
        let shift = ((number >> 40) as usize % SHIFTS) & if odd { !0 } else { !7 };
        let (to, from) = (self.to.address(), self.from.address() + 2 * shift as u64);
        // SAFETY: both blocks have room for the longest call and shift.
        unsafe {
            let (to, from) = (to as *mut u8, from as *const u8);
            comm.all_reduce_at(to, from, count, DTYPE, ReduceOp::Sum, &self.stream)
        }?;
        self.calls[0] += 1;
        if check {
            self.checked += 1;
            let wanted = self.wanted.address() + 2 * shift as u64;
            self.tools.compare(to, wanted, 2 * count, call, &self.stream)?;
        }
        Ok(())
    }

    /// An all-to-all with another matrix than the last one's, whose splits are on the host or on the device.
    fn exchange(&mut self, which: usize, call: u64, number: u64, check: bool) -> Result<()> {
        let Some(exchanges) = &mut self.exchanges else { return Ok(()) };
        let nth = exchanges.next(number);
        let comm = &self.comms[which].1;
        if number >> 40 & 1 == 0 {
            exchanges.by_splits(comm, exchanges.splits_of(nth), &self.stream)?;
        } else {
            exchanges.by_lists(comm, nth, &self.stream)?;
        }
        self.calls[1] += 1;
        if check {
            self.checked += 1;
            exchanges.compare(nth, call, &self.tools, &self.stream)?;
        }
        Ok(())
    }

    fn equal_parts(&mut self, which: usize, call: u64, number: u64, check: bool) -> Result<()> {
        let Some(equal) = &self.equal else { return Ok(()) };
        equal.call(&self.comms[which].1, number, &self.stream)?;
        self.calls[1] += 1;
        if check {
            self.checked += 1;
            equal.compare(number, call, &self.tools, &self.stream)?;
        }
        Ok(())
    }

    fn route(&mut self, call: u64, number: u64, check: bool) -> Result<u64> {
        let Some(experts) = &self.experts else { return Ok(0) };
        let made = experts.call(number, &self.stream)?;
        self.calls[2] += made;
        if check {
            self.checked += 1;
            experts.compare(number, call, &self.tools, &self.stream)?;
        }
        Ok(made)
    }

    /// Captures graphs of all-reduces and calls for experts, each compared inside the graph, and of all-to-alls, whose
    /// splits are read from one place.
    fn graphs(&mut self) -> Result<Vec<SoakGraph>> {
        let seed = random(self.options.seed, 1 << 50);
        let make = |nth: u64| {
            let mut routed = 0;
            let graph = CallGraph::capture(self.pool, self.stream, || {
                for pair in 0..PAIRS {
                    let number = random(seed, nth * PAIRS + pair);
                    let which = (nth + pair) as usize % self.comms.len();
                    self.all_reduce(which, GRAPH + nth, number, true)?;
                    if let Some(exchanges) = &self.exchanges {
                        let comm = &self.comms[which].1;
                        exchanges.by_splits(comm, exchanges.current(), &self.stream)?;
                    }
                }
                routed = self.route(GRAPH + nth, random(seed, 1000 + nth), true)?;
                if has_equal(nth) {
                    let which = (nth / 6) as usize * 3 % self.comms.len();
                    self.equal_parts(which, GRAPH + nth, random(seed, nth), true)?;
                }
                Ok(())
            })?;
            Ok(SoakGraph { graph, routed })
        };
        let graphs: Result<Vec<SoakGraph>> = (0..GRAPHS).map(make).collect();
        // The calls were captured and not made.
        (self.calls, self.checked) = ([0; 4], 0);
        graphs
    }

    /// Launches a graph, and compares the output of its last all-to-all. Returns how many calls it made.
    fn replay(&mut self, graphs: &[SoakGraph], call: u64, number: u64) -> Result<u64> {
        let (pool, stream) = (self.pool, self.stream);
        let nth = (number >> 24) % GRAPHS;
        let (SoakGraph { graph, routed }, equal) =
            (&graphs[nth as usize], u64::from(has_equal(nth)));
        let mut calls = PAIRS + routed;
        match &mut self.exchanges {
            Some(exchanges) => {
                let nth = exchanges.next(number);
                let (to, from) = (exchanges.current(), exchanges.splits_of(nth));
                self.tools.copy(to, from, 8 * pool.world() as usize, &stream)?;
                graph.launch(pool, stream)?;
                exchanges.compare(nth, call, &self.tools, &stream)?;
                self.calls[1] += PAIRS + equal;
                self.checked += 1 + equal;
                calls += PAIRS + equal;
            }
            None => graph.launch(pool, stream)?,
        }
        self.calls[0] += PAIRS;
        self.calls[2] += routed;
        self.checked += PAIRS + u64::from(*routed != 0);
        self.calls[3] += calls;
        Ok(calls)
    }
}

/// How many graphs have an all-to-all of equal parts, which takes longer than all their other calls.
fn has_equal(graph: u64) -> bool {
    graph.is_multiple_of(6)
}

/// How many matrices splits are taken from, and most bytes that a rank sends.
const MATRICES: usize = 64;
const SENT: usize = 1 << 20;

/// All-to-alls whose splits are in the device's memory already, so that no call waits for the host.
struct Exchanges {
    matrices: Vec<Matrix>,
    rank: u32,
    /// The splits of all matrices, and a place for the splits of graphs.
    splits: Block<i64>,
    input: Block<u8>,
    output: Block<u8>,
    /// This rank's expected output for each matrix.
    wanted: Block<u8>,
    last: usize,
}

impl Exchanges {
    /// Allocates memory; the caller commits the pool.
    fn new(pool: &Pool, seed: u64) -> Result<Self> {
        let (rank, world) = (pool.rank(), pool.world());
        let matrices: Vec<Matrix> = (0..MATRICES as u64)
            .map(|nth| Matrix::random(random(seed ^ 3, nth), world, SENT))
            .collect();
        let splits = pool.alloc::<i64>((MATRICES + 1) * world as usize)?;
        let (input, output) = (pool.alloc::<u8>(SENT)?, pool.alloc::<u8>(SENT)?);
        let wanted = pool.alloc::<u8>(MATRICES * SENT)?;
        let data: Vec<Vec<u8>> = (0..world).map(|rank| bytes(seed, rank, SENT)).collect();
        let all: Vec<u8> = matrices
            .iter()
            .flat_map(|matrix| matrix.sends(rank))
            .flat_map(|count| (count as u64).to_le_bytes())
            .collect();
        upload(pool, splits.address(), &all)?;
        upload(pool, input.address(), &data[rank as usize])?;
        for (nth, matrix) in matrices.iter().enumerate() {
            let at = wanted.address() + (nth * SENT) as u64;
            upload(pool, at, &matrix.output(&data, rank, 1, SENT))?;
        }
        Ok(Self { matrices, rank, splits, input, output, wanted, last: 0 })
    }

    /// Another matrix than the last one.
    fn next(&mut self, number: u64) -> usize {
        self.last = (self.last + 1 + (number >> 24) as usize % (MATRICES - 1)) % MATRICES;
        self.last
    }

    fn splits_of(&self, nth: usize) -> u64 {
        self.splits.address() + (8 * nth * self.matrices[0].sends(self.rank).len()) as u64
    }

    /// The place where graphs read their splits.
    fn current(&self) -> u64 {
        self.splits_of(MATRICES)
    }

    fn places(&self) -> (*mut u8, *const u8) {
        (self.output.as_ptr().cast(), self.input.as_ptr() as *const u8)
    }

    fn by_splits(&self, comm: &Communicator, splits: u64, stream: &Stream) -> Result<()> {
        let (to, from) = self.places();
        let rows = SplitRows { dtype: DType::U8, row: 1, length: SENT, capacity: SENT };
        let null = std::ptr::null_mut();
        let (input, dtype) = (splits as *const u8, DType::I64);
        let splits = SplitsAt { input, output: null, offsets: null, dtype };
        // SAFETY: both blocks have room for all of a matrix, and there is a split for each rank.
        unsafe { comm.all_to_all_v_splits_at(to, from, &rows, &splits, stream) }
    }

    fn by_lists(&self, comm: &Communicator, nth: usize, stream: &Stream) -> Result<()> {
        let (to, from) = self.places();
        let matrix = &self.matrices[nth];
        let (send, receive) = (matrix.sends(self.rank), matrix.receives(self.rank));
        // SAFETY: both blocks have room for all of a matrix.
        unsafe { comm.all_to_all_v_at(to, from, &receive, &send, DType::U8, stream) }
    }

    fn compare(&self, nth: usize, call: u64, tools: &Tools<'_>, stream: &Stream) -> Result<()> {
        let received = self.matrices[nth].receives(self.rank).iter().sum();
        let wanted = self.wanted.address() + (nth * SENT) as u64;
        tools.compare(self.output.address(), wanted, received, call, stream)
    }
}
