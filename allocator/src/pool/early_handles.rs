//! Handles of segments that are made before the commit that sends them to peers.
//!
//! Making and closing the descriptor of a segment takes long with some drivers (see
//! [`has_slow_handles`](crate::driver::MemoryDriver::has_slow_handles)). There it is made together with the
//! segment, and closed by a thread after the commit.
//!
//! A forked child has copies of the descriptors until it ends or executes another program, and does not
//! close them.

use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use crate::driver::{Driver, Exported, Physical, Transport};
use crate::fork::ProcessId;
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{AtomicUsize, Mutex, lock, mutant};

/// How many descriptors a pool makes early at most: a process may usually have 1,024 for everything.
const MAX_EARLY: usize = 64;

/// Makes and closes the early handles of a pool. Shared by its symmetric lanes and its commits.
pub(super) struct EarlyHandles {
    /// Whether the driver's handles are slow. Otherwise commits make and close handles themselves.
    slow: bool,
    /// How many early handles exist.
    existing: AtomicUsize,
    /// The thread that closes the handles which the last commit has sent, until somebody joins it.
    closer: Mutex<Option<JoinHandle<()>>>,
    /// The process that made the pool.
    maker: ProcessId,
}

impl EarlyHandles {
    pub(super) fn new(driver: &Driver, world: u32) -> Arc<Self> {
        let travel = world > 1 && driver.transport() == Transport::UnixSocket;
        Arc::new(Self {
            slow: travel && driver.has_slow_handles(),
            existing: AtomicUsize::new(0),
            closer: Mutex::new(None),
            maker: ProcessId::here(),
        })
    }

    /// Makes the handle of a new segment. `None` if the commit is to make it: because handles are quick, or
    /// because there are too many early ones, or because making it failed, which is an error only there.
    pub(super) fn make(
        self: &Arc<Self>,
        driver: &Driver,
        physical: &Physical,
    ) -> Option<EarlyHandle> {
        if !self.slow {
            return None;
        }
        // Relaxed, because nothing else is ordered by this counter.
        let more = |made| (made < MAX_EARLY).then_some(made + 1);
        self.existing.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        let permit = Permit(self.clone());
        match driver.export(physical) {
            Ok(Exported::Fd(fd)) => Some(EarlyHandle { fd, permit }),
            Ok(Exported::Bytes(_) | Exported::Derived) => None,
            Err(error) => {
                tracing::debug!(%error, "a segment's handle is left to the commit");
                None
            }
        }
    }

    /// Closes the handles that a commit has sent. Slow ones are closed by a thread that then ends. There is
    /// one such thread at a time, so that commits in quick succession do not accumulate descriptors.
    pub(super) fn close(&self, handles: Vec<impl Send + 'static>) {
        if !self.slow || handles.is_empty() {
            return;
        }
        let mut closer = lock(&self.closer);
        if !mutant("mutant_closer_forgotten") {
            join(closer.take());
        }
        let thread = thread::Builder::new().name("symmpool-close".into());
        // If no thread can be started, `spawn` drops the closure, and with it the handles.
        *closer = thread.spawn(move || drop(handles)).ok();
    }

    /// Waits until the closing thread has ended. Called before memory is released, because an open
    /// descriptor keeps its memory allocated.
    pub(super) fn wait_until_closed(&self) {
        // A forked child has no such thread, and the lock may have been held at the fork.
        if self.slow && self.maker.is_here() {
            join(lock(&self.closer).take());
        }
    }
}

impl Drop for EarlyHandles {
    fn drop(&mut self) {
        let closer = self.closer.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.maker.is_here() {
            join(closer);
        } else {
            mem::forget(closer);
        }
    }
}

fn join(closer: Option<JoinHandle<()>>) {
    // The thread only closes descriptors, which cannot panic.
    let _ = closer.map(JoinHandle::join);
}

/// A handle that was made before its commit.
pub(super) struct EarlyHandle {
    fd: OwnedFd,
    permit: Permit,
}

impl EarlyHandle {
    /// The descriptor, which does not count as early any more.
    pub(super) fn into_fd(self) -> OwnedFd {
        let Self { fd, permit } = self;
        drop(permit);
        fd
    }
}

impl AsFd for EarlyHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Counts as one of at most [`MAX_EARLY`] handles while it exists.
struct Permit(Arc<EarlyHandles>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.existing.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod models {
    use super::*;
    use crate::models::prove;

    /// A handle that counts itself when it is closed.
    struct Counted(Arc<AtomicUsize>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whoever has waited for closed handles finds closed what all commits have sent.
    fn commits_close_handles() {
        let (existing, closer) = (AtomicUsize::new(0), Mutex::new(None));
        let maker = ProcessId::here();
        let handles = EarlyHandles { slow: true, existing, closer, maker };
        let closed = Arc::new(AtomicUsize::new(0));
        for _ in 0..2 {
            handles.close(vec![Counted(closed.clone())]);
        }
        handles.wait_until_closed();
        assert_eq!(closed.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn loom_handles_of_all_commits_are_closed() {
        prove(2, &["mutant_closer_forgotten"], commits_close_handles);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read};
    use std::sync::mpsc;

    use super::*;

    fn handles(maker: ProcessId) -> EarlyHandles {
        let (existing, closer) = (AtomicUsize::new(0), Mutex::new(None));
        EarlyHandles { slow: true, existing, closer, maker }
    }

    #[test]
    fn handles_are_closed_when_the_wait_returns() {
        let handles = handles(ProcessId::here());
        let (mut reader, writer) = io::pipe().unwrap();
        let (mut other, second) = io::pipe().unwrap();
        handles.close(vec![writer]);
        handles.close(vec![second]);
        // The pipe ends when its last writer is closed; one at a time, so the first already is.
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        handles.wait_until_closed();
        assert!(lock(&handles.closer).is_none());
        assert_eq!(other.read(&mut [0]).unwrap(), 0);
        handles.wait_until_closed();
    }

    #[test]
    fn a_forked_child_waits_for_no_thread_of_its_parent() {
        // The state of a child: the process is another one, and the closing thread never ends.
        let handles = handles(ProcessId::elsewhere());
        let (end, held) = mpsc::channel::<()>();
        let closer = thread::spawn(move || held.recv().unwrap_or_default());
        *lock(&handles.closer) = Some(closer);
        handles.wait_until_closed();
        let locked = lock(&handles.closer);
        handles.wait_until_closed();
        drop(locked);
        drop(handles);
        drop(end);
    }
}
