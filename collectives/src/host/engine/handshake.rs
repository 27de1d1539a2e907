//! The phases of a call, its handshake and its steps, and what happens when a wait fails.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use symmpool_allocator::{Error, Result};

use super::HostEngine;
use crate::call::{CallDescription, mismatch};
use crate::host::step::{CallStep, at_step};
use crate::host::wait::fault::{Cause, WaitFailure, WaitFault};
use crate::host::wait::waiter::{WaitWatchdog, Waiter, wake};
use crate::signal::{await_word, handshake_word, is_handshake, wake_sleepers};

/// Polls of a measured wait from one check of what may end it to the next. After the square of as many polls it sleeps between
/// two.
const LOOKS: u32 = 64;
const LOOK_AGAIN: Duration = Duration::from_micros(50);

impl HostEngine {
    /// The first phase of every call: sends every peer the description of this rank's call, waits for those of all
    /// peers, and compares them. What a rank wrote before its handshake is visible to all ranks after theirs.
    ///
    /// # Errors
    ///
    /// `is_diverged`, the same on every rank, when calls differ; `is_timeout` or `is_peer_lost` when a peer makes no
    /// call, which fails the communicator.
    #[inline]
    pub(crate) fn handshake(&mut self, call: &CallDescription) -> Result<()> {
        let (epoch, parity) = (self.epoch, self.parity());
        if self.exchange_descriptions(call)? {
            Ok(())
        } else {
            Err(self.disagreement(call, parity, epoch))
        }
    }

    /// [`Self::handshake`] that says how long it waited for each peer.
    pub(crate) fn measured_handshake(
        &mut self,
        call: &CallDescription,
        mut waited: impl FnMut(u32, Duration),
    ) -> Result<()> {
        let (epoch, parity) = (self.epoch, self.parity());
        let word = self.publish_call(call);
        let begin = Instant::now();
        let mut missing: Vec<u32> = self.peers().collect();
        while let Some(first) = missing.first().copied() {
            let mut check = self.watchdog(first, 0, epoch);
            let mut looks = 0_u32;
            // All peers are polled in turn, so that the time at which each one comes is known.
            let failure = loop {
                missing.retain(|peer| {
                    let slot = self.control.handshake(self.layout.rank, parity, *peer);
                    let is_there = is_handshake(slot.word.load(Ordering::Acquire), epoch);
                    if is_there {
                        waited(*peer, begin.elapsed());
                    }
                    !is_there
                });
                if missing.first() != Some(&first) {
                    break None;
                }
                looks = looks.saturating_add(1);
                if looks.is_multiple_of(LOOKS)
                    && let Err(failure) = check()
                {
                    break Some(failure);
                }
                if looks < LOOKS * LOOKS {
                    rustix::thread::sched_yield();
                } else {
                    std::thread::sleep(LOOK_AGAIN);
                }
            };
            drop(check);
            if let Some(failure) = failure {
                return Err(self.fail(failure));
            }
        }
        self.check_abort()?;
        let mut words = self.peers().map(|peer| {
            self.control.handshake(self.layout.rank, parity, peer).word.load(Ordering::Acquire)
        });
        if words.all(|theirs| theirs == word) {
            return Ok(());
        }
        Err(self.disagreement(call, parity, epoch))
    }

    /// [`Self::handshake`] of an all-to-all whose rows are published. Returns whether all descriptions are equal. It
    /// is no error if only some ranks describe a call of equal parts, because the rows say what their parts are.
    #[inline]
    pub(crate) fn handshake_all_to_all(&mut self, call: &CallDescription) -> Result<bool> {
        let (epoch, parity) = (self.epoch, self.parity());
        if self.exchange_descriptions(call)? {
            Ok(true)
        } else {
            self.compare_all_to_all(call, parity, epoch)
        }
    }

    /// Compares the descriptions of an all-to-all where they are not all equal.
    #[cold]
    fn compare_all_to_all(
        &mut self,
        call: &CallDescription,
        parity: u64,
        epoch: u64,
    ) -> Result<bool> {
        for peer in self.peers() {
            // This does not wait: the peer has made this call, and it overwrites this slot only in the call after the
            // next one, which it cannot reach before this rank has.
            let word = match self.await_handshake(peer, parity, epoch) {
                Ok(word) => word,
                Err(failure) => return Err(self.fail(failure)),
            };
            let slot = self.control.handshake(self.layout.rank, parity, peer);
            let theirs = CallDescription::from_words(slot.description());
            // The digest covers the options, which the description does not have.
            let digest_matches = handshake_word(epoch, theirs.digest(self.salt)) == word;
            if !digest_matches || theirs.without_parts() != call.without_parts() {
                return Err(self.disagreement(call, parity, epoch));
            }
        }
        Ok(false)
    }

    /// Publishes this rank's call, waits for those of the other ranks, and returns whether all are equal.
    #[inline]
    fn exchange_descriptions(&mut self, call: &CallDescription) -> Result<bool> {
        let (epoch, parity) = (self.epoch, self.parity());
        // Else the handshake of a call that a peer has not come to would be overwritten.
        debug_assert!(
            self.declined.is_none(),
            "a call catches up with those that this rank declined"
        );
        let word = self.publish_call(call);
        let all_agree = match self.await_handshakes(word, parity, epoch) {
            Ok(all_agree) => all_agree,
            Err(failure) => return Err(self.fail(failure)),
        };
        self.check_abort()?;
        let (control, me) = (&self.control, self.layout.rank);
        self.shared_cores.note(me, |peer| control.handshake(me, parity, peer).core());
        Ok(all_agree)
    }

    /// Waits for the descriptions of all other ranks, and returns whether their words are all this one.
    #[inline]
    fn await_handshakes(&self, word: u64, parity: u64, epoch: u64) -> Result<bool, WaitFailure> {
        let mut all_agree = true;
        for peer in self.in_waiting_order() {
            all_agree &= self.await_handshake(peer, parity, epoch)? == word;
        }
        Ok(all_agree)
    }

    /// All other ranks, in the order in which to wait for them. Ranks on this rank's core come first, and once more with
    /// all others: they can signal only if this rank yields, and what the others signal arrives meanwhile.
    #[inline]
    fn in_waiting_order(&self) -> impl Iterator<Item = u32> {
        let here = self.peers().filter(|peer| self.shared_cores.is_here(*peer));
        here.chain(self.peers())
    }

    /// Fails if a peer has given up. Such a peer waited for this very call in vain; its signals are still there, but
    /// it may use its memory for something else by now. You must call this before a peer's memory is written.
    #[inline]
    pub(crate) fn check_abort(&mut self) -> Result<()> {
        at_step(CallStep::HandshakeCompare);
        if let Some(failure) = self.control.reported_fault(&self.layout) {
            return Err(self.fail(failure));
        }
        Ok(())
    }

    /// Signals every peer that this rank makes a call, with its description. Returns the handshake word.
    #[inline]
    pub(super) fn publish_call(&mut self, call: &CallDescription) -> u64 {
        let (me, epoch, parity) = (self.layout.rank, self.epoch, self.parity());
        let word = handshake_word(epoch, call.digest(self.salt));
        self.operation = call.words()[0] as u8;
        self.call_timeout = self.timeout.get();
        self.steps_before = self.steps;
        // Advanced before anything can fail: the call counts, however it ends (S2).
        self.epoch += 1;
        let core = self.shared_cores.begin_call();
        at_step(CallStep::HandshakeBegin);
        for peer in self.peers() {
            at_step(CallStep::HandshakePublish);
            let slot = self.control.handshake(peer, parity, me);
            slot.set_core(core);
            slot.publish(word, call.words());
        }
        wake_sleepers(self.peers().map(|peer| self.control.handshake(peer, parity, me)), wake);
        at_step(CallStep::HandshakeAwait);
        word
    }

    /// A later phase of a call: signals every peer, and waits for every peer's signal.
    #[inline]
    pub(crate) fn step(&mut self) -> Result<()> {
        let me = self.layout.rank;
        self.steps += 1;
        let (step, parity) = (self.steps, self.steps & 1);
        at_step(CallStep::PhaseBegin);
        for peer in self.peers() {
            at_step(CallStep::PhaseSignal);
            self.control.step(peer, parity, me).publish_word(step);
        }
        wake_sleepers(self.peers().map(|peer| self.control.step(peer, parity, me)), wake);
        at_step(CallStep::PhaseAwait);
        let mut peers = self.in_waiting_order();
        let result = peers.try_for_each(|peer| self.await_step(peer, step));
        drop(peers);
        at_step(CallStep::PhaseEnd);
        result.map_err(|failure| self.fail(failure))
    }

    #[inline]
    pub(super) fn await_handshake(
        &self,
        peer: u32,
        parity: u64,
        epoch: u64,
    ) -> Result<u64, WaitFailure> {
        let slot = self.control.handshake(self.layout.rank, parity, peer);
        let mut waiter =
            Waiter::new(self.shared_cores.policy_for(peer), self.watchdog(peer, 0, epoch));
        await_word(slot, |word| is_handshake(word, epoch), &mut waiter)
    }

    /// Signals a peer on a channel of the plan that runs.
    pub(crate) fn signal_in_plan(&mut self, peer: u32, channel: u32) {
        at_step(CallStep::ProgramSignal);
        let number = self.plan_signals.send(peer, channel);
        let slot = self.control.plan_channel(peer, self.layout.rank, channel);
        slot.publish_word(number);
        wake_sleepers(std::iter::once(slot), wake);
    }

    /// Waits for a peer's next signal on a channel of the plan that runs. `phase` is for the error's message.
    pub(crate) fn wait_in_plan(&mut self, peer: u32, channel: u32, phase: u32) -> Result<()> {
        at_step(CallStep::ProgramAwait);
        let number = self.plan_signals.take(peer, channel);
        match self.await_in_plan(peer, channel, number, phase) {
            Ok(_) => Ok(()),
            Err(failure) => Err(self.fail(failure)),
        }
    }

    fn await_in_plan(
        &self,
        peer: u32,
        channel: u32,
        number: u64,
        phase: u32,
    ) -> Result<u64, WaitFailure> {
        let slot = self.control.plan_channel(self.layout.rank, peer, channel);
        // `self.epoch` is that of the next call already.
        let watch = self.watchdog(peer, phase, self.epoch - 1);
        let mut waiter = Waiter::new(self.shared_cores.policy_for(peer), watch);
        await_word(slot, |word| word >= number, &mut waiter)
    }

    #[inline]
    fn await_step(&self, peer: u32, step: u64) -> Result<(), WaitFailure> {
        let slot = self.control.step(self.layout.rank, step & 1, peer);
        let phase = (step - self.steps_before) as u32;
        // `self.epoch` is that of the next call already.
        let watch = self.watchdog(peer, phase, self.epoch - 1);
        let mut waiter = Waiter::new(self.shared_cores.policy_for(peer), watch);
        await_word(slot, |word| word == step, &mut waiter).map(|_| ())
    }

    /// Fails the engine after a panic inside a call, which may have left its peers waiting.
    #[cold]
    pub(crate) fn fail_after_panic(&mut self) {
        self.failed.get_or_init(|| {
            Error::invalid_state(format!(
                "rank {}: an earlier call of this communicator panicked; rebuild it on every rank",
                self.layout.rank
            ))
        });
    }

    /// The error for calls that differ. Every rank has the same descriptions, so all return the same error.
    #[cold]
    fn disagreement(&self, mine: &CallDescription, parity: u64, epoch: u64) -> Error {
        let me = self.layout.rank;
        let calls: Vec<CallDescription> = (0..self.layout.world)
            .map(|rank| match rank {
                rank if rank == me => *mine,
                peer => CallDescription::from_words(
                    self.control.handshake(me, parity, peer).description(),
                ),
            })
            .collect();
        mismatch(epoch, &calls)
    }

    /// The check that a waiter makes once it has stopped spinning: for an abort, the peer's death, and the deadline.
    #[inline]
    fn watchdog(
        &self,
        peer: u32,
        phase: u32,
        epoch: u64,
    ) -> impl FnMut() -> Result<(), WaitFailure> {
        let mut watchdog = None;
        move || {
            if let Some(failure) = self.control.reported_fault(&self.layout) {
                return Err(failure);
            }
            let watchdog = watchdog.get_or_insert_with(|| WaitWatchdog::new(self.call_timeout));
            let (operation, timeout) = (self.operation, watchdog.timeout());
            let fault = |cause| WaitFault { cause, operation, phase, peer, epoch, timeout };
            if self.failed.get().is_some() {
                // Another thread of this rank has failed the communicator in a message, and has reported that.
                let reporter = Some(self.layout.rank);
                return Err(WaitFailure { fault: fault(Cause::Timeout), reporter });
            }
            let alive = self.options.peer_alive.as_ref().map(|alive| || alive(peer));
            let interrupted = self.options.interrupted.as_ref();
            watchdog
                .run(alive, interrupted)
                .map_err(|cause| WaitFailure { fault: fault(cause), reporter: None })
        }
    }

    /// Fails the communicator: reports the fault to the peers, unless a peer reported it, and keeps the error for
    /// later calls.
    #[cold]
    pub(super) fn fail(&mut self, failure: WaitFailure) -> Error {
        self.fail_after_declining(failure, None)
    }

    /// Fails the communicator where this rank has declined a call before; the error then contains the reason for that.
    #[cold]
    pub(super) fn fail_after_declining(
        &mut self,
        failure: WaitFailure,
        declined: Option<&Error>,
    ) -> Error {
        let me = self.layout.rank;
        if failure.reporter.is_none() {
            for peer in self.peers() {
                self.control.report_fault(peer, me, &failure.fault);
            }
            // Pairs with the fence between a rank's handshake signal and its load of the abort flag: a late peer sees
            // the flag, unless it signalled before.
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        }
        let gone: Vec<u32> = match (&self.options.peer_alive, failure.reporter) {
            (Some(alive), None) if failure.fault.cause == Cause::PeerLost => {
                self.peers().filter(|peer| *peer != failure.fault.peer && !alive(*peer)).collect()
            }
            _ => Vec::new(),
        };
        let mut error = failure.fault.to_error(me, failure.reporter, &gone);
        if let Some(why) = declined {
            let why = why.to_string();
            let why = why.trim_start_matches("symmpool: ");
            error = error.context(format!("rank {me} had declined its own call before ({why})"));
        }
        tracing::error!(rank = me, epoch = failure.fault.epoch, %error, "communicator failed");
        self.failed.get_or_init(|| error).clone()
    }
}
