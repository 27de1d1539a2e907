//! The model: ranges in a sorted vector.

use crate::lane::{BlockState, BlockView, LaneState, Segment, UNIT, WindowPolicy};

/// A range of the heap. Holes are left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) state: BlockState,
    pub(super) stream: u16,
    /// Counter of the allocation, for blocks that are handed out; else 0.
    pub(super) counter: u64,
}

impl Range {
    pub(super) fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// Expected state of a lane, given the segments that it made and moved.
#[derive(Clone, Debug)]
pub(super) struct Naive {
    pub(super) policy: WindowPolicy,
    pub(super) ranges: Vec<Range>,
    pub(super) segments: Vec<Segment>,
}

impl Naive {
    pub(super) fn new(policy: WindowPolicy) -> Self {
        Self { policy, ranges: Vec::new(), segments: Vec::new() }
    }

    /// The lowest place for `bytes` on a stream, given the memory there is (D2).
    pub(super) fn lowest_fit(&self, bytes: u64, align: u64, stream: u16) -> Option<u64> {
        let size = bytes.max(1).next_multiple_of(UNIT);
        let free = self.ranges.iter().filter(|r| r.state == BlockState::Free && r.stream == stream);
        free.map(|range| (range.offset.next_multiple_of(align.max(UNIT)), range.end()))
            .find(|&(start, end)| start + size <= end)
            .map(|(start, _)| start)
    }

    /// Changes the state of `[offset, end)`, which lies in one range in state `was`.
    pub(super) fn set(&mut self, offset: u64, end: u64, was: BlockState, now: BlockState) {
        let holder = self.ranges.iter().position(|r| r.offset <= offset && end <= r.end());
        let holder = self.ranges.remove(holder.expect("the range lies in one range"));
        assert_eq!(holder.state, was);
        let part = |offset, end: u64, state| Range { offset, bytes: end - offset, state, ..holder };
        let parts = [
            part(holder.offset, offset, was),
            part(offset, end, now),
            part(end, holder.end(), was),
        ];
        self.ranges.extend(parts.into_iter().filter(|range| range.bytes > 0));
        self.tidy();
    }

    /// Takes over the lane's segments, after checking that those which are gone were free and that new
    /// ones overlap nothing (D6). Returns the new ones.
    pub(super) fn follow(&mut self, lane: &LaneState, stream: u16) -> Vec<Segment> {
        let old = std::mem::replace(&mut self.segments, lane.segments().to_vec());
        let gone = |old: &&Segment| !self.segments.contains(old);
        for gone in old.iter().filter(gone).copied().collect::<Vec<_>>() {
            self.set(gone.offset, gone.offset + gone.bytes, BlockState::Free, BlockState::Retired);
        }
        let came: Vec<Segment> =
            self.segments.iter().filter(|segment| !old.contains(segment)).copied().collect();
        for new in &came {
            let Segment { offset, bytes, .. } = *new;
            assert!(
                self.ranges.iter().all(|r| r.end() <= offset || offset + bytes <= r.offset),
                "new segments lie where nothing else is"
            );
            let (state, counter) = (BlockState::Free, 0);
            self.ranges.push(Range { offset, bytes, state, stream, counter });
        }
        self.tidy();
        came
    }

    /// Segments that one free range covers.
    pub(super) fn free_segments(&self) -> Vec<Segment> {
        let covered = |segment: &&Segment| {
            self.ranges.iter().any(|r| {
                r.state == BlockState::Free
                    && r.offset <= segment.offset
                    && segment.offset + segment.bytes <= r.end()
            })
        };
        self.segments.iter().filter(covered).copied().collect()
    }

    /// Sorts the ranges and merges free neighbours of one stream, as far as the policy allows.
    pub(super) fn tidy(&mut self) {
        self.ranges = merged(std::mem::take(&mut self.ranges), self.policy, &self.segments);
    }

    /// The lane's ranges in the form of the model.
    pub(super) fn of(lane: &LaneState) -> Vec<Range> {
        let ranges = lane.blocks().filter(|block| block.state != BlockState::Hole);
        let ranges = ranges.map(|BlockView { offset, bytes, state, stream, counter }| {
            let live = matches!(state, BlockState::Live | BlockState::Deferred);
            Range { offset, bytes, state, stream, counter: if live { counter } else { 0 } }
        });
        // Free neighbours must be merged already: that is for `assert_sound` and the comparison.
        merge_where(ranges.collect(), |low, high| {
            low.state == BlockState::Retired && high.state == BlockState::Retired
        })
    }
}

fn merged(mut ranges: Vec<Range>, policy: WindowPolicy, segments: &[Segment]) -> Vec<Range> {
    for range in &mut ranges {
        if !matches!(range.state, BlockState::Live | BlockState::Deferred) {
            range.counter = 0;
        }
    }
    merge_where(ranges, |low, high| {
        let at_boundary = policy == WindowPolicy::PerSegment
            && segments.iter().any(|segment| segment.offset == high.offset);
        match low.state {
            BlockState::Retired => high.state == BlockState::Retired,
            BlockState::Free => {
                high.state == BlockState::Free && low.stream == high.stream && !at_boundary
            }
            _ => false,
        }
    })
}

fn merge_where(mut ranges: Vec<Range>, merge: impl Fn(&Range, &Range) -> bool) -> Vec<Range> {
    ranges.sort_by_key(|range| range.offset);
    let mut merged: Vec<Range> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(low) if low.end() == range.offset && merge(low, &range) => {
                low.bytes += range.bytes;
                if range.state == BlockState::Retired {
                    low.stream = 0;
                }
            }
            _ => merged.push(range),
        }
    }
    for range in &mut merged {
        if range.state == BlockState::Retired {
            range.stream = 0;
        }
    }
    merged
}
