//! Compiled kernels on disk, found by a hash of all that they were made from.
//!
//! A file is written under another name and renamed. It holds its key, length and checksum; if these are wrong the
//! kernel is compiled again. Device code runs with the user's rights, so only files of the user in a folder of the user
//! are trusted. No call fails because there is no cache: kernels are compiled then. The images that were not used for
//! longest are removed where there are more than a GiB of them.

#[cfg(test)]
mod tests;
mod trim;

use std::fs::{DirBuilder, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;
use symmpool_allocator::random_bytes;

const MAGIC: &[u8; 8] = b"symmjit1";
const HASH: usize = blake3::OUT_LEN;
/// Bytes of the head: magic, key, kind with padding, length.
const HEADER: usize = MAGIC.len() + HASH + 8 + 8;
/// Most bytes of a file; larger ones were not made here.
const LARGEST: u64 = 1 << 28;

/// Images that a process writes between two looks at how much there is.
const WRITES_A_LOOK: u32 = 64;

/// The hash of all that an image is made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key([u8; HASH]);

impl Key {
    /// The key of these parts. It depends on their order and on their boundaries.
    pub(super) fn of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hasher = blake3::Hasher::new();
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self(*hasher.finalize().as_bytes())
    }
}

/// A compiled kernel in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CachedKernel {
    pub(super) kind: u8,
    pub(super) bytes: Vec<u8>,
}

/// A folder of compiled kernels.
pub(super) struct Cache {
    folder: OwnedFd,
    path: PathBuf,
    /// The user whose files are trusted.
    owner: u32,
    /// Longest wait for another process that compiles the same kernel.
    wait: Duration,
    /// Whether a failure to write was logged already.
    reported: AtomicBool,
    /// How many images were written.
    writes: AtomicU32,
}

impl Cache {
    /// Opens the cache in `path`, which is created if it does not exist. The error says why there can be no cache.
    pub(super) fn open(path: &Path, wait: Duration) -> Result<Self, String> {
        Self::open_as(path, wait, rustix::process::geteuid().as_raw())
    }

    fn open_as(path: &Path, wait: Duration, owner: u32) -> Result<Self, String> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.map_err(|error| format!("it cannot be made: {error}"))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|error| format!("it cannot be opened: {error}"))?;
        let stat = rustix::fs::fstat(&folder).map_err(|error| error.to_string())?;
        trusted(&stat, owner)?;
        let (reported, writes) = (AtomicBool::new(false), AtomicU32::new(0));
        Ok(Self { folder, path: path.to_owned(), owner, wait, reported, writes })
    }

    /// The image of `key`: from disk, made here, or made by another process that is compiling it.
    pub(super) fn get_or_make<E>(
        &self,
        key: Key,
        make: impl FnOnce() -> Result<CachedKernel, E>,
    ) -> Result<CachedKernel, E> {
        if let Some(entry) = self.load(key) {
            return Ok(entry);
        }
        // If the lock fails, the kernel may be compiled twice, which does no harm.
        let lock = match self.lock(key) {
            Turn::Mine(lock) => Some(lock),
            Turn::Made(entry) => return Ok(entry),
            Turn::Unknown => None,
        };
        let entry = make()?;
        let kept = self.store(key, &entry).and_then(|()| {
            match self.writes.fetch_add(1, Ordering::Relaxed) % WRITES_A_LOOK {
                0 => self.trim(trim::MAX_KEPT),
                _ => Ok(()),
            }
        });
        if let Err(error) = kept
            && !self.reported.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("compiled kernels are not kept in {}: {error}", self.path.display());
        }
        drop(lock);
        Ok(entry)
    }

    /// The entry on disk for this key, if it is complete and its file belongs to the user.
    fn load(&self, key: Key) -> Option<CachedKernel> {
        let name = file_name(key);
        // Non-blocking, in case it is a pipe.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = match rustix::fs::openat(&self.folder, &name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return None,
            Err(error) => {
                self.distrust(&name, &error.to_string());
                return None;
            }
        };
        let read = || -> Result<CachedKernel, String> {
            let stat = rustix::fs::fstat(&file).map_err(|error| error.to_string())?;
            trusted(&stat, self.owner)?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                return Err("it is no ordinary file".to_owned());
            }
            let mut bytes = Vec::new();
            (&file).take(LARGEST).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
            let entry = decode(key, &bytes)?;
            trim::note_use(&file, &stat);
            Ok(entry)
        };
        read().inspect_err(|why| self.distrust(&name, why)).ok()
    }

    fn distrust(&self, name: &str, why: &str) {
        tracing::warn!(
            "{} is not used, the kernel is compiled: {why}",
            self.path.join(name).display()
        );
    }

    fn store(&self, key: Key, entry: &CachedKernel) -> Result<(), String> {
        let random = random_bytes().map_err(|error| error.to_string())?;
        let name = file_name(key);
        let temporary = format!("{name}.{:016x}", u64::from_le_bytes(random));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.folder, &temporary, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|error| error.to_string())?;
        let written = File::from(file)
            .write_all(&encode(key, entry))
            .map_err(|error| error.to_string())
            .and_then(|()| {
                rustix::fs::renameat(&self.folder, &temporary, &self.folder, &name)
                    .map_err(|error| error.to_string())
            });
        if written.is_err() {
            // It is no error if the file does not exist.
            let _ = rustix::fs::unlinkat(&self.folder, &temporary, AtFlags::empty());
        }
        written
    }

    /// Waits until this process may compile `key`, or another process has done so.
    fn lock(&self, key: Key) -> Turn<'_> {
        let name = format!("{}.lock", blake3::Hash::from_bytes(key.0).to_hex());
        let until = Instant::now() + self.wait;
        let mut pause = Duration::from_millis(1);
        loop {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let opened = rustix::fs::openat(&self.folder, &name, flags, Mode::RUSR | Mode::WUSR);
            let Ok(file) = opened else { return Turn::Unknown };
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    // The holder before may have removed the lock's file, and its name may be that of another file.
                    if let Some(entry) = self.load(key) {
                        return Turn::Made(entry);
                    }
                    if rustix::fs::fstat(&file).is_ok_and(|stat| stat.st_nlink == 1) {
                        return Turn::Mine(Lock { folder: &self.folder, name, file });
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => {
                    if Instant::now() >= until {
                        tracing::warn!(
                            "another process compiles a kernel since {:.1?} ({}): compiled here too",
                            self.wait,
                            self.path.join(&name).display()
                        );
                        return Turn::Unknown;
                    }
                    thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_millis(20));
                    if let Some(entry) = self.load(key) {
                        return Turn::Made(entry);
                    }
                }
                // A file system without locks.
                Err(_) => return Turn::Unknown,
            }
        }
    }
}

/// Who is to compile a kernel.
enum Turn<'a> {
    Mine(Lock<'a>),
    Made(CachedKernel),
    /// This process, without a lock: the file system has no locks, or the wait took too long.
    Unknown,
}

/// A lock that is held. Its file is removed with it, so that none are left. A process that waited for it sees that the
/// file has no name any more.
struct Lock<'a> {
    folder: &'a OwnedFd,
    name: String,
    file: OwnedFd,
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        if let Err(error) = rustix::fs::unlinkat(self.folder, &self.name, AtFlags::empty()) {
            tracing::debug!("{}: {error}", self.name);
        }
        // Closing it is not enough: a process that was forked meanwhile has the file open as well.
        if let Err(error) = rustix::fs::flock(&self.file, FlockOperation::Unlock) {
            tracing::debug!("{}: {error}", self.name);
        }
    }
}

/// Whether only the owner can have written the file or folder.
fn trusted(stat: &Stat, owner: u32) -> Result<(), String> {
    if stat.st_uid != owner {
        return Err(format!("it belongs to user {}, not to user {owner}", stat.st_uid));
    }
    if stat.st_mode & 0o022 != 0 {
        return Err(format!("others may write to it (mode {:o})", stat.st_mode & 0o777));
    }
    Ok(())
}

fn file_name(key: Key) -> String {
    format!("{}.kernel", blake3::Hash::from_bytes(key.0).to_hex())
}

fn encode(key: Key, entry: &CachedKernel) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + entry.bytes.len() + HASH);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&key.0);
    bytes.extend_from_slice(&[entry.kind, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend_from_slice(&(entry.bytes.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&entry.bytes);
    let checksum = blake3::hash(&bytes);
    bytes.extend_from_slice(checksum.as_bytes());
    bytes
}

/// Reads an entry from a file's bytes. The error says what is wrong with them.
fn decode(key: Key, bytes: &[u8]) -> Result<CachedKernel, String> {
    let (content, checksum) = bytes
        .split_last_chunk::<HASH>()
        .filter(|(content, _)| content.len() >= HEADER)
        .ok_or_else(|| format!("it is cut off: {} bytes", bytes.len()))?;
    if blake3::hash(content) != blake3::Hash::from_bytes(*checksum) {
        return Err("its checksum is wrong".to_owned());
    }
    let (header, image) = content.split_at(HEADER);
    let (magic, rest) = header.split_at(MAGIC.len());
    let (found, rest) = rest.split_at(HASH);
    let (kind, length) = rest.split_at(8);
    if magic != MAGIC || *found != key.0 || length != (image.len() as u64).to_le_bytes() {
        return Err("it holds something else".to_owned());
    }
    Ok(CachedKernel { kind: kind[0], bytes: image.to_vec() })
}
