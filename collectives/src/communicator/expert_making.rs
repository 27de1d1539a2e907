//! How all ranks make a buffer for experts together, or none.

#![allow(unsafe_code)] // passes on memory by address

use std::ops::Deref;

use symmpool_allocator::{Block, CONTROL_LANE, Result, Stream};

use super::engine::AnyEngine;
use super::experts::ExpertBuffer;
use super::{Communicator, Inner};
use crate::ExpertShape;
use crate::call::CallDescription;
use crate::call::experts::RegionParts;
use crate::spanning::combine_areas;

/// Alignment of the memory. DLPack consumers may count on 256 bytes.
const ALIGN: u64 = 512;

impl<C: Deref<Target = Communicator>> ExpertBuffer<C> {
    /// A buffer as of [`Self::new`], and its memory, which is not the buffer's own, by a collective call: it waits until every rank
    /// has made it, with the same arguments. It commits the pool before it allocates, so that memory of blocks which all ranks have
    /// dropped is used again, and afterwards. Calls of other threads on the communicator wait meanwhile.
    ///
    /// # Errors
    ///
    /// Those of every call, on every rank: `is_diverged` where ranks make different calls, or buffers of different shapes, which
    /// are named; nothing was allocated then. Those of a rank that has no room, or cannot compile its kernels, on every rank as
    /// well. `is_invalid_argument` for an invalid shape, which other ranks are not told of.
    ///
    /// # Safety
    ///
    /// The block stays allocated while the value and calls of it live. Nobody but its calls writes it.
    pub unsafe fn together(
        comm: C,
        shape: ExpertShape,
        num_sms: Option<u32>,
        any_layout: bool,
        stream: &Stream,
    ) -> Result<(Block<u8>, Self)> {
        let shape = shape.checked(comm.rank(), comm.world())?;
        Self::check_sms(comm.rank(), num_sms)?;
        let call = CallDescription::expert_buffer(&shape, num_sms.unwrap_or(0), any_layout);
        let bytes = comm.expert_region_bytes(&shape);
        let block = {
            let mut inner = comm.begin(stream)?;
            comm.await_call(&mut inner, call, stream)?;
            let ready = inner.engine.load_experts_together(&shape);
            comm.allocate_together(&mut inner, call, ready, bytes, stream)?
        };
        let region = block.address() as *mut u8;
        // SAFETY: the block has as many bytes, and the caller promises the rest.
        let buffer = unsafe { Self::in_region(comm, shape, num_sms, region) }?;
        Ok((block, if any_layout { buffer.with_any_layout() } else { buffer }))
    }
}

impl Communicator {
    /// Bytes of a buffer's symmetric memory on each rank: more where hosts have different numbers of ranks.
    pub(super) fn expert_region_bytes(&self, shape: &ExpertShape) -> usize {
        let hosts = self.pool.hosts();
        let areas = if hosts.count() > 1 { combine_areas(hosts) } else { 0 };
        RegionParts::with_areas(shape, self.world(), areas).bytes as usize
    }

    /// Waits on the host until every rank has come to a call without data.
    fn await_call(&self, inner: &mut Inner, call: CallDescription, stream: &Stream) -> Result<()> {
        match &mut inner.engine {
            AnyEngine::Host(host) => host.handshake_only(&call),
            AnyEngine::Spanning(spanning) => {
                spanning.refuse_experts()?;
                spanning.meet_all(call, stream)
            }
            AnyEngine::Cuda(cuda) => self.await_ranks(cuda, call, stream),
        }
    }

    /// Allocates a block on every rank, as a window, or on none. All ranks have come to `call`.
    fn allocate_together(
        &self,
        inner: &mut Inner,
        call: CallDescription,
        ready: Result<()>,
        bytes: usize,
        stream: &Stream,
    ) -> Result<Block<u8>> {
        let (pool, deadline) = (&self.pool, self.pool.group().deadline());
        let lane = pool.lane(CONTROL_LANE)?;
        // Other communicators of the pool have other memory.
        let control = self.shared.memory().next().map_or(0, |(offset, _)| offset);
        let subject = u64::from(call.digest(control)) << 32 | u64::from(call.digest(!control));
        let made = pool.reclaim_and_commit_together(subject, ready, deadline, || {
            let block = lane.alloc_bytes(bytes, ALIGN, *stream);
            block.inspect_err(|why| lane.note_failure(why))
        });
        match made {
            Ok(made) => {
                inner.windows = pool.windows();
                made
            }
            // The commit found that ranks had differed before, on all of them alike.
            Err(error) if error.is_diverged() && pool.can_commit() => Err(error),
            // An error of this rank alone, or of ranks that cannot communicate any more: this rank cannot tell what
            // the others have.
            Err(error) => Err(inner.engine.decline_and_fail(error, stream)),
        }
    }
}
