//! Checks that every kernel is in a family of `cuda_collectives check`, which `bench/sanitize` runs under compute-sanitizer, and
//! that docs/gpus.md lists them all.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use symmpool_collectives::AllReduceAlgorithm;

const FAMILIES: &str = "tests/gpu/cuda_collectives/families.rs";
/// Folders in which those of collectives have kernels and headers.
const FOLDERS: [&str; 2] = ["collectives/kernels", "collectives/src/cuda"];
/// A kernel that no family has: `cuda_hosts` runs it.
const OVER_HOSTS: &str = "reduce_local/reduce_local.cu";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the repository")
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The families: the name, the kernels, and whether blocks share memory.
fn families() -> Vec<(String, Vec<String>, bool)> {
    let text = read(FAMILIES);
    let (_, list) = text.split_once("const FAMILIES").expect("the list");
    let list = &list[list.find("= [").expect("its beginning")..list.find("\n];").expect("its end")];
    // A family ends with whether its kernels share memory.
    let mut found = Vec::new();
    let mut rest = list;
    while let Some(end) = [rest.find("true"), rest.find("false")].into_iter().flatten().min() {
        let names: Vec<&str> = rest[..end].split('"').skip(1).step_by(2).collect();
        let kernels = names[1..].iter().map(|name| (*name).to_owned()).collect();
        found.push((names[0].to_owned(), kernels, rest[end..].starts_with("true")));
        rest = &rest[end + 4..];
    }
    assert!(found.len() > 10, "{found:?}");
    // All-reduces by single algorithms are families, too.
    found.extend(AllReduceAlgorithm::ALL.into_iter().filter_map(|algorithm| {
        let checked = algorithm.checked()?;
        Some((algorithm.name().to_owned(), vec![checked.kernel.to_owned()], checked.shares_memory))
    }));
    found
}

/// The kernels' files, below the folders that have them.
fn kernels() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for folder in FOLDERS.map(|folder| root().join(folder)) {
        for collective in fs::read_dir(&folder).expect("folders").flatten() {
            let Ok(files) = fs::read_dir(collective.path()) else { continue };
            for file in files.flatten() {
                let path = file.path();
                let name = path.strip_prefix(&folder).expect("below it").display().to_string();
                if name.ends_with(".cu") {
                    found.insert(name);
                }
            }
        }
    }
    assert!(found.len() > 15, "{found:?}");
    found
}

/// Whether a file, or one that it includes, has memory of a block.
fn shares_memory(file: &str, seen: &mut BTreeSet<String>) -> bool {
    // Its memory is that of forms that share SMs, which no family runs.
    if file == "symmpool/impl/sm_grant.cuh" || !seen.insert(file.to_owned()) {
        return false;
    }
    let places = FOLDERS.map(|folder| Path::new(folder).join(file));
    let place = places.into_iter().find(|place| root().join(place).exists());
    let text = read(place.unwrap_or_else(|| panic!("{file} is in none of {FOLDERS:?}")));
    let includes = text.lines().filter_map(|line| line.strip_prefix("#include <"));
    let includes =
        includes.filter_map(|line| line.split_once('>')).map(|(name, _)| name.to_owned());
    text.contains("__shared__")
        || includes.collect::<Vec<_>>().iter().any(|name| shares_memory(name, seen))
}

#[test]
fn every_kernel_is_in_a_family() {
    let listed: BTreeSet<String> =
        families().into_iter().flat_map(|(_, kernels, _)| kernels).collect();
    let mut all = kernels();
    assert!(all.remove(OVER_HOSTS), "{OVER_HOSTS} is gone");
    assert_eq!(listed, all, "{FAMILIES} lists the kernels");
}

#[test]
fn races_are_looked_for_where_blocks_share_memory() {
    for (name, kernels, shares) in families() {
        if kernels.iter().any(|kernel| shares_memory(kernel, &mut BTreeSet::new())) {
            assert!(shares, "{FAMILIES}: kernels of {name} share memory in a block");
        }
    }
}

/// The rows of the first table below a heading.
fn table_below(document: &str, heading: &str) -> String {
    let (_, text) = document.split_once(&format!("# {heading}\n")).expect("the heading");
    let is_row = |line: &&str| line.starts_with('|');
    let rows = text.lines().skip_while(|line| !is_row(line)).take_while(is_row);
    rows.collect::<Vec<_>>().join("\n")
}

#[test]
fn every_check_is_a_family_and_the_document_has_them_all() {
    let listed: BTreeSet<String> = families().into_iter().map(|(name, ..)| name).collect();
    let check = read("tests/gpu/cuda_collectives/check.rs");
    let parts = check.lines().filter(|line| line.contains("When::Always, "));
    let parts = parts.map(|line| line.split('"').nth(1).expect("a name").to_owned());
    // All-reduces of the host have no kernels, and those that choose between two have none of their own.
    let of_their_own =
        |each: &AllReduceAlgorithm| *each == AllReduceAlgorithm::Auto || each.checked().is_some();
    let algorithms = AllReduceAlgorithm::ALL.into_iter().filter(of_their_own);
    let algorithms = algorithms.map(|each| each.name().to_owned());
    let checked: BTreeSet<String> = parts.chain(algorithms).collect();
    assert_eq!(listed, checked, "{FAMILIES} lists what a quick check runs");
    let document = read("docs/gpus.md");
    for name in listed {
        let is_all_reduce = AllReduceAlgorithm::ALL.iter().any(|each| each.name() == name);
        let heading = match is_all_reduce && name != AllReduceAlgorithm::Auto.name() {
            true => "Which algorithm serves a call",
            false => "Under compute-sanitizer",
        };
        let in_the_table = table_below(&document, heading).contains(&format!("`{name}`"));
        assert!(
            in_the_table,
            "docs/gpus.md: the table below \"{heading}\" has no row that names `{name}`: add it there"
        );
    }
}
