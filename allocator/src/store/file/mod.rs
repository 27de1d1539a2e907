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
//! The last reader of a gather removes it. That is safe because a rank counts itself, under the lock, only
//! after it has read every part: when the count reaches the world size, no rank needs the files any more.
//! The directory is renamed before it is emptied, so that nobody sees half of it. A gather that some rank
//! never finished stays until whoever made the store's directory removes that, as do the temporary files
//! of killed processes.
//!
//! The filesystem must have hard links and `flock` that works between its users (local
//! filesystems, NFS 3 and later, Lustre with `-o flock`). On NFS another host's files may be
//! seen seconds late. Anyone who can write to the directory can write anything to the store, so one of another user, or
//! one that others may write to, is refused.

mod directory;
mod gather;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use directory::{Backoff, Directory, file_name, io_error, read_at_most};
use gather::FileGather;

use super::traffic::TrafficCounters;
use super::{
    Gathered, MAX_VALUE, Stop, Store, StoreTraffic, check_gather, check_limits, counter_sum,
};
use crate::{Deadline, Error, Result};

/// A store in a directory. Clones, other instances and other processes that open the same
/// directory see the same content; each handle counts its own [`StoreTraffic`], file by file (polls
/// that find nothing are not counted).
#[derive(Debug)]
pub struct FileStore {
    directory: Arc<Directory>,
    counters: TrafficCounters,
}

impl Clone for FileStore {
    fn clone(&self) -> Self {
        Self { directory: self.directory.clone(), counters: TrafficCounters::default() }
    }
}

impl FileStore {
    /// Opens the store in `dir`, which is created, for this user only, if need be. One directory
    /// serves one job: what an earlier one left in it is content like any other.
    ///
    /// # Errors
    ///
    /// [`Error::is_invalid_argument`] if `dir` is no directory, belongs to another user, or may be written to by others.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let directory = Arc::new(Directory::open(dir.as_ref())?);
        Ok(Self { directory, counters: TrafficCounters::default() })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        self.directory.path()
    }

    fn value_path(&self, key: &str) -> PathBuf {
        self.directory.path().join(file_name("v", key))
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        check_limits(key, value)?;
        self.counters.asked(key.len() + value.len());
        // The lock orders a set before or after an add, never in its middle.
        let _lock = self.directory.lock(deadline)?;
        self.directory.replace(&self.value_path(key), value)
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
        let _lock = self.directory.lock(deadline)?;
        let old = read_at_most(&path, MAX_VALUE)?;
        let sum = counter_sum(key, old.as_deref(), delta)?;
        self.directory.replace(&path, sum.to_string().as_bytes())?;
        self.counters.answered(size_of::<i64>());
        Ok(sum)
    }

    fn delete(&self, key: &str, deadline: Deadline) -> Result<bool> {
        check_limits(key, &[])?;
        self.counters.asked(key.len());
        let path = self.value_path(key);
        let _lock = self.directory.lock(deadline)?;
        match fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(io_error("cannot remove", &path, &error)),
        }
    }

    fn all_gather_until(
        &self,
        key: &str,
        rank: u32,
        world: u32,
        value: &[u8],
        deadline: Deadline,
        stop: Option<Stop<'_>>,
    ) -> Result<Gathered> {
        check_gather(key, rank, world, value)?;
        let gather = FileGather::new(&self.directory, &self.counters, key, world);
        gather.contribute(rank, value)?;
        let gathered = gather.collect(rank, deadline, stop)?;
        gather.count_reader(deadline);
        Ok(gathered)
    }

    fn traffic(&self) -> StoreTraffic {
        self.counters.snapshot()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

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
    fn a_rank_that_never_came_is_named_behind_those_who_gave_up() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        let after =
            |rank| store.all_gather("g", rank, 3, b"", Deadline::after(Duration::from_millis(40)));
        assert_eq!(after(0).unwrap_err().ranks(), [1, 2]);
        // Rank 0 was here, and took back what it had brought.
        assert_eq!(after(1).unwrap_err().ranks(), [2]);
        assert_eq!(after(0).unwrap_err().ranks(), [2]);
        assert_eq!(after(2).unwrap_err().ranks(), [0, 1], "all have been here");
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let store = store.clone();
                scope.spawn(move || {
                    store.all_gather("g", rank, 3, b"", Deadline::seconds(60)).unwrap()
                });
            }
        });
    }

    #[test]
    fn a_held_lock_bounds_the_wait_by_the_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        let held = store.directory.lock(Deadline::seconds(10)).unwrap();
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
