//! Exchanges: every rank's file descriptors go to every other rank.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::PeerSockets;
use super::packet::{Descriptors, FDS_PER_PACKET};
use super::round::Round;
use crate::descriptors::make_room;
use crate::rendezvous::message;
use crate::{Deadline, Error, Result};

/// Called with the sender's rank, the first descriptor's index there, and the descriptors of one
/// packet.
pub(crate) type OnReceive<'a> = dyn FnMut(u32, usize, Vec<OwnedFd>) -> Result<()> + 'a;

/// An exchange in progress.
struct ExchangeUnderWay<'a, 'b> {
    rank: u32,
    round: u64,
    send: &'a [BorrowedFd<'a>],
    expect: usize,
    on_receive: &'a mut OnReceive<'b>,
    peers: Vec<PeerProgress>,
    frame: Vec<u8>,
}

/// How far the exchange with one peer has come.
#[derive(Clone, Debug, Default)]
struct PeerProgress {
    sent: usize,
    received: usize,
    /// The peer takes part with no descriptors, because it failed before.
    sent_nothing: bool,
}

impl PeerSockets {
    /// Sends all of `send` to every peer and receives `expect` descriptors from each, which
    /// `on_receive` takes in each sender's order. Collective.
    ///
    /// The sent descriptors stay with the caller, who keeps the memory behind them alive until
    /// peers have confirmed.
    ///
    /// A rank that has failed before still takes part, with nothing to send, so that the others do not
    /// wait for it. Returns the ranks that did so although descriptors were expected of them; all ranks
    /// must agree afterwards that the exchange is void.
    ///
    /// Any failure breaks the connections, an error of `on_receive` too. A caller that can go on without
    /// a descriptor returns `Ok` from `on_receive` and agrees with the others afterwards. Errors:
    /// [`Error::is_peer_lost`], [`Error::is_timeout`] (naming ranks that have not finished with this
    /// one), a mismatch where ranks are in different rounds or numbers of descriptors differ, and the
    /// error of another rank that gave up.
    pub(crate) fn exchange(
        &mut self,
        send: &[BorrowedFd<'_>],
        expect: usize,
        on_receive: &mut OnReceive<'_>,
        deadline: Deadline,
    ) -> Result<Vec<u32>> {
        let round = self.next_round()?;
        let peers = vec![PeerProgress::default(); self.sockets.len()];
        let (rank, frame) = (self.rank, Vec::new());
        // The kernel drops descriptors that arrive when the process is at its limit.
        make_room(expect.min(FDS_PER_PACKET));
        let mut exchange = ExchangeUnderWay { rank, round, send, expect, on_receive, peers, frame };
        self.run_round(&mut exchange, || format!("exchanging handles (round {round})"), deadline)?;
        let failed = (0..).zip(&exchange.peers).filter(|(_, progress)| progress.sent_nothing);
        Ok(failed.map(|(peer, _)| peer).collect())
    }
}

impl Round for ExchangeUnderWay<'_, '_> {
    type Packet = Descriptors;

    fn next(&mut self, peer: u32) -> Result<(&[u8], &[BorrowedFd<'_>])> {
        self.frame = message::encode(&Descriptors {
            round: self.round,
            first: number(self.peers[peer as usize].sent)?,
            count: number(self.batch(peer).len())?,
            total: number(self.send.len())?,
        })?;
        Ok((&self.frame, self.batch(peer)))
    }

    fn sent(&mut self, peer: u32) -> bool {
        self.peers[peer as usize].sent += self.batch(peer).len();
        self.peers[peer as usize].sent == self.send.len()
    }

    fn take(&mut self, peer: u32, announced: Descriptors, fds: Vec<OwnedFd>) -> Result<bool> {
        self.check(peer, &announced, fds.len()).map_err(|error| error.naming([peer]))?;
        let progress = &mut self.peers[peer as usize];
        if announced.total == 0 && self.expect > 0 {
            progress.sent_nothing = true;
            return Ok(true);
        }
        let first = progress.received;
        progress.received += fds.len();
        let last = progress.received == self.expect;
        if !fds.is_empty() {
            (self.on_receive)(peer, first, fds)?;
            // These may be kept open, so the limit may be reached before the next ones arrive.
            make_room(self.expect.min(FDS_PER_PACKET));
        }
        Ok(last)
    }

    fn waiting_for(&self) -> &str {
        "exchanging handles"
    }
}

impl ExchangeUnderWay<'_, '_> {
    /// The descriptors that `peer` is sent next.
    fn batch(&self, peer: u32) -> &[BorrowedFd<'_>] {
        let rest = &self.send[self.peers[peer as usize].sent..];
        &rest[..rest.len().min(FDS_PER_PACKET)]
    }

    /// Refuses a packet that does not continue this exchange; its descriptors are then closed.
    fn check(&self, peer: u32, announced: &Descriptors, came: usize) -> Result<()> {
        let Self { rank, round, expect, peers, .. } = self;
        let received = peers[peer as usize].received;
        if announced.round != *round {
            return Err(Error::mismatch(format!(
                "rank {peer} is in round {} and exchanges handles, rank {rank} in round {round}: they \
                 made different collective calls of the pool",
                announced.round
            )));
        }
        // A rank that has failed before announces a total of 0.
        if announced.total as usize != *expect && announced.total != 0 {
            return Err(Error::mismatch(format!(
                "rank {peer} sends {} handles in round {round}, rank {rank} expects {expect}",
                announced.total
            )));
        }
        let continues = announced.first as usize == received;
        let empty = came == 0 && announced.total == 0;
        let fits = received + came <= *expect && (came > 0 || empty);
        if !continues || announced.count as usize != came || !fits {
            return Err(Error::mismatch(format!(
                "rank {peer} announces handles {} to {} of {expect} in round {round}, and {came} \
                 came after {}",
                announced.first,
                u64::from(announced.first) + u64::from(announced.count),
                received
            )));
        }
        Ok(())
    }
}

fn number(n: usize) -> Result<u32> {
    u32::try_from(n).map_err(|_| Error::invalid_argument(format!("{n} handles in one exchange")))
}
