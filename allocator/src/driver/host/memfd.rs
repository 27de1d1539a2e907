//! Segments as sealed memory files.
//!
//! The seals make sharing safe: nobody, not even the maker, can shrink a file that another rank has mapped
//! (whose next access would be a `SIGBUS`), and nobody can remove the seals. A file without them is refused
//! on import.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::{Errno, FdFlags};
use rustix::process::{Resource, getrlimit};

use super::{HostOptions, available, scratch};
use crate::byte_size::ByteSize;
use crate::descriptors::within_hard_limit;
use crate::{Error, Result};

pub(super) const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Memory is committed in steps of this size. Available memory is checked again before each step, as other
/// ranks of the machine commit theirs at the same time.
const STEP: u64 = 1 << 30;

/// Makes a sealed file of `bytes`, committed as the options say; also returns the mapping through which it
/// was committed, if it was. `bytes` is a multiple of a page.
pub(super) fn create(
    bytes: u64,
    options: &HostOptions,
) -> Result<(OwnedFd, Option<scratch::ScratchMapping>)> {
    let fd = create_lazily(bytes, options)?;
    let committed = if options.populate { commit(fd.as_fd(), bytes, options)? } else { None };
    Ok((fd, committed))
}

/// Makes a sealed file of `bytes`, whose pages come with their first accesses. What is available is checked as the
/// options say.
pub(super) fn create_lazily(bytes: u64, options: &HostOptions) -> Result<OwnedFd> {
    if options.check_available {
        available::check(bytes)?;
    }
    check_file_size(bytes)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = with_free_descriptor(|| rustix::fs::memfd_create("symmpool", flags))?;
    rustix::fs::ftruncate(&fd, bytes).map_err(|cause| no_memory(bytes, cause))?;
    rustix::fs::fcntl_add_seals(&fd, SEALS)
        .map_err(|cause| Error::system("sealing a segment", cause))?;
    Ok(fd)
}

/// Refuses a file that the process may not make: the kernel would kill it with SIGXFSZ.
fn check_file_size(bytes: u64) -> Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(limit) if bytes > limit => Err(Error::out_of_memory(format!(
            "a segment of {} is a file larger than this process may make: RLIMIT_FSIZE (ulimit -f) is \
             {limit} bytes; raise it",
            ByteSize(bytes)
        ))),
        _ => Ok(()),
    }
}

fn commit(
    fd: BorrowedFd<'_>,
    bytes: u64,
    options: &HostOptions,
) -> Result<Option<scratch::ScratchMapping>> {
    // Through a mapping, because only a mapping can ask for huge pages. If there are not enough
    // addresses for one, the pages are small but just as committed.
    let mapping = scratch::ScratchMapping::new(fd, bytes, options.huge_pages).ok();
    let mut done = 0;
    while done < bytes {
        let step = STEP.min(bytes - done);
        if options.check_available && done > 0 {
            available::check(bytes - done)?;
        }
        let populated = match &mapping {
            Some(mapping) => mapping.populate(done, step),
            None => Err(Errno::INVAL),
        };
        match populated {
            // Before Linux 5.14.
            Err(Errno::INVAL) => allocate(fd, done, step),
            other => other,
        }
        .map_err(|cause| no_memory(bytes, cause))?;
        done += step;
    }
    Ok(mapping)
}

fn allocate(fd: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<(), Errno> {
    loop {
        match rustix::fs::fallocate(fd, FallocateFlags::empty(), offset, bytes) {
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}

/// A second descriptor of the same file.
pub(super) fn duplicate(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    with_free_descriptor(|| rustix::io::fcntl_dupfd_cloexec(fd, 0))
}

/// Accepts a peer's file only if it is as drivers make it: `bytes` long and sealed.
pub(super) fn import(fd: OwnedFd, bytes: u64) -> Result<OwnedFd> {
    let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|cause| {
        Error::refused(format!(
            "a peer handed over a descriptor that is not a memory file ({cause}); expected a \
             segment of {}",
            ByteSize(bytes)
        ))
    })?;
    if !seals.contains(SEALS) || seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err(Error::refused(format!(
            "a peer handed over a memory file sealed as {seals:?}; expected one that can be \
             written and is sealed as {SEALS:?}, so that it cannot shrink under this rank"
        )));
    }
    let found =
        rustix::fs::fstat(&fd).map_err(|cause| Error::system("fstat of a segment", cause))?;
    if u64::try_from(found.st_size) != Ok(bytes) {
        return Err(Error::refused(format!(
            "a peer handed over a segment of {} bytes; expected {bytes}",
            found.st_size
        )));
    }
    rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC)
        .map_err(|cause| Error::system("marking a segment close-on-exec", cause))?;
    Ok(fd)
}

fn no_memory(bytes: u64, cause: Errno) -> Error {
    match cause {
        // EFAULT: a page could not be had while populating; EFBIG, EINVAL: no file is that large.
        Errno::NOMEM | Errno::NOSPC | Errno::FAULT | Errno::FBIG | Errno::INVAL => {
            Error::out_of_memory(format!(
                "the system has not {} of memory to give: {cause}; free memory or make pools \
                 smaller",
                ByteSize(bytes)
            ))
        }
        _ => Error::system(format!("committing a segment of {}", ByteSize(bytes)), cause),
    }
}

/// Makes a descriptor, up to the hard limit.
fn with_free_descriptor(make: impl Fn() -> Result<OwnedFd, Errno>) -> Result<OwnedFd> {
    within_hard_limit(make).map_err(|cause| match cause {
        Errno::MFILE | Errno::NFILE => {
            let limit = getrlimit(Resource::Nofile);
            let limit = limit.maximum.map_or("unlimited".to_owned(), |n| n.to_string());
            Error::out_of_memory(format!(
                "no file descriptor for a segment: {cause}; the hard limit is {limit} (ulimit \
                 -Hn): raise it, or use fewer and larger segments"
            ))
        }
        Errno::NOMEM | Errno::NOSPC => {
            Error::out_of_memory(format!("no kernel memory for a segment: {cause}"))
        }
        Errno::NOSYS => Error::unsupported(format!(
            "memory shared between processes needs memfd_create, which this kernel lacks: {cause}"
        )),
        _ => Error::system("making a descriptor for a segment", cause),
    })
}
