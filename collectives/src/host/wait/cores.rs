//! Finds out whether every rank can have a core of its own, from the affinity masks of their processes.

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::matching::assign;

/// Whether there is a core for each of `world` ranks, if all have this thread's affinity mask.
pub(in crate::host) fn enough_here(world: u32) -> bool {
    world as usize <= available()
}

/// The number of cores that this thread may use, by its affinity mask and by the CPU quota of its container.
fn available() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Whether every rank can have a core of its own, by the affinity masks of all of them. `processes` has an entry for
/// each rank: its process, of which the first thread's mask is used, or `None` for the calling thread and for ranks
/// whose process is not visible, which are assumed to have this thread's mask.
///
/// So ranks that are bound to one core each still spin, and ranks do not spin if two of them are bound to the same
/// core, however many others are idle.
pub(crate) fn enough_for(processes: &[Option<Pid>]) -> bool {
    let Ok(own) = sched_getaffinity(None) else { return enough_here(processes.len() as u32) };
    // If it is less than the mask's cores, it is the quota of a container, which its ranks share.
    let share = available();
    if share < own.count() as usize && share < processes.len() {
        return false;
    }
    let mask = |process: &Option<Pid>| {
        process.and_then(|pid| sched_getaffinity(Some(pid)).ok()).unwrap_or(own)
    };
    one_each(&processes.iter().map(mask).collect::<Vec<_>>())
}

/// Whether each mask can be assigned a core that no other has.
fn one_each(masks: &[CpuSet]) -> bool {
    let assigned = assign(0..masks.len(), CpuSet::MAX_CPU, |rank, core| masks[rank].is_set(core));
    assigned.iter().flatten().count() == masks.len()
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use rustix::thread::sched_setaffinity;

    use super::*;

    fn mask(cores: &[usize]) -> CpuSet {
        let mut mask = CpuSet::new();
        cores.iter().for_each(|core| mask.set(*core));
        mask
    }

    #[test]
    fn every_rank_needs_a_core_that_no_other_needs() {
        let one_each =
            |masks: &[&[usize]]| one_each(&masks.iter().map(|m| mask(m)).collect::<Vec<_>>());
        assert!(one_each(&[&[0], &[1], &[2]]), "bound to one each");
        assert!(!one_each(&[&[0], &[0], &[1, 2, 3]]), "two share one while others are idle");
        assert!(one_each(&[&[0, 1], &[0], &[1, 2]]), "the first has to make room");
        assert!(one_each(&[&[0, 1], &[1, 2], &[2, 3], &[0]]), "and the next for it, and so on");
        assert!(!one_each(&[&[0, 1], &[0, 1], &[0, 1]]));
        assert!(!one_each(&[&[]]));
        assert!(one_each(&[]));
        let many: Vec<usize> = (0..CpuSet::MAX_CPU).collect();
        assert!(one_each(&vec![&many[..]; CpuSet::MAX_CPU]));
        assert!(!one_each(&vec![&many[..]; CpuSet::MAX_CPU + 1]));
    }
    /// Binds this thread to `mine` and a process to `theirs`; asks whether the two have a core each.
    fn bound(child: &Child, mine: &[usize], theirs: &[usize]) -> bool {
        let child = Pid::from_child(child);
        sched_setaffinity(None, &mask(mine)).unwrap();
        sched_setaffinity(Some(child), &mask(theirs)).unwrap();
        enough_for(&[None, Some(child)])
    }

    #[test]
    fn ranks_bound_to_a_core_each_may_spin_and_those_that_share_one_may_not() {
        let before = sched_getaffinity(None).unwrap();
        let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| before.is_set(*core)).collect();
        let (&[a, b, ..], 2..) = (&cores[..], available()) else {
            println!("skipped: a machine with one core");
            return;
        };
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let apart = [bound(&child, &[a], &[b]), bound(&child, &[a], &[a, b])];
        let shared = [bound(&child, &[a], &[a]), bound(&child, &[b], &[b])];
        let alone = enough_here(2);
        sched_setaffinity(None, &before).unwrap();
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(apart, [true, true]);
        assert_eq!(shared, [false, false]);
        assert!(!alone, "its own mask alone says too little");
        assert!(enough_for(&[None]) && !enough_for(&vec![None; CpuSet::MAX_CPU + 1]));
    }
}
