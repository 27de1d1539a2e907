//! Goals of a program, and random ways there: values that are copied from rank to rank, parked, reduced in steps, and
//! put into outputs.

use std::collections::{BTreeMap, BTreeSet};

use symmpool_allocator::testing::SplitMix64;
use symmpool_collectives::plan::{
    Buffer, Collective, Contribution, Operation, Plan, Protocol, Span,
};

use super::weaver::{ChunkCell, Habits, Weaver};

/// The number of a value: an input's chunk, or a reduction.
type ValueNumber = usize;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ValueSource {
    Input(Contribution),
    Reduced(Vec<ValueNumber>),
}

/// How a program goes about it. All are percents, but the last ones.
#[derive(Clone, Copy, Debug)]
struct Style {
    /// Reads peers' memory, instead of having peers put.
    pulls: u64,
    /// Reductions read and write peers' memory.
    reduces_remotely: u64,
    /// Copies that nobody needs.
    noise: u64,
    /// An operation on as many consecutive chunks as there are.
    ranges: u64,
    /// Copies by a reduction of one chunk.
    reduces_one: u64,
    /// Values are parked in outputs, in chunks of other places.
    parks: bool,
    moves_places: bool,
    /// Input and output of all ranks may be one memory.
    in_place: bool,
    /// Peers are reached by puts into scratch alone, and each chunk of it is written once.
    ll: bool,
}

/// A program in the making.
pub(super) struct Goals {
    plan: Plan,
    style: Style,
    weaver: Weaver,
    made: Vec<ValueSource>,
    /// Values of chunks.
    held: BTreeMap<ChunkCell, ValueNumber>,
    /// Chunks of outputs that lack their value.
    left: BTreeMap<ChunkCell, ValueNumber>,
    /// Chunks of scratch that may never be written again.
    used: BTreeSet<ChunkCell>,
}

/// Writes a program that is right, in one of very many ways.
pub(super) fn write(plan: Plan, mut random: SplitMix64) -> Plan {
    let mut percent = |of: &[u64]| of[random.below(of.len() as u64) as usize];
    let ll = percent(&[0, 0, 0, 0, 1]) == 1;
    let habits = Habits {
        barriers: if ll { 0 } else { percent(&[0, 0, 10, 30]) },
        early_signals: percent(&[0, 0, 10, 40]),
        groups: percent(&[0, 0, 0, 25, 50]),
        many_channels: percent(&[0, 0, 1]) == 1,
    };
    let style = Style {
        pulls: if ll { 0 } else { percent(&[0, 0, 30, 100]) },
        reduces_remotely: if ll { 0 } else { percent(&[0, 0, 50, 100]) },
        noise: percent(&[0, 5, 20]),
        ranges: percent(&[0, 70, 100]),
        reduces_one: percent(&[0, 0, 20]),
        parks: percent(&[0, 1]) == 1,
        moves_places: percent(&[0, 0, 1]) == 1,
        in_place: percent(&[0, 1]) == 1,
        ll,
    };
    let protocol = if ll { Protocol::Ll } else { Protocol::Simple };
    let world = plan.world;
    let weaver = Weaver::new(world, habits, random);
    let plan = Plan { protocol, ..plan };
    let mut goals = Goals {
        plan,
        style,
        weaver,
        made: Vec::new(),
        held: BTreeMap::new(),
        left: BTreeMap::new(),
        used: BTreeSet::new(),
    };
    goals.begin();
    goals.reach();
    goals.weaver.end();
    let programs = goals.weaver.programs;
    Plan { programs, ..goals.plan }
}

impl Goals {
    fn value(&mut self, made: ValueSource) -> ValueNumber {
        if let Some(found) = self.made.iter().position(|other| *other == made) {
            return found;
        }
        self.made.push(made);
        self.made.len() - 1
    }

    /// Notes the values that must be reached, and those that are there already.
    fn begin(&mut self) {
        let plan = self.plan.clone();
        for rank in 0..plan.world {
            if plan.collective == Collective::Broadcast && rank > 0 {
                continue;
            }
            for chunk in 0..plan.chunks {
                let value = self.value(ValueSource::Input(Contribution { rank, chunk }));
                self.held.insert((rank, Buffer::Input, chunk), value);
            }
        }
        // Where results must have the same bits, equal sets of inputs are reduced in one way.
        let mut ways: BTreeMap<Vec<Contribution>, ValueNumber> = BTreeMap::new();
        for rank in 0..plan.world {
            for index in 0..plan.output_chunks(rank) {
                let mut of = super::expected(&plan, rank, index);
                of.sort_unstable();
                let value = match ways.get(&of) {
                    Some(value) if plan.reproducible => *value,
                    _ => self.way_to_reduce(&of),
                };
                ways.insert(of, value);
                self.left.insert((rank, Buffer::Output, index), value);
            }
        }
    }

    /// One of the ways to reduce inputs: at once, one after the other, or in pairs.
    fn way_to_reduce(&mut self, of: &[Contribution]) -> ValueNumber {
        let mut values: Vec<ValueNumber> =
            of.iter().map(|each| self.value(ValueSource::Input(*each))).collect();
        if self.weaver.chance(30) {
            self.weaver.random.shuffle(&mut values);
        }
        let kind = self.weaver.random.below(6);
        while values.len() > 1 {
            let count = match kind {
                0..=2 => values.len(),
                3 => 2,
                _ => 2 + self.weaver.random.below(values.len() as u64 - 1) as usize,
            };
            let first = match kind {
                0..=3 => 0,
                _ => self.weaver.random.below((values.len() - count + 1) as u64) as usize,
            };
            let operands = values[first..first + count].to_vec();
            let reduced = self.value(ValueSource::Reduced(operands));
            values.splice(first..first + count, [reduced]);
        }
        values[0]
    }

    /// Goes on until every output holds its value.
    fn reach(&mut self) {
        let budget = 40 + self.left.len() * 8;
        let mut rounds = 0;
        while !self.left.is_empty() {
            rounds += 1;
            assert!(rounds < 10_000, "{} never holds its values: {:?}", self.plan.name, self.left);
            let rank = self.weaver.random.below(self.plan.world.into()) as u32;
            let has_time = self.weaver.len() < budget;
            if has_time {
                self.weaver.change_groups(rank);
                self.weaver.early_signal(rank);
            }
            if has_time && self.weaver.chance(self.style.noise) {
                self.make_noise(rank);
                continue;
            }
            let nth = self.weaver.random.below(self.left.len() as u64) as usize;
            let Some((target, value)) =
                self.left.iter().nth(nth).map(|(cell, value)| (*cell, *value))
            else {
                return;
            };
            self.deliver(target, value);
        }
    }

    /// Brings a value, which may have to be made, to a chunk of an output.
    fn deliver(&mut self, target: ChunkCell, value: ValueNumber) {
        if self.where_is(value, target.0).is_some() {
            self.bring(target, value);
            return;
        }
        let Some(wanted) = self.next_to_make(value) else { return };
        // Who reduces, and where to: into the output, if that is all there is to do.
        let rank = match self.weaver.chance(60) {
            true => target.0,
            false => self.weaver.random.below(self.plan.world.into()) as u32,
        };
        let ValueSource::Reduced(operands) = self.made[wanted].clone() else { return };
        let remotely = self.weaver.chance(self.style.reduces_remotely);
        let dst = if wanted == value && self.is_free(target) && (target.0 == rank || remotely) {
            target
        } else {
            let to =
                if (remotely || self.style.ll) && self.weaver.chance(30) { target.0 } else { rank };
            match self.room(to) {
                Some(cell) => cell,
                None => return self.grow(),
            }
        };
        let mut srcs = Vec::new();
        for operand in operands {
            let here = self.here_or_there(operand, rank, remotely);
            match here {
                Some(cell) => srcs.push(cell),
                None => {
                    // It is brought first.
                    let Some(room) = self.room_but(rank, &srcs, dst) else { return self.grow() };
                    if !self.bring(room, operand) {
                        return;
                    }
                    srcs.push(room);
                }
            }
        }
        // Bringing may have overwritten what was found before.
        let ValueSource::Reduced(operands) = self.made[wanted].clone() else { return };
        let still_there =
            srcs.iter().zip(&operands).all(|(src, value)| self.held.get(src) == Some(value));
        if !still_there || !self.may_write(dst) || !self.can_lose(&[dst], Some(wanted)) {
            return;
        }
        let count = self.range_of(dst, &srcs);
        let span = |cell: ChunkCell| span(cell, count);
        let operation =
            Operation::Reduce { dst: span(dst), srcs: srcs.iter().copied().map(span).collect() };
        self.run(rank, operation);
    }

    /// The innermost reduction of a value whose operands are there.
    fn next_to_make(&self, value: ValueNumber) -> Option<ValueNumber> {
        if self.held.values().any(|held| *held == value) {
            return None;
        }
        let ValueSource::Reduced(operands) = &self.made[value] else { return None };
        operands.iter().find_map(|operand| self.next_to_make(*operand)).or(Some(value))
    }

    /// A chunk that holds a value, on that rank if there is one there.
    fn where_is(&mut self, value: ValueNumber, rank: u32) -> Option<ChunkCell> {
        let found: Vec<ChunkCell> =
            self.held.iter().filter(|(_, held)| **held == value).map(|(cell, _)| *cell).collect();
        let here: Vec<ChunkCell> = found.iter().copied().filter(|cell| cell.0 == rank).collect();
        let from = if here.is_empty() || self.weaver.chance(20) { &found } else { &here };
        if from.is_empty() {
            return None;
        }
        Some(from[self.weaver.random.below(from.len() as u64) as usize])
    }

    /// Where a reduction on `rank` takes a value from, if it needs not be brought.
    fn here_or_there(
        &mut self,
        value: ValueNumber,
        rank: u32,
        remotely: bool,
    ) -> Option<ChunkCell> {
        let here = self.held.iter().find(|(cell, held)| **held == value && cell.0 == rank);
        let here = here.map(|(cell, _)| *cell);
        if here.is_some() && !(remotely && self.weaver.chance(20)) {
            return here;
        }
        if remotely { self.where_is(value, rank) } else { None }
    }

    /// Copies a value to a chunk. Returns whether it could.
    fn bring(&mut self, target: ChunkCell, value: ValueNumber) -> bool {
        let Some(src) = self.where_is(value, target.0) else { return false };
        let mut target = target;
        if self.style.ll && src.0 != target.0 && target.1 != Buffer::Scratch {
            match self.room(target.0) {
                Some(room) => target = room,
                None => {
                    self.grow();
                    return false;
                }
            }
        }
        if src == target || !self.may_write(target) || !self.can_lose(&[target], Some(value)) {
            if self.held.get(&target) != Some(&value) {
                self.rescue(target);
            }
            return false;
        }
        let is_remote = src.0 != target.0;
        let rank = match (is_remote, self.weaver.chance(self.style.pulls)) {
            (true, true) => target.0,
            _ => src.0,
        };
        // A value that lies in one memory anyway needs no copy, and may not have one to another place there.
        let count = self.range_of(target, &[src]);
        let (dst, src) = (span(target, count), span(src, count));
        let operation = if self.weaver.chance(self.style.reduces_one) {
            Operation::Reduce { dst, srcs: vec![src] }
        } else if !is_remote {
            Operation::Copy { dst, src }
        } else if rank == target.0 {
            Operation::Get { dst, src }
        } else {
            Operation::Put { dst, src }
        };
        self.run(rank, operation);
        true
    }

    /// Copies what a chunk of a memory holds to somewhere else, so that it may be written.
    fn rescue(&mut self, target: ChunkCell) {
        let rank = target.0;
        let memory = self.memory(target);
        let lost: Vec<ChunkCell> =
            self.held.keys().copied().filter(|cell| self.memory(*cell) == memory).collect();
        for cell in lost {
            match self.room(rank) {
                Some(room) => {
                    let (dst, src) = (span(room, 1), span(cell, 1));
                    self.run(rank, Operation::Copy { dst, src });
                }
                None => self.grow(),
            }
        }
    }

    /// A copy that nobody needs, or the rank's last operation again.
    fn make_noise(&mut self, rank: u32) {
        let last = self.weaver.programs[rank as usize]
            .iter()
            .rev()
            .find(|each| each.operation.name() != "signal");
        if self.weaver.random.below(3) == 0
            && !self.style.ll
            && let Some(last) = last
        {
            let operation = last.operation.clone();
            self.again(rank, operation);
            return;
        }
        let values: Vec<ValueNumber> = self.held.values().copied().collect();
        if values.is_empty() {
            return;
        }
        let value = values[self.weaver.random.below(values.len() as u64) as usize];
        if let Some(room) = self.room(rank) {
            self.bring(room, value);
        }
    }

    /// Repeats an operation, if it would leave the same.
    fn again(&mut self, rank: u32, operation: Operation) {
        let (dst, srcs) = match &operation {
            Operation::Copy { dst, src }
            | Operation::Put { dst, src }
            | Operation::Get { dst, src } => (*dst, vec![*src]),
            Operation::Reduce { dst, srcs } => (*dst, srcs.clone()),
            _ => return,
        };
        for offset in 0..dst.count {
            let at =
                |span: Span| self.held.get(&(span.rank, span.buffer, span.index + offset)).copied();
            let Some(found) = srcs.iter().map(|src| at(*src)).collect::<Option<Vec<ValueNumber>>>()
            else {
                return;
            };
            let value = match found[..] {
                [one] => Some(one),
                _ => self.made.iter().position(|made| *made == ValueSource::Reduced(found.clone())),
            };
            if at(dst) != value {
                return;
            }
        }
        self.run(rank, operation);
    }

    /// How many chunks an operation can take at once that begins with these: for each further one the sources hold what
    /// the destination lacks.
    fn range_of(&mut self, dst: ChunkCell, srcs: &[ChunkCell]) -> u32 {
        let mut count = 1;
        while self.weaver.chance(self.style.ranges) && count < 8 {
            let next = |cell: &ChunkCell| (cell.0, cell.1, cell.2 + count);
            let to = next(&dst);
            let found: Option<Vec<ValueNumber>> =
                srcs.iter().map(|src| self.held.get(&next(src)).copied()).collect();
            let Some(found) = found else { break };
            let value = match found[..] {
                [one] => Some(one),
                _ => self.made.iter().position(|made| *made == ValueSource::Reduced(found.clone())),
            };
            let Some(value) = value else { break };
            let is_wanted = match to.1 {
                Buffer::Output => self.left.get(&to) == Some(&value),
                Buffer::Scratch => to.2 < self.plan.scratch && !self.held.contains_key(&to),
                Buffer::Input => false,
            };
            // Ranges that overlap are refused.
            let overlaps = srcs.iter().any(|src| {
                (src.0, src.1) == (dst.0, dst.1)
                    && src.2 < dst.2 + count + 1
                    && dst.2 < src.2 + count + 1
            });
            let all: Vec<ChunkCell> = (0..=count).map(|nth| (dst.0, dst.1, dst.2 + nth)).collect();
            let fits = !overlaps && self.may_write(to) && self.place_fits(to, value);
            if !is_wanted || !fits || !self.can_lose(&all, None) {
                break;
            }
            count += 1;
        }
        count
    }

    /// The memory of a chunk.
    fn memory(&self, cell: ChunkCell) -> ChunkCell {
        memory(&self.plan, self.style.in_place, cell)
    }

    fn run(&mut self, rank: u32, operation: Operation) {
        let (plan, in_place) = (self.plan.clone(), self.style.in_place);
        self.weaver.data(rank, operation.clone(), |cell| memory(&plan, in_place, cell));
        let (dst, srcs) = match operation {
            Operation::Copy { dst, src }
            | Operation::Put { dst, src }
            | Operation::Get { dst, src } => (dst, vec![src]),
            Operation::Reduce { dst, srcs } => (dst, srcs),
            _ => return,
        };
        for offset in 0..dst.count {
            let at = |span: Span| (span.rank, span.buffer, span.index + offset);
            let found: Vec<ValueNumber> =
                srcs.iter().filter_map(|src| self.held.get(&at(*src)).copied()).collect();
            let value = match found[..] {
                [one] => one,
                _ => self.value(ValueSource::Reduced(found)),
            };
            let to = at(dst);
            let memory = self.memory(to);
            let lost: Vec<ChunkCell> = self
                .held
                .keys()
                .copied()
                .filter(|cell| *cell != to && self.memory(*cell) == memory)
                .collect();
            for cell in lost {
                self.held.remove(&cell);
            }
            self.held.insert(to, value);
            if to.1 == Buffer::Scratch && self.style.ll {
                self.used.insert(to);
            }
            if self.left.get(&to) == Some(&value) {
                self.left.remove(&to);
            }
        }
    }

    /// Whether a value is in a chunk of as many elements as it has, whatever the count of a call.
    fn place_fits(&self, cell: ChunkCell, value: ValueNumber) -> bool {
        if cell.1 == Buffer::Scratch || self.style.moves_places {
            return true;
        }
        let each = self.plan.chunks_of_part().max(1);
        self.places(value).iter().all(|place| *place == cell.2 % each)
    }

    fn places(&self, value: ValueNumber) -> BTreeSet<u32> {
        let each = self.plan.chunks_of_part().max(1);
        match &self.made[value] {
            ValueSource::Input(of) => [of.chunk % each].into(),
            ValueSource::Reduced(operands) => {
                operands.iter().flat_map(|of| self.places(*of)).collect()
            }
        }
    }

    /// Whether a chunk may be written: inputs never, outputs only as long as they are not complete, and in LL scratch once.
    fn may_write(&self, cell: ChunkCell) -> bool {
        match cell.1 {
            Buffer::Input => false,
            Buffer::Output => self.left.contains_key(&cell),
            Buffer::Scratch => !self.used.contains(&cell),
        }
    }

    fn is_free(&self, cell: ChunkCell) -> bool {
        self.may_write(cell) && self.can_lose(&[cell], None)
    }

    /// Whether what the memories of chunks hold is not needed any more, or held elsewhere, or written there again.
    fn can_lose(&self, cells: &[ChunkCell], for_value: Option<ValueNumber>) -> bool {
        let memories: Vec<ChunkCell> = cells.iter().map(|cell| self.memory(*cell)).collect();
        let is_lost = |cell: &ChunkCell| memories.contains(&self.memory(*cell));
        self.held.iter().filter(|(cell, _)| is_lost(cell)).all(|(_, value)| {
            let elsewhere = self.held.iter().any(|(other, held)| held == value && !is_lost(other));
            elsewhere || for_value == Some(*value) || !self.is_needed(*value)
        })
    }

    fn is_needed(&self, value: ValueNumber) -> bool {
        self.left.values().any(|wanted| self.takes(*wanted, value))
    }

    fn takes(&self, whole: ValueNumber, part: ValueNumber) -> bool {
        if whole == part {
            return true;
        }
        match &self.made[whole] {
            ValueSource::Input(_) => false,
            ValueSource::Reduced(operands) => operands.iter().any(|of| self.takes(*of, part)),
        }
    }

    /// A chunk of a rank where something may be parked.
    fn room(&mut self, rank: u32) -> Option<ChunkCell> {
        self.room_but(rank, &[], (rank, Buffer::Input, 0))
    }

    fn room_but(&mut self, rank: u32, but: &[ChunkCell], other: ChunkCell) -> Option<ChunkCell> {
        let mut found: Vec<ChunkCell> =
            (0..self.plan.scratch).map(|index| (rank, Buffer::Scratch, index)).collect();
        // In LL peers are reached through scratch alone.
        if self.style.parks && self.style.moves_places && !self.style.ll && self.weaver.chance(30) {
            found.extend(self.left.keys().copied().filter(|cell| cell.0 == rank));
        }
        found.retain(|cell| *cell != other && !but.contains(cell) && self.is_free(*cell));
        if found.is_empty() {
            return None;
        }
        Some(found[self.weaver.random.below(found.len() as u64) as usize])
    }

    fn grow(&mut self) {
        self.plan.scratch += 1;
    }
}

fn span((rank, buffer, index): ChunkCell, count: u32) -> Span {
    Span { rank, buffer, index, count }
}

/// The memory of a chunk, where input and output may be one.
fn memory(plan: &Plan, in_place: bool, cell: ChunkCell) -> ChunkCell {
    let (rank, buffer, index) = cell;
    if !in_place || buffer != Buffer::Output {
        return cell;
    }
    let each = plan.chunks_of_part();
    let input = match plan.collective {
        Collective::AllReduce | Collective::Broadcast | Collective::AllToAll => Some(index),
        Collective::AllGather => index.checked_sub(rank * each).filter(|index| *index < each),
        Collective::ReduceScatter => Some(rank * each + index),
        Collective::Custom { .. } => (index < plan.chunks).then_some(index),
    };
    input.map_or(cell, |index| (rank, Buffer::Input, index))
}
