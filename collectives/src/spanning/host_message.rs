//! The message by which hosts agree on a call, and the state of that agreement. How it comes about is in `agreement`.

use std::collections::VecDeque;

use symmpool_allocator::Error;

use crate::call::CallDescription;
use crate::outer::Ticket;
use crate::signal::DESCRIPTION_WORDS;

/// Bytes of a message's head: the numbers, then the text of a declined call.
pub(super) const HEAD: usize = 512;
/// Numbers in a head: the call's number, how it stands on the host, the rank that is to blame, and the description.
pub(super) const NUMBERS: usize = 3 + DESCRIPTION_WORDS;
/// Bytes of room where nothing is known of the calls before, or they had no data for a message.
const MIN_ROOM: usize = 512;
/// The most room of a message, and of all messages of a rank: more data has a message of its own.
const MAX_ROOM: usize = 256 << 10;
const MAX_ROOM_IN_ALL: usize = 2 << 20;
/// Calls of which it is remembered what came behind them.
const REMEMBERED: usize = 64;

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
    pub(super) open: Option<CallDescription>,
    /// Calls so far.
    pub(super) number: u64,
    /// The last call, and how many bytes its data needed: none behind one that failed.
    last: Option<(u64, usize)>,
    /// Entry by the digest of a call: that, and how many bytes the call behind it needed.
    successors: Vec<(u64, usize)>,
    /// The most room, among so many hosts.
    most: usize,
    /// Messages under way: of calls that this rank declined, and behind them that of the call.
    pub(super) under_way: VecDeque<HostMessage>,
    /// The last message, whose memory serves the next one.
    pub(super) spare: Option<HostMessage>,
    /// Whether the error that a call returns is known to all ranks.
    pub(super) is_shared: bool,
    /// Whether a call failed in a wait for the leader, which may know more.
    pub(super) awaits_leader: bool,
}

/// A message to and from the leader of every other host.
#[derive(Debug, Default)]
pub(super) struct HostMessage {
    pub(super) number: u64,
    /// This host.
    pub(super) host: usize,
    /// Bytes to and from each host.
    pub(super) bytes: usize,
    pub(super) sent: Vec<u8>,
    pub(super) arrived: Vec<u8>,
    pub(super) ticket: Ticket,
    /// Why this rank declined the call.
    pub(super) declined: Option<Error>,
}

impl HostMessage {
    /// Where the message of another host begins.
    fn begin(&self, at: usize) -> usize {
        (at - usize::from(at > self.host)) * self.bytes
    }

    /// The place of another host's room.
    pub(super) fn room(&self, at: usize) -> usize {
        self.begin(at) + HEAD
    }

    /// A number in the head of a host's message.
    pub(super) fn number(&self, at: usize, nth: usize) -> u64 {
        let bytes = &self.arrived[self.begin(at) + 8 * nth..][..8];
        bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
    }

    pub(super) fn call(&self, at: usize) -> CallDescription {
        CallDescription::from_words(std::array::from_fn(|word| self.number(at, 3 + word)))
    }

    pub(super) fn text(&self, at: usize) -> String {
        let text = &self.arrived[self.begin(at) + 8 * NUMBERS..self.begin(at) + HEAD];
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        String::from_utf8_lossy(&text[..end]).into_owned()
    }
}

impl Agreement {
    pub(super) fn new(hosts: usize) -> Self {
        let most = MAX_ROOM.min(MAX_ROOM_IN_ALL / hosts.max(1)).max(MIN_ROOM);
        Self {
            open: None,
            number: 0,
            last: None,
            successors: vec![(0, 0); REMEMBERED],
            most,
            under_way: VecDeque::new(),
            spare: None,
            is_shared: false,
            awaits_leader: false,
        }
    }

    /// Bytes of room of the next message: as many as the call needed that came behind one like the last, and else as the
    /// last one needed.
    pub(super) fn room(&self) -> usize {
        let Some((call, needed)) = self.last else { return MIN_ROOM };
        let (known, behind) = self.successors[(call >> 1) as usize % REMEMBERED];
        let expected = if known == call { behind } else { needed };
        if expected > self.most { MIN_ROOM } else { expected.max(MIN_ROOM) }
    }

    /// Whether the error that a call is about to return is known to all ranks.
    pub(super) fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// [`Self::is_shared`], which is over then.
    pub(super) fn take_shared(&mut self) -> bool {
        std::mem::take(&mut self.is_shared)
    }

    /// Remembers a call on which all agreed, whose data needed so many bytes from one host to another.
    pub(super) fn adapt(&mut self, call: &CallDescription, needed: usize) {
        if let Some((before, _)) = self.last {
            self.successors[(before >> 1) as usize % REMEMBERED] = (before, needed);
        }
        // Never 0, which stands for no call.
        self.last = Some((u64::from(call.digest(0)) << 1 | 1, needed));
    }

    /// Forgets the last call, behind one that failed: ranks learn of that in different ways, and all have the same room then.
    pub(super) fn forget(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::call::OpType;

    fn call(count: usize) -> CallDescription {
        CallDescription::new(OpType::AllReduce).elements(DType::F32, count)
    }

    #[test]
    fn room_is_what_the_next_call_needs_where_calls_repeat() {
        let mut agreement = Agreement::new(2);
        assert_eq!(agreement.room(), MIN_ROOM);
        agreement.adapt(&call(1), 4000);
        assert_eq!(agreement.room(), 4000, "the same once more");
        let cycle = [(1, 4000), (2, 90_000), (3, MAX_ROOM + 1), (4, 0)];
        for _ in 0..2 {
            cycle.iter().for_each(|(count, needed)| agreement.adapt(&call(*count), *needed));
        }
        for (count, needed) in cycle {
            let room = if needed > MAX_ROOM { MIN_ROOM } else { needed.max(MIN_ROOM) };
            assert_eq!(agreement.room(), room, "before call {count}");
            agreement.adapt(&call(count), needed);
        }
        agreement.forget();
        assert_eq!(agreement.room(), MIN_ROOM);
    }
}
