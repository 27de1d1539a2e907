//! Fused all-reduces in host memory: an all-reduce, and then each row by itself, on every rank.

#![allow(unsafe_code)] // reads and writes the caller's rows by address

use symmpool_allocator::Result;

use crate::host::HostEngine;
use crate::host::kernels::{RowIn, narrow_row, norm_row, widen_row};
use crate::types::place::Place;
use crate::{AllReduceAlgorithm, FusedAlgorithm, NormBuffers, NormOutput, NormShape, ReduceOp};

impl HostEngine {
    /// Adds up every rank's rows, and a bias and the residual to them, and norms the rows. `input` is where the buffers'
    /// input lies.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::all_reduce`].
    ///
    /// # Safety
    ///
    /// The buffers are readable or writable for the shape, and nobody else accesses them until the call returns on every
    /// rank.
    pub(crate) unsafe fn all_reduce_norm(
        &mut self,
        shape: &NormShape,
        buffers: &NormBuffers,
        input: Place,
    ) -> Result<()> {
        self.ready()?;
        let checked = shape.check(buffers, self.rank());
        self.or_decline(checked)?;
        self.handshake(&shape.describe(buffers, FusedAlgorithm::Auto))?;
        let mut sums = std::mem::take(&mut self.norm_sums);
        sums.clear();
        sums.resize(shape.bytes(), 0);
        let to = Place::Unregistered(sums.as_mut_ptr());
        let (count, dtype) = (shape.tokens * shape.hidden, shape.dtype);
        let (op, auto) = (ReduceOp::Sum, AllReduceAlgorithm::Auto);
        // SAFETY: the caller promised that the input is readable for the shape; the sums are as long, and this
        // engine's own.
        let summed = unsafe { self.all_reduce(input, to, count, dtype, op, auto) };
        if summed.is_ok() {
            // SAFETY: the caller promised that the buffers are readable or writable for the shape.
            unsafe { norm_rows(shape, buffers, &sums) };
        }
        self.norm_sums = sums;
        summed
    }
}

/// # Safety
///
/// The buffers are as [`HostEngine::all_reduce_norm`] says.
unsafe fn norm_rows(shape: &NormShape, buffers: &NormBuffers, sums: &[u8]) {
    let NormShape { tokens, dtype, output, .. } = *shape;
    let row = shape.row_bytes();
    // SAFETY: rows at these addresses are readable by the caller's promise, so here and below. They are copied, as other
    // threads may have references to them.
    let one = |at: *const u8| (!at.is_null() && tokens > 0).then(|| unsafe { read(at, row) });
    let (bias, weight) = (one(buffers.bias), one(buffers.weight));
    let bias = bias.map(|bytes| widen_row(dtype, &bytes));
    let weight = weight.map(|bytes| widen_row(dtype, &bytes)).unwrap_or_default();
    let scale = match output {
        // SAFETY: one scale is readable.
        NormOutput::Fp8Static if tokens > 0 => unsafe { buffers.scales.read_unaligned() },
        _ => 0.0,
    };
    for token in 0..tokens {
        let at = token * row;
        let residual = one(buffers.residual.wrapping_add(match buffers.residual.is_null() {
            true => 0,
            false => at,
        }));
        let residual = residual.map(|bytes| widen_row(dtype, &bytes));
        let sum = widen_row(dtype, &sums[at..at + row]);
        let made = norm_row(
            shape,
            &RowIn {
                sum: &sum,
                bias: bias.as_deref(),
                residual: residual.as_deref(),
                weight: &weight,
                scale,
            },
        );
        // SAFETY: the row of each array is writable by the caller's promise.
        unsafe { write(buffers.residual_out, at, &narrow_row(dtype, &made.sum)) };
        let norm = if output == NormOutput::Norm { buffers.output } else { buffers.norm_out };
        // SAFETY: the caller promised that the row of this array is writable. Without a norm there are no bytes.
        unsafe { write(norm, at, &narrow_row(dtype, &made.norm)) };
        if output.quantizes() {
            // SAFETY: the caller promised that the row of the output is writable.
            unsafe { write(buffers.output, token * shape.hidden, &made.quantized) };
        }
        for (group, scale) in made.scales.iter().enumerate() {
            let at = token * buffers.token_stride + group * buffers.group_stride;
            // SAFETY: the caller promised that scales are writable at these strides.
            unsafe { write(buffers.scales.cast(), 4 * at, &scale.to_ne_bytes()) };
        }
    }
}

/// # Safety
///
/// So many bytes are readable.
unsafe fn read(at: *const u8, bytes: usize) -> Vec<u8> {
    let mut found = vec![0; bytes];
    // SAFETY: readable by contract; the vector is as long, and new.
    unsafe { std::ptr::copy_nonoverlapping(at, found.as_mut_ptr(), bytes) };
    found
}

/// Writes `bytes` behind an address, unless it is null.
///
/// # Safety
///
/// The bytes are writable there.
unsafe fn write(to: *mut u8, offset: usize, bytes: &[u8]) {
    if !to.is_null() {
        // SAFETY: writable by contract; `bytes` is a vector of this function's caller.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.wrapping_add(offset), bytes.len());
        };
    }
}
