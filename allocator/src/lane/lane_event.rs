//! The events of a lane's sequence. Each has a number, the lane's counter.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Site, UNIT};
use crate::byte_size::ByteSize;

/// One event of a lane's sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneEvent {
    /// Its number: the lane's counter when it happened.
    pub counter: u64,
    /// Kind of the event, with its arguments.
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
        /// How many blocks.
        blocks: u64,
        /// Digest of their counters.
        digest: u64,
    },
    /// A stream was forgotten. The next new stream takes its ordinal.
    Forget {
        /// Its ordinal.
        stream: u16,
    },
    /// The ranks agreed on a state again after they had diverged.
    Resync {
        /// Digest of the state agreed on.
        digest: u64,
    },
}

/// An event as two words: what its digest is made of, and how the history keeps it.
///
/// The first word holds, from its low bits: 3 bits of kind, 6 bits of stream, 6 bits of the alignment's
/// logarithm, and then bytes (at most 2^40) or a number of blocks. The second holds a counter, a digest
/// or, for an allocation, its offset and its growth in units, 32 bits each.
pub(super) type Packed = [u64; 2];

impl EventKind {
    #[inline(always)]
    pub(super) fn pack(&self) -> Packed {
        let word =
            |kind: u64, stream: u16, bytes: u64| kind | (u64::from(stream) << 3) | (bytes << 15);
        match *self {
            Self::Alloc { bytes, align, stream, offset, grown } => [
                word(1, stream, bytes) | (u64::from(align.trailing_zeros()) << 9),
                (offset / UNIT) | ((grown / UNIT) << 32),
            ],
            Self::Free { block } => [2, block],
            Self::Record { block, stream } => [word(3, stream, 0), block],
            Self::Reserve { bytes, stream } => [word(4, stream, bytes), 0],
            Self::Trim { bytes } => [word(5, 0, bytes), 0],
            Self::Reclaim { blocks, digest } => [word(6, 0, blocks), digest],
            Self::Resync { digest } => [7, digest],
            Self::Forget { stream } => [word(0, stream, 0), 0],
        }
    }

    pub(super) fn unpack([first, second]: Packed) -> Self {
        let (stream, bytes) = (((first >> 3) & 63) as u16, first >> 15);
        match first & 7 {
            0 => Self::Forget { stream },
            1 => Self::Alloc {
                bytes,
                align: 1 << ((first >> 9) & 63),
                stream,
                offset: (second & u64::from(u32::MAX)) * UNIT,
                grown: (second >> 32) * UNIT,
            },
            2 => Self::Free { block: second },
            3 => Self::Record { block: second, stream },
            4 => Self::Reserve { bytes, stream },
            5 => Self::Trim { bytes },
            6 => Self::Reclaim { blocks: bytes, digest: second },
            _ => Self::Resync { digest: second },
        }
    }
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alloc { bytes, align, stream, .. } => {
                write!(f, "alloc {:#} on stream {stream}", ByteSize(*bytes))?;
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
                write!(f, "reserve {:#} on stream {stream}", ByteSize(*bytes))
            }
            Self::Trim { bytes } => write!(f, "trim of {:#}", ByteSize(*bytes)),
            Self::Reclaim { blocks, .. } => write!(f, "return of {blocks} unordered frees"),
            Self::Resync { .. } => f.write_str("resync"),
            Self::Forget { stream } => write!(f, "end of stream {stream}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_loses_nothing() {
        let (most, stream) = (1 << 40, 63);
        let alloc = |bytes, align, stream, offset, grown| EventKind::Alloc {
            bytes,
            align,
            stream,
            offset,
            grown,
        };
        let kinds = [
            alloc(0, 1, 0, 0, 0),
            alloc(most, 1 << 63, stream, 0, most),
            alloc(513, 2 << 20, 1, most - 512, 512),
            EventKind::Free { block: u64::MAX },
            EventKind::Record { block: u64::MAX, stream },
            EventKind::Reserve { bytes: most, stream },
            EventKind::Trim { bytes: most },
            EventKind::Reclaim { blocks: 1 << 32, digest: u64::MAX },
            EventKind::Resync { digest: u64::MAX },
            EventKind::Forget { stream },
        ];
        for (at, kind) in kinds.iter().enumerate() {
            assert_eq!(EventKind::unpack(kind.pack()), *kind);
            assert!(kinds[..at].iter().all(|other| other.pack() != kind.pack()));
        }
    }
}
