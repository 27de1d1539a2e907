//! Stream ordinals, and waits between streams.
//!
//! A stream is known by the ordinal of its first use (rule D3). A block that was used on other
//! streams carries a mask of their ordinals; whoever reuses it first makes its own stream wait on
//! those streams' events, on the device (rule D4). Only the latest event of each stream is kept:
//! waiting on a later one is waiting on all before it.

use super::Backing;
use crate::driver::{Event, Stream};
use crate::{Error, Result};

/// Ordinals are bits of a 64-bit mask.
const MOST_STREAMS: usize = 64;

/// A set of streams by ordinal.
pub(super) type StreamMask = u64;

#[derive(Debug)]
struct Known {
    stream: Stream,
    /// The event by which it became known.
    born: u64,
    /// The latest event recorded on this stream, and its serial number.
    latest: Option<(u64, Event)>,
    /// For each other stream, the serial number of the last of its events waited on.
    waited: Vec<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Streams {
    known: Vec<Known>,
    serial: u64,
}

impl Streams {
    /// The ordinal of `stream`, known or next; [`Streams::learn`] makes it known.
    pub(super) fn ordinal(&self, stream: Stream) -> Result<u16> {
        let at = self.known.iter().position(|known| known.stream == stream);
        let at = at.unwrap_or(self.known.len());
        if at >= MOST_STREAMS {
            return Err(Error::invalid_argument(format!(
                "stream {:#x} would be number {at} of this lane, which can serve {MOST_STREAMS}; \
                 use another lane for it",
                stream.raw()
            )));
        }
        Ok(at as u16)
    }

    /// Makes the stream of this ordinal known, by the event with number `event`.
    pub(super) fn learn(&mut self, ordinal: u16, stream: Stream, event: u64) {
        if usize::from(ordinal) == self.known.len() {
            self.known.push(Known { stream, born: event, latest: None, waited: Vec::new() });
        }
    }

    pub(super) fn handles(&self) -> impl Iterator<Item = Stream> + '_ {
        self.known.iter().map(|known| known.stream)
    }

    pub(super) fn count(&self) -> usize {
        self.known.len()
    }

    /// Records an event on each stream of the mask.
    pub(super) fn record(&mut self, mask: StreamMask, backing: &mut dyn Backing) -> Result<()> {
        for ordinal in bits(mask) {
            let Some(known) = self.known.get_mut(ordinal) else { continue };
            let event = backing.record(known.stream)?;
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
            backing.wait(own.stream, event)?;
            let waited = &mut self.known[waiter].waited;
            if waited.len() <= ordinal {
                waited.resize(ordinal + 1, 0);
            }
            waited[ordinal] = serial;
        }
        Ok(())
    }

    /// Forgets streams that became known by event `first` or later; their events are released.
    pub(super) fn forget_since(&mut self, first: u64, backing: &mut dyn Backing) {
        let keep = self.known.partition_point(|known| known.born < first);
        for known in self.known.drain(keep..) {
            if let Some((_, event)) = known.latest {
                backing.release(event);
            }
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
