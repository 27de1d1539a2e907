//! The server's thread: no lock, no blocking call but the wait for events.
//!
//! A connection is always in one [`ConnectionPhase`], which decides what it is polled for
//! ([`EventLoop::update_polling`]) and which timer runs for it.
//!
//! | file | holds |
//! | --- | --- |
//! | `admission` | new connections: accepting, turning away, the handshake |
//! | `replies` | what a connection is sent, and how it ends |

mod admission;
mod replies;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;

use super::frame_io::{Incoming, Input, Outgoing};
use super::meter::{Meter, MeteredPayload};
use super::poller::{FIRST_CLIENT, Poller, ReadySource};
use super::server_state::{Client, ServerState};
use super::wire::{self, Caps, StoreRequest, ToServer};
use super::{TcpLimits, TcpOptions};
use crate::descriptors;
use crate::fork::NotInherited;
use crate::{Error, Result};

/// How long a dropped client may take to read the reason.
const LINGER: Duration = Duration::from_secs(2);

/// Phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionPhase {
    /// It has been challenged and has not answered.
    Handshake { nonce: [u8; 32] },
    /// It may send a request.
    Ready,
    /// Its request waits in the state; the client may cancel it.
    Waiting,
    /// It has a reply to read before it may send the next request.
    Replying,
    /// It has an error to read. What it sends is discarded, because closing with unread data would reset the
    /// connection before the error is read.
    Ending,
}

#[derive(Debug)]
struct Connection {
    /// With a copy in a forked child, the client would not see that this process is gone. Dropped before the
    /// stream.
    _own: NotInherited,
    stream: TcpStream,
    incoming: Incoming,
    outgoing: Outgoing,
    phase: ConnectionPhase,
    /// The events that epoll watches it for.
    polled: EventFlags,
    timer: Option<Instant>,
}

impl Connection {
    fn is_challenged(&self) -> bool {
        matches!(self.phase, ConnectionPhase::Handshake { .. })
    }
}

/// The loop and all it owns.
#[derive(Debug)]
pub(super) struct EventLoop {
    poller: Poller,
    options: TcpOptions,
    instance: [u8; 16],
    meter: Meter,
    state: ServerState,
    connections: BTreeMap<Client, Connection>,
    timers: BTreeSet<(Instant, Client)>,
    next: Client,
    accept_again: Option<Instant>,
    /// Clients that may be dropped for others: those that have not completed the handshake, and those that
    /// are ending. Numbers grow, so the first is the oldest.
    unproven: BTreeSet<Client>,
    /// The most there may be of them.
    most_unproven: usize,
}

impl EventLoop {
    pub(super) fn new(
        poller: Poller,
        options: TcpOptions,
        instance: [u8; 16],
        one_group: bool,
    ) -> Self {
        let meter = Meter::new(options.limits.max_memory);
        // The process that serves the store needs descriptors for itself as well.
        let most_unproven = (descriptors::hard_limit() / 4).max(1);
        let state = ServerState::new(meter.clone());
        Self {
            poller,
            options,
            instance,
            state: if one_group { state.for_one_group() } else { state },
            meter,
            connections: BTreeMap::new(),
            timers: BTreeSet::new(),
            next: FIRST_CLIENT,
            accept_again: None,
            unproven: BTreeSet::new(),
            most_unproven,
        }
    }

    fn limits(&self) -> &TcpLimits {
        &self.options.limits
    }

    /// Serves until the order to stop.
    pub(super) fn run(&mut self) -> rustix::io::Result<()> {
        let stopped = self.serve_all();
        self.send_pending_replies();
        // Forked children may have copies of these sockets, which must not keep the port taken or
        // make clients wait for a server that is gone.
        let _ = rustix::net::shutdown(&self.poller.listener, rustix::net::Shutdown::Both);
        for connection in self.connections.values() {
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
        stopped
    }

    fn serve_all(&mut self) -> rustix::io::Result<()> {
        loop {
            let next = self.timers.first().map(|(at, _)| *at);
            let mut stop = false;
            for ready in self.poller.wait(next.into_iter().chain(self.accept_again).min())? {
                match ready {
                    // Events that came together with this one are still handled: this process may stop because a
                    // rank has left, and the others need to know which.
                    ReadySource::Stop => stop = true,
                    ReadySource::Listener => self.accept()?,
                    ReadySource::Client(client, flags) => self.handle_events(client, flags),
                }
                self.deliver();
            }
            if stop {
                return Ok(());
            }
            self.run_timers()?;
            self.deliver();
        }
    }

    fn run_timers(&mut self) -> rustix::io::Result<()> {
        let now = Instant::now();
        if self.accept_again.is_some_and(|at| at <= now) {
            self.accept_again = None;
            self.poller.listen(true)?;
        }
        while let Some(&(at, client)) = self.timers.first()
            && at <= now
        {
            self.timers.remove(&(at, client));
            let Some(connection) = self.connections.get_mut(&client) else { continue };
            connection.timer = None;
            match connection.phase {
                ConnectionPhase::Waiting => self.state.expire(client),
                ConnectionPhase::Handshake { .. } => {
                    let limit = self.limits().handshake;
                    self.end(
                        client,
                        &Error::timeout("for the client's handshake", limit, Vec::new()),
                    );
                }
                ConnectionPhase::Ready => {
                    let limit = self.limits().stall;
                    let what = "for the rest of a client's request";
                    self.end(client, &Error::timeout(what, limit, Vec::new()));
                }
                ConnectionPhase::Replying | ConnectionPhase::Ending => self.close(client),
            }
        }
        Ok(())
    }

    /// Acts on the events that epoll reported for `client`.
    fn handle_events(&mut self, client: Client, flags: EventFlags) {
        let Some(connection) = self.connections.get(&client) else { return };
        if flags.contains(EventFlags::ERR) {
            return self.close(client);
        }
        let may_send =
            matches!(connection.phase, ConnectionPhase::Handshake { .. } | ConnectionPhase::Ready);
        let hung_up = flags.intersects(EventFlags::RDHUP | EventFlags::HUP);
        let readable = flags.contains(EventFlags::IN);
        let cancels = connection.phase == ConnectionPhase::Waiting && readable && !hung_up;
        if may_send && (readable || hung_up) || cancels {
            self.read(client);
        } else if connection.phase == ConnectionPhase::Ending {
            if readable || hung_up {
                self.discard(client);
            }
        } else if hung_up {
            // Nobody is left to read the reply.
            return self.close(client);
        }
        if flags.contains(EventFlags::OUT) {
            self.flush(client);
        }
    }

    fn read(&mut self, client: Client) {
        let Some(connection) = self.connections.get_mut(&client) else { return };
        let caps = match connection.phase {
            ConnectionPhase::Handshake { .. } => Caps::HANDSHAKE,
            _ => Caps::REQUEST,
        };
        match connection.incoming.read(&mut connection.stream, &self.meter, caps) {
            Input::Frame(head, tail) => {
                let phase = connection.phase;
                let handled = wire::decode(&head).and_then(|message| match (phase, message) {
                    (ConnectionPhase::Handshake { nonce }, ToServer::Hello(hello)) => {
                        self.greet(client, nonce, &hello)
                    }
                    (ConnectionPhase::Ready, ToServer::Request(request)) => {
                        self.serve(client, request, tail);
                        Ok(())
                    }
                    (ConnectionPhase::Waiting, ToServer::Cancel) => {
                        self.state.cancel(client);
                        Ok(())
                    }
                    // The cancellation crossed the reply on the way.
                    (ConnectionPhase::Ready, ToServer::Cancel) => Ok(()),
                    _ => Err(Error::invalid_argument("a store message out of turn")),
                });
                if let Err(error) = handled {
                    self.end(client, &error);
                }
            }
            Input::Partial(begun) => {
                // One budget for the whole request: a client that sends slowly does not renew it.
                if connection.phase == ConnectionPhase::Ready && begun && connection.timer.is_none()
                {
                    let stall = self.limits().stall;
                    self.set_timer(client, Some(stall));
                }
            }
            Input::Closed => self.close(client),
            Input::Broken(error) => self.end(client, &error),
        }
    }

    fn serve(&mut self, client: Client, request: StoreRequest, tail: Result<MeteredPayload>) {
        let wait = match &request {
            StoreRequest::Get { wait_ms, .. } | StoreRequest::AllGather { wait_ms, .. } => *wait_ms,
            _ => 0,
        };
        self.state.request(client, request, tail);
        if self.state.is_waiting(client) {
            // Nobody waits for more than a month, and much larger numbers would overflow the clock.
            let wait = Duration::from_millis(wait).min(Duration::from_secs(30 * 24 * 3600));
            self.set_phase(client, ConnectionPhase::Waiting);
            self.set_timer(client, Some(wait));
        }
    }

    /// Discards what an ending client still sends, a bounded amount at a time.
    fn discard(&mut self, client: Client) {
        let Some(connection) = self.connections.get_mut(&client) else { return };
        let mut buffer = [0u8; 16 << 10];
        for _ in 0..16 {
            match connection.stream.read(&mut buffer) {
                Ok(0) => return self.close(client),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => return self.close(client),
            }
        }
    }

    fn close(&mut self, client: Client) {
        self.set_timer(client, None);
        // Closing the socket takes it out of the epoll set.
        self.connections.remove(&client);
        self.unproven.remove(&client);
        self.state.disconnect(client);
    }

    fn set_phase(&mut self, client: Client, phase: ConnectionPhase) {
        if let Some(connection) = self.connections.get_mut(&client) {
            connection.phase = phase;
            if phase == ConnectionPhase::Ending {
                self.unproven.insert(client);
            } else {
                self.unproven.remove(&client);
            }
        }
        self.update_polling(client);
    }

    /// Has epoll watch the connection for the events of its phase.
    fn update_polling(&mut self, client: Client) {
        let Some(connection) = self.connections.get_mut(&client) else { return };
        let mut polled = match connection.phase {
            ConnectionPhase::Handshake { .. }
            | ConnectionPhase::Ready
            | ConnectionPhase::Waiting => EventFlags::IN | EventFlags::RDHUP,
            ConnectionPhase::Replying => EventFlags::RDHUP,
            ConnectionPhase::Ending => EventFlags::IN,
        };
        if !connection.outgoing.is_empty() {
            polled |= EventFlags::OUT;
        }
        if polled == connection.polled {
            return;
        }
        connection.polled = polled;
        if self.poller.change(client, &connection.stream, polled).is_err() {
            self.close(client);
        }
    }

    /// Replaces the connection's timer.
    fn set_timer(&mut self, client: Client, after: Option<Duration>) {
        let Some(connection) = self.connections.get_mut(&client) else { return };
        if let Some(at) = connection.timer.take() {
            self.timers.remove(&(at, client));
        }
        if let Some(at) = after.and_then(|after| Instant::now().checked_add(after)) {
            connection.timer = Some(at);
            self.timers.insert((at, client));
        }
    }
}
