//! Broadcast in host memory: every rank ends with the root's data.

#![allow(unsafe_code)] // hands raw buffers to the kernels

use symmpool_allocator::{Error, Result};

use super::pieces::Pieces;
use crate::DType;
use crate::host::call::{Call, Operation};
use crate::host::kernels::copy;
use crate::host::{HostEngine, Place};

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
            .input(buffer)
            .in_place(true);
        if count == 0 {
            return self.handshake(&call);
        }
        match buffer {
            Place::Window(offset) if count * size > SCRATCH_BYTES.min(self.scratch_bytes()) => {
                self.handshake(&call)?;
                if self.rank() != root {
                    let from = self.window(root, offset);
                    // SAFETY: the root has made this call, and leaves its window alone until this rank's step.
                    // The same offset of different slots does not overlap.
                    unsafe { copy(from, address, count * size) };
                }
                self.step()
            }
            // SAFETY: the caller's promises about the buffer, which `address` resolves.
            _ => unsafe {
                staged(
                    self,
                    &call,
                    address,
                    root,
                    Pieces::new(count, size, self.scratch_bytes()),
                    size,
                )
            },
        }
    }
}

/// Broadcasts through the root's scratch, in pieces.
///
/// # Safety
///
/// As [`HostEngine::broadcast`], for the buffer at `address`.
unsafe fn staged(
    engine: &mut HostEngine,
    call: &Call,
    address: *mut u8,
    root: u32,
    pieces: Pieces,
    size: usize,
) -> Result<()> {
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
