//! Reduce-scatter: rank `r` ends with the reduction of everyone's `r`-th part.

#![allow(unsafe_code)] // hands raw buffers to the kernels

use symmpool_allocator::Result;

use super::all_reduce::Pieces;
use crate::host::call::{Call, Operation};
use crate::host::kernels::{ReduceFn, copy};
use crate::host::{Data, HostEngine, InPlace, Place};
use crate::{DType, ReduceOp};

/// Up to here windows go through scratch too, in one phase instead of two; bytes of all parts. Only
/// as far as scratch has room for every part in one piece.
const SCRATCH_BYTES: usize = 32 << 10;

impl HostEngine {
    /// Reduces part `r` of every rank's `input`, `count` elements of `world * count`, into rank
    /// `r`'s `output` of `count` elements. In place if the output is this rank's part of the
    /// input; otherwise they must not overlap.
    ///
    /// # Errors
    ///
    /// As [`Self::all_reduce`].
    ///
    /// # Safety
    ///
    /// `input` is readable for `world * count` elements of `dtype` and `output` writable for
    /// `count`, and nobody else touches either, in any rank's slot if it is a window, until the
    /// call returns on every rank.
    pub unsafe fn reduce_scatter(
        &mut self,
        input: Place,
        output: Place,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        self.ready()?;
        let reduce = self.reduction("reduce_scatter", dtype, op)?;
        let size = dtype.size();
        let (part, all, own) = self.part_of_all(count, dtype);
        let data = self.resolve((input, all), (output, part), InPlace::OutputAt(own));
        let data = self.or_decline(data)?;
        let call = Call::new(Operation::ReduceScatter)
            .elements(dtype, count)
            .reduce(op)
            .input(input)
            .in_place(data.in_place);
        if count == 0 {
            return self.enter(&call);
        }
        match input {
            Place::Window(offset) if !fits_scratch(count * size, self) => {
                self.enter(&call)?;
                let at = offset + own as u64;
                let mut sources = std::mem::take(&mut self.sources);
                sources.clear();
                sources.extend((0..self.world()).map(|rank| self.window(rank, at).cast_const()));
                // SAFETY: all ranks have entered with this offset and leave their inputs alone
                // until this rank's step; this part of them only this rank reads. The output is
                // this rank's part of its own input, or apart from it.
                unsafe { reduce(&sources, &[data.to], count) };
                self.sources = sources;
                self.step()
            }
            // SAFETY: the caller's promises about input and output, which `data` resolves.
            _ => unsafe { staged(self, &call, &data, count, size, reduce) },
        }
    }
}

/// Scratch for one rank's part, lines whole; bytes.
fn room(engine: &HostEngine) -> usize {
    (engine.scratch_bytes() / engine.world() as usize) & !15
}

/// Whether windows with parts of `part` bytes go through scratch.
fn fits_scratch(part: usize, engine: &HostEngine) -> bool {
    let room = room(engine);
    room > 0 && part <= room.min(SCRATCH_BYTES / engine.world() as usize)
}

/// Through scratch: of every part a piece at a time.
///
/// # Safety
///
/// As [`HostEngine::reduce_scatter`], for the resolved buffers.
unsafe fn staged(
    engine: &mut HostEngine,
    call: &Call,
    data: &Data,
    count: usize,
    size: usize,
    reduce: ReduceFn,
) -> Result<()> {
    let (me, world) = (engine.rank(), engine.world());
    // Halves of it alternate. At least one element of the largest type fits, whatever the options.
    let room = room(engine);
    if room == 0 {
        return Err(engine.decline(symmpool_allocator::Error::invalid_argument(format!(
            "{} bytes of scratch are too few for a reduce_scatter of {world} ranks; raise \
             scratch_bytes to {} or more",
            engine.scratch_bytes(),
            (16 * world).next_multiple_of(256)
        ))));
    }
    let pieces = Pieces::new(count, size, room);
    let fill = |scratch: *mut u8, index: usize| {
        let range = pieces.range(index);
        for part in (0..world as usize).filter(|part| *part != me as usize) {
            let from = data.from.wrapping_add((part * count + range.start) * size);
            let to = scratch.wrapping_add(part * room + pieces.offset(index));
            // SAFETY: a piece of a part of the input, readable by contract, into that part's room
            // in own scratch, which is free: see the callers.
            unsafe { copy(from, to, range.len() * size) };
        }
    };
    // Free: see `next_scratch`.
    fill(engine.next_scratch(), 0);
    engine.enter(call)?;
    for index in 0..pieces.len() {
        let range = pieces.range(index);
        if index > 0 {
            // Free: the half held the piece before the last, and every peer has signalled the last.
            fill(engine.scratch(me), index);
            engine.step()?;
        }
        let offset = me as usize * room + pieces.offset(index);
        let own = data.from.wrapping_add((me as usize * count + range.start) * size);
        let mut sources = std::mem::take(&mut engine.sources);
        sources.clear();
        sources.extend((0..world).map(|rank| match rank {
            rank if rank == me => own,
            peer => engine.scratch(peer).wrapping_add(offset).cast_const(),
        }));
        // SAFETY: each peer wrote its piece before it signalled and leaves it alone until this
        // rank's next signal; the output is the own source exactly, or apart from it.
        unsafe { reduce(&sources, &[data.to.wrapping_add(range.start * size)], range.len()) };
        engine.sources = sources;
    }
    Ok(())
}
