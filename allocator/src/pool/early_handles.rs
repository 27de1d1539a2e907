//! Descriptors of segments where making and closing them takes long (see
//! [`has_slow_handles`](crate::driver::MemoryDriver::has_slow_handles)): made with the segments,
//! ahead of the commit that hands them over, and closed beside what follows it.
//!
//! A forked child has copies of them until it ends or becomes another program, and leaves them as
//! they are.

use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use crate::driver::{Driver, Exported, Physical, Transport};
use crate::sync::lock;

/// Descriptors that a pool makes ahead at most: a process may have 1,024 as a rule, for everything.
const MOST_AHEAD: usize = 64;

/// What the symmetric lanes of a pool and its commits share.
pub(super) struct Handles {
    /// Whether the driver asks for all this. Otherwise commits make and close handles themselves.
    slow: bool,
    /// Handles that exist ahead of their commit.
    ahead: AtomicUsize,
    /// The thread that closes what the last commit handed over, until somebody waits for it.
    closer: Mutex<Option<JoinHandle<()>>>,
    /// The process that all this is in.
    pid: u32,
}

impl Handles {
    pub(super) fn new(driver: &Driver, world: u32) -> Arc<Self> {
        let travel = world > 1 && driver.transport() == Transport::UnixSocket;
        Arc::new(Self {
            slow: travel && driver.has_slow_handles(),
            ahead: AtomicUsize::new(0),
            closer: Mutex::new(None),
            pid: std::process::id(),
        })
    }

    /// A handle of a new segment, unless the commit is to make it: because that is quick, because
    /// there are many handles, or because it failed now and is an error only there.
    pub(super) fn make(self: &Arc<Self>, driver: &Driver, physical: &Physical) -> Option<Ahead> {
        if !self.slow {
            return None;
        }
        // Relaxed: a counter orders nothing but itself.
        let more = |made| (made < MOST_AHEAD).then_some(made + 1);
        self.ahead.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        let place = Place(self.clone());
        match driver.export(physical) {
            Ok(Exported::Fd(fd)) => Some(Ahead { fd, place }),
            Ok(Exported::Bytes(_) | Exported::Derived) => None,
            Err(error) => {
                tracing::debug!(%error, "a segment's handle is left to the commit");
                None
            }
        }
    }

    /// Closes what a commit handed over. Slow ones by a thread that then ends: one at a time, so
    /// that commits in quick succession cannot heap descriptors up.
    pub(super) fn close(&self, handles: Vec<OwnedFd>) {
        if !self.slow || handles.is_empty() {
            return;
        }
        let mut closer = lock(&self.closer);
        join(closer.take());
        let thread = thread::Builder::new().name("symmpool-close".into());
        // Where no thread can be started, what it was to drop is dropped here.
        *closer = thread.spawn(move || drop(handles)).ok();
    }

    /// Waits until all is closed that was to be. A descriptor keeps its memory: called before memory
    /// is given back, so that it is free when it is said to be.
    pub(super) fn settle(&self) {
        // A forked child lacks the thread, and maybe the thread that has the lock.
        if self.slow && self.pid == std::process::id() {
            join(lock(&self.closer).take());
        }
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        let closer = self.closer.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.pid == std::process::id() {
            join(closer);
        } else {
            mem::forget(closer);
        }
    }
}

fn join(closer: Option<JoinHandle<()>>) {
    // Closing cannot panic, and nothing depends on it if it did.
    let _ = closer.map(JoinHandle::join);
}

/// A handle made ahead of the commit that hands it over.
pub(super) struct Ahead {
    fd: OwnedFd,
    place: Place,
}

impl Ahead {
    /// The descriptor, which is no longer ahead of a commit.
    pub(super) fn into_fd(self) -> OwnedFd {
        let Self { fd, place } = self;
        drop(place);
        fd
    }
}

impl AsFd for Ahead {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// One of the [`MOST_AHEAD`].
struct Place(Arc<Handles>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.ahead.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read};
    use std::sync::mpsc;

    use super::*;

    fn handles(pid: u32) -> Handles {
        let (ahead, closer) = (AtomicUsize::new(0), Mutex::new(None));
        Handles { slow: true, ahead, closer, pid }
    }

    #[test]
    fn what_is_closed_beside_is_closed_once_it_is_waited_for() {
        let handles = handles(std::process::id());
        let (mut reader, writer) = io::pipe().unwrap();
        let (mut other, second) = io::pipe().unwrap();
        handles.close(vec![writer.into()]);
        handles.close(vec![second.into()]);
        // The pipe ends when its last writer is closed; one at a time, so the first already is.
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        handles.settle();
        assert!(lock(&handles.closer).is_none());
        assert_eq!(other.read(&mut [0]).unwrap(), 0);
        handles.settle();
    }

    #[test]
    fn a_forked_child_waits_for_no_thread_of_its_parent() {
        // As in a child: the process is another, and the thread that closes goes on for ever.
        let handles = handles(std::process::id() + 1);
        let (end, held) = mpsc::channel::<()>();
        let closer = thread::spawn(move || held.recv().unwrap_or_default());
        *lock(&handles.closer) = Some(closer);
        handles.settle();
        let locked = lock(&handles.closer);
        handles.settle();
        drop(locked);
        drop(handles);
        drop(end);
    }
}
