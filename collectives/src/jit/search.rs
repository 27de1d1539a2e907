//! Where NVRTC may be, in the order in which it is searched.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// The names by which CUDA 13, CUDA 12 and development packages install it, newest first.
pub(super) const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// The folder of a Python package that has a library of this name, relative to `site-packages`.
fn package_folder(name: &str) -> Option<&'static str> {
    match name {
        "libnvrtc.so.13" => Some("nvidia/cu13/lib"),
        "libnvrtc.so.12" => Some("nvidia/cuda_nvrtc/lib"),
        _ => None,
    }
}

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

impl Candidate {
    /// The major version of CUDA that the library's name has, if it has one.
    pub(super) fn major(&self) -> Option<u32> {
        let name = match self {
            Candidate::Chosen(path) | Candidate::File(path) => path.file_name()?.to_str()?,
            Candidate::Loaded(name) | Candidate::Named(name) => name,
        };
        name.strip_prefix("libnvrtc.so.")?.split('.').next()?.parse().ok()
    }
}

/// All places: those of CUDA 13 before those of CUDA 12, and of one version, a library that is loaded already before
/// others. So torch's library is shared unless there is a newer one. `variable` reads the environment; `packages` are
/// further folders of Python packages (`site-packages`); `mapped` are files that the process has mapped, of which those
/// in such a folder tell where it is.
pub(super) fn candidates(
    chosen: Option<&Path>,
    packages: &[PathBuf],
    mapped: &[PathBuf],
    variable: impl Fn(&str) -> Option<OsString>,
) -> Vec<Candidate> {
    if let Some(path) = chosen {
        return vec![Candidate::Chosen(path.to_owned())];
    }
    let folder = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);

    let mut toolkits: Vec<PathBuf> =
        ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(folder).collect();
    toolkits.push(PathBuf::from("/usr/local/cuda"));
    let mut folders: Vec<PathBuf> = toolkits.iter().map(|toolkit| toolkit.join("lib64")).collect();
    folders.extend(folder("CONDA_PREFIX").map(|conda| conda.join("lib")));
    let mut packages = packages.to_vec();
    packages.extend(folder("VIRTUAL_ENV").map(|at| site_packages(&at)).unwrap_or_default());
    packages.extend(packages_of(mapped));

    let mut found = Vec::new();
    for name in NAMES {
        found.extend([Candidate::Loaded(name), Candidate::Named(name)]);
        found.extend(folders.iter().map(|folder| Candidate::File(folder.join(name))));
        if let Some(inside) = package_folder(name) {
            let files = packages.iter().map(|packages| packages.join(inside).join(name));
            found.extend(files.map(Candidate::File));
        }
    }
    found
}

/// The folders of Python packages from which these files come, as far as they are NVRTC of such a package.
fn packages_of(files: &[PathBuf]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for inside in
        NAMES.into_iter().filter_map(|name| Some(Path::new(package_folder(name)?).join(name)))
    {
        for file in files.iter().filter(|file| file.ends_with(&inside)) {
            // The folder, the package, `nvidia`, and the file itself lie below it.
            found.extend(file.ancestors().nth(4).map(Path::to_owned));
        }
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
        let chosen =
            candidates(Some(Path::new("/x/libnvrtc.so.12")), &["/p".into()], &[], |_| None);
        assert_eq!(chosen, [Candidate::Chosen("/x/libnvrtc.so.12".into())]);
    }

    #[test]
    fn of_one_version_the_loaded_comes_first_then_the_system_then_toolkits_then_packages() {
        let environment = tempfile::tempdir().expect("a folder");
        let site = environment.path().join("lib/python3.11/site-packages");
        fs::create_dir_all(&site).expect("a folder");
        let found = candidates(None, &["/given".into()], &[], |name| match name {
            "VIRTUAL_ENV" => Some(environment.path().into()),
            "CUDA_HOME" => Some("/opt/cuda".into()),
            "CUDA_PATH" => Some("".into()),
            _ => None,
        });
        let order = [
            Candidate::Loaded("libnvrtc.so.12"),
            Candidate::Named("libnvrtc.so.12"),
            Candidate::File("/opt/cuda/lib64/libnvrtc.so.12".into()),
            Candidate::File("/usr/local/cuda/lib64/libnvrtc.so.12".into()),
            Candidate::File("/given/nvidia/cuda_nvrtc/lib/libnvrtc.so.12".into()),
            Candidate::File(site.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12")),
            Candidate::Loaded("libnvrtc.so"),
            Candidate::File("/usr/local/cuda/lib64/libnvrtc.so".into()),
        ];
        let places: Vec<_> = order
            .iter()
            .map(|one| found.iter().position(|other| other == one).expect("in the list"))
            .collect();
        assert!(places.is_sorted(), "{found:?}");
        assert!(!found.contains(&Candidate::File("lib64/libnvrtc.so".into())), "{found:?}");
    }

    #[test]
    fn a_newer_library_next_to_the_loaded_one_comes_first() {
        let mapped = [
            PathBuf::from("/env/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
            PathBuf::from("/opt/libnvrtc.so.12"),
            PathBuf::from("/lib/libc.so.6"),
        ];
        let found = candidates(None, &[], &mapped, |_| None);
        let at =
            |one: Candidate| found.iter().position(|other| *other == one).expect("in the list");
        let newer = "/env/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13";
        assert!(at(Candidate::File(newer.into())) < at(Candidate::Loaded("libnvrtc.so.12")));
        let majors: Vec<Option<u32>> = found.iter().map(Candidate::major).collect();
        assert!(majors.is_sorted_by(|one, other| one >= other), "{majors:?}");
    }
}
