//! The server's thread: no lock, no blocking call but the wait for events.
//!
//! A connection is always in one [`Phase`], which decides what it is polled for and which timer
//! runs for it; [`EventLoop::settle`] is where the poller is told.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::auth::{Handshake, Side};
use super::frame_io::{Incoming, Input, Outgoing};
use super::meter::{Meter, Payload};
use super::poller::{self, FIRST_CLIENT, Poller, Ready};
use super::server_state::{Admission, Client, Frame, State};
use super::wire::{self, Caps, Hello, Request, ToClient, ToServer};
use super::{TcpLimits, TcpOptions, tune};
use crate::descriptors;
use crate::fork::NotInherited;
use crate::random::random;
use crate::{Error, Result};

/// How long a dropped client may take to read why.
const LINGER: Duration = Duration::from_secs(2);

/// How long no connection is accepted after the process ran out of memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections taken before those that are there get their turn.
const ACCEPT_TURN: usize = 64;

/// What a connection is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It has been challenged and has not answered.
    Handshake { nonce: [u8; 32] },
    /// It may send a request.
    Ready,
    /// The state has its request, which it may cancel.
    Waiting,
    /// It has a reply to read before it may send the next request.
    Replying,
    /// It has an error to read; what it sends is thrown away, so that closing does not reset the
    /// connection under the error.
    Ending,
}

#[derive(Debug)]
struct Conn {
    /// Clients see that this process is gone. Dropped before the stream.
    _own: NotInherited,
    stream: TcpStream,
    incoming: Incoming,
    outgoing: Outgoing,
    phase: Phase,
    /// What epoll was last told.
    polled: EventFlags,
    timer: Option<Instant>,
}

impl Conn {
    fn is_challenged(&self) -> bool {
        matches!(self.phase, Phase::Handshake { .. })
    }
}

/// The loop and all it owns.
#[derive(Debug)]
pub(super) struct EventLoop {
    poller: Poller,
    options: TcpOptions,
    instance: [u8; 16],
    meter: Meter,
    state: State,
    conns: BTreeMap<Client, Conn>,
    timers: BTreeSet<(Instant, Client)>,
    next: Client,
    accept_again: Option<Instant>,
    /// Clients that may be dropped for others: those that have not proven themselves, and those that
    /// have their last word. Numbers grow, so the first is the oldest.
    unproven: BTreeSet<Client>,
    /// How many there may be of them.
    most_unproven: usize,
}

impl EventLoop {
    pub(super) fn new(
        poller: Poller,
        options: TcpOptions,
        instance: [u8; 16],
        one_meeting: bool,
    ) -> Self {
        let meter = Meter::new(options.limits.max_memory);
        // The process that serves the store needs descriptors for itself, too.
        let most_unproven = (descriptors::hard_limit() / 4).max(1);
        let state = State::new(meter.clone());
        Self {
            poller,
            options,
            instance,
            state: if one_meeting { state.for_one_meeting() } else { state },
            meter,
            conns: BTreeMap::new(),
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

    /// Serves until told to stop.
    pub(super) fn run(&mut self) -> rustix::io::Result<()> {
        let stopped = self.serve_all();
        self.send_the_rest();
        // Forked children may have copies of these sockets, which must not keep the port taken or
        // make clients wait for a server that is gone.
        let _ = rustix::net::shutdown(&self.poller.listener, rustix::net::Shutdown::Both);
        for conn in self.conns.values() {
            let _ = conn.stream.shutdown(Shutdown::Both);
        }
        stopped
    }

    /// Sends what is answered already: the rank that serves the store leaves when it has its own
    /// answer, and the others are owed theirs. Who does not read is not waited for long.
    fn send_the_rest(&mut self) {
        self.deliver();
        let until = Instant::now() + LINGER;
        loop {
            let unsent = self.conns.iter().filter(|(_, conn)| !conn.outgoing.is_empty());
            let (clients, mut polled): (Vec<Client>, Vec<PollFd<'_>>) = unsent
                .map(|(client, conn)| (*client, PollFd::new(&conn.stream, PollFlags::OUT)))
                .unzip();
            let left = until.saturating_duration_since(Instant::now());
            if clients.is_empty() || left.is_zero() {
                return;
            }
            // An error is as good as an answer: flushing says the same of those that are to be closed.
            let _ = poll(&mut polled, Timespec::try_from(left).ok().as_ref());
            for client in clients {
                self.flush(client);
            }
        }
    }

    fn serve_all(&mut self) -> rustix::io::Result<()> {
        loop {
            let next = self.timers.first().map(|(at, _)| *at);
            for ready in self.poller.wait(next.into_iter().chain(self.accept_again).min())? {
                match ready {
                    Ready::Stop => return Ok(()),
                    Ready::Listener => self.accept()?,
                    Ready::Client(client, flags) => self.ready(client, flags),
                }
                self.deliver();
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
            let Some(conn) = self.conns.get_mut(&client) else { continue };
            conn.timer = None;
            match conn.phase {
                Phase::Waiting => self.state.expire(client),
                Phase::Handshake { .. } => {
                    let limit = self.limits().handshake;
                    self.end(
                        client,
                        &Error::timeout("for the client's handshake", limit, Vec::new()),
                    );
                }
                Phase::Ready => {
                    let limit = self.limits().stall;
                    let what = "for the rest of a client's request";
                    self.end(client, &Error::timeout(what, limit, Vec::new()));
                }
                Phase::Replying | Phase::Ending => self.close(client),
            }
        }
        Ok(())
    }

    /// Takes waiting connections, a turn of them; the rest is reported again.
    fn accept(&mut self) -> rustix::io::Result<()> {
        for _ in 0..ACCEPT_TURN {
            let mut dropped = false;
            let stream = match self.poller.accept() {
                Err(error) if descriptors::are_used_up(error) => {
                    dropped = self.drop_unproven();
                    if dropped { self.poller.accept() } else { self.accept_to_say_no() }
                }
                first => first,
            };
            match stream {
                Ok(stream) => {
                    let limit = self.limits().max_connections;
                    if self.conns.len() >= limit || self.unproven.len() >= self.most_unproven {
                        dropped |= self.drop_unproven();
                    }
                    if let Err(error) = self.admit(stream) {
                        tracing::debug!(%error, "a connection to the store was not taken");
                    }
                }
                Err(Errno::WOULDBLOCK) => return Ok(()),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => {
                    // The listener stays readable, so polling it meanwhile would spin.
                    tracing::warn!(%error, "the store's server cannot accept");
                    self.accept_again = Some(Instant::now() + ACCEPT_PAUSE);
                    return self.poller.listen(false);
                }
            }
            if dropped {
                // Who was taken in another's place may answer before it is the oldest itself.
                return Ok(());
            }
        }
        Ok(())
    }

    /// Drops the client that has had the longest time to prove itself, for one that waits. Whether
    /// there was one.
    fn drop_unproven(&mut self) -> bool {
        while let Some(&oldest) = self.unproven.first() {
            // It may have answered in the meantime.
            if self.conns.get(&oldest).is_some_and(Conn::is_challenged) {
                self.read(oldest);
            }
            if !self.unproven.contains(&oldest) && self.conns.contains_key(&oldest) {
                continue;
            }
            if let Some(conn) = self.conns.get_mut(&oldest)
                && conn.is_challenged()
            {
                let why = "it had not answered when its place was needed for another".to_owned();
                conn.outgoing.push(self.state.frame(&ToClient::Later { why }, None));
                // Who does not read it sees the connection close.
                let _ = conn.outgoing.flush(&mut conn.stream);
            }
            self.close(oldest);
            return true;
        }
        false
    }

    /// Takes a connection for which there is no descriptor, in place of the spare one, tells it so and
    /// closes it. What is returned is why there is none to admit.
    fn accept_to_say_no(&mut self) -> rustix::io::Result<TcpStream> {
        if self.poller.spare.take().is_none() {
            self.poller.spare = poller::spare().ok();
            return Err(Errno::MFILE);
        }
        let told = self.poller.accept().map(|stream| {
            let why = descriptors::shortage();
            tracing::warn!(why, "the store's server cannot take a connection");
            self.say_no(stream, &ToClient::Later { why })
        });
        self.poller.spare = poller::spare().ok();
        // Interrupted, as it were: there may be more of them.
        told.and_then(|_| Err(Errno::INTR))
    }

    /// The last word to a connection that is not taken. It fits in an empty socket, and nothing has been
    /// read that closing could answer with a reset.
    fn say_no(&self, mut stream: TcpStream, last: &ToClient) -> std::io::Result<bool> {
        let mut outgoing = Outgoing::default();
        outgoing.push(self.state.frame(last, None));
        outgoing.flush(&mut stream)
    }

    fn admit(&mut self, stream: TcpStream) -> Result<()> {
        tune(&stream);
        let limit = self.limits().max_connections;
        if self.conns.len() >= limit {
            let error = Error::refused(format!("the store already has {limit} connections"));
            self.say_no(stream, &ToClient::Failed(error.kind().clone()))
                .map_err(|error| Error::system("store connection", error))?;
            return Err(error);
        }
        let nonce = random()?;
        let client = self.next;
        self.next += 1;
        let challenge = ToClient::Challenge {
            instance: self.instance,
            nonce,
            secret_needed: self.options.secret.is_some(),
        };
        let mut outgoing = Outgoing::default();
        outgoing.push(self.state.frame(&challenge, None));
        let polled = EventFlags::IN | EventFlags::RDHUP;
        self.poller.add(client, &stream, polled).map_err(|error| Error::system("epoll", error))?;
        let conn = Conn {
            _own: NotInherited::new(&stream),
            stream,
            incoming: Incoming::default(),
            outgoing,
            phase: Phase::Handshake { nonce },
            polled,
            timer: None,
        };
        self.conns.insert(client, conn);
        self.unproven.insert(client);
        let handshake = self.limits().handshake;
        self.set_timer(client, Some(handshake));
        self.flush(client);
        Ok(())
    }

    /// Acts on what epoll said of `client`.
    fn ready(&mut self, client: Client, flags: EventFlags) {
        let Some(conn) = self.conns.get(&client) else { return };
        if flags.contains(EventFlags::ERR) {
            return self.close(client);
        }
        let reads = matches!(conn.phase, Phase::Handshake { .. } | Phase::Ready);
        let hung_up = flags.intersects(EventFlags::RDHUP | EventFlags::HUP);
        let speaks = flags.contains(EventFlags::IN);
        if reads && (speaks || hung_up) || conn.phase == Phase::Waiting && speaks && !hung_up {
            self.read(client);
        } else if conn.phase == Phase::Ending {
            if speaks || hung_up {
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
        let Some(conn) = self.conns.get_mut(&client) else { return };
        let caps = match conn.phase {
            Phase::Handshake { .. } => Caps::HANDSHAKE,
            _ => Caps::REQUEST,
        };
        match conn.incoming.read(&mut conn.stream, &self.meter, caps) {
            Input::Frame(head, tail) => {
                let phase = conn.phase;
                let handled = wire::decode(&head).and_then(|message| match (phase, message) {
                    (Phase::Handshake { nonce }, ToServer::Hello(hello)) => {
                        self.greet(client, nonce, &hello)
                    }
                    (Phase::Ready, ToServer::Request(request)) => {
                        self.serve(client, request, tail);
                        Ok(())
                    }
                    (Phase::Waiting, ToServer::Cancel) => {
                        self.state.cancel(client);
                        Ok(())
                    }
                    // It crossed the answer on the way.
                    (Phase::Ready, ToServer::Cancel) => Ok(()),
                    _ => Err(Error::invalid_argument("a store message out of turn")),
                });
                if let Err(error) = handled {
                    self.end(client, &error);
                }
            }
            Input::Partial(begun) => {
                // The whole request has one budget: a trickle does not renew it.
                if conn.phase == Phase::Ready && begun && conn.timer.is_none() {
                    let stall = self.limits().stall;
                    self.set_timer(client, Some(stall));
                }
            }
            Input::Closed => self.close(client),
            Input::Broken(error) => self.end(client, &error),
        }
    }

    /// Checks a client's answer to the challenge and lets it in.
    fn greet(&mut self, client: Client, nonce: [u8; 32], hello: &Hello) -> Result<()> {
        let handshake = Handshake {
            instance: self.instance,
            server_nonce: nonce,
            client_nonce: hello.nonce,
            identity: hello.identity,
        };
        let proof = match (&self.options.secret, &hello.proof) {
            (None, None) => None,
            (None, Some(_)) => {
                return Err(Error::refused("the client has a secret and the store has none"));
            }
            (Some(_), None) => {
                return Err(Error::refused("the store needs a secret and the client has none"));
            }
            (Some(secret), Some(proof)) => {
                if !secret.verify(Side::Client, &handshake, proof) {
                    return Err(Error::refused("the client's secret is not the store's"));
                }
                Some(secret.prove(Side::Server, &handshake))
            }
        };
        match self.state.connect(client, hello.identity)? {
            Admission::Granted => {
                let frame = self.state.frame(&ToClient::Welcome { proof }, None);
                self.reply(client, frame);
            }
            Admission::Later(why) => self.end_with(client, &ToClient::Later { why }),
        }
        Ok(())
    }

    fn serve(&mut self, client: Client, request: Request, tail: Result<Payload>) {
        let wait = match &request {
            Request::Get { wait_ms, .. } | Request::AllGather { wait_ms, .. } => *wait_ms,
            _ => 0,
        };
        self.state.request(client, request, tail);
        if self.state.is_waiting(client) {
            // Beyond a month nobody waits, and far beyond the clock would overflow.
            let wait = Duration::from_millis(wait).min(Duration::from_secs(30 * 24 * 3600));
            self.set_phase(client, Phase::Waiting);
            self.set_timer(client, Some(wait));
        }
    }

    /// Sends out what the state has answered.
    fn deliver(&mut self) {
        loop {
            let replies = self.state.take_replies();
            if replies.is_empty() {
                return;
            }
            for (client, frame) in replies {
                self.reply(client, frame);
            }
        }
    }

    fn reply(&mut self, client: Client, frame: Frame) {
        let stall = self.limits().stall;
        let Some(conn) = self.conns.get_mut(&client) else { return };
        conn.outgoing.push(frame);
        self.set_phase(client, Phase::Replying);
        self.set_timer(client, Some(stall));
        self.flush(client);
    }

    /// Sends what can be sent.
    fn flush(&mut self, client: Client) {
        let stall = self.limits().stall;
        let Some(conn) = self.conns.get_mut(&client) else { return };
        let Ok(progress) = conn.outgoing.flush(&mut conn.stream) else {
            return self.close(client);
        };
        let empty = conn.outgoing.is_empty();
        match conn.phase {
            Phase::Replying if empty => {
                self.set_phase(client, Phase::Ready);
                self.set_timer(client, None);
            }
            Phase::Replying if progress => self.set_timer(client, Some(stall)),
            Phase::Ending if empty => {
                let _ = conn.stream.shutdown(Shutdown::Write);
            }
            _ => {}
        }
        self.settle(client);
    }

    /// Drops a client that did wrong, after telling it why.
    fn end(&mut self, client: Client, error: &Error) {
        tracing::debug!(%error, client, "the store drops a client");
        self.end_with(client, &ToClient::Failed(error.kind().clone()));
    }

    /// Says a last word to a client.
    fn end_with(&mut self, client: Client, last: &ToClient) {
        let frame = self.state.frame(last, None);
        self.state.disconnect(client);
        let Some(conn) = self.conns.get_mut(&client) else { return };
        conn.incoming = Incoming::default();
        conn.outgoing.push(frame);
        self.set_phase(client, Phase::Ending);
        self.set_timer(client, Some(LINGER));
        self.flush(client);
    }

    /// Throws away what an ending client still sends, a turn at a time.
    fn discard(&mut self, client: Client) {
        let Some(conn) = self.conns.get_mut(&client) else { return };
        let mut buffer = [0u8; 16 << 10];
        for _ in 0..16 {
            match conn.stream.read(&mut buffer) {
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
        self.conns.remove(&client);
        self.unproven.remove(&client);
        self.state.disconnect(client);
    }

    fn set_phase(&mut self, client: Client, phase: Phase) {
        if let Some(conn) = self.conns.get_mut(&client) {
            conn.phase = phase;
            if phase == Phase::Ending {
                self.unproven.insert(client);
            } else {
                self.unproven.remove(&client);
            }
        }
        self.settle(client);
    }

    /// Polls for what the connection's phase calls for.
    fn settle(&mut self, client: Client) {
        let Some(conn) = self.conns.get_mut(&client) else { return };
        let mut polled = match conn.phase {
            Phase::Handshake { .. } | Phase::Ready | Phase::Waiting => {
                EventFlags::IN | EventFlags::RDHUP
            }
            Phase::Replying => EventFlags::RDHUP,
            Phase::Ending => EventFlags::IN,
        };
        if !conn.outgoing.is_empty() {
            polled |= EventFlags::OUT;
        }
        if polled == conn.polled {
            return;
        }
        conn.polled = polled;
        if self.poller.change(client, &conn.stream, polled).is_err() {
            self.close(client);
        }
    }

    /// Replaces the connection's timer.
    fn set_timer(&mut self, client: Client, after: Option<Duration>) {
        let Some(conn) = self.conns.get_mut(&client) else { return };
        if let Some(at) = conn.timer.take() {
            self.timers.remove(&(at, client));
        }
        if let Some(at) = after.and_then(|after| Instant::now().checked_add(after)) {
            conn.timer = Some(at);
            self.timers.insert((at, client));
        }
    }
}
