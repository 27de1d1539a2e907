//! Forked children: objects that belong to the process that made them.
//!
//! A forked child has a copy of every object, but shares memory, signals and connections with its parent:
//! whatever it did with them would look to all ranks as if the parent had done it. It also has none of
//! its parent's other threads. So in a child, objects of the parent are refused.
//!
//! A child does not keep its parent's sockets either. Peers see that a process is gone because its
//! connections are closed, and with copies in a child (a worker that loads data, say) they would stay
//! open.
//!
//! A handler that the C library runs in every forked child counts forks, so that a check costs one load;
//! asking the system for the process id would cost half of a small call. A child that is not made through
//! the C library (by `clone`) is not counted.

#![allow(unsafe_code)] // registers a handler for forks, and replaces descriptors in it

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};

use rustix::io::DupFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::{Error, Result};

/// How many forks lie between this process and the one that registered the handler.
static FORKS: AtomicU32 = AtomicU32::new(0);
static REGISTERED: Once = Once::new();

type Handler = Option<unsafe extern "C" fn()>;

unsafe extern "C" {
    fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int;
}

/// Runs in every forked child. A signal handler may do as much: atomic accesses and system calls.
extern "C" fn after_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    replace_descriptors();
}

/// Registers the handler, once.
fn register() {
    REGISTERED.call_once(|| {
        // SAFETY: the C library's function by its own signature; the handler is a function of this
        // library, which the C library forgets when it unloads that, and makes only atomic accesses
        // and system calls.
        let code = unsafe { pthread_atfork(None, None, Some(after_fork)) };
        if code != 0 {
            tracing::warn!(
                code,
                "no handler for forks could be registered; forked children are not refused"
            );
        }
    });
}

/// The process that made an object.
#[derive(Clone, Copy, Debug)]
pub struct ProcessId {
    forks: u32,
    pid: u32,
}

impl ProcessId {
    /// This process.
    pub fn here() -> Self {
        register();
        Self { forks: FORKS.load(Ordering::Relaxed), pid: std::process::id() }
    }

    /// Number of this process, other than zero, for an atomic that says who made something.
    pub fn to_bits(self) -> u64 {
        u64::from(self.forks) << 32 | u64::from(self.pid)
    }

    /// The process of [`to_bits`](ProcessId::to_bits).
    pub fn from_bits(bits: u64) -> Self {
        Self { forks: (bits >> 32) as u32, pid: bits as u32 }
    }

    /// Whether that is this process, and not one that it was forked from.
    #[inline]
    pub fn is_here(&self) -> bool {
        self.forks == FORKS.load(Ordering::Relaxed)
    }

    /// Whether that is this process, by a system call. It also tells children apart which were not made through the C
    /// library.
    pub fn is_this_process(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Refuses the use of `what` in a child of the process that made it: [`Error::is_invalid_state`].
    #[inline]
    pub fn check(&self, what: &str) -> Result<()> {
        if self.is_here() { Ok(()) } else { Err(self.refusal(what)) }
    }

    #[cold]
    fn refusal(&self, what: &str) -> Error {
        Error::invalid_state(format!(
            "{what} of process {} is used in process {}, forked from it; make a group, and what is \
             needed on it, after the fork",
            self.pid,
            std::process::id()
        ))
    }
}

/// Descriptors that forked children do not inherit: the number of one, or [`FREE`], in each place. When all
/// places are taken, the list grows by another block; it never shrinks, so a forked child can walk it
/// whatever its parent's other threads were doing.
struct Places {
    numbers: [AtomicI32; 64],
    more: AtomicPtr<Places>,
}

static PLACES: Places = Places::new();
const FREE: i32 = -1;

impl Places {
    const fn new() -> Self {
        Self {
            numbers: [const { AtomicI32::new(FREE) }; 64],
            more: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// The next block, if there is one.
    fn more(&self) -> Option<&'static Self> {
        // SAFETY: null, or made by `grow` from a box that nobody takes back.
        unsafe { self.more.load(Ordering::Acquire).as_ref() }
    }

    /// The next block, which is made if there is none.
    fn grow(&self) -> &'static Self {
        if let Some(more) = self.more() {
            return more;
        }
        let made = Box::into_raw(Box::new(Self::new()));
        let (null, order) = (ptr::null_mut(), Ordering::AcqRel);
        match self.more.compare_exchange(null, made, order, Ordering::Acquire) {
            // SAFETY: made above, and from here on nobody takes it back.
            Ok(_) => unsafe { &*made },
            Err(theirs) => {
                // SAFETY: made above, and nobody else has seen it.
                drop(unsafe { Box::from_raw(made) });
                // SAFETY: another thread's, made as this one was, and never taken back.
                unsafe { &*theirs }
            }
        }
    }
}

/// Replaces each of the parent's descriptors by a socket that is connected to nothing. Called in a forked
/// child before anything else runs there: makes atomic accesses and system calls and nothing else.
fn replace_descriptors() {
    let mut unconnected: Option<OwnedFd> = None;
    let mut places = Some(&PLACES);
    while let Some(here) = places {
        for number in &here.numbers {
            let number = number.load(Ordering::Acquire);
            if number == FREE {
                continue;
            }
            if unconnected.is_none() {
                let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
                unconnected = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).ok();
            }
            // With no descriptor left the child keeps its copies. There is nowhere to report it.
            let Some(unconnected) = &unconnected else { return };
            // SAFETY: open, as a number is taken out of its place before it is closed; its owner in this
            // process closes whatever it stands for from now on.
            let mut own = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
            // Fails for no open descriptor.
            let _ = rustix::io::dup3(unconnected, &mut own, DupFlags::CLOEXEC);
        }
        places = here.more();
    }
}

/// Keeps a descriptor from forked children: in them the same number stands for a socket that is connected
/// to nothing. Dropped before the descriptor is closed, so that it never applies to a later descriptor of
/// that number.
#[derive(Debug)]
pub(crate) struct NotInherited(&'static AtomicI32);

impl NotInherited {
    pub(crate) fn new(descriptor: &impl AsFd) -> Self {
        register();
        let number = descriptor.as_fd().as_raw_fd();
        let mut places = &PLACES;
        loop {
            for place in &places.numbers {
                let (order, otherwise) = (Ordering::AcqRel, Ordering::Relaxed);
                if place.compare_exchange(FREE, number, order, otherwise).is_ok() {
                    return Self(place);
                }
            }
            places = places.grow();
        }
    }
}

impl Drop for NotInherited {
    fn drop(&mut self) {
        self.0.store(FREE, Ordering::Release);
    }
}

/// Something with a descriptor that forked children do not inherit.
#[derive(Debug)]
pub(crate) struct Uninherited<T: AsFd> {
    /// First, so that it is dropped before the descriptor is closed.
    _own: NotInherited,
    held: T,
}

impl<T: AsFd> Uninherited<T> {
    pub(crate) fn new(held: T) -> Self {
        Self { _own: NotInherited::new(&held), held }
    }
}

impl<T: AsFd> Deref for Uninherited<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.held
    }
}

impl<T: AsFd> AsFd for Uninherited<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.held.as_fd()
    }
}

#[cfg(test)]
impl ProcessId {
    /// A maker that is another process.
    pub(crate) fn elsewhere() -> Self {
        let here = Self::here();
        Self { forks: here.forks + 1, pid: here.pid + 1 }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeWriter, Read};

    use rustix::process::{Pid, WaitOptions, waitpid};

    use super::*;

    unsafe extern "C" {
        fn fork() -> c_int;
        fn _exit(status: c_int) -> !;
    }

    /// A child that lives until `end` is dropped here, and then says whether `check` was true.
    fn child(end: PipeWriter, mut until: impl Read, check: impl Fn() -> bool) -> (Pid, PipeWriter) {
        // SAFETY: the child makes system calls only, and ends.
        let pid = unsafe { fork() };
        if pid == 0 {
            drop(end);
            let good = check() && matches!(until.read(&mut [0]), Ok(0));
            // SAFETY: ends the process at once, as a child of a program with threads must.
            unsafe { _exit(c_int::from(!good)) };
        }
        (Pid::from_raw(pid).expect("a child"), end)
    }

    #[test]
    fn a_child_does_not_keep_connections_open() {
        // More than fit the first list of them.
        let pairs: Vec<_> = (0..200)
            .map(|_| {
                let (flags, kind) = (SocketFlags::CLOEXEC, SocketType::SEQPACKET);
                let pair = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None);
                let (own, other) = pair.expect("two sockets");
                (Uninherited::new(own), other)
            })
            .collect();
        let (own, others): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let (until, end) = std::io::pipe().expect("a pipe");
        let closed_there = || own.iter().all(|own| rustix::io::write(&**own, b"y").is_err());
        let (pid, end) = child(end, until, closed_there);
        for (own, other) in own.iter().zip(&others) {
            rustix::io::write(&**own, b"x").expect("the parent's is as it was");
            assert_eq!(rustix::io::read(other, &mut [0; 2]), Ok(1));
        }
        drop(own);
        for other in &others {
            assert_eq!(rustix::io::read(other, &mut [0]), Ok(0), "closed, and the child lives");
        }
        drop(end);
        let (_, status) = waitpid(Some(pid), WaitOptions::empty()).expect("ours").expect("ended");
        assert_eq!(status.exit_status(), Some(0), "the child saw its copies closed");
    }

    #[test]
    fn a_descriptor_that_was_given_up_is_left_alone() {
        let (until, end) = std::io::pipe().expect("a pipe");
        let (reader, writer) = std::io::pipe().expect("a pipe");
        // The number may have been another descriptor's before.
        drop(NotInherited::new(&writer));
        let writable = || rustix::io::write(&writer, b"x") == Ok(1);
        let (pid, end) = child(end, until, writable);
        drop(end);
        let (_, status) = waitpid(Some(pid), WaitOptions::empty()).expect("ours").expect("ended");
        assert_eq!(status.exit_status(), Some(0), "the child writes where it could");
        assert_eq!(rustix::io::read(&reader, &mut [0; 2]), Ok(1));
    }
}
