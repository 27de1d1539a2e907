//! Times of a lane's calls: pairs of alloc and free, compared with the `offset-allocator` crate, and real
//! traces.
//!
//! `steady` keeps 10,000 live blocks of 512 B to 1 MiB; each iteration frees one of them and allocates
//! another. `by address` does the same for a lane whose blocks are freed by their addresses. `same` allocates
//! and frees one size repeatedly. Every allocator is behind a mutex, as in a pool; with two threads each
//! thread has an allocator of its own (rule D7).

use std::hint::black_box;
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use offset_allocator::{Allocation, Allocator};
use symmpool_allocator::Stream;
use symmpool_allocator::lane::{
    AllocationRequest, BlockKey, LaneConfig, LaneState, NoBacking, UNIT,
};
use symmpool_allocator::trace::{Trace, TraceOp};

const LIVE: usize = 10_000;
const RANGE: u64 = 1 << 40;

/// Marsaglia's xorshift generator, so that every run has the same blocks.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0) * u128::from(end)) >> 64) as u64
    }

    fn bytes(&mut self) -> u64 {
        512 + self.below((1 << 20) - 511)
    }
}

/// The allocators that are compared.
trait Placing: Send {
    type Block: Copy + Send;

    fn new() -> Self;
    fn alloc(&mut self, bytes: u64) -> Self::Block;
    fn free(&mut self, block: Self::Block);
}

impl Placing for LaneState {
    type Block = BlockKey;

    fn new() -> Self {
        LaneState::new(LaneConfig::symmetric("bench"), RANGE, 2 << 20).expect("a valid lane")
    }

    fn alloc(&mut self, bytes: u64) -> BlockKey {
        let request = AllocationRequest { bytes, align: 512, stream: Stream::DEFAULT, site: None };
        LaneState::alloc(self, request, &mut NoBacking).expect("room for the block").key
    }

    fn free(&mut self, block: BlockKey) {
        LaneState::free(self, block, None, &mut NoBacking).expect("a live block");
    }
}

/// A lane whose blocks are named by their offsets, as by a caller that keeps addresses.
struct ByAddress(LaneState);

impl Placing for ByAddress {
    type Block = u64;

    fn new() -> Self {
        Self(<LaneState as Placing>::new())
    }

    fn alloc(&mut self, bytes: u64) -> u64 {
        let request = AllocationRequest { bytes, align: 512, stream: Stream::DEFAULT, site: None };
        self.0.alloc(request, &mut NoBacking).expect("room for the block").offset
    }

    fn free(&mut self, block: u64) {
        let key = self.0.block_at(block).expect("a live block");
        self.0.free(key, None, &mut NoBacking).expect("a live block");
    }
}

impl Placing for Allocator {
    type Block = Allocation;

    fn new() -> Self {
        // Offsets and sizes count in `UNIT`s, as a lane's do; 16 GiB is twice what the live blocks take.
        Allocator::new((16_u64 << 30).div_ceil(UNIT) as u32)
    }

    fn alloc(&mut self, bytes: u64) -> Allocation {
        self.allocate(bytes.div_ceil(UNIT) as u32).expect("room for the block")
    }

    fn free(&mut self, block: Allocation) {
        Allocator::free(self, block);
    }
}

/// An allocator with [`LIVE`] blocks that has been used for a while.
struct Filled<P: Placing> {
    placing: Mutex<P>,
    blocks: Vec<P::Block>,
    random: Random,
}

impl<P: Placing> Filled<P> {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let mut placing = P::new();
        let blocks = (0..LIVE).map(|_| placing.alloc(random.bytes())).collect();
        let mut filled = Self { placing: Mutex::new(placing), blocks, random };
        for _ in 0..20 * LIVE {
            filled.replace();
        }
        filled
    }

    /// Frees a block and allocates another.
    fn replace(&mut self) {
        let at = self.random.below(LIVE as u64) as usize;
        let bytes = self.random.bytes();
        self.placing.lock().expect("no panic").free(self.blocks[at]);
        self.blocks[at] = self.placing.lock().expect("no panic").alloc(black_box(bytes));
    }

    /// Allocates a block and frees it.
    fn same(&mut self) {
        let block = self.placing.lock().expect("no panic").alloc(black_box(64 << 10));
        self.placing.lock().expect("no panic").free(black_box(block));
    }
}

/// Makes `iterations` replacements on each of two threads, which have an allocator each. Returns the time
/// until both are done.
fn two_threads<P: Placing>(filled: &mut [Filled<P>; 2], iterations: u64) -> Duration {
    let start = Barrier::new(3);
    thread::scope(|scope| {
        let threads = filled.each_mut().map(|filled| {
            let start = &start;
            scope.spawn(move || {
                start.wait();
                for _ in 0..iterations {
                    filled.replace();
                }
            })
        });
        start.wait();
        let began = Instant::now();
        for thread in threads {
            thread.join().expect("no panic");
        }
        began.elapsed()
    })
}

fn pairs<P: Placing>(criterion: &mut Criterion, name: &str) {
    let mut filled = Filled::<P>::new(1);
    let mut group = criterion.benchmark_group("steady");
    group.bench_function(BenchmarkId::new(name, "1 thread"), |b| b.iter(|| filled.replace()));
    let mut two = [2, 3].map(Filled::<P>::new);
    group.bench_function(BenchmarkId::new(name, "2 threads"), |b| {
        b.iter_custom(|iterations| two_threads(&mut two, iterations));
    });
    group.finish();
    let mut group = criterion.benchmark_group("same");
    group.bench_function(name, |b| b.iter(|| filled.same()));
    group.finish();
}

/// Replays traces on new lanes. Throughput is in events.
fn replay(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("replay");
    for name in ["train_gpt_small", "serve_kv"] {
        let file = format!("{}/../tests/traces/{name}.csv.gz", env!("CARGO_MANIFEST_DIR"));
        let trace = Trace::open(file).expect("the trace of the tests");
        group.throughput(Throughput::Elements(trace.ops().len() as u64));
        group.bench_function(name, |b| b.iter(|| events(&trace)));
    }
    group.finish();
}

fn events(trace: &Trace) -> LaneState {
    let mut lane = <LaneState as Placing>::new();
    let mut blocks = vec![None; trace.slots() as usize];
    for &op in trace.ops() {
        match op {
            TraceOp::Alloc { slot, bytes, stream } => {
                let stream = Stream::numbered(u64::from(stream));
                let request = AllocationRequest { bytes, align: 512, stream, site: None };
                let placed = lane.alloc(request, &mut NoBacking).expect("room for the block");
                blocks[slot as usize] = Some(placed.key);
            }
            TraceOp::Free { slot } => {
                let key = blocks[slot as usize].expect("a live block");
                lane.free(key, None, &mut NoBacking).expect("a live block");
            }
            TraceOp::FreeUnordered { .. }
            | TraceOp::Record { .. }
            | TraceOp::Commit
            | TraceOp::Trim => {
                panic!("not in these traces")
            }
        }
    }
    lane
}

fn lanes(criterion: &mut Criterion) {
    pairs::<LaneState>(criterion, "lane");
    pairs::<ByAddress>(criterion, "by address");
    pairs::<Allocator>(criterion, "offset-allocator");
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(50)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3));
    targets = lanes, replay
}
criterion_main!(benches);
