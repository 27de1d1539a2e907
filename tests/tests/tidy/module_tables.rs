//! Tables of modules: a module that lists those below it has all of them in its list, and no other.

use std::collections::BTreeSet;

use crate::{name, read, sources};

/// The modules that the table of a source file names in its first column, if it has such a table.
fn listed(text: &str) -> Option<BTreeSet<String>> {
    let lines: Vec<&str> = text.lines().collect();
    let is_head = |at: &usize| {
        let heads = ["//! | file |", "//! | module |"];
        heads.iter().any(|head| lines[*at].starts_with(head))
            && lines.get(at + 1).is_some_and(|next| next.starts_with("//! | ---"))
    };
    let head = (0..lines.len()).find(is_head)?;
    let rows = lines[head + 2..].iter().map_while(|line| line.strip_prefix("//! | "));
    let cells = rows.filter_map(|row| row.split(" | ").next()).collect::<Vec<_>>();
    let names = cells.iter().flat_map(|cell| cell.split('`').skip(1).step_by(2));
    // The file itself is called `mod`, and `device/captures` is a file of a module below.
    Some(names.filter(|name| *name != "mod" && !name.contains('/')).map(str::to_owned).collect())
}

/// The modules of a source file that other files have: those that must be listed, and those for tests, which may be.
fn modules(text: &str) -> [BTreeSet<String>; 2] {
    let (mut shipped, mut of_tests) = (BTreeSet::new(), BTreeSet::new());
    let mut before = "";
    for line in text.lines() {
        let visible = line.strip_prefix("pub").map_or(line, |rest| match rest.strip_prefix('(') {
            Some(inner) => inner.split_once(')').map_or(rest, |(_, rest)| rest),
            None => rest,
        });
        let module =
            visible.trim_start().strip_prefix("mod ").and_then(|rest| rest.strip_suffix(';'));
        if let Some(module) = module.filter(|_| !line.starts_with(' ')) {
            let is_for_tests = before.starts_with("#[cfg(") && before.contains("test");
            if is_for_tests { &mut of_tests } else { &mut shipped }.insert(module.to_owned());
        }
        before = line;
    }
    [shipped, of_tests]
}

#[test]
fn tables_list_all_modules_and_no_other() {
    let (mut tables, mut found) = (0, Vec::new());
    let all = sources();
    for path in all.iter().filter(|path| name(path).contains("/src/")) {
        let text = read(path);
        let Some(listed) = listed(&text) else { continue };
        tables += 1;
        let [shipped, of_tests] = modules(&text);
        for missing in shipped.difference(&listed) {
            found.push(format!("{}: the table lacks `{missing}`", name(path)));
        }
        for other in listed.difference(&shipped).filter(|other| !of_tests.contains(*other)) {
            found.push(format!("{}: the table has `{other}`, which is no module", name(path)));
        }
    }
    assert!(tables > 20, "found {tables} tables");
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn rows_and_modules_are_found() {
    let text = "//! About.\n//!\n//! | file | holds |\n//! | --- | --- |\n//! | `mod` | it |\n//! | `a`, `b` | `c` |\n//!\n\n\
                mod a;\npub(in crate::x) mod b;\n#[cfg(test)]\nmod tests;\nmod inline {}\n";
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(listed(text), Some(set(&["a", "b"])));
    assert_eq!(modules(text), [set(&["a", "b"]), set(&["tests"])]);
    assert_eq!(listed("//! About.\nmod a;\n"), None);
}
