//! When free segments move, which ones, and where new memory may lie.

use super::log::{LaneCall, Log};
use super::script::MIB;
use crate::driver::Stream;
use crate::lane::{AllocationRequest, LaneConfig, LaneState, Placed};

fn lane(range: u64) -> LaneState {
    LaneState::new(LaneConfig::symmetric("test"), range, 2 * MIB).unwrap()
}

fn alloc(lane: &mut LaneState, mib: u64, stream: u64, log: &mut Log) -> Placed {
    let stream = Stream::numbered(stream);
    let block =
        lane.alloc(AllocationRequest { bytes: mib * MIB, align: 1, stream, site: None }, log);
    lane.assert_sound();
    block.unwrap()
}

fn free(lane: &mut LaneState, block: Placed, log: &mut Log) {
    lane.free(block.key, None, log).unwrap();
}

/// Sizes in MiB of what the last growth moved, and of what it made.
fn last_growth(log: &Log) -> (Vec<u64>, Vec<u64>) {
    let growth = log.calls.iter().rev().find_map(|call| match call {
        LaneCall::Grow(growth) => Some(growth),
        _ => None,
    });
    let growth = growth.unwrap();
    let moved = growth.moves.iter().map(|step| step.to.bytes / MIB).collect();
    (moved, growth.new.iter().map(|new| new.bytes / MIB).collect())
}

#[test]
fn the_smallest_that_suffices_moves_else_the_largest() {
    let (mut lane, mut log) = (lane(1 << 30), Log::default());
    let blocks = [20, 16, 40].map(|mib| alloc(&mut lane, mib, 1, &mut log));
    for block in blocks {
        free(&mut lane, block, &mut log);
    }
    alloc(&mut lane, 20, 0, &mut log);
    assert_eq!(last_growth(&log), (vec![20], vec![]), "and nothing is made in addition");
    alloc(&mut lane, 50, 0, &mut log);
    assert_eq!(last_growth(&log), (vec![40, 16], vec![]));
}

#[test]
fn nothing_moves_within_2_percent_of_the_highest_use() {
    let (mut lane, mut log) = (lane(1 << 30), Log::default());
    let high = alloc(&mut lane, 100, 0, &mut log);
    free(&mut lane, high, &mut log);
    lane.trim(None);
    lane.take_retired();
    let other = alloc(&mut lane, 68, 1, &mut log);
    free(&mut lane, other, &mut log);
    alloc(&mut lane, 16, 0, &mut log);
    assert_eq!(last_growth(&log), (vec![], vec![34]), "102 MiB, and 100 were in use");
}

// Two streams that take turns get a segment each, once as many bytes were moved as made.
#[test]
fn no_more_bytes_move_than_were_made() {
    // The second move ends exactly at the end of the range.
    let (mut lane, mut log) = (lane(48 * MIB), Log::default());
    let mut growths = Vec::new();
    for stream in [0, 1, 0, 1] {
        let block = alloc(&mut lane, 16, stream, &mut log);
        growths.push(last_growth(&log));
        free(&mut lane, block, &mut log);
        lane.take_retired();
    }
    let (moved, made) = ((vec![16], vec![]), (vec![], vec![16]));
    assert_eq!(growths, [made.clone(), moved.clone(), moved, made]);
}

// A lane usually grows by more than is missing, but not past its end or that of a hole.
#[test]
fn growth_ends_where_its_range_does() {
    let (mut lane, mut log) = (lane(104 * MIB), Log::default());
    let [_, gone, _] = [16, 40, 40].map(|mib| alloc(&mut lane, mib, 0, &mut log));
    alloc(&mut lane, 4, 0, &mut log);
    assert_eq!(last_growth(&log), (vec![], vec![4]), "the usual 48 do not fit the range");
    free(&mut lane, gone, &mut log);
    lane.trim(None);
    lane.take_retired();
    assert_eq!(alloc(&mut lane, 6, 0, &mut log).offset, gone.offset);
    assert_eq!(last_growth(&log), (vec![], vec![30]), "half of the lane fits the hole");
    alloc(&mut lane, 6, 1, &mut log);
    assert_eq!(last_growth(&log), (vec![], vec![6]), "and then no more than is missing");
}

// D4, and all or nothing: memory that fills a hole merges with the free block above it.
#[test]
fn waits_of_the_block_above_a_hole_come_before_growth() {
    let (mut lane, mut log) = (lane(128 * MIB), Log::default());
    let low = alloc(&mut lane, 64, 0, &mut log);
    let high = alloc(&mut lane, 60, 0, &mut log);
    alloc(&mut lane, 4, 0, &mut log);
    free(&mut lane, low, &mut log);
    lane.trim(None);
    lane.take_retired();
    lane.record_stream(high.key, Stream::numbered(1), None).unwrap();
    free(&mut lane, high, &mut log);
    let began = log.calls.len();
    assert_eq!(alloc(&mut lane, 64, 0, &mut log).offset, 0);
    assert!(
        matches!(log.calls[began..], [LaneCall::Wait { stream: 0, .. }, LaneCall::Grow(_)]),
        "{:?}",
        &log.calls[began..]
    );
}
