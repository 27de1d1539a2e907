//! The all-reduces of devices: what fits each, which kernel it has, and how that is launched.

use super::constraints::{AllReduceShape, MIN_COPY_BYTES, fits_lamport};
use crate::cuda::kernel::mode::TwoShotCollective;
use crate::cuda::kernel::spec::KernelSpec;
use crate::cuda::layout::params::{Control, LL128_PAYLOAD};
use crate::jit::sources::{ONE_SHOT, ONE_SHOT_LL128, ONE_SHOT_PULL, TWO_SHOT_COPY, TWO_SHOT_PUSH};
use crate::{AllReduceAlgorithm as Name, DType, ReduceOp};

/// Bytes of a longer call, of all ranks' shares together, that scratch must hold at once for copy engines to
/// be worth their start-up time in every round. From `cuda_collectives bench` on 4 H200s.
const COPY_ROUND_BYTES: u64 = 256 << 20;
/// Launches of `two_shot_push` of at least so many bytes lose little where a call takes several: 1.4% of 128 MiB, as
/// 256 MiB in one launch take 746 us on two H100s, and two of 128 MiB 755 us (`h100x2_tune.json`).
const PUSH_LAUNCH_BYTES: u64 = 128 << 20;
/// Launches through inboxes of at least so many bytes lose little, too: 16 MiB in two launches of 8 MiB take 52 us
/// instead of 50.
const INBOX_LAUNCH_BYTES: u64 = 8 << 20;
/// Shorter launches through inboxes are as fast as any other way where a call takes no more than so many: 4 MiB in
/// four launches of 1 MiB take 22 us there, as long as by loads from peers, which only windows have.
const INBOX_LAUNCHES: u64 = 4;

/// How all-reduces are launched: `ops/all_reduce.rs` has a function for each.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) enum AllReduceLaunch {
    OneShot,
    OneShotLl128,
    OneShotPull,
    TwoShotLamport,
    TwoShotPush,
    TwoShotLl,
    TwoShotPull,
    TwoShotCopy,
    TwoShotStages,
}

/// A reduction's element type and operation.
type Reduction = (DType, ReduceOp);

/// An all-reduce algorithm.
pub(in crate::cuda) struct AllReduce {
    pub(in crate::cuda) name: Name,
    /// The name that stands for the first of several algorithms that fits, if this is one of those.
    pub(in crate::cuda) one_of: Option<Name>,
    /// Whether it can serve a call.
    pub(in crate::cuda) fits: fn(&AllReduceShape, &Control) -> bool,
    /// Whether it is about as fast with the memory there is as it was when it was measured: it is if the call goes in
    /// one round or launch, or in long ones.
    pub(in crate::cuda) pays_off: fn(&AllReduceShape, &Control) -> bool,
    /// Most bytes of a launch.
    pub(in crate::cuda) most_bytes: fn(&AllReduceShape, &Control) -> u64,
    /// Its kernel on so many ranks, for launches of at most so many bytes.
    pub(in crate::cuda) kernel: fn(u32, Reduction, u64) -> KernelSpec,
    /// How it is launched.
    pub(in crate::cuda) launch: AllReduceLaunch,
}

/// All-reduces, in the order in which names that stand for several try them.
pub(in crate::cuda) static ALL_REDUCE: [AllReduce; 10] = [
    AllReduce {
        name: Name::OneShotLamport,
        one_of: Some(Name::OneShot),
        fits: |shape, control| {
            fits_lamport(shape.dtype) && shape.one_shot_vectors() <= control.lamport_vectors()
        },
        pays_off: always,
        most_bytes: |_, _| u64::MAX,
        kernel: |_, of, _| KernelSpec { lamport: true, ..KernelSpec::reduces(&ONE_SHOT, of) },
        launch: AllReduceLaunch::OneShot,
    },
    AllReduce {
        name: Name::OneShotLl128,
        one_of: Some(Name::OneShot),
        // A line of 128 bytes has one flag, so it must arrive whole; buses other than NVLink may tear it.
        fits: |shape, control| {
            let lines = u64::from(shape.world) * shape.bytes.div_ceil(LL128_PAYLOAD);
            shape.direct && lines <= control.ll128_lines()
        },
        pays_off: always,
        most_bytes: |_, _| u64::MAX,
        kernel: |_, of, _| KernelSpec::reduces(&ONE_SHOT_LL128, of),
        launch: AllReduceLaunch::OneShotLl128,
    },
    AllReduce {
        name: Name::OneShotLl,
        one_of: Some(Name::OneShot),
        fits: |shape, control| shape.one_shot_vectors() <= control.ll_vectors(),
        pays_off: always,
        most_bytes: |_, _| u64::MAX,
        kernel: |_, of, _| KernelSpec::reduces(&ONE_SHOT, of),
        launch: AllReduceLaunch::OneShot,
    },
    AllReduce {
        name: Name::OneShotPull,
        one_of: Some(Name::OneShot),
        fits: |shape, control| shape.bytes.next_multiple_of(16) <= control.scratch_bytes,
        pays_off: always,
        most_bytes: |_, _| u64::MAX,
        kernel: |_, of, _| KernelSpec::reduces(&ONE_SHOT_PULL, of),
        launch: AllReduceLaunch::OneShotPull,
    },
    AllReduce {
        name: Name::TwoShotLamport,
        one_of: Some(Name::TwoShot),
        fits: |shape, _| fits_lamport(shape.dtype),
        pays_off: |shape, control| pays_off_in_inboxes(shape, control, true),
        most_bytes: |shape, control| inbox_launch(shape, control, true),
        kernel: |world, of, bytes| {
            KernelSpec::two_shot(world, of, TwoShotCollective::AllReduce, true, bytes)
        },
        launch: AllReduceLaunch::TwoShotLamport,
    },
    AllReduce {
        name: Name::TwoShotPush,
        one_of: Some(Name::TwoShot),
        fits: |shape, _| shape.output_window,
        pays_off: |shape, control| at_once(shape, control) >= shape.bytes.min(PUSH_LAUNCH_BYTES),
        most_bytes: |_, _| u64::MAX,
        kernel: |_, of, _| KernelSpec::reduces(&TWO_SHOT_PUSH, of),
        launch: AllReduceLaunch::TwoShotPush,
    },
    AllReduce {
        name: Name::TwoShotLl,
        one_of: Some(Name::TwoShot),
        fits: |_, _| true,
        pays_off: |shape, control| pays_off_in_inboxes(shape, control, false),
        most_bytes: |shape, control| inbox_launch(shape, control, false),
        kernel: |world, of, bytes| {
            KernelSpec::two_shot(world, of, TwoShotCollective::AllReduce, false, bytes)
        },
        launch: AllReduceLaunch::TwoShotLl,
    },
    AllReduce {
        name: Name::TwoShotPull,
        one_of: None,
        fits: |shape, _| shape.input_window && shape.output_window,
        pays_off: always,
        most_bytes: |_, _| u64::MAX,
        kernel: |_, of, _| KernelSpec::two_shot_pull(of, TwoShotCollective::AllReduce),
        launch: AllReduceLaunch::TwoShotPull,
    },
    AllReduce {
        // In pieces, as into ordinary memory, it pays off for calls during compute only.
        name: Name::TwoShotCopy,
        one_of: None,
        fits: |shape, _| {
            let served = shape.output_window || shape.streams_may_wait;
            shape.world > 1 && shape.bytes >= MIN_COPY_BYTES && served
        },
        pays_off: |shape, control| {
            shape.output_window && at_once(shape, control) >= shape.bytes.min(COPY_ROUND_BYTES)
        },
        most_bytes: |_, _| u64::MAX,
        kernel: |_, of, _| KernelSpec::reduces(&TWO_SHOT_COPY, of),
        launch: AllReduceLaunch::TwoShotCopy,
    },
    AllReduce {
        name: Name::TwoShotStages,
        one_of: None,
        fits: |shape, _| shape.world > 1,
        pays_off: always,
        most_bytes: |_, _| u64::MAX,
        kernel: |_, of, _| KernelSpec::two_shot_stages(of, TwoShotCollective::AllReduce),
        launch: AllReduceLaunch::TwoShotStages,
    },
];

fn always(_: &AllReduceShape, _: &Control) -> bool {
    true
}

/// Bytes of a call that scratch holds at once.
fn at_once(shape: &AllReduceShape, control: &Control) -> u64 {
    control.scratch_room(shape.world) * u64::from(shape.world)
}

fn pays_off_in_inboxes(shape: &AllReduceShape, control: &Control, lamport: bool) -> bool {
    let at_once = inbox_launch(shape, control, lamport);
    at_once >= INBOX_LAUNCH_BYTES || shape.bytes <= INBOX_LAUNCHES * at_once
}

/// Most bytes of a launch of two shots through inboxes.
fn inbox_launch(shape: &AllReduceShape, control: &Control, lamport: bool) -> u64 {
    KernelSpec::two_shot_launch(control, shape.world, shape.dtype, lamport, shape.bytes)
}

impl AllReduce {
    /// The algorithm of this name; `None` if the name leaves something open, or is of host memory.
    pub(in crate::cuda) fn named(name: Name) -> Option<&'static Self> {
        ALL_REDUCE.iter().find(|entry| entry.name == name)
    }
}

impl AllReduceShape {
    /// Whether an algorithm is about as fast with the memory there is as it was when it was measured.
    pub(in crate::cuda) fn pays_off(&self, algorithm: Name, control: &Control) -> bool {
        AllReduce::named(algorithm).is_some_and(|entry| (entry.pays_off)(self, control))
    }

    /// The algorithm for what inboxes are too small for.
    pub(in crate::cuda) fn through_scratch(&self, control: &Control) -> Name {
        let push = Name::TwoShotPush;
        let pushes = self.can_serve(push, control) && self.pays_off(push, control);
        if pushes { push } else { Name::TwoShotStages }
    }

    pub(in crate::cuda) fn can_serve(&self, algorithm: Name, control: &Control) -> bool {
        AllReduce::named(algorithm).is_some_and(|entry| (entry.fits)(self, control))
    }
}

#[cfg(test)]
mod tests {
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
            |world| Control::new(world, Footprint::ample(4 << 20, 1 << 20)).expect("valid");
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
        let control = Control::new(4, Footprint::ample(4 << 20, 1 << 20)).expect("valid");
        let linked = shape(64 << 10, 4);
        assert!(linked.can_serve(Algorithm::OneShotLl128, &control));
        let over_a_bus = AllReduceShape { direct: false, ..linked };
        assert!(!over_a_bus.can_serve(Algorithm::OneShotLl128, &control));
        for other in [Algorithm::OneShotLl, Algorithm::OneShotLamport] {
            assert!(over_a_bus.can_serve(other, &control), "their flags travel with each word");
        }
    }

    #[test]
    fn copy_engines_are_for_long_calls() {
        let control = Control::new(2, Footprint::ample(1 << 20, 1 << 20)).expect("valid");
        let fits = |shape: AllReduceShape| shape.can_serve(Algorithm::TwoShotCopy, &control);
        let least = shape(MIN_COPY_BYTES, 2);
        assert!(fits(least));
        assert!(!fits(AllReduceShape { bytes: MIN_COPY_BYTES - 1, ..least }));
        assert!(fits(AllReduceShape { output_window: false, ..least }));
        assert!(!fits(AllReduceShape { world: 1, ..least }));
    }
}
