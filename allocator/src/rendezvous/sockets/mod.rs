//! Unix sockets between all ranks of one machine: gathers, and the exchange of file descriptors.
//!
//! A [`Listener`] is made before the ranks meet, so that its random abstract name can be announced;
//! [`PeerSockets::connect`] turns the names into one connection for each pair of ranks. The connections
//! belong to one pool and last as long as it does: a rank also sees by them that a peer is gone, without
//! waiting for a deadline. Nothing here starts a thread or leaves a file behind; every wait is one `poll`
//! with a deadline.
//!
//! Only a process of the same user (the kernel vouches for it) that knows the group's secret may connect.
//! Others are turned away and disturb nobody.
//!
//! | file | holds |
//! | --- | --- |
//! | `packet` | what one packet holds, and sending and receiving it |
//! | `connect` | making the connections |
//! | `round` | the loop in which every rank sends to all others and receives from all |
//! | `gather` | a round in which every rank's bytes go to every other |
//! | `exchange` | a round in which descriptors do |
//! | `barrier_messages` | what a rank says between rounds, which others hear whenever they listen |
//! | `fuzzed` | for fuzz targets, a rank whose peer sends what it wants |
//!
//! A rank whose part fails sends its peers the reason before it closes the connections (a *farewell*), so
//! that they can tell a failure from a crash and name the first cause rather than the last. After one
//! failure the connections are *broken*: they are closed, and every later call fails at once.

mod barrier_messages;
mod connect;
mod exchange;
#[cfg(feature = "testing")]
pub(crate) mod fuzzed;
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

use self::packet::Farewell;
use crate::fork::{ProcessId, Uninherited};
use crate::group::Interrupt;
use crate::{Deadline, Error, Result};

pub(crate) use connect::{Dial, Listener, dial, same_user};
pub(crate) use packet::{BarrierMessage, BarrierStep, PacketBuffer, ReceivedPacket, Sent, send};

/// A connection, or what becomes one. Forked children do not inherit it: with a copy in a child, peers
/// would not see that this process is gone.
pub(crate) type Socket = Uninherited<OwnedFd>;

/// The connections of one rank to all others of its group.
#[derive(Debug)]
pub(crate) struct PeerSockets {
    rank: u32,
    /// One for each rank; `None` for this rank itself, and for all when broken.
    sockets: Vec<Option<Socket>>,
    buffer: PacketBuffer,
    /// The process that connected.
    maker: ProcessId,
    /// The number of exchanges and gathers begun.
    rounds: u64,
    /// Messages of barriers that were received and not heard yet, with their ranks, in the order of each rank.
    barrier_messages: Vec<(u32, BarrierMessage)>,
    /// Asked by a rank that waits whether it is to stop.
    interrupt: Option<Interrupt>,
    broken: Option<Broken>,
}

/// Why a round fails.
enum RoundFault {
    /// This peer's connection is closed.
    Closed(u32),
    /// A peer gave up.
    Farewell(Farewell),
    Failed(Error),
}

impl From<Error> for RoundFault {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

#[derive(Debug)]
struct Broken {
    why: Farewell,
    /// Peers that were gone when it happened.
    lost: Vec<u32>,
}

impl PeerSockets {
    /// The peers whose connection is closed: they exited, or gave up (on purpose or not) the pool that
    /// the connections belong to. Does not wait. After a failure, the peers that were gone when it
    /// happened.
    pub(crate) fn lost_peers(&self) -> Vec<u32> {
        if let Some(broken) = &self.broken {
            return broken.lost.clone();
        }
        closed(connected(&self.sockets))
    }

    /// Whether `rank` closed its connection without a farewell: its process ended, or it dropped the pool.
    /// A rank that gave up sends a farewell, and may still use what is mapped. Does not wait. False after
    /// a failure, when all connections are closed.
    pub(crate) fn has_left(&mut self, rank: u32) -> bool {
        self.take_in_barrier_messages();
        let Self { sockets, buffer, .. } = self;
        let Some(socket) = sockets.get(rank as usize).and_then(Option::as_deref) else {
            return false;
        };
        let left = !closed(std::iter::once((rank, socket))).is_empty();
        left && buffer.farewell(rank, socket).is_none()
    }

    /// Returns these connections with waits that end when `interrupt` says so.
    pub(crate) fn with_interrupt(mut self, interrupt: Option<Interrupt>) -> Self {
        self.interrupt = interrupt;
        self
    }

    /// Whether an earlier failure closed the connections.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    /// The number of the next exchange or gather. Fails after an earlier failure.
    fn next_round(&mut self) -> Result<u64> {
        self.check()?;
        self.rounds += 1;
        Ok(self.rounds)
    }

    /// Fails after an earlier failure.
    fn check(&self) -> Result<()> {
        let Some(broken) = &self.broken else { return Ok(()) };
        let error = broken.why.clone().into_error();
        Err(error.context("ranks can no longer talk since an earlier failure"))
    }

    /// Which rank is lost, if another one has given up; for ranks that go on to agree on an error.
    pub(crate) fn loss(&self) -> Option<Error> {
        let why = self.broken.as_ref().map(|broken| &broken.why);
        why.filter(|why| why.by != self.rank).map(|why| why.clone().into_loss())
    }

    /// Sends the peers the reason, closes all connections and returns the fault as an error.
    fn break_with(&mut self, fault: RoundFault) -> Error {
        let (error, why) = match fault {
            RoundFault::Farewell(why) => (why.clone().into_error(), why),
            RoundFault::Closed(peer) => self.own(Error::peer_lost(vec![peer], CLOSED)),
            RoundFault::Failed(error) => self.own(error),
        };
        let lost = self.lost_peers();
        send_farewell(connected(&self.sockets).map(|(_, socket)| socket), &why);
        self.close();
        self.broken = Some(Broken { why, lost });
        error
    }

    /// Tells the peers that this rank will take part in nothing more, because of `error`.
    pub(crate) fn fail(&mut self, error: &Error) {
        if !self.is_broken() {
            let _ = self.break_with(RoundFault::Failed(error.clone()));
        }
    }

    /// Closes all connections. Shutting them down makes peers see it also where a child that was not made
    /// through the C library has copies. A child that drops its copies leaves the connections to its parent.
    fn close(&mut self) {
        for socket in self.sockets.iter_mut().filter_map(Option::take) {
            if self.maker.is_this_process() {
                // Fails where the peer has closed it before.
                let _ = rustix::net::shutdown(&socket, Shutdown::Both);
            }
        }
    }

    /// A failure that this rank found.
    fn own(&self, error: Error) -> (Error, Farewell) {
        let why = Farewell { by: self.rank, cause: error.kind().clone() };
        (error, why)
    }

    /// Finds out why the connection to `first` was closed: which ranks are gone, or which failed and why. Discards
    /// everything that was still to be received, so the connections cannot be used afterwards.
    fn diagnose(&mut self, first: u32) -> RoundFault {
        let mut lost = Vec::new();
        let mut farewell = None;
        for (rank, socket) in connected(&self.sockets) {
            match read_ending(&mut self.buffer, rank, socket) {
                Ending::Farewell(found) => {
                    farewell.get_or_insert(found);
                }
                Ending::Silent => lost.push(rank),
                Ending::NotEnded => {}
            }
        }
        match farewell {
            Some(farewell) if lost.is_empty() => RoundFault::Farewell(farewell),
            _ if lost.is_empty() => RoundFault::Closed(first),
            _ => RoundFault::Failed(Error::peer_lost(lost, CLOSED)),
        }
    }
}

impl Drop for PeerSockets {
    fn drop(&mut self) {
        self.close();
    }
}

const CLOSED: &str = "the connection was closed without a word (the process exited, was killed, or dropped its pool)";

/// How a connection ended.
enum Ending {
    Farewell(Farewell),
    /// Closed without a farewell.
    Silent,
    /// It is still open.
    NotEnded,
}

/// How the connection to `rank` ended. Reads everything that was sent, and discards all but a farewell.
fn read_ending(buffer: &mut PacketBuffer, rank: u32, socket: &OwnedFd) -> Ending {
    loop {
        match buffer.receive(rank, socket) {
            Ok(ReceivedPacket::Packet { frame, .. }) => {
                if let Some(farewell) = Farewell::read(rank, frame) {
                    return Ending::Farewell(farewell);
                }
            }
            Ok(ReceivedPacket::WouldBlock) => return Ending::NotEnded,
            Ok(ReceivedPacket::Closed) | Err(_) => return Ending::Silent,
        }
    }
}

/// The open connections, with their ranks.
fn connected(all: &[Option<Socket>]) -> impl Iterator<Item = (u32, &OwnedFd)> {
    (0u32..).zip(all).filter_map(|(rank, socket)| Some((rank, socket.as_deref()?)))
}

/// The send buffer of a rank that fails, in bytes. The kernel limits it to twice net.core.wmem_max,
/// which by default is twice what a new socket has.
const FAREWELL_BUFFER: usize = 1 << 20;

/// Sends peers the reason why this rank fails. What cannot be sent at once is not sent.
fn send_farewell<'a>(to: impl IntoIterator<Item = &'a OwnedFd>, why: &Farewell) {
    let Ok(frame) = why.frame() else { return };
    for socket in to {
        // Packets that the peer has not read yet may fill the socket's buffer.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, FAREWELL_BUFFER);
        let _ = packet::send(socket, &frame, &[]);
    }
}

/// The ranks whose end of the connection is closed, whether or not there is more to read. Does not wait.
fn closed<'a>(sockets: impl Iterator<Item = (u32, &'a OwnedFd)>) -> Vec<u32> {
    let (ranks, mut polled): (Vec<u32>, Vec<PollFd<'_>>) =
        sockets.map(|(rank, socket)| (rank, PollFd::new(socket, PollFlags::empty()))).unzip();
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
