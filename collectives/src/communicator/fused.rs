//! All-reduces with what layers do next: a residual is added, rows are normed and quantised, in one call.

#![allow(unsafe_code)] // passes on blocks as raw memory that the pool keeps mapped

use symmpool_allocator::{Block, Error, Result, Stream};

use super::Communicator;
use super::engine::AnyEngine;
use super::growth::Inbox;
use crate::{Element, NormBuffers, NormShape};

impl Communicator {
    /// Adds up every rank's rows of `input`, adds `residual` to the sums, which go to `residual_out`, and norms each row by
    /// its root mean square: `out = sum / sqrt(mean(sum * sum) + epsilon) * weight`. All ranks get the same bits, with
    /// every algorithm; sums are those of [`Self::all_reduce`]. `out` and `residual_out` may be `input` and `residual`.
    ///
    /// The shape says how many rows there are and of what type; its output is [`Norm`](crate::NormOutput::Norm). On
    /// devices this is one kernel, which is compiled for a type and length of rows when a call first needs it. Blocks need
    /// not be windows.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for shapes that are not possible, blocks that are shorter, and blocks that overlap;
    /// `is_diverged` if ranks pass different shapes; `is_unsupported` for rows that are longer than an inbox; else as all
    /// calls.
    #[expect(clippy::too_many_arguments, reason = "they are what a layer has")]
    pub fn all_reduce_norm<T: Element>(
        &self,
        out: &Block<T>,
        residual_out: &Block<T>,
        input: &Block<T>,
        residual: &Block<T>,
        weight: &Block<T>,
        shape: &NormShape,
        stream: &Stream,
    ) -> Result<()> {
        let rows = shape.tokens.checked_mul(shape.hidden);
        let long = [out, residual_out, input, residual];
        let short = long.iter().any(|block| rows.is_none_or(|rows| block.len() < rows));
        if shape.dtype != T::DTYPE
            || shape.output != crate::NormOutput::Norm
            || short
            || weight.len() < shape.hidden
        {
            let why = Error::invalid_argument(format!(
                "all_reduce_norm on rank {}: {shape:?} with blocks of {:?} and a weight of {} {}: pass blocks of the \
                 shape's type and length, and the output Norm",
                self.rank(),
                long.map(Block::len),
                weight.len(),
                T::DTYPE.name()
            ));
            return Err(self.decline(why, stream));
        }
        let mut blocks = long.into_iter().chain([weight]);
        blocks
            .try_for_each(|block| self.check_own("all_reduce_norm", block))
            .map_err(|why| self.decline(why, stream))?;
        let buffers = NormBuffers {
            input: input.as_ptr().cast::<u8>().cast_const(),
            residual: residual.as_ptr().cast::<u8>().cast_const(),
            weight: weight.as_ptr().cast::<u8>().cast_const(),
            bias: std::ptr::null(),
            output: out.as_ptr().cast(),
            residual_out: residual_out.as_ptr().cast(),
            norm_out: std::ptr::null_mut(),
            scales: std::ptr::null_mut(),
            token_stride: 0,
            group_stride: 0,
        };
        // SAFETY: the blocks are borrowed, so live and mapped, and as long as the shape says. Whoever else touches them
        // does so through raw pointers as well.
        unsafe { self.all_reduce_norm_at(shape, &buffers, stream) }
    }

    /// [`Self::all_reduce_norm`] on addresses, with all outputs that [`NormOutput`](crate::NormOutput) has.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::all_reduce_norm`].
    ///
    /// # Safety
    ///
    /// The buffers are readable or writable for the shape by whoever runs the call (the CPU in host memory, else the
    /// device), from now until `stream` is past the call, and nobody else touches them meanwhile.
    pub unsafe fn all_reduce_norm_at(
        &self,
        shape: &NormShape,
        buffers: &NormBuffers,
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        // Two shots need room for the sums of a row as well.
        let bytes = shape.tokens.max(2).saturating_mul(shape.hidden);
        let bytes = bytes.saturating_mul(shape.dtype.size()) as u64;
        let call = shape.describe(buffers, shape.algorithm);
        self.grow_above(&mut inner, (bytes, Inbox::Lamport), call, stream)?;
        // In host memory peers reach an input that is a window; on devices rows travel through inboxes.
        let is_host = matches!(inner.engine, AnyEngine::Host(_));
        let bytes = shape.tokens.saturating_mul(shape.hidden).saturating_mul(shape.dtype.size());
        let input = match is_host {
            true => self.place_at(&mut inner, buffers.input.cast_mut(), bytes, stream)?,
            false => crate::Place::Unregistered(buffers.input.cast_mut()),
        };
        // SAFETY: the caller promised that the buffers are readable or writable for the shape until `stream` is past
        // the call.
        unsafe { inner.engine.all_reduce_norm(shape, buffers, input, stream) }
    }
}
