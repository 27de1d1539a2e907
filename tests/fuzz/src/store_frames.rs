//! Several clients of a store's server, who send it requests and any bytes.

use arbitrary::Arbitrary;
use symmpool_allocator::testing::{StoreStep, store_reply, store_session};

use crate::{FuzzTarget, value_of};

pub(crate) const TARGET: FuzzTarget = FuzzTarget {
    name: "store_frames",
    run,
    words: &[],
    quick: 40_000,
    max_memory: 8 << 20,
    max_input: 4096,
};

/// Memory of the server, which large values exhaust.
const MAX_MEMORY: usize = 64 << 10;

#[derive(Arbitrary, Debug)]
enum StoreInput {
    Session(Vec<(u8, ChosenStep)>),
    /// A server's bytes to a client in a world of so many ranks.
    Reply(u16, Vec<u8>),
}

#[derive(Arbitrary, Debug)]
enum ChosenStep {
    Bytes(Vec<u8>),
    Framed(Vec<u8>, Option<u32>, Option<u32>),
    Set(ChosenKey, Vec<u8>),
    SetLong(ChosenKey, u16),
    SetNumber(ChosenKey, i64),
    Get(ChosenKey),
    Add(ChosenKey, i64),
    Delete(ChosenKey),
    Gather(ChosenKey, u8, u8, Vec<u8>),
    GatherOfMany(ChosenKey, u32, u32, Vec<u8>),
    Cancel,
    Expire,
    Reconnect(Option<u8>),
    ReconnectAs(u32),
}

#[derive(Arbitrary, Debug)]
enum ChosenKey {
    One,
    Two,
    Other(String),
    Long(u16),
}

impl ChosenKey {
    fn text(&self) -> String {
        match self {
            Self::One => "one".to_owned(),
            Self::Two => "two".to_owned(),
            Self::Other(text) => text.clone(),
            Self::Long(length) => "k".repeat(usize::from(*length)),
        }
    }
}

fn run(bytes: &[u8]) {
    store_reply(bytes, 3);
    match value_of(bytes) {
        Some(StoreInput::Session(steps)) => {
            let steps: Vec<(u64, StoreStep)> =
                steps.into_iter().map(|(who, step)| (u64::from(who), made(step))).collect();
            store_session(3, MAX_MEMORY, &steps);
        }
        Some(StoreInput::Reply(world, bytes)) => store_reply(&bytes, world.into()),
        None => {}
    }
}

fn made(step: ChosenStep) -> StoreStep {
    match step {
        ChosenStep::Bytes(bytes) => StoreStep::Bytes(bytes),
        ChosenStep::Framed(bytes, head, tail) => StoreStep::Framed(bytes, head, tail),
        ChosenStep::Set(key, value) => StoreStep::Set(key.text(), value),
        ChosenStep::SetLong(key, length) => StoreStep::Set(key.text(), vec![3; length.into()]),
        ChosenStep::SetNumber(key, number) => StoreStep::Set(key.text(), number.to_string().into()),
        ChosenStep::Get(key) => StoreStep::Get(key.text()),
        ChosenStep::Add(key, delta) => StoreStep::Add(key.text(), delta),
        ChosenStep::Delete(key) => StoreStep::Delete(key.text()),
        ChosenStep::Gather(key, rank, world, part) => {
            StoreStep::Gather(key.text(), (rank % 4).into(), (world % 4).into(), part)
        }
        ChosenStep::GatherOfMany(key, rank, world, part) => {
            StoreStep::Gather(key.text(), rank, world, part)
        }
        ChosenStep::Cancel => StoreStep::Cancel,
        ChosenStep::Expire => StoreStep::Expire,
        ChosenStep::Reconnect(rank) => StoreStep::Reconnect(rank.map(|rank| (rank % 4).into())),
        ChosenStep::ReconnectAs(rank) => StoreStep::Reconnect(Some(rank)),
    }
}
