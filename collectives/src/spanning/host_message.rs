//! The message by which hosts agree on a call, and the state of that agreement. How it comes about is in `agreement`.

use std::collections::VecDeque;

use symmpool_allocator::Error;

use crate::call::Call;
use crate::outer::Ticket;
use crate::signal::DESCRIPTION_WORDS;

/// Bytes of a message's head: the numbers, then the text of a declined call.
pub(super) const HEAD: usize = 512;
/// Numbers in a head: the call's number, how it stands on the host, the rank that is to blame, and the description.
pub(super) const NUMBERS: usize = 3 + DESCRIPTION_WORDS;
/// Bytes of room where the calls before were large, or declined.
pub(super) const MIN_ROOM: usize = 512;
/// The most room of a message, and of all messages of a rank: larger transfers have messages of their own.
const MAX_ROOM: usize = 64 << 10;
const MAX_ROOM_IN_ALL: usize = 1 << 20;

/// How a call stands on the ranks of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// All make it.
    Agreed = 0,
    /// The rank that sends the message declines it.
    Declined = 1,
    /// The host's ranks differ, or another one of them declines it.
    Differs = 2,
}

/// State of the agreement on calls so far. It is the same on all ranks, but for what is under way.
#[derive(Debug)]
pub(super) struct Agreement {
    /// The call on which the hosts have not agreed yet.
    pub(super) open: Option<Call>,
    /// Calls so far.
    pub(super) number: u64,
    pub(super) room: usize,
    /// The most room, among so many ranks.
    most: usize,
    /// Messages under way: of calls that this rank declined, and behind them that of the call.
    pub(super) under_way: VecDeque<HostMessage>,
    /// The last message, whose memory serves the next one.
    pub(super) spare: Option<HostMessage>,
    /// Whether the error that a call returns is known to all ranks.
    pub(super) is_shared: bool,
}

/// A message to and from every rank of the outer engine.
#[derive(Debug, Default)]
pub(super) struct HostMessage {
    pub(super) number: u64,
    /// Bytes to and from each rank.
    pub(super) bytes: usize,
    pub(super) sent: Vec<u8>,
    pub(super) arrived: Vec<u8>,
    pub(super) ticket: Ticket,
    /// Why this rank declined the call.
    pub(super) declined: Option<Error>,
}

impl HostMessage {
    /// The place of a rank's room.
    pub(super) fn room(&self, at: usize) -> usize {
        at * self.bytes + HEAD
    }

    /// A number in the head of a rank's message.
    pub(super) fn number(&self, at: usize, nth: usize) -> u64 {
        let bytes = &self.arrived[at * self.bytes + 8 * nth..][..8];
        bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
    }

    pub(super) fn call(&self, at: usize) -> Call {
        Call::from_words(std::array::from_fn(|word| self.number(at, 3 + word)))
    }

    pub(super) fn text(&self, at: usize) -> String {
        let text = &self.arrived[at * self.bytes + 8 * NUMBERS..at * self.bytes + HEAD];
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        String::from_utf8_lossy(&text[..end]).into_owned()
    }
}

impl Agreement {
    pub(super) fn new(width: usize) -> Self {
        let most = MAX_ROOM.min(MAX_ROOM_IN_ALL / width.max(1)).max(MIN_ROOM);
        Self {
            open: None,
            number: 0,
            room: MIN_ROOM,
            most,
            under_way: VecDeque::new(),
            spare: None,
            is_shared: false,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Whether a first transfer, of at most so many bytes from one rank to another, goes with the message.
    pub(super) fn has_room(&self, piece: usize) -> bool {
        piece <= self.room
    }

    /// Whether the error that a call is about to return is known to all ranks.
    pub(super) fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// [`Self::is_shared`], which is over then.
    pub(super) fn take_shared(&mut self) -> bool {
        std::mem::take(&mut self.is_shared)
    }

    /// Room of the next message, where the first transfer of this call had so many bytes.
    pub(super) fn adapt(&mut self, piece: usize) {
        let wanted = if piece > self.most { 0 } else { piece.next_power_of_two() };
        self.room = wanted.max(self.room / 2).clamp(MIN_ROOM, self.most);
    }
}
