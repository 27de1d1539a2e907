//! Where NVRTC may be, in the order in which it is searched.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// The names by which CUDA 13, CUDA 12 and development packages install it.
pub(super) const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// A place where NVRTC may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Candidate {
    /// The file that the user has named. No other is tried.
    Chosen(PathBuf),
    /// A library of this name that the process has loaded already, as torch does.
    Loaded(&'static str),
    /// A name that the dynamic linker searches.
    Named(&'static str),
    /// A file, which need not exist.
    File(PathBuf),
}

/// All places. `variable` reads the environment; `packages` are further folders of Python packages
/// (`site-packages`).
pub(super) fn candidates(
    chosen: Option<&Path>,
    packages: &[PathBuf],
    variable: impl Fn(&str) -> Option<OsString>,
) -> Vec<Candidate> {
    if let Some(path) = chosen {
        return vec![Candidate::Chosen(path.to_owned())];
    }
    let mut found: Vec<Candidate> = NAMES.map(Candidate::Loaded).into();
    found.extend(NAMES.map(Candidate::Named));
    let folder = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);

    let mut toolkits: Vec<PathBuf> =
        ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(folder).collect();
    toolkits.push(PathBuf::from("/usr/local/cuda"));
    for toolkit in toolkits {
        found.extend(NAMES.map(|name| Candidate::File(toolkit.join("lib64").join(name))));
    }
    if let Some(conda) = folder("CONDA_PREFIX") {
        found.extend(NAMES.map(|name| Candidate::File(conda.join("lib").join(name))));
    }
    let environment = folder("VIRTUAL_ENV").map(|at| site_packages(&at)).unwrap_or_default();
    for packages in packages.iter().chain(&environment) {
        found.push(Candidate::File(packages.join("nvidia/cu13/lib/libnvrtc.so.13")));
        found.push(Candidate::File(packages.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12")));
    }
    found
}

/// The folders of packages in a Python environment, usually one.
fn site_packages(environment: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(environment.join("lib")) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python"))
        .map(|entry| entry.path().join("site-packages"))
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_the_only_candidate() {
        let chosen = candidates(Some(Path::new("/x/libnvrtc.so.12")), &["/p".into()], |_| None);
        assert_eq!(chosen, [Candidate::Chosen("/x/libnvrtc.so.12".into())]);
    }

    #[test]
    fn what_is_loaded_comes_first_then_the_system_then_toolkits_then_packages() {
        let environment = tempfile::tempdir().expect("a folder");
        let site = environment.path().join("lib/python3.11/site-packages");
        fs::create_dir_all(&site).expect("a folder");
        let found = candidates(None, &["/given".into()], |name| match name {
            "VIRTUAL_ENV" => Some(environment.path().into()),
            "CUDA_HOME" => Some("/opt/cuda".into()),
            "CUDA_PATH" => Some("".into()),
            _ => None,
        });
        let order = [
            Candidate::Loaded("libnvrtc.so.13"),
            Candidate::Loaded("libnvrtc.so.12"),
            Candidate::Named("libnvrtc.so.13"),
            Candidate::File("/opt/cuda/lib64/libnvrtc.so.12".into()),
            Candidate::File("/usr/local/cuda/lib64/libnvrtc.so".into()),
            Candidate::File("/given/nvidia/cu13/lib/libnvrtc.so.13".into()),
            Candidate::File(site.join("nvidia/cu13/lib/libnvrtc.so.13")),
            Candidate::File(site.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12")),
        ];
        let places: Vec<_> = order
            .iter()
            .map(|one| found.iter().position(|other| other == one).expect("in the list"))
            .collect();
        assert!(places.is_sorted(), "{found:?}");
        assert!(!found.contains(&Candidate::File("lib64/libnvrtc.so".into())), "{found:?}");
    }
}
