//! How much memory this process may still take, so that a request that is too large becomes an error and
//! does not wake the system's out-of-memory killer.
//!
//! This is an estimate, as other processes take memory as well: the smallest of what the system reports as
//! available and what is left in each control group above this process, version 1 or 2.

use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::byte_size::ByteSize;
use crate::{Error, Result};

/// The files in which the kernel reports memory and control groups.
#[derive(Debug)]
pub(super) struct Sources<'a> {
    pub(super) proc: &'a Path,
    pub(super) cgroup: &'a Path,
}

impl Sources<'static> {
    pub(super) fn system() -> Self {
        Self { proc: Path::new("/proc"), cgroup: Path::new("/sys/fs/cgroup") }
    }
}

/// Bytes available, and where that number comes from.
#[derive(Debug, PartialEq)]
pub(super) struct Available {
    pub(super) bytes: u64,
    pub(super) source: String,
}

/// Refuses `bytes` of memory that are not available. Passes if the system does not report it.
pub(super) fn check(bytes: u64) -> Result<()> {
    let Some(available) = available(&Sources::system()) else { return Ok(()) };
    // The page tables of two mappings are needed in addition to the pages.
    if bytes.saturating_add(bytes / 256) <= available.bytes {
        return Ok(());
    }
    Err(Error::out_of_memory(format!(
        "{} of host memory asked for, {} available according to {}; free memory, make pools \
         smaller, raise that limit or, if that number means nothing here, turn \
         HostOptions::check_available off",
        ByteSize(bytes),
        ByteSize(available.bytes),
        available.source
    )))
}

/// The tightest bound that can be found.
pub(super) fn available(sources: &Sources<'_>) -> Option<Available> {
    let meminfo = sources.proc.join("meminfo");
    let system = fs::read_to_string(&meminfo)
        .ok()
        .and_then(|text| value(&text, "MemAvailable:"))
        .map(|kib| Available {
            bytes: kib.saturating_mul(1024),
            source: format!("MemAvailable of {}", meminfo.display()),
        });
    let groups = fs::read_to_string(sources.proc.join("self/cgroup")).unwrap_or_default();
    let group =
        groups.lines().filter_map(|line| group(line, sources.cgroup)).min_by_key(|a| a.bytes);
    system.into_iter().chain(group).min_by_key(|a| a.bytes)
}

/// The names that the two versions of control groups give to the same numbers.
struct Names {
    limit: &'static str,
    usage: &'static str,
    cache: [&'static str; 2],
}

const V2: Names =
    Names { limit: "memory.max", usage: "memory.current", cache: ["inactive_file", "active_file"] };
const V1: Names = Names {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cache: ["total_inactive_file", "total_active_file"],
};

/// Version 1 says the largest multiple of a page that fits where there is no limit. What is used there need not be read,
/// which takes longer than all else here.
const NO_LIMIT: u64 = i64::MAX as u64 / (1 << 20) * (1 << 20);

/// The tightest limit on the way up from the group that a line of `/proc/self/cgroup`
/// (`id:controllers:path`) names.
fn group(line: &str, root: &Path) -> Option<Available> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    // Only plain names: a path that climbs out belongs to another namespace's view.
    let below: PathBuf =
        Path::new(path).components().filter(|c| matches!(c, Component::Normal(_))).collect();
    let (names, roots) = if controllers.is_empty() {
        (&V2, vec![root.to_path_buf(), root.join("unified")])
    } else if controllers.split(',').any(|controller| controller == "memory") {
        (&V1, vec![root.join("memory")])
    } else {
        return None;
    };
    // In a container the path may be the host's, of which only the top is visible. Levels that do not exist
    // are skipped.
    roots
        .iter()
        .flat_map(|root| below.ancestors().map(move |level| root.join(level)))
        .filter_map(|level| left(&level, names))
        .min_by_key(|a| a.bytes)
}

/// Memory left in one control group; its page cache counts as left, as it gives way.
fn left(group: &Path, names: &Names) -> Option<Available> {
    let read = |name: &str| fs::read_to_string(group.join(name)).ok();
    // "max" is not a number: no limit at this level.
    let limit: u64 = read(names.limit)?.trim().parse().ok()?;
    if limit >= NO_LIMIT {
        return None;
    }
    let usage: u64 = read(names.usage)?.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    let cache: u64 = names.cache.iter().filter_map(|name| value(&stat, name)).sum();
    Some(Available {
        bytes: limit.saturating_sub(usage.saturating_sub(cache)),
        source: format!("{} of {}", names.limit, group.display()),
    })
}

/// The number after `name` in a file of `name number` lines.
fn value(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next()? == name).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with the given files, and what is available according to them.
    fn with(files: &[(&str, &str)]) -> Option<(u64, String)> {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let (proc, cgroup) = (dir.path().join("proc"), dir.path().join("cgroup"));
        let found = available(&Sources { proc: &proc, cgroup: &cgroup })?;
        Some((found.bytes, found.source.replace(dir.path().to_str().unwrap(), "")))
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    8000 kB\n");

    #[test]
    fn without_limits_the_system_says() {
        let found = with(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/a\n"),
            ("cgroup/a/memory.max", "max\n"),
            ("cgroup/a/memory.current", "5\n"),
        ]);
        assert_eq!(found, Some((8_192_000, "MemAvailable of /proc/meminfo".into())));
        assert_eq!(with(&[("proc/self/cgroup", "0::/a\n")]), None);
    }

    #[test]
    fn the_tightest_group_above_us_says() {
        let found = with(&[
            MEMINFO,
            ("proc/self/cgroup", "3:cpu:/\n0::/a/b\n"),
            ("cgroup/a/memory.max", "1000\n"),
            ("cgroup/a/memory.current", "900\n"),
            ("cgroup/a/memory.stat", "file 70\ninactive_file 30\nactive_file 20\n"),
            ("cgroup/a/b/memory.max", "5000\n"),
            ("cgroup/a/b/memory.current", "100\n"),
        ]);
        assert_eq!(found, Some((150, "memory.max of /cgroup/a".into())));
    }

    #[test]
    fn version_1_and_paths_of_another_namespace() {
        let found = with(&[
            MEMINFO,
            ("proc/self/cgroup", "4:hugetlb,memory:/docker/../0123\n0::/\n"),
            ("cgroup/memory/memory.limit_in_bytes", "1000\n"),
            ("cgroup/memory/memory.usage_in_bytes", "1200\n"),
        ]);
        assert_eq!(found, Some((0, "memory.limit_in_bytes of /cgroup/memory/".into())));
    }

    #[test]
    fn a_group_of_version_1_without_a_limit_says_nothing() {
        let found = with(&[
            ("proc/self/cgroup", "4:memory:/\n"),
            ("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("cgroup/memory/memory.usage_in_bytes", "1200\n"),
        ]);
        assert_eq!(found, None);
    }

    #[test]
    fn more_than_there_is_names_both_numbers() {
        let error = check(1 << 60).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        assert!(error.to_string().contains("1 EiB of host memory asked for"), "{error}");
        check(4096).unwrap();
    }
}
