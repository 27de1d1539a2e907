//! Random programs on several ranks. Placement and windows are the same on every rank, whatever the addresses
//! are and in whatever order garbage collectors free. Peers read memory as it was written, through growth,
//! reuse, trims and moves.

use proptest::collection::vec;
use proptest::prelude::*;
use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::{Block, CommitReport, Driver, Group, Pool, Stream, Window};

use crate::ranks::ranks;

/// One step of a program that all ranks run.
#[derive(Clone, Copy, Debug)]
enum ProgramStep {
    /// Elements, lane, stream.
    Alloc(usize, usize, u64),
    /// Frees the nth live block, in order.
    Free(usize),
    /// Frees the nth live block without order: every rank does it at a time of its own.
    Forget(usize),
    /// Uses the nth live block on this stream too.
    Record(usize, u64),
    /// Bytes, lane, stream.
    Reserve(u64, usize, u64),
    Trim(usize),
    Commit,
}

fn op(largest: usize) -> impl Strategy<Value = ProgramStep> {
    prop_oneof![
        8 => (0..largest, 0..2usize, 0..3u64).prop_map(|(n, lane, on)| ProgramStep::Alloc(n, lane, on)),
        2 => (1..200usize, 0..2usize, 0..3u64).prop_map(|(n, lane, on)| ProgramStep::Alloc(n, lane, on)),
        5 => any::<usize>().prop_map(ProgramStep::Free),
        4 => any::<usize>().prop_map(ProgramStep::Forget),
        1 => (any::<usize>(), 0..3u64).prop_map(|(n, on)| ProgramStep::Record(n, on)),
        1 => (0..16u64 << 20, 0..2usize, 0..3u64)
            .prop_map(|(n, lane, on)| ProgramStep::Reserve(n, lane, on)),
        2 => (0..2usize).prop_map(ProgramStep::Trim),
        3 => Just(ProgramStep::Commit),
    ]
}

/// Results that must be equal on all ranks.
#[derive(Debug, Default, PartialEq)]
struct ProgramTrace {
    /// Counter and offset of each allocation.
    placed: Vec<(u64, u64)>,
    /// Bytes of each trim.
    trimmed: Vec<u64>,
    commits: Vec<(CommitReport, Vec<Window>)>,
    digests: Vec<u64>,
}

/// A rank that runs a program.
struct Runner {
    pool: Pool,
    /// Whether blocks are filled and compared.
    checked: bool,
    live: Vec<Block<u64>>,
    /// Blocks that this rank will free without order, at some time.
    forgotten: Vec<Block<u64>>,
    /// State of the random numbers that decide when. It differs from rank to rank.
    random: u64,
    trace: ProgramTrace,
}

/// How many live blocks a program has at most. Beyond that the oldest is freed in order.
const MAX_LIVE: usize = 24;

impl Runner {
    fn new(group: Group, driver: Driver, seed: u64, checked: bool) -> Self {
        let random = seed ^ u64::from(group.rank()).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let pool = Pool::builder(group)
            .driver(driver)
            .stride(1 << 36)
            .lane(LaneConfig::symmetric("first"))
            .lane(LaneConfig::symmetric("second").history(16))
            .build()
            .unwrap();
        let (live, forgotten) = (Vec::new(), Vec::new());
        Self { pool, checked, live, forgotten, random, trace: ProgramTrace::default() }
    }

    fn random(&mut self, below: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) as usize % below
    }

    fn run(mut self, program: &[ProgramStep]) -> ProgramTrace {
        for &op in program {
            self.step(op);
            // Sometimes the garbage collector runs.
            if self.random(3) == 0 {
                self.collect(2);
            }
        }
        self.step(ProgramStep::Commit);
        // Now all ranks free all forgotten blocks, each in its own order (D5).
        self.collect(usize::MAX);
        self.step(ProgramStep::Commit);
        assert_eq!(
            self.pool.stats().unwrap().lanes.iter().map(|(_, lane)| lane.deferred).sum::<u64>(),
            0
        );
        for block in self.live.drain(..) {
            block.free().unwrap();
        }
        for lane in 0..2 {
            self.step(ProgramStep::Trim(lane));
        }
        self.step(ProgramStep::Commit);
        assert_eq!(self.pool.stats().unwrap().allocated(), 0);
        assert_eq!(self.pool.stats().unwrap().reserved(), 0, "everything was trimmed");
        assert_eq!(self.pool.windows().list(), []);
        // Memory that was given back can be allocated again.
        self.step(ProgramStep::Alloc(1000, 0, 0));
        self.step(ProgramStep::Commit);
        self.trace
    }

    fn step(&mut self, op: ProgramStep) {
        let lane = |at: usize| self.pool.lanes().nth(at).unwrap();
        match op {
            ProgramStep::Alloc(count, at, on) => {
                let block = lane(at).alloc_on::<u64>(count, Stream::numbered(on)).unwrap();
                self.trace.placed.push((block.counter(), block.offset()));
                if self.checked {
                    block.write(&pattern(self.pool.rank(), &block)).unwrap();
                }
                self.live.push(block);
                if self.live.len() > MAX_LIVE {
                    self.live.remove(0).free().unwrap();
                }
            }
            ProgramStep::Free(nth) => {
                if let Some(block) = self.take(nth) {
                    block.free().unwrap();
                }
            }
            ProgramStep::Forget(nth) => {
                let block = self.take(nth);
                self.forgotten.extend(block);
            }
            ProgramStep::Record(nth, on) => {
                if !self.live.is_empty() {
                    let block = &self.live[nth % self.live.len()];
                    block.record_stream(Stream::numbered(on)).unwrap();
                }
            }
            ProgramStep::Reserve(bytes, at, on) => {
                lane(at).reserve_on(bytes, Stream::numbered(on)).unwrap();
            }
            ProgramStep::Trim(at) => {
                let bytes = lane(at).trim().unwrap();
                self.trace.trimmed.push(bytes);
            }
            ProgramStep::Commit => self.commit(),
        }
    }

    fn take(&mut self, nth: usize) -> Option<Block<u64>> {
        (!self.live.is_empty()).then(|| self.live.remove(nth % self.live.len()))
    }

    /// Frees at most `most` forgotten blocks, in an order that differs from rank to rank.
    fn collect(&mut self, most: usize) {
        for _ in 0..most.min(self.forgotten.len()) {
            let at = self.random(self.forgotten.len());
            self.forgotten.swap_remove(at).free_unordered().unwrap();
        }
    }

    fn commit(&mut self) {
        let report = self.pool.commit().unwrap();
        self.trace.commits.push((report, self.pool.windows().list().to_vec()));
        self.trace.digests.extend(self.pool.lanes().map(|lane| lane.digest().unwrap()));
        self.check_places();
        if self.checked {
            self.check_memory();
        }
    }

    /// Asserts that live blocks lie in windows and do not overlap.
    fn check_places(&self) {
        let blocks = self.live.iter().chain(&self.forgotten);
        let mut places: Vec<(u64, u64)> =
            blocks.clone().map(|block| (block.offset(), block.bytes().max(1))).collect();
        places.sort_unstable();
        for pair in places.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "blocks overlap: {pair:?}");
        }
        for block in blocks {
            assert!(self.pool.is_window(block.address(), block.bytes()), "{block:?}");
        }
    }

    /// Asserts that every rank's copy of every live block holds what that rank wrote.
    fn check_memory(&self) {
        for block in self.live.iter().chain(&self.forgotten) {
            assert_eq!(block.read().unwrap(), pattern(self.pool.rank(), block));
            if block.is_empty() {
                continue;
            }
            // Peers may have freed a forgotten block, but it is not reused before this rank has freed it too.
            for peer in 0..self.pool.world() {
                let expected = pattern(peer, block);
                let copy = block.peer_ptr(peer).unwrap() as *const u64;
                for at in [0, block.len() / 2, block.len() - 1] {
                    // SAFETY: `at` is below the block's length.
                    let place = unsafe { copy.add(at) };
                    // SAFETY: the block lies in windows, so the peer's copy is mapped; the commit
                    // ordered the peer's writes before this.
                    let value = unsafe { place.read_volatile() };
                    assert_eq!(value, expected[at], "rank {peer}'s copy of {block:?} at {at}");
                }
            }
        }
        // No rank writes again before all have read.
        let group = self.pool.group();
        group.all_gather("read", b"", group.deadline()).unwrap();
    }
}

/// Data that `rank` writes to a block. The counter makes two uses of the same memory differ.
fn pattern(rank: u32, block: &Block<u64>) -> Vec<u64> {
    let seed = (u64::from(rank) << 56) | (block.counter() << 24) | (block.offset() >> 40 << 20);
    (0..block.len() as u64).map(|at| seed + at).collect()
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(48))]

    #[test]
    fn places_are_the_same_on_every_rank(
        world in 2..=6u32,
        seed in any::<u64>(),
        program in vec(op(1 << 20), 1..80),
    ) {
        // D1, D5, D6: addresses (each rank's driver has its own seed) and the order of unordered
        // frees differ; counters, offsets, windows and digests do not.
        let traces = ranks(world, |group| {
            let driver = Driver::sim(seed.wrapping_add(u64::from(group.rank())));
            Runner::new(group, driver, seed, false).run(&program)
        });
        for trace in &traces[1..] {
            prop_assert_eq!(trace, &traces[0]);
        }
    }
}

proptest! {
    #![proptest_config(config(12))]

    #[test]
    fn peers_read_what_was_written(
        world in 2..=3u32,
        seed in any::<u64>(),
        program in vec(op(48 << 10), 1..60),
    ) {
        let traces = ranks(world, |group| {
            Runner::new(group, Driver::host().unwrap(), seed, true).run(&program)
        });
        for trace in &traces[1..] {
            prop_assert_eq!(trace, &traces[0]);
        }
    }
}

#[test]
fn a_released_range_holds_new_memory_when_it_is_used_again() {
    // D6: a range is used again only after a commit, and never with a peer's old memory in it.
    ranks(3, |group| {
        let lane = LaneConfig::symmetric("tight").range(16 << 20);
        let rank = u64::from(group.rank());
        let driver = Driver::host().unwrap();
        let pool = Pool::builder(group).driver(driver).stride(1 << 30).lane(lane).build().unwrap();
        let count = 12 << 17;
        for round in 0..4u64 {
            let block = pool.alloc::<u64>(count).unwrap();
            // New memory is zero, so nothing of the previous round is left.
            assert!(block.read().unwrap().iter().all(|&value| value == 0), "round {round}");
            block.write(&vec![rank * 100 + round + 1; count]).unwrap();
            let report = pool.commit().unwrap();
            assert!(report.windows_added > 0);
            for peer in 0..3 {
                let copy = block.peer_ptr(peer).unwrap();
                // SAFETY: the last element of a block that is a window.
                let last = unsafe { copy.add(count - 1) };
                // SAFETY: `last` is the last element of the peer's block, which is a window; the commit ordered the
                // peer's writes before this.
                assert_eq!(unsafe { last.read_volatile() }, u64::from(peer) * 100 + round + 1);
            }
            pool.group().all_gather("read", b"", pool.group().deadline()).unwrap();
            block.free().unwrap();
            assert_eq!(pool.default_lane().trim().unwrap(), 16 << 20);
            assert!(
                pool.alloc::<u64>(count).is_err_and(|error| error.is_out_of_memory()),
                "the range is used again only after a commit"
            );
            assert!(pool.commit().unwrap().windows_removed > 0);
            assert_eq!(pool.windows().list(), []);
        }
    });
}
