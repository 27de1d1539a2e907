//! The all-reduces of devices: a file for each, with its row of [`ALL_REDUCE`], and what they share.
//!
//! Beside each file is its kernel. Headers that these share are in `collectives/kernels/all_reduce`.
//!
//! | file | holds |
//! | --- | --- |
//! | `one_shot`, `one_shot_ll128`, `one_shot_pull` | every rank reduces everything |
//! | `two_shot`, `two_shot_pull`, `two_shot_push`, `two_shot_copy`, `two_shot_pipeline` | every rank reduces a share |
//! | `constraints` | what decides which all-reduce can serve a call |
//! | `row` | a row of the table, and what its launch is given |
//!
//! A row says which calls its algorithm can serve, for which it is fast, which kernel it has, how that is launched, and which
//! calls check it. Its name is a variant of [`AllReduceAlgorithm`](Name), which is not here: names travel in call descriptions,
//! which host memory, several hosts and error messages read without a device. The compiler ties the two: `rows!` has every
//! variant, with its row or among those that devices have no row for.

pub(in crate::cuda) mod constraints;
mod one_shot;
mod one_shot_ll128;
mod one_shot_pull;
pub(in crate::cuda) mod row;
pub(in crate::cuda) mod two_shot;
pub(in crate::cuda) mod two_shot_copy;
pub(in crate::cuda) mod two_shot_pipeline;
mod two_shot_pull;
mod two_shot_push;

use std::collections::BTreeSet;

use self::constraints::AllReduceShape;
use self::row::{AllReduce, CheckedAllReduce};
use crate::cuda::layout::params::ControlLayout;
use crate::jit::{KernelSource, shares_memory};
use crate::{AllReduceAlgorithm as Name, DType, ReduceOp};

/// Makes the table of rows in this order, and finds a row by its name. A name that is missing here does not compile, and neither
/// does a row of another name.
macro_rules! rows {
    ($($name:ident => $row:path),+ $(,)?; without: $($other:ident),+ $(,)?) => {
        /// All-reduces, in the order in which names that stand for several try them.
        pub(in crate::cuda) static ALL_REDUCE: [AllReduce; [$(Name::$name),+].len()] = [$($row),+];

        $(const _: () = assert!(
            matches!($row.name, Name::$name),
            concat!(stringify!($row), " has another name than ", stringify!($name))
        );)+

        impl AllReduce {
            /// The row of the algorithm of this name; `None` if the name leaves something open, or is of host memory.
            pub(in crate::cuda) fn named(name: Name) -> Option<&'static Self> {
                match name {
                    $(Name::$name)|+ => ALL_REDUCE.iter().find(|row| row.name == name),
                    $(Name::$other)|+ => None,
                }
            }
        }
    };
}

rows! {
    OneShotLamport => one_shot::LAMPORT_ROW,
    OneShotLl128 => one_shot_ll128::ROW,
    OneShotLl => one_shot::LL_ROW,
    OneShotPull => one_shot_pull::ROW,
    TwoShotLamport => two_shot::LAMPORT_ROW,
    TwoShotPush => two_shot_push::ROW,
    TwoShotLl => two_shot::LL_ROW,
    TwoShotPull => two_shot_pull::ROW,
    TwoShotCopy => two_shot_copy::ROW,
    TwoShotPipeline => two_shot_pipeline::ROW;
    without: Auto, OneShot, TwoShot, CubeMesh
}

/// The kernels of all of them, each once.
pub(in crate::cuda) fn kernels() -> BTreeSet<&'static KernelSource<'static>> {
    ALL_REDUCE.iter().map(AllReduce::any_kernel).collect()
}

impl AllReduce {
    /// The kernel, whatever it is compiled for.
    fn any_kernel(&self) -> &'static KernelSource<'static> {
        (self.kernel)(2, (DType::F32, ReduceOp::Sum), 0).kernel
    }
}

impl Name {
    /// The algorithm as checks of devices see it. `None` if the name leaves something open, or is of host memory.
    #[doc(hidden)]
    pub fn checked(self) -> Option<CheckedAllReduce> {
        let entry = AllReduce::named(self)?;
        let kernel = entry.any_kernel();
        let shares_memory = shares_memory(kernel.source);
        Some(CheckedAllReduce { kernel: kernel.path, shares_memory, cases: entry.cases })
    }
}

impl AllReduceShape {
    /// Whether an algorithm is about as fast with the memory there is as it was when it was measured.
    pub(in crate::cuda) fn pays_off(&self, algorithm: Name, control: &ControlLayout) -> bool {
        AllReduce::named(algorithm).is_some_and(|entry| (entry.pays_off)(self, control))
    }

    /// The algorithm for what inboxes are too small for.
    pub(in crate::cuda) fn through_scratch(&self, control: &ControlLayout) -> Name {
        let push = Name::TwoShotPush;
        let pushes = self.can_serve(push, control) && self.pays_off(push, control);
        if pushes { push } else { Name::TwoShotPipeline }
    }

    pub(in crate::cuda) fn can_serve(&self, algorithm: Name, control: &ControlLayout) -> bool {
        AllReduce::named(algorithm).is_some_and(|entry| (entry.fits)(self, control))
    }
}

#[cfg(test)]
mod tests {
    use super::constraints::MIN_COPY_BYTES;
    use super::*;
    use crate::AllReduceAlgorithm as Algorithm;
    use crate::cuda::layout::params::Footprint;

    fn shape(bytes: u64, world: u32) -> AllReduceShape {
        AllReduceShape::between_windows(bytes, DType::F32, world)
    }

    #[test]
    fn one_shot_is_for_what_the_inboxes_have_room_for_from_all_ranks() {
        // Half of LL is data, and 120 of 128 bytes of LL128. Each row has the most bytes that fit.
        let control =
            |world| ControlLayout::new(world, Footprint::ample(4 << 20, 1 << 20)).expect("valid");
        for (algorithm, world, most) in [
            (Algorithm::OneShotLl, 2, 2 << 20),
            (Algorithm::OneShotLl, 8, 512 << 10),
            (Algorithm::OneShotLl128, 2, 120 << 15),
            (Algorithm::OneShotLl128, 8, 120 << 13),
            (Algorithm::OneShotLamport, 2, 2 << 20),
            (Algorithm::OneShotLamport, 8, 512 << 10),
            (Algorithm::OneShotPull, 2, 1 << 20),
            (Algorithm::OneShotPull, 8, 1 << 20),
        ] {
            let fits = |bytes| shape(bytes, world).can_serve(algorithm, &control(world));
            assert!(fits(0) && fits(most), "{algorithm:?} of {world} ranks");
            assert!(!fits(most + 1), "{algorithm:?} of {world} ranks");
        }
    }

    #[test]
    fn lines_are_for_ranks_that_are_linked_directly() {
        let control = ControlLayout::new(4, Footprint::ample(4 << 20, 1 << 20)).expect("valid");
        let linked = shape(64 << 10, 4);
        assert!(linked.can_serve(Algorithm::OneShotLl128, &control));
        let over_a_bus = AllReduceShape { nvlinked: false, ..linked };
        assert!(!over_a_bus.can_serve(Algorithm::OneShotLl128, &control));
        for other in [Algorithm::OneShotLl, Algorithm::OneShotLamport] {
            assert!(over_a_bus.can_serve(other, &control), "their flags travel with each word");
        }
    }

    #[test]
    fn copy_engines_are_for_long_calls() {
        let control = ControlLayout::new(2, Footprint::ample(1 << 20, 1 << 20)).expect("valid");
        let fits = |shape: AllReduceShape| shape.can_serve(Algorithm::TwoShotCopy, &control);
        let least = shape(MIN_COPY_BYTES, 2);
        assert!(fits(least));
        assert!(!fits(AllReduceShape { bytes: MIN_COPY_BYTES - 1, ..least }));
        assert!(fits(AllReduceShape { output_window: false, ..least }));
        assert!(!fits(AllReduceShape { world: 1, ..least }));
    }
}
