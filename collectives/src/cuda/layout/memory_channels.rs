//! Channels of memory operations, and where their flags lie.

use crate::signal::channel::CHANNELS;

/// Slots that pieces use in turn.
pub(in crate::cuda) const SLOTS: usize = 4;

/// Channels of the signals of pieces: two for each slot.
pub(in crate::cuda) const CHANNELS_OF_PIECES: u32 = 2 * SLOTS as u32;

/// The first channel of collectives by copy engines.
pub(in crate::cuda) const PIECE_CHANNELS: u32 = 2 * CHANNELS;

/// Channels of memory operations between two ranks in each direction: those of programs, behind them as many for fused
/// operators, and then those of collectives by copy engines.
pub(crate) const MEMORY_CHANNELS: u32 = PIECE_CHANNELS + CHANNELS_OF_PIECES;

/// Which of the two flags that a rank has for a peer and a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum MemoryFlag {
    /// 1 while a signal of the peer was not taken yet.
    Arrived,
    /// 1 while the peer has not taken this rank's last signal.
    Untaken,
}

/// Where flags of memory operations lie in a control block.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct MemoryFlags {
    /// Where they begin: two flags for each rank and channel.
    begin: u64,
}

impl MemoryFlags {
    pub(in crate::cuda) fn new(begin: u64) -> Self {
        Self { begin }
    }

    /// Bytes that the flags take for `world` ranks.
    pub(in crate::cuda) const fn bytes(world: u32) -> u64 {
        8 * world as u64 * MEMORY_CHANNELS as u64
    }

    /// The flag that a rank has for `peer`.
    pub(in crate::cuda) fn at(self, peer: u32, channel: u32, flag: MemoryFlag) -> u64 {
        let pair = u64::from(peer) * u64::from(MEMORY_CHANNELS) + u64::from(channel);
        self.begin + 8 * pair + 4 * u64::from(flag == MemoryFlag::Untaken)
    }
}
