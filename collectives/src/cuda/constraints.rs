//! The all-reduce algorithms of devices, and which of them can serve a call.

use symmpool_allocator::topology::Topology;

use super::kernel_spec::KernelSpec;
use super::params::{Control, LL128_PAYLOAD};
use crate::{AllReduceAlgorithm, DType};

/// An all-reduce algorithm on a device. The numbers are part of the call description that ranks compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Algorithm {
    OneShotLl = 8,
    OneShotLamport = 9,
    OneShotPull = 10,
    TwoShotLl = 11,
    TwoShotLamport = 12,
    TwoShotPull = 13,
    TwoShotPush = 14,
    OneShotLl128 = 15,
    TwoShotCopy = 16,
    TwoShotStages = 17,
}

impl Algorithm {
    /// The one that a requested algorithm names; `None` if it leaves something open.
    pub(super) fn of(requested: AllReduceAlgorithm) -> Option<Self> {
        Some(match requested {
            AllReduceAlgorithm::Auto
            | AllReduceAlgorithm::OneShot
            | AllReduceAlgorithm::TwoShot
            | AllReduceAlgorithm::CubeMesh => return None,
            AllReduceAlgorithm::OneShotLl => Self::OneShotLl,
            AllReduceAlgorithm::OneShotLamport => Self::OneShotLamport,
            AllReduceAlgorithm::OneShotLl128 => Self::OneShotLl128,
            AllReduceAlgorithm::OneShotPull => Self::OneShotPull,
            AllReduceAlgorithm::TwoShotLl => Self::TwoShotLl,
            AllReduceAlgorithm::TwoShotLamport => Self::TwoShotLamport,
            AllReduceAlgorithm::TwoShotPull => Self::TwoShotPull,
            AllReduceAlgorithm::TwoShotPush => Self::TwoShotPush,
            AllReduceAlgorithm::TwoShotCopy => Self::TwoShotCopy,
            AllReduceAlgorithm::TwoShotStages => Self::TwoShotStages,
        })
    }
}

/// Calls of fewer bytes gain nothing from copy engines, and some of their shares may be empty.
pub(super) const MIN_COPY_BYTES: u64 = 1 << 20;

/// Bytes of a longer call, of all ranks' shares together, that scratch must hold at once for copy engines to
/// be worth their start-up time in every round. From `cuda_collectives bench` on 4 H200s.
const COPY_ROUND_BYTES: u64 = 256 << 20;
/// Launches of `two_shot_push` of at least so many bytes lose little where a call takes several: 1.4% of 128 MiB, as
/// 256 MiB in one launch take 746 us on two H100s, and two of 128 MiB 755 us (`h100x2_tune.json`).
const PUSH_LAUNCH_BYTES: u64 = 128 << 20;
/// The same for algorithms through inboxes: 16 MiB in two launches of 8 MiB take 52 us instead of 50.
const INBOX_LAUNCH_BYTES: u64 = 8 << 20;
/// Shorter launches through inboxes are as fast as any other way where a call takes no more than so many: 4 MiB in
/// four launches of 1 MiB take 22 us there, as long as by loads from peers, which only windows have.
const INBOX_LAUNCHES: u64 = 4;

/// What the algorithm of an all-reduce is chosen by. It is the same on every rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct AllReduceShape {
    pub(super) bytes: u64,
    pub(super) dtype: DType,
    pub(super) world: u32,
    pub(super) input_window: bool,
    pub(super) output_window: bool,
    /// Whether all ranks' devices are linked by NVLink, or are one device.
    pub(super) direct: bool,
}

impl AllReduceShape {
    pub(super) fn vectors(&self) -> u64 {
        self.bytes.div_ceil(16)
    }

    /// Vectors that all ranks together put into an inbox in one shot.
    fn one_shot_vectors(&self) -> u64 {
        u64::from(self.world) * self.vectors()
    }

    /// Whether an algorithm is about as fast with the memory there is as it was when it was measured: it is if the
    /// call goes in one round or launch, or in long ones.
    pub(super) fn pays_off(&self, algorithm: Algorithm, control: &Control) -> bool {
        let at_once = control.scratch_room(self.world) * u64::from(self.world);
        match algorithm {
            Algorithm::TwoShotCopy => at_once >= self.bytes.min(COPY_ROUND_BYTES),
            Algorithm::TwoShotPush => at_once >= self.bytes.min(PUSH_LAUNCH_BYTES),
            Algorithm::TwoShotLl | Algorithm::TwoShotLamport => {
                let lamport = algorithm == Algorithm::TwoShotLamport;
                let at_once = KernelSpec::two_shot_launch(
                    control, self.world, self.dtype, lamport, self.bytes,
                );
                at_once >= INBOX_LAUNCH_BYTES || self.bytes <= INBOX_LAUNCHES * at_once
            }
            _ => true,
        }
    }

    /// The algorithm for what inboxes are too small for.
    pub(super) fn through_scratch(&self, control: &Control) -> Algorithm {
        let push = Algorithm::TwoShotPush;
        let pushes = self.can_serve(push, control) && self.pays_off(push, control);
        if pushes { push } else { Algorithm::TwoShotStages }
    }

    pub(super) fn can_serve(&self, algorithm: Algorithm, control: &Control) -> bool {
        match algorithm {
            Algorithm::OneShotLl => self.one_shot_vectors() <= control.ll_vectors(),
            Algorithm::OneShotLl128 => {
                let lines = self.bytes.div_ceil(LL128_PAYLOAD);
                // A line of 128 bytes has one flag, so it must arrive whole; buses other than NVLink may tear it.
                self.direct && u64::from(self.world) * lines <= control.ll128_lines()
            }
            Algorithm::OneShotLamport => {
                fits_lamport(self.dtype) && self.one_shot_vectors() <= control.lamport_vectors()
            }
            Algorithm::OneShotPull => self.bytes.next_multiple_of(16) <= control.scratch_bytes,
            Algorithm::TwoShotLl => true,
            Algorithm::TwoShotLamport => fits_lamport(self.dtype),
            Algorithm::TwoShotPull => self.input_window && self.output_window,
            Algorithm::TwoShotPush => self.output_window,
            Algorithm::TwoShotCopy => {
                self.output_window && self.world > 1 && self.bytes >= MIN_COPY_BYTES
            }
            Algorithm::TwoShotStages => self.world > 1,
        }
    }
}

/// Whether all pairs of ranks have devices linked by NVLink, or one device.
pub(super) fn directly_linked(links: &Topology) -> bool {
    let ranks = 0..links.world();
    ranks.clone().all(|a| ranks.clone().all(|b| links.link(a, b).is_direct()))
}

/// Whether the Lamport protocol can carry the type: its reserved bit pattern is a NaN, for which another NaN
/// can be sent.
pub(super) fn fits_lamport(dtype: DType) -> bool {
    use DType::{Bf16, F8E4m3, F8E5m2, F16, F32};
    matches!(dtype, F32 | F16 | Bf16 | F8E4m3 | F8E5m2)
}

#[cfg(test)]
mod tests {
    use super::super::footprint::Footprint;
    use symmpool_allocator::topology::{Link, LinkMatrix};

    use super::*;

    fn shape(bytes: u64, world: u32) -> AllReduceShape {
        let (dtype, input_window, output_window) = (DType::F32, true, true);
        AllReduceShape { bytes, dtype, world, input_window, output_window, direct: true }
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
    fn ranks_are_linked_directly_if_all_pairs_are() {
        let one_pair =
            |link| {
                let matrix = LinkMatrix::from_fn(4, |a, b| {
                    if (a, b) == (1, 3) { link } else { Link::NvSwitch(18) }
                });
                directly_linked(&Topology::from_matrix(matrix))
            };
        assert!(one_pair(Link::NvLink(4)) && one_pair(Link::Local));
        assert!(!one_pair(Link::Pci) && !one_pair(Link::Unknown) && !one_pair(Link::NvLink(0)));
        assert!(directly_linked(&Topology::host(2)), "one device");
        assert!(!directly_linked(&Topology::unknown(2)) && directly_linked(&Topology::unknown(1)));
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
    fn copy_engines_are_for_long_outputs_that_peers_reach() {
        let control = Control::new(2, Footprint::ample(1 << 20, 1 << 20)).expect("valid");
        let fits = |shape: AllReduceShape| shape.can_serve(Algorithm::TwoShotCopy, &control);
        let least = shape(MIN_COPY_BYTES, 2);
        assert!(fits(least));
        assert!(!fits(AllReduceShape { bytes: MIN_COPY_BYTES - 1, ..least }));
        assert!(!fits(AllReduceShape { output_window: false, ..least }));
        assert!(!fits(AllReduceShape { world: 1, ..least }));
    }
}
