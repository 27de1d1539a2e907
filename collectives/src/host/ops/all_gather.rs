//! All-gather in host memory: every rank ends with every rank's input, in rank order.

#![allow(unsafe_code)] // hands raw buffers to the kernels

use symmpool_allocator::Result;

use super::pieces::Pieces;
use crate::algorithm::{DIRECT, SCRATCH};
use crate::call::{Arguments, StandardCall};
use crate::host::HostEngine;
use crate::host::engine::host_algorithm::{
    HostAlgorithm, ResolvedCall, always, with_output_window,
};
use crate::host::kernels::{copy, copy_own, moves_only};
use crate::host::layout::place::InPlace;
use crate::types::place::Place;

/// The algorithms: through scratch, and straight into outputs that are windows.
pub(crate) static ALGORITHMS: [HostAlgorithm; 2] = [
    HostAlgorithm { id: SCRATCH, fits: always, run: by_scratch },
    HostAlgorithm { id: DIRECT, fits: with_output_window, run: push },
];

/// Windows of up to this many bytes for each rank go through scratch too, in one phase instead of two, as far as
/// scratch holds them in one piece.
const SCRATCH_BYTES: usize = 32 << 10;

impl HostEngine {
    /// Copies rank `r`'s input to part `r` of every rank's output. In place if the input is this rank's part of the
    /// output.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::all_gather`].
    pub(crate) unsafe fn run_all_gather(&mut self, standard: &StandardCall) -> Result<()> {
        self.ready()?;
        let Arguments { input, output, count, dtype, .. } = standard.arguments;
        let size = dtype.size();
        let (part, all, own) = self.part_of_all(count, dtype);
        let data = self.resolve((input, part), (output, all), InPlace::InputAt(own));
        let data = self.or_decline(data)?;
        let call = standard.describe().algorithm(standard.algorithm);
        let mut call = call.output(output).in_place(data.in_place);
        if !data.in_place {
            // In place, the input's offset differs from rank to rank, and follows from the output's.
            call = call.input(input);
        }
        let direct = output.is_window() && count * size > SCRATCH_BYTES.min(self.scratch_bytes());
        let work = ResolvedCall { call, data, count, size, root: 0, reduce: moves_only };
        // SAFETY: the caller promised that input and output are there for these lengths on every rank; `data` has
        // their resolved places.
        unsafe { self.run_by(&ALGORITHMS, standard, if direct { DIRECT } else { SCRATCH }, &work) }
    }
}

/// Every rank writes its input to everyone's output.
///
/// # Safety
///
/// You must keep the promises of [`HostEngine::all_gather`], for the resolved buffers, the output being a window.
unsafe fn push(engine: &mut HostEngine, work: &ResolvedCall) -> Result<()> {
    let ResolvedCall { call, data, count, size, .. } = work;
    let bytes = count * size;
    let me = engine.rank();
    engine.handshake(call)?;
    let part = me as usize * bytes;
    let Place::Window(offset) = data.output else { return engine.step() };
    for rank in engine.peers() {
        let to = engine.window(rank, offset + part as u64);
        // SAFETY: the peer has made this call with this offset, and leaves its output alone until this rank's
        // step; only this rank writes this part of it. The input is this rank's own memory.
        unsafe { copy(data.from, to, bytes) };
    }
    if !data.in_place {
        // SAFETY: input and output do not overlap.
        unsafe { copy_own(data.from, data.to.wrapping_add(part), bytes) };
    }
    engine.step()
}

/// Gathers through scratch, in pieces.
///
/// # Safety
///
/// You must keep the promises of [`HostEngine::all_gather`], for the resolved buffers.
unsafe fn by_scratch(engine: &mut HostEngine, work: &ResolvedCall) -> Result<()> {
    let ResolvedCall { call, data, count, size, .. } = work;
    let (count, size) = (*count, *size);
    let me = engine.rank();
    let pieces = Pieces::new(count, size, engine.scratch_bytes());
    // SAFETY: the first piece of the input is readable by contract; scratch holds a piece and is free
    // (see `next_scratch`).
    unsafe { copy(data.from, engine.next_scratch(), pieces.range(0).len() * size) };
    engine.handshake(call)?;
    for index in 0..pieces.len() {
        let range = pieces.range(index);
        let (at, bytes) = (range.start * size, range.len() * size);
        if index > 0 {
            let scratch = engine.scratch(me).wrapping_add(pieces.offset(index));
            // SAFETY: this piece is copied to the half of scratch that held the piece before the last one. Every
            // peer has signalled the last piece since it read that.
            unsafe { copy(data.from.wrapping_add(at), scratch, bytes) };
            engine.step()?;
        }
        for rank in engine.peers() {
            let from = engine.scratch(rank).wrapping_add(pieces.offset(index));
            let to = data.to.wrapping_add(rank as usize * count * size + at);
            // SAFETY: the peer wrote its piece before it signalled and leaves it alone until this rank's next
            // signal; the output is writable by contract, and does not overlap scratch.
            unsafe { copy(from, to, bytes) };
        }
        if !data.in_place {
            let to = data.to.wrapping_add(me as usize * count * size + at);
            // SAFETY: input and output do not overlap.
            unsafe { copy_own(data.from.wrapping_add(at), to, bytes) };
        }
    }
    Ok(())
}
