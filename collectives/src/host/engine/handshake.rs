//! How ranks meet in a call: its entry, its steps, and what becomes of a rank that waits in vain.

use symmpool_allocator::{Error, Result};

use super::HostEngine;
use crate::host::call::{Call, mismatch};
use crate::host::fault::{Cause, End, Fault};
use crate::host::wait::{Lookout, Waiter, wake};
use crate::signal::{await_word, entry_word, is_entry, wake_sleepers};

impl HostEngine {
    /// The first phase of every call: tells every peer what this rank calls, waits until every
    /// peer has told, and compares. What this rank wrote before is visible to peers after, and the
    /// reverse.
    ///
    /// # Errors
    ///
    /// `is_diverged`, the same on every rank, when calls differ; `is_timeout` or `is_peer_lost`
    /// when a peer does not come, which closes the communicator.
    #[inline]
    pub(crate) fn enter(&mut self, call: &Call) -> Result<()> {
        let (epoch, parity) = (self.epoch, self.parity());
        if self.meet(call)? { Ok(()) } else { Err(self.disagreement(call, parity, epoch)) }
    }

    /// [`Self::enter`] of an all-to-all that shows rows: whether all ranks said the same of it. It is no
    /// other call where some said that their parts are equal, as rows tell what these are.
    #[inline]
    pub(crate) fn enter_exchange(&mut self, call: &Call) -> Result<bool> {
        let (epoch, parity) = (self.epoch, self.parity());
        if self.meet(call)? { Ok(true) } else { self.exchange_alike(call, parity, epoch) }
    }

    /// What ranks that said different things of an all-to-all come to.
    #[cold]
    fn exchange_alike(&mut self, call: &Call, parity: u64, epoch: u64) -> Result<bool> {
        for peer in self.peers() {
            // It is there: the peer has entered, and its next word here is that of the call after the
            // next, which this rank has to enter first.
            let word = match self.await_entry(peer, parity, epoch) {
                Ok(word) => word,
                Err(end) => return Err(self.close(end)),
            };
            let slot = self.control.entry(self.layout.rank, parity, peer);
            let theirs = Call::from_words(slot.details());
            // The digest tells options that differ as well.
            let true_to_word = entry_word(epoch, theirs.digest(self.salt)) == word;
            if !true_to_word || theirs.without_parts() != call.without_parts() {
                return Err(self.disagreement(call, parity, epoch));
            }
        }
        Ok(false)
    }

    /// Tells what this rank calls, waits for what the others call, and says whether it is the same.
    #[inline]
    fn meet(&mut self, call: &Call) -> Result<bool> {
        let (epoch, parity) = (self.epoch, self.parity());
        let word = self.announce(call);
        let mut all_agree = true;
        for peer in self.peers() {
            match self.await_entry(peer, parity, epoch) {
                Ok(theirs) => all_agree &= theirs == word,
                Err(end) => return Err(self.close(end)),
            }
        }
        self.heed_abort()?;
        Ok(all_agree)
    }

    /// Fails if a peer has given up: it waited in vain for this very call, has left its words behind, and
    /// may use its memory for something else by now. To be asked before that is written.
    #[inline]
    pub(crate) fn heed_abort(&mut self) -> Result<()> {
        if let Some(end) = self.control.heard(&self.layout) {
            return Err(self.close(end));
        }
        Ok(())
    }

    /// Tells every peer that this rank makes a call; returns the word that says which.
    #[inline]
    pub(super) fn announce(&mut self, call: &Call) -> u64 {
        let (me, epoch, parity) = (self.layout.rank, self.epoch, self.parity());
        let word = entry_word(epoch, call.digest(self.salt));
        self.operation = call.words()[0] as u8;
        self.call_timeout = self.timeout.get();
        self.steps_before = self.steps;
        // Advanced before anything can fail: the call counts, however it ends (S2).
        self.epoch += 1;
        for peer in self.peers() {
            self.control.entry(peer, parity, me).publish(word, call.words());
        }
        wake_sleepers(self.peers().map(|peer| self.control.entry(peer, parity, me)), wake);
        word
    }

    /// A later phase: signals every peer, and waits for every peer's signal.
    #[inline]
    pub(crate) fn step(&mut self) -> Result<()> {
        let me = self.layout.rank;
        self.steps += 1;
        let (step, parity) = (self.steps, self.steps & 1);
        for peer in self.peers() {
            self.control.step(peer, parity, me).publish_word(step);
        }
        wake_sleepers(self.peers().map(|peer| self.control.step(peer, parity, me)), wake);
        for peer in self.peers() {
            if let Err(end) = self.await_step(peer, step) {
                return Err(self.close(end));
            }
        }
        Ok(())
    }

    #[inline]
    pub(super) fn await_entry(&self, peer: u32, parity: u64, epoch: u64) -> Result<u64, End> {
        let slot = self.control.entry(self.layout.rank, parity, peer);
        let mut waiter = Waiter::new(self.patience, self.watch(peer, 0, epoch));
        await_word(slot, |word| is_entry(word, epoch), &mut waiter)
    }

    #[inline]
    fn await_step(&self, peer: u32, step: u64) -> Result<u64, End> {
        let slot = self.control.step(self.layout.rank, step & 1, peer);
        let phase = (step - self.steps_before) as u32;
        // The call's own epoch; `self.epoch` is already the next one's.
        let mut waiter = Waiter::new(self.patience, self.watch(peer, phase, self.epoch - 1));
        await_word(slot, |word| word == step, &mut waiter)
    }

    /// Closes the engine after a panic inside a call, which may have left its peers waiting.
    #[cold]
    pub(crate) fn abandon(&mut self) {
        self.failed.get_or_init(|| {
            Error::invalid_state(format!(
                "rank {}: an earlier call of this communicator panicked; rebuild it on every rank",
                self.layout.rank
            ))
        });
    }

    /// Every rank sees the same words, so makes the same error of them.
    #[cold]
    fn disagreement(&self, mine: &Call, parity: u64, epoch: u64) -> Error {
        let me = self.layout.rank;
        let calls: Vec<Call> = (0..self.layout.world)
            .map(|rank| match rank {
                rank if rank == me => *mine,
                peer => Call::from_words(self.control.entry(me, parity, peer).details()),
            })
            .collect();
        mismatch(epoch, &calls)
    }

    /// What a waiter looks for once it has stopped spinning: an abort, the peer's death, the
    /// deadline.
    #[inline]
    fn watch(&self, peer: u32, phase: u32, epoch: u64) -> impl FnMut() -> Result<(), End> {
        let mut lookout = None;
        move || {
            if let Some(end) = self.control.heard(&self.layout) {
                return Err(end);
            }
            let lookout = lookout.get_or_insert_with(|| Lookout::new(self.call_timeout));
            let alive = self.options.peer_alive.as_ref().map(|alive| || alive(peer));
            lookout.look(alive).map_err(|cause| {
                let (operation, timeout) = (self.operation, lookout.timeout());
                let fault = Fault { cause, operation, phase, peer, epoch, timeout };
                End { fault, reporter: None }
            })
        }
    }

    /// Closes the communicator: tells the peers, unless one told us, and keeps the error for later
    /// calls.
    #[cold]
    pub(super) fn close(&mut self, end: End) -> Error {
        self.close_after(end, None)
    }

    /// The same after a call that this rank refused: later errors keep the reason for that.
    #[cold]
    pub(super) fn close_after(&mut self, end: End, refused: Option<&Error>) -> Error {
        let me = self.layout.rank;
        if end.reporter.is_none() {
            for peer in self.peers() {
                self.control.tell(peer, me, &end.fault);
            }
            // Pairs with the fence between a rank's entry and its look at the abort flag: a late
            // peer sees the flag, unless it had entered before.
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        }
        let gone: Vec<u32> = match (&self.options.peer_alive, end.reporter) {
            (Some(alive), None) if end.fault.cause == Cause::PeerLost => {
                self.peers().filter(|peer| *peer != end.fault.peer && !alive(*peer)).collect()
            }
            _ => Vec::new(),
        };
        let mut error = end.fault.to_error(me, end.reporter, &gone);
        if let Some(why) = refused {
            let why = why.to_string();
            let why = why.trim_start_matches("symmpool: ");
            error =
                error.context(format!("rank {me} had refused its own arguments before ({why})"));
        }
        tracing::error!(rank = me, epoch = end.fault.epoch, %error, "communicator closed");
        self.failed.get_or_init(|| error).clone()
    }
}
