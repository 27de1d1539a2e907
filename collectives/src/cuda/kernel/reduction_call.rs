//! A call of a reduction whose arguments were checked.

use symmpool_allocator::Stream;

use crate::call::CallDescription;
use crate::cuda::layout::params::CallParams;
use crate::{DType, ReduceOp};

/// A call of a reduction, or of a move that runs in a kernel of reductions, with checked arguments. Who launches it must promise that its input is readable and its output
/// writable on the device until the stream has done the call, and that nothing else touches them meanwhile, in any rank's
/// slot if they are windows.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct ReductionCall {
    pub(in crate::cuda) call: CallDescription,
    pub(in crate::cuda) input: u64,
    pub(in crate::cuda) output: u64,
    /// Bytes of the whole data, or of a rank's part.
    pub(in crate::cuda) bytes: u64,
    /// Bytes from part to part.
    pub(in crate::cuda) stride: u64,
    pub(in crate::cuda) dtype: DType,
    pub(in crate::cuda) op: ReduceOp,
    pub(in crate::cuda) root: u32,
    pub(in crate::cuda) stream: Stream,
}

impl ReductionCall {
    pub(in crate::cuda) fn params(&self) -> CallParams {
        CallParams {
            description: *self.call.words(),
            input: self.input,
            output: self.output,
            bytes: self.bytes,
            stride: self.stride,
            root: self.root,
            peer_blocks: 0,
        }
    }

    /// The call as pieces of at most `most` bytes and of about equal length. All but the last are a multiple of
    /// `unit`; so must `most` be.
    pub(in crate::cuda) fn pieces(self, most: u64, unit: u64) -> impl Iterator<Item = Self> {
        let count = self.bytes.div_ceil(most).max(1);
        let each = self.bytes.div_ceil(count).div_ceil(unit).saturating_mul(unit).clamp(1, most);
        (0..count)
            .map(move |nth| nth * each)
            .take_while(move |from| *from < self.bytes)
            .map(move |from| self.piece(from, each.min(self.bytes - from)))
    }

    /// Where a rank's share of the input begins, and its length: its part of a reduce-scatter, or what `RankChunks` in
    /// `symmpool/impl/partition.cuh` computes.
    pub(in crate::cuda) fn share(&self, rank: u32, world: u32) -> (u64, u64) {
        if self.stride > 0 {
            return (u64::from(rank) * self.stride, self.bytes);
        }
        let share = self.bytes.div_ceil(16).div_ceil(u64::from(world)) * 16;
        let from = (u64::from(rank) * share).min(self.bytes);
        (from, share.min(self.bytes - from))
    }

    /// The range `[from, from + bytes)` of both buffers.
    fn piece(&self, from: u64, bytes: u64) -> Self {
        Self { input: self.input + from, output: self.output + from, bytes, ..*self }
    }
}
