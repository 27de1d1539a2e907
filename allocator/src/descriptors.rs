//! File descriptors: the limits of open files, and descriptors that travel over Unix sockets.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
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

/// Raises the soft limit, if need be, so that `count` more descriptors can be opened, as far as the hard
/// limit allows it. Called before calls that drop the descriptors for which there is no room, and that
/// then report it.
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

/// The most descriptors in one message; the kernel takes up to 253.
pub(crate) const MAX_PER_MESSAGE: usize = 128;

/// Sends `bytes`, and `fds` with them, over a Unix socket by one call; returns how many bytes were sent.
/// Fails with [`Errno::INVAL`] for more than 128 descriptors.
#[cfg_attr(not(feature = "testing"), allow(unreachable_pub))]
pub fn send_with_descriptors(
    socket: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PER_MESSAGE))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)
}

/// Result of one call of [`receive_with_descriptors`].
#[derive(Debug)]
#[cfg_attr(not(feature = "testing"), allow(unreachable_pub))]
pub struct ReceivedMessage {
    /// How many bytes of the buffer are filled; 0 at the end of the connection.
    pub bytes: usize,
    /// The descriptors that came with them, close-on-exec.
    pub fds: Vec<OwnedFd>,
    /// Whether bytes or descriptors were dropped for lack of room.
    pub flags: ReturnFlags,
}

/// Receives into `buffer` from a Unix socket by one call, with at most 128 descriptors.
#[cfg_attr(not(feature = "testing"), allow(unreachable_pub))]
pub fn receive_with_descriptors(
    socket: impl AsFd,
    buffer: &mut [u8],
    flags: RecvFlags,
) -> Result<ReceivedMessage, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PER_MESSAGE))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let message =
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = part {
            fds.extend(received);
        }
    }
    Ok(ReceivedMessage { bytes: message.bytes, fds, flags: message.flags })
}
