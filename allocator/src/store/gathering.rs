//! A gather in progress: which ranks have come, with which parts, and whether it can still succeed.
//!
//! Pure bookkeeping, shared by the in-process store and the TCP server; each of them does its
//! own waiting.

use std::collections::{BTreeMap, BTreeSet};

use super::MAX_GATHERED;
use crate::error::ErrorKind;
use crate::{Error, Result};

/// The parts of one gather. `B` is a cheap handle to bytes that orders by content, so that equal
/// parts can be kept once.
#[derive(Debug)]
pub(crate) struct Gathering<B> {
    world: u32,
    /// Rank to the id of its part.
    parts: BTreeMap<u32, u32>,
    /// Ranks that came and stopped waiting.
    left: BTreeSet<u32>,
    /// Distinct part to its id. Ids are given in order of arrival and never used again.
    distinct: BTreeMap<B, u32>,
    /// The id of each distinct part to the part, and how many ranks have it.
    holders: BTreeMap<u32, (B, u32)>,
    next_id: u32,
    /// Bytes of all distinct parts.
    bytes: usize,
    /// Calls counted so far. Once the gather has failed and `world` calls were made, every rank has received
    /// the failure.
    calls: u32,
    failure: Option<ErrorKind>,
}

impl<B: Clone + Ord + AsRef<[u8]>> Gathering<B> {
    pub(crate) fn new(world: u32) -> Self {
        Self {
            world,
            parts: BTreeMap::new(),
            left: BTreeSet::new(),
            distinct: BTreeMap::new(),
            holders: BTreeMap::new(),
            next_id: 0,
            bytes: 0,
            calls: 0,
            failure: None,
        }
    }

    /// Takes `rank`'s part; true if it was the last. An error concerns all ranks: the gather has failed, and
    /// the caller passes the error to those that wait.
    pub(crate) fn arrive(&mut self, key: &str, rank: u32, world: u32, part: B) -> Result<bool> {
        self.calls = self.calls.saturating_add(1);
        if let Some(failure) = &self.failure {
            return Err(Error::from_kind(failure.clone()));
        }
        if world != self.world {
            return Err(self.fail(&Error::mismatch(format!(
                "all_gather {key:?}: rank {rank} says the world has {world} ranks, those before \
                 it said {}",
                self.world
            ))
            .naming([rank])));
        }
        if self.parts.contains_key(&rank) {
            return Err(self.fail(
                &Error::mismatch(format!(
                    "two ranks with number {rank} in all_gather {key:?}; each of the {world} ranks \
                 contributes once"
                ))
                .naming([rank]),
            ));
        }
        let id = match self.distinct.get(&part) {
            Some(&id) => id,
            None => {
                let bytes = self.bytes + part.as_ref().len();
                if bytes > MAX_GATHERED {
                    return Err(self.fail(&Error::out_of_memory(format!(
                        "all_gather {key:?}: the distinct parts exceed {MAX_GATHERED} bytes with \
                         rank {rank}'s"
                    ))));
                }
                self.bytes = bytes;
                let id = self.next_id;
                self.next_id = self.next_id.wrapping_add(1);
                self.holders.insert(id, (part.clone(), 0));
                self.distinct.insert(part, id);
                id
            }
        };
        if let Some((_, holders)) = self.holders.get_mut(&id) {
            *holders += 1;
        }
        self.parts.insert(rank, id);
        self.left.remove(&rank);
        Ok(self.parts.len() == self.world as usize)
    }

    /// Counts a call whose part could not be taken: the gather cannot succeed any more.
    pub(crate) fn arrive_broken(&mut self, error: &Error) -> Error {
        self.calls = self.calls.saturating_add(1);
        match &self.failure {
            Some(failure) => Error::from_kind(failure.clone()),
            None => self.fail(error),
        }
    }

    /// Takes back the part of a rank that stopped waiting.
    pub(crate) fn leave(&mut self, rank: u32) {
        let Some(id) = self.parts.remove(&rank) else { return };
        self.left.insert(rank);
        self.calls = self.calls.saturating_sub(1);
        if let Some((_, holders)) = self.holders.get_mut(&id) {
            *holders -= 1;
            if *holders == 0
                && let Some((part, _)) = self.holders.remove(&id)
            {
                self.distinct.remove(&part);
                self.bytes -= part.as_ref().len();
            }
        }
    }

    /// A rank whose part never was here came and stopped waiting.
    pub(crate) fn note_left(&mut self, rank: u32) {
        self.left.insert(rank);
    }

    /// Marks the gather failed for everyone who is in it or still comes; returns `error`.
    pub(crate) fn fail(&mut self, error: &Error) -> Error {
        self.failure = Some(error.kind().clone());
        self.parts.clear();
        self.distinct.clear();
        self.holders.clear();
        error.clone()
    }

    /// Marks the gather failed because ranks are gone. They count as having received the failure.
    pub(crate) fn lose(&mut self, error: &Error) {
        let gone = u32::try_from(error.ranks().len()).unwrap_or(u32::MAX);
        self.calls = self.calls.saturating_add(gone);
        self.fail(error);
    }

    /// Whether the gather failed because `rank` was gone.
    pub(crate) fn failed_without(&self, rank: u32) -> bool {
        matches!(&self.failure, Some(ErrorKind::PeerLost { ranks, .. }) if ranks.contains(&rank))
    }

    /// Whether this entry is of no further use: it holds no part, and no rank has yet to receive a failure.
    pub(crate) fn is_spent(&self) -> bool {
        match self.failure {
            Some(_) => self.calls >= self.world,
            None => self.parts.is_empty(),
        }
    }

    pub(crate) fn has(&self, rank: u32) -> bool {
        self.parts.contains_key(&rank)
    }

    /// Whether `rank` came, also if it has stopped waiting.
    pub(crate) fn knows(&self, rank: u32) -> bool {
        self.has(rank) || self.left.contains(&rank)
    }

    pub(crate) fn failed(&self) -> bool {
        self.failure.is_some()
    }

    /// The ranks that are missing: those that never came. Ranks that came and stopped waiting did so because
    /// of these, and are named only if there are no others.
    pub(crate) fn missing(&self) -> Vec<u32> {
        // One pass over the parts, which are in rank order: a look-up for every rank would be slow in a large
        // world.
        let mut absent = Vec::new();
        let mut next = 0;
        for &rank in self.parts.keys() {
            absent.extend(next..rank);
            next = rank + 1;
        }
        absent.extend(next..self.world);
        let (left, never): (Vec<u32>, Vec<u32>) =
            absent.into_iter().partition(|rank| self.left.contains(rank));
        if never.is_empty() { left } else { never }
    }

    /// Those of `ranks` that are [`missing`](Gathering::missing). Its cost depends on `ranks` alone, as it is
    /// called at every arrival.
    pub(crate) fn missing_of(&self, ranks: impl Iterator<Item = u32>) -> Vec<u32> {
        let all_came = self.parts.len() + self.left.len() >= self.world as usize;
        ranks
            .filter(|rank| *rank < self.world && !self.has(*rank))
            .filter(|rank| all_came || !self.left.contains(rank))
            .collect()
    }

    /// The distinct parts in order of the first rank that has each, and for each rank the index
    /// of its own.
    pub(crate) fn finish(self) -> (Vec<B>, Vec<u32>) {
        let mut by_id: BTreeMap<u32, B> =
            self.distinct.into_iter().map(|(part, id)| (id, part)).collect();
        let mut order = BTreeMap::<u32, u32>::new();
        let mut distinct = Vec::with_capacity(by_id.len());
        let mut which = Vec::with_capacity(self.parts.len());
        for id in self.parts.into_values() {
            let next = u32::try_from(distinct.len()).expect("at most MAX_WORLD parts");
            let at = *order.entry(id).or_insert(next);
            if let Some(part) = by_id.remove(&id) {
                distinct.push(part);
            }
            which.push(at);
        }
        (distinct, which)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn part(text: &str) -> Arc<[u8]> {
        text.as_bytes().into()
    }

    #[test]
    fn parts_come_out_in_rank_order_whatever_order_they_came_in() {
        let mut gathering = Gathering::new(4);
        assert!(!gathering.arrive("k", 3, 4, part("x")).unwrap());
        assert!(!gathering.arrive("k", 1, 4, part("y")).unwrap());
        assert_eq!(gathering.missing(), [0, 2]);
        assert!(!gathering.arrive("k", 2, 4, part("x")).unwrap());
        assert!(gathering.arrive("k", 0, 4, part("y")).unwrap());
        let (distinct, which) = gathering.finish();
        assert_eq!(distinct, [part("y"), part("x")]);
        assert_eq!(which, [0, 0, 1, 1]);
    }

    #[test]
    fn a_rank_that_left_leaves_nothing_behind() {
        let mut gathering = Gathering::new(2);
        gathering.arrive("k", 0, 2, part("old")).unwrap();
        gathering.leave(0);
        assert!(gathering.is_spent());
        gathering.arrive("k", 0, 2, part("new")).unwrap();
        assert!(gathering.arrive("k", 1, 2, part("new")).unwrap());
        assert_eq!(gathering.finish(), (vec![part("new")], vec![0, 0]));
    }

    #[test]
    fn ranks_that_waited_in_vain_are_not_the_ones_waited_for() {
        let mut gathering = Gathering::new(3);
        gathering.arrive("k", 0, 3, part("x")).unwrap();
        gathering.arrive("k", 1, 3, part("x")).unwrap();
        assert_eq!(gathering.missing(), [2]);
        gathering.leave(0);
        assert_eq!(gathering.missing(), [2], "rank 0 left because of rank 2");
        assert_eq!(gathering.missing_of(0..5), [2]);
        assert_eq!(gathering.missing_of(0..2), Vec::<u32>::new());
        gathering.arrive("k", 2, 3, part("x")).unwrap();
        assert_eq!(gathering.missing(), [0], "it is the only one that is not there");
        assert_eq!(gathering.missing_of(0..5), [0]);
        assert!(gathering.arrive("k", 0, 3, part("x")).unwrap());
    }

    #[test]
    fn a_failure_is_owed_to_each_rank_once() {
        let mut gathering = Gathering::new(3);
        gathering.arrive("k", 1, 3, part("x")).unwrap();
        let error = gathering.arrive("k", 1, 3, part("x")).unwrap_err();
        assert!(error.is_diverged());
        assert!(error.to_string().contains("two ranks with number 1"), "{error}");
        assert!(!gathering.is_spent());
        let late = gathering.arrive("k", 0, 3, part("x")).unwrap_err();
        assert_eq!(late.to_string(), error.to_string());
        assert!(gathering.is_spent());
    }

    #[test]
    fn worlds_must_agree() {
        let mut gathering = Gathering::new(3);
        gathering.arrive("k", 0, 3, part("x")).unwrap();
        let error = gathering.arrive("k", 1, 4, part("x")).unwrap_err();
        assert!(error.is_diverged());
        assert!(gathering.failed());
        assert!(error.to_string().contains("world has 4 ranks"), "{error}");
    }
}
