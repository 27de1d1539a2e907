//! The collective step that compares the ranks' sequences and turns new segments into windows.
//!
//! | step | store round trips |
//! | --- | --- |
//! | 1 publish counters, digests, freed blocks, failures; 2 judge them, alike on all ranks | 1 |
//! | 3 hand over handles: descriptors over sockets, or bytes through the store | 0 or 1 |
//! | 4 map peers' segments, confirm; if any rank failed, all undo | 1 |
//! | 5 finish: new windows, retired segments unmapped, freed blocks returned | 0 |
//!
//! Nothing is mapped before all digests agree. A commit in which nothing grew ends after step 2.
//! The lanes stay locked throughout, because a commit is part of their sequence.

use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::lane::{LaneInner, SharedLane};
use super::{Committer, Pool};
use crate::driver::{Exported, Physical, Step, Stream, Transport};
use crate::error::list;
use crate::heap::Heap;
use crate::lane::Segment;
use crate::rendezvous::agreement::{LaneProposal, Proposal, Propose, Verdict, judge};
use crate::rendezvous::message::{Message, decode, encode};
use crate::rendezvous::search::first_difference;
use crate::rendezvous::status::{Status, agreed};
use crate::sync::lock;
use crate::window::{Window, Windows};
use crate::{Deadline, Error, Result};

/// Unordered frees that one commit can carry; more of them wait for the next.
const MOST_FREED: usize = 1 << 16;

/// A rank that failed still hears out the others for at least this long, so that all of them
/// agree on the error.
const GRACE: Duration = Duration::from_millis(500);

/// What a commit did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommitReport {
    /// Its number, from 1.
    pub number: u64,
    /// Windows that are new.
    pub windows_added: u64,
    /// Windows that are gone, because their segments were released or moved.
    pub windows_removed: u64,
    /// Blocks freed without order that came back, over all lanes.
    pub blocks_returned: u64,
}

/// How mapping went on one rank.
#[derive(Debug, Serialize, Deserialize)]
struct Mapped(Status<()>);

impl Message for Mapped {
    const KIND: u16 = 7;
    const NAME: &'static str = "mapping";
}

/// One rank's handles, in segment order.
#[derive(Debug, Serialize, Deserialize)]
struct Handles(Status<Vec<Vec<u8>>>);

impl Message for Handles {
    const KIND: u16 = 8;
    const NAME: &'static str = "handles";
}

/// A symmetric lane, locked for the length of the commit.
pub(super) struct Held<'a> {
    pub(super) lane: &'a SharedLane,
    pub(super) inner: MutexGuard<'a, LaneInner>,
}

impl Held<'_> {
    /// Whether the lane has something to share, or to take back, that no commit has.
    pub(super) fn is_due(&self) -> bool {
        let shared = self.inner.memory.shared_below;
        self.inner.state.has_retired()
            || self.inner.state.segments().iter().any(|segment| segment.counter >= shared)
    }
}

/// A segment to be shared.
#[derive(Clone, Copy, Debug)]
struct Fresh {
    /// Index among the held lanes.
    lane: usize,
    segment: Segment,
    /// Offset in the slot.
    offset: u64,
}

impl Pool {
    /// Checks that all ranks did the same, and makes windows of new memory, until `deadline`.
    /// Collective: every rank must call it, in the same place of its program.
    ///
    /// Errors leave the pool as it was, the same on every rank wherever ranks can still talk:
    /// - [`Error::is_diverged`]: the ranks' sequences differ; says where, and what each did. Free
    ///   what was allocated since and [`resync`](Pool::resync).
    /// - [`Error::is_out_of_memory`] and others: one rank could not do what the others did.
    /// - [`Error::is_timeout`], [`Error::is_peer_lost`]: names the ranks. No further commit of this
    ///   pool can succeed, and each says so at once; what is mapped stays usable.
    /// - [`Error::is_invalid_state`]: another thread is committing, or a stream is being captured.
    pub fn commit_by(&self, deadline: Deadline) -> Result<CommitReport> {
        let mut committer = self.committer()?;
        let mut held = self.hold();
        let outcome = self.commit_held(&mut committer, &mut held, deadline);
        outcome.map_err(|error| {
            // Ranks that lost each other cannot know what the others will do.
            if error.is_timeout() || error.is_peer_lost() {
                committer.broken = Some(error.clone());
            }
            let number = committer.commits + 1;
            error.context(format!("rank {}, commit {number}", self.rank()))
        })
    }

    /// The right to commit, unless somebody else has it or no commit can succeed any more.
    pub(super) fn committer(&self) -> Result<Turn<'_>> {
        // A flag of its own: who only looks at the committer must not make a commit fail, which
        // would set this rank apart from the others.
        if self.0.committing.swap(true, Ordering::Acquire) {
            return Err(Error::invalid_state(format!(
                "rank {}: another thread is in a commit of this pool; commits are collective and \
                 come one at a time",
                self.rank()
            )));
        }
        let committer = Turn { committer: lock(&self.0.committer), committing: &self.0.committing };
        match &committer.broken {
            Some(cause) => {
                Err(cause.clone().context("this pool cannot commit any more; build a new one"))
            }
            None => Ok(committer),
        }
    }

    /// Locks the symmetric lanes, in order.
    pub(super) fn hold(&self) -> Vec<Held<'_>> {
        let held = self.0.lanes.iter().map(|lane| Held { lane, inner: lane.lock() });
        held.filter(|held| held.inner.state.is_symmetric()).collect()
    }

    fn commit_held(
        &self,
        committer: &mut Committer,
        held: &mut [Held<'_>],
        deadline: Deadline,
    ) -> Result<CommitReport> {
        let freed = self.agree(committer, held, deadline)?;
        let mut ready = self.driver().at_step(Step::CommitAgree);
        let fresh = fresh_segments(held);
        if held.iter().any(Held::is_due) {
            self.share(committer, held, &fresh, ready, deadline)?;
            ready = Ok(());
        }
        let finished = ready
            .and_then(|()| self.driver().at_step(Step::CommitFinish))
            .and_then(|()| self.finish(held, &fresh, &freed));
        let mut report = finished.inspect_err(|error| {
            // The others went on: this rank is no longer like them, and tells them next time.
            committer.unfinished = Some(error.to_string());
        })?;
        committer.commits += 1;
        report.number = committer.commits;
        tracing::debug!(rank = self.rank(), ?report, "committed");
        Ok(report)
    }

    /// Steps 1 and 2. Returns, for each held lane, the blocks that every rank has freed.
    fn agree(
        &self,
        committer: &Committer,
        held: &[Held<'_>],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u64>>> {
        let proposal = self.propose(committer, held).map_err(|error| error.kind().clone());
        let group = &self.0.group;
        let gathered = group.all_gather("propose", &encode(&Propose(proposal))?, deadline)?;
        match judge(&gathered)? {
            Verdict::Agreed(freed) => Ok(freed),
            Verdict::Differs(lane) => {
                let Held { lane: shared, inner } = &held[lane];
                let mut gather = |what: &str, value: &[u8]| group.all_gather(what, value, deadline);
                let found = first_difference(&shared.name, &inner.state, &mut gather)?;
                Err(Error::diverged(found))
            }
        }
    }

    fn propose(&self, committer: &Committer, held: &[Held<'_>]) -> Result<Proposal> {
        if let Some(cause) = &committer.unfinished {
            return Err(Error::invalid_state(format!(
                "an earlier commit went half-way on this rank ({cause}); build a new pool"
            )));
        }
        self.driver().at_step(Step::CommitPublish)?;
        if self.driver().is_capturing(Stream::DEFAULT) {
            return Err(Error::invalid_state(
                "the default stream is being captured into a graph; commit after the capture",
            ));
        }
        let lanes = held.iter().map(|held| {
            let state = &held.inner.state;
            LaneProposal {
                counter: state.counter(),
                digest: state.digest(),
                freed: state.set_aside(MOST_FREED),
                failure: state.failure().cloned(),
            }
        });
        Ok(Proposal { round: committer.commits, lanes: lanes.collect() })
    }

    /// Steps 3 and 4: afterwards every peer's fresh segments are mapped on every rank, or none on
    /// any.
    fn share(
        &self,
        committer: &mut Committer,
        held: &[Held<'_>],
        fresh: &[Fresh],
        ready: Result<()>,
        deadline: Deadline,
    ) -> Result<()> {
        let heap = &*self.0.heap;
        let mut mapped = Mapping { heap, done: Vec::new(), withheld: Vec::new() };
        let budget = deadline.remaining();
        // The confirmation needs its share, or a slow peer would look like a lost one.
        let exchange_by = Deadline::after(budget.mul_f64(0.8));
        let outcome = self
            .hand_over(committer, held, fresh, ready, &mut mapped, exchange_by)
            .and_then(|()| self.driver().at_step(Step::CommitConfirm));
        let status = outcome.as_ref().copied().map_err(|error| error.kind().clone());
        let confirm = || -> Result<()> {
            let deadline = Deadline::after(deadline.remaining().max(GRACE));
            let gathered =
                self.0.group.all_gather("mapped", &encode(&Mapped(status))?, deadline)?;
            let statuses: Vec<Mapped> = gathered
                .parts()
                .zip(0..)
                .map(|(part, rank)| decode(rank, part))
                .collect::<Result<_>>()?;
            let failures: Vec<_> = (0..)
                .zip(statuses)
                .filter_map(|(rank, Mapped(status))| Some((rank, status.err()?)))
                .collect();
            agreed("mapping peers' memory", &failures).map_or(Ok(()), Err)
        };
        match (confirm(), outcome) {
            (Ok(()), Ok(())) if mapped.withheld.is_empty() => {
                mapped.keep(fresh);
                Ok(())
            }
            (Ok(()), Ok(())) => Err(Error::mismatch(format!(
                "rank{} {} shared nothing and gave no reason",
                if mapped.withheld.len() == 1 { "" } else { "s" },
                list(&mapped.withheld)
            ))),
            // A rank that saw who went missing knows more than one that only waited.
            (Err(later), Err(own)) if later.is_timeout() && !own.is_timeout() => Err(own),
            (Err(error), _) | (Ok(()), Err(error)) => Err(error),
        }
    }

    /// A rank that fails here, or failed before (`ready`), goes through the same exchanges with
    /// nothing to give: nobody waits for it in vain, and the confirmation tells why.
    fn hand_over(
        &self,
        committer: &mut Committer,
        held: &[Held<'_>],
        fresh: &[Fresh],
        ready: Result<()>,
        mapped: &mut Mapping<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        let transport = committer.peers.transport();
        let exported = ready.and_then(|()| self.export(transport, held, fresh));
        match transport {
            Transport::Derived => {
                exported?;
                self.driver().at_step(Step::CommitReceive)?;
                self.driver().at_step(Step::CommitMap)?;
                for peer in mapped.heap.peers() {
                    for fresh in fresh {
                        mapped.map(peer, fresh, Exported::Derived)?;
                    }
                }
                Ok(())
            }
            Transport::UnixSocket => {
                let Some(mesh) = committer.peers.mesh_mut() else { return exported.map(drop) };
                let descriptors: Vec<_> = exported
                    .iter()
                    .flatten()
                    .filter_map(|handle| match handle {
                        Exported::Fd(fd) => Some(fd.as_fd()),
                        Exported::Bytes(_) | Exported::Derived => None,
                    })
                    .collect();
                // An unusable handle must not break the exchange with the other peers.
                let mut failed = exported.as_ref().err().cloned();
                let mut first = true;
                let mut take = |peer: u32, index: usize, fd| {
                    if failed.is_none() {
                        failed = receive(mapped, &mut first, peer, &fresh[index], fd).err();
                    }
                    Ok(())
                };
                committer.exchanges += 1;
                let round = committer.exchanges;
                let exchanged =
                    mesh.exchange(round, &descriptors, fresh.len(), &mut take, deadline);
                // What failed here explains what failed after it.
                failed.map_or(Ok(()), Err)?;
                mapped.withheld = exchanged?;
                Ok(())
            }
            Transport::Store => {
                let handles = exported.and_then(|exported| {
                    let handles = exported.into_iter().map(|handle| match handle {
                        Exported::Bytes(bytes) => bytes,
                        Exported::Fd(_) | Exported::Derived => Vec::new(),
                    });
                    encode(&Handles(Ok(handles.collect())))
                });
                let own = match &handles {
                    Ok(frame) => frame.clone(),
                    Err(error) => encode(&Handles(Err(error.kind().clone())))?,
                };
                let gathered = self.0.group.all_gather("handles", &own, deadline)?;
                handles?;
                self.driver().at_step(Step::CommitReceive)?;
                self.driver().at_step(Step::CommitMap)?;
                for peer in mapped.heap.peers() {
                    let Handles(handles) = decode(peer, gathered.part(peer))?;
                    let Ok(handles) = handles else {
                        mapped.withheld.push(peer);
                        continue;
                    };
                    if handles.len() != fresh.len() {
                        return Err(Error::mismatch(format!(
                            "rank {peer} shared {} segments, this rank {}",
                            handles.len(),
                            fresh.len()
                        )));
                    }
                    for (fresh, handle) in fresh.iter().zip(handles) {
                        mapped.map(peer, fresh, Exported::Bytes(handle))?;
                    }
                }
                Ok(())
            }
        }
    }

    /// Makes the handles that peers import, where handles travel at all.
    fn export(
        &self,
        transport: Transport,
        held: &[Held<'_>],
        fresh: &[Fresh],
    ) -> Result<Vec<Exported>> {
        self.driver().at_step(Step::CommitExport)?;
        let mut exported = Vec::new();
        if transport != Transport::Derived && self.world() > 1 {
            for fresh in fresh {
                let counter = fresh.segment.counter;
                let physical =
                    held[fresh.lane].inner.memory.physical(counter).ok_or_else(|| {
                        Error::invalid_state(format!("segment {counter} has no memory to share"))
                    })?;
                exported.push(self.driver().export(physical)?);
            }
        }
        self.driver().at_step(Step::CommitSend)?;
        Ok(exported)
    }

    /// Step 5. Local, and after all ranks confirmed.
    fn finish(
        &self,
        held: &mut [Held<'_>],
        fresh: &[Fresh],
        freed: &[Vec<u64>],
    ) -> Result<CommitReport> {
        let mut report = CommitReport { windows_added: fresh.len() as u64, ..Default::default() };
        if held.iter().any(|held| held.inner.state.has_retired()) {
            // Kernels that were given this memory may still run.
            self.driver().synchronize()?;
        }
        for (held, freed) in held.iter_mut().zip(freed) {
            let LaneInner { state, memory } = &mut *held.inner;
            for segment in state.take_retired() {
                self.0.heap.unmap_peers(held.lane.base + segment.offset)?;
                report.windows_removed += u64::from(segment.counter < memory.shared_below);
                memory.drop_segment(&segment)?;
            }
            memory.shared_below = state.next_segment();
            state.reclaim(freed, memory)?;
            state.mark_agreed();
            report.blocks_returned += freed.len() as u64;
        }
        self.0.due.settle(false);
        if report.windows_added + report.windows_removed > 0 {
            self.publish_windows(held);
        }
        Ok(report)
    }

    /// Makes the list of windows from the segments in use.
    pub(super) fn publish_windows(&self, held: &[Held<'_>]) {
        let windows = held.iter().flat_map(|held| {
            let shared = held.inner.memory.shared_below;
            let segments = held.inner.state.segments().iter();
            segments.filter(move |segment| segment.counter < shared).map(|segment| Window {
                lane: held.lane.name.clone(),
                counter: segment.counter,
                offset: held.lane.base + segment.offset,
                bytes: segment.bytes,
            })
        });
        let windows = Windows::new(self.layout(), windows.collect());
        *lock(&self.0.windows) = std::sync::Arc::new(windows);
    }
}

/// The segments that no commit has shared, lane by lane, in counter order.
fn fresh_segments(held: &[Held<'_>]) -> Vec<Fresh> {
    let mut all = Vec::new();
    for (lane, held) in held.iter().enumerate() {
        let shared = held.inner.memory.shared_below;
        let new = held.inner.state.segments().iter().filter(|new| new.counter >= shared);
        let from = all.len();
        all.extend(new.map(|&segment| Fresh {
            lane,
            segment,
            offset: held.lane.base + segment.offset,
        }));
        all[from..].sort_by_key(|fresh: &Fresh| fresh.segment.counter);
    }
    all
}

fn receive(
    mapped: &mut Mapping<'_>,
    first: &mut bool,
    peer: u32,
    fresh: &Fresh,
    fd: std::os::fd::OwnedFd,
) -> Result<()> {
    let driver = mapped.heap.driver();
    if std::mem::take(first) {
        driver.at_step(Step::CommitReceive)?;
        driver.at_step(Step::CommitMap)?;
    }
    mapped.map(peer, fresh, Exported::Fd(fd))
}

/// The right to commit, and what commits need.
pub(super) struct Turn<'a> {
    committer: MutexGuard<'a, Committer>,
    committing: &'a AtomicBool,
}

impl Deref for Turn<'_> {
    type Target = Committer;

    fn deref(&self) -> &Committer {
        &self.committer
    }
}

impl DerefMut for Turn<'_> {
    fn deref_mut(&mut self) -> &mut Committer {
        &mut self.committer
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.committing.store(false, Ordering::Release);
    }
}

/// Mappings of peers' segments that are undone unless they are kept.
struct Mapping<'a> {
    heap: &'a Heap,
    /// Rank, offset in the slot, length.
    done: Vec<(u32, u64, u64)>,
    /// Peers that failed and shared nothing.
    withheld: Vec<u32>,
}

impl Mapping<'_> {
    fn map(&mut self, peer: u32, fresh: &Fresh, handle: Exported) -> Result<()> {
        let bytes = fresh.segment.bytes;
        let doing = |error: Error| {
            error.context(format!("mapping segment {} of rank {peer}", fresh.segment.counter))
        };
        let driver = self.heap.driver();
        let physical: Physical = driver.import(handle, bytes).map_err(doing)?;
        let mapped = self.heap.map(peer, fresh.offset, &physical);
        if mapped.is_ok() {
            self.done.push((peer, fresh.offset, bytes));
        }
        // The mapping keeps the memory; the handle has done its work.
        driver.release(physical).and(mapped).map_err(doing)
    }

    fn keep(mut self, fresh: &[Fresh]) {
        self.done.clear();
        for fresh in fresh {
            self.heap.note_peers_mapped(fresh.offset, fresh.segment.bytes);
        }
    }
}

impl Drop for Mapping<'_> {
    fn drop(&mut self) {
        for (peer, offset, bytes) in self.done.drain(..).rev() {
            if let Err(error) = self.heap.unmap(peer, offset, bytes) {
                tracing::error!(%error, peer, offset, "undoing a commit that failed");
            }
        }
    }
}
