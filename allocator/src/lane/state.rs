//! A lane: where each block goes, as a pure function of the calls so far.

use std::sync::OnceLock;

use super::backing::Backing;
use super::commit_trigger::CommitTrigger;
use super::deferred::DeferredFrees;
use super::free::FreeList;
use super::history::{Checkpoints, Digest, History};
use super::index::OffsetIndex;
use super::local_uses::LocalUses;
use super::segments::Segments;
use super::stats::{LaneStats, RunningCounts};
use super::streams::{Streams, bit};
use super::table::{BlockEntry, BlockState, BlockTable, BlockView};
use super::{EventKind, LaneConfig, LaneEvent, LaneKind, Segment, Site, UNIT, WindowPolicy};
use crate::byte_size::ByteSize;
use crate::driver::Stream;
use crate::error::ErrorKind;
use crate::{Error, Result};

/// An allocation request.
#[derive(Clone, Copy, Debug)]
pub struct AllocationRequest {
    /// Bytes. A request of 0 bytes gets an address of its own, like one of 1 byte.
    pub bytes: u64,
    /// A power of two up to the driver's granularity; less than 512 means 512.
    pub align: u64,
    /// The stream on which the block is used first.
    pub stream: Stream,
    /// From which line of the program it comes.
    pub site: Site,
}

/// Identifies a block: its entry in the block table, and its counter, because entries are reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockKey {
    pub(super) id: u32,
    /// Counter of the allocation.
    pub counter: u64,
}

/// Where a request was placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The block's key.
    pub key: BlockKey,
    /// First byte, from the start of the lane.
    pub offset: u64,
    /// Usable bytes: the request rounded up to whole units.
    pub bytes: u64,
}

/// The state of a lane. It has no lock of its own: the owner locks it.
#[derive(Debug)]
pub struct LaneState {
    pub(super) config: LaneConfig,
    pub(super) range: u64,
    pub(super) granularity: u64,
    pub(super) table: BlockTable,
    /// Made by the first lookup of an address; lanes that are used by keys alone have none.
    pub(super) index: OnceLock<OffsetIndex>,
    /// Free lists by stream ordinal.
    pub(super) free: Vec<FreeList>,
    pub(super) segments: Segments,
    pub(super) streams: Streams,
    pub(super) local_uses: LocalUses,
    pub(super) history: History,
    pub(super) counts: RunningCounts,
    pub(super) deferred: DeferredFrees,
    pub(super) trigger: CommitTrigger,
    /// The first failure on this rank since the last commit, with the counter at which it happened.
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
            table: BlockTable::new(),
            index: OnceLock::new(),
            free: Vec::new(),
            segments: Segments::default(),
            streams: Streams::default(),
            local_uses: LocalUses::default(),
            history,
            counts: RunningCounts::new(),
            deferred: DeferredFrees::default(),
            trigger: CommitTrigger::default(),
            failure: None,
        })
    }

    /// Places a block. On any error the lane is as it was, except that a failure of the driver is
    /// remembered for the next commit, which reports it to every rank. This holds for every call of a lane.
    pub fn alloc(
        &mut self,
        request: AllocationRequest,
        backing: &mut dyn Backing,
    ) -> Result<Placed> {
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
        // After a growth nothing here can fail any more: `grow_on` has made the stream known.
        let entered = self.streams.enter(stream, request.stream, self.history.counter(), backing);
        entered.map_err(|error| self.failed(error))?;
        let bytes = u64::from(size) * UNIT;
        if self.trigger.note_alloc(bytes, self.reserved()) {
            backing.due();
        }
        let (place, free, start) = fit;
        let waits = self.table.get(free.id).waits;
        if waits != 0 {
            // After growth this repeats what `grow` waited for, and so cannot fail.
            let waited = self.streams.wait(stream, waits, backing);
            if let Err(error) = waited {
                // A stream that was new to the lane stays new.
                self.streams.forget_since(self.history.counter(), backing);
                return Err(self.failed(error));
            }
            // The stream has waited for the whole free block, so the rest of it needs no wait.
            self.table.get_mut(free.id).waits = 0;
        }
        if let Err(error) = self.wait_for_uses((start, start + size), request.stream, backing) {
            self.streams.forget_since(self.history.counter(), backing);
            return Err(self.failed(error));
        }
        self.take_uses((start, start + size), backing);
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
        let BlockEntry { waits: used_on, partial, .. } = *self.check_live(key)?;
        if partial {
            return self.free_unordered(key, site, backing);
        }
        if used_on != 0 {
            let recorded = self.streams.record(used_on, backing);
            recorded.map_err(|error| self.failed(error))?;
        }
        self.end_uses(key, backing)?;
        self.give_back(key.id);
        self.counts.frees += 1;
        self.history.push(EventKind::Free { block: key.counter }, site);
        Ok(())
    }

    /// Frees a block without order (rule D5). In a local lane that is an ordinary free. In a symmetric
    /// one the free is deferred: the block returns at the commit by which every rank has freed it.
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
        self.end_uses(key, backing)?;
        let block = self.table.get_mut(key.id);
        block.state = BlockState::Deferred;
        block.partial = false;
        self.deferred.insert(key.counter, key.id);
        self.counts.unordered_frees += 1;
        self.counts.deferred += bytes;
        Ok(())
    }

    /// Notes that a block is used on another stream, so that its memory is reused only after that use
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

    /// Forgets a stream that is about to be destroyed: the lane does not use it from now on. The next stream
    /// that is new to the lane takes over its ordinal and its memory, after waiting for its work. Does nothing
    /// if the lane does not know the stream.
    pub fn forget_stream(
        &mut self,
        stream: Stream,
        site: Site,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        self.forget_uses(stream, backing)?;
        let Some(ordinal) = self.streams.find(stream) else { return Ok(()) };
        let forgotten = self.streams.forget(ordinal, backing);
        forgotten.map_err(|error| self.failed(error))?;
        self.history.push(EventKind::Forget { stream: ordinal }, site);
        Ok(())
    }

    /// Returns blocks to the lane that every rank has freed without order: the last step of a commit.
    /// `counters` ascend. Unknown ones are ignored; there are none, because the caller has the list from
    /// `apply_reports`.
    pub fn reclaim(&mut self, counters: &[u64], backing: &mut dyn Backing) -> Result<()> {
        if counters.is_empty() {
            return Ok(());
        }
        let deferred = counters.iter().filter_map(|counter| self.deferred.id(*counter));
        let used_on = deferred.fold(0, |mask, id| mask | self.table.get(id).waits);
        let recorded = self.streams.record(used_on, backing);
        recorded.map_err(|error| self.failed(error))?;
        let mut digest = 0;
        for counter in counters {
            digest = xxhash_rust::xxh3::xxh3_64_with_seed(&counter.to_le_bytes(), digest);
            if let Some(id) = self.deferred.remove(*counter) {
                let bytes = self.table.get(id).bytes();
                self.counts.deferred -= bytes;
                self.trigger.note_return(bytes);
                self.give_back(id);
            }
        }
        let blocks = counters.len() as u64;
        self.history.push(EventKind::Reclaim { blocks, digest }, None);
        Ok(())
    }

    /// Counters of the deferred frees, ascending, at most `most` of them.
    pub fn deferred_frees(&self, most: usize) -> Vec<u64> {
        self.deferred.counters().take(most).collect()
    }

    /// Counters of the deferred frees that the next commit reports to the other ranks, ascending, at
    /// most `most`. No successful commit has reported them before.
    pub(crate) fn to_report(&self, most: usize) -> Vec<u64> {
        self.deferred.to_report(most)
    }

    /// Takes over the reports of a commit that succeeded: blocks of this lane with the number of ranks,
    /// out of `world`, that reported them, for the same `most` as [`to_report`](Self::to_report). Returns
    /// the blocks that all ranks have reported by now, which the caller reclaims.
    pub(crate) fn apply_reports(
        &mut self,
        most: usize,
        reports: &[(u64, u32)],
        world: u32,
    ) -> Vec<u64> {
        self.deferred.apply_reports(most, reports, world)
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
    pub fn event(&self, counter: u64) -> Option<LaneEvent> {
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

    /// A commit or resync has succeeded: all ranks agree on everything so far.
    pub(crate) fn mark_agreed(&mut self) {
        self.failure = None;
        self.history.mark_agreed();
        self.trigger.note_commit();
    }

    /// Destroys the stream events that the lane keeps, and forgets their streams, because the lane ends.
    pub(crate) fn release_events(&mut self, backing: &mut dyn Backing) {
        self.streams.forget_since(0, backing);
        self.clear_uses(0, backing);
    }

    /// The segments in use, by offset.
    pub fn segments(&self) -> &[Segment] {
        self.segments.live()
    }

    /// The streams used so far, by ordinal, without those that were forgotten.
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
            deferred: self.counts.deferred,
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
                "lane {:?}: alignment {align}; it must be a power of two of at most {}, the driver's \
                 granularity, to which heaps are aligned",
                self.config.name,
                ByteSize(self.granularity)
            )));
        }
        if bytes > self.range {
            return Err(Error::out_of_memory(format!(
                "lane {:?}: a request of {:#} is larger than the lane's range of {}; \
                 build the pool with a longer range",
                self.config.name,
                ByteSize(bytes),
                ByteSize(self.range)
            )));
        }
        let size = bytes.div_ceil(UNIT).max(1) as u32;
        Ok((size, (align / UNIT).max(1) as u32))
    }

    pub(super) fn check_live(&self, key: BlockKey) -> Result<&BlockEntry> {
        let lane = &self.config.name;
        let BlockKey { id, counter } = key;
        match self.table.try_get(id) {
            Some(block) if block.counter == counter && block.state == BlockState::Live => Ok(block),
            _ if counter >= self.history.counter() => Err(Error::invalid_argument(format!(
                "lane {lane:?} has no block of event {counter}: it is at event {}, so the block belongs to \
                 another lane",
                self.history.counter()
            ))),
            _ => Err(Error::invalid_argument(format!(
                "lane {lane:?}: the block of event {counter} is not live; it was freed before \
                 (double free) or belongs to another lane"
            ))),
        }
    }

    /// Notes that this rank cannot do what comes next in the sequence, for a reason outside the lane. If
    /// other ranks went on, the next commit returns `why` as the error on all ranks.
    pub fn note_failure(&mut self, why: &Error) {
        self.failed(why.clone());
    }

    /// Remembers a failure for the next commit. The first one counts, because there this rank's sequence
    /// left that of the others.
    pub(super) fn failed(&mut self, error: Error) -> Error {
        let failure = (self.history.counter(), error.kind().clone());
        self.failure.get_or_insert(failure);
        error
    }

    pub(super) fn policy(&self) -> WindowPolicy {
        self.config.policy
    }
}
