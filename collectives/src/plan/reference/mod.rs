//! The meaning of a plan: an interpreter of plans that is as plain as it is slow.
//!
//! Everything else that runs plans, in host memory and on devices, has to leave the bits that this leaves, and what
//! [`Plan::check`](super::Plan::check) passes leaves the same bits on every schedule. The meaning in short:
//!
//! - A rank has three buffers. Its input and output are the caller's; they are the call's from the rank's entering to its
//!   leaving, and the caller may do anything with them before and after. Its scratch is two halves, which calls use in turn.
//!   A half begins with whatever is there.
//! - A rank may leave a call when its program has ended and all ranks have entered the call. So a rank is at most one call
//!   ahead, and a peer's half of scratch for the next call may be written before that peer enters it.
//! - Operations of one block group run in order, as do those outside of groups; an operation outside of groups, or a join,
//!   comes after all before it in the program, and before all after it. Nothing else is ordered on a rank.
//! - `signal` adds one to a count; `wait` takes one, when there is one. The count is of sender, receiver and channel, and
//!   goes on from call to call. `barrier` is passed when all ranks have come to as many.
//! - An operation on data is element by element, and is made of parts: of every range of elements, chunk by chunk. Each part
//!   reads its sources and then writes. Parts of several operations may come between each other.
//! - `copy`, `put` and `get` keep the bits. So does a reduction of one chunk. A reduction of several takes them in the order
//!   given, in the accumulator of the element type, and rounds once.
//! - An average is a sum that is divided once by the number of inputs in it. A reduction that makes a result divides
//!   before it rounds. If another reduction takes that sum, the result is divided when the rank leaves.
//! - The last chunks of a part may be shorter than the others, or empty; those of scratch are as long as the longest. An
//!   operation is over as many elements as the shortest of its chunks has.

mod arithmetic;
mod layout;
mod memory;
mod progress;
mod values;

pub use layout::ChunkLayout;
pub use memory::{Caller, Touched};
pub use values::Values;

use std::collections::BTreeMap;
use std::ops::Range;

use super::model::{Collective, Operation, Plan, Span};
use crate::{DType, ReduceOp};
use arithmetic::reduce;
use memory::ReferenceMemory;
use progress::RankProgress;

/// Successive calls of a plan, each with data of its own, and alike in everything else.
#[derive(Clone, Debug)]
pub struct CallSeries<'a> {
    /// The plan. It need not be checked.
    pub plan: &'a Plan,
    /// How the elements are divided into chunks.
    pub layout: ChunkLayout,
    /// The type of the elements.
    pub dtype: DType,
    /// The operation of reductions.
    pub op: ReduceOp,
    /// Whether each rank's input and output are one memory.
    pub in_place: Vec<bool>,
    /// The inputs, by call and rank of the plan. Those of ranks that have nothing to broadcast are empty.
    pub inputs: &'a [Vec<Vec<u8>>],
}

/// Next step that a rank may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextStep {
    /// The rank.
    pub rank: u32,
    /// Step of the rank.
    pub step: RankStep,
}

/// A step of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankStep {
    /// Enters its next call.
    Enter,
    /// The next part of an operation, or all of one that moves no data.
    Operation(usize),
    /// Leaves its call.
    Leave,
}

/// Results of calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// The outputs, by call and rank, as they were when the rank left.
    pub outputs: Vec<Vec<Vec<u8>>>,
    /// Accesses of memory that should not have been made, the first one first.
    pub touched: Vec<Touched>,
    /// Signals that nobody has waited for.
    pub signals: u64,
}

/// Why calls did not come to their end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// No rank can go on: the operations that ranks wait in, as rank and index.
    Stuck(Vec<(u32, usize)>),
}

/// An operation that has begun: the parts of it that are left, and what its chunks will hold.
struct Begun {
    /// Elements, and the next chunk of them.
    parts: Vec<(Range<usize>, u32)>,
    /// For each chunk, its elements, and by what an average is divided here.
    chunks: Vec<(usize, usize)>,
}

/// A chunk that an operation accesses, and whether it writes there.
type PlaceAccess = (memory::ChunkPlace, bool);

/// Ranks in the middle of their calls.
pub struct Machine<'a> {
    calls: &'a CallSeries<'a>,
    memory: ReferenceMemory,
    progress: Vec<RankProgress<'a>>,
    begun: BTreeMap<(u32, usize), Begun>,
    signals: BTreeMap<(u32, u32, u32), u64>,
    values: &'a mut Values,
    outputs: Vec<Vec<Vec<u8>>>,
    /// How many parts an operation has, at most.
    parts: usize,
}

impl<'a> Machine<'a> {
    /// Ranks before their first call. Scratch and outputs begin with what `caller` gives. `values` says how averages
    /// divide: run the plan once with sums and [`Values::default`], and averages with what that leaves.
    pub fn new(
        calls: &'a CallSeries<'a>,
        caller: Caller,
        values: &'a mut Values,
        parts: usize,
    ) -> Self {
        let plan = calls.plan;
        let progress = plan.programs.iter().map(|program| RankProgress::new(program)).collect();
        Self {
            calls,
            memory: ReferenceMemory::new(calls, caller),
            progress,
            begun: BTreeMap::new(),
            signals: BTreeMap::new(),
            values,
            outputs: vec![vec![Vec::new(); plan.world as usize]; calls.inputs.len()],
            parts: parts.max(1),
        }
    }

    /// Runs all calls to their ends. `choose` says which of the possible steps is next.
    ///
    /// # Errors
    ///
    /// [`Stopped`] if the calls do not come to their ends.
    pub fn run(
        mut self,
        mut choose: impl FnMut(&Self, &[NextStep]) -> usize,
    ) -> Result<Left, Stopped> {
        loop {
            let choices = self.choices();
            if choices.is_empty() {
                break;
            }
            let chosen = choose(&self, &choices).min(choices.len() - 1);
            self.step(choices[chosen]);
        }
        let last = self.calls.inputs.len();
        if self.progress.iter().all(|rank| rank.calls == last && !rank.is_inside) {
            let signals = self.signals.values().sum();
            return Ok(Left { outputs: self.outputs, touched: self.memory.touched(), signals });
        }
        let ranks = (0u32..).zip(&self.progress);
        let waiting = ranks
            .flat_map(|(rank, progress)| progress.next.iter().map(move |index| (rank, *index)));
        Err(Stopped::Stuck(waiting.collect()))
    }

    /// All steps that are possible.
    pub fn choices(&self) -> Vec<NextStep> {
        let mut found = Vec::new();
        for (rank, progress) in (0u32..).zip(&self.progress) {
            let mut add = |step| found.push(NextStep { rank, step });
            if !progress.is_inside {
                if progress.calls < self.calls.inputs.len() {
                    add(RankStep::Enter);
                }
                continue;
            }
            let program = &self.calls.plan.programs[rank as usize];
            for &index in &progress.next {
                let is_possible = match program[index].operation {
                    Operation::Wait { peer, channel } => {
                        self.signals.get(&(peer, rank, channel)).is_some_and(|count| *count > 0)
                    }
                    // A rank comes to a barrier by a step, and passes it by another.
                    Operation::Barrier if progress.is_at_barrier => {
                        self.progress.iter().all(|other| other.barriers >= progress.barriers)
                    }
                    _ => true,
                };
                if is_possible {
                    add(RankStep::Operation(index));
                }
            }
            let has_ended = progress.has_ended();
            if has_ended && self.progress.iter().all(|other| other.calls >= progress.calls) {
                add(RankStep::Leave);
            }
        }
        found
    }

    fn step(&mut self, NextStep { rank, step }: NextStep) {
        let at = rank as usize;
        match step {
            RankStep::Enter => {
                let call = self.progress[at].enter();
                self.memory.enter(rank, &self.calls.inputs[call][at], call);
                for index in 0..self.calls.plan.chunks {
                    let place = self.memory.input_chunk(rank, index);
                    let value = self.values.input(rank, index);
                    self.memory.hold(place, value);
                }
            }
            RankStep::Leave => {
                let call = self.progress[at].leave();
                self.divide_last(rank);
                self.outputs[call][at] = self.memory.leave(rank, call);
            }
            RankStep::Operation(index) => match self.calls.plan.programs[at][index].operation {
                Operation::Join => self.progress[at].done(index),
                Operation::Barrier => {
                    let progress = &mut self.progress[at];
                    if progress.is_at_barrier {
                        progress.is_at_barrier = false;
                        progress.done(index);
                    } else {
                        progress.is_at_barrier = true;
                        progress.barriers += 1;
                    }
                }
                Operation::Signal { peer, channel } => {
                    *self.signals.entry((rank, peer, channel)).or_default() += 1;
                    self.progress[at].done(index);
                }
                Operation::Wait { peer, channel } => {
                    *self.signals.entry((peer, rank, channel)).or_default() -= 1;
                    self.progress[at].done(index);
                }
                _ => self.part(rank, index),
            },
        }
    }

    /// The next part of an operation on data.
    fn part(&mut self, rank: u32, index: usize) {
        let operation = &self.calls.plan.programs[rank as usize][index].operation;
        let Some(dst) = operation.destination() else { return };
        let srcs = operation.sources();
        let mut begun = match self.begun.remove(&(rank, index)) {
            Some(begun) => begun,
            None => self.begin(rank, dst, srcs),
        };
        // The ranges take turns, so that a schedule that stops here for a while leaves some chunks written in part.
        let (range, offset) = begun.parts.remove(0);
        let (length, divisor) = begun.chunks[offset as usize];
        let range_here = range.start.min(length)..range.end.min(length);
        let half = self.progress[rank as usize].half();
        let sources: Vec<Vec<u8>> = srcs
            .iter()
            .map(|src| {
                self.memory.read((rank, index), self.memory.chunk(*src, offset, half), &range_here)
            })
            .collect();
        let (dtype, op) = (self.calls.dtype, self.calls.op);
        let result = reduce(sources, dtype, op, divisor);
        let place = self.memory.chunk(dst, offset, half);
        self.memory.write((rank, index), place, range_here.start, &result);
        if offset + 1 < dst.count {
            begun.parts.push((range, offset + 1));
        }
        if begun.parts.is_empty() {
            self.progress[rank as usize].done(index);
        } else {
            self.begun.insert((rank, index), begun);
        }
    }

    /// Finds what the chunks of an operation will hold, and how long they are.
    fn begin(&mut self, rank: u32, dst: Span, srcs: &[Span]) -> Begun {
        let half = self.progress[rank as usize].half();
        let mut chunks = Vec::new();
        for offset in 0..dst.count {
            let to = self.memory.chunk(dst, offset, half);
            let mut length = self.memory.length(to);
            let mut values = Vec::new();
            for src in srcs {
                let from = self.memory.chunk(*src, offset, half);
                length = length.min(self.memory.length(from));
                values.push(self.memory.held(from));
            }
            let value = self.values.reduced(values);
            let divisor = match (srcs.len() > 1, self.calls.op) {
                (true, ReduceOp::Avg) => self.values.divisor(value),
                _ => 1,
            };
            self.memory.hold(to, value);
            chunks.push((length, divisor));
        }
        let longest = chunks.iter().map(|(length, _)| *length).max().unwrap_or(0);
        let each = longest.div_ceil(self.parts).max(1);
        let starts = (0..longest.max(1)).step_by(each);
        let parts = starts.map(|start| (start..(start + each).min(longest), 0)).collect();
        Begun { parts, chunks }
    }

    /// Divides the chunks of a rank's output whose sums other results were made of.
    fn divide_last(&mut self, rank: u32) {
        let plan = self.calls.plan;
        for index in 0..plan.output_chunks(rank) {
            let place = self.memory.output_chunk(rank, index);
            let (value, length) = (self.memory.held(place), self.memory.length(place));
            self.values.result(value);
            let divisor = self.values.last_divisor(value);
            if let (ReduceOp::Avg, 2..) = (self.calls.op, divisor) {
                let sum = self.memory.read((rank, 0), place, &(0..length));
                let average = reduce(vec![sum], self.calls.dtype, ReduceOp::Avg, divisor);
                self.memory.write((rank, 0), place, 0, &average);
            }
        }
    }

    /// Two operations on data that could both be next, of which one writes what the other one accesses; as ranks and
    /// indices. Whatever comes of it, nothing says which of the two is first.
    pub fn conflict(&self) -> Option<[(u32, usize); 2]> {
        let mut seen: Vec<((u32, usize), Vec<PlaceAccess>)> = Vec::new();
        for NextStep { rank, step } in self.choices() {
            let RankStep::Operation(index) = step else { continue };
            let operation = &self.calls.plan.programs[rank as usize][index].operation;
            let half = self.progress[rank as usize].half();
            let all = operation.sources().iter().map(|span| (*span, false));
            let all = all.chain(operation.destination().map(|span| (span, true)));
            let mine: Vec<_> = all
                .flat_map(|(span, writes)| {
                    let memory = &self.memory;
                    (0..span.count).map(move |offset| (memory.chunk(span, offset, half), writes))
                })
                .collect();
            for (other, theirs) in &seen {
                let conflicts = |a: &PlaceAccess| {
                    theirs.iter().any(|b| (a.1 || b.1) && a.0.is_same_memory(&b.0))
                };
                if mine.iter().any(conflicts) {
                    return Some([*other, (rank, index)]);
                }
            }
            seen.push(((rank, index), mine));
        }
        None
    }
}

/// Contents that chunk `index` of `rank`'s output must have by the collective's promise, for sums of integers and for
/// what is only moved: each contribution once, in whatever order.
pub fn promised(calls: &CallSeries<'_>, call: usize, rank: u32, index: u32) -> Vec<u8> {
    let size = calls.dtype.size();
    let contributions = calls.plan.expected(rank, index);
    let chunks = contributions.iter().map(|from| {
        let start = calls.layout.start(from.chunk) * size;
        let length = calls.layout.length(from.chunk) * size;
        calls.inputs[call][from.rank as usize][start..start + length].to_vec()
    });
    reduce(chunks.collect(), calls.dtype, calls.op, contributions.len())
}

/// Whether a rank has data when a call of the plan begins: nobody but the root of a broadcast has.
pub fn has_input(plan: &Plan, rank: u32) -> bool {
    plan.collective != Collective::Broadcast || rank == 0
}
