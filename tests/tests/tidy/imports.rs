//! Nothing imports itself by way of others, and the drawings of ARCHITECTURE.md show what rooms import.

use std::path::Path;

use crate::arrows::{ImportGraph, drawings};
use crate::rust_imports::Crate;
use crate::{name, python_imports, read, root};

const CRATES: [&str; 4] = ["allocator/src", "collectives/src", "python/src", "ffi/src"];

/// All files of a folder whose names end so, with their paths in it.
fn files(folder: &Path, end: &str) -> Vec<(String, String)> {
    let (mut found, mut open) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(next) = open.pop() {
        for entry in next.read_dir().expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                open.push(path);
            } else if path.to_string_lossy().ends_with(end) {
                let inner = path.strip_prefix(folder).expect("below it").display().to_string();
                found.push((inner, read(&path)));
            }
        }
    }
    found
}

/// The arrows between kernels and their headers.
fn kernels() -> ImportGraph {
    let mut graph = ImportGraph::default();
    let folder = root().join("collectives/kernels");
    let beside = files(&root().join("collectives/src/cuda"), ".cu");
    for (file, text) in [".cu", ".cuh"].iter().flat_map(|end| files(&folder, end)).chain(beside) {
        let includes = text.lines().filter_map(|line| line.trim().strip_prefix("#include "));
        let names = includes.map(|name| name.trim().trim_matches(['"', '<', '>']));
        // The others are the compiler's.
        for included in names.filter(|name| folder.join(name).exists()) {
            graph.add(&file, included);
        }
    }
    graph
}

fn python() -> ImportGraph {
    let modules: Vec<_> = files(&root().join("python/symmpool"), ".py")
        .into_iter()
        .map(|(file, text)| {
            let path = file.trim_end_matches(".py").replace('/', ".");
            let is_package = path.ends_with("__init__");
            let inner = path.trim_end_matches("__init__").trim_end_matches('.');
            (format!("symmpool.{inner}").trim_end_matches('.').to_owned(), is_package, text)
        })
        .collect();
    assert!(modules.len() > 50, "too few modules found");
    python_imports::arrows(&modules)
}

#[test]
fn no_file_imports_itself_by_way_of_others() {
    for folder in CRATES {
        let graph = Crate::read(&root().join(folder)).arrows();
        assert_eq!(graph.circle(), None, "in {folder}");
    }
    assert_eq!(kernels().circle(), None);
    assert_eq!(python().circle(), None);
}

/// The room of a file or module below a folder: the next part of its path.
fn room(path: &str, folder: &str, mark: char) -> Option<String> {
    let inner = match folder {
        "" => path,
        folder => path.strip_prefix(folder)?.strip_prefix(mark)?,
    };
    inner.split(mark).next().map(str::to_owned)
}

#[test]
fn the_architecture_draws_what_rooms_import() {
    let text = read(&root().join("ARCHITECTURE.md"));
    let drawn = drawings(&text);
    let expected = [
        "allocator/src",
        "collectives/kernels",
        "collectives/src",
        "collectives/src/cuda",
        "collectives/src/host",
        "ffi/src",
        "python/symmpool",
    ];
    assert_eq!(drawn.keys().collect::<Vec<_>>(), expected);
    for (folder, drawing) in drawn {
        let real = match folder.as_str() {
            "collectives/kernels" => kernels().rooms(&|file| room(file, "", '/')),
            "python/symmpool" => python().rooms(&|module| room(module, "symmpool", '.')),
            folder => {
                let source =
                    CRATES.into_iter().find(|each| folder.starts_with(each)).expect("a crate");
                let inner = folder[source.len()..].trim_start_matches('/');
                let graph = Crate::read(&root().join(source)).arrows();
                graph.rooms(&|file| room(file, inner, '/'))
            }
        };
        let real = real.rooms(&|room| Some(drawing.node_of(room)));
        let differences = real.differences(&drawing);
        assert!(differences.is_empty(), "ARCHITECTURE.md, {folder}: {differences:#?}");
    }
}

#[test]
fn the_architecture_is_short() {
    let path = root().join("ARCHITECTURE.md");
    let text = read(&path);
    let lines = text.lines().count();
    assert!(lines <= 200, "{} has {lines} lines", name(&path));
    // Two lines of a page.
    let cells = text.lines().filter(|line| line.starts_with('|')).flat_map(|line| line.split('|'));
    let long: Vec<&str> = cells.filter(|cell| cell.chars().count() > 240).collect();
    assert!(long.is_empty(), "shorten these: {long:#?}");
}
