//! One message, as this rank has begun it.

use std::any::Any;
use std::fmt;
use std::sync::OnceLock;

use symmpool_allocator::{Error, Result};

use crate::call::p2p::{Direction, Payload};

/// A send or a receive that was begun.
pub(super) struct BegunMessage {
    pub(super) direction: Direction,
    /// The other rank; `None` to receive from any.
    pub(super) peer: Option<u32>,
    pub(super) tag: u64,
    pub(super) payload: Payload,
    memory: usize,
    /// How it ended, with the other rank.
    outcome: OnceLock<Result<u32, Error>>,
    /// Owner that keeps the memory.
    _held: Box<dyn Any + Send + Sync>,
}

impl BegunMessage {
    pub(super) fn new(
        (direction, peer, tag): (Direction, Option<u32>, u64),
        payload: Payload,
        memory: *mut u8,
        held: Box<dyn Any + Send + Sync>,
    ) -> Self {
        let (memory, outcome) = (memory as usize, OnceLock::new());
        Self { direction, peer, tag, payload, memory, outcome, _held: held }
    }

    pub(super) fn memory(&self) -> *mut u8 {
        self.memory as *mut u8
    }

    pub(super) fn outcome(&self) -> Option<&Result<u32, Error>> {
        self.outcome.get()
    }

    /// Ends it, unless it has ended.
    pub(super) fn finish(&self, outcome: Result<u32, Error>) {
        let _ = self.outcome.set(outcome);
    }

    /// Describes the operation for errors: "recv of 3 f32 (12 bytes), tag 7, from rank 2".
    pub(super) fn describe(&self) -> String {
        let preposition = if self.direction == Direction::Send { "to" } else { "from" };
        let peer = self.peer.map_or_else(|| "any rank".to_owned(), |peer| format!("rank {peer}"));
        let (what, payload, tag) = (self.direction.name(), self.payload, self.tag as i64);
        format!("{what} of {payload}, tag {tag}, {preposition} {peer}")
    }
}

impl fmt::Debug for BegunMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Op({}, {:?})", self.describe(), self.outcome.get())
    }
}
