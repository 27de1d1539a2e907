//! What kernels are compiled for, and which of them a communicator has ready before its first call.

use symmpool_allocator::{Error, Result};

use super::constraints::{Algorithm, Shape, fits_lamport};
use super::params::Control;
use super::reductions::{GATHER, SCATTER, THREADS};
use super::table::Rows;
use crate::algorithm::RequestedAlgorithm;
use crate::jit::Kernel;
use crate::jit::sources::{
    ALL_TO_ALL, BARRIER, COPY_COMPANION, ONE_SHOT, ONE_SHOT_LL128, ONE_SIDED, PULL, TWO_SHOT,
    TWO_SHOT_COPY, TWO_SHOT_PUSH,
};
use crate::{DType, ReduceOp};

/// Threads of the kernel that has nothing but an entry.
pub(super) const BARRIER_THREADS: u32 = 128;
/// Of a kernel that only signals or waits.
pub(super) const FEW_THREADS: u32 = 32;

/// `SHOTS` of all-to-alls: through inboxes alone, what goes straight too, counts on the device too.
pub(super) const INBOXES: u8 = 1;
pub(super) const STRAIGHT: u8 = 2;
pub(super) const DEVICE: u8 = 4;

/// `SHOTS` of one-sided operations: a copy, a signal, a wait.
pub(super) const COPIES: u8 = 1;
pub(super) const SIGNALS: u8 = 2;
pub(super) const WAITS: u8 = 4;

/// Two shots of more are moved by twice as many threads, if registers suffice.
const MUCH: u64 = 4 << 20;

/// The environment's list of reductions.
const VARIABLE: &str = "SYMMPOOL_READY";
/// What it is if there are none.
const NONE: &str = "none";
/// What it is where it is not set, or empty: what training and serving are made of.
const USUAL: [(DType, ReduceOp); 3] =
    [(DType::F32, ReduceOp::Sum), (DType::F16, ReduceOp::Sum), (DType::Bf16, ReduceOp::Sum)];

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Specialty {
    pub(super) kernel: &'static str,
    pub(super) dtype: u8,
    pub(super) op: u8,
    /// Bits of `SHOTS`; 0 where the kernel has none.
    pub(super) shots: u8,
    pub(super) lamport: bool,
    pub(super) threads: u32,
    /// Blocks that a processor is to hold, within its registers.
    pub(super) blocks: u32,
}

impl Specialty {
    /// For a kernel that moves bytes or nothing.
    pub(super) fn new(kernel: &'static Kernel, threads: u32) -> Self {
        let (dtype, op) = (DType::U8 as u8, ReduceOp::Sum as u8);
        Self { kernel: kernel.name, dtype, op, shots: 0, lamport: false, threads, blocks: 1 }
    }

    /// The entry of a call alone, which tells a kernel beside it or not.
    pub(super) fn barrier(tells: bool) -> Self {
        Self { shots: tells.into(), ..Self::new(&BARRIER, BARRIER_THREADS) }
    }

    /// An all-to-all. Vectors of more ranks take more registers.
    pub(super) fn all_to_all(world: u32, shots: u8) -> Self {
        let threads = if world <= 4 { THREADS } else { THREADS / 2 };
        Self { shots, ..Self::new(&ALL_TO_ALL, threads) }
    }

    /// A copy or a signal between two ranks, or both.
    pub(super) fn one_sided(shots: u8) -> Self {
        let threads = if shots & COPIES != 0 { THREADS } else { FEW_THREADS };
        Self { shots, ..Self::new(&ONE_SIDED, threads) }
    }

    /// A kernel that reduces.
    pub(super) fn reduces(kernel: &'static Kernel, (dtype, op): (DType, ReduceOp)) -> Self {
        Self { dtype: dtype as u8, op: op as u8, ..Self::new(kernel, THREADS) }
    }

    /// Through inboxes in two shots, or in one of them, so many bytes at most at once.
    pub(super) fn two_shot(
        world: u32,
        reduction: (DType, ReduceOp),
        shots: u8,
        lamport: bool,
        bytes: u64,
    ) -> Self {
        // Vectors of more ranks take more registers.
        let threads = if world <= 4 { THREADS } else { THREADS / 2 };
        let wide = matches!(reduction.0, DType::F32 | DType::F16 | DType::Bf16);
        let blocks = if bytes > MUCH && lamport && wide && world <= 4 { 2 } else { 1 };
        let base = if shots & SCATTER == 0 {
            // Bits are moved as they are.
            Self::new(&TWO_SHOT, threads)
        } else {
            Self::reduces(&TWO_SHOT, reduction)
        };
        Self { shots, lamport, threads, blocks, ..base }
    }

    /// What does an all-reduce, so many bytes at most at once.
    pub(super) fn all_reduce(
        algorithm: Algorithm,
        world: u32,
        reduction: (DType, ReduceOp),
        bytes: u64,
    ) -> Self {
        const BOTH: u8 = SCATTER | GATHER;
        let one = |kernel| Self::reduces(kernel, reduction);
        match algorithm {
            Algorithm::OneShotLl => one(&ONE_SHOT),
            Algorithm::OneShotLamport => Self { lamport: true, ..one(&ONE_SHOT) },
            Algorithm::OneShotLl128 => one(&ONE_SHOT_LL128),
            Algorithm::OneShotPull => Self { shots: SCATTER, ..one(&PULL) },
            Algorithm::TwoShotPull => Self { shots: BOTH, ..one(&PULL) },
            Algorithm::TwoShotPush => Self { shots: BOTH, ..one(&TWO_SHOT_PUSH) },
            Algorithm::TwoShotCopy => one(&TWO_SHOT_COPY),
            Algorithm::TwoShotLl => Self::two_shot(world, reduction, BOTH, false, bytes),
            Algorithm::TwoShotLamport => Self::two_shot(world, reduction, BOTH, true, bytes),
        }
    }

    /// What calls of any communicator need that reduce nothing.
    fn of_moves(world: u32) -> Vec<Self> {
        let mut all = vec![Self::barrier(false), Self::barrier(true)];
        let exchanges = [INBOXES, INBOXES | STRAIGHT, INBOXES | STRAIGHT | DEVICE];
        all.extend(exchanges.map(|shots| Self::all_to_all(world, shots)));
        let sided = [COPIES, COPIES | SIGNALS, SIGNALS, WAITS];
        all.extend(sided.map(Self::one_sided));
        if world > 1 {
            all.push(Self::new(&COPY_COMPANION, THREADS));
            all.extend(super::p2p::specialties());
            let bytes = (DType::U8, ReduceOp::Sum);
            all.extend(
                [GATHER, super::reductions::BROADCAST]
                    .map(|shots| Self::two_shot(world, bytes, shots, false, 0)),
            );
        }
        all
    }

    /// What all-reduces and reduce-scatters of a kind need, of whatever size, with the algorithm that the
    /// communicator was asked for.
    fn of_reduction(
        reduction: (DType, ReduceOp),
        (usual, asked): (&Shape, RequestedAlgorithm),
        control: &Control,
        rows: &Rows,
    ) -> Vec<Self> {
        let (world, dtype) = (usual.world, reduction.0);
        let mut all = Vec::new();
        // Of each power of two, and between: choices change at few sizes.
        let sizes = (4..34).flat_map(|power| [1 << power, (1 << power) + 16, 3 << (power - 1)]);
        for bytes in sizes {
            for window in [true, false] {
                let (input_window, output_window) = (window, window);
                let shape = Shape { bytes, dtype, input_window, output_window, ..*usual };
                // What was asked for may be for some sizes only.
                let Ok((algorithm, _)) = shape.choose(asked, control, rows) else { continue };
                let bytes = bytes.min(control.two_shot_bytes(algorithm, world));
                all.push(Self::all_reduce(algorithm, world, reduction, bytes));
            }
        }
        all.push(Self { shots: SCATTER, ..Self::reduces(&TWO_SHOT_PUSH, reduction) });
        all.push(Self::two_shot(world, reduction, SCATTER, fits_lamport(dtype), 0));
        all
    }

    /// What a communicator has ready before its first call, in an order that all ranks share.
    pub(super) fn ready(
        (usual, asked): (&Shape, RequestedAlgorithm),
        control: &Control,
        rows: &Rows,
    ) -> Result<Vec<Self>> {
        let mut all = Self::of_moves(usual.world);
        if usual.world > 1 {
            for reduction in reductions(std::env::var(VARIABLE).ok().as_deref())? {
                all.append(&mut Self::of_reduction(reduction, (usual, asked), control, rows));
            }
        }
        all.sort();
        all.dedup();
        Ok(all)
    }
}

/// The reductions that a list names: types, each with an operation behind a colon unless that is the sum.
fn reductions(list: Option<&str>) -> Result<Vec<(DType, ReduceOp)>> {
    let list = list.map(str::trim).filter(|list| !list.is_empty());
    let Some(list) = list else { return Ok(USUAL.to_vec()) };
    if list == NONE {
        return Ok(Vec::new());
    }
    let parts = list.split(',').map(str::trim).filter(|part| !part.is_empty());
    let one = |part: &str| {
        let (dtype, op) = part.split_once(':').unwrap_or((part, ReduceOp::Sum.name()));
        let dtype = DType::REDUCED.into_iter().find(|each| each.name() == dtype.trim());
        let op = ReduceOp::ALL.into_iter().find(|each| each.name() == op.trim());
        dtype.zip(op).ok_or_else(|| {
            let types: Vec<&str> = DType::REDUCED.iter().map(|dtype| dtype.name()).collect();
            let ops: Vec<&str> = ReduceOp::ALL.iter().map(|op| op.name()).collect();
            Error::invalid_argument(format!(
                "{VARIABLE} has {part:?}: reductions whose kernels are to be ready are types ({}), each \
                 with a colon and an operation ({}) if it is not the sum, as in \"bf16,i64:max\"; or {NONE}",
                types.join(", "),
                ops.join(", ")
            ))
        })
    };
    parts.map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AllReduceAlgorithm;

    const AUTO: RequestedAlgorithm =
        RequestedAlgorithm { algorithm: AllReduceAlgorithm::Auto, by_environment: false };

    fn shape(world: u32) -> Shape {
        let (bytes, dtype) = (0, DType::F32);
        Shape { bytes, dtype, world, input_window: true, output_window: true, direct: true }
    }

    #[test]
    fn a_list_names_reductions_and_what_it_cannot_mean_is_said() {
        let read = |list| reductions(list).expect("a list");
        assert_eq!(read(None), USUAL);
        assert_eq!(read(Some(" ")), USUAL);
        assert_eq!(read(Some("none")), []);
        let two = [(DType::Bf16, ReduceOp::Sum), (DType::I64, ReduceOp::Max)];
        assert_eq!(read(Some(" bf16, i64:max,")), two);
        for wrong in ["bf17", "f32:xor", "f32:", "all"] {
            let error = reductions(Some(wrong)).expect_err("nonsense");
            assert!(error.is_invalid_argument(), "{error}");
            let text = error.to_string();
            assert!(
                text.contains(wrong) && text.contains(VARIABLE) && text.contains("i64"),
                "{text}"
            );
        }
    }

    #[test]
    fn whatever_is_chosen_by_itself_is_ready() {
        for world in 2..=8 {
            let control = Control::new(world, 32 << 20, 192 << 20).expect("valid");
            for name in ["NVIDIA H200", "a device"] {
                let rows = Rows::of(&vec![name; world as usize]);
                let usual = shape(world);
                for reduction in [
                    (DType::Bf16, ReduceOp::Sum),
                    (DType::I32, ReduceOp::Max),
                    (DType::F64, ReduceOp::Avg),
                ] {
                    let both = (&usual, AUTO);
                    let ready = Specialty::of_reduction(reduction, both, &control, &rows);
                    // Sizes that are not those which were looked at.
                    for bytes in (1..4000_u64).map(|nth| nth * nth * 509 + 2 * nth) {
                        for window in [true, false] {
                            let shape = Shape {
                                bytes,
                                dtype: reduction.0,
                                input_window: window,
                                output_window: window,
                                ..usual
                            };
                            let chosen = shape.choose(AUTO, &control, &rows).expect("something");
                            let most = bytes.min(control.two_shot_bytes(chosen.0, world));
                            let needed = Specialty::all_reduce(chosen.0, world, reduction, most);
                            assert!(ready.contains(&needed), "{world} {bytes} {needed:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_ready_is_little() {
        for (world, most) in [(1, 9), (2, 45), (4, 45), (8, 45)] {
            let control = Control::new(world, 32 << 20, 192 << 20).expect("valid");
            for name in ["NVIDIA H200", "a device"] {
                let rows = Rows::of(&vec![name; world as usize]);
                let usual = shape(world);
                let ready = Specialty::ready((&usual, AUTO), &control, &rows).expect("no nonsense");
                println!("{world} ranks on {name}: {} kernels", ready.len());
                assert!(ready.len() <= most, "{world} ranks: {}", ready.len());
            }
        }
    }
}
