//! All-reduces in two shots through inboxes: every rank reduces a share and gives the result to the others.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::Result;

use super::constraints::{AllReduceShape, fits_lamport};
use super::row::{AllReduce, AllReduceCall, Cases};
use crate::cuda::kernel::launch_config::LaunchConfig;
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::mode::{KernelMode, TwoShotCollective};
use crate::cuda::kernel::reduction_call::ReductionCall;
use crate::cuda::kernel::spec::{KernelSpec, MANY_BYTES, THREADS};
use crate::cuda::layout::params::ControlLayout;
use crate::jit::kernel_beside;
use crate::jit::sources::{
    ABOVE_4, ALL_REDUCE, BOTH, BYTES, F32, KernelSource, LAMPORT, LAMPORT_DTYPES, LL, MOVES,
    NARROW, ODD_ABOVE_4, ONE, OTHERS_UP_TO_4, REDUCTIONS, SOME_DTYPES, SUM, TWO, UP_TO_4, WIDE,
    WORLD_OF_2, sharing_threads,
};
use crate::{AllReduceAlgorithm as Name, DType, ReduceOp};

/// Bytes of a launch through inboxes from which on a call in several launches loses little: 16 MiB in two launches of 8 MiB
/// take 52 us instead of 50.
const INBOX_LAUNCH_BYTES: u64 = 8 << 20;
/// The most shorter launches through inboxes with which a call is as fast as any other way: 4 MiB in four launches of 1 MiB
/// take 22 us, as long as by loads from peers, which only windows have.
const INBOX_LAUNCHES: u64 = 4;

/// All-reduce in two shots through inboxes; reduce-scatter, all-gather and broadcast, which are one of the shots.
pub(in crate::cuda) const KERNEL: KernelSource<'static> = kernel_beside!(
    "all_reduce" / "two_shot",
    [WORLD_OF_2, WIDE, ONE, SOME_DTYPES, SUM, REDUCTIONS, LL],
    [UP_TO_4, WIDE, ONE, BYTES, SUM, MOVES, LL],
    [WORLD_OF_2, WIDE, ONE, LAMPORT_DTYPES, SUM, REDUCTIONS, LAMPORT],
    [UP_TO_4, WIDE, TWO, ("DTYPE", &["1", "3", "4"]), SUM, REDUCTIONS, LAMPORT],
    [ABOVE_4, NARROW, ONE, SOME_DTYPES, SUM, REDUCTIONS, LL],
    [ABOVE_4, NARROW, ONE, BYTES, SUM, MOVES, LL],
    [ABOVE_4, NARROW, ONE, LAMPORT_DTYPES, SUM, REDUCTIONS, LAMPORT],
    [OTHERS_UP_TO_4, WIDE, ONE, F32, SUM, REDUCTIONS, BOTH],
    [ODD_ABOVE_4, NARROW, ONE, F32, SUM, ALL_REDUCE, BOTH],
);

/// Row of the Lamport protocol.
pub(super) const LAMPORT_ROW: AllReduce = AllReduce {
    name: Name::TwoShotLamport,
    one_of: Some(Name::TwoShot),
    fits: |shape, _| fits_lamport(shape.dtype),
    pays_off: |shape, control| pays_off_in_inboxes(shape, control, true),
    most_bytes: |shape, control| inbox_launch(shape, control, true),
    kernel: |world, of, bytes| {
        KernelSpec::two_shot(world, of, TwoShotCollective::AllReduce, true, bytes)
    },
    launch: launch_lamport,
    cases: Cases { count: 1_800_000, in_pieces: true, has_two_layouts: true, ..Cases::USUAL },
};

/// Row of the LL protocol.
pub(super) const LL_ROW: AllReduce = AllReduce {
    name: Name::TwoShotLl,
    one_of: Some(Name::TwoShot),
    fits: |_, _| true,
    pays_off: |shape, control| pays_off_in_inboxes(shape, control, false),
    most_bytes: |shape, control| inbox_launch(shape, control, false),
    kernel: |world, of, bytes| {
        KernelSpec::two_shot(world, of, TwoShotCollective::AllReduce, false, bytes)
    },
    launch: launch_ll,
    cases: Cases { count: 1_800_000, in_pieces: true, ..Cases::USUAL },
};

fn pays_off_in_inboxes(shape: &AllReduceShape, control: &ControlLayout, lamport: bool) -> bool {
    let at_once = inbox_launch(shape, control, lamport);
    at_once >= INBOX_LAUNCH_BYTES || shape.bytes <= INBOX_LAUNCHES * at_once
}

/// Most bytes of a launch of two shots through inboxes.
fn inbox_launch(shape: &AllReduceShape, control: &ControlLayout, lamport: bool) -> u64 {
    KernelSpec::two_shot_launch(control, shape.world, shape.dtype, lamport, shape.bytes)
}

/// # Safety
///
/// You must keep the promises of [`AllReduceCall`].
unsafe fn launch_lamport(engine: &mut dyn KernelLauncher, call: &AllReduceCall) -> Result<()> {
    // SAFETY: the caller promised that the input and output of the call are there until the stream has done it.
    unsafe { launch(engine, call.work, true) }
}

/// # Safety
///
/// You must keep the promises of [`AllReduceCall`].
unsafe fn launch_ll(engine: &mut dyn KernelLauncher, call: &AllReduceCall) -> Result<()> {
    // SAFETY: the caller promised that the input and output of the call are there until the stream has done it.
    unsafe { launch(engine, call.work, false) }
}

/// # Safety
///
/// You must keep the promises of [`AllReduceCall`].
unsafe fn launch(
    engine: &mut dyn KernelLauncher,
    work: &ReductionCall,
    lamport: bool,
) -> Result<()> {
    let (control, world) = (engine.control(), engine.world());
    let most = KernelSpec::two_shot_launch(control, world, work.dtype, lamport, work.bytes);
    // Inboxes need room for the inputs and the results of all shares.
    let room = (u64::from(world), most);
    // SAFETY: the caller promised that the input and output of the call are there until the stream has done it.
    unsafe { in_inboxes(engine, work, TwoShotCollective::AllReduce, lamport, room) }
}

/// Runs a collective of two shots, or of one of them, through inboxes, in as many launches as their size requires. Each takes
/// at most `most` bytes, of so many shares.
///
/// # Safety
///
/// You must keep the promises of [`AllReduceCall`].
pub(in crate::cuda) unsafe fn in_inboxes(
    engine: &mut dyn KernelLauncher,
    work: &ReductionCall,
    collective: TwoShotCollective,
    lamport: bool,
    (shares, most): (u64, u64),
) -> Result<()> {
    let threads = match most.min(work.bytes) {
        0..=524_288 => 64,
        524_289..=1_048_576 => 256,
        _ => THREADS,
    };
    let (reduction, bytes) = ((work.dtype, work.op), most.min(work.bytes));
    let spec = KernelSpec::two_shot(engine.world(), reduction, collective, lamport, bytes);
    let loaded = engine.kernel(spec)?;
    let threads = threads.min(loaded.threads);
    for piece in work.pieces(most, 16 * shares) {
        let each = piece.bytes.div_ceil(16).div_ceil(shares);
        let config = LaunchConfig::new(&loaded, each, threads, 264);
        // SAFETY: the caller promised that the input and output of the call are there until the stream has done it; a piece
        // lies within them.
        unsafe { engine.launch_blocks(loaded, config, &piece) }?;
    }
    Ok(())
}

/// Runs a collective that is one of the two shots, through inboxes, which have room for a part of each rank.
///
/// # Safety
///
/// You must keep the promises of [`ReductionCall`].
pub(in crate::cuda) unsafe fn one_of_two_shots(
    engine: &mut dyn KernelLauncher,
    work: &ReductionCall,
    collective: TwoShotCollective,
    lamport: bool,
) -> Result<()> {
    let room = (1, part_launch(engine.control(), engine.world(), lamport));
    // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
    unsafe { in_inboxes(engine, work, collective, lamport, room) }
}

/// Most bytes of a part that one launch of a single shot takes through inboxes, which must hold a part of each rank. Longer
/// launches would not be faster, and need another variant of the kernel.
pub(in crate::cuda) fn part_launch(control: &ControlLayout, world: u32, lamport: bool) -> u64 {
    (control.inbox_vectors(lamport) / u64::from(world) * 16).min(MANY_BYTES)
}

impl KernelSpec {
    /// A collective of two shots, or of one of them, through inboxes, for at most `bytes` bytes a launch.
    pub(in crate::cuda) fn two_shot(
        world: u32,
        reduction: (DType, ReduceOp),
        collective: TwoShotCollective,
        lamport: bool,
        bytes: u64,
    ) -> Self {
        // Vectors of more ranks take more registers.
        let threads = if world <= 4 { THREADS } else { THREADS / 2 };
        let min_blocks_per_sm =
            if Self::is_compact(world, reduction.0, lamport, bytes) { 2 } else { 1 };
        let sharing_threads = (min_blocks_per_sm > 1).then(|| sharing_threads(world));
        let base = if collective.reduces() {
            Self::reduces(&KERNEL, reduction)
        } else {
            // Nothing is reduced, so one kernel serves all element types.
            Self::new(&KERNEL, threads)
        };
        Self {
            mode: KernelMode::Collective(collective),
            lamport,
            threads,
            min_blocks_per_sm,
            sharing_threads,
            ..base
        }
    }

    /// Whether a launch of `bytes` bytes has two blocks of an SM, and an inbox without a slot for the rank itself.
    fn is_compact(world: u32, dtype: DType, lamport: bool, bytes: u64) -> bool {
        let wide = matches!(dtype, DType::F32 | DType::F16 | DType::Bf16);
        bytes > MANY_BYTES && lamport && wide && world <= 4
    }

    /// Most bytes of a launch of a two-shot all-reduce of `bytes` bytes through inboxes.
    pub(in crate::cuda) fn two_shot_launch(
        control: &ControlLayout,
        world: u32,
        dtype: DType,
        lamport: bool,
        bytes: u64,
    ) -> u64 {
        let compact = control.two_shot_room(lamport, world, true);
        if Self::is_compact(world, dtype, lamport, bytes.min(compact)) {
            return compact;
        }
        control.two_shot_room(lamport, world, false)
    }
}
