//! Calls whose data the leaders exchange: the first ranks of the hosts, one message to each other host.
//!
//! Every rank of a host copies its data to the leader's memory before the call's first handshake. The leader reduces it, if
//! the call does, and exchanges it with the other leaders, along with the message by which they agree on the call if there is
//! room for it. Behind the second handshake every rank takes its result out of the leader's memory. So a call costs two
//! handshakes inside each host and one message between each two hosts, whatever the number of ranks. Sums are made in the
//! order in which phases inside hosts and between them make them, and have the same bits.
//!
//! | area of the leader | what lies there |
//! | --- | --- |
//! | `inside` | a reduction's inputs, rank behind rank; behind those the host's own result of a reduce-scatter; of an all-to-all, parts for ranks of the same host |
//! | `leaving` | the data for each other host, host behind host |
//! | `arrived` | the data of each other host, host behind host |

#![allow(unsafe_code)] // copies between raw buffers and windows

use symmpool_allocator::Result;

use super::exchange::HostReduction;
use super::host_message::HostMessage;
use super::phases::Phase;
use super::ranks::Route;
use super::staging::LeaderAreas;
use super::state::SpanningEngine;
use super::ways::is_for_leaders;
use crate::algorithm::StandardCollective;
use crate::call::{Arguments, CallDescription};
use crate::outer::Transfer;

/// A call whose data the leaders exchange.
#[derive(Clone)]
pub(super) struct LeaderCall {
    collective: StandardCollective,
    given: Arguments,
    reduction: Option<HostReduction>,
    /// Bytes of `count` elements.
    bytes: usize,
    /// Bytes for each host and from each host. None for this one.
    send: Vec<usize>,
    receive: Vec<usize>,
    /// The most bytes from any host to any other one.
    piece: usize,
}

impl LeaderCall {
    /// Where data for a host begins, or data from it.
    fn begin(parts: &[usize], host: usize) -> usize {
        parts[..host].iter().sum()
    }
}

impl SpanningEngine {
    /// The call, if the leaders are to exchange its data: the same on all ranks that make the same call.
    pub(super) fn by_leaders(
        &self,
        collective: StandardCollective,
        given: &Arguments,
    ) -> Option<LeaderCall> {
        let Arguments { count, dtype, op, root, .. } = *given;
        let reduces =
            matches!(collective, StandardCollective::AllReduce | StandardCollective::ReduceScatter);
        if count == 0 || (reduces && !Self::divides(dtype, op)) {
            return None;
        }
        let (here, hosts) = (self.ranks.host as usize, self.ranks.host_count());
        let bytes = count.checked_mul(dtype.size())?;
        let ranks: Vec<usize> = (0..hosts).map(|host| self.ranks.ranks_on(host)).collect();
        let most = ranks.iter().copied().max().unwrap_or(1);
        let home = self.ranks.hosts.of(root.min(self.ranks.hosts.world() - 1)) as usize;
        // Ranks' parts in what goes from one host to another.
        let parts = |from: usize, to: usize| match collective {
            StandardCollective::AllReduce => 1,
            StandardCollective::ReduceScatter => ranks[to],
            StandardCollective::AllGather => ranks[from],
            StandardCollective::AllToAll => ranks[from] * ranks[to],
            StandardCollective::Broadcast => usize::from(from == home),
        };
        let largest = match collective {
            StandardCollective::AllReduce | StandardCollective::Broadcast => 1,
            StandardCollective::ReduceScatter | StandardCollective::AllGather => most,
            StandardCollective::AllToAll => most * most,
        };
        let piece = bytes.checked_mul(largest)?;
        // Parts that ranks of a host put into the leader's memory.
        let world = self.ranks.world();
        let inside = match collective {
            StandardCollective::AllReduce => most,
            StandardCollective::ReduceScatter => (most + 1) * world,
            _ => largest,
        };
        let all = |parts: usize| bytes.checked_mul(parts);
        if !is_for_leaders(collective, all(largest * (hosts - 1)), all(inside)) {
            return None;
        }
        let between = |way: &dyn Fn(usize) -> usize| -> Vec<usize> {
            let of = |host: usize| if host == here { 0 } else { way(host) * bytes };
            (0..hosts).map(of).collect()
        };
        let reduction = match reduces {
            true => Some(self.reduction(collective.name(), dtype, op).ok()?),
            false => None,
        };
        Some(LeaderCall {
            collective,
            given: *given,
            reduction,
            bytes,
            send: between(&|host| parts(here, host)),
            receive: between(&|host| parts(host, here)),
            piece,
        })
    }

    /// Makes such a call. `meanwhile` runs while the leaders' messages are on their way: what it has done for the host's other ranks
    /// is there when this returns on them.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Engine`](crate::engine::Engine)'s unsafe methods.
    pub(super) unsafe fn run_by_leaders(
        &mut self,
        call: CallDescription,
        plan: &LeaderCall,
        meanwhile: impl FnOnce(&mut Self),
    ) -> Result<()> {
        let areas = self.staging.areas(self.agreement.number + 1);
        self.enter(call, |engine| {
            // SAFETY: the caller promised that the input is there; `enter` fills the areas where nobody uses them.
            engine.timed(Phase::Before, |engine| unsafe { engine.fill(plan, areas) });
        })?;
        self.timed(Phase::Between, |engine| {
            let found = if engine.leads() {
                // SAFETY: all ranks of the host have filled the areas, and read them behind the second handshake alone.
                unsafe { engine.exchange_as_leader(&call, plan, areas, meanwhile) }
            } else {
                meanwhile(engine);
                Ok(())
            };
            engine.tell_host(found, plan.piece)
        })?;
        // SAFETY: the caller promised that the output is there; behind the second handshake the leader has all data.
        self.timed(Phase::After, |engine| unsafe { engine.empty(plan, areas) });
        Ok(())
    }

    /// # Safety
    ///
    /// The areas are filled, and nobody else uses them.
    unsafe fn exchange_as_leader(
        &mut self,
        call: &CallDescription,
        plan: &LeaderCall,
        areas: LeaderAreas,
        meanwhile: impl FnOnce(&mut Self),
    ) -> Result<()> {
        let (here, others) = (self.ranks.host as usize, self.ranks.other_hosts());
        if plan.piece <= self.agreement.room() {
            // SAFETY: the caller promised that the areas are filled, and nobody else uses them.
            unsafe { self.combine(plan, areas) };
            let parts = |at: *mut u8, parts: &[usize]| -> Vec<(usize, *mut u8, usize)> {
                let part = |host: usize| {
                    (host, at.wrapping_add(LeaderCall::begin(parts, host)), parts[host])
                };
                others.clone().map(part).collect()
            };
            let (leaving, arrived) =
                (parts(areas.leaving, &plan.send), parts(areas.arrived, &plan.receive));
            self.send(*call, None, |message: &mut HostMessage| {
                for (host, from, bytes) in leaving {
                    let begin = message.room(host);
                    let room = &mut message.sent[begin..begin + bytes];
                    // SAFETY: the area has the data for that host; the message's memory is its own.
                    unsafe { from.copy_to_nonoverlapping(room.as_mut_ptr(), bytes) };
                }
            })?;
            meanwhile(self);
            return self.hear(call, |message| {
                for (host, to, bytes) in arrived {
                    let begin = message.room(host);
                    let room = &message.arrived[begin..begin + bytes];
                    // SAFETY: the area has room for the data of that host; the message's memory is its own.
                    unsafe { room.as_ptr().copy_to_nonoverlapping(to, bytes) };
                }
            });
        }
        self.send(*call, None, |_| ())?;
        // SAFETY: the caller promised that the areas are filled, and nobody else uses them.
        unsafe { self.combine(plan, areas) };
        meanwhile(self);
        self.hear(call, |_| ())?;
        debug_assert!(plan.send[here] == 0 && plan.receive[here] == 0);
        let exchange = Transfer::AllToAll {
            output: areas.arrived,
            input: areas.leaving,
            send: &plan.send,
            receive: &plan.receive,
        };
        // SAFETY: the areas have room for these bytes, nobody else uses them, and a failure ends all transfers before the
        // call returns (`fail`).
        let ticket = unsafe { self.begin_agreed(Route::Rail, exchange) }?;
        self.finish(Route::Rail, ticket)
    }

    /// Copies this rank's data to the leader.
    ///
    /// # Safety
    ///
    /// The input is readable, and nobody uses what this rank writes to.
    unsafe fn fill(&self, plan: &LeaderCall, areas: LeaderAreas) {
        let LeaderCall { bytes, given, .. } = *plan;
        let from = self.address(given.input).cast_const();
        let (index, inside) = (self.ranks.index as usize, self.ranks.local_world());
        let here = self.ranks.host as usize;
        let copy = |from: *const u8, to: *mut u8, bytes: usize| {
            // SAFETY: the caller promised that the input is readable for all of its parts, which end where this does, and that
            // nobody uses these parts of the areas, which `by_leaders` has found large enough.
            unsafe { from.copy_to_nonoverlapping(to, bytes) };
        };
        let leaving = |host: usize| areas.leaving.wrapping_add(LeaderCall::begin(&plan.send, host));
        match plan.collective {
            // The input of a rank that is alone is reduced where it lies.
            StandardCollective::AllReduce if inside > 1 => {
                copy(from, areas.inside.wrapping_add(index * bytes), bytes);
            }
            StandardCollective::ReduceScatter if inside > 1 => {
                let all = self.ranks.world() * bytes;
                copy(from, areas.inside.wrapping_add(index * all), all);
            }
            StandardCollective::AllReduce | StandardCollective::ReduceScatter => {}
            StandardCollective::AllGather => {
                for host in self.ranks.other_hosts() {
                    copy(from, leaving(host).wrapping_add(index * bytes), bytes);
                }
            }
            StandardCollective::AllToAll => {
                for host in 0..self.ranks.host_count() {
                    let to = if host == here { areas.inside } else { leaving(host) };
                    for (nth, rank) in self.ranks.hosts.ranks(host as u32).iter().enumerate() {
                        let part = from.wrapping_add(*rank as usize * bytes);
                        copy(part, to.wrapping_add((nth * inside + index) * bytes), bytes);
                    }
                }
            }
            StandardCollective::Broadcast if given.root == self.ranks.rank => {
                let from = self.address(given.output);
                for host in self.ranks.other_hosts() {
                    copy(from, leaving(host), bytes);
                }
            }
            StandardCollective::Broadcast => {}
        }
    }

    /// Reduces the data of this host's ranks for each host.
    ///
    /// # Safety
    ///
    /// All ranks of the host have filled the areas, and nobody else uses them.
    unsafe fn combine(&self, plan: &LeaderCall, areas: LeaderAreas) {
        let Some(reduction) = &plan.reduction else { return };
        let LeaderCall { bytes, given, .. } = *plan;
        let (inside, count) = (self.ranks.local_world(), given.count);
        let all = match plan.collective {
            StandardCollective::AllReduce => bytes,
            _ => self.ranks.world() * bytes,
        };
        let inputs: Vec<*const u8> = match inside {
            1 => vec![self.address(given.input)],
            _ => (0..inside).map(|nth| areas.inside.wrapping_add(nth * all).cast_const()).collect(),
        };
        let leaving = |host: usize| areas.leaving.wrapping_add(LeaderCall::begin(&plan.send, host));
        if plan.collective == StandardCollective::AllReduce {
            let mut others = self.ranks.other_hosts().map(leaving);
            let Some(first) = others.next() else { return };
            // SAFETY: the inputs lie in the areas, or the caller of the call promised that they are there; the areas have room
            // for the result.
            unsafe { reduction.reduce_inside(&inputs, count, first) };
            for to in others {
                // SAFETY: the areas have room for the result once for each other host.
                unsafe { first.copy_to_nonoverlapping(to, bytes) };
            }
            return;
        }
        for host in 0..self.ranks.host_count() {
            let to = if host == self.ranks.host as usize {
                areas.inside.wrapping_add(inside * all)
            } else {
                leaving(host)
            };
            for (nth, rank) in self.ranks.hosts.ranks(host as u32).iter().enumerate() {
                let skip = *rank as usize * bytes;
                let parts: Vec<*const u8> = inputs.iter().map(|at| at.wrapping_add(skip)).collect();
                // SAFETY: each input has a part for every rank; the areas have room for the results.
                unsafe { reduction.reduce_inside(&parts, count, to.wrapping_add(nth * bytes)) };
            }
        }
    }

    /// Takes this rank's result out of the leader's memory.
    ///
    /// # Safety
    ///
    /// The output is writable, and all data has come.
    unsafe fn empty(&self, plan: &LeaderCall, areas: LeaderAreas) {
        let LeaderCall { bytes, given, .. } = *plan;
        let to = self.address(given.output);
        let (index, inside) = (self.ranks.index as usize, self.ranks.local_world());
        let (here, hosts) = (self.ranks.host as usize, self.ranks.host_count());
        let arrived =
            |host: usize| areas.arrived.wrapping_add(LeaderCall::begin(&plan.receive, host));
        // Data that this host sends all others.
        let own = areas.leaving;
        match plan.collective {
            StandardCollective::AllReduce | StandardCollective::ReduceScatter => {
                let (own, skip) = match plan.collective {
                    StandardCollective::AllReduce => (own, 0),
                    _ => {
                        let inputs = inside * self.ranks.world() * bytes;
                        (areas.inside.wrapping_add(inputs), index * bytes)
                    }
                };
                let partial = |host: usize| if host == here { own } else { arrived(host) };
                let partials: Vec<*const u8> =
                    (0..hosts).map(|host| partial(host).wrapping_add(skip).cast_const()).collect();
                if let Some(reduction) = &plan.reduction {
                    // SAFETY: the areas have a result of each host, and the caller promised that the output is there.
                    unsafe { reduction.reduce_hosts(&partials, given.count, to) };
                }
            }
            StandardCollective::AllGather | StandardCollective::AllToAll => {
                for host in 0..hosts {
                    let ranks = self.ranks.hosts.ranks(host as u32);
                    let from = match (plan.collective, host == here) {
                        (StandardCollective::AllGather, true) => own,
                        (_, true) => areas.inside,
                        (_, false) => arrived(host),
                    };
                    let skip = match plan.collective {
                        StandardCollective::AllToAll => index * ranks.len() * bytes,
                        _ => 0,
                    };
                    for (nth, rank) in ranks.iter().enumerate() {
                        let part = from.wrapping_add(skip + nth * bytes);
                        let place = to.wrapping_add(*rank as usize * bytes);
                        // SAFETY: the areas have a part of each rank of the host, and the caller promised that the output
                        // has room for all. An input that is part of the output is there already.
                        unsafe { part.copy_to_nonoverlapping(place, bytes) };
                    }
                }
            }
            StandardCollective::Broadcast if given.root != self.ranks.rank => {
                let home = self.ranks.hosts.of(given.root) as usize;
                let from = if home == here { own } else { arrived(home) };
                // SAFETY: the areas have the data, and the caller promised that the output is there.
                unsafe { from.copy_to_nonoverlapping(to, bytes) };
            }
            StandardCollective::Broadcast => {}
        }
    }
}
