//! Reduce-scatter in host memory: rank `r` ends with the reduction of all ranks' part `r`.

#![allow(unsafe_code)] // hands raw buffers to the kernels

use symmpool_allocator::{Error, Result};

use super::pieces::Pieces;
use crate::algorithm::{DIRECT, SCRATCH};
use crate::call::{Arguments, StandardCall};
use crate::host::HostEngine;
use crate::host::engine::host_algorithm::{HostAlgorithm, ResolvedCall, always, with_input_window};
use crate::host::kernels::copy;
use crate::host::layout::place::InPlace;
use crate::types::place::Place;

/// The algorithms: through scratch, and by reading inputs that are windows.
pub(crate) static ALGORITHMS: [HostAlgorithm; 2] = [
    HostAlgorithm { id: SCRATCH, fits: always, run: by_scratch },
    HostAlgorithm { id: DIRECT, fits: with_input_window, run: pull },
];

/// Windows of up to this many bytes in all parts go through scratch too, in one phase instead of two, as far as
/// scratch has room for every part in one piece.
const SCRATCH_BYTES: usize = 32 << 10;

impl HostEngine {
    /// Reduces part `r` of every rank's input into rank `r`'s output. In place if the output is this rank's part of the
    /// input.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::reduce_scatter`].
    pub(crate) unsafe fn run_reduce_scatter(&mut self, standard: &StandardCall) -> Result<()> {
        self.ready()?;
        let Arguments { input, output, count, dtype, op, .. } = standard.arguments;
        let reduce = self.reduction("reduce_scatter", dtype, op)?;
        let size = dtype.size();
        let (part, all, own) = self.part_of_all(count, dtype);
        let data = self.resolve((input, all), (output, part), InPlace::OutputAt(own));
        let data = self.or_decline(data)?;
        let call = standard.describe().algorithm(standard.algorithm);
        let call = call.input(input).in_place(data.in_place);
        let direct = input.is_window() && !fits_scratch(count * size, self);
        let work = ResolvedCall { call, data, count, size, root: 0, reduce };
        // SAFETY: the caller promised that input and output are there for these lengths on every rank; `data` has
        // their resolved places.
        unsafe { self.run_by(&ALGORITHMS, standard, if direct { DIRECT } else { SCRATCH }, &work) }
    }
}

/// Every rank reads its part of all inputs.
///
/// # Safety
///
/// You must keep the promises of [`HostEngine::reduce_scatter`], for the resolved buffers, the input being a window.
unsafe fn pull(engine: &mut HostEngine, work: &ResolvedCall) -> Result<()> {
    let ResolvedCall { call, data, count, size, reduce, .. } = work;
    engine.handshake(call)?;
    if let Place::Window(offset) = data.input {
        let at = offset + (engine.rank() as usize * count * size) as u64;
        let mut sources = std::mem::take(&mut engine.sources);
        sources.clear();
        sources.extend((0..engine.world()).map(|rank| engine.window(rank, at).cast_const()));
        // SAFETY: all ranks have made this call with this offset and leave their inputs alone until this rank's
        // step; only this rank reads this part of them. The output is this rank's part of its own input, or does not
        // overlap it.
        unsafe { reduce(&sources, &[data.to], *count, sources.len()) };
        engine.sources = sources;
    }
    engine.step()
}

/// Bytes of scratch that each part has, a multiple of 16.
fn part_room(engine: &HostEngine) -> usize {
    (engine.scratch_bytes() / engine.world() as usize) & !15
}

/// Whether windows with parts of `part` bytes go through scratch.
fn fits_scratch(part: usize, engine: &HostEngine) -> bool {
    let room = part_room(engine);
    room > 0 && part <= room.min(SCRATCH_BYTES / engine.world() as usize)
}

/// Reduces through scratch, one piece of every part at a time.
///
/// # Safety
///
/// You must keep the promises of [`HostEngine::reduce_scatter`], for the resolved buffers.
unsafe fn by_scratch(engine: &mut HostEngine, work: &ResolvedCall) -> Result<()> {
    let ResolvedCall { call, data, count, size, reduce, .. } = work;
    let (count, size) = (*count, *size);
    let (me, world) = (engine.rank(), engine.world());
    // Pieces use the two halves of it alternately. At least one element of the largest type fits into it.
    let room = part_room(engine);
    if room == 0 {
        return Err(engine.decline(Error::invalid_argument(format!(
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
            // SAFETY: a piece of a part of the input, which is readable by contract, is copied to that part's room
            // in this rank's scratch, which is free where this is called.
            unsafe { copy(from, to, range.len() * size) };
        }
    };
    // This scratch is free: see `next_scratch`.
    fill(engine.next_scratch(), 0);
    engine.handshake(call)?;
    for index in 0..pieces.len() {
        let range = pieces.range(index);
        if index > 0 {
            // This half is free: it held the piece before the last one, and every peer has signalled the last one.
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
        // SAFETY: each peer wrote its piece before it signalled and leaves it alone until this rank's next
        // signal; the output is exactly this rank's own source, or does not overlap it.
        unsafe {
            let to = data.to.wrapping_add(range.start * size);
            reduce(&sources, &[to], range.len(), sources.len());
        }
        engine.sources = sources;
    }
    Ok(())
}
