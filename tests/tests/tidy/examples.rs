//! Examples teach: they are short, each way to call the library has one, and tests run all of them.

use std::fs;
use std::path::PathBuf;

use crate::{name, read, root};

/// The most lines of an example.
const MAX_LINES: usize = 120;
/// Folders of examples.
const FOLDERS: [&str; 2] = ["examples", "collectives/examples"];
/// The page that lists them, with the way of each to call the library.
const PAGE: &str = "examples/README.md";
/// Ways to call the library.
const DOORS: [&str; 4] = ["Python with torch", "Python without torch", "Rust", "C"];
/// Tests that run examples.
const TESTS: [&str; 4] = [
    "collectives/tests/examples.rs",
    "ffi/tests/c_program.rs",
    "python/tests/test_examples.py",
    "python/tests/test_torch_examples.py",
];

fn examples() -> Vec<PathBuf> {
    let entries = |folder: &str| fs::read_dir(root().join(folder)).expect("examples").flatten();
    let files = FOLDERS.into_iter().flat_map(entries).map(|entry| entry.path());
    let mut found: Vec<PathBuf> =
        files.filter(|path| name(path) != PAGE && !path.ends_with("__pycache__")).collect();
    found.sort();
    assert!(found.len() > 5, "too few examples found: {found:?}");
    found
}

#[test]
fn examples_are_short_files() {
    for path in examples() {
        assert!(path.is_file(), "{} is a folder: an example is one file", name(&path));
        let lines = read(&path).lines().count();
        let place = "what measures belongs in bench/programs, what checks in tests";
        assert!(lines <= MAX_LINES, "{} has {lines} lines: {place}", name(&path));
    }
}

#[test]
fn no_package_has_examples_elsewhere() {
    for package in fs::read_dir(root()).expect("the repository").flatten() {
        let folder = package.path().join("examples");
        let is_known = FOLDERS.iter().any(|known| folder == root().join(known));
        assert!(is_known || !folder.exists(), "{} is no folder of {FOLDERS:?}", name(&folder));
    }
}

#[test]
fn each_way_to_call_the_library_has_an_example_and_each_example_has_a_row() {
    let page = read(&root().join(PAGE));
    for door in DOORS {
        assert!(page.contains(&format!("\n| {door} | `")), "{PAGE} has no example of {door}");
    }
    for path in examples() {
        let path = name(&path);
        assert!(page.contains(&format!(" | `{path}` | ")), "{PAGE} has no row of {path}");
    }
}

#[test]
fn each_example_is_run_by_a_test() {
    let tests: String = TESTS.iter().map(|test| read(&root().join(test))).collect();
    for path in examples() {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let named = tests.contains(&format!("\"{stem}\"")) || tests.contains(&format!("/{file}\""));
        assert!(named, "none of {TESTS:?} names {}", name(&path));
    }
}
