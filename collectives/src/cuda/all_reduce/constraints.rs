//! Constraints that decide which all-reduce algorithm of a device can serve a call.

use symmpool_allocator::topology::Topology;

use crate::DType;
use crate::cuda::layout::params::ControlLayout;

/// Calls of fewer bytes gain nothing from copy engines, and some of their shares may be empty.
pub(in crate::cuda) const MIN_COPY_BYTES: u64 = 1 << 20;

/// Properties of a call by which the algorithm of an all-reduce is chosen. They are the same on every rank.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct AllReduceShape {
    pub(in crate::cuda) bytes: u64,
    pub(in crate::cuda) dtype: DType,
    pub(in crate::cuda) world: u32,
    pub(in crate::cuda) input_window: bool,
    pub(in crate::cuda) output_window: bool,
    /// Whether all ranks' devices are linked by NVLink, or are one device.
    pub(in crate::cuda) nvlinked: bool,
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
            nvlinked: true,
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
}

/// A bound of algorithms that have none.
pub(super) fn always(_: &AllReduceShape, _: &ControlLayout) -> bool {
    true
}

/// Bytes of a call that scratch holds at once.
pub(super) fn at_once(shape: &AllReduceShape, control: &ControlLayout) -> u64 {
    control.scratch_room(shape.world) * u64::from(shape.world)
}

/// Whether all pairs of ranks have devices linked by NVLink, or one device.
pub(in crate::cuda) fn are_nvlinked(links: &Topology) -> bool {
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
    use symmpool_allocator::topology::{Link, LinkMatrix};

    use super::*;

    #[test]
    fn ranks_are_linked_directly_if_all_pairs_are() {
        let one_pair =
            |link| {
                let matrix = LinkMatrix::from_fn(4, |a, b| {
                    if (a, b) == (1, 3) { link } else { Link::NvSwitch(18) }
                });
                are_nvlinked(&Topology::from_matrix(matrix))
            };
        assert!(one_pair(Link::NvLink(4)) && one_pair(Link::Local));
        assert!(!one_pair(Link::Pci) && !one_pair(Link::Unknown) && !one_pair(Link::NvLink(0)));
        assert!(are_nvlinked(&Topology::host(2)), "one device");
        assert!(!are_nvlinked(&Topology::unknown(2)) && are_nvlinked(&Topology::unknown(1)));
    }
}
