//! Calls whose arguments this rank refuses. The other ranks learn of it from the handshake signal, as of any call.
//! The rank itself returns its reason at once, and waits for no other rank before its next call.

use std::sync::atomic::Ordering;

use symmpool_allocator::{Error, Result};

use super::HostEngine;
use crate::call::{Call, OpType};
use crate::signal::is_handshake;

/// Calls that this rank refused, beginning with the first one that not all other ranks have reached yet.
#[derive(Debug)]
pub(super) struct Refused {
    /// Why it refused the first of them.
    why: Error,
    /// How many more it has refused since. A rank is at most one call ahead (rule S4), so each of them is published
    /// once all others have reached the one before.
    more: u64,
}

impl HostEngine {
    /// Notifies the other ranks that this rank refuses its own arguments, so that they get an error instead of
    /// waiting, and epochs stay aligned. Does not wait, because the others may not have made the call yet. Returns the
    /// error for this rank.
    #[cold]
    pub(crate) fn decline(&mut self, why: Error) -> Error {
        if self.is_rehearsing() {
            return why;
        }
        if let Err(closed) = self.ready() {
            return closed;
        }
        match &mut self.refused {
            Some(refused) => refused.more += 1,
            None => self.publish_refusal(why.clone(), 0),
        }
        while self.refused.is_some() && self.all_reached_refused() {
            if let Err(closed) = self.finish_first_refused() {
                return closed;
            }
        }
        why
    }

    /// Waits until the other ranks have reached the calls that this rank refused. To be called before any other call
    /// writes anything.
    ///
    /// # Errors
    ///
    /// `is_timeout` or `is_peer_lost` when a peer does not reach one, which closes the communicator.
    #[inline]
    pub(crate) fn catch_up(&mut self) -> Result<()> {
        if self.refused.is_none() { Ok(()) } else { self.finish_refused() }
    }

    #[cold]
    fn finish_refused(&mut self) -> Result<()> {
        while let Some(refused) = &self.refused {
            let (why, epoch) = (refused.why.clone(), self.refused_epoch());
            for peer in self.peers() {
                if let Err(failure) = self.await_handshake(peer, epoch & 1, epoch) {
                    return Err(self.close_after(failure, Some(&why)));
                }
            }
            self.finish_first_refused()?;
        }
        Ok(())
    }

    /// Ends the first refused call, which all ranks have reached, and publishes the next one if there is one.
    fn finish_first_refused(&mut self) -> Result<()> {
        self.check_abort()?;
        if let Some(Refused { why, more: more @ 1.. }) = self.refused.take() {
            self.publish_refusal(why, more - 1);
        }
        Ok(())
    }

    fn publish_refusal(&mut self, why: Error, more: u64) {
        self.publish_call(&Call::new(OpType::Declined));
        self.refused = Some(Refused { why, more });
    }

    /// Whether all other ranks have reached the first refused call.
    fn all_reached_refused(&self) -> bool {
        let (me, epoch) = (self.layout.rank, self.refused_epoch());
        self.peers().all(|peer| {
            let slot = self.control.handshake(me, epoch & 1, peer);
            is_handshake(slot.word.load(Ordering::Acquire), epoch)
        })
    }

    /// The epoch of the refused call that was published last. No call has been made since.
    fn refused_epoch(&self) -> u64 {
        self.epoch - 1
    }

    /// [`Self::decline`] for a rank that will make no further call. Returns the error.
    #[cold]
    pub(crate) fn give_up(&mut self, why: Error) -> Error {
        if let Err(closed) = self.ready() {
            return closed;
        }
        if self.refused.is_none() {
            self.publish_call(&Call::new(OpType::Declined));
        }
        self.failed.get_or_init(|| {
            let rank = self.layout.rank;
            why.clone().context(format!("rank {rank}: this communicator is closed; rebuild it"))
        });
        why
    }
}
