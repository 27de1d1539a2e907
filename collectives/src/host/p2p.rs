//! Send and recv between two ranks in host memory, through slots in the receiver's control block. They are no
//! calls of all ranks, and wait for no turn of the communicator, as one-sided operations.
//!
//! A message is divided into packets of a slot's length. The sender counts in the receiver's control block how
//! many it has sent. The receiver compares the length that comes with each packet before it writes, and counts in
//! the sender's control block how many it has taken. An empty message is one packet.

#![allow(unsafe_code)] // copies between callers' memory and the control block

use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use symmpool_allocator::{Error, Result};

use super::control::{PACKETS, peers};
use super::fault::{Fault, WaitFailure};
use super::kernels::copy;
use super::one_sided::HostOneSided;
use super::operation::Operation;
use super::wait::{Waiter, Watchdog, wake};
use crate::p2p::{Direction, Length, lengths_differ};
use crate::signal::{Native, Slot, await_word, wake_sleepers};

/// The count of packets taken if the receiver expects something else.
const REFUSED: u64 = u64::MAX;

impl HostOneSided {
    /// Sends data at `memory` to a peer, which is another rank, or receives the peer's data there.
    ///
    /// # Safety
    ///
    /// The memory is readable, or, to receive, writable, for the length's bytes. Nobody else writes it meanwhile,
    /// or, to receive, touches it.
    pub(crate) unsafe fn send_or_recv(
        &self,
        (direction, memory): (Direction, *mut u8),
        length: Length,
        peer: u32,
    ) -> Result<()> {
        self.ready()?;
        let (me, bytes) = (self.layout.rank, length.bytes() as usize);
        let counts = &self.counts[peer as usize];
        let (mut count, sender, receiver) = match direction {
            Direction::Send => (lock(&counts.sent), me, peer),
            Direction::Receive => (lock(&counts.received), peer, me),
        };
        // The message before this one may have failed while this thread waited for its turn.
        self.ready()?;
        let mut at = 0;
        loop {
            let number = *count + 1;
            match direction {
                Direction::Send => self.await_free_slot(peer, number)?,
                Direction::Receive => self.await_packet(peer, number)?,
            }
            let packet = self.control.packet(receiver, sender, number);
            let part = (bytes - at).min(packet.room);
            let here = memory.wrapping_add(at);
            let counter = match direction {
                Direction::Send => {
                    // SAFETY: the caller's promise; the packet is the sender's until it is counted, and has room.
                    unsafe { copy(here, packet.data, part) };
                    packet.length.store(length.word(), Ordering::Relaxed);
                    self.control.packets_sent(receiver, sender)
                }
                Direction::Receive => {
                    let sent = packet.length.load(Ordering::Relaxed);
                    if sent != length.word() {
                        return Err(self.refuse(peer, Length::from_word(sent), length));
                    }
                    // SAFETY: the caller's promise; the packet is the receiver's until it is counted as taken, and
                    // is as long as both ranks say.
                    unsafe { copy(packet.data, here, part) };
                    self.control.packets_taken(sender, receiver)
                }
            };
            *count = number;
            counter.publish_word(number);
            wake_sleepers(std::iter::once(counter), wake);
            at += part;
            if at >= bytes {
                return Ok(());
            }
        }
    }

    /// Waits until the packet of that number has arrived.
    fn await_packet(&self, peer: u32, number: u64) -> Result<()> {
        let slot = self.control.packets_sent(self.layout.rank, peer);
        self.await_count(slot, (Operation::Recv, peer, number), |count| count >= number).map(drop)
    }

    /// Waits until the peer has a free slot for the packet of that number.
    fn await_free_slot(&self, peer: u32, number: u64) -> Result<()> {
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

    /// Reports to the sender that its message is not the expected one, and closes the communicator.
    #[cold]
    fn refuse(&self, peer: u32, sent: Length, expected: Length) -> Error {
        let me = self.layout.rank;
        let taken = self.control.packets_taken(peer, me);
        taken.publish(REFUSED, &[sent.word(), expected.word(), 0, 0]);
        wake_sleepers(std::iter::once(taken), wake);
        self.close(lengths_differ(me, (peer, me), (sent, expected)))
    }

    /// Waits until a count is accepted. If the wait ends before, the communicator is closed, as the part of a
    /// message that was transferred cannot be undone; peers are notified (rule S5).
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
            let alive = Some(|| (self.alive)(peer));
            watchdog.look(alive, self.interrupted.as_ref()).map_err(|cause| {
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

/// A count is valid even if a thread panicked in a message.
fn lock(count: &Mutex<u64>) -> MutexGuard<'_, u64> {
    count.lock().unwrap_or_else(PoisonError::into_inner)
}
