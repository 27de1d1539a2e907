//! Calls whose arguments this rank refuses. The other ranks are told by its entry signal, as of any call;
//! the rank itself has its reason at once, and waits for nobody before its next call.

use std::sync::atomic::Ordering;

use symmpool_allocator::{Error, Result};

use super::HostEngine;
use crate::host::call::{Call, Operation};
use crate::signal::is_entry;

/// Calls that this rank refused, from the first one on in which it has not met all others yet.
#[derive(Debug)]
pub(super) struct Refused {
    /// Why it refused the first of them.
    why: Error,
    /// How many more it has refused since. A rank is at most one call ahead (rule S4), so the others are
    /// told of each once they have come to the one before.
    more: u64,
}

impl HostEngine {
    /// Tells the others that this rank refuses its own arguments, so that they get an error instead of a
    /// wait, and epochs stay aligned. Waits for nobody: the others may be elsewhere. Returns the error
    /// for this rank.
    #[cold]
    pub(crate) fn decline(&mut self, why: Error) -> Error {
        if let Err(closed) = self.ready() {
            return closed;
        }
        match &mut self.refused {
            Some(refused) => refused.more += 1,
            None => self.tell_refused(why.clone(), 0),
        }
        while self.refused.is_some() && self.has_met() {
            if let Err(closed) = self.met() {
                return closed;
            }
        }
        why
    }

    /// Meets the others in the calls that this rank refused. To be called before any other call, ahead
    /// of what that writes.
    ///
    /// # Errors
    ///
    /// `is_timeout` or `is_peer_lost` when a peer does not come to one, which closes the communicator.
    #[inline]
    pub(crate) fn catch_up(&mut self) -> Result<()> {
        if self.refused.is_none() { Ok(()) } else { self.await_refused() }
    }

    #[cold]
    fn await_refused(&mut self) -> Result<()> {
        while let Some(refused) = &self.refused {
            let (why, epoch) = (refused.why.clone(), self.refused_epoch());
            for peer in self.peers() {
                if let Err(end) = self.await_entry(peer, epoch & 1, epoch) {
                    return Err(self.close_after(end, Some(&why)));
                }
            }
            self.met()?;
        }
        Ok(())
    }

    /// All have come to the call that was refused first: the next one is told of, if there is one.
    fn met(&mut self) -> Result<()> {
        self.heed_abort()?;
        if let Some(Refused { why, more: more @ 1.. }) = self.refused.take() {
            self.tell_refused(why, more - 1);
        }
        Ok(())
    }

    fn tell_refused(&mut self, why: Error, more: u64) {
        self.announce(&Call::new(Operation::Declined));
        self.refused = Some(Refused { why, more });
    }

    /// Whether all others have come to the call that was refused first.
    fn has_met(&self) -> bool {
        let (me, epoch) = (self.layout.rank, self.refused_epoch());
        self.peers().all(|peer| {
            let slot = self.control.entry(me, epoch & 1, peer);
            is_entry(slot.word.load(Ordering::Acquire), epoch)
        })
    }

    /// Of the refused call that was told of last: no other has been since.
    fn refused_epoch(&self) -> u64 {
        self.epoch - 1
    }

    /// The same for a rank that will make no call any more. Returns the error.
    #[cold]
    pub(crate) fn give_up(&mut self, why: Error) -> Error {
        if let Err(closed) = self.ready() {
            return closed;
        }
        if self.refused.is_none() {
            self.announce(&Call::new(Operation::Declined));
        }
        self.failed.get_or_init(|| {
            let rank = self.layout.rank;
            why.clone().context(format!("rank {rank}: this communicator is closed; rebuild it"))
        });
        why
    }
}
