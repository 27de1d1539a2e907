//! What belongs to the process that made it.
//!
//! A forked child has a copy of every object, but one set of shared memory, signals and connections
//! with its parent: what it did with them would be done in the parent's name, to all ranks. And it has
//! none of its parent's other threads. So it is refused what its parent made.
//!
//! Nor does it keep its parent's sockets: peers see that a process is gone because its connections are
//! closed, and those would stay open as long as a child (a worker that loads data, say) has them, too.
//!
//! The C library tells of a fork, so that asking costs one load; asking the system who we are would
//! cost half of a small call. A child made past the C library (`clone` by hand) is not seen.

#![allow(unsafe_code)] // hears of forks

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

/// How many forks lie between this process and the one that first asked.
static FORKS: AtomicU32 = AtomicU32::new(0);
static LISTENING: Once = Once::new();

type Handler = Option<unsafe extern "C" fn()>;

unsafe extern "C" {
    fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int;
}

/// Called in every forked child, in which only a few things may be done: this is one of them.
extern "C" fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    leave_to_the_parent();
}

/// Asks the C library, once, to tell of forks.
fn listen() {
    LISTENING.call_once(|| {
        // SAFETY: the C library's function by its own signature; the handler is a function of this
        // library, which the C library forgets when it unloads that, and makes only atomic accesses
        // and system calls.
        let told = unsafe { pthread_atfork(None, None, Some(forked)) };
        if told != 0 {
            tracing::warn!(told, "no memory to be told of forks; children are not refused");
        }
    });
}

/// The process that made something.
#[derive(Clone, Copy, Debug)]
pub struct Maker {
    forks: u32,
    pid: u32,
}

impl Maker {
    /// This process.
    pub fn here() -> Self {
        listen();
        Self { forks: FORKS.load(Ordering::Relaxed), pid: std::process::id() }
    }

    /// Whether that is this process, not one that it was forked from.
    #[inline]
    pub fn is_here(&self) -> bool {
        self.forks == FORKS.load(Ordering::Relaxed)
    }

    /// Refuses the use of `what` in a child of the process that made it: [`Error::is_invalid_state`].
    #[inline]
    pub fn check(&self, what: &str) -> Result<()> {
        if self.is_here() { Ok(()) } else { Err(self.elsewhere(what)) }
    }

    #[cold]
    fn elsewhere(&self, what: &str) -> Error {
        Error::invalid_state(format!(
            "{what} of process {} is used in process {}, forked from it; make a group, and what is \
             needed on it, after the fork",
            self.pid,
            std::process::id()
        ))
    }
}

/// Descriptors that belong to this process alone, a number or [`FREE`] each. There are more where these
/// are taken: a list that only grows, and that a forked child can walk whatever its parent's other
/// threads were doing.
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

    /// Those after these, if there are any.
    fn more(&self) -> Option<&'static Self> {
        // SAFETY: null, or made by `grow` from a box that nobody takes back.
        unsafe { self.more.load(Ordering::Acquire).as_ref() }
    }

    /// Those after these, made if there are none.
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

/// Puts a socket that is connected to nobody in the place of each descriptor that belongs to the parent.
/// Called in a forked child before anything else runs there: makes atomic accesses and system calls and
/// nothing else.
fn leave_to_the_parent() {
    let mut nobodys: Option<OwnedFd> = None;
    let mut places = Some(&PLACES);
    while let Some(here) = places {
        for number in &here.numbers {
            let number = number.load(Ordering::Acquire);
            if number == FREE {
                continue;
            }
            if nobodys.is_none() {
                let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
                nobodys = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).ok();
            }
            // Where no descriptor is left the child keeps its copies. Nobody could be told.
            let Some(nobodys) = &nobodys else { return };
            // SAFETY: open, as a number is taken out of its place before it is closed; whoever owns it
            // in this process closes what it stands for from now on.
            let mut own = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
            // Fails for no open descriptor.
            let _ = rustix::io::dup3(nobodys, &mut own, DupFlags::CLOEXEC);
        }
        places = here.more();
    }
}

/// Keeps a descriptor from forked children: in them the same number stands for a socket that is
/// connected to nobody. To be dropped before the descriptor is closed, so that no later one of that number
/// is meant.
#[derive(Debug)]
pub(crate) struct NotInherited(&'static AtomicI32);

impl NotInherited {
    pub(crate) fn new(descriptor: &impl AsFd) -> Self {
        listen();
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

/// Something with a descriptor that forked children do not have.
#[derive(Debug)]
pub(crate) struct Own<T: AsFd> {
    /// First, so that it is dropped before the descriptor is closed.
    _own: NotInherited,
    held: T,
}

impl<T: AsFd> Own<T> {
    pub(crate) fn new(held: T) -> Self {
        Self { _own: NotInherited::new(&held), held }
    }
}

impl<T: AsFd> Deref for Own<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.held
    }
}

impl<T: AsFd> AsFd for Own<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.held.as_fd()
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
                (Own::new(own), other)
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
        // As if the number had been another descriptor's before.
        drop(NotInherited::new(&writer));
        let writable = || rustix::io::write(&writer, b"x") == Ok(1);
        let (pid, end) = child(end, until, writable);
        drop(end);
        let (_, status) = waitpid(Some(pid), WaitOptions::empty()).expect("ours").expect("ended");
        assert_eq!(status.exit_status(), Some(0), "the child writes where it could");
        assert_eq!(rustix::io::read(&reader, &mut [0; 2]), Ok(1));
    }
}
