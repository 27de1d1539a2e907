//! Unix sockets between all ranks of one machine, over which file descriptors travel.
//!
//! A [`Listener`] is made before ranks meet, so that its random abstract name can be announced;
//! [`Mesh::connect`] turns the names into one connection a pair. A mesh belongs to one pool and
//! lasts as long: the sockets are also how a rank sees that a peer is gone, without waiting for a
//! deadline. Nothing here starts a thread or leaves a file behind; every wait is one `poll` with a
//! deadline.
//!
//! Who may connect: a process of the same user (the kernel vouches for it) that knows the group's
//! secret. Others are turned away and disturb nobody.
//!
//! A rank whose part fails tells its peers why before it hangs up (a *farewell*), so that a crash
//! and a failure can be told apart, and the first cause be named rather than the last. A mesh that
//! failed once is *broken*: its sockets are closed and every later call fails at once.

mod connect;
mod exchange;
#[cfg(test)]
mod tests;
mod wire;

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use self::wire::{Farewell, Inbox, Received};
use super::message;
use crate::error::ErrorKind;
use crate::{Deadline, Error, Result};

pub(crate) use connect::Listener;

/// The connections of one rank to all others of its group.
#[derive(Debug)]
pub(crate) struct Mesh {
    rank: u32,
    /// One a rank; `None` for this rank itself, and for all when broken.
    links: Vec<Option<OwnedFd>>,
    inbox: Inbox,
    broken: Option<Broken>,
}

#[derive(Debug)]
struct Broken {
    cause: ErrorKind,
    /// Peers that were gone when it happened.
    lost: Vec<u32>,
}

impl Mesh {
    /// The peers whose connection is closed: they exited, or gave up (on purpose or not) the pool
    /// this mesh belongs to. Does not wait. Of a broken mesh, those that were gone when it broke.
    pub(crate) fn lost_peers(&self) -> Vec<u32> {
        if let Some(broken) = &self.broken {
            return broken.lost.clone();
        }
        closed(links(&self.links))
    }

    /// The reason why this mesh can no longer be used, if there is one.
    fn check_usable(&self) -> Result<()> {
        match &self.broken {
            None => Ok(()),
            Some(broken) => Err(Error::from_kind(broken.cause.clone())
                .context("handles can no longer travel since an earlier failure")),
        }
    }

    /// Tells the peers why, closes all connections and passes `error` on.
    fn break_with(&mut self, error: Error) -> Error {
        let lost = self.lost_peers();
        say_farewell(links(&self.links).map(|(_, socket)| socket), error.kind());
        self.links.iter_mut().for_each(|link| *link = None);
        self.broken = Some(Broken { cause: error.kind().clone(), lost });
        error
    }

    /// What the closed connection to `first` means: who is really gone, or who gave up and why.
    /// Discards everything that was still to be received; the mesh has to be broken afterwards.
    fn diagnose(&mut self, first: u32) -> Error {
        let mut lost = Vec::new();
        let mut gave_up = None;
        for (rank, socket) in links(&self.links) {
            match last_words(&mut self.inbox, rank, socket) {
                LastWords::Farewell(error) => {
                    gave_up.get_or_insert(error);
                }
                LastWords::Nothing => lost.push(rank),
                LastWords::StillThere => {}
            }
        }
        match gave_up {
            Some(error) if lost.is_empty() => error,
            _ => {
                if lost.is_empty() {
                    lost.push(first);
                }
                Error::peer_lost(lost, CLOSED)
            }
        }
    }
}

const CLOSED: &str = "the connection was closed without a word (the process exited, was killed, or dropped its pool)";

/// How a connection ended.
enum LastWords {
    Farewell(Error),
    /// Closed without a farewell.
    Nothing,
    StillThere,
}

/// Reads all there is from `rank`, discarding everything but a farewell.
fn last_words(inbox: &mut Inbox, rank: u32, socket: &OwnedFd) -> LastWords {
    loop {
        match inbox.receive(rank, socket) {
            Ok(Received::Packet { frame, .. }) => {
                if let Some(error) = farewell_of(rank, frame) {
                    return LastWords::Farewell(error);
                }
            }
            Ok(Received::WouldBlock) => return LastWords::StillThere,
            Ok(Received::Closed) | Err(_) => return LastWords::Nothing,
        }
    }
}

/// The connections there are, with their ranks.
fn links(all: &[Option<OwnedFd>]) -> impl Iterator<Item = (u32, &OwnedFd)> {
    (0u32..).zip(all).filter_map(|(rank, link)| Some((rank, link.as_ref()?)))
}

/// The error a peer gave up with, when `frame` is its farewell.
///
/// Losses and timeouts are passed on as they are: they name who is to blame. Anything else is the
/// peer's own failure, and to this rank the loss of that peer; ranks agree on the failure itself
/// in the round through the store that follows.
fn farewell_of(rank: u32, frame: &[u8]) -> Option<Error> {
    let farewell: Farewell = message::decode(rank, frame).ok()?;
    Some(match farewell.cause {
        cause @ (ErrorKind::PeerLost { .. } | ErrorKind::Timeout { .. }) => Error::from_kind(cause),
        cause => Error::peer_lost(vec![rank], format!("it gave up: {cause}")),
    })
}

/// Tells peers why this rank gives up. What cannot be sent at once is not sent.
fn say_farewell<'a>(to: impl IntoIterator<Item = &'a OwnedFd>, cause: &ErrorKind) {
    let Ok(frame) = Farewell::frame(cause) else { return };
    for socket in to {
        let _ = wire::send(socket, &frame, &[]);
    }
}

/// Those of `links` whose other end is closed, whether or not there is more to read. Does not wait.
fn closed<'a>(links: impl Iterator<Item = (u32, &'a OwnedFd)>) -> Vec<u32> {
    let (ranks, mut polled): (Vec<u32>, Vec<PollFd<'_>>) =
        links.map(|(rank, socket)| (rank, PollFd::new(socket, PollFlags::empty()))).unzip();
    // A poll that fails shows nothing; the next use of the sockets will say why.
    let _ = poll_for(&mut polled, Duration::ZERO);
    let gone = |poll: &PollFd<'_>| poll.revents().intersects(PollFlags::HUP | PollFlags::ERR);
    ranks.into_iter().zip(&polled).filter(|(_, poll)| gone(poll)).map(|(rank, _)| rank).collect()
}

/// Waits until one of `fds` is ready or `limit` has passed; says how many are ready. An
/// interrupted wait counts as one that ended with none.
fn poll_for(fds: &mut [PollFd<'_>], limit: Duration) -> Result<usize> {
    let limit = Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    };
    match rustix::event::poll(fds, Some(&limit)) {
        Ok(ready) => Ok(ready),
        Err(Errno::INTR) => Ok(0),
        Err(error) => Err(Error::system("polling the connections to other ranks", error)),
    }
}

/// The earlier of `limit` from now and the deadline, as a time to wait.
fn at_most(limit: Duration, deadline: Deadline) -> Duration {
    limit.min(deadline.remaining())
}
