//! The store of ranks that share a filesystem.
//!
//! Everything is a file of one directory:
//!
//! | name | holds |
//! | --- | --- |
//! | `v-KEY` | a value |
//! | `g-KEY/part-RANK` | a rank's part of a gather: its world size (4 bytes, little endian), its value |
//! | `g-KEY/failed` | why a gather failed, for everyone in it |
//! | `g-KEY/readers` | how many ranks have read all parts |
//! | `lock` | nothing; whoever changes a value or counts readers holds its `flock` |
//! | `tmp-…` | a file being written, or a gather being removed |
//!
//! Files appear complete: they are written under a temporary name, then renamed (values) or
//! hard-linked (parts). A link fails when the name exists, which is how a second rank with the
//! same number is noticed. Waiting is polling with a growing pause.
//!
//! The last reader of a gather removes it. That is safe because a rank counts itself, under the
//! lock, only after it has read every part: when the count reaches the world nobody needs the
//! files, and the directory is renamed away before it is emptied, so that nobody sees half of
//! it. A gather that some rank never finished stays until the directory is removed by whoever
//! made it, as do the temporary files of killed processes.
//!
//! The filesystem must have hard links and `flock` that works between its users (local
//! filesystems, NFS 3 and later, Lustre with `-o flock`). On NFS another host's files may be
//! seen seconds late. Anyone who can write to the directory can write anything to the store.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind as IoKind, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

use super::gathering::Gathering;
use super::random::random;
use super::traffic::Counters;
use super::{Gathered, MAX_VALUE, Store, Traffic, check_gather, check_limits, counter_sum};
use crate::error::ErrorKind;
use crate::{Deadline, Error, Result};

/// A store in a directory. Clones, other instances and other processes that open the same
/// directory see the same content; each handle counts its own [`Traffic`], file by file (polls
/// that find nothing are not counted).
#[derive(Debug)]
pub struct FileStore {
    dir: Arc<Path>,
    names: Arc<TemporaryNames>,
    counters: Counters,
}

/// Makes names no other instance makes: 128 random bits and a count.
#[derive(Debug)]
struct TemporaryNames {
    instance: String,
    next: AtomicU64,
}

impl Clone for FileStore {
    fn clone(&self) -> Self {
        Self { dir: self.dir.clone(), names: self.names.clone(), counters: Counters::default() }
    }
}

/// The lock of the directory; released on drop.
struct Locked {
    _file: File,
}

/// Pauses between polls: 1 ms, growing to 50 ms, never beyond the deadline.
struct Backoff(Duration);

impl Backoff {
    fn new() -> Self {
        Self(Duration::from_millis(1))
    }

    fn pause(&mut self, deadline: Deadline) {
        std::thread::sleep(self.0.min(deadline.remaining()));
        self.0 = (self.0 * 3 / 2).min(Duration::from_millis(50));
    }
}

/// A file name for `key` that is one path component: letters, digits, `_` and `-` stand for
/// themselves, every other byte is `%XX`; where that gets long, a hash stands for the key.
fn file_name(prefix: &str, key: &str) -> String {
    const LONGEST: usize = 200;
    let mut name = format!("{prefix}-");
    for byte in key.bytes() {
        if byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-' {
            name.push(char::from(byte));
        } else {
            name.push_str(&format!("%{byte:02X}"));
        }
    }
    if name.len() > LONGEST {
        // No encoded key contains a '#', so hashed names are apart from encoded ones.
        return format!("{prefix}-#{}", blake3::hash(key.as_bytes()).to_hex());
    }
    name
}

fn io_error(what: &str, path: &Path, error: &std::io::Error) -> Error {
    Error::system(format!("file store: {what} {}", path.display()), error)
}

/// The file's bytes, at most `limit` of them; `None` when there is no such file.
fn read_at_most(path: &Path, limit: usize) -> Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == IoKind::NotFound => return Ok(None),
        Err(error) => return Err(io_error("cannot open", path, &error)),
    };
    let mut bytes = Vec::new();
    file.take(limit as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| io_error("cannot read", path, &error))?;
    if bytes.len() > limit {
        return Err(Error::invalid_argument(format!(
            "file store: {} has more than {limit} bytes; it was not written by a store",
            path.display()
        )));
    }
    Ok(Some(bytes))
}

impl FileStore {
    /// Opens the store in `dir`, which is created, for this user only, if need be. One directory
    /// serves one job: what an earlier one left in it is content like any other.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(|error| io_error("cannot create", dir, &error))?;
        // Later changes of the working directory must not move the store.
        let dir = fs::canonicalize(dir).map_err(|error| io_error("cannot open", dir, &error))?;
        Ok(Self {
            dir: dir.into(),
            names: Arc::new(TemporaryNames {
                instance: format!("{:032x}", u128::from_le_bytes(random()?)),
                next: AtomicU64::new(0),
            }),
            counters: Counters::default(),
        })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn temporary(&self) -> PathBuf {
        let next = self.names.next.fetch_add(1, Ordering::Relaxed);
        self.dir.join(format!("tmp-{}-{next}", self.names.instance))
    }

    /// Writes `pieces` to a new temporary file.
    fn write_temporary(&self, pieces: &[&[u8]]) -> Result<PathBuf> {
        let path = self.temporary();
        let write = || -> std::io::Result<()> {
            let mut file = OpenOptions::new().write(true).create_new(true).open(&path)?;
            for piece in pieces {
                file.write_all(piece)?;
            }
            Ok(())
        };
        match write() {
            Ok(()) => Ok(path),
            Err(error) => {
                let _ = fs::remove_file(&path);
                Err(io_error("cannot write", &path, &error))
            }
        }
    }

    /// Replaces `path` by a file of `bytes`, at once.
    fn replace(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let temporary = self.write_temporary(&[bytes])?;
        fs::rename(&temporary, path).map_err(|error| {
            let _ = fs::remove_file(&temporary);
            io_error("cannot rename to", path, &error)
        })
    }

    /// Makes `path` a file of `pieces`; false when it already exists.
    fn create(&self, path: &Path, pieces: &[&[u8]]) -> Result<bool> {
        let temporary = self.write_temporary(pieces)?;
        let linked = fs::hard_link(&temporary, path);
        let _ = fs::remove_file(&temporary);
        match linked {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == IoKind::AlreadyExists => Ok(false),
            Err(error) => Err(io_error("cannot link", path, &error)),
        }
    }

    fn lock(&self, deadline: Deadline) -> Result<Locked> {
        let path = self.dir.join("lock");
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(|error| io_error("cannot open", &path, &error))?;
        let mut backoff = Backoff::new();
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Locked { _file: file }),
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io_error("cannot lock", &path, &error.into())),
            }
            if deadline.expired() {
                return Err(Error::timeout(
                    format!("for the lock {}", path.display()),
                    deadline.budget(),
                    Vec::new(),
                ));
            }
            backoff.pause(deadline);
        }
    }

    fn value_path(&self, key: &str) -> PathBuf {
        self.dir.join(file_name("v", key))
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        check_limits(key, value)?;
        self.counters.asked(key.len() + value.len());
        // The lock orders a set before or after an add, never in its middle.
        let _lock = self.lock(deadline)?;
        self.replace(&self.value_path(key), value)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        check_limits(key, &[])?;
        self.counters.asked(key.len());
        let path = self.value_path(key);
        let mut backoff = Backoff::new();
        loop {
            if let Some(value) = read_at_most(&path, MAX_VALUE)? {
                self.counters.answered(value.len());
                return Ok(value);
            }
            if deadline.expired() {
                return Err(Error::timeout(
                    format!("waiting for the store's key {key:?}"),
                    deadline.budget(),
                    Vec::new(),
                ));
            }
            backoff.pause(deadline);
        }
    }

    fn add(&self, key: &str, delta: i64, deadline: Deadline) -> Result<i64> {
        check_limits(key, &[])?;
        self.counters.asked(key.len() + size_of::<i64>());
        let path = self.value_path(key);
        let _lock = self.lock(deadline)?;
        let old = read_at_most(&path, MAX_VALUE)?;
        let sum = counter_sum(key, old.as_deref(), delta)?;
        self.replace(&path, sum.to_string().as_bytes())?;
        self.counters.answered(size_of::<i64>());
        Ok(sum)
    }

    fn delete(&self, key: &str, deadline: Deadline) -> Result<bool> {
        check_limits(key, &[])?;
        self.counters.asked(key.len());
        let path = self.value_path(key);
        let _lock = self.lock(deadline)?;
        match fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == IoKind::NotFound => Ok(false),
            Err(error) => Err(io_error("cannot remove", &path, &error)),
        }
    }

    fn all_gather(
        &self,
        key: &str,
        rank: u32,
        world: u32,
        value: &[u8],
        deadline: Deadline,
    ) -> Result<Gathered> {
        check_gather(key, rank, world, value)?;
        let gather = Gather { store: self, key, dir: self.dir.join(file_name("g", key)), world };
        gather.contribute(rank, value)?;
        let gathered = gather.collect(rank, deadline)?;
        gather.count_reader(deadline);
        Ok(gathered)
    }

    fn traffic(&self) -> Traffic {
        self.counters.snapshot()
    }
}

/// One rank's view of one gather.
struct Gather<'a> {
    store: &'a FileStore,
    key: &'a str,
    dir: PathBuf,
    world: u32,
}

impl Gather<'_> {
    fn part_path(&self, rank: u32) -> PathBuf {
        self.dir.join(format!("part-{rank}"))
    }

    fn contribute(&self, rank: u32, value: &[u8]) -> Result<()> {
        match fs::DirBuilder::new().mode(0o700).create(&self.dir) {
            Err(error) if error.kind() != IoKind::AlreadyExists => {
                return Err(io_error("cannot create", &self.dir, &error));
            }
            _ => {}
        }
        self.store.counters.asked(self.key.len() + value.len());
        if self.store.create(&self.part_path(rank), &[&self.world.to_le_bytes(), value])? {
            return Ok(());
        }
        Err(self.fail(Error::mismatch(format!(
            "two ranks with number {rank} in all_gather {:?}; each of the {} ranks contributes \
             once",
            self.key, self.world
        ))))
    }

    /// Leaves word of `error` for the others; the first such word is everyone's.
    fn fail(&self, error: Error) -> Error {
        let Ok(bytes) = postcard::to_stdvec(error.kind()) else { return error };
        match self.store.create(&self.dir.join("failed"), &[&bytes]) {
            Ok(_) => error,
            Err(other) => error.context(format!("and the others could not be told ({other})")),
        }
    }

    /// Every rank's part, once all are there. Equal parts are held once.
    fn collect(&self, rank: u32, deadline: Deadline) -> Result<Gathered> {
        let mut gathering = Gathering::<Arc<[u8]>>::new(self.world);
        let mut backoff = Backoff::new();
        loop {
            self.check_failed()?;
            for peer in self.arrived()? {
                if peer >= self.world || gathering.has(peer) {
                    continue;
                }
                // Gone again: the peer timed out and took its part back.
                let Some((world, part)) = self.read_part(peer)? else { continue };
                let arrived = gathering.arrive(self.key, peer, world, part.into());
                if arrived.map_err(|error| self.fail(error))? {
                    let (distinct, which) = gathering.finish();
                    return Ok(Gathered::from_distinct(distinct, which)
                        .expect("a finished gather has a part for every rank"));
                }
            }
            if deadline.expired() {
                // Take the part back, so that the next try is not a second rank.
                let _ = fs::remove_file(self.part_path(rank));
                return Err(Error::timeout(
                    format!("in all_gather {:?}", self.key),
                    deadline.budget(),
                    gathering.missing(),
                ));
            }
            backoff.pause(deadline);
        }
    }

    fn check_failed(&self) -> Result<()> {
        const LONGEST: usize = 64 << 10;
        let path = self.dir.join("failed");
        let Some(bytes) = read_at_most(&path, LONGEST)? else { return Ok(()) };
        Err(match postcard::from_bytes::<ErrorKind>(&bytes) {
            Ok(kind) => Error::from_kind(kind),
            Err(error) => {
                Error::system(format!("file store: {} is damaged", path.display()), error)
            }
        })
    }

    /// The ranks whose parts are there: one listing of the directory, whatever the world.
    fn arrived(&self) -> Result<Vec<u32>> {
        let error = |error| io_error("cannot list", &self.dir, &error);
        let mut ranks = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(error)? {
            let name = entry.map_err(error)?.file_name();
            let rank = name.to_str().and_then(|name| name.strip_prefix("part-"));
            if let Some(rank) = rank.and_then(|rank| rank.parse::<u32>().ok()) {
                ranks.push(rank);
            }
        }
        Ok(ranks)
    }

    /// The world size `peer` has in mind, and its part; `None` when there is no such file.
    fn read_part(&self, peer: u32) -> Result<Option<(u32, Vec<u8>)>> {
        let path = self.part_path(peer);
        let Some(mut bytes) = read_at_most(&path, MAX_VALUE + size_of::<u32>())? else {
            return Ok(None);
        };
        let Some(world) = bytes.first_chunk().map(|world| u32::from_le_bytes(*world)) else {
            return Err(Error::system(
                format!("file store: {} is damaged", path.display()),
                "shorter than its header",
            ));
        };
        bytes.drain(..size_of::<u32>());
        self.store.counters.asked(0);
        self.store.counters.answered(bytes.len());
        Ok(Some((world, bytes)))
    }

    /// Counts this rank as done; the last one removes the gather. The result has been read by
    /// then, so what fails here fails no one: the files stay.
    fn count_reader(&self, deadline: Deadline) {
        let removed = || -> Result<()> {
            // Worth a moment even when the last part came just in time.
            let patience = Deadline::after(deadline.remaining().max(Duration::from_millis(200)));
            let lock = self.store.lock(patience)?;
            let path = self.dir.join("readers");
            let readers = read_at_most(&path, 64)?;
            let readers = counter_sum("readers", readers.as_deref(), 1)?;
            if readers < i64::from(self.world) {
                return self.store.replace(&path, readers.to_string().as_bytes());
            }
            let away = self.store.temporary();
            fs::rename(&self.dir, &away).map_err(|e| io_error("cannot rename", &self.dir, &e))?;
            drop(lock);
            fs::remove_dir_all(&away).map_err(|error| io_error("cannot remove", &away, &error))
        };
        if let Err(error) = removed() {
            tracing::debug!(key = self.key, %error, "a finished gather's files stay");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_one_component_and_distinct() {
        let keys =
            ["a", "../a", "a/b", "a%2Fb", "a/../b", ".", "..", "\0", "ключ", "A", "a b", "#"];
        let names: std::collections::BTreeSet<_> =
            keys.iter().map(|key| file_name("v", key)).collect();
        assert_eq!(names.len(), keys.len());
        for name in &names {
            assert!(name.starts_with("v-"), "{name}");
            assert!(!name.contains(['/', '\0', '.']), "{name}");
        }
        let long = [file_name("v", &"x".repeat(1024)), file_name("v", &"x".repeat(1023))];
        assert_ne!(long[0], long[1]);
        assert!(long.iter().all(|name| name.len() < 255));
    }

    #[test]
    fn keys_do_not_leave_the_directory() {
        let outside = tempfile::tempdir().unwrap();
        let store = FileStore::open(outside.path().join("store")).unwrap();
        store.set("../escaped", b"x", Deadline::seconds(10)).unwrap();
        let names: Vec<_> =
            fs::read_dir(outside.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["store"]);
        assert_eq!(store.get("../escaped", Deadline::seconds(10)).unwrap(), b"x");
    }

    #[test]
    fn the_last_reader_removes_a_gather() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        std::thread::scope(|scope| {
            for rank in 0..4 {
                let store = store.clone();
                scope.spawn(move || {
                    store.all_gather("g", rank, 4, b"part", Deadline::seconds(60)).unwrap()
                });
            }
        });
        let names: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["lock"]);
    }

    #[test]
    fn a_held_lock_bounds_the_wait_by_the_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        let held = store.lock(Deadline::seconds(10)).unwrap();
        let soon = Deadline::after(Duration::from_millis(30));
        assert!(store.add("n", 1, soon).unwrap_err().is_timeout());
        drop(held);
        assert_eq!(store.add("n", 1, Deadline::seconds(10)).unwrap(), 1);
    }

    #[test]
    fn a_damaged_part_is_an_error_not_a_panic() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        let gather = dir.path().join("g-g");
        fs::create_dir(&gather).unwrap();
        fs::write(gather.join("part-1"), b"x").unwrap();
        fs::write(gather.join("part-99999999999"), b"x").unwrap();
        let error = store.all_gather("g", 0, 2, b"", Deadline::seconds(10)).unwrap_err();
        assert!(error.to_string().contains("part-1 is damaged"), "{error}");
    }
}
