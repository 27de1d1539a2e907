//! Point-to-point messages: what both ranks compare of a message, and the errors where they differ.

use std::any::TypeId;

use bytemuck::Pod;
use half::{bf16, f16};
use symmpool_allocator::{Error, Result};

use crate::{DType, F8E4m3, F8E5m2};

/// Which end of a message a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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

    /// The call with its preposition, before the name of the peer.
    fn call(self) -> &'static str {
        match self {
            Self::Send => "send to",
            Self::Receive => "recv from",
        }
    }

    fn other(self) -> Self {
        match self {
            Self::Send => Self::Receive,
            Self::Receive => Self::Send,
        }
    }
}

/// Content of a message: its length in bytes, the bytes of one of its elements, and their type. All of it must be
/// what the receiver expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Payload {
    bytes: u64,
    element: u8,
    /// The code of a [`DType`]; 0 for elements of another type, of which ranks compare the size alone.
    dtype: u8,
}

/// How many bits of a word hold the bytes of an element, and how many hold its type. The highest ones hold the bytes of
/// the message.
const FIELD_BITS: u32 = 8;

impl Payload {
    /// In place of a message that its own rank declined. No message that is made has this type.
    pub(crate) const DECLINED: Self = Self { bytes: 0, element: 0, dtype: u8::MAX };

    /// `count` elements of a type. `what` and `rank` are used in errors only.
    pub(crate) fn new(what: &str, rank: u32, count: usize, dtype: DType) -> Result<Self> {
        Self::checked(what, rank, count, (dtype.size(), dtype as u8))
    }

    /// `count` elements of a Rust type.
    pub(crate) fn of<T: Pod>(what: &str, rank: u32, count: usize) -> Result<Self> {
        let code = dtype_of::<T>().map_or(0, |dtype| dtype as u8);
        Self::checked(what, rank, count, (size_of::<T>(), code))
    }

    fn checked(what: &str, rank: u32, count: usize, (size, dtype): (usize, u8)) -> Result<Self> {
        let bytes = (count as u64).checked_mul(size as u64);
        let bytes = bytes.filter(|bytes| bytes >> (u64::BITS - 2 * FIELD_BITS) == 0);
        match (bytes, u8::try_from(size)) {
            (Some(bytes), Ok(element)) => Ok(Self { bytes, element, dtype }),
            (None, _) => Err(Error::invalid_argument(format!(
                "{what} of {count} elements of {size} bytes on rank {rank}: no memory is that long"
            ))),
            (_, Err(_)) => Err(Error::invalid_argument(format!(
                "{what} of elements of {size} bytes on rank {rank}: at most {} are possible; pass \
                 them as bytes",
                u8::MAX
            ))),
        }
    }

    pub(crate) fn bytes(self) -> u64 {
        self.bytes
    }

    /// All of it in one word, as it travels with the data.
    pub(crate) fn word(self) -> u64 {
        self.bytes << (2 * FIELD_BITS)
            | u64::from(self.dtype) << FIELD_BITS
            | u64::from(self.element)
    }

    pub(crate) fn from_word(word: u64) -> Self {
        let (bytes, dtype) = (word >> (2 * FIELD_BITS), (word >> FIELD_BITS) as u8);
        Self { bytes, element: word as u8, dtype }
    }
}

/// The type of elements that are of this Rust type, if it is one that other interfaces name too.
fn dtype_of<T: Pod>() -> Option<DType> {
    macro_rules! find {
        ($($ty:ty => $dtype:ident),+ $(,)?) => {$(
            if TypeId::of::<T>() == TypeId::of::<$ty>() {
                return Some(DType::$dtype);
            }
        )+};
    }
    find! {
        f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16, i32 => I32, i64 => I64, u8 => U8, i8 => I8,
        F8E4m3 => F8E4m3, F8E5m2 => F8E5m2, i16 => I16, u16 => U16, u32 => U32, u64 => U64,
    }
    None
}

impl std::fmt::Display for Payload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { bytes, element, dtype } = *self;
        let count = bytes / u64::from(element.max(1));
        match DType::from_code(dtype) {
            Some(dtype) => write!(f, "{count} {} ({bytes} bytes)", dtype.name()),
            None => write!(f, "{count} elements of {element} bytes ({bytes} bytes)"),
        }
    }
}

/// State of the communicator after an error of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Afterwards {
    /// Both ends know of it, and go on with the next message.
    Usable,
    /// Both ends of a message of a group, which no communicator carries, know of it, and go on with the next message.
    UsableGroup,
    /// On devices, whose streams may have gone on already.
    Failed,
}

impl Afterwards {
    fn text(self) -> &'static str {
        match self {
            Self::Usable => {
                "Nothing was received. The communicator stays usable, and the calls count as made on both ranks"
            }
            Self::UsableGroup => {
                "Nothing was received, the message is gone, and the group stays usable"
            }
            Self::Failed => {
                "What recv should have written is undefined. The communicator has failed: make a new one"
            }
        }
    }
}

/// The error of `rank` where the two ends of a message differ. All ranks get the same text but for the rank.
pub(crate) fn payloads_differ(
    rank: u32,
    (sender, receiver): (u32, u32),
    (sent, expected): (Payload, Payload),
    afterwards: Afterwards,
) -> Error {
    for (direction, payload) in [(Direction::Send, sent), (Direction::Receive, expected)] {
        if payload == Payload::DECLINED {
            return declined(rank, direction, (sender, receiver), afterwards);
        }
    }
    Error::mismatch(format!(
        "send and recv disagree, seen on rank {rank}:\n  rank {sender} sends {sent} to rank {receiver}, which expects \
         {expected}\n{}; what a rank sends must be what the other receives.",
        afterwards.text()
    ))
    .naming([sender, receiver])
}

/// The error of `rank` for a message that one of its ends, the one that is named, declined itself.
pub(crate) fn declined(
    rank: u32,
    direction: Direction,
    (sender, receiver): (u32, u32),
    afterwards: Afterwards,
) -> Error {
    let (culprit, peer) = match direction {
        Direction::Send => (sender, receiver),
        Direction::Receive => (receiver, sender),
    };
    Error::mismatch(format!(
        "rank {culprit} declined its own {} rank {peer}, seen on rank {rank}, so the {} rank {culprit} \
         failed too. {}; rank {culprit} knows the reason.",
        direction.call(),
        direction.other().call(),
        afterwards.text()
    ))
    .naming([culprit])
}

/// The error of `rank` where it is known of a message that it failed, and not why.
pub(crate) fn refused_elsewhere(
    rank: u32,
    (sender, receiver): (u32, u32),
    afterwards: Afterwards,
) -> Error {
    Error::mismatch(format!(
        "what rank {sender} sends to rank {receiver} is not what that expects, or one of the two declined it, seen on rank {rank}. {}; these ranks' errors say more.",
        afterwards.text()
    ))
    .naming([sender, receiver])
}

/// The error of a call that was not made, as its peer has declined an earlier message meanwhile.
pub(crate) fn declined_before(earlier: Error, direction: Direction, rank: u32, peer: u32) -> Error {
    earlier.context(format!(
        "{} rank {peer} on rank {rank} was not made, as an earlier message failed",
        direction.call()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(count: usize, dtype: DType) -> Payload {
        Payload::new("send", 0, count, dtype).expect("sound")
    }

    #[test]
    fn payloads_travel_through_a_word_whole() {
        for dtype in DType::all() {
            for count in [0, 1, 250, 1 << 40] {
                let payload = typed(count, dtype);
                assert_eq!(Payload::from_word(payload.word()), payload);
                assert_eq!(payload.bytes(), (count * dtype.size()) as u64);
                assert_ne!(payload, Payload::DECLINED);
            }
        }
        assert_eq!(Payload::from_word(Payload::DECLINED.word()), Payload::DECLINED);
        let odd = Payload::of::<[u8; 48]>("recv", 0, 3).expect("sound");
        assert_eq!((Payload::from_word(odd.word()), odd.bytes()), (odd, 144));
        // Messages of equal length but with other elements differ, and so do empty ones.
        assert_ne!(typed(4, DType::F32).word(), typed(2, DType::F64).word());
        assert_ne!(typed(4, DType::F32).word(), typed(4, DType::I32).word());
        assert_ne!(typed(0, DType::F32).word(), typed(0, DType::I32).word());
        assert_eq!(Payload::of::<f32>("send", 0, 4).expect("sound"), typed(4, DType::F32));
        assert_eq!(Payload::of::<u16>("send", 0, 4).expect("sound"), typed(4, DType::U16));
        assert_ne!(Payload::of::<[u8; 4]>("send", 0, 4).expect("sound"), typed(4, DType::F32));
        let errors = [
            Payload::new("recv", 3, usize::MAX, DType::I16),
            Payload::new("recv", 3, 1 << 48, DType::U8),
            Payload::of::<[u8; 256]>("recv", 3, 1),
        ];
        for error in errors.map(|outcome| outcome.expect_err("too much")) {
            assert!(error.is_invalid_argument(), "{error}");
            assert!(error.to_string().contains("recv of ") && error.to_string().contains("rank 3"));
        }
    }

    #[test]
    fn a_difference_names_both_payloads_and_both_ranks() {
        for (rank, afterwards) in [(2, Afterwards::Usable), (5, Afterwards::Failed)] {
            let payloads = (typed(250, DType::F32), typed(99, DType::U8));
            let error = payloads_differ(rank, (2, 5), payloads, afterwards);
            assert!(error.is_diverged() && error.ranks() == [2, 5], "{error}");
            let text = error.to_string();
            assert!(text.contains(&format!("seen on rank {rank}")), "{text}");
            let line =
                "rank 2 sends 250 f32 (1000 bytes) to rank 5, which expects 99 u8 (99 bytes)";
            assert!(text.contains(line), "{text}");
            assert_eq!(text.contains("stays usable"), afterwards == Afterwards::Usable, "{text}");
            let sent = payloads_differ(rank, (2, 5), (Payload::DECLINED, payloads.1), afterwards);
            assert!(sent.is_diverged() && sent.ranks() == [2], "{sent}");
            assert!(sent.to_string().contains("its own send to rank 5"), "{sent}");
            let expected = (payloads.0, Payload::DECLINED);
            let expected = payloads_differ(rank, (2, 5), expected, afterwards);
            assert!(expected.is_diverged() && expected.ranks() == [5], "{expected}");
            assert!(expected.to_string().contains("its own recv from rank 2"), "{expected}");
        }
        let before = payloads_differ(
            2,
            (2, 5),
            (typed(1, DType::U8), typed(2, DType::U8)),
            Afterwards::Usable,
        );
        let before = declined_before(before, Direction::Receive, 2, 5);
        assert!(before.to_string().contains("recv from rank 5 on rank 2 was not made"), "{before}");
        assert!(before.is_diverged() && before.ranks() == [2, 5], "{before}");
    }
}
