//! Times graphs of calls: the median of replays on the slowest rank, with the number of calls in a graph that is
//! fastest.

mod fused;
mod plans;

use std::collections::BTreeMap;
use std::time::Instant;

use serde_json::json;
use symmpool_allocator::{Block, Deadline, Pool, Result, Stream};
use symmpool_collectives::{
    AllReduceAlgorithm, AllToAllAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp,
    built_from, kernel_versions,
};

use crate::Options;
use crate::cuda::{CallGraph, StreamTimer, download, driver, stream, upload};
use crate::oracle::{differs, input, reduce};

/// The name of all-to-alls with the automatic choice of an algorithm. Others have the algorithm in their name, such
/// as `all_to_all_ll`.
const ALL_TO_ALL: &str = "all_to_all";
/// Sends from one rank to another, and sends with an answer.
const P2P: &str = "p2p";
const P2P_ROUND_TRIP: &str = "p2p_round_trip";

/// How many replays of a graph follow each other. The first one, in which ranks wait for each other, is not counted.
const REPLAYS: usize = 10;
/// About how many bytes the calls between two events move; as in `python -m symmpool bench`, so that both give the
/// same times.
const SPAN_BYTES: u64 = 256 << 20;
/// The numbers of calls in a graph that are tried, as in `python -m symmpool bench`; fewer for large calls.
const GRAPHS: &[u64] = &[1, 10, 20, 100];
/// The number of calls in a graph where our algorithms are compared only with each other.
pub(crate) const LONG_GRAPHS: &[u64] = &[100];
/// How often a size is timed. The median counts.
const ROUNDS: usize = 3;

/// Microseconds of each algorithm, by bytes.
pub(crate) type AlgorithmTimes = BTreeMap<u64, Vec<(String, f64)>>;

/// Times all-reduces and other calls.
pub(crate) struct Bench<'a> {
    pub(crate) pool: &'a Pool,
    stream: Stream,
    clock: StreamTimer,
    /// The numbers of calls in a graph that are tried.
    graphs: &'static [u64],
    /// The number of calls in the fastest graph, by bytes and by name.
    calls: BTreeMap<u64, BTreeMap<String, u64>>,
    /// The number of the next name in the store; names are used once.
    number: u32,
    /// Whether every result was right.
    pub(crate) right: bool,
}

impl<'a> Bench<'a> {
    pub(crate) fn new(pool: &'a Pool, graphs: &'static [u64]) -> Result<Self> {
        let (stream, clock) = (stream(pool)?, StreamTimer::new(pool, REPLAYS)?);
        Ok(Self { pool, stream, clock, graphs, calls: BTreeMap::new(), number: 0, right: true })
    }

    /// Times algorithms with the sizes of the options, from one block to another or in place: the slowest rank's
    /// times. Sizes that an algorithm does not support are left out.
    pub(crate) fn measure(
        &mut self,
        options: &Options,
        (from, to): (&Block<u8>, &Block<u8>),
        dtype: DType,
        algorithms: &[AllReduceAlgorithm],
    ) -> Result<AlgorithmTimes> {
        let pool = self.pool;
        let (most, sizes) = (options.largest(), options.sizes());
        let in_place = from.address() == to.address();
        // Results are checked up to this element; longer data repeats.
        let checked = most.min(4 << 20);
        let count = checked / dtype.size();
        let all: Vec<Vec<u8>> =
            (0..pool.world()).map(|rank| input(options.seed, rank, dtype, count)).collect();
        let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
        let fill = |length: usize| {
            (0..length).step_by(checked).try_for_each(|at| {
                let bytes = checked.min(length - at);
                upload(pool, from.address() + at as u64, &all[pool.rank() as usize][..bytes])
            })
        };
        fill(most)?;
        let wanted = reduce(&all, dtype, ReduceOp::Sum);
        let mut times = AlgorithmTimes::new();
        for &algorithm in algorithms {
            let mut communicator = CommunicatorOptions { algorithm, ..options.communicator() };
            let copied = algorithm.checked().is_some_and(|checked| checked.cases.by_copies);
            if let Some(bytes) = options.copy_scratch.filter(|_| copied) {
                communicator.device_scratch_bytes = Some(bytes);
            }
            for &bytes in &sizes {
                let comm = Communicator::with_options(pool, &communicator)?;
                let count = bytes as usize / dtype.size();
                let length = (count * dtype.size()).min(checked);
                // SAFETY: both blocks are this long, and nothing else uses them.
                let call = |stream: &Stream| unsafe {
                    let (to, from) = (to.address() as *mut u8, from.address() as *const u8);
                    comm.all_reduce_at(to, from, count, dtype, ReduceOp::Sum, stream)
                };
                if let Some((slowest, calls)) = self.time(&comm, bytes, call)? {
                    let name = algorithm.name().to_owned();
                    self.calls.entry(bytes).or_default().insert(name.clone(), calls);
                    times.entry(bytes).or_default().push((name, slowest));
                    if in_place {
                        // The timed calls may have summed up sums in place, so the data is written again.
                        fill(bytes as usize)?;
                        self.meet()?;
                        call(&self.stream)?;
                        comm.synchronize(&self.stream)?;
                    }
                    let got = download(pool, to.address(), length)?;
                    if differs(&got, &wanted[..length], dtype).is_some() {
                        self.right = false;
                        let name = algorithm.name();
                        println!("rank {}: {name} of {bytes} bytes is wrong", pool.rank());
                    }
                    if in_place {
                        fill(bytes as usize)?;
                    }
                }
            }
        }
        Ok(times)
    }

    /// Times all-to-alls of equal parts of `bytes` bytes together, if options name them.
    fn all_to_alls(
        &mut self,
        options: &Options,
        (from, to): (&Block<u8>, &Block<u8>),
        times: &mut AlgorithmTimes,
    ) -> Result<()> {
        let world = self.pool.world();
        for algorithm in AllToAllAlgorithm::ALL {
            let name = match algorithm {
                AllToAllAlgorithm::Auto => ALL_TO_ALL.to_owned(),
                _ => format!("{ALL_TO_ALL}_{}", algorithm.name()),
            };
            if !options.algorithms.contains(&name) {
                continue;
            }
            let communicator =
                CommunicatorOptions { all_to_all: algorithm, ..options.communicator() };
            let comm = Communicator::with_options(self.pool, &communicator)?;
            for &bytes in &options.sizes() {
                let count = (bytes / u64::from(world)) as usize;
                // SAFETY: both blocks are this long, and nothing else uses them.
                let call = |stream: &Stream| unsafe {
                    let (to, from) = (to.address() as *mut u8, from.address() as *const u8);
                    comm.all_to_all_at(to, from, count, DType::U8, stream)
                };
                if let Some((slowest, calls)) = self.time(&comm, bytes, call)? {
                    self.calls.entry(bytes).or_default().insert(name.clone(), calls);
                    times.entry(bytes).or_default().push((name.clone(), slowest));
                }
            }
        }
        Ok(())
    }

    /// Times sends from rank 0 to rank 1, without and with an answer of the same length, if options name them.
    fn messages(
        &mut self,
        options: &Options,
        (from, to): (&Block<u8>, &Block<u8>),
        times: &mut AlgorithmTimes,
    ) -> Result<()> {
        let rank = self.pool.rank();
        for (name, answers) in [(P2P, false), (P2P_ROUND_TRIP, true)] {
            if self.pool.world() < 2 || !options.algorithms.iter().any(|other| other == name) {
                continue;
            }
            let comm = Communicator::with_options(self.pool, &options.communicator())?;
            for &bytes in &options.sizes() {
                let (from, to) = (from.address() as *const u8, to.address() as *mut u8);
                let count = bytes as usize;
                // SAFETY: both blocks are this long, and nothing else uses them.
                let send = |peer, stream: &Stream| unsafe {
                    comm.send_at(from, count, DType::U8, peer, stream)
                };
                // SAFETY: both blocks are this long, and nothing else uses them.
                let receive = |peer, stream: &Stream| unsafe {
                    comm.recv_at(to, count, DType::U8, peer, stream)
                };
                let call = |stream: &Stream| match (rank, answers) {
                    (0, false) => send(1, stream),
                    (0, true) => send(1, stream).and_then(|()| receive(1, stream)),
                    (1, false) => receive(0, stream),
                    (1, true) => receive(0, stream).and_then(|()| send(0, stream)),
                    _ => Ok(()),
                };
                if let Some((slowest, calls)) = self.time(&comm, bytes, call)? {
                    self.calls.entry(bytes).or_default().insert(name.to_owned(), calls);
                    times.entry(bytes).or_default().push((name.to_owned(), slowest));
                }
            }
        }
        Ok(())
    }

    /// Microseconds of a call on the slowest rank, and the number of calls in the graph with that time; `None`
    /// if the communicator does not support the call.
    fn time(
        &mut self,
        comm: &Communicator,
        bytes: u64,
        call: impl Fn(&Stream) -> Result<()>,
    ) -> Result<Option<(f64, u64)>> {
        let (pool, stream) = (self.pool, self.stream);
        let most = (SPAN_BYTES / bytes.max(1)).clamp(5, 100);
        let mut lengths: Vec<u64> = self.graphs.iter().map(|calls| most.min(*calls)).collect();
        lengths.dedup();
        let mut graphs = Vec::new();
        for calls in lengths {
            let captured =
                CallGraph::capture(pool, stream, || (0..calls).try_for_each(|_| call(&stream)));
            match captured {
                Ok(graph) => graphs.push((graph, calls)),
                Err(error) if error.is_unsupported() => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        let mut best = (f64::INFINITY, 0);
        if graphs.len() > 1 {
            // Every rank has the same times here, so all choose the same number.
            for (at, (graph, calls)) in graphs.iter().enumerate() {
                let us = self.replay(comm, graph, *calls, most)?;
                best = if us < best.0 { (us, at) } else { best };
            }
        }
        let (graph, calls) = &graphs[best.1];
        let rounds: Result<Vec<f64>> =
            (0..ROUNDS).map(|_| self.replay(comm, graph, *calls, most)).collect();
        let found = (median(rounds?), *calls);
        graphs.into_iter().try_for_each(|(graph, _)| graph.destroy(pool))?;
        Ok(Some(found))
    }

    /// Microseconds of a call in a graph of `calls`, on the slowest rank, by replays with `most` calls between
    /// two events.
    fn replay(
        &mut self,
        comm: &Communicator,
        graph: &CallGraph,
        calls: u64,
        most: u64,
    ) -> Result<f64> {
        let (pool, stream, launches) = (self.pool, self.stream, most / calls);
        self.meet()?;
        let work = || (0..launches).try_for_each(|_| graph.launch(pool, stream));
        let laps = self.clock.laps(pool, stream, REPLAYS, work)?;
        comm.synchronize(&stream)?;
        let mine = median(laps[1..].to_vec()) / (launches * calls) as f64;
        self.number += 1;
        let name = format!("time{}", self.number);
        let of_all = pool.group().all_gather(&name, &mine.to_le_bytes(), Deadline::seconds(60))?;
        let each =
            of_all.parts().map(|part| f64::from_le_bytes(part.try_into().expect("a number")));
        Ok(each.fold(0.0, f64::max))
    }

    /// Waits until every rank is here.
    fn meet(&mut self) -> Result<()> {
        self.number += 1;
        let name = format!("bench{}", self.number);
        self.pool.group().all_gather(&name, &[], Deadline::seconds(60)).map(drop)
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The command as it may be published: paths are shortened to their last part.
fn command() -> String {
    let names = std::env::args().map(|argument| {
        let name = std::path::Path::new(&argument).file_name();
        name.map_or(argument.clone(), |name| name.to_string_lossy().into_owned())
    });
    names.collect::<Vec<_>>().join(" ")
}

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<bool> {
    let most = options.largest();
    let (from, to) = (pool.alloc::<u8>(most)?, pool.alloc::<u8>(most)?);
    pool.commit()?;
    let into = if options.in_place { &from } else { &to };
    let named = |algorithm: &AllReduceAlgorithm| {
        options.algorithms.is_empty()
            || options.algorithms.iter().any(|name| name == algorithm.name())
    };
    let algorithms: Vec<_> = AllReduceAlgorithm::ALL.into_iter().filter(named).collect();
    let mut bench = Bench::new(pool, GRAPHS)?;
    let mut rows = bench.measure(options, (&from, into), DType::Bf16, &algorithms)?;
    bench.all_to_alls(options, (&from, &to), &mut rows)?;
    bench.messages(options, (&from, &to), &mut rows)?;
    bench.plans(options, (&from, &to), &mut rows)?;
    bench.fused(pool, options)?;
    // The device's context is current, as in programs that use the device.
    let stream = stream(pool)?;
    let host_us =
        driver(pool).with_context(|| eager(pool, stream, (to.address(), from.address())))?;
    if pool.rank() == 0 {
        show(&rows, pool.world());
        println!("a call of 4 KiB outside of graphs takes {host_us:.2} us of the host's time");
        if let Some(path) = &options.json {
            let facts = driver(pool).facts();
            let results = json!({
                "benchmark": "cuda_collectives", "symmpool": env!("CARGO_PKG_VERSION"),
                "commit": built_from(), "kernels": kernel_versions(),
                "command": command(), "world": pool.world(),
                "devices": vec![&facts.name; pool.world() as usize],
                "driver_api": facts.driver_version, "dtype": "bf16", "op": "sum",
                "in_place": options.in_place, "eager_host_us": host_us,
                "us": rows.iter().map(|(bytes, row)| {
                    let by = row.iter().cloned().collect::<BTreeMap<_, _>>();
                    json!({ "bytes": bytes, "by": by, "calls": bench.calls[bytes] })
                }).collect::<Vec<_>>(),
            });
            let text = serde_json::to_string_pretty(&results).expect("plain data");
            std::fs::write(path, text + "\n")
                .unwrap_or_else(|error| panic!("writing {path}: {error}"));
        }
    }
    Ok(bench.right)
}

/// Microseconds that the host takes to put a small call on a stream: the median of bursts that the
/// stream's queue holds.
fn eager(pool: &Pool, stream: Stream, (to, from): (u64, u64)) -> Result<f64> {
    const BURST: u32 = 200;
    let comm = Communicator::new(pool)?;
    let mut times = Vec::new();
    for _ in 0..15 {
        let began = Instant::now();
        for _ in 0..BURST {
            // SAFETY: both blocks are longer, and nothing else uses them.
            unsafe {
                comm.all_reduce_at(
                    to as *mut u8,
                    from as *const u8,
                    2048,
                    DType::Bf16,
                    ReduceOp::Sum,
                    &stream,
                )
            }?;
        }
        times.push(began.elapsed().as_secs_f64() * 1e6 / f64::from(BURST));
        comm.synchronize(&stream)?;
    }
    Ok(median(times))
}

/// Prints the times of every size, the fastest first.
pub(crate) fn show(rows: &AlgorithmTimes, world: u32) {
    for (bytes, row) in rows {
        let mut row = row.clone();
        row.sort_by(|a, b| a.1.total_cmp(&b.1));
        let best = row[0].1;
        // How often the bytes cross a rank's links in each direction.
        let is_half = |name: &str| {
            let halves = [ALL_TO_ALL, "all_gather", "reduce_scatter", "broadcast"];
            halves.iter().any(|half| name.contains(half))
        };
        let ways = if is_half(&row[0].0) { 1.0 } else { 2.0 };
        let part = f64::from(world - 1) / f64::from(world);
        // A message crosses the links of both ranks once.
        let times = if row[0].0.starts_with(P2P) { 1.0 } else { ways * part };
        let moved = *bytes as f64 * times;
        print!("{:>9} KiB {:>7.1} GB/s ", bytes >> 10, moved / best / 1000.0);
        for (name, us) in row {
            print!(" {name} {us:.2}");
        }
        println!();
    }
}
