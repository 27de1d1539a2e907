//! Broadcast in host memory: every rank ends with the root's data.

#![allow(unsafe_code)] // hands raw buffers to the kernels

use symmpool_allocator::{Error, Result};

use super::pieces::Pieces;
use crate::DType;
use crate::algorithm::{AUTO, CallShape, DIRECT, STAGED, StandardCollective};
use crate::call::{Call, Operation};
use crate::host::host_algorithm::{HostAlgorithm, Work, always, with_input_window};
use crate::host::kernels::copy;
use crate::host::{Data, HostEngine};
use crate::types::place::Place;

/// The algorithms: through the root's scratch, and straight from its window.
pub(crate) static ALGORITHMS: [HostAlgorithm<Work>; 2] = [
    HostAlgorithm { code: STAGED, fits: always, run: staged },
    HostAlgorithm { code: DIRECT, fits: with_input_window, run: pull },
];

/// Windows of up to this many bytes go through scratch too, in one phase instead of two, as far as scratch holds
/// them in one piece.
const SCRATCH_BYTES: usize = 32 << 10;

impl HostEngine {
    /// Copies `count` elements of the root's `buffer` into every other rank's.
    ///
    /// # Errors
    ///
    /// As [`Self::all_reduce`], and `is_invalid_argument` for a root that is not below the number of ranks.
    ///
    /// # Safety
    ///
    /// `buffer` is readable and writable for `count` elements of `dtype`, and nobody else accesses it, in any
    /// rank's slot if it is a window, until the call returns on every rank.
    pub unsafe fn broadcast(
        &mut self,
        buffer: Place,
        count: usize,
        dtype: DType,
        root: u32,
    ) -> Result<()> {
        // SAFETY: the caller's promises.
        unsafe { self.broadcast_by(buffer, count, dtype, root, AUTO) }
    }

    /// The same with the algorithm of this number.
    ///
    /// # Safety
    ///
    /// As [`Self::broadcast`].
    pub(crate) unsafe fn broadcast_by(
        &mut self,
        buffer: Place,
        count: usize,
        dtype: DType,
        root: u32,
        algorithm: u8,
    ) -> Result<()> {
        self.ready()?;
        let size = dtype.size();
        let address = match self.resolve_one(buffer, count.checked_mul(size)) {
            Ok(_) if root >= self.world() => Err(Error::invalid_argument(format!(
                "root {root} of a group of {} ranks",
                self.world()
            ))),
            other => other,
        };
        let address = self.or_decline(address)?;
        let call = Call::new(Operation::Broadcast)
            .elements(dtype, count)
            .root(root)
            .algorithm(algorithm)
            .input(buffer)
            .in_place(true);
        let direct = buffer.is_window() && count * size > SCRATCH_BYTES.min(self.scratch_bytes());
        let code = match algorithm {
            AUTO if direct => DIRECT,
            AUTO => STAGED,
            requested => requested,
        };
        let data =
            Data { input: buffer, output: buffer, from: address, to: address, in_place: true };
        let (bytes, broadcast) = (count * size, StandardCollective::Broadcast);
        let shape = CallShape::of_host(self, broadcast, bytes, dtype, &data);
        let entry = self.entry(&ALGORITHMS, code, &shape);
        let entry = self.or_decline(entry)?;
        if self.rehearses(broadcast, code) {
            return Ok(());
        }
        if count == 0 {
            return self.handshake(&call);
        }
        let work = Work { call, data, count, size, root, reduce: None };
        // SAFETY: the caller's promises about the buffer, which `data` resolves.
        unsafe { (entry.run)(self, &work) }
    }
}

/// Every other rank copies the root's window.
///
/// # Safety
///
/// As [`HostEngine::broadcast`], for the resolved buffer, which is a window.
unsafe fn pull(engine: &mut HostEngine, work: &Work) -> Result<()> {
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
/// As [`HostEngine::broadcast`], for the resolved buffer.
unsafe fn staged(engine: &mut HostEngine, work: &Work) -> Result<()> {
    let Work { call, data, count, size, root, .. } = work;
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
