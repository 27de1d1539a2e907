//! Calls that this rank declines, as their arguments are wrong. The other ranks learn of it from the handshake signal, as of any call.
//! The rank itself returns its reason at once, and waits for no other rank before its next call.

use std::sync::atomic::Ordering;

use symmpool_allocator::{Error, Result};

use super::HostEngine;
use crate::call::{CallDescription, OpType};
use crate::signal::is_handshake;

/// Calls that this rank declined, beginning with the first one that not all other ranks have reached yet.
#[derive(Debug)]
pub(super) struct DeclinedCalls {
    /// Why it declined the first of them.
    why: Error,
    /// How many more it has declined since. A rank is at most one call ahead (rule S4), so each of them is published
    /// once all others have reached the one before.
    more: u64,
}

impl HostEngine {
    /// Notifies the other ranks that this rank declines its next call, so that they get an error instead of
    /// waiting, and epochs stay aligned. Does not wait, because the others may not have made the call yet. Returns the
    /// error for this rank.
    #[cold]
    pub(crate) fn decline(&mut self, why: Error) -> Error {
        if self.is_rehearsing() {
            return why;
        }
        if let Err(failed) = self.ready() {
            return failed;
        }
        match &mut self.declined {
            Some(declined) => declined.more += 1,
            None => self.publish_declined(why.clone(), 0),
        }
        while self.declined.is_some() && self.all_reached_declined() {
            if let Err(failed) = self.finish_first_declined() {
                return failed;
            }
        }
        why
    }

    /// Waits until the other ranks have reached the calls that this rank declined. You must call this before any other call
    /// writes anything.
    ///
    /// # Errors
    ///
    /// `is_timeout` or `is_peer_lost` when a peer does not reach one, which fails the communicator.
    #[inline]
    pub(crate) fn catch_up(&mut self) -> Result<()> {
        if self.declined.is_none() { Ok(()) } else { self.finish_declined() }
    }

    #[cold]
    fn finish_declined(&mut self) -> Result<()> {
        while let Some(declined) = &self.declined {
            let (why, epoch) = (declined.why.clone(), self.declined_epoch());
            for peer in self.peers() {
                if let Err(failure) = self.await_handshake(peer, epoch & 1, epoch) {
                    return Err(self.fail_after_declining(failure, Some(&why)));
                }
            }
            self.finish_first_declined()?;
        }
        Ok(())
    }

    /// Ends the first declined call, which all ranks have reached, and publishes the next one if there is one.
    fn finish_first_declined(&mut self) -> Result<()> {
        self.check_abort()?;
        if let Some(DeclinedCalls { why, more: more @ 1.. }) = self.declined.take() {
            self.publish_declined(why, more - 1);
        }
        Ok(())
    }

    fn publish_declined(&mut self, why: Error, more: u64) {
        self.publish_call(&CallDescription::new(OpType::Declined));
        self.declined = Some(DeclinedCalls { why, more });
    }

    /// Whether all other ranks have reached the first declined call.
    fn all_reached_declined(&self) -> bool {
        let (me, epoch) = (self.layout.rank, self.declined_epoch());
        self.peers().all(|peer| {
            let slot = self.control.handshake(me, epoch & 1, peer);
            is_handshake(slot.word.load(Ordering::Acquire), epoch)
        })
    }

    /// The epoch of the declined call that was published last. No call has been made since.
    fn declined_epoch(&self) -> u64 {
        self.epoch - 1
    }

    /// [`Self::decline`] for a rank that will make no further call. Returns the error.
    #[cold]
    pub(crate) fn decline_and_fail(&mut self, why: Error) -> Error {
        if let Err(failed) = self.ready() {
            return failed;
        }
        if self.declined.is_none() {
            self.publish_call(&CallDescription::new(OpType::Declined));
        }
        self.failed.get_or_init(|| {
            let rank = self.layout.rank;
            why.clone().context(format!("rank {rank}: this communicator has failed; rebuild it"))
        });
        why
    }
}
