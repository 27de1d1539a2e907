//! Length of the sentences in documents.

use crate::documents::documents;
use crate::{read, root};

/// Words that a sentence of a document has at most, on average.
const MAX_MEAN: f64 = 18.0;

/// Paragraphs and items of lists. Code, tables, headings, comments and pictures are left out, and so is what `make tables` writes.
fn paragraphs(text: &str) -> Vec<String> {
    let (mut found, mut is_code, mut is_generated) = (vec![String::new()], false, false);
    for line in text.lines().map(str::trim) {
        if line.starts_with("```") {
            is_code = !is_code;
        } else if line.starts_with("<!-- table: ") {
            is_generated = true;
        } else if line == "<!-- end -->" {
            is_generated = false;
        }
        let is_prose = !line.is_empty()
            && !["#", "|", "<!--", "![", "```"].iter().any(|mark| line.starts_with(mark));
        if !is_prose || is_code || is_generated {
            found.push(String::new());
            continue;
        }
        let number = line.trim_start_matches(|c: char| c.is_ascii_digit());
        let numbered = if number.len() < line.len() { number.strip_prefix(". ") } else { None };
        let item = line.strip_prefix("- ").or_else(|| line.strip_prefix("* ")).or(numbered);
        if item.is_some() {
            found.push(String::new());
        }
        let last = found.last_mut().expect("it begins with one");
        last.push_str(item.unwrap_or(line));
        last.push(' ');
    }
    found.retain(|paragraph| !paragraph.is_empty());
    found
}

/// A paragraph in which each piece of code is the word `X`, and links have no targets.
fn words_alone(paragraph: &str) -> String {
    let parts = paragraph.split('`').enumerate();
    let text: String = parts.map(|(at, part)| if at % 2 == 0 { part } else { "X" }).collect();
    let mut links = text.split("](");
    let first = links.next().unwrap_or_default().to_owned();
    links.fold(first, |text, rest| text + rest.split_once(')').map_or(rest, |(_, after)| after))
}

/// Numbers of words in the sentences of a document.
fn sentences(text: &str) -> Vec<usize> {
    let mut found = Vec::new();
    for paragraph in paragraphs(text) {
        let words_alone = words_alone(&paragraph);
        let words: Vec<&str> = words_alone.split_whitespace().collect();
        let mut length = 0;
        for (at, word) in words.iter().enumerate() {
            length += usize::from(word.contains(char::is_alphanumeric));
            let ends =
                word.trim_end_matches(['"', '\'', ')', ']', '*', '_']).ends_with(['.', '!', '?']);
            let begins = words.get(at + 1).is_none_or(|next| {
                let next = next.trim_start_matches(['"', '\'', '(', '[', '*', '_']);
                next.starts_with(|c: char| c.is_uppercase() || c.is_ascii_digit())
            });
            let is_last = at + 1 == words.len();
            if length > 0 && (is_last || (ends && begins)) {
                found.push(length);
                length = 0;
            }
        }
    }
    found
}

fn mean(text: &str) -> f64 {
    let lengths = sentences(text);
    let number = |count: usize| f64::from(u32::try_from(count).expect("not that many"));
    if lengths.is_empty() { 0.0 } else { number(lengths.iter().sum()) / number(lengths.len()) }
}

#[test]
fn sentences_of_documents_are_short() {
    let mut long = Vec::new();
    for document in documents().iter().filter(|name| *name != "CHANGELOG.md") {
        let mean = mean(&read(&root().join(document)));
        if mean > MAX_MEAN {
            long.push(format!("{document}: {mean:.1} words a sentence"));
        }
    }
    assert!(long.is_empty(), "sentences have more than {MAX_MEAN} words on average: {long:#?}");
}

#[test]
fn words_are_counted_in_prose_alone() {
    let text = "# A heading of words\n\nOne `a b c` [two three](some/where.md#there). Four (five) six!\nSeven\n\
                eight.\n\n```sh\ncode code\n```\n\n| a | table |\n\n- An item\n- Another\n  one. 2.5 of it, e.g. this\n\
                1. Last?\n\n<!-- table: x -->\nMade of results.\n<!-- end -->\n![A picture](of.svg)\n";
    assert_eq!(sentences(text), [4, 3, 2, 2, 2, 5, 1]);
    assert!((mean("One. Two three.") - 1.5).abs() < 1e-9);
}
