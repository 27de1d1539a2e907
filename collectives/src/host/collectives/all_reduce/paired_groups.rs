//! Two groups of ranks, all linked inside, each rank with a partner in the other: found in any set
//! of links, the same way by every rank.

use symmpool_allocator::topology::{Mesh, Topology};

use crate::host::call::named;

/// More ranks than such machines have; keeps the search short.
const MOST: u32 = 16;
/// Up to so many ranks that are all linked stay one group: nothing need be passed on.
const ONE_GROUP: u32 = 4;

/// A set of ranks.
type Set = u16;

/// How the ranks are grouped. Of one group, all linked, no rank has a partner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Halves {
    world: u32,
    /// The group of rank 0; the other ranks are the second.
    first: Set,
    /// A rank's partner, itself if there is none.
    partners: [u8; MOST as usize],
}

impl Halves {
    /// The grouping of these links, or what they lack for one.
    ///
    /// Of several groupings it is the first, by the numbers of the ranks in rank 0's group.
    pub(crate) fn find(links: &Topology) -> Result<Self, String> {
        let world = links.world();
        if links.mesh() == Mesh::Unknown {
            return Err("the links between the ranks are not known; give them (`links`)".into());
        }
        if world > MOST {
            return Err(format!("{world} ranks, where at most {MOST} are possible"));
        }
        let graph = Graph::new(world, |a, b| links.link(a, b).is_direct());
        graph.halves().map_err(|lack| lack.to_string())
    }

    /// The rank of the other group that `rank` is paired with, if there is another group.
    #[inline]
    pub(crate) fn partner(&self, rank: u32) -> Option<u32> {
        let partner = u32::from(self.partners[rank as usize]);
        (partner != rank).then_some(partner)
    }

    /// The other ranks of `rank`'s group, starting after it, so that not all turn to the same one
    /// at once.
    pub(crate) fn mates(&self, rank: u32) -> impl Iterator<Item = u32> + use<> {
        let group = self.group(rank);
        (rank + 1..self.world).chain(0..rank).filter(move |mate| group >> mate & 1 != 0)
    }

    /// How many [`Self::mates`] a rank has: the same for all.
    pub(crate) fn mate_count(&self) -> usize {
        self.first.count_ones() as usize - 1
    }

    /// Whether two ranks are of one group.
    pub(crate) fn together(&self, a: u32, b: u32) -> bool {
        self.group(a) >> b & 1 != 0
    }

    /// The number of `mate` among the mates of `rank`, in rank order.
    pub(crate) fn number(&self, rank: u32, mate: u32) -> usize {
        let others = self.group(rank) & !(1 << rank);
        (others & ((1 << mate) - 1)).count_ones() as usize
    }

    fn group(&self, rank: u32) -> Set {
        if self.first >> rank & 1 != 0 { self.first } else { all(self.world) & !self.first }
    }
}

/// Every rank.
fn all(world: u32) -> Set {
    Set::MAX >> (MOST - world)
}

fn members(set: Set) -> impl Iterator<Item = u32> {
    (0..MOST).filter(move |rank| set >> rank & 1 != 0)
}

/// Who is linked to whom.
#[derive(Clone, Debug)]
struct Graph {
    world: u32,
    near: [Set; MOST as usize],
}

impl Graph {
    /// Of at most [`MOST`] ranks; asks for each pair once.
    fn new(world: u32, mut linked: impl FnMut(u32, u32) -> bool) -> Self {
        let mut graph = Self { world, near: [0; MOST as usize] };
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
        self.near[a as usize] |= 1 << b;
        self.near[b as usize] |= 1 << a;
    }

    fn has(&self, a: u32, b: u32) -> bool {
        self.near[a as usize] >> b & 1 != 0
    }

    /// The links that a group lacks inside.
    fn gaps(&self, group: Set) -> impl Iterator<Item = (u32, u32)> {
        members(group).flat_map(move |a| {
            members(group).filter(move |b| a < *b && !self.has(a, *b)).map(move |b| (a, b))
        })
    }

    /// Of all ways to split the ranks in two, the first to which no link is missing, else what is
    /// missing to the way that lacks fewest.
    fn halves(&self) -> Result<Halves, Lack> {
        let (world, all) = (self.world, all(self.world));
        if world <= ONE_GROUP || world % 2 == 1 {
            let gaps: Vec<_> = self.gaps(all).collect();
            if gaps.is_empty() {
                let mut partners = [0; MOST as usize];
                (0..world).for_each(|rank| partners[rank as usize] = rank as u8);
                return Ok(Halves { world, first: all, partners });
            }
            if world % 2 == 1 {
                return Err(Lack { first: all, second: 0, links: gaps });
            }
        }
        let mut nearest: Option<Lack> = None;
        for first in (0..=all).filter(|set| set & 1 != 0 && set.count_ones() == world / 2) {
            let second = all & !first;
            let fewest = nearest.as_ref().map_or(usize::MAX, |lack| lack.links.len());
            let gaps = self.gaps(first).chain(self.gaps(second));
            let mut links: Vec<_> = gaps.take(fewest).collect();
            if links.len() >= fewest {
                continue;
            }
            let (partners, unpaired) = self.pair(first, second);
            links.extend(unpaired);
            if links.is_empty() {
                return Ok(Halves { world, first, partners });
            }
            if links.len() < fewest {
                nearest = Some(Lack { first, second, links });
            }
        }
        Err(nearest.unwrap_or(Lack { first: all, second: 0, links: Vec::new() }))
    }

    /// Pairs as many ranks of the first group as can be with one each of the second that they are
    /// linked to; those left over pair off in order, as links that would have to be there.
    fn pair(&self, first: Set, second: Set) -> ([u8; MOST as usize], Vec<(u32, u32)>) {
        let mut holders = [None; MOST as usize];
        for rank in members(first) {
            self.seat(rank, second, &mut holders, &mut 0);
        }
        let mut partners = [0; MOST as usize];
        let mut left = first;
        let mut free = Vec::new();
        for b in members(second) {
            match holders[b as usize] {
                Some(a) => {
                    (partners[a as usize], partners[b as usize]) = (b as u8, a as u8);
                    left &= !(1 << a);
                }
                None => free.push(b),
            }
        }
        (partners, members(left).zip(free).collect())
    }

    /// Finds `rank` a partner in `second`, moving others where that helps.
    fn seat(
        &self,
        rank: u32,
        second: Set,
        holders: &mut [Option<u32>; MOST as usize],
        tried: &mut Set,
    ) -> bool {
        let near = second & self.near[rank as usize];
        // A free one first: then nobody has to move.
        if let Some(b) = members(near).find(|b| holders[*b as usize].is_none()) {
            holders[b as usize] = Some(rank);
            return true;
        }
        for b in members(near) {
            if *tried >> b & 1 != 0 {
                continue;
            }
            *tried |= 1 << b;
            let holder = holders[b as usize];
            if holder.is_none_or(|holder| self.seat(holder, second, holders, tried)) {
                holders[b as usize] = Some(rank);
                return true;
            }
        }
        false
    }
}

/// The links without which a split of the ranks is no [`Halves`].
#[derive(Debug)]
struct Lack {
    first: Set,
    second: Set,
    links: Vec<(u32, u32)>,
}

impl std::fmt::Display for Lack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let group = |set| named(&members(set).collect::<Vec<u32>>());
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

    /// What the schedule relies on.
    fn check(graph: &Graph, halves: &Halves) {
        let world = graph.world;
        for a in 0..world {
            let mates: Vec<u32> = halves.mates(a).collect();
            assert_eq!(mates.len(), halves.mate_count());
            for b in mates {
                assert!(graph.has(a, b) && halves.together(a, b) && halves.together(b, a));
                assert!(halves.number(a, b) < halves.mate_count());
            }
            let mut numbers: Vec<_> = halves.mates(a).map(|mate| halves.number(a, mate)).collect();
            numbers.sort_unstable();
            assert!(numbers.into_iter().eq(0..halves.mate_count()));
            match halves.partner(a) {
                Some(partner) => {
                    assert!(graph.has(a, partner) && !halves.together(a, partner));
                    assert_eq!(halves.partner(partner), Some(a));
                    assert_eq!(world as usize, 2 * halves.mate_count() + 2);
                }
                None => assert_eq!(world as usize, halves.mate_count() + 1),
            }
        }
    }

    #[test]
    fn ranks_that_are_all_linked_are_one_group_or_two() {
        for world in 1..=MOST {
            let graph = Graph::new(world, |_, _| true);
            let halves = graph.halves().unwrap();
            check(&graph, &halves);
            assert_eq!(halves.partner(0).is_some(), world > 4 && world % 2 == 0, "{world} ranks");
        }
        let eight = Halves::find(&Topology::host(8)).unwrap();
        assert_eq!((eight.first, eight.partner(1)), (0b1111, Some(5)));
    }

    #[test]
    fn what_is_missing_is_named() {
        let links = |world, linked: &dyn Fn(u32, u32) -> bool| {
            let link = |a, b| if linked(a, b) { Link::NvLink(1) } else { Link::Pci };
            Halves::find(&Topology::from_matrix(LinkMatrix::from_fn(world, link)))
        };
        let text = links(8, &|a, b| a / 4 == b / 4 || (a + 4 == b && a != 2)).unwrap_err();
        assert!(text.contains("ranks 0-3 and ranks 4-7"), "{text}");
        assert!(text.ends_with("no link between ranks 2 and 6"), "{text}");
        let text = links(5, &|a, b| (a, b) != (1, 3)).unwrap_err();
        assert!(text.ends_with("no link between ranks 1 and 3"), "{text}");
        assert!(links(2, &|_, _| false).unwrap_err().contains("between ranks 0 and 1"));
        assert!(links(17, &|_, _| true).unwrap_err().contains("at most 16"));
        assert!(links(16, &|_, _| true).is_ok());
        assert!(Halves::find(&Topology::unknown(8)).unwrap_err().contains("not known"));
        // A square is two pairs.
        let square = links(4, &|a, b| b - a != 2).unwrap();
        assert_eq!((square.first, square.partner(0)), (0b11, Some(3)));
    }

    #[test]
    fn a_rank_with_a_choice_of_partners_leaves_another_its_only_one() {
        // The first free one of rank 0 is rank 4, the only one of rank 1; rank 5, the next, the only one of
        // rank 2.
        let across = [(0, 4), (0, 5), (0, 7), (1, 4), (2, 5), (3, 6)];
        let graph = Graph::new(8, |a, b| a / 4 == b / 4 || across.contains(&(a, b)));
        let halves = graph.halves().unwrap();
        check(&graph, &halves);
        assert_eq!((0..4).map(|a| halves.partner(a).unwrap()).collect::<Vec<_>>(), [7, 4, 5, 6]);
    }

    proptest! {
        #[test]
        fn a_cube_mesh_is_found_however_its_ranks_are_numbered(
            order in Just((0..8).collect::<Vec<u32>>()).prop_shuffle()
        ) {
            let graph = cube_mesh(&order);
            let halves = graph.halves().unwrap();
            check(&graph, &halves);
            for a in 0..8 {
                let partner = halves.partner(a).unwrap();
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
            if let Err(lack) = graph.halves() {
                prop_assert!(!lack.links.is_empty());
                // No other way lacks fewer.
                let halves = |set: &Set| set & 1 != 0 && 2 * set.count_ones() == world;
                for first in (0..=all(world)).filter(halves) {
                    let second = all(world) & !first;
                    let gaps = graph.gaps(first).chain(graph.gaps(second)).count();
                    let fewest = gaps + graph.pair(first, second).1.len();
                    prop_assert!(lack.links.len() <= fewest);
                }
                for &(a, b) in &lack.links {
                    prop_assert!(!graph.has(a, b));
                    graph.link(a, b);
                }
            }
            check(&graph, &graph.halves().unwrap());
        }
    }
}
