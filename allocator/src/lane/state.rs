//! A lane: where each block goes, as a pure function of the calls so far.

use std::sync::OnceLock;

use super::commit_trigger::Turnover;
use super::deferred::Aside;
use super::free::FreeList;
use super::history::{Checkpoints, Digest, History};
use super::index::Index;
use super::segments::{Growth, Segments};
use super::stats::{Counts, LaneStats};
use super::streams::{Streams, bit};
use super::table::{Block, BlockState, BlockView, Table};
use super::{Event, EventKind, LaneConfig, LaneKind, Segment, Site, UNIT, WindowPolicy};
use crate::amount::Amount;
use crate::driver::{Event as StreamEvent, Stream};
use crate::error::ErrorKind;
use crate::{Error, Result};

/// What a lane asks of the world: physical memory and stream events. Never a decision.
pub trait Backing {
    /// The sequence has come to where a commit is due: a growth, or enough to be taken back. Called before
    /// anything can fail, so on every rank alike.
    fn due(&mut self) {}
    /// Makes and moves segments: all of `growth` or nothing.
    fn grow(&mut self, growth: &Growth) -> Result<()>;
    /// Records an event on `stream`.
    fn record(&mut self, stream: Stream) -> Result<StreamEvent>;
    /// Makes `stream` wait for `event`, on the device.
    fn wait(&mut self, stream: Stream, event: &StreamEvent) -> Result<()>;
    /// Lets go of an event.
    fn release(&mut self, event: StreamEvent);
}

/// Memory that is not there: for planning and for tests of the arithmetic.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoBacking;

impl Backing for NoBacking {
    fn grow(&mut self, _growth: &Growth) -> Result<()> {
        Ok(())
    }

    fn record(&mut self, _stream: Stream) -> Result<StreamEvent> {
        Ok(StreamEvent::numbered(0))
    }

    fn wait(&mut self, _stream: Stream, _event: &StreamEvent) -> Result<()> {
        Ok(())
    }

    fn release(&mut self, _event: StreamEvent) {}
}

/// An allocation request.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Bytes; 0 gets a place of its own like 1.
    pub bytes: u64,
    /// A power of two up to the driver's granularity; less than 512 means 512.
    pub align: u64,
    /// The stream on which the block is used first.
    pub stream: Stream,
    /// Who asks.
    pub site: Site,
}

/// Names a block: its slab entry and, against reuse of that entry, its counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockKey {
    pub(super) id: u32,
    /// Counter of the allocation.
    pub counter: u64,
}

/// Where a request was placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The block's name.
    pub key: BlockKey,
    /// First byte, from the start of the lane.
    pub offset: u64,
    /// Usable bytes: the request rounded up to whole units.
    pub bytes: u64,
}

/// The lane. Not synchronised: its owner locks it.
#[derive(Debug)]
pub struct LaneState {
    pub(super) config: LaneConfig,
    pub(super) range: u64,
    pub(super) granularity: u64,
    pub(super) table: Table,
    /// Made by the first question for an address; lanes used through keys alone do without.
    pub(super) index: OnceLock<Index>,
    /// By stream ordinal.
    pub(super) free: Vec<FreeList>,
    pub(super) segments: Segments,
    pub(super) streams: Streams,
    pub(super) history: History,
    pub(super) counts: Counts,
    /// Blocks freed without order.
    pub(super) aside: Aside,
    pub(super) turnover: Turnover,
    /// A local failure since the last agreement, with the counter at which it happened.
    pub(super) failure: Option<(u64, ErrorKind)>,
}

impl LaneState {
    /// An empty lane over `range` bytes of addresses. `granularity` is the driver's.
    pub fn new(config: LaneConfig, range: u64, granularity: u64) -> Result<Self> {
        config.validate()?;
        if !granularity.is_power_of_two() || granularity < UNIT {
            return Err(Error::invalid_argument(format!(
                "granularity {granularity} is not a power of two of at least {UNIT}"
            )));
        }
        let range = range.min(super::MAX_LANE_BYTES) / granularity * granularity;
        if range == 0 {
            return Err(Error::invalid_argument(format!(
                "lane {:?}: a range below the driver's granularity of {granularity} bytes",
                config.name
            )));
        }
        let history = History::new(config.history);
        Ok(Self {
            config,
            range,
            granularity,
            table: Table::new(),
            index: OnceLock::new(),
            free: Vec::new(),
            segments: Segments::default(),
            streams: Streams::default(),
            history,
            counts: Counts::new(),
            aside: Aside::default(),
            turnover: Turnover::default(),
            failure: None,
        })
    }

    /// Places a block. On any error the lane is as it was, except that a failure of the driver is
    /// remembered for the next commit, where every rank learns of it. So it is with every call.
    pub fn alloc(&mut self, request: Request, backing: &mut dyn Backing) -> Result<Placed> {
        let (size, align) = self.check(request.bytes, request.align)?;
        let stream = self.streams.ordinal(request.stream)?;
        let fit = self.free.get(usize::from(stream)).and_then(|free| free.first_fit(size, align));
        let (fit, grown) = match fit {
            Some(fit) => (fit, 0),
            None => {
                let grown = self.grow_on(request.stream, size, align, stream, backing)?;
                let fit = self.free[usize::from(stream)].first_fit(size, align);
                (fit.expect("growth made room for the request"), grown)
            }
        };
        // After growth there is nothing left to do here that could fail.
        let entered = self.streams.enter(stream, request.stream, self.history.counter(), backing);
        entered.map_err(|error| self.failed(error))?;
        let bytes = u64::from(size) * UNIT;
        if self.turnover.allocates(bytes, self.reserved()) {
            backing.due();
        }
        let (place, free, start) = fit;
        let waits = self.table.get(free.id).waits;
        if waits != 0 {
            // After growth this repeats what `grow` waited for, and so cannot fail.
            let waited = self.streams.wait(stream, waits, backing);
            if let Err(error) = waited {
                // A stream that was new stays new.
                self.streams.forget_since(self.history.counter(), backing);
                return Err(self.failed(error));
            }
            // The whole block has been waited for; what is left of it need not wait again.
            self.table.get_mut(free.id).waits = 0;
        }
        let counter = self.history.counter();
        let id = self.take(stream, place, free, start, size, counter);
        if let Some(index) = self.index.get_mut() {
            index.insert(start, id);
        }
        self.counts.add(size);
        let offset = u64::from(start) * UNIT;
        let kind =
            EventKind::Alloc { bytes: request.bytes, align: request.align, stream, offset, grown };
        self.history.push(kind, request.site);
        Ok(Placed { key: BlockKey { id, counter }, offset, bytes })
    }

    /// Frees a block in order: its place may be used again by the next call.
    pub fn free(&mut self, key: BlockKey, site: Site, backing: &mut dyn Backing) -> Result<()> {
        let Block { waits: used_on, partial, .. } = *self.check_live(key)?;
        if partial {
            return self.free_unordered(key, site, backing);
        }
        if used_on != 0 {
            let recorded = self.streams.record(used_on, backing);
            recorded.map_err(|error| self.failed(error))?;
        }
        self.give_back(key.id);
        self.counts.frees += 1;
        self.history.push(EventKind::Free { block: key.counter }, site);
        Ok(())
    }

    /// Frees a block without order (rule D5). In a local lane that is an ordinary free; in a
    /// symmetric one the block is set aside and comes back at a commit, once every rank freed it.
    pub fn free_unordered(
        &mut self,
        key: BlockKey,
        site: Site,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        if self.config.kind == LaneKind::Local {
            return self.free(key, site, backing);
        }
        let bytes = self.check_live(key)?.bytes();
        let block = self.table.get_mut(key.id);
        block.state = BlockState::SetAside;
        block.partial = false;
        self.aside.insert(key.counter, key.id);
        self.counts.unordered_frees += 1;
        self.counts.set_aside += bytes;
        Ok(())
    }

    /// Notes that a block is used on another stream: it will be reused only behind that use
    /// (rule D4).
    pub fn record_stream(&mut self, key: BlockKey, stream: Stream, site: Site) -> Result<()> {
        if self.check_live(key)?.partial {
            return Err(Error::invalid_state(format!(
                "lane {:?}: the block of event {} was freed on other ranks before a resync; free \
                 it here too",
                self.config.name, key.counter
            )));
        }
        let ordinal = self.streams.ordinal(stream)?;
        self.streams.learn(ordinal, stream, self.history.counter());
        let block = self.table.get_mut(key.id);
        if block.stream != ordinal {
            block.waits |= bit(ordinal);
        }
        self.history.push(EventKind::Record { block: key.counter, stream: ordinal }, site);
        Ok(())
    }

    /// Whether a stream was used here and not forgotten.
    pub fn knows(&self, stream: Stream) -> bool {
        self.streams.find(stream).is_some()
    }

    /// Forgets a stream that is about to be destroyed: nothing here touches it from now on. The next stream
    /// that is new to the lane takes its ordinal and its memory, behind its work. Nothing happens if the lane
    /// does not know it.
    pub fn forget_stream(
        &mut self,
        stream: Stream,
        site: Site,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        let Some(ordinal) = self.streams.find(stream) else { return Ok(()) };
        let forgotten = self.streams.forget(ordinal, backing);
        forgotten.map_err(|error| self.failed(error))?;
        self.history.push(EventKind::Forget { stream: ordinal }, site);
        Ok(())
    }

    /// Returns blocks to the lane that every rank has freed without order: the last step of a
    /// commit. `counters` ascend; unknown ones are ignored, because the caller made the list from
    /// what this lane published.
    pub fn reclaim(&mut self, counters: &[u64], backing: &mut dyn Backing) -> Result<()> {
        if counters.is_empty() {
            return Ok(());
        }
        let aside = counters.iter().filter_map(|counter| self.aside.id(*counter));
        let used_on = aside.fold(0, |mask, id| mask | self.table.get(id).waits);
        let recorded = self.streams.record(used_on, backing);
        recorded.map_err(|error| self.failed(error))?;
        let mut digest = 0;
        for counter in counters {
            digest = xxhash_rust::xxh3::xxh3_64_with_seed(&counter.to_le_bytes(), digest);
            if let Some(id) = self.aside.remove(*counter) {
                let bytes = self.table.get(id).bytes();
                self.counts.set_aside -= bytes;
                self.turnover.returns(bytes);
                self.give_back(id);
            }
        }
        let blocks = counters.len() as u64;
        self.history.push(EventKind::Reclaim { blocks, digest }, None);
        Ok(())
    }

    /// Counters of the blocks set aside, ascending, at most `most` of them.
    pub fn set_aside(&self, most: usize) -> Vec<u64> {
        self.aside.counters().take(most).collect()
    }

    /// Counters of the blocks set aside that the next commit tells the other ranks, ascending, at
    /// most `most`. No successful commit has told them before.
    pub(crate) fn to_tell(&self, most: usize) -> Vec<u64> {
        self.aside.to_tell(most)
    }

    /// Notes what a commit told of this lane (for the same `most` as [`to_tell`](Self::to_tell)),
    /// and by how many of `world` ranks. Returns the blocks that all ranks have told by now, to be
    /// reclaimed.
    pub(crate) fn told(&mut self, most: usize, heard: &[(u64, u32)], world: u32) -> Vec<u64> {
        self.aside.told(most, heard, world)
    }

    /// The number of events so far.
    pub fn counter(&self) -> u64 {
        self.history.counter()
    }

    /// Digest of all events so far.
    pub fn digest(&self) -> Digest {
        self.history.digest()
    }

    /// The event with this number, if it is still kept.
    pub fn event(&self, counter: u64) -> Option<Event> {
        self.history.event(counter)
    }

    /// The oldest event that is kept in full.
    pub fn oldest_event(&self) -> u64 {
        self.history.oldest()
    }

    pub(crate) fn checkpoints(&self) -> Checkpoints<'_> {
        self.history.checkpoints()
    }

    pub(crate) fn failure(&self) -> Option<&(u64, ErrorKind)> {
        self.failure.as_ref()
    }

    /// All ranks agree on everything so far.
    pub(crate) fn mark_agreed(&mut self) {
        self.failure = None;
        self.history.mark_agreed();
        self.turnover.settle();
    }

    /// Lets go of the events that it keeps, and forgets their streams: the lane ends.
    pub(crate) fn release_events(&mut self, backing: &mut dyn Backing) {
        self.streams.forget_since(0, backing);
    }

    /// The segments in use, by offset.
    pub fn segments(&self) -> &[Segment] {
        self.segments.live()
    }

    /// The streams used so far, by ordinal, but for those that were forgotten.
    pub fn streams(&self) -> impl Iterator<Item = Stream> + '_ {
        self.streams.handles()
    }

    /// The serial number that the next segment will get.
    pub fn next_segment(&self) -> u64 {
        self.segments.next_counter()
    }

    /// All ranges of the lane in address order.
    pub fn blocks(&self) -> impl Iterator<Item = BlockView> + '_ {
        self.table.views()
    }

    /// The lane's configuration.
    pub fn config(&self) -> &LaneConfig {
        &self.config
    }

    /// Whether every segment is shared in the normal course (see [`LaneKind`]).
    pub fn is_symmetric(&self) -> bool {
        self.config.kind == LaneKind::Symmetric
    }

    /// The lane's numbers now.
    pub fn stats(&self) -> LaneStats {
        LaneStats {
            allocated: self.counts.allocated,
            peak_allocated: self.counts.peak_allocated,
            reserved: self.segments.reserved,
            peak_reserved: self.segments.peak_reserved,
            set_aside: self.counts.set_aside,
            live_blocks: self.counts.live_blocks,
            free_blocks: self.free.iter().map(|free| free.iter().count() as u64).sum(),
            segments: self.segments.live().len() as u64,
            segments_made: self.segments.made,
            segments_moved: self.segments.moved,
            events: self.history.counter(),
            allocs: self.counts.allocs,
            frees: self.counts.frees,
            unordered_frees: self.counts.unordered_frees,
            classes: self.counts.classes(),
        }
    }

    /// Bytes handed out.
    pub(crate) fn allocated(&self) -> u64 {
        self.counts.allocated
    }

    /// Bytes of segments.
    pub(crate) fn reserved(&self) -> u64 {
        self.segments.reserved
    }

    /// Blocks that are not freed.
    pub(crate) fn live(&self) -> u64 {
        self.counts.live_blocks
    }

    /// Size and alignment in units.
    fn check(&self, bytes: u64, align: u64) -> Result<(u32, u32)> {
        if !align.is_power_of_two() || align > self.granularity {
            return Err(Error::invalid_argument(format!(
                "lane {:?}: alignment {align}; a power of two of at most {} can be served: this is the \
                 driver's granularity, and heaps are aligned no further",
                self.config.name,
                Amount(self.granularity)
            )));
        }
        if bytes > self.range {
            return Err(Error::out_of_memory(format!(
                "lane {:?}: a request of {:#} is larger than the lane's range of {}; \
                 build the pool with a longer range",
                self.config.name,
                Amount(bytes),
                Amount(self.range)
            )));
        }
        let size = bytes.div_ceil(UNIT).max(1) as u32;
        Ok((size, (align / UNIT).max(1) as u32))
    }

    pub(super) fn check_live(&self, key: BlockKey) -> Result<&Block> {
        let lane = &self.config.name;
        let BlockKey { id, counter } = key;
        match self.table.try_get(id) {
            Some(block) if block.counter == counter && block.state == BlockState::Live => Ok(block),
            _ if counter >= self.history.counter() => Err(Error::invalid_argument(format!(
                "lane {lane:?} has no block {counter}: it is at event {}; the block is another \
                 lane's",
                self.history.counter()
            ))),
            _ => Err(Error::invalid_argument(format!(
                "lane {lane:?}: the block of event {counter} is not live; it was freed before \
                 (double free) or belongs to another lane"
            ))),
        }
    }

    /// Notes that this rank cannot do what comes next in the sequence, for a reason outside the
    /// lane: where the others went on, the next commit gives all ranks `why` as the error.
    pub fn note_failure(&mut self, why: &Error) {
        self.failed(why.clone());
    }

    /// Remembers a failure of the driver for the next commit: the first one, where the lane left
    /// the common path.
    pub(super) fn failed(&mut self, error: Error) -> Error {
        let failure = (self.history.counter(), error.kind().clone());
        self.failure.get_or_insert(failure);
        error
    }

    pub(super) fn policy(&self) -> WindowPolicy {
        self.config.policy
    }
}
