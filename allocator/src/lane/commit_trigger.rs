//! When deferred frees make a commit due, by which their blocks return to the lane (rule D5).
//!
//! Growth alone is not enough of a trigger. A program that makes and drops a tensor in every step would
//! reach the end of its memory again and again, with nearly all of it in deferred frees, and grow each
//! time. The amount of deferred frees itself cannot decide, because ranks free at different times. What the
//! last commit returned is the same on all ranks, and so is what was allocated before that commit and since.
//! A lane estimates from their ratio how much waits to return.

/// A commit is due when half of the lane's memory waits to return, but at least this many bytes: smaller
/// lanes would otherwise commit all the time.
const MIN_BYTES: u64 = 128 << 20;
/// A commit is also due when this many blocks wait, however small: one commit returns at most twice as
/// many.
const MAX_BLOCKS: u64 = 1 << 15;

/// Decides from a lane's allocations, and from what commits return, when the next commit is due.
#[derive(Clone, Debug, Default)]
pub(super) struct CommitTrigger {
    bytes: Flow,
    blocks: Flow,
}

impl CommitTrigger {
    /// Counts an allocation in a lane that has `reserved` bytes of memory. Returns whether a commit is due.
    pub(super) fn note_alloc(&mut self, bytes: u64, reserved: u64) -> bool {
        self.bytes.note_alloc(bytes);
        self.blocks.note_alloc(1);
        self.bytes.waiting_reaches((reserved / 2).max(MIN_BYTES))
            || self.blocks.waiting_reaches(MAX_BLOCKS)
    }

    /// Counts a block that all ranks have freed, while a commit finishes.
    pub(super) fn note_return(&mut self, bytes: u64) {
        self.bytes.note_return(bytes);
        self.blocks.note_return(1);
    }

    /// A commit has succeeded: counts anew from here.
    pub(super) fn note_commit(&mut self) {
        self.bytes.note_commit();
        self.blocks.note_commit();
    }
}

#[derive(Clone, Debug, Default)]
struct Flow {
    /// Allocated since the last commit.
    allocated: u64,
    /// Returned by the commit that is being finished.
    returned: u64,
    /// Bytes that the last commit returned, and bytes allocated before it; the former is at most the latter.
    last: (u64, u64),
}

impl Flow {
    fn note_alloc(&mut self, more: u64) {
        self.allocated = self.allocated.saturating_add(more);
    }

    fn note_return(&mut self, more: u64) {
        self.returned = self.returned.saturating_add(more);
    }

    /// Whether at least `amount` waits to return, if the same share of it returns as the last time.
    fn waiting_reaches(&self, amount: u64) -> bool {
        let (returned, of) = self.last;
        let product = |a, b| u128::from(a) * u128::from(b);
        returned > 0 && product(self.allocated, returned) >= product(amount, of)
    }

    fn note_commit(&mut self) {
        if self.allocated > 0 {
            self.last = (self.returned.min(self.allocated), self.allocated);
        }
        (self.allocated, self.returned) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Allocations of a MiB until a commit is due, `None` where 10 GiB make none.
    fn until_due(trigger: &mut CommitTrigger, reserved: u64) -> Option<u64> {
        (1..=10 << 10).find(|_| trigger.note_alloc(MIB, reserved))
    }

    #[test]
    fn a_lane_to_which_nothing_returns_is_never_due() {
        let mut trigger = CommitTrigger::default();
        for _ in 0..3 {
            assert_eq!(until_due(&mut trigger, 0), None);
            trigger.note_commit();
        }
    }

    #[test]
    fn half_of_the_memory_is_estimated_from_the_last_return() {
        let mut trigger = CommitTrigger::default();
        trigger.note_alloc(100 * MIB, 0);
        trigger.note_return(100 * MIB);
        trigger.note_commit();
        assert_eq!(until_due(&mut trigger.clone(), 0), Some(128));
        assert_eq!(until_due(&mut trigger.clone(), 1 << 30), Some(512));
        // A quarter of it returns.
        until_due(&mut trigger, 1 << 30);
        trigger.note_return(128 * MIB);
        trigger.note_commit();
        assert_eq!(until_due(&mut trigger.clone(), 1 << 30), Some(2048));
        // A commit with no allocation before it changes no estimate.
        trigger.note_return(900 * MIB);
        trigger.note_commit();
        assert_eq!(until_due(&mut trigger.clone(), 1 << 30), Some(2048));
        // More returns than was allocated: blocks from before the last commit.
        trigger.note_alloc(MIB, 1 << 30);
        trigger.note_return(900 * MIB);
        trigger.note_commit();
        assert_eq!(until_due(&mut trigger.clone(), 1 << 30), Some(512));
        // Nothing returns.
        trigger.note_alloc(MIB, 1 << 30);
        trigger.note_commit();
        assert_eq!(until_due(&mut trigger, 1 << 30), None);
    }

    #[test]
    fn counts_saturate() {
        let mut trigger = CommitTrigger::default();
        for _ in 0..3 {
            trigger.note_alloc(u64::MAX, u64::MAX);
            trigger.note_return(u64::MAX);
            trigger.note_return(1);
            trigger.note_commit();
        }
        assert!(trigger.note_alloc(u64::MAX, u64::MAX));
    }

    #[test]
    fn many_small_blocks_are_worth_a_commit_too() {
        let mut trigger = CommitTrigger::default();
        for round in 0..3 {
            let due = (1..=1 << 20).find(|_| trigger.note_alloc(512, 1 << 40));
            assert_eq!(due, (round > 0).then_some(MAX_BLOCKS));
            for _ in 0..due.unwrap_or(1 << 20) {
                trigger.note_return(512);
            }
            trigger.note_commit();
        }
    }
}
