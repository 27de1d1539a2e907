//! Agreement: before bytes of a call leave a host, all ranks of all hosts know that they make the same call.
//!
//! A call begins with a handshake inside each host, which compares descriptions. Then the *leaders*, the first ranks of the
//! hosts, send each other a message, and a second handshake inside each host says what came of it. The message's head has the
//! description, or says that the host's ranks differ. Behind it there is room for data, which small calls use
//! ([`leaders`](super::leaders)). How much room follows from the calls before, on which all ranks have agreed. So no length
//! that travels depends on what was not compared, and a small call that was expected costs one message.
//!
//! A rank that leaves the second handshake knows that all ranks of all hosts have come: an agreement is a barrier as well. Its
//! errors are the same kind on every rank, and the communicator stays usable, as on one host. The other ranks of a host find
//! their leader's error on the host's notice board, which is a window.

#![allow(unsafe_code)] // the board is shared memory

use symmpool_allocator::{Error, Result, Stream};

use super::host_message::{HEAD, HostMessage, NUMBERS, Standing};
use super::notice_board::LeaderError;
use super::phases::Phase;
use super::ranks::Route;
use super::state::SpanningEngine;
use crate::call::{CallDescription, OpType};

impl SpanningEngine {
    /// Whether this rank sends its host's messages.
    pub(super) fn leads(&self) -> bool {
        self.ranks.index == 0
    }

    /// Meets the ranks of this host, all of which must make the same call. Behind it the hosts have not agreed yet. `fill` runs before
    /// that, and may write where no rank of this host reads any more: what calls of the same parity have on the leader.
    pub(super) fn enter(
        &mut self,
        call: CallDescription,
        fill: impl FnOnce(&mut Self),
    ) -> Result<()> {
        self.agreement.number += 1;
        // The other ranks of the host come to calls that this rank declined by their handshakes.
        self.inner.catch_up().map_err(|why| self.in_group(why))?;
        fill(self);
        let met = self.timed(Phase::Meeting, |engine| engine.inner.meet(&call));
        let met = met.map_err(|why| self.in_group(why));
        if self.inner.failure().is_some() {
            return met;
        }
        if self.leads() {
            self.catch_up()?;
        }
        match met {
            Ok(()) => {
                self.agreement.open = Some(call);
                Ok(())
            }
            // A rank of the host has stopped for good: its reason is the error of all.
            Err(why) if self.has_stopped() => Err(why),
            Err(why) => Err(self.disagree(call, why)),
        }
    }

    /// Has the leader send the host's message without data. You must call this where no data goes with it, behind [`Self::enter`].
    pub(super) fn announce(&mut self) -> Result<()> {
        match self.agreement.open {
            Some(call) if self.leads() => {
                self.timed(Phase::Agreement, |engine| engine.send(call, None, |_| ()))
            }
            _ => Ok(()),
        }
    }

    /// Agrees once more, in the middle of a call, where ranks may have found something wrong that others cannot see.
    pub(super) fn confirm<T>(&mut self, call: CallDescription, own: Result<T>) -> Result<T> {
        match own {
            Ok(found) => {
                self.enter(call, |_| ())?;
                self.announce()?;
                self.settle()?;
                Ok(found)
            }
            Err(why) => {
                self.agreement.number += 1;
                self.inner.decline(why.clone(), &Stream::DEFAULT);
                if self.leads() {
                    self.send(call, Some((Standing::Declined, &why)), |_| ())?;
                    self.receive()?;
                }
                self.agreement.forget();
                self.agreement.is_shared = true;
                Err(why)
            }
        }
    }

    /// Agrees on the call if that has not happened yet: all hosts make it, or all of their ranks get an error. Behind
    /// [`Self::announce`].
    pub(super) fn settle(&mut self) -> Result<()> {
        let Some(call) = self.agreement.open else { return Ok(()) };
        self.timed(Phase::Agreement, |engine| {
            let found = if engine.leads() { engine.hear(&call, |_| ()) } else { Ok(()) };
            engine.tell_host(found, 0)
        })
    }

    /// Waits for the other hosts' messages, and compares them. `empty` takes the data out of them. The leader alone.
    pub(super) fn hear(
        &mut self,
        call: &CallDescription,
        empty: impl FnOnce(&HostMessage),
    ) -> Result<()> {
        let message = self.receive()?;
        let found = self.compare(call, &message);
        match &found {
            Ok(()) => empty(&message),
            Err(_) => self.agreement.is_shared = true,
        }
        self.agreement.spare = Some(message);
        found
    }

    /// The second handshake inside the host, in which its leader says whether the hosts agree: `found` is `Ok` on all other
    /// ranks. A call like this one is expected to have `piece` bytes from one host to another go with its message.
    pub(super) fn tell_host(&mut self, found: Result<()>, piece: usize) -> Result<()> {
        let Some(call) = self.agreement.open.take() else { return found };
        if let Err(why) = found {
            // An error that not all hosts know of ends the communicator, which the host learns from the store.
            if self.agreement.is_shared {
                self.agreement.forget();
                let entry = LeaderError { number: self.agreement.number, error: &why };
                // SAFETY: this is the leader, and the call's first handshake found all ranks of the host in it (`open` was there).
                // The second one is declined in the next line.
                unsafe { entry.write(self.staging.notice_board()) };
                self.inner.decline(why.clone(), &Stream::DEFAULT);
            }
            return Err(why);
        }
        let Err(why) = self.inner.meet(&call) else {
            self.agreement.adapt(&call, piece);
            return Ok(());
        };
        if self.inner.failure().is_none() {
            let board = self.staging.notice_board();
            // SAFETY: the second handshake has failed while the engine has not, so the leader declined it, and this call is the
            // rank's last one.
            let left = unsafe { LeaderError::read(board, self.agreement.number) };
            if let Some(shared) = left {
                self.agreement.forget();
                self.agreement.is_shared = true;
                return Err(shared);
            }
        }
        self.agreement.awaits_leader = true;
        Err(self.in_group(why))
    }

    /// Where the ranks of this host do not agree, tells the other hosts. Returns why.
    #[cold]
    fn disagree(&mut self, call: CallDescription, why: Error) -> Error {
        if self.leads() {
            let told = self.send(call, Some((Standing::Differs, &why)), |_| ());
            if let Err(error) = told.and_then(|()| self.receive()) {
                return error;
            }
        }
        self.agreement.forget();
        self.agreement.is_shared = true;
        why
    }

    /// Counts this rank's declined call. A leader also tells the other hosts, and does not wait for them.
    #[cold]
    pub(super) fn tell_declined(&mut self, why: &Error) -> Result<()> {
        self.agreement.number += 1;
        if !self.leads() {
            // The leader finds it in the handshake.
            self.agreement.forget();
            return Ok(());
        }
        let call = CallDescription::new(OpType::Declined);
        self.send(call, Some((Standing::Declined, why)), |_| ())?;
        self.agreement.forget();
        if let Some(message) = self.agreement.under_way.back_mut() {
            message.declined = Some(why.clone());
        }
        Ok(())
    }

    /// Waits until the other hosts have reached the calls that this rank declined.
    fn catch_up(&mut self) -> Result<()> {
        while let Some(HostMessage { declined: Some(why), .. }) = self.agreement.under_way.front() {
            let why = why.message();
            self.receive().map_err(|error| {
                let rank = self.ranks.rank;
                error.context(format!("rank {rank} had declined its own call before ({why})"))
            })?;
        }
        Ok(())
    }

    /// Begins to send the message of a call to the other hosts.
    pub(super) fn send(
        &mut self,
        call: CallDescription,
        trouble: Option<(Standing, &Error)>,
        fill: impl FnOnce(&mut HostMessage),
    ) -> Result<()> {
        let (others, rank) = (self.ranks.host_count() - 1, self.ranks.rank);
        let agreement = &mut self.agreement;
        let bytes = HEAD + agreement.room();
        let mut message = agreement.spare.take().unwrap_or_default();
        (message.number, message.bytes) = (agreement.number, bytes);
        message.host = self.ranks.host as usize;
        message.sent.resize(others * bytes, 0);
        message.arrived.resize(others * bytes, 0);
        let mut head = [0_u8; HEAD];
        let standing = trouble.map_or(Standing::Agreed, |(standing, _)| standing);
        let culprit = match trouble {
            Some((Standing::Differs, why)) => why.ranks().first().copied().unwrap_or(rank),
            _ => rank,
        };
        let numbers = [agreement.number, standing as u64, u64::from(culprit)];
        for (nth, number) in numbers.iter().chain(call.words()).enumerate() {
            head[8 * nth..][..8].copy_from_slice(&number.to_le_bytes());
        }
        if let Some((_, why)) = trouble {
            let text = why.message();
            let room = &mut head[8 * NUMBERS..];
            let most = text.floor_char_boundary(room.len());
            room[..most].copy_from_slice(&text.as_bytes()[..most]);
        }
        for at in 0..others {
            message.sent[at * bytes..][..HEAD].copy_from_slice(&head);
        }
        fill(&mut message);
        let begun = self.begin_message(&mut message);
        // A transfer that could not be begun may use its memory until the connections are closed.
        self.agreement.under_way.push_back(message);
        begun
    }

    /// Waits for the first message under way. Its memory stays where it is if it does not end.
    pub(super) fn receive(&mut self) -> Result<HostMessage> {
        let lost = || Error::invalid_state("no message is under way between hosts");
        let ticket = self.agreement.under_way.front().ok_or_else(lost)?.ticket;
        self.finish(Route::Rail, ticket)?;
        self.agreement.under_way.pop_front().ok_or_else(lost)
    }

    /// Compares what all hosts have sent. Ranks of other hosts find the same.
    fn compare(&mut self, call: &CallDescription, message: &HostMessage) -> Result<()> {
        let own = [message.number, Standing::Agreed as u64];
        let same = |at: &usize| {
            (0..2).all(|nth| message.number(*at, nth) == own[nth]) && message.call(*at) == *call
        };
        let others: Vec<usize> = self.ranks.other_hosts().filter(|at| !same(at)).collect();
        if others.is_empty() {
            return Ok(());
        }
        Err(self.difference(call, message, &others))
    }

    #[cold]
    fn difference(&self, call: &CallDescription, message: &HostMessage, others: &[usize]) -> Error {
        let number = message.number;
        const END: &str = "Nothing was written and the communicator stays usable; every rank must make the same call with \
                           the same arguments";
        let standing = |at: usize| message.number(at, 1);
        if let Some(&at) = others.iter().find(|at| standing(**at) != Standing::Agreed as u64) {
            let culprit = (message.number(at, 2) as u32).min(self.ranks.hosts.world() - 1);
            let host = self.host_name(culprit);
            let did = if standing(at) == Standing::Declined as u64 {
                "declined its call"
            } else {
                "did not make the call of the others of its host"
            };
            return Error::mismatch(format!(
                "rank {culprit} (host {host}) {did}, where rank {} (host {}) made {call} as call {number}: {}\n{END}",
                self.ranks.rank,
                self.host_name(self.ranks.rank),
                message.text(at)
            ))
            .naming([culprit]);
        }
        let ranks: Vec<u32> = others.iter().map(|&at| self.rank_on(Route::Rail, at)).collect();
        let described: Vec<String> = others
            .iter()
            .zip(&ranks)
            .map(|(&at, &rank)| {
                format!("rank {rank} (host {}): {}", self.host_name(rank), message.call(at))
            })
            .collect();
        Error::mismatch(format!(
            "ranks of different hosts entered different collectives as call {number}:\n  rank {} (host {}): {call}\n  {}\n\
             {END}",
            self.ranks.rank,
            self.host_name(self.ranks.rank),
            described.join("\n  ")
        ))
        .naming(ranks)
    }
}
