//! Which way a call takes, by its size: the leaders exchange the data of small calls, and all ranks that of large ones.
//!
//! | call | by the leaders | above |
//! | --- | --- | --- |
//! | hosts of as many ranks, several each | up to the limits below | phases inside hosts, and exchanges between ranks of equal index |
//! | one rank a host | up to the limits below | the outer engine alone |
//! | hosts of different numbers of ranks | up to the limits below | reductions: phases inside hosts, and exchanges of what segments share; else the outer engine alone |
//!
//! All ways of a collective reduce in the same order, so the bits of a result do not depend on its size.

use super::staging::AREA_BYTES;
use crate::algorithm::StandardCollective;

/// The most bytes that leave a host in a call that reduces and of which the leaders exchange the data: above, all ranks of a
/// host reduce at once.
const MAX_REDUCED: usize = 256 << 10;
/// The most bytes that leave a host in another call of the kind: above, all ranks of a host send at once, and copy less.
const MAX_MOVED: usize = 2 << 20;

/// Whether the leaders exchange the data of a call, in which at most `leaving` bytes leave a host, and its ranks put `inside`
/// bytes into their leader's memory. `None` stands for more than can be counted.
pub(super) fn is_for_leaders(
    collective: StandardCollective,
    leaving: Option<usize>,
    inside: Option<usize>,
) -> bool {
    let most = if collective.reduces() { MAX_REDUCED } else { MAX_MOVED };
    leaving.is_some_and(|bytes| bytes <= most) && inside.is_some_and(|bytes| bytes <= AREA_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_calls_are_for_the_leaders_and_what_does_not_fit_is_not() {
        let (sum, moved) = (StandardCollective::AllReduce, StandardCollective::AllToAll);
        assert!(is_for_leaders(sum, Some(MAX_REDUCED), Some(AREA_BYTES)));
        assert!(!is_for_leaders(sum, Some(MAX_REDUCED + 1), Some(0)));
        assert!(is_for_leaders(moved, Some(MAX_MOVED), Some(0)));
        assert!(!is_for_leaders(moved, Some(1), Some(AREA_BYTES + 1)));
        assert!(!is_for_leaders(moved, None, Some(1)) && !is_for_leaders(moved, Some(1), None));
    }
}
