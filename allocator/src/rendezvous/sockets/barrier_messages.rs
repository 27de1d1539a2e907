//! Messages of barriers on the host: what a rank says between rounds. Others hear it whenever they listen, in a round or outside.
//!
//! Such a message belongs to no round, so a rank may say something and leave again, and rounds go on as before. Packets of one rank
//! keep their order: a message behind a packet of a round is heard in that round or after it.

use super::packet::{self, BarrierMessage, BarrierStep, Peeked, ReceivedPacket, Sent};
use super::{CLOSED, PeerSockets, closed, connected};
use crate::rendezvous::message;
use crate::{Error, Result};

/// Messages of one peer that may wait to be heard. A rank says three things about a barrier, and is in few at a time.
pub(super) const MAX_UNHEARD: usize = 1024;

/// Keeps a message of `peer`, in place of its oldest one where too many are unheard: those are of barriers that this rank has
/// given up, or the peer sends what no rank sends.
pub(super) fn keep(unheard: &mut Vec<(u32, BarrierMessage)>, peer: u32, message: BarrierMessage) {
    let of_peer = |unheard: &[(u32, BarrierMessage)]| {
        unheard.iter().filter(|(rank, _)| *rank == peer).count()
    };
    if unheard.len() >= MAX_UNHEARD
        && of_peer(unheard) >= MAX_UNHEARD
        && let Some(oldest) = unheard.iter().position(|(rank, _)| *rank == peer)
    {
        unheard.remove(oldest);
    }
    unheard.push((peer, message));
}

impl PeerSockets {
    /// Sends a message to every peer that has not been `sent` it, as far as sockets take it now. Returns whether all have it.
    ///
    /// # Errors
    ///
    /// [`Error::is_peer_lost`], and the error of an earlier failure. Other peers have the message then.
    pub(crate) fn say(&self, message: &BarrierMessage, sent: &mut Vec<u32>) -> Result<bool> {
        self.check()?;
        let frame = message::encode(message)?;
        let mut lost = Vec::new();
        for (rank, socket) in connected(&self.sockets) {
            if sent.contains(&rank) {
                continue;
            }
            match packet::send(socket, &frame, &[])? {
                Sent::Yes => sent.push(rank),
                Sent::WouldBlock | Sent::TryLater => {}
                Sent::Closed => lost.push(rank),
            }
        }
        if !lost.is_empty() {
            return Err(Error::peer_lost(lost, CLOSED));
        }
        Ok(connected(&self.sockets).all(|(rank, _)| sent.contains(&rank)))
    }

    /// Messages of peers about a barrier since the last call, each with its rank. Does not wait.
    pub(crate) fn heard(&mut self, id: (u64, u64)) -> Vec<(u32, BarrierStep)> {
        self.take_in_barrier_messages();
        let about = self.barrier_messages.extract_if(.., |(_, message)| message.id == id);
        about.map(|(rank, message)| (rank, message.step)).collect()
    }

    /// Fails if a peer is gone, or failed, or ranks cannot talk since an earlier failure. Does not wait.
    pub(crate) fn check_all_here(&mut self) -> Result<()> {
        self.check()?;
        let gone = closed(connected(&self.sockets));
        let Self { sockets, buffer, .. } = self;
        let farewells = connected(sockets).filter(|(rank, _)| gone.contains(rank));
        for (rank, socket) in farewells {
            if let Some(farewell) = buffer.farewell(rank, socket) {
                return Err(farewell.into_loss());
            }
        }
        if gone.is_empty() { Ok(()) } else { Err(Error::peer_lost(gone, CLOSED)) }
    }

    /// Takes messages of barriers out of the sockets, as far as no packet of a round is before them.
    pub(super) fn take_in_barrier_messages(&mut self) {
        let Self { sockets, buffer, barrier_messages, .. } = self;
        for (rank, socket) in connected(sockets) {
            // A peer that sends without end does not hold this rank up.
            for _ in 0..MAX_UNHEARD {
                let Ok(Peeked::Frame(frame)) = buffer.peek(socket) else { break };
                if BarrierMessage::read(rank, frame).is_none() {
                    break;
                }
                let Ok(ReceivedPacket::Packet { frame, .. }) = buffer.receive(rank, socket) else {
                    break;
                };
                if let Some(message) = BarrierMessage::read(rank, frame) {
                    keep(barrier_messages, rank, message);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peers_oldest_messages_make_room_for_its_latest() {
        let message = |id: u64| BarrierMessage { id: (id, 0), step: BarrierStep::GoesOn };
        let mut unheard = vec![(2, message(9))];
        (0..MAX_UNHEARD as u64 + 3).for_each(|id| keep(&mut unheard, 1, message(id)));
        assert_eq!(unheard.len(), MAX_UNHEARD + 1);
        assert_eq!(
            (unheard[0].0, unheard[1].1.id),
            (2, (3, 0)),
            "another peer's is not its to take"
        );
    }
}
