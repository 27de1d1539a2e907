//! Gathers: every rank's bytes go to every other rank.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::packet::{BYTES_PER_PACKET, Part};
use super::round::Round;
use super::{PeerSockets, RoundFault};
use crate::rendezvous::message;
use crate::store::{Gathered, MAX_VALUE};
use crate::{Deadline, Error, Result};

/// A gather in progress.
struct Gather<'a> {
    rank: u32,
    round: u64,
    what: &'a str,
    waiting_for: String,
    value: &'a [u8],
    /// How many bytes were sent to each rank, and the bytes received from each.
    sent: Vec<usize>,
    received: Vec<Vec<u8>>,
    /// The first byte of the piece that `frame` holds. Every peer is sent the same pieces.
    framed: Option<usize>,
    frame: Vec<u8>,
}

impl PeerSockets {
    /// Every rank's `value`, in rank order. Every rank must make this call, with the same `what`, which says in
    /// messages what is gathered.
    ///
    /// Each rank sends one packet to each peer if its value fits into one. Any failure breaks the
    /// connections: [`Error::is_peer_lost`] at once, [`Error::is_timeout`] naming ranks that did not
    /// come, a mismatch where ranks gather different things, the error of another rank that gave up, and
    /// [`Error::is_invalid_state`] after an interrupt. Some ranks may have received this rank's value by
    /// then. A value longer than [`MAX_VALUE`] is refused here, and the others receive that error.
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
            let error = RoundFault::Failed(Error::invalid_argument(message));
            return Err(self.break_with(error).context(doing()));
        }
        let ranks = self.sockets.len();
        let mut gather = Gather {
            rank: self.rank,
            round,
            what,
            waiting_for: format!("in the gather {what:?}"),
            value,
            sent: vec![0; ranks],
            received: vec![Vec::new(); ranks],
            framed: None,
            frame: Vec::new(),
        };
        self.run_round(&mut gather, doing, deadline)?;
        let parts = (0..).zip(&gather.received);
        let parts =
            parts.map(|(peer, part)| if peer == gather.rank { value } else { part.as_slice() });
        Ok(Gathered::from_parts(parts))
    }
}

impl Round for Gather<'_> {
    type Packet = Part;

    fn next(&mut self, peer: u32) -> Result<(&[u8], &[BorrowedFd<'_>])> {
        let first = self.sent[peer as usize];
        if self.framed != Some(first) {
            self.frame = message::encode(&Part {
                round: self.round,
                what: self.what.to_owned(),
                first: first as u64,
                total: self.value.len() as u64,
                bytes: self.piece(peer).to_vec(),
            })?;
            self.framed = Some(first);
        }
        Ok((&self.frame, &[]))
    }

    fn sent(&mut self, peer: u32) -> bool {
        self.sent[peer as usize] += self.piece(peer).len();
        self.sent[peer as usize] == self.value.len()
    }

    fn take(&mut self, peer: u32, part: Part, _: Vec<OwnedFd>) -> Result<bool> {
        self.check(peer, &part).map_err(|error| error.naming([peer]))?;
        let received = &mut self.received[peer as usize];
        received.extend(&part.bytes);
        Ok(received.len() as u64 == part.total)
    }

    fn waiting_for(&self) -> &str {
        &self.waiting_for
    }
}

impl Gather<'_> {
    /// The bytes that `peer` is sent next.
    fn piece(&self, peer: u32) -> &[u8] {
        let rest = &self.value[self.sent[peer as usize]..];
        &rest[..rest.len().min(BYTES_PER_PACKET)]
    }

    /// Refuses a packet that does not continue this gather.
    fn check(&self, peer: u32, part: &Part) -> Result<()> {
        let Self { rank, round, what, .. } = self;
        if part.round != *round || part.what != *what {
            return Err(Error::mismatch(format!(
                "rank {peer} is in round {} and gathers {:?}, rank {rank} in round {round} and \
                 gathers {what:?}: they made different collective calls of the pool",
                part.round, part.what
            )));
        }
        let received = self.received[peer as usize].len() as u64;
        let end = received + part.bytes.len() as u64;
        let moves = !part.bytes.is_empty() || part.total == 0;
        if part.first != received || end > part.total || part.total > MAX_VALUE as u64 || !moves {
            return Err(Error::mismatch(format!(
                "rank {peer} sends bytes {} to {} of {} for {what:?}, and {received} had come",
                part.first,
                // A damaged packet may begin anywhere.
                part.first.saturating_add(part.bytes.len() as u64),
                part.total
            )));
        }
        Ok(())
    }
}
