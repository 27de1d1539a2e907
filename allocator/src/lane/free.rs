//! The free blocks of one stream, in heap order (rule D2).
//!
//! An allocation takes the lowest-lying block that fits. This is first fit; on real traces it packs
//! tighter than best fit once free segments may move (docs/decisions/first-fit.md says why). To find the
//! block quickly, the list is cut into chunks of up to [`CHUNK`] blocks, and the size of each chunk's
//! largest block is kept in one flat array. A search scans that array, then one chunk, both with vector
//! instructions. Shrinking or growing a block in place touches one chunk.

/// Blocks in a chunk. A full chunk is split in half, so most hold 32 to 64.
const CHUNK: usize = 64;

/// A free block: where it begins, its length (both in units), and its id in the block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Free {
    pub(super) offset: u32,
    pub(super) size: u32,
    pub(super) id: u32,
}

/// Sizes and offsets are kept as signed numbers, because the oldest vector instructions compare only
/// those. Offsets stay below 2^31; sizes may reach 2^31, so one less than the size is kept (`last`).
#[derive(Clone, Debug)]
struct Chunk {
    len: usize,
    offsets: [i32; CHUNK],
    last: [i32; CHUNK],
    ids: [u32; CHUNK],
}

/// Value of unused entries: a size of 0, and an offset that no other exceeds.
const UNUSED: Free = Free { offset: i32::MAX as u32, size: 0, id: 0 };

/// A size as it is kept.
fn last_of(size: u32) -> i32 {
    size.wrapping_sub(1) as i32
}

impl Chunk {
    fn new() -> Box<Self> {
        let (offset, last) = (UNUSED.offset as i32, last_of(UNUSED.size));
        Box::new(Self { len: 0, offsets: [offset; CHUNK], last: [last; CHUNK], ids: [0; CHUNK] })
    }

    /// The largest size, in the form in which sizes are kept. Scans the whole array, unused entries too.
    fn max(&self) -> i32 {
        self.last.iter().fold(last_of(UNUSED.size), |max, &last| max.max(last))
    }

    /// How many blocks begin below `offset`: also the index of the block that begins there.
    fn rank(&self, offset: u32) -> usize {
        let offset = offset as i32;
        self.offsets.iter().map(|&at| i32::from(at < offset)).sum::<i32>() as usize
    }

    fn get(&self, at: usize) -> Free {
        let size = (self.last[at] as u32).wrapping_add(1);
        Free { offset: self.offsets[at] as u32, size, id: self.ids[at] }
    }

    fn set(&mut self, at: usize, block: Free) {
        self.offsets[at] = block.offset as i32;
        self.last[at] = last_of(block.size);
        self.ids[at] = block.id;
    }

    fn insert(&mut self, at: usize, block: Free) {
        self.offsets.copy_within(at..self.len, at + 1);
        self.last.copy_within(at..self.len, at + 1);
        self.ids.copy_within(at..self.len, at + 1);
        self.set(at, block);
        self.len += 1;
    }

    fn remove(&mut self, at: usize) {
        self.offsets.copy_within(at + 1..self.len, at);
        self.last.copy_within(at + 1..self.len, at);
        self.ids.copy_within(at + 1..self.len, at);
        self.len -= 1;
        self.set(self.len, UNUSED);
    }

    fn split(&mut self) -> Box<Self> {
        let mut upper = Self::new();
        for at in CHUNK / 2..CHUNK {
            upper.set(at - CHUNK / 2, self.get(at));
            self.set(at, UNUSED);
        }
        upper.len = CHUNK / 2;
        self.len = CHUNK / 2;
        upper
    }
}

/// Free blocks of one stream.
#[derive(Clone, Debug, Default)]
pub(super) struct FreeList {
    /// The lowest offset that belongs into each chunk; ascending, the first is 0.
    first: Vec<u32>,
    /// The size of each chunk's largest block, in the form in which sizes are kept.
    max: Vec<i32>,
    /// Boxed, so that inserting a chunk moves pointers, not the chunks behind it.
    #[allow(clippy::vec_box)]
    chunks: Vec<Box<Chunk>>,
}

/// A place in the list, valid until the list changes.
#[derive(Clone, Copy, Debug)]
pub(super) struct FreePosition {
    chunk: usize,
    at: usize,
}

/// A guess at the chunk to which an offset belongs: its index when the block was taken.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Near(u16);

impl FreePosition {
    /// The guess to keep with a block that is taken from here.
    pub(super) fn near(self) -> Near {
        Near(u16::try_from(self.chunk).unwrap_or(0))
    }
}

impl FreeList {
    /// The lowest-lying block of at least `size` units in which a piece of `size` units can begin
    /// at a multiple of `align` units, a power of two, and where it would begin.
    pub(super) fn first_fit(&self, size: u32, align: u32) -> Option<(FreePosition, Free, u32)> {
        let (mut from, last) = (0, last_of(size));
        while let Some(chunk) = position_at_least(&self.max, from, last) {
            let blocks = &self.chunks[chunk];
            let mut at = 0;
            while let Some(found) = position_at_least(&blocks.last, at, last) {
                let free = blocks.get(found);
                // Offsets stay below 2^31 units, so rounding up cannot overflow.
                let start = (free.offset + (align - 1)) & !(align - 1);
                if start - free.offset <= free.size - size {
                    return Some((FreePosition { chunk, at: found }, free, start));
                }
                at = found + 1;
            }
            from = chunk + 1;
        }
        None
    }

    /// Adds a block.
    pub(super) fn insert(&mut self, block: Free, near: Near) {
        if self.chunks.is_empty() {
            self.first.push(0);
            self.max.push(last_of(UNUSED.size));
            self.chunks.push(Chunk::new());
        }
        let mut chunk = self.chunk_of(block.offset, near);
        if self.chunks[chunk].len == CHUNK {
            let upper = self.chunks[chunk].split();
            self.max[chunk] = self.chunks[chunk].max();
            self.first.insert(chunk + 1, upper.offsets[0] as u32);
            self.max.insert(chunk + 1, upper.max());
            self.chunks.insert(chunk + 1, upper);
            chunk += usize::from(self.first[chunk + 1] <= block.offset);
        }
        let at = self.chunks[chunk].rank(block.offset);
        self.chunks[chunk].insert(at, block);
        self.max[chunk] = self.max[chunk].max(last_of(block.size));
    }

    /// Where the block that begins at `offset` is. The caller knows it is there.
    pub(super) fn place_of(&self, offset: u32, near: Near) -> FreePosition {
        let chunk = self.chunk_of(offset, near);
        let at = self.chunks[chunk].rank(offset);
        debug_assert_eq!(self.chunks[chunk].offsets[at] as u32, offset, "the block is in the list");
        FreePosition { chunk, at }
    }

    /// The place of the block after the one at `place`. The caller knows that there is one. Removing it
    /// leaves `place` valid.
    pub(super) fn after(&self, place: FreePosition) -> FreePosition {
        let FreePosition { chunk, at } = place;
        if at + 1 < self.chunks[chunk].len {
            FreePosition { chunk, at: at + 1 }
        } else {
            FreePosition { chunk: chunk + 1, at: 0 }
        }
    }

    /// Removes the block at `place`.
    pub(super) fn remove(&mut self, place: FreePosition) {
        let FreePosition { chunk, at } = place;
        let last = self.chunks[chunk].last[at];
        self.chunks[chunk].remove(at);
        if self.chunks[chunk].len == 0 && self.chunks.len() > 1 {
            self.first.remove(chunk);
            self.max.remove(chunk);
            self.chunks.remove(chunk);
            self.first[0] = 0;
        } else if last == self.max[chunk] {
            self.max[chunk] = self.chunks[chunk].max();
        }
    }

    /// Changes offset and size of the block at `place`. Its order among the others must not change.
    pub(super) fn resize(&mut self, place: FreePosition, offset: u32, size: u32) {
        let FreePosition { chunk, at } = place;
        if offset < self.first[chunk] {
            // The block grew downwards past the border of its chunk. Nothing else begins in between.
            self.first[chunk] = offset;
        } else if self.first.get(chunk + 1).is_some_and(|&next| next <= offset) {
            // The block had merged with blocks of the next chunk, and now begins past that border.
            self.first[chunk + 1] = self.chunks[chunk + 1].offsets[0] as u32;
        }
        let blocks = &mut self.chunks[chunk];
        let (old, last) = (blocks.last[at], last_of(size));
        blocks.offsets[at] = offset as i32;
        blocks.last[at] = last;
        if last >= self.max[chunk] {
            self.max[chunk] = last;
        } else if old == self.max[chunk] {
            self.max[chunk] = blocks.max();
        }
    }

    /// All blocks, lowest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = Free> + '_ {
        self.chunks.iter().flat_map(|chunk| (0..chunk.len).map(|at| chunk.get(at)))
    }

    /// The last chunk whose `first` is not above `offset`.
    fn chunk_of(&self, offset: u32, near: Near) -> usize {
        let near = usize::from(near.0);
        let begins = self.first.get(near).is_some_and(|&first| first <= offset);
        let ends = self.first.get(near + 1).is_none_or(|&next| offset < next);
        if begins && ends { near } else { self.search(offset) }
    }

    /// Halving stops early, because counting in a short stretch takes less time than the last steps of a
    /// binary search, each of which waits for the one before.
    fn search(&self, offset: u32) -> usize {
        let (mut low, mut len) = (0, self.first.len());
        while len > 128 {
            let half = len / 2;
            low += if self.first[low + half] <= offset { half } else { 0 };
            len -= half;
        }
        let below = |&first: &u32| i32::from(first as i32 <= offset as i32);
        low + self.first[low..low + len].iter().map(below).sum::<i32>() as usize - 1
    }
}

/// The first index from `from` on whose value is at least `wanted`. Compares eight values at a time,
/// which the compiler turns into vector comparisons. The index within the eight is found without a branch,
/// because it could not be predicted.
#[inline]
fn position_at_least(values: &[i32], from: usize, wanted: i32) -> Option<usize> {
    let mut base = from;
    let (groups, rest) = values[from..].as_chunks::<8>();
    for group in groups {
        if group.iter().fold(false, |any, &value| any | (value >= wanted)) {
            let bits = |mask, (at, &value): (usize, &i32)| mask | u32::from(value >= wanted) << at;
            let mask = group.iter().enumerate().fold(0, bits);
            return Some(base + mask.trailing_zeros() as usize);
        }
        base += 8;
    }
    rest.iter().position(|&value| value >= wanted).map(|at| base + at)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum FreeListOp {
        Insert { at: u32, size: u32 },
        Remove { nth: usize },
        ShrinkLow { nth: usize, by: u32 },
        GrowDown { nth: usize },
        SwallowNext { nth: usize },
        Find { size: u32, align: u32 },
    }

    fn op() -> impl Strategy<Value = FreeListOp> {
        prop_oneof![
            4 => (0u32..9000, 1u32..20).prop_map(|(at, size)| FreeListOp::Insert { at, size }),
            2 => any::<usize>().prop_map(|nth| FreeListOp::Remove { nth }),
            2 => (any::<usize>(), 1u32..30).prop_map(|(nth, by)| FreeListOp::ShrinkLow { nth, by }),
            1 => any::<usize>().prop_map(|nth| FreeListOp::GrowDown { nth }),
            1 => any::<usize>().prop_map(|nth| FreeListOp::SwallowNext { nth }),
            3 => (1u32..40, 0u32..5).prop_map(|(size, shift)| FreeListOp::Find { size, align: 1 << shift }),
        ]
    }

    /// The obvious implementation: a sorted vector.
    #[derive(Default)]
    struct NaiveFreeLists(Vec<Free>);

    impl NaiveFreeLists {
        fn first_fit(&self, size: u32, align: u32) -> Option<(Free, u32)> {
            self.0.iter().find_map(|&free| {
                let start = (free.offset + (align - 1)) & !(align - 1);
                (start + size <= free.offset + free.size).then_some((free, start))
            })
        }
    }

    proptest! {
        // D2: the lowest-lying block that fits, whatever the history of the list.
        #[test]
        fn agrees_with_a_sorted_vector(ops in prop::collection::vec(op(), 1..1200)) {
            let mut list = FreeList::default();
            let mut naive = NaiveFreeLists::default();
            for op in ops {
                let len = naive.0.len();
                match op {
                    FreeListOp::Insert { at, size } => {
                        let overlaps = naive
                            .0
                            .iter()
                            .any(|f| at < f.offset + f.size && f.offset < at + size);
                        if !overlaps {
                            let free = Free { offset: at, size, id: at };
                            list.insert(free, Near(at as u16 % 5));
                            naive.0.push(free);
                            naive.0.sort_by_key(|free| free.offset);
                        }
                    }
                    FreeListOp::Remove { nth } if len > 0 => {
                        let free = naive.0.remove(nth % len);
                        list.remove(list.place_of(free.offset, Near(1)));
                    }
                    FreeListOp::ShrinkLow { nth, by } if len > 0 => {
                        let free = &mut naive.0[nth % len];
                        if free.size > by {
                            let place = list.place_of(free.offset, Near(1));
                            free.offset += by;
                            free.size -= by;
                            list.resize(place, free.offset, free.size);
                        }
                    }
                    FreeListOp::GrowDown { nth } if len > 0 => {
                        let nth = nth % len;
                        let floor = if nth == 0 {
                            0
                        } else {
                            naive.0[nth - 1].offset + naive.0[nth - 1].size
                        };
                        let place = list.place_of(naive.0[nth].offset, Near(0));
                        let free = &mut naive.0[nth];
                        free.size += free.offset - floor;
                        free.offset = floor;
                        list.resize(place, free.offset, free.size);
                    }
                    FreeListOp::SwallowNext { nth } if nth % len.max(1) + 1 < len => {
                        let next = naive.0.remove(nth % len + 1);
                        let free = &mut naive.0[nth % len];
                        let place = list.place_of(free.offset, Near(1));
                        list.remove(list.after(place));
                        free.size = next.offset + next.size - free.offset;
                        list.resize(place, free.offset, free.size);
                    }
                    FreeListOp::Find { size, align } => {
                        let found = list.first_fit(size, align).map(|(_, free, at)| (free, at));
                        prop_assert_eq!(found, naive.first_fit(size, align));
                    }
                    _ => {}
                }
                prop_assert_eq!(list.iter().collect::<Vec<_>>(), naive.0.clone());
                for free in &naive.0 {
                    let FreePosition { chunk, at } = list.place_of(free.offset, Near(1));
                    prop_assert_eq!(list.chunks[chunk].get(at), *free);
                }
            }
        }
    }
}
