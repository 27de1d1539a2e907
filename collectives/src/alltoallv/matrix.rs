//! Who sends how many bytes to whom.

use symmpool_allocator::{Error, Result};

use crate::host::HostEngine;

/// The traffic matrix of one call, in bytes.
#[derive(Clone, Copy)]
pub(super) enum Matrix {
    /// Everyone sends the same to everyone.
    Even { bytes: usize },
    /// In the rows that ranks show each other for the call.
    Rows,
}

/// Disagreements a message lists before it stops.
const LISTED: usize = 4;

impl Matrix {
    /// What `sender` sends to `receiver`, once all have entered.
    #[inline]
    pub(super) fn bytes(self, engine: &HostEngine, sender: u32, receiver: u32) -> usize {
        match self {
            Self::Even { bytes } => bytes,
            Self::Rows => engine.row(sender, receiver) as usize,
        }
    }

    /// What this rank sends to `receiver`, before it has entered.
    #[inline]
    pub(super) fn next_bytes(self, engine: &HostEngine, receiver: u32) -> usize {
        match self {
            Self::Even { bytes } => bytes,
            Self::Rows => engine.next_row(receiver) as usize,
        }
    }

    /// What `sender` sends to all others, once all have entered.
    pub(super) fn stream(self, engine: &HostEngine, sender: u32) -> usize {
        let others = (0..engine.world()).filter(|rank| *rank != sender);
        others.map(|rank| self.bytes(engine, sender, rank)).sum()
    }

    /// What this rank sends to all others, before it has entered.
    pub(super) fn next_stream(self, engine: &HostEngine) -> usize {
        engine.peers().map(|rank| self.next_bytes(engine, rank)).sum()
    }

    /// Whether everyone expects what is sent. Every rank reads the same rows, so makes the same
    /// error of them.
    pub(super) fn check(self, engine: &HostEngine, size: usize) -> Result<()> {
        if matches!(self, Self::Even { .. }) {
            return Ok(());
        }
        let world = engine.world();
        let pairs = || (0..world).flat_map(|from| (0..world).map(move |to| (from, to)));
        let differs =
            |(from, to): &(u32, u32)| engine.row(*from, *to) != engine.row(*to, world + *from);
        if !pairs().any(|pair| differs(&pair)) {
            return Ok(());
        }
        let mut message = String::from("all_to_all_v counts disagree:");
        for (from, to) in pairs().filter(differs).take(LISTED) {
            message.push_str(&format!(
                "\n  rank {from} sends {} elements to rank {to}, which expects {}",
                engine.row(from, to) / size as u64,
                engine.row(to, world + from) / size as u64
            ));
        }
        let more = pairs().filter(differs).count().saturating_sub(LISTED);
        if more > 0 {
            message.push_str(&format!("\n  and {more} more pairs of ranks"));
        }
        message.push_str(
            "\nNothing was written and the communicator stays usable; what a rank sends must be \
             what the other receives.",
        );
        Err(Error::mismatch(message))
    }
}
