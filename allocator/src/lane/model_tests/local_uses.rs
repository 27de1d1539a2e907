//! Uses of blocks on streams of this rank alone: they change no place, and reuses wait for them.

use proptest::prelude::*;

use super::log::{LaneCall, Log};
use super::ranks::ModelRank;
use super::script::{KIB, MIB, STREAMS, lane, ops};
use crate::driver::Stream;
use crate::lane::{AllocationRequest, BlockKey, LaneConfig, LaneState};
use crate::testing::SplitMix64;

/// The first number of a stream that the lane's sequence does not name.
const SIDE: u64 = 100;

/// A block that was handed out: its key, where it lies, and the streams of this rank that use it, with the call behind which
/// they do at the earliest.
struct Live {
    key: BlockKey,
    range: (u64, u64),
    stream: u64,
    uses: Vec<u64>,
}

/// Memory that was freed, by whom it was used, and the number of calls until then.
struct Freed {
    range: (u64, u64),
    uses: Vec<u64>,
    since: usize,
}

fn overlap(a: (u64, u64), b: (u64, u64)) -> bool {
    a.0 < b.1 && b.0 < a.1
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    // D1: a rank that records uses, and one that records none, are at the same places with the same digests.
    #[test]
    fn uses_change_no_place(lane in lane(), ops in ops(150), seed in any::<u64>()) {
        let (mut plain, mut noting) = (ModelRank::new(seed, lane.clone()), ModelRank::new(seed, lane));
        let mut random = SplitMix64::new(seed);
        for op in ops {
            for _ in 0..random.next() % 3 {
                let count = noting.live.len() as u64;
                if count > 0 {
                    let key = noting.live[(random.next() % count) as usize];
                    let stream = Stream::numbered(SIDE + random.next() % 80);
                    noting.lane.note_use(key, stream, &mut Log::default()).unwrap();
                }
            }
            prop_assert_eq!(plain.call(op), noting.call(op));
        }
    }

    // D4: whoever gets memory that a stream of this rank has used waits for that stream, up to the free.
    #[test]
    fn a_reuse_waits_for_uses(seed in any::<u64>(), unordered in any::<bool>(), fails in any::<bool>()) {
        let (mut random, mut log) = (SplitMix64::new(seed), Log::default());
        let config = LaneConfig::symmetric("test").limit(64 * MIB);
        let mut lane = LaneState::new(config, 256 * MIB, 64 * KIB).unwrap();
        let (mut live, mut freed): (Vec<Live>, Vec<Freed>) = (Vec::new(), Vec::new());
        for _ in 0..200 {
            let stream = random.next() % STREAMS;
            let nth = random.next() as usize;
            match random.next() % 8 {
                0..3 => {
                    if fails && random.next().is_multiple_of(8) {
                        log.fail_after = Some((random.next() % 3) as usize);
                    }
                    let request = AllocationRequest {
                        bytes: random.next() % (4 * MIB),
                        align: 1,
                        stream: Stream::numbered(stream),
                        site: None,
                    };
                    let placed = lane.alloc(request, &mut log);
                    log.fail_after = None;
                    let Ok(placed) = placed else { continue };
                    let range = (placed.offset, placed.offset + placed.bytes);
                    for gone in freed.iter().filter(|gone| overlap(gone.range, range)) {
                        for used in gone.uses.iter().filter(|used| **used != stream) {
                            prop_assert!(
                                log.waits(stream, *used, gone.since),
                                "stream {stream} gets what {used} uses"
                            );
                        }
                    }
                    // The rest of what was freed there still has to be waited for, by others.
                    let cut = |gone: Freed| {
                        let (start, end) = gone.range;
                        let parts = [(start, range.0.min(end)), (range.1.max(start), end)];
                        let parts = parts.into_iter().filter(|(from, to)| from < to);
                        parts
                            .map(|range| Freed { range, uses: gone.uses.clone(), since: gone.since })
                            .collect::<Vec<_>>()
                    };
                    freed = freed.into_iter().flat_map(cut).collect();
                    live.push(Live { key: placed.key, range, stream, uses: Vec::new() });
                }
                3..5 if !live.is_empty() => {
                    let at = nth % live.len();
                    let used = SIDE + random.next() % 3;
                    let within = live[at].range.0 + random.next() % (live[at].range.1 - live[at].range.0);
                    let noted = lane.note_use_at(within, Stream::numbered(used), &mut log);
                    prop_assert!(noted.unwrap());
                    live[at].uses.push(used);
                }
                5..7 if !live.is_empty() => {
                    let gone = live.swap_remove(nth % live.len());
                    let since = log.calls.len();
                    if unordered {
                        lane.free_unordered(gone.key, None, &mut log).unwrap();
                    } else {
                        lane.free(gone.key, None, &mut log).unwrap();
                    }
                    let _ = gone.stream;
                    freed.push(Freed { range: gone.range, uses: gone.uses, since });
                }
                _ => {
                    let deferred = lane.deferred_frees(usize::MAX);
                    lane.reclaim(&deferred, &mut log).unwrap();
                }
            }
            log.assert_waits_make_sense();
        }
        // Every event is given back in the end.
        lane.release_events(&mut log);
        let count = |wanted: fn(&LaneCall) -> bool| log.calls.iter().filter(|call| wanted(call)).count();
        prop_assert_eq!(
            count(|call| matches!(call, LaneCall::Record { .. })),
            count(|call| matches!(call, LaneCall::Release { .. }))
        );
    }
}

#[test]
fn a_stream_that_is_forgotten_is_not_used_again() {
    let mut log = Log::default();
    let mut lane = LaneState::new(LaneConfig::local("test"), 64 * MIB, 64 * KIB).unwrap();
    let request = |stream| AllocationRequest {
        bytes: 1000,
        align: 1,
        stream: Stream::numbered(stream),
        site: None,
    };
    let block = lane.alloc(request(1), &mut log).unwrap();
    lane.note_use(block.key, Stream::numbered(SIDE), &mut log).unwrap();
    lane.forget_stream(Stream::numbered(SIDE), None, &mut log).unwrap();
    let calls = log.calls.len();
    lane.free(block.key, None, &mut log).unwrap();
    assert_eq!(log.calls.len(), calls, "the event was recorded when the stream was forgotten");
    let again = lane.alloc(request(1), &mut log).unwrap();
    assert_eq!(again.offset, block.offset);
    assert!(log.waits(1, SIDE, 0));
}

#[test]
fn threads_that_share_the_handle_of_their_own_streams_wait_for_each_other() {
    let mut log = Log::default();
    let mut lane = LaneState::new(LaneConfig::local("test"), 64 * MIB, 64 * KIB).unwrap();
    let own = Stream::PER_THREAD;
    let request = AllocationRequest { bytes: 1000, align: 1, stream: own, site: None };
    for round in 0..3 {
        let block = lane.alloc(request, &mut log).unwrap();
        let waits = |call: &&LaneCall| matches!(call, LaneCall::Wait { stream: 2, .. });
        assert_eq!(log.calls.iter().filter(waits).count(), round);
        lane.free(block.key, None, &mut log).unwrap();
    }
}

/// A block that a stream has used, which is captured when the block is freed in order: whoever gets its memory waits for what
/// that stream was given before the capture.
#[test]
fn a_reuse_waits_for_what_came_before_a_capture() {
    let mut log = Log::default();
    let mut lane = LaneState::new(LaneConfig::symmetric("test"), 64 * MIB, 64 * KIB).unwrap();
    let request = |stream| AllocationRequest {
        bytes: 1000,
        align: 1,
        stream: Stream::numbered(stream),
        site: None,
    };
    let block = lane.alloc(request(1), &mut log).unwrap();
    lane.note_use(block.key, Stream::numbered(SIDE), &mut log).unwrap();
    log.captured = vec![SIDE];
    lane.free(block.key, None, &mut log).unwrap();
    // Nothing can be recorded yet.
    let since = log.calls.len();
    let refused = lane.alloc(request(1), &mut log).unwrap_err();
    assert!(refused.is_invalid_state() && refused.to_string().contains("0x64"), "{refused}");
    log.captured.clear();
    let again = lane.alloc(request(1), &mut log).unwrap();
    assert_eq!(again.offset, block.offset, "it changes no place");
    assert!(log.waits(1, SIDE, since));
    lane.free(again.key, None, &mut log).unwrap();
    // A stream that goes away is recorded before, and what it is captured for at its end is not waited for.
    for captured in [false, true] {
        let block = lane.alloc(request(1), &mut log).unwrap();
        lane.note_use(block.key, Stream::numbered(SIDE), &mut log).unwrap();
        log.captured = vec![SIDE];
        lane.free(block.key, None, &mut log).unwrap();
        if !captured {
            log.captured.clear();
        }
        let since = log.calls.len();
        lane.forget_stream(Stream::numbered(SIDE), None, &mut log).unwrap();
        let again = lane.alloc(request(1), &mut log).unwrap();
        assert_eq!(log.waits(1, SIDE, since), !captured);
        lane.free(again.key, None, &mut log).unwrap();
        log.captured.clear();
    }
    lane.release_events(&mut log);
    let count =
        |wanted: fn(&LaneCall) -> bool| log.calls.iter().filter(|call| wanted(call)).count();
    assert_eq!(
        count(|call| matches!(call, LaneCall::Record { .. })),
        count(|call| matches!(call, LaneCall::Release { .. }))
    );
}

/// Uses on `CU_STREAM_PER_THREAD` keep one event for each block and thread, however often they are noted.
#[test]
fn uses_of_a_thread_keep_one_event() {
    let mut log = Log::default();
    let mut lane = LaneState::new(LaneConfig::local("test"), 64 * MIB, 64 * KIB).unwrap();
    let request = |stream| AllocationRequest {
        bytes: 1000,
        align: 1,
        stream: Stream::numbered(stream),
        site: None,
    };
    let block = lane.alloc(request(1), &mut log).unwrap();
    let kept = |log: &Log| {
        let count =
            |wanted: fn(&LaneCall) -> bool| log.calls.iter().filter(|call| wanted(call)).count();
        count(|call| matches!(call, LaneCall::Record { .. }))
            - count(|call| matches!(call, LaneCall::Release { .. }))
    };
    for _ in 0..10 {
        lane.note_use(block.key, Stream::PER_THREAD, &mut log).unwrap();
        assert_eq!(kept(&log), 1);
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..10 {
                lane.note_use(block.key, Stream::PER_THREAD, &mut log).unwrap();
            }
        });
    });
    assert_eq!(kept(&log), 2);
    lane.free(block.key, None, &mut log).unwrap();
    let since = log.calls.len();
    lane.alloc(request(1), &mut log).unwrap();
    let waits = log.calls[since..].iter().filter(|call| matches!(call, LaneCall::Wait { .. }));
    assert_eq!(waits.count(), 2, "the last event of each thread");
    assert_eq!(kept(&log), 0);
}
