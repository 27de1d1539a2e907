//! Times graphs of calls: the median of replays, the slowest rank.

use std::collections::BTreeMap;
use std::time::Instant;

use serde_json::json;
use symmpool_allocator::{Block, Deadline, Pool, Result, Stream};
use symmpool_collectives::{
    AllReduceAlgorithm, AllToAllAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp,
};

use crate::Options;
use crate::cuda::{Clock, Graph, download, driver, stream, upload};
use crate::oracle::{differs, input, reduce};

/// What options call all-to-alls that choose for themselves; `all_to_all_packet` and others do not.
const ALL_TO_ALL: &str = "all_to_all";

const REPLAYS: usize = 12;
const WARM_UP: usize = 3;

/// Microseconds of each algorithm, by bytes.
pub(crate) type Times = BTreeMap<u64, Vec<(String, f64)>>;

/// What all-reduces are timed on.
pub(crate) struct Bench<'a> {
    pub(crate) pool: &'a Pool,
    stream: Stream,
    clock: Clock,
    /// Of names in the store, which are used once.
    number: u32,
    /// Whether every result was right.
    pub(crate) right: bool,
}

impl<'a> Bench<'a> {
    pub(crate) fn new(pool: &'a Pool) -> Result<Self> {
        let (stream, clock) = (stream(pool)?, Clock::new(pool)?);
        Ok(Self { pool, stream, clock, number: 0, right: true })
    }

    /// Times algorithms on sizes from `options.min` to `options.max`, between blocks that are as
    /// long; the slowest rank's times. What an algorithm cannot do is left out.
    pub(crate) fn measure(
        &mut self,
        options: &Options,
        (from, to): (&Block<u8>, &Block<u8>),
        dtype: DType,
        algorithms: &[AllReduceAlgorithm],
    ) -> Result<Times> {
        let pool = self.pool;
        let most = options.max as usize;
        // Checked up to here; the rest repeats.
        let checked = most.min(4 << 20);
        let count = checked / dtype.size();
        let all: Vec<Vec<u8>> =
            (0..pool.world()).map(|rank| input(options.seed, rank, dtype, count)).collect();
        let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
        for at in (0..most).step_by(checked) {
            let bytes = checked.min(most - at);
            upload(pool, from.address() + at as u64, &all[pool.rank() as usize][..bytes])?;
        }
        let wanted = reduce(&all, dtype, ReduceOp::Sum);
        let mut times = Times::new();
        for &algorithm in algorithms {
            let mut communicator = CommunicatorOptions { algorithm, ..Default::default() };
            let copied = algorithm == AllReduceAlgorithm::TwoShotCopy;
            if let Some(bytes) = options.copy_scratch.filter(|_| copied) {
                communicator.device_scratch_bytes = bytes;
            }
            let mut bytes = options.min;
            while bytes <= options.max {
                let comm = Communicator::with_options(pool, &communicator)?;
                let count = bytes as usize / dtype.size();
                // SAFETY: both blocks are this long, and nothing else uses them.
                let call = |stream: &Stream| unsafe {
                    let (to, from) = (to.address() as *mut u8, from.address() as *const u8);
                    comm.all_reduce_at(to, from, count, dtype, ReduceOp::Sum, stream)
                };
                if let Some(slowest) = self.time(&comm, bytes, call)? {
                    times.entry(bytes).or_default().push((algorithm.name().to_owned(), slowest));
                    let length = (bytes as usize).min(checked);
                    let got = download(pool, to.address(), length)?;
                    if differs(&got, &wanted[..length], dtype).is_some() {
                        self.right = false;
                        let name = algorithm.name();
                        println!("rank {}: {name} of {bytes} bytes is wrong", pool.rank());
                    }
                }
                bytes *= 2;
            }
        }
        Ok(times)
    }

    /// Times all-to-alls of equal parts, `bytes` of them together, where options name them.
    fn all_to_alls(
        &mut self,
        options: &Options,
        (from, to): (&Block<u8>, &Block<u8>),
        times: &mut Times,
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
            let communicator = CommunicatorOptions { all_to_all: algorithm, ..Default::default() };
            let comm = Communicator::with_options(self.pool, &communicator)?;
            let mut bytes = options.min;
            while bytes <= options.max {
                let count = (bytes / u64::from(world)) as usize;
                // SAFETY: both blocks are this long, and nothing else uses them.
                let call = |stream: &Stream| unsafe {
                    let (to, from) = (to.address() as *mut u8, from.address() as *const u8);
                    comm.all_to_all_at(to, from, count, DType::U8, stream)
                };
                if let Some(slowest) = self.time(&comm, bytes, call)? {
                    times.entry(bytes).or_default().push((name.clone(), slowest));
                }
                bytes *= 2;
            }
        }
        Ok(())
    }

    /// Microseconds of a call on the slowest rank; none if the communicator cannot make it.
    fn time(
        &mut self,
        comm: &Communicator,
        bytes: u64,
        call: impl Fn(&Stream) -> Result<()>,
    ) -> Result<Option<f64>> {
        let (pool, stream) = (self.pool, self.stream);
        let calls = match bytes {
            0..=1_048_576 => 40,
            1_048_577..=16_777_216 => 16,
            _ => 6,
        };
        let captured = Graph::capture(pool, stream, || (0..calls).try_for_each(|_| call(&stream)));
        let graph = match captured {
            Ok(graph) => graph,
            Err(error) if error.is_unsupported() => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut times = Vec::new();
        for _ in 0..REPLAYS {
            self.number += 1;
            // Ranks begin together, on the device too.
            let deadline = Deadline::seconds(60);
            pool.group().all_gather(&format!("bench{}", self.number), &[], deadline)?;
            comm.barrier(&stream)?;
            let took = self.clock.time(pool, stream, || graph.launch(pool, stream))?;
            times.push(took / f64::from(calls));
        }
        comm.synchronize(&stream)?;
        let mut times = times.split_off(WARM_UP);
        times.sort_by(f64::total_cmp);
        let mine = times[times.len() / 2].to_le_bytes();
        let name = format!("time{}", self.number);
        let of_all = pool.group().all_gather(&name, &mine, Deadline::seconds(60))?;
        graph.destroy(pool)?;
        let each =
            of_all.parts().map(|part| f64::from_le_bytes(part.try_into().expect("a number")));
        Ok(Some(each.fold(0.0, f64::max)))
    }
}

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<bool> {
    let most = options.max as usize;
    let (from, to) = (pool.alloc::<u8>(most)?, pool.alloc::<u8>(most)?);
    pool.commit()?;
    let named = |algorithm: &AllReduceAlgorithm| {
        options.algorithms.is_empty()
            || options.algorithms.iter().any(|name| name == algorithm.name())
    };
    let algorithms: Vec<_> = AllReduceAlgorithm::ALL.into_iter().filter(named).collect();
    let mut bench = Bench::new(pool)?;
    let mut rows = bench.measure(options, (&from, &to), DType::Bf16, &algorithms)?;
    bench.all_to_alls(options, (&from, &to), &mut rows)?;
    // As in programs that use the device: its context is current.
    let stream = stream(pool)?;
    let host_us =
        driver(pool).with_context(|| eager(pool, stream, (to.address(), from.address())))?;
    if pool.rank() == 0 {
        show(&rows, pool.world());
        println!("a call of 4 KiB outside of graphs takes {host_us:.2} us of the host's time");
        if let Some(path) = &options.json {
            let facts = driver(pool).facts();
            let results = json!({
                "device": facts.name, "driver": facts.driver_version, "ranks": pool.world(),
                "dtype": "bf16", "op": "sum", "eager_host_us": host_us,
                "command": std::env::args().skip(1).collect::<Vec<_>>().join(" "),
                "us": rows.iter().map(|(bytes, row)| {
                    json!({ "bytes": bytes, "by": row.iter().cloned().collect::<BTreeMap<_, _>>() })
                }).collect::<Vec<_>>(),
            });
            let text = serde_json::to_string_pretty(&results).expect("plain data");
            std::fs::write(path, text + "\n").expect("the results written");
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
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Every size, the fastest first.
pub(crate) fn show(rows: &Times, world: u32) {
    for (bytes, row) in rows {
        let mut row = row.clone();
        row.sort_by(|a, b| a.1.total_cmp(&b.1));
        let best = row[0].1;
        // Of the bytes, what crosses a rank's links each way: once for all-to-alls.
        let ways = if row[0].0.starts_with(ALL_TO_ALL) { 1.0 } else { 2.0 };
        let moved = *bytes as f64 * ways * f64::from(world - 1) / f64::from(world);
        print!("{:>9} KiB {:>7.1} GB/s ", bytes >> 10, moved / best / 1000.0);
        for (name, us) in row {
            print!(" {name} {us:.2}");
        }
        println!();
    }
}
