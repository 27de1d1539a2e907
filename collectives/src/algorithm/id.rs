//! Built-in algorithms by number: the form in which an algorithm goes from a communicator's door to the engine, and into call
//! descriptions.

use super::{AllReduceAlgorithm, AllToAllAlgorithm, StandardCollective};

/// A built-in algorithm of a collective, by the number that it has in call descriptions. Collectives but the all-reduce have
/// one set of numbers; those of all-to-alls come first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct AlgorithmId(u8);

/// Leaves the choice to the engine's rule.
pub(crate) const AUTO: AlgorithmId = AlgorithmId(0);
pub(crate) const LAMPORT: AlgorithmId = AlgorithmId(AllToAllAlgorithm::Lamport as u8);
pub(crate) const DIRECT: AlgorithmId = AlgorithmId(AllToAllAlgorithm::Direct as u8);
pub(crate) const COPY: AlgorithmId = AlgorithmId(AllToAllAlgorithm::Copy as u8);
pub(crate) const RING: AlgorithmId = AlgorithmId(AllToAllAlgorithm::Ring as u8);
pub(crate) const SCRATCH: AlgorithmId = AlgorithmId(5);
pub(crate) const LL: AlgorithmId = AlgorithmId(6);
pub(crate) const PIPELINE: AlgorithmId = AlgorithmId(7);

const NAMES: [(&str, AlgorithmId); 8] = [
    ("auto", AUTO),
    ("lamport", LAMPORT),
    ("direct", DIRECT),
    ("copy", COPY),
    ("ring", RING),
    ("scratch", SCRATCH),
    ("ll", LL),
    ("pipeline", PIPELINE),
];

impl AlgorithmId {
    pub(crate) const fn of_all_reduce(algorithm: AllReduceAlgorithm) -> Self {
        Self(algorithm as u8)
    }

    pub(crate) const fn of_all_to_all(algorithm: AllToAllAlgorithm) -> Self {
        Self(algorithm as u8)
    }

    /// The algorithm of a number in a call description.
    pub(crate) const fn from_code(code: u8) -> Self {
        Self(code)
    }

    pub(crate) const fn code(self) -> u8 {
        self.0
    }

    /// The built-in algorithm of this name, of host memory or of devices. Collectives but the all-reduce share one list of names,
    /// whether or not each has such an algorithm.
    pub(crate) fn named(collective: StandardCollective, name: &str) -> Option<Self> {
        if collective == StandardCollective::AllReduce {
            return AllReduceAlgorithm::named(name).map(Self::of_all_reduce);
        }
        NAMES.iter().find(|(each, _)| *each == name).map(|(_, id)| *id)
    }

    /// The name of this number, in the all-reduces' list or in that of all other collectives.
    pub(crate) fn name(self, collective: StandardCollective) -> Option<&'static str> {
        if collective == StandardCollective::AllReduce {
            return self.all_reduce().map(AllReduceAlgorithm::name);
        }
        NAMES.iter().find(|(_, id)| *id == self).map(|(name, _)| *name)
    }

    /// Its name for messages, which say "?" where it has none.
    pub(crate) fn label(self, collective: StandardCollective) -> &'static str {
        self.name(collective).unwrap_or("?")
    }

    /// The algorithm of an all-reduce, if it is one.
    pub(crate) fn all_reduce(self) -> Option<AllReduceAlgorithm> {
        AllReduceAlgorithm::ALL.into_iter().find(|each| Self::of_all_reduce(*each) == self)
    }

    /// The algorithm of an all-to-all, if it is one.
    pub(crate) fn all_to_all(self) -> Option<AllToAllAlgorithm> {
        AllToAllAlgorithm::ALL.into_iter().find(|each| Self::of_all_to_all(*each) == self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_of_built_in_algorithms_are_one_to_one() {
        for collective in StandardCollective::ALL {
            assert_eq!(StandardCollective::named(collective.name()), Some(collective));
            let mut known = 0;
            for id in (0..=u8::MAX).map(AlgorithmId) {
                let Some(name) = id.name(collective) else { continue };
                assert_eq!(AlgorithmId::named(collective, name), Some(id), "{collective} {name}");
                known += 1;
            }
            assert!(known >= NAMES.len());
            assert_eq!(AlgorithmId::named(collective, "nonsense"), None);
        }
        for algorithm in AllToAllAlgorithm::ALL {
            let id = AlgorithmId::named(StandardCollective::AllToAll, algorithm.name());
            assert_eq!(id.and_then(AlgorithmId::all_to_all), Some(algorithm));
        }
    }
}
