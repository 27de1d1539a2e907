//! The loop of gathers and exchanges: every rank sends packets to all peers and receives theirs.
//!
//! Sending and receiving alternate, so that full socket buffers cannot make ranks wait for each other in
//! a circle. Each rank sends each peer at least one packet in a round, even if it has no data for it, so
//! a finished round also proves that all peers took part in it.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::barrier_messages;
use super::packet::{self, BarrierMessage, Farewell, PacketBuffer, ReceivedPacket, Sent};
use super::{CLOSED, PeerSockets, RoundFault, at_most, connected, is_closed, poll_for};
use crate::group::Interrupt;
use crate::rendezvous::message::{self, Message};
use crate::{Deadline, Error, Result};

/// How soon sending is tried again when too many descriptors of this user are in flight.
const SEND_AGAIN_AFTER: Duration = Duration::from_millis(1);

/// How often a rank that waits asks whether it is to stop.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// Packets of one peer that are received before those of others.
const MAX_PACKETS_A_TURN: usize = 4096;

const INTERRUPTED: &str = "interrupted while waiting for other ranks";

/// How long a rank still waits for others after a peer from which it has everything has closed its
/// connection. That peer may have finished the round; then the others have sent all their packets, and
/// what this rank waits for is about to arrive.
const WAIT_AFTER_LOSS: Duration = Duration::from_secs(2);

/// Packets that ranks send each other in one round.
pub(super) trait Round {
    /// Content of a peer's packet.
    type Packet: Message;

    /// The next packet for `peer`: a frame, and the descriptors that go with it. Called again until it
    /// could be sent.
    fn next(&mut self, peer: u32) -> Result<(&[u8], &[BorrowedFd<'_>])>;

    /// Notes that the packet was sent; says whether it was the last for this peer.
    fn sent(&mut self, peer: u32) -> bool;

    /// Takes a packet of `peer`; says whether it was the last.
    fn take(&mut self, peer: u32, packet: Self::Packet, fds: Vec<OwnedFd>) -> Result<bool>;

    /// Completes "timed out after 3 s …".
    fn waiting_for(&self) -> &str;
}

/// How far a round has come with one peer.
struct RoundProgress<'a> {
    peer: u32,
    socket: &'a OwnedFd,
    all_sent: bool,
    all_received: bool,
    /// The kernel would not take the last packet, and polling does not show when it will.
    send_later: bool,
    /// Set once the peer has closed the connection after its last packet; with its farewell, if it sent
    /// one.
    gone: Option<Option<Farewell>>,
}

impl PeerSockets {
    /// Sends and receives until the round is complete with all peers. Any failure breaks the connections;
    /// `what` says in the error what was being done.
    pub(super) fn run_round(
        &mut self,
        round: &mut impl Round,
        what: impl FnOnce() -> String,
        deadline: Deadline,
    ) -> Result<()> {
        self.send_and_receive(round, deadline).map_err(|fault| {
            let fault = match fault {
                RoundFault::Closed(peer) => self.diagnose(peer),
                fault => fault,
            };
            self.break_with(fault).context(what())
        })
    }

    fn send_and_receive(
        &mut self,
        round: &mut impl Round,
        deadline: Deadline,
    ) -> Result<(), RoundFault> {
        let begin = |(peer, socket)| RoundProgress {
            peer,
            socket,
            all_sent: false,
            all_received: false,
            send_later: false,
            gone: None,
        };
        // Each rank begins with the rank after it, so that not all receive from one peer at a time.
        let (mut peers, before): (Vec<_>, Vec<_>) =
            connected(&self.sockets).map(begin).partition(|progress| progress.peer > self.rank);
        peers.extend(before);
        let mut asked = Instant::now();
        let mut until = deadline;
        loop {
            // Taking a packet may be slow (it maps memory), so everything is sent first.
            for peer in &mut peers {
                peer.send(round)?;
            }
            for peer in &mut peers {
                peer.receive(round, &mut self.buffer, &mut self.barrier_messages)?;
            }
            if peers.iter().all(RoundProgress::is_complete) {
                return Ok(());
            }
            if until.expired() {
                return Err(out_of_time(&peers, round.waiting_for(), deadline));
            }
            let send_later = peers.iter().any(|peer| peer.send_later);
            let limit = if send_later { SEND_AGAIN_AFTER } else { ASK_EVERY };
            let ready = wait(&mut peers, &mut self.buffer, at_most(limit, until))?;
            if peers.iter().any(|peer| peer.gone.is_some()) {
                until = until.min(Deadline::after(WAIT_AFTER_LOSS));
            }
            if (ready == 0 && !send_later) || asked.elapsed() >= ASK_EVERY {
                asked = Instant::now();
                if self.interrupt.as_ref().is_some_and(Interrupt::is_requested) {
                    return Err(Error::interrupted(INTERRUPTED).into());
                }
            }
        }
    }
}

/// Waits at most for `limit` until some peers can be sent to or received from; returns their number.
/// Peers with which the round is complete are polled as well: if one of them has closed its connection,
/// that may be the reason why another never sends.
fn wait(
    peers: &mut [RoundProgress<'_>],
    buffer: &mut PacketBuffer,
    limit: Duration,
) -> Result<usize, RoundFault> {
    let mut open: Vec<_> = peers.iter_mut().filter(|peer| peer.gone.is_none()).collect();
    let mut polled: Vec<_> = open.iter().map(|peer| peer.poll()).collect();
    let ready = poll_for(&mut polled, limit)?;
    for (progress, poll) in open.iter_mut().zip(&polled) {
        if !is_closed(poll) {
            continue;
        }
        if progress.is_complete() {
            progress.gone = Some(buffer.farewell(progress.peer, progress.socket));
        } else if progress.all_received && progress.send_later {
            // Another attempt to send would only report too many descriptors, not that the peer is gone.
            return Err(RoundFault::Closed(progress.peer));
        }
    }
    Ok(ready)
}

impl<'a> RoundProgress<'a> {
    fn is_complete(&self) -> bool {
        self.all_sent && self.all_received
    }

    /// The events of the socket that are waited for.
    fn poll(&self) -> PollFd<'a> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, !self.all_received);
        events.set(PollFlags::OUT, !self.all_sent && !self.send_later);
        PollFd::new(self.socket, events)
    }

    /// Sends until everything is sent or the socket takes no more.
    fn send(&mut self, round: &mut impl Round) -> Result<(), RoundFault> {
        self.send_later = false;
        while !self.all_sent {
            let (frame, fds) = round.next(self.peer)?;
            match packet::send(self.socket, frame, fds)? {
                Sent::Yes => self.all_sent = round.sent(self.peer),
                Sent::WouldBlock => break,
                Sent::TryLater => {
                    self.send_later = true;
                    break;
                }
                Sent::Closed => return Err(RoundFault::Closed(self.peer)),
            }
        }
        Ok(())
    }

    /// Receives until everything is received or nothing more has arrived, but not so much that a peer which sends without end
    /// holds this rank up beyond its deadline. Does not read what a faster peer may have sent for the next round.
    fn receive<R: Round>(
        &mut self,
        round: &mut R,
        buffer: &mut PacketBuffer,
        barrier_messages: &mut Vec<(u32, BarrierMessage)>,
    ) -> Result<(), RoundFault> {
        for _ in 0..MAX_PACKETS_A_TURN {
            if self.all_received {
                break;
            }
            let (frame, fds) = match buffer.receive(self.peer, self.socket)? {
                ReceivedPacket::WouldBlock => break,
                ReceivedPacket::Closed => return Err(RoundFault::Closed(self.peer)),
                ReceivedPacket::Packet { frame, fds } => (frame, fds),
            };
            if let Some(farewell) = Farewell::read(self.peer, frame) {
                return Err(RoundFault::Farewell(farewell));
            }
            if let Some(message) = BarrierMessage::read(self.peer, frame) {
                barrier_messages::keep(barrier_messages, self.peer, message);
                continue;
            }
            let packet: R::Packet = message::decode(self.peer, frame)?;
            self.all_received = round.take(self.peer, packet, fds)?;
        }
        Ok(())
    }
}

/// Why the deadline passed: because of peers that are gone, if there are any, else a timeout that names
/// those with which the round is not complete.
fn out_of_time(all: &[RoundProgress<'_>], waiting_for: &str, deadline: Deadline) -> RoundFault {
    if let Some(farewell) = all.iter().find_map(|peer| peer.gone.clone().flatten()) {
        return RoundFault::Farewell(farewell);
    }
    let ranks = |which: fn(&RoundProgress<'_>) -> bool| -> Vec<u32> {
        let mut ranks: Vec<u32> =
            all.iter().filter(|progress| which(progress)).map(|progress| progress.peer).collect();
        ranks.sort_unstable();
        ranks
    };
    let gone = ranks(|progress| progress.gone.is_some());
    if !gone.is_empty() {
        return Error::peer_lost(gone, CLOSED).into();
    }
    let mut waiting_for = format!("{waiting_for} with the other ranks of this machine");
    if all.iter().any(|progress| progress.send_later) {
        waiting_for.push_str(
            " (the kernel takes no more descriptors of this user: more are on their way than \
             RLIMIT_NOFILE allows)",
        );
    }
    Error::timeout(waiting_for, deadline.budget(), ranks(|progress| !progress.is_complete())).into()
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;

    #[test]
    fn a_peer_that_is_gone_is_not_sent_to_later() {
        // All its packets have come, and too many descriptors were in flight to send it the last one.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, other) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .unwrap();
        let (all_sent, all_received, send_later) = (false, true, true);
        let peer = RoundProgress {
            peer: 3,
            socket: &socket,
            all_sent,
            all_received,
            send_later,
            gone: None,
        };
        let (mut peers, mut buffer) = ([peer], PacketBuffer::new());
        assert!(wait(&mut peers, &mut buffer, Duration::ZERO).is_ok_and(|ready| ready == 0));
        drop(other);
        let found = wait(&mut peers, &mut buffer, Duration::from_secs(5));
        assert!(matches!(found, Err(RoundFault::Closed(3))));
    }

    #[test]
    fn a_wait_ends_when_a_peer_can_be_sent_to_or_received_from() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, other) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .unwrap();
        let ready = |all_sent, all_received| {
            let (send_later, gone) = (false, None);
            let peer = RoundProgress {
                peer: 3,
                socket: &socket,
                all_sent,
                all_received,
                send_later,
                gone,
            };
            wait(&mut [peer], &mut PacketBuffer::new(), Duration::ZERO).ok()
        };
        assert_eq!(ready(false, true), Some(1), "to be sent to");
        assert_eq!(ready(true, false), Some(0), "nothing came");
        assert_eq!(packet::send(&other, b"something", &[]).unwrap(), Sent::Yes);
        assert_eq!(ready(true, false), Some(1));
        assert_eq!(ready(true, true), Some(0), "what comes is for the next round");
    }
}
