//! The words of the sources: how short comments begin, what SAFETY comments say, how orders are written, and names that are
//! not used.

use std::path::{Path, PathBuf};

use crate::{name, read, root};

/// Folders whose comments and names are looked at.
const FOLDERS: [&str; 7] =
    ["allocator", "bench", "collectives", "examples", "ffi", "python", "tests"];

/// First words of fragments, which hide what they are about.
const FRAGMENTS: [&str; 7] = ["Of", "By", "As", "What", "And", "Or", "The same"];

/// Beginnings of SAFETY comments that leave the proof to the reader.
const NO_PROOFS: [&str; 9] = [
    "as ",
    "the same",
    "likewise",
    "passed on",
    "exactly the caller",
    "the caller's promise",
    "the caller keeps",
    "ditto",
    "see ",
];

/// First parts of names for "max" and "min". They are written in two halves, so that this file does not contain them.
const FORMER: [&str; 2] = [concat!("MO", "ST"), concat!("LEA", "ST")];

/// Words that hide an order as a fact. They are written in two halves, so that this file does not contain them.
const HIDDEN_ORDER: &str = concat!("To be", " called");

/// The quotes of a docstring.
const QUOTES: &str = "\"\"\"";

/// Findings, each with its line and its text.
type Findings = Vec<String>;

/// Files with comments below a folder.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for path in folder.read_dir().expect("a folder").flatten().map(|entry| entry.path()) {
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let ends = ["rs", "py", "pyi", "c", "h", "cpp", "cu", "cuh", "sh"];
        if path.is_dir() {
            if !file.starts_with('.') && !["target", "dist", "__pycache__"].contains(&&*file) {
                files(&path, found);
            }
        } else if path.extension().is_some_and(|end| ends.iter().any(|each| end == *each)) {
            found.push(path);
        }
    }
}

/// The comment of a line that holds nothing else: its marker and its text.
fn whole_line(line: &str, is_hash: bool) -> Option<(&'static str, &str)> {
    let line = line.trim_start();
    let markers: &[&str] = if is_hash { &["#"] } else { &["////", "///", "//!", "//"] };
    let marker = markers.iter().find(|marker| line.starts_with(**marker))?;
    let text = &line[marker.len()..];
    (*marker != "////" && !(is_hash && text.starts_with('!'))).then_some((marker, text.trim()))
}

/// The comment behind the code of a line. Marks within text in quotes are none.
fn behind_code(line: &str, is_hash: bool) -> Option<&str> {
    let mark = if is_hash { " # " } else { " // " };
    let at = line.rfind(mark)?;
    let is_code =
        !line[..at].trim().is_empty() && line[..at].matches('"').count().is_multiple_of(2);
    is_code.then(|| line[at + mark.len()..].trim())
}

/// The paragraphs of all comments of a text, with their lines and the number of the first one. Of a docstring it is the first
/// paragraph.
fn paragraphs(text: &str, is_hash: bool) -> Vec<(usize, Vec<&str>)> {
    let mut found: Vec<(usize, Vec<&str>)> = Vec::new();
    // The marker of the paragraph that the next line may belong to, and whether a text of three quotes is open.
    let (mut before, mut is_quoted) = (None, false);
    for (number, line) in (1..).zip(text.lines()) {
        let toggles = is_hash && !line.matches(QUOTES).count().is_multiple_of(2);
        if is_quoted {
            let part = line.split(QUOTES).next().unwrap_or_default().trim();
            match found.last_mut() {
                Some((_, lines)) if before == Some(QUOTES) && !part.is_empty() => lines.push(part),
                _ => before = None,
            }
            is_quoted = !toggles;
            continue;
        }
        let comment = whole_line(line, is_hash);
        if let Some((marker, part)) = comment {
            match found.last_mut() {
                Some((_, lines)) if before == Some(marker) && !part.is_empty() => lines.push(part),
                _ if !part.is_empty() => found.push((number, vec![part])),
                _ => {}
            }
            before = (!part.is_empty()).then_some(marker);
            continue;
        }
        before = None;
        let code = line.trim_start().trim_start_matches(['r', 'b', 'u', 'f']);
        is_quoted = toggles;
        if is_hash && let Some(doc) = code.strip_prefix(QUOTES) {
            found.push((number, vec![doc.split(QUOTES).next().unwrap_or_default().trim()]));
            before = Some(QUOTES);
        } else if let Some(part) = behind_code(line, is_hash) {
            found.push((number, vec![part]));
        }
    }
    found
}

/// Whether a text begins with a word or some words, in any case of the first letter.
fn begins(text: &str, words: &str) -> bool {
    let Some(start) = text.get(..words.len()) else { return false };
    let rest = &text[words.len()..];
    start.eq_ignore_ascii_case(words)
        && !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_')
        && start[1..] == words[1..]
}

/// Short comments that are fragments.
fn fragments(text: &str, is_hash: bool) -> Findings {
    let short = paragraphs(text, is_hash).into_iter().filter(|(_, lines)| lines.len() <= 2);
    short
        .filter(|(_, lines)| FRAGMENTS.iter().any(|words| begins(lines[0], words)))
        .map(|(number, lines)| format!("{number}: {}", lines.join(" ")))
        .collect()
}

/// SAFETY comments that prove nothing.
fn no_proofs(text: &str) -> Findings {
    let proofs = (1..).zip(text.lines()).filter_map(|(number, line)| {
        let (code, proof) = line.split_once("SAFETY: ")?;
        code.contains("//").then_some((number, proof.trim().to_lowercase()))
    });
    let is_none = |proof: &str| NO_PROOFS.iter().any(|words| proof.starts_with(words));
    proofs
        .filter(|(_, proof)| is_none(proof) || proof == "refused.")
        .map(|(number, proof)| format!("{number}: SAFETY: {proof}"))
        .collect()
}

/// Names of constants that say "most" and "least" where the field says "max" and "min".
fn former_names(text: &str) -> Findings {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_former = |word: &str| {
        let bare = word.trim_start_matches('_');
        FORMER.iter().any(|of| {
            bare.strip_prefix(of).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        })
    };
    let mut found = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let code = line.split("//").next().unwrap_or_default();
        let words = code.split(|c| !is_part(c)).filter(|word| is_former(word));
        found.extend(words.map(|word| format!("{number}: {word}")));
    }
    found
}

/// Orders that are not written as orders.
fn hidden_orders(text: &str) -> Findings {
    let lines = (1..).zip(text.lines()).filter(|(_, line)| line.contains(HIDDEN_ORDER));
    lines.map(|(number, line)| format!("{number}: {}", line.trim())).collect()
}

#[test]
fn comments_begin_with_their_noun_and_proofs_are_proofs() {
    let mut all = Vec::new();
    for folder in FOLDERS {
        files(&root().join(folder), &mut all);
    }
    assert!(all.len() > 500, "too few files found: {}", all.len());
    all.sort();
    let mut found: [Findings; 4] = Default::default();
    for path in &all {
        let (file, text) = (name(path), read(path));
        let is_hash =
            path.extension().is_some_and(|end| end == "py" || end == "pyi" || end == "sh");
        let each = [
            fragments(&text, is_hash),
            no_proofs(&text),
            former_names(&text),
            hidden_orders(&text),
        ];
        for (all, more) in found.iter_mut().zip(each) {
            all.extend(more.into_iter().map(|finding| format!("{file}:{finding}")));
        }
    }
    let what = [
        "comments that do not begin with their noun, or with a function's verb",
        "proofs that do not say what holds, and who upholds it",
        "constants whose names must begin with MAX_ or MIN_",
        "orders that must begin with \"You must call this\"",
    ];
    for (found, what) in found.iter().zip(what) {
        assert!(found.is_empty(), "{what}: {found:#?}");
    }
}

#[test]
fn fragments_and_empty_proofs_are_found() {
    let rust = "/// Of a thing.\nfn a() {} // as in C\n\n/// What is\n/// long, and\n/// longer.\n// Offers.\n//! A b.\n//!\n//! The same.\n";
    assert_eq!(fragments(rust, false), ["1: Of a thing.", "2: as in C", "10: The same."]);
    let python = "\"\"\"By name.\n\nAs here.\n\"\"\"\nx = 1  # of one\ns = \"a # b\"\n\n\ndef f():\n    \"\"\"Or so.\"\"\"\n    # Andes\n";
    assert_eq!(fragments(python, true), ["1: By name.", "5: of one", "10: Or so."]);
    // The word is put in here, so that this file does not contain it.
    let proofs =
        "// @: as above.\n// @: the caller's promise.\n// @: the block lives.\n// @: refused.\n";
    assert_eq!(no_proofs(&proofs.replace('@', "SAFETY")).len(), 3);
    let order = format!("/// Ends it.\n/// {HIDDEN_ORDER} last.\n");
    assert_eq!(hidden_orders(&order), [format!("2: /// {HIDDEN_ORDER} last.")]);
    let [most, least] = FORMER;
    let names = format!("const {most}_A: u8 = B; const AT_{most}: u8 = 1; {least} // {most}");
    assert_eq!(former_names(&names), [format!("1: {most}_A"), format!("1: {least}")]);
}
