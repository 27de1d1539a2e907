//! Stream ordinals, and waits between streams.
//!
//! A stream is known by the ordinal of its first use (rule D3). A block that was used on other
//! streams carries a mask of their ordinals; whoever reuses it first makes its own stream wait on
//! those streams' events, on the device (rule D4). Only the latest event of each stream is kept:
//! waiting on a later one is waiting on all before it.
//!
//! A stream that its program is about to destroy is forgotten: nothing touches it any more. Its ordinal
//! goes to the next stream that is new to the lane, and with it the memory that is there; that stream first
//! waits for the event which stands for the forgotten one's work. So a program that makes and destroys
//! streams goes on in the same memory, and with the same few ordinals. Forgetting is an event of the
//! lane's sequence, as ordinals follow from it.

use super::Backing;
use crate::driver::{Event, Stream};
use crate::{Error, Result};

/// Ordinals are bits of a 64-bit mask.
const MOST_STREAMS: usize = 64;

/// A set of streams by ordinal.
pub(super) type StreamMask = u64;

#[derive(Debug)]
struct Known {
    /// `None` once it was forgotten, until the next stream that is new to the lane takes its place.
    stream: Option<Stream>,
    /// The event by which the ordinal became known,
    born: u64,
    /// and that by which this stream had it first.
    since: u64,
    /// The latest event recorded on this stream or the one before it, and its serial number.
    latest: Option<(u64, Event)>,
    /// That is of the one before it, and this one is not behind it yet.
    owes: bool,
    /// For each other stream, the serial number of the last of its events waited on.
    waited: Vec<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Streams {
    known: Vec<Known>,
    serial: u64,
}

impl Streams {
    /// The ordinal of `stream`: its own, else that of a forgotten one, else the next;
    /// [`Streams::learn`] makes it known.
    pub(super) fn ordinal(&self, stream: Stream) -> Result<u16> {
        let known = |wanted: Option<Stream>| self.known.iter().position(|k| k.stream == wanted);
        let at = known(Some(stream)).or_else(|| known(None)).unwrap_or(self.known.len());
        if at >= MOST_STREAMS {
            return Err(Error::invalid_argument(format!(
                "stream {:#x} would be number {at} of this lane, which can serve {MOST_STREAMS}; \
                 have streams forgotten before they are destroyed (forget_stream), or use another \
                 lane for it",
                stream.raw()
            )));
        }
        Ok(at as u16)
    }

    /// Makes the stream of this ordinal known, by the event with number `event`.
    pub(super) fn learn(&mut self, ordinal: u16, stream: Stream, event: u64) {
        match self.known.get_mut(usize::from(ordinal)) {
            None => self.known.push(Known {
                stream: Some(stream),
                born: event,
                since: event,
                latest: None,
                owes: false,
                waited: Vec::new(),
            }),
            Some(known) if known.stream.is_none() => {
                known.stream = Some(stream);
                known.since = event;
                known.owes = known.latest.is_some();
            }
            Some(_) => {}
        }
    }

    /// Makes `stream` known if it is not, and behind the work of the stream whose ordinal it took. On an
    /// error it is as new as before.
    #[inline]
    pub(super) fn enter(
        &mut self,
        ordinal: u16,
        stream: Stream,
        event: u64,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        match self.known.get(usize::from(ordinal)) {
            Some(known) if known.stream == Some(stream) && !known.owes => Ok(()),
            _ => self.come(ordinal, stream, event, backing),
        }
    }

    #[cold]
    fn come(
        &mut self,
        ordinal: u16,
        stream: Stream,
        event: u64,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        self.learn(ordinal, stream, event);
        let settled = self.settle(usize::from(ordinal), backing);
        if settled.is_err() {
            self.forget_since(event, backing);
        }
        settled
    }

    /// Makes a stream wait for the one whose ordinal it took, unless it did.
    fn settle(&mut self, ordinal: usize, backing: &mut dyn Backing) -> Result<()> {
        let Some(known) = self.known.get_mut(ordinal).filter(|known| known.owes) else {
            return Ok(());
        };
        if let (Some(stream), Some((_, event))) = (known.stream, &known.latest) {
            backing.wait(stream, event)?;
        }
        known.owes = false;
        Ok(())
    }

    /// The ordinal of a stream that is known.
    pub(super) fn find(&self, stream: Stream) -> Option<u16> {
        self.known.iter().position(|known| known.stream == Some(stream)).map(|at| at as u16)
    }

    /// Never names the stream of this ordinal again, which lives still: an event behind its work stands
    /// for it, and the next new stream takes its ordinal, with what memory is there.
    pub(super) fn forget(&mut self, ordinal: u16, backing: &mut dyn Backing) -> Result<()> {
        self.record(bit(ordinal), backing)?;
        self.known[usize::from(ordinal)].stream = None;
        Ok(())
    }

    /// Those that were forgotten when the lane had seen `first` events and had not been taken since, and
    /// those that were forgotten since.
    pub(super) fn forgotten_since(&self, first: u64) -> StreamMask {
        let known = self.known.iter().enumerate().filter(|(_, known)| known.born < first);
        known
            .filter(|(_, known)| known.stream.is_none() || known.since >= first)
            .fold(0, |mask, (at, _)| mask | 1 << at)
    }

    /// Forgets the streams of a mask, whose work is done.
    pub(super) fn forget_idle(&mut self, mask: StreamMask, backing: &mut dyn Backing) {
        for ordinal in bits(mask) {
            let Some(known) = self.known.get_mut(ordinal) else { continue };
            known.stream = None;
            known.owes = false;
            if let Some((_, event)) = known.latest.take() {
                backing.release(event);
            }
        }
    }

    pub(super) fn handles(&self) -> impl Iterator<Item = Stream> + '_ {
        self.known.iter().filter_map(|known| known.stream)
    }

    pub(super) fn count(&self) -> usize {
        self.known.len()
    }

    /// Records an event on each stream of the mask. Of one that was forgotten there is one.
    pub(super) fn record(&mut self, mask: StreamMask, backing: &mut dyn Backing) -> Result<()> {
        for ordinal in bits(mask) {
            self.settle(ordinal, backing)?;
            let Some(known) = self.known.get_mut(ordinal) else { continue };
            let Some(stream) = known.stream else { continue };
            let event = backing.record(stream)?;
            self.serial += 1;
            if let Some((_, old)) = known.latest.replace((self.serial, event)) {
                backing.release(old);
            }
        }
        Ok(())
    }

    /// Makes `waiter` wait, on the device, for the latest event of each stream of the mask,
    /// unless it did so already.
    pub(super) fn wait(
        &mut self,
        waiter: u16,
        mask: StreamMask,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        let waiter = usize::from(waiter);
        self.settle(waiter, backing)?;
        for ordinal in bits(mask).filter(|&ordinal| ordinal != waiter) {
            let Some((serial, event)) =
                self.known.get(ordinal).and_then(|known| known.latest.as_ref())
            else {
                continue;
            };
            let serial = *serial;
            let Some(own) = self.known.get(waiter) else { continue };
            if own.waited.get(ordinal).is_some_and(|&waited| waited >= serial) {
                continue;
            }
            let Some(stream) = own.stream else { continue };
            backing.wait(stream, event)?;
            let waited = &mut self.known[waiter].waited;
            if waited.len() <= ordinal {
                waited.resize(ordinal + 1, 0);
            }
            waited[ordinal] = serial;
        }
        Ok(())
    }

    /// Undoes that streams became known by event `first` or later; the events of new ordinals are released.
    pub(super) fn forget_since(&mut self, first: u64, backing: &mut dyn Backing) {
        let keep = self.known.partition_point(|known| known.born < first);
        for known in self.known.drain(keep..) {
            if let Some((_, event)) = known.latest {
                backing.release(event);
            }
        }
        for known in self.known.iter_mut().filter(|known| known.since >= first) {
            known.stream = None;
        }
    }
}

/// The mask of one stream.
pub(super) fn bit(ordinal: u16) -> StreamMask {
    1 << ordinal
}

fn bits(mask: StreamMask) -> impl Iterator<Item = usize> {
    (0..MOST_STREAMS).filter(move |at| mask >> at & 1 == 1)
}
