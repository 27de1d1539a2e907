//! Broadcast in stages, which peers pass on.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::Result;

use crate::Place;
use crate::algorithm::PIPELINE;
use crate::cuda::all_to_all::row::{Exchange, Use};
use crate::cuda::kernel::launch_config::LaunchConfig;
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::reduction_call::ReductionCall;
use crate::cuda::kernel::spec::KernelSpec;
use crate::cuda::layout::params::UNKNOWN;
use crate::jit::kernel_beside;
use crate::jit::sources::{KernelSource, NARROW, ODD, WORLD};

/// Threads of a block. Two of these blocks run on an SM, so that one stores while the other waits for its stores to arrive
/// before it raises a flag.
const PIPELINE_THREADS: u32 = 256;
/// Bytes from which on broadcasts go in stages where there are more than two ranks. On four H200s, stages take 78 us for
/// 16 MiB, 219 for 64 and 794 for 256; two steps take 77, 292 and 1,135. Shorter ones go faster in two steps.
const PIPELINE_BYTES: u64 = 16 << 20;
/// Most peer blocks of it, and the least bytes that scratch must have for each of them: two of the shortest stages.
const MAX_PIPELINE_BLOCKS: u64 = 256;
const MIN_PIPELINE_BYTES: u64 = 2 * 16 * PIPELINE_THREADS as u64;

/// Broadcast in stages, which peers pass on.
pub(in crate::cuda) const KERNEL: KernelSource<'static> =
    kernel_beside!("broadcast" / "broadcast_pipeline", [WORLD, NARROW], [ODD, NARROW]);

pub(in crate::cuda) static ROW: Exchange =
    Exchange { id: PIPELINE, pipeline: Use::Always, ..Exchange::DIRECTLY };

/// Whether a broadcast of `bytes` bytes goes in stages, among `world` ranks.
pub(in crate::cuda) fn serves(by: &Exchange, bytes: u64, world: u32) -> bool {
    match by.pipeline {
        Use::Never => false,
        Use::WhereFaster => world > 2 && bytes >= PIPELINE_BYTES,
        Use::Always => world > 1,
    }
}

/// The kernel.
pub(in crate::cuda) fn kernel() -> KernelSpec {
    KernelSpec::new(&KERNEL, PIPELINE_THREADS)
}

/// The root sends a share to every peer, which passes it on while the next stage arrives.
///
/// # Safety
///
/// You must keep the promises of [`ReductionCall`]; its output is at `place`.
pub(in crate::cuda) unsafe fn launch(
    engine: &mut dyn KernelLauncher,
    work: &ReductionCall,
    place: Place,
) -> Result<()> {
    let loaded = engine.kernel(kernel())?;
    let share = work.bytes.div_ceil(16).div_ceil(u64::from(engine.world()) - 1);
    let room = engine.control().scratch_room(engine.world()) / MIN_PIPELINE_BYTES;
    let most = room.clamp(1, MAX_PIPELINE_BLOCKS) as u32;
    let config = LaunchConfig::new(&loaded.alone(), share, PIPELINE_THREADS, most);
    let offset = if let Place::Window(offset) = place { offset } else { UNKNOWN };
    // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
    // The stride is no length for this kernel: it is the window's offset, or `UNKNOWN`.
    unsafe { engine.launch_peer_blocks(loaded, config, &ReductionCall { stride: offset, ..*work }) }
}
