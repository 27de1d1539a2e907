//! The store of ranks that share nothing but a network.
//!
//! [`TcpServer`] holds the content and runs on a thread of its own, in rank 0's process or
//! anywhere else; every rank, rank 0 too, is a client with a [`TcpStore`].
//!
//! | file | owns |
//! | --- | --- |
//! | `wire` | frames and messages, their limits |
//! | `auth` | the shared secret and its proofs |
//! | `meter` | how much memory clients make the server hold |
//! | `server_state` | the content, who waits for what, which ranks are lost: no I/O, no clock |
//! | `frame_io` | frames of one connection of the server: half-read ones, unsent replies |
//! | `poller` | the epoll set |
//! | `event_loop` | the server's thread: sockets, timers, phases of a connection |
//! | `server` | the server as its owner sees it |
//! | `wait_limit` | how long a client waits, and what can stop it before |
//! | `client_connection` | one connection of a client: handshake, request, reply |
//! | `client` | the [`Store`](super::Store) over such connections |
//! | `fuzzed` | for fuzz targets, both ends of a connection without sockets |
//! | `address` | where the server is: names, resolved until a deadline |
//!
//! **Trust.** Without a secret the server listens on loopback addresses only, and every process
//! of the machine can use it. With one, both sides prove that they know it before anything else
//! is said; the secret itself never travels. Traffic is not encrypted.
//!
//! **Misuse.** A client that sends half a frame, nothing, nonsense or too much, or does not read
//! its replies, is dropped, with an error reply where it can still be sent one; nobody else notices.
//! Clients that have not proven themselves keep nobody out: they are dropped for others, the oldest first.
//!
//! **Loss.** A client that declares its rank ([`TcpStore::connect_as`]) is missed when its
//! process ends: gathers that still need it fail at once with [`Error::is_peer_lost`], instead of
//! at their deadlines. The server also tells its clients which declared
//! rank left first, because the rank that serves may leave when another has. When the server itself is
//! gone, clients get that error with the rank that left first: the one named by
//! [`TcpOptions::hosted_by`], if no other had left before it.
//!
//! [`Error::is_peer_lost`]: crate::Error::is_peer_lost

mod address;
mod auth;
mod client;
mod client_connection;
mod event_loop;
mod frame_io;
#[cfg(feature = "testing")]
pub(crate) mod fuzzed;
mod meter;
mod poller;
mod server;
mod server_state;
mod wait_limit;
mod wire;

use std::net::TcpStream;
use std::time::Duration;

use rustix::net::sockopt;

pub use address::ServerAddress;
pub use auth::Secret;
pub use client::TcpStore;
pub use server::TcpServer;

/// How a server serves and a client connects. Both sides take the same, so that one value can be
/// made from a job's configuration; each reads what concerns it.
#[derive(Clone, Debug, Default)]
pub struct TcpOptions {
    /// Secret that clients and server prove to each other. Needed by a server on any address but
    /// loopback. A client that has a secret refuses a server that has none, and the other way
    /// round.
    pub secret: Option<Secret>,
    /// For clients: the rank in whose process the server runs, if in any's. It is the rank that
    /// errors name when the server is gone, unless another had left before.
    pub hosted_by: Option<u32>,
    /// For servers: what clients may use up.
    pub limits: TcpLimits,
}

/// Resources that the clients of a server may use up, all together unless said otherwise.
#[derive(Clone, Copy, Debug)]
pub struct TcpLimits {
    /// Connections open at a time. For one more, the oldest that has not completed its handshake is dropped,
    /// and tries again; if all have, the new one is refused. Connections without a completed handshake are
    /// also never more than a quarter of the files that the server's process may open.
    pub max_connections: usize,
    /// Bytes of keys, values, parts and half-read requests. Requests that would exceed it fail
    /// with [`Error::is_out_of_memory`](crate::Error::is_out_of_memory) and change nothing.
    /// Unsent replies count too, and may bring the total to twice this.
    pub max_memory: usize,
    /// Time a new connection has to prove itself.
    pub handshake: Duration,
    /// Time one request may take to arrive once it has begun, and the longest a client may go
    /// without reading anything of a reply.
    pub stall: Duration,
}

impl Default for TcpLimits {
    /// 8192 connections, 1 GiB, 10 s to shake hands, 60 s to get a request across.
    fn default() -> Self {
        Self {
            max_connections: 8192,
            max_memory: 1 << 30,
            handshake: Duration::from_secs(10),
            stall: Duration::from_secs(60),
        }
    }
}

/// Sends small frames at once, and notices within about a minute that the other machine is gone.
/// A socket that does not take an option still works.
fn tune(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, Duration::from_secs(20));
    let _ = sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10));
    let _ = sockopt::set_tcp_keepcnt(stream, 4);
    let _ = sockopt::set_tcp_user_timeout(stream, 60_000);
}

#[cfg(test)]
mod abuse_tests;
