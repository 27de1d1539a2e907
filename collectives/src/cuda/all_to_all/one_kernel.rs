//! All-to-alls by one kernel, straight into outputs, through inboxes, or from one peer to the next.

use super::row::{Exchange, Use};
use crate::algorithm::{LAMPORT, RING};
use crate::cuda::kernel::mode::{AllToAllMode, KernelMode};
use crate::cuda::kernel::spec::{KernelSpec, THREADS};
use crate::jit::kernel_beside;
use crate::jit::sources::{
    ABOVE_4, ANY_COUNTS, BYTES, DEVICE_COUNTS, DIRECT, HOST_COUNTS, INBOXES, KernelSource, NARROW,
    ODD_ABOVE_4, ODD_UP_TO_4, WIDE,
};

/// All-to-all with any counts.
pub(in crate::cuda) const KERNEL: KernelSource<'static> = kernel_beside!(
    "all_to_all" / "all_to_all",
    [("WORLD", &["1", "2", "4"]), WIDE, BYTES, INBOXES, HOST_COUNTS],
    [("WORLD", &["1", "2", "4"]), WIDE, BYTES, DIRECT, ANY_COUNTS],
    [ABOVE_4, NARROW, BYTES, INBOXES, HOST_COUNTS],
    [ABOVE_4, NARROW, BYTES, DIRECT, ANY_COUNTS],
    [ODD_UP_TO_4, WIDE, BYTES, DIRECT, DEVICE_COUNTS],
    [ODD_ABOVE_4, NARROW, BYTES, DIRECT, DEVICE_COUNTS],
);

/// Row of the algorithm that writes into outputs.
pub(in crate::cuda) static DIRECT_ROW: Exchange = Exchange::DIRECTLY;

/// Row of the Lamport protocol.
pub(in crate::cuda) static LAMPORT_ROW: Exchange =
    Exchange { id: LAMPORT, inboxes: Use::Always, ..Exchange::DIRECTLY };

/// Row of the ring.
pub(in crate::cuda) static RING_ROW: Exchange =
    Exchange { id: RING, ring: true, ..Exchange::DIRECTLY };

impl KernelSpec {
    /// An all-to-all. Vectors of more ranks take more registers, so blocks are smaller then.
    pub(in crate::cuda) fn all_to_all(world: u32, mode: AllToAllMode) -> Self {
        let threads = if world <= 4 { THREADS } else { THREADS / 2 };
        Self { mode: KernelMode::AllToAll(mode), ..Self::new(&KERNEL, threads) }
    }
}
