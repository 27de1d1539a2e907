//! The all-reduce in two shots by stores, through scratch and into outputs that are windows.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::Result;

use super::constraints::at_once;
use super::row::{AllReduce, AllReduceCall, Cases};
use crate::AllReduceAlgorithm as Name;
use crate::cuda::kernel::launch_config::LaunchConfig;
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::spec::{KernelSpec, THREADS};
use crate::cuda::layout::control::MAX_STAGE_BLOCKS;
use crate::jit::kernel_beside;
use crate::jit::sources::{F32, KernelSource, OTHERS, SOME_DTYPES, SUM, WIDE, WORLDS_OF_2_AND_8};

/// Bytes of a launch of `two_shot_push` from which on a call in several launches loses little. With 128 MiB it is 1.4%: 256 MiB
/// in one launch take 746 us on two H100s, and in two 755 us (`h100x2_tune.json`).
const PUSH_LAUNCH_BYTES: u64 = 128 << 20;
/// Most peer blocks of `two_shot_push`. All get the same length: with 84, 64 MiB on windows take two H200s 197 us alone and 201
/// beside a communicator that rests, with 96 they take 196 and 204 us.
const MAX_PUSH_BLOCKS: u32 = MAX_STAGE_BLOCKS;

/// All-reduce in two shots through scratch and into outputs.
pub(in crate::cuda) const KERNEL: KernelSource<'static> = kernel_beside!(
    "all_reduce" / "two_shot_push",
    [WORLDS_OF_2_AND_8, SOME_DTYPES, SUM, WIDE],
    [OTHERS, F32, SUM, WIDE],
);

pub(super) const ROW: AllReduce = AllReduce {
    name: Name::TwoShotPush,
    one_of: Some(Name::TwoShot),
    fits: |shape, _| shape.output_window,
    pays_off: |shape, control| at_once(shape, control) >= shape.bytes.min(PUSH_LAUNCH_BYTES),
    most_bytes: |_, _| u64::MAX,
    kernel: |_, of, _| KernelSpec::reduces(&KERNEL, of),
    launch,
    cases: Cases { count: 1_800_000, in_pieces: true, ..Cases::USUAL },
};

/// Pushes inputs through scratch and results into outputs that are windows, in as many launches as the scratch's
/// size requires. Each begins when the peer blocks of all ranks are in step.
///
/// # Safety
///
/// You must keep the promises of [`AllReduceCall`].
unsafe fn launch(engine: &mut dyn KernelLauncher, call: &AllReduceCall) -> Result<()> {
    let shares = u64::from(engine.world());
    let loaded = call.kernel(engine)?;
    let most = engine.control().scratch_room(engine.world()) * shares;
    for piece in call.work.pieces(most, 128 * shares) {
        let wanted = piece.bytes.div_ceil(16).div_ceil(shares);
        let config = LaunchConfig::new(&loaded.alone(), wanted, THREADS, MAX_PUSH_BLOCKS)
            .with_leader_place(&loaded.alone(), wanted);
        // SAFETY: the caller promised that the input and output of the call are there until the stream has done it; a piece
        // lies within them.
        unsafe { engine.launch_peer_blocks(loaded, config, &piece) }?;
    }
    Ok(())
}
