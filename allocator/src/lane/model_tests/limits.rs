//! Bad arguments, stale keys, failures, and regressions.

use super::log::{LaneCall, Log};
use super::script::{KIB, MIB};
use crate::driver::Stream;
use crate::lane::{
    AllocationRequest, BlockKey, BlockState, LaneConfig, LaneState, MAX_LANE_BYTES, NoBacking,
    Placed, WindowPolicy,
};
use crate::{Error, Result};

fn lane(config: LaneConfig, range: u64) -> LaneState {
    LaneState::new(config, range, 2 * MIB).unwrap()
}

fn symmetric() -> LaneConfig {
    LaneConfig::symmetric("test")
}

fn request(bytes: u64, align: u64, stream: u64) -> AllocationRequest {
    AllocationRequest { bytes, align, stream: Stream::numbered(stream), site: None }
}

fn alloc(lane: &mut LaneState, bytes: u64, stream: u64, log: &mut Log) -> Placed {
    lane.alloc(request(bytes, 1, stream), log).unwrap()
}

fn assert_refused<T: std::fmt::Debug>(result: Result<T>, word: &str) {
    let error = result.unwrap_err();
    assert!(error.is_invalid_argument(), "{error}");
    assert!(error.to_string().contains(word), "{error}");
}

fn assert_full<T: std::fmt::Debug>(result: Result<T>, word: &str) {
    let error = result.unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert!(error.to_string().contains(word), "{error}");
}

#[test]
fn a_lane_is_built_of_sensible_numbers() {
    assert_refused(LaneState::new(symmetric(), MIB, 2 * MIB), "range below");
    assert_refused(LaneState::new(symmetric(), 0, 2 * MIB), "range below");
    assert_refused(LaneState::new(symmetric(), 64 * MIB, 3 * MIB), "power of two");
    assert_refused(LaneState::new(symmetric(), 64 * MIB, 0), "power of two");
    assert_refused(LaneState::new(symmetric(), 64 * MIB, 256), "power of two");
    assert_refused(LaneState::new(LaneConfig::local(""), 64 * MIB, 2 * MIB), "lane name");
    for (bytes, served) in [(64, true), (65, false), (90, false)] {
        let named = LaneState::new(LaneConfig::local("n".repeat(bytes)), 64 * MIB, 2 * MIB);
        assert_eq!(named.is_ok(), served, "a name of {bytes} bytes");
    }
    assert_refused(LaneState::new(symmetric().range(0), 64 * MIB, 2 * MIB), "a range of 0");
    let too_long = symmetric().range(MAX_LANE_BYTES + 1);
    assert_refused(LaneState::new(too_long, 64 * MIB, 2 * MIB), "can be served");
    LaneState::new(symmetric().range(MAX_LANE_BYTES), 64 * MIB, 2 * MIB).unwrap();
    // Range beyond what offsets can express is not used.
    let mut longest = lane(symmetric(), u64::MAX);
    assert_full(longest.alloc(request((1 << 40) + 1, 1, 0), &mut NoBacking), "larger than");
    let whole = longest.alloc(request(1 << 40, 1, 0), &mut NoBacking).unwrap();
    assert_eq!((whole.offset, whole.bytes), (0, 1 << 40));
    longest.assert_sound();
    longest.free(whole.key, None, &mut NoBacking).unwrap();
    longest.assert_sound();
}

#[test]
fn impossible_requests_are_refused_and_change_nothing() {
    let mut lane = lane(symmetric(), 64 * MIB);
    for align in [0, 3, 4 * MIB, 1 << 63] {
        assert_refused(lane.alloc(request(1, align, 0), &mut NoBacking), "alignment");
    }
    for bytes in [64 * MIB + 1, u64::MAX, u64::MAX - 511] {
        assert_full(lane.alloc(request(bytes, 1, 0), &mut NoBacking), "larger than");
        let stream = Stream::DEFAULT;
        assert_full(lane.reserve(bytes, stream, None, &mut NoBacking), "cannot reserve");
    }
    assert_eq!((lane.counter(), lane.digest(), lane.blocks().count()), (0, 0, 0));
    assert!(lane.failure().is_none(), "these are the same on every rank");
    let empty = lane.alloc(request(0, 2 * MIB, 0), &mut NoBacking).unwrap();
    assert_eq!(empty.bytes, 512);
    lane.free(empty.key, None, &mut NoBacking).unwrap();
    lane.reserve(64 * MIB, Stream::DEFAULT, None, &mut NoBacking).unwrap();
}

#[test]
fn a_65th_stream_is_refused() {
    let mut lane = lane(symmetric(), 1 << 32);
    for stream in 0..64 {
        alloc(&mut lane, KIB, stream, &mut Log::default());
    }
    assert_refused(lane.alloc(request(KIB, 1, 64), &mut NoBacking), "number 64");
    assert_refused(lane.reserve(KIB, Stream::numbered(64), None, &mut NoBacking), "number 64");
    let block = alloc(&mut lane, KIB, 63, &mut Log::default());
    assert_refused(lane.record_stream(block.key, Stream::numbered(64), None), "number 64");
}

#[test]
fn any_number_of_streams_is_served_if_they_are_forgotten() {
    let log = &mut Log::default();
    let mut lane = lane(symmetric(), 1 << 32);
    let first = alloc(&mut lane, MIB, 0, log);
    let mut places = Vec::new();
    for stream in 1..300 {
        let block = alloc(&mut lane, MIB, stream, log);
        lane.record_stream(first.key, Stream::numbered(stream), None).unwrap();
        lane.free(block.key, None, log).unwrap();
        lane.forget_stream(Stream::numbered(stream), None, log).unwrap();
        assert_eq!(lane.streams().count(), 1);
        places.push(block.offset);
        lane.assert_sound();
    }
    assert!(
        places.iter().all(|place| *place == places[0]),
        "each has the memory of the one before"
    );
    // A stream is not used after it was forgotten, and the next one waits for its work.
    for (at, call) in log.calls.iter().enumerate() {
        let (LaneCall::Record { stream, .. } | LaneCall::Wait { stream, .. }) = *call else {
            continue;
        };
        let later = |call: &LaneCall| match *call {
            LaneCall::Record { stream, .. } | LaneCall::Wait { stream, .. } => stream,
            _ => 0,
        };
        assert!(log.calls[at..].iter().all(|call| later(call) == 0 || later(call) >= stream));
    }
    for stream in 1..299 {
        assert!(log.waits(stream + 1, stream, 0), "stream {stream}");
    }
    log.assert_waits_make_sense();
    log.assert_waits_once();
}

#[test]
fn forgetting_an_unknown_stream_does_nothing() {
    let log = &mut Log::default();
    let mut lane = lane(symmetric(), 64 * MIB);
    alloc(&mut lane, KIB, 1, log);
    let (digest, calls) = (lane.digest(), log.calls.len());
    lane.forget_stream(Stream::numbered(2), None, log).unwrap();
    assert_eq!((lane.digest(), log.calls.len()), (digest, calls));
    log.fail_after = Some(0);
    lane.forget_stream(Stream::numbered(1), None, log).unwrap_err();
    assert!(lane.knows(Stream::numbered(1)), "an error leaves it as it was");
    lane.forget_stream(Stream::numbered(1), None, log).unwrap();
    assert!(!lane.knows(Stream::numbered(1)));
    assert_ne!(lane.digest(), digest, "ordinals follow from it");
}

#[test]
fn keys_of_freed_blocks_are_refused() {
    let log = &mut Log::default();
    let mut lane = lane(symmetric(), 64 * MIB);
    let a = alloc(&mut lane, KIB, 0, log);
    let b = alloc(&mut lane, KIB, 0, log);
    lane.free(a.key, None, log).unwrap();
    let events = (lane.counter(), lane.digest());
    assert_refused(lane.free(a.key, None, log), "double free");
    assert_refused(lane.free_unordered(a.key, None, log), "double free");
    assert_refused(lane.record_stream(a.key, Stream::DEFAULT, None), "double free");
    lane.free_unordered(b.key, None, log).unwrap();
    assert_refused(lane.free(b.key, None, log), "double free");
    assert_refused(lane.free_unordered(b.key, None, log), "double free");
    assert_eq!(lane.block_at(b.offset), None, "a deferred free leaves nothing to look up");
    assert_eq!((lane.counter(), lane.digest()), events, "refused calls are no events");
    // The table entry of `a` is used again, by a block with another counter.
    let c = alloc(&mut lane, KIB, 0, log);
    assert_eq!(c.offset, a.offset);
    assert_refused(lane.free(a.key, None, log), "double free");
    assert_refused(lane.free(BlockKey { id: c.key.id, counter: 999 }, None, log), "another");
    assert_refused(lane.free(BlockKey { id: 999, counter: 0 }, None, log), "another lane");
    lane.free(c.key, None, log).unwrap();
    for foreign in [0, 1, 512, 2 * MIB, 64 * MIB, u64::MAX, u64::MAX - 511] {
        assert_eq!(lane.block_at(foreign), None);
    }
    lane.assert_sound();
}

// D3: a stream whose first call failed gets its ordinal by a call that succeeds.
#[test]
fn a_failed_call_makes_no_stream_known() {
    let mut lane = lane(symmetric().limit(2 * MIB), 64 * MIB);
    assert_full(lane.alloc(request(4 * MIB, 1, 7), &mut NoBacking), "limit");
    assert_full(lane.reserve(4 * MIB, Stream::numbered(8), None, &mut NoBacking), "limit");
    alloc(&mut lane, KIB, 9, &mut Log::default());
    assert_eq!(lane.blocks().map(|block| block.stream).collect::<Vec<_>>(), [0, 0]);
}

/// A lane whose end belongs to stream 0, waiting for stream 1, and the log so far.
fn lane_with_a_wait() -> (LaneState, Log) {
    let mut lane = lane(symmetric(), 1 << 30);
    let mut log = Log::default();
    let block = alloc(&mut lane, MIB, 0, &mut log);
    lane.record_stream(block.key, Stream::numbered(1), None).unwrap();
    lane.free(block.key, None, &mut log).unwrap();
    (lane, log)
}

// D4, and all or nothing: a wait that fails must not come after memory was made.
#[test]
fn waits_come_before_growth() {
    let (mut lane, mut log) = lane_with_a_wait();
    let segments = lane.segments().to_vec();
    log.fail_after = Some(0);
    let error = lane.alloc(request(64 * MIB, 1, 0), &mut log).unwrap_err();
    assert!(error.to_string().contains("planned"), "{error}");
    assert_eq!(lane.segments(), segments);
    assert!(lane.failure().is_some());
    lane.assert_sound();
    lane.mark_agreed();
    let began = log.calls.len();
    assert_eq!(alloc(&mut lane, 64 * MIB, 0, &mut log).offset, 0);
    assert!(matches!(log.calls[began..], [LaneCall::Wait { stream: 0, .. }, LaneCall::Grow(_)]));
}

// D4: once a block was waited for, what is left of it is not waited for again.
#[test]
fn the_rest_of_a_block_is_not_waited_for_twice() {
    let (mut lane, mut log) = lane_with_a_wait();
    let began = log.calls.len();
    let small = alloc(&mut lane, KIB, 0, &mut log);
    assert!(matches!(log.calls[began..], [LaneCall::Wait { stream: 0, .. }]));
    // A later event on stream 1 concerns another block, so the rest need not wait for it.
    lane.record_stream(small.key, Stream::numbered(1), None).unwrap();
    let other = alloc(&mut lane, KIB, 0, &mut log);
    lane.free(small.key, None, &mut log).unwrap();
    let began = log.calls.len();
    alloc(&mut lane, 2 * KIB, 0, &mut log);
    assert_eq!(log.calls.len(), began, "reused without waiting: {:?}", &log.calls[began..]);
    lane.free(other.key, None, &mut log).unwrap();
    lane.assert_sound();
}

// D5: deferred frees return all together or, if an event cannot be recorded, not at all.
#[test]
fn a_reclaim_that_fails_keeps_every_block() {
    let mut lane = lane(symmetric(), 64 * MIB);
    let mut log = Log::default();
    let blocks = [KIB, 2 * KIB, 3 * KIB].map(|bytes| alloc(&mut lane, bytes, 0, &mut log));
    for (stream, block) in (1..).zip(blocks) {
        lane.record_stream(block.key, Stream::numbered(stream), None).unwrap();
        lane.free_unordered(block.key, None, &mut log).unwrap();
    }
    let (deferred, digest) = (lane.deferred_frees(9), lane.digest());
    log.fail_after = Some(1);
    lane.reclaim(&deferred, &mut log).unwrap_err();
    assert_eq!((lane.deferred_frees(9), lane.digest()), (deferred.clone(), digest));
    assert_eq!(lane.stats().deferred, 6 * KIB);
    assert_eq!(lane.deferred_frees(2), deferred[..2]);
    lane.assert_sound();
    lane.reclaim(&deferred, &mut log).unwrap();
    assert_eq!((lane.stats().deferred, lane.stats().live_blocks), (0, 0));
    lane.assert_sound();
}

// The limit is on memory that is held, and a released segment is held until it is unmapped.
#[test]
fn released_memory_counts_against_the_limit_until_it_is_unmapped() {
    let log = &mut Log::default();
    let mut lane = lane(symmetric().limit(24 * MIB), 256 * MIB);
    let block = alloc(&mut lane, 20 * MIB, 0, log);
    lane.free(block.key, None, log).unwrap();
    assert_eq!(lane.trim(None), 20 * MIB);
    assert_full(lane.alloc(request(8 * MIB, 1, 0), log), "limit");
    assert_eq!(lane.take_retired().len(), 1);
    alloc(&mut lane, 24 * MIB, 0, log);
    lane.assert_sound();
}

// D4: a stream that takes over moved memory waits for the stream that had it, and for no other work.
#[test]
fn moved_segments_bring_their_waits() {
    let mut lane = lane(symmetric().limit(48 * MIB), 1 << 30);
    let mut log = Log::default();
    let block = alloc(&mut lane, 48 * MIB, 0, &mut log);
    lane.record_stream(block.key, Stream::numbered(1), None).unwrap();
    lane.free(block.key, None, &mut log).unwrap();
    let began = log.calls.len();
    let moved = alloc(&mut lane, 40 * MIB, 2, &mut log);
    assert_eq!(moved.offset, 48 * MIB);
    let [LaneCall::Record { stream: 0, .. }, waits @ .., LaneCall::Grow(growth)] =
        &log.calls[began..]
    else {
        panic!("{:?}", &log.calls[began..])
    };
    assert!(growth.new.is_empty() && !growth.moves.is_empty());
    assert!(log.waits(2, 0, began) && log.waits(2, 1, 0));
    assert_eq!(waits.len(), 2, "one wait a stream: {waits:?}");
    assert_eq!(lane.stats().reserved, 48 * MIB);
    lane.assert_sound();
}

// D6: released ranges are used again only after a commit, which turns them into holes.
#[test]
fn holes_are_used_once_the_range_is_used_up() {
    for policy in [WindowPolicy::Contiguous, WindowPolicy::PerSegment] {
        let log = &mut Log::default();
        let mut lane = lane(symmetric().window_policy(policy), 128 * MIB);
        let low = alloc(&mut lane, 64 * MIB, 0, log);
        let high = alloc(&mut lane, 64 * MIB, 0, log);
        lane.free(low.key, None, log).unwrap();
        assert_eq!(lane.trim(None), 64 * MIB);
        assert_full(lane.alloc(request(40 * MIB, 1, 0), log), "trim and commit");
        lane.take_retired();
        assert_eq!(lane.blocks().next().map(|block| block.state), Some(BlockState::Hole));
        assert_eq!(alloc(&mut lane, 40 * MIB, 0, log).offset, low.offset);
        lane.assert_sound();
        lane.free(high.key, None, log).unwrap();
        lane.assert_sound();
    }
}

// A growth that the driver refuses, and a later one that succeeds.
#[test]
fn a_driver_that_refuses_is_remembered_until_ranks_have_agreed() {
    let mut log = Log { fail_after: Some(0), ..Log::default() };
    let mut lane = lane(symmetric(), 64 * MIB);
    let error: Error = lane.alloc(request(KIB, 1, 5), &mut log).unwrap_err();
    assert!(error.to_string().contains("growing lane \"test\""), "{error}");
    assert_eq!(lane.failure().map(|&(counter, _)| counter), Some(0));
    alloc(&mut lane, KIB, 6, &mut log);
    assert!(lane.failure().is_some(), "success does not hide that this rank went its own way");
    lane.mark_agreed();
    assert!(lane.failure().is_none());
}
