//! Unix sockets between all ranks of one machine, over which file descriptors travel, and what
//! ranks tell each other once they are connected.
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
mod gather;
mod packet;
mod round;
#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::Shutdown;
use rustix::process::Pid;

use self::packet::{Farewell, Inbox, Received};
use self::round::Fault;
use crate::fork::Own;
use crate::group::Interrupt;
use crate::{Deadline, Error, Result};

pub(crate) use connect::Listener;

/// A connection, or what becomes one, which forked children do not have: peers would not see that this
/// process is gone.
type Socket = Own<OwnedFd>;

/// The connections of one rank to all others of its group.
#[derive(Debug)]
pub(crate) struct Mesh {
    rank: u32,
    /// One a rank; `None` for this rank itself, and for all when broken.
    links: Vec<Option<Socket>>,
    inbox: Inbox,
    /// Whose connections these are.
    process: Pid,
    /// Exchanges and gathers begun.
    rounds: u64,
    /// Whether a rank that waits is to stop.
    interrupt: Option<Interrupt>,
    broken: Option<Broken>,
}

#[derive(Debug)]
struct Broken {
    why: Farewell,
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

    /// Whether `rank` hung up without a word: its process ended, or it let go of the pool. A rank that
    /// gave up says so, and may still use what is mapped. Does not wait; false of a broken mesh, whose
    /// peers were told to hang up.
    pub(crate) fn has_left(&mut self, rank: u32) -> bool {
        let Self { links: all, inbox, .. } = self;
        let Some(socket) = all.get(rank as usize).and_then(Option::as_deref) else { return false };
        let left = !closed(std::iter::once((rank, socket))).is_empty();
        left && inbox.farewell(rank, socket).is_none()
    }

    /// The same mesh, whose waits end when `interrupt` says so.
    pub(crate) fn with_interrupt(mut self, interrupt: Option<Interrupt>) -> Self {
        self.interrupt = interrupt;
        self
    }

    /// Whether an earlier failure closed the connections.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    /// The number of the next exchange or gather. Fails when this mesh can no longer be used.
    fn next_round(&mut self) -> Result<u64> {
        if let Some(broken) = &self.broken {
            let error = broken.why.clone().into_error();
            return Err(error.context("ranks can no longer talk since an earlier failure"));
        }
        self.rounds += 1;
        Ok(self.rounds)
    }

    /// Tells the peers why, closes all connections and returns the error that it is.
    fn break_with(&mut self, fault: Fault) -> Error {
        let (error, why) = match fault {
            Fault::GaveUp(why) => (why.clone().into_error(), why),
            Fault::Closed(peer) => self.own(Error::peer_lost(vec![peer], CLOSED)),
            Fault::Failed(error) => self.own(error),
        };
        let lost = self.lost_peers();
        say_farewell(links(&self.links).map(|(_, socket)| socket), &why);
        self.hang_up();
        self.broken = Some(Broken { why, lost });
        error
    }

    /// Tells the peers that this rank will take part in nothing more, because of `error`.
    pub(crate) fn give_up(&mut self, error: &Error) {
        if !self.is_broken() {
            let _ = self.break_with(Fault::Failed(error.clone()));
        }
    }

    /// Closes all connections: for peers, too, where a child made past the C library has copies. A child
    /// that lets go of its own leaves them to its parent.
    fn hang_up(&mut self) {
        for link in self.links.iter_mut().filter_map(Option::take) {
            if self.process == rustix::process::getpid() {
                // Fails where the peer was first.
                let _ = rustix::net::shutdown(&link, Shutdown::Both);
            }
        }
    }

    /// A failure that this rank found.
    fn own(&self, error: Error) -> (Error, Farewell) {
        let why = Farewell { by: self.rank, cause: error.kind().clone() };
        (error, why)
    }

    /// What the closed connection to `first` means: who is really gone, or who gave up and why.
    /// Discards everything that was still to be received; the mesh has to be broken afterwards.
    fn diagnose(&mut self, first: u32) -> Fault {
        let mut lost = Vec::new();
        let mut gave_up = None;
        for (rank, socket) in links(&self.links) {
            match last_words(&mut self.inbox, rank, socket) {
                LastWords::Farewell(farewell) => {
                    gave_up.get_or_insert(farewell);
                }
                LastWords::Nothing => lost.push(rank),
                LastWords::StillThere => {}
            }
        }
        match gave_up {
            Some(farewell) if lost.is_empty() => Fault::GaveUp(farewell),
            _ if lost.is_empty() => Fault::Closed(first),
            _ => Fault::Failed(Error::peer_lost(lost, CLOSED)),
        }
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        self.hang_up();
    }
}

const CLOSED: &str = "the connection was closed without a word (the process exited, was killed, or dropped its pool)";

/// How a connection ended.
enum LastWords {
    Farewell(Farewell),
    /// Closed without a farewell.
    Nothing,
    StillThere,
}

/// Reads all there is from `rank`, discarding everything but a farewell.
fn last_words(inbox: &mut Inbox, rank: u32, socket: &OwnedFd) -> LastWords {
    loop {
        match inbox.receive(rank, socket) {
            Ok(Received::Packet { frame, .. }) => {
                if let Some(farewell) = Farewell::read(rank, frame) {
                    return LastWords::Farewell(farewell);
                }
            }
            Ok(Received::WouldBlock) => return LastWords::StillThere,
            Ok(Received::Closed) | Err(_) => return LastWords::Nothing,
        }
    }
}

/// The connections there are, with their ranks.
fn links(all: &[Option<Socket>]) -> impl Iterator<Item = (u32, &OwnedFd)> {
    (0u32..).zip(all).filter_map(|(rank, link)| Some((rank, link.as_deref()?)))
}

/// The room for packets of a rank that gives up, in bytes. The kernel cuts it to twice its
/// net.core.wmem_max: as it comes, twice what a socket has to begin with.
const FAREWELL_BUFFER: usize = 1 << 20;

/// Tells peers why this rank gives up. What cannot be sent at once is not sent.
fn say_farewell<'a>(to: impl IntoIterator<Item = &'a OwnedFd>, why: &Farewell) {
    let Ok(frame) = why.frame() else { return };
    for socket in to {
        // What the peer has not read yet may fill the socket.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, FAREWELL_BUFFER);
        let _ = packet::send(socket, &frame, &[]);
    }
}

/// Those of `links` whose other end is closed, whether or not there is more to read. Does not wait.
fn closed<'a>(links: impl Iterator<Item = (u32, &'a OwnedFd)>) -> Vec<u32> {
    let (ranks, mut polled): (Vec<u32>, Vec<PollFd<'_>>) =
        links.map(|(rank, socket)| (rank, PollFd::new(socket, PollFlags::empty()))).unzip();
    // A poll that fails shows nothing; the next use of the sockets will say why.
    let _ = poll_for(&mut polled, Duration::ZERO);
    let closed = ranks.into_iter().zip(&polled).filter(|(_, poll)| is_closed(poll));
    closed.map(|(rank, _)| rank).collect()
}

/// Whether a poll found the other end closed.
fn is_closed(poll: &PollFd<'_>) -> bool {
    poll.revents().intersects(PollFlags::HUP | PollFlags::ERR)
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
