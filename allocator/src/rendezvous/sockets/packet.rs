//! Packets between two ranks: one frame and up to 128 file descriptors.
//!
//! The sockets are of type SEQPACKET, so the kernel keeps packets whole: one is sent, or received,
//! entirely or not at all, and its descriptors come with it.

use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::{Deserialize, Serialize};

use crate::error::ErrorKind;
use crate::rendezvous::message::{self, Message};
use crate::{Error, Result};

/// The most descriptors in one packet; the kernel takes up to 253.
pub(super) const FDS_PER_PACKET: usize = 128;

/// The longest frame in a packet, in bytes: well below a socket's default send buffer.
const MAX_FRAME: usize = 32 << 10;

/// The most bytes of a value in one packet: what a frame leaves beside the words around them.
pub(super) const BYTES_PER_PACKET: usize = MAX_FRAME - 512;

/// The first packet in each direction: who speaks, to whom, and that they know the group's secret.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Introduction {
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) proof: [u8; 32],
}

impl Message for Introduction {
    const KIND: u16 = 0x10;
    const NAME: &'static str = "introduction";
}

impl Introduction {
    /// The introduction of `from` to `to`. The proof is bound to both, so it is of no use to a
    /// third rank or in the other direction.
    pub(super) fn new(secret: &[u8; 32], from: u32, to: u32) -> Self {
        Self { from, to, proof: proof(secret, from, to).into() }
    }

    /// Whether this was made by one who knows `secret`.
    pub(super) fn proven(&self, secret: &[u8; 32]) -> bool {
        // Comparing blake3::Hash takes the same time whatever the bytes are.
        proof(secret, self.from, self.to) == blake3::Hash::from_bytes(self.proof)
    }
}

fn proof(secret: &[u8; 32], from: u32, to: u32) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(secret);
    hasher.update(b"symmpool mesh introduction");
    hasher.update(&from.to_le_bytes());
    hasher.update(&to.to_le_bytes());
    hasher.finalize()
}

/// Announces the descriptors in the same packet.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Descriptors {
    /// Which exchange they belong to.
    pub(super) round: u64,
    /// Index of the first one among all of this exchange.
    pub(super) first: u32,
    /// How many are in this packet.
    pub(super) count: u32,
    /// How many the sender sends in this exchange.
    pub(super) total: u32,
}

impl Message for Descriptors {
    const KIND: u16 = 0x11;
    const NAME: &'static str = "descriptors";
}

/// A piece of what a rank tells the others in a gather.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Part {
    /// Which talk it belongs to.
    pub(super) round: u64,
    /// What is gathered.
    pub(super) what: String,
    /// How many bytes came before.
    pub(super) first: u64,
    /// How many there are in all.
    pub(super) total: u64,
    pub(super) bytes: Vec<u8>,
}

impl Message for Part {
    const KIND: u16 = 0x13;
    const NAME: &'static str = "part";
}

/// The last packet of a rank that gives up, so that its peers can tell this from a crash.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Farewell {
    /// Who began: a rank that gives up because of another passes on what that one said.
    pub(super) by: u32,
    pub(super) cause: ErrorKind,
}

impl Message for Farewell {
    const KIND: u16 = 0x12;
    const NAME: &'static str = "farewell";
}

impl Farewell {
    /// What `rank` sent, when it is a farewell.
    pub(super) fn read(rank: u32, frame: &[u8]) -> Option<Self> {
        message::decode(rank, frame).ok()
    }

    /// The frame that tells it, or less of it where it is too long for a packet.
    pub(super) fn frame(&self) -> Result<Vec<u8>> {
        let frame = message::encode(self)?;
        if frame.len() <= MAX_FRAME {
            return Ok(frame);
        }
        let short = ErrorKind::InvalidState("it failed, with a message too long to send".into());
        message::encode(&Self { by: self.by, cause: short })
    }

    /// What it is to those that hear it, where nothing more is said about it.
    pub(super) fn into_error(self) -> Error {
        Error::from_kind(self.cause).context(format!("rank {} gave up", self.by))
    }

    /// What it is where ranks go on to agree on the failure: the loss of that rank, unless it names
    /// others who are to blame.
    pub(super) fn into_loss(self) -> Error {
        match self.cause {
            cause @ (ErrorKind::PeerLost { .. } | ErrorKind::Timeout { .. }) => {
                Error::from_kind(cause)
            }
            cause => Error::peer_lost(vec![self.by], format!("it gave up: {cause}")),
        }
    }
}

/// What became of a packet to be sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// It is on its way.
    Yes,
    /// The socket's buffer is full; poll for it.
    WouldBlock,
    /// Too many descriptors of this user are on their way (or kernel memory is short): receive
    /// some, and try again a little later. Polling does not show when.
    TryLater,
    /// Nobody is there to receive it.
    Closed,
}

/// Sends one packet, without waiting.
pub(super) fn send(socket: &OwnedFd, frame: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Sent> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_PACKET))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fits = fds.len() <= FDS_PER_PACKET
        && (fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    if !fits {
        return Err(Error::invalid_argument(format!(
            "{} descriptors in one packet; it takes {FDS_PER_PACKET}",
            fds.len()
        )));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        return match rustix::net::sendmsg(socket, &[IoSlice::new(frame)], &mut control, flags) {
            Ok(_) => Ok(Sent::Yes),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Ok(Sent::WouldBlock),
            Err(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => Ok(Sent::TryLater),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Ok(Sent::Closed),
            Err(error) => Err(Error::system("sending to a peer", error)),
        };
    }
}

/// What was there to be received.
#[derive(Debug)]
pub(super) enum Received<'a> {
    Packet {
        frame: &'a [u8],
        fds: Vec<OwnedFd>,
    },
    /// Nothing yet; poll for it.
    WouldBlock,
    /// The peer has closed the connection, and all it sent before has been received.
    Closed,
}

/// Where packets are received.
pub(super) struct Inbox(Vec<u8>);

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Inbox(..)")
    }
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self(vec![0; MAX_FRAME])
    }

    /// The farewell of `rank`, where that is what comes next. Takes nothing.
    pub(super) fn farewell(&mut self, rank: u32, socket: &OwnedFd) -> Option<Farewell> {
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        let mut resets = 0;
        let bytes = loop {
            match rustix::net::recv(socket, &mut self.0[..], flags) {
                Ok((_, bytes)) => break bytes,
                Err(Errno::INTR) => {}
                // As in `receive`: what the peer had not read is reported before what it said.
                Err(Errno::CONNRESET) if resets == 0 => resets = 1,
                Err(_) => return None,
            }
        };
        Farewell::read(rank, self.0.get(..bytes)?)
    }

    /// Receives one packet of `rank`, without waiting. Descriptors are close-on-exec.
    pub(super) fn receive(&mut self, rank: u32, socket: &OwnedFd) -> Result<Received<'_>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_PACKET))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut resets = 0;
        let message = loop {
            let mut parts = [IoSliceMut::new(&mut self.0)];
            match rustix::net::recvmsg(socket.as_fd(), &mut parts, &mut control, flags) {
                Ok(message) => break message,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Received::WouldBlock),
                // Reported once, before what the peer had sent is read.
                Err(Errno::CONNRESET) if resets == 0 => resets = 1,
                Err(Errno::CONNRESET | Errno::NOTCONN) => return Ok(Received::Closed),
                Err(error) => {
                    let what = format!("receiving from rank {rank}");
                    return Err(Error::system(what, error));
                }
            }
        };
        let mut fds = Vec::new();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = part {
                fds.extend(received);
            }
        }
        if message.flags.contains(ReturnFlags::CTRUNC) {
            return Err(Error::out_of_memory(format!(
                "the kernel could not give this process all file descriptors that rank {rank} \
                 sent ({} of them came): it is at its hard limit of open files; raise RLIMIT_NOFILE",
                fds.len()
            )));
        }
        if message.flags.contains(ReturnFlags::TRUNC) {
            return Err(Error::mismatch(format!(
                "rank {rank} sent a packet longer than {MAX_FRAME} bytes"
            ))
            .naming([rank]));
        }
        if message.bytes == 0 {
            return Ok(Received::Closed);
        }
        Ok(Received::Packet { frame: &self.0[..message.bytes], fds })
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .unwrap()
    }

    #[test]
    fn proofs_hold_for_one_direction_and_one_secret() {
        let proof = Introduction::new(&[1; 32], 3, 4);
        assert!(proof.proven(&[1; 32]));
        assert!(!proof.proven(&[2; 32]));
        assert!(!Introduction { from: 4, to: 3, proof: proof.proof }.proven(&[1; 32]));
    }

    #[test]
    fn what_was_sent_before_closing_is_received() {
        let (a, b) = pair();
        let mut inbox = Inbox::new();
        assert!(matches!(inbox.receive(0, &a).unwrap(), Received::WouldBlock));
        // Unread data at `b` makes the kernel report a reset to `a` before `b`'s own packet.
        assert_eq!(send(&a, b"unread", &[]).unwrap(), Sent::Yes);
        assert_eq!(send(&b, b"last", &[a.as_fd()]).unwrap(), Sent::Yes);
        drop(b);
        match inbox.receive(0, &a).unwrap() {
            Received::Packet { frame, fds } => assert_eq!((frame, fds.len()), (&b"last"[..], 1)),
            other => panic!("{other:?}"),
        }
        assert!(matches!(inbox.receive(0, &a).unwrap(), Received::Closed));
        assert_eq!(send(&a, b"more", &[]).unwrap(), Sent::Closed);
    }

    #[test]
    fn packets_and_farewells_have_limits() {
        let (a, b) = pair();
        assert_eq!(send(&a, &vec![0; MAX_FRAME + 1], &[]).unwrap(), Sent::Yes);
        assert!(Inbox::new().receive(7, &b).unwrap_err().to_string().contains("rank 7"));
        let many = vec![a.as_fd(); FDS_PER_PACKET + 1];
        assert!(send(&a, b"x", &many).unwrap_err().is_invalid_argument());
        let cause = ErrorKind::InvalidState("x".repeat(MAX_FRAME));
        assert!(Farewell { by: 0, cause }.frame().unwrap().len() < MAX_FRAME);
        let longest = Part {
            round: u64::MAX,
            what: "a name of a gather".repeat(20),
            first: u64::MAX,
            total: u64::MAX,
            bytes: vec![255; BYTES_PER_PACKET],
        };
        assert!(message::encode(&longest).unwrap().len() <= MAX_FRAME);
    }
}
