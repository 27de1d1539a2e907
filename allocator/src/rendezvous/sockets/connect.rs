//! Making the connections: every rank dials all lower ranks and is dialled by all higher ones.
//!
//! One loop dials, accepts and answers, so ranks cannot wait for each other in a circle. A rank that
//! fails still dials the lower ranks, to send them the reason; a higher rank that disappeared before it
//! dialled is noticed because its listener is gone.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::packet::{self, Farewell, Introduction, PacketBuffer, ReceivedPacket, Sent};
use super::{Ending, PeerSockets, Socket, at_most, closed, poll_for, read_ending, send_farewell};
use crate::descriptors;
use crate::fork::ProcessId;
use crate::random::random_bytes;
use crate::rendezvous::message;
use crate::{Deadline, Error, Result};

/// How often a rank checks that the higher ranks which have not dialled it yet still exist.
const PROBE_EVERY: Duration = Duration::from_millis(200);

/// How soon a rank whose listener was full is dialled again.
const REDIAL_AFTER: Duration = Duration::from_millis(2);

/// How many callers may be kept that have not proven who they are, in addition to one for each rank.
const SPARE_CALLERS: usize = 64;

/// A socket that peers connect to, under a random name.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: Socket,
    name: String,
}

impl Listener {
    /// Listens under a new name in this network namespace's abstract names.
    pub(crate) fn bind() -> Result<Self> {
        let name = format!("symmpool-{}", hex(&random_bytes::<16>()?));
        let what = "listening for other ranks on an abstract Unix socket";
        let socket = new_socket()?;
        rustix::net::bind(&socket, &address(&name)?).map_err(|error| Error::system(what, error))?;
        // The kernel cuts this to net.core.somaxconn; callers beyond it dial again.
        rustix::net::listen(&socket, 4096).map_err(|error| Error::system(what, error))?;
        Ok(Self { socket, name })
    }

    /// The name by which peers connect.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// A connection that waits to be accepted. `None` when there is none.
    pub(crate) fn accept(&self) -> Result<Option<Socket>> {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            return match rustix::net::accept_with(&self.socket, flags) {
                Ok(caller) => Ok(Some(Socket::new(caller))),
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => Ok(None),
                Err(error) => {
                    Err(descriptors::error("accepting a connection of another rank", error))
                }
            };
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// One connection in the making.
#[derive(Debug)]
enum Connection {
    /// This rank itself, or one of another host, to which there is none.
    Nowhere,
    /// A lower rank that has yet to be dialled.
    ToDial,
    /// A lower rank that this rank has introduced itself to, and that has yet to answer.
    Dialled(Socket),
    /// A higher rank, which dials this one; `refusals` probes in a row found no listener there.
    Expected { refusals: u32 },
    /// Connected, and both sides have proven who they are.
    Up(Socket),
}

impl PeerSockets {
    /// Connects to the other ranks of this host, which announced `names` (in rank order) and do the same. Ranks of other
    /// hosts have no name here.
    ///
    /// Collective. Fails with [`Error::is_peer_lost`] when a rank is gone and
    /// [`Error::is_timeout`] naming those that did not come; when another rank gave up, with that
    /// rank's error.
    pub(crate) fn connect(
        listener: Listener,
        rank: u32,
        names: &[Option<&str>],
        secret: &[u8; 32],
        deadline: Deadline,
    ) -> Result<Self> {
        let mut connecting = Connecting::new(listener, rank, names, secret);
        match connecting.run(deadline) {
            Ok(()) => Ok(connecting.into_sockets()),
            Err(error) => {
                connecting.fail(&error);
                Err(error)
            }
        }
    }

    /// Does not connect because of `error`, and sends the other ranks the reason.
    pub(crate) fn decline(
        listener: Listener,
        rank: u32,
        names: &[Option<&str>],
        secret: &[u8; 32],
        error: &Error,
    ) {
        Connecting::new(listener, rank, names, secret).fail(error);
    }
}

/// The state of one rank while ranks connect.
struct Connecting<'a> {
    rank: u32,
    names: &'a [Option<&'a str>],
    secret: &'a [u8; 32],
    listener: Listener,
    /// Connections by rank.
    connections: Vec<Connection>,
    /// Accepted connections that have yet to say who they are, oldest first.
    callers: VecDeque<Socket>,
    buffer: PacketBuffer,
}

impl<'a> Connecting<'a> {
    fn new(
        listener: Listener,
        rank: u32,
        names: &'a [Option<&'a str>],
        secret: &'a [u8; 32],
    ) -> Self {
        let first = |(other, name): (u32, &Option<&str>)| match other.cmp(&rank) {
            _ if name.is_none() => Connection::Nowhere,
            std::cmp::Ordering::Less => Connection::ToDial,
            std::cmp::Ordering::Equal => Connection::Nowhere,
            std::cmp::Ordering::Greater => Connection::Expected { refusals: 0 },
        };
        let connections = (0..).zip(names).map(first).collect();
        let callers = VecDeque::new();
        Self { rank, names, secret, listener, connections, callers, buffer: PacketBuffer::new() }
    }

    fn run(&mut self, deadline: Deadline) -> Result<()> {
        loop {
            self.dial()?;
            self.accept_callers()?;
            self.read_answers()?;
            let missing = self.missing();
            if missing.is_empty() {
                return Ok(());
            }
            if deadline.expired() {
                return Err(Error::timeout(
                    "connecting to the other ranks of this machine",
                    deadline.budget(),
                    missing,
                ));
            }
            self.wait(deadline)?;
        }
    }

    fn missing(&self) -> Vec<u32> {
        let done =
            |connection: &Connection| matches!(connection, Connection::Nowhere | Connection::Up(_));
        (0..)
            .zip(&self.connections)
            .filter(|(_, connection)| !done(connection))
            .map(|(rank, _)| rank)
            .collect()
    }

    fn into_sockets(self) -> PeerSockets {
        let up = |connection| match connection {
            Connection::Up(socket) => Some(socket),
            _ => None,
        };
        let sockets = self.connections.into_iter().map(up).collect();
        let Self { rank, buffer, .. } = self;
        PeerSockets {
            rank,
            sockets,
            buffer,
            maker: ProcessId::here(),
            rounds: 0,
            barrier_messages: Vec::new(),
            interrupt: None,
            broken: None,
        }
    }

    /// Dials the lower ranks that have yet to be dialled.
    fn dial(&mut self) -> Result<()> {
        for peer in 0..self.rank {
            if !matches!(self.connections[peer as usize], Connection::ToDial) {
                continue;
            }
            let socket = match self.dial_rank(peer)? {
                Dial::Connected(socket) => socket,
                Dial::Busy => continue,
                Dial::Gone => return Err(Error::peer_lost(vec![peer], "it no longer listens")),
            };
            if !same_user(&socket)? {
                return Err(Error::refused(format!(
                    "the socket that rank {peer} announced belongs to another user"
                )));
            }
            match packet::send(&socket, &self.introduction(peer)?, &[])? {
                Sent::Yes => self.connections[peer as usize] = Connection::Dialled(socket),
                Sent::WouldBlock | Sent::TryLater => {}
                Sent::Closed => return Err(lost(peer)),
            }
        }
        Ok(())
    }

    fn dial_rank(&self, peer: u32) -> Result<Dial> {
        self.names[peer as usize].map_or(Ok(Dial::Gone), dial)
    }

    fn introduction(&self, to: u32) -> Result<Vec<u8>> {
        message::encode(&Introduction::new(self.secret, self.rank, to))
    }

    /// Accepts callers and lets those in that prove to be an expected rank.
    fn accept_callers(&mut self) -> Result<()> {
        let most = self.connections.len() + SPARE_CALLERS;
        // A bounded number at a time: callers may arrive as fast as they are accepted, and then nothing
        // would check the deadline.
        for _ in 0..most {
            let Some(caller) = self.listener.accept()? else { break };
            if !same_user(&caller)? {
                tracing::warn!(rank = self.rank, "turned away a connection of another user");
                continue;
            }
            if self.callers.len() >= most {
                // A peer introduces itself at once, so the oldest silent caller is none.
                self.callers.pop_front();
            }
            self.callers.push_back(caller);
        }
        for _ in 0..self.callers.len() {
            let Some(caller) = self.callers.pop_front() else { break };
            let from = match self.buffer.receive(self.rank, &caller) {
                Ok(ReceivedPacket::WouldBlock) => {
                    self.callers.push_back(caller);
                    continue;
                }
                Ok(ReceivedPacket::Packet { frame, .. }) => {
                    known_caller(frame, self.rank, &self.connections, self.secret)
                }
                // A probe, or a caller that left.
                Ok(ReceivedPacket::Closed) => continue,
                Err(_) => None,
            };
            let Some(from) = from else {
                tracing::warn!(rank = self.rank, "turned away a caller that is not of this group");
                continue;
            };
            // A caller that has left at once may have sent a farewell, which is read later.
            let _ = packet::send(&caller, &self.introduction(from)?, &[])?;
            self.connections[from as usize] = Connection::Up(caller);
        }
        Ok(())
    }

    /// Reads the answers of dialled ranks, and notices connected ranks that have left.
    fn read_answers(&mut self) -> Result<()> {
        for peer in 0..self.rank {
            let Connection::Dialled(socket) = &self.connections[peer as usize] else { continue };
            let frame = match self.buffer.receive(peer, socket)? {
                ReceivedPacket::WouldBlock => continue,
                ReceivedPacket::Closed => return Err(lost(peer)),
                ReceivedPacket::Packet { frame, .. } => frame,
            };
            let answer: Introduction = message::decode(peer, frame)?;
            if (answer.from, answer.to) != (peer, self.rank) || !answer.proven(self.secret) {
                return Err(Error::refused(format!(
                    "whoever listens where rank {peer} should does not know this group's secret"
                )));
            }
            let dialled =
                std::mem::replace(&mut self.connections[peer as usize], Connection::ToDial);
            if let Connection::Dialled(socket) = dialled {
                self.connections[peer as usize] = Connection::Up(socket);
            }
        }
        // Packets of a connected rank are not read while its connection is open: it may have finished
        // connecting and begun to exchange handles. After a farewell a rank closes the connection.
        let up =
            (0u32..).zip(&self.connections).filter_map(|(peer, connection)| match connection {
                Connection::Up(socket) => Some((peer, &**socket)),
                _ => None,
            });
        for peer in closed(up) {
            let Connection::Up(socket) = &self.connections[peer as usize] else { continue };
            return Err(match read_ending(&mut self.buffer, peer, socket) {
                Ending::Farewell(farewell) => farewell.into_loss(),
                Ending::Silent | Ending::NotEnded => lost(peer),
            });
        }
        Ok(())
    }

    /// Waits until a socket is ready. If none becomes ready, checks that the ranks which have yet to dial
    /// this one still exist.
    fn wait(&mut self, deadline: Deadline) -> Result<()> {
        let mut polled = vec![PollFd::new(&self.listener.socket, PollFlags::IN)];
        polled.extend(self.callers.iter().map(|caller| PollFd::new(caller, PollFlags::IN)));
        let mut redial = false;
        for connection in &self.connections {
            match connection {
                Connection::Dialled(socket) => polled.push(PollFd::new(socket, PollFlags::IN)),
                Connection::Up(socket) => polled.push(PollFd::new(socket, PollFlags::empty())),
                Connection::ToDial => redial = true,
                Connection::Nowhere | Connection::Expected { .. } => {}
            }
        }
        let limit = if redial { REDIAL_AFTER } else { PROBE_EVERY };
        let ready = poll_for(&mut polled, at_most(limit, deadline))?;
        if ready == 0 && !redial { self.probe() } else { Ok(()) }
    }

    /// Checks that ranks which have yet to dial this one still listen. One that does not has failed: on
    /// success a rank closes its listener only after this rank has answered it.
    fn probe(&mut self) -> Result<()> {
        for (peer, connection) in (0u32..).zip(&mut self.connections) {
            let Connection::Expected { refusals } = connection else { continue };
            match self.names[peer as usize].map_or(Ok(Dial::Gone), dial)? {
                Dial::Connected(_) | Dial::Busy => *refusals = 0,
                Dial::Gone => *refusals += 1,
            }
            // Only the second time, so that a farewell sent just before is read first.
            if *refusals == 2 {
                return Err(Error::peer_lost(vec![peer], "it left before it connected"));
            }
        }
        Ok(())
    }

    /// Sends every rank that can be reached the reason why this rank fails.
    fn fail(mut self, error: &Error) {
        // Ranks of the group that have called meanwhile are sent it as well.
        let _ = self.accept_callers();
        let why = Farewell { by: self.rank, cause: error.kind().clone() };
        for peer in 0..self.connections.len() as u32 {
            match &self.connections[peer as usize] {
                Connection::Dialled(socket) | Connection::Up(socket) => {
                    send_farewell([&**socket], &why);
                }
                Connection::ToDial => {
                    if let (Ok(Dial::Connected(socket)), Ok(introduction)) =
                        (self.dial_rank(peer), self.introduction(peer))
                    {
                        let _ = packet::send(&socket, &introduction, &[]);
                        send_farewell([&*socket], &why);
                    }
                }
                Connection::Nowhere | Connection::Expected { .. } => {}
            }
        }
    }
}

/// The rank that `frame` introduces to `rank`, if it is one that is expected and proves itself.
fn known_caller(
    frame: &[u8],
    rank: u32,
    connections: &[Connection],
    secret: &[u8; 32],
) -> Option<u32> {
    let caller: Introduction = message::decode(rank, frame).ok()?;
    let expected =
        matches!(connections.get(caller.from as usize), Some(Connection::Expected { .. }));
    (caller.to == rank && expected && caller.proven(secret)).then_some(caller.from)
}

#[derive(Debug)]
pub(crate) enum Dial {
    Connected(Socket),
    /// Its listener is full.
    Busy,
    /// Nobody listens under that name.
    Gone,
}

pub(crate) fn dial(name: &str) -> Result<Dial> {
    let socket = new_socket()?;
    let address = address(name)?;
    loop {
        return match rustix::net::connect(&socket, &address) {
            Ok(()) => Ok(Dial::Connected(socket)),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Ok(Dial::Busy),
            Err(Errno::CONNREFUSED) => Ok(Dial::Gone),
            Err(error) => Err(Error::system("connecting to another rank's Unix socket", error)),
        };
    }
}

fn new_socket() -> Result<Socket> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map(Socket::new)
        .map_err(|error| descriptors::error("opening a Unix socket", error))
}

fn address(name: &str) -> Result<SocketAddrUnix> {
    SocketAddrUnix::new_abstract_name(name.as_bytes())
        .map_err(|error| Error::system(format!("the abstract socket name {name:?}"), error))
}

/// Whether the process at the other end runs as this process's user. Root is not an exception.
pub(crate) fn same_user(socket: &Socket) -> Result<bool> {
    let peer = rustix::net::sockopt::socket_peercred(socket)
        .map_err(|error| Error::system("asking who is at the other end of a socket", error))?;
    Ok(peer.uid == rustix::process::geteuid())
}

fn lost(peer: u32) -> Error {
    Error::peer_lost(vec![peer], "it closed the connection while ranks were connecting")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
