//! What all that ranks tell each other has in common: one loop that sends to all and hears all.
//!
//! Sending and receiving alternate, so that full socket buffers cannot make ranks wait for each
//! other in a circle. Each rank sends each peer at least one packet a talk, however little it has
//! to say: so a finished talk also says that all peers were in the same one.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::wire::{Farewell, Inbox, Received};
use super::{Mesh, at_most, links, poll_for};
use crate::group::Interrupt;
use crate::rendezvous::message::{self, Message};
use crate::{Deadline, Error, Result};

/// How soon sending is tried again when too many descriptors are on their way.
const SEND_AGAIN_AFTER: Duration = Duration::from_millis(1);

/// How often a rank that waits asks whether it is to stop.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// Why a talk stops.
pub(super) enum Fault {
    /// This peer's connection is closed.
    Closed(u32),
    /// A peer gave up.
    GaveUp(Farewell),
    Failed(Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// How far a talk with one peer has come.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    pub(super) all_sent: bool,
    pub(super) all_received: bool,
    /// The last attempt to send came too early.
    pub(super) send_later: bool,
}

impl Progress {
    fn is_over(&self) -> bool {
        self.all_sent && self.all_received
    }
}

/// What ranks tell each other.
pub(super) trait Talk {
    /// Sends `peer` what is left, until all is sent or no more can be.
    fn send(&mut self, peer: u32, socket: &OwnedFd) -> Result<(), Fault>;

    /// Receives from `peer`, until all is received or no more is there. Does not touch what a fast
    /// peer may have sent for the next talk.
    fn receive(&mut self, peer: u32, socket: &OwnedFd, inbox: &mut Inbox) -> Result<(), Fault>;

    /// How far the talk with `peer` has come.
    fn progress(&self, peer: u32) -> &Progress;

    /// Completes "timed out after 3 s …".
    fn waiting_for(&self) -> String;
}

impl Mesh {
    /// Talks with all peers until all is said. Any failure breaks the mesh; `what` is being done.
    pub(super) fn talk(
        &mut self,
        talk: &mut impl Talk,
        what: impl FnOnce() -> String,
        deadline: Deadline,
    ) -> Result<()> {
        self.run(talk, deadline).map_err(|fault| {
            let fault = match fault {
                Fault::Closed(peer) => self.diagnose(peer),
                fault => fault,
            };
            self.break_with(fault).context(what())
        })
    }

    fn run(&mut self, talk: &mut impl Talk, deadline: Deadline) -> Result<(), Fault> {
        // From the next rank on and around, so that not all ranks take from one peer at a time.
        let after = |&(peer, _): &(u32, _)| peer > self.rank;
        let (mut peers, before): (Vec<_>, Vec<_>) = links(&self.links).partition(after);
        peers.extend(before);
        loop {
            // Taking may be slow (it maps memory), so all are sent what there is before.
            for &(peer, socket) in &peers {
                if !talk.progress(peer).all_sent {
                    talk.send(peer, socket)?;
                }
            }
            for &(peer, socket) in &peers {
                if !talk.progress(peer).all_received {
                    talk.receive(peer, socket, &mut self.inbox)?;
                }
            }
            peers.retain(|&(peer, _)| !talk.progress(peer).is_over());
            if peers.is_empty() {
                return Ok(());
            }
            if deadline.expired() {
                let mut missing: Vec<u32> = peers.iter().map(|&(peer, _)| peer).collect();
                missing.sort_unstable();
                return Err(Error::timeout(talk.waiting_for(), deadline.budget(), missing).into());
            }
            let mut limit = if self.interrupt.is_some() { ASK_EVERY } else { Duration::MAX };
            let mut polled = Vec::with_capacity(peers.len());
            for &(peer, socket) in &peers {
                let progress = talk.progress(peer);
                let mut events = PollFlags::empty();
                events.set(PollFlags::IN, !progress.all_received);
                events.set(PollFlags::OUT, !progress.all_sent && !progress.send_later);
                if progress.send_later {
                    limit = limit.min(SEND_AGAIN_AFTER);
                }
                polled.push(PollFd::new(socket, events));
            }
            let ready = poll_for(&mut polled, at_most(limit, deadline))?;
            if ready == 0 && self.interrupt.as_ref().is_some_and(Interrupt::asked) {
                return Err(
                    Error::invalid_state("interrupted while waiting for other ranks").into()
                );
            }
        }
    }
}

/// The next message of `peer` and the descriptors with it. `None` when nothing has come yet.
pub(super) fn hear<M: Message>(
    peer: u32,
    socket: &OwnedFd,
    inbox: &mut Inbox,
) -> Result<Option<(M, Vec<OwnedFd>)>, Fault> {
    match inbox.receive(peer, socket)? {
        Received::WouldBlock => Ok(None),
        Received::Closed => Err(Fault::Closed(peer)),
        Received::Packet { frame, fds } => match Farewell::read(peer, frame) {
            Some(farewell) => Err(Fault::GaveUp(farewell)),
            None => Ok(Some((message::decode(peer, frame)?, fds))),
        },
    }
}
