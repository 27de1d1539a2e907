//! Agreeing on a state again after a divergence.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::Pool;
use super::held::Held;
use super::lane::LaneInner;
use crate::lane::{Agreed, Survivor};
use crate::rendezvous::message::{Message, decode, encode};
use crate::rendezvous::search::first_difference;
use crate::{Deadline, Error, Result};

/// Where each symmetric lane of a rank stands: counter and digest.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Standing(Vec<(u64, u64)>);

impl Message for Standing {
    const KIND: u16 = 9;
    const NAME: &'static str = "standing";
}

/// What a rank holds of a lane that differs.
#[derive(Debug, Serialize, Deserialize)]
struct Holdings {
    counter: u64,
    next_segment: u64,
    strays: u64,
    survivors: Vec<Survivor>,
}

impl Message for Holdings {
    const KIND: u16 = 10;
    const NAME: &'static str = "holdings";
}

impl Pool {
    /// Makes the ranks alike again after a divergence or a failed allocation, until the group's
    /// timeout. Collective. Returns whether anything differed.
    ///
    /// Every lane that differs goes back to just before its first differing event. Blocks that
    /// were allocated since have no counterpart elsewhere, so all of them must have been freed:
    /// otherwise every rank gets the same [`Error::is_invalid_state`] that says how many each
    /// still holds, and nothing has changed. Older blocks stay as they are; ones that some ranks
    /// freed meanwhile and others did not count as freed without order (rule D5).
    ///
    /// Waits for the device. Streams that were first used since are forgotten.
    pub fn resync(&self) -> Result<bool> {
        let deadline = self.group().deadline();
        let mut committer = self.committer()?;
        let mut held = self.hold();
        let outcome = self.resync_held(&mut held, deadline);
        outcome.map_err(|error| {
            if error.is_timeout() || error.is_peer_lost() {
                committer.broken = Some(error.clone());
            }
            error.context(format!("rank {}, resync", self.rank()))
        })
    }

    fn resync_held(&self, held: &mut [Held<'_>], deadline: Deadline) -> Result<bool> {
        let standing = held.iter().map(|held| {
            let state = &held.inner.state;
            (state.counter(), state.digest())
        });
        let own = Standing(standing.collect());
        let gathered = self.group().all_gather("standing", &encode(&own)?, deadline)?;
        let all: Vec<Standing> = gathered
            .parts()
            .zip(0..)
            .map(|(part, rank)| decode(rank, part))
            .collect::<Result<_>>()?;
        let differing: Vec<usize> = (0..own.0.len())
            .filter(|&lane| all.iter().any(|other| other.0.get(lane) != own.0.get(lane)))
            .collect();
        // All lanes are judged before any is changed.
        let mut agreements = Vec::new();
        for &lane in &differing {
            agreements.push((lane, self.agree_on(&held[lane], deadline)?));
        }
        if !agreements.is_empty() {
            self.driver().synchronize()?;
        }
        for (lane, agreed) in &agreements {
            let lane = &mut held[*lane];
            let LaneInner { state, memory } = &mut *lane.inner;
            for segment in state.resync(agreed, memory)? {
                if let Some(from) = segment.moved_from {
                    memory.rename(segment.counter, from);
                }
                memory.drop_segment(&segment)?;
            }
        }
        for held in held.iter_mut() {
            held.inner.state.mark_agreed();
        }
        let due = held.iter().any(Held::is_due);
        self.0.due.settle(due);
        Ok(!differing.is_empty())
    }

    /// Finds the state that all ranks can go back to in a lane that differs.
    fn agree_on(&self, held: &Held<'_>, deadline: Deadline) -> Result<Agreed> {
        let state = &held.inner.state;
        let name = &held.lane.name;
        let mut gather = |what: &str, value: &[u8]| self.group().all_gather(what, value, deadline);
        let first = first_difference(name, state, &mut gather)?.counter;
        let own = Holdings {
            counter: state.counter(),
            next_segment: state.next_segment(),
            strays: state.strays(first),
            survivors: state.survivors(first),
        };
        let gathered = gather("holdings", &encode(&own)?)?;
        let mut digest = blake3::Hasher::new();
        let mut all = Vec::new();
        for (part, rank) in gathered.parts().zip(0..) {
            digest.update(part);
            all.push((rank, decode::<Holdings>(rank, part)?));
        }
        let holding: Vec<String> = all
            .iter()
            .filter(|(_, holdings)| holdings.strays > 0)
            .map(|(rank, holdings)| format!("rank {rank}: {}", holdings.strays))
            .collect();
        if !holding.is_empty() {
            return Err(Error::invalid_state(format!(
                "lane {name:?}: blocks allocated since the ranks diverged at event {first} are \
                 still live ({}); free them on every rank, then resync again",
                holding.join(", ")
            )));
        }
        let survivors: BTreeSet<Survivor> =
            all.iter().flat_map(|(_, holdings)| holdings.survivors.iter().copied()).collect();
        let [a, b, c, d, e, f, g, h, ..] = *digest.finalize().as_bytes();
        Ok(Agreed {
            first,
            counter: all.iter().map(|(_, holdings)| holdings.counter).max().unwrap_or(0),
            next_segment: all.iter().map(|(_, holdings)| holdings.next_segment).max().unwrap_or(0),
            digest: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            survivors: survivors.into_iter().collect(),
        })
    }
}
