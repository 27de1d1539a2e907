//! One connection of a client: the handshake, then a request and its reply at a time.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use super::auth::{Handshake, ProverRole, Secret};
use super::tune;
use super::wait_limit::{ConnectionFault, WaitLimit};
use super::wire::{
    self, Caps, ClientHello, HEADER, Identity, StoreRequest, ToClient, ToServer, decode_header,
};
use crate::Error;
use crate::fork::{NotInherited, ProcessId};
use crate::random::random_bytes;

/// How long the server may take to say that a request is cancelled.
const CANCELLED_IN: Duration = Duration::from_millis(500);

/// How long a client still reads from a broken connection, whose last message may say why it broke.
const LAST_WORDS_IN: Duration = Duration::from_millis(100);

/// An open connection on which no request is under way.
#[derive(Debug)]
pub(super) struct ClientConnection {
    /// With a copy in a forked child, the server would not see that this process is gone. Dropped before the
    /// stream.
    _own: NotInherited,
    stream: TcpStream,
    maker: ProcessId,
    /// Which rank left first and has not come back, as the server last said here.
    first_left: Option<u32>,
}

impl Drop for ClientConnection {
    /// Shuts the connection down, so that the server sees its end also where a forked child has a copy. A
    /// child that drops its copy leaves the connection to its parent.
    fn drop(&mut self) {
        if self.maker.is_here() {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

impl ClientConnection {
    /// Completes the handshake with the server; returns its instance number too.
    pub(super) fn handshake(
        stream: TcpStream,
        secret: Option<&Secret>,
        identity: Option<Identity>,
        limit: WaitLimit<'_>,
    ) -> Result<(Self, [u8; 16]), ConnectionFault> {
        tune(&stream);
        let (own, maker) = (NotInherited::new(&stream), ProcessId::here());
        let mut connection = Self { _own: own, stream, maker, first_left: None };
        let (instance, server_nonce, secret_needed) =
            match connection.receive(Caps::HANDSHAKE, limit)? {
                (ToClient::Challenge { instance, nonce, secret_needed }, _) => {
                    (instance, nonce, secret_needed)
                }
                (answer, _) => return Err(no_welcome(answer)),
            };
        match (secret, secret_needed) {
            (None, true) => {
                return Err(ConnectionFault::Refused(Error::refused(
                    "the store needs a secret and this client has none",
                )));
            }
            (Some(_), false) => {
                return Err(ConnectionFault::Refused(Error::refused(
                    "this client has a secret and the store has none",
                )));
            }
            _ => {}
        }
        let handshake =
            Handshake { instance, server_nonce, client_nonce: random_bytes()?, identity };
        let hello = ClientHello {
            identity,
            nonce: handshake.client_nonce,
            proof: secret.map(|secret| secret.prove(ProverRole::Client, &handshake)),
        };
        connection.send(&wire::encode(&ToServer::Hello(hello), 0), limit)?;
        let proof = match connection.receive(Caps::HANDSHAKE, limit)? {
            (ToClient::Welcome { proof }, _) => proof,
            (answer, _) => return Err(no_welcome(answer)),
        };
        let proven = match (secret, proof) {
            (None, _) => true,
            (Some(secret), Some(proof)) => secret.verify(ProverRole::Server, &handshake, &proof),
            (Some(_), None) => false,
        };
        if !proven {
            return Err(ConnectionFault::Refused(Error::refused(
                "the store's secret is not this client's",
            )));
        }
        Ok((connection, instance))
    }

    /// Which rank left first and has not come back, as far as the server had said when the last call ended.
    pub(super) fn first_left(&self) -> Option<u32> {
        self.first_left
    }

    /// Sends `request` with its value and waits for the reply. After an error the connection must be
    /// dropped.
    pub(super) fn ask(
        &mut self,
        request: StoreRequest,
        tail: &[u8],
        limit: WaitLimit<'_>,
    ) -> Result<(ToClient, Vec<u8>), ConnectionFault> {
        let asked = self.exchange(request, tail, limit);
        if matches!(asked, Err(ConnectionFault::Gone(_))) {
            // Sending may have failed while there is still something to read.
            let soon = WaitLimit::until(limit.until.min(Instant::now() + LAST_WORDS_IN));
            while self.receive_reply(soon).is_ok() {}
        }
        asked
    }

    fn exchange(
        &mut self,
        request: StoreRequest,
        tail: &[u8],
        limit: WaitLimit<'_>,
    ) -> Result<(ToClient, Vec<u8>), ConnectionFault> {
        /// Values up to this size go out in one write with their head.
        const SMALL: usize = 64 << 10;
        let mut frame = wire::encode(&ToServer::Request(request), tail.len());
        if tail.len() <= SMALL {
            frame.extend_from_slice(tail);
            self.send(&frame, limit)?;
        } else {
            self.send(&frame, limit)?;
            self.send(tail, limit)?;
        }
        loop {
            if limit.stop.is_some() {
                match self.wait_for_reply(limit) {
                    Err(ConnectionFault::Stopped) => return self.cancel(limit),
                    begun => begun?,
                }
            }
            if let Some(reply) = self.receive_message(limit)? {
                return Ok(reply);
            }
        }
    }

    /// Receives the server's next message: a reply, or `None` for news of which rank left first, which is noted.
    fn receive_message(
        &mut self,
        limit: WaitLimit<'_>,
    ) -> Result<Option<(ToClient, Vec<u8>)>, ConnectionFault> {
        match self.receive(Caps::REPLY, limit)? {
            (ToClient::FirstLeft(first), _) => {
                self.first_left = first;
                Ok(None)
            }
            reply => Ok(Some(reply)),
        }
    }

    fn receive_reply(
        &mut self,
        limit: WaitLimit<'_>,
    ) -> Result<(ToClient, Vec<u8>), ConnectionFault> {
        loop {
            if let Some(reply) = self.receive_message(limit)? {
                return Ok(reply);
            }
        }
    }

    /// Waits for the first byte of the server's next message.
    fn wait_for_reply(&mut self, limit: WaitLimit<'_>) -> Result<(), ConnectionFault> {
        loop {
            let slice = limit.slice()?;
            self.stream
                .set_read_timeout(Some(slice))
                .map_err(|error| ConnectionFault::Gone(error.to_string()))?;
            match self.stream.peek(&mut [0]) {
                // Also at the end of the connection, which reading then reports.
                Ok(_) => return Ok(()),
                Err(error) => {
                    retry(&error)?;
                    limit.check_stop()?;
                }
            }
        }
    }

    /// Takes the request back. If the server answers it before it reads the cancellation, that answer counts.
    fn cancel(&mut self, limit: WaitLimit<'_>) -> Result<(ToClient, Vec<u8>), ConnectionFault> {
        let soon = Instant::now() + CANCELLED_IN;
        let soon = WaitLimit::until(soon.min(limit.until));
        self.send(&wire::encode(&ToServer::Cancel, 0), soon)?;
        match self.receive_reply(soon) {
            Err(ConnectionFault::Late) => Err(ConnectionFault::Stopped),
            answered => answered,
        }
    }

    fn send(&mut self, mut bytes: &[u8], limit: WaitLimit<'_>) -> Result<(), ConnectionFault> {
        while !bytes.is_empty() {
            let slice = limit.slice()?;
            let written =
                self.stream.set_write_timeout(Some(slice)).and_then(|()| self.stream.write(bytes));
            match written {
                Ok(count) => bytes = &bytes[count..],
                Err(error) => {
                    retry(&error)?;
                    limit.check_stop()?;
                }
            }
        }
        Ok(())
    }

    fn receive(
        &mut self,
        caps: Caps,
        limit: WaitLimit<'_>,
    ) -> Result<(ToClient, Vec<u8>), ConnectionFault> {
        let mut header = [0; HEADER];
        self.fill(&mut header, limit)?;
        let lengths = decode_header(&header, caps)?;
        let head = self.take(lengths.head, limit)?;
        let tail = self.take(lengths.tail, limit)?;
        Ok((wire::decode(&head)?, tail))
    }

    /// Reads `length` bytes; memory grows with what arrives.
    fn take(&mut self, length: usize, limit: WaitLimit<'_>) -> Result<Vec<u8>, ConnectionFault> {
        const STEP: usize = 1 << 20;
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let have = bytes.len();
            bytes.resize(length.min(have + have.max(STEP)), 0);
            self.fill(&mut bytes[have..], limit)?;
        }
        Ok(bytes)
    }

    fn fill(&mut self, mut bytes: &mut [u8], limit: WaitLimit<'_>) -> Result<(), ConnectionFault> {
        while !bytes.is_empty() {
            let slice = limit.slice()?;
            let read =
                self.stream.set_read_timeout(Some(slice)).and_then(|()| self.stream.read(bytes));
            match read {
                Ok(0) => return Err(ConnectionFault::Gone("connection closed".to_owned())),
                Ok(count) => bytes = &mut bytes[count..],
                Err(error) => {
                    retry(&error)?;
                    limit.check_stop()?;
                }
            }
        }
        Ok(())
    }
}

/// Passes errors after which the caller tries again.
fn retry(error: &std::io::Error) -> Result<(), ConnectionFault> {
    match error.kind() {
        ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok(()),
        _ => Err(ConnectionFault::Gone(error.to_string())),
    }
}

/// Fault of a connection whose handshake gets another answer than it needs.
fn no_welcome(answer: ToClient) -> ConnectionFault {
    match answer {
        ToClient::Later { why } => ConnectionFault::Later(why),
        ToClient::Failed(kind) => ConnectionFault::Refused(Error::from_kind(kind)),
        _ => ConnectionFault::Refused(Error::refused("the peer is no symmpool store")),
    }
}
