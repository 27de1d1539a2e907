//! The notice board of a host: where its leader leaves why a call failed that the hosts do not agree on.

#![allow(unsafe_code)] // the board is shared memory

use symmpool_allocator::Error;

/// Bytes of a board.
pub(super) const BOARD_BYTES: usize = 4096;
/// The most ranks that an error on a board names.
const MAX_RANKS: usize = 64;
/// Bytes before the text: the call's number, the number of ranks, these, and the length of the text.
const TEXT: usize = 8 * (MAX_RANKS + 3);

/// Entry of a board: the leader's error.
#[derive(Clone, Copy)]
pub(super) struct LeaderError<'a> {
    /// The call's number.
    pub(super) number: u64,
    /// Why the hosts did not agree.
    pub(super) error: &'a Error,
}

/// The memory of a host in which its leader leaves notices.
#[derive(Clone, Copy)]
pub(super) struct NoticeBoard(*mut u8);

impl NoticeBoard {
    /// # Safety
    ///
    /// You must promise that the memory has `BOARD_BYTES` bytes for as long as the value is used, and is used for nothing else.
    pub(super) unsafe fn at(memory: *mut u8) -> Self {
        Self(memory)
    }
}

impl LeaderError<'_> {
    /// Writes the notice.
    ///
    /// # Safety
    ///
    /// You must call it on the host's leader, in a call to which all its ranks have come, before you decline the call's second
    /// handshake: all ranks have read the notices of calls before then.
    pub(super) unsafe fn write(&self, board: NoticeBoard) {
        let text = self.error.message();
        let end = text.floor_char_boundary(BOARD_BYTES - TEXT);
        let ranks = self.error.ranks();
        let ranks = &ranks[..ranks.len().min(MAX_RANKS)];
        let mut bytes = vec![0; BOARD_BYTES];
        let mut put = |nth: usize, value: u64| {
            bytes[8 * nth..][..8].copy_from_slice(&value.to_le_bytes());
        };
        put(0, self.number);
        put(1, ranks.len() as u64);
        (2..).zip(ranks).for_each(|(nth, rank)| put(nth, u64::from(*rank)));
        put(MAX_RANKS + 2, end as u64);
        bytes[TEXT..][..end].copy_from_slice(&text.as_bytes()[..end]);
        // SAFETY: the board has as many bytes (`NoticeBoard::at`). The caller promised that all ranks have come to the call, and
        // none of them reads the board before the handshake that follows.
        unsafe { bytes.as_ptr().copy_to_nonoverlapping(board.0, BOARD_BYTES) };
    }

    /// The error of a call, if the leader has left one.
    ///
    /// # Safety
    ///
    /// You must call it behind the call's second handshake, which the leader declined, and before this rank's next call.
    pub(super) unsafe fn read(board: NoticeBoard, number: u64) -> Option<Error> {
        let mut bytes = vec![0; BOARD_BYTES];
        // SAFETY: the board has as many bytes (`NoticeBoard::at`). The leader has written it before the handshake that it
        // declined, as the caller promised, and does not again before this rank has come to the next call.
        unsafe { board.0.copy_to_nonoverlapping(bytes.as_mut_ptr(), BOARD_BYTES) };
        let word = |nth: usize| {
            let bytes = &bytes[8 * nth..][..8];
            bytes.iter().rev().fold(0_u64, |word, byte| word << 8 | u64::from(*byte))
        };
        if word(0) != number {
            return None;
        }
        let ranks = (word(1) as usize).min(MAX_RANKS);
        let length = (word(MAX_RANKS + 2) as usize).min(BOARD_BYTES - TEXT);
        let text = String::from_utf8_lossy(&bytes[TEXT..][..length]).into_owned();
        Some(Error::mismatch(text).naming((0..ranks).map(|nth| word(2 + nth) as u32)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_are_read_as_they_were_written_and_those_of_other_calls_are_not() {
        let mut board = vec![0; BOARD_BYTES];
        let error = Error::mismatch("they differ: \u{e9}".repeat(900)).naming(0..100);
        // SAFETY: the vector has `BOARD_BYTES` bytes, and outlives the board.
        let board = unsafe { NoticeBoard::at(board.as_mut_ptr()) };
        // SAFETY: this thread alone has the board.
        unsafe { LeaderError { number: 7, error: &error }.write(board) };
        // SAFETY: the notice has been written, by this thread, which alone has the board.
        let read = |number| unsafe { LeaderError::read(board, number) };
        let found = read(7).unwrap();
        assert!(found.is_diverged() && error.message().starts_with(&found.message()));
        assert_eq!(found.ranks(), (0..64).collect::<Vec<u32>>());
        assert!(read(8).is_none());
    }
}
