//! Security: the tests that docs/security.md names exist.

use std::collections::BTreeSet;

use crate::{name, read, root, sources};

#[test]
fn the_tests_of_the_page_on_security_exist() {
    let page = read(&root().join("docs/security.md"));
    let is_test = |name: &&str| {
        name.contains('_') && name.chars().all(|c| c.is_ascii_lowercase() || c == '_')
    };
    let named: BTreeSet<&str> = page.split('`').skip(1).step_by(2).filter(is_test).collect();
    assert!(named.len() > 15, "{named:?}");
    let mut missing = named;
    for path in sources() {
        let text = read(&path);
        // Fuzz targets are tests that a macro makes.
        let targets = name(&path) == "tests/fuzz/tests/seeds.rs";
        missing.retain(|name| {
            !(text.contains(&format!("fn {name}()")) || (targets && text.contains(*name)))
        });
    }
    let python = read(&root().join("python/tests/test_bench_tool.py"));
    missing.retain(|name| !python.contains(&format!("def {name}(")));
    assert_eq!(missing, BTreeSet::new(), "tests that docs/security.md names");
}
