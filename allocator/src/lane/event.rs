//! What happens to a lane, one event a counter.

use std::fmt;
use std::panic::Location;

use serde::{Deserialize, Serialize};

/// Where in the caller's program an event came from. Shown in messages, never compared.
pub type Site = Option<&'static Location<'static>>;

/// One event of a lane's sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its number: the lane's counter when it happened.
    pub counter: u64,
    /// What happened.
    pub kind: EventKind,
    /// Which line of the program asked for it, where known.
    pub site: Site,
}

/// The kinds of events. Everything in here goes into the lane's digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EventKind {
    /// A block was placed.
    Alloc {
        /// Bytes asked for.
        bytes: u64,
        /// Alignment asked for.
        align: u64,
        /// Ordinal of the stream (rule D3).
        stream: u16,
        /// Where it was placed, from the start of the lane.
        offset: u64,
        /// Bytes of segments made or moved for it.
        grown: u64,
    },
    /// A block was freed in order; `block` is the counter of its allocation.
    Free {
        /// Counter of the allocation.
        block: u64,
    },
    /// A block was used on another stream.
    Record {
        /// Counter of the allocation.
        block: u64,
        /// Ordinal of the other stream.
        stream: u16,
    },
    /// Memory was made ahead of need.
    Reserve {
        /// Bytes asked for.
        bytes: u64,
        /// Ordinal of the stream.
        stream: u16,
    },
    /// Free segments were released.
    Trim {
        /// Bytes released.
        bytes: u64,
    },
    /// A commit returned blocks that every rank had freed without order (rule D5).
    Reclaim {
        /// How many.
        blocks: u64,
        /// Digest of their counters.
        digest: u64,
    },
    /// The ranks agreed on a state again after they had diverged.
    Resync {
        /// Digest of the state agreed on.
        digest: u64,
    },
}

impl EventKind {
    /// The event as words, for its digest.
    pub(super) fn words(&self) -> [u64; 6] {
        match *self {
            Self::Alloc { bytes, align, stream, offset, grown } => {
                [1, bytes, align, u64::from(stream), offset, grown]
            }
            Self::Free { block } => [2, block, 0, 0, 0, 0],
            Self::Record { block, stream } => [3, block, u64::from(stream), 0, 0, 0],
            Self::Reserve { bytes, stream } => [4, bytes, u64::from(stream), 0, 0, 0],
            Self::Trim { bytes } => [5, bytes, 0, 0, 0, 0],
            Self::Reclaim { blocks, digest } => [6, blocks, digest, 0, 0, 0],
            Self::Resync { digest } => [7, digest, 0, 0, 0, 0],
        }
    }
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alloc { bytes, align, stream, .. } => {
                write!(f, "alloc {} on stream {stream}", Bytes(*bytes))?;
                if *align > super::UNIT {
                    write!(f, ", aligned to {align}")?;
                }
                Ok(())
            }
            Self::Free { block } => write!(f, "free of the block of event {block}"),
            Self::Record { block, stream } => {
                write!(f, "use of the block of event {block} on stream {stream}")
            }
            Self::Reserve { bytes, stream } => {
                write!(f, "reserve {} on stream {stream}", Bytes(*bytes))
            }
            Self::Trim { bytes } => write!(f, "trim of {}", Bytes(*bytes)),
            Self::Reclaim { blocks, .. } => write!(f, "return of {blocks} unordered frees"),
            Self::Resync { .. } => f.write_str("resync"),
        }
    }
}

/// A size as people write it: exact bytes below 1 KiB, else two decimals of the next unit.
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        write!(f, "{value:.2} {}", UNITS[unit])
    }
}
