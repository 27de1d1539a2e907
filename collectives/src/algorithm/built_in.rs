//! The collectives that communicators have algorithms for, and the numbers that built-in algorithms have in call
//! descriptions.

use std::fmt;

use symmpool_allocator::{Error, Result, short};

use super::AllReduceAlgorithm;

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

    /// As [`named`](Self::named).
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

/// The number of the algorithm that is chosen for a call by its size and memory.
pub(crate) const AUTO: u8 = 0;
/// The numbers of algorithms of the collectives that do not all-reduce. Those of all-to-alls come first.
pub(crate) const LAMPORT: u8 = 1;
pub(crate) const DIRECT: u8 = 2;
pub(crate) const COPY: u8 = 3;
pub(crate) const RING: u8 = 4;
pub(crate) const STAGED: u8 = 5;
pub(crate) const LL: u8 = 6;
pub(crate) const STAGES: u8 = 7;

const NAMES: [(&str, u8); 8] = [
    ("auto", AUTO),
    ("lamport", LAMPORT),
    ("direct", DIRECT),
    ("copy", COPY),
    ("ring", RING),
    ("staged", STAGED),
    ("ll", LL),
    ("stages", STAGES),
];

/// The number of a built-in algorithm, of host memory or of devices, by its name.
pub(crate) fn code_of(collective: StandardCollective, name: &str) -> Option<u8> {
    if collective == StandardCollective::AllReduce {
        return AllReduceAlgorithm::named(name).map(|algorithm| algorithm as u8);
    }
    NAMES.iter().find(|(each, _)| *each == name).map(|(_, code)| *code)
}

/// The name of a built-in algorithm of this number.
pub(crate) fn name_of(collective: StandardCollective, code: u8) -> Option<&'static str> {
    if collective == StandardCollective::AllReduce {
        let found = AllReduceAlgorithm::ALL.into_iter().find(|each| *each as u8 == code);
        return found.map(AllReduceAlgorithm::name);
    }
    NAMES.iter().find(|(_, each)| *each == code).map(|(name, _)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AllToAllAlgorithm;

    #[test]
    fn names_and_numbers_of_built_in_algorithms_are_one_to_one() {
        for collective in StandardCollective::ALL {
            assert_eq!(StandardCollective::named(collective.name()), Some(collective));
            let mut known = 0;
            for code in 0..=u8::MAX {
                let Some(name) = name_of(collective, code) else { continue };
                assert_eq!(code_of(collective, name), Some(code), "{collective} {name}");
                known += 1;
            }
            assert!(known >= NAMES.len());
            assert_eq!(code_of(collective, "nonsense"), None);
        }
        for algorithm in AllToAllAlgorithm::ALL {
            let code = algorithm as u8;
            assert_eq!(code_of(StandardCollective::AllToAll, algorithm.name()), Some(code));
        }
    }
}
