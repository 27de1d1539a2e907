//! Telling everybody something: every rank's bytes to every other.

use std::os::fd::OwnedFd;

use super::Mesh;
use super::talk::{Fault, Progress, Talk, hear};
use super::wire::{self, BYTES_PER_PACKET, Inbox, Part, Sent};
use crate::rendezvous::message;
use crate::store::{Gathered, MAX_VALUE};
use crate::{Deadline, Error, Result};

/// A gather in progress.
struct Gather<'a> {
    rank: u32,
    round: u64,
    what: &'a str,
    value: &'a [u8],
    legs: Vec<Leg>,
}

/// How far the gather with one peer has come.
#[derive(Clone, Debug, Default)]
struct Leg {
    progress: Progress,
    sent: usize,
    received: Vec<u8>,
}

impl Mesh {
    /// Every rank's `value`, in rank order. Collective; `what` says in messages what is gathered, and
    /// has to be the same on all ranks.
    ///
    /// Costs each rank a packet to and from each peer where values fit into one. Any failure breaks
    /// the mesh: [`Error::is_peer_lost`] at once, [`Error::is_timeout`] naming ranks that did not
    /// come, a mismatch where ranks gather different things, what another rank gave up with, and
    /// [`Error::is_invalid_state`] after an interrupt. Which ranks were told before is not known
    /// then. A value longer than [`MAX_VALUE`] is refused here, and the others are told.
    pub(crate) fn all_gather(
        &mut self,
        what: &str,
        value: &[u8],
        deadline: Deadline,
    ) -> Result<Gathered> {
        let round = self.next_round()?;
        let doing = || format!("gathering {what:?} (round {round})");
        if value.len() > MAX_VALUE {
            let message = format!("a value of {} bytes; the limit is {MAX_VALUE}", value.len());
            let error = Fault::Failed(Error::invalid_argument(message));
            return Err(self.break_with(error).context(doing()));
        }
        let legs = vec![Leg::default(); self.links.len()];
        let mut gather = Gather { rank: self.rank, round, what, value, legs };
        self.talk(&mut gather, doing, deadline)?;
        let parts = (0..)
            .zip(&gather.legs)
            .map(|(peer, leg)| if peer == gather.rank { value } else { leg.received.as_slice() });
        Ok(Gathered::from_parts(parts))
    }
}

impl Talk for Gather<'_> {
    fn send(&mut self, peer: u32, socket: &OwnedFd) -> Result<(), Fault> {
        let leg = &mut self.legs[peer as usize];
        leg.progress.send_later = false;
        while !leg.progress.all_sent {
            let rest = &self.value[leg.sent..];
            let bytes = &rest[..rest.len().min(BYTES_PER_PACKET)];
            let frame = message::encode(&Part {
                round: self.round,
                what: self.what.to_owned(),
                first: leg.sent as u64,
                total: self.value.len() as u64,
                bytes: bytes.to_vec(),
            })?;
            match wire::send(socket, &frame, &[])? {
                Sent::Yes => {
                    leg.sent += bytes.len();
                    leg.progress.all_sent = leg.sent == self.value.len();
                }
                Sent::WouldBlock => break,
                Sent::TryLater => {
                    leg.progress.send_later = true;
                    break;
                }
                Sent::Closed => return Err(Fault::Closed(peer)),
            }
        }
        Ok(())
    }

    fn receive(&mut self, peer: u32, socket: &OwnedFd, inbox: &mut Inbox) -> Result<(), Fault> {
        while !self.progress(peer).all_received {
            let Some((part, _)) = hear::<Part>(peer, socket, inbox)? else { break };
            self.check(peer, &part)?;
            let leg = &mut self.legs[peer as usize];
            leg.received.extend(&part.bytes);
            leg.progress.all_received = leg.received.len() as u64 == part.total;
        }
        Ok(())
    }

    fn progress(&self, peer: u32) -> &Progress {
        &self.legs[peer as usize].progress
    }

    fn waiting_for(&self) -> String {
        format!("in the gather {:?} with the other ranks of this machine", self.what)
    }
}

impl Gather<'_> {
    /// Refuses a packet that does not continue this gather.
    fn check(&self, peer: u32, part: &Part) -> Result<()> {
        let Self { rank, round, what, legs, .. } = self;
        if part.round != *round || part.what != *what {
            return Err(Error::mismatch(format!(
                "rank {peer} is in round {} and gathers {:?}, rank {rank} in round {round} and \
                 gathers {what:?}: they made different collective calls of the pool",
                part.round, part.what
            )));
        }
        let received = legs[peer as usize].received.len() as u64;
        let end = received + part.bytes.len() as u64;
        let moves = !part.bytes.is_empty() || part.total == 0;
        if part.first != received || end > part.total || part.total > MAX_VALUE as u64 || !moves {
            return Err(Error::mismatch(format!(
                "rank {peer} sends bytes {} to {} of {} for {what:?}, and {received} had come",
                part.first,
                part.first + part.bytes.len() as u64,
                part.total
            )));
        }
        Ok(())
    }
}
