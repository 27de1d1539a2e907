//! Which kernels a communicator has ready before its first call.

use symmpool_allocator::{Error, Result};

use crate::cuda::all_gather::ll;
use crate::cuda::all_reduce::constraints::AllReduceShape;
use crate::cuda::all_reduce::row::AllReduce;
use crate::cuda::all_to_all::copies::COMPANION;
use crate::cuda::broadcast::pipeline;
use crate::cuda::kernel::mode::{AllToAllMode, OneSidedMode, TwoShotCollective};
use crate::cuda::layout::params::ControlLayout;
use crate::cuda::reduce_scatter::scatter_kernels;
use crate::cuda::select::table::MeasuredTable;
use crate::{AllReduceAlgorithm, DType, ReduceOp};

use crate::call::p2p::Direction;
use crate::cuda::kernel::spec::{KernelSpec, THREADS};

/// The environment variable that lists the reductions whose kernels are to be ready.
const VARIABLE: &str = "SYMMPOOL_READY";
/// Its value where no reduction is to be ready.
const NONE: &str = "none";
/// The reductions that are ready where it is not set, or empty: those that training and serving use most.
const USUAL: [(DType, ReduceOp); 3] =
    [(DType::F32, ReduceOp::Sum), (DType::F16, ReduceOp::Sum), (DType::Bf16, ReduceOp::Sum)];

impl KernelSpec {
    /// The kernels of all calls that reduce nothing.
    fn for_moves(world: u32) -> Vec<Self> {
        let mut all = vec![Self::barrier(false), Self::barrier(true)];
        let exchanges = [AllToAllMode::INBOXES, AllToAllMode::DIRECT, AllToAllMode::DEVICE_COUNTS];
        all.extend(exchanges.map(|mode| Self::all_to_all(world, mode)));
        let one_sided = [
            OneSidedMode::Copy,
            OneSidedMode::CopyAndSignal,
            OneSidedMode::Signal,
            OneSidedMode::Wait,
        ];
        all.extend(one_sided.map(Self::one_sided));
        if world > 1 {
            all.push(Self::new(&COMPANION, THREADS));
            all.push(pipeline::kernel());
            all.extend([Direction::Send, Direction::Receive].map(Self::p2p));
            all.extend(
                [TwoShotCollective::AllGather, TwoShotCollective::Broadcast]
                    .map(|collective| ll::kernel(world, collective)),
            );
        }
        all
    }

    /// The kernels that all-reduces and reduce-scatters of one type and operation need, for all sizes, with the
    /// algorithm that was requested of the communicator.
    fn for_reduction(
        reduction: (DType, ReduceOp),
        (usual, requested): (&AllReduceShape, AllReduceAlgorithm),
        control: &ControlLayout,
        measured: &MeasuredTable,
    ) -> Vec<Self> {
        let (world, dtype) = (usual.world, reduction.0);
        let mut all = Vec::new();
        // Each power of two, and sizes between: the selected algorithm changes at few sizes.
        let sizes = (4..34).flat_map(|power| [1 << power, (1 << power) + 16, 3 << (power - 1)]);
        for bytes in sizes {
            for window in [true, false] {
                let (input_window, output_window) = (window, window);
                let shape = AllReduceShape { bytes, dtype, input_window, output_window, ..*usual };
                // A requested algorithm may serve some sizes only.
                let chosen = shape.choose(requested, control, measured).ok();
                let Some(entry) = chosen.and_then(|(name, _)| AllReduce::named(name)) else {
                    continue;
                };
                let most = (entry.most_bytes)(&shape, control);
                all.push((entry.kernel)(world, reduction, bytes.min(most)));
            }
        }
        all.extend(scatter_kernels(world, reduction));
        all
    }

    /// The kernels that a communicator has ready before its first call, in the same order on all ranks, for all layouts that
    /// its memory may have.
    pub(in crate::cuda) fn ready(
        (usual, requested): (&AllReduceShape, AllReduceAlgorithm),
        layouts: &[ControlLayout],
        measured: &MeasuredTable,
    ) -> Result<Vec<Self>> {
        let mut all = Self::for_moves(usual.world);
        if usual.world > 1 {
            for reduction in reductions(std::env::var(VARIABLE).ok().as_deref())? {
                for control in layouts {
                    let by = (usual, requested);
                    all.append(&mut Self::for_reduction(reduction, by, control, measured));
                }
            }
        }
        all.sort();
        all.dedup();
        Ok(all)
    }
}

/// The reductions that a list names: element types, each with a colon and an operation unless that is the sum.
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
    use crate::cuda::layout::params::Footprint;

    const AUTO: AllReduceAlgorithm = AllReduceAlgorithm::Auto;

    fn shape(world: u32) -> AllReduceShape {
        AllReduceShape::between_windows(0, DType::F32, world)
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
            let control =
                ControlLayout::new(world, Footprint::ample(32 << 20, 192 << 20)).expect("valid");
            for name in ["NVIDIA H200", "a device"] {
                let measured = MeasuredTable::of(&vec![name; world as usize]);
                let usual = shape(world);
                for reduction in [
                    (DType::Bf16, ReduceOp::Sum),
                    (DType::I32, ReduceOp::Max),
                    (DType::F64, ReduceOp::Avg),
                ] {
                    let both = (&usual, AUTO);
                    let ready = KernelSpec::for_reduction(reduction, both, &control, &measured);
                    // Other sizes than those that `for_reduction` looks at.
                    for bytes in (1..4000_u64).map(|nth| nth * nth * 509 + 2 * nth) {
                        for window in [true, false] {
                            let shape = AllReduceShape {
                                bytes,
                                dtype: reduction.0,
                                input_window: window,
                                output_window: window,
                                ..usual
                            };
                            let chosen =
                                shape.choose(AUTO, &control, &measured).expect("something");
                            let entry = AllReduce::named(chosen.0).expect("an entry");
                            let most = (entry.most_bytes)(&shape, &control);
                            let needed = (entry.kernel)(world, reduction, bytes.min(most));
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
            let control =
                ControlLayout::new(world, Footprint::ample(32 << 20, 192 << 20)).expect("valid");
            for name in ["NVIDIA H200", "a device"] {
                let measured = MeasuredTable::of(&vec![name; world as usize]);
                let usual = shape(world);
                let ready =
                    KernelSpec::ready((&usual, AUTO), &[control], &measured).expect("no nonsense");
                println!("{world} ranks on {name}: {} kernels", ready.len());
                assert!(ready.len() <= most, "{world} ranks: {}", ready.len());
            }
        }
    }
}
