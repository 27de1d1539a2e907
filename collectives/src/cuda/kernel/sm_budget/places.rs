//! A model of devices that put blocks wherever there is room: does every kernel find its places?
//!
//! Every placement and every interleaving is tried. A block of a kernel takes one place of an SM or two, and keeps them until its
//! call has all of its blocks on all ranks. Kernels on one stream come one after the other. A device begins kernels in the order
//! of their launches: while a block of one finds no room, none of a later one is placed, as devices have it.

use std::collections::BTreeSet;

use super::PLACES;

const SMS: usize = 4;
/// The part of one of four communicators.
const PART: u32 = PLACES * SMS as u32 / 4;

/// A kernel of a rank: the call that it belongs to, its stream, its blocks, and how many places each of these takes.
#[derive(Clone, Copy)]
struct Kernel {
    call: usize,
    stream: usize,
    blocks: u32,
    places: u32,
}

/// For each kernel of a rank how many of its blocks each SM has; `None` once it has ended.
type Rank = Vec<Option<[u32; SMS]>>;

/// A call with a communicator's part of the device, in blocks of so many places.
fn call(call: usize, stream: usize, places: u32) -> Kernel {
    Kernel { call, stream, blocks: PART / places, places }
}

fn is_whole(kernel: &Kernel, held: Option<[u32; SMS]>) -> bool {
    held.is_some_and(|held| held.iter().sum::<u32>() == kernel.blocks)
}

/// The kernel of a rank whose block is placed next, if there is one.
fn next_to_place(kernels: &[Kernel], held: &Rank) -> Option<usize> {
    let is_behind = |nth: usize| {
        (0..nth).any(|other| held[other].is_some() && kernels[other].stream == kernels[nth].stream)
    };
    let waits = |nth: &usize| {
        held[*nth].is_some() && !is_whole(&kernels[*nth], held[*nth]) && !is_behind(*nth)
    };
    (0..kernels.len()).find(waits)
}

/// All states that may come next. Of SMs that hold the same, one stands for all.
fn steps(ranks: &[Vec<Kernel>], state: &[Rank]) -> Vec<Vec<Rank>> {
    let mut found = Vec::new();
    for (rank, held) in state.iter().enumerate() {
        let Some(nth) = next_to_place(&ranks[rank], held) else { continue };
        let on = |sm: usize| -> Vec<u32> {
            held.iter().map(|held| held.map_or(0, |held| held[sm])).collect()
        };
        let mut tried = BTreeSet::new();
        for sm in 0..SMS {
            let taken: u32 =
                on(sm).iter().zip(&ranks[rank]).map(|(blocks, of)| blocks * of.places).sum();
            if taken + ranks[rank][nth].places <= PLACES && tried.insert(on(sm)) {
                let mut next = state.to_vec();
                next[rank][nth].as_mut().expect("it has not ended")[sm] += 1;
                sort_sms(&mut next[rank]);
                found.push(next);
            }
        }
    }
    for kernel in &ranks[0] {
        let at = |kernels: &Vec<Kernel>| {
            let same = |other: &Kernel| other.call == kernel.call;
            kernels.iter().position(same).expect("ranks make the same calls")
        };
        let places: Vec<usize> = ranks.iter().map(at).collect();
        let meets = |rank: usize| is_whole(&ranks[rank][places[rank]], state[rank][places[rank]]);
        if (0..ranks.len()).all(meets) {
            let mut next = state.to_vec();
            (0..ranks.len()).for_each(|rank| next[rank][places[rank]] = None);
            // An end never stands in another kernel's way, so it may come at once.
            return vec![next];
        }
    }
    found
}

/// Numbers a rank's SMs anew by what they hold, so that states which differ in numbers alone are one.
fn sort_sms(rank: &mut Rank) {
    let column = |sm: usize| rank.iter().map(|held| held.map_or(0, |held| held[sm])).collect();
    let mut columns: Vec<Vec<u32>> = (0..SMS).map(column).collect();
    columns.sort();
    for (nth, held) in rank.iter_mut().enumerate() {
        if let Some(held) = held {
            *held = std::array::from_fn(|sm| columns[sm][nth]);
        }
    }
}

/// Whether ranks with these kernels may wait for each other for ever.
fn finds_a_circle(ranks: &[Vec<Kernel>]) -> bool {
    let first: Vec<Rank> = ranks.iter().map(|all| vec![Some([0; SMS]); all.len()]).collect();
    let (mut seen, mut left) = (BTreeSet::from([first.clone()]), vec![first]);
    while let Some(state) = left.pop() {
        let next = steps(ranks, &state);
        if next.is_empty() && state.iter().flatten().any(Option::is_some) {
            return true;
        }
        left.extend(next.into_iter().filter(|next| seen.insert(next.clone())));
    }
    false
}

/// The calls of three ranks, of which the first communicator's has blocks of so many places. Each rank has calls of two others in
/// front of it, and the third one's behind it.
fn in_three_orders(places: u32) -> Vec<Vec<Kernel>> {
    let of = |comm: usize| call(comm, 7 + comm, if comm == 0 { places } else { 1 });
    [[1, 2, 0, 3], [2, 3, 0, 1], [3, 1, 0, 2]].map(|order| order.map(of).to_vec()).to_vec()
}

#[test]
fn blocks_of_one_place_get_through_in_any_order() {
    assert!(!finds_a_circle(&in_three_orders(1)));
    let of = |order: [usize; 4]| order.map(|comm| call(comm, 7 + comm, 1)).to_vec();
    for other in [[3, 2, 1, 0], [1, 0, 3, 2], [2, 3, 0, 1]] {
        assert!(!finds_a_circle(&[of([0, 1, 2, 3]), of(other)]), "{other:?}");
    }
}

/// On one rank the second communicator's call is behind the first one's, and on the other rank on a stream of its own.
#[test]
fn blocks_of_one_place_need_no_common_streams() {
    let (first, third, fourth) = (call(0, 7, 1), call(2, 9, 1), call(3, 10, 1));
    let rank0 = vec![call(1, 8, 1), first, third, fourth];
    for rank1 in
        [vec![first, call(1, 7, 1), third, fourth], vec![fourth, third, first, call(1, 7, 1)]]
    {
        assert!(!finds_a_circle(&[rank0.clone(), rank1]));
    }
}

/// Larger blocks are safe for two communicators, in one of them and in both.
#[test]
fn two_communicators_may_have_larger_blocks() {
    let of = |comm, places| Kernel { blocks: SMS as u32 / places, ..call(comm, 7 + comm, places) };
    for (one, other) in [(1, 2), (2, 1), (2, 2)] {
        let (first, second) = (of(0, one), of(1, other));
        let behind = Kernel { call: 2, ..first };
        for rank1 in [vec![first, second, behind], vec![second, first, behind]] {
            let rank2 = vec![first, behind, second];
            let ranks = [vec![first, second, behind], rank1, rank2];
            assert!(!finds_a_circle(&ranks), "{one} and {other} places");
        }
    }
}

/// Hence such blocks count as SMs (`BudgetMember::count_sms`).
#[test]
fn larger_blocks_of_several_may_find_no_room() {
    assert!(finds_a_circle(&in_three_orders(2)));
}

#[test]
fn more_than_all_places_are_a_circle() {
    let of = |comm| Kernel { blocks: 5, ..call(comm, 7 + comm, 1) };
    assert!(finds_a_circle(&[vec![of(0), of(1)], vec![of(1), of(0)]]));
}
