//! Order of accesses: vector clocks of strands, and the accesses of chunks that they are compared with.
//!
//! A *strand* is what runs in order: a rank's operations outside of block groups, or those of one group. Each has a
//! component of the clock, in which it counts its operations. A clock says of every strand how many of its operations
//! come before. Two accesses are ordered if the clock at the second covers the first.

use std::collections::BTreeMap;

use super::super::model::Cell;

/// How many operations of each strand come before.
#[derive(Clone, Debug, Default)]
pub(super) struct Clock(Vec<u32>);

impl Clock {
    pub(super) fn new(strands: usize) -> Self {
        Self(vec![0; strands])
    }

    /// Counts an operation of `strand`, and returns when it is.
    pub(super) fn tick(&mut self, strand: usize) -> Moment {
        self.0[strand] += 1;
        Moment { strand, count: self.0[strand] }
    }

    /// Adds what comes before `other`.
    pub(super) fn join(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// Whether `moment` comes before this.
    pub(super) fn covers(&self, moment: Moment) -> bool {
        self.0[moment.strand] >= moment.count
    }
}

/// One operation of a strand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moment {
    pub(super) strand: usize,
    pub(super) count: u32,
}

/// An access, and which operation it is of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    pub(super) moment: Moment,
    pub(super) rank: u32,
    /// The index of the operation in that rank's program.
    pub(super) index: usize,
    pub(super) writes: bool,
}

/// The accesses of every chunk with which a later one may conflict: the last write, and each strand's last read since.
///
/// That is enough: what is ordered behind the last write is ordered behind all accesses before it, which were
/// compared with it. What is ordered behind a strand's last read is ordered behind that strand's former ones.
#[derive(Default)]
pub(super) struct AccessHistory {
    cells: BTreeMap<Cell, Accesses>,
}

#[derive(Default)]
struct Accesses {
    write: Option<Access>,
    /// Last reads by strand.
    reads: BTreeMap<usize, Access>,
}

impl AccessHistory {
    /// Adds an access. Returns the access that it conflicts with, if there is one that `clock`, the clock of the new
    /// one, does not cover.
    pub(super) fn add(&mut self, cell: Cell, access: Access, clock: &Clock) -> Option<Access> {
        let Accesses { write, reads } = self.cells.entry(cell).or_default();
        let unordered = |other: &&Access| !clock.covers(other.moment);
        let found = write.iter().find(unordered);
        let found = found.or_else(|| reads.values().filter(|_| access.writes).find(unordered));
        if let Some(other) = found {
            return Some(*other);
        }
        if access.writes {
            *write = Some(access);
            reads.clear();
        } else {
            reads.insert(access.moment.strand, access);
        }
        None
    }

    /// All accesses that are kept, in the order of chunks.
    pub(super) fn all(&self) -> impl Iterator<Item = (Cell, &Access)> {
        self.cells.iter().flat_map(|(cell, Accesses { write, reads })| {
            write.iter().chain(reads.values()).map(|each| (*cell, each))
        })
    }
}
