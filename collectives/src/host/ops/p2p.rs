//! Send and recv between two ranks in host memory, through slots in the receiver's control block. They are no
//! calls of all ranks, and wait for no turn of the communicator, as one-sided operations.
//!
//! A message is divided into packets of a slot's length. The sender counts in the receiver's control block how
//! many it has sent. The receiver compares what comes with each packet before it writes, and counts in
//! the sender's control block how many it has taken. An empty message is one packet.
//!
//! Both ranks number the messages of each direction alike, however they end: a message that one of them does not make
//! fails on both (`decline`), and the next ones arrive.

#![allow(unsafe_code)] // copies between callers' memory and the control block

mod decline;
mod messages;

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError, TryLockError};

use symmpool_allocator::{Error, Result};

pub(in crate::host) use self::messages::PeerMessages;
use self::messages::{Position, Turns};
use crate::call::operation::OpType;
use crate::call::p2p::{Direction, Payload};
use crate::host::kernels::copy;
use crate::host::layout::control::{PACKETS, peers};
use crate::host::ops::one_sided::HostOneSided;
use crate::host::step::{CallStep, at_step};
use crate::host::wait::fault::{Cause, WaitFailure, WaitFault};
use crate::host::wait::waiter::{WaitWatchdog, Waiter, wake};
use crate::signal::{Native, SignalSlot, await_word, wake_sleepers};

/// How a wait for a peer ended.
enum Arrival {
    /// The packet, or a free slot for it, is there.
    Here,
    /// The peer does not make the message.
    Refused,
    /// The peer has declined an earlier message of this rank, which no call has reported yet.
    EarlierDeclined,
}

impl HostOneSided {
    /// Sends data at `memory` to a peer, which is another rank, or receives the peer's data there.
    ///
    /// # Safety
    ///
    /// The memory is readable, or, to receive, writable, for the payload's bytes. Nobody else writes it meanwhile,
    /// or, to receive, touches it.
    pub(crate) unsafe fn send_or_recv(
        &self,
        (direction, memory): (Direction, *mut u8),
        payload: Payload,
        peer: u32,
    ) -> Result<()> {
        self.ready()?;
        let outcome = {
            let mut position = self.take_turn(direction, peer);
            // The message before this one may have failed while this thread waited for its turn.
            self.ready()?;
            position.messages += 1;
            at_step(CallStep::MessageBegin);
            match self.earlier_declined(peer) {
                Some(error) => Err(self.decline_counted(error, direction, peer, &mut position)),
                None => match direction {
                    // SAFETY: the caller promised that the memory is readable for the payload's bytes, and that
                    // nobody writes it meanwhile.
                    Direction::Send => unsafe { self.send(memory, payload, peer, &mut position) },
                    // SAFETY: the caller promised that the memory is writable for the payload's bytes, and that
                    // nobody else touches it meanwhile.
                    Direction::Receive => unsafe {
                        self.receive(memory, payload, peer, &mut position)
                    },
                },
            }
        };
        self.settle(direction, peer);
        at_step(CallStep::MessageEnd);
        outcome
    }

    /// The peers that have sent what no thread of this rank receives. Does not wait.
    pub(crate) fn waiting_senders(&self) -> Result<Vec<u32>> {
        self.ready()?;
        let has_sent = |peer: &u32| {
            let Ok(position) = self.turns(Direction::Receive, *peer).position.try_lock() else {
                return false;
            };
            let sent = self.control.packets_sent(self.layout.rank, *peer);
            sent.word.load(Ordering::Acquire) > position.packets
        };
        Ok(peers(&self.layout).filter(has_sent).collect())
    }

    /// # Safety
    ///
    /// You must keep the promises of [`Self::send_or_recv`], to send.
    unsafe fn send(
        &self,
        memory: *mut u8,
        payload: Payload,
        peer: u32,
        position: &mut Position,
    ) -> Result<()> {
        let (me, bytes) = (self.layout.rank, payload.bytes() as usize);
        let (message, sent) = (position.messages, self.control.packets_sent(peer, me));
        let end = position.packets + self.control.packets_of(payload.bytes());
        let mut at = 0;
        loop {
            let number = position.packets + 1;
            match self.await_free_slot(peer, (number, message), at == 0)? {
                Arrival::Here => {}
                Arrival::Refused => {
                    // The receiver counts all packets of a message of which it has seen one.
                    if at > 0 {
                        position.packets = end;
                        publish(sent, end);
                    }
                    return Err(self.untaken(peer, message));
                }
                Arrival::EarlierDeclined => match self.earlier_declined(peer) {
                    Some(error) => {
                        return Err(self.decline_counted(error, Direction::Send, peer, position));
                    }
                    // Another thread of this rank reports it.
                    None => continue,
                },
            }
            let packet = self.control.packet(peer, me, number);
            let part = (bytes - at).min(packet.room);
            // SAFETY: the caller promised that the memory is readable for `bytes`, of which this is a part; the
            // packet is the sender's until it is counted, and has room.
            unsafe { copy(memory.wrapping_add(at), packet.data, part) };
            packet.header.message.store(message, Ordering::Relaxed);
            packet.header.payload.store(payload.word(), Ordering::Relaxed);
            at_step(CallStep::MessageSend);
            position.packets = number;
            publish(sent, number);
            at += part;
            if at >= bytes {
                break;
            }
        }
        // The receiver may have declined the message before it saw it: either it finds the packets, or this sees that.
        if self.is_untaken(peer, message) { Err(self.untaken(peer, message)) } else { Ok(()) }
    }

    /// # Safety
    ///
    /// You must keep the promises of [`Self::send_or_recv`], to receive.
    unsafe fn receive(
        &self,
        memory: *mut u8,
        payload: Payload,
        peer: u32,
        position: &mut Position,
    ) -> Result<()> {
        let (me, bytes) = (self.layout.rank, payload.bytes() as usize);
        let message = position.messages;
        let mut at = 0;
        loop {
            let number = position.packets + 1;
            match self.await_packet(peer, (number, message), at == 0)? {
                Arrival::Here => {}
                Arrival::Refused => return Err(self.unsent(peer)),
                Arrival::EarlierDeclined => match self.earlier_declined(peer) {
                    Some(error) => {
                        return Err(self.decline_counted(
                            error,
                            Direction::Receive,
                            peer,
                            position,
                        ));
                    }
                    // Another thread of this rank reports it.
                    None => continue,
                },
            }
            let packet = self.control.packet(me, peer, number);
            let found = packet.header.message.load(Ordering::Relaxed);
            if found > message {
                // Packets come in the order of messages, so this one was declined.
                return Err(self.unsent(peer));
            }
            let sent = Payload::from_word(packet.header.payload.load(Ordering::Relaxed));
            if found < message {
                self.skip(peer, (found, sent), position);
                continue;
            }
            if sent != payload {
                return Err(self.decline_arrived(peer, (sent, payload), position));
            }
            let part = (bytes - at).min(packet.room);
            // SAFETY: the caller promised that the memory is writable for `bytes`, of which this is a part; the
            // packet is the receiver's until it is counted as taken, and is as long as both ranks say.
            unsafe { copy(packet.data, memory.wrapping_add(at), part) };
            at_step(CallStep::MessageTake);
            position.packets = number;
            publish(self.control.packets_taken(peer, me), number);
            at += part;
            if at >= bytes {
                return Ok(());
            }
        }
    }

    /// Waits for the packet of that number, which may be the first one of the message.
    #[inline]
    fn await_packet(
        &self,
        peer: u32,
        (number, message): (u64, u64),
        is_first: bool,
    ) -> Result<Arrival> {
        let me = self.layout.rank;
        let (slot, record) =
            (self.control.packets_sent(me, peer), self.control.message_record(me, peer));
        let is_unsent = || is_first && record.unsent.load(Ordering::Acquire) >= message;
        let is_news = || is_first && self.is_declined_before(peer);
        let accept = |sent: u64| sent >= number || is_unsent() || is_news();
        self.await_count(slot, (OpType::Recv, peer, number), accept)?;
        // Everything that the peer did before it sent, or declined, is visible: so what it declined earlier comes first.
        let is_unsent = is_unsent();
        // A message is declined behind all packets that were sent before, so the count is read last.
        let is_here = slot.word.load(Ordering::Acquire) >= number;
        Ok(match (is_news(), is_here, is_unsent) {
            (true, _, _) => Arrival::EarlierDeclined,
            (_, true, _) => Arrival::Here,
            (_, _, true) => Arrival::Refused,
            // Another thread of this rank has reported the news meanwhile.
            (false, false, false) => Arrival::EarlierDeclined,
        })
    }

    /// Waits until the peer has a free slot for the packet of that number.
    #[inline]
    fn await_free_slot(
        &self,
        peer: u32,
        (number, message): (u64, u64),
        is_first: bool,
    ) -> Result<Arrival> {
        let slot = self.control.packets_taken(self.layout.rank, peer);
        let is_news = || is_first && self.is_declined_before(peer);
        let is_room = |taken: u64| taken + PACKETS >= number;
        let accept = |taken| is_room(taken) || self.is_untaken(peer, message) || is_news();
        let taken = self.await_count(slot, (OpType::Send, peer, number), accept)?;
        Ok(if self.is_untaken(peer, message) {
            Arrival::Refused
        } else if is_news() || !is_room(taken) {
            Arrival::EarlierDeclined
        } else {
            Arrival::Here
        })
    }

    /// Waits until a count is accepted. If the wait ends before, the communicator has failed, as the part of a
    /// message that was transferred cannot be undone; peers are notified (rule S5).
    fn await_count(
        &self,
        slot: &SignalSlot<Native>,
        (operation, peer, number): (OpType, u32, u64),
        accept: impl Fn(u64) -> bool,
    ) -> Result<u64> {
        at_step(CallStep::MessageAwait);
        let mut watchdog = None;
        let watch = || {
            if let Some(end) = self.control.reported_fault(&self.layout) {
                return Err(end);
            }
            let watchdog = watchdog.get_or_insert_with(|| WaitWatchdog::new(self.timeout.get()));
            let (operation, timeout) = (operation as u8, watchdog.timeout());
            let fault =
                |cause| WaitFault { cause, operation, phase: 0, peer, epoch: number, timeout };
            if self.failed.get().is_some() {
                // Another thread of this rank has failed the communicator, and reported it.
                let reporter = Some(self.layout.rank);
                return Err(WaitFailure { fault: fault(Cause::Timeout), reporter });
            }
            let alive = Some(|| (self.alive)(peer));
            watchdog
                .run(alive, self.interrupted.as_ref())
                .map_err(|cause| WaitFailure { fault: fault(cause), reporter: None })
        };
        await_word(slot, accept, &mut Waiter::new(self.spin_policy, watch)).map_err(|end| {
            let me = self.layout.rank;
            if end.reporter.is_none() {
                for peer in peers(&self.layout) {
                    self.control.report_fault(peer, me, &end.fault);
                }
            }
            self.fail(end.fault.to_error(me, end.reporter, &[]))
        })
    }

    /// Keeps the error for later calls, unless there was one before.
    #[cold]
    fn fail(&self, error: Error) -> Error {
        tracing::error!(rank = self.layout.rank, %error, "communicator failed");
        self.failed.get_or_init(|| error).clone()
    }

    fn turns(&self, direction: Direction, peer: u32) -> &Turns {
        let messages = &self.messages[peer as usize];
        match direction {
            Direction::Send => &messages.sends,
            Direction::Receive => &messages.receives,
        }
    }

    /// Waits for other threads' messages in this direction.
    fn take_turn(&self, direction: Direction, peer: u32) -> MutexGuard<'_, Position> {
        let turns = self.turns(direction, peer);
        // Numbers are valid even if a thread panicked in a message.
        let mut position = turns.position.lock().unwrap_or_else(PoisonError::into_inner);
        // This thread may have declined messages while another thread was in one; those come first.
        self.decline_pending(direction, peer, &mut position);
        position
    }

    /// Declines the messages that were declined while this thread was in one. You must call this after a message.
    fn settle(&self, direction: Direction, peer: u32) {
        let turns = self.turns(direction, peer);
        while turns.declined.load(Ordering::SeqCst) > 0 {
            let mut position = match turns.position.try_lock() {
                Ok(position) => position,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // Whoever has the lock does it afterwards.
                Err(TryLockError::WouldBlock) => return,
            };
            self.decline_pending(direction, peer, &mut position);
        }
    }
}

/// Signals a count to the peer that waits for it.
fn publish(slot: &SignalSlot<Native>, count: u64) {
    slot.publish_word(count);
    wake_sleepers(std::iter::once(slot), wake);
}
