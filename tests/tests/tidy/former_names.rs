//! Functions and files that have better names now: nobody uses the former ones again.

use std::path::{Path, PathBuf};

use crate::documents::documents;
use crate::{name, read, root};

/// Folders that are looked at.
const FOLDERS: [&str; 7] =
    ["allocator", "bench", "collectives", "examples", "ffi", "python", "tests"];

/// Ends of the names of sources.
const SOURCES: [&str; 5] = ["rs", "py", "pyi", "cu", "cuh"];

/// This file, which has the former names.
const HERE: &str = "tests/tests/tidy/former_names.rs";

/// Names that functions have had, with the better ones.
const FUNCTIONS: [(&str, &str); 8] = [
    ("abandon", "fail_after_panic, or fail"),
    ("close_after", "fail_after_declining"),
    ("close_because", "fail_because"),
    ("close_halfway", "fail_mid_call, or fail_halfway"),
    ("give_up", "decline_and_fail, fail, or cancel"),
    ("publish_refusal", "publish_declined"),
    ("report_or_close", "report_or_fail"),
    ("take_notice", "take_async_error"),
];

/// Identifiers that nothing has any more, in kernels neither, with the better ones.
const IDENTIFIERS: [(&str, &str); 17] = [
    ("FewRows", "LowLatencyDispatch, or SmallM"),
    ("FewSums", "LowLatencyCombine"),
    ("GAVE_UP", "PEER_FAILED"),
    ("GIVE_UP", "STOP_WAITING"),
    ("has_few", "is_low_latency"),
    ("MatmulProduct", "GemmProblem"),
    ("MatmulSplit", "StreamK"),
    ("matmul_few", "matmul_small_m"),
    ("MAX_LANES", "MAX_STRIPES"),
    ("MAX_PRODUCTS", "MAX_PROBLEMS, or MAX_MATMULS"),
    ("multiply_few", "multiply_small"),
    ("ONLY_FEW", "ONLY_LOW_LATENCY"),
    ("STAGED", "SCRATCH"),
    ("two_shot_stages", "two_shot_pipeline"),
    ("withdraw", "fail_handshake, or leave"),
    ("withdrawal", "failed_flag"),
    ("withdrawn", "has_failed_handshake, or left"),
];

/// Ends of paths that files have had, with the better ones.
const FILES: [(&str, &str); 13] = [
    ("/amount.rs", "byte_size.rs"),
    ("/choice.rs", "decision.rs"),
    ("/few.rs", "small_m.rs"),
    ("/fused/products.py", "matmuls.py"),
    ("/language/programs.py", "library.py"),
    ("/made.rs", "generated_kernel.rs"),
    ("/meeting.rs", "host_barrier.rs"),
    ("/notes.rs", "barrier_messages.rs"),
    ("/raw.rs", "addresses.rs"),
    ("/refusal.rs", "decline.rs"),
    ("/refusals.py", "declined_calls.py"),
    ("/requested.rs", "selection/request.rs"),
    ("/pool/share.rs", "exchange_segments.rs"),
];

/// Words of documents that stand for something else there, with the better ones.
const WORDS: [(&str, &str); 3] = [
    ("best peer", "best contender: a peer is another rank"),
    ("fastest peer", "fastest contender: a peer is another rank"),
    ("pip install .\n", "pip install ./python: the package is there"),
];

/// Sources below a folder.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for path in folder.read_dir().expect("a folder").flatten().map(|entry| entry.path()) {
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if !file.starts_with('.') && !["target", "dist", "__pycache__"].contains(&&*file) {
                files(&path, found);
            }
        } else if path.extension().is_some_and(|end| SOURCES.iter().any(|each| end == *each)) {
            found.push(path);
        }
    }
}

/// The name of the function that a line defines, if it does.
fn defined(line: &str) -> Option<&str> {
    let words = line.trim_start();
    let at = ["fn ", "def "].iter().find_map(|keyword| {
        let at = words.find(keyword)?;
        let is_word = at == 0 || words[..at].ends_with([' ', ')']);
        (is_word && !words.starts_with("//") && !words.starts_with('#')).then(|| at + keyword.len())
    })?;
    let rest = &words[at..];
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    (end > 0).then_some(&rest[..end])
}

/// The former identifiers that a line has, in its comment too, with the better ones.
fn former_identifiers(line: &str) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
    let words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.filter_map(|word| IDENTIFIERS.iter().find(|(former, _)| *former == word))
}

#[test]
fn former_names_of_functions_and_files_are_gone() {
    let mut all = Vec::new();
    for folder in FOLDERS {
        files(&root().join(folder), &mut all);
    }
    assert!(all.len() > 500, "too few files found: {}", all.len());
    let mut found = Vec::new();
    for path in &all {
        let file = name(path);
        for (former, better) in FILES.iter().filter(|(former, _)| file.ends_with(former)) {
            found.push(format!("{file}: call it {better}, not {former}"));
        }
        for (number, line) in (1..).zip(read(path).lines()) {
            if file != HERE {
                found.extend(former_identifiers(line).map(|(former, better)| {
                    format!("{file}:{number}: call it {better}, not {former}")
                }));
            }
            let Some(defined) = defined(line) else { continue };
            for (former, better) in FUNCTIONS.iter().filter(|(former, _)| *former == defined) {
                found.push(format!("{file}:{number}: call it {better}, not {former}"));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn words_of_documents_stand_for_one_thing() {
    let mut found = Vec::new();
    for document in documents() {
        let text = read(&root().join(&document)).to_lowercase();
        for (former, better) in WORDS.iter().filter(|(former, _)| text.contains(former)) {
            found.push(format!("{document} has {former:?}: say {better}"));
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn former_identifiers_are_found() {
    let found = |line| former_identifiers(line).map(|(former, _)| *former).collect::<Vec<_>>();
    assert_eq!(found("    u32 kind = GAVE_UP;  // withdrawn"), ["GAVE_UP", "withdrawn"]);
    assert_eq!(found("const MAX_STRIPES: u32 = withdraw_all();"), [""; 0]);
}

#[test]
fn definitions_of_functions_are_found() {
    assert_eq!(defined("fn a() {"), Some("a"));
    assert_eq!(defined("    pub(crate) unsafe fn b<T>("), Some("b"));
    assert_eq!(defined("async def c(self):"), Some("c"));
    assert_eq!(defined("let d = e(fn_f);"), None);
    assert_eq!(defined("// fn g() is gone"), None);
    assert_eq!(defined("undef h"), None);
}
