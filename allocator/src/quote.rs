//! Text of callers in messages: a name that is no name may be as long as a file.

use std::fmt;

/// Characters of a text that messages repeat.
const SHOWN: usize = 96;

/// Text for a message, as it is (`{}`) or in quotes (`{:?}`). Of a long one only the beginning is shown, and how long it is.
#[derive(Clone, Copy)]
pub struct Short<'a>(&'a str);

/// Shortens what a message repeats of a caller's text.
pub fn short(text: &str) -> Short<'_> {
    Short(text)
}

impl Short<'_> {
    /// The part of the text that is shown, and whether that is all of it.
    fn shown(&self) -> (&str, bool) {
        match self.0.char_indices().nth(SHOWN) {
            Some((end, _)) => (&self.0[..end], false),
            None => (self.0, true),
        }
    }

    fn rest(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "... ({} bytes)", self.0.len())
    }
}

impl fmt::Display for Short<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shown, all) = self.shown();
        f.write_str(shown)?;
        if all { Ok(()) } else { self.rest(f) }
    }
}

impl fmt::Debug for Short<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shown, all) = self.shown();
        write!(f, "{shown:?}")?;
        if all { Ok(()) } else { self.rest(f) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_shortened_between_characters() {
        assert_eq!(format!("{:?} {}", short("a\n"), short("b")), "\"a\\n\" b");
        let just = "é".repeat(SHOWN);
        assert_eq!(short(&just).to_string(), just);
        let long = "é".repeat(5 << 20);
        assert_eq!(short(&long).to_string(), format!("{just}... (10485760 bytes)"));
        assert_eq!(format!("{:?}", short(&long)), format!("\"{just}\"... (10485760 bytes)"));
    }
}
