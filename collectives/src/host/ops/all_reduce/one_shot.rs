//! One-shot all-reduce: every rank copies its input to scratch, signals, waits for all peers, and reduces
//! everything. What does not fit into scratch goes through it in pieces, one step each.

use symmpool_allocator::Result;

use super::{Pieces, ResolvedCall};
use crate::host::HostEngine;
use crate::host::kernels::copy;

/// Runs a one-shot all-reduce.
///
/// # Safety
///
/// You must keep the promises of [`HostEngine::all_reduce`], for the resolved buffers of `work`.
pub(super) unsafe fn run(engine: &mut HostEngine, work: &ResolvedCall) -> Result<()> {
    let (from, to, size) = (work.data.from, work.data.to, work.size);
    let pieces = Pieces::new(work.count, size, engine.scratch_bytes());
    let me = engine.rank();
    if engine.world() > 1 {
        // SAFETY: the first piece of the input is readable by contract; scratch holds a piece and is free
        // (see `next_scratch`).
        unsafe { copy(from, engine.next_scratch(), pieces.range(0).len() * size) };
    }
    engine.handshake(&work.call)?;
    for index in 0..pieces.len() {
        let range = pieces.range(index);
        let (at, offset) = (range.start * size, pieces.offset(index));
        if index > 0 && engine.world() > 1 {
            let scratch = engine.scratch(me).wrapping_add(offset);
            // SAFETY: this piece of the input is copied to the half of scratch that held the piece before the
            // last one. Every peer has signalled the last piece, so it has finished reading that.
            unsafe { copy(from.wrapping_add(at), scratch, range.len() * size) };
            engine.step()?;
        }
        let mut sources = std::mem::take(&mut engine.sources);
        sources.clear();
        // This rank's own data is read from the input: the same bits, and more likely to be in its cache.
        sources.extend((0..engine.world()).map(|rank| match rank {
            rank if rank == me => from.wrapping_add(at),
            peer => engine.scratch(peer).wrapping_add(offset).cast_const(),
        }));
        // SAFETY: every source holds this piece, which its rank wrote before it signalled and
        // leaves alone until this rank has signalled again (S3, S4); the output is writable by
        // contract, and is exactly this rank's own source or does not overlap it (`resolve`).
        unsafe {
            (work.reduce)(&sources, &[to.wrapping_add(at)], range.len(), sources.len());
        }
        engine.sources = sources;
    }
    Ok(())
}
