//! Writes programs of all ranks at once, operation by operation, and puts signals, waits and barriers where an operation must
//! come after another rank's.
//!
//! Every operation has a number, in the order in which it is written. That is an order in which all of them could run, so
//! ranks cannot wait in a circle. Each strand (what a rank runs in order) has the set of operations that come before its
//! next one.

use std::collections::{BTreeMap, VecDeque};

use symmpool_allocator::testing::SplitMix64;
use symmpool_collectives::plan::{Buffer, Instruction, Operation, Span};

/// Channels between two ranks.
const CHANNELS: u32 = 16;

/// A chunk: of a rank, in a buffer, at an index.
pub(super) type ChunkCell = (u32, Buffer, u32);

/// A set of operations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Past(Vec<u64>);

impl Past {
    fn add(&mut self, number: usize) {
        let word = number / 64;
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (number % 64);
    }

    fn has(&self, number: usize) -> bool {
        self.0.get(number / 64).is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine |= theirs;
        }
    }
}

/// Operations of a rank that run in order.
#[derive(Clone, Debug)]
struct Strand {
    group: Option<u32>,
    past: Past,
}

/// Who signals whom, on which channel.
type Channel = (u32, u32, u32);

/// How programs are written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Habits {
    /// In percent, how often a barrier orders what a signal could, and how often a signal that was sent is waited for
    /// later.
    pub(super) barriers: u64,
    pub(super) early_signals: u64,
    /// How often a rank's next operations are of several block groups, and for how many operations.
    pub(super) groups: u64,
    /// Whether channels other than 0 are used where they need not be.
    pub(super) many_channels: bool,
}

/// Where accesses of a memory stand.
#[derive(Clone, Debug, Default)]
struct Accesses {
    write: Option<usize>,
    reads: Vec<usize>,
}

pub(super) struct Weaver {
    world: u32,
    habits: Habits,
    pub(super) random: SplitMix64,
    pub(super) programs: Vec<Vec<Instruction>>,
    strands: Vec<Vec<Strand>>,
    numbers: usize,
    /// The rank of each number.
    rank_of: Vec<u32>,
    /// The number of each rank's entering.
    entered: Vec<usize>,
    accesses: BTreeMap<ChunkCell, Accesses>,
    /// Accesses of inputs and outputs by other ranks: whose memory, and the number.
    remote: Vec<(u32, usize)>,
    pending: BTreeMap<Channel, VecDeque<Past>>,
    last_signal: BTreeMap<Channel, usize>,
    last_wait: BTreeMap<Channel, usize>,
}

impl Weaver {
    pub(super) fn new(world: u32, habits: Habits, random: SplitMix64) -> Self {
        let mut weaver = Self {
            world,
            habits,
            random,
            programs: vec![Vec::new(); world as usize],
            strands: Vec::new(),
            numbers: 0,
            rank_of: Vec::new(),
            entered: Vec::new(),
            accesses: BTreeMap::new(),
            remote: Vec::new(),
            pending: BTreeMap::new(),
            last_signal: BTreeMap::new(),
            last_wait: BTreeMap::new(),
        };
        for rank in 0..world {
            let number = weaver.number(rank);
            let mut past = Past::default();
            past.add(number);
            weaver.entered.push(number);
            weaver.strands.push(vec![Strand { group: None, past }]);
        }
        weaver
    }

    /// Whether something happens that does in so many percent of cases.
    pub(super) fn chance(&mut self, percent: u64) -> bool {
        self.random.below(100) < percent
    }

    fn number(&mut self, rank: u32) -> usize {
        self.rank_of.push(rank);
        self.numbers += 1;
        self.numbers - 1
    }

    /// How many operations there are.
    pub(super) fn len(&self) -> usize {
        self.programs.iter().map(Vec::len).sum()
    }

    fn emit(&mut self, rank: u32, strand: usize, operation: Operation) -> usize {
        let number = self.number(rank);
        let strand = &mut self.strands[rank as usize][strand];
        strand.past.add(number);
        let (group, program) = (strand.group, &mut self.programs[rank as usize]);
        // Lines count operations from 1.
        let line = program.len() as u32 + 1;
        program.push(Instruction { operation, group, line });
        number
    }

    /// Splits a rank into block groups, or joins them.
    pub(super) fn change_groups(&mut self, rank: u32) {
        if !self.chance(self.habits.groups) {
            return;
        }
        if self.strands[rank as usize].len() > 1 {
            return self.join(rank);
        }
        let ends_in_group =
            self.programs[rank as usize].last().is_some_and(|last| last.group.is_some());
        if ends_in_group {
            self.emit(rank, 0, Operation::Join);
        }
        let count = 1 + self.random.below(3) as u32;
        let first = self.random.below(4) as u32;
        let past = self.strands[rank as usize][0].past.clone();
        let strand = |nth| Strand { group: Some((first + nth) % 8), past: past.clone() };
        self.strands[rank as usize] = (0..count).map(strand).collect();
    }

    /// Orders later operations of a rank after all its block groups.
    pub(super) fn join(&mut self, rank: u32) {
        let mut past = Past::default();
        for strand in &self.strands[rank as usize] {
            past.join(&strand.past);
        }
        let was_grouped = self.strands[rank as usize].iter().any(|strand| strand.group.is_some());
        self.strands[rank as usize] = vec![Strand { group: None, past }];
        if was_grouped && self.chance(50) {
            self.emit(rank, 0, Operation::Join);
        }
    }

    /// Has all ranks come to a barrier.
    pub(super) fn barrier(&mut self) {
        let mut all = Past::default();
        for rank in 0..self.world {
            self.join(rank);
            self.emit(rank, 0, Operation::Barrier);
            all.join(&self.strands[rank as usize][0].past);
        }
        for strands in &mut self.strands {
            strands[0].past.join(&all);
        }
    }

    /// Writes an operation on data: `memory` says in which memory each chunk lies, which may be one for two of them.
    pub(super) fn data(
        &mut self,
        rank: u32,
        operation: Operation,
        memory: impl Fn(ChunkCell) -> ChunkCell,
    ) {
        let cells = |span: &Span| {
            let Span { rank, buffer, index, count } = *span;
            (index..index + count)
                .map(move |index| (rank, buffer, index))
                .collect::<Vec<ChunkCell>>()
        };
        let (dst, srcs): (Span, Vec<Span>) = match &operation {
            Operation::Copy { dst, src }
            | Operation::Put { dst, src }
            | Operation::Get { dst, src } => (*dst, vec![*src]),
            Operation::Reduce { dst, srcs } => (*dst, srcs.clone()),
            _ => return,
        };
        let read: Vec<ChunkCell> = srcs.iter().flat_map(cells).collect();
        let written = cells(&dst);
        let mut needed = Vec::new();
        for cell in read.iter().chain(&written) {
            if cell.0 != rank && cell.1 != Buffer::Scratch {
                needed.push(self.entered[cell.0 as usize]);
            }
            let accesses = self.accesses.entry(memory(*cell)).or_default();
            needed.extend(accesses.write);
        }
        for cell in &written {
            needed.extend(self.accesses.entry(memory(*cell)).or_default().reads.iter().copied());
        }
        let strand = self.order(rank, &needed);
        let number = self.emit(rank, strand, operation);
        for cell in read.iter().chain(&written) {
            if cell.0 != rank && cell.1 != Buffer::Scratch {
                self.remote.push((cell.0, number));
            }
        }
        for cell in &read {
            self.accesses.entry(memory(*cell)).or_default().reads.push(number);
        }
        for cell in &written {
            let accesses = Accesses { write: Some(number), reads: Vec::new() };
            self.accesses.insert(memory(*cell), accesses);
        }
    }

    /// Sees to it that a strand of a rank comes after all these operations, and returns which.
    fn order(&mut self, rank: u32, needed: &[usize]) -> usize {
        let count = self.strands[rank as usize].len();
        let first = self.random.below(count as u64) as usize;
        let all_known = |strand: &Strand| needed.iter().all(|number| strand.past.has(*number));
        let of = &self.strands[rank as usize];
        let found = (0..count).map(|nth| (first + nth) % count).find(|nth| all_known(&of[*nth]));
        if let Some(found) = found {
            return found;
        }
        // An operation of the rank itself in another block group needs a join.
        let is_own = |number: &&usize| self.rank_of[**number] == rank;
        let strand = &self.strands[rank as usize][first];
        let mut strand_at = first;
        if needed.iter().filter(is_own).any(|number| !strand.past.has(*number)) {
            self.join(rank);
            strand_at = 0;
        }
        for number in needed {
            if self.strands[rank as usize][strand_at].past.has(*number) {
                continue;
            }
            if self.chance(self.habits.barriers) {
                self.barrier();
                strand_at = 0;
                continue;
            }
            strand_at = self.learn(rank, strand_at, *number);
        }
        strand_at
    }

    /// Has a rank's strand come after one operation, by a signal. Returns the strand, which is another one if the rank's
    /// block groups had to join.
    fn learn(&mut self, rank: u32, strand: usize, number: usize) -> usize {
        let mut strand = strand;
        // A signal that was sent already may do.
        let ways: Vec<Channel> =
            self.pending.keys().copied().filter(|(_, to, _)| *to == rank).collect();
        for way in ways {
            if self.pending[&way].front().is_some_and(|past| past.has(number))
                && self.can_wait(way, strand)
            {
                self.wait(way, strand);
                return strand;
            }
        }
        // Whoever knows of the operation may signal: its own rank, or one that came after it.
        let mut senders: Vec<u32> = (0..self.world).filter(|other| *other != rank).collect();
        senders.retain(|other| {
            self.strands[*other as usize].iter().any(|strand| strand.past.has(number))
        });
        let owner = self.rank_of[number];
        let sender = match self.chance(80) || senders.is_empty() {
            true => owner,
            false => senders[self.random.below(senders.len() as u64) as usize],
        };
        let knows = |strand: &Strand| strand.past.has(number);
        let sender_strand =
            self.strands[sender as usize].iter().position(knows).unwrap_or_else(|| {
                self.join(sender);
                0
            });
        let (way, sender_strand) = self.free_channel(sender, sender_strand, rank, &mut strand);
        self.signal(way, sender_strand);
        while self.pending.get(&way).is_some_and(|pending| !pending.is_empty()) {
            self.wait(way, strand);
        }
        strand
    }

    /// A channel that no unordered strand uses.
    fn free_channel(
        &mut self,
        from: u32,
        from_strand: usize,
        to: u32,
        to_strand: &mut usize,
    ) -> (Channel, usize) {
        let first = if self.habits.many_channels { self.random.below(4) as u32 } else { 0 };
        for nth in 0..CHANNELS {
            let way = (from, to, (first + nth) % CHANNELS);
            if self.can_signal(way, from_strand) && self.can_wait(way, *to_strand) {
                return (way, from_strand);
            }
        }
        self.join(from);
        self.join(to);
        *to_strand = 0;
        ((from, to, first), 0)
    }

    fn can_signal(&self, way: Channel, strand: usize) -> bool {
        let past = &self.strands[way.0 as usize][strand].past;
        self.last_signal.get(&way).is_none_or(|last| past.has(*last))
    }

    fn can_wait(&self, way: Channel, strand: usize) -> bool {
        let past = &self.strands[way.1 as usize][strand].past;
        self.last_wait.get(&way).is_none_or(|last| past.has(*last))
    }

    fn signal(&mut self, way: Channel, strand: usize) {
        let (peer, channel) = (way.1, way.2);
        let number = self.emit(way.0, strand, Operation::Signal { peer, channel });
        self.last_signal.insert(way, number);
        let past = self.strands[way.0 as usize][strand].past.clone();
        self.pending.entry(way).or_default().push_back(past);
    }

    fn wait(&mut self, way: Channel, strand: usize) {
        let (peer, channel) = (way.0, way.2);
        let Some(past) = self.pending.get_mut(&way).and_then(VecDeque::pop_front) else { return };
        let number = self.emit(way.1, strand, Operation::Wait { peer, channel });
        self.last_wait.insert(way, number);
        self.strands[way.1 as usize][strand].past.join(&past);
    }

    /// A signal that somebody waits for some time later.
    pub(super) fn early_signal(&mut self, from: u32) {
        if self.world < 2 || !self.chance(self.habits.early_signals) {
            return;
        }
        let to = (from + 1 + self.random.below(u64::from(self.world) - 1) as u32) % self.world;
        let strand = self.random.below(self.strands[from as usize].len() as u64) as usize;
        let channel = if self.habits.many_channels { self.random.below(4) as u32 } else { 0 };
        if self.can_signal((from, to, channel), strand) {
            self.signal((from, to, channel), strand);
        }
    }

    /// Ends all programs: whose memory others accessed knows that they have ended that, and no signal is left.
    pub(super) fn end(&mut self) {
        let mut order: Vec<u32> = (0..self.world).collect();
        self.random.shuffle(&mut order);
        for rank in order {
            let needed: Vec<usize> = self
                .remote
                .iter()
                .filter(|(of, _)| *of == rank)
                .map(|(_, number)| *number)
                .collect();
            let known = |number: &usize| {
                self.strands[rank as usize].iter().any(|strand| strand.past.has(*number))
            };
            if !needed.iter().all(known) {
                self.order(rank, &needed);
            }
        }
        let left: Vec<Channel> = self.pending.keys().copied().collect();
        for way in left {
            while !self.pending[&way].is_empty() {
                let strands = self.strands[way.1 as usize].len();
                let free = (0..strands).find(|strand| self.can_wait(way, *strand));
                let strand = free.unwrap_or_else(|| {
                    self.join(way.1);
                    0
                });
                self.wait(way, strand);
            }
        }
    }
}
