//! Runs a plan in the abstract: all ranks at once, with expressions in place of data and vector clocks in place of
//! time.
//!
//! Programs have no branches, waits name their signaller, and channels count. So what one rank can do next never
//! depends on how far another has come beyond its signals: if any run ends, all do, with the same values, and one run
//! is enough to find deadlocks. Accesses that this run happens to order, and another might not, are found by their
//! clocks.

use std::collections::{BTreeMap, VecDeque};

use super::super::model::{Buffer, Cell, Collective, Operation, Plan, phases};
use super::clock::{Access, AccessHistory, Clock, Moment};
use super::error::{PlanError, PlanErrorReason};
use super::value::{PlanValues, Value};

/// An operation as it ran.
pub(super) struct Ran {
    pub(super) rank: u32,
    /// Its index in the rank's program.
    pub(super) index: usize,
    /// For each chunk of its spans, what it wrote.
    pub(super) written: Vec<Written>,
}

/// Value that an operation wrote to a chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Written {
    pub(super) value: Value,
    /// The index in its part of the shortest chunk that takes part, which says how many elements were written.
    pub(super) index_in_part: u32,
}

/// Result of a run.
pub(super) struct RunOutcome {
    pub(super) values: PlanValues,
    /// The operations of all ranks, in an order in which they can run one after the other.
    pub(super) order: Vec<Ran>,
    /// Values of chunks at the end, with the rank and index of the operation that wrote each.
    pub(super) cells: BTreeMap<Cell, HeldValue>,
}

#[derive(Clone, Copy)]
pub(super) struct HeldValue {
    pub(super) value: Value,
    /// The index in its part of the shortest chunk that it has passed through: it is known to be as long.
    pub(super) index_in_part: u32,
    pub(super) writer: Option<(u32, usize)>,
}

/// Operations of a rank that run in order, and how far they have.
struct Strand {
    /// The strand's component of clocks.
    component: usize,
    clock: Clock,
    left: VecDeque<usize>,
}

/// A rank: what it runs now, and what comes after that.
struct Rank {
    strands: Vec<Strand>,
    /// Phases that follow: operations by strand.
    later: VecDeque<Vec<Vec<usize>>>,
    first_component: usize,
    /// Clock at the beginning of the next phase.
    clock: Clock,
    at_barrier: bool,
}

/// Who signals whom, on which channel.
type Channel = (u32, u32, u32);

pub(super) struct CheckRun<'a> {
    plan: &'a Plan,
    /// Whether input and output are one memory.
    in_place: bool,
    ranks: Vec<Rank>,
    /// Signals that were not waited for, with what comes before them.
    signals: BTreeMap<Channel, VecDeque<Clock>>,
    /// The last signal and the last wait of each channel.
    signalled: BTreeMap<Channel, (Moment, u32)>,
    awaited: BTreeMap<Channel, (Moment, u32)>,
    history: AccessHistory,
    values: PlanValues,
    cells: BTreeMap<Cell, HeldValue>,
    order: Vec<Ran>,
    /// The first read of what was never written. A race or a deadlock says more, if there is one.
    undefined: Option<PlanError>,
}

impl<'a> CheckRun<'a> {
    pub(super) fn new(plan: &'a Plan) -> Self {
        Self::with(plan, false, PlanValues::new())
    }

    /// A run in which input and output are one memory on every rank. With the values of another run equal values have equal
    /// numbers in both.
    pub(super) fn in_place(plan: &'a Plan, values: PlanValues) -> Self {
        Self::with(plan, true, values)
    }

    fn with(plan: &'a Plan, in_place: bool, values: PlanValues) -> Self {
        let all: Vec<_> = plan.programs.iter().map(|program| phases(program)).collect();
        let most =
            |phases: &VecDeque<Vec<Vec<usize>>>| phases.iter().map(Vec::len).max().unwrap_or(1);
        let components: usize = all.iter().map(most).sum();
        let mut next = 0;
        let ranks = all
            .into_iter()
            .map(|later| {
                let first_component = next;
                next += most(&later);
                let mut clock = Clock::new(components);
                // The moment at which the rank enters the call.
                clock.tick(first_component);
                Rank { strands: Vec::new(), later, first_component, clock, at_barrier: false }
            })
            .collect();
        let mut run = Self {
            plan,
            in_place,
            ranks,
            signals: BTreeMap::new(),
            signalled: BTreeMap::new(),
            awaited: BTreeMap::new(),
            history: AccessHistory::default(),
            values,
            cells: BTreeMap::new(),
            order: Vec::with_capacity(plan.len()),
            undefined: None,
        };
        for rank in 0..plan.world {
            // Nobody but the root has data to broadcast.
            if plan.collective == Collective::Broadcast && rank != 0 {
                continue;
            }
            for index in 0..plan.chunks {
                let value = run.values.input(rank, index);
                let cell = Cell { rank, buffer: Buffer::Input, index };
                let index_in_part = plan.index_in_part(cell);
                run.cells.insert(cell, HeldValue { value, index_in_part, writer: None });
            }
        }
        run
    }

    /// Runs all programs to their ends.
    pub(super) fn run(mut self) -> Result<RunOutcome, PlanError> {
        loop {
            let mut progress = false;
            for rank in 0..self.plan.world {
                progress |= self.advance(rank)?;
            }
            progress |= self.pass_barrier();
            if !progress {
                break;
            }
        }
        if self.ranks.iter().any(|rank| !rank.strands.is_empty()) {
            return Err(self.deadlock());
        }
        self.check_ends()?;
        if let Some(error) = self.undefined {
            return Err(error);
        }
        Ok(RunOutcome { values: self.values, order: self.order, cells: self.cells })
    }

    /// The memory that a chunk is in.
    fn memory_of(plan: &Plan, in_place: bool, cell: Cell) -> Cell {
        match plan.alias(cell.rank, cell.index) {
            Some(index) if in_place && cell.buffer == Buffer::Output => {
                Cell { buffer: Buffer::Input, index, ..cell }
            }
            _ => cell,
        }
    }

    /// Runs a rank's strands as far as they go. Returns whether they went anywhere.
    fn advance(&mut self, rank: u32) -> Result<bool, PlanError> {
        let mut progress = false;
        loop {
            let of = &mut self.ranks[rank as usize];
            if of.strands.is_empty() {
                let Some(phase) = of.later.pop_front() else { return Ok(progress) };
                let (first, clock) = (of.first_component, &of.clock);
                let strands = phase.into_iter().zip(first..).map(|(left, component)| Strand {
                    component,
                    clock: clock.clone(),
                    left: left.into(),
                });
                of.strands = strands.collect();
            }
            for strand in 0..self.ranks[rank as usize].strands.len() {
                while self.step(rank, strand)? {
                    progress = true;
                }
            }
            let of = &mut self.ranks[rank as usize];
            if of.strands.iter().any(|strand| !strand.left.is_empty()) {
                return Ok(progress);
            }
            for strand in of.strands.drain(..) {
                of.clock.join(&strand.clock);
            }
            progress = true;
        }
    }

    /// Runs a strand's next operation. Returns whether it could.
    fn step(&mut self, rank: u32, strand: usize) -> Result<bool, PlanError> {
        let plan = self.plan;
        let of = &mut self.ranks[rank as usize];
        let running = &mut of.strands[strand];
        let Some(index) = running.left.front().copied() else { return Ok(false) };
        let operation = &plan.programs[rank as usize][index].operation;
        match operation {
            Operation::Barrier => {
                of.at_barrier = true;
                return Ok(false);
            }
            Operation::Wait { peer, channel } => {
                let way = (*peer, rank, *channel);
                let Some(before) = self.signals.get_mut(&way).and_then(VecDeque::pop_front) else {
                    return Ok(false);
                };
                let former = self.awaited.get(&way).copied();
                let ordered = former.is_none_or(|(moment, _)| running.clock.covers(moment));
                running.clock.join(&before);
                let moment = running.clock.tick(running.component);
                if !ordered {
                    return Err(self.shared_channel(rank, index, "wait for", former));
                }
                self.awaited.insert(way, (moment, index as u32));
            }
            Operation::Signal { peer, channel } => {
                let way = (rank, *peer, *channel);
                let former = self.signalled.get(&way).copied();
                let ordered = former.is_none_or(|(moment, _)| running.clock.covers(moment));
                let moment = running.clock.tick(running.component);
                let clock = running.clock.clone();
                if !ordered {
                    return Err(self.shared_channel(rank, index, "signal", former));
                }
                self.signalled.insert(way, (moment, index as u32));
                self.signals.entry(way).or_default().push_back(clock);
            }
            _ => {
                let moment = running.clock.tick(running.component);
                self.access(rank, strand, index, moment)?;
            }
        }
        self.ranks[rank as usize].strands[strand].left.pop_front();
        if !operation.spans().any(|_| true) {
            self.order.push(Ran { rank, index, written: Vec::new() });
        }
        Ok(true)
    }

    /// Reads and writes the chunks of an operation.
    fn access(
        &mut self,
        rank: u32,
        strand: usize,
        index: usize,
        moment: Moment,
    ) -> Result<(), PlanError> {
        let plan = self.plan;
        let operation = &plan.programs[rank as usize][index].operation;
        let Some(dst) = operation.destination() else { return Ok(()) };
        let mut written = Vec::with_capacity(dst.count as usize);
        for offset in 0..dst.count {
            let mut found = Vec::with_capacity(operation.sources().len());
            let cell = dst.cell(offset);
            let mut index_in_part = plan.index_in_part(cell);
            for src in operation.sources() {
                let cell = src.cell(offset);
                self.touch(rank, strand, index, moment, cell, false)?;
                let held = self.cells.get(&Self::memory_of(plan, self.in_place, cell));
                let value = held.map_or(PlanValues::UNDEFINED, |held| held.value);
                index_in_part = index_in_part.max(held.map_or(0, |held| held.index_in_part));
                if !self.values.is_defined(value) && self.undefined.is_none() {
                    let message = format!(
                        "{} reads {cell}, which nothing has written",
                        self.name_of(rank, index)
                    );
                    self.undefined =
                        Some(self.error(PlanErrorReason::Undefined, rank, index, message));
                }
                found.push(value);
            }
            let value = self.values.reduced(found);
            self.touch(rank, strand, index, moment, cell, true)?;
            let cell = Self::memory_of(plan, self.in_place, cell);
            self.cells
                .insert(cell, HeldValue { value, index_in_part, writer: Some((rank, index)) });
            written.push(Written { value, index_in_part });
        }
        self.order.push(Ran { rank, index, written });
        Ok(())
    }

    /// Notes an access, and refuses one that is not ordered with all it conflicts with.
    fn touch(
        &mut self,
        rank: u32,
        strand: usize,
        index: usize,
        moment: Moment,
        cell: Cell,
        writes: bool,
    ) -> Result<(), PlanError> {
        let clock = &self.ranks[rank as usize].strands[strand].clock;
        let verb = if writes { "writes" } else { "reads" };
        if cell.rank != rank && cell.buffer != Buffer::Scratch {
            let entered =
                Moment { strand: self.ranks[cell.rank as usize].first_component, count: 1 };
            if !clock.covers(entered) {
                let message = format!(
                    "{} {verb} {cell} before anything shows that rank {} has entered the call: wait for its signal, \
                     or for a barrier, before",
                    self.name_of(rank, index),
                    cell.rank
                );
                return Err(self.error(PlanErrorReason::NotEntered, rank, index, message));
            }
        }
        let memory = Self::memory_of(self.plan, self.in_place, cell);
        let access = Access { moment, rank, index, writes };
        let Some(other) = self.history.add(memory, access, clock) else { return Ok(()) };
        let message = format!(
            "{} {verb} {cell}, and {} {} it; nothing orders the two",
            self.name_of(rank, index),
            self.name_of(other.rank, other.index),
            if other.writes { "writes" } else { "reads" },
        );
        Err(self.error(PlanErrorReason::Unordered, rank, index, message))
    }

    /// Lets all ranks pass a barrier that all have come to.
    fn pass_barrier(&mut self) -> bool {
        if self.ranks.iter().any(|rank| !rank.at_barrier) {
            return false;
        }
        let mut all = Clock::new(0);
        for rank in &mut self.ranks {
            let strand = &mut rank.strands[0];
            strand.clock.tick(strand.component);
            all = if rank.first_component == 0 { strand.clock.clone() } else { all };
            all.join(&strand.clock);
        }
        for (number, rank) in (0u32..).zip(&mut self.ranks) {
            rank.at_barrier = false;
            let strand = &mut rank.strands[0];
            strand.clock.join(&all);
            if let Some(index) = strand.left.pop_front() {
                self.order.push(Ran { rank: number, index, written: Vec::new() });
            }
        }
        true
    }

    /// Refuses a program that may end on a rank while others still access that rank's input or output.
    fn check_ends(&self) -> Result<(), PlanError> {
        for (cell, access) in self.history.all() {
            let end = &self.ranks[cell.rank as usize].clock;
            if access.rank == cell.rank
                || cell.buffer == Buffer::Scratch
                || end.covers(access.moment)
            {
                continue;
            }
            let message = format!(
                "{} {} {cell}, and rank {} may have left the call by then: it must wait for a signal that follows, \
                 or for a barrier",
                self.name_of(access.rank, access.index),
                if access.writes { "writes" } else { "reads" },
                cell.rank
            );
            return Err(self.error(
                PlanErrorReason::MayHaveLeft,
                access.rank,
                access.index,
                message,
            ));
        }
        Ok(())
    }

    /// The error of two block groups that use a channel at once, so that nobody knows whose signal is whose.
    fn shared_channel(
        &self,
        rank: u32,
        index: usize,
        what: &str,
        former: Option<(Moment, u32)>,
    ) -> PlanError {
        let other = former.map_or(index, |(_, index)| index as usize);
        let message = format!(
            "{} and {} both {what} one channel, and nothing orders the two block groups: give each a channel of its \
             own",
            self.name_of(rank, index),
            self.name_of(rank, other)
        );
        self.error(PlanErrorReason::SharedChannel, rank, index, message)
    }

    /// The error of ranks of which none can go on: the circle that they wait in.
    fn deadlock(&self) -> PlanError {
        let blocked = |rank: u32| {
            let strands = &self.ranks[rank as usize].strands;
            strands.iter().find_map(|strand| strand.left.front().copied())
        };
        let first = (0..self.plan.world).find(|rank| blocked(*rank).is_some()).unwrap_or(0);
        let mut chain: Vec<(u32, usize)> = Vec::new();
        let mut rank = first;
        while let (Some(index), false) =
            (blocked(rank), chain.iter().any(|(seen, _)| *seen == rank))
        {
            chain.push((rank, index));
            rank = match &self.plan.programs[rank as usize][index].operation {
                Operation::Wait { peer, .. } => *peer,
                // It waits at a barrier for somebody who is not there.
                _ => (0..self.plan.world)
                    .find(|other| !self.ranks[*other as usize].at_barrier)
                    .unwrap_or(rank),
            };
        }
        let circle = chain.iter().position(|(seen, _)| *seen == rank).unwrap_or(0);
        let circle = &chain[circle.min(chain.len().saturating_sub(1))..];
        let story: Vec<String> =
            circle.iter().map(|(rank, index)| self.name_of(*rank, *index)).collect();
        let (rank, index) = circle.first().copied().unwrap_or((first, 0));
        let message = match blocked(circle.last().map_or(first, |(rank, _)| *rank)) {
            _ if circle.len() > 1 => {
                format!("ranks wait for each other in a circle: {}", story.join("; "))
            }
            _ => format!("{} waits for what never comes", story.join("; ")),
        };
        self.error(PlanErrorReason::Circle, rank, index, message)
    }

    /// An operation in messages: `line 12 of rank 0 (put input[1] to rank 1's scratch[0])`.
    fn name_of(&self, rank: u32, index: usize) -> String {
        name_of(self.plan, rank, index)
    }

    fn error(
        &self,
        reason: PlanErrorReason,
        rank: u32,
        index: usize,
        message: String,
    ) -> PlanError {
        error(self.plan, reason, rank, index, message)
    }
}

/// An operation in messages.
pub(super) fn name_of(plan: &Plan, rank: u32, index: usize) -> String {
    let Some(each) = plan.programs.get(rank as usize).and_then(|program| program.get(index)) else {
        return format!("rank {rank}");
    };
    let place = match each.line {
        0 => format!("operation {index}"),
        line => format!("line {line}"),
    };
    format!("{place} on rank {rank} ({})", each.operation.seen_by(rank))
}

/// An error about an operation.
pub(super) fn error(
    plan: &Plan,
    reason: PlanErrorReason,
    rank: u32,
    index: usize,
    message: String,
) -> PlanError {
    let found = plan.programs.get(rank as usize).and_then(|program| program.get(index));
    PlanError::new(reason, rank, found.map_or(0, |each| each.line), message)
}
