//! Two-shot: every rank reduces its share of the elements and hands the result to all.

use symmpool_allocator::Result;

use super::{Pieces, Work, share};
use crate::host::HostEngine;
use crate::host::kernels::{copy, copy_streaming};

/// From here on an output leaves the caches anyway; bytes of the whole reduction.
const STREAMING_BYTES: usize = 16 << 20;
/// What is reduced before it is streamed out; bytes.
const TILE: usize = 4096;

/// Between windows: each rank reads its share from every rank's input and writes it to every
/// rank's output. No copies besides; one entry, one step.
///
/// # Safety
///
/// As [`HostEngine::all_reduce`]; `from` and `to` are the window offsets of input and output.
pub(super) unsafe fn direct(
    engine: &mut HostEngine,
    work: &Work,
    from: u64,
    to: u64,
) -> Result<()> {
    engine.enter(&work.call)?;
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
        // SAFETY: all ranks have entered with these very offsets, so their windows are theirs no
        // more until they have seen this rank's step. No other rank touches this share: of the
        // inputs each reads its own, of the outputs each writes its own. Offsets are equal on all
        // ranks and input and output are one range or apart, so outputs meet sources exactly or
        // not at all; they are apart when streaming.
        unsafe { reduce(work, &mut sources, &mut outputs, mine.len(), streaming) };
        engine.sources = sources;
        engine.outputs = outputs;
    }
    // Every rank is done with this rank's windows when all have come here.
    engine.step()
}

/// Reduces `count` elements; when streaming, by way of a tile that stays in the nearest cache, so
/// that outputs can be written past the caches, without being read first.
///
/// # Safety
///
/// As [`crate::host::kernels::ReduceFn`]; when streaming, no output is a source.
unsafe fn reduce(
    work: &Work,
    sources: &mut [*const u8],
    outputs: &mut [*mut u8],
    count: usize,
    streaming: bool,
) {
    if !streaming {
        // SAFETY: the caller's promises.
        unsafe { (work.reduce)(sources, outputs, count) };
        return;
    }
    let mut tile = [0u64; TILE / 8];
    let local = tile.as_mut_ptr().cast::<u8>();
    let each = TILE / work.size;
    let mut left = count;
    while left > 0 {
        let (now, bytes) = (left.min(each), left.min(each) * work.size);
        // SAFETY: the next elements of every source; the tile is local and holds them.
        unsafe { (work.reduce)(sources, &[local], now) };
        for output in outputs.iter_mut() {
            // SAFETY: the same elements of this output, writable, apart from the local tile.
            unsafe { copy_streaming(local, *output, bytes) };
            *output = output.wrapping_add(bytes);
        }
        for source in sources.iter_mut() {
            *source = source.wrapping_add(bytes);
        }
        left -= now;
    }
}

/// Through scratch, in pieces: copy in, step, reduce the own share onto its place in own scratch,
/// step, collect the other shares.
///
/// # Safety
///
/// As [`HostEngine::all_reduce`], for the resolved buffers of `work`.
pub(super) unsafe fn staged(engine: &mut HostEngine, work: &Work) -> Result<()> {
    let (from, to, size) = (work.data.from, work.data.to, work.size);
    let pieces = Pieces::new(work.count, size, engine.scratch_bytes());
    let (me, world) = (engine.rank(), engine.world());
    // SAFETY: the first piece of the input, readable by contract, into scratch that holds a piece
    // and is free (see `next_scratch`).
    unsafe { copy(from, engine.next_scratch(), pieces.range(0).len() * size) };
    engine.enter(&work.call)?;
    for index in 0..pieces.len() {
        let range = pieces.range(index);
        let (at, offset) = (range.start * size, pieces.offset(index));
        let own = engine.scratch(me).wrapping_add(offset);
        if index > 0 {
            // SAFETY: this piece of the input, into the half of scratch that held the piece before
            // the last; every peer has signalled the last one's first step since it collected.
            unsafe { copy(from.wrapping_add(at), own, range.len() * size) };
            engine.step()?;
        }
        let mine = share(range.len(), size, me, world);
        let mut sources = std::mem::take(&mut engine.sources);
        sources.clear();
        sources.extend((0..world).map(|rank| {
            engine.scratch(rank).wrapping_add(offset + mine.start * size).cast_const()
        }));
        // SAFETY: every rank has staged this piece and signalled; of it, this share is read by
        // this rank alone. The output is exactly this rank's own source, in its own scratch.
        unsafe { (work.reduce)(&sources, &[own.wrapping_add(mine.start * size)], mine.len()) };
        engine.sources = sources;
        engine.step()?;
        for rank in engine.peers().chain([me]) {
            let theirs = share(range.len(), size, rank, world);
            let result = engine.scratch(rank).wrapping_add(offset + theirs.start * size);
            let target = to.wrapping_add(at + theirs.start * size);
            // SAFETY: `rank` reduced its share there before it signalled, and refills it only
            // after this rank's next signal; the output is writable by contract, and scratch is
            // apart from it.
            unsafe { copy(result, target, theirs.len() * size) };
        }
    }
    Ok(())
}
