//! Making the mesh: every rank dials all lower ranks and is dialled by all higher ones.
//!
//! One loop does everything a rank has to do, dialling, accepting and answering, so ranks cannot
//! wait for each other in a circle. A rank that fails dials the lower ranks all the same, to tell
//! them; a higher rank that vanished before it dialled is noticed because its listener is gone.

use std::collections::VecDeque;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::packet::{self, Farewell, Inbox, Introduction, Received, Sent};
use super::{LastWords, Mesh, Socket, at_most, closed, last_words, poll_for, say_farewell};
use crate::rendezvous::message;
use crate::{Deadline, Error, Result};

/// How often it is checked that ranks which have yet to dial us still exist.
const PROBE_EVERY: Duration = Duration::from_millis(200);

/// How soon a rank with too many callers is dialled again.
const REDIAL_AFTER: Duration = Duration::from_millis(2);

/// Callers that may be waiting for their turn to prove themselves, beyond one a rank.
const SPARE_GUESTS: usize = 64;

/// A socket that peers connect to, under a random name.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: Socket,
    name: String,
}

impl Listener {
    /// Listens under a new name in this network namespace's abstract names.
    pub(crate) fn bind() -> Result<Self> {
        let name = format!("symmpool-{}", hex(&crate::rendezvous::random()?));
        let what = "listening for other ranks on an abstract Unix socket";
        let socket = new_socket()?;
        rustix::net::bind(&socket, &address(&name)?).map_err(|error| Error::system(what, error))?;
        // The kernel cuts this to net.core.somaxconn; callers beyond it dial again.
        rustix::net::listen(&socket, 4096).map_err(|error| Error::system(what, error))?;
        Ok(Self { socket, name })
    }

    /// What peers need to know in order to connect.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// A connection that waits to be accepted. `None` when there is none.
    fn accept(&self) -> Result<Option<Socket>> {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            return match rustix::net::accept_with(&self.socket, flags) {
                Ok(guest) => Ok(Some(Socket::new(guest))),
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => Ok(None),
                Err(error) => Err(socket_error("accepting a connection of another rank", error)),
            };
        }
    }
}

/// One connection in the making.
#[derive(Debug)]
enum Link {
    /// This rank itself.
    Own,
    /// A lower rank that has yet to be dialled.
    ToDial,
    /// A lower rank that we introduced ourselves to, and that has yet to do the same.
    Dialled(Socket),
    /// A higher rank, which dials us; and how many probes in a row found nobody there.
    Expected { refusals: u32 },
    /// Both sides have proven who they are.
    Up(Socket),
}

impl Mesh {
    /// Connects to all other ranks, which announced `names` (in rank order) and do the same.
    ///
    /// Collective. Fails with [`Error::is_peer_lost`] when a rank is gone and
    /// [`Error::is_timeout`] naming those that did not come; when another rank gave up, with that
    /// rank's error.
    pub(crate) fn connect(
        listener: Listener,
        rank: u32,
        names: &[&str],
        secret: &[u8; 32],
        deadline: Deadline,
    ) -> Result<Self> {
        let mut assembly = Assembly::new(listener, rank, names, secret);
        match assembly.run(deadline) {
            Ok(()) => Ok(assembly.into_mesh()),
            Err(error) => {
                assembly.give_up(&error);
                Err(error)
            }
        }
    }

    /// Takes no part in connecting because of `error`, and tells the others.
    pub(crate) fn decline(
        listener: Listener,
        rank: u32,
        names: &[&str],
        secret: &[u8; 32],
        error: &Error,
    ) {
        Assembly::new(listener, rank, names, secret).give_up(error);
    }
}

/// A mesh in the making.
struct Assembly<'a> {
    rank: u32,
    names: &'a [&'a str],
    secret: &'a [u8; 32],
    listener: Listener,
    links: Vec<Link>,
    /// Callers that have yet to say who they are, oldest first.
    guests: VecDeque<Socket>,
    inbox: Inbox,
}

impl<'a> Assembly<'a> {
    fn new(listener: Listener, rank: u32, names: &'a [&'a str], secret: &'a [u8; 32]) -> Self {
        let link = |other: u32| match other.cmp(&rank) {
            std::cmp::Ordering::Less => Link::ToDial,
            std::cmp::Ordering::Equal => Link::Own,
            std::cmp::Ordering::Greater => Link::Expected { refusals: 0 },
        };
        let links = (0..names.len() as u32).map(link).collect();
        let guests = VecDeque::new();
        Self { rank, names, secret, listener, links, guests, inbox: Inbox::new() }
    }

    fn run(&mut self, deadline: Deadline) -> Result<()> {
        loop {
            self.dial()?;
            self.hear_callers()?;
            self.hear_links()?;
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
        let there = |link: &Link| matches!(link, Link::Own | Link::Up(_));
        (0..).zip(&self.links).filter(|(_, link)| !there(link)).map(|(rank, _)| rank).collect()
    }

    fn into_mesh(self) -> Mesh {
        let process = rustix::process::getpid();
        let up = |link| match link {
            Link::Up(socket) => Some(socket),
            _ => None,
        };
        let links = self.links.into_iter().map(up).collect();
        let Self { rank, inbox, .. } = self;
        Mesh { rank, links, inbox, process, rounds: 0, interrupt: None, broken: None }
    }

    /// Dials the lower ranks that have yet to be dialled.
    fn dial(&mut self) -> Result<()> {
        for peer in 0..self.rank {
            if !matches!(self.links[peer as usize], Link::ToDial) {
                continue;
            }
            let socket = match dial(self.names[peer as usize])? {
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
                Sent::Yes => self.links[peer as usize] = Link::Dialled(socket),
                Sent::WouldBlock | Sent::TryLater => {}
                Sent::Closed => return Err(lost(peer)),
            }
        }
        Ok(())
    }

    fn introduction(&self, to: u32) -> Result<Vec<u8>> {
        message::encode(&Introduction::new(self.secret, self.rank, to))
    }

    /// Accepts callers and lets those in that prove to be an expected rank.
    fn hear_callers(&mut self) -> Result<()> {
        let most = self.links.len() + SPARE_GUESTS;
        // No more at a time: callers may come as fast as they are accepted, and the deadline goes on.
        for _ in 0..most {
            let Some(guest) = self.listener.accept()? else { break };
            if !same_user(&guest)? {
                tracing::warn!(rank = self.rank, "turned away a connection of another user");
                continue;
            }
            if self.guests.len() >= most {
                // A true peer speaks at once, so the oldest silent caller is none.
                self.guests.pop_front();
            }
            self.guests.push_back(guest);
        }
        for _ in 0..self.guests.len() {
            let Some(guest) = self.guests.pop_front() else { break };
            let from = match self.inbox.receive(self.rank, &guest) {
                Ok(Received::WouldBlock) => {
                    self.guests.push_back(guest);
                    continue;
                }
                Ok(Received::Packet { frame, .. }) => {
                    known_caller(frame, self.rank, &self.links, self.secret)
                }
                // A probe, or one that left.
                Ok(Received::Closed) => continue,
                Err(_) => None,
            };
            let Some(from) = from else {
                tracing::warn!(rank = self.rank, "turned away a caller that is not of this group");
                continue;
            };
            // A caller that left at once may still have said why: that is read from the link.
            let _ = packet::send(&guest, &self.introduction(from)?, &[])?;
            self.links[from as usize] = Link::Up(guest);
        }
        Ok(())
    }

    /// Reads what dialled ranks answer, and notices ranks that were there and left.
    fn hear_links(&mut self) -> Result<()> {
        for peer in 0..self.rank {
            let Link::Dialled(socket) = &self.links[peer as usize] else { continue };
            let frame = match self.inbox.receive(peer, socket)? {
                Received::WouldBlock => continue,
                Received::Closed => return Err(lost(peer)),
                Received::Packet { frame, .. } => frame,
            };
            let answer: Introduction = message::decode(peer, frame)?;
            if (answer.from, answer.to) != (peer, self.rank) || !answer.proven(self.secret) {
                return Err(Error::refused(format!(
                    "whoever listens where rank {peer} should does not know this group's secret"
                )));
            }
            let dialled = std::mem::replace(&mut self.links[peer as usize], Link::ToDial);
            if let Link::Dialled(socket) = dialled {
                self.links[peer as usize] = Link::Up(socket);
            }
        }
        // What a connected rank says is left alone while it is there: it may be done connecting,
        // and have begun to exchange handles. A farewell is followed by closing.
        let up = (0u32..).zip(&self.links).filter_map(|(peer, link)| match link {
            Link::Up(socket) => Some((peer, &**socket)),
            _ => None,
        });
        for peer in closed(up) {
            let Link::Up(socket) = &self.links[peer as usize] else { continue };
            return Err(match last_words(&mut self.inbox, peer, socket) {
                LastWords::Farewell(farewell) => farewell.into_loss(),
                LastWords::Nothing | LastWords::StillThere => lost(peer),
            });
        }
        Ok(())
    }

    /// Waits for something to happen. Where nothing does, checks that those still exist who would
    /// have to make it happen.
    fn wait(&mut self, deadline: Deadline) -> Result<()> {
        let mut polled = vec![PollFd::new(&self.listener.socket, PollFlags::IN)];
        polled.extend(self.guests.iter().map(|guest| PollFd::new(guest, PollFlags::IN)));
        let mut redial = false;
        for link in &self.links {
            match link {
                Link::Dialled(socket) => polled.push(PollFd::new(socket, PollFlags::IN)),
                Link::Up(socket) => polled.push(PollFd::new(socket, PollFlags::empty())),
                Link::ToDial => redial = true,
                Link::Own | Link::Expected { .. } => {}
            }
        }
        let limit = if redial { REDIAL_AFTER } else { PROBE_EVERY };
        let ready = poll_for(&mut polled, at_most(limit, deadline))?;
        if ready == 0 && !redial { self.probe() } else { Ok(()) }
    }

    /// Checks that ranks which have yet to dial us still listen: one that does not has failed,
    /// because it stops on success only after we have answered it.
    fn probe(&mut self) -> Result<()> {
        for (peer, link) in (0u32..).zip(&mut self.links) {
            let Link::Expected { refusals } = link else { continue };
            match dial(self.names[peer as usize])? {
                Dial::Connected(_) | Dial::Busy => *refusals = 0,
                Dial::Gone => *refusals += 1,
            }
            // The second time, so that a farewell sent just before is read first.
            if *refusals == 2 {
                return Err(Error::peer_lost(vec![peer], "it left before it connected"));
            }
        }
        Ok(())
    }

    /// Tells everybody who can be reached why this rank gives up.
    fn give_up(mut self, error: &Error) {
        // Those that called meanwhile become links, if they are of the group.
        let _ = self.hear_callers();
        let why = Farewell { by: self.rank, cause: error.kind().clone() };
        for peer in 0..self.links.len() as u32 {
            match &self.links[peer as usize] {
                Link::Dialled(socket) | Link::Up(socket) => say_farewell([&**socket], &why),
                Link::ToDial => {
                    if let (Ok(Dial::Connected(socket)), Ok(introduction)) =
                        (dial(self.names[peer as usize]), self.introduction(peer))
                    {
                        let _ = packet::send(&socket, &introduction, &[]);
                        say_farewell([&*socket], &why);
                    }
                }
                Link::Own | Link::Expected { .. } => {}
            }
        }
    }
}

/// The rank that `frame` introduces to `rank`, if it is one that is expected and proves itself.
fn known_caller(frame: &[u8], rank: u32, links: &[Link], secret: &[u8; 32]) -> Option<u32> {
    let caller: Introduction = message::decode(rank, frame).ok()?;
    let expected = matches!(links.get(caller.from as usize), Some(Link::Expected { .. }));
    (caller.to == rank && expected && caller.proven(secret)).then_some(caller.from)
}

enum Dial {
    Connected(Socket),
    /// Too many callers wait there already.
    Busy,
    /// Nobody listens under that name.
    Gone,
}

fn dial(name: &str) -> Result<Dial> {
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
        .map_err(|error| socket_error("opening a Unix socket", error))
}

fn address(name: &str) -> Result<SocketAddrUnix> {
    SocketAddrUnix::new_abstract_name(name.as_bytes())
        .map_err(|error| Error::system(format!("the abstract socket name {name:?}"), error))
}

fn socket_error(what: &str, error: Errno) -> Error {
    match error {
        Errno::MFILE | Errno::NFILE => Error::out_of_memory(format!(
            "{what}: this process (or machine) is at its limit of open files; raise RLIMIT_NOFILE"
        )),
        error => Error::system(what, error),
    }
}

/// Whether the process at the other end runs as this process's user. Root is no exception in
/// either direction.
fn same_user(socket: &Socket) -> Result<bool> {
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
