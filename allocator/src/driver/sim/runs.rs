//! Which ranges of a reservation are mapped, in little memory.
//!
//! A rank of a large group maps one segment for each peer, all of one size and one stride apart. The 16.7
//! million mappings of a simulated group of 4096 ranks would take half a gigabyte if each were kept by
//! itself. So equally spaced mappings are kept as one *run*, whatever their number. Mappings that fit no
//! run are kept in a tree. The number of runs is bounded, so a call takes `O(log n)` for any pattern.

use std::collections::BTreeMap;

use super::super::mappings::Ranges;

/// Most runs kept; a pattern that needs more goes to the tree.
const MAX_RUNS: usize = 64;

/// `count >= 2` mappings of `bytes` each, at `start`, `start + stride`, …; `stride >= bytes`.
#[derive(Clone, Copy, Debug)]
struct MappingRun {
    start: u64,
    bytes: u64,
    stride: u64,
    count: u64,
}

impl MappingRun {
    /// The offset of the mapping after the last.
    fn next(&self) -> u64 {
        self.start + self.stride * self.count
    }

    /// Where the last mapping of the run begins that has a byte in `[offset, end)`, if any has.
    fn overlapping(&self, offset: u64, end: u64) -> Option<u64> {
        // The last mapping that begins before `end` reaches furthest of those that do.
        let k = (end.checked_sub(self.start + 1)? / self.stride).min(self.count - 1);
        let at = self.start + k * self.stride;
        (at + self.bytes > offset).then_some(at)
    }

    /// Which mapping of the run is exactly `[offset, offset + bytes)`.
    fn find(&self, offset: u64, bytes: u64) -> Option<u64> {
        let from_start = offset.checked_sub(self.start)?;
        let k = from_start / self.stride;
        (self.bytes == bytes && from_start.is_multiple_of(self.stride) && k < self.count)
            .then_some(k)
    }

    /// Mappings `from..to` of the run.
    fn part(&self, from: u64, to: u64) -> Self {
        Self { start: self.start + from * self.stride, count: to - from, ..*self }
    }
}

/// A set of ranges that do not overlap.
#[derive(Debug, Default)]
pub(super) struct Runs {
    runs: Vec<MappingRun>,
    singles: BTreeMap<u64, u64>,
    /// The last single, which with its successor may begin a run.
    last: Option<u64>,
    count: u64,
}

impl Ranges for Runs {
    fn len(&self) -> u64 {
        self.count
    }

    fn overlapping(&self, offset: u64, end: u64) -> Option<(u64, u64)> {
        let before = self.singles.range(..end).next_back().map(|(&at, &bytes)| (at, bytes));
        before.filter(|&(at, bytes)| at + bytes > offset).or_else(|| {
            self.runs.iter().find_map(|run| Some((run.overlapping(offset, end)?, run.bytes)))
        })
    }

    fn contains(&self, offset: u64, bytes: u64) -> bool {
        self.singles.get(&offset) == Some(&bytes)
            || self.runs.iter().any(|run| run.find(offset, bytes).is_some())
    }

    fn insert(&mut self, offset: u64, bytes: u64) {
        debug_assert_eq!(self.overlapping(offset, offset + bytes), None);
        self.count += 1;
        if let Some(run) = self.runs.iter_mut().find(|r| r.bytes == bytes && r.next() == offset) {
            run.count += 1;
            return;
        }
        if self.runs.len() < MAX_RUNS
            && let Some(start) = self.last.filter(|&start| start < offset)
            && self.singles.get(&start) == Some(&bytes)
        {
            self.singles.remove(&start);
            self.last = None;
            self.runs.push(MappingRun { start, bytes, stride: offset - start, count: 2 });
            return;
        }
        self.singles.insert(offset, bytes);
        self.last = Some(offset);
    }

    fn remove(&mut self, offset: u64, bytes: u64) {
        debug_assert!(self.contains(offset, bytes));
        self.count -= 1;
        if self.singles.remove(&offset).is_some() {
            return;
        }
        let found =
            self.runs.iter().enumerate().find_map(|(i, r)| Some((i, r.find(offset, bytes)?)));
        let Some((i, k)) = found else { return };
        let run = self.runs.swap_remove(i);
        let (low, high) = (run.part(0, k), run.part(k + 1, run.count));
        // The longer part has the better claim to a place among the runs.
        if low.count >= high.count {
            self.keep(low);
            self.keep(high);
        } else {
            self.keep(high);
            self.keep(low);
        }
    }
}

impl Runs {
    /// Puts back a part of a run that was split.
    fn keep(&mut self, part: MappingRun) {
        if part.count >= 2 && self.runs.len() < MAX_RUNS {
            self.runs.push(part);
        } else {
            let singles = (0..part.count).map(|k| (part.start + k * part.stride, part.bytes));
            self.singles.extend(singles);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_mapping_per_peer_takes_one_run_per_segment() {
        let mut runs = Runs::default();
        let (stride, me) = (1 << 40, 17);
        for segment in 0..3 {
            let offset = segment * 64;
            runs.insert(me * stride + offset, 64);
            for peer in (0..4096).filter(|&peer| peer != me) {
                let at = peer * stride + offset;
                runs.insert(at, 64);
                assert_eq!(runs.overlapping(at + 63, at + 65), Some((at, 64)));
            }
        }
        assert_eq!(runs.len(), 3 * 4096);
        assert!(runs.runs.len() <= 9 && runs.singles.len() <= 9, "{runs:?}");
        for peer in 0..4096 {
            assert!(runs.contains(peer * stride + 64, 64));
            runs.remove(peer * stride + 64, 64);
            assert!(!runs.contains(peer * stride + 64, 64));
        }
        assert_eq!(runs.len(), 2 * 4096);
    }

    proptest! {
        /// Small offsets, so that equal spacing, overlaps and splits are frequent.
        #[test]
        fn behaves_like_a_plain_set_of_ranges(
            steps in prop::collection::vec((0u8..4, 0u64..96, 1u64..5, 1u64..9, 1u64..24), 1..80)
        ) {
            let mut runs = Runs::default();
            let mut model: BTreeMap<u64, u64> = BTreeMap::new();
            for (kind, offset, bytes, stride, repeats) in steps {
                for k in 0..repeats {
                    let offset = offset + k * stride;
                    if kind == 0 {
                        let there = model.get(&offset) == Some(&bytes);
                        prop_assert_eq!(runs.contains(offset, bytes), there);
                        if there {
                            runs.remove(offset, bytes);
                            model.remove(&offset);
                        }
                    } else {
                        let apart = |o: u64, b: u64| o + b <= offset || offset + bytes <= o;
                        let free = model.iter().all(|(&o, &b)| apart(o, b));
                        match runs.overlapping(offset, offset + bytes) {
                            None => {
                                prop_assert!(free);
                                runs.insert(offset, bytes);
                                model.insert(offset, bytes);
                            }
                            Some((o, b)) => {
                                prop_assert_eq!(model.get(&o), Some(&b));
                                prop_assert!(!apart(o, b));
                            }
                        }
                    }
                    prop_assert_eq!(runs.len(), model.len() as u64);
                    prop_assert!(runs.runs.len() <= MAX_RUNS);
                }
            }
            for (offset, bytes) in model {
                prop_assert!(runs.contains(offset, bytes));
                runs.remove(offset, bytes);
            }
            prop_assert_eq!(runs.len(), 0);
        }
    }
}
