//! Handing descriptors over: every rank to every other, in one loop.
//!
//! Sending and receiving alternate, so that full socket buffers cannot make ranks wait for each
//! other in a circle. In every exchange each rank sends each peer at least one packet, even with
//! no descriptor in it: so a finished exchange also says that all peers were in the same one.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::wire::{self, Descriptors, FDS_PER_PACKET, Inbox, Received, Sent};
use super::{Mesh, at_most, farewell_of, links, poll_for};
use crate::rendezvous::message;
use crate::{Deadline, Error, Result};

/// How soon sending is tried again when too many descriptors are on their way.
const SEND_AGAIN_AFTER: Duration = Duration::from_millis(1);

/// Called with the sender's rank, the first descriptor's index there, and the descriptors of one
/// packet.
pub(crate) type OnReceive<'a> = dyn FnMut(u32, usize, Vec<OwnedFd>) -> Result<()> + 'a;

/// How far the exchange with one peer has come.
#[derive(Clone, Debug, Default)]
struct Leg {
    sent: usize,
    all_sent: bool,
    received: usize,
    all_received: bool,
    /// The peer takes part with nothing to give, because it failed before.
    withheld: bool,
    /// The last attempt to send came too early.
    send_later: bool,
}

/// Why an exchange stops.
enum Fault {
    /// This peer's connection is closed.
    Closed(u32),
    Failed(Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// What is equal for all peers in one exchange.
struct Plan<'a> {
    round: u64,
    send: &'a [BorrowedFd<'a>],
    expect: usize,
}

impl Mesh {
    /// Sends all of `send` to every peer and receives `expect` descriptors from each, which
    /// `on_receive` takes in each sender's order. Collective; `round` has to be the same on all
    /// ranks and differ from one exchange to the next.
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
        round: u64,
        send: &[BorrowedFd<'_>],
        expect: usize,
        on_receive: &mut OnReceive<'_>,
        deadline: Deadline,
    ) -> Result<Vec<u32>> {
        self.check_usable()?;
        let plan = Plan { round, send, expect };
        let outcome = self.run(&plan, on_receive, deadline);
        outcome.map_err(|fault| {
            let error = match fault {
                Fault::Closed(peer) => self.diagnose(peer),
                Fault::Failed(error) => error,
            };
            self.break_with(error).context(format!("exchanging handles (round {round})"))
        })
    }

    fn run(
        &mut self,
        plan: &Plan<'_>,
        on_receive: &mut OnReceive<'_>,
        deadline: Deadline,
    ) -> Result<Vec<u32>, Fault> {
        let mut legs = vec![Leg::default(); self.links.len()];
        // From the next rank on and around, so that not all ranks take from one peer at a time.
        let after = |&(peer, _): &(u32, _)| peer > self.rank;
        let (mut peers, before): (Vec<_>, Vec<_>) = links(&self.links).partition(after);
        peers.extend(before);
        loop {
            // Taking may be slow (it maps memory), so all are sent what there is before.
            for &(peer, socket) in &peers {
                legs[peer as usize].send(plan, peer, socket)?;
            }
            let mut unfinished = Vec::new();
            for &(peer, socket) in &peers {
                let leg = &mut legs[peer as usize];
                leg.receive(plan, self.rank, peer, socket, &mut self.inbox, on_receive)?;
                if !(leg.all_sent && leg.all_received) {
                    unfinished.push(peer);
                }
            }
            if unfinished.is_empty() {
                let withheld = (0..).zip(&legs).filter(|(_, leg)| leg.withheld);
                return Ok(withheld.map(|(peer, _)| peer).collect());
            }
            if deadline.expired() {
                return Err(timeout(&legs, unfinished, deadline).into());
            }
            let mut limit = Duration::MAX;
            let mut polled = Vec::with_capacity(unfinished.len());
            for &(peer, socket) in &peers {
                let leg = &legs[peer as usize];
                let mut events = PollFlags::empty();
                events.set(PollFlags::IN, !leg.all_received);
                events.set(PollFlags::OUT, !leg.all_sent && !leg.send_later);
                if leg.send_later {
                    limit = SEND_AGAIN_AFTER;
                }
                if !(leg.all_sent && leg.all_received) {
                    polled.push(PollFd::new(socket, events));
                }
            }
            poll_for(&mut polled, at_most(limit, deadline))?;
        }
    }
}

impl Leg {
    /// Sends until all is sent or no more can be.
    fn send(&mut self, plan: &Plan<'_>, peer: u32, socket: &OwnedFd) -> Result<(), Fault> {
        self.send_later = false;
        while !self.all_sent {
            let count = (plan.send.len() - self.sent).min(FDS_PER_PACKET);
            let frame = message::encode(&Descriptors {
                round: plan.round,
                first: number(self.sent)?,
                count: number(count)?,
                total: number(plan.send.len())?,
            })?;
            match wire::send(socket, &frame, &plan.send[self.sent..self.sent + count])? {
                Sent::Yes => {
                    self.sent += count;
                    self.all_sent = self.sent == plan.send.len();
                }
                Sent::WouldBlock => break,
                Sent::TryLater => {
                    self.send_later = true;
                    break;
                }
                Sent::Closed => return Err(Fault::Closed(peer)),
            }
        }
        Ok(())
    }

    /// Receives until all is received or no more is there. Does not touch what a fast peer may
    /// have sent for the next exchange.
    fn receive(
        &mut self,
        plan: &Plan<'_>,
        rank: u32,
        peer: u32,
        socket: &OwnedFd,
        inbox: &mut Inbox,
        on_receive: &mut OnReceive<'_>,
    ) -> Result<(), Fault> {
        while !self.all_received {
            let (frame, fds) = match inbox.receive(peer, socket)? {
                Received::WouldBlock => break,
                Received::Closed => return Err(Fault::Closed(peer)),
                Received::Packet { frame, fds } => (frame, fds),
            };
            if let Some(error) = farewell_of(peer, frame) {
                return Err(error.into());
            }
            let announced: Descriptors = message::decode(peer, frame)?;
            self.check(plan, rank, peer, &announced, fds.len())?;
            if announced.total == 0 && plan.expect > 0 {
                self.withheld = true;
                self.all_received = true;
                break;
            }
            if !fds.is_empty() {
                let first = self.received;
                self.received += fds.len();
                on_receive(peer, first, fds)?;
            }
            self.all_received = self.received == plan.expect;
        }
        Ok(())
    }

    /// Refuses a packet that does not continue this exchange; its descriptors are then closed.
    fn check(
        &self,
        plan: &Plan<'_>,
        rank: u32,
        peer: u32,
        announced: &Descriptors,
        came: usize,
    ) -> Result<()> {
        let Plan { round, expect, .. } = plan;
        if announced.round != *round {
            return Err(Error::mismatch(format!(
                "rank {peer} is in round {} of the exchange of handles, rank {rank} in round \
                 {round}: they took part in different numbers of commits",
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
        let continues = announced.first as usize == self.received;
        let empty = came == 0 && announced.total == 0;
        let fits = self.received + came <= *expect && (came > 0 || empty);
        if !continues || announced.count as usize != came || !fits {
            return Err(Error::mismatch(format!(
                "rank {peer} announces handles {} to {} of {expect} in round {round}, and {came} \
                 came after {}",
                announced.first,
                u64::from(announced.first) + u64::from(announced.count),
                self.received
            )));
        }
        Ok(())
    }
}

fn number(n: usize) -> Result<u32> {
    u32::try_from(n).map_err(|_| Error::invalid_argument(format!("{n} handles in one exchange")))
}

fn timeout(legs: &[Leg], unfinished: Vec<u32>, deadline: Deadline) -> Error {
    let mut waiting_for = String::from("exchanging handles with the other ranks of this machine");
    if legs.iter().any(|leg| leg.send_later) {
        waiting_for.push_str(
            " (the kernel takes no more descriptors of this user: more are on their way than \
             RLIMIT_NOFILE allows)",
        );
    }
    Error::timeout(waiting_for, deadline.budget(), unfinished)
}
