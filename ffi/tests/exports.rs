//! The library exports its own names and no others.

mod common;

use std::collections::BTreeSet;
use std::path::Path;

use object::{Object, ObjectSymbol};

#[test]
fn only_our_own_names_are_visible_and_all_of_them_are() {
    let bytes = std::fs::read(common::library()).expect("the library");
    let file = object::File::parse(&*bytes).expect("an ELF file");
    let visible: BTreeSet<String> = file
        .dynamic_symbols()
        .filter(|symbol| symbol.is_global() && symbol.is_definition())
        .filter_map(|symbol| symbol.name().ok().map(str::to_owned))
        .collect();
    let foreign: Vec<_> = visible.iter().filter(|name| !name.starts_with("symmpool_")).collect();
    assert!(foreign.is_empty(), "{foreign:?}");
    for slot in 0..64 {
        for name in [format!("symmpool_alloc_{slot}"), format!("symmpool_free_{slot}")] {
            assert!(visible.contains(&name), "{name} is missing");
        }
    }
    // Every function of the header, and no function that it does not have.
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/symmpool.h");
    let header = std::fs::read_to_string(header).expect("the header");
    let declared: BTreeSet<&str> = header
        .lines()
        .filter(|line| !line.starts_with("//"))
        .flat_map(|line| line.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '(')))
        .filter_map(|word| word.split_once('('))
        .map(|(name, _)| name)
        .filter(|name| name.starts_with("symmpool_"))
        .collect();
    assert!(declared.len() > 30, "{declared:?}");
    let programs = [include_str!("program.c"), include_str!("experts.c")];
    for name in &declared {
        assert!(visible.contains(*name), "{name} is declared and not exported");
        // README.md says that these programs use every function.
        let call = format!("{name}(");
        assert!(programs.iter().any(|text| text.contains(&call)), "no C program uses {name}");
    }
    for name in &visible {
        let numbered = name.trim_end_matches(|c: char| c.is_ascii_digit()) != name;
        let hook = name.starts_with("symmpool_process_");
        assert!(
            numbered || hook || declared.contains(name.as_str()),
            "{name} is not in the header"
        );
    }
}
