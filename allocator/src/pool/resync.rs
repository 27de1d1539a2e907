//! Agreeing on a state again after a divergence.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::held::Held;
use super::lane_memory::LaneInner;
use super::{Committer, Pool, half_way};
use crate::lane::{Agreed, Survivor};
use crate::rendezvous::message::{Message, decode, decode_all};
use crate::rendezvous::peers::Peers;
use crate::rendezvous::search::first_difference;
use crate::rendezvous::status::{Status, agreed, encode_status};
use crate::{Deadline, Error, Result};

/// Where each symmetric lane of a rank stands (counter and digest), or why it cannot resync.
#[derive(Debug, Serialize, Deserialize)]
struct Standing(Status<Vec<(u64, u64)>>);

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

/// The same, or why a rank cannot tell: more blocks than a message holds.
#[derive(Debug, Serialize, Deserialize)]
struct Holds(Status<Holdings>);

impl Message for Holds {
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
    /// freed meanwhile and others did not count as freed without order (rule D5), and so will the
    /// frees of the others, however they free them.
    ///
    /// Waits for the device. Streams that were first used since are forgotten.
    pub fn resync(&self) -> Result<bool> {
        let deadline = self.group().deadline();
        let mut committer = self.committer()?;
        let mut held = self.hold();
        let outcome = self.resync_held(&mut committer, &mut held, deadline);
        outcome.map_err(|error| {
            committer.give_up_if_apart(&error);
            error.context(format!("rank {}, resync", self.rank()))
        })
    }

    fn resync_held(
        &self,
        committer: &mut Committer,
        held: &mut [Held<'_>],
        deadline: Deadline,
    ) -> Result<bool> {
        let ready = match &committer.unfinished {
            // What this rank holds is no longer what it says it holds.
            Some(cause) => Err(half_way(cause)),
            // All ranks wait for their devices here: nobody's kernels write to memory that is
            // given to somebody else below.
            None => self.driver().synchronize(),
        };
        let standing = held.iter().map(|held| {
            let state = &held.inner.state;
            (state.counter(), state.digest())
        });
        let own: Vec<(u64, u64)> = standing.collect();
        let status = ready.map(|()| own.clone()).map_err(|error| error.kind().clone());
        let status = encode_status(Standing, status)?;
        let gathered = committer.peers.all_gather(self.group(), "standing", &status, deadline)?;
        let mut all = Vec::new();
        let mut failures = Vec::new();
        for (rank, Standing(status)) in (0..).zip(decode_all(&gathered)?) {
            match status {
                Ok(standing) => all.push(standing),
                Err(kind) => failures.push((rank, kind)),
            }
        }
        if let Some(error) = agreed("resync", &failures) {
            return Err(error);
        }
        let differing: Vec<usize> = (0..own.len())
            .filter(|&lane| all.iter().any(|other| other.get(lane) != own.get(lane)))
            .collect();
        // All lanes are judged before any is changed.
        let mut agreements = Vec::new();
        for &lane in &differing {
            agreements.push((lane, self.agree_on(&mut committer.peers, &held[lane], deadline)?));
        }
        let outcome = agreements.iter().try_for_each(|(lane, agreed)| {
            let lane = &mut held[*lane];
            let LaneInner { state, memory } = &mut *lane.inner;
            for segment in state.resync(agreed, memory)? {
                if let Some(from) = segment.moved_from {
                    memory.rename(segment.counter, from);
                }
                memory.drop_segment(&segment)?;
            }
            Ok(())
        });
        // The others went on: this rank is no longer like them.
        outcome.inspect_err(|error: &Error| committer.leave_unfinished(error))?;
        for held in held.iter_mut() {
            held.inner.state.mark_agreed();
        }
        let due = held.iter().any(Held::is_due);
        self.0.due.settle(due);
        Ok(!differing.is_empty())
    }

    /// Finds the state that all ranks can go back to in a lane that differs.
    fn agree_on(&self, peers: &mut Peers, held: &Held<'_>, deadline: Deadline) -> Result<Agreed> {
        let state = &held.inner.state;
        let name = &held.lane.name;
        let mut gather =
            |what: &str, value: &[u8]| peers.all_gather(self.group(), what, value, deadline);
        let first = first_difference(name, state, &mut gather)?.counter;
        let own = Holdings {
            counter: state.counter(),
            next_segment: state.next_segment(),
            strays: state.strays(first),
            survivors: state.survivors(first),
        };
        let gathered = gather("holdings", &encode_status(Holds, Ok(own))?)?;
        let mut digest = blake3::Hasher::new();
        let mut all = Vec::new();
        let mut failures = Vec::new();
        for (part, rank) in gathered.parts().zip(0..) {
            digest.update(part);
            match decode::<Holds>(rank, part)?.0 {
                Ok(holdings) => all.push((rank, holdings)),
                Err(kind) => failures.push((rank, kind)),
            }
        }
        if let Some(error) = agreed("resync", &failures) {
            return Err(error);
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
        let mut survivors = BTreeMap::<Survivor, usize>::new();
        for survivor in all.iter().flat_map(|(_, holdings)| &holdings.survivors) {
            *survivors.entry(*survivor).or_default() += 1;
        }
        let held_by_all = |holders: usize| holders == all.len();
        let [a, b, c, d, e, f, g, h, ..] = *digest.finalize().as_bytes();
        Ok(Agreed {
            first,
            counter: all.iter().map(|(_, holdings)| holdings.counter).max().unwrap_or(0),
            next_segment: all.iter().map(|(_, holdings)| holdings.next_segment).max().unwrap_or(0),
            digest: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            survivors: survivors
                .into_iter()
                .map(|(block, holders)| (block, held_by_all(holders)))
                .collect(),
        })
    }
}
