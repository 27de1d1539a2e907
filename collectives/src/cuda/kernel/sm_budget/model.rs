//! A model of devices whose kernels wait for each other, in which every interleaving is tried: do budgets keep ranks from
//! waiting for each other for ever?
//!
//! A rank's host makes its calls one after the other, in an order of its own between communicators. A kernel takes the free SMs
//! of its device as soon as the kernel before it on its stream, and the call before it of its communicator, have ended. It may
//! get a part of what it needs, and keeps that. It ends when it has all that it needs on every rank.
//!
//! The grid of a kernel is decided when its first block begins (`symmpool/impl/sm_grant.cuh`): its wide grid, if no other kernel of the
//! device is wide, and its narrow grid otherwise. The blocks behind a narrow grid end at once, but each needs an SM for that.

use std::collections::BTreeSet;

use symmpool_allocator::Stream;

use super::{BudgetMember, BudgetOptions, SmBudget};

const SMS: u32 = 132;

/// A call as a rank's program has it: of which communicator, and on which stream.
type Made = (usize, u64);

/// A kernel of a rank.
#[derive(Clone, Debug)]
struct Kernel {
    comm: usize,
    stream: u64,
    /// Which call of its communicator it is.
    nth: usize,
    needs: u32,
    /// SMs that it needs while another kernel is wide.
    narrow: Option<u32>,
    /// Whether the host waits for all kernels before it: its communicator was made just before.
    behind_all: bool,
    /// The stream of the communicator's last call, if this call changes it: it is behind all that the host had put there
    /// (`StreamOrder::switch_to`).
    leaves: Option<u64>,
}

/// When communicators are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Make {
    /// All of them before the first call.
    First,
    /// [`Make::First`], and each has had a call on the first stream before, which has ended.
    Called,
    /// The first one before all calls, and each other one before its own first call; whether that waits for the device.
    Late { waits: bool },
}

/// Whether the first call on another stream is behind all that the communicator's last stream holds, as in the engine where the
/// communicator had the whole device before, or behind its own last call alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leave {
    BehindTheStream,
    BehindItsCall,
}

/// The stream of calls before those of a program.
const FIRST_STREAM: u64 = 7;

fn is_late(make: Make) -> bool {
    matches!(make, Make::Late { .. })
}

/// Kernels of a rank, in the order in which its host launches them.
fn kernels(
    ordinal: u32,
    communicators: usize,
    (make, leave): (Make, Leave),
    calls: &[Made],
) -> Vec<Kernel> {
    let follows_stream = leave == Leave::BehindTheStream;
    let member = || BudgetMember::new(ordinal, SMS, 2, BudgetOptions::default());
    let mut members: Vec<Option<BudgetMember>> =
        (0..communicators).map(|nth| (nth == 0 || !is_late(make)).then(member)).collect();
    let (mut counts, mut last) = (vec![0; communicators], vec![None; communicators]);
    if make == Make::Called {
        // The second time all are known to be on one stream.
        for _ in 0..2 {
            for (member, last) in members.iter_mut().flatten().zip(&mut last) {
                let budget = member.budget_in_call(Stream::numbered(FIRST_STREAM), || false);
                *last = Some((FIRST_STREAM, budget.concurrent));
            }
        }
    }
    let kernel = |(comm, stream): &Made| {
        let is_new = members[*comm].is_none();
        let made = members[*comm].get_or_insert_with(member);
        let behind_all = is_new && make == Make::Late { waits: true } && made.has_company();
        let budget = made.budget_in_call(Stream::numbered(*stream), || false);
        counts[*comm] += 1;
        // Behind a call that others may run beside, the engine records an event, and waits for that (`StreamOrder`).
        let leaves = last[*comm].replace((*stream, budget.concurrent));
        let leaves = leaves.filter(|(last, shares)| last != stream && !shares && follows_stream);
        let leaves = leaves.map(|(last, _)| last);
        let (nth, needs) = (counts[*comm] - 1, budget.most_blocks.min(SMS));
        let narrow = budget.narrow_blocks;
        Kernel { comm: *comm, stream: *stream, nth, needs, narrow, behind_all, leaves }
    };
    calls.iter().map(kernel).collect()
}

/// A kernel's grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Grid {
    /// None of its blocks has begun.
    Unknown,
    Whole,
    Wide,
    /// Whether the blocks behind the narrow grid have ended.
    Narrow {
        is_alone: bool,
    },
}

/// SMs of a kernel that has not ended, and its grid.
type Held = (u32, Grid);

/// State of each rank: how many kernels its host has launched, and what each of them has; `None` once it has ended.
type State = Vec<(usize, Vec<Option<Held>>)>;

/// How a device gives SMs to kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Device {
    /// Whether blocks of a kernel begin only when all blocks of kernels that were launched before, and could begin, have begun.
    in_order: bool,
    /// Whether kernels wait until no other kernel is wide.
    waits_for_lock: bool,
}

const DEVICES: [Device; 2] = [
    Device { in_order: true, waits_for_lock: false },
    Device { in_order: false, waits_for_lock: false },
];

impl Kernel {
    /// SMs that it needs with that grid.
    fn needs(&self, grid: Grid) -> u32 {
        match (grid, self.narrow) {
            (Grid::Narrow { .. }, Some(narrow)) => narrow,
            _ => self.needs,
        }
    }
}

/// A state in which nothing can go on, though not all is done.
fn finds_a_circle(ranks: &[Vec<Kernel>]) -> Option<State> {
    DEVICES.into_iter().find_map(|device| finds_a_circle_on(device, ranks))
}

fn finds_a_circle_on(device: Device, ranks: &[Vec<Kernel>]) -> Option<State> {
    let unknown = Some((0, Grid::Unknown));
    let first: State = ranks.iter().map(|all| (0, vec![unknown; all.len()])).collect();
    let (mut seen, mut left) = (BTreeSet::from([first.clone()]), vec![first]);
    while let Some(state) = left.pop() {
        let next = steps(device, ranks, &state);
        let is_done = state.iter().all(|(_, kernels)| kernels.iter().all(Option::is_none));
        if next.is_empty() && !is_done {
            return Some(state);
        }
        left.extend(next.into_iter().filter(|next| seen.insert(next.clone())));
    }
    None
}

/// SMs and grid of a kernel behind its next block, where so many SMs are free. `None` if nothing can begin.
fn next_block(
    device: Device,
    kernel: &Kernel,
    (has, grid): Held,
    free: u32,
    is_locked: bool,
) -> Option<Held> {
    if free == 0 {
        return None;
    }
    let grid = match (grid, kernel.narrow) {
        (Grid::Unknown, None) => Grid::Whole,
        (Grid::Unknown, Some(_)) if is_locked && device.waits_for_lock => return None,
        (Grid::Unknown, Some(_)) if is_locked => Grid::Narrow { is_alone: false },
        (Grid::Unknown, Some(_)) => Grid::Wide,
        _ => grid,
    };
    let needs = kernel.needs(grid);
    match grid {
        _ if has < needs => Some((needs.min(has + free), grid)),
        Grid::Narrow { is_alone: false } => Some((has, Grid::Narrow { is_alone: true })),
        _ => None,
    }
}

/// Whether all blocks of a kernel have begun.
fn has_begun(kernel: &Kernel, (has, grid): Held) -> bool {
    grid != Grid::Unknown && has == kernel.needs(grid) && grid != Grid::Narrow { is_alone: false }
}

/// All states that may come next.
fn steps(device: Device, ranks: &[Vec<Kernel>], state: &State) -> Vec<State> {
    let mut found = Vec::new();
    for (rank, kernels) in ranks.iter().enumerate() {
        let (launched, held) = &state[rank];
        let may_launch =
            |kernel: &Kernel| !kernel.behind_all || held[..*launched].iter().all(Option::is_none);
        if kernels.get(*launched).is_some_and(may_launch) {
            let mut next = state.clone();
            next[rank].0 += 1;
            found.push(next);
        }
        let free = SMS - held.iter().flatten().map(|(has, _)| has).sum::<u32>();
        let is_locked = held.iter().flatten().any(|(_, grid)| *grid == Grid::Wide);
        for (nth, kernel) in kernels[..*launched].iter().enumerate() {
            let Some(has) = held[nth] else { continue };
            let is_behind = |other: usize| {
                let before = &kernels[other];
                held[other].is_some()
                    && (before.stream == kernel.stream
                        || before.comm == kernel.comm
                        || kernel.leaves == Some(before.stream))
            };
            if (0..nth).any(is_behind) {
                continue;
            }
            if let Some(has) = next_block(device, kernel, has, free, is_locked) {
                let mut next = state.clone();
                next[rank].1[nth] = Some(has);
                found.push(next);
            }
            if device.in_order && !has_begun(kernel, has) {
                break;
            }
        }
    }
    // A call ends on all ranks at once, which leaves out no circle: kernels that have met need nothing any more.
    for kernel in &ranks[0] {
        let at = |rank: usize| {
            let same = |other: &Kernel| (other.comm, other.nth) == (kernel.comm, kernel.nth);
            ranks[rank].iter().position(same).expect("ranks make the same calls")
        };
        let places: Vec<usize> = (0..ranks.len()).map(at).collect();
        let is_met = places.iter().enumerate().all(|(rank, nth)| {
            let (launched, held) = &state[rank];
            let kernel = &ranks[rank][*nth];
            let has_all = |(has, grid): Held| grid != Grid::Unknown && has == kernel.needs(grid);
            nth < launched && held[*nth].is_some_and(has_all)
        });
        if is_met {
            let mut next = state.clone();
            places.iter().enumerate().for_each(|(rank, nth)| next[rank].1[*nth] = None);
            found.push(next);
        }
    }
    found
}

/// All orders of calls, of which communicator `c` makes `left[c]`.
fn orders(left: &[usize]) -> Vec<Vec<usize>> {
    if left.iter().all(|count| *count == 0) {
        return vec![Vec::new()];
    }
    let mut found = Vec::new();
    for (comm, count) in left.iter().enumerate().filter(|(_, count)| **count > 0) {
        let mut rest = left.to_vec();
        rest[comm] = count - 1;
        for mut order in orders(&rest) {
            order.insert(0, comm);
            found.push(order);
        }
    }
    found
}

/// Of ranks that make these numbers of calls, each in any order between communicators, but on each stream in the same one: how
/// many pairs of ranks may wait for each other for ever in some interleaving, of how many. `stream` says on which stream a call
/// of a communicator is, by its number.
fn circles(
    ordinal: u32,
    counts: &[usize],
    rules: (Make, Leave),
    stream: impl Fn(usize, usize) -> u64,
) -> (usize, usize) {
    let programs: Vec<Vec<Made>> = orders(counts)
        .into_iter()
        .map(|order| {
            let mut nth = vec![0; counts.len()];
            let made = |comm: usize| {
                nth[comm] += 1;
                (comm, stream(comm, nth[comm] - 1))
            };
            order.into_iter().map(made).collect()
        })
        .collect();
    let on_streams = |calls: &[Made]| {
        let mut calls = calls.to_vec();
        calls.sort_by_key(|(_, stream)| *stream);
        calls
    };
    let (mut found, mut tried) = (0, 0);
    for (nth, one) in programs.iter().enumerate() {
        for other in &programs[nth..] {
            if on_streams(one) == on_streams(other) {
                let ranks = [one, other].map(|calls| kernels(ordinal, counts.len(), rules, calls));
                found += usize::from(finds_a_circle(&ranks).is_some());
                tried += 1;
            }
        }
    }
    (found, tried)
}

/// All communicators are made first, and calls change their streams as the engine has it.
const ALL_FIRST: (Make, Leave) = (Make::First, Leave::BehindTheStream);

fn streams_of_their_own(comm: usize, _: usize) -> u64 {
    comm as u64 + 7
}

#[test]
fn eager_calls_on_streams_of_their_own_get_through_in_any_order() {
    for (ordinal, counts) in
        [(2000, &[2, 2][..]), (2001, &[1, 1, 1]), (2002, &[3, 1]), (2003, &[2, 2, 0])]
    {
        let (found, tried) = circles(ordinal, counts, ALL_FIRST, streams_of_their_own);
        assert!(found == 0 && tried > 3, "{counts:?}: {found} of {tried}");
    }
    // The first one alternates between two streams.
    let stream = |comm, nth| if comm == 0 { 7 + nth as u64 % 2 } else { 9 };
    assert_eq!(circles(2004, &[3, 1], ALL_FIRST, stream).0, 0);
}

/// Kernels that have the whole device may still be to come on their stream when another communicator is made. What that
/// launches then may get in front of them, on one rank and not on another.
#[test]
fn a_communicator_that_is_made_behind_calls_waits_for_them() {
    for (ordinal, counts) in [(2010, [2, 1]), (2012, [3, 1])] {
        let late = |waits| (Make::Late { waits }, Leave::BehindTheStream);
        let (found, tried) = circles(ordinal, &counts, late(false), streams_of_their_own);
        assert!(found > 0, "of {tried}");
        assert_eq!(circles(ordinal + 1, &counts, late(true), streams_of_their_own).0, 0);
    }
}

/// Two communicators on one stream have the whole device each. What one of them launches on another stream then may get in
/// front of what is still to come on the first one, unless it is behind all that is there.
#[test]
fn a_communicator_that_leaves_a_common_stream_is_behind_what_is_there() {
    let second_leaves = |comm, nth| if comm == 1 && nth > 0 { 8 } else { FIRST_STREAM };
    let both_leave = |comm, nth| if nth > 0 { 8 + comm as u64 } else { 7 };
    let comes_back = |comm, nth| if comm == 1 && nth == 1 { 8 } else { 7 };
    let called = (Make::Called, Leave::BehindTheStream);
    let alone = (Make::Called, Leave::BehindItsCall);
    let (found, tried) = circles(2020, &[2, 2], alone, second_leaves);
    assert!(found > 0, "none of {tried}");
    assert_eq!(circles(2021, &[2, 2], called, second_leaves).0, 0);
    assert_eq!(circles(2022, &[3, 2], called, second_leaves).0, 0);
    assert_eq!(circles(2023, &[2, 2], called, both_leave).0, 0);
    assert_eq!(circles(2024, &[2, 3], called, comes_back).0, 0);
    // A communicator whose last call had a share, as another one had made no call yet, waits for that call alone.
    let (found, tried) = circles(2025, &[2, 2], ALL_FIRST, second_leaves);
    assert!(found > 0, "none of {tried}: docs/gpus.md says that there are some");
}

fn whole(comm: usize) -> Kernel {
    let stream = comm as u64;
    Kernel { comm, stream, nth: 0, needs: SMS, narrow: None, behind_all: false, leaves: None }
}

/// The model finds a circle where there is one: two kernels that each take the whole device.
#[test]
fn whole_devices_in_opposite_orders_are_a_circle() {
    let ranks = [vec![whole(0), whole(1)], vec![whole(1), whole(0)]];
    assert!(finds_a_circle(&ranks).is_some());
    let part = |comm| Kernel { needs: 44, ..whole(comm) };
    assert!(finds_a_circle(&[vec![part(0), part(1)], vec![part(1), part(0)]]).is_none());
    assert!(finds_a_circle(&[vec![whole(0), part(1)], vec![part(1), whole(0)]]).is_some());
}

/// Programs of ranks of which each begins with another communicator.
fn rotated(
    ranks: usize,
    communicators: usize,
    kernel: impl Fn(usize) -> Kernel,
) -> Vec<Vec<Kernel>> {
    let program =
        |rank| (0..communicators).map(|nth| kernel((rank + nth) % communicators)).collect();
    (0..ranks).map(program).collect()
}

/// Kernels are wide by turns, so there must be room for one wide grid, all other narrow ones, and one block behind those.
#[test]
fn kernels_that_are_wide_by_turns_get_through_where_all_have_room() {
    for (ranks, communicators) in [(2, 2), (2, 3), (3, 3), (2, 4)] {
        let of = |count: u32| {
            let budget = SmBudget::by_turns(count, SMS);
            rotated(ranks, communicators, |comm| Kernel {
                needs: budget.most_blocks,
                narrow: budget.narrow_blocks,
                ..whole(comm)
            })
        };
        assert!(finds_a_circle(&of(communicators as u32)).is_none(), "{ranks} {communicators}");
        let others = communicators as u32 - 1;
        let filled = |left| {
            let wide =
                |comm| Kernel { needs: SMS - 2 * others - left, narrow: Some(2), ..whole(comm) };
            finds_a_circle(&rotated(ranks, communicators, wide))
        };
        assert!(filled(1).is_none(), "{ranks} ranks, {communicators} communicators");
    }
}

/// Without an SM for the blocks behind a narrow grid, these keep back the kernels behind them.
#[test]
fn blocks_behind_narrow_grids_need_an_sm() {
    let wide = |comm| Kernel { needs: SMS - 6, narrow: Some(2), ..whole(comm) };
    // Each rank has begun with two communicators of its own, the second of which is narrow.
    let ranks = [[0, 1, 2, 3], [2, 3, 0, 1]].map(|order| order.map(wide).to_vec());
    assert!(finds_a_circle(&ranks).is_none(), "there is room for all four");
    let wide = |comm| Kernel { needs: SMS - 2, narrow: Some(2), ..whole(comm) };
    let ranks = [[0, 1, 2, 3], [2, 3, 0, 1]].map(|order| order.map(wide).to_vec());
    assert!(finds_a_circle(&ranks).is_some());
}

/// A lock for which kernels wait has circles of its own, as ranks take it in different orders.
#[test]
fn waiting_for_the_lock_is_a_circle() {
    let wide = |comm| Kernel { needs: 100, narrow: Some(2), ..whole(comm) };
    let ranks = [vec![wide(0), wide(1)], vec![wide(1), wide(0)]];
    let waits = Device { in_order: false, waits_for_lock: true };
    assert!(finds_a_circle_on(waits, &ranks).is_some());
    assert!(finds_a_circle(&ranks).is_none());
}
