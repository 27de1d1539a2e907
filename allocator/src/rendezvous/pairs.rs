//! Connections between two ranks of one machine, in which no third one takes part.
//!
//! A rank listens under a random name, and publishes it with its secret: its [`PairAddress`]. Whoever knows that can
//! hand over memory at once, also while the rank is elsewhere: the connection and its first packet wait in the kernel
//! until the rank accepts them. A connection that closes shows that the other process has ended.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{RecvFlags, SendFlags};
use serde::{Deserialize, Serialize};

use super::identity::HostIdentity;
use super::message::{self, Message};
use super::sockets::{
    Dial, Listener, PacketBuffer, ReceivedPacket, Sent, Socket, dial, same_user, send,
};
use crate::random::random_bytes;
use crate::{Error, Result};

/// How many connections may wait that have not said yet who they are.
const MAX_CALLERS: usize = 256;

/// Secret of a listener, which callers must know. It is never shown, and compared in constant time.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct PairSecret([u8; 32]);

impl fmt::Debug for PairSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PairSecret(..)")
    }
}

impl PartialEq for PairSecret {
    fn eq(&self, other: &Self) -> bool {
        // Hashes are compared in constant time.
        blake3::Hash::from_bytes(self.0) == blake3::Hash::from_bytes(other.0)
    }
}

/// Where a rank can be reached, as it publishes it.
#[derive(Debug, Serialize, Deserialize)]
pub struct PairAddress {
    identity: HostIdentity,
    name: String,
    secret: PairSecret,
}

impl Message for PairAddress {
    const KIND: u16 = 0x20;
    const NAME: &'static str = "address";
}

/// The first packet on a connection. The memory that is handed over comes with it.
#[derive(Debug, Serialize, Deserialize)]
struct Greeting {
    from: u32,
    secret: PairSecret,
}

impl Message for Greeting {
    const KIND: u16 = 0x21;
    const NAME: &'static str = "greeting";
}

/// Result of an attempt to connect.
#[derive(Debug)]
pub enum Dialled {
    /// Connected, and the memory was handed over.
    Connected(PairSocket),
    /// Too many others wait there; try again a little later.
    Busy,
    /// Nobody listens there: the process has ended, or has closed its listener.
    Gone,
}

impl PairAddress {
    /// Reads what `rank` has published.
    ///
    /// # Errors
    ///
    /// - `is_diverged` for what another version has published, or something else has.
    pub fn decode(rank: u32, bytes: &[u8]) -> Result<Self> {
        message::decode(rank, bytes)
    }

    /// Why two ranks cannot be connected; `None` if they can. Equal for both, and transitive.
    pub fn obstacle(&self, other: &Self) -> Option<String> {
        self.identity.obstacle(&other.identity)
    }

    /// Connects to the rank with this address, and hands it `memory`. Does not wait.
    ///
    /// # Errors
    ///
    /// - `is_refused` where another user listens there.
    /// - `is_out_of_memory` where there are too many open files.
    pub fn dial(&self, from: u32, memory: BorrowedFd<'_>) -> Result<Dialled> {
        let socket = match dial(&self.name)? {
            Dial::Connected(socket) => socket,
            Dial::Busy => return Ok(Dialled::Busy),
            Dial::Gone => return Ok(Dialled::Gone),
        };
        if !same_user(&socket)? {
            return Err(Error::refused("whoever listens where a rank should is another user"));
        }
        let greeting = message::encode(&Greeting { from, secret: self.secret })?;
        Ok(match send(&socket, &greeting, &[memory])? {
            Sent::Yes => Dialled::Connected(PairSocket(socket)),
            Sent::WouldBlock | Sent::TryLater => Dialled::Busy,
            Sent::Closed => Dialled::Gone,
        })
    }
}

/// Accepts the connections of other ranks.
#[derive(Debug)]
pub struct PairListener {
    listener: Listener,
    secret: PairSecret,
    /// Accepted connections that have yet to say who they are, oldest first; and what packets are read into.
    callers: Mutex<(VecDeque<Socket>, PacketBuffer)>,
}

/// A connection that was accepted: who made it, and the memory that came with it.
#[derive(Debug)]
pub struct Accepted {
    /// The rank that connected.
    pub from: u32,
    /// The connection.
    pub socket: PairSocket,
    /// Memory that the other rank has handed over.
    pub memory: OwnedFd,
}

impl PairListener {
    /// Listens under a new name.
    ///
    /// # Errors
    ///
    /// - `is_out_of_memory` where there are too many open files.
    pub fn bind() -> Result<Self> {
        let (listener, secret) = (Listener::bind()?, PairSecret(random_bytes()?));
        let callers = Mutex::new((VecDeque::new(), PacketBuffer::new()));
        Ok(Self { listener, secret, callers })
    }

    /// Returns the address by which other ranks connect.
    ///
    /// # Errors
    ///
    /// - Where the system does not say which machine this is.
    pub fn address(&self) -> Result<Vec<u8>> {
        let (identity, name) = (HostIdentity::current()?, self.listener.name().to_owned());
        message::encode(&PairAddress { identity, name, secret: self.secret })
    }

    /// The next connection; `None` if there is none. Does not wait. Whoever does not know the secret is turned away.
    ///
    /// # Errors
    ///
    /// - `is_out_of_memory` where there are too many open files.
    pub fn accept(&self) -> Result<Option<Accepted>> {
        let mut held = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        let (callers, buffer) = &mut *held;
        while let Some(caller) = self.listener.accept()? {
            if !same_user(&caller)? {
                tracing::warn!("turned away a connection of another user");
                continue;
            }
            if callers.len() == MAX_CALLERS {
                callers.pop_front();
            }
            callers.push_back(caller);
        }
        for _ in 0..callers.len() {
            let Some(caller) = callers.pop_front() else { break };
            match buffer.receive(0, &caller) {
                Ok(ReceivedPacket::WouldBlock) => callers.push_back(caller),
                Ok(ReceivedPacket::Packet { frame, mut fds }) => {
                    let greeting = message::decode::<Greeting>(0, frame);
                    let known = greeting.ok().filter(|greeting| greeting.secret == self.secret);
                    if let (Some(Greeting { from, .. }), Some(memory)) = (known, fds.pop()) {
                        return Ok(Some(Accepted { from, socket: PairSocket(caller), memory }));
                    }
                    tracing::warn!("turned away a caller that is not of this group");
                }
                Ok(ReceivedPacket::Closed) => {}
                Err(error) => tracing::warn!(%error, "turned away a caller"),
            }
        }
        Ok(None)
    }
}

impl AsFd for PairListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// A connection to another rank, whose packets after the first say nothing but that there is something to look at.
#[derive(Debug)]
pub struct PairSocket(Socket);

impl PairSocket {
    /// Wakes the other rank, if it sleeps in a poll. Does not wait.
    pub fn wake(&self) {
        // A wake-up that does not fit is not needed: packets that nobody has read wake as well. A closed connection
        // is noticed by its reader.
        let _ = rustix::net::send(&*self.0, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    /// Takes what has woken this rank. Returns false once the other rank has closed the connection.
    pub fn drain(&self) -> bool {
        let mut bytes = [0; 16];
        loop {
            match rustix::net::recv(&*self.0, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return false,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return true,
                Err(_) => return false,
            }
        }
    }

    /// Whether the other rank has closed the connection. Does not wait.
    pub fn is_closed(&self) -> bool {
        let mut polled = [PollFd::new(&*self.0, PollFlags::empty())];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(rustix::event::poll(&mut polled, Some(&now)), Ok(1..))
    }
}

impl AsFd for PairSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::MemfdFlags;

    use super::*;

    fn address(of: &PairListener) -> PairAddress {
        PairAddress::decode(3, &of.address().unwrap()).unwrap()
    }

    #[test]
    fn memory_is_handed_over_before_the_other_rank_comes() {
        let listener = PairListener::bind().unwrap();
        let there = address(&listener);
        assert!(there.obstacle(&there).is_none() && listener.accept().unwrap().is_none());
        let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 77).unwrap();
        let Dialled::Connected(socket) = there.dial(5, memory.as_fd()).unwrap() else {
            panic!("nobody listens")
        };
        let accepted = listener.accept().unwrap().expect("a caller");
        assert_eq!((accepted.from, rustix::fs::fstat(&accepted.memory).unwrap().st_size), (5, 77));
        assert!(accepted.socket.drain() && !socket.is_closed());
        socket.wake();
        assert!(accepted.socket.drain());
        drop(socket);
        assert!(accepted.socket.is_closed() && !accepted.socket.drain());
    }

    #[test]
    fn secrets_of_pairs_are_not_shown() {
        let listener = PairListener::bind().unwrap();
        let (there, secret) = (address(&listener), listener.secret);
        let greeting = Greeting { from: 1, secret };
        let shown = format!("{listener:?} {there:?} {greeting:?}");
        assert_eq!(shown.matches("PairSecret(..)").count(), 3, "{shown}");
        assert!(!shown.contains(&format!("{:?}", secret.0)), "{shown}");
    }

    #[test]
    fn callers_without_the_secret_are_turned_away_and_ended_ranks_are_gone() {
        let listener = PairListener::bind().unwrap();
        let there = PairAddress { secret: PairSecret([1; 32]), ..address(&listener) };
        let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        let socket = there.dial(5, memory.as_fd()).unwrap();
        assert!(listener.accept().unwrap().is_none());
        assert!(matches!(socket, Dialled::Connected(socket) if socket.is_closed()));
        // A connection that nobody has accepted closes with the listener.
        let there = address(&listener);
        let Dialled::Connected(waiting) = there.dial(5, memory.as_fd()).unwrap() else {
            panic!("nobody listens")
        };
        assert!(!waiting.is_closed());
        drop(listener);
        assert!(waiting.is_closed());
        assert!(matches!(there.dial(5, memory.as_fd()).unwrap(), Dialled::Gone));
    }
}
