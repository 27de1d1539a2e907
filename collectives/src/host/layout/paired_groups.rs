//! Finds two groups of ranks such that all ranks of a group are linked to each other, and each rank is linked
//! to one partner in the other group. Every rank computes the same groups from the same links.

use symmpool_allocator::topology::{Topology, TopologyKind};

use crate::call::rank_list;
use crate::matching::assign;

/// The most ranks of a search: more than such machines have. It tries every split of the ranks, so the limit keeps it short.
const MAX_RANKS: u32 = 16;
/// Up to this many ranks stay one group if all are linked: no data has to be forwarded then.
const MAX_SINGLE_GROUP: u32 = 4;

/// A set of ranks, one bit for each.
type RankSet = u16;

/// How the ranks are grouped. If there is one group only, no rank has a partner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PairedGroups {
    world: u32,
    /// The group of rank 0; the other ranks are the second.
    first: RankSet,
    /// The partner of each rank, or the rank itself where there is one group only.
    partners: [u8; MAX_RANKS as usize],
}

impl PairedGroups {
    /// The groups that these links allow, or a text that names the links that are missing.
    ///
    /// If several groupings are possible, the one whose first group is the smallest number as a bit set.
    pub(crate) fn find(links: &Topology) -> Result<Self, String> {
        let world = links.world();
        if links.kind() == TopologyKind::Unknown {
            return Err("the links between the ranks are not known; give them (`links`)".into());
        }
        if world > MAX_RANKS {
            return Err(format!("{world} ranks, where at most {MAX_RANKS} are possible"));
        }
        let graph = Graph::new(world, |a, b| links.link(a, b).is_direct());
        graph.paired_groups().map_err(|missing| missing.to_string())
    }

    /// The rank of the other group that `rank` is paired with, if there is another group.
    #[inline]
    pub(crate) fn partner(&self, rank: u32) -> Option<u32> {
        let partner = u32::from(self.partners[rank as usize]);
        (partner != rank).then_some(partner)
    }

    /// The other ranks of `rank`'s group, beginning with the one after it, so that not all ranks access the
    /// same peer at once.
    pub(crate) fn group_peers(&self, rank: u32) -> impl Iterator<Item = u32> + use<> {
        let group = self.group(rank);
        (rank + 1..self.world).chain(0..rank).filter(move |peer| group >> peer & 1 != 0)
    }

    /// How many [`Self::group_peers`] a rank has. It is the same for all ranks.
    pub(crate) fn group_peer_count(&self) -> usize {
        self.first.count_ones() as usize - 1
    }

    /// Whether two ranks are in the same group.
    pub(crate) fn same_group(&self, a: u32, b: u32) -> bool {
        self.group(a) >> b & 1 != 0
    }

    /// The index of `peer` among the [`Self::group_peers`] of `rank`, in rank order.
    pub(crate) fn index_in_group(&self, rank: u32, peer: u32) -> usize {
        let others = self.group(rank) & !(1 << rank);
        (others & ((1 << peer) - 1)).count_ones() as usize
    }

    fn group(&self, rank: u32) -> RankSet {
        if self.first >> rank & 1 != 0 { self.first } else { all(self.world) & !self.first }
    }
}

/// The set of all ranks.
fn all(world: u32) -> RankSet {
    RankSet::MAX >> (MAX_RANKS - world)
}

fn members(set: RankSet) -> impl Iterator<Item = u32> {
    (0..MAX_RANKS).filter(move |rank| set >> rank & 1 != 0)
}

/// Which ranks are linked to each other directly.
#[derive(Clone, Debug)]
struct Graph {
    world: u32,
    neighbors: [RankSet; MAX_RANKS as usize],
}

impl Graph {
    /// A graph of at most [`MAX_RANKS`] ranks. Calls `linked` once for each pair.
    fn new(world: u32, mut linked: impl FnMut(u32, u32) -> bool) -> Self {
        let mut graph = Self { world, neighbors: [0; MAX_RANKS as usize] };
        for a in 0..world {
            for b in a + 1..world {
                if linked(a, b) {
                    graph.link(a, b);
                }
            }
        }
        graph
    }

    fn link(&mut self, a: u32, b: u32) {
        self.neighbors[a as usize] |= 1 << b;
        self.neighbors[b as usize] |= 1 << a;
    }

    fn has(&self, a: u32, b: u32) -> bool {
        self.neighbors[a as usize] >> b & 1 != 0
    }

    /// The links that are missing inside a group.
    fn gaps(&self, group: RankSet) -> impl Iterator<Item = (u32, u32)> {
        members(group).flat_map(move |a| {
            members(group).filter(move |b| a < *b && !self.has(a, *b)).map(move |b| (a, b))
        })
    }

    /// The first split of the ranks into two groups for which no link is missing, else the missing links of
    /// the split that lacks the fewest.
    fn paired_groups(&self) -> Result<PairedGroups, MissingLinks> {
        let (world, all) = (self.world, all(self.world));
        if world <= MAX_SINGLE_GROUP || world % 2 == 1 {
            let gaps: Vec<_> = self.gaps(all).collect();
            if gaps.is_empty() {
                let mut partners = [0; MAX_RANKS as usize];
                (0..world).for_each(|rank| partners[rank as usize] = rank as u8);
                return Ok(PairedGroups { world, first: all, partners });
            }
            if world % 2 == 1 {
                return Err(MissingLinks { first: all, second: 0, links: gaps });
            }
        }
        let mut nearest: Option<MissingLinks> = None;
        for first in (0..=all).filter(|set| set & 1 != 0 && set.count_ones() == world / 2) {
            let second = all & !first;
            let fewest = nearest.as_ref().map_or(usize::MAX, |missing| missing.links.len());
            let gaps = self.gaps(first).chain(self.gaps(second));
            let mut links: Vec<_> = gaps.take(fewest).collect();
            if links.len() >= fewest {
                continue;
            }
            let (partners, unpaired) = self.pair(first, second);
            links.extend(unpaired);
            if links.is_empty() {
                return Ok(PairedGroups { world, first, partners });
            }
            if links.len() < fewest {
                nearest = Some(MissingLinks { first, second, links });
            }
        }
        Err(nearest.unwrap_or(MissingLinks { first: all, second: 0, links: Vec::new() }))
    }

    /// Pairs as many ranks of the first group as possible with ranks of the second that they are linked to.
    /// The ranks left over are paired in order and returned as missing links.
    fn pair(&self, first: RankSet, second: RankSet) -> ([u8; MAX_RANKS as usize], Vec<(u32, u32)>) {
        let is_candidate = |a: usize, b: usize| (second & self.neighbors[a]) >> b & 1 != 0;
        let assigned =
            assign(members(first).map(|rank| rank as usize), MAX_RANKS as usize, is_candidate);
        let mut partners = [0; MAX_RANKS as usize];
        let mut left = first;
        let mut free = Vec::new();
        for b in members(second) {
            match assigned[b as usize] {
                Some(a) => {
                    (partners[a], partners[b as usize]) = (b as u8, a as u8);
                    left &= !(1 << a);
                }
                None => free.push(b),
            }
        }
        (partners, members(left).zip(free).collect())
    }
}

/// The links that a split of the ranks lacks to be [`PairedGroups`].
#[derive(Debug)]
struct MissingLinks {
    first: RankSet,
    second: RankSet,
    links: Vec<(u32, u32)>,
}

impl std::fmt::Display for MissingLinks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let group = |set| rank_list(&members(set).collect::<Vec<u32>>());
        if self.second == 0 {
            write!(f, "an odd number of ranks must all be linked, and there is no link")?;
        } else {
            write!(
                f,
                "two groups of ranks are needed that are all linked inside, each rank with one of \
                 the other group; the nearest are {} and {}, and there is no link",
                group(self.first),
                group(self.second)
            )?;
        }
        for (i, (a, b)) in self.links.iter().enumerate() {
            write!(f, "{} between ranks {a} and {b}", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use symmpool_allocator::topology::{Link, LinkMatrix};

    use super::*;

    fn cube_mesh(order: &[u32]) -> Graph {
        Graph::new(8, |a, b| {
            let (a, b) = (order[a as usize], order[b as usize]);
            a / 4 == b / 4 || a % 4 == b % 4
        })
    }

    /// Checks what the `cube_mesh` algorithm relies on.
    fn check(graph: &Graph, groups: &PairedGroups) {
        let world = graph.world;
        for a in 0..world {
            let peers: Vec<u32> = groups.group_peers(a).collect();
            assert_eq!(peers.len(), groups.group_peer_count());
            for b in peers {
                assert!(graph.has(a, b) && groups.same_group(a, b) && groups.same_group(b, a));
                assert!(groups.index_in_group(a, b) < groups.group_peer_count());
            }
            let mut numbers: Vec<_> =
                groups.group_peers(a).map(|peer| groups.index_in_group(a, peer)).collect();
            numbers.sort_unstable();
            assert!(numbers.into_iter().eq(0..groups.group_peer_count()));
            match groups.partner(a) {
                Some(partner) => {
                    assert!(graph.has(a, partner) && !groups.same_group(a, partner));
                    assert_eq!(groups.partner(partner), Some(a));
                    assert_eq!(world as usize, 2 * groups.group_peer_count() + 2);
                }
                None => assert_eq!(world as usize, groups.group_peer_count() + 1),
            }
        }
    }

    #[test]
    fn ranks_that_are_all_linked_are_one_group_or_two() {
        for world in 1..=MAX_RANKS {
            let graph = Graph::new(world, |_, _| true);
            let groups = graph.paired_groups().unwrap();
            check(&graph, &groups);
            assert_eq!(groups.partner(0).is_some(), world > 4 && world % 2 == 0, "{world} ranks");
        }
        let eight = PairedGroups::find(&Topology::host(8)).unwrap();
        assert_eq!((eight.first, eight.partner(1)), (0b1111, Some(5)));
    }

    #[test]
    fn what_is_missing_is_named() {
        let links = |world, linked: &dyn Fn(u32, u32) -> bool| {
            let link = |a, b| if linked(a, b) { Link::NvLink(1) } else { Link::Pci };
            PairedGroups::find(&Topology::from_matrix(LinkMatrix::from_fn(world, link)))
        };
        let text = links(8, &|a, b| a / 4 == b / 4 || (a + 4 == b && a != 2)).unwrap_err();
        assert!(text.contains("ranks 0-3 and ranks 4-7"), "{text}");
        assert!(text.ends_with("no link between ranks 2 and 6"), "{text}");
        let text = links(5, &|a, b| (a, b) != (1, 3)).unwrap_err();
        assert!(text.ends_with("no link between ranks 1 and 3"), "{text}");
        assert!(links(2, &|_, _| false).unwrap_err().contains("between ranks 0 and 1"));
        assert!(links(17, &|_, _| true).unwrap_err().contains("at most 16"));
        assert!(links(16, &|_, _| true).is_ok());
        assert!(PairedGroups::find(&Topology::unknown(8)).unwrap_err().contains("not known"));
        // Four ranks linked in a square are two groups of two.
        let square = links(4, &|a, b| b - a != 2).unwrap();
        assert_eq!((square.first, square.partner(0)), (0b11, Some(3)));
    }

    #[test]
    fn a_rank_with_a_choice_of_partners_leaves_another_its_only_one() {
        // Rank 0 is linked to ranks 4, 5 and 7, but rank 4 is the only link of rank 1, and rank 5 of rank 2.
        let across = [(0, 4), (0, 5), (0, 7), (1, 4), (2, 5), (3, 6)];
        let graph = Graph::new(8, |a, b| a / 4 == b / 4 || across.contains(&(a, b)));
        let groups = graph.paired_groups().unwrap();
        check(&graph, &groups);
        assert_eq!((0..4).map(|a| groups.partner(a).unwrap()).collect::<Vec<_>>(), [7, 4, 5, 6]);
    }

    proptest! {
        #[test]
        fn a_cube_mesh_is_found_however_its_ranks_are_numbered(
            order in Just((0..8).collect::<Vec<u32>>()).prop_shuffle()
        ) {
            let graph = cube_mesh(&order);
            let groups = graph.paired_groups().unwrap();
            check(&graph, &groups);
            for a in 0..8 {
                let partner = groups.partner(a).unwrap();
                prop_assert_eq!(order[a as usize] % 4, order[partner as usize] % 4);
            }
        }

        #[test]
        fn any_links_fit_once_those_that_are_named_are_there(
            world in 1u32..=10,
            pairs in proptest::collection::vec(0u32..4, 45),
        ) {
            let mut pairs = pairs.into_iter();
            let mut graph = Graph::new(world, |_, _| pairs.next().unwrap() > 0);
            if let Err(missing) = graph.paired_groups() {
                prop_assert!(!missing.links.is_empty());
                // No other split lacks fewer links.
                let halves = |set: &RankSet| set & 1 != 0 && 2 * set.count_ones() == world;
                for first in (0..=all(world)).filter(halves) {
                    let second = all(world) & !first;
                    let gaps = graph.gaps(first).chain(graph.gaps(second)).count();
                    let fewest = gaps + graph.pair(first, second).1.len();
                    prop_assert!(missing.links.len() <= fewest);
                }
                for &(a, b) in &missing.links {
                    prop_assert!(!graph.has(a, b));
                    graph.link(a, b);
                }
            }
            check(&graph, &graph.paired_groups().unwrap());
        }
    }
}
