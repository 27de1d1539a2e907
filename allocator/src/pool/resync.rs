//! Returning all ranks to a common state after a divergence.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Pool;
use super::commit_guard::{LockedLane, all_sound};
use super::committer::{Committer, incomplete_commit, own_failure_or};
use super::lane_memory::LaneInner;
use crate::lane::{AgreedState, Survivor};
use crate::rendezvous::message::{Message, decode_all};
use crate::rendezvous::peers::Peers;
use crate::rendezvous::search::first_difference;
use crate::rendezvous::status::{RankStatus, all_ok, encode_status};
use crate::{Deadline, Error, Result};

/// Counter and digest of each symmetric lane of a rank, or why the rank cannot resync.
#[derive(Debug, Serialize, Deserialize)]
struct LaneStanding(RankStatus<Vec<(u64, u64)>>);

impl Message for LaneStanding {
    const KIND: u16 = 9;
    const NAME: &'static str = "standing";
}

/// Holdings of a rank in a lane in which ranks differ.
#[derive(Debug, Serialize, Deserialize)]
struct Holdings {
    /// The lane's counter.
    counter: u64,
    /// Counter of its next segment.
    next_segment: u64,
    /// How many live blocks were allocated since the ranks diverged.
    strays: u64,
    /// Ordinals of forgotten streams, as a mask.
    forgotten: u64,
    /// Live blocks that were allocated before.
    survivors: Vec<Survivor>,
}

/// Message with the holdings, or why it cannot be sent: there are more blocks than a message can hold.
#[derive(Debug, Serialize, Deserialize)]
struct Holds(RankStatus<Holdings>);

impl Message for Holds {
    const KIND: u16 = 10;
    const NAME: &'static str = "holdings";
}

impl Pool {
    /// Returns all ranks to a common state after a divergence or a failed allocation, within the group's
    /// timeout. Collective. Returns whether anything differed.
    ///
    /// Every lane that differs returns to the state before its first differing event. Blocks that were
    /// allocated since have no counterpart on other ranks, so all of them must have been freed. Otherwise every
    /// rank gets the same [`Error::is_invalid_state`], which says how many blocks each rank still holds, and
    /// nothing has changed. Older blocks stay as they are. If some ranks have freed such a block since and
    /// others have not, it counts as freed without order on all of them (rule D5), however the others free it.
    ///
    /// Waits for the device, within the same timeout. Streams that were first used since are forgotten, and so
    /// are streams that any rank has forgotten.
    pub fn resync(&self) -> Result<bool> {
        let deadline = self.0.group.deadline();
        self.check_process()?;
        self.await_background(deadline)?;
        let mut committer = self.committer()?;
        self.resync_with(&mut committer, deadline)
    }

    /// Resynchronizes in a thread that has the right to commit.
    pub(super) fn resync_with(
        &self,
        committer: &mut Committer,
        deadline: Deadline,
    ) -> Result<bool> {
        let mut locked = self.lock_lanes();
        let outcome = self.resync_locked(committer, &mut locked, deadline);
        outcome.map_err(|error| {
            committer.stop_commits_after(&error);
            error.context(format!("rank {}, resync", self.rank()))
        })
    }

    fn resync_locked(
        &self,
        committer: &mut Committer,
        locked: &mut [LockedLane<'_>],
        deadline: Deadline,
    ) -> Result<bool> {
        let ready = match &committer.incomplete {
            // The recorded state of this rank no longer matches its memory.
            Some(cause) => Err(incomplete_commit(cause)),
            // All ranks wait for their devices here, because below memory changes owners that kernels
            // may still write to.
            None => all_sound(locked).and_then(|()| self.wait_for_device(deadline)),
        };
        let differing = self.differing(&mut committer.peers, ready, locked, deadline)?;
        // Ranks agree on all lanes before any lane is changed.
        let mut agreements = Vec::new();
        for &lane in &differing {
            agreements
                .push((lane, self.common_state(&mut committer.peers, &locked[lane], deadline)?));
        }
        for (lane, agreed) in &agreements {
            // Other ranks complete the resync: if this rank fails here, it is no longer like them.
            roll_back(&mut locked[*lane], agreed)
                .inspect_err(|error| committer.mark_incomplete(error))?;
        }
        for locked in locked.iter_mut() {
            locked.inner.state.mark_agreed();
        }
        let due = locked.iter().any(LockedLane::is_due);
        self.0.due.set(due);
        Ok(!differing.is_empty())
    }

    /// Indices of the locked lanes in which any two ranks differ: the same list on every rank.
    fn differing(
        &self,
        peers: &mut Peers,
        ready: Result<()>,
        locked: &[LockedLane<'_>],
        deadline: Deadline,
    ) -> Result<Vec<usize>> {
        let standing = locked.iter().map(|locked| {
            let state = &locked.inner.state;
            (state.counter(), state.digest())
        });
        let own: Vec<(u64, u64)> = standing.collect();
        let failed = ready.as_ref().err().cloned();
        let status = ready.map(|()| own.clone()).map_err(|error| error.kind().clone());
        let status = encode_status(LaneStanding, status)?;
        let gathered = peers.all_gather(&self.0.group, "standing", &status, deadline);
        let gathered = gathered.map_err(|error| own_failure_or(failed, error))?;
        let statuses: Vec<LaneStanding> = decode_all(&gathered)?;
        let all = all_ok("resync", statuses.into_iter().map(|LaneStanding(status)| status))?;
        let differs = |lane: &usize| all.iter().any(|other| other.get(*lane) != own.get(*lane));
        Ok((0..own.len()).filter(differs).collect())
    }

    /// Finds the state that all ranks can return to, in a lane in which they differ.
    fn common_state(
        &self,
        peers: &mut Peers,
        locked: &LockedLane<'_>,
        deadline: Deadline,
    ) -> Result<AgreedState> {
        let state = &locked.inner.state;
        let name = &locked.lane.name;
        let mut gather =
            |what: &str, value: &[u8]| peers.all_gather(&self.0.group, what, value, deadline);
        let first = first_difference(name, state, &mut gather)?.counter;
        let own = Holdings {
            counter: state.counter(),
            next_segment: state.next_segment(),
            strays: state.strays(first),
            forgotten: state.forgotten(first),
            survivors: state.survivors(first),
        };
        let gathered = gather("holdings", &encode_status(Holds, Ok(own))?)?;
        let statuses: Vec<Holds> = decode_all(&gathered)?;
        let all = all_ok("resync", statuses.into_iter().map(|Holds(status)| status))?;
        let holding: Vec<String> = (0..)
            .zip(&all)
            .filter(|(_, holdings)| holdings.strays > 0)
            .map(|(rank, holdings): (u32, _)| format!("rank {rank}: {}", holdings.strays))
            .collect();
        if !holding.is_empty() {
            return Err(Error::invalid_state(format!(
                "lane {name:?}: blocks allocated since the ranks diverged at event {first} are \
                 still live ({}); free them on every rank, then resync again",
                holding.join(", ")
            )));
        }
        let mut survivors = BTreeMap::<Survivor, usize>::new();
        for survivor in all.iter().flat_map(|holdings| &holdings.survivors) {
            *survivors.entry(*survivor).or_default() += 1;
        }
        let held_by_all = |holders: usize| holders == all.len();
        let mut digest = blake3::Hasher::new();
        for part in gathered.parts() {
            digest.update(part);
        }
        let [a, b, c, d, e, f, g, h, ..] = *digest.finalize().as_bytes();
        Ok(AgreedState {
            first,
            counter: all.iter().map(|holdings| holdings.counter).max().unwrap_or(0),
            next_segment: all.iter().map(|holdings| holdings.next_segment).max().unwrap_or(0),
            forgotten: all.iter().fold(0, |mask, holdings| mask | holdings.forgotten),
            digest: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            survivors: survivors
                .into_iter()
                .map(|(block, holders)| (block, held_by_all(holders)))
                .collect(),
        })
    }
}

/// Returns a lane to the agreed state, and drops the segments that are not part of it.
fn roll_back(locked: &mut LockedLane<'_>, agreed: &AgreedState) -> Result<()> {
    let LaneInner { state, memory } = &mut *locked.inner;
    for segment in state.roll_back(agreed, memory)? {
        if let Some(from) = segment.moved_from {
            // The memory belongs to the old segment again; dropping the new one only unmaps it here.
            memory.rename(segment.counter, from);
        }
        memory.drop_segment(&segment)?;
    }
    Ok(())
}
