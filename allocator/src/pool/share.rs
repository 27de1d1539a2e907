//! Steps 3 and 4 of a commit: segments become memory that every rank has mapped.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::commit_guard::Held;
use super::{Committer, Pool};
use crate::driver::{Exported, Physical, Step, Transport};
use crate::error::list;
use crate::heap::Heap;
use crate::lane::Segment;
use crate::rendezvous::mesh::Mesh;
use crate::rendezvous::message::{Message, decode, decode_all, encode};
use crate::rendezvous::peers::Peers;
use crate::rendezvous::status::{Status, all_ok, encode_status};
use crate::{Deadline, Error, Result};

/// A rank that failed still hears out the others for at least this long, so that all of them
/// agree on the error.
pub(super) const GRACE: Duration = Duration::from_millis(500);

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

/// A segment to be shared.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fresh {
    /// Index among the held lanes.
    lane: usize,
    segment: Segment,
    /// Offset in the slot.
    offset: u64,
}

impl Pool {
    /// Steps 3 and 4: afterwards every peer's fresh segments are mapped on every rank, or none on
    /// any.
    pub(super) fn share(
        &self,
        committer: &mut Committer,
        held: &mut [Held<'_>],
        fresh: &[Fresh],
        ready: Result<()>,
        deadline: Deadline,
    ) -> Result<()> {
        let peers = &mut committer.peers;
        let budget = deadline.remaining();
        // The confirmation needs its share, or a slow peer would look like a lost one.
        let exchange_by = Deadline::after(budget.mul_f64(0.8));
        let exported = ready.and_then(|()| self.export(peers.transport(), held, fresh));
        let (own, ready) = match exported {
            Ok(handles) => (handles, Ok(())),
            Err(error) => (Vec::new(), Err(error)),
        };
        let mut mapping = Mapping { heap: &self.0.heap, done: Vec::new() };
        let outcome = self
            .hand_over(peers, &own, ready, fresh, &mut mapping, exchange_by)
            .and_then(|withheld| self.driver().at_step(Step::CommitConfirm).map(|()| withheld));
        // Where the exchange broke the connections, peers know why, and nothing can be confirmed.
        let confirmed =
            if peers.can_talk() { self.confirm(peers, &outcome, deadline) } else { Ok(()) };
        let shared = match (confirmed, outcome) {
            (Ok(()), Ok(withheld)) if withheld.is_empty() => {
                mapping.keep(fresh);
                Ok(())
            }
            (Ok(()), Ok(withheld)) => Err(Error::mismatch(format!(
                "rank{} {} shared nothing and gave no reason",
                if withheld.len() == 1 { "" } else { "s" },
                list(&withheld)
            ))
            .naming(withheld)),
            // A rank that saw who went missing knows more than one that only waited.
            (Err(later), Err(own)) if later.is_timeout() && !own.is_timeout() => Err(own),
            (Err(error), _) | (Ok(()), Err(error)) => Err(error),
        };
        // Peers have what they were sent, or never will.
        let mut done_with: Vec<_> = own.into_iter().filter_map(Handle::made).collect();
        // A commit that failed leaves the others where they are, to the next.
        if shared.is_ok() {
            done_with.extend(fresh.iter().filter_map(|fresh| {
                held[fresh.lane].inner.memory.take_handle(fresh.segment.counter)
            }));
        }
        self.0.handles.close(done_with);
        shared
    }

    /// Step 4: whether every rank has mapped its peers' segments; fails alike on all if one has not.
    fn confirm<T>(&self, peers: &mut Peers, outcome: &Result<T>, deadline: Deadline) -> Result<()> {
        let deadline = Deadline::after(deadline.remaining().max(GRACE));
        let status = outcome.as_ref().map(drop).map_err(|error| error.kind().clone());
        let status = encode_status(Mapped, status)?;
        let gathered = peers.all_gather(&self.0.group, "mapped", &status, deadline)?;
        let said: Vec<Mapped> = decode_all(&gathered)?;
        all_ok("mapping peers' memory", said.into_iter().map(|Mapped(status)| status)).map(drop)
    }

    /// Gives `own` to every peer and maps what they give. Returns the peers that gave nothing,
    /// because they failed.
    ///
    /// A rank that is not `ready` goes through the same exchanges with nothing to give: nobody waits
    /// for it in vain, and the confirmation tells why.
    fn hand_over(
        &self,
        peers: &mut Peers,
        own: &[Handle<'_>],
        ready: Result<()>,
        fresh: &[Fresh],
        mapping: &mut Mapping<'_>,
        deadline: Deadline,
    ) -> Result<Vec<u32>> {
        match (peers.transport(), peers.mesh_mut()) {
            (Transport::Derived, _) => ready.and_then(|()| self.map_derived(fresh, mapping)),
            (Transport::UnixSocket, Some(mesh)) => {
                self.exchange_descriptors(mesh, own, ready, fresh, mapping, deadline)
            }
            // Does not happen: ranks of this kind are connected, even one alone.
            (Transport::UnixSocket, None) => ready.map(|()| Vec::new()),
            (Transport::Store, _) => self.gather_bytes(own, ready, fresh, mapping, deadline),
        }
    }

    /// Maps what follows from its place: no handle travels.
    fn map_derived(&self, fresh: &[Fresh], mapping: &mut Mapping<'_>) -> Result<Vec<u32>> {
        self.pass_receive_and_map()?;
        for peer in self.0.heap.peers() {
            mapping.map(peer, fresh, fresh.iter().map(|_| Exported::Derived))?;
        }
        Ok(Vec::new())
    }

    /// Sends descriptors over the sockets and maps each packet of them as it comes.
    fn exchange_descriptors(
        &self,
        mesh: &mut Mesh,
        own: &[Handle<'_>],
        mut ready: Result<()>,
        fresh: &[Fresh],
        mapping: &mut Mapping<'_>,
        deadline: Deadline,
    ) -> Result<Vec<u32>> {
        let descriptors: Vec<_> = own.iter().filter_map(Handle::descriptor).collect();
        let mut begun = false;
        let mut receive = |peer: u32, at: usize, fds: Vec<OwnedFd>| {
            if !std::mem::replace(&mut begun, true) {
                self.pass_receive_and_map()?;
            }
            mapping.map(peer, &fresh[at..], fds.into_iter().map(Exported::Fd))
        };
        // An unusable handle must not break the exchange with the other peers.
        let mut on_receive = |peer, at, fds| {
            if ready.is_ok() {
                ready = receive(peer, at, fds);
            }
            Ok(())
        };
        let exchanged = mesh.exchange(&descriptors, fresh.len(), &mut on_receive, deadline);
        // What failed here explains what failed after it.
        ready.and(exchanged)
    }

    /// Gathers the bytes of all ranks' handles and maps what they stand for.
    fn gather_bytes(
        &self,
        own: &[Handle<'_>],
        ready: Result<()>,
        fresh: &[Fresh],
        mapping: &mut Mapping<'_>,
        deadline: Deadline,
    ) -> Result<Vec<u32>> {
        let bytes = || own.iter().map(|handle| handle.bytes().to_vec()).collect();
        let (frame, ready) = match ready.and_then(|()| encode(&Handles(Ok(bytes())))) {
            Ok(frame) => (frame, Ok(())),
            Err(error) => (encode_status(Handles, Err(error.kind().clone()))?, Err(error)),
        };
        let gathered = self.0.group.all_gather("handles", &frame, deadline)?;
        ready?;
        self.pass_receive_and_map()?;
        let mut withheld = Vec::new();
        for peer in self.0.heap.peers() {
            let Handles(Ok(handles)) = decode(peer, gathered.part(peer))? else {
                withheld.push(peer);
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
            mapping.map(peer, fresh, handles.into_iter().map(Exported::Bytes))?;
        }
        Ok(withheld)
    }

    /// Passes the steps between the first handle of a peer and its mapping.
    fn pass_receive_and_map(&self) -> Result<()> {
        self.driver().at_step(Step::CommitReceive)?;
        self.driver().at_step(Step::CommitMap)
    }

    /// The handles that peers import, where handles travel at all. Makes those that are not there.
    fn export<'a>(
        &self,
        transport: Transport,
        held: &'a [Held<'_>],
        fresh: &[Fresh],
    ) -> Result<Vec<Handle<'a>>> {
        self.driver().at_step(Step::CommitExport)?;
        let mut exported = Vec::new();
        if transport != Transport::Derived && self.world() > 1 {
            for fresh in fresh {
                let counter = fresh.segment.counter;
                let memory = &held[fresh.lane].inner.memory;
                if let Some(handle) = memory.handle(counter) {
                    exported.push(Handle::Ahead(handle.as_fd()));
                    continue;
                }
                let physical = memory.physical(counter).ok_or_else(|| {
                    Error::invalid_state(format!("segment {counter} has no memory to share"))
                })?;
                exported.push(Handle::Made(self.driver().export(physical)?));
            }
        }
        self.driver().at_step(Step::CommitSend)?;
        Ok(exported)
    }
}

/// A handle for peers.
enum Handle<'a> {
    /// Made with its segment, which keeps it until a commit has shared it.
    Ahead(BorrowedFd<'a>),
    /// Made in this commit.
    Made(Exported),
}

impl Handle<'_> {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Ahead(fd) => Some(*fd),
            Self::Made(Exported::Fd(fd)) => Some(fd.as_fd()),
            Self::Made(_) => None,
        }
    }

    /// What the store carries of it; nothing where descriptors travel.
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Made(Exported::Bytes(bytes)) => bytes,
            Self::Made(_) | Self::Ahead(_) => &[],
        }
    }

    /// The descriptor that this commit made.
    fn made(self) -> Option<OwnedFd> {
        match self {
            Self::Made(Exported::Fd(fd)) => Some(fd),
            Self::Made(_) | Self::Ahead(_) => None,
        }
    }
}

/// The segments that no commit has shared, lane by lane, in counter order.
pub(super) fn fresh_segments(held: &[Held<'_>]) -> Vec<Fresh> {
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

/// Mappings of peers' segments that are undone unless they are kept.
struct Mapping<'a> {
    heap: &'a Heap,
    /// Rank, offset in the slot, length.
    done: Vec<(u32, u64, u64)>,
}

impl Mapping<'_> {
    /// Maps what `handles` stand for at the places of the first of `fresh`.
    fn map(
        &mut self,
        peer: u32,
        fresh: &[Fresh],
        handles: impl ExactSizeIterator<Item = Exported>,
    ) -> Result<()> {
        let driver = self.heap.driver();
        let fresh = &fresh[..handles.len()];
        let doing = |fresh: &Fresh, error: Error| {
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
            outcome = self.map_runs(peer, fresh, &physicals, doing);
        }
        // The mappings keep the memory; the handles have done their work.
        for (fresh, physical) in fresh.iter().zip(physicals) {
            let released = driver.release(physical).map_err(|error| doing(fresh, error));
            outcome = outcome.and(released);
        }
        outcome
    }

    /// Segments that follow each other are mapped together.
    fn map_runs(
        &mut self,
        peer: u32,
        fresh: &[Fresh],
        physicals: &[Physical],
        doing: impl Fn(&Fresh, Error) -> Error,
    ) -> Result<()> {
        let follows = |a: &Fresh, b: &Fresh| a.offset + a.segment.bytes == b.offset;
        let mut at = 0;
        for run in fresh.chunk_by(follows) {
            let mapped = self.heap.map_all(peer, run[0].offset, &physicals[at..at + run.len()]);
            mapped.map_err(|error| doing(&run[0], error))?;
            self.done.extend(run.iter().map(|fresh| (peer, fresh.offset, fresh.segment.bytes)));
            at += run.len();
        }
        Ok(())
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
