//! The lines of the program that events come from.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::Location;
use std::sync::{LazyLock, Mutex};

use crate::sync::lock_leaf;

/// The line of the caller's program that an event comes from, if known. It is shown in messages and never
/// compared.
pub type Site = Option<Origin>;

/// A line of a program, in Rust or another language. Shown as `file:line`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A line of Rust code, from `#[track_caller]`.
    Rust(&'static Location<'static>),
    /// A line of another language, given by a binding.
    Other(&'static Line),
}

/// A line of a program that is not in Rust.
#[derive(Debug, PartialEq, Eq)]
pub struct Line {
    file: String,
    number: u32,
}

impl Origin {
    /// The line `number`, counted from 1, of `file`. Each line is stored once, until the process ends.
    pub fn line(file: &str, number: u32) -> Self {
        static LINES: LazyLock<Mutex<BTreeMap<u32, Vec<&'static Line>>>> =
            LazyLock::new(Mutex::default);
        let mut lines = lock_leaf(&LINES);
        let same = lines.entry(number).or_default();
        let known = same.iter().find(|line| line.file == file).copied();
        Self::Other(known.unwrap_or_else(|| {
            let line: &'static Line = Box::leak(Box::new(Line { file: file.to_owned(), number }));
            same.push(line);
            line
        }))
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rust(location) => write!(f, "{}:{}", location.file(), location.line()),
            Self::Other(line) => write!(f, "{}:{}", line.file, line.number),
        }
    }
}

thread_local! {
    static WITHIN: Cell<Option<Site>> = const { Cell::new(None) };
}

/// Calls `work`, and attributes its events on this thread to `site` instead of the Rust caller: for
/// bindings, whose callers are in another language.
///
/// ```
/// use symmpool_allocator::lane::{Origin, at_site};
///
/// let site = Origin::line("model.py", 212);
/// assert_eq!(site.to_string(), "model.py:212");
/// at_site(Some(site), || { /* allocate */ });
/// ```
pub fn at_site<T>(site: Site, work: impl FnOnce() -> T) -> T {
    struct Before(Option<Site>);
    impl Drop for Before {
        fn drop(&mut self) {
            WITHIN.set(self.0);
        }
    }
    let _before = Before(WITHIN.replace(Some(site)));
    work()
}

/// The site of the present call: the one given to [`at_site`], else the Rust caller.
#[track_caller]
pub(crate) fn here() -> Site {
    let caller = Location::caller();
    WITHIN.get().unwrap_or(Some(Origin::Rust(caller)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_kept_once() {
        let line = |file, number| match Origin::line(file, number) {
            Origin::Other(line) => std::ptr::from_ref(line),
            Origin::Rust(_) => unreachable!(),
        };
        assert_eq!(line("a.py", 3), line("a.py", 3));
        assert_ne!(line("a.py", 3), line("b.py", 3));
        assert_ne!(line("a.py", 3), line("a.py", 4));
    }

    #[test]
    fn a_site_holds_within_its_call_and_on_this_thread_only() {
        let outside = here();
        assert!(outside.unwrap().to_string().starts_with("allocator/src/lane/site.rs:"));
        let (outer, inner) = (Some(Origin::line("outer.py", 1)), Some(Origin::line("inner.py", 2)));
        at_site(outer, || {
            assert_eq!(here(), outer);
            at_site(inner, || assert_eq!(here(), inner));
            let caught = std::panic::catch_unwind(|| at_site(None, || panic!("on purpose")));
            caught.unwrap_err();
            assert_eq!(here(), outer);
            let elsewhere = std::thread::spawn(here).join().unwrap();
            assert_ne!(elsewhere, outer);
        });
        assert!(matches!(here(), Some(Origin::Rust(_))));
    }
}
