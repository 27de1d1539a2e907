//! A rank whose peer, which knows the secret, sends packets of any kind.

use arbitrary::Arbitrary;
use symmpool_allocator::testing::{
    MeshCall, MeshPacket, mesh_hello, mesh_introduction, mesh_session,
};

use crate::{FuzzTarget, value_of};

pub(crate) const TARGET: FuzzTarget = FuzzTarget {
    name: "mesh_messages",
    run,
    words: &[],
    quick: 20_000,
    max_memory: 8 << 20,
    max_input: 4096,
};

#[derive(Arbitrary, Debug)]
enum MeshInput {
    Session(Vec<ChosenPacket>, Vec<ChosenCall>),
    Hello(Vec<u8>),
    Introduction(Vec<u8>),
}

#[derive(Arbitrary, Debug)]
enum ChosenPacket {
    Bytes(Vec<u8>, u8),
    Payload(u8, Vec<u8>, u8),
    /// The next piece of a value of so many bytes, in one of the first rounds.
    Piece(u8, u8, u8, u8),
    Part(u8, bool, u64, u64, Vec<u8>),
    /// The next descriptors of so many.
    Handles(u8, u8, u8, u8),
    Descriptors(u8, u32, u32, u32, u8),
    Barrier(u8, u8, Vec<u8>),
    Farewell(u32, String),
}

#[derive(Arbitrary, Debug)]
enum ChosenCall {
    Gather(u16),
    Exchange(u8),
    Hear(u8, u8),
}

fn run(bytes: &[u8]) {
    match value_of(bytes) {
        Some(MeshInput::Session(packets, calls)) => {
            let packets: Vec<MeshPacket> = packets.into_iter().take(64).map(packet).collect();
            let calls = calls.into_iter().take(8).map(|call| match call {
                ChosenCall::Gather(length) => MeshCall::Gather(length),
                ChosenCall::Exchange(expect) => MeshCall::Exchange(expect % 8),
                ChosenCall::Hear(a, b) => MeshCall::Hear(a.into(), b.into()),
            });
            mesh_session(&packets, &calls.collect::<Vec<_>>());
        }
        Some(MeshInput::Hello(payload)) => mesh_hello(&payload),
        Some(MeshInput::Introduction(payload)) => mesh_introduction(&payload),
        None => {}
    }
}

fn packet(packet: ChosenPacket) -> MeshPacket {
    match packet {
        ChosenPacket::Bytes(bytes, fds) => MeshPacket::Bytes(bytes, fds % 8),
        ChosenPacket::Payload(kind, payload, fds) => {
            MeshPacket::Payload(kind.into(), payload, fds % 8)
        }
        ChosenPacket::Piece(round, first, length, total) => {
            let bytes = vec![first; (length % 16).into()];
            let (round, first) = ((round % 4).into(), (first % 32).into());
            MeshPacket::Part(round, true, first, (total % 32).into(), bytes)
        }
        ChosenPacket::Part(round, right, first, total, bytes) => {
            MeshPacket::Part((round % 4).into(), right, first, total, bytes)
        }
        ChosenPacket::Handles(round, first, count, total) => {
            let (first, count, total) = (first % 8, count % 8, total % 8);
            MeshPacket::Descriptors(
                (round % 4).into(),
                first.into(),
                count.into(),
                total.into(),
                count,
            )
        }
        ChosenPacket::Descriptors(round, first, count, total, fds) => {
            MeshPacket::Descriptors((round % 4).into(), first, count, total, fds % 8)
        }
        ChosenPacket::Barrier(a, b, bytes) => MeshPacket::Barrier(a.into(), b.into(), bytes),
        ChosenPacket::Farewell(by, why) => MeshPacket::Farewell(by, why),
    }
}
