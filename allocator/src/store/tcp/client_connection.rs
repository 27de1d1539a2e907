//! One connection of a client: the handshake, then a request and its reply at a time.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use super::auth::{Handshake, Secret, Side};
use super::tune;
use super::wait_limit::Patience;
use super::wire::{
    self, Caps, HEADER, Hello, Identity, Request, ToClient, ToServer, decode_header,
};
use crate::Error;
use crate::fork::{Maker, NotInherited};
use crate::random::random;

/// How long the server may take to say that a request is cancelled.
const CANCELLED_IN: Duration = Duration::from_millis(500);

/// Why a connection is of no more use.
#[derive(Debug)]
pub(super) enum Fault {
    /// This client was told to stop; what it asked is not known to have been done or not.
    Stopped,
    /// Nothing came in time. An answer may still come, so the connection is out of step.
    Late,
    /// The other end is gone, and how that showed.
    Gone(String),
    /// The server does not admit this client yet, and why. Another connection may be tried.
    Later(String),
    /// One side has said no; trying again changes nothing.
    Said(Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Said(error)
    }
}

/// An open connection on which no request is under way.
#[derive(Debug)]
pub(super) struct Link {
    /// A server that counts on it sees that this process is gone. Dropped before the stream.
    _own: NotInherited,
    stream: TcpStream,
    maker: Maker,
}

impl Drop for Link {
    /// The server is to hear of it also where a forked child has a copy of the connection. What a child
    /// lets go of, its parent goes on with.
    fn drop(&mut self) {
        if self.maker.is_here() {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

impl Link {
    /// Shakes hands with the server; returns its instance number too.
    pub(super) fn greet(
        stream: TcpStream,
        secret: Option<&Secret>,
        identity: Option<Identity>,
        patience: Patience<'_>,
    ) -> Result<(Self, [u8; 16]), Fault> {
        tune(&stream);
        let (own, maker) = (NotInherited::new(&stream), Maker::here());
        let mut link = Self { _own: own, stream, maker };
        let (instance, server_nonce, secret_needed) =
            match link.receive(Caps::HANDSHAKE, patience)? {
                (ToClient::Challenge { instance, nonce, secret_needed }, _) => {
                    (instance, nonce, secret_needed)
                }
                (ToClient::Later { why }, _) => return Err(Fault::Later(why)),
                (ToClient::Failed(kind), _) => return Err(Fault::Said(Error::from_kind(kind))),
                _ => return Err(Fault::Said(Error::refused("the peer is no symmpool store"))),
            };
        match (secret, secret_needed) {
            (None, true) => {
                return Err(Fault::Said(Error::refused(
                    "the store needs a secret and this client has none",
                )));
            }
            (Some(_), false) => {
                return Err(Fault::Said(Error::refused(
                    "this client has a secret and the store has none",
                )));
            }
            _ => {}
        }
        let handshake = Handshake { instance, server_nonce, client_nonce: random()?, identity };
        let hello = Hello {
            identity,
            nonce: handshake.client_nonce,
            proof: secret.map(|secret| secret.prove(Side::Client, &handshake)),
        };
        link.send(&wire::encode(&ToServer::Hello(hello), 0), patience)?;
        let proof = match link.receive(Caps::HANDSHAKE, patience)? {
            (ToClient::Welcome { proof }, _) => proof,
            (ToClient::Later { why }, _) => return Err(Fault::Later(why)),
            (ToClient::Failed(kind), _) => return Err(Fault::Said(Error::from_kind(kind))),
            _ => return Err(Fault::Said(Error::refused("the peer is no symmpool store"))),
        };
        let proven = match (secret, proof) {
            (None, _) => true,
            (Some(secret), Some(proof)) => secret.verify(Side::Server, &handshake, &proof),
            (Some(_), None) => false,
        };
        if !proven {
            return Err(Fault::Said(Error::refused("the store's secret is not this client's")));
        }
        Ok((link, instance))
    }

    /// Sends `request` with its value and waits for the reply. After an error the link must be
    /// dropped.
    pub(super) fn ask(
        &mut self,
        request: Request,
        tail: &[u8],
        patience: Patience<'_>,
    ) -> Result<(ToClient, Vec<u8>), Fault> {
        /// Values up to this size go out in one write with their head.
        const SMALL: usize = 64 << 10;
        let mut frame = wire::encode(&ToServer::Request(request), tail.len());
        if tail.len() <= SMALL {
            frame.extend_from_slice(tail);
            self.send(&frame, patience)?;
        } else {
            self.send(&frame, patience)?;
            self.send(tail, patience)?;
        }
        if patience.stop.is_some() {
            match self.begins(patience) {
                Err(Fault::Stopped) => return self.cancel(patience),
                begun => begun?,
            }
        }
        self.receive(Caps::REPLY, patience)
    }

    /// Waits for the reply to begin.
    fn begins(&mut self, patience: Patience<'_>) -> Result<(), Fault> {
        loop {
            let slice = patience.slice()?;
            self.stream
                .set_read_timeout(Some(slice))
                .map_err(|error| Fault::Gone(error.to_string()))?;
            match self.stream.peek(&mut [0]) {
                // The end of the connection, too, is for the one that reads.
                Ok(_) => return Ok(()),
                Err(error) => {
                    passing(&error)?;
                    patience.asked()?;
                }
            }
        }
    }

    /// Takes back what was asked. The server may have answered before it hears of that: then it is as if
    /// nobody had stopped.
    fn cancel(&mut self, patience: Patience<'_>) -> Result<(ToClient, Vec<u8>), Fault> {
        let soon = Instant::now() + CANCELLED_IN;
        let soon = Patience::until(soon.min(patience.until));
        self.send(&wire::encode(&ToServer::Cancel, 0), soon)?;
        match self.receive(Caps::REPLY, soon) {
            Err(Fault::Late) => Err(Fault::Stopped),
            heard => heard,
        }
    }

    fn send(&mut self, mut bytes: &[u8], patience: Patience<'_>) -> Result<(), Fault> {
        while !bytes.is_empty() {
            let slice = patience.slice()?;
            let written =
                self.stream.set_write_timeout(Some(slice)).and_then(|()| self.stream.write(bytes));
            match written {
                Ok(count) => bytes = &bytes[count..],
                Err(error) => {
                    passing(&error)?;
                    patience.asked()?;
                }
            }
        }
        Ok(())
    }

    fn receive(
        &mut self,
        caps: Caps,
        patience: Patience<'_>,
    ) -> Result<(ToClient, Vec<u8>), Fault> {
        let mut header = [0; HEADER];
        self.fill(&mut header, patience)?;
        let lengths = decode_header(&header, caps)?;
        let head = self.take(lengths.head, patience)?;
        let tail = self.take(lengths.tail, patience)?;
        Ok((wire::decode(&head)?, tail))
    }

    /// Reads `length` bytes; memory grows with what arrives.
    fn take(&mut self, length: usize, patience: Patience<'_>) -> Result<Vec<u8>, Fault> {
        const STEP: usize = 1 << 20;
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let have = bytes.len();
            bytes.resize(length.min(have + have.max(STEP)), 0);
            self.fill(&mut bytes[have..], patience)?;
        }
        Ok(bytes)
    }

    fn fill(&mut self, mut bytes: &mut [u8], patience: Patience<'_>) -> Result<(), Fault> {
        while !bytes.is_empty() {
            let slice = patience.slice()?;
            let read =
                self.stream.set_read_timeout(Some(slice)).and_then(|()| self.stream.read(bytes));
            match read {
                Ok(0) => return Err(Fault::Gone("connection closed".to_owned())),
                Ok(count) => bytes = &mut bytes[count..],
                Err(error) => {
                    passing(&error)?;
                    patience.asked()?;
                }
            }
        }
        Ok(())
    }
}

/// Lets errors pass after which one tries again.
fn passing(error: &std::io::Error) -> Result<(), Fault> {
    match error.kind() {
        ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok(()),
        _ => Err(Fault::Gone(error.to_string())),
    }
}
