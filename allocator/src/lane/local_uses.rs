//! Streams of this rank that use blocks besides those that the lane's sequence names.
//!
//! Ranks may differ in which blocks they use on further streams, and in when such work ends. So nothing here is an event of
//! the lane, has an ordinal, or takes part in where a block goes (rule D1). It only makes streams wait on the device before
//! they reuse memory (rule D4). When a block is freed, an event is recorded behind each of its streams. The range keeps
//! these events until it is handed out again, to whichever stream, which waits for them first.
//!
//! A block on `CU_STREAM_PER_THREAD` is reused behind an event, too: whoever reuses it may be another thread, whose stream
//! is another one by the same handle.

use std::collections::BTreeMap;

use super::backing::Backing;
use super::state::{BlockKey, LaneState};
use crate::Result;
use crate::driver::{Event, Stream};

/// A use of a block that is handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// By what the stream is given until the block is freed.
    On(Stream),
    /// By what an event was recorded behind.
    Until(u64),
}

/// An event behind what a stream was given.
#[derive(Debug)]
struct Recorded {
    event: Event,
    stream: Stream,
    /// How many uses and ranges have it.
    holders: usize,
}

/// A range of freed memory, in units, with the events that a reuse waits for.
#[derive(Clone, Debug)]
struct Busy {
    end: u32,
    events: Vec<u64>,
}

#[derive(Debug, Default)]
pub(super) struct LocalUses {
    /// Uses of blocks that are handed out, by their counters.
    blocks: BTreeMap<u64, Vec<Use>>,
    /// Freed ranges by where they begin. They do not overlap. Those of released segments stay until their place is handed out
    /// again: a wait for what ended long ago costs nothing.
    freed: BTreeMap<u32, Busy>,
    /// Events by number.
    events: BTreeMap<u64, Recorded>,
    next: u64,
    /// Whether a block was freed while a stream that uses it was captured, where no event could be recorded.
    missed: bool,
}

impl LocalUses {
    /// Whether no range has to be waited for.
    #[inline]
    fn is_idle(&self) -> bool {
        self.freed.is_empty()
    }

    /// Notes that a block is used on a stream.
    fn note(&mut self, counter: u64, stream: Stream, backing: &mut dyn Backing) -> Result<()> {
        let used = if stream.is_per_thread() {
            // Whoever frees the block may be another thread, which cannot record anything on this one's stream.
            match self.record(stream, backing)? {
                Some(event) => Use::Until(event),
                None => return Ok(()),
            }
        } else {
            Use::On(stream)
        };
        let uses = self.blocks.entry(counter).or_default();
        if uses.contains(&used) {
            return Ok(());
        }
        uses.push(used);
        Ok(())
    }

    /// Records an event, which nothing has yet. There is none while the stream is captured: an event of the capture means
    /// nothing outside of it.
    fn record(&mut self, stream: Stream, backing: &mut dyn Backing) -> Result<Option<u64>> {
        if backing.is_capturing(stream) {
            self.missed = true;
            return Ok(None);
        }
        let event = backing.record(stream)?;
        self.next += 1;
        self.events.insert(self.next, Recorded { event, stream, holders: 1 });
        Ok(Some(self.next))
    }

    /// Takes the uses of a block that is freed, as events that are recorded behind them. On an error nothing has changed.
    fn end(
        &mut self,
        counter: u64,
        home: Option<Stream>,
        backing: &mut dyn Backing,
    ) -> Result<Vec<u64>> {
        let uses = self.blocks.remove(&counter).unwrap_or_default();
        let mut events = Vec::with_capacity(uses.len());
        let streams = uses.iter().map(|each| Some(*each)).chain([home.map(Use::On)]).flatten();
        for each in streams {
            match each {
                Use::Until(event) => events.push(event),
                Use::On(stream) => match self.record(stream, backing) {
                    Ok(event) => events.extend(event),
                    Err(error) => {
                        for event in events {
                            if !uses.contains(&Use::Until(event)) {
                                self.drop_event(event, backing);
                            }
                        }
                        if !uses.is_empty() {
                            self.blocks.insert(counter, uses);
                        }
                        return Err(error);
                    }
                },
            }
        }
        Ok(events)
    }

    fn add_range(&mut self, start: u32, end: u32, events: Vec<u64>) {
        if !events.is_empty() {
            self.freed.insert(start, Busy { end, events });
        }
    }

    /// Makes a stream wait for what may still use `[start, end)`.
    fn wait(
        &self,
        (start, end): (u32, u32),
        stream: Stream,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        for (_, busy) in self.in_range(start, end) {
            for number in &busy.events {
                let Some(recorded) = self.events.get(number) else { continue };
                // What comes on the same stream comes behind it anyway.
                if recorded.stream != stream || stream.is_per_thread() {
                    backing.wait(stream, &recorded.event)?;
                }
            }
        }
        Ok(())
    }

    fn in_range(&self, start: u32, end: u32) -> impl Iterator<Item = (u32, &Busy)> {
        let first = self.freed.range(..=start).next_back().map_or(start, |(begin, _)| *begin);
        let found = self.freed.range(first..end.max(first)).map(|(begin, busy)| (*begin, busy));
        found.filter(move |(_, busy)| busy.end > start)
    }

    /// Forgets what was to be waited for in `[start, end)`, as somebody has.
    fn take_range(&mut self, start: u32, end: u32, backing: &mut dyn Backing) {
        let begins: Vec<u32> = self.in_range(start, end).map(|(begin, _)| begin).collect();
        for begin in begins {
            let Some(Busy { end: last, events }) = self.freed.remove(&begin) else { continue };
            for (from, to) in [(begin, start.min(last)), (end.max(begin), last)] {
                if from < to {
                    for number in &events {
                        if let Some(recorded) = self.events.get_mut(number) {
                            recorded.holders += 1;
                        }
                    }
                    self.freed.insert(from, Busy { end: to, events: events.clone() });
                }
            }
            events.into_iter().for_each(|event| self.drop_event(event, backing));
        }
    }

    fn drop_event(&mut self, number: u64, backing: &mut dyn Backing) {
        let Some(recorded) = self.events.get_mut(&number) else { return };
        recorded.holders -= 1;
        if recorded.holders == 0
            && let Some(Recorded { event, .. }) = self.events.remove(&number)
        {
            backing.release(event);
        }
    }

    /// Has uses on a stream that is about to be destroyed end with what it was given so far.
    fn forget(&mut self, stream: Stream, backing: &mut dyn Backing) -> Result<()> {
        let used: Vec<u64> = self
            .blocks
            .iter()
            .filter(|(_, uses)| uses.contains(&Use::On(stream)))
            .map(|(counter, _)| *counter)
            .collect();
        for counter in used {
            let event = self.record(stream, backing)?;
            let Some(uses) = self.blocks.get_mut(&counter) else { continue };
            uses.retain(|each| *each != Use::On(stream));
            uses.extend(event.map(Use::Until));
        }
        Ok(())
    }

    /// Forgets everything but uses of blocks that were allocated before event `first`: the device is idle.
    fn clear(&mut self, first: u64, backing: &mut dyn Backing) {
        self.freed.clear();
        self.blocks.retain(|counter, uses| {
            uses.retain(|each| matches!(each, Use::On(_)));
            *counter < first && !uses.is_empty()
        });
        for recorded in std::mem::take(&mut self.events).into_values() {
            backing.release(recorded.event);
        }
    }
}

impl LaneState {
    /// Notes that a block is used on a stream of this rank, of which the other ranks need not know: after the block is freed,
    /// whoever reuses its memory first waits, on the device, for that stream's work up to the free (rule D4). Changes
    /// nothing else, and is no event of the lane.
    ///
    /// Work of `CU_STREAM_PER_THREAD` counts up to this call. What is captured into a graph does not count: a graph's memory
    /// lives as long as the graph.
    pub fn note_use(
        &mut self,
        key: BlockKey,
        stream: Stream,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        let home = self.check_live(key)?.stream;
        if self.streams.of_ordinal(home) == Some(stream) && !stream.is_per_thread() {
            return Ok(());
        }
        self.local_uses.note(key.counter, stream, backing)
    }

    /// As [`note_use`](Self::note_use), for the live block in which a byte of the lane lies. False if there is none.
    pub fn note_use_at(
        &mut self,
        offset: u64,
        stream: Stream,
        backing: &mut dyn Backing,
    ) -> Result<bool> {
        match self.block_around(offset) {
            Some(key) => self.note_use(key, stream, backing).map(|()| true),
            None => Ok(false),
        }
    }

    /// Records what still uses a block that is freed. To be called before anything changes.
    #[inline]
    pub(super) fn end_uses(&mut self, key: BlockKey, backing: &mut dyn Backing) -> Result<()> {
        let block = self.table.get(key.id);
        let home = self.streams.of_ordinal(block.stream).filter(|stream| stream.is_per_thread());
        if home.is_none() && self.local_uses.blocks.is_empty() {
            return Ok(());
        }
        let (start, end) = (block.offset, block.end());
        let ended = self.local_uses.end(key.counter, home, backing);
        let events = ended.map_err(|error| self.failed(error))?;
        self.local_uses.add_range(start, end, events);
        Ok(())
    }

    /// Whether a block was freed while a stream that uses it was captured: then it may be reused when the device has done all
    /// that it was given. From then on that is forgotten.
    pub(crate) fn take_missed_uses(&mut self) -> bool {
        std::mem::take(&mut self.local_uses.missed)
    }

    /// Makes a stream wait for what may still use `[start, end)`, in units.
    #[inline]
    pub(super) fn wait_for_uses(
        &self,
        range: (u32, u32),
        stream: Stream,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        if self.local_uses.is_idle() {
            return Ok(());
        }
        self.local_uses.wait(range, stream, backing)
    }

    /// Forgets uses of `[start, end)`, in units, for which somebody has waited.
    #[inline]
    pub(super) fn take_uses(&mut self, (start, end): (u32, u32), backing: &mut dyn Backing) {
        if !self.local_uses.is_idle() {
            self.local_uses.take_range(start, end, backing);
        }
    }

    /// Has uses on a stream that is about to be destroyed end now.
    pub(super) fn forget_uses(&mut self, stream: Stream, backing: &mut dyn Backing) -> Result<()> {
        let forgotten = self.local_uses.forget(stream, backing);
        forgotten.map_err(|error| self.failed(error))
    }

    /// Forgets uses when the device is idle, but for those of blocks that were allocated before event `first`.
    pub(super) fn clear_uses(&mut self, first: u64, backing: &mut dyn Backing) {
        self.local_uses.clear(first, backing);
    }
}
