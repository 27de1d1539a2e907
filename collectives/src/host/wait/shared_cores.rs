//! Ranks that share cores: how they wait for each other in collectives, and how they move to less crowded cores. Ranks
//! with a core each share one too while other programs keep cores busy: whom a signal wakes up often runs on the core of
//! who signalled.
//!
//! A rank spins for a peer that runs on another core, as if both had a core of their own: the peer may be about to
//! signal. A peer on this rank's own core cannot signal until this rank yields it, so the rank yields at once. For that,
//! every handshake says on which core its rank runs. Only the time that a wait takes depends on it.
//!
//! The operating system may leave ranks unevenly on cores for a second and longer, as it moves no thread that ran a
//! moment ago. Then a call takes as long as the fullest core needs for all of its ranks. So a rank moves to a core that
//! has two ranks fewer: it sets its thread's affinity mask to that core, and then to what it was before, as NCCL does
//! while it makes a communicator.

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

use crate::host::wait::crowd::CROWD;
use crate::host::wait::waiter::SpinPolicy;

/// Calls from one time at which a rank looks where the others run to the next.
const LOOK_EVERY: u32 = 256;
/// How often a rank moves at most in [`FORGET_AFTER`] looks: the load that other programs put on a core is not known
/// here, so the operating system may move it back.
const MAX_MOVES: u32 = 16;
const FORGET_AFTER: u32 = 1024;

/// Stands for this rank's core where that does not matter.
const NOWHERE: u32 = u32::MAX;

/// Knowledge of a rank about those on its core.
#[derive(Debug)]
pub(in crate::host) struct SharedCores {
    /// Whether there is a core for each rank, which it shares with other programs at most.
    enough: bool,
    /// How this rank waits for ranks on other cores.
    elsewhere: SpinPolicy,
    /// The core on which this rank began its call.
    here: u32,
    /// The core of each rank in the call before; `None` if it did not say.
    cores: Vec<Option<u32>>,
    /// Handshakes so far, wrapping.
    calls: u32,
    moves: u32,
}

impl SharedCores {
    /// `enough` says whether there is a core for each rank.
    pub(in crate::host) fn new(world: u32, enough: bool) -> Self {
        let (elsewhere, cores) = (SpinPolicy::new(world > 1), vec![None; world as usize]);
        Self { enough, elsewhere, here: NOWHERE, cores, calls: 0, moves: 0 }
    }

    /// Has waits sleep soon.
    pub(in crate::host) fn sleep_soon(&mut self) {
        self.elsewhere = self.elsewhere.with_few_yields();
    }

    /// Called when a call begins. Returns the core on which it does, if that matters to other ranks.
    #[inline]
    pub(in crate::host) fn begin_call(&mut self) -> Option<u32> {
        let matters = !self.enough || CROWD.is_known();
        self.here = if matters { current_core() } else { NOWHERE };
        matters.then_some(self.here)
    }

    /// Whether a peer ran on this rank's core in the call before.
    #[inline]
    pub(in crate::host) fn is_here(&self, peer: u32) -> bool {
        self.here != NOWHERE && self.cores[peer as usize] == Some(self.here)
    }

    /// How to wait for a rank.
    #[inline]
    pub(in crate::host) fn policy_for(&self, peer: u32) -> SpinPolicy {
        if self.is_here(peer) { self.elsewhere.here() } else { self.elsewhere }
    }

    /// Called at the end of handshakes. `core_of` says where a peer runs, as it said itself.
    #[inline]
    pub(in crate::host) fn note(&mut self, rank: u32, core_of: impl Fn(u32) -> Option<u32>) {
        if self.here == NOWHERE {
            return;
        }
        for (other, core) in (0..).zip(&mut self.cores) {
            *core = if other == rank { Some(self.here) } else { core_of(other) };
        }
        self.calls = self.calls.wrapping_add(1);
        if !self.enough && self.calls.is_multiple_of(LOOK_EVERY) {
            self.leave_crowded_core(rank);
        }
    }

    #[cold]
    fn leave_crowded_core(&mut self, rank: u32) {
        if self.calls.is_multiple_of(LOOK_EVERY * FORGET_AFTER) {
            self.moves = 0;
        }
        if self.moves == MAX_MOVES {
            return;
        }
        let Some(mut cores) = self.cores.iter().copied().collect::<Option<Vec<u32>>>() else {
            return;
        };
        let Ok(allowed) = sched_getaffinity(None) else { return };
        let allowed_cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
        let allowed_cores: Vec<u32> = allowed_cores.map(|core| core as u32).collect();
        even_out(&mut cores, &allowed_cores);
        let to = cores[rank as usize];
        if to == self.here {
            return;
        }
        self.moves += 1;
        let mut only = CpuSet::new();
        only.set(to as usize);
        if sched_setaffinity(None, &only).is_ok()
            && let Err(error) = sched_setaffinity(None, &allowed)
        {
            tracing::warn!(rank, %error, core = to, "a thread stays bound to the core that it moved to");
        }
    }
}

/// The core on which the calling thread runs.
#[inline]
fn current_core() -> u32 {
    sched_getcpu() as u32
}

/// Moves ranks to less crowded cores: in rank order, each to the core with fewest ranks if that has two fewer than its
/// own. All ranks look at the same cores, so each finds the same moves, and makes its own. `cores` has the core of each
/// rank.
fn even_out(cores: &mut [u32], allowed: &[u32]) {
    for rank in 0..cores.len() {
        let ranks_on = |core: u32| cores.iter().filter(|other| **other == core).count();
        let Some(to) = allowed.iter().copied().min_by_key(|core| ranks_on(*core)) else { return };
        if ranks_on(to) + 2 <= ranks_on(cores[rank]) {
            cores[rank] = to;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_leave_crowded_cores_until_all_are_about_as_full() {
        let evened = |cores: &[u32], allowed: &[u32]| {
            let mut cores = cores.to_vec();
            even_out(&mut cores, allowed);
            cores
        };
        assert_eq!(evened(&[0, 0, 1, 0], &[0, 1]), [1, 0, 1, 0]);
        assert_eq!(evened(&[0, 1, 1, 0], &[0, 1]), [0, 1, 1, 0], "two each");
        assert_eq!(evened(&[0, 0, 1], &[0, 1]), [0, 0, 1], "no better the other way round");
        assert_eq!(evened(&[0, 0], &[0, 1]), [1, 0], "a core that none has yet");
        assert_eq!(evened(&[0, 0, 1, 0], &[0]), [0, 0, 1, 0], "bound to one core");
        assert_eq!(evened(&[0, 0, 0], &[]), [0, 0, 0]);
        // Only one of three pairs gets the core that is free.
        assert_eq!(evened(&[0, 0, 1, 1, 2, 2], &[0, 1, 2, 3]), [3, 0, 1, 1, 2, 2]);
        assert_eq!(evened(&[7; 8], &[5, 6, 7, 8]), [5, 6, 8, 5, 6, 8, 7, 7]);
    }

    #[test]
    fn a_rank_moves_a_bounded_number_of_times_and_keeps_its_affinity_mask() {
        let before = sched_getaffinity(None).unwrap();
        let allowed = (0..CpuSet::MAX_CPU).filter(|core| before.is_set(*core)).count();
        let mut shared = SharedCores::new(2, false);
        let made = |shared: &mut SharedCores, looks: u32| {
            for _ in 0..LOOK_EVERY * looks {
                let here = shared.begin_call();
                // Both ranks are always where this one is, which is the first to leave.
                shared.note(0, |_| here);
                assert!(shared.is_here(1));
            }
            shared.moves
        };
        let most = if allowed > 1 { MAX_MOVES } else { 0 };
        assert_eq!(made(&mut shared, MAX_MOVES + 4), most);
        assert_eq!(
            made(&mut shared, FORGET_AFTER - MAX_MOVES - 4),
            most.min(1),
            "later, moves are forgotten"
        );
        let after = sched_getaffinity(None).unwrap();
        assert!((0..CpuSet::MAX_CPU).all(|core| after.is_set(core) == before.is_set(core)));
    }

    #[test]
    fn nobody_moves_while_it_is_not_known_where_all_run() {
        let mut shared = SharedCores::new(2, false);
        for _ in 0..2 * LOOK_EVERY {
            shared.note(0, |_| None);
        }
        assert!(shared.moves == 0 && !shared.is_here(1));
    }
}
