//! Who sends how many bytes to whom.

use symmpool_allocator::{Error, Result};

use crate::host::HostEngine;

/// The traffic matrix of one call, in bytes.
#[derive(Clone, Copy)]
pub(super) enum Matrix {
    /// Everyone sends the same to everyone, which entries have told: nobody's row is read.
    Even { bytes: usize },
    /// In the rows that ranks show each other for the call, with what each expects.
    Rows,
    /// In such rows too, with how much each output holds.
    Splits,
}

/// Beside the capacity in a row: the rank's splits made no sense, and it sends nothing.
pub(super) const NONSENSE: u64 = 1 << 63;

/// Disagreements a message lists before it stops.
const LISTED: usize = 4;

impl Matrix {
    /// What `sender` sends to `receiver`, once all have entered.
    #[inline]
    pub(super) fn bytes(self, engine: &HostEngine, sender: u32, receiver: u32) -> usize {
        match self {
            Self::Even { bytes } => bytes,
            Self::Rows | Self::Splits => engine.row(sender, receiver) as usize,
        }
    }

    /// What this rank sends to `receiver`, before it has entered.
    #[inline]
    pub(super) fn next_bytes(self, engine: &HostEngine, receiver: u32) -> usize {
        match self {
            Self::Even { bytes } => bytes,
            Self::Rows | Self::Splits => engine.next_row(receiver) as usize,
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

    /// Where in the receiver's output a sender's segment begins, and how much of it that holds.
    pub(super) fn place(self, engine: &HostEngine, sender: u32, receiver: u32) -> (usize, usize) {
        let begin = (0..sender).map(|rank| self.bytes(engine, rank, receiver)).sum();
        (begin, self.fitting(engine, begin, sender, receiver))
    }

    /// The same of all senders, in their order.
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

    /// What a rank's output holds, of a call with splits.
    fn capacity(self, engine: &HostEngine, rank: u32) -> usize {
        (engine.row(rank, engine.world()) & !NONSENSE) as usize
    }

    /// What did not go as wished, though all data is where it should be: the first rank's, on every
    /// rank alike.
    pub(super) fn amiss(self, engine: &HostEngine, size: usize) -> Result<()> {
        let (me, world) = (engine.rank(), engine.world());
        for rank in 0..world {
            if engine.row(rank, world) & NONSENSE != 0 {
                return Err(Error::invalid_argument(format!(
                    "all_to_all_v, seen on rank {me}: the input splits of rank {rank} are \
                     negative, or more than its input has, or it has a row whose destination is no \
                     rank or changed meanwhile. It sent nothing, and the communicator goes on"
                ))
                .naming([rank]));
            }
            let sent: usize = (0..world).map(|from| self.bytes(engine, from, rank)).sum();
            let capacity = self.capacity(engine, rank);
            if sent > capacity {
                return Err(Error::overflow(format!(
                    "all_to_all_v, seen on rank {me}: rank {rank} was sent {} rows, and its output \
                     holds {}. The {} beyond were not written, and the communicator goes on. Pass a \
                     longer output, or send less",
                    sent / size,
                    capacity / size,
                    (sent - capacity) / size
                ))
                .naming([rank]));
            }
        }
        Ok(())
    }

    /// Whether everyone expects what is sent. Every rank reads the same rows, so makes the same
    /// error of them.
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
