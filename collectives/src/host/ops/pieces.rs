//! How elements are divided: into pieces that go through scratch one after the other, and into a share for each
//! rank.

use std::ops::Range;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Pieces of `count` elements that go through scratch in turn: all at once if `room` bytes hold
/// them, else groups of the room alternate.
#[derive(Clone, Copy)]
pub(crate) struct Pieces {
    count: usize,
    each: usize,
    half: usize,
}

impl Pieces {
    /// `room` is a multiple of 16.
    pub(crate) fn new(count: usize, size: usize, room: usize) -> Self {
        let half = room / 2;
        Self { count, each: if count * size <= room { count } else { half / size }, half }
    }

    /// The number of pieces; 0 if there are no elements.
    pub(crate) fn len(&self) -> usize {
        if self.count == 0 { 0 } else { self.count.div_ceil(self.each) }
    }

    /// The elements of piece `index`; an empty range past the last piece.
    pub(crate) fn range(&self, index: usize) -> Range<usize> {
        let start = index.saturating_mul(self.each).min(self.count);
        start..start.saturating_add(self.each).min(self.count)
    }

    /// Where in scratch piece `index` lies, in bytes.
    pub(crate) fn offset(&self, index: usize) -> usize {
        (index & 1) * self.half
    }
}

/// The share of `count` elements of `size` bytes that `rank` of `world` reduces. Shares are whole cache lines, so
/// that no two ranks write to the same line.
pub(crate) fn share(count: usize, size: usize, rank: u32, world: u32) -> Range<usize> {
    let each = count.div_ceil(world as usize).next_multiple_of((LINE / size).max(1));
    let start = (rank as usize).saturating_mul(each).min(count);
    start..start.saturating_add(each).min(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_and_shares_cover_everything_once() {
        for count in [0, 1, 63, 64, 65, 1000, 4096, 4097] {
            for size in [1, 2, 4, 8] {
                let pieces = Pieces::new(count, size, 1024);
                let mut next = 0;
                for i in 0..pieces.len() {
                    let range = pieces.range(i);
                    assert_eq!(range.start, next);
                    assert!(!range.is_empty());
                    assert!(pieces.offset(i) + range.len() * size <= 1024);
                    next = range.end;
                }
                assert_eq!(next, count);
                assert!(pieces.range(pieces.len()).is_empty());
                for world in 1..6 {
                    let mut next = 0;
                    for rank in 0..world {
                        let range = share(count, size, rank, world);
                        assert_eq!(range.start, next);
                        let at_line = (range.start * size).is_multiple_of(64);
                        assert!(at_line || range.is_empty(), "{range:?} of {size} bytes each");
                        next = range.end;
                    }
                    assert_eq!(next, count);
                }
            }
        }
    }
}
