//! Steps 3 and 4 of a commit: new segments are mapped by every rank, or by none.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Pool;
use super::commit_guard::LockedLane;
use super::committer::Committer;
use crate::driver::{Exported, Physical, Step, Transport};
use crate::heap::Heap;
use crate::lane::Segment;
use crate::ranks::list;
use crate::rendezvous::message::{Message, decode, decode_all, encode};
use crate::rendezvous::peers::Peers;
use crate::rendezvous::sockets::PeerSockets;
use crate::rendezvous::status::{RankStatus, all_ok, encode_status};
use crate::sync::mutant;
use crate::{Deadline, Error, Result};

/// A rank that failed still waits for the others for at least this long, so that all of them agree on the
/// error.
pub(super) const GRACE: Duration = Duration::from_millis(500);

/// Whether one rank has mapped its peers' segments, or why not.
#[derive(Debug, Serialize, Deserialize)]
struct Mapped(RankStatus<()>);

impl Message for Mapped {
    const KIND: u16 = 7;
    const NAME: &'static str = "mapping";
}

/// The handles of one rank's segments, in segment order, or why there are none.
#[derive(Debug, Serialize, Deserialize)]
struct HandlesMessage(RankStatus<Vec<Vec<u8>>>);

impl Message for HandlesMessage {
    const KIND: u16 = 8;
    const NAME: &'static str = "handles";
}

/// A segment that is to be shared.
#[derive(Clone, Copy, Debug)]
pub(super) struct SegmentToMap {
    /// Index of its lane among the locked lanes.
    lane: usize,
    segment: Segment,
    /// Offset from the start of a slot.
    offset: u64,
}

impl Pool {
    /// Steps 3 and 4. Afterwards every rank has mapped the fresh segments of all peers, or no rank has mapped
    /// any. `ready` is an error if this rank has failed already.
    pub(super) fn exchange_segments(
        &self,
        committer: &mut Committer,
        locked: &mut [LockedLane<'_>],
        fresh: &[SegmentToMap],
        ready: Result<()>,
        deadline: Deadline,
    ) -> Result<()> {
        let peers = &mut committer.peers;
        let budget = deadline.remaining();
        // Leaves time for the confirmation: without it, a slow peer would look like a lost one.
        let exchange_by = Deadline::after(budget.mul_f64(0.8));
        let exported = ready.and_then(|()| self.export(peers.transport(), locked, fresh));
        let (own, ready) = match exported {
            Ok(handles) => (handles, Ok(())),
            Err(error) => (Vec::new(), Err(error)),
        };
        let mut mapping = PeerMappings { heap: &self.0.heap, done: Vec::new() };
        let outcome = self
            .exchange_handles(peers, &own, ready, fresh, &mut mapping, exchange_by)
            .and_then(|silent| self.driver().at_step(Step::CommitConfirm).map(|()| silent));
        // If the exchange broke the connections, peers know the reason, and nothing can be confirmed.
        let leaves = outcome.is_err() && mutant("mutant_leaves_unconfirmed");
        let confirmed = if peers.can_talk() && !leaves {
            self.confirm(peers, &outcome, deadline)
        } else {
            Ok(())
        };
        let confirmed = if mutant("mutant_unconfirmed") { Ok(()) } else { confirmed };
        let shared = match (confirmed, outcome) {
            (Ok(()), Ok(silent)) if silent.is_empty() => {
                mapping.keep(fresh);
                Ok(())
            }
            (Ok(()), Ok(silent)) => Err(Error::mismatch(format!(
                "rank{} {} shared nothing and gave no reason",
                if silent.len() == 1 { "" } else { "s" },
                list(&silent)
            ))
            .naming(silent)),
            // This rank noticed which peer is gone, which says more than that others timed out.
            (Err(later), Err(own)) if later.is_timeout() && !own.is_timeout() => Err(own),
            (Err(error), _) | (Ok(()), Err(error)) => Err(error),
        };
        // The handles have arrived by now, or never will.
        let mut to_close: Vec<_> = own.into_iter().filter_map(SegmentHandle::made).collect();
        // After a failure, early handles stay for the next commit.
        if shared.is_ok() {
            to_close.extend(fresh.iter().filter_map(|fresh| {
                locked[fresh.lane].inner.memory.take_handle(fresh.segment.counter)
            }));
        }
        self.0.handles.close(to_close);
        shared
    }

    /// Step 4: succeeds if every rank has mapped its peers' segments; else the same error on all ranks.
    fn confirm<T>(&self, peers: &mut Peers, outcome: &Result<T>, deadline: Deadline) -> Result<()> {
        let most = if mutant("mutant_waits_longer") { deadline.budget() * 2 } else { GRACE };
        let deadline = Deadline::after(deadline.remaining().max(most));
        let status = outcome.as_ref().map(drop).map_err(|error| error.kind().clone());
        let status = if mutant("mutant_failure_unreported") { Ok(()) } else { status };
        let status = encode_status(Mapped, status)?;
        let gathered = peers.all_gather(&self.0.group, "mapped", &status, deadline)?;
        let statuses: Vec<Mapped> = decode_all(&gathered)?;
        all_ok("mapping peers' memory", statuses.into_iter().map(|Mapped(status)| status)).map(drop)
    }

    /// Step 3: sends `own` to every peer and maps the segments that peers send. Returns the peers that sent
    /// nothing, because they failed.
    ///
    /// A rank that is not `ready` takes part in the same exchanges with nothing to send, so that nobody waits
    /// for it in vain; the confirmation reports its failure.
    fn exchange_handles(
        &self,
        peers: &mut Peers,
        own: &[SegmentHandle<'_>],
        ready: Result<()>,
        fresh: &[SegmentToMap],
        mapping: &mut PeerMappings<'_>,
        deadline: Deadline,
    ) -> Result<Vec<u32>> {
        match (peers.transport(), peers.sockets_mut()) {
            (Transport::Derived, _) => ready.and_then(|()| self.map_derived(fresh, mapping)),
            (Transport::UnixSocket, Some(sockets)) => {
                self.exchange_descriptors(sockets, own, ready, fresh, mapping, deadline)
            }
            // Does not happen: ranks with this transport are connected, even if there is only one.
            (Transport::UnixSocket, None) => ready.map(|()| Vec::new()),
            (Transport::Store, _) => self.gather_bytes(own, ready, fresh, mapping, deadline),
        }
    }

    /// Maps segments whose handles follow from their place, so that none are exchanged.
    fn map_derived(
        &self,
        fresh: &[SegmentToMap],
        mapping: &mut PeerMappings<'_>,
    ) -> Result<Vec<u32>> {
        self.at_receive_and_map()?;
        for slot in self.0.heap.peers() {
            mapping.map(slot, fresh, fresh.iter().map(|_| Exported::Derived))?;
        }
        Ok(Vec::new())
    }

    /// Sends descriptors over the sockets, and maps each packet of descriptors when it arrives.
    fn exchange_descriptors(
        &self,
        sockets: &mut PeerSockets,
        own: &[SegmentHandle<'_>],
        mut ready: Result<()>,
        fresh: &[SegmentToMap],
        mapping: &mut PeerMappings<'_>,
        deadline: Deadline,
    ) -> Result<Vec<u32>> {
        let descriptors: Vec<_> = own.iter().filter_map(SegmentHandle::descriptor).collect();
        let mut begun = false;
        let mut receive = |peer: u32, at: usize, fds: Vec<OwnedFd>| {
            if !std::mem::replace(&mut begun, true) {
                self.at_receive_and_map()?;
            }
            mapping.map(self.0.heap.slot_of(peer)?, &fresh[at..], fds.into_iter().map(Exported::Fd))
        };
        // A handle that cannot be mapped must not break the exchange with the other peers.
        let mut on_receive = |peer, at, fds| {
            if ready.is_ok() {
                ready = receive(peer, at, fds);
            }
            Ok(())
        };
        let exchanged = sockets.exchange(&descriptors, fresh.len(), &mut on_receive, deadline);
        // The earlier failure explains the later one.
        ready.and(exchanged)
    }

    /// Gathers all ranks' handles as bytes, and maps their segments.
    fn gather_bytes(
        &self,
        own: &[SegmentHandle<'_>],
        ready: Result<()>,
        fresh: &[SegmentToMap],
        mapping: &mut PeerMappings<'_>,
        deadline: Deadline,
    ) -> Result<Vec<u32>> {
        let bytes = || own.iter().map(|handle| handle.bytes().to_vec()).collect();
        let (frame, ready) = match ready.and_then(|()| encode(&HandlesMessage(Ok(bytes())))) {
            Ok(frame) => (frame, Ok(())),
            Err(error) => (encode_status(HandlesMessage, Err(error.kind().clone()))?, Err(error)),
        };
        let gathered = self.0.group.all_gather("handles", &frame, deadline)?;
        ready?;
        self.at_receive_and_map()?;
        let mut silent = Vec::new();
        for slot in self.0.heap.peers() {
            let peer = self.0.heap.ranks()[slot as usize];
            let HandlesMessage(Ok(handles)) = decode(peer, gathered.part(peer))? else {
                silent.push(peer);
                continue;
            };
            if handles.len() != fresh.len() {
                return Err(Error::mismatch(format!(
                    "rank {peer} shared {} segments, this rank {}",
                    handles.len(),
                    fresh.len()
                ))
                .naming([peer]));
            }
            mapping.map(slot, fresh, handles.into_iter().map(Exported::Bytes))?;
        }
        Ok(silent)
    }

    /// Runs the test hooks between receiving a peer's first handle and mapping it.
    fn at_receive_and_map(&self) -> Result<()> {
        self.driver().at_step(Step::CommitReceive)?;
        self.driver().at_step(Step::CommitMap)
    }

    /// The handles that peers import, if handles are exchanged at all. Makes those that were not made early.
    fn export<'a>(
        &self,
        transport: Transport,
        locked: &'a [LockedLane<'_>],
        fresh: &[SegmentToMap],
    ) -> Result<Vec<SegmentHandle<'a>>> {
        self.driver().at_step(Step::CommitExport)?;
        let mut exported = Vec::new();
        if transport != Transport::Derived && self.layout().world > 1 {
            for fresh in fresh {
                let counter = fresh.segment.counter;
                let memory = &locked[fresh.lane].inner.memory;
                if let Some(handle) = memory.handle(counter) {
                    exported.push(SegmentHandle::Early(handle.as_fd()));
                    continue;
                }
                let physical = memory.physical(counter).ok_or_else(|| {
                    Error::invalid_state(format!("segment {counter} has no memory to share"))
                })?;
                exported.push(SegmentHandle::Made(self.driver().export(physical)?));
            }
        }
        self.driver().at_step(Step::CommitSend)?;
        Ok(exported)
    }
}

/// The handle of a segment, for peers.
enum SegmentHandle<'a> {
    /// Made before the commit; the lane keeps it until a commit has shared the segment.
    Early(BorrowedFd<'a>),
    /// Made in this commit.
    Made(Exported),
}

impl SegmentHandle<'_> {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Early(fd) => Some(*fd),
            Self::Made(Exported::Fd(fd)) => Some(fd.as_fd()),
            Self::Made(_) => None,
        }
    }

    /// The bytes to send through the store; empty if descriptors are sent.
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Made(Exported::Bytes(bytes)) => bytes,
            Self::Made(_) | Self::Early(_) => &[],
        }
    }

    /// The descriptor, if this commit made it.
    fn made(self) -> Option<OwnedFd> {
        match self {
            Self::Made(Exported::Fd(fd)) => Some(fd),
            Self::Made(_) | Self::Early(_) => None,
        }
    }
}

/// The segments that no commit has shared, by lane, then counter.
pub(super) fn fresh_segments(locked: &[LockedLane<'_>]) -> Vec<SegmentToMap> {
    let mut all = Vec::new();
    for (lane, locked) in locked.iter().enumerate() {
        let shared = locked.inner.memory.shared_below;
        let new = locked.inner.state.segments().iter().filter(|new| new.counter >= shared);
        let from = all.len();
        all.extend(new.map(|&segment| SegmentToMap {
            lane,
            segment,
            offset: locked.lane.base + segment.offset,
        }));
        all[from..].sort_by_key(|fresh: &SegmentToMap| fresh.segment.counter);
    }
    all
}

/// Mappings of peers' segments. They are undone on drop, unless [`keep`](PeerMappings::keep) is called.
struct PeerMappings<'a> {
    heap: &'a Heap,
    /// Slot, offset in it, length.
    done: Vec<(u32, u64, u64)>,
}

impl PeerMappings<'_> {
    /// Maps the segments behind `handles` into a slot, at the offsets of the first segments of `fresh`.
    fn map(
        &mut self,
        slot: u32,
        fresh: &[SegmentToMap],
        handles: impl ExactSizeIterator<Item = Exported>,
    ) -> Result<()> {
        let driver = self.heap.driver();
        let fresh = &fresh[..handles.len()];
        let peer = self.heap.ranks()[slot as usize];
        let doing = |fresh: &SegmentToMap, error: Error| {
            error.context(format!("mapping segment {} of rank {peer}", fresh.segment.counter))
        };
        let mut physicals = Vec::with_capacity(fresh.len());
        let mut outcome = Ok(());
        for (fresh, handle) in fresh.iter().zip(handles) {
            match driver.import(handle, fresh.segment.bytes) {
                Ok(physical) => physicals.push(physical),
                Err(error) => {
                    outcome = Err(doing(fresh, error));
                    break;
                }
            }
        }
        if outcome.is_ok() {
            outcome = self.map_runs(slot, fresh, &physicals, doing);
        }
        // The mappings keep the memory alive without the handles.
        for (fresh, physical) in fresh.iter().zip(physicals) {
            let released = driver.release(physical).map_err(|error| doing(fresh, error));
            outcome = outcome.and(released);
        }
        outcome
    }

    /// Maps segments, those that follow each other in one call.
    fn map_runs(
        &mut self,
        slot: u32,
        fresh: &[SegmentToMap],
        physicals: &[Physical],
        doing: impl Fn(&SegmentToMap, Error) -> Error,
    ) -> Result<()> {
        let follows = |a: &SegmentToMap, b: &SegmentToMap| a.offset + a.segment.bytes == b.offset;
        let mut at = 0;
        for run in fresh.chunk_by(follows) {
            let mapped = self.heap.map_all(slot, run[0].offset, &physicals[at..at + run.len()]);
            mapped.map_err(|error| doing(&run[0], error))?;
            self.done.extend(run.iter().map(|fresh| (slot, fresh.offset, fresh.segment.bytes)));
            at += run.len();
        }
        Ok(())
    }

    /// Keeps the mappings, because every rank has confirmed.
    fn keep(mut self, fresh: &[SegmentToMap]) {
        self.done.clear();
        for fresh in fresh {
            self.heap.note_peers_mapped(fresh.offset, fresh.segment.bytes);
        }
    }
}

impl Drop for PeerMappings<'_> {
    fn drop(&mut self) {
        if mutant("mutant_not_undone") {
            return;
        }
        for (slot, offset, bytes) in self.done.drain(..).rev() {
            if let Err(error) = self.heap.unmap(slot, offset, bytes) {
                tracing::error!(%error, slot, offset, "a mapping of a failed commit could not be undone");
            }
        }
    }
}
