//! What belongs to the process that made it.
//!
//! A forked child has a copy of every object, but one set of shared memory, signals and connections
//! with its parent: what it did with them would be done in the parent's name, to all ranks. And it has
//! none of its parent's other threads. So it is refused what its parent made.
//!
//! The C library tells of a fork, so that asking costs one load; asking the system who we are would
//! cost half of a small call. A child made past the C library (`clone` by hand) is not seen.

#![allow(unsafe_code)] // hears of forks

use std::ffi::c_int;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

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
        LISTENING.call_once(|| {
            // SAFETY: the C library's function by its own signature; the handler is a function of this
            // library, which the C library forgets when it unloads that, and does one atomic addition.
            let told = unsafe { pthread_atfork(None, None, Some(forked)) };
            if told != 0 {
                tracing::warn!(told, "no memory to be told of forks; children are not refused");
            }
        });
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
