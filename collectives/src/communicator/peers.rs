//! The other ranks' processes: which they are, and whether they still run and have the pool.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};
use symmpool_allocator::Pool;

use crate::host::subgroup_memory::NestedMemory;

/// Each other rank's process, where this one can see it.
pub(super) fn pids(pool: &Pool) -> Vec<Option<Pid>> {
    let pid = |rank| (rank != pool.rank()).then(|| number(pool.peer_pid(rank)?)).flatten();
    (0..pool.world()).map(pid).collect()
}

fn number(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

/// The processes of a pool's ranks, as far as this one can see them.
struct OpenProcesses(Vec<Process>);

/// Says whether a rank can still take part in calls: its process runs and has the pool. That takes a few system
/// calls, so it is asked only after waiting for a while.
pub(super) fn still_there(pool: &Pool) -> impl Fn(u32) -> bool + Clone + Send + Sync + 'static {
    let (processes, pool) = (Arc::new(OpenProcesses::of(pool)), pool.clone());
    // A rank that dropped its pool has no communicator either, as a communicator keeps its pool.
    move |rank| processes.alive(rank) && !pool.has_left(rank)
}

/// Looks like [`still_there`], for the ranks of a nested pool: one that has no communicator has let go of its memory.
pub(super) fn still_nested(
    pool: &Pool,
    memory: Arc<NestedMemory>,
) -> impl Fn(u32) -> bool + Clone + Send + Sync + 'static {
    let there = still_there(pool);
    move |rank| there(rank) && !memory.has_left(rank)
}

enum Process {
    /// Not visible to this process, or this process itself.
    Unknown,
    /// Readable once the process has ended, even before its parent has waited for it.
    Handle(OwnedFd),
    /// Used where the kernel has no process handles. The number may be given to another process later.
    Number(Pid),
    /// Ended before its handle was opened.
    Gone,
}

impl OpenProcesses {
    fn of(pool: &Pool) -> Self {
        let own = std::process::id();
        let open = |rank| match pool.peer_pid(rank).filter(|pid| *pid != own) {
            Some(pid) => Process::open(pid),
            None => Process::Unknown,
        };
        Self((0..pool.world()).map(open).collect())
    }

    /// Whether `rank`'s process runs; also true where that is not known.
    fn alive(&self, rank: u32) -> bool {
        match self.0.get(rank as usize) {
            Some(Process::Gone) => false,
            Some(Process::Handle(handle)) => {
                let mut look = [PollFd::new(handle, PollFlags::IN)];
                let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
                !matches!(poll(&mut look, Some(&at_once)), Ok(1..))
            }
            Some(Process::Number(pid)) => test_kill_process(*pid) != Err(Errno::SRCH),
            Some(Process::Unknown) | None => true,
        }
    }
}

impl Process {
    fn open(pid: u32) -> Self {
        let Some(pid) = number(pid) else { return Self::Unknown };
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(handle) => Self::Handle(handle),
            Err(Errno::SRCH) => Self::Gone,
            Err(_) => Self::Number(pid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// Rule S5.
    #[test]
    fn a_process_that_ended_is_not_alive() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        let number = Pid::from_raw(pid as i32).unwrap();
        let processes = OpenProcesses(vec![Process::open(pid), Process::Number(number)]);
        assert!(processes.alive(0) && processes.alive(1));
        assert!(processes.alive(7), "an unknown rank is not reported as dead");
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(!processes.alive(0) && !processes.alive(1));
        assert!(matches!(Process::open(pid), Process::Gone));
    }
}
