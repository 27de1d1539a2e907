//! What all that ranks tell each other has in common: one loop that sends to all and hears all.
//!
//! Sending and receiving alternate, so that full socket buffers cannot make ranks wait for each
//! other in a circle. Each rank sends each peer at least one packet a talk, however little it has
//! to say: so a finished talk also says that all peers were in the same one.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::packet::{self, Farewell, Inbox, Received, Sent};
use super::{CLOSED, Mesh, at_most, is_closed, links, poll_for};
use crate::group::Interrupt;
use crate::rendezvous::message::{self, Message};
use crate::{Deadline, Error, Result};

/// How soon sending is tried again when too many descriptors are on their way.
const SEND_AGAIN_AFTER: Duration = Duration::from_millis(1);

/// How often a rank that waits asks whether it is to stop.
const ASK_EVERY: Duration = Duration::from_secs(1);

const INTERRUPTED: &str = "interrupted while waiting for other ranks";

/// How long others are waited for once a peer has gone that had said all it had to say. It may have
/// ended the talk; but then they have told it what is waited for here, and it is on its way.
const WAIT_AFTER_LOSS: Duration = Duration::from_secs(2);

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

/// What ranks tell each other.
pub(super) trait Talk {
    /// What comes from peers, packet by packet.
    type Heard: Message;

    /// The next packet for `peer`: a frame, and descriptors that go with it. Asked for again until it
    /// could be sent.
    fn next(&mut self, peer: u32) -> Result<(&[u8], &[BorrowedFd<'_>])>;

    /// It has been sent. Whether it was the last.
    fn sent(&mut self, peer: u32) -> bool;

    /// Takes a packet of `peer`. Whether it was the last.
    fn take(&mut self, peer: u32, heard: Self::Heard, fds: Vec<OwnedFd>) -> Result<bool>;

    /// Completes "timed out after 3 s …".
    fn waiting_for(&self) -> &str;
}

/// How far a talk with one peer has come.
struct Leg<'a> {
    peer: u32,
    socket: &'a OwnedFd,
    all_sent: bool,
    all_received: bool,
    /// The last attempt to send came too early.
    send_later: bool,
    /// The peer has closed the connection, after it had said all: and why, if it said that.
    gone: Option<Option<Farewell>>,
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
        let leg = |(peer, socket)| Leg {
            peer,
            socket,
            all_sent: false,
            all_received: false,
            send_later: false,
            gone: None,
        };
        // From the next rank on and around, so that not all ranks take from one peer at a time.
        let (mut legs, before): (Vec<_>, Vec<_>) =
            links(&self.links).map(leg).partition(|leg| leg.peer > self.rank);
        legs.extend(before);
        let mut asked = Instant::now();
        let mut until = deadline;
        loop {
            // Taking may be slow (it maps memory), so all are sent what there is before.
            for leg in &mut legs {
                leg.send(talk)?;
            }
            for leg in &mut legs {
                leg.receive(talk, &mut self.inbox)?;
            }
            if legs.iter().all(Leg::is_over) {
                return Ok(());
            }
            if until.expired() {
                return Err(out_of_time(&legs, talk.waiting_for(), deadline));
            }
            let send_later = legs.iter().any(|leg| leg.send_later);
            let limit = if send_later { SEND_AGAIN_AFTER } else { ASK_EVERY };
            let ready = wait(&mut legs, &mut self.inbox, at_most(limit, until))?;
            if legs.iter().any(|leg| leg.gone.is_some()) {
                until = until.min(Deadline::after(WAIT_AFTER_LOSS));
            }
            if (ready == 0 && !send_later) || asked.elapsed() >= ASK_EVERY {
                asked = Instant::now();
                if self.interrupt.as_ref().is_some_and(Interrupt::asked) {
                    return Err(Error::invalid_state(INTERRUPTED).into());
                }
            }
        }
    }
}

/// Waits until a peer can be sent to or heard, at most for `limit`; says how many can. Peers that
/// have said all are looked at, too: one that is gone, or gave up, may be what others are waited
/// for in vain.
fn wait(legs: &mut [Leg<'_>], inbox: &mut Inbox, limit: Duration) -> Result<usize, Fault> {
    let mut there: Vec<_> = legs.iter_mut().filter(|leg| leg.gone.is_none()).collect();
    let mut polled: Vec<_> = there.iter().map(|leg| leg.poll()).collect();
    let ready = poll_for(&mut polled, limit)?;
    for (leg, poll) in there.iter_mut().zip(&polled) {
        if !is_closed(poll) {
            continue;
        }
        if leg.is_over() {
            leg.gone = Some(inbox.farewell(leg.peer, leg.socket));
        } else if leg.all_received && leg.send_later {
            // Sending would go on to say that there are too many descriptors, not who is gone.
            return Err(Fault::Closed(leg.peer));
        }
    }
    Ok(ready)
}

impl<'a> Leg<'a> {
    fn is_over(&self) -> bool {
        self.all_sent && self.all_received
    }

    /// What is waited for.
    fn poll(&self) -> PollFd<'a> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, !self.all_received);
        events.set(PollFlags::OUT, !self.all_sent && !self.send_later);
        PollFd::new(self.socket, events)
    }

    /// Sends until all is sent or no more can be.
    fn send(&mut self, talk: &mut impl Talk) -> Result<(), Fault> {
        self.send_later = false;
        while !self.all_sent {
            let (frame, fds) = talk.next(self.peer)?;
            match packet::send(self.socket, frame, fds)? {
                Sent::Yes => self.all_sent = talk.sent(self.peer),
                Sent::WouldBlock => break,
                Sent::TryLater => {
                    self.send_later = true;
                    break;
                }
                Sent::Closed => return Err(Fault::Closed(self.peer)),
            }
        }
        Ok(())
    }

    /// Receives until all is received or no more is there. Does not touch what a fast peer may
    /// have sent for the next talk.
    fn receive<T: Talk>(&mut self, talk: &mut T, inbox: &mut Inbox) -> Result<(), Fault> {
        while !self.all_received {
            let (frame, fds) = match inbox.receive(self.peer, self.socket)? {
                Received::WouldBlock => break,
                Received::Closed => return Err(Fault::Closed(self.peer)),
                Received::Packet { frame, fds } => (frame, fds),
            };
            if let Some(farewell) = Farewell::read(self.peer, frame) {
                return Err(Fault::GaveUp(farewell));
            }
            let heard: T::Heard = message::decode(self.peer, frame)?;
            self.all_received = talk.take(self.peer, heard, fds)?;
        }
        Ok(())
    }
}

/// A peer that is gone is why others were waited for in vain.
fn out_of_time(legs: &[Leg<'_>], waiting_for: &str, deadline: Deadline) -> Fault {
    if let Some(farewell) = legs.iter().find_map(|leg| leg.gone.clone().flatten()) {
        return Fault::GaveUp(farewell);
    }
    let peers = |which: fn(&Leg<'_>) -> bool| -> Vec<u32> {
        let mut peers: Vec<u32> =
            legs.iter().filter(|leg| which(leg)).map(|leg| leg.peer).collect();
        peers.sort_unstable();
        peers
    };
    let gone = peers(|leg| leg.gone.is_some());
    if !gone.is_empty() {
        return Error::peer_lost(gone, CLOSED).into();
    }
    let mut waiting_for = format!("{waiting_for} with the other ranks of this machine");
    if legs.iter().any(|leg| leg.send_later) {
        waiting_for.push_str(
            " (the kernel takes no more descriptors of this user: more are on their way than \
             RLIMIT_NOFILE allows)",
        );
    }
    Error::timeout(waiting_for, deadline.budget(), peers(|leg| !leg.is_over())).into()
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;

    #[test]
    fn a_peer_that_is_gone_is_not_sent_to_later() {
        // It has said all, and too many descriptors were on their way to say the last to it.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, other) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .unwrap();
        let (all_sent, all_received, send_later) = (false, true, true);
        let leg = Leg { peer: 3, socket: &socket, all_sent, all_received, send_later, gone: None };
        let (mut legs, mut inbox) = ([leg], Inbox::new());
        assert!(wait(&mut legs, &mut inbox, Duration::ZERO).is_ok_and(|ready| ready == 0));
        drop(other);
        let found = wait(&mut legs, &mut inbox, Duration::from_secs(5));
        assert!(matches!(found, Err(Fault::Closed(3))));
    }

    #[test]
    fn a_wait_ends_when_a_peer_can_be_sent_to_or_heard() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, other) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .unwrap();
        let ready = |all_sent, all_received| {
            let (send_later, gone) = (false, None);
            let leg = Leg { peer: 3, socket: &socket, all_sent, all_received, send_later, gone };
            wait(&mut [leg], &mut Inbox::new(), Duration::ZERO).ok()
        };
        assert_eq!(ready(false, true), Some(1), "to be sent to");
        assert_eq!(ready(true, false), Some(0), "nothing came");
        assert_eq!(packet::send(&other, b"something", &[]).unwrap(), Sent::Yes);
        assert_eq!(ready(true, false), Some(1));
        assert_eq!(ready(true, true), Some(0), "what comes is for the next talk");
    }
}
