//! Steps 3 and 4 of a commit: segments become memory that every rank has mapped.

use std::os::fd::AsFd;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::held::Held;
use super::{Committer, Pool};
use crate::driver::{Exported, Physical, Step, Transport};
use crate::error::list;
use crate::heap::Heap;
use crate::lane::Segment;
use crate::rendezvous::message::{Message, decode, decode_all, encode};
use crate::rendezvous::status::{Status, agreed, encode_status};
use crate::{Deadline, Error, Result};

/// A rank that failed still hears out the others for at least this long, so that all of them
/// agree on the error.
const GRACE: Duration = Duration::from_millis(500);

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
            let status = encode_status(Mapped, status)?;
            let gathered = self.0.group.all_gather("mapped", &status, deadline)?;
            let statuses: Vec<Mapped> = decode_all(&gathered)?;
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
                    Err(error) => encode_status(Handles, Err(error.kind().clone()))?,
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
