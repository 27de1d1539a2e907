//! Messages of a rank to itself.

#![allow(unsafe_code)] // copies between callers' memory

use std::collections::VecDeque;
use std::sync::Arc;

use symmpool_allocator::Error;

use super::operation::BegunMessage;
use super::peer::Unexpected;
use super::state::{MailboxState, WHOLE};
use crate::call::p2p::{Afterwards, Direction, Payload, payloads_differ};

impl MailboxState {
    /// Begins a message of this rank to itself. A small one is copied, so that its send is done at once.
    pub(super) fn begin_own(&mut self, op: &Arc<BegunMessage>) {
        let me = self.rank;
        if op.direction == Direction::Receive {
            let waiting = &mut self.peer(me).unexpected;
            let found = waiting.iter().position(|message| message.tag == op.tag);
            match found.and_then(|at| waiting.remove(at)) {
                Some(message) => receive_own(me, &message, op),
                None => self.posted.push_back(Arc::clone(op)),
            }
            return;
        }
        let payload = op.payload.word();
        self.arrivals += 1;
        let (arrival, tag, own) = (self.arrivals, op.tag, Some(Arc::clone(op)));
        let mut message = Unexpected { arrival, number: 0, tag, payload, data: None, own };
        let fits = |posted: &Arc<BegunMessage>| posted.tag == tag && posted.peer == Some(me);
        let found = self.posted.iter().position(fits);
        if let Some(posted) = found.and_then(|at| self.posted.remove(at)) {
            receive_own(me, &message, &posted);
            return;
        }
        let bytes = op.payload.bytes();
        if bytes <= WHOLE {
            let mut data = vec![0; bytes as usize];
            // SAFETY: whoever made the operation promised that its memory is readable for its payload's bytes.
            unsafe { copy(op.memory(), data.as_mut_ptr(), bytes) };
            message.data = Some(data.into());
            message.own = None;
            op.finish(Ok(me));
        }
        self.peer(me).unexpected.push_back(message);
    }

    /// Ends what this rank sends itself, and every receive that still waits.
    pub(super) fn end_own(&mut self, error: &Error) {
        let me = self.rank;
        let unexpected: VecDeque<Unexpected> = std::mem::take(&mut self.peer(me).unexpected);
        let sends = unexpected.into_iter().filter_map(|message| message.own);
        for op in sends.chain(std::mem::take(&mut self.posted)) {
            op.finish(Err(error.clone()));
        }
    }
}

/// Gives a message to its receive, and ends both.
fn receive_own(me: u32, message: &Unexpected, receive: &BegunMessage) {
    let sent = Payload::from_word(message.payload);
    let outcome = if sent == receive.payload {
        let from = match (&message.data, &message.own) {
            (Some(data), _) => data.as_ptr(),
            (None, Some(send)) => send.memory().cast_const(),
            (None, None) => std::ptr::null(),
        };
        // SAFETY: both payloads say this many bytes, for which whoever began the send and the receive promised that
        // their memory is there; data kept in the message is as long.
        unsafe { copy(from, receive.memory(), sent.bytes()) };
        Ok(me)
    } else {
        Err(payloads_differ(me, (me, me), (sent, receive.payload), Afterwards::UsableGroup))
    };
    receive.finish(outcome.clone());
    if let Some(send) = &message.own {
        send.finish(outcome);
    }
}

/// Copies bytes, which may overlap: both ends are this rank's.
///
/// # Safety
///
/// `from` is readable and `to` writable for these bytes, unless there are none.
unsafe fn copy(from: *const u8, to: *mut u8, bytes: u64) {
    if bytes > 0 {
        // SAFETY: there are bytes, so the caller promised that `from` is readable and `to` writable for them.
        unsafe { std::ptr::copy(from, to, bytes as usize) };
    }
}
