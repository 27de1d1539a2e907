//! One name, one type: the name of a type that others can use stands for nothing else, in the whole workspace.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::{name, read, root};

/// Folders with Rust.
const RUST: [&str; 7] =
    ["allocator", "bench", "collectives", "examples", "ffi", "python/src", "tests"];

/// The Python package, and its programs that measure, which have their own contenders and cases each.
const PACKAGE: &str = "python/symmpool";
const PROGRAMS: &str = "python/symmpool/bench/";

/// Types that have a form in C and a class in Python: each form has the name of what it wraps.
const WRAPPED: [&str; 13] = [
    "Algorithm",
    "Block",
    "CommitReport",
    "Communicator",
    "Group",
    "GroupOffer",
    "Mailbox",
    "PendingMessage",
    "Pool",
    "PoolStats",
    "Redirected",
    "Slot",
    "Window",
];

/// Types that Python has once more, in Python: what they stand for is the same.
const SAME_IN_PYTHON: [&str; 6] =
    ["Collective", "Error", "ExpertBuffer", "Explanation", "PlanError", "ReduceOp"];

/// Names that other libraries gave, and where these stand: programs written for the library need them.
const OF_OTHERS: [(&str, &str); 1] = [("Buffer", "python/symmpool/deep_ep/buffer.py")];

/// Folders in which a name of [`WRAPPED`] may stand once each.
const WRAPPERS: [&str; 2] = ["ffi/src", "python/src"];

/// Names that types have had, with the better ones.
const FORMER: [(&str, &str); 20] = [
    ("Amount", "ByteSize"),
    ("Bell", "CallWakeup"),
    ("Call", "CallDescription"),
    ("Control", "ControlLayout"),
    ("MadeKernel", "GeneratedKernel"),
    ("Maker", "ProcessId"),
    ("Mark", "StreamPosition"),
    ("Meeting", "OuterRendezvous"),
    ("Mesh", "TopologyKind"),
    ("Note", "BarrierMessage"),
    ("Notice", "AsyncError"),
    ("Product", "Matmul, or GemmLaunch"),
    ("Record", "FaultRecord"),
    ("Rows", "MatrixView"),
    ("Said", "BarrierStep"),
    ("Split", "StreamK"),
    ("Terms", "RankContext"),
    ("Topic", "BarrierId"),
    ("Watchdog", "WaitWatchdog"),
    ("Work", "ReductionCall"),
];

/// A definition of a type.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Definition {
    file: String,
    /// Whether other modules can use it.
    is_visible: bool,
}

/// Definitions by the types' names.
type Types = BTreeMap<String, BTreeSet<Definition>>;

fn files(folder: &Path, ends: &[&str], found: &mut Vec<PathBuf>) {
    for path in folder.read_dir().expect("a folder").flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            files(&path, ends, found);
        } else if path.extension().is_some_and(|end| ends.iter().any(|each| end == *each)) {
            found.push(path);
        }
    }
}

/// The name behind one of some keywords.
fn behind<'a>(line: &'a str, keywords: &[&str]) -> Option<&'a str> {
    let rest = keywords.iter().find_map(|keyword| line.strip_prefix(keyword))?;
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    (end > 0 && !rest.starts_with('_')).then_some(&rest[..end])
}

/// The name of the type that a line of Rust defines, and whether other modules can use it. A private `type` of a trait or an
/// `impl` is none.
fn rust_type(line: &str) -> Option<(&str, bool)> {
    let inner = line.trim_start();
    let (inner, is_visible) = match inner.strip_prefix("pub") {
        Some(rest) => {
            let rest = match rest.strip_prefix('(') {
                Some(scope) => scope.split_once(')')?.1,
                None => rest,
            };
            (rest.strip_prefix(' ')?, true)
        }
        None => (inner, false),
    };
    let inner = inner.strip_prefix("unsafe ").unwrap_or(inner);
    let is_type = is_visible || !line.starts_with(' ');
    let keywords: &[&str] = match is_type {
        true => &["struct ", "enum ", "trait ", "union ", "type "],
        false => &["struct ", "enum ", "trait ", "union "],
    };
    Some((behind(inner, keywords)?, is_visible))
}

/// The name of the type that a line of a kernel defines.
fn cuda_type(line: &str) -> Option<&str> {
    let is_declared = line.trim_end().ends_with(';');
    let line = match line.strip_prefix("template <") {
        Some(rest) => rest.split_once("> ")?.1,
        None => line,
    };
    let found = behind(line, &["enum class ", "struct ", "class ", "enum ", "union "])?;
    (!is_declared && found.starts_with(char::is_uppercase)).then_some(found)
}

/// The types of folders, by what finds them in a line.
fn types_of<'a>(
    folders: &[&str],
    ends: &[&str],
    find: impl for<'b> Fn(&'b str) -> Option<(&'b str, bool)> + 'a,
) -> Types {
    let mut all = Vec::new();
    for folder in folders {
        files(&root().join(folder), ends, &mut all);
    }
    assert!(all.len() > 10, "too few files found in {folders:?}");
    let mut found = Types::new();
    for path in &all {
        let file = name(path);
        for (defined, is_visible) in read(path).lines().filter_map(&find) {
            let definition = Definition { file: file.clone(), is_visible };
            found.entry(defined.to_owned()).or_default().insert(definition);
        }
    }
    found
}

fn rust_types() -> Types {
    types_of(&RUST, &["rs"], rust_type)
}

/// Classes of the package that others can use.
fn python_types() -> Types {
    let mut found =
        types_of(&[PACKAGE], &["py"], |line| behind(line, &["class "]).map(|name| (name, true)));
    for files in found.values_mut() {
        files.retain(|definition| !definition.file.starts_with(PROGRAMS));
    }
    found.retain(|_, files| !files.is_empty());
    found
}

/// Whether definitions are one type and what wraps it: one for each wrapper, and one elsewhere.
fn is_wrapped(definitions: &BTreeSet<Definition>) -> bool {
    let in_folder =
        |folder: &str| definitions.iter().filter(|each| each.file.starts_with(folder)).count();
    let wrappers = WRAPPERS.map(in_folder);
    let elsewhere = definitions.len() - wrappers.iter().sum::<usize>();
    wrappers.iter().all(|count| *count <= 1) && elsewhere <= 1
}

#[test]
fn a_name_that_others_can_use_stands_for_one_type() {
    let mut several = Types::new();
    let mut wrapped = BTreeSet::new();
    for (name, definitions) in rust_types() {
        let files: BTreeSet<&str> = definitions.iter().map(|each| each.file.as_str()).collect();
        if files.len() < 2 || !definitions.iter().any(|each| each.is_visible) {
            continue;
        }
        if WRAPPED.contains(&name.as_str()) && is_wrapped(&definitions) {
            wrapped.insert(name);
            continue;
        }
        several.insert(name, definitions);
    }
    assert!(several.is_empty(), "give these types names of their own: {several:#?}");
    let expected: BTreeSet<String> = WRAPPED.map(str::to_owned).into();
    assert_eq!(wrapped, expected, "WRAPPED is not what is wrapped");
}

#[test]
fn a_class_of_the_package_has_no_name_of_another_type() {
    let (rust, python) = (rust_types(), python_types());
    let mut several = Types::new();
    for (name, mut definitions) in python {
        let is_of_others = |each: &Definition| OF_OTHERS.contains(&(&name, &each.file));
        definitions.retain(|each| !is_of_others(each));
        let visible = rust.get(&name).filter(|types| types.iter().any(|each| each.is_visible));
        let is_same = SAME_IN_PYTHON.contains(&name.as_str());
        assert!(!is_same || visible.is_some(), "{name} is in Python alone: it needs no exception");
        let programs = ["bench/", "tests/", "collectives/tests/"];
        let is_library = |each: &&Definition| !programs.iter().any(|of| each.file.starts_with(of));
        let others = visible.into_iter().flatten().filter(is_library).cloned();
        let count = definitions.len();
        if !is_same && count > 0 {
            definitions.extend(others);
        }
        if definitions.len() > 1 {
            several.insert(name, definitions);
        }
    }
    assert!(several.is_empty(), "give these classes names of their own: {several:#?}");
}

#[test]
fn a_name_stands_for_one_type_of_kernels() {
    let folders = ["collectives/kernels", "collectives/src"];
    let mut types =
        types_of(&folders, &["cu", "cuh"], |line| cuda_type(line).map(|name| (name, true)));
    types.retain(|_, files| files.len() > 1);
    assert!(types.is_empty(), "give these types names of their own: {types:#?}");
}

#[test]
fn former_names_of_types_are_gone() {
    let all = [rust_types(), python_types()];
    for (former, better) in FORMER {
        for types in &all {
            let visible = |each: &&Definition| each.is_visible;
            let found: Vec<_> = types.get(former).into_iter().flatten().filter(visible).collect();
            let is_torchs = former == "Work" && found.iter().all(|each| each.file.ends_with(".py"));
            assert!(found.is_empty() || is_torchs, "{former} in {found:?}: call it {better}");
        }
    }
}

#[test]
fn definitions_of_types_are_found() {
    assert_eq!(rust_type("pub struct A {"), Some(("A", true)));
    assert_eq!(rust_type("    pub(in crate::b) enum C_<T> {"), Some(("C_", true)));
    assert_eq!(rust_type("pub unsafe trait D: E {"), Some(("D", true)));
    assert_eq!(rust_type("struct F;"), Some(("F", false)));
    assert_eq!(rust_type("type G = u8;"), Some(("G", false)));
    assert_eq!(rust_type("    type H = u8;"), None);
    assert_eq!(rust_type("pub fn i() {}"), None);
    assert_eq!(behind("class J(K):", &["class "]), Some("J"));
    assert_eq!(behind("class _L:", &["class "]), None);
    assert_eq!(behind("    class M:", &["class "]), None);
    assert_eq!(cuda_type("template <u32 N> struct O : P {"), Some("O"));
    assert_eq!(cuda_type("enum class Q : u32 {"), Some("Q"));
    assert_eq!(cuda_type("struct R;"), None);
    let at = |file: &str| Definition { file: file.to_owned(), is_visible: true };
    assert!(is_wrapped(&[at("allocator/src/a.rs"), at("ffi/src/a.rs")].into()));
    assert!(!is_wrapped(&[at("allocator/src/a.rs"), at("collectives/src/a.rs")].into()));
}
