//! A gather in a file store: one directory, one file a rank.

use std::fs;
use std::io::ErrorKind as IoKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::directory::{Backoff, Directory, file_name, io_error, read_at_most};
use crate::error::ErrorKind;
use crate::store::gathering::Gathering;
use crate::store::traffic::TrafficCounters;
use crate::store::{ASK_EVERY, Gathered, MAX_VALUE, Stop, counter_sum};
use crate::{Deadline, Error, Result};

/// One rank's view of one gather.
pub(super) struct FileGather<'a> {
    directory: &'a Directory,
    counters: &'a TrafficCounters,
    key: &'a str,
    dir: PathBuf,
    world: u32,
}

impl<'a> FileGather<'a> {
    pub(super) fn new(
        directory: &'a Directory,
        counters: &'a TrafficCounters,
        key: &'a str,
        world: u32,
    ) -> Self {
        Self { directory, counters, key, dir: directory.path().join(file_name("g", key)), world }
    }

    fn part_path(&self, rank: u32) -> PathBuf {
        self.dir.join(format!("part-{rank}"))
    }

    /// Where a rank says that it came and stopped waiting.
    fn left_path(&self, rank: u32) -> PathBuf {
        self.dir.join(format!("left-{rank}"))
    }

    /// Puts `rank`'s part where the others find it.
    pub(super) fn contribute(&self, rank: u32, value: &[u8]) -> Result<()> {
        match fs::DirBuilder::new().mode(0o700).create(&self.dir) {
            Err(error) if error.kind() != IoKind::AlreadyExists => {
                return Err(io_error("cannot create", &self.dir, &error));
            }
            _ => {}
        }
        // This may be left of an attempt before this one.
        let _ = fs::remove_file(self.left_path(rank));
        self.counters.asked(self.key.len() + value.len());
        if self.directory.create(&self.part_path(rank), &[&self.world.to_le_bytes(), value])? {
            return Ok(());
        }
        Err(self.fail(
            Error::mismatch(format!(
                "two ranks with number {rank} in all_gather {:?}; each of the {} ranks contributes \
             once",
                self.key, self.world
            ))
            .naming([rank]),
        ))
    }

    /// Leaves `error` for the others; the first error that is left is everyone's.
    fn fail(&self, error: Error) -> Error {
        let Ok(bytes) = postcard::to_stdvec(error.kind()) else { return error };
        match self.directory.create(&self.dir.join("failed"), &[&bytes]) {
            Ok(_) => error,
            Err(other) => {
                error.context(format!("which could not be left for the other ranks ({other})"))
            }
        }
    }

    /// Every rank's part, once all are there, unless `stop` ends the wait first. Equal parts are held
    /// once.
    pub(super) fn collect(
        &self,
        rank: u32,
        deadline: Deadline,
        stop: Option<Stop<'_>>,
    ) -> Result<Gathered> {
        let mut asked = Instant::now();
        let mut gathering = Gathering::<Arc<[u8]>>::new(self.world);
        let mut backoff = Backoff::new();
        loop {
            self.check_failed()?;
            for peer in self.arrived()? {
                if peer >= self.world || gathering.has(peer) {
                    continue;
                }
                // Removed again: the peer timed out and took its part back.
                let Some((world, part)) = self.read_part(peer)? else { continue };
                let arrived = gathering.arrive(self.key, peer, world, part.into());
                if arrived.map_err(|error| self.fail(error))? {
                    let (distinct, which) = gathering.finish();
                    return Ok(Gathered::from_distinct(distinct, which)
                        .expect("a finished gather has a part for every rank"));
                }
            }
            let stopped = asked.elapsed() >= ASK_EVERY && {
                asked = Instant::now();
                stop.is_some_and(|stop| stop())
            };
            if stopped {
                let missing = self.leave(rank, gathering);
                return Err(Error::interrupted_wait("while waiting for other ranks", &missing));
            }
            if deadline.expired() {
                let missing = self.leave(rank, gathering);
                return Err(Error::timeout(
                    format!("in all_gather {:?}", self.key),
                    deadline.budget(),
                    missing,
                ));
            }
            backoff.pause(deadline);
        }
    }

    /// Takes `rank`'s part back, so that another attempt does not look like a second rank, and says so for those who wait
    /// longer. Returns the ranks that are missing.
    fn leave(&self, rank: u32, mut gathering: Gathering<Arc<[u8]>>) -> Vec<u32> {
        let _ = self.directory.create(&self.left_path(rank), &[]);
        let _ = fs::remove_file(self.part_path(rank));
        for peer in gathering.missing() {
            if self.left_path(peer).exists() {
                gathering.note_left(peer);
            }
        }
        gathering.missing()
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

    /// The world size that `peer` passed, and its part; `None` when there is no such file.
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
        self.counters.asked(0);
        self.counters.answered(bytes.len());
        Ok(Some((world, bytes)))
    }

    /// Counts this rank as done; the last one removes the gather. The result has been read by
    /// then, so what fails here fails no one: the files stay.
    pub(super) fn count_reader(&self, deadline: Deadline) {
        let removed = || -> Result<()> {
            // Waits a moment even if the last part came just before the deadline.
            let until = Deadline::after(deadline.remaining().max(Duration::from_millis(200)));
            let lock = self.directory.lock(until)?;
            let path = self.dir.join("readers");
            let readers = read_at_most(&path, 64)?;
            let readers = counter_sum("readers", readers.as_deref(), 1)?;
            if readers < i64::from(self.world) {
                return self.directory.replace(&path, readers.to_string().as_bytes());
            }
            let away = self.directory.temporary();
            fs::rename(&self.dir, &away).map_err(|e| io_error("cannot rename", &self.dir, &e))?;
            drop(lock);
            fs::remove_dir_all(&away).map_err(|error| io_error("cannot remove", &away, &error))
        };
        if let Err(error) = removed() {
            tracing::debug!(key = self.key, %error, "a finished gather's files stay");
        }
    }
}
