//! Agreement: before bytes of a call leave a host, all ranks of all hosts know that they make the same call.
//!
//! A call begins with a handshake inside each host, which compares descriptions, and a message between hosts. The message's
//! head has the description, or says that a rank of the host declines the call. Behind it there is room for the call's first
//! transfer, if that is small. How much room follows from the calls before, on which all ranks have agreed. So no length that
//! travels depends on what was not compared, and a call that is as large as the one before costs no message more.
//!
//! A rank of which the host has met has the messages of all hosts only when all ranks of these have met: an agreement is a
//! barrier as well. Its errors are the same kind on every rank, and the communicator stays usable, as on one host.

use symmpool_allocator::{Error, Result};

use super::host_message::{HEAD, HostMessage, MIN_ROOM, NUMBERS, Standing};
use super::ranks::Route;
use super::state::SpanningEngine;
use crate::call::{Call, OpType};

impl SpanningEngine {
    /// Meets the ranks of this host, all of which must make the same call. The hosts have not agreed then.
    pub(super) fn enter(&mut self, call: Call) -> Result<()> {
        self.agreement.open = Some(call);
        let met = match self.route() {
            Route::Flat => Ok(()),
            Route::Rail => self.inner.meet(&call).map_err(|why| self.in_group(why)),
        };
        // The other ranks of the host come to calls that this rank declined by their handshakes, which `meet` goes through, and
        // send their messages then.
        if self.inner.failure().is_none() {
            self.catch_up()?;
        }
        met
    }

    /// Agrees once more, in the middle of a call, where ranks may have found something wrong that others cannot see.
    pub(super) fn confirm<T>(&mut self, call: Call, own: Result<T>) -> Result<T> {
        match own {
            Ok(found) => {
                self.enter(call)?;
                self.settle()?;
                Ok(found)
            }
            Err(why) => {
                if self.route() == Route::Rail {
                    self.inner.decline(why.clone(), &symmpool_allocator::Stream::DEFAULT);
                }
                self.send(call, Some((Standing::Declined, &why)), |_| ())?;
                self.receive()?;
                self.agreement.is_shared = true;
                Err(why)
            }
        }
    }

    /// Agrees on the call if that has not happened yet, without a transfer.
    pub(super) fn settle(&mut self) -> Result<()> {
        self.settle_with(0, |_| (), |_| ())
    }

    /// Agrees on the call if that has not happened yet: all hosts make it, or all of their ranks get an error. `fill` has a
    /// first transfer go with the message, of at most so many bytes from one rank to another, and `empty` ends it.
    pub(super) fn settle_with(
        &mut self,
        piece: usize,
        fill: impl FnOnce(&mut HostMessage),
        empty: impl FnOnce(&HostMessage),
    ) -> Result<()> {
        let Some(call) = self.agreement.open.take() else { return Ok(()) };
        self.send(call, None, fill)?;
        let message = self.receive()?;
        let found = self.compare(&call, &message);
        match &found {
            Ok(()) => {
                self.agreement.adapt(piece);
                empty(&message);
            }
            Err(_) => {
                self.agreement.is_shared = true;
            }
        }
        self.agreement.spare = Some(message);
        found
    }

    /// Tells the other hosts that the ranks of this one do not agree, where a call fails before the hosts have agreed on it.
    /// Returns why.
    #[cold]
    pub(super) fn disagree(&mut self, why: Error) -> Error {
        let Some(call) = self.agreement.open.take() else { return why };
        let told = self.send(call, Some((Standing::Differs, &why)), |_| ());
        match told.and_then(|()| self.receive()) {
            Ok(_) => {
                self.agreement.is_shared = true;
                why
            }
            Err(error) => error,
        }
    }

    /// Tells the other hosts that this rank declines its call, and does not wait for them.
    #[cold]
    pub(super) fn tell_declined(&mut self, why: &Error) -> Result<()> {
        let call = Call::new(OpType::Declined);
        self.send(call, Some((Standing::Declined, why)), |_| ())?;
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
                // Nobody is told any more.
                self.agreement.open = None;
                error.context(format!("rank {rank} had declined its own call before ({why})"))
            })?;
        }
        Ok(())
    }

    /// Begins to send the message of a call to the other hosts.
    fn send(
        &mut self,
        call: Call,
        trouble: Option<(Standing, &Error)>,
        fill: impl FnOnce(&mut HostMessage),
    ) -> Result<()> {
        let route = self.route();
        let (width, rank) = (self.width(route), self.ranks.rank);
        let agreement = &mut self.agreement;
        agreement.number += 1;
        let bytes = HEAD + agreement.room;
        let mut message = agreement.spare.take().unwrap_or_default();
        (message.number, message.bytes) = (agreement.number, bytes);
        message.sent.resize(width * bytes, 0);
        message.arrived.resize(width * bytes, 0);
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
            // Room is the same on all ranks behind such a call, whoever knows of it already.
            agreement.room = MIN_ROOM;
        }
        for at in 0..width {
            message.sent[at * bytes..][..HEAD].copy_from_slice(&head);
        }
        fill(&mut message);
        let begun = self.begin_message(route, &mut message);
        // A transfer that could not be begun may use its memory until the connections are closed.
        self.agreement.under_way.push_back(message);
        begun
    }

    /// Waits for the first message under way. Its memory stays where it is if it does not end.
    fn receive(&mut self) -> Result<HostMessage> {
        let route = self.route();
        let lost = || Error::invalid_state("no message is under way between hosts");
        let ticket = self.agreement.under_way.front().ok_or_else(lost)?.ticket;
        self.finish(route, ticket)?;
        self.agreement.under_way.pop_front().ok_or_else(lost)
    }

    /// Compares what all hosts have sent. Ranks of other hosts find the same.
    fn compare(&mut self, call: &Call, message: &HostMessage) -> Result<()> {
        let route = self.route();
        let own: Vec<u64> = [message.number, Standing::Agreed as u64].to_vec();
        let same = |at: &usize| {
            (0..2).all(|nth| message.number(*at, nth) == own[nth]) && message.call(*at) == *call
        };
        let others: Vec<usize> = (0..self.width(route)).filter(|at| !same(at)).collect();
        if others.is_empty() {
            return Ok(());
        }
        self.agreement.room = MIN_ROOM;
        Err(self.difference(call, message, &others))
    }

    #[cold]
    fn difference(&self, call: &Call, message: &HostMessage, others: &[usize]) -> Error {
        let (route, number) = (self.route(), message.number);
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
        let ranks: Vec<u32> = others.iter().map(|&at| self.rank_on(route, at)).collect();
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
