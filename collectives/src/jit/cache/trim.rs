//! The limit of the cache's size: the images that were not used for longest are removed.

use std::os::fd::AsFd;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, Dir, FileType, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};

use super::Cache;

/// Most bytes of images that are kept.
pub(super) const MAX_KEPT: u64 = 1 << 30;
/// A day: the granularity of an image's last use, and the age at which what a killed process left is removed.
const DAY: Duration = Duration::from_secs(24 * 3600);

/// A file of the cache.
struct Found {
    name: String,
    bytes: u64,
    used: Duration,
}

impl Cache {
    /// Removes the images that were not used for longest, until three quarters of `most` bytes are left, if there are
    /// more than `most`; and what writes that never ended have left. Another process that misses an image compiles it
    /// again.
    pub(super) fn trim(&self, most: u64) -> Result<(), String> {
        let now = since_1970(SystemTime::now());
        let (mut images, mut unfinished) = (Vec::new(), Vec::new());
        for entry in Dir::read_from(&self.folder).map_err(|error| error.to_string())? {
            let entry = entry.map_err(|error| error.to_string())?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            let Some((_, end)) = name.split_once('.') else { continue };
            // A file may be gone meanwhile.
            let Ok(stat) = rustix::fs::statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                continue;
            }
            let bytes = u64::try_from(stat.st_size).unwrap_or(0);
            let found = Found { name: name.to_owned(), bytes, used: last_used(&stat) };
            match end {
                "kernel" => images.push(found),
                end if end.starts_with("kernel.") => unfinished.push(found),
                _ => {}
            }
        }
        for left in unfinished {
            if now.saturating_sub(left.used) > DAY {
                self.remove(&left.name);
            }
        }
        let mut kept: u64 = images.iter().map(|image| image.bytes).sum();
        if kept <= most {
            return Ok(());
        }
        images.sort_by_key(|image| image.used);
        for image in images {
            if kept <= most / 4 * 3 {
                break;
            }
            self.remove(&image.name);
            kept -= image.bytes;
        }
        Ok(())
    }

    fn remove(&self, name: &str) {
        if let Err(error) = rustix::fs::unlinkat(&self.folder, name, AtFlags::empty()) {
            tracing::debug!("{name}: {error}");
        }
    }
}

/// Notes that an image is used, at most once a day.
pub(super) fn note_use(file: impl AsFd, stat: &Stat) {
    if since_1970(SystemTime::now()).saturating_sub(last_used(stat)) < DAY {
        return;
    }
    let times = Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        last_modification: Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
    };
    if let Err(error) = rustix::fs::futimens(file, &times) {
        tracing::debug!("the use of a compiled kernel is not noted: {error}");
    }
}

fn last_used(stat: &Stat) -> Duration {
    Duration::from_secs(u64::try_from(stat.st_mtime).unwrap_or(0))
}

fn since_1970(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}
