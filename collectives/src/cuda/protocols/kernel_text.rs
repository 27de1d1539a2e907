//! The lines of kernels that the models are made of: who changes them looks whether the models still do what kernels do.
//!
//! `kernel_text.txt` has the functions, and of each the statements that a model has, in their order. All those that access
//! memory which threads share are among them, so none may be added, left out or moved without this test.

use std::path::Path;

use symmpool_allocator::models::mutant;

use super::{calls, escaped, expiry, grant, lamport};
use crate::cuda::engine::{ESCAPED_PATTERN, LAMPORT_PATTERN};

const QUOTED: &str = include_str!("kernel_text.txt");

/// Beginnings and names of what accesses memory that threads share, or orders that.
const ACCESSES: [&str; 13] = [
    "store_relaxed",
    "store_release",
    "store_plain",
    "store_line",
    "load_relaxed",
    "load_acquire",
    "load_line",
    "fence(",
    "atomic",
    "volatile",
    "__syncthreads",
    "raise_flags",
    "await_",
];

fn read(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn without_comments(text: &str) -> String {
    let code = |line: &str| line.split("//").next().unwrap_or_default().to_owned();
    text.lines().map(code).collect::<Vec<_>>().join("\n")
}

/// Where the bracket closes that opens at `begin`.
fn closing(text: &str, begin: usize, [opens, closes]: [char; 2]) -> usize {
    let mut depth = 0;
    let is_end = |letter: char| {
        depth += i32::from(letter == opens) - i32::from(letter == closes);
        depth == 0
    };
    begin + text[begin..].find(is_end).expect("an end")
}

/// The body of the function whose declaration has `signature`.
fn body(text: &str, signature: &str) -> String {
    let at = text.find(signature).unwrap_or_else(|| panic!("no function `{signature}`"));
    let begin = at + text[at..].find('(').expect("parameters");
    // Parameters may have braces too.
    let begin = closing(text, begin, ['(', ')']);
    let begin = begin + text[begin..].find('{').expect("a body");
    text[begin + 1..closing(text, begin, ['{', '}'])].to_owned()
}

fn statements(body: &str) -> Vec<String> {
    let words = |part: &str| part.split_whitespace().collect::<Vec<_>>().join(" ");
    body.split([';', '{', '}']).map(words).filter(|part| !part.is_empty()).collect()
}

fn is_access(statement: &str) -> bool {
    ACCESSES.iter().any(|access| statement.contains(access))
}

/// How a function differs from what is quoted of it.
fn difference(found: &[String], quoted: &[&str]) -> Option<String> {
    let mut left = found.iter();
    for line in quoted {
        if !left.any(|statement| statement == line) {
            return Some(format!("`{line}` is not there, or not behind the lines before it"));
        }
    }
    let is_more = |line: &str| {
        let found = found.iter().filter(|found| *found == line).count();
        found > quoted.iter().filter(|quoted| **quoted == line).count()
    };
    let more = found.iter().find(|found| is_access(found) && is_more(found))?;
    Some(format!("`{more}` is in no model"))
}

/// The quoted parts: a file, a signature, and statements.
fn quotes() -> Vec<(&'static str, &'static str, Vec<&'static str>)> {
    let sections = QUOTED.split("\n# ").skip(1);
    let quote = |section: &'static str| {
        let (head, lines) = section.split_once('\n').expect("statements");
        let (file, signature) = head.split_once(": ").expect("a file and a function");
        (file, signature, lines.lines().filter(|line| !line.is_empty()).collect())
    };
    sections.map(quote).collect()
}

#[test]
fn models_are_made_of_the_kernels_as_they_are() {
    let quotes = quotes();
    assert!(quotes.len() > 30, "{} functions", quotes.len());
    for (file, signature, lines) in quotes {
        let found = statements(&body(&without_comments(&read(file)), signature));
        if let Some(difference) = difference(&found, &lines) {
            panic!(
                "{signature} in {file}: {difference}. See whether the models in src/cuda/protocols still do what it does, \
                 then change kernel_text.txt there. It has now:\n{}",
                found.join("\n")
            );
        }
    }
}

#[test]
fn a_function_that_differs_is_noticed() {
    let text = "void f(int a) {\n  if (a) { store_relaxed(p, a); }  // as a\n  fence();\n  store_relaxed(q, 1);\n}";
    let found = statements(&body(&without_comments(text), "void f("));
    let quoted = ["store_relaxed(p, a)", "fence()", "store_relaxed(q, 1)"];
    assert_eq!(difference(&found, &quoted), None);
    assert!(difference(&found, &quoted[..2]).is_some_and(|text| text.contains("in no model")));
    let twice = [found.clone(), vec!["fence()".to_owned()]].concat();
    assert!(difference(&twice, &quoted).is_some_and(|text| text.contains("in no model")));
    let moved = [quoted[1], quoted[0], quoted[2]];
    assert!(difference(&found, &moved).is_some_and(|text| text.contains("not behind")));
}

#[test]
fn models_have_the_numbers_of_kernels() {
    let has = |file: &str, line: String| {
        let text = read(&format!("kernels/symmpool/impl/{file}"));
        assert!(text.contains(&line), "no `{line}` in {file}");
    };
    assert!(!mutant("mutant_epoch_wraps_to_one"));
    let (last, first) = (calls::LAST, calls::next_epoch(calls::LAST));
    has("comm.cuh", format!("return epoch == {last:#x}u ? {first} : epoch + 1;"));
    has("handshake.cuh", format!("return (session.epoch & {:#x}u) < 2;", expiry::EXPIRY_MASK));
    has("lamport.cuh", format!("EMPTY = {LAMPORT_PATTERN:#x}u;"));
    has("lamport.cuh", format!("DTYPE == F8E4M3 ? 0xffffff7fu : {:#x}u;", lamport::SUBSTITUTE));
    has("lamport.cuh", format!("u64 part = comm.lamport_bytes / {};", lamport::PARTS));
    has("lamport_escaped.cuh", format!("constexpr u32 EMPTY = {ESCAPED_PATTERN:#x}u;"));
    has("lamport_escaped.cuh", "constexpr u32 ESCAPED = EMPTY | 1;".to_owned());
    assert_eq!(escaped::ESCAPED, ESCAPED_PATTERN | 1);
    assert_ne!(LAMPORT_PATTERN, lamport::SUBSTITUTE);
    has("sm_grant.cuh", format!("constexpr u32 NARROW_MARKS = {};", grant::NARROW_MARKS));
    has("comm.cuh", format!("constexpr u32 AREAS = {};", expiry::AREAS));
}
