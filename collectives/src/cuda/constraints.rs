//! What an all-reduce on a device looks like, the ways there are to do it, and which of them can.

use symmpool_allocator::topology::Topology;

use super::params::{Control, LINE_PAYLOAD};
use crate::{AllReduceAlgorithm, DType};

/// How data travels on a device.
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
}

impl Algorithm {
    /// The one of this name; none of those that leave something open.
    pub(super) fn of(asked: AllReduceAlgorithm) -> Option<Self> {
        Some(match asked {
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
        })
    }
}

/// Below this, copy engines have nothing to gain, and shares may have nothing for them.
pub(super) const LEAST_COPIED: u64 = 1 << 20;

/// What scratch is to hold of a longer call at once, of all ranks' shares together, for copy engines to
/// be worth their beginnings in every round. From `cuda_collectives bench` on 4 H200s.
const COPIED_AT_ONCE: u64 = 256 << 20;

/// What an all-reduce is chosen by: the same on every rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) bytes: u64,
    pub(super) dtype: DType,
    pub(super) world: u32,
    pub(super) input_window: bool,
    pub(super) output_window: bool,
    /// Whether all ranks' devices are linked by NVLink, or are one.
    pub(super) direct: bool,
}

impl Shape {
    pub(super) fn vectors(&self) -> u64 {
        self.bytes.div_ceil(16)
    }

    /// Vectors that one shot leaves in an inbox.
    fn inbox(&self) -> u64 {
        u64::from(self.world) * self.vectors()
    }

    /// Whether what was measured with room for it holds with the room there is: it does where the call
    /// goes in one round, as it went when it was measured, or in long ones.
    pub(super) fn pays(&self, algorithm: Algorithm, control: &Control) -> bool {
        let at_once = control.scratch_room(self.world) * u64::from(self.world);
        algorithm != Algorithm::TwoShotCopy || at_once >= self.bytes.min(COPIED_AT_ONCE)
    }

    pub(super) fn fits(&self, algorithm: Algorithm, control: &Control) -> bool {
        match algorithm {
            Algorithm::OneShotLl => self.inbox() <= control.packet_vectors(),
            Algorithm::OneShotLl128 => {
                let lines = self.bytes.div_ceil(LINE_PAYLOAD);
                // A line has one flag for all of it: it must arrive whole, and other buses may tear it.
                self.direct && u64::from(self.world) * lines <= control.line_count()
            }
            Algorithm::OneShotLamport => {
                fits_lamport(self.dtype) && self.inbox() <= control.sentinel_vectors()
            }
            Algorithm::OneShotPull => self.bytes.next_multiple_of(16) <= control.scratch_bytes,
            Algorithm::TwoShotLl => true,
            Algorithm::TwoShotLamport => fits_lamport(self.dtype),
            Algorithm::TwoShotPull => self.input_window && self.output_window,
            Algorithm::TwoShotPush => self.output_window,
            Algorithm::TwoShotCopy => {
                self.output_window && self.world > 1 && self.bytes >= LEAST_COPIED
            }
        }
    }
}

/// Whether no bus lies between any two ranks' devices.
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
    use symmpool_allocator::topology::{Link, LinkMatrix};

    use super::*;

    fn shape(bytes: u64, world: u32) -> Shape {
        let (dtype, input_window, output_window) = (DType::F32, true, true);
        Shape { bytes, dtype, world, input_window, output_window, direct: true }
    }

    #[test]
    fn one_shot_is_for_what_the_inboxes_have_room_for_from_all_ranks() {
        // Of packets half is data, of lines 120 bytes of 128; rows are bytes that fit just so.
        let control = |world| Control::new(world, 4 << 20, 1 << 20).expect("valid");
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
            let fits = |bytes| shape(bytes, world).fits(algorithm, &control(world));
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
        let control = Control::new(4, 4 << 20, 1 << 20).expect("valid");
        let linked = shape(64 << 10, 4);
        assert!(linked.fits(Algorithm::OneShotLl128, &control));
        let over_a_bus = Shape { direct: false, ..linked };
        assert!(!over_a_bus.fits(Algorithm::OneShotLl128, &control));
        for other in [Algorithm::OneShotLl, Algorithm::OneShotLamport] {
            assert!(over_a_bus.fits(other, &control), "words show by themselves that they came");
        }
    }

    #[test]
    fn copy_engines_are_for_long_outputs_that_peers_reach() {
        let control = Control::new(2, 1 << 20, 1 << 20).expect("valid");
        let fits = |shape: Shape| shape.fits(Algorithm::TwoShotCopy, &control);
        let least = shape(LEAST_COPIED, 2);
        assert!(fits(least));
        assert!(!fits(Shape { bytes: LEAST_COPIED - 1, ..least }));
        assert!(!fits(Shape { output_window: false, ..least }));
        assert!(!fits(Shape { world: 1, ..least }));
    }
}
