//! Handing descriptors over: every rank to every other.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::Mesh;
use super::packet::{Descriptors, FDS_PER_PACKET};
use super::round::Talk;
use crate::descriptors::make_room;
use crate::rendezvous::message;
use crate::{Deadline, Error, Result};

/// Called with the sender's rank, the first descriptor's index there, and the descriptors of one
/// packet.
pub(crate) type OnReceive<'a> = dyn FnMut(u32, usize, Vec<OwnedFd>) -> Result<()> + 'a;

/// An exchange in progress.
struct Exchange<'a, 'b> {
    rank: u32,
    round: u64,
    send: &'a [BorrowedFd<'a>],
    expect: usize,
    on_receive: &'a mut OnReceive<'b>,
    legs: Vec<Leg>,
    frame: Vec<u8>,
}

/// How far the exchange with one peer has come.
#[derive(Clone, Debug, Default)]
struct Leg {
    sent: usize,
    received: usize,
    /// The peer takes part with nothing to give, because it failed before.
    withheld: bool,
}

impl Mesh {
    /// Sends all of `send` to every peer and receives `expect` descriptors from each, which
    /// `on_receive` takes in each sender's order. Collective.
    ///
    /// The sent descriptors stay with the caller, who keeps the memory behind them alive until
    /// peers have confirmed.
    ///
    /// A rank that has failed before takes part all the same, with nothing to send, so that the
    /// others do not wait for it. Returns the ranks that did so while something was expected of
    /// them; all ranks have to agree afterwards that the exchange is void.
    ///
    /// Any failure breaks the mesh, an error of `on_receive` too. A caller that wants to survive
    /// a descriptor it cannot use notes that, returns `Ok` and agrees with the others afterwards.
    /// Errors: [`Error::is_peer_lost`], [`Error::is_timeout`] (naming ranks that have not finished
    /// with this one), a mismatch where ranks are in different rounds or numbers of descriptors
    /// differ, and what another rank gave up with.
    pub(crate) fn exchange(
        &mut self,
        send: &[BorrowedFd<'_>],
        expect: usize,
        on_receive: &mut OnReceive<'_>,
        deadline: Deadline,
    ) -> Result<Vec<u32>> {
        let round = self.next_round()?;
        let legs = vec![Leg::default(); self.links.len()];
        let (rank, frame) = (self.rank, Vec::new());
        // Descriptors that come without room for them are lost.
        make_room(expect.min(FDS_PER_PACKET));
        let mut exchange = Exchange { rank, round, send, expect, on_receive, legs, frame };
        self.talk(&mut exchange, || format!("exchanging handles (round {round})"), deadline)?;
        let withheld = (0..).zip(&exchange.legs).filter(|(_, leg)| leg.withheld);
        Ok(withheld.map(|(peer, _)| peer).collect())
    }
}

impl Talk for Exchange<'_, '_> {
    type Heard = Descriptors;

    fn next(&mut self, peer: u32) -> Result<(&[u8], &[BorrowedFd<'_>])> {
        self.frame = message::encode(&Descriptors {
            round: self.round,
            first: number(self.legs[peer as usize].sent)?,
            count: number(self.batch(peer).len())?,
            total: number(self.send.len())?,
        })?;
        Ok((&self.frame, self.batch(peer)))
    }

    fn sent(&mut self, peer: u32) -> bool {
        self.legs[peer as usize].sent += self.batch(peer).len();
        self.legs[peer as usize].sent == self.send.len()
    }

    fn take(&mut self, peer: u32, announced: Descriptors, fds: Vec<OwnedFd>) -> Result<bool> {
        self.check(peer, &announced, fds.len()).map_err(|error| error.naming([peer]))?;
        let leg = &mut self.legs[peer as usize];
        if announced.total == 0 && self.expect > 0 {
            leg.withheld = true;
            return Ok(true);
        }
        let first = leg.received;
        leg.received += fds.len();
        let last = leg.received == self.expect;
        if !fds.is_empty() {
            (self.on_receive)(peer, first, fds)?;
            // Those may be kept, so that there is less room for what comes next.
            make_room(self.expect.min(FDS_PER_PACKET));
        }
        Ok(last)
    }

    fn waiting_for(&self) -> &str {
        "exchanging handles"
    }
}

impl Exchange<'_, '_> {
    /// What goes to `peer` next.
    fn batch(&self, peer: u32) -> &[BorrowedFd<'_>] {
        let rest = &self.send[self.legs[peer as usize].sent..];
        &rest[..rest.len().min(FDS_PER_PACKET)]
    }

    /// Refuses a packet that does not continue this exchange; its descriptors are then closed.
    fn check(&self, peer: u32, announced: &Descriptors, came: usize) -> Result<()> {
        let Self { rank, round, expect, legs, .. } = self;
        let received = legs[peer as usize].received;
        if announced.round != *round {
            return Err(Error::mismatch(format!(
                "rank {peer} is in round {} and exchanges handles, rank {rank} in round {round}: they \
                 made different collective calls of the pool",
                announced.round
            )));
        }
        // Nothing at all is what a rank sends that has failed.
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
