//! Blocks that were freed without order, and how they come back (rule D5).
//!
//! A block comes back at the commit by which every rank has told that it freed it. A commit
//! carries a bounded number of blocks a rank, and ranks free different blocks at different times;
//! so what each tells must not depend on what others did not free, or blocks that one rank keeps
//! for ever would stand in the way of all later ones.
//!
//! Therefore every rank tells each block once, those first that it freed first. All ranks hear the
//! same, and remember of each block how many ranks have told it; it comes back when all have. That
//! is the same commit everywhere, since it follows from what all heard alone. No block waits for
//! another for longer than the own queue lasts, nothing is told twice, and what is remembered is
//! at most a number for each block that some rank still holds.
//!
//! What a commit told counts only if the commit succeeds, which it does on all ranks or on none;
//! a failed one is told again. A resync begins anew: every rank tells all it has set aside.

use std::collections::{BTreeMap, VecDeque};

/// The blocks of one lane that are set aside.
#[derive(Clone, Debug, Default)]
pub(super) struct Aside {
    /// By counter of the allocation.
    blocks: BTreeMap<u64, Entry>,
    /// Counters of those that no commit has told, in the order in which they were freed.
    untold: VecDeque<u64>,
    /// How many ranks have told a block, for those that some have and others have not.
    tellers: BTreeMap<u64, u32>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// In the block table.
    id: u32,
    told: bool,
}

impl Aside {
    /// Sets a block aside.
    pub(super) fn insert(&mut self, counter: u64, id: u32) {
        self.blocks.insert(counter, Entry { id, told: false });
        self.untold.push_back(counter);
    }

    /// The block's id in the table, if it is set aside.
    pub(super) fn id(&self, counter: u64) -> Option<u32> {
        self.blocks.get(&counter).map(|entry| entry.id)
    }

    /// Takes a block out; returns its id.
    pub(super) fn remove(&mut self, counter: u64) -> Option<u32> {
        let Entry { id, told } = self.blocks.remove(&counter)?;
        if !told {
            self.untold.retain(|other| *other != counter);
        }
        self.tellers.remove(&counter);
        Some(id)
    }

    /// Counters of all blocks set aside, ascending.
    pub(super) fn counters(&self) -> impl Iterator<Item = u64> + '_ {
        self.blocks.keys().copied()
    }

    /// What to tell at the next commit: at most `most` blocks, ascending, so that ranks that freed
    /// the same in another order say the same.
    pub(super) fn to_tell(&self, most: usize) -> Vec<u64> {
        let mut counters: Vec<u64> = self.untold.iter().copied().take(most).collect();
        counters.sort_unstable();
        counters
    }

    /// Notes what a commit told, and by how many of `world` ranks: this one told what
    /// [`to_tell`](Self::to_tell) said for the same `most`. Returns the blocks that all ranks have
    /// told by now, ascending; they remain until they are removed.
    pub(super) fn told(&mut self, most: usize, heard: &[(u64, u32)], world: u32) -> Vec<u64> {
        for counter in self.untold.drain(..most.min(self.untold.len())) {
            if let Some(entry) = self.blocks.get_mut(&counter) {
                entry.told = true;
            }
        }
        let mut by_all = Vec::new();
        for &(counter, ranks) in heard {
            let ranks = ranks + self.tellers.remove(&counter).unwrap_or(0);
            if ranks >= world {
                by_all.push(counter);
            } else {
                self.tellers.insert(counter, ranks);
            }
        }
        by_all
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// What a rank does between two commits: the blocks it frees, by their place among those it
    /// still holds.
    type Frees = Vec<usize>;

    /// The same, with nothing clever: who has freed what, and who has said so.
    struct Naive {
        freed: Vec<Vec<u64>>,
        said: Vec<BTreeSet<u64>>,
        back: BTreeSet<u64>,
    }

    impl Naive {
        fn commit(&mut self, most: usize) -> Vec<u64> {
            for (freed, said) in self.freed.iter().zip(&mut self.said) {
                let new: Vec<u64> = freed.iter().copied().filter(|c| !said.contains(c)).collect();
                said.extend(new.into_iter().take(most));
            }
            let by_all = self.said.iter().skip(1).fold(self.said[0].clone(), |a, b| &a & b);
            let new: Vec<u64> = by_all.difference(&self.back).copied().collect();
            self.back.extend(&new);
            new
        }
    }

    struct Ranks {
        aside: Vec<Aside>,
        naive: Naive,
        held: Vec<Vec<u64>>,
        most: usize,
    }

    impl Ranks {
        fn new(world: usize, blocks: u64, most: usize) -> Self {
            let naive = Naive {
                freed: vec![Vec::new(); world],
                said: vec![BTreeSet::new(); world],
                back: BTreeSet::new(),
            };
            let held = vec![(0..blocks).collect(); world];
            Self { aside: vec![Aside::default(); world], naive, held, most }
        }

        fn free(&mut self, rank: usize, nth: usize) {
            if self.held[rank].is_empty() {
                return;
            }
            let nth = nth % self.held[rank].len();
            let counter = self.held[rank].remove(nth);
            self.aside[rank].insert(counter, counter as u32 + 7);
            self.naive.freed[rank].push(counter);
        }

        /// A commit of all ranks, which may fail after they have heard each other.
        fn commit(&mut self, fails: bool) -> Vec<u64> {
            let mut heard = BTreeMap::<u64, u32>::new();
            for aside in &self.aside {
                let told = aside.to_tell(self.most);
                assert!(told.len() <= self.most && told.is_sorted_by(|a, b| a < b));
                told.into_iter().for_each(|counter| *heard.entry(counter).or_default() += 1);
            }
            if fails {
                return Vec::new();
            }
            let heard: Vec<(u64, u32)> = heard.into_iter().collect();
            let expected = self.naive.commit(self.most);
            let world = self.aside.len() as u32;
            for aside in &mut self.aside {
                let back = aside.told(self.most, &heard, world);
                assert_eq!(back, expected, "the same blocks, at the same commit");
                for counter in back {
                    assert_eq!(aside.id(counter), Some(counter as u32 + 7));
                    assert_eq!(aside.remove(counter), Some(counter as u32 + 7));
                }
                assert!(aside.tellers.keys().all(|c| !self.naive.back.contains(c)));
            }
            expected
        }
    }

    proptest! {
        // D5: a block comes back once every rank has told it, at the same commit on all of them,
        // however few a commit carries and whatever a rank keeps.
        #[test]
        fn blocks_come_back_as_in_the_naive_model(
            world in 1_usize..5,
            most in 1_usize..6,
            rounds in prop::collection::vec(
                (prop::collection::vec(any::<Frees>(), 4), any::<bool>()),
                1..20,
            ),
            keeper in prop::option::of(0_usize..4),
        ) {
            const BLOCKS: u64 = 60;
            let mut ranks = Ranks::new(world, BLOCKS, most);
            if let Some(held) = keeper.and_then(|rank| ranks.held.get_mut(rank)) {
                // The oldest third is never freed on this rank.
                held.retain(|counter| *counter >= BLOCKS / 3);
            }
            for (frees, fails) in rounds {
                for (rank, frees) in frees.into_iter().enumerate().take(world) {
                    frees.into_iter().for_each(|nth| ranks.free(rank, nth));
                }
                ranks.commit(fails);
            }
            // In the end everybody frees all it ever will, and the queues run dry in time.
            for rank in 0..world {
                while !ranks.held[rank].is_empty() {
                    ranks.free(rank, 0);
                }
            }
            for _ in 0..(BLOCKS as usize).div_ceil(most) {
                ranks.commit(false);
            }
            let kept = if keeper.is_some_and(|rank| rank < world) { BLOCKS / 3 } else { 0 };
            prop_assert_eq!(ranks.naive.back.len() as u64, BLOCKS - kept);
            prop_assert!(ranks.aside.iter().all(|aside| aside.untold.is_empty()));
        }
    }

    #[test]
    fn a_block_that_comes_back_untold_is_not_told() {
        let mut aside = Aside::default();
        (0..5).for_each(|counter| aside.insert(10 - counter, counter as u32));
        assert_eq!(aside.to_tell(3), [8, 9, 10]);
        assert_eq!(aside.remove(9), Some(1));
        assert_eq!(aside.to_tell(3), [7, 8, 10]);
        assert_eq!(aside.told(2, &[(8, 1), (10, 2)], 2), [10]);
        assert_eq!((aside.to_tell(3), aside.remove(9)), (vec![6, 7], None));
        assert_eq!(aside.counters().collect::<Vec<_>>(), [6, 7, 8, 10]);
    }
}
