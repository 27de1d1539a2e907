//! When blocks that were freed without order are worth a commit, by which they come back (rule D5).
//!
//! Growth alone does not do: a program that makes and drops a tensor in every step would come to the end of
//! what there is again and again, with nearly all of it set aside, and grow each time. When ranks free is
//! their own affair, so what they have set aside decides nothing. What the last commit returned is the same
//! on all of them, though, and so is what was allocated before it and since: by their ratio a lane reckons
//! how much waits.

/// Bytes that are to wait at least, beside half of the lane's memory: smaller lanes would commit all the time.
const LEAST_BYTES: u64 = 128 << 20;
/// As many blocks do, however small: one commit returns twice as many at most.
const ENOUGH_BLOCKS: u64 = 1 << 15;

/// What a lane allocates from commit to commit, and what comes back.
#[derive(Clone, Debug, Default)]
pub(super) struct Turnover {
    bytes: Flow,
    blocks: Flow,
}

impl Turnover {
    /// Notes an allocation in a lane that has so much memory; whether a commit is due from here on.
    pub(super) fn allocates(&mut self, bytes: u64, reserved: u64) -> bool {
        self.bytes.goes(bytes);
        self.blocks.goes(1);
        self.bytes.waits((reserved / 2).max(LEAST_BYTES)) || self.blocks.waits(ENOUGH_BLOCKS)
    }

    /// Notes a block that all ranks have freed.
    pub(super) fn returns(&mut self, bytes: u64) {
        self.bytes.comes(bytes);
        self.blocks.comes(1);
    }

    /// All ranks agree on everything so far.
    pub(super) fn settle(&mut self) {
        self.bytes.settle();
        self.blocks.settle();
    }
}

#[derive(Clone, Debug, Default)]
struct Flow {
    /// Since the last commit.
    gone: u64,
    /// By the commit that is being finished.
    back: u64,
    /// What came back by the last commit, of what had gone before: no more than that.
    last: (u64, u64),
}

impl Flow {
    fn goes(&mut self, more: u64) {
        self.gone = self.gone.saturating_add(more);
    }

    fn comes(&mut self, more: u64) {
        self.back = self.back.saturating_add(more);
    }

    /// Whether so much waits to come back, if as much of it does as the last time.
    fn waits(&self, worth: u64) -> bool {
        let (back, of) = self.last;
        let product = |a, b| u128::from(a) * u128::from(b);
        back > 0 && product(self.gone, back) >= product(worth, of)
    }

    fn settle(&mut self) {
        if self.gone > 0 {
            self.last = (self.back.min(self.gone), self.gone);
        }
        (self.gone, self.back) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Allocations of a MiB until a commit is due, `None` where 10 GiB make none.
    fn until_due(turnover: &mut Turnover, reserved: u64) -> Option<u64> {
        (1..=10 << 10).find(|_| turnover.allocates(MIB, reserved))
    }

    #[test]
    fn what_nothing_comes_back_from_is_never_due() {
        let mut turnover = Turnover::default();
        for _ in 0..3 {
            assert_eq!(until_due(&mut turnover, 0), None);
            turnover.settle();
        }
    }

    #[test]
    fn half_of_the_memory_is_waited_for_by_what_came_back_last() {
        let mut turnover = Turnover::default();
        turnover.allocates(100 * MIB, 0);
        turnover.returns(100 * MIB);
        turnover.settle();
        assert_eq!(until_due(&mut turnover.clone(), 0), Some(128));
        assert_eq!(until_due(&mut turnover.clone(), 1 << 30), Some(512));
        // A quarter of it comes back.
        until_due(&mut turnover, 1 << 30);
        turnover.returns(128 * MIB);
        turnover.settle();
        assert_eq!(until_due(&mut turnover.clone(), 1 << 30), Some(2048));
        // A commit with nothing before it says nothing new.
        turnover.returns(900 * MIB);
        turnover.settle();
        assert_eq!(until_due(&mut turnover.clone(), 1 << 30), Some(2048));
        // More than was allocated has come back, from long ago.
        turnover.allocates(MIB, 1 << 30);
        turnover.returns(900 * MIB);
        turnover.settle();
        assert_eq!(until_due(&mut turnover.clone(), 1 << 30), Some(512));
        // Nothing did.
        turnover.allocates(MIB, 1 << 30);
        turnover.settle();
        assert_eq!(until_due(&mut turnover, 1 << 30), None);
    }

    #[test]
    fn numbers_have_no_end() {
        let mut turnover = Turnover::default();
        for _ in 0..3 {
            turnover.allocates(u64::MAX, u64::MAX);
            turnover.returns(u64::MAX);
            turnover.returns(1);
            turnover.settle();
        }
        assert!(turnover.allocates(u64::MAX, u64::MAX));
    }

    #[test]
    fn many_small_blocks_are_worth_a_commit_too() {
        let mut turnover = Turnover::default();
        for round in 0..3 {
            let due = (1..=1 << 20).find(|_| turnover.allocates(512, 1 << 40));
            assert_eq!(due, (round > 0).then_some(ENOUGH_BLOCKS));
            for _ in 0..due.unwrap_or(1 << 20) {
                turnover.returns(512);
            }
            turnover.settle();
        }
    }
}
