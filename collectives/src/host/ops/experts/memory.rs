//! Where the parts of a buffer's memory and of a handle lie.

#![allow(unsafe_code)] // arrays by address

use symmpool_allocator::HeapLayout;

use crate::Place;
use crate::call::experts::{ExpertCall, ExpertsWork, HandleParts, RegionParts};
use crate::host::layout::numbers::Numbers;

/// The symmetric memory of a buffer, in the slots of the ranks of one host.
pub(crate) struct SymmetricRegion {
    pub(crate) parts: RegionParts,
    /// Where it begins in every rank's slot.
    offset: u64,
    layout: HeapLayout,
}

impl SymmetricRegion {
    /// The memory of a buffer of a group of `world` ranks.
    pub(crate) fn of(call: &ExpertCall, world: u32, layout: HeapLayout) -> Self {
        // `ExpertBuffer` declines calls of memory that is in no window.
        let Place::Window(offset) = call.region else { unreachable!("declined before") };
        Self { parts: RegionParts::new(&call.shape, world), offset, layout }
    }

    /// The address of item `index` of a part, whose items have `size` bytes, in a slot.
    pub(crate) fn at(&self, slot: u32, part: u64, index: usize, size: usize) -> *mut u8 {
        let offset = self.offset + part + (index * size) as u64;
        (self.layout.base + u64::from(slot) * self.layout.stride + offset) as *mut u8
    }

    /// `count` numbers of a part in a slot, the `index`-th of such arrays.
    ///
    /// # Safety
    ///
    /// They lie within the part, and are readable, and writable where they are set, while the value is used.
    pub(crate) unsafe fn numbers<T: Copy>(
        &self,
        slot: u32,
        part: u64,
        index: usize,
        count: usize,
    ) -> Numbers<T> {
        let at = self.at(slot, part, index, count * size_of::<T>());
        // SAFETY: the caller promised that the numbers lie within the part and are there while the value is used.
        // Parts, and the arrays in front within one, are multiples of the size of a number, so they are aligned.
        unsafe { Numbers::new(at as u64, count) }
    }
}

/// The weights that the caller gave, if it gave any.
///
/// # Safety
///
/// They are readable, `[tokens, top_k]`.
pub(crate) unsafe fn given_weights(work: &ExpertsWork) -> Option<Numbers<f32>> {
    let count = work.tokens as usize * work.top_k as usize;
    // SAFETY: the caller promised that weights, if there are any, are readable for the tokens.
    (work.weights != 0).then(|| unsafe { Numbers::new(work.weights, count) })
}

/// The parts of a handle.
pub(crate) struct RoutingHandle {
    pub(crate) head: Numbers<i32>,
    pub(crate) source_offsets: Numbers<i32>,
    pub(crate) bases: Numbers<i32>,
    pub(crate) source_tokens: Numbers<i32>,
    pub(crate) expert_counts: Numbers<i32>,
    pub(crate) expert_offsets: Numbers<i32>,
    pub(crate) positions: Numbers<i32>,
    pub(crate) places: Numbers<i32>,
    pub(crate) weights: Numbers<f32>,
    pub(crate) tokens: Numbers<i32>,
}

impl RoutingHandle {
    /// Where the numbers of the head are: rows received, tokens, rows by expert, how rows lie.
    pub(crate) const RECEIVED: usize = 0;
    pub(crate) const TOKENS: usize = 1;
    pub(crate) const BY_EXPERT: usize = 2;
    pub(crate) const LAYOUT: usize = 3;

    /// # Safety
    ///
    /// While the value is used, the parts of the handle are readable and writable.
    pub(crate) unsafe fn new(work: &ExpertsWork, world: u32) -> Self {
        let (ranks, local) = (world as usize, (work.experts / world) as usize);
        let (capacity, top_k) = (work.capacity as usize, work.top_k as usize);
        // SAFETY: the caller promised that the parts of the handle are readable and writable; these are the lengths
        // of `HandleParts`.
        let numbers = |at: u64, count: usize| unsafe { Numbers::new(at, count) };
        Self {
            head: numbers(work.head, 16),
            source_offsets: numbers(work.source_offsets, ranks + 1),
            bases: numbers(work.bases, ranks),
            source_tokens: numbers(work.source_tokens, ranks),
            expert_counts: numbers(work.expert_counts, local),
            expert_offsets: numbers(work.expert_offsets, local + 1),
            positions: numbers(work.positions, work.max_tokens as usize * ranks),
            places: numbers(work.places, capacity * top_k),
            // SAFETY: the caller promised that the parts of the handle are readable and writable; this is the length
            // of `HandleParts`.
            weights: unsafe { Numbers::new(work.kept_weights, capacity * top_k) },
            tokens: numbers(work.kept_tokens, capacity),
        }
    }

    /// How many rows were received.
    pub(crate) fn received(&self, capacity: u64) -> usize {
        (self.head.get(Self::RECEIVED).max(0) as usize).min(capacity as usize)
    }

    /// Why a call cannot use the handle, if it cannot. `rows` is how many rows a combine's input has,
    /// in either layout.
    ///
    /// A handle is the caller's memory, which a program may write to. Calls that pass this check read it again, and
    /// check what is an index once more.
    pub(crate) fn refusal(
        &self,
        work: &ExpertsWork,
        (me, world): (usize, usize),
        by_expert: bool,
        rows: u64,
    ) -> Option<String> {
        let number = |what: &str, at: usize, found: i32| {
            Some(format!(
                "the handle was written to since its dispatch: its {what} {at} is {found}; pass one as dispatch gave it"
            ))
        };
        let layout = self.head.get(Self::LAYOUT);
        let other = layout == HandleParts::layout_word(!by_expert);
        if layout != HandleParts::layout_word(by_expert) && !(other && work.any_layout != 0) {
            return Some(if other {
                let (call, made) = if by_expert { ("expert", "rank") } else { ("rank", "expert") };
                format!("layout {call:?} with a handle of layout {made:?}")
            } else {
                "the handle is none that a dispatch has written".to_owned()
            });
        }
        let tokens = self.head.get(Self::TOKENS);
        if i64::from(tokens) != i64::from(work.tokens) {
            return Some(format!(
                "{} tokens with a handle of {tokens}: pass the handle of the dispatch of the same tokens",
                work.tokens
            ));
        }
        let received = self.head.get(Self::RECEIVED);
        if received < 0 || received as u64 > work.capacity {
            return number("number of received rows,", 0, received);
        }
        if !by_expert && received as u64 > rows {
            return Some(format!("{rows} rows, where the handle's dispatch received {received}"));
        }
        let mut before = 0;
        for rank in 0..=world {
            let begin = self.source_offsets.get(rank);
            let last = rank == world && begin != received;
            let many = i64::from(begin) - i64::from(before) > i64::from(work.max_tokens);
            if begin < before || begin > received || last || many || (rank == 0 && begin != 0) {
                return number("source offset", rank, begin);
            }
            before = begin;
        }
        let own = self.source_offsets.get(me + 1) - self.source_offsets.get(me);
        for at in 0..work.tokens as usize * world {
            let (rank, position) = (at % world, self.positions.get(at));
            let fits = self.row_at(rank, position, work.capacity).is_some()
                && (position as u64) < u64::from(work.tokens)
                && (rank != me || position < own);
            if position != -1 && !fits {
                return number("position", at, position);
            }
        }
        if by_expert {
            for at in 0..received as usize * work.top_k as usize {
                let place = self.places.get(at);
                if place < -1 || place >= 0 && place as u64 >= rows {
                    return number("place", at, place);
                }
            }
        }
        None
    }

    /// The row, among those that a rank receives, of the one at `position` among those that this rank sends there.
    pub(crate) fn row_at(&self, rank: usize, position: i32, capacity: u64) -> Option<usize> {
        let position = usize::try_from(position).ok()?;
        let base = usize::try_from(self.bases.get(rank)).ok()?;
        base.checked_add(position).filter(|at| (*at as u64) < capacity)
    }
}
