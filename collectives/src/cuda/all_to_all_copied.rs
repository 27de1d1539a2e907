//! All-to-alls of equal parts that copy engines carry: `copy`.
//!
//! An H200's copy engine reaches 388 GB/s on its links, where stores of kernels end at 366, but each
//! copy begins with some microseconds of nothing, and only one is to be under way at a time. So a
//! rank's parts leave one after the other, in an order in which no two ranks copy to one, while a
//! kernel copies its own part. The host has to know where parts go: so counts are equal, and outputs
//! are windows at one offset on all ranks, which the call compares.

#![allow(unsafe_code)] // copies by address, and passes on the caller's promises

use symmpool_allocator::{Result, Stream};

use super::engine::CudaEngine;
use crate::host::call::{Call, Operation};
use crate::{AllToAllAlgorithm, DType, Place};

/// From so many bytes on that leave a rank it takes less time than kernels' stores.
const COPY_BYTES: u64 = 128 << 20;

impl CudaEngine {
    /// Whether equal parts of so many bytes go by copy engines: the same on every rank if outputs are
    /// windows on all or on none.
    pub(super) fn copies_parts(&self, output: Place, part: u64) -> bool {
        let leaves = part.saturating_mul(u64::from(self.world()) - 1);
        let wanted = match self.all_to_all {
            AllToAllAlgorithm::Auto => leaves >= COPY_BYTES,
            AllToAllAlgorithm::Copy => leaves > 0,
            AllToAllAlgorithm::Packet | AllToAllAlgorithm::Direct => false,
        };
        wanted && output.is_window()
    }

    /// Part `r` of `input` to rank `r`, `count` elements each.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::all_to_all_v`].
    pub(super) unsafe fn all_to_all_copied(
        &mut self,
        (input, output): (Place, Place),
        count: usize,
        dtype: DType,
        stream: Stream,
    ) -> Result<()> {
        self.ready()?;
        let rank = self.rank();
        let part = self.bytes("all_to_all", count, dtype, stream)?;
        let whole = self.parts("all_to_all", part, stream)?;
        let call = Call::new(Operation::AllToAll).elements(dtype, count).output(output);
        let call = call.algorithm(AllToAllAlgorithm::Copy as u8);
        let (from, to) = (self.address(input), self.address(output));
        self.apart("all_to_all", (from, whole), (to, whole), stream)?;
        // Peers' streams are past what they did with their outputs when they have entered.
        self.enter_only(call, stream)?;
        let aside = self.aside;
        self.fork(stream, aside)?;
        for peer in self.others() {
            let to = self.at_peer(to + u64::from(rank) * part, peer);
            self.copy_by_engine(to, from + u64::from(peer) * part, part, aside)?;
        }
        let own = u64::from(rank) * part;
        // SAFETY: this rank's own part, of what the caller promised.
        unsafe { self.copy((from + own, to + own), part, (rank, None), stream) }?;
        self.fork(aside, stream)?;
        // What a rank copied to its peers has arrived when they have entered this one.
        self.enter_after_copies(call, stream)
    }
}
