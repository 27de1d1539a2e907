//! A plan as devices run it: each rank's program in levels.
//!
//! A level is waits, then operations on data, then signals. A wait is at a later level than its signal, so levels of a
//! call can overlap with those of the next stage of the data, and no rank waits for what comes later (see
//! `symmpool/impl/plan.cuh`). Operations of one level have no order but that of their list; operations of block groups, and
//! signals, move into the level that they belong to. That orders more than the program asked for, and nothing less: a
//! wait comes earlier among the rank's own operations, and a signal later.

use std::collections::{BTreeMap, VecDeque};

use super::model::phases;
use super::step::{Item, PlanStep};
use super::{Buffer, Cell, Instruction, Operation, Plan, Protocol};

/// A peer and the number of the flag that one of the two raises on the other.
pub(crate) type PeerFlag = (u32, u32);

/// Work of a rank at one level.
#[derive(Clone, Debug, Default)]
pub(crate) struct Level {
    pub(crate) waits: Vec<PeerFlag>,
    pub(crate) items: Vec<Item>,
    pub(crate) signals: Vec<PeerFlag>,
}

/// Where a chunk of scratch lies on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScratchSlot {
    /// In memory that signals guard.
    Plain(u32),
    /// In the LL inbox, where this rank puts it.
    Ll(u32, u32),
}

/// A plan in levels.
#[derive(Debug)]
pub(crate) struct Schedule {
    /// Levels by rank, then in order. Where there is scratch, every rank has a level, at which it can say what it
    /// needs no more.
    pub(crate) ranks: Vec<Vec<Level>>,
    /// Flags that a rank raises on one peer, at most.
    pub(crate) flags: u32,
    /// Chunks of scratch that a rank has in plain memory, and in the LL inbox, at most. Those that nobody accesses are
    /// left out.
    pub(crate) plain_slots: u32,
    pub(crate) ll_slots: u32,
    /// The last level at which any rank accesses scratch.
    pub(crate) last_scratch: u32,
    /// Whether some rank moves data at several levels, so that stages of the data can overlap.
    pub(crate) overlaps: bool,
    /// Whether every rank begins with a barrier, which the handshake does as well.
    pub(crate) begins_with_barrier: bool,
    slots: Vec<BTreeMap<u32, ScratchSlot>>,
}

/// How far a rank has come.
#[derive(Default)]
struct ScheduledRank {
    /// The level of what follows all block groups so far.
    joined: u32,
    /// The levels of the block groups of the running phase.
    groups: BTreeMap<u32, u32>,
    phase: usize,
    barriers: usize,
}

impl ScheduledRank {
    fn join(&mut self) -> u32 {
        let groups = std::mem::take(&mut self.groups);
        self.joined = groups.into_values().fold(self.joined, u32::max);
        self.joined
    }
}

impl Schedule {
    /// Divides a plan into levels: its ranks' steps, and the order in which operations of all ranks, as rank and index, can
    /// run one after the other.
    pub(super) fn new(plan: &Plan, steps: &[Vec<PlanStep>], order: &[(u32, usize)]) -> Self {
        let signalled = plan.protocol == Protocol::Simple;
        let world = plan.world as usize;
        let phase_of: Vec<Vec<usize>> =
            plan.programs.iter().map(|program| phase_numbers(program)).collect();
        let mut progress: Vec<ScheduledRank> =
            (0..world).map(|_| ScheduledRank::default()).collect();
        let mut ranks = vec![Vec::<Level>::new(); world];
        let mut steps: Vec<_> = steps.iter().map(|steps| steps.iter()).collect();
        let mut signals: BTreeMap<(u32, u32, u32), VecDeque<(u32, u32)>> = BTreeMap::new();
        let mut flags: BTreeMap<(u32, u32), u32> = BTreeMap::new();
        let mut next_flag = |from: u32, to: u32| {
            let next = flags.entry((from, to)).or_default();
            *next += 1;
            *next - 1
        };
        let begins_with_barrier = plan.programs.iter().all(|program| {
            program.first().is_some_and(|first| first.operation == Operation::Barrier)
        });
        for (rank, index) in order.iter().copied() {
            let at = rank as usize;
            let Instruction { operation, group, .. } = &plan.programs[at][index];
            if let Operation::Barrier = operation {
                steps[at].next();
                progress[at].barriers += 1;
                let number = progress[at].barriers;
                // All ranks come to a barrier one behind the other. The first of them passes it for all.
                let is_first = progress.iter().all(|other| other.barriers <= number)
                    && progress.iter().filter(|other| other.barriers == number).count() == 1;
                if !is_first || !signalled || (number == 1 && begins_with_barrier) {
                    continue;
                }
                let level = progress.iter_mut().map(ScheduledRank::join).max().unwrap_or(0) + 1;
                for (from, mine) in (0u32..).zip(&mut progress) {
                    mine.joined = level;
                    for to in (0..plan.world).filter(|to| *to != from) {
                        let flag = next_flag(from, to);
                        of_level(&mut ranks, from, level - 1).signals.push((to, flag));
                        of_level(&mut ranks, to, level).waits.push((from, flag));
                    }
                }
                continue;
            }
            let mine = &mut progress[at];
            if mine.phase < phase_of[at][index] {
                mine.phase = phase_of[at][index];
                mine.join();
            }
            let joined = mine.joined;
            let level = match group {
                Some(group) => mine.groups.entry(*group).or_insert(joined),
                None => &mut mine.joined,
            };
            match operation {
                Operation::Signal { peer, channel } => {
                    steps[at].next();
                    if signalled {
                        let flag = next_flag(rank, *peer);
                        let way = (rank, *peer, *channel);
                        signals.entry(way).or_default().push_back((*level, flag));
                        of_level(&mut ranks, rank, *level).signals.push((*peer, flag));
                    }
                }
                Operation::Wait { peer, channel } => {
                    steps[at].next();
                    let way = (*peer, rank, *channel);
                    let signal = signals.get_mut(&way).and_then(VecDeque::pop_front);
                    if let Some((signalled_at, flag)) = signal {
                        *level = (*level).max(signalled_at + 1);
                        of_level(&mut ranks, rank, *level).waits.push((*peer, flag));
                    }
                }
                _ => {
                    let chunks = operation.destination().map_or(0, |dst| dst.count);
                    for _ in 0..chunks {
                        let Some(PlanStep::Reduce(item)) = steps[at].next() else { continue };
                        of_level(&mut ranks, rank, *level).items.push(item.clone());
                    }
                }
            }
        }
        let mut made = Self {
            flags: flags.into_values().max().unwrap_or(0),
            plain_slots: 0,
            ll_slots: 0,
            last_scratch: 0,
            overlaps: ranks
                .iter()
                .any(|levels| levels.iter().filter(|level| !level.items.is_empty()).count() > 1),
            begins_with_barrier: begins_with_barrier && signalled,
            slots: vec![BTreeMap::new(); world],
            ranks,
        };
        made.place_scratch(signalled);
        made
    }

    /// Numbers the chunks of scratch that are accessed.
    fn place_scratch(&mut self, signalled: bool) {
        let mut counts = vec![(0, 0); self.ranks.len()];
        // Chunks that a peer puts into the LL inbox come first, so that reads of them are known.
        let ranks = (0u32..).zip(&self.ranks);
        let all =
            || ranks.clone().flat_map(|(rank, levels)| levels.iter().map(move |at| (rank, at)));
        for (rank, level) in all() {
            for dst in level.items.iter().map(|item| item.dst) {
                if signalled || dst.buffer != Buffer::Scratch || dst.rank == rank {
                    continue;
                }
                let (_, ll) = &mut counts[dst.rank as usize];
                self.slots[dst.rank as usize].insert(dst.index, ScratchSlot::Ll(*ll, rank));
                *ll += 1;
            }
        }
        for (_, level) in all() {
            for item in &level.items {
                for cell in item.srcs.iter().chain([&item.dst]) {
                    if cell.buffer != Buffer::Scratch {
                        continue;
                    }
                    let (plain, _) = &mut counts[cell.rank as usize];
                    self.slots[cell.rank as usize].entry(cell.index).or_insert_with(|| {
                        *plain += 1;
                        ScratchSlot::Plain(*plain - 1)
                    });
                }
            }
        }
        self.plain_slots = counts.iter().map(|(plain, _)| *plain).max().unwrap_or(0);
        self.ll_slots = counts.iter().map(|(_, ll)| *ll).max().unwrap_or(0);
        let ranks = 0..self.ranks.len() as u32;
        let last = ranks.filter_map(|rank| self.scratch_levels(rank)).map(|(_, last)| last);
        self.last_scratch = last.max().unwrap_or(0);
        if self.plain_slots > 0 {
            self.ranks.iter_mut().filter(|levels| levels.is_empty()).for_each(|levels| {
                levels.push(Level::default());
            });
        }
    }

    /// Where a chunk of scratch lies. `None` if nobody accesses it.
    pub(crate) fn slot(&self, cell: Cell) -> Option<ScratchSlot> {
        self.slots[cell.rank as usize].get(&cell.index).copied()
    }

    /// The first and the last level at which a rank accesses scratch, of any rank. `None` if it accesses none.
    pub(crate) fn scratch_levels(&self, rank: u32) -> Option<(u32, u32)> {
        let levels = self.levels_where(rank, |cell| cell.buffer == Buffer::Scratch);
        levels.first().copied().zip(levels.last().copied())
    }

    /// The first level at which a rank accesses a peer's input or output.
    pub(crate) fn first_remote(&self, rank: u32) -> Option<u32> {
        let remote = |cell: &Cell| cell.buffer != Buffer::Scratch && cell.rank != rank;
        self.levels_where(rank, remote).first().copied()
    }

    fn levels_where(&self, rank: u32, accesses: impl Fn(&Cell) -> bool) -> Vec<u32> {
        let levels = (0u32..).zip(&self.ranks[rank as usize]);
        let any = |item: &Item| accesses(&item.dst) || item.srcs.iter().any(&accesses);
        levels.filter(|(_, level)| level.items.iter().any(any)).map(|(number, _)| number).collect()
    }

    /// Chunks that a rank's program writes.
    #[cfg(test)]
    fn items(&self, rank: u32) -> usize {
        self.ranks[rank as usize].iter().map(|level| level.items.len()).sum()
    }

    /// Chunks that a rank's program reads, in all and in one operation at most.
    pub(crate) fn reads(&self, rank: u32) -> (usize, usize) {
        let items = self.ranks[rank as usize].iter().flat_map(|level| &level.items);
        let reads = items.map(|item| item.srcs.len());
        reads.fold((0, 0), |(all, most), reads| (all + reads, most.max(reads)))
    }
}

fn of_level(ranks: &mut [Vec<Level>], rank: u32, level: u32) -> &mut Level {
    let levels = &mut ranks[rank as usize];
    if levels.len() <= level as usize {
        levels.resize_with(level as usize + 1, Level::default);
    }
    &mut levels[level as usize]
}

/// The phase of each operation of a program: phases join all block groups.
fn phase_numbers(program: &[Instruction]) -> Vec<usize> {
    let mut numbers = vec![0; program.len()];
    for (number, phase) in phases(program).into_iter().enumerate() {
        for index in phase.into_iter().flatten() {
            numbers[index] = number;
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::super::testing::plans;
    use super::*;

    #[test]
    fn waits_are_at_later_levels_than_their_signals_and_nothing_is_lost() {
        for checked in [2, 3, 4, 8].into_iter().flat_map(plans) {
            let schedule = checked.schedule();
            let mut signalled: BTreeMap<(u32, u32, u32), u32> = BTreeMap::new();
            for (rank, levels) in (0u32..).zip(&schedule.ranks) {
                for (number, level) in (0u32..).zip(levels) {
                    for (peer, flag) in &level.signals {
                        let before = signalled.insert((rank, *peer, *flag), number);
                        assert_eq!(before, None, "each signal has a flag of its own");
                        assert!(*flag < schedule.flags);
                    }
                }
            }
            for (rank, levels) in (0u32..).zip(&schedule.ranks) {
                for (number, level) in (0u32..).zip(levels) {
                    for (peer, flag) in &level.waits {
                        let signal = signalled.remove(&(*peer, rank, *flag));
                        assert!(signal.is_some_and(|signal| signal < number), "{checked:?}");
                    }
                }
                let moved = |step: &&PlanStep| matches!(step, PlanStep::Reduce(_));
                let wanted = checked.steps[rank as usize].iter().filter(moved).count();
                assert_eq!(schedule.items(rank), wanted);
            }
            assert!(signalled.is_empty(), "every signal is waited for");
        }
    }

    /// Peers wait until every rank has said that a slot is free.
    #[test]
    fn ranks_without_operations_have_a_level_where_there_is_scratch() {
        for checked in [2, 3, 4].into_iter().flat_map(plans) {
            let schedule = checked.schedule();
            let all = schedule.ranks.iter().all(|levels| !levels.is_empty());
            assert!(all || schedule.plain_slots == 0, "{}", checked.plan().name);
        }
    }

    #[test]
    fn usual_programs_have_few_levels() {
        let levels = |name: &str| {
            let all = plans(3);
            let found = all.iter().find(|checked| checked.plan().name == name);
            let ranks = &found.expect("a program").schedule().ranks;
            ranks.iter().map(Vec::len).max().expect("ranks")
        };
        assert_eq!((levels("one_shot"), levels("two_shot")), (2, 3));
        // The handshake is the barrier with which they begin.
        assert_eq!((levels("all_gather"), levels("grouped_all_gather")), (2, 2));
        assert_eq!((levels("one_shot_ll"), levels("two_shot_in_scratch_ll")), (1, 1));
    }
}
