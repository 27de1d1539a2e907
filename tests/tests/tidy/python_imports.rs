//! Imports of Python's modules, also those inside functions. What only type checkers see does not count.

use std::collections::BTreeSet;

use crate::arrows::ImportGraph;

/// A text's logical lines, without comments and strings.
fn lines(text: &str) -> Vec<String> {
    let (mut found, mut line, mut depth, mut rest) = (Vec::new(), String::new(), 0, text);
    while let Some(first) = rest.chars().next() {
        let length = if let Some(quote) =
            ["\"\"\"", "'''", "\"", "'"].iter().find(|q| rest.starts_with(**q))
        {
            string_length(&rest[quote.len()..], quote) + quote.len()
        } else if first == '#' {
            rest.find('\n').unwrap_or(rest.len())
        } else {
            match first {
                '(' | '[' | '{' => depth += 1,
                ')' | ']' | '}' => depth -= 1,
                _ => {}
            }
            match first {
                '\n' if depth == 0 => found.push(std::mem::take(&mut line)),
                '\n' | '(' | ')' => line.push(' '),
                _ => line.push(first),
            }
            first.len_utf8()
        };
        rest = &rest[length..];
    }
    found.push(line);
    found
}

fn string_length(text: &str, quote: &str) -> usize {
    let mut at = 0;
    while at < text.len() {
        if text[at..].starts_with(quote) {
            return at + quote.len();
        }
        let mut chars = text[at..].chars();
        let first = chars.next().map_or(1, char::len_utf8);
        at += first
            + if text[at..].starts_with('\\') { chars.next().map_or(0, char::len_utf8) } else { 0 };
    }
    text.len()
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// The modules that a module imports, of those that there are. A package is named as its `__init__`.
fn imported(
    module: &str,
    is_package: bool,
    text: &str,
    all: &BTreeSet<String>,
) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut for_checkers = None;
    let package = if is_package {
        module
    } else {
        module.rsplit_once('.').map_or("", |(package, _)| package)
    };
    for line in lines(text) {
        if line.trim().is_empty() {
            continue;
        }
        if for_checkers.is_some_and(|outer| indentation(&line) > outer) {
            continue;
        }
        for_checkers = line.trim().ends_with("TYPE_CHECKING:").then(|| indentation(&line));
        let line = line.trim();
        if let Some(names) = line.strip_prefix("import ") {
            let names = names.split(',').filter_map(|name| name.split_whitespace().next());
            found.extend(names.map(str::to_owned).filter(|name| all.contains(name)));
        }
        let Some((from, names)) =
            line.strip_prefix("from ").and_then(|rest| rest.split_once(" import "))
        else {
            continue;
        };
        let dots = from.trim().chars().take_while(|c| *c == '.').count();
        let named = from.trim().trim_start_matches('.');
        let ups = package.rsplitn(dots.max(1), '.').last().unwrap_or_default();
        let base = match (dots, named) {
            (0, named) => named.to_owned(),
            (_, "") => ups.to_owned(),
            (_, named) => format!("{ups}.{named}"),
        };
        for name in names.split(',').filter_map(|name| name.split_whitespace().next()) {
            let inner = format!("{base}.{name}");
            found.extend([inner, base.clone()].into_iter().find(|name| all.contains(name)));
        }
    }
    found.remove(module);
    found
}

/// The arrows between modules, of each one's name, whether it is a package, and its text.
pub(crate) fn arrows(modules: &[(String, bool, String)]) -> ImportGraph {
    let native = "symmpool._symmpool".to_owned();
    let all: BTreeSet<String> =
        modules.iter().map(|(name, ..)| name.clone()).chain([native]).collect();
    let mut graph = ImportGraph::default();
    for (name, is_package, text) in modules {
        for other in imported(name, *is_package, text, &all) {
            graph.add(name, &other);
        }
    }
    graph
}

#[test]
fn imports_inside_functions_count_and_those_for_type_checkers_do_not() {
    let module =
        |name: &str, is_package, text: &str| (name.to_owned(), is_package, text.to_owned());
    let found = arrows(&[
        module("p", true, "from .a import (\n    x,\n    y,\n)\n"),
        module(
            "p.a",
            false,
            "\"\"\"import p.b\"\"\"\nif TYPE_CHECKING:\n    from . import c\ndef f():\n    from . import b\n",
        ),
        module("p.b", false, "import os, p.a  # import p.c\n"),
        module("p.c", false, "from p.b import z as w\n"),
    ]);
    assert_eq!(
        found.list(),
        ["p imports p.a", "p.a imports p.b", "p.b imports p.a", "p.c imports p.b"]
    );
    assert_eq!(found.circle(), Some(vec!["p.a".to_owned(), "p.b".to_owned()]));
}
