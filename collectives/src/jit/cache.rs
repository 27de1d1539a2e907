//! Compiled kernels on disk, found by what they were made from.
//!
//! A file is written under another name and renamed, carries its key, length and checksum, and is
//! compiled anew when these do not hold. Device code runs with the user's rights, so only the
//! user's own files in the user's own folder are trusted. Nothing here fails for want of a cache:
//! without one, kernels are compiled.

use std::fs::{DirBuilder, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::rand::GetRandomFlags;

const MAGIC: &[u8; 8] = b"symmjit1";
const HASH: usize = blake3::OUT_LEN;
/// Magic, key, kind with padding, length.
const HEADER: usize = MAGIC.len() + HASH + 8 + 8;
/// Larger files are not ours; bytes.
const LARGEST: u64 = 1 << 28;

/// What an image is made from, as a hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(blake3::Hash);

impl Key {
    /// The key of these parts. Neither order nor boundaries can be mistaken.
    pub(super) fn of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hasher = blake3::Hasher::new();
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self(hasher.finalize())
    }
}

/// A compiled kernel as the cache sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) kind: u8,
    pub(super) bytes: Vec<u8>,
}

/// A folder of compiled kernels.
pub(super) struct Cache {
    folder: OwnedFd,
    path: PathBuf,
    /// The user whose files are trusted.
    owner: u32,
    /// Longest wait for another process that compiles the same.
    wait: Duration,
    /// Whether a failure to write was told already.
    told: AtomicBool,
}

impl Cache {
    /// The cache in `path`, which is made if need be. The error says why there can be none.
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
        Ok(Self { folder, path: path.to_owned(), owner, wait, told: AtomicBool::new(false) })
    }

    /// The image of `key`: from disk, or made here, or made by another process that is at it.
    pub(super) fn get_or_make<E>(
        &self,
        key: Key,
        make: impl FnOnce() -> Result<Entry, E>,
    ) -> Result<Entry, E> {
        if let Some(entry) = self.load(key) {
            return Ok(entry);
        }
        // Without the lock, the worst is work done twice.
        let lock = match self.lock(key) {
            Turn::Mine(lock) => Some(lock),
            Turn::Made(entry) => return Ok(entry),
            Turn::Unknown => None,
        };
        let entry = make()?;
        if let Err(error) = self.store(key, &entry)
            && !self.told.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("compiled kernels are not kept in {}: {error}", self.path.display());
        }
        drop(lock);
        Ok(entry)
    }

    /// What is on disk for this key, if it is whole and the user's own.
    fn load(&self, key: Key) -> Option<Entry> {
        let name = file_name(key);
        // Not blocking, should it be a pipe.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = match rustix::fs::openat(&self.folder, &name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return None,
            Err(error) => {
                self.distrust(&name, &error.to_string());
                return None;
            }
        };
        let read = || -> Result<Entry, String> {
            let stat = rustix::fs::fstat(&file).map_err(|error| error.to_string())?;
            trusted(&stat, self.owner)?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                return Err("it is no ordinary file".to_owned());
            }
            let mut bytes = Vec::new();
            (&file).take(LARGEST).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
            decode(key, &bytes)
        };
        read().inspect_err(|why| self.distrust(&name, why)).ok()
    }

    fn distrust(&self, name: &str, why: &str) {
        tracing::warn!(
            "{} is not used, the kernel is compiled: {why}",
            self.path.join(name).display()
        );
    }

    fn store(&self, key: Key, entry: &Entry) -> Result<(), String> {
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, GetRandomFlags::empty())
            .map_err(|error| error.to_string())?;
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
            // It may not be there; then nothing is left to remove.
            let _ = rustix::fs::unlinkat(&self.folder, &temporary, AtFlags::empty());
        }
        written
    }

    /// Waits for this process's turn to compile `key`, or for another's result.
    fn lock(&self, key: Key) -> Turn<'_> {
        let name = format!("{}.lock", key.0.to_hex());
        let until = Instant::now() + self.wait;
        let mut pause = Duration::from_millis(1);
        loop {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let opened = rustix::fs::openat(&self.folder, &name, flags, Mode::RUSR | Mode::WUSR);
            let Ok(file) = opened else { return Turn::Unknown };
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    // The holder before may be done, and its lock's name gone or another file's.
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

/// Who compiles.
enum Turn<'a> {
    Mine(Lock<'a>),
    Made(Entry),
    /// There are no locks here, or the wait was over.
    Unknown,
}

/// A lock that is held. Its file goes with it, so that none are left; one that was waited for has
/// no name any more, which the next holder sees.
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
        // Not by closing alone: a process forked meanwhile has the file open as well.
        if let Err(error) = rustix::fs::flock(&self.file, FlockOperation::Unlock) {
            tracing::debug!("{}: {error}", self.name);
        }
    }
}

/// Whether what is stored there can only be the owner's.
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
    format!("{}.kernel", key.0.to_hex())
}

fn encode(key: Key, entry: &Entry) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + entry.bytes.len() + HASH);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(key.0.as_bytes());
    bytes.extend_from_slice(&[entry.kind, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend_from_slice(&(entry.bytes.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&entry.bytes);
    let checksum = blake3::hash(&bytes);
    bytes.extend_from_slice(checksum.as_bytes());
    bytes
}

/// The entry in a file's bytes; the error says what is wrong with them.
fn decode(key: Key, bytes: &[u8]) -> Result<Entry, String> {
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
    if magic != MAGIC || found != key.0.as_bytes() || length != (image.len() as u64).to_le_bytes() {
        return Err("it holds something else".to_owned());
    }
    Ok(Entry { kind: kind[0], bytes: image.to_vec() })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::process::{Child, Command, Stdio};

    use tempfile::TempDir;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn key() -> Key {
        Key::of([b"kernel".as_slice(), b"options"])
    }

    fn entry() -> Entry {
        Entry { kind: 1, bytes: (0..200).collect() }
    }

    fn cache() -> (TempDir, Cache) {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::open(&folder.path().join("made/here"), LONG).expect("a cache");
        (folder, cache)
    }

    fn made(cache: &Cache) -> bool {
        let mut made = false;
        let got = cache.get_or_make(key(), || {
            made = true;
            Ok::<_, ()>(entry())
        });
        assert_eq!(got, Ok(entry()));
        made
    }

    fn path(cache: &Cache) -> PathBuf {
        cache.path.join(file_name(key()))
    }

    #[test]
    fn keys_tell_parts_from_their_concatenation() {
        let keys = [
            Key::of([b"ab".as_slice(), b"c"]),
            Key::of([b"a".as_slice(), b"bc"]),
            Key::of([b"abc".as_slice()]),
            Key::of([b"abc".as_slice(), b""]),
            Key::of([b"c".as_slice(), b"ab"]),
        ];
        for (i, one) in keys.iter().enumerate() {
            assert!(keys[i + 1..].iter().all(|other| one != other));
        }
    }

    #[test]
    fn an_image_is_made_once_and_nothing_else_is_left() {
        let (_folder, cache) = cache();
        assert!(made(&cache));
        assert!(!made(&cache));
        let again = Cache::open(&cache.path, LONG).expect("the same cache");
        assert!(!made(&again));
        let files: Vec<_> = fs::read_dir(&cache.path).expect("a folder").flatten().collect();
        assert_eq!(files.len(), 1, "{files:?}");
        assert_eq!(files[0].path(), path(&cache));
    }

    #[test]
    fn a_failure_is_not_kept() {
        let (_folder, cache) = cache();
        assert_eq!(cache.get_or_make(key(), || Err("no")), Err("no"));
        assert!(made(&cache));
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_noticed_and_mended() {
        let (_folder, cache) = cache();
        made(&cache);
        let whole = fs::read(path(&cache)).expect("a file");
        let cuts = (0..whole.len()).map(|length| whole[..length].to_vec());
        let flips = (0..whole.len()).map(|at| {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x10;
            bytes
        });
        let longer = [&whole[..], b"x"].concat();
        for damaged in cuts.chain(flips).chain([longer]) {
            assert!(decode(key(), &damaged).is_err());
        }
        fs::write(path(&cache), &whole[..whole.len() / 2]).expect("written");
        assert!(made(&cache));
        assert_eq!(fs::read(path(&cache)).expect("a file"), whole);
    }

    #[test]
    fn the_image_of_another_key_is_not_taken() {
        let (_folder, cache) = cache();
        let other = Key::of([b"other".as_slice()]);
        fs::write(path(&cache), encode(other, &entry())).expect("written");
        assert!(made(&cache));
    }

    #[test]
    fn what_others_could_have_written_is_not_trusted() {
        let (_folder, cache) = cache();
        made(&cache);
        // As another user sees it.
        let theirs = Cache { owner: cache.owner + 1, ..Cache::open(&cache.path, LONG).expect("") };
        assert!(theirs.load(key()).is_none());
        assert!(Cache::open_as(&cache.path, LONG, cache.owner + 1).is_err());

        fs::set_permissions(path(&cache), PermissionsExt::from_mode(0o620)).expect("set");
        assert!(cache.load(key()).is_none());
        assert!(made(&cache) && !made(&cache));

        let moved = cache.path.join("moved");
        fs::rename(path(&cache), &moved).expect("renamed");
        symlink(&moved, path(&cache)).expect("a link");
        assert!(cache.load(key()).is_none());
        assert!(made(&cache) && !made(&cache));

        fs::set_permissions(&cache.path, PermissionsExt::from_mode(0o777)).expect("set");
        let why = Cache::open(&cache.path, LONG).err().expect("refused");
        assert!(why.contains("777"), "{why}");
    }

    #[test]
    fn a_folder_that_cannot_be_is_refused_and_one_that_vanished_does_no_harm() {
        let (folder, cache) = cache();
        let file = folder.path().join("file");
        fs::write(&file, "").expect("written");
        assert!(Cache::open(&file.join("below"), LONG).is_err());
        assert!(Cache::open(&file, LONG).is_err());
        fs::remove_dir_all(&cache.path).expect("removed");
        assert!(made(&cache) && made(&cache));
    }

    #[test]
    fn the_wait_for_another_compiler_ends() {
        let (_folder, cache) = cache();
        let short = Cache::open(&cache.path, Duration::from_millis(30)).expect("a cache");
        let held = cache.lock(key());
        assert!(matches!(held, Turn::Mine(_)));
        assert!(made(&short));
        drop(held);
    }

    #[test]
    fn threads_make_an_image_once() {
        let (_folder, cache) = cache();
        let count = std::sync::atomic::AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let got = cache.get_or_make(key(), || {
                        count.fetch_add(1, Ordering::Relaxed);
                        thread::sleep(Duration::from_millis(30));
                        Ok::<_, ()>(entry())
                    });
                    assert_eq!(got, Ok(entry()));
                });
            }
        });
        assert_eq!(count.into_inner(), 1);
    }

    const FOLDER: &str = "SYMMPOOL_TEST_CACHE";

    /// What the processes of the tests below do; nothing when run as a test.
    #[test]
    fn a_process_of_another_test() {
        let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
        let cache = Cache::open(&folder.join("cache"), LONG).expect("a cache");
        if folder.join("hang").exists() {
            let _held = cache.lock(key());
            fs::write(folder.join("held"), "").expect("written");
            thread::sleep(LONG);
        }
        let got = cache.get_or_make(key(), || {
            let count = fs::OpenOptions::new().create(true).append(true).open(folder.join("count"));
            count.and_then(|mut count| count.write_all(b".")).expect("counted");
            thread::sleep(Duration::from_millis(200));
            Ok::<_, ()>(entry())
        });
        assert_eq!(got, Ok(entry()));
    }

    fn start(folder: &Path) -> Child {
        Command::new(std::env::current_exe().expect("a program"))
            .args(["--exact", "jit::cache::tests::a_process_of_another_test"])
            .env(FOLDER, folder)
            .stdout(Stdio::null())
            .spawn()
            .expect("a process")
    }

    #[test]
    fn of_many_processes_one_compiles() {
        let folder = tempfile::tempdir().expect("a folder");
        let all: Vec<_> = (0..6).map(|_| start(folder.path())).collect();
        for mut one in all {
            assert!(one.wait().expect("an end").success());
        }
        assert_eq!(fs::read(folder.path().join("count")).expect("a count"), b".");
    }

    #[test]
    fn a_compiler_that_dies_is_replaced_at_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let (hang, held) = (folder.path().join("hang"), folder.path().join("held"));
        fs::write(&hang, "").expect("written");
        let mut first = start(folder.path());
        let until = Instant::now() + LONG;
        while !held.exists() {
            assert!(Instant::now() < until, "the process never took the lock");
            thread::sleep(Duration::from_millis(5));
        }
        fs::remove_file(&hang).expect("removed");
        let mut second = start(folder.path());
        thread::sleep(Duration::from_millis(100));
        assert!(second.try_wait().expect("a state").is_none(), "it did not wait for the first");
        first.kill().expect("killed");
        first.wait().expect("an end");
        let before = Instant::now();
        assert!(second.wait().expect("an end").success());
        assert!(before.elapsed() < LONG / 2);
        assert_eq!(fs::read(folder.path().join("count")).expect("a count"), b".");
    }
}
