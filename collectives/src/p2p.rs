//! Point-to-point messages: the lengths that both ranks compare, and the error where they differ.

use symmpool_allocator::{Error, Result};

/// Which end of a message a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Send,
    Receive,
}

impl Direction {
    /// The name of the call.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Receive => "recv",
        }
    }
}

/// The length of a message in bytes, and the bytes of one of its elements. Both must be what the receiver expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Length {
    bytes: u64,
    element: u8,
}

/// How many bits of a word hold the bytes of an element. The other bits hold the bytes of the message.
const ELEMENT_BITS: u32 = 8;

impl Length {
    /// The length of `count` elements of `element` bytes each. `what` and `rank` are used in errors only.
    pub(crate) fn new(what: &str, rank: u32, count: usize, element: usize) -> Result<Self> {
        let bytes = (count as u64).checked_mul(element as u64);
        let bytes = bytes.filter(|bytes| bytes >> (u64::BITS - ELEMENT_BITS) == 0);
        match (bytes, u8::try_from(element)) {
            (Some(bytes), Ok(element)) => Ok(Self { bytes, element }),
            (None, _) => Err(Error::invalid_argument(format!(
                "{what} of {count} elements of {element} bytes on rank {rank}: no memory is that long"
            ))),
            (_, Err(_)) => Err(Error::invalid_argument(format!(
                "{what} of elements of {element} bytes on rank {rank}: at most {} are possible; pass \
                 them as bytes",
                u8::MAX
            ))),
        }
    }

    pub(crate) fn bytes(self) -> u64 {
        self.bytes
    }

    /// Both numbers in one word, as they travel with the data.
    pub(crate) fn word(self) -> u64 {
        self.bytes << ELEMENT_BITS | u64::from(self.element)
    }

    pub(crate) fn from_word(word: u64) -> Self {
        Self { bytes: word >> ELEMENT_BITS, element: word as u8 }
    }
}

impl std::fmt::Display for Length {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { bytes, element } = *self;
        match element {
            0 | 1 => write!(f, "{bytes} bytes"),
            _ => {
                let count = bytes / u64::from(element);
                write!(f, "{count} elements of {element} bytes ({bytes} bytes)")
            }
        }
    }
}

/// The error of `rank` where the two ends of a message differ. Both ends get the same text but for the rank.
pub(crate) fn lengths_differ(
    rank: u32,
    (sender, receiver): (u32, u32),
    (sent, expected): (Length, Length),
) -> Error {
    Error::mismatch(format!(
        "send and recv disagree, seen on rank {rank}:\n  rank {sender} sends {sent} to rank \
         {receiver}, which expects {expected}\nNothing was received. The communicator is closed: make \
         a new one; what a rank sends must be what the other receives."
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_travel_through_a_word_whole() {
        for (count, element) in [(0, 1), (1, 1), (0, 16), (250, 4), (1 << 40, 16), (3, 255)] {
            let length = Length::new("send", 0, count, element).expect("sound");
            assert_eq!(Length::from_word(length.word()), length);
            assert_eq!(length.bytes(), (count * element) as u64);
        }
        // Messages of equal length but with elements of different sizes differ, and so do empty ones.
        let of = |count, element| Length::new("send", 0, count, element).expect("sound");
        assert_ne!(of(4, 4).word(), of(2, 8).word());
        assert_ne!(of(0, 4).word(), of(0, 8).word());
        for (count, element) in [(usize::MAX, 2), (1 << 56, 1), (1, 256)] {
            let error = Length::new("recv", 3, count, element).expect_err("too much");
            assert!(error.is_invalid_argument(), "{error}");
            assert!(error.to_string().contains("recv of ") && error.to_string().contains("rank 3"));
        }
    }

    #[test]
    fn a_difference_names_both_lengths_and_both_ranks() {
        let of = |count, element| Length::new("send", 0, count, element).expect("sound");
        for rank in [2, 5] {
            let error = lengths_differ(rank, (2, 5), (of(250, 4), of(99, 1)));
            assert!(error.is_diverged(), "{error}");
            let text = error.to_string();
            assert!(text.contains(&format!("seen on rank {rank}")), "{text}");
            let line = "rank 2 sends 250 elements of 4 bytes (1000 bytes) to rank 5, which expects \
                        99 bytes";
            assert!(text.contains(line), "{text}");
        }
    }
}
