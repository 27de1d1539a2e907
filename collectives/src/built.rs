//! Sources that this library was built from: reports of measurements name them, so that a table can tell whether its
//! code has changed since.

use std::collections::{BTreeMap, BTreeSet};

use crate::cuda::kernels;
use crate::jit::sources_below;

/// The commit that the library was built from, with `-dirty` behind it where files had changed: what the environment variable
/// `SYMMPOOL_COMMIT` said at the build. `make wheel`, `make extension` and `bench/record_gpu` set it. `None` where it was
/// not set.
#[must_use]
pub fn built_from() -> Option<&'static str> {
    option_env!("SYMMPOOL_COMMIT").filter(|commit| !commit.is_empty())
}

/// The version of the kernels of each kind, as `all_reduce` and `symmpool`: 8 hexadecimal digits. It changes with any file of the
/// folders of that name, and with any header that one of them includes.
///
/// It is the CRC-32 of the paths and texts of all these files, in the order of their paths, with a zero byte behind each
/// path and each text.
#[must_use]
pub fn kernel_versions() -> BTreeMap<&'static str, String> {
    let mut folders: BTreeMap<&str, BTreeSet<(&str, &str)>> = BTreeMap::new();
    for (folder, files) in sources_below(kernels()) {
        folders.entry(folder).or_default().extend(files);
    }
    let version = |files: BTreeSet<(&str, &str)>| {
        let mut sum = crc32fast::Hasher::new();
        for (path, text) in files {
            for part in [path, text] {
                sum.update(part.as_bytes());
                sum.update(&[0]);
            }
        }
        format!("{:08x}", sum.finalize())
    };
    folders.into_iter().map(|(folder, files)| (folder, version(files))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jit::sources::files_of_kernels;

    #[test]
    fn every_folder_of_kernels_has_a_version() {
        let files = files_of_kernels();
        let folder = |path: &String| path.split_once('/').expect("in a folder").0.to_owned();
        let names: BTreeSet<String> = files.iter().map(folder).collect();
        let versions = kernel_versions();
        assert_eq!(versions.keys().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>(), names);
        assert_eq!(versions.values().collect::<BTreeSet<_>>().len(), versions.len());
    }
}
