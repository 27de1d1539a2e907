//! Deferred frees: blocks that were freed without order, and how they return to the lane (rule D5).
//!
//! A block returns at the commit by which every rank has reported that it freed it. A commit carries a
//! bounded number of reports per rank, and ranks free different blocks at different times. What a rank
//! reports must therefore not depend on what other ranks have not freed: otherwise blocks that one rank
//! keeps for ever would delay all later ones.
//!
//! Every rank reports each block once, in the order in which it freed them. All ranks receive the same
//! reports and count, for each block, how many ranks have reported it; the block returns when all have.
//! That is the same commit on every rank, because it follows from the reports alone. A block waits for
//! others only as long as it takes this rank's own queue to drain, and the counts take one number for each
//! block that some rank still holds.
//!
//! Reports count only if their commit succeeds, which it does on all ranks or on none; after a failed
//! commit they are sent again. A resync starts over: every rank reports all its deferred frees anew.

use std::collections::{BTreeMap, VecDeque};

/// The deferred frees of one lane.
#[derive(Clone, Debug, Default)]
pub(super) struct DeferredFrees {
    /// Entries by the counter of their allocation.
    blocks: BTreeMap<u64, DeferredFree>,
    /// Counters of the blocks that no successful commit has reported, in the order in which they were
    /// freed.
    unreported: VecDeque<u64>,
    /// How many ranks have reported a block, for blocks that some ranks have reported and others have not.
    report_counts: BTreeMap<u64, u32>,
}

#[derive(Clone, Copy, Debug)]
struct DeferredFree {
    /// In the block table.
    id: u32,
    reported: bool,
}

impl DeferredFrees {
    /// Adds a block that this rank has freed.
    pub(super) fn insert(&mut self, counter: u64, id: u32) {
        self.blocks.insert(counter, DeferredFree { id, reported: false });
        self.unreported.push_back(counter);
    }

    /// The block's id in the table, if its free is deferred.
    pub(super) fn id(&self, counter: u64) -> Option<u32> {
        self.blocks.get(&counter).map(|entry| entry.id)
    }

    /// Removes a block; returns its id.
    pub(super) fn remove(&mut self, counter: u64) -> Option<u32> {
        let DeferredFree { id, reported } = self.blocks.remove(&counter)?;
        if !reported {
            self.unreported.retain(|other| *other != counter);
        }
        self.report_counts.remove(&counter);
        Some(id)
    }

    /// Counters of all blocks, ascending.
    pub(super) fn counters(&self) -> impl Iterator<Item = u64> + '_ {
        self.blocks.keys().copied()
    }

    /// Blocks to report at the next commit, at most `most`. They ascend, so that ranks that freed the same blocks in
    /// another order send the same report.
    pub(super) fn to_report(&self, most: usize) -> Vec<u64> {
        let mut counters: Vec<u64> = self.unreported.iter().copied().take(most).collect();
        counters.sort_unstable();
        counters
    }

    /// Takes over the reports of a commit that succeeded: blocks with the number of ranks, out of `world`,
    /// that reported them. This rank reported what [`to_report`](Self::to_report) returned for the same
    /// `most`. Returns the blocks that all ranks have reported by now, ascending; they stay here until they
    /// are removed.
    pub(super) fn apply_reports(
        &mut self,
        most: usize,
        reports: &[(u64, u32)],
        world: u32,
    ) -> Vec<u64> {
        for counter in self.unreported.drain(..most.min(self.unreported.len())) {
            if let Some(entry) = self.blocks.get_mut(&counter) {
                entry.reported = true;
            }
        }
        let mut by_all = Vec::new();
        for &(counter, ranks) in reports {
            let ranks = ranks + self.report_counts.remove(&counter).unwrap_or(0);
            if ranks >= world {
                by_all.push(counter);
            } else {
                self.report_counts.insert(counter, ranks);
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

    /// Frees of a rank between two commits: places of the blocks among those it still holds.
    type Frees = Vec<usize>;

    /// The obvious implementation: what each rank has freed, and what it has reported.
    struct NaiveFrees {
        freed: Vec<Vec<u64>>,
        reported: Vec<BTreeSet<u64>>,
        back: BTreeSet<u64>,
    }

    impl NaiveFrees {
        fn commit(&mut self, most: usize) -> Vec<u64> {
            for (freed, reported) in self.freed.iter().zip(&mut self.reported) {
                let new: Vec<u64> =
                    freed.iter().copied().filter(|c| !reported.contains(c)).collect();
                reported.extend(new.into_iter().take(most));
            }
            let by_all = self.reported.iter().skip(1).fold(self.reported[0].clone(), |a, b| &a & b);
            let new: Vec<u64> = by_all.difference(&self.back).copied().collect();
            self.back.extend(&new);
            new
        }
    }

    struct Ranks {
        deferred: Vec<DeferredFrees>,
        naive: NaiveFrees,
        held: Vec<Vec<u64>>,
        most: usize,
    }

    impl Ranks {
        fn new(world: usize, blocks: u64, most: usize) -> Self {
            let naive = NaiveFrees {
                freed: vec![Vec::new(); world],
                reported: vec![BTreeSet::new(); world],
                back: BTreeSet::new(),
            };
            let held = vec![(0..blocks).collect(); world];
            Self { deferred: vec![DeferredFrees::default(); world], naive, held, most }
        }

        fn free(&mut self, rank: usize, nth: usize) {
            if self.held[rank].is_empty() {
                return;
            }
            let nth = nth % self.held[rank].len();
            let counter = self.held[rank].remove(nth);
            self.deferred[rank].insert(counter, counter as u32 + 7);
            self.naive.freed[rank].push(counter);
        }

        /// A commit of all ranks, which may fail after they have exchanged their reports.
        fn commit(&mut self, fails: bool) -> Vec<u64> {
            let mut reports = BTreeMap::<u64, u32>::new();
            for deferred in &self.deferred {
                let report = deferred.to_report(self.most);
                assert!(report.len() <= self.most && report.is_sorted_by(|a, b| a < b));
                report.into_iter().for_each(|counter| *reports.entry(counter).or_default() += 1);
            }
            if fails {
                return Vec::new();
            }
            let reports: Vec<(u64, u32)> = reports.into_iter().collect();
            let expected = self.naive.commit(self.most);
            let world = self.deferred.len() as u32;
            for deferred in &mut self.deferred {
                let back = deferred.apply_reports(self.most, &reports, world);
                assert_eq!(back, expected, "the same blocks, at the same commit");
                for counter in back {
                    assert_eq!(deferred.id(counter), Some(counter as u32 + 7));
                    assert_eq!(deferred.remove(counter), Some(counter as u32 + 7));
                }
                assert!(deferred.report_counts.keys().all(|c| !self.naive.back.contains(c)));
            }
            expected
        }
    }

    proptest! {
        // D5: a block comes back once every rank has reported it, at the same commit on all of them,
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
            prop_assert!(ranks.deferred.iter().all(|deferred| deferred.unreported.is_empty()));
        }
    }

    #[test]
    fn a_block_that_returns_unreported_is_not_reported() {
        let mut deferred = DeferredFrees::default();
        (0..5).for_each(|counter| deferred.insert(10 - counter, counter as u32));
        assert_eq!(deferred.to_report(3), [8, 9, 10]);
        assert_eq!(deferred.remove(9), Some(1));
        assert_eq!(deferred.to_report(3), [7, 8, 10]);
        assert_eq!(deferred.apply_reports(2, &[(8, 1), (10, 2)], 2), [10]);
        assert_eq!((deferred.to_report(3), deferred.remove(9)), (vec![6, 7], None));
        assert_eq!(deferred.counters().collect::<Vec<_>>(), [6, 7, 8, 10]);
    }
}
