//! Replays: equal placements whatever differs between ranks, and divergences located exactly.

use std::time::{Duration, Instant};

use super::*;
use crate::driver::Stream;
use crate::lane::{AllocationRequest, BlockKey, LaneEvent, LaneState, NoBacking, WindowPolicy};
use crate::testing::SplitMix64;

fn open(name: &str) -> Trace {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/traces");
    Trace::open(format!("{folder}/{name}.csv.gz")).expect("a trace of this repository")
}

fn play(trace: &Trace, options: &ReplayOptions) -> ReplayOutcome {
    let outcome = replay(trace, options).expect("the options make sense");
    assert_eq!(outcome.ranks, options.ranks);
    outcome
}

fn play_well(trace: &Trace, options: &ReplayOptions) -> ReplayOutcome {
    let outcome = play(trace, options);
    assert!(outcome.error.is_none(), "{:?}", outcome.error);
    assert!(outcome.digests_equal);
    assert_eq!(outcome.events, trace.ops().len() as u64);
    assert!(outcome.windows > 0 && outcome.segments >= outcome.windows);
    assert!(outcome.peak_reserved_bytes >= outcome.peak_live_bytes);
    outcome
}

#[test]
fn real_traces_are_placed_alike_and_tightly() {
    for name in ["generate_llama", "serve_kv", "train_gpt_small"] {
        let trace = open(name);
        let options = ReplayOptions { address_seed: Some(1), ..ReplayOptions::new(2) };
        let contiguous = play_well(&trace, &options);
        let ratio = contiguous.peak_reserved_bytes as f64 / contiguous.peak_live_bytes as f64;
        assert!(ratio < 1.15, "{name}: {ratio} times the live bytes reserved");
        let policy = WindowPolicy::PerSegment;
        let separate = play_well(&trace, &ReplayOptions { policy, ..options });
        assert_ne!(contiguous.digest, separate.digest, "{name}");
    }
}

#[test]
fn addresses_and_stream_handles_change_nothing() {
    // D1, D3
    let trace = Trace::synthetic(2_000, 11);
    let with = |address_seed| ReplayOptions { address_seed, ..ReplayOptions::new(8) };
    let expected = play_well(&trace, &with(None)).digest;
    for seed in 0..100 {
        assert_eq!(play_well(&trace, &with(Some(seed))).digest, expected, "seed {seed}");
    }
}

#[test]
fn the_drivers_place_alike() {
    // D1
    let trace = Trace::synthetic(2_000, 5);
    let sim = ReplayOptions::new(3);
    let host = ReplayOptions { driver: ReplayDriver::Host, address_seed: Some(9), ..sim.clone() };
    assert_eq!(play_well(&trace, &sim).digest, play_well(&trace, &host).digest);
}

#[test]
fn the_order_of_unordered_frees_changes_nothing() {
    // D5
    let trace = Trace::synthetic(8_000, 21);
    let with = |unordered| ReplayOptions { unordered, ..ReplayOptions::new(4) };
    let expected = play_well(&trace, &with(Unordered::AsTraced)).digest;
    let mut delayed = Vec::new();
    for seed in 0..5 {
        let shuffled = play_well(&trace, &with(Unordered::Shuffled { seed }));
        assert_eq!(shuffled.digest, expected, "seed {seed}");
        delayed.push(play_well(&trace, &with(Unordered::Delayed { seed })).digest);
    }
    // If blocks return at other commits, later placements change, but alike on all ranks.
    assert!(delayed.iter().any(|digest| *digest != expected));
}

#[test]
fn hundreds_of_ranks() {
    let trace = Trace::synthetic(2_000, 2);
    play_well(&trace, &ReplayOptions { address_seed: Some(3), ..ReplayOptions::new(300) });
}

/// A replay on two lanes alone, of which one leaves out an operation. It finds where they diverge independently of
/// pools, commits and searches.
struct ReplayOracle {
    lane: LaneState,
    blocks: Vec<Option<BlockKey>>,
}

impl ReplayOracle {
    fn new(trace: &Trace) -> Self {
        let config = ReplayOptions::new(2).lane();
        let lane = LaneState::new(config, 1 << 39, 2 << 20).expect("a valid configuration");
        Self { lane, blocks: vec![None; trace.slots() as usize] }
    }

    fn step(&mut self, op: TraceOp) {
        let Self { lane, blocks } = self;
        let stream = |ordinal| Stream::numbered(u64::from(ordinal));
        match op {
            TraceOp::Alloc { slot, bytes, stream: on } => {
                let request =
                    AllocationRequest { bytes, align: 512, stream: stream(on), site: None };
                let placed = lane.alloc(request, &mut NoBacking).expect("there is room");
                blocks[slot as usize] = Some(placed.key);
            }
            TraceOp::Free { slot } => {
                if let Some(key) = blocks[slot as usize].take() {
                    lane.free(key, None, &mut NoBacking).expect("it is live");
                }
            }
            TraceOp::FreeUnordered { slot } => {
                if let Some(key) = blocks[slot as usize].take() {
                    lane.free_unordered(key, None, &mut NoBacking).expect("it is live");
                }
            }
            TraceOp::Record { slot, stream: on } => {
                if let Some(key) = blocks[slot as usize] {
                    lane.record_stream(key, stream(on), None).expect("it is live");
                }
            }
            TraceOp::Trim => {
                lane.trim(None);
            }
            TraceOp::Commit => {}
        }
    }

    fn commit(&mut self, freed: &[u64]) {
        self.lane.take_retired();
        self.lane.reclaim(freed, &mut NoBacking).expect("nothing to fail");
    }

    fn kind(&self, counter: u64) -> Option<crate::lane::EventKind> {
        self.lane.event(counter).map(|LaneEvent { kind, .. }| kind)
    }
}

/// The first event that differs when one rank leaves out operation `skip`, if any does.
fn expected_counter(trace: &Trace, skip: usize) -> Option<u64> {
    let (mut all, mut less) = (ReplayOracle::new(trace), ReplayOracle::new(trace));
    for (at, op) in trace.ops().iter().chain([&TraceOp::Commit]).enumerate() {
        all.step(*op);
        if at != skip {
            less.step(*op);
        }
        if *op == TraceOp::Commit {
            if all.lane.digest() != less.lane.digest() {
                let end = all.lane.counter().max(less.lane.counter());
                return (0..end).find(|&counter| all.kind(counter) != less.kind(counter));
            }
            let freed = less.lane.deferred_frees(usize::MAX);
            let mut common = all.lane.deferred_frees(usize::MAX);
            common.retain(|counter| freed.contains(counter));
            all.commit(&common);
            less.commit(&common);
        }
    }
    None
}

#[test]
fn every_rank_learns_where_one_of_them_diverged() {
    let trace = Trace::synthetic(4_000, 33);
    let mut random = SplitMix64::for_participant(1, 2);
    let mut located = 0;
    for round in 0..60 {
        let skip = random.below(trace.ops().len() as u64);
        if trace.ops()[skip as usize] == TraceOp::Commit {
            continue;
        }
        let expected = expected_counter(&trace, skip as usize);
        let rank = random.below(4) as u32;
        let diverge = Some((rank, skip));
        let options = ReplayOptions { diverge, address_seed: Some(round), ..ReplayOptions::new(4) };
        let outcome = play(&trace, &options);
        let op = trace.ops()[skip as usize];
        let Some(counter) = expected else {
            assert!(matches!(op, TraceOp::FreeUnordered { .. }), "{op:?} leaves no trace");
            assert!(outcome.digests_equal && outcome.error.is_none(), "D5: {:?}", outcome.error);
            continue;
        };
        let failure = outcome.error.expect("a divergence");
        assert!(!outcome.digests_equal);
        assert!(failure.error.is_diverged());
        assert!(failure.is_same_everywhere(), "{:?}", failure.groups);
        assert_eq!(failure.groups[0].ranks, [0, 1, 2, 3]);
        assert_eq!(failure.lane.as_deref(), Some("replay"));
        assert_eq!((failure.counter, failure.until), (Some(counter), None), "{op:?} at {skip}");
        assert_eq!(failure.error.ranks(), [rank]);
        assert!(failure.event >= skip);
        located += 1;
    }
    assert!(located >= 40, "{located}");
}

#[test]
fn a_divergence_older_than_the_history_is_located_roughly() {
    let trace = Trace::synthetic(3_000, 4);
    let ops = trace.ops().iter().copied().filter(|op| *op != TraceOp::Commit).collect();
    let trace = Trace { ops, ..trace };
    let skip = trace.ops().iter().position(|op| matches!(op, TraceOp::Alloc { .. })).unwrap_or(0);
    let expected = expected_counter(&trace, skip).expect("an allocation leaves a trace");
    let diverge = Some((1, skip as u64));
    let options = ReplayOptions { diverge, history: 64, ..ReplayOptions::new(3) };
    let failure = play(&trace, &options).error.expect("a divergence");
    assert!(failure.is_same_everywhere());
    let (from, until) = (failure.counter.unwrap_or(u64::MAX), failure.until.unwrap_or(0));
    assert!(from <= expected && expected <= until, "{expected} is not in {from}..={until}");
}

#[test]
fn a_divergence_within_a_full_history_is_located_exactly() {
    let trace = Trace::synthetic(4_000, 4);
    let skip = trace.ops().iter().rposition(|op| matches!(op, TraceOp::Alloc { .. })).unwrap_or(0);
    let expected = expected_counter(&trace, skip).expect("an allocation leaves a trace");
    let diverge = Some((0, skip as u64));
    let options = ReplayOptions { diverge, history: 1024, ..ReplayOptions::new(3) };
    let failure = play(&trace, &options).error.expect("a divergence");
    assert_eq!((failure.counter, failure.until), (Some(expected), None));
}

#[test]
fn a_missing_commit_ends_in_bounded_time() {
    let trace = Trace::read(&b"op,id,bytes,stream\nalloc,1,100,0\ncommit\n"[..]).unwrap();
    let timeout = Duration::from_secs(2);
    let options = ReplayOptions { diverge: Some((2, 1)), timeout, ..ReplayOptions::new(3) };
    let started = Instant::now();
    let failure = play(&trace, &options).error.expect("two ranks wait for the third's commit");
    assert!(failure.error.is_timeout() || failure.error.is_peer_lost(), "{}", failure.message);
    // The rank that gives up first leaves the gather, so the other may miss two ranks.
    assert!(failure.error.ranks().contains(&2), "{}", failure.message);
    let without_error = RankGroup { ranks: vec![2], message: None };
    assert!(!failure.is_same_everywhere() && failure.groups.contains(&without_error));
    assert!(started.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_limit_is_the_same_error_on_every_rank() {
    let trace = Trace::synthetic(4_000, 6);
    let options = ReplayOptions { limit: Some(256 << 20), ..ReplayOptions::new(4) };
    let outcome = play(&trace, &options);
    let failure = outcome.error.expect("more than 256 MiB are needed");
    assert!(failure.error.is_out_of_memory(), "{}", failure.message);
    assert!(failure.is_same_everywhere(), "{:?}", failure.groups);
    assert!(outcome.digests_equal, "up to the limit all ranks did the same");
    assert!(outcome.peak_reserved_bytes <= 256 << 20);
    let op = trace.ops()[failure.event as usize];
    assert!(matches!(op, TraceOp::Alloc { .. }), "{op:?}");
}

#[test]
fn nonsense_is_refused() {
    let trace = Trace::synthetic(10, 0);
    for options in [
        ReplayOptions::new(0),
        ReplayOptions { diverge: Some((2, 0)), ..ReplayOptions::new(2) },
        ReplayOptions { diverge: Some((0, 10)), ..ReplayOptions::new(2) },
    ] {
        assert!(replay(&trace, &options).unwrap_err().is_invalid_argument());
    }
    assert!(ReplayDriver::from_name("cuda").unwrap_err().is_invalid_argument());
}
