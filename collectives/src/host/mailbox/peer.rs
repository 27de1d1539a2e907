//! State of a mailbox about one peer, and how bytes pass between the two.

#![allow(unsafe_code)] // copies between callers' memory and segments

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use symmpool_allocator::{Error, PairSocket};

use super::operation::BegunMessage;
use super::segment::{EntryHeader, EntryKind, RingSegment};

/// A segment, and the connection by which its two ranks wake each other.
#[derive(Debug)]
pub(super) struct PairLink {
    pub(super) segment: RingSegment,
    pub(super) socket: Arc<PairSocket>,
}

/// An entry that is still to be written, and the message that is sent by it.
pub(super) struct Queued {
    pub(super) entry: EntryHeader,
    pub(super) op: Option<Arc<BegunMessage>>,
}

/// A message that came before its receive.
pub(super) struct Unexpected {
    /// Its number among all that came to this rank.
    pub(super) arrival: u64,
    pub(super) number: u64,
    pub(super) tag: u64,
    pub(super) payload: u64,
    /// Its bytes, if it came whole.
    pub(super) data: Option<Box<[u8]>>,
    /// The send, if this rank sends it to itself and its bytes are there.
    pub(super) own: Option<Arc<BegunMessage>>,
}

/// A large message that is under way, and how many of its bytes have passed.
pub(super) struct PassingMessage {
    pub(super) op: Arc<BegunMessage>,
    pub(super) number: u64,
    pub(super) passed: u64,
}

/// Messages to and from one rank.
#[derive(Default)]
pub(super) struct MailboxPeer {
    pub(super) outgoing: Option<PairLink>,
    pub(super) incoming: Option<PairLink>,
    /// Why there can be no more messages.
    pub(super) lost: Option<Error>,
    /// Number of the last message to it, and bytes of all that were sent whole.
    pub(super) sent: u64,
    pub(super) sent_whole: u64,
    pub(super) queue: VecDeque<Queued>,
    /// Messages whose bytes the peer has not asked for.
    pub(super) offered: BTreeMap<u64, Arc<BegunMessage>>,
    /// Messages whose bytes it has asked for, and those whose bytes this rank has asked for, in that order.
    pub(super) streams: VecDeque<PassingMessage>,
    pub(super) awaited: VecDeque<PassingMessage>,
    pub(super) unexpected: VecDeque<Unexpected>,
    /// That it refused messages which were sent whole, as no call has reported yet.
    pub(super) reports: VecDeque<Error>,
}

impl PairLink {
    /// Wakes the peer, if it sleeps.
    pub(super) fn wake(&self) {
        if self.segment.wakes() {
            self.socket.wake();
        }
    }
}

impl MailboxPeer {
    pub(super) fn has_ended(&self) -> bool {
        [&self.outgoing, &self.incoming].into_iter().flatten().any(|link| link.segment.has_ended())
    }

    /// Writes what there is room for. Returns whether that was anything.
    pub(super) fn write(&mut self) -> bool {
        let Some(link) = &mut self.outgoing else { return false };
        let mut has_written = false;
        while let Some(Queued { entry, op }) = self.queue.front() {
            let data = op.as_ref().map_or(std::ptr::null(), |op| op.memory().cast_const());
            // SAFETY: whoever made the operation promised that its memory is readable for its payload's bytes.
            if !unsafe { link.segment.write(*entry, data) } {
                break;
            }
            if let (Some(op), Some(peer)) = (op, op.as_ref().and_then(|op| op.peer)) {
                op.finish(Ok(peer));
            }
            self.queue.pop_front();
            has_written = true;
        }
        // The receiver takes bytes for those of the first message that it has asked for, so a cancellation goes before them.
        while let Some(stream) = self.streams.front_mut().filter(|_| self.queue.is_empty()) {
            let (from, left) = stream.rest();
            // SAFETY: the rest of the operation's memory, as above.
            let part = unsafe { link.segment.write_bulk(from, left) };
            stream.passed += part;
            has_written |= part > 0;
            if part < left {
                if part == 0 {
                    break;
                }
                link.wake();
                continue;
            }
            if let Some(PassingMessage { op, .. }) = self.streams.pop_front() {
                op.finish(Ok(op.peer.unwrap_or_default()));
            }
        }
        if has_written {
            link.wake();
        }
        has_written
    }

    /// Cancels a message whose bytes have not begun to pass. Returns whether there was one.
    pub(super) fn cancel(&mut self, op: &Arc<BegunMessage>) -> bool {
        let is_it = |other: &Arc<BegunMessage>| Arc::ptr_eq(other, op);
        let offered = self.offered.iter().find(|(_, offered)| is_it(offered));
        let asked = self.streams.iter().find(|stream| is_it(&stream.op) && stream.passed == 0);
        let found = offered.map(|(number, _)| *number).or(asked.map(|stream| stream.number));
        let Some(number) = found else { return false };
        self.offered.remove(&number);
        self.streams.retain(|stream| stream.number != number);
        let is_offer =
            |entry: &EntryHeader| entry.kind == EntryKind::Offer && entry.number == number;
        let unsaid = self.queue.iter().position(|queued| is_offer(&queued.entry));
        if unsaid.and_then(|at| self.queue.remove(at)).is_none() {
            self.say(EntryHeader::about(EntryKind::Cancellation, number));
        }
        self.write();
        true
    }

    /// Queues what is said to the peer, unless there are no more messages with it.
    pub(super) fn say(&mut self, entry: EntryHeader) {
        if self.lost.is_none() {
            self.queue.push_back(Queued { entry, op: None });
        }
    }

    /// Says that all messages with the peer are given up, past everything that is queued.
    pub(super) fn fail(&mut self, is_interrupted: bool) {
        let Some(link) = &mut self.outgoing else { return };
        let tag = is_interrupted.into();
        let entry = EntryHeader { tag, ..EntryHeader::about(EntryKind::Failure, 0) };
        // SAFETY: no bytes are read. Where there is no room, the peer sees the closed connection alone.
        let _ = unsafe { link.segment.write(entry, std::ptr::null()) };
        link.wake();
    }

    /// Reads what is there of the large messages that were asked for, where `written` bytes were ever written.
    pub(super) fn read_bulk(&mut self, rank: u32, written: u64) -> bool {
        let Some(link) = &mut self.incoming else { return false };
        let mut has_read = false;
        while let Some(stream) = self.awaited.front_mut() {
            let (to, left) = stream.rest();
            // SAFETY: the rest of the operation's memory, which is writable for its payload's bytes, as many as the
            // sender has.
            let part = unsafe { link.segment.read_bulk(to, left, written) };
            stream.passed += part;
            has_read |= part > 0;
            if part < left {
                if part == 0 {
                    break;
                }
                continue;
            }
            if let Some(PassingMessage { op, .. }) = self.awaited.pop_front() {
                op.finish(Ok(rank));
            }
        }
        if has_read {
            link.wake();
        }
        has_read
    }
}

impl PassingMessage {
    /// Where the bytes lie that have not passed yet, and how many those are.
    fn rest(&self) -> (*mut u8, u64) {
        let left = self.op.payload.bytes() - self.passed;
        (self.op.memory().wrapping_add(self.passed as usize), left)
    }
}
