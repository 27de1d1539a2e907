//! Mutants: each fault that code can run with is noticed by a model, and listed in docs/reliability.md.

use std::collections::BTreeSet;

use crate::{name, read, root, sources};

/// Names of mutants that stand behind `before` in a text.
fn named<'a>(text: &'a str, before: &str) -> BTreeSet<&'a str> {
    let behind = |(at, _): (usize, &str)| {
        let rest = &text[at + before.len()..];
        let end = rest.find(|c: char| !c.is_ascii_lowercase() && c != '_').unwrap_or(rest.len());
        &rest[..end]
    };
    text.match_indices(&format!("{before}mutant_")).map(behind).collect()
}

#[test]
fn every_mutant_is_noticed_by_a_model_and_listed() {
    let texts: Vec<(String, String)> =
        sources().iter().map(|path| (name(path), read(path))).collect();
    let page = read(&root().join("docs/reliability.md"));
    let listed = named(&page, "`");
    let (mut placed, mut proved) = (BTreeSet::new(), BTreeSet::new());
    for (file, text) in &texts {
        // The models of models have faults of their own.
        if file.starts_with("allocator/src/models/") || file.starts_with("tests/") {
            continue;
        }
        let faults = named(text, "mutant(\"").into_iter().chain(named(text, "weakened(\""));
        let faults: BTreeSet<&str> = faults.collect();
        proved.extend(named(text, "\"").into_iter().filter(|name| {
            // A name is in a list of a model where it stands once more than at its fault.
            let count = text.matches(&format!("\"{name}\"")).count();
            let at_fault = ["mutant", "weakened"]
                .iter()
                .map(|call| text.matches(&format!("{call}(\"{name}\"")).count())
                .sum::<usize>();
            count > at_fault
        }));
        placed.extend(faults);
    }
    assert!(placed.len() > 10, "too few mutants found: {placed:?}");
    assert_eq!(placed, proved, "faults in the code, and faults that models are given");
    assert_eq!(placed, listed, "faults in the code, and those of docs/reliability.md");
}
