//! The collectives that communicators have algorithms for.

use std::fmt;

use symmpool_allocator::{Error, Result, short};

/// A collective of which there are several algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StandardCollective {
    /// Every rank gets the reduction of all ranks' data.
    AllReduce,
    /// Rank `r` gets the reduction of all ranks' part `r`.
    ReduceScatter,
    /// Every rank gets all ranks' data.
    AllGather,
    /// Every rank gets the root's data.
    Broadcast,
    /// Rank `r` gets all ranks' part `r`.
    AllToAll,
}

impl StandardCollective {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::AllReduce, Self::ReduceScatter, Self::AllGather, Self::Broadcast, Self::AllToAll];

    /// The name, as `all_reduce`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all_to_all",
        }
    }

    /// The collective of this [`name`](Self::name).
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|each| each.name() == name)
    }

    /// Finds a collective like [`named`](Self::named).
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for a name that no collective has, with those that there are.
    pub fn parse(name: &str) -> Result<Self> {
        Self::named(name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::invalid_argument(format!("collective: {:?} is none of {names}", short(name)))
        })
    }

    /// The name in a sentence, as "all-reduce".
    pub(crate) fn in_words(self) -> String {
        self.name().replace('_', "-")
    }

    /// The environment variable that requests an algorithm where options leave the choice open.
    pub const fn variable(self) -> &'static str {
        match self {
            Self::AllReduce => "SYMMPOOL_ALL_REDUCE",
            Self::ReduceScatter => "SYMMPOOL_REDUCE_SCATTER",
            Self::AllGather => "SYMMPOOL_ALL_GATHER",
            Self::Broadcast => "SYMMPOOL_BROADCAST",
            Self::AllToAll => "SYMMPOOL_ALL_TO_ALL",
        }
    }

    /// Whether it reduces, so that calls have a [`ReduceOp`](crate::ReduceOp).
    pub const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter)
    }

    /// How many parts the input and the output have, among so many ranks.
    pub(crate) const fn both_parts(self, world: u32) -> [u32; 2] {
        match self {
            Self::AllReduce | Self::Broadcast => [1, 1],
            Self::ReduceScatter => [world, 1],
            Self::AllGather => [1, world],
            Self::AllToAll => [world, world],
        }
    }

    /// How many elements input and output have, for parts of `count` among so many ranks. `None` stands for a number that
    /// is too large.
    #[inline]
    pub(crate) fn lengths(self, world: u32, count: usize) -> [Option<usize>; 2] {
        self.both_parts(world).map(|parts| count.checked_mul(parts as usize))
    }

    /// How many parts the larger one of input and output has, among so many ranks.
    pub(crate) const fn parts(self, world: u32) -> u32 {
        match self {
            Self::AllReduce | Self::Broadcast => 1,
            Self::ReduceScatter | Self::AllGather | Self::AllToAll => world,
        }
    }
}

impl fmt::Display for StandardCollective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
