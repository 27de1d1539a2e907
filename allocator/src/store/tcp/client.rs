//! The client: a [`Store`] over connections to a [`TcpServer`](super::TcpServer).
//!
//! A call uses a connection by itself from its request to its reply. A [`TcpStore`] keeps as many
//! connections as it has had calls at once, so a thread that waits in a `get` never delays the
//! `set` that it waits for.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::address::Unresolved;
use super::client_connection::ClientConnection;
use super::wait_limit::{ConnectionFault, WaitLimit};
use super::wire::{Identity, StoreRequest, ToClient};
use super::{ServerAddress, TcpOptions};
use crate::fork::ProcessId;
use crate::random::random_bytes;
use crate::store::gathered::expand_runs;
use crate::store::traffic::TrafficCounters;
use crate::store::{Gathered, Stop, Store, StoreTraffic, check_gather, check_limits};
use crate::{Deadline, Error, Result};

/// How long after its deadline a call still waits for the server's answer, which names the ranks that are
/// missing. A server that is dead or stuck must not hold a call for longer than this.
const GRACE: Duration = Duration::from_millis(500);

/// Completes "interrupted ...".
const WAITING: &str = "while waiting for other ranks";

/// The longest pause between attempts to connect.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// A store on a [`TcpServer`](super::TcpServer).
///
/// Calls from several threads run side by side, each on a connection of its own. Once the server
/// is found gone, every call fails with the same error: what the store held is lost, and a server
/// that has taken its place is another store. Connect anew to use that.
#[derive(Debug)]
pub struct TcpStore {
    addr: SocketAddr,
    options: TcpOptions,
    identity: Option<Identity>,
    /// The server's instance number: a server with another one has taken its place at this address.
    instance: [u8; 16],
    connections: Mutex<Connections>,
    counters: TrafficCounters,
    /// The process whose connections these are.
    maker: ProcessId,
}

#[derive(Debug, Default)]
struct Connections {
    idle: Vec<ClientConnection>,
    /// Which rank left first and has not come back, as the server last said.
    first_left: Option<u32>,
    gone: Option<Error>,
}

impl TcpStore {
    /// Connects to the server at `addr`, trying again until it is up or the deadline passes.
    ///
    /// Errors: [`Error::is_refused`] when one side has another secret or protocol version, or
    /// the server is full; [`Error::is_timeout`] when no server came up.
    pub fn connect(
        addr: impl Into<ServerAddress>,
        options: TcpOptions,
        deadline: Deadline,
    ) -> Result<Self> {
        Self::open(&addr.into(), options, None, deadline, None)
    }

    /// Connects as `rank`. While this store lives, another that connects as the same rank is
    /// refused with [`Error::is_refused`]; when it goes, with its process or without, gathers
    /// that still need the rank fail with [`Error::is_peer_lost`] on every client that has
    /// declared a rank.
    ///
    /// Gathers through this store must be made as `rank`: groups that number their ranks anew
    /// use a store that declares none. A server serves one set of declared ranks.
    pub fn connect_as(
        addr: impl Into<ServerAddress>,
        options: TcpOptions,
        rank: u32,
        deadline: Deadline,
    ) -> Result<Self> {
        Self::connect_as_until(addr, options, rank, deadline, None)
    }

    /// Connects as `rank`, unless `stop` ends that first.
    pub(crate) fn connect_as_until(
        addr: impl Into<ServerAddress>,
        options: TcpOptions,
        rank: u32,
        deadline: Deadline,
        stop: Option<Stop<'_>>,
    ) -> Result<Self> {
        let identity = Identity { rank, session: random_bytes()? };
        Self::open(&addr.into(), options, Some(identity), deadline, stop)
    }

    /// The server's address.
    pub fn server_addr(&self) -> SocketAddr {
        self.addr
    }

    fn open(
        addr: &ServerAddress,
        options: TcpOptions,
        identity: Option<Identity>,
        deadline: Deadline,
        stop: Option<Stop<'_>>,
    ) -> Result<Self> {
        let limit = WaitLimit { until: deadline.at(), stop };
        let mut pause = Duration::from_millis(10);
        let mut known = None;
        loop {
            let why = match connect_any(addr, &options, identity, limit)? {
                Attempt::Connected(addr, connection, instance) => {
                    let connections = Mutex::new(Connections {
                        idle: vec![connection],
                        ..Connections::default()
                    });
                    let counters = TrafficCounters::default();
                    let maker = ProcessId::here();
                    return Ok(Self {
                        addr,
                        options,
                        identity,
                        instance,
                        connections,
                        counters,
                        maker,
                    });
                }
                // With no time left nobody can answer, so an earlier reason says more.
                Attempt::NoAnswer(silent) => known.take().unwrap_or(silent),
                Attempt::NotYet(why) => why,
                Attempt::Stopped => {
                    let why = known.unwrap_or_else(|| "it did not answer yet".to_owned());
                    let host: Vec<u32> = options.hosted_by.into_iter().collect();
                    let doing = format!("while connecting to the store ({why})");
                    return Err(Error::interrupted_wait(&doing, &host));
                }
            };
            if deadline.expired() {
                return Err(Error::timeout(
                    format!("connecting to the store ({why})"),
                    deadline.budget(),
                    options.hosted_by.into_iter().collect(),
                ));
            }
            known = Some(why);
            std::thread::sleep(pause.min(deadline.remaining()));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One request and its reply.
    fn call(
        &self,
        request: StoreRequest,
        tail: &[u8],
        deadline: Deadline,
    ) -> Result<(ToClient, Vec<u8>)> {
        self.call_until(request, tail, deadline, None)
    }

    /// One request and its reply, unless `stop` ends the wait first.
    fn call_until(
        &self,
        request: StoreRequest,
        tail: &[u8],
        deadline: Deadline,
        stop: Option<Stop<'_>>,
    ) -> Result<(ToClient, Vec<u8>)> {
        self.maker.check("a store's client")?;
        let limit = WaitLimit { until: deadline.at() + GRACE, stop };
        let exchanged = self.checkout(limit).and_then(|mut connection| {
            let reply = connection.ask(request, tail, limit);
            let mut connections = self.lock();
            connections.first_left = connection.first_left();
            if reply.is_ok() {
                connections.idle.push(connection);
            }
            reply
        });
        match exchanged {
            Ok((ToClient::Failed(kind), _)) => Err(match Error::from_kind(kind) {
                // The server was sent what was left of the budget.
                error if error.is_timeout() => error.waited_for(deadline.budget()),
                error => error,
            }),
            Ok((ToClient::Cancelled { missing }, _)) => {
                Err(Error::interrupted_wait(WAITING, &missing))
            }
            Ok(reply) => Ok(reply),
            Err(ConnectionFault::Refused(error)) => Err(error),
            Err(ConnectionFault::Stopped) => Err(Error::interrupted_wait(WAITING, &[])),
            Err(ConnectionFault::Late) => Err(Error::timeout(
                format!("for the store's server at {} to answer", self.addr),
                deadline.budget(),
                self.options.hosted_by.into_iter().collect(),
            )),
            Err(ConnectionFault::Gone(cause) | ConnectionFault::Later(cause)) => {
                let mut connections = self.lock();
                connections.idle.clear();
                let first = connections.first_left;
                Err(connections.gone.get_or_insert_with(|| self.gone(&cause, first)).clone())
            }
        }
    }

    /// An idle connection, or a new one.
    fn checkout(&self, limit: WaitLimit<'_>) -> Result<ClientConnection, ConnectionFault> {
        let mut connections = self.lock();
        if let Some(error) = &connections.gone {
            return Err(ConnectionFault::Refused(error.clone()));
        }
        if let Some(connection) = connections.idle.pop() {
            return Ok(connection);
        }
        drop(connections);
        let (connection, instance) = connect_once(self.addr, &self.options, self.identity, limit)?;
        if instance != self.instance {
            return Err(ConnectionFault::Gone("another server has taken its place".to_owned()));
        }
        Ok(connection)
    }

    /// The error of calls after the server has gone. `first` is the rank that had left before, as the server said: the
    /// process that served has most likely left because of it.
    fn gone(&self, cause: &str, first: Option<u32>) -> Error {
        let addr = self.addr;
        match (self.options.hosted_by, first) {
            (Some(host), Some(first)) if first != host => Error::peer_lost(
                vec![first],
                format!(
                    "it disconnected from the store, whose server at {addr}, in the process of rank {host}, \
                     then left as well ({cause})"
                ),
            ),
            (Some(rank), _) => Error::peer_lost(
                vec![rank],
                format!(
                    "the store's server at {addr}, in its process, is gone ({cause}), and no other rank had left \
                     before; it may have left because of an error, which it reports itself"
                ),
            ),
            (None, _) => Error::system(format!("the store's server at {addr} is gone"), cause),
        }
    }
}

/// Result of trying a server's addresses.
enum Attempt {
    /// The address, the connection and the server's instance number.
    Connected(SocketAddr, ClientConnection, [u8; 16]),
    /// There is no server yet, and why.
    NotYet(String),
    /// There is a server, which did not answer in time.
    NoAnswer(String),
    /// `stop` said so.
    Stopped,
}

/// Tries each address that `addr` has now. A server's refusal is an error, as trying again changes
/// nothing.
fn connect_any(
    addr: &ServerAddress,
    options: &TcpOptions,
    identity: Option<Identity>,
    limit: WaitLimit<'_>,
) -> Result<Attempt> {
    if limit.check_stop().is_err() {
        return Ok(Attempt::Stopped);
    }
    // Names are resolved every time: a job's name service may come up after the job.
    let left = limit.until.saturating_duration_since(Instant::now());
    let addrs = match addr.resolve(left) {
        Ok(addrs) => addrs,
        Err(why) => {
            let text = format!("its address is {addr}, and {why}");
            let is_late = matches!(why, Unresolved::Late(_));
            return Ok(if is_late { Attempt::NoAnswer(text) } else { Attempt::NotYet(text) });
        }
    };
    let mut outcome = Attempt::NotYet("its name has no address".to_owned());
    for addr in addrs {
        match connect_once(addr, options, identity, limit) {
            Ok((connection, instance)) => {
                return Ok(Attempt::Connected(addr, connection, instance));
            }
            Err(ConnectionFault::Refused(error)) => {
                return Err(error.context(format!("connecting to the store at {addr}")));
            }
            Err(ConnectionFault::Stopped) => return Ok(Attempt::Stopped),
            Err(ConnectionFault::Late) => {
                outcome = Attempt::NoAnswer(format!("{addr} does not answer"));
            }
            Err(ConnectionFault::Gone(error) | ConnectionFault::Later(error)) => {
                outcome = Attempt::NotYet(format!("{addr}: {error}"));
            }
        }
    }
    Ok(outcome)
}

/// Connects and completes the handshake, in one attempt.
fn connect_once(
    addr: SocketAddr,
    options: &TcpOptions,
    identity: Option<Identity>,
    limit: WaitLimit<'_>,
) -> Result<(ClientConnection, [u8; 16]), ConnectionFault> {
    let stream = limit.connect(addr)?;
    // On the server's own machine, a port that nobody listens on may be given to this very socket,
    // which is then connected to itself.
    if stream.local_addr().ok() == Some(addr) {
        return Err(ConnectionFault::Gone("connection refused".to_owned()));
    }
    ClientConnection::handshake(stream, options.secret.as_ref(), identity, limit)
}

/// Rest of the deadline in milliseconds, rounded up.
fn wait_ms(deadline: Deadline) -> u64 {
    u64::try_from(deadline.remaining().as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// The server's reply does not belong to the request.
fn wrong_reply() -> Error {
    Error::invalid_state("the store's server gave a reply that does not fit the request")
}

/// Takes a gather's reply apart; `None` when it does not hold together.
pub(super) fn unpack(
    lengths: &[u32],
    runs: &[(u32, u32)],
    tail: &[u8],
    world: u32,
) -> Option<Gathered> {
    let mut rest = tail;
    let mut distinct = Vec::<Arc<[u8]>>::with_capacity(lengths.len());
    for &length in lengths {
        let (part, after) = rest.split_at_checked(length as usize)?;
        distinct.push(part.into());
        rest = after;
    }
    let which = expand_runs(runs, world)?;
    if !rest.is_empty() || which.len() != world as usize {
        return None;
    }
    Gathered::from_distinct(distinct, which)
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        check_limits(key, value)?;
        self.counters.asked(key.len() + value.len());
        match self.call(StoreRequest::Set { key: key.to_owned() }, value, deadline)? {
            (ToClient::Done, _) => Ok(()),
            _ => Err(wrong_reply()),
        }
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        check_limits(key, &[])?;
        self.counters.asked(key.len());
        let request = StoreRequest::Get { key: key.to_owned(), wait_ms: wait_ms(deadline) };
        match self.call(request, &[], deadline)? {
            (ToClient::Value, value) => {
                self.counters.answered(value.len());
                Ok(value)
            }
            _ => Err(wrong_reply()),
        }
    }

    fn add(&self, key: &str, delta: i64, deadline: Deadline) -> Result<i64> {
        check_limits(key, &[])?;
        self.counters.asked(key.len() + size_of::<i64>());
        match self.call(StoreRequest::Add { key: key.to_owned(), delta }, &[], deadline)? {
            (ToClient::Sum(sum), _) => {
                self.counters.answered(size_of::<i64>());
                Ok(sum)
            }
            _ => Err(wrong_reply()),
        }
    }

    fn delete(&self, key: &str, deadline: Deadline) -> Result<bool> {
        check_limits(key, &[])?;
        self.counters.asked(key.len());
        match self.call(StoreRequest::Delete { key: key.to_owned() }, &[], deadline)? {
            (ToClient::Deleted(was_there), _) => Ok(was_there),
            _ => Err(wrong_reply()),
        }
    }

    fn all_gather_until(
        &self,
        key: &str,
        rank: u32,
        world: u32,
        value: &[u8],
        deadline: Deadline,
        stop: Option<Stop<'_>>,
    ) -> Result<Gathered> {
        check_gather(key, rank, world, value)?;
        self.counters.asked(key.len() + value.len());
        let request = StoreRequest::AllGather {
            key: key.to_owned(),
            rank,
            world,
            wait_ms: wait_ms(deadline),
        };
        let (ToClient::Gathered { lengths, runs }, tail) =
            self.call_until(request, value, deadline, stop)?
        else {
            return Err(wrong_reply());
        };
        let gathered = unpack(&lengths, &runs, &tail, world).ok_or_else(wrong_reply)?;
        self.counters.answered(gathered.payload_bytes());
        Ok(gathered)
    }

    fn traffic(&self) -> StoreTraffic {
        self.counters.snapshot()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_that_does_not_hold_together_is_refused() {
        let good = unpack(&[1, 2], &[(0, 1), (1, 2)], b"abb", 3).unwrap();
        assert_eq!(good.parts().collect::<Vec<_>>(), [&b"a"[..], b"bb", b"bb"]);
        assert!(unpack(&[1, 2], &[(0, 1), (1, 2)], b"ab", 3).is_none());
        assert!(unpack(&[1, 2], &[(0, 1), (1, 2)], b"abbb", 3).is_none());
        assert!(unpack(&[1, 2], &[(0, 1), (2, 2)], b"abb", 3).is_none());
        assert!(unpack(&[1, 2], &[(0, 1), (1, 1)], b"abb", 3).is_none());
        assert!(unpack(&[1, 2], &[(0, 1), (1, u32::MAX)], b"abb", 3).is_none());
        assert!(unpack(&[u32::MAX], &[(0, 1)], b"", 1).is_none());
    }
}
