//! One name, one type: in each layer, names of types stand for one thing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::{name, read, root};

/// The layers. A type and its binding have one name, so each layer is looked at by itself.
const LAYERS: [&[&str]; 4] =
    [&["allocator/src", "collectives/src"], &["ffi/src"], &["python/src"], &["python/symmpool"]];

/// Programs that measure have their own contenders and cases each.
const PROGRAMS: &str = "python/symmpool/bench/";

/// Names that types have had, with the better ones.
const FORMER: [(&str, &str); 16] = [
    ("Amount", "ByteSize"),
    ("Bell", "CallWakeup"),
    ("MadeKernel", "GeneratedKernel"),
    ("Maker", "ProcessId"),
    ("Mark", "StreamPosition"),
    ("Meeting", "OuterRendezvous"),
    ("Mesh", "TopologyKind"),
    ("Note", "BarrierMessage"),
    ("Notice", "AsyncError"),
    ("Product", "Matmul, or GemmLaunch"),
    ("Rows", "MatrixView"),
    ("Said", "BarrierStep"),
    ("Split", "StreamK"),
    ("Terms", "RankContext"),
    ("Topic", "BarrierId"),
    ("Watchdog", "WaitWatchdog"),
];

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for path in folder.read_dir().expect("a folder").flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs" || end == "py") {
            found.push(path);
        }
    }
}

/// The name of the type that a line defines for other modules, if it does.
fn defined(line: &str, is_python: bool) -> Option<&str> {
    let rest = if is_python {
        line.strip_prefix("class ")?
    } else {
        let line = line.trim_start().strip_prefix("pub")?;
        let line = match line.strip_prefix('(') {
            Some(inner) => inner.split_once(')')?.1,
            None => line,
        };
        let line = line.strip_prefix(' ')?;
        let line = line.strip_prefix("unsafe ").unwrap_or(line);
        ["struct ", "enum ", "trait ", "union ", "type "]
            .iter()
            .find_map(|kind| line.strip_prefix(kind))?
    };
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    (end > 0 && !rest.starts_with('_')).then_some(&rest[..end])
}

/// The files of a layer that define each name.
fn types_of(layer: &[&str]) -> BTreeMap<String, BTreeSet<String>> {
    let mut all = Vec::new();
    for folder in layer {
        files(&root().join(folder), &mut all);
    }
    assert!(all.len() > 10, "too few files found in {layer:?}");
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for path in all.iter().filter(|path| !name(path).starts_with(PROGRAMS)) {
        let is_python = path.extension().is_some_and(|end| end == "py");
        for line in read(path).lines() {
            if let Some(defined) = defined(line, is_python) {
                found.entry(defined.to_owned()).or_default().insert(name(path));
            }
        }
    }
    found
}

#[test]
fn a_name_stands_for_one_type_of_a_layer() {
    let mut several = BTreeMap::new();
    for layer in LAYERS {
        let types = types_of(layer);
        for (former, better) in FORMER {
            let found = types.get(former);
            assert!(found.is_none(), "{former} in {found:?}: call it {better}");
        }
        several.extend(types.into_iter().filter(|(_, files)| files.len() > 1));
    }
    assert!(several.is_empty(), "give these types names of their own: {several:#?}");
}

#[test]
fn definitions_of_types_are_found() {
    let rust = |line| defined(line, false);
    assert_eq!(rust("pub struct A {"), Some("A"));
    assert_eq!(rust("    pub(in crate::b) enum C_<T> {"), Some("C_"));
    assert_eq!(rust("pub unsafe trait D: E {"), Some("D"));
    assert_eq!(rust("struct F;"), None);
    assert_eq!(rust("pub fn g() {}"), None);
    assert_eq!(defined("class H(I):", true), Some("H"));
    assert_eq!(defined("class _J:", true), None);
    assert_eq!(defined("    class K:", true), None);
}
