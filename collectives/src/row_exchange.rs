//! Row exchanges: all-to-alls of rows of which each has a destination, and the exchange back.
//!
//! First, every rank packs its rows in the order of their destinations (a stable order, so it is the same in every
//! run), and two all-to-alls with splits in memory move the rows and their indices. On the way back, a third
//! all-to-all moves the rows to that order again, and each is unpacked to its original place. Both ways use blocks
//! that were allocated before, so that calls allocate nothing (S8).
//!
//! This file has what both engines share: shapes, where things lie in those blocks, and the arguments of a step.
//! `host/row_exchange.rs` has the steps on the CPU; `cuda/row_exchange.rs` runs them as kernels.

use symmpool_allocator::{Error, Result};

pub(crate) use crate::host::BadRow;

use crate::parts::Parts;
use crate::{DType, Place};

/// The shape of the rows that a row exchange moves. It is the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShape {
    /// The most rows that a rank may send in a call; less than 2^31.
    pub rows: usize,
    /// Elements in a row, 1 or more; a row has at most 2 GiB.
    pub row: usize,
    /// The type of the elements.
    pub dtype: DType,
}

/// The most blocks of a kernel; each has counters of its own.
pub(crate) const MOST_BLOCKS: u32 = 1024;

impl RowShape {
    /// Bytes of a row.
    pub(crate) fn row_bytes(&self) -> u64 {
        self.row as u64 * self.dtype.size() as u64
    }

    /// Returns this shape, or an error if it is not possible.
    pub(crate) fn checked(self, rank: u32) -> Result<Self> {
        let Self { rows, row, dtype } = self;
        let bytes = (row as u64).checked_mul(dtype.size() as u64);
        if rows <= i32::MAX as usize && bytes.is_some_and(|bytes| (1..=1 << 31).contains(&bytes)) {
            return Ok(self);
        }
        Err(Error::invalid_argument(format!(
            "a row exchange on rank {rank} of up to {rows} rows of {row} {}: pass less than 2^31 rows, \
             of 1 byte to 2 GiB each",
            dtype.name()
        )))
    }
}

/// Where things lie in the block that an exchange works in: offsets in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scratch {
    packed: u64,
    order: u64,
    splits: u64,
    index_splits: u64,
    returned: u64,
    returned_at: u64,
    tallies: u64,
    pub(crate) bytes: u64,
}

impl Scratch {
    /// The layout for fewer than 2^16 ranks, for which nothing overflows.
    pub(crate) fn new(shape: &RowShape, world: u32) -> Self {
        let (rows, ranks) = (shape.rows as u64, u64::from(world));
        let mut parts = Parts(0);
        let packed = parts.take(rows, shape.row_bytes());
        let order = parts.take(rows, 4);
        let [splits, index_splits, returned, returned_at] = [(); 4].map(|()| parts.take(ranks, 8));
        let tallies = parts.take(u64::from(MOST_BLOCKS) * (ranks + 1), 4);
        let bytes = parts.0;
        Self { packed, order, splits, index_splits, returned, returned_at, tallies, bytes }
    }
}

/// Where things lie in a layout's block: offsets in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayoutParts {
    pub(crate) counts: u64,
    pub(crate) offsets: u64,
    pub(crate) state: u64,
    pub(crate) source_index: u64,
    pub(crate) position: u64,
    pub(crate) bytes: u64,
}

impl LayoutParts {
    pub(crate) fn new(shape: &RowShape, world: u32) -> Self {
        let (rows, ranks) = (shape.rows as u64, u64::from(world));
        let mut parts = Parts(0);
        let [counts, offsets] = [(); 2].map(|()| parts.take(ranks, 8));
        let state = parts.take(ranks + 1, 8);
        let source_index = parts.take(Self::indices(shape, world) as u64, 4);
        let position = parts.take(rows, 4);
        Self { counts, offsets, state, source_index, position, bytes: parts.0 }
    }

    /// Room for the indices of all rows that can arrive. They are small, so there is always room for all.
    pub(crate) fn indices(shape: &RowShape, world: u32) -> usize {
        shape.rows * world as usize
    }
}

/// The arguments of the steps; addresses are those of the processor that runs them. This is `RowWork` in
/// `row_exchange/row_exchange.cu`, which documents the fields.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowWork {
    pub(crate) destinations: u64,
    pub(crate) input: u64,
    pub(crate) output: u64,
    pub(crate) packed: u64,
    pub(crate) order: u64,
    pub(crate) splits: u64,
    pub(crate) index_splits: u64,
    pub(crate) returned: u64,
    pub(crate) returned_at: u64,
    pub(crate) tallies: u64,
    pub(crate) counts: u64,
    pub(crate) offsets: u64,
    pub(crate) position: u64,
    pub(crate) state: u64,
    /// The number of rows that have destinations; on the way back, the number of rows of the output.
    pub(crate) given: u64,
    pub(crate) rows: u64,
    pub(crate) row_bytes: u64,
    pub(crate) capacity: u64,
    pub(crate) wide: u32,
    pub(crate) unused: u32,
}

impl RowWork {
    /// Arguments with the addresses of the exchange's and the layout's memory only.
    pub(crate) fn new(shape: &RowShape, world: u32, scratch_at: u64, layout_at: u64) -> Self {
        let (scratch, layout) = (Scratch::new(shape, world), LayoutParts::new(shape, world));
        Self {
            destinations: 0,
            input: 0,
            output: 0,
            packed: scratch_at + scratch.packed,
            order: scratch_at + scratch.order,
            splits: scratch_at + scratch.splits,
            index_splits: scratch_at + scratch.index_splits,
            returned: scratch_at + scratch.returned,
            returned_at: scratch_at + scratch.returned_at,
            tallies: scratch_at + scratch.tallies,
            counts: layout_at + layout.counts,
            offsets: layout_at + layout.offsets,
            position: layout_at + layout.position,
            state: layout_at + layout.state,
            given: 0,
            rows: shape.rows as u64,
            row_bytes: shape.row_bytes(),
            capacity: 0,
            wide: 0,
            unused: 0,
        }
    }
}

/// Where the data of an exchange's all-to-alls lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowPlaces {
    pub(crate) packed: Place,
    /// The caller's rows: the output on the way there, the input on the way back.
    pub(crate) rows: Place,
    pub(crate) order: Place,
    pub(crate) source_index: Place,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::ALIGN;

    #[test]
    fn parts_lie_apart_and_sizes_are_those_that_kernels_are_compiled_with() {
        let row = crate::jit::sources::ROW_EXCHANGE.variants[0];
        let stated = row.iter().find(|(axis, _)| *axis == "ROW_WORK_BYTES").expect("the axis");
        assert_eq!(stated.1[0].parse(), Ok(size_of::<RowWork>()));
        for (rows, row, world) in [(0, 1, 1), (1, 1, 2), (1000, 7, 3), (i32::MAX as usize, 4, 8)] {
            let shape = RowShape { rows, row, dtype: DType::Bf16 }.checked(0).expect("sound");
            let ranks = u64::from(world);
            let all = rows as u64;
            let of = Scratch::new(&shape, world);
            let numbers = 8 * ranks;
            let parts = [
                (of.packed, all * 2 * row as u64),
                (of.order, all * 4),
                (of.splits, numbers),
                (of.index_splits, numbers),
                (of.returned, numbers),
                (of.returned_at, numbers),
                (of.tallies, 4 * u64::from(MOST_BLOCKS) * (ranks + 1)),
                (of.bytes, 0),
            ];
            let layout = LayoutParts::new(&shape, world);
            let others = [
                (layout.counts, numbers),
                (layout.offsets, numbers),
                (layout.state, numbers + 8),
                (layout.source_index, all * 4 * ranks),
                (layout.position, all * 4),
                (layout.bytes, 0),
            ];
            for pair in parts.windows(2).chain(others.windows(2)) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
                assert!(pair[0].0.is_multiple_of(ALIGN));
            }
        }
        for (rows, row) in [(1 << 31, 1), (1, 0), (1, usize::MAX), (1, (1 << 30) + 1)] {
            let error =
                RowShape { rows, row, dtype: DType::Bf16 }.checked(2).expect_err("nonsense");
            assert!(error.is_invalid_argument() && error.to_string().contains("rank 2"), "{error}");
        }
    }
}
