//! `SYMMPOOL_HOST_ID`: a process pretends to be on a host of that name.
//!
//! One machine then behaves as several hosts, on which programs for several hosts are tried. The id is read when a
//! process first needs it, and must not change afterwards: groups made before and after would disagree.

use std::env;
use std::ffi::OsStr;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use crate::{Error, Result, short};

/// The environment variable with the id.
pub(super) const HOST_ID: &str = "SYMMPOOL_HOST_ID";

/// The most characters of an id.
const MAX_CHARACTERS: usize = 255;

/// Id of the host that this process pretends to be on; `None` if it does not pretend.
pub(super) fn of_this_process() -> Result<Option<String>> {
    static FIRST: FirstRead = FirstRead::new();
    FIRST.compare(std::process::id(), env::var_os(HOST_ID).as_deref())
}

/// A process by its number, and the id that it found at first.
type Read = (u32, Option<String>);

/// Result of a process's first read of the variable. A forked child reads it anew.
struct FirstRead(Mutex<Option<Read>>);

impl FirstRead {
    const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// The id that the variable has now, if process `pid` found the same one at first.
    fn compare(&self, pid: u32, found: Option<&OsStr>) -> Result<Option<String>> {
        let id = found.map(parse).transpose()?;
        let Some(mut first) = self.lock() else { return Ok(id) };
        match &*first {
            Some((reader, before)) if *reader == pid && *before != id => {
                let text = |id: &Option<String>| match id {
                    Some(id) => format!("{:?}", short(id)),
                    None => "not set".into(),
                };
                Err(Error::invalid_state(format!(
                    "environment variable {HOST_ID} was {} when process {pid} first read it, and is {} now; set \
                     it before the process makes its first group, and leave it as it is, or start another process",
                    text(before),
                    text(&id),
                )))
            }
            Some((reader, _)) if *reader == pid => Ok(id),
            _ => {
                *first = Some((pid, id.clone()));
                Ok(id)
            }
        }
    }

    /// Locks what was read first. `None` in a forked child whose parent held the lock: no thread there gives it back.
    fn lock(&self) -> Option<MutexGuard<'_, Option<Read>>> {
        for _ in 0..1000 {
            match self.0.try_lock() {
                Ok(first) => return Some(first),
                Err(TryLockError::Poisoned(poisoned)) => {
                    return Some(PoisonError::into_inner(poisoned));
                }
                // The lock is held for as long as it takes to copy a short text.
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(100)),
            }
        }
        None
    }
}

/// Reads an id. What is no id is an [`Error::is_invalid_argument`] that shows it.
fn parse(found: &OsStr) -> Result<String> {
    let id = found.to_str().filter(|id| is_id(id));
    id.map(str::to_owned).ok_or_else(|| {
        Error::invalid_argument(format!(
            "environment variable {HOST_ID}={:?}: expected 1 to {MAX_CHARACTERS} printable characters without blanks, \
             as in node0; ranks with one id pretend to share a host; unset it where nothing is pretended",
            short(&found.to_string_lossy())
        ))
    })
}

/// Refuses what is no id of a host.
pub(crate) fn check_host_id(id: &str) -> Result<&str> {
    if is_id(id) {
        return Ok(id);
    }
    Err(Error::invalid_argument(format!(
        "host id {:?}: expected 1 to {MAX_CHARACTERS} printable characters without blanks, as in node0",
        short(id)
    )))
}

fn is_id(id: &str) -> bool {
    // Quotes and backslashes are escaped though they are printable. All else that is escaped is not.
    let plain = id.replace(['\'', '"', '\\'], "x");
    let is_printable = plain.escape_debug().eq(plain.chars());
    let is_short = id.chars().take(MAX_CHARACTERS + 1).count() <= MAX_CHARACTERS;
    !id.is_empty() && is_short && is_printable && !id.contains(char::is_whitespace)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn ids_are_short_printable_and_without_blanks() {
        let longest = "é".repeat(MAX_CHARACTERS);
        for id in [
            "a",
            "0",
            "node-7.example.org",
            "rack/2:3",
            "\"'\\",
            "knöten",
            "節点",
            "e\u{301}",
            &longest,
        ] {
            assert_eq!(parse(OsStr::new(id)).unwrap(), id);
        }
        let long = "x".repeat(10 << 10);
        for wrong in [
            "",
            " ",
            "a b",
            " a",
            "a\t",
            "a\n",
            "\r",
            "\u{1b}[31m",
            "\u{7f}",
            "a\u{a0}b",
            "a\u{2003}b",
            "\u{200b}",
            "a\u{202e}b",
            "\u{feff}a",
            "\u{e000}",
            &"x".repeat(256),
            &long,
        ] {
            let error = parse(OsStr::new(wrong)).unwrap_err();
            assert!(error.is_invalid_argument(), "{wrong:?}");
            let text = error.to_string();
            assert!(text.contains(&format!("{HOST_ID}={:?}", short(wrong))), "{text}");
            assert!(text.contains("unset it") && text.len() < 500, "{text}");
        }
        let error = parse(OsStr::from_bytes(b"a\xff")).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("a\u{fffd}"), "{error}");
    }

    #[test]
    fn an_id_that_changes_is_an_error_with_both() {
        for (before, now, texts) in [
            (Some("a"), Some("b"), ["was \"a\"", "is \"b\" now"]),
            (Some("a"), None, ["was \"a\"", "is not set now"]),
            (None, Some("b"), ["was not set", "is \"b\" now"]),
        ] {
            let first = FirstRead::new();
            let compare = |pid, id: Option<&'static str>| first.compare(pid, id.map(OsStr::new));
            assert_eq!(compare(7, before).unwrap().as_deref(), before);
            let error = compare(7, now).unwrap_err();
            let text = error.to_string();
            assert!(error.is_invalid_state(), "{text}");
            assert!(texts.iter().all(|part| text.contains(part)), "{text}");
            // The first one counts still, and another process has a first one of its own.
            assert_eq!(compare(7, before).unwrap().as_deref(), before);
            assert_eq!(compare(8, now).unwrap().as_deref(), now);
        }
    }

    #[test]
    fn what_is_no_id_is_not_kept() {
        let first = FirstRead::new();
        first.compare(7, Some(OsStr::new("a b"))).unwrap_err();
        assert_eq!(first.compare(7, Some(OsStr::new("a"))).unwrap().as_deref(), Some("a"));
        assert!(first.compare(7, Some(OsStr::new("a b"))).unwrap_err().is_invalid_argument());
    }

    #[test]
    fn a_forked_child_that_finds_the_lock_held_goes_on() {
        let first = FirstRead::new();
        let held = first.0.lock().unwrap();
        assert_eq!(first.compare(8, Some(OsStr::new("a"))).unwrap().as_deref(), Some("a"));
        drop(held);
    }
}
