//! Imports of Rust sources: which file uses what another file defines.
//!
//! An arrow is a path of `use`, or one in code, that begins with `crate`, `super` or `self`. A re-export is no arrow: a path
//! through it leads to the file that defines the name. Comments, strings and what only tests compile do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::arrows::ImportGraph;

type PathSegments = Vec<String>;

/// A path of a `use`, and the name that it gives.
struct UsePath {
    path: PathSegments,
    name: String,
    exported: bool,
}

/// Declarations and imports of a file.
#[derive(Default)]
struct Module {
    children: Vec<String>,
    uses: Vec<UsePath>,
    paths: Vec<PathSegments>,
    defined: BTreeSet<String>,
}

/// A crate's modules by name; the crate's own name is empty.
pub(crate) struct Crate(BTreeMap<PathSegments, Module>);

impl Crate {
    /// Reads the modules of the crate whose `lib.rs` is in a folder.
    pub(crate) fn read(folder: &Path) -> Self {
        let text = |name: &[String]| {
            let path = folder.join(name.join("/"));
            let files = match name {
                [] => [folder.join("lib.rs"), folder.join("lib.rs")],
                _ => [path.with_extension("rs"), path.join("mod.rs")],
            };
            let found = files.iter().find(|file| file.exists());
            crate::read(found.unwrap_or_else(|| panic!("no file of the module {path:?}")))
        };
        Self::of(&text)
    }

    /// The modules that are reached from the root, whose texts are given by name.
    fn of(text: &dyn Fn(&[String]) -> String) -> Self {
        let (mut found, mut open) = (BTreeMap::new(), vec![PathSegments::new()]);
        while let Some(name) = open.pop() {
            let module = parse(&tokens(&text(&name)), &name);
            open.extend(module.children.iter().map(|child| joined(&name, [child.clone()])));
            found.insert(name, module);
        }
        Self(found)
    }

    /// The module that defines what a path from the root names.
    fn find(&self, path: &[String], depth: usize) -> Option<&PathSegments> {
        let lengths = (0..=path.len()).rev();
        let (length, (name, module)) =
            lengths.filter_map(|at| Some((at, self.0.get_key_value(&path[..at])?))).next()?;
        let Some((first, rest)) = path[length..].split_first() else { return Some(name) };
        if module.defined.contains(first) || depth > 12 {
            return Some(name);
        }
        let mut exports = module.uses.iter().filter(|each| each.exported);
        if let Some(export) = exports.clone().find(|each| each.name == *first) {
            return self.find(&joined(&export.path, rest.iter().cloned()), depth + 1);
        }
        let glob = exports.find(|each| {
            let of = self.0.get(&each.path);
            each.name == "*" && of.is_some_and(|module| module.offers(first))
        });
        match glob {
            Some(glob) => self.find(&joined(&glob.path, path[length..].iter().cloned()), depth + 1),
            None => Some(name),
        }
    }

    /// The arrows from module to module; the root has none.
    pub(crate) fn arrows(&self) -> ImportGraph {
        let mut graph = ImportGraph::default();
        for (name, module) in &self.0 {
            let uses = module.uses.iter().filter(|each| !each.exported).map(|each| &each.path);
            for path in uses.chain(&module.paths) {
                let target = self.find(path, 0);
                if let Some(target) = target.filter(|target| !target.is_empty() && *target != name)
                    && !name.is_empty()
                {
                    graph.add(&name.join("/"), &target.join("/"));
                }
            }
        }
        graph
    }
}

impl Module {
    fn offers(&self, name: &str) -> bool {
        let mut exports = self.uses.iter().filter(|each| each.exported);
        self.defined.contains(name) || exports.any(|each| each.name == name)
    }
}

fn joined(name: &[String], rest: impl IntoIterator<Item = String>) -> PathSegments {
    name.iter().cloned().chain(rest).collect()
}

/// The words, strings and signs of a text, without comments. A string keeps its first quotation mark.
fn tokens(text: &str) -> Vec<String> {
    let (mut found, mut rest) = (Vec::new(), text);
    while let Some(first) = rest.chars().next() {
        let word = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let hashes = rest.strip_prefix(['r', 'b', 'c']).map(|rest| rest.trim_start_matches('r'));
        let hashes = hashes.and_then(|rest| rest.split_once('"')).map(|(hashes, _)| hashes);
        let raw = hashes.filter(|hashes| hashes.chars().all(|c| c == '#'));
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |at| at + 2)
        } else if let (Some(hashes), true) = (raw, rest.starts_with(['r', 'b'])) {
            let begin = rest.find('"').expect("found above") + 1;
            let is_raw = rest[..begin].contains('r');
            if is_raw {
                let end = format!("\"{hashes}");
                begin + rest[begin..].find(&end).map_or(0, |at| at + end.len())
            } else {
                begin + string_length(&rest[begin..])
            }
        } else if first == '"' {
            let length = 1 + string_length(&rest[1..]);
            found.push(rest[..length - 1].to_owned());
            length
        } else if first == '\'' {
            let mut inside = rest[1..].chars();
            match (inside.next(), inside.next()) {
                (Some('\\'), _) => 2 + rest[2..].find('\'').map_or(0, |at| at.max(1) + 1),
                (Some(c), Some('\'')) => 2 + c.len_utf8(),
                _ => 1,
            }
        } else if word > 0 {
            found.push(rest[..word].to_owned());
            word
        } else if rest.starts_with("::") {
            found.push("::".to_owned());
            2
        } else {
            if !first.is_whitespace() {
                found.push(first.to_string());
            }
            first.len_utf8()
        };
        rest = rest.get(length..).unwrap_or_default();
    }
    found
}

/// Bytes of what is left of a string, with the quotation mark at its end.
fn string_length(text: &str) -> usize {
    let mut escaped = false;
    let end = text.find(|c| {
        let ends = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    });
    end.map_or(text.len(), |at| at + 1)
}

const ITEMS: [&str; 15] = [
    "pub", "fn", "use", "mod", "impl", "struct", "enum", "const", "static", "type", "trait",
    "unsafe", "async", "extern", "union",
];

/// Where what begins at a token ends: an item, or a variant, field or arm.
fn end_of_item(tokens: &[String], begin: usize) -> usize {
    let is_item = tokens.get(begin).is_some_and(|first| ITEMS.contains(&first.as_str()));
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(begin) {
        match token.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" if depth == 0 => return at,
            "}" if depth == 1 && is_item => return at + 1,
            ")" | "]" | "}" => depth -= 1,
            ";" if depth == 0 => return at + 1,
            "," if depth == 0 && !is_item => return at + 1,
            _ => {}
        }
    }
    tokens.len()
}

/// Whether an attribute has what follows it compiled for tests alone.
fn is_for_tests(attribute: &[String]) -> bool {
    let has = |word: &str| attribute.iter().any(|token| token == word);
    has("cfg") && (has("test") || has("\"testing")) && !has("not")
}

fn parse(tokens: &[String], name: &[String]) -> Module {
    let mut module = Module::default();
    let (mut at, mut depth, mut exported) = (0, 0_usize, false);
    // Inline modules that are open, and how deep they lie.
    let mut inside: Vec<(String, usize)> = Vec::new();
    let word = |at: usize| tokens.get(at).map_or("", String::as_str);
    while at < tokens.len() {
        let here = joined(name, inside.iter().map(|(name, _)| name.clone()));
        match word(at) {
            "#" if word(at + 1) == "[" => {
                let end = at + 2 + end_of_item(&tokens[at + 2..], 0);
                let attribute = &tokens[at + 2..end];
                at = end + 1;
                if is_for_tests(attribute) {
                    while word(at) == "#" {
                        at += 3 + end_of_item(&tokens[at + 2..], 0);
                    }
                    at = end_of_item(tokens, at);
                }
                continue;
            }
            "pub" => {
                exported = true;
                at += 1;
                if word(at) == "(" {
                    at += 2 + end_of_item(&tokens[at + 1..], 0);
                }
                continue;
            }
            "use" => {
                let end = end_of_item(tokens, at);
                let mut open = at + 1;
                uses(&tokens[..end], &mut open, &[], exported, &here, &mut module.uses);
                at = end;
                exported = false;
                continue;
            }
            "mod" if word(at + 2) == ";" && inside.is_empty() => {
                module.children.push(word(at + 1).to_owned());
                module.defined.insert(word(at + 1).to_owned());
            }
            "mod" if word(at + 2) == "{" => inside.push((word(at + 1).to_owned(), depth)),
            "fn" | "struct" | "enum" | "trait" | "const" | "static" | "type" | "union" => {
                module.defined.insert(word(at + 1).to_owned());
            }
            "macro_rules" => {
                module.defined.insert(word(at + 2).to_owned());
            }
            "{" => depth += 1,
            "}" => {
                depth = depth.saturating_sub(1);
                inside.retain(|(_, of)| *of < depth || (*of == depth && word(at) != "}"));
            }
            "crate" | "super" | "self" if word(at + 1) == "::" => {
                let mut path = vec![word(at).to_owned()];
                while word(at + 1) == "::" && word(at + 2).starts_with(char::is_alphabetic) {
                    path.push(word(at + 2).to_owned());
                    at += 2;
                }
                module.paths.extend(absolute(&path, &here));
            }
            _ => {}
        }
        exported = false;
        at += 1;
    }
    module
}

/// Reads a tree of paths.
fn uses(
    tokens: &[String],
    at: &mut usize,
    before: &[String],
    exported: bool,
    here: &[String],
    found: &mut Vec<UsePath>,
) {
    let mut path = before.to_vec();
    let mut name = None;
    while let Some(token) = tokens.get(*at) {
        *at += 1;
        match token.as_str() {
            "::" => {}
            "{" => {
                while tokens.get(*at).is_some_and(|token| token != "}") {
                    uses(tokens, at, &path, exported, here, found);
                }
                *at += 1;
                if tokens.get(*at).is_some_and(|token| token == ",") {
                    *at += 1;
                }
                return;
            }
            "as" => name = tokens.get(*at).cloned(),
            "," | ";" => break,
            "}" => {
                *at -= 1;
                break;
            }
            _ if name.is_none() => path.push(token.clone()),
            _ => {}
        }
    }
    if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
        path.pop();
    }
    let name = name.or_else(|| path.last().cloned()).unwrap_or_default();
    if name == "*" {
        path.pop();
    }
    let of_child = exported.then(|| joined(here, path.clone()));
    if let Some(path) = absolute(&path, here).or(of_child) {
        found.push(UsePath { path, name, exported });
    }
}

/// A path from the root, of one that begins with `crate`, `super` or `self`.
fn absolute(path: &[String], here: &[String]) -> Option<PathSegments> {
    let ups = path.iter().take_while(|part| *part == "super").count();
    match path.first()?.as_str() {
        "crate" => Some(path[1..].to_vec()),
        "self" => Some(joined(here, path[1..].iter().cloned())),
        "super" => {
            Some(joined(here.get(..here.len().checked_sub(ups)?)?, path[ups..].iter().cloned()))
        }
        _ => None,
    }
}

#[test]
fn arrows_lead_to_where_a_name_is_defined() {
    let text = |name: &[String]| match name.join("/").as_str() {
        "" => "mod a; pub mod b; #[cfg(test)] mod tests; pub use b::{Shown, c::*};",
        "a" => {
            "// use crate::b::Comment;\nuse crate::{Shown as Seen, Deep}; fn f() { \"crate::b::Text\"; '\"'; }"
        }
        "b" => {
            "mod c; mod d; pub(crate) use d::Shown; #[cfg(test)] mod inner { use crate::a::f; } use std::fmt;"
        }
        "b/c" => "pub struct Deep; fn g() { super::super::a::f() }",
        "b/d" => {
            "pub struct Shown; #[cfg(any(test, feature = \"testing\"))] fn t() { crate::a::f() }"
        }
        other => panic!("{other} is for tests"),
    };
    let arrows = Crate::of(&|name| text(name).to_owned()).arrows();
    assert_eq!(arrows.list(), ["a imports b/c", "a imports b/d", "b/c imports a"]);
    assert_eq!(arrows.circle(), Some(vec!["a".to_owned(), "b/c".to_owned()]));
}
