//! Streams of this rank that use blocks besides those that the lane's sequence names.
//!
//! Ranks may differ in which blocks they use on further streams, and in when such work ends. So nothing here is an event of
//! the lane, has an ordinal, or takes part in where a block goes (rule D1). It only makes streams wait on the device before
//! they reuse memory (rule D4). When a block is freed, an event is recorded behind each of its streams. The range keeps
//! these events until it is handed out again, to whichever stream, which waits for them first.
//!
//! A block on `CU_STREAM_PER_THREAD` is reused behind an event, too: whoever reuses it may be another thread, whose stream
//! is another one by the same handle.
//!
//! Behind a stream that is captured no event can be recorded, and what it was given before the capture may still run. So the
//! event is recorded by whoever reuses the memory, which must be when the capture has ended.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use super::backing::Backing;
use crate::driver::{Event, Stream};
use crate::{Error, Result};

/// A use of a block that is handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockUse {
    /// Use by everything that the stream is given until the block is freed.
    On(Stream),
    /// Use by the work behind which the event of this number was recorded.
    Until(u64),
    /// Use like `Until`, on the stream that a thread has by `CU_STREAM_PER_THREAD`. The first number is the thread's,
    /// the second the event's; each block and thread has one event.
    OfThread(u64, u64),
}

impl BlockUse {
    /// The number of its event, if it has one.
    fn event(self) -> Option<u64> {
        match self {
            Self::On(_) => None,
            Self::Until(event) | Self::OfThread(_, event) => Some(event),
        }
    }
}

/// A number that no other thread of the process has.
fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    thread_local!(static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed));
    NUMBER.with(|number| *number)
}

/// An event behind what a stream was given.
#[derive(Debug)]
struct RecordedEvent {
    /// `None` where the stream was captured: it is recorded when somebody has to wait for it.
    event: Option<Event>,
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
    pub(super) blocks: BTreeMap<u64, Vec<BlockUse>>,
    /// Freed ranges by where they begin. They do not overlap. Those of released segments stay until their place is handed out
    /// again: a wait for what ended long ago costs nothing.
    freed: BTreeMap<u32, Busy>,
    /// Events by number.
    events: BTreeMap<u64, RecordedEvent>,
    next: u64,
    /// Whether a block was freed while a stream that uses it was captured, where no event could be recorded.
    pub(super) missed: bool,
}

impl LocalUses {
    /// Whether no range has to be waited for.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.freed.is_empty()
    }

    /// Notes that a block is used on a stream.
    pub(super) fn note(
        &mut self,
        counter: u64,
        stream: Stream,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        if stream.is_per_thread() {
            return self.note_of_thread(counter, stream, backing);
        }
        let uses = self.blocks.entry(counter).or_default();
        if !uses.contains(&BlockUse::On(stream)) {
            uses.push(BlockUse::On(stream));
        }
        Ok(())
    }

    /// Notes that a block is used on this thread's own stream: whoever frees the block may be another thread, which cannot
    /// record anything there.
    fn note_of_thread(
        &mut self,
        counter: u64,
        stream: Stream,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        let Some(event) = self.record(stream, backing)? else { return Ok(()) };
        let thread = this_thread();
        let uses = self.blocks.entry(counter).or_default();
        let before =
            uses.iter().position(|each| matches!(each, BlockUse::OfThread(of, _) if *of == thread));
        let before = before.map(|at| uses.swap_remove(at));
        uses.push(BlockUse::OfThread(thread, event));
        // Later work on a stream runs behind its earlier work, so the new event covers the former one.
        if let Some(event) = before.and_then(BlockUse::event) {
            self.drop_event(event, backing);
        }
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
        Ok(Some(self.keep(Some(event), stream)))
    }

    /// Records an event. While the stream is captured, the event is recorded later, if it is a stream that other
    /// threads can name.
    fn record_or_later(
        &mut self,
        stream: Stream,
        backing: &mut dyn Backing,
    ) -> Result<Option<u64>> {
        let recorded = self.record(stream, backing)?;
        let later = recorded.is_none() && !stream.is_per_thread();
        Ok(recorded.or_else(|| later.then(|| self.keep(None, stream))))
    }

    fn keep(&mut self, event: Option<Event>, stream: Stream) -> u64 {
        self.next += 1;
        self.events.insert(self.next, RecordedEvent { event, stream, holders: 1 });
        self.next
    }

    /// Takes the uses of a block that is freed, as events that are recorded behind them. On an error nothing has changed.
    pub(super) fn end(
        &mut self,
        counter: u64,
        home: Option<Stream>,
        backing: &mut dyn Backing,
    ) -> Result<Vec<u64>> {
        let uses = self.blocks.remove(&counter).unwrap_or_default();
        let mut events = Vec::with_capacity(uses.len());
        let streams = uses.iter().map(|each| Some(*each)).chain([home.map(BlockUse::On)]).flatten();
        for each in streams {
            match each {
                BlockUse::Until(event) | BlockUse::OfThread(_, event) => events.push(event),
                BlockUse::On(stream) => match self.record_or_later(stream, backing) {
                    Ok(event) => events.extend(event),
                    Err(error) => {
                        for event in events {
                            if !uses.iter().any(|each| each.event() == Some(event)) {
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

    pub(super) fn add_range(&mut self, start: u32, end: u32, events: Vec<u64>) {
        if !events.is_empty() {
            self.freed.insert(start, Busy { end, events });
        }
    }

    /// Makes a stream wait for what may still use `[start, end)`.
    #[inline]
    pub(super) fn wait(
        &mut self,
        range: (u32, u32),
        stream: Stream,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        if self.is_idle() {
            return Ok(());
        }
        self.wait_for_range(range, stream, backing)
    }

    fn wait_for_range(
        &mut self,
        (start, end): (u32, u32),
        stream: Stream,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        let numbers: Vec<u64> =
            self.in_range(start, end).flat_map(|(_, busy)| busy.events.iter().copied()).collect();
        for number in numbers {
            let Some(recorded) = self.events.get_mut(&number) else { continue };
            // Work on the same stream runs behind that event anyway.
            if recorded.stream == stream && !stream.is_per_thread() {
                continue;
            }
            let event = match &mut recorded.event {
                Some(event) => event,
                // Work that is captured too runs with a graph, which its launcher orders.
                None if backing.is_capturing(stream) => continue,
                None if backing.is_capturing(recorded.stream) => {
                    return Err(still_captured(recorded.stream, stream));
                }
                later => later.insert(backing.record(recorded.stream)?),
            };
            backing.wait(stream, event)?;
        }
        Ok(())
    }

    fn in_range(&self, start: u32, end: u32) -> impl Iterator<Item = (u32, &Busy)> {
        let first = self.freed.range(..=start).next_back().map_or(start, |(begin, _)| *begin);
        let found = self.freed.range(first..end.max(first)).map(|(begin, busy)| (*begin, busy));
        found.filter(move |(_, busy)| busy.end > start)
    }

    /// Forgets what was to be waited for in `[start, end)`, as somebody has.
    pub(super) fn take_range(&mut self, start: u32, end: u32, backing: &mut dyn Backing) {
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
            && let Some(RecordedEvent { event: Some(event), .. }) = self.events.remove(&number)
        {
            backing.release(event);
        }
    }

    /// Has uses on a stream that is about to be destroyed end with what it was given so far.
    pub(super) fn forget(&mut self, stream: Stream, backing: &mut dyn Backing) -> Result<()> {
        let used: Vec<u64> = self
            .blocks
            .iter()
            .filter(|(_, uses)| uses.contains(&BlockUse::On(stream)))
            .map(|(counter, _)| *counter)
            .collect();
        for counter in used {
            let event = self.record(stream, backing)?;
            let Some(uses) = self.blocks.get_mut(&counter) else { continue };
            uses.retain(|each| *each != BlockUse::On(stream));
            uses.extend(event.map(BlockUse::Until));
        }
        // Events that were to be recorded later are recorded now, or never.
        for recorded in self.events.values_mut() {
            if recorded.stream == stream
                && recorded.event.is_none()
                && !backing.is_capturing(stream)
            {
                recorded.event = Some(backing.record(stream)?);
            }
        }
        self.events.retain(|_, recorded| recorded.stream != stream || recorded.event.is_some());
        Ok(())
    }

    /// Forgets everything but uses of blocks that were allocated before event `first`: the device is idle.
    pub(super) fn clear(&mut self, first: u64, backing: &mut dyn Backing) {
        self.freed.clear();
        self.blocks.retain(|counter, uses| {
            uses.retain(|each| matches!(each, BlockUse::On(_)));
            *counter < first && !uses.is_empty()
        });
        for recorded in std::mem::take(&mut self.events).into_values() {
            if let Some(event) = recorded.event {
                backing.release(event);
            }
        }
    }
}

/// The error of a reuse whose stream would have to wait for one that is captured.
#[cold]
fn still_captured(used: Stream, stream: Stream) -> Error {
    Error::invalid_state(format!(
        "memory was freed while stream {:#x}, which had used it, was captured into a graph, and is to be used again on stream \
         {:#x}, which cannot wait for what the other one was given before; end the capture first",
        used.raw(),
        stream.raw()
    ))
}
