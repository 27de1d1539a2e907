//! A lane and the model make the same calls; every rule is checked after every call.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::log::{LaneCall, Log};
use super::naive::{Naive, Range};
use super::script::{LaneOp, STREAMS, lane, op, ops};
use crate::driver::Stream;
use crate::lane::{AllocationRequest, BlockKey, BlockState, LaneConfig, LaneState, UNIT};
use crate::{Error, Result};

/// Memory at `[from, to)` may be used on other streams only after the work on `stream` that was
/// submitted before call `since` of the log.
#[derive(Clone, Copy, Debug)]
struct RequiredWait {
    from: u64,
    to: u64,
    stream: u64,
    since: usize,
}

struct ComparedRun {
    lane: LaneState,
    naive: Naive,
    log: Log,
    live: Vec<BlockKey>,
    /// Uses of blocks on other streams: the block's counter, and the stream.
    used: Vec<(u64, u64)>,
    required: Vec<RequiredWait>,
    /// Stream handles by ordinal; `None` for streams that were forgotten.
    streams: Vec<Option<u64>>,
    /// For each forgotten stream, the index in the log of the event behind its last work.
    forgotten: BTreeMap<u64, usize>,
    /// How often each stream of the script was forgotten. Each time it gets another handle.
    lives: [u64; STREAMS as usize],
    /// The model's ranges and the length of the log when the present call began.
    before: Vec<Range>,
    began: usize,
    range: u64,
    granularity: u64,
    limit: Option<u64>,
}

impl ComparedRun {
    fn new((config, range, granularity): (LaneConfig, u64, u64)) -> Self {
        Self {
            naive: Naive::new(config.policy),
            limit: config.limit,
            lane: LaneState::new(config, range, granularity).unwrap(),
            log: Log::default(),
            live: Vec::new(),
            used: Vec::new(),
            required: Vec::new(),
            streams: Vec::new(),
            forgotten: BTreeMap::new(),
            lives: [0; STREAMS as usize],
            before: Vec::new(),
            began: 0,
            range,
            granularity,
        }
    }

    fn handle(&self, stream: u64) -> u64 {
        stream + STREAMS * self.lives[stream as usize]
    }

    /// D3: the ordinal that a stream has or would get: that of a forgotten stream, or else the next.
    fn ordinal(&self, stream: u64) -> u16 {
        let place = |wanted| self.streams.iter().position(|&known| known == wanted);
        place(Some(stream)).or_else(|| place(None)).unwrap_or(self.streams.len()) as u16
    }

    fn learn(&mut self, stream: u64) {
        let at = usize::from(self.ordinal(stream));
        if at == self.streams.len() {
            self.streams.push(None);
        }
        self.streams[at] = Some(stream);
    }

    /// Forgets a stream. Whoever uses its memory next must wait for its work.
    fn forget(&mut self, stream: u64) -> Result<()> {
        let handle = self.handle(stream);
        let known = self.streams.contains(&Some(handle));
        let events = self.lane.counter();
        self.lane.forget_stream(Stream::numbered(handle), None, &mut self.log)?;
        assert_eq!(self.lane.counter(), events + u64::from(known));
        if !known {
            return Ok(());
        }
        let since = self.recorded_in_this_call(handle).expect("D4: an event behind its work");
        self.forgotten.insert(handle, since);
        self.lives[stream as usize] += 1;
        let ordinal = self.ordinal(handle);
        self.streams[usize::from(ordinal)] = None;
        for range in self.naive.ranges.iter().filter(|range| {
            range.stream == ordinal
                && !matches!(range.state, BlockState::Hole | BlockState::Retired)
        }) {
            let (from, to) = (range.offset, range.end());
            self.required.push(RequiredWait { from, to, stream: handle, since });
        }
        Ok(())
    }

    /// All state of the lane that a failed call must not change.
    fn snapshot(&self) -> impl PartialEq + std::fmt::Debug + use<> {
        let lane = &self.lane;
        let blocks: Vec<_> = lane.blocks().collect();
        let retired: Vec<_> = lane.retired().collect();
        let segments = lane.segments().to_vec();
        (
            blocks,
            segments,
            retired,
            lane.digest(),
            lane.counter(),
            lane.stats(),
            lane.deferred_frees(999),
        )
    }

    /// Makes one call, in which the device call number `fail_after` fails, and then once more without a
    /// failure.
    fn step(&mut self, op: LaneOp, fail_after: Option<usize>) {
        let before = self.snapshot();
        self.log.fail_after = fail_after;
        let result = self.call(op);
        let failed = fail_after.is_some() && self.log.fail_after.take().is_none();
        assert_eq!(self.lane.failure().is_some(), failed, "failures of the driver are kept");
        if result.is_err() {
            assert_eq!(self.snapshot(), before, "an error leaves the lane as it was");
            let made = self.log.calls[self.began..].iter().any(|c| matches!(c, LaneCall::Grow(_)));
            assert!(!made, "nothing fails after memory was made");
        }
        assert!(result.is_err() || !failed, "failures are not swallowed");
        if failed {
            self.lane.mark_agreed();
            self.call(op).unwrap();
        }
        self.check();
    }

    fn call(&mut self, op: LaneOp) -> Result<()> {
        self.before.clone_from(&self.naive.ranges);
        self.began = self.log.calls.len();
        let n = self.live.len();
        match op {
            LaneOp::Alloc { bytes, align, stream } => {
                self.alloc(bytes, align, self.handle(stream))?;
            }
            LaneOp::Forget { stream } => self.forget(stream)?,
            LaneOp::Free { nth } if n > 0 => {
                let key = self.live[nth % n];
                self.lane.free(key, None, &mut self.log)?;
                self.live.swap_remove(nth % n);
                self.freed(key.counter, BlockState::Live);
            }
            LaneOp::FreeUnordered { nth } if n > 0 => {
                let key = self.live[nth % n];
                self.lane.free_unordered(key, None, &mut self.log)?;
                self.live.swap_remove(nth % n);
                if self.lane.is_local() {
                    self.freed(key.counter, BlockState::Live);
                } else {
                    let range = self.range_of(key.counter, BlockState::Live);
                    let (was, now) = (BlockState::Live, BlockState::Deferred);
                    self.naive.set(range.offset, range.end(), was, now);
                }
            }
            LaneOp::Record { nth, stream } if n > 0 => {
                let (key, stream) = (self.live[nth % n], self.handle(stream));
                self.lane.record_stream(key, Stream::numbered(stream), None)?;
                self.learn(stream);
                self.used.push((key.counter, stream));
            }
            LaneOp::Reserve { bytes, stream } => {
                let stream = self.handle(stream);
                let ordinal = self.ordinal(stream);
                self.lane.reserve(bytes, Stream::numbered(stream), None, &mut self.log)?;
                self.learn(stream);
                self.follow(ordinal, stream);
                assert!(bytes == 0 || self.naive.lowest_fit(bytes, 1, ordinal).is_some());
            }
            LaneOp::Reclaim { keep } => {
                let deferred = self.lane.deferred_frees(usize::MAX);
                assert!(deferred.is_sorted());
                let back: Vec<u64> = deferred.into_iter().step_by(keep + 1).collect();
                self.lane.reclaim(&back, &mut self.log)?;
                for counter in back {
                    self.freed(counter, BlockState::Deferred);
                }
            }
            LaneOp::Trim => {
                let free = self.naive.free_segments();
                let bytes = self.lane.trim(None);
                assert_eq!(bytes, free.iter().map(|segment| segment.bytes).sum::<u64>());
                self.naive.follow(&self.lane, 0);
                assert!(self.naive.free_segments().is_empty());
            }
            LaneOp::TakeRetired => {
                self.lane.take_retired();
                assert!(!self.lane.has_retired());
                self.naive.ranges.retain(|range| range.state != BlockState::Retired);
            }
            _ => {}
        }
        Ok(())
    }

    fn alloc(&mut self, bytes: u64, align: u64, stream: u64) -> Result<()> {
        let ordinal = self.ordinal(stream);
        let fit = self.naive.lowest_fit(bytes, align, ordinal);
        let request =
            AllocationRequest { bytes, align, stream: Stream::numbered(stream), site: None };
        let counter = self.lane.counter();
        let placed = match self.lane.alloc(request, &mut self.log) {
            Ok(placed) => placed,
            Err(error) => {
                self.assert_reason(&error, fit, bytes, align);
                return Err(error);
            }
        };
        self.learn(stream);
        self.follow(ordinal, stream);
        let fit = fit.or_else(|| self.naive.lowest_fit(bytes, align, ordinal));
        assert_eq!(Some(placed.offset), fit, "D2: the lowest place that fits");
        assert_eq!(placed.key.counter, counter);
        assert_eq!(placed.bytes, bytes.max(1).next_multiple_of(UNIT));
        assert!(placed.offset.is_multiple_of(align.max(UNIT)));
        let end = placed.offset + placed.bytes;
        self.naive.set(placed.offset, end, BlockState::Free, BlockState::Live);
        let range = self.naive.ranges.iter_mut().find(|range| range.offset == placed.offset);
        range.unwrap().counter = counter;
        assert_eq!(self.lane.block_at(placed.offset), Some(placed.key));
        assert_eq!(self.lane.block_at(placed.offset + 1), None);
        self.live.push(placed.key);
        for wait in self.required.iter().filter(|d| d.from < end && placed.offset < d.to) {
            assert!(
                wait.stream == stream || self.log.waits(stream, wait.stream, wait.since),
                "D4: {wait:?} is not waited for by stream {stream}"
            );
        }
        Ok(())
    }

    /// Asserts that an allocation failed only because there was no memory.
    fn assert_reason(&self, error: &Error, fit: Option<u64>, bytes: u64, align: u64) {
        if self.lane.failure().is_some() {
            return;
        }
        if error.is_invalid_argument() {
            assert!(align > self.granularity, "{error}");
            return;
        }
        assert!(error.is_out_of_memory(), "{error}");
        assert_eq!(fit, None, "what fits is placed");
        let end = self.naive.ranges.last().map_or(0, Range::end);
        let bytes = bytes.max(1).next_multiple_of(self.granularity);
        assert!(self.limit.is_some() || end + bytes > self.range, "{error}");
    }

    /// Takes over the lane's new and moved segments, and adds the waits that moved memory requires.
    fn follow(&mut self, ordinal: u16, stream: u64) {
        let old = self.naive.segments.clone();
        let came = self.naive.follow(&self.lane, ordinal);
        if came.is_empty() {
            return;
        }
        let grow = self.log.calls[self.began..].iter().find_map(|call| match call {
            LaneCall::Grow(growth) => Some(growth.clone()),
            _ => None,
        });
        let growth = grow.expect("segments come from the backing");
        let made = growth.moves.iter().map(|step| step.to).chain(growth.new.iter().copied());
        let made: Vec<_> = made.map(|new| (new.counter, new.offset, new.bytes)).collect();
        let came: Vec<_> = came.iter().map(|new| (new.counter, new.offset, new.bytes)).collect();
        assert_eq!(made, came, "the backing made what the lane uses");
        let mut moved = Vec::new();
        for step in &growth.moves {
            let from = old.iter().find(|segment| segment.counter == step.from).unwrap();
            assert_eq!((from.offset, from.bytes), (step.from_offset, step.to.bytes));
            for wait in &self.required {
                let low = wait.from.max(from.offset);
                let high = wait.to.min(from.offset + from.bytes);
                if low < high {
                    let to = |at| at - from.offset + step.to.offset;
                    moved.push(RequiredWait { from: to(low), to: to(high), ..*wait });
                }
            }
        }
        for &(_, offset, bytes) in &made {
            // Other memory was mapped at this range before.
            self.required.retain(|wait| wait.to <= offset || offset + bytes <= wait.from);
        }
        self.required.extend(moved);
        for step in growth.moves {
            let from = step.from_offset;
            let owner = self.before.iter().find(|r| r.offset <= from && from < r.end()).unwrap();
            // Waits for a forgotten owner were added when it was forgotten.
            let Some(owner) = self.streams[usize::from(owner.stream)] else { continue };
            if owner != stream {
                let since = self.recorded_in_this_call(owner);
                let since = since.expect("D4: an event where the memory came from");
                let (from, to) = (step.to.offset, step.to.offset + step.to.bytes);
                self.required.push(RequiredWait { from, to, stream: owner, since });
            }
        }
    }

    fn recorded_in_this_call(&self, on: u64) -> Option<usize> {
        let record =
            |call: &LaneCall| matches!(call, LaneCall::Record { stream, .. } if *stream == on);
        self.log.calls.iter().rposition(record).filter(|&at| at >= self.began)
    }

    fn range_of(&self, counter: u64, state: BlockState) -> Range {
        let mut ranges = self.naive.ranges.iter();
        *ranges.find(|range| range.counter == counter && range.state == state).unwrap()
    }

    /// Notes that the block with this counter became free.
    fn freed(&mut self, counter: u64, was: BlockState) {
        let range = self.range_of(counter, was);
        let (from, to) = (range.offset, range.end());
        let own = self.streams[usize::from(range.stream)];
        let used = self.used.iter().filter(|&&(block, on)| block == counter && Some(on) != own);
        for stream in used.map(|&(_, stream)| stream).collect::<Vec<_>>() {
            let forgotten = self.forgotten.get(&stream).copied();
            let since = forgotten.or_else(|| self.recorded_in_this_call(stream));
            let since = since.expect("D4: an event at the free");
            self.required.push(RequiredWait { from, to, stream, since });
        }
        self.used.retain(|&(block, _)| block != counter);
        self.naive.set(from, to, was, BlockState::Free);
    }

    fn check(&mut self) {
        self.lane.assert_sound();
        assert_eq!(Naive::of(&self.lane), self.naive.ranges);
        let stats = self.lane.stats();
        assert!(stats.reserved <= self.limit.unwrap_or(u64::MAX));
        assert!(stats.reserved <= stats.peak_reserved);
        assert_eq!(
            stats.live_blocks as usize,
            self.live.len() + self.lane.deferred_frees(usize::MAX).len()
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    // D2, D3, D4, D5, D6: placement, waits, deferred frees and segments, call by call.
    #[test]
    fn a_lane_does_the_same_as_the_model(lane in lane(), ops in ops(150)) {
        let mut run = ComparedRun::new(lane);
        for op in ops {
            run.step(op, None);
        }
        run.log.assert_waits_make_sense();
        run.log.assert_waits_once();
    }

    // A device call that fails changes nothing, is remembered, and may be tried again.
    #[test]
    fn failures_of_the_driver_change_nothing(
        lane in lane(),
        ops in prop::collection::vec((op(), prop::option::of(0_usize..3)), 1..120),
    ) {
        let mut run = ComparedRun::new(lane);
        for (op, fail_after) in ops {
            run.step(op, fail_after);
        }
        run.log.assert_waits_make_sense();
    }
}
