//! Stream ordinals, and waits between streams.
//!
//! A stream is known by the ordinal of its first use (rule D3). A block that was used on other
//! streams carries a mask of their ordinals. Before it is reused, the stream that reuses it waits on the
//! device for those streams' events (rule D4). Only the latest event of each stream is kept: waiting for it
//! includes waiting for all earlier ones.
//!
//! A stream that its program is about to destroy is forgotten: the lane does not use it any more. The next
//! stream that is new to the lane takes over its ordinal, and with it the memory there, and first waits for
//! an event recorded behind the forgotten stream's work. A program that makes and destroys streams so stays
//! in the same memory, with the same few ordinals. Forgetting is an event of the lane's sequence, because
//! ordinals follow from it.

use super::Backing;
use super::table::StreamMask;
use crate::driver::{Event, Stream};
use crate::{Error, Result};

/// Ordinals are bits of a 64-bit mask.
const MAX_STREAMS: usize = 64;

#[derive(Debug)]
struct KnownStream {
    /// The stream that has the ordinal; `None` from when it is forgotten until a new stream takes over.
    stream: Option<Stream>,
    /// Number of the lane's event by which the ordinal was first used.
    born: u64,
    /// Number of the lane's event by which the present stream got the ordinal.
    since: u64,
    /// The latest device event recorded on this stream, or on its predecessor with the same ordinal, and
    /// its serial number.
    latest: Option<(u64, Event)>,
    /// Whether this stream has yet to wait for `latest`, which is its predecessor's.
    must_wait: bool,
    /// For each other stream, the serial number of its last event that this stream waits for.
    waited: Vec<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Streams {
    known: Vec<KnownStream>,
    serial: u64,
}

impl Streams {
    /// The ordinal of `stream`: its own if it has one, else that of a forgotten stream, else the next free
    /// one. [`Streams::learn`] makes it known.
    pub(super) fn ordinal(&self, stream: Stream) -> Result<u16> {
        let known = |wanted: Option<Stream>| self.known.iter().position(|k| k.stream == wanted);
        let at = known(Some(stream)).or_else(|| known(None)).unwrap_or(self.known.len());
        if at >= MAX_STREAMS {
            return Err(Error::invalid_argument(format!(
                "stream {:#x} would be number {at} of this lane, which can serve {MAX_STREAMS} at a time; \
                 call forget_stream before a stream is destroyed, or use another lane for this one",
                stream.raw()
            )));
        }
        Ok(at as u16)
    }

    /// Makes a stream known under its ordinal, by the lane's event with number `event`.
    pub(super) fn learn(&mut self, ordinal: u16, stream: Stream, event: u64) {
        match self.known.get_mut(usize::from(ordinal)) {
            None => self.known.push(KnownStream {
                stream: Some(stream),
                born: event,
                since: event,
                latest: None,
                must_wait: false,
                waited: Vec::new(),
            }),
            Some(known) if known.stream.is_none() => {
                known.stream = Some(stream);
                known.since = event;
                known.must_wait = known.latest.is_some();
            }
            Some(_) => {}
        }
    }

    /// Makes `stream` known if it is new, and makes it wait for the work of the stream whose ordinal it
    /// takes over. On an error it stays new.
    #[inline]
    pub(super) fn enter(
        &mut self,
        ordinal: u16,
        stream: Stream,
        event: u64,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        match self.known.get(usize::from(ordinal)) {
            Some(known) if known.stream == Some(stream) && !known.must_wait => Ok(()),
            _ => self.enter_new(ordinal, stream, event, backing),
        }
    }

    #[cold]
    fn enter_new(
        &mut self,
        ordinal: u16,
        stream: Stream,
        event: u64,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        self.learn(ordinal, stream, event);
        let waited = self.wait_for_predecessor(usize::from(ordinal), backing);
        if waited.is_err() {
            self.forget_since(event, backing);
        }
        waited
    }

    /// Makes a stream wait for the one whose ordinal it took over, unless it has done so.
    fn wait_for_predecessor(&mut self, ordinal: usize, backing: &mut dyn Backing) -> Result<()> {
        let Some(known) = self.known.get_mut(ordinal).filter(|known| known.must_wait) else {
            return Ok(());
        };
        if let (Some(stream), Some((_, event))) = (known.stream, &known.latest) {
            backing.wait(stream, event)?;
        }
        known.must_wait = false;
        Ok(())
    }

    /// The stream that has this ordinal.
    #[inline]
    pub(super) fn of_ordinal(&self, ordinal: u16) -> Option<Stream> {
        self.known.get(usize::from(ordinal)).and_then(|known| known.stream)
    }

    /// The ordinal of a stream that is known.
    pub(super) fn find(&self, stream: Stream) -> Option<u16> {
        self.known.iter().position(|known| known.stream == Some(stream)).map(|at| at as u16)
    }

    /// Forgets the stream of this ordinal, which still exists: records an event behind its work, and leaves
    /// the ordinal and the memory there to the next new stream.
    pub(super) fn forget(&mut self, ordinal: u16, backing: &mut dyn Backing) -> Result<()> {
        self.record(bit(ordinal), backing)?;
        self.known[usize::from(ordinal)].stream = None;
        Ok(())
    }

    /// The ordinals, out of those in use when the lane had seen `first` events, whose stream was forgotten
    /// then or has been forgotten since.
    pub(super) fn forgotten_since(&self, first: u64) -> StreamMask {
        let known = self.known.iter().enumerate().filter(|(_, known)| known.born < first);
        known
            .filter(|(_, known)| known.stream.is_none() || known.since >= first)
            .fold(0, |mask, (at, _)| mask | 1 << at)
    }

    /// Forgets the streams of a mask, whose work is complete, so that nobody has to wait for it.
    pub(super) fn forget_idle(&mut self, mask: StreamMask, backing: &mut dyn Backing) {
        for ordinal in bits(mask) {
            let Some(known) = self.known.get_mut(ordinal) else { continue };
            known.stream = None;
            known.must_wait = false;
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

    /// Records an event on each stream of the mask. A forgotten stream has its event already.
    pub(super) fn record(&mut self, mask: StreamMask, backing: &mut dyn Backing) -> Result<()> {
        for ordinal in bits(mask) {
            self.wait_for_predecessor(ordinal, backing)?;
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

    /// Makes the stream with ordinal `waiter` wait, on the device, for the latest event of each stream of
    /// the mask, unless it has done so already.
    pub(super) fn wait(
        &mut self,
        waiter: u16,
        mask: StreamMask,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        let waiter = usize::from(waiter);
        self.wait_for_predecessor(waiter, backing)?;
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

    /// Undoes that streams became known by the lane's event `first` or later, and destroys the device
    /// events of ordinals that were new since.
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
    (0..MAX_STREAMS).filter(move |at| mask >> at & 1 == 1)
}
