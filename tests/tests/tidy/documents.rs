//! Promises of documents: files, links, programs, and the pages of decisions.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{name, read, root};

/// All documents: those of the root, those below `docs`, and those of the examples and of the device API.
pub(crate) fn documents() -> Vec<String> {
    let is_document = |path: &PathBuf| path.extension().is_some_and(|end| end == "md");
    let entries = |folder: &Path| fs::read_dir(folder).expect("a folder").flatten();
    let mut found: Vec<PathBuf> = entries(&root()).map(|entry| entry.path()).collect();
    let mut folders = vec![
        root().join("docs"),
        root().join("examples"),
        root().join("collectives/kernels/symmpool"),
    ];
    while let Some(folder) = folders.pop() {
        for path in entries(&folder).map(|entry| entry.path()) {
            if path.is_dir() { folders.push(path) } else { found.push(path) }
        }
    }
    let mut found: Vec<String> =
        found.iter().filter(|path| is_document(path)).map(|path| name(path)).collect();
    found.sort();
    assert!(found.len() > 20, "too few documents found: {found:?}");
    found
}

#[test]
fn every_decision_has_a_title_a_date_three_sections_and_a_place_in_the_index() {
    let index = read(&root().join("docs/decisions/README.md"));
    let pages: Vec<String> = documents()
        .into_iter()
        .filter_map(|name| name.strip_prefix("docs/decisions/").map(str::to_owned))
        .filter(|page| page != "README.md")
        .collect();
    assert!(pages.len() > 50, "too few decisions found: {pages:?}");
    for page in &pages {
        let text = read(&root().join("docs/decisions").join(page));
        let mut lines = text.lines();
        let title = lines.next().and_then(|line| line.strip_prefix("# ")).unwrap_or_default();
        assert!(!title.is_empty(), "{page} begins with no title");
        let date =
            lines.nth(1).and_then(|line| line.strip_prefix("Decided 20")).unwrap_or_default();
        let dated = date.chars().take(8).filter(|c| c.is_ascii_digit() || *c == '-').count() == 8;
        assert!(
            dated,
            "{page} does not say below its title when it was decided: \"Decided 2026-01-31.\""
        );
        let headings: Vec<&str> =
            text.lines().filter_map(|line| line.strip_prefix("## ")).collect();
        let sections = ["Decision", "Alternatives", "Numbers"];
        assert_eq!(headings, sections, "{page} has other sections than a decision's page has");
        let bodies = text.split("\n## ").skip(1).filter_map(|section| section.split_once('\n'));
        for (heading, body) in bodies {
            assert!(!body.trim().is_empty(), "{page} has nothing in its section {heading:?}");
        }
        let link = format!("| [{title}]({page}) | ");
        assert!(index.contains(&link), "docs/decisions/README.md has no row {link}");
    }
}

#[test]
fn the_documents_name_files_that_exist() {
    for document in documents() {
        let text = read(&root().join(&document));
        for quoted in text.split('`').skip(1).step_by(2) {
            let folders = [
                "allocator/",
                "collectives/",
                "examples/",
                "ffi/",
                "python/",
                "tests/",
                "bench/",
                "docs/",
            ];
            let is_path = folders.iter().any(|folder| quoted.starts_with(folder))
                && !quoted.contains([' ', '*', '{', '<']);
            if is_path {
                let path = root().join(quoted);
                assert!(path.exists(), "{document} names {quoted}, which does not exist");
            }
        }
    }
}

#[test]
fn links_between_documents_lead_somewhere() {
    // The anchor of a heading, as repository hosts make it.
    let anchor = |heading: &str| -> String {
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
    };
    let anchors = |text: &str| -> Vec<String> {
        let headings = text.lines().filter(|line| line.starts_with('#'));
        headings.map(|line| anchor(line.trim_start_matches('#').trim())).collect()
    };
    let (mut links, all) = (0, documents());
    for document in &all {
        let path = root().join(document);
        let text = read(&path);
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for target in
            targets.filter(|target| !target.contains([' ', '\n']) && !target.contains("://"))
        {
            links += 1;
            let (file, place) = target.split_once('#').unwrap_or((target, ""));
            let folder = path.parent().expect("a folder");
            let to = if file.is_empty() { path.clone() } else { folder.join(file) };
            assert!(to.exists(), "{document} links to {target}, which does not exist");
            // `make docs` puts these into its site, and nothing else.
            let in_site = name(&to.canonicalize().expect("it exists"));
            let has_page = all.contains(&in_site) || in_site.starts_with("docs/pictures/");
            assert!(has_page, "{document} links to {target}, which is no document");
            let there = place.is_empty() || anchors(&read(&to)).iter().any(|known| known == place);
            assert!(there, "{document} links to {target}, where there is no such heading");
        }
    }
    assert!(links > 20, "only {links} links found");
}

#[test]
fn the_first_page_the_map_and_the_changelog_are_short() {
    let lines = |name: &str| read(&root().join(name)).lines().count();
    for (name, max_lines) in [("README.md", 150), ("ARCHITECTURE.md", 200)] {
        let count = lines(name);
        assert!(count <= max_lines, "{name} has {count} lines, and may have {max_lines}");
    }
    let changelog = read(&root().join("CHANGELOG.md"));
    for version in changelog.split("\n## ").skip(1) {
        let count = version.lines().count();
        let name = version.lines().next().unwrap_or_default();
        assert!(count <= 60, "CHANGELOG.md has {count} lines of {name}: a line for each feature");
    }
}

#[test]
fn the_page_on_rust_shows_the_first_example_as_it_is() {
    let example = read(&root().join("collectives/examples/first.rs"));
    let begin = example.find("use ").expect("what it imports");
    // Programs of readers need no `--help`.
    let program: Vec<&str> =
        example[begin..].lines().filter(|line| !line.contains("clap::")).collect();
    let page = read(&root().join("docs/rust.md"));
    assert!(page.contains(&program.join("\n")), "docs/rust.md differs from examples/first.rs");
}
