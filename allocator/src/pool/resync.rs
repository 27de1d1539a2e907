//! Agreeing on a state again after a divergence.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::commit_guard::{Held, all_sound};
use super::lane_memory::LaneInner;
use super::{Committer, Pool, half_way, untold};
use crate::lane::{Agreed, Survivor};
use crate::rendezvous::message::{Message, decode_all};
use crate::rendezvous::peers::Peers;
use crate::rendezvous::search::first_difference;
use crate::rendezvous::status::{Status, all_ok, encode_status};
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
    forgotten: u64,
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
    /// Waits for the device, also no longer than that. Streams that were first used since are forgotten, and
    /// so are those that any rank has forgotten.
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
            // given to somebody else below. A rank whose device is late still has to tell the others.
            None => all_sound(held).and_then(|()| {
                let share = deadline.remaining().mul_f64(0.8);
                self.driver().synchronize_by(Deadline::after(share))
            }),
        };
        let differing = self.differing(&mut committer.peers, ready, held, deadline)?;
        // All lanes are judged before any is changed.
        let mut agreements = Vec::new();
        for &lane in &differing {
            agreements
                .push((lane, self.common_state(&mut committer.peers, &held[lane], deadline)?));
        }
        for (lane, agreed) in &agreements {
            // The others go on: a rank that fails here is no longer like them.
            go_back(&mut held[*lane], agreed)
                .inspect_err(|error| committer.leave_unfinished(error))?;
        }
        for held in held.iter_mut() {
            held.inner.state.mark_agreed();
        }
        let due = held.iter().any(Held::is_due);
        self.0.due.settle(due);
        Ok(!differing.is_empty())
    }

    /// The lanes, of those held, in which any two ranks differ: the same list on every rank.
    fn differing(
        &self,
        peers: &mut Peers,
        ready: Result<()>,
        held: &[Held<'_>],
        deadline: Deadline,
    ) -> Result<Vec<usize>> {
        let standing = held.iter().map(|held| {
            let state = &held.inner.state;
            (state.counter(), state.digest())
        });
        let own: Vec<(u64, u64)> = standing.collect();
        let failed = ready.as_ref().err().cloned();
        let status = ready.map(|()| own.clone()).map_err(|error| error.kind().clone());
        let status = encode_status(Standing, status)?;
        let gathered = peers.all_gather(self.group(), "standing", &status, deadline);
        let gathered = gathered.map_err(|error| untold(failed, error))?;
        let said: Vec<Standing> = decode_all(&gathered)?;
        let all = all_ok("resync", said.into_iter().map(|Standing(status)| status))?;
        let differs = |lane: &usize| all.iter().any(|other| other.get(*lane) != own.get(*lane));
        Ok((0..own.len()).filter(differs).collect())
    }

    /// Finds the state that all ranks can go back to in a lane that differs.
    fn common_state(
        &self,
        peers: &mut Peers,
        held: &Held<'_>,
        deadline: Deadline,
    ) -> Result<Agreed> {
        let state = &held.inner.state;
        let name = &held.lane.name;
        let mut gather =
            |what: &str, value: &[u8]| peers.all_gather(self.group(), what, value, deadline);
        let first = first_difference(name, state, &mut gather)?.counter;
        let own = Holdings {
            counter: state.counter(),
            next_segment: state.next_segment(),
            strays: state.strays(first),
            forgotten: state.forgotten(first),
            survivors: state.survivors(first),
        };
        let gathered = gather("holdings", &encode_status(Holds, Ok(own))?)?;
        let said: Vec<Holds> = decode_all(&gathered)?;
        let all = all_ok("resync", said.into_iter().map(|Holds(status)| status))?;
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
        Ok(Agreed {
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

/// Takes a lane back to what the ranks agreed on, and drops segments that are not part of it.
fn go_back(held: &mut Held<'_>, agreed: &Agreed) -> Result<()> {
    let LaneInner { state, memory } = &mut *held.inner;
    for segment in state.resync(agreed, memory)? {
        if let Some(from) = segment.moved_from {
            // The memory is the old segment's again: dropping this one only unmaps it here.
            memory.rename(segment.counter, from);
        }
        memory.drop_segment(&segment)?;
    }
    Ok(())
}
