//! Messages between two ranks in host memory: `send` and `recv` through slots in the receiver's control
//! block. As one-sided operations they are outside calls, and need no turn.
//!
//! A message is cut into packets of a slot's length. The sender counts packets up at the receiver, who
//! compares the length that lies beside each before it writes, and counts up at the sender what it has
//! taken. Of nothing there is one packet, too.

#![allow(unsafe_code)] // copies between callers' memory and the control block

use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use symmpool_allocator::{Error, Result};

use super::control::{PACKETS, peers};
use super::fault::{Fault, WaitFailure};
use super::kernels::copy;
use super::one_sided::HostSided;
use super::operation::Operation;
use super::wait::{Waiter, Watchdog, wake};
use crate::p2p::{Length, lengths_differ};
use crate::signal::{Native, Slot, await_word, wake_sleepers};

/// Of the count of packets taken: the receiver expects something else.
const REFUSED: u64 = u64::MAX;

/// Packets of messages with one peer so far. Whoever holds one is in the middle of a message.
#[derive(Debug, Default)]
pub(super) struct Counts {
    sent: Mutex<u64>,
    received: Mutex<u64>,
}

impl HostSided {
    /// Sends a message to a peer, which is another rank.
    ///
    /// # Safety
    ///
    /// `from` is readable for the message's bytes, and nobody writes it meanwhile.
    pub(crate) unsafe fn send(&self, from: *const u8, length: Length, peer: u32) -> Result<()> {
        self.ready()?;
        let (me, bytes) = (self.layout.rank, length.bytes() as usize);
        let mut sent = lock(&self.counts[peer as usize].sent);
        // The one before it may have failed.
        self.ready()?;
        let slot = self.control.packets_sent(peer, me);
        let mut at = 0;
        loop {
            let number = *sent + 1;
            self.await_room(peer, number)?;
            let packet = self.control.packet(peer, me, number);
            let part = (bytes - at).min(packet.room);
            // SAFETY: the caller's promise; the packet is this rank's until it is counted, and has room.
            unsafe { copy(from.wrapping_add(at), packet.data, part) };
            packet.length.store(length.word(), Ordering::Relaxed);
            *sent = number;
            slot.publish_word(number);
            wake_sleepers(std::iter::once(slot), wake);
            at += part;
            if at >= bytes {
                return Ok(());
            }
        }
    }

    /// Receives a message of a peer, which is another rank.
    ///
    /// # Safety
    ///
    /// `to` is writable for the message's bytes, and nobody else touches it meanwhile.
    pub(crate) unsafe fn receive(&self, to: *mut u8, length: Length, peer: u32) -> Result<()> {
        self.ready()?;
        let (me, bytes) = (self.layout.rank, length.bytes() as usize);
        let mut received = lock(&self.counts[peer as usize].received);
        self.ready()?;
        let slot = self.control.packets_sent(me, peer);
        let mut at = 0;
        loop {
            let number = *received + 1;
            self.await_count(slot, (Operation::Recv, peer, number), |count| count >= number)?;
            let packet = self.control.packet(me, peer, number);
            let sent = packet.length.load(Ordering::Relaxed);
            if sent != length.word() {
                return Err(self.refuse(peer, Length::from_word(sent), length));
            }
            let part = (bytes - at).min(packet.room);
            // SAFETY: the caller's promise; the packet is the sender's no more until it is counted as
            // taken, and is as long as both ranks say.
            unsafe { copy(packet.data, to.wrapping_add(at), part) };
            *received = number;
            let taken = self.control.packets_taken(peer, me);
            taken.publish_word(number);
            wake_sleepers(std::iter::once(taken), wake);
            at += part;
            if at >= bytes {
                return Ok(());
            }
        }
    }

    /// Until a packet has a place at the peer.
    fn await_room(&self, peer: u32, number: u64) -> Result<()> {
        let me = self.layout.rank;
        let slot = self.control.packets_taken(me, peer);
        let room = |taken: u64| taken == REFUSED || taken + PACKETS >= number;
        if self.await_count(slot, (Operation::Send, peer, number), room)? == REFUSED {
            let [sent, expected, ..] = slot.description();
            let lengths = (Length::from_word(sent), Length::from_word(expected));
            return Err(self.close(lengths_differ(me, (me, peer), lengths)));
        }
        Ok(())
    }

    /// Has the sender know that its message is not the one that is expected, and closes the communicator.
    #[cold]
    fn refuse(&self, peer: u32, sent: Length, expected: Length) -> Error {
        let me = self.layout.rank;
        let taken = self.control.packets_taken(peer, me);
        taken.publish(REFUSED, &[sent.word(), expected.word(), 0, 0]);
        wake_sleepers(std::iter::once(taken), wake);
        self.close(lengths_differ(me, (peer, me), (sent, expected)))
    }

    /// Until a count is as it should be. What ends the wait before closes the communicator, as what came
    /// of a message cannot be taken back; peers hear of it (rule S5).
    fn await_count(
        &self,
        slot: &Slot<Native>,
        (operation, peer, number): (Operation, u32, u64),
        accept: impl Fn(u64) -> bool,
    ) -> Result<u64> {
        let mut watchdog = None;
        let watch = || {
            if let Some(end) = self.control.reported_fault(&self.layout) {
                return Err(end);
            }
            let watchdog = watchdog.get_or_insert_with(|| Watchdog::new(self.timeout.get()));
            watchdog.look(Some(|| (self.alive)(peer))).map_err(|cause| {
                let (operation, timeout) = (operation as u8, watchdog.timeout());
                let fault = Fault { cause, operation, phase: 0, peer, epoch: number, timeout };
                WaitFailure { fault, reporter: None }
            })
        };
        await_word(slot, accept, &mut Waiter::new(self.spin_policy, watch)).map_err(|end| {
            let me = self.layout.rank;
            if end.reporter.is_none() {
                for peer in peers(&self.layout) {
                    self.control.report_fault(peer, me, &end.fault);
                }
            }
            self.close(end.fault.to_error(me, end.reporter, &[]))
        })
    }

    /// Keeps the error for later calls, unless there was one before.
    #[cold]
    fn close(&self, error: Error) -> Error {
        tracing::error!(rank = self.layout.rank, %error, "communicator closed");
        self.failed.get_or_init(|| error).clone()
    }
}

/// A message that panicked has changed no count.
fn lock(count: &Mutex<u64>) -> MutexGuard<'_, u64> {
    count.lock().unwrap_or_else(PoisonError::into_inner)
}
