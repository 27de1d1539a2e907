//! Two-shot all-reduce: every rank reduces its share of the elements, and all ranks collect the results.

use symmpool_allocator::Result;

use super::{Pieces, ResolvedCall, share};
use crate::host::HostEngine;
use crate::host::kernels::{copy, copy_streaming};

/// From this size in bytes on, outputs do not stay in the caches anyway, so they are written past them.
const STREAMING_BYTES: usize = 16 << 20;
/// How many bytes are reduced before they are written past the caches.
const TILE: usize = 4096;

/// Runs it directly between windows, or through scratch.
///
/// # Safety
///
/// You must keep the promises of [`HostEngine::all_reduce`], for the resolved buffers of `work`.
pub(super) unsafe fn run(engine: &mut HostEngine, work: &ResolvedCall) -> Result<()> {
    match work.windows() {
        // SAFETY: the caller promised that the buffers of `work` are there for its lengths; these are their window
        // offsets.
        Some((from, to)) => unsafe { direct(engine, work, from, to) },
        // SAFETY: the caller promised that the buffers of `work` are there for its lengths on every rank.
        None => unsafe { by_scratch(engine, work) },
    }
}

/// Runs the algorithm where input and output are windows: each rank reads its share of every rank's input and
/// writes the result to every rank's output. Nothing else is copied; there is a handshake and one step.
///
/// # Safety
///
/// You must keep the promises of [`HostEngine::all_reduce`]; `from` and `to` are the window offsets of input and
/// output.
unsafe fn direct(engine: &mut HostEngine, work: &ResolvedCall, from: u64, to: u64) -> Result<()> {
    engine.handshake(&work.call)?;
    let mine = share(work.count, work.size, engine.rank(), engine.world());
    let at = (mine.start * work.size) as u64;
    if !mine.is_empty() {
        let mut sources = std::mem::take(&mut engine.sources);
        let mut outputs = std::mem::take(&mut engine.outputs);
        sources.clear();
        outputs.clear();
        let ranks = 0..engine.world();
        sources.extend(ranks.clone().map(|rank| engine.window(rank, from + at).cast_const()));
        outputs.extend(ranks.map(|rank| engine.window(rank, to + at)));
        let streaming = !work.data.in_place && work.bytes() >= STREAMING_BYTES;
        // SAFETY: all ranks have made this call with these offsets, and leave their windows alone until they
        // have seen this rank's step. No other rank accesses this share: each rank reads its own share of the
        // inputs and writes its own share of the outputs. Offsets are equal on all ranks, and input and output
        // are the same range or do not overlap, so each output is exactly a source or overlaps none; they
        // do not overlap when streaming.
        unsafe { reduce(work, &mut sources, &mut outputs, mine.len(), streaming) };
        engine.sources = sources;
        engine.outputs = outputs;
    }
    // When all ranks have reached this step, none accesses this rank's windows any more.
    engine.step()
}

/// Reduces `count` elements. When streaming, it reduces into a tile that stays in the L1 cache, and copies that
/// to the outputs past the caches, so that they need not be read before they are written.
///
/// # Safety
///
/// You must keep the promises of [`crate::host::kernels::ReduceFn`]; when streaming, no output is a source.
unsafe fn reduce(
    work: &ResolvedCall,
    sources: &mut [*const u8],
    outputs: &mut [*mut u8],
    count: usize,
    streaming: bool,
) {
    if !streaming {
        // SAFETY: the caller promised that sources are readable and outputs writable for `count` elements, and
        // overlap as `ReduceFn` allows.
        unsafe { (work.reduce)(sources, outputs, count, sources.len()) };
        return;
    }
    let mut tile = [0u64; TILE / 8];
    let local = tile.as_mut_ptr().cast::<u8>();
    let each = TILE / work.size;
    let mut left = count;
    while left > 0 {
        let (now, bytes) = (left.min(each), left.min(each) * work.size);
        // SAFETY: the next `now` elements of every source are readable; the local tile has room for them.
        unsafe { (work.reduce)(sources, &[local], now, sources.len()) };
        for output in outputs.iter_mut() {
            // SAFETY: the caller promised that this output is writable for `count` elements, of which these are some;
            // it does not overlap the local tile.
            unsafe { copy_streaming(local, *output, bytes) };
            *output = output.wrapping_add(bytes);
        }
        for source in sources.iter_mut() {
            *source = source.wrapping_add(bytes);
        }
        left -= now;
    }
}

/// Runs the algorithm through scratch, in pieces: copies a piece to scratch, makes a step, reduces the own share
/// in place in own scratch, makes another step, and collects the other shares.
///
/// # Safety
///
/// You must keep the promises of [`HostEngine::all_reduce`], for the resolved buffers of `work`.
unsafe fn by_scratch(engine: &mut HostEngine, work: &ResolvedCall) -> Result<()> {
    let (from, to, size) = (work.data.from, work.data.to, work.size);
    let pieces = Pieces::new(work.count, size, engine.scratch_bytes());
    let (me, world) = (engine.rank(), engine.world());
    // SAFETY: the first piece of the input is readable by contract; scratch holds a piece and is free
    // (see `next_scratch`).
    unsafe { copy(from, engine.next_scratch(), pieces.range(0).len() * size) };
    engine.handshake(&work.call)?;
    for index in 0..pieces.len() {
        let range = pieces.range(index);
        let (at, offset) = (range.start * size, pieces.offset(index));
        let own = engine.scratch(me).wrapping_add(offset);
        if index > 0 {
            // SAFETY: this piece of the input is copied to the half of scratch that held the piece before the
            // last one. Every peer has signalled the last piece's first step since it collected that.
            unsafe { copy(from.wrapping_add(at), own, range.len() * size) };
            engine.step()?;
        }
        let mine = share(range.len(), size, me, world);
        let mut sources = std::mem::take(&mut engine.sources);
        sources.clear();
        sources.extend((0..world).map(|rank| {
            engine.scratch(rank).wrapping_add(offset + mine.start * size).cast_const()
        }));
        // SAFETY: every rank has copied this piece to its scratch and signalled; only this rank reads this share
        // of it. The output is exactly this rank's own source, in its own scratch.
        unsafe {
            let own = own.wrapping_add(mine.start * size);
            (work.reduce)(&sources, &[own], mine.len(), sources.len());
        }
        engine.sources = sources;
        engine.step()?;
        for rank in engine.peers().chain([me]) {
            let theirs = share(range.len(), size, rank, world);
            let result = engine.scratch(rank).wrapping_add(offset + theirs.start * size);
            let target = to.wrapping_add(at + theirs.start * size);
            // SAFETY: `rank` reduced its share there before it signalled, and refills it only after this rank's
            // next signal; the output is writable by contract, and does not overlap scratch.
            unsafe { copy(result, target, theirs.len() * size) };
        }
    }
    Ok(())
}
