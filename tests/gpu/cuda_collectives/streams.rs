//! Checks several communicators at once, each on its own stream or changing from one to the next: their calls are under
//! way together, in another order on other ranks; graphs of each one interleave; and one graph has calls of all.

use std::time::Duration;

use symmpool_allocator::driver::Event;
use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    AllToAllAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp, SplitRows, SplitsAt,
};

use crate::Options;
use crate::cuda::{CallGraph, stream, upload};
use crate::oracle::{finite, random, reduce};
use crate::tools::Tools;

const DTYPE: DType = DType::Bf16;
/// How many rounds there are, and most elements of a call. The largest calls use every processor of a device.
const SIZES: [(u64, usize); 3] = [(400, 20_000), (200, 400_000), (30, 8 << 20)];
/// Communicators.
const LANES: usize = 3;
const GRAPHS: usize = 4;
const LAUNCHES: u64 = 200;
/// Most elements by which the beginning of an input is shifted.
const SHIFTS: usize = 512;
/// The timeout of communicators: kernels that wait for each other fail after it.
const TIMEOUT: Duration = Duration::from_secs(8);

/// How many rounds there are in which a communicator changes its stream while a graph is captured.
const TURNS: u64 = 12;
/// How long one rank's stream is held up in these rounds.
const PAUSE: Duration = Duration::from_millis(3);
/// Bits of a call's number that say what kind of call it is.
const REDUCES: u64 = 2 << 50;
const EXCHANGES: u64 = 0;

/// How the calls of a round are made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    OneByOne,
    AtOnce,
    /// All at once, and each communicator on another stream than in the round before.
    Moving,
}

/// One communicator with its stream and buffers.
struct CommunicatorStream {
    comm: Communicator,
    stream: Stream,
    /// The stream on which its last call's result is compared.
    compared: Option<Event>,
    from: Block<u8>,
    to: Block<u8>,
    exchanged: Block<u8>,
    /// The sums of all ranks' inputs.
    wanted: Block<u8>,
    /// The number of elements for each rank, which is the same for all.
    splits: Block<i64>,
}

struct StreamChecks<'a> {
    pool: &'a Pool,
    tools: Tools<'a>,
    lanes: Vec<CommunicatorStream>,
    /// Bytes that every rank sends to each rank in all-to-alls.
    part: usize,
    cases: u64,
}

/// Cases, and sizes at which something was wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let (mut cases, mut wrong) = (0, 0);
    for (rounds, most) in SIZES {
        // After a failure, the other sizes would only wait for timeouts.
        let result = StreamChecks::new(pool, options.seed, most).and_then(|mut streams| {
            let rounds = options.seldom(rounds, rounds / 10);
            // Loads all kernels first, one by one, as loading may wait for running kernels.
            streams.calls(options.seed, rounds, most, How::OneByOne)?;
            streams.calls(options.seed, rounds, most, How::AtOnce)?;
            streams.calls(options.seed, rounds, most, How::Moving)?;
            streams.turns(options.seed, most)?;
            let launches = if most > 1 << 20 { LAUNCHES / 8 } else { LAUNCHES };
            streams.graphs(options.seed, options.seldom(launches, 16), most)?;
            Ok((streams.cases, streams.tools.take()?))
        });
        match result {
            Ok((done, (0, _))) => cases += done,
            Ok((done, (differ, first))) => {
                cases += done;
                wrong += 1;
                println!(
                    "rank {}: {LANES} communicators at once, up to {most} elements: {differ} bytes wrong, \
                     first in round {first:?}",
                    pool.rank()
                );
            }
            Err(error) => {
                wrong += 1;
                println!(
                    "rank {}: {LANES} communicators at once, up to {most} elements: {error}",
                    pool.rank()
                );
            }
        }
    }
    if pool.rank() == 0 {
        println!("{LANES} communicators at once: {cases} calls, {wrong} of 3 sizes wrong");
    }
    Ok((cases, wrong))
}

impl CommunicatorStream {
    /// Allocates memory; the caller commits the pool.
    fn new(pool: &Pool, most: usize, concurrent: Option<u32>) -> Result<Self> {
        let bytes = 2 * (most + SHIFTS);
        // All-to-alls of equal parts, which copy engines carry.
        let all_to_all = AllToAllAlgorithm::Copy;
        let options =
            CommunicatorOptions { all_to_all, timeout: TIMEOUT, concurrent, ..Default::default() };
        Ok(Self {
            comm: Communicator::with_options(pool, &options)?,
            stream: stream(pool)?,
            compared: None,
            from: pool.alloc(bytes)?,
            to: pool.alloc(bytes)?,
            exchanged: pool.alloc(bytes)?,
            wanted: pool.alloc(bytes)?,
            splits: pool.alloc(pool.world() as usize)?,
        })
    }
}

impl<'a> StreamChecks<'a> {
    fn new(pool: &'a Pool, seed: u64, most: usize) -> Result<Self> {
        let (rank, world) = (pool.rank(), pool.world());
        // Ranks may give the same communicator different SM budgets.
        let concurrent = |lane| (lane == 0).then_some(LANES as u32 + rank % 3);
        let lanes: Vec<CommunicatorStream> = (0..LANES)
            .map(|lane| CommunicatorStream::new(pool, most, concurrent(lane)))
            .collect::<Result<_>>()?;
        pool.commit()?;
        let part = most / world as usize / 16 * 16;
        for (nth, lane) in (0_u64..).zip(&lanes) {
            // Longer data repeats.
            let count = (most + SHIFTS).min(1 << 20);
            let all: Vec<Vec<u8>> =
                (0..world).map(|rank| finite(random(seed, nth), rank, DTYPE, count)).collect();
            let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
            let sum = reduce(&all, DTYPE, ReduceOp::Sum);
            for at in (0..2 * (most + SHIFTS)).step_by(2 * count) {
                let bytes = (2 * count).min(2 * (most + SHIFTS) - at);
                upload(pool, lane.from.address() + at as u64, &all[rank as usize][..bytes])?;
                upload(pool, lane.wanted.address() + at as u64, &sum[..bytes])?;
            }
            let splits: Vec<u8> = (0..world).flat_map(|_| (part as u64).to_le_bytes()).collect();
            upload(pool, lane.splits.address(), &splits)?;
        }
        Ok(Self { pool, tools: Tools::new(pool)?, lanes, part, cases: 0 })
    }

    /// An all-reduce whose size and shift depend on `number`, or an all-to-all.
    fn call(&mut self, lane: usize, name: u64, number: u64, most: usize) -> Result<()> {
        self.cases += 1;
        let CommunicatorStream { comm, stream, from, to, exchanged, wanted, splits, .. } =
            &self.lanes[lane];
        if (number >> 50).is_multiple_of(4) {
            let (to, null) = (exchanged.address() as *mut u8, std::ptr::null_mut());
            let (length, capacity) = (2 * most, 2 * most);
            let rows = SplitRows { dtype: DType::U8, row: 1, length, capacity };
            let input = splits.address() as *const u8;
            let splits = SplitsAt { input, output: null, offsets: null, dtype: DType::I64 };
            // SAFETY: both blocks are this long; so they are below.
            unsafe {
                let from = from.address() as *const u8;
                comm.all_to_all_v_splits_at(to, from, &rows, &splits, stream)
            }?;
            return self.compare_own(lane, name);
        }
        if (number >> 50) % 4 == 1 {
            // SAFETY: both blocks are this long, and so many parts are no longer.
            unsafe {
                let (to, from) = (exchanged.address() as *mut u8, from.address() as *const u8);
                comm.all_to_all_at(to, from, self.part, DType::U8, stream)
            }?;
            return self.compare_own(lane, name);
        }
        let count = most - (number >> 8) as usize % (most >> (number >> 61));
        let shift = ((number >> 30) as usize % SHIFTS) & !7;
        let (to, from) = (to.address(), from.address() + 2 * shift as u64);
        // SAFETY: both blocks are this long.
        unsafe {
            let (to, from) = (to as *mut u8, from as *const u8);
            comm.all_reduce_at(to, from, count, DTYPE, ReduceOp::Sum, stream)
        }?;
        self.tools.compare(to, wanted.address() + 2 * shift as u64, 2 * count, name, stream)
    }

    /// Compares what this rank sent to itself; it does not have the inputs of peers.
    fn compare_own(&self, lane: usize, name: u64) -> Result<()> {
        let CommunicatorStream { stream, from, exchanged, .. } = &self.lanes[lane];
        let own = (self.pool.rank() as usize * self.part) as u64;
        let (got, sent) = (exchanged.address() + own, from.address() + own);
        self.tools.compare(got, sent, self.part, name, stream)
    }

    fn synchronize(&self) -> Result<()> {
        self.lanes.iter().try_for_each(|lane| lane.comm.synchronize(&lane.stream))
    }

    /// The communicators in the order in which they make their calls in a round, which differs from rank to rank.
    fn order(&self, number: u64) -> [usize; LANES] {
        let mut order = std::array::from_fn(|lane| lane);
        order.sort_by_key(|lane| random(number ^ u64::from(self.pool.rank()), *lane as u64));
        order
    }

    fn calls(&mut self, seed: u64, rounds: u64, most: usize, how: How) -> Result<()> {
        for round in 0..rounds {
            let number = random(seed ^ 21, round);
            let usual = std::array::from_fn(|lane| lane);
            if how == How::Moving {
                let streams: [Stream; LANES] = usual.map(|lane| self.lanes[lane].stream);
                for (lane, stream) in self.lanes.iter_mut().zip(streams.iter().cycle().skip(1)) {
                    lane.stream = *stream;
                }
            }
            for lane in if how == How::OneByOne { usual } else { self.order(number) } {
                let number = random(number, lane as u64);
                self.follow(lane)?;
                // Sometimes two calls in a row.
                for call in 0..1 + (number & 1) {
                    self.call(lane, round, random(number, 5 + call), most)?;
                    if how == How::OneByOne {
                        self.synchronize()?;
                    }
                }
                let driver = self.pool.driver();
                self.lanes[lane].compared = Some(driver.record_event(self.lanes[lane].stream)?);
            }
            if round % 16 == 15 {
                self.synchronize()?;
            }
        }
        self.synchronize()
    }

    /// Results are written only where no comparison is under way, whatever stream the call is on.
    fn follow(&mut self, lane: usize) -> Result<()> {
        let (driver, lane) = (self.pool.driver(), &mut self.lanes[lane]);
        let Some(compared) = lane.compared.take() else { return Ok(()) };
        let waits = driver.wait_event(lane.stream, &compared);
        driver.release_event(compared);
        waits
    }

    /// A call waits for the communicator's last call on another stream, which one rank holds up, although a call on a
    /// third stream was captured between the two.
    fn turns(&mut self, seed: u64, most: usize) -> Result<()> {
        let [held, captured, next] = [0, 1, 2].map(|lane: usize| self.lanes[lane].stream);
        for turn in 0..TURNS {
            let number = random(seed ^ 25, turn) & !(3 << 50);
            self.lanes[0].stream = held;
            if u64::from(self.pool.rank()) == turn % u64::from(self.pool.world()) {
                self.tools.pause(PAUSE, &held)?;
            }
            self.call(0, 3000 + turn, number | REDUCES, most)?;
            self.lanes[0].stream = captured;
            let graph = CallGraph::capture(self.pool, captured, || {
                self.call(0, 4000 + turn, number | REDUCES, most)
            });
            // The output is another one than that compared on the other stream.
            self.lanes[0].stream = next;
            self.call(0, 5000 + turn, number | EXCHANGES, most)?;
            self.synchronize()?;
            graph?.destroy(self.pool)?;
        }
        self.lanes[0].stream = held;
        Ok(())
    }

    /// S2, S8: graphs of each communicator, and one of all, are launched without a pause on all streams.
    fn graphs(&mut self, seed: u64, launches: u64, most: usize) -> Result<()> {
        let pool = self.pool;
        let mut captured: [Vec<CallGraph>; LANES] = std::array::from_fn(|_| Vec::new());
        for (lane, graphs) in captured.iter_mut().enumerate() {
            for nth in 0..GRAPHS as u64 {
                let stream = self.lanes[lane].stream;
                let number = random(seed ^ 22, 10 * lane as u64 + nth);
                graphs.push(CallGraph::capture(pool, stream, || {
                    (0..3).try_for_each(|call| {
                        self.call(lane, 1000 + nth, random(number, call), most)
                    })
                })?);
            }
        }
        // Calls of all communicators in turn, on one stream.
        let usual: Vec<Stream> = self.lanes.iter().map(|lane| lane.stream).collect();
        let first = usual[0];
        self.lanes.iter_mut().for_each(|lane| lane.stream = first);
        let of_all = CallGraph::capture(pool, first, || {
            (0..2 * LANES).try_for_each(|call| {
                self.call(call % LANES, 2000, random(seed ^ 23, call as u64), most)
            })
        });
        self.lanes.iter_mut().zip(usual).for_each(|(lane, stream)| lane.stream = stream);
        let of_all = of_all?;
        for launch in 0..launches {
            let number = random(seed ^ 24, launch);
            for lane in self.order(number) {
                let nth = random(number, lane as u64) as usize % GRAPHS;
                captured[lane][nth].launch(pool, self.lanes[lane].stream)?;
                self.cases += 3;
            }
            if launch % 16 == 15 {
                // A graph with calls of all communicators waits for what each has under way.
                self.synchronize()?;
                of_all.launch(pool, self.lanes[0].stream)?;
                self.synchronize()?;
                self.cases += 2 * LANES as u64;
            }
        }
        self.synchronize()?;
        captured.into_iter().flatten().chain([of_all]).try_for_each(|graph| graph.destroy(pool))
    }
}
