//! The directory of a file store: files that appear whole, names that stay inside, one lock.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

use crate::random::random_bytes;
use crate::{Deadline, Error, Result};

/// A directory that stores share.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    /// 128 random bits: with a count they make names no other instance makes.
    instance: String,
    next: AtomicU64,
}

/// The lock of the directory; released on drop.
pub(super) struct Locked {
    _file: File,
}

/// Pauses between polls: 1 ms, growing to 50 ms, never beyond the deadline.
pub(super) struct Backoff(Duration);

impl Backoff {
    pub(super) fn new() -> Self {
        Self(Duration::from_millis(1))
    }

    pub(super) fn pause(&mut self, deadline: Deadline) {
        std::thread::sleep(self.0.min(deadline.remaining()));
        self.0 = (self.0 * 3 / 2).min(Duration::from_millis(50));
    }
}

/// A file name for `key` that is one path component: letters, digits, `_` and `-` stand for
/// themselves, every other byte is `%XX`; where that gets long, a hash stands for the key.
pub(super) fn file_name(prefix: &str, key: &str) -> String {
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

pub(super) fn io_error(what: &str, path: &Path, error: &std::io::Error) -> Error {
    Error::system(format!("file store: {what} {}", path.display()), error)
}

/// The file's bytes, at most `limit` of them; `None` when there is no such file.
pub(super) fn read_at_most(path: &Path, limit: usize) -> Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
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

/// Refuses a directory in which another user could leave or replace files: ranks map memory and open sockets by what
/// they find there.
fn trust(path: &Path, found: &fs::Metadata, user: u32) -> Result<()> {
    let why = if !found.is_dir() {
        "is no directory".to_owned()
    } else if found.uid() != user {
        format!("belongs to user {}, and this process is user {user}'s", found.uid())
    } else if found.mode() & 0o022 != 0 {
        format!("may be written to by others (mode {:o})", found.mode() & 0o7777)
    } else {
        return Ok(());
    };
    Err(Error::invalid_argument(format!(
        "file store: {} {why}; name a directory that does not exist yet, which is then made for this user \
         alone, or take that right from others (chmod go-w)",
        path.display()
    )))
}

impl Directory {
    /// Opens `path`, which is created, for this user only, if need be.
    pub(super) fn open(path: &Path) -> Result<Self> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(|error| io_error("cannot create", path, &error))?;
        // Later changes of the working directory must not move the store.
        let path = fs::canonicalize(path).map_err(|error| io_error("cannot open", path, &error))?;
        let found = fs::metadata(&path).map_err(|error| io_error("cannot open", &path, &error))?;
        trust(&path, &found, rustix::process::geteuid().as_raw())?;
        let instance = format!("{:032x}", u128::from_le_bytes(random_bytes()?));
        Ok(Self { path, instance, next: AtomicU64::new(0) })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// A name for a new file.
    pub(super) fn temporary(&self) -> PathBuf {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        self.path.join(format!("tmp-{}-{next}", self.instance))
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

    /// Replaces `path` by a file of `bytes`, which appears complete.
    pub(super) fn replace(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let temporary = self.write_temporary(&[bytes])?;
        fs::rename(&temporary, path).map_err(|error| {
            let _ = fs::remove_file(&temporary);
            io_error("cannot rename to", path, &error)
        })
    }

    /// Makes `path` a file of `pieces`; false when it already exists.
    pub(super) fn create(&self, path: &Path, pieces: &[&[u8]]) -> Result<bool> {
        let temporary = self.write_temporary(pieces)?;
        let linked = fs::hard_link(&temporary, path);
        let _ = fs::remove_file(&temporary);
        match linked {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(io_error("cannot link", path, &error)),
        }
    }

    /// Locks the directory, waiting until `deadline`.
    pub(super) fn lock(&self, deadline: Deadline) -> Result<Locked> {
        let path = self.path.join("lock");
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
    fn a_directory_that_others_may_write_to_is_refused() {
        use std::os::unix::fs::PermissionsExt;

        let root = tempfile::tempdir().unwrap();
        let user = rustix::process::geteuid().as_raw();
        for (mode, is_trusted) in [
            (0o700, true),
            (0o755, true),
            (0o750, true),
            (0o775, false),
            (0o777, false),
            (0o1777, false),
            (0o702, false),
        ] {
            let path = root.path().join(format!("{mode:o}"));
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let opened = Directory::open(&path);
            assert_eq!(opened.is_ok(), is_trusted, "{mode:o}: {opened:?}");
            if let Err(error) = opened {
                let error = error.to_string();
                assert!(
                    error.contains(&format!("mode {mode:o}")) && error.contains("chmod go-w"),
                    "{error}"
                );
            }
            // A link to the directory is judged alike.
            let link = root.path().join(format!("to-{mode:o}"));
            std::os::unix::fs::symlink(&path, &link).unwrap();
            assert_eq!(Directory::open(&link).is_ok(), is_trusted);
            let found = fs::metadata(&path).unwrap();
            let error = trust(&path, &found, user + 1).unwrap_err().to_string();
            assert!(error.contains(&format!("belongs to user {user}")), "{error}");
        }
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(Directory::open(&file).is_err());
    }
}
