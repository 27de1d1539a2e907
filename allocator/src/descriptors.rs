//! File descriptors where the limits of open files are in the way.

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Resource, Rlimit};

use crate::Error;

/// Whether there is no descriptor left, for this process or on this machine.
pub(crate) fn are_used_up(errno: Errno) -> bool {
    matches!(errno, Errno::MFILE | Errno::NFILE)
}

/// Why there is no descriptor left in this process, and what to do about it.
pub(crate) fn shortage() -> String {
    let limit = rustix::process::getrlimit(Resource::Nofile).maximum;
    let limit = limit.map_or_else(|| "the machine's".to_owned(), |limit| format!("{limit}"));
    format!(
        "no file descriptor is left in process {}; its hard limit of open files is {limit}: close \
         some, or raise RLIMIT_NOFILE (ulimit -n)",
        std::process::id()
    )
}

/// An error of a call that makes a descriptor, `what` being that.
pub(crate) fn error(what: impl Into<String>, errno: Errno) -> Error {
    if are_used_up(errno) {
        return Error::out_of_memory(format!("{}: {}", what.into(), shortage()));
    }
    Error::system(what, errno)
}

/// How many descriptors this process may have at most.
pub(crate) fn hard_limit() -> usize {
    let limit = rustix::process::getrlimit(Resource::Nofile).maximum;
    limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

/// Makes descriptors; where the soft limit is in the way, raises it to the hard one and tries once
/// more.
pub(crate) fn within_hard_limit<T>(mut make: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    match make() {
        Err(Errno::MFILE) => {
            let limit = rustix::process::getrlimit(Resource::Nofile);
            let raised = Rlimit { current: limit.maximum, ..limit };
            tracing::info!(?limit, "out of file descriptors; raising the soft limit");
            // If this fails so will the second try, and that says why.
            let _ = rustix::process::setrlimit(Resource::Nofile, raised);
            make()
        }
        first => first,
    }
}

/// Sees to it that `count` more descriptors can be had, if the hard limit allows it: for calls that
/// lose what they have no room for. If they cannot, such a call says so.
pub(crate) fn make_room(count: usize) {
    if count == 0 {
        return;
    }
    // Only the kernel knows how many are open, so as many are opened as a test.
    let _ = within_hard_limit(|| {
        let first = eventfd(0, EventfdFlags::CLOEXEC)?;
        let more: Result<Vec<_>, Errno> =
            (1..count).map(|_| fcntl_dupfd_cloexec(&first, 0)).collect();
        more.map(drop)
    });
}
