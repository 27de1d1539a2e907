//! Packets between two ranks: one frame and up to 128 file descriptors.
//!
//! The sockets are of type SEQPACKET, so the kernel keeps packets whole: one is sent, or received,
//! entirely or not at all, and its descriptors come with it.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, ReturnFlags, SendFlags};
use serde::{Deserialize, Serialize};

use crate::descriptors::{self, ReceivedMessage, receive_with_descriptors, send_with_descriptors};
use crate::error::ErrorKind;
use crate::rendezvous::message::{self, Message};
use crate::{Error, Result};

/// The most descriptors in one packet.
pub(super) const FDS_PER_PACKET: usize = descriptors::MAX_PER_MESSAGE;

/// The longest frame in a packet, in bytes: well below a socket's default send buffer.
const MAX_FRAME: usize = 32 << 10;

/// The most bytes of a value in one packet: a frame less the header and numbers around them.
pub(super) const BYTES_PER_PACKET: usize = MAX_FRAME - 512;

/// The first packet in each direction: sender, receiver, and the proof that the sender knows the group's
/// secret.
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

    /// Whether the sender knows `secret`.
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

/// Describes the descriptors in the same packet.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Descriptors {
    /// The number of the round they belong to.
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

/// A piece of a rank's value in a gather.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Part {
    /// The number of the round it belongs to.
    pub(super) round: u64,
    /// Name of the gather.
    pub(super) what: String,
    /// How many bytes of the value come before.
    pub(super) first: u64,
    /// The length of the value in bytes.
    pub(super) total: u64,
    pub(super) bytes: Vec<u8>,
}

impl Message for Part {
    const KIND: u16 = 0x13;
    const NAME: &'static str = "part";
}

/// Message of a rank outside of rounds, about a barrier on the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct BarrierMessage {
    /// Two numbers that the barrier has on all ranks, and no other barrier of the pool.
    pub(crate) id: (u64, u64),
    pub(crate) step: BarrierStep,
}

/// Step of a rank in a barrier.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum BarrierStep {
    /// The rank has come to the barrier, and what it brings.
    Here(Vec<u8>),
    /// It knows that all ranks have come, and goes on.
    GoesOn,
    /// It has left the barrier, and why.
    Left(ErrorKind),
}

impl Message for BarrierMessage {
    const KIND: u16 = 0x14;
    const NAME: &'static str = "barrier message";
}

impl BarrierMessage {
    /// Decodes the packet of `rank`, when it is such a message.
    pub(super) fn read(rank: u32, frame: &[u8]) -> Option<Self> {
        message::decode(rank, frame).ok()
    }
}

/// The last packet of a rank that fails, so that its peers can tell this from a crash.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Farewell {
    /// The rank that failed first: a rank that fails because of another passes on its farewell.
    pub(super) by: u32,
    pub(super) cause: ErrorKind,
}

impl Message for Farewell {
    const KIND: u16 = 0x12;
    const NAME: &'static str = "farewell";
}

impl Farewell {
    /// Decodes the packet of `rank`, when it is a farewell.
    pub(super) fn read(rank: u32, frame: &[u8]) -> Option<Self> {
        message::decode(rank, frame).ok()
    }

    /// The farewell's frame; a shorter reason stands in for one that is too long for a packet.
    pub(super) fn frame(&self) -> Result<Vec<u8>> {
        let frame = message::encode(self)?;
        if frame.len() <= MAX_FRAME {
            return Ok(frame);
        }
        let short = ErrorKind::InvalidState("it failed, with a message too long to send".into());
        message::encode(&Self { by: self.by, cause: short })
    }

    /// The error of a rank that receives it, where ranks do not go on to agree on an error.
    pub(super) fn into_error(self) -> Error {
        Error::from_kind(self.cause).context(format!("rank {} gave up", self.by))
    }

    /// The error of a rank that receives it, where ranks go on to agree on one: that rank is lost, unless
    /// the farewell names others that caused the failure.
    pub(super) fn into_loss(self) -> Error {
        match self.cause {
            cause @ (ErrorKind::PeerLost { .. } | ErrorKind::Timeout { .. }) => {
                Error::from_kind(cause)
            }
            cause => Error::peer_lost(vec![self.by], format!("it gave up: {cause}")),
        }
    }
}

/// Result of an attempt to send a packet.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    Yes,
    /// The socket's buffer is full; poll for it.
    WouldBlock,
    /// Too many descriptors of this user are in flight, or kernel memory is short: receive some, and try
    /// again a little later. Polling does not show when.
    TryLater,
    /// The peer has closed the connection.
    Closed,
}

/// Sends one packet, without waiting.
pub(crate) fn send(socket: &OwnedFd, frame: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Sent> {
    if fds.len() > FDS_PER_PACKET {
        return Err(Error::invalid_argument(format!(
            "{} descriptors in one packet; it takes {FDS_PER_PACKET}",
            fds.len()
        )));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        return match send_with_descriptors(socket, frame, fds, flags) {
            Ok(_) => Ok(Sent::Yes),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Ok(Sent::WouldBlock),
            Err(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => Ok(Sent::TryLater),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Ok(Sent::Closed),
            Err(error) => Err(Error::system("sending to a peer", error)),
        };
    }
}

/// Result of an attempt to receive.
#[derive(Debug)]
pub(crate) enum ReceivedPacket<'a> {
    Packet {
        frame: &'a [u8],
        fds: Vec<OwnedFd>,
    },
    /// Nothing yet; poll for it.
    WouldBlock,
    /// The peer has closed the connection, and all it sent before has been received.
    Closed,
}

/// Kind of the next packet.
#[derive(Debug)]
pub(super) enum Peeked<'a> {
    Frame(&'a [u8]),
    Nothing,
    Closed,
}

/// Receives packets, one at a time.
pub(crate) struct PacketBuffer(Vec<u8>);

impl fmt::Debug for PacketBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PacketBuffer(..)")
    }
}

impl PacketBuffer {
    pub(crate) fn new() -> Self {
        Self(vec![0; MAX_FRAME])
    }

    /// The farewell of `rank`, if that is its next packet, which is not taken out of the socket.
    pub(super) fn farewell(&mut self, rank: u32, socket: &OwnedFd) -> Option<Farewell> {
        match self.peek(socket) {
            Ok(Peeked::Frame(frame)) => Farewell::read(rank, frame),
            Ok(Peeked::Nothing | Peeked::Closed) | Err(_) => None,
        }
    }

    /// The next packet, which is not taken out of the socket.
    pub(super) fn peek(&mut self, socket: &OwnedFd) -> rustix::io::Result<Peeked<'_>> {
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        let mut resets = 0;
        let bytes = loop {
            match rustix::net::recv(socket, &mut self.0[..], flags) {
                Ok((_, bytes)) => break bytes,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Peeked::Nothing),
                // `receive` does so too: the reset is reported once, before what the peer had sent is read.
                Err(Errno::CONNRESET) if resets == 0 => resets = 1,
                Err(Errno::CONNRESET | Errno::NOTCONN) => return Ok(Peeked::Closed),
                Err(error) => return Err(error),
            }
        };
        match bytes.min(self.0.len()) {
            0 => Ok(Peeked::Closed),
            bytes => Ok(Peeked::Frame(&self.0[..bytes])),
        }
    }

    /// Receives one packet of `rank`, without waiting. Descriptors are close-on-exec.
    pub(crate) fn receive(&mut self, rank: u32, socket: &OwnedFd) -> Result<ReceivedPacket<'_>> {
        let mut resets = 0;
        let ReceivedMessage { bytes, fds, flags } = loop {
            match receive_with_descriptors(socket, &mut self.0, RecvFlags::DONTWAIT) {
                Ok(message) => break message,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(ReceivedPacket::WouldBlock),
                // Reported once, before what the peer had sent is read.
                Err(Errno::CONNRESET) if resets == 0 => resets = 1,
                Err(Errno::CONNRESET | Errno::NOTCONN) => return Ok(ReceivedPacket::Closed),
                Err(error) => {
                    let what = format!("receiving from rank {rank}");
                    return Err(Error::system(what, error));
                }
            }
        };
        if flags.contains(ReturnFlags::CTRUNC) {
            return Err(Error::out_of_memory(format!(
                "the kernel could not give this process all file descriptors that rank {rank} \
                 sent ({} of them came): it is at its hard limit of open files; raise RLIMIT_NOFILE",
                fds.len()
            )));
        }
        if flags.contains(ReturnFlags::TRUNC) {
            return Err(Error::mismatch(format!(
                "rank {rank} sent a packet longer than {MAX_FRAME} bytes"
            ))
            .naming([rank]));
        }
        if bytes == 0 {
            return Ok(ReceivedPacket::Closed);
        }
        Ok(ReceivedPacket::Packet { frame: &self.0[..bytes], fds })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

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
        let mut buffer = PacketBuffer::new();
        assert!(matches!(buffer.receive(0, &a).unwrap(), ReceivedPacket::WouldBlock));
        // Unread data at `b` makes the kernel report a reset to `a` before `b`'s own packet.
        assert_eq!(send(&a, b"unread", &[]).unwrap(), Sent::Yes);
        assert_eq!(send(&b, b"last", &[a.as_fd()]).unwrap(), Sent::Yes);
        drop(b);
        match buffer.receive(0, &a).unwrap() {
            ReceivedPacket::Packet { frame, fds } => {
                assert_eq!((frame, fds.len()), (&b"last"[..], 1));
            }
            other => panic!("{other:?}"),
        }
        assert!(matches!(buffer.receive(0, &a).unwrap(), ReceivedPacket::Closed));
        assert_eq!(send(&a, b"more", &[]).unwrap(), Sent::Closed);
    }

    #[test]
    fn packets_and_farewells_have_limits() {
        let (a, b) = pair();
        assert_eq!(send(&a, &vec![0; MAX_FRAME + 1], &[]).unwrap(), Sent::Yes);
        assert!(PacketBuffer::new().receive(7, &b).unwrap_err().to_string().contains("rank 7"));
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
