//! Messages that one of their two ranks does not make: its arguments are wrong, or what comes is not what it expects.
//!
//! Such a message counts on both ranks, and fails on both. Whoever declines a message publishes its number and goes on.
//! The other rank finds the number where it would wait. If the message was sent already, its receiver skips it, and
//! records for the sender what was declined; the sender's next message to or from this peer fails with that.

use std::sync::atomic::{Ordering, fence};

use symmpool_allocator::{Error, Result};

use super::messages::Position;
use super::publish;
use crate::call::p2p::{
    Afterwards, Direction, Payload, declined, declined_before, payloads_differ,
};
use crate::host::ops::one_sided::HostOneSided;
use crate::host::wait::waiter::wake;
use crate::signal::wake_sleepers;

impl HostOneSided {
    /// Declines a message. You must call this in place of a message whose arguments are wrong: the peer's call fails too, and
    /// both ranks count the message. Does not wait. Returns what to report: `why`, or why the communicator has failed.
    #[cold]
    pub(crate) fn decline(&self, why: Error, direction: Direction, peer: u32) -> Error {
        if let Err(failed) = self.ready() {
            return failed;
        }
        self.turns(direction, peer).declined.fetch_add(1, Ordering::SeqCst);
        self.settle(direction, peer);
        why
    }

    /// Reports messages to a peer that it declined after they had been sent, of which no call has reported yet.
    pub(crate) fn report_declined(&self) -> Result<()> {
        self.ready()?;
        let mut peers = (0..self.layout.world).filter(|peer| *peer != self.layout.rank);
        peers.find_map(|peer| self.take_declined(peer)).map_or(Ok(()), Err)
    }

    /// Declines the messages that are still to be declined.
    #[inline]
    pub(super) fn decline_pending(&self, direction: Direction, peer: u32, position: &mut Position) {
        let pending = &self.turns(direction, peer).declined;
        if pending.load(Ordering::SeqCst) == 0 {
            return;
        }
        for _ in 0..pending.swap(0, Ordering::SeqCst) {
            position.messages += 1;
            self.decline_now(direction, peer, position);
        }
    }

    /// Ends a message that this rank does not make for this reason. Returns that.
    #[cold]
    pub(super) fn decline_counted(
        &self,
        why: Error,
        direction: Direction,
        peer: u32,
        position: &mut Position,
    ) -> Error {
        self.decline_now(direction, peer, position);
        declined_before(why, direction, self.layout.rank, peer)
    }

    /// Notifies the peer that this rank does not make the message that was counted last.
    #[cold]
    fn decline_now(&self, direction: Direction, peer: u32, position: &mut Position) {
        match direction {
            Direction::Send => {
                let record = self.control.message_record(peer, self.layout.rank);
                record.unsent.store(position.messages, Ordering::Release);
                self.wake_peer(peer);
            }
            Direction::Receive => {
                self.publish_untaken(peer, position);
                // The fence of `wake_peer` lies in between: either these loads see a packet, or its sender sees the number.
                self.skip_arrived(peer, position);
            }
        }
    }

    /// Skips messages that have arrived and were declined, so that their slots are free.
    fn skip_arrived(&self, peer: u32, position: &mut Position) {
        let me = self.layout.rank;
        let arrived = self.control.packets_sent(me, peer);
        while arrived.word.load(Ordering::Acquire) > position.packets {
            let packet = self.control.packet(me, peer, position.packets + 1);
            let found = packet.header.message.load(Ordering::Relaxed);
            if found > position.messages {
                return;
            }
            let sent = Payload::from_word(packet.header.payload.load(Ordering::Relaxed));
            self.skip(peer, (found, sent), position);
        }
    }

    /// Skips a message that was declined here, and arrived nevertheless.
    #[cold]
    pub(super) fn skip(&self, peer: u32, (message, sent): (u64, Payload), at: &mut Position) {
        self.record_declined(peer, message, (sent, Payload::DECLINED));
        self.take_whole(peer, sent, at);
        self.wake_peer(peer);
    }

    /// Declines the message that has arrived, as this rank expects something else.
    #[cold]
    pub(super) fn decline_arrived(
        &self,
        peer: u32,
        (sent, expected): (Payload, Payload),
        position: &mut Position,
    ) -> Error {
        let me = self.layout.rank;
        self.record_declined(peer, position.messages, (sent, expected));
        // Before the packets count as taken: else their sender could take the message for received.
        self.publish_untaken(peer, position);
        self.take_whole(peer, sent, position);
        self.wake_peer(peer);
        payloads_differ(me, (peer, me), (sent, expected), Afterwards::Usable)
    }

    /// Counts all packets of a message as taken, of which the first one has arrived. Its sender counts all of them too.
    fn take_whole(&self, peer: u32, sent: Payload, position: &mut Position) {
        position.packets += self.control.packets_of(sent.bytes());
        publish(self.control.packets_taken(peer, self.layout.rank), position.packets);
    }

    /// Publishes that this rank does not take the message that was counted last.
    fn publish_untaken(&self, peer: u32, position: &Position) {
        let (record, message) =
            (self.control.message_record(peer, self.layout.rank), position.messages);
        if record.last_untaken.load(Ordering::Relaxed) + 1 != message {
            record.first_untaken.store(message, Ordering::Relaxed);
        }
        record.last_untaken.store(message, Ordering::Release);
        self.wake_peer(peer);
    }

    /// Whether the peer does not take this message, which is this rank's last one to it. The peer takes no later message
    /// before that, so the numbers of a row that holds this one do not change but for its end.
    #[inline]
    pub(super) fn is_untaken(&self, peer: u32, message: u64) -> bool {
        let record = self.control.message_record(self.layout.rank, peer);
        record.last_untaken.load(Ordering::Acquire) >= message
            && record.first_untaken.load(Ordering::Relaxed) <= message
    }

    /// The error of a message that the peer does not take.
    #[cold]
    pub(super) fn untaken(&self, peer: u32, message: u64) -> Error {
        let me = self.layout.rank;
        self.messages[peer as usize].known_declined.fetch_max(message, Ordering::Relaxed);
        match self.last_declined(peer) {
            Some((declined, payloads)) if declined == message => {
                payloads_differ(me, (me, peer), payloads, Afterwards::Usable)
            }
            _ => declined(me, Direction::Receive, (me, peer), Afterwards::Usable),
        }
    }

    /// The error of a message that the peer does not send.
    #[cold]
    pub(super) fn unsent(&self, peer: u32) -> Error {
        let me = self.layout.rank;
        declined(me, Direction::Send, (peer, me), Afterwards::Usable)
    }

    /// Records for the sender that this message of its was declined.
    fn record_declined(&self, peer: u32, message: u64, (sent, expected): (Payload, Payload)) {
        let record = self.control.message_record(peer, self.layout.rank);
        record.declined.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        record.sent.store(sent.word(), Ordering::Relaxed);
        record.expected.store(expected.word(), Ordering::Relaxed);
        record.declined.store(message, Ordering::Release);
    }

    /// The last of this rank's messages that the peer has declined after it arrived, what it held, and what was expected.
    fn last_declined(&self, peer: u32) -> Option<(u64, (Payload, Payload))> {
        let record = self.control.message_record(self.layout.rank, peer);
        loop {
            let message = record.declined.load(Ordering::Acquire);
            if message == 0 {
                // Perhaps another one is recorded now; that is found later.
                return None;
            }
            let words = [&record.sent, &record.expected].map(|word| word.load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            if record.declined.load(Ordering::Relaxed) == message {
                let [sent, expected] = words.map(Payload::from_word);
                return Some((message, (sent, expected)));
            }
        }
    }

    /// Whether the peer has declined a message of this rank of which no call has reported yet.
    #[inline]
    pub(super) fn is_declined_before(&self, peer: u32) -> bool {
        let record = self.control.message_record(self.layout.rank, peer);
        record.declined.load(Ordering::Acquire)
            > self.messages[peer as usize].known_declined.load(Ordering::Relaxed)
    }

    /// The error of a message that the peer has declined after it was sent. Each is returned once.
    #[inline]
    pub(super) fn earlier_declined(&self, peer: u32) -> Option<Error> {
        if self.is_declined_before(peer) { self.take_declined(peer) } else { None }
    }

    #[cold]
    fn take_declined(&self, peer: u32) -> Option<Error> {
        let me = self.layout.rank;
        let (message, payloads) = self.last_declined(peer)?;
        let known = &self.messages[peer as usize].known_declined;
        // Another thread of this rank may report it.
        let is_news = known.fetch_max(message, Ordering::Relaxed) < message;
        is_news.then(|| payloads_differ(me, (me, peer), payloads, Afterwards::Usable))
    }

    /// Wakes the peer's threads that wait for messages from this rank, or for room for them.
    fn wake_peer(&self, peer: u32) {
        let me = self.layout.rank;
        let slots = [self.control.packets_sent(peer, me), self.control.packets_taken(peer, me)];
        wake_sleepers(slots.into_iter(), wake);
    }
}
