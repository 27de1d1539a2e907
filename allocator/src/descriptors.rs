//! File descriptors where the soft limit of open files is in the way.

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Resource, Rlimit};

/// Makes descriptors; where the soft limit is in the way, raises it to the hard one and tries once
/// more.
pub(crate) fn within_hard_limit<T>(make: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
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
