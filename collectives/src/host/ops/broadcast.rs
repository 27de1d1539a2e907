//! Broadcast in host memory: every rank ends with the root's data.

#![allow(unsafe_code)] // hands raw buffers to the kernels

use symmpool_allocator::{Error, Result};

use super::pieces::Pieces;
use crate::algorithm::{DIRECT, SCRATCH};
use crate::call::{Arguments, StandardCall};
use crate::host::HostEngine;
use crate::host::engine::host_algorithm::{HostAlgorithm, ResolvedCall, always, with_input_window};
use crate::host::kernels::{copy, moves_only};
use crate::host::layout::place::Data;
use crate::types::place::Place;

/// The algorithms: through the root's scratch, and straight from its window.
pub(crate) static ALGORITHMS: [HostAlgorithm; 2] = [
    HostAlgorithm { id: SCRATCH, fits: always, run: by_scratch },
    HostAlgorithm { id: DIRECT, fits: with_input_window, run: pull },
];

/// Windows of up to this many bytes go through scratch too, in one phase instead of two, as far as scratch holds
/// them in one piece.
const SCRATCH_BYTES: usize = 32 << 10;

impl HostEngine {
    /// Copies the root's output into every other rank's.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::broadcast`].
    pub(crate) unsafe fn run_broadcast(&mut self, standard: &StandardCall) -> Result<()> {
        self.ready()?;
        let Arguments { output: buffer, count, dtype, root, .. } = standard.arguments;
        let size = dtype.size();
        let address = match self.resolve_one(buffer, count.checked_mul(size)) {
            Ok(_) if root >= self.world() => Err(Error::invalid_argument(format!(
                "root {root} of a group of {} ranks",
                self.world()
            ))),
            other => other,
        };
        let address = self.or_decline(address)?;
        let call = standard.describe().algorithm(standard.algorithm).input(buffer).in_place(true);
        let direct = buffer.is_window() && count * size > SCRATCH_BYTES.min(self.scratch_bytes());
        let data =
            Data { input: buffer, output: buffer, from: address, to: address, in_place: true };
        let work = ResolvedCall { call, data, count, size, root, reduce: moves_only };
        // SAFETY: the caller promised that the buffer is there for this length on every rank; `data` has its resolved
        // place.
        unsafe { self.run_by(&ALGORITHMS, standard, if direct { DIRECT } else { SCRATCH }, &work) }
    }
}

/// Every other rank copies the root's window.
///
/// # Safety
///
/// You must keep the promises of [`HostEngine::broadcast`], for the resolved buffer, which is a window.
unsafe fn pull(engine: &mut HostEngine, work: &ResolvedCall) -> Result<()> {
    engine.handshake(&work.call)?;
    if let (Place::Window(offset), true) = (work.data.input, engine.rank() != work.root) {
        let from = engine.window(work.root, offset);
        // SAFETY: the root has made this call, and leaves its window alone until this rank's step. The same offset
        // of different slots does not overlap.
        unsafe { copy(from, work.data.to, work.count * work.size) };
    }
    engine.step()
}

/// Broadcasts through the root's scratch, in pieces.
///
/// # Safety
///
/// You must keep the promises of [`HostEngine::broadcast`], for the resolved buffer.
unsafe fn by_scratch(engine: &mut HostEngine, work: &ResolvedCall) -> Result<()> {
    let ResolvedCall { call, data, count, size, root, .. } = work;
    let (address, size, root) = (data.to, *size, *root);
    let pieces = Pieces::new(*count, size, engine.scratch_bytes());
    let is_root = engine.rank() == root;
    if is_root {
        // SAFETY: the first piece of the buffer is readable by contract; scratch holds a piece and is free
        // (see `next_scratch`).
        unsafe { copy(address, engine.next_scratch(), pieces.range(0).len() * size) };
    }
    engine.handshake(call)?;
    for index in 0..pieces.len() {
        let range = pieces.range(index);
        let local = address.wrapping_add(range.start * size);
        let scratch = engine.scratch(root).wrapping_add(pieces.offset(index));
        if index > 0 {
            if is_root {
                // SAFETY: this piece is copied to the half of scratch that held the piece before the last one.
                // Every peer has signalled the last piece since it read that.
                unsafe { copy(local, scratch, range.len() * size) };
            }
            engine.step()?;
        }
        if !is_root {
            // SAFETY: the root wrote this piece before it signalled, and overwrites it only after this rank's
            // next signal.
            unsafe { copy(scratch, local, range.len() * size) };
        }
    }
    Ok(())
}
