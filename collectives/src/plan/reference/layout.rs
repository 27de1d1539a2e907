//! How the elements of a call are divided into chunks.

use super::super::{CheckedPlan, Collective, Plan};

/// Chunks begin at multiples of so many bytes, unless all of them must be equal.
const LINE: usize = 64;

/// How the elements of a part are divided into chunks: each has as many, but those at the end of a part, which may have
/// fewer or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkLayout {
    count: usize,
    each: usize,
    of_part: usize,
}

impl ChunkLayout {
    /// Equal chunks, if `count` elements divide into them.
    pub fn equal(plan: &Plan, count: usize) -> Option<Self> {
        let of_part = plan.chunks_of_part().max(1) as usize;
        count.is_multiple_of(of_part).then_some(Self { count, each: count / of_part, of_part })
    }

    /// Chunks that begin at multiples of 64 bytes, for elements of `size` bytes.
    pub fn lines(plan: &Plan, count: usize, size: usize) -> Self {
        let of_part = plan.chunks_of_part().max(1) as usize;
        let each = count.div_ceil(of_part).next_multiple_of((LINE / size).max(1));
        Self { count, each, of_part }
    }

    /// The layout of calls of a checked plan; `None` where a call of so many elements is refused.
    pub fn of_call(checked: &CheckedPlan, count: usize, size: usize) -> Option<Self> {
        let plan = checked.plan();
        let is_custom = matches!(plan.collective, Collective::Custom { .. });
        if checked.needs_equal_chunks || is_custom {
            return Self::equal(plan, count);
        }
        Some(Self::lines(plan, count, size))
    }

    /// Elements of a part.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Elements of the longest chunk.
    pub fn each(&self) -> usize {
        self.each
    }

    /// Elements of a chunk of the input or output.
    pub fn length(&self, index: u32) -> usize {
        let begin = (index as usize % self.of_part) * self.each;
        self.count.saturating_sub(begin).min(self.each)
    }

    /// Elements before a chunk of the input or output.
    pub fn start(&self, index: u32) -> usize {
        let (part, index_in_part) = (index as usize / self.of_part, index as usize % self.of_part);
        part * self.count + (index_in_part * self.each).min(self.count)
    }

    /// Elements of so many chunks.
    pub fn total(&self, chunks: u32) -> usize {
        self.start(chunks)
    }
}
