//! Checks of what calls are given on a device: element types, lengths, and buffers that must not overlap.
//! A rank that cannot make a call declines it, so that all ranks get an error.

use symmpool_allocator::{Error, Result, Stream};

use crate::DType;
use crate::cuda::engine::CudaEngine;

impl CudaEngine {
    /// Refuses element types that kernels can only move, and not reduce.
    pub(in crate::cuda) fn check_reducible(
        &mut self,
        what: &str,
        dtype: DType,
        stream: Stream,
    ) -> Result<()> {
        if dtype.is_reduced() {
            return Ok(());
        }
        let why = dtype.only_moved(what, self.rank());
        Err(self.decline(why, stream))
    }

    /// Bytes of `count` elements. Declines the call if no memory is that long.
    pub(in crate::cuda) fn byte_count(
        &mut self,
        what: &str,
        count: usize,
        dtype: DType,
        stream: Stream,
    ) -> Result<u64> {
        let bytes = (count as u64).checked_mul(dtype.size() as u64);
        match bytes.filter(|bytes| *bytes <= self.pool_stride()) {
            Some(bytes) => Ok(bytes),
            None => {
                let why = Error::invalid_argument(format!(
                    "{what} of {count} {} on rank {}: no memory is that long",
                    dtype.name(),
                    self.rank()
                ));
                Err(self.decline(why, stream))
            }
        }
    }

    /// Bytes of a part for every rank together. Declines the call if no memory is that long.
    pub(in crate::cuda) fn bytes_of_parts(
        &mut self,
        what: &str,
        part: u64,
        stream: Stream,
    ) -> Result<u64> {
        match part.checked_mul(u64::from(self.world())) {
            Some(whole) if whole <= self.pool_stride() => Ok(whole),
            _ => {
                let why = Error::invalid_argument(format!(
                    "{what} of parts of {part} bytes on rank {}: no memory is that long",
                    self.rank()
                ));
                Err(self.decline(why, stream))
            }
        }
    }

    /// Declines the call if the buffers overlap.
    pub(in crate::cuda) fn check_disjoint(
        &mut self,
        what: &str,
        (a, a_bytes): (u64, u64),
        (b, b_bytes): (u64, u64),
        stream: Stream,
    ) -> Result<()> {
        if a_bytes == 0
            || b_bytes == 0
            || a.saturating_add(a_bytes) <= b
            || b.saturating_add(b_bytes) <= a
        {
            return Ok(());
        }
        let why = Error::invalid_argument(format!(
            "{what} on rank {}: input [{a:#x}, +{a_bytes}) and output [{b:#x}, +{b_bytes}) overlap \
             without being in place",
            self.rank()
        ));
        Err(self.decline(why, stream))
    }
}
