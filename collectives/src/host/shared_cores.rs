//! Ranks that share cores: how they wait for each other, and that they spread over the cores.
//!
//! A rank spins for a peer that runs on another core, as if both had a core of their own: the peer may be about to
//! signal. A peer that needs this very core cannot signal before it is left to it, so the rank yields at once. That is
//! why ranks say with every handshake where they run. Nothing but the time of a wait depends on it.
//!
//! The operating system may leave ranks unevenly on cores for a second and longer, as it moves no thread that ran a
//! moment ago. Then a call takes as long as the fullest core needs for all of its ranks. So a rank moves to a core that
//! has two ranks fewer: it sets its thread's affinity mask to that core, and then to what it was before, as NCCL does
//! while it makes a communicator.

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

use super::wait::SpinPolicy;

/// A rank looks where the others run at one of so many calls.
const LOOK_EVERY: u32 = 256;
/// How often a rank moves at most: the load that other programs put on a core is not known here, so the operating system
/// may move it back.
const MOST_MOVES: u32 = 16;

/// What a rank knows that shares its core with others.
#[derive(Debug)]
pub(super) struct SharedCores {
    /// Waits for ranks on other cores.
    pub(super) elsewhere: SpinPolicy,
    /// The core on which this rank began its call.
    pub(super) here: u32,
    calls: u32,
    moves: u32,
}

impl SharedCores {
    pub(super) fn new() -> Self {
        Self { elsewhere: SpinPolicy::new(true), here: core(), calls: 0, moves: 0 }
    }

    /// Called when a call begins. Returns the core on which it does.
    #[inline]
    pub(super) fn begin_call(&mut self) -> u32 {
        self.here = core();
        self.here
    }

    /// Called at the end of every handshake. `core_of` says where a rank runs, as it said itself.
    #[inline]
    pub(super) fn spread(
        &mut self,
        (rank, world): (u32, u32),
        core_of: impl Fn(u32) -> Option<u32>,
    ) {
        self.calls += 1;
        if self.calls == LOOK_EVERY {
            self.calls = 0;
            self.move_away((rank, world), core_of);
        }
    }

    #[cold]
    fn move_away(&mut self, (rank, world): (u32, u32), core_of: impl Fn(u32) -> Option<u32>) {
        if self.moves == MOST_MOVES {
            return;
        }
        let here = self.here;
        let cores = (0..world).map(|other| if other == rank { Some(here) } else { core_of(other) });
        let Some(cores) = cores.collect::<Option<Vec<u32>>>() else { return };
        let Ok(allowed) = sched_getaffinity(None) else { return };
        let allowed_cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
        let Some(to) = better_core(rank as usize, &cores, allowed_cores.map(|core| core as u32))
        else {
            return;
        };
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
fn core() -> u32 {
    sched_getcpu() as u32
}

/// Where a rank had better run: on that of the allowed cores which has fewest ranks, if its own has two more. Of the
/// ranks of a core the last one moves, so that they do not all do. `cores` has the core of every rank.
fn better_core(rank: usize, cores: &[u32], allowed: impl Iterator<Item = u32>) -> Option<u32> {
    let here = cores[rank];
    let ranks_on = |core: u32| cores.iter().filter(|other| **other == core).count();
    let to = allowed.min_by_key(|core| ranks_on(*core))?;
    let is_last = !cores[rank + 1..].contains(&here);
    (is_last && ranks_on(to) + 2 <= ranks_on(here)).then_some(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_rank_of_a_crowded_core_moves_to_the_emptiest() {
        let better = |rank, cores: &[u32], allowed: &[u32]| {
            better_core(rank, cores, allowed.iter().copied())
        };
        let crowded = [0, 0, 1, 0];
        let moves = |cores: &[u32], allowed: &[u32]| {
            (0..cores.len()).map(|rank| better(rank, cores, allowed)).collect::<Vec<_>>()
        };
        assert_eq!(moves(&crowded, &[0, 1]), [None, None, None, Some(1)]);
        assert_eq!(moves(&[0, 1, 1, 0], &[0, 1]), [None; 4], "two each");
        assert_eq!(moves(&[0, 0, 1], &[0, 1]), [None; 3], "no better the other way round");
        assert_eq!(moves(&[0, 0], &[0, 1]), [None, Some(1)], "a core that none has yet");
        assert_eq!(moves(&crowded, &[0]), [None; 4], "bound to one core");
        assert_eq!(better(3, &crowded, &[]), None);
        assert_eq!(
            moves(&[5, 5, 5, 9, 9, 9], &[5, 7, 9]),
            [None, None, Some(7), None, None, Some(7)]
        );
    }

    #[test]
    fn a_rank_moves_a_bounded_number_of_times_and_keeps_its_affinity_mask() {
        let before = sched_getaffinity(None).unwrap();
        let allowed = (0..CpuSet::MAX_CPU).filter(|core| before.is_set(*core)).count();
        let mut shared = SharedCores::new();
        let looks = std::cell::Cell::new(0);
        for _ in 0..LOOK_EVERY * (MOST_MOVES + 4) {
            let here = shared.begin_call();
            // All ranks are always where this one is.
            shared.spread((1, 2), |_| {
                looks.set(looks.get() + 1);
                Some(here)
            });
        }
        let same = (0..CpuSet::MAX_CPU)
            .all(|core| sched_getaffinity(None).unwrap().is_set(core) == before.is_set(core));
        assert!(same, "the mask is as it was");
        if allowed > 1 {
            assert_eq!((shared.moves, looks.get()), (MOST_MOVES, MOST_MOVES));
        } else {
            assert_eq!((shared.moves, looks.get()), (0, MOST_MOVES + 4), "no other core");
        }
    }

    #[test]
    fn nobody_moves_while_it_is_not_known_where_all_run() {
        let mut shared = SharedCores::new();
        for _ in 0..2 * LOOK_EVERY {
            shared.spread((1, 2), |_| None);
        }
        assert_eq!(shared.moves, 0);
    }
}
