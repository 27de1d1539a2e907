//! When each operation of a plan runs at the earliest, if every operation takes one step: behind what comes before it
//! on its rank, and a wait behind its signal.

use std::collections::{BTreeMap, VecDeque};

use super::{CheckedPlan, Operation};

/// An operation and its step.
pub(super) struct TimedOperation {
    pub(super) rank: u32,
    /// Its index in the rank's program.
    pub(super) index: usize,
    /// From 0.
    pub(super) step: usize,
    /// Position in the timeline of the signal that a wait waits for.
    pub(super) signal: Option<usize>,
}

/// The operations of a plan in an order in which they can run, without joins.
pub(super) fn timeline(checked: &CheckedPlan) -> Vec<TimedOperation> {
    let plan = checked.plan();
    let mut events: Vec<TimedOperation> = Vec::with_capacity(checked.order.len());
    // The first free step by rank and block group; operations of no group are behind all groups.
    let mut free: BTreeMap<(u32, Option<u32>), usize> = BTreeMap::new();
    let mut signals: BTreeMap<(u32, u32, u32), VecDeque<usize>> = BTreeMap::new();
    let mut barriers: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    let mut passed = vec![0; plan.world as usize];
    for (rank, index) in checked.order.iter().copied() {
        let instruction = &plan.programs[rank as usize][index];
        let of_rank = (rank, None)..=(rank, Some(u32::MAX));
        let group = instruction.group.filter(|_| instruction.operation != Operation::Join);
        let mut step = match group {
            // A group begins behind what came before all groups.
            Some(group) => {
                let own = free.get(&(rank, Some(group))).copied().unwrap_or(0);
                own.max(free.get(&(rank, None)).copied().unwrap_or(0))
            }
            None => free.range(of_rank).map(|(_, step)| *step).max().unwrap_or(0),
        };
        let mut signal = None;
        match instruction.operation {
            Operation::Join => {
                free.insert((rank, None), step);
                continue;
            }
            Operation::Signal { peer, channel } => {
                signals.entry((rank, peer, channel)).or_default().push_back(events.len());
            }
            Operation::Wait { peer, channel } => {
                signal = signals.entry((peer, rank, channel)).or_default().pop_front();
                step = step.max(signal.map_or(0, |signal| events[signal].step + 1));
            }
            Operation::Barrier => {
                let number = passed[rank as usize];
                passed[rank as usize] += 1;
                let others = barriers.entry(number).or_default();
                others.push(events.len());
            }
            _ => {}
        }
        free.insert((rank, group), step + 1);
        events.push(TimedOperation { rank, index, step, signal });
        if instruction.operation == Operation::Barrier {
            align(plan.world, &mut events, &mut free, &barriers[&(passed[rank as usize] - 1)]);
        }
    }
    events
}

/// Moves a barrier that all ranks have come to where the last of them is.
fn align(
    world: u32,
    events: &mut [TimedOperation],
    free: &mut BTreeMap<(u32, Option<u32>), usize>,
    barrier: &[usize],
) {
    if barrier.len() < world as usize {
        return;
    }
    let last = barrier.iter().map(|event| events[*event].step).max().unwrap_or(0);
    for event in barrier {
        events[*event].step = last;
        free.insert((events[*event].rank, None), last + 1);
    }
}
