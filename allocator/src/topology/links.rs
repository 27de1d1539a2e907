//! The links between ranks, and the class of shape that they form, however they were read. Consistent
//! renumbering of the ranks does not change the class.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Kind of connection between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Link {
    /// Nothing: both ranks use one device, or memory of one host.
    Local,
    /// This many NVLinks, straight from device to device.
    NvLink(u32),
    /// NVSwitches, to which each of the two devices has at least this many links.
    NvSwitch(u32),
    /// No NVLink: PCI Express, or the link between CPU sockets.
    Pci,
    /// It could not be determined.
    Unknown,
}

impl Link {
    /// Whether the two ranks reach each other's memory with no third device, bus or socket between.
    pub fn is_direct(self) -> bool {
        match self {
            Self::Local => true,
            Self::NvLink(links) | Self::NvSwitch(links) => links > 0,
            Self::Pci | Self::Unknown => false,
        }
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.pad("-"),
            Self::NvLink(links) => f.pad(&format!("NV{links}")),
            Self::NvSwitch(links) => f.pad(&format!("SW{links}")),
            Self::Pci => f.pad("PCI"),
            Self::Unknown => f.pad("?"),
        }
    }
}

/// A link for each pair of ranks, symmetric by construction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkMatrix {
    world: u32,
    /// Pairs `(a, b)` with `a < b`, row by row.
    pairs: Vec<Link>,
}

impl LinkMatrix {
    /// Asks `link` for each pair `(a, b)` of ranks with `a < b`.
    pub fn from_fn(world: u32, mut link: impl FnMut(u32, u32) -> Link) -> Self {
        let mut pairs = Vec::new();
        for a in 0..world {
            for b in a + 1..world {
                pairs.push(link(a, b));
            }
        }
        Self { world, pairs }
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// The link between two ranks, in either order; `Local` from a rank to itself, `Unknown` for
    /// a rank that does not exist.
    pub fn link(&self, a: u32, b: u32) -> Link {
        if a >= self.world || b >= self.world {
            return Link::Unknown;
        }
        if a == b {
            return Link::Local;
        }
        let (a, b, world) = (u128::from(a.min(b)), u128::from(a.max(b)), u128::from(self.world));
        // Rows before `a` hold (world - 1) + (world - 2) + ... pairs.
        let index = a * (2 * world - a - 1) / 2 + (b - a - 1);
        // A matrix that came from a peer may be shorter than it says.
        usize::try_from(index)
            .ok()
            .and_then(|i| self.pairs.get(i))
            .copied()
            .unwrap_or(Link::Unknown)
    }

    fn each_pair(&self) -> impl Iterator<Item = Link> + '_ {
        (0..self.world).flat_map(move |a| (a + 1..self.world).map(move |b| self.link(a, b)))
    }
}

/// The classes of shape by which algorithms are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TopologyKind {
    /// Every rank reaches every other without passing through a third.
    FullyConnected {
        /// The fewest links between any two; 0 if no pair is connected by a wire (one rank, one device, host
        /// memory).
        links: u32,
    },
    /// Eight devices in two fully connected quads, each device linked to its counterpart in the
    /// other quad, as in a DGX-1.
    HybridCubeMesh,
    /// Some ranks reach each other only by PCI Express or through a third.
    Other,
    /// The links could not be determined.
    Unknown,
}

impl fmt::Display for TopologyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FullyConnected { links: 0 } => f.write_str("fully connected (no wires between)"),
            Self::FullyConnected { links } => write!(f, "fully connected ({links} links)"),
            Self::HybridCubeMesh => f.write_str("hybrid cube mesh"),
            Self::Other => f.write_str("other"),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

/// The class of a matrix.
pub fn classify(matrix: &LinkMatrix) -> TopologyKind {
    if matrix.each_pair().any(|link| link == Link::Unknown) {
        return TopologyKind::Unknown;
    }
    if matrix.each_pair().all(Link::is_direct) {
        let wires = matrix.each_pair().filter_map(|link| match link {
            Link::NvLink(links) | Link::NvSwitch(links) => Some(links),
            Link::Local | Link::Pci | Link::Unknown => None,
        });
        return TopologyKind::FullyConnected { links: wires.min().unwrap_or(0) };
    }
    if is_hybrid_cube_mesh(matrix) { TopologyKind::HybridCubeMesh } else { TopologyKind::Other }
}

/// Two quads with all six links each, and four links that pair their members off.
///
/// In that graph a neighbour of rank 0 shares two further neighbours with it if it is in the same
/// quad, and none if it is the counterpart; so the quads are found from the links alone.
fn is_hybrid_cube_mesh(matrix: &LinkMatrix) -> bool {
    if matrix.world() != 8 {
        return false;
    }
    let near = |a: u32, b: u32| a != b && matches!(matrix.link(a, b), Link::NvLink(1..));
    let shared = |a: u32, b: u32| (0..8).filter(|&c| near(a, c) && near(b, c)).count();
    let in_first = |a: u32| a == 0 || (near(0, a) && shared(0, a) == 2);
    let (first, second): (Vec<u32>, Vec<u32>) = (0..8).partition(|&a| in_first(a));
    let complete = |quad: &[u32]| quad.iter().all(|&a| quad.iter().all(|&b| a == b || near(a, b)));
    let counterparts = |a: u32, other: &[u32]| other.iter().filter(|&&b| near(a, b)).count();
    first.len() == 4
        && complete(&first)
        && complete(&second)
        && first.iter().all(|&a| counterparts(a, &second) == 1)
        && second.iter().all(|&b| counterparts(b, &first) == 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A DGX-1V, where some pairs have two links.
    fn dgx1() -> LinkMatrix {
        LinkMatrix::from_fn(8, |a, b| match (a / 4 == b / 4, b - a) {
            (true, 3) => Link::NvLink(2),
            (true, _) => Link::NvLink(1),
            (false, 4) => Link::NvLink(2),
            (false, _) => Link::Pci,
        })
    }

    fn relabelled(matrix: &LinkMatrix, order: &[u32]) -> LinkMatrix {
        LinkMatrix::from_fn(matrix.world(), |a, b| {
            matrix.link(order[a as usize], order[b as usize])
        })
    }

    #[test]
    fn a_link_is_the_same_from_both_ends() {
        let matrix = LinkMatrix::from_fn(7, |a, b| Link::NvLink(10 * a + b));
        for a in 0..7 {
            for b in a + 1..7 {
                assert_eq!(matrix.link(a, b), Link::NvLink(10 * a + b));
                assert_eq!(matrix.link(b, a), matrix.link(a, b));
            }
            assert_eq!(matrix.link(a, a), Link::Local);
            assert_eq!(matrix.link(a, 7), Link::Unknown);
        }
    }

    #[test]
    fn switched_and_direct_links_connect_fully() {
        let switched = LinkMatrix::from_fn(8, |_, _| Link::NvSwitch(18));
        assert_eq!(classify(&switched), TopologyKind::FullyConnected { links: 18 });
        let uneven = LinkMatrix::from_fn(4, |a, b| Link::NvLink(4 + a + b));
        assert_eq!(classify(&uneven), TopologyKind::FullyConnected { links: 5 });
    }

    #[test]
    fn ranks_without_wires_between_connect_fully() {
        assert_eq!(
            classify(&LinkMatrix::from_fn(1, |_, _| Link::Pci)),
            TopologyKind::FullyConnected { links: 0 }
        );
        let shared = LinkMatrix::from_fn(4, |_, _| Link::Local);
        assert_eq!(classify(&shared), TopologyKind::FullyConnected { links: 0 });
        let two_a_device =
            LinkMatrix::from_fn(
                4,
                |a, b| {
                    if a / 2 == b / 2 { Link::Local } else { Link::NvSwitch(18) }
                },
            );
        assert_eq!(classify(&two_a_device), TopologyKind::FullyConnected { links: 18 });
    }

    #[test]
    fn a_pair_without_links_is_not_fully_connected() {
        let one_missing = |missing| {
            LinkMatrix::from_fn(4, |a, b| if (a, b) == (1, 2) { missing } else { Link::NvLink(6) })
        };
        assert_eq!(classify(&one_missing(Link::Pci)), TopologyKind::Other);
        assert_eq!(classify(&one_missing(Link::NvLink(0))), TopologyKind::Other);
        assert_eq!(classify(&one_missing(Link::NvSwitch(0))), TopologyKind::Other);
        assert_eq!(classify(&one_missing(Link::Unknown)), TopologyKind::Unknown);
    }

    #[test]
    fn a_matrix_cut_short_is_unknown_and_not_a_panic() {
        let lying = LinkMatrix { world: u32::MAX, pairs: vec![Link::Local] };
        assert_eq!(lying.link(u32::MAX - 2, u32::MAX - 1), Link::Unknown);
        assert_eq!(classify(&lying), TopologyKind::Unknown);
    }

    #[test]
    fn a_dgx1_is_a_hybrid_cube_mesh_and_nothing_less_is() {
        assert_eq!(classify(&dgx1()), TopologyKind::HybridCubeMesh);
        // Any link fewer, or one more across, is another shape.
        for x in 0..8 {
            for y in x + 1..8 {
                let changed = LinkMatrix::from_fn(8, |a, b| match dgx1().link(a, b) {
                    link if (a, b) != (x, y) => link,
                    Link::Pci => Link::NvLink(1),
                    _ => Link::Pci,
                });
                assert_eq!(classify(&changed), TopologyKind::Other, "pair {x}, {y}");
            }
        }
    }

    #[test]
    fn a_ring_of_the_same_degree_is_not_a_hybrid_cube_mesh() {
        // Every rank has four links here too: to the next two on either side of a ring of eight.
        let other = LinkMatrix::from_fn(8, |a, b| {
            if matches!(b - a, 1 | 2 | 6 | 7) { Link::NvLink(1) } else { Link::Pci }
        });
        assert_eq!(classify(&other), TopologyKind::Other);
    }

    fn any_link() -> impl Strategy<Value = Link> {
        prop_oneof![
            Just(Link::Local),
            (0u32..3).prop_map(Link::NvLink),
            (1u32..3).prop_map(Link::NvSwitch),
            Just(Link::Pci),
            (0u32..8).prop_map(|n| if n == 0 { Link::Unknown } else { Link::NvLink(1) }),
        ]
    }

    fn any_matrix() -> impl Strategy<Value = LinkMatrix> {
        (1u32..10).prop_flat_map(|world| {
            let pairs = (world * (world - 1) / 2) as usize;
            prop::collection::vec(any_link(), pairs)
                .prop_map(move |pairs| LinkMatrix { world, pairs })
        })
    }

    fn with_order(
        matrix: impl Strategy<Value = LinkMatrix>,
    ) -> impl Strategy<Value = (LinkMatrix, Vec<u32>)> {
        matrix.prop_flat_map(|matrix| {
            let order: Vec<u32> = (0..matrix.world()).collect();
            (Just(matrix), Just(order).prop_shuffle())
        })
    }

    proptest! {
        #[test]
        fn relabelling_ranks_does_not_change_the_class((matrix, order) in with_order(any_matrix())) {
            prop_assert_eq!(classify(&relabelled(&matrix, &order)), classify(&matrix));
        }

        #[test]
        fn a_dgx1_is_known_however_its_ranks_are_numbered(
            (matrix, order) in with_order(Just(dgx1()))
        ) {
            prop_assert_eq!(classify(&relabelled(&matrix, &order)), TopologyKind::HybridCubeMesh);
        }

        #[test]
        fn a_dgx1_short_of_links_is_other_however_its_ranks_are_numbered(
            (matrix, order) in with_order(Just(dgx1())),
            broken in 0usize..28,
        ) {
            let mut matrix = matrix;
            prop_assume!(matrix.pairs[broken].is_direct());
            matrix.pairs[broken] = Link::NvLink(0);
            prop_assert_eq!(classify(&relabelled(&matrix, &order)), TopologyKind::Other);
        }
    }
}
