//! What decides which all-reduce algorithm of a device can serve a call.

use symmpool_allocator::topology::Topology;

use super::algorithms::AllReduce;
use crate::cuda::layout::params::Control;
use crate::{AllReduceAlgorithm as Algorithm, DType};

/// Calls of fewer bytes gain nothing from copy engines, and some of their shares may be empty.
pub(in crate::cuda) const MIN_COPY_BYTES: u64 = 1 << 20;

/// What the algorithm of an all-reduce is chosen by. It is the same on every rank.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct AllReduceShape {
    pub(in crate::cuda) bytes: u64,
    pub(in crate::cuda) dtype: DType,
    pub(in crate::cuda) world: u32,
    pub(in crate::cuda) input_window: bool,
    pub(in crate::cuda) output_window: bool,
    /// Whether all ranks' devices are linked by NVLink, or are one device.
    pub(in crate::cuda) direct: bool,
    /// Whether calls may run beside compute, with few SMs.
    pub(in crate::cuda) beside_compute: bool,
    /// Whether streams can wait for peers without SMs, as pieces of calls by copy engines do.
    pub(in crate::cuda) streams_may_wait: bool,
}

impl AllReduceShape {
    /// A call between windows of linked devices, which has them to itself.
    #[cfg(test)]
    pub(in crate::cuda) fn between_windows(bytes: u64, dtype: DType, world: u32) -> Self {
        Self {
            bytes,
            dtype,
            world,
            input_window: true,
            output_window: true,
            direct: true,
            beside_compute: false,
            streams_may_wait: true,
        }
    }

    pub(in crate::cuda) fn vectors(&self) -> u64 {
        self.bytes.div_ceil(16)
    }

    /// Vectors that all ranks together put into an inbox in one shot.
    pub(in crate::cuda) fn one_shot_vectors(&self) -> u64 {
        u64::from(self.world) * self.vectors()
    }

    /// Whether an algorithm is about as fast with the memory there is as it was when it was measured.
    pub(in crate::cuda) fn pays_off(&self, algorithm: Algorithm, control: &Control) -> bool {
        AllReduce::named(algorithm).is_some_and(|entry| (entry.pays_off)(self, control))
    }

    /// The algorithm for what inboxes are too small for.
    pub(in crate::cuda) fn through_scratch(&self, control: &Control) -> Algorithm {
        let push = Algorithm::TwoShotPush;
        let pushes = self.can_serve(push, control) && self.pays_off(push, control);
        if pushes { push } else { Algorithm::TwoShotStages }
    }

    pub(in crate::cuda) fn can_serve(&self, algorithm: Algorithm, control: &Control) -> bool {
        AllReduce::named(algorithm).is_some_and(|entry| (entry.fits)(self, control))
    }
}

/// Whether all pairs of ranks have devices linked by NVLink, or one device.
pub(in crate::cuda) fn directly_linked(links: &Topology) -> bool {
    let ranks = 0..links.world();
    ranks.clone().all(|a| ranks.clone().all(|b| links.link(a, b).is_direct()))
}

/// Whether the Lamport protocol can carry the type: its reserved bit pattern is a NaN, for which another NaN
/// can be sent.
pub(crate) fn fits_lamport(dtype: DType) -> bool {
    use DType::{Bf16, F8E4m3, F8E5m2, F16, F32};
    matches!(dtype, F32 | F16 | Bf16 | F8E4m3 | F8E5m2)
}

#[cfg(test)]
mod tests {
    use crate::cuda::layout::footprint::Footprint;
    use symmpool_allocator::topology::{Link, LinkMatrix};

    use super::*;

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
