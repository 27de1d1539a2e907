//! New connections: accepting, turning away, and the handshake.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::{Connection, ConnectionPhase, EventLoop};
use crate::descriptors;
use crate::fork::NotInherited;
use crate::random::random_bytes;
use crate::store::tcp::auth::{Handshake, ProverRole};
use crate::store::tcp::frame_io::{Incoming, Outgoing};
use crate::store::tcp::poller;
use crate::store::tcp::server_state::{Admission, Client};
use crate::store::tcp::tune;
use crate::store::tcp::wire::{ClientHello, ToClient};
use crate::{Error, Result};

/// How long no connection is accepted after the process ran out of memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The most connections accepted before other events are handled.
const ACCEPT_TURN: usize = 64;

impl EventLoop {
    /// Accepts connections, at most [`ACCEPT_TURN`]; epoll reports the rest again.
    pub(super) fn accept(&mut self) -> rustix::io::Result<()> {
        for _ in 0..ACCEPT_TURN {
            let mut dropped = false;
            let stream = match self.poller.accept() {
                Err(error) if descriptors::are_used_up(error) => {
                    dropped = self.drop_unproven();
                    if dropped { self.poller.accept() } else { self.accept_and_refuse() }
                }
                first => first,
            };
            match stream {
                Ok(stream) => {
                    let limit = self.limits().max_connections;
                    if self.connections.len() >= limit || self.unproven.len() >= self.most_unproven
                    {
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
                // The new connection gets time to answer before it may be dropped for another.
                return Ok(());
            }
        }
        Ok(())
    }

    /// Drops the oldest client that has not completed its handshake, to make room for a new connection;
    /// whether there was one.
    fn drop_unproven(&mut self) -> bool {
        while let Some(&oldest) = self.unproven.first() {
            // It may have answered in the meantime.
            if self.connections.get(&oldest).is_some_and(Connection::is_challenged) {
                self.read(oldest);
            }
            if !self.unproven.contains(&oldest) && self.connections.contains_key(&oldest) {
                continue;
            }
            if let Some(connection) = self.connections.get_mut(&oldest)
                && connection.is_challenged()
            {
                let why = "it had not answered when its place was needed for another".to_owned();
                connection.outgoing.push(self.state.frame(&ToClient::Later { why }, None));
                // If there is no room for it in the socket, the client only sees the connection close.
                let _ = connection.outgoing.flush(&mut connection.stream);
            }
            self.close(oldest);
            return true;
        }
        false
    }

    /// Accepts a connection for which there is no descriptor by giving up the spare one, sends it the
    /// reason and closes it. Returns the error for which there is no connection to admit.
    fn accept_and_refuse(&mut self) -> rustix::io::Result<TcpStream> {
        if self.poller.spare.take().is_none() {
            self.poller.spare = poller::spare().ok();
            return Err(Errno::MFILE);
        }
        let refused = self.poller.accept().map(|stream| {
            let why = descriptors::shortage();
            tracing::warn!(why, "the store's server cannot take a connection");
            self.refuse(stream, &ToClient::Later { why })
        });
        self.poller.spare = poller::spare().ok();
        // The caller tries again, as after an interrupted call: there may be more connections.
        refused.and_then(|_| Err(Errno::INTR))
    }

    /// Sends a connection that is not admitted the reason. It fits into an empty socket, and nothing is
    /// unread yet for which closing would reset the connection.
    fn refuse(&self, mut stream: TcpStream, last: &ToClient) -> std::io::Result<bool> {
        let mut outgoing = Outgoing::default();
        outgoing.push(self.state.frame(last, None));
        outgoing.flush(&mut stream)
    }

    fn admit(&mut self, stream: TcpStream) -> Result<()> {
        tune(&stream);
        let limit = self.limits().max_connections;
        if self.connections.len() >= limit {
            let error = Error::refused(format!("the store already has {limit} connections"));
            self.refuse(stream, &ToClient::Failed(error.kind().clone()))
                .map_err(|error| Error::system("store connection", error))?;
            return Err(error);
        }
        let nonce = random_bytes()?;
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
        let connection = Connection {
            _own: NotInherited::new(&stream),
            stream,
            incoming: Incoming::default(),
            outgoing,
            phase: ConnectionPhase::Handshake { nonce },
            polled,
            timer: None,
        };
        self.connections.insert(client, connection);
        self.unproven.insert(client);
        let handshake = self.limits().handshake;
        self.set_timer(client, Some(handshake));
        self.flush(client);
        Ok(())
    }

    /// Checks a client's answer to the challenge and lets it in.
    pub(super) fn greet(
        &mut self,
        client: Client,
        nonce: [u8; 32],
        hello: &ClientHello,
    ) -> Result<()> {
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
                if !secret.verify(ProverRole::Client, &handshake, proof) {
                    return Err(Error::refused("the client's secret is not the store's"));
                }
                Some(secret.prove(ProverRole::Server, &handshake))
            }
        };
        match self.state.connect(client, hello.identity)? {
            Admission::Granted => {
                let frame = self.state.frame(&ToClient::Welcome { proof }, None);
                self.reply(client, frame);
                if let Some(first) = self.state.first_left() {
                    let frame = self.state.frame(&ToClient::FirstLeft(Some(first)), None);
                    self.tell(client, frame);
                }
            }
            Admission::Later(why) => self.end_with(client, &ToClient::Later { why }),
        }
        Ok(())
    }
}
