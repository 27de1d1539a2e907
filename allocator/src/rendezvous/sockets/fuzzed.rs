//! A rank whose peer sends what it wants, for fuzz targets.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::packet::{Descriptors, Farewell, Introduction, Part};
use super::{BarrierMessage, BarrierStep, PacketBuffer, PeerSockets, Sent, Socket, send};
use crate::error::ErrorKind;
use crate::fork::ProcessId;
use crate::rendezvous::handshake::fuzzed_hello;
use crate::rendezvous::message::{self, Message};
use crate::{Deadline, Result};

/// Packet of a peer.
#[derive(Clone, Debug)]
pub enum MeshPacket {
    /// Any bytes, and a number of descriptors.
    Bytes(Vec<u8>, u8),
    /// A kind of message, a payload behind a header that is right for it, and a number of descriptors.
    Payload(u16, Vec<u8>, u8),
    /// A piece of a gather: its round, whether it is of this gather, its first byte's index, the length of the whole,
    /// and bytes.
    Part(u64, bool, u64, u64, Vec<u8>),
    /// Descriptors of an exchange: round, first, count, total, and how many come.
    Descriptors(u64, u32, u32, u32, u8),
    /// A message of a barrier.
    Barrier(u64, u64, Vec<u8>),
    /// The peer gives up because of this rank.
    Farewell(u32, String),
}

/// Reactions of the rank to its peer's packets.
#[derive(Clone, Copy, Debug)]
pub enum MeshCall {
    /// A gather, in which this rank has this number of bytes.
    Gather(u16),
    /// An exchange, in which this rank sends none and expects this number of descriptors.
    Exchange(u8),
    /// A look for messages of the barrier that has these two numbers.
    Hear(u64, u64),
}

const WHAT: &str = "fuzzed";

/// Runs calls of rank 0 of two, whose peer has sent `packets` and then closed its connection. Panics if a call succeeds with
/// anything but what the peer sent for it.
pub fn mesh_session(packets: &[MeshPacket], calls: &[MeshCall]) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (own, peer) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a pair");
    for packet in packets {
        if !sent(&peer, packet) {
            break;
        }
    }
    // This rank may still send, and finds the end behind the last packet.
    rustix::net::shutdown(&peer, rustix::net::Shutdown::Write).expect("an open connection");
    let mut sockets = PeerSockets {
        rank: 0,
        sockets: vec![None, Some(Socket::new(own))],
        buffer: PacketBuffer::new(),
        maker: ProcessId::here(),
        rounds: 0,
        barrier_messages: Vec::new(),
        interrupt: None,
        broken: None,
    };
    for call in calls {
        let deadline = Deadline::after(Duration::from_secs(5));
        let round = sockets.rounds + 1;
        match *call {
            MeshCall::Gather(length) => {
                let value = vec![7; length.into()];
                if let Ok(all) = sockets.all_gather(WHAT, &value, deadline) {
                    assert_eq!((all.world(), all.part(0)), (2, &value[..]));
                    assert_eq!(all.part(1), told(packets, round));
                }
            }
            MeshCall::Exchange(expect) => {
                let mut came = 0;
                let mut take = |from: u32, first: usize, fds: Vec<OwnedFd>| -> Result<()> {
                    assert_eq!((from, first), (1, came), "in order");
                    came += fds.len();
                    Ok(())
                };
                let exchanged = sockets.exchange(&[], expect.into(), &mut take, deadline);
                assert!(came <= expect.into(), "{came} descriptors where {expect} were expected");
                if let Ok(silent) = exchanged {
                    let all = came == usize::from(expect) && silent.is_empty();
                    assert!(all || came == 0 && silent == [1], "{came} of {expect}, {silent:?}");
                }
            }
            MeshCall::Hear(a, b) => {
                let heard = sockets.heard((a, b));
                assert!(heard.len() <= packets.len());
                let _ = sockets.check_all_here();
            }
        }
        let _ = (sockets.lost_peers(), sockets.has_left(1), sockets.has_left(9));
    }
}

/// The whole of the pieces that the peer sent for this round.
fn told(packets: &[MeshPacket], of: u64) -> Vec<u8> {
    let mut all = Vec::new();
    for packet in packets {
        let part = match packet {
            MeshPacket::Part(round, true, _, total, bytes) => Some((*round, *total, bytes.clone())),
            MeshPacket::Part(..) => None,
            packet => message::decode::<Part>(1, &frame(packet))
                .ok()
                .filter(|part| part.what == WHAT)
                .map(|part| (part.round, part.total, part.bytes)),
        };
        if let Some((_, total, bytes)) = part.filter(|(round, ..)| *round == of) {
            all.extend_from_slice(&bytes);
            if all.len() as u64 == total {
                break;
            }
        }
    }
    all
}

/// Sends a packet. Returns false when the connection takes no more.
fn sent(to: &OwnedFd, packet: &MeshPacket) -> bool {
    let count = match packet {
        MeshPacket::Bytes(_, fds) | MeshPacket::Payload(_, _, fds) => *fds,
        MeshPacket::Descriptors(.., fds) => *fds,
        _ => 0,
    };
    let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor");
    let fds: Vec<BorrowedFd<'_>> = (0..count.min(64)).map(|_| fd.as_fd()).collect();
    matches!(send(to, &frame(packet), &fds), Ok(Sent::Yes))
}

fn frame(packet: &MeshPacket) -> Vec<u8> {
    let frame = match packet.clone() {
        MeshPacket::Bytes(bytes, _) => return bytes,
        MeshPacket::Payload(kind, payload, _) => return message::framed(kind, &payload),
        MeshPacket::Part(round, right, first, total, bytes) => {
            let what = if right { WHAT } else { "another" }.to_owned();
            message::encode(&Part { round, what, first, total, bytes })
        }
        MeshPacket::Descriptors(round, first, count, total, _) => {
            message::encode(&Descriptors { round, first, count, total })
        }
        MeshPacket::Barrier(a, b, bytes) => {
            message::encode(&BarrierMessage { id: (a, b), step: BarrierStep::Here(bytes) })
        }
        MeshPacket::Farewell(by, why) => {
            message::encode(&Farewell { by, cause: ErrorKind::InvalidState(why) })
        }
    };
    frame.expect("short messages")
}

/// Reads bytes that a peer published in the store: a description that fits this rank's own, or an error.
pub fn mesh_hello(payload: &[u8]) {
    fuzzed_hello(&message::framed(1, payload));
    fuzzed_hello(payload);
}

/// Whether this introduction is the peer's: it is only where the secret is known.
pub fn mesh_introduction(payload: &[u8]) {
    let frame = message::framed(Introduction::KIND, payload);
    if let Ok(introduction) = message::decode::<Introduction>(1, &frame) {
        assert!(!introduction.proven(&[3; 32]), "a proof made without the secret");
    }
}
