//! How many cases a part of a check has had, and how many of them were wrong.

use symmpool_allocator::Pool;

/// A rank's count.
#[derive(Debug)]
pub(crate) struct Tally {
    rank: u32,
    pub(crate) cases: u64,
    pub(crate) wrong: u64,
}

impl Tally {
    pub(crate) fn new(pool: &Pool) -> Self {
        Self { rank: pool.rank(), cases: 0, wrong: 0 }
    }

    /// Counts a case, and prints what it was if it is not right.
    pub(crate) fn expect(&mut self, what: &str, right: bool) {
        self.cases += 1;
        if !right {
            self.wrong += 1;
            println!("rank {}: {what}", self.rank);
        }
    }

    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.cases, self.wrong)
    }
}
