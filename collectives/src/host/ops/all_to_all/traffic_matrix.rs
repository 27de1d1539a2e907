//! The traffic matrix of an all-to-all: who sends how many bytes to whom.

use symmpool_allocator::{Error, Result};

use crate::host::HostEngine;

/// The traffic matrix of one call, in bytes.
#[derive(Clone, Copy)]
pub(super) enum TrafficMatrix {
    /// Every rank sends the same number of bytes to every rank, as their call descriptions say. No row is read.
    Even { bytes: usize },
    /// The rows that ranks publish for the call, with what each rank expects.
    Rows,
    /// Such rows too, with how much each output holds.
    Splits,
}

/// A bit of the capacity in a row: the rank's splits were invalid, and it sends nothing.
pub(super) const BAD_SPLITS: u64 = 1 << 63;

/// How many differences an error message lists at most.
const LISTED: usize = 4;

impl TrafficMatrix {
    /// The bytes that `sender` sends to `receiver`. You must call this after the handshake.
    #[inline]
    pub(super) fn bytes(self, engine: &HostEngine, sender: u32, receiver: u32) -> usize {
        match self {
            Self::Even { bytes } => bytes,
            Self::Rows | Self::Splits => engine.row(sender, receiver) as usize,
        }
    }

    /// The bytes that this rank sends to `receiver`. You must call this before the handshake.
    #[inline]
    pub(super) fn next_bytes(self, engine: &HostEngine, receiver: u32) -> usize {
        match self {
            Self::Even { bytes } => bytes,
            Self::Rows | Self::Splits => engine.next_row(receiver) as usize,
        }
    }

    /// The bytes that `sender` sends to all other ranks. You must call this after the handshake.
    pub(super) fn outgoing(self, engine: &HostEngine, sender: u32) -> usize {
        let others = (0..engine.world()).filter(|rank| *rank != sender);
        others.map(|rank| self.bytes(engine, sender, rank)).sum()
    }

    /// The bytes that this rank sends to all other ranks. You must call this before the handshake.
    pub(super) fn next_outgoing(self, engine: &HostEngine) -> usize {
        engine.peers().map(|rank| self.next_bytes(engine, rank)).sum()
    }

    /// Where in the receiver's output a sender's segment begins, and how many bytes of it have room there.
    pub(super) fn place(self, engine: &HostEngine, sender: u32, receiver: u32) -> (usize, usize) {
        let begin = (0..sender).map(|rank| self.bytes(engine, rank, receiver)).sum();
        (begin, self.fitting(engine, begin, sender, receiver))
    }

    /// Returns the places of all senders' segments, in rank order.
    pub(super) fn received(
        self,
        engine: &HostEngine,
        receiver: u32,
    ) -> impl Iterator<Item = (usize, usize)> {
        let mut end = 0;
        (0..engine.world()).map(move |sender| {
            let begin = end;
            end += self.bytes(engine, sender, receiver);
            (begin, self.fitting(engine, begin, sender, receiver))
        })
    }

    fn fitting(self, engine: &HostEngine, begin: usize, sender: u32, receiver: u32) -> usize {
        let bytes = self.bytes(engine, sender, receiver);
        match self {
            Self::Even { .. } | Self::Rows => bytes,
            Self::Splits => self.capacity(engine, receiver).saturating_sub(begin).min(bytes),
        }
    }

    /// The bytes that a rank's output holds in a call with splits.
    fn capacity(self, engine: &HostEngine, rank: u32) -> usize {
        (engine.row(rank, engine.world()) & !BAD_SPLITS) as usize
    }

    /// The error of a call with splits whose data has arrived, where a rank's splits were invalid or a rank had
    /// too little room. Every rank returns the error of the same, lowest rank.
    pub(super) fn outcome(self, engine: &HostEngine, size: usize) -> Result<()> {
        let (me, world) = (engine.rank(), engine.world());
        for rank in 0..world {
            if engine.row(rank, world) & BAD_SPLITS != 0 {
                return Err(Error::invalid_argument(format!(
                    "all_to_all_v, seen on rank {me}: the input splits of rank {rank} are \
                     negative, or more than its input has, or it has a row whose destination is no \
                     rank or changed meanwhile. It sent nothing, and the communicator stays usable"
                ))
                .naming([rank]));
            }
            let sent: usize = (0..world).map(|from| self.bytes(engine, from, rank)).sum();
            let capacity = self.capacity(engine, rank);
            if sent > capacity {
                return Err(Error::overflow(format!(
                    "all_to_all_v, seen on rank {me}: rank {rank} was sent {} rows, and its output \
                     holds {}. The last {} were not written, and the communicator stays usable. Pass \
                     a longer output, or send less",
                    sent / size,
                    capacity / size,
                    (sent - capacity) / size
                ))
                .naming([rank]));
            }
        }
        Ok(())
    }

    /// Checks that every rank expects what it is sent. Every rank reads the same rows, so all return the same
    /// error.
    pub(super) fn check(self, engine: &HostEngine, size: usize) -> Result<()> {
        if !matches!(self, Self::Rows) {
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
        let pairs = pairs().filter(differs).flat_map(|(from, to)| [from, to]);
        Err(Error::mismatch(message).naming(pairs))
    }
}
