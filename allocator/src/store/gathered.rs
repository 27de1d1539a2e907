//! The result of an all-gather.

use std::collections::BTreeMap;
use std::sync::Arc;

/// The result of an all-gather: one part a rank, equal parts held (and sent) once.
///
/// The parts that ranks publish at a commit are equal on all of them unless something is wrong, so keeping
/// distinct parts only makes an answer's size independent of the world's in the usual case.
/// Cloning shares everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gathered {
    distinct: Arc<[Arc<[u8]>]>,
    /// Rank to index into `distinct`.
    which: Arc<[u32]>,
}

impl Gathered {
    /// Collects parts in rank order.
    pub fn from_parts<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> Self {
        let mut distinct: Vec<Arc<[u8]>> = Vec::new();
        let mut index = BTreeMap::<Arc<[u8]>, u32>::new();
        let mut which = Vec::new();
        for part in parts {
            let part = part.as_ref();
            let at = match index.get(part) {
                Some(&at) => at,
                None => {
                    let at = u32::try_from(distinct.len()).expect("at most u32::MAX ranks");
                    let part: Arc<[u8]> = part.into();
                    distinct.push(part.clone());
                    index.insert(part, at);
                    at
                }
            };
            which.push(at);
        }
        Self { distinct: distinct.into(), which: which.into() }
    }

    /// Rebuilds a result from its distinct parts and, for each rank, which of them is its own.
    /// `None` when an index has no part.
    pub fn from_distinct(distinct: Vec<Arc<[u8]>>, which: Vec<u32>) -> Option<Self> {
        let known = which.iter().all(|&at| (at as usize) < distinct.len());
        known.then(|| Self { distinct: distinct.into(), which: which.into() })
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        u32::try_from(self.which.len()).expect("at most u32::MAX ranks")
    }

    /// Contribution of `rank`. Panics when `rank` is not below [`world`](Gathered::world).
    pub fn part(&self, rank: u32) -> &[u8] {
        &self.distinct[self.which[rank as usize] as usize]
    }

    /// The parts in rank order.
    pub fn parts(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.which.iter().map(|&at| &*self.distinct[at as usize])
    }

    /// The distinct parts, in order of the first rank that contributed each.
    pub fn distinct(&self) -> &[Arc<[u8]>] {
        &self.distinct
    }

    /// For each rank, the index of its part in [`distinct`](Gathered::distinct).
    pub fn which(&self) -> &[u32] {
        &self.which
    }

    /// Whether every rank contributed the same bytes.
    pub fn is_uniform(&self) -> bool {
        self.distinct.len() <= 1
    }

    /// The bytes of an answer that carries this result: its distinct parts, and eight bytes for
    /// each run of the index.
    pub(crate) fn payload_bytes(&self) -> usize {
        let parts: usize = self.distinct.iter().map(|part| part.len()).sum();
        parts + 8 * runs(&self.which).len()
    }
}

/// `which` run-length encoded, as (value, count).
pub(crate) fn runs(which: &[u32]) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &at in which {
        match runs.last_mut() {
            Some((value, count)) if *value == at => *count += 1,
            _ => runs.push((at, 1)),
        }
    }
    runs
}

/// The inverse of [`runs`]; `None` when the runs make more than `limit` entries, or are empty.
pub(crate) fn expand_runs(runs: &[(u32, u32)], limit: u32) -> Option<Vec<u32>> {
    let mut which = Vec::new();
    for &(value, count) in runs {
        if count == 0 || count as usize > limit as usize - which.len() {
            return None;
        }
        which.resize(which.len() + count as usize, value);
    }
    Some(which)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_parts_are_held_once_in_order_of_first_use() {
        let gathered = Gathered::from_parts([&b"b"[..], b"a", b"b", b""]);
        assert_eq!(gathered.distinct().len(), 3);
        assert_eq!(gathered.which(), [0, 1, 0, 2]);
        assert_eq!(gathered.part(2), b"b");
        assert_eq!(gathered.parts().collect::<Vec<_>>(), [&b"b"[..], b"a", b"b", b""]);
        assert!(!gathered.is_uniform());
        assert!(Gathered::from_parts([b"x"; 9]).is_uniform());
    }

    #[test]
    fn an_index_without_a_part_is_refused() {
        assert!(Gathered::from_distinct(vec![b"x"[..].into()], vec![0, 1]).is_none());
    }

    #[test]
    fn runs_expand_to_what_they_were_made_from() {
        let which = [0, 0, 0, 1, 0, 2, 2];
        assert_eq!(runs(&which), [(0, 3), (1, 1), (0, 1), (2, 2)]);
        assert_eq!(expand_runs(&runs(&which), 7).as_deref(), Some(&which[..]));
        assert_eq!(expand_runs(&runs(&which), 6), None);
        assert_eq!(expand_runs(&[(0, u32::MAX), (0, u32::MAX)], 65_536), None);
        assert_eq!(expand_runs(&[(0, 0)], 4), None);
    }

    #[test]
    fn a_uniform_answer_does_not_grow_with_the_world() {
        let small = Gathered::from_parts([[7u8; 100]; 2]);
        let large = Gathered::from_parts(vec![[7u8; 100]; 4096]);
        assert_eq!(small.payload_bytes(), large.payload_bytes());
    }
}
