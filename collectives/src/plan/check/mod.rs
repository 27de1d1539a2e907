//! The proof that a plan does what its collective promises, on every schedule.
//!
//! What is checked, in this order: places and peers are there; signals and waits match; nobody waits in a circle;
//! accesses that conflict are ordered, also with the calls before and after; and every output holds what it must,
//! reduced in one order. `run` does most of it.
//!
//! What holds between calls is part of the proof. Scratch has two halves that calls use alternately, and no rank is
//! more than one call ahead (rule S4), so scratch of one call is never touched by another. Input and output are the
//! caller's again when the call ends on a rank. So a peer's input and output may be accessed only behind a signal
//! that shows that the peer has entered the call, and the peer must wait for a signal behind the last access. What is
//! proved of one call this way holds for any number of them.

mod clock;
mod error;
mod run;
mod value;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

pub use error::{PlanError, PlanErrorKind};
pub(super) use run::phases;
use run::{Held, Outcome, Run, name_of};
use value::Value;

use super::model::{Buffer, Cell, Collective, Contribution, Operation, Plan, Protocol, Span};
use super::schedule::Schedule;

/// A plan that was proved, and what execution needs to know of it.
#[derive(Debug)]
pub struct CheckedPlan {
    plan: Plan,
    hash: u64,
    /// What each rank does, in an order in which one thread a rank can do it.
    pub(crate) steps: Vec<Vec<Step>>,
    /// The operations of all ranks, as rank and index, in an order in which they can run one after the other.
    pub(super) order: Vec<(u32, usize)>,
    /// Why input and output must not be one memory, if they must not.
    in_place: Result<(), PlanError>,
    /// Whether chunks must have equal lengths, because chunks at different places of their parts are exchanged.
    pub(crate) needs_equal_chunks: bool,
    /// Whether peers access inputs, so that these must be windows; and outputs.
    reaches_inputs: bool,
    reaches_outputs: bool,
    /// Whether results are reduced in several steps, with rounding between them.
    pub(crate) has_partial_results: bool,
    /// Whether averages divide some results at the end of the call ([`Step::Divide`]).
    pub(crate) divides_last: bool,
    /// As devices run it, from the first call on one.
    schedule: OnceLock<Schedule>,
}

/// A step of one rank, over single chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Reduces chunks, or copies one.
    Reduce(Item),
    /// Divides a chunk of the rank's own output, where a call averages: another result was made of it as a sum, so that
    /// it was not divided when it was reduced.
    Divide {
        cell: Cell,
        /// Which chunk of a part it has the length of.
        place: u32,
        by: u32,
    },
    Signal {
        peer: u32,
        channel: u32,
    },
    Wait {
        peer: u32,
        channel: u32,
    },
    Barrier,
}

/// A chunk that is written, and what it is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) dst: Cell,
    pub(crate) srcs: Vec<Cell>,
    /// Which chunk of a part it has the length of.
    pub(crate) place: u32,
    /// What an average is divided by here: the number of inputs that are reduced in a result. 1 where nothing is
    /// divided, which are copies and partial results.
    pub(crate) divisor: u32,
}

impl Plan {
    /// Proves that the plan computes what its collective promises on every schedule, whatever calls come before and
    /// after.
    ///
    /// It takes time in proportion to operations and chunks: some milliseconds for 16 ranks.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong, with the rank and the line.
    pub fn check(self) -> Result<CheckedPlan, PlanError> {
        if let Err(error) = self.within_limits() {
            let message = error.to_string();
            let message = message.trim_start_matches("symmpool: ").to_owned();
            return Err(PlanError { kind: PlanErrorKind::OutOfRange, rank: 0, line: 0, message });
        }
        check_places(&self)?;
        check_signals(&self)?;
        let outcome = Run::new(&self, false).run()?;
        check_results(&self, false, &outcome)?;
        check_protocol(&self)?;
        let in_place = check_in_place(&self);
        Ok(CheckedPlan::new(self, &outcome, in_place))
    }
}

impl CheckedPlan {
    fn new(plan: Plan, outcome: &Outcome, in_place: Result<(), PlanError>) -> Self {
        let values = &outcome.values;
        let mut results: BTreeSet<Value> = BTreeSet::new();
        let mut needs_equal_chunks = false;
        for rank in 0..plan.world {
            for index in 0..plan.output_chunks(rank) {
                let cell = Cell { rank, buffer: Buffer::Output, index };
                let Some(held) = outcome.cells.get(&cell) else { continue };
                results.insert(held.value);
                needs_equal_chunks |=
                    values.place(held.value) != Some(index % plan.chunks_of_part().max(1));
            }
        }
        // A result of which others are made stays a sum until the end, when nobody reads it any more.
        let all = outcome.order.iter().flat_map(|ran| &ran.values);
        let parts: BTreeSet<Value> =
            all.flat_map(|value| values.operands(*value)).copied().collect();
        let mut steps = vec![Vec::new(); plan.world as usize];
        let mut has_partial_results = false;
        for ran in &outcome.order {
            let steps = &mut steps[ran.rank as usize];
            let operation = &plan.programs[ran.rank as usize][ran.index].operation;
            match operation {
                Operation::Signal { peer, channel } => {
                    steps.push(Step::Signal { peer: *peer, channel: *channel });
                }
                Operation::Wait { peer, channel } => {
                    steps.push(Step::Wait { peer: *peer, channel: *channel });
                }
                Operation::Barrier => steps.push(Step::Barrier),
                _ => {}
            }
            for (offset, value) in (0u32..).zip(&ran.values) {
                let Some(dst) = operation.destination() else { continue };
                let place = values.place(*value);
                needs_equal_chunks |= place.is_none();
                has_partial_results |= !values.is_flat(*value);
                let srcs: Vec<Cell> =
                    operation.sources().iter().map(|src| src.cell(offset)).collect();
                let divides = srcs.len() > 1 && results.contains(value) && !parts.contains(value);
                let divisor = if divides { values.count(*value) } else { 1 };
                let (dst, place) = (dst.cell(offset), place.unwrap_or(0));
                steps.push(Step::Reduce(Item { dst, srcs, place, divisor }));
            }
        }
        for (rank, steps) in (0u32..).zip(&mut steps) {
            for index in 0..plan.output_chunks(rank) {
                let cell = Cell { rank, buffer: Buffer::Output, index };
                let Some(Held { value, .. }) = outcome.cells.get(&cell) else { continue };
                let by = values.count(*value);
                if by > 1 && parts.contains(value) {
                    let place = values.place(*value).unwrap_or(0);
                    steps.push(Step::Divide { cell, place, by });
                }
            }
        }
        let is_division = |step: &Step| matches!(step, Step::Divide { .. });
        let divides_last = steps.iter().flatten().any(is_division);
        let reaches = |buffer: Buffer| {
            let programs = (0u32..).zip(&plan.programs);
            programs.into_iter().any(|(rank, program)| {
                let spans = program.iter().flat_map(|each| each.operation.spans());
                spans.into_iter().any(|span| span.rank != rank && span.buffer == buffer)
            })
        };
        let (reaches_inputs, reaches_outputs) = (reaches(Buffer::Input), reaches(Buffer::Output));
        let in_place = in_place.and_then(|()| match plan.collective {
            Collective::AllGather if reaches_inputs => Err(elsewhere("inputs")),
            Collective::ReduceScatter if reaches_outputs => Err(elsewhere("outputs")),
            _ => Ok(()),
        });
        Self {
            hash: plan.hash(),
            order: outcome.order.iter().map(|ran| (ran.rank, ran.index)).collect(),
            steps,
            in_place,
            needs_equal_chunks,
            reaches_inputs,
            reaches_outputs,
            has_partial_results,
            divides_last,
            schedule: OnceLock::new(),
            plan,
        }
    }

    /// The plan in levels.
    pub(crate) fn schedule(&self) -> &Schedule {
        self.schedule.get_or_init(|| Schedule::new(self))
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The plan's hash; see [`Plan::hash`].
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Whether input and output may be one memory. The error says what goes wrong if they are.
    ///
    /// In place, the input of an all-gather is the rank's part of the output, and the output of a reduce-scatter the
    /// rank's part of the input; else the two begin at one address.
    pub fn in_place(&self) -> Result<(), &PlanError> {
        self.in_place.as_ref().copied()
    }

    /// The elements of `rank`'s input and output in a call of `count` elements; see
    /// [`HostEngine::run_plan`](crate::HostEngine::run_plan). `None` stands for a number that is too large.
    pub fn lengths(&self, rank: u32, count: usize) -> [Option<usize>; 2] {
        let plan = &self.plan;
        let times = |parts: u32| count.checked_mul(parts as usize);
        match plan.collective {
            Collective::Custom { .. } => {
                let chunk = count / plan.chunks.max(1) as usize;
                [Some(count), chunk.checked_mul(plan.output_chunks(rank) as usize)]
            }
            _ => [times(plan.input_parts()), times(plan.output_parts())],
        }
    }

    /// Whether peers read or write inputs, which must then be windows.
    pub fn needs_input_window(&self) -> bool {
        self.reaches_inputs
    }

    /// Whether peers read or write outputs, which must then be windows.
    pub fn needs_output_window(&self) -> bool {
        self.reaches_outputs
    }
}

/// Why a program that reaches its peers' inputs, or outputs, is not right where these are a rank's own part of the other
/// buffer: peers look for them at one offset on every rank.
fn elsewhere(what: &str) -> PlanError {
    let message = format!("peers access {what}, which then lie at another offset on each rank");
    PlanError { kind: PlanErrorKind::Race, rank: 0, line: 0, message }
}

/// Refuses places, peers and groups that are not there.
fn check_places(plan: &Plan) -> Result<(), PlanError> {
    if let Collective::Custom { name, outputs } = &plan.collective {
        for (rank, chunks) in (0u32..).zip(outputs) {
            for (index, chunk) in chunks.iter().enumerate() {
                let outside =
                    chunk.iter().find(|each| each.rank >= plan.world || each.chunk >= plan.chunks);
                let message = match (outside, chunk.is_empty()) {
                    (Some(each), _) => format!(
                        "{name}: output[{index}] of rank {rank} must hold {each}, which is not there"
                    ),
                    (None, true) => format!(
                        "{name}: output[{index}] of rank {rank} must hold nothing; leave it out"
                    ),
                    (None, false) => continue,
                };
                return Err(PlanError { kind: PlanErrorKind::OutOfRange, rank, line: 0, message });
            }
        }
    }
    for (rank, program) in (0u32..).zip(&plan.programs) {
        for (index, each) in program.iter().enumerate() {
            let refuse = |why: String| {
                let message = format!("{}: {why}", name_of(plan, rank, index));
                Err(run::error(plan, PlanErrorKind::OutOfRange, rank, index, message))
            };
            if let Operation::Signal { peer, .. } | Operation::Wait { peer, .. } = each.operation
                && (peer >= plan.world || peer == rank)
            {
                return refuse(format!("rank {peer} is no peer among {} ranks", plan.world));
            }
            if each.operation == Operation::Barrier && each.group.is_some() {
                return refuse("a barrier must stand outside of block groups".to_owned());
            }
            for span in each.operation.spans() {
                if let Err(why) = check_span(plan, span) {
                    return refuse(why);
                }
            }
            if let Err(why) = check_shape(rank, &each.operation) {
                return refuse(why);
            }
        }
    }
    Ok(())
}

fn check_span(plan: &Plan, span: Span) -> Result<(), String> {
    if span.rank >= plan.world {
        return Err(format!("there is no rank {} among {} ranks", span.rank, plan.world));
    }
    let chunks = plan.chunks_of(span.rank, span.buffer);
    let end = u64::from(span.index) + u64::from(span.count);
    if span.count == 0 || end > chunks.into() {
        let buffer = span.buffer.name();
        return Err(format!("{buffer} of rank {} has {chunks} chunks", span.rank));
    }
    Ok(())
}

/// Whether places are of the lengths and on the ranks that the operation asks for.
fn check_shape(rank: u32, operation: &Operation) -> Result<(), String> {
    let Some(dst) = operation.destination() else { return Ok(()) };
    let srcs = operation.sources();
    if srcs.is_empty() {
        return Err("there is nothing to reduce".to_owned());
    }
    if let Some(src) = srcs.iter().find(|src| src.count != dst.count) {
        return Err(format!("{} chunks do not fit {}", src.count, dst.count));
    }
    let overlaps = |src: &Span| {
        let of_one = (src.rank, src.buffer) == (dst.rank, dst.buffer) && src.index != dst.index;
        of_one && src.index < dst.index + dst.count && dst.index < src.index + src.count
    };
    if srcs.iter().any(overlaps) {
        return Err("source and destination overlap, and are not the same".to_owned());
    }
    let (to_peer, from_peer) = (dst.rank != rank, srcs[0].rank != rank);
    match operation {
        Operation::Copy { .. } if to_peer || from_peer => {
            Err("copy is within a rank; put copies to a peer, and get from one".to_owned())
        }
        Operation::Put { .. } if !to_peer || from_peer => {
            Err("put copies from the rank's own memory to a peer's".to_owned())
        }
        Operation::Get { .. } if to_peer || !from_peer => {
            Err("get copies from a peer's memory to the rank's own".to_owned())
        }
        _ => Ok(()),
    }
}

/// The indices of the signals of a channel, and of its waits.
type Matched = (Vec<usize>, Vec<usize>);

/// Refuses signals that nobody waits for, waits without a signal, and barriers that not all ranks come to.
fn check_signals(plan: &Plan) -> Result<(), PlanError> {
    // By sender, receiver and channel.
    let mut ways: BTreeMap<(u32, u32, u32), Matched> = BTreeMap::new();
    let mut barriers = vec![Vec::new(); plan.world as usize];
    for (rank, program) in (0u32..).zip(&plan.programs) {
        for (index, each) in program.iter().enumerate() {
            match each.operation {
                Operation::Signal { peer, channel } => {
                    ways.entry((rank, peer, channel)).or_default().0.push(index);
                }
                Operation::Wait { peer, channel } => {
                    ways.entry((peer, rank, channel)).or_default().1.push(index);
                }
                Operation::Barrier => barriers[rank as usize].push(index),
                _ => {}
            }
        }
    }
    let kind = PlanErrorKind::UnmatchedSignal;
    for ((from, to, channel), (signals, waits)) in ways {
        let counts = format!(
            "rank {from} signals rank {to} {} times on channel {channel}, and that waits for it {} times",
            signals.len(),
            waits.len()
        );
        if let Some(index) = signals.get(waits.len()) {
            let message =
                format!("{}: nobody waits for this signal; {counts}", name_of(plan, from, *index));
            return Err(run::error(plan, kind, from, *index, message));
        }
        if let Some(index) = waits.get(signals.len()) {
            let message =
                format!("{}: nobody sends this signal; {counts}", name_of(plan, to, *index));
            return Err(run::error(plan, kind, to, *index, message));
        }
    }
    let fewest = (0..plan.world).min_by_key(|rank| barriers[*rank as usize].len()).unwrap_or(0);
    let least = barriers[fewest as usize].len();
    for (rank, mine) in (0u32..).zip(&barriers) {
        if let Some(index) = mine.get(least) {
            let message = format!(
                "{}: rank {fewest} comes to {least} barriers, and rank {rank} to {}",
                name_of(plan, rank, *index),
                mine.len()
            );
            return Err(run::error(plan, kind, rank, *index, message));
        }
    }
    Ok(())
}

/// Refuses outputs that do not hold what the collective promises, and reductions in different orders.
fn check_results(plan: &Plan, in_place: bool, outcome: &Outcome) -> Result<(), PlanError> {
    // The first output of each set of contributions.
    let mut orders: BTreeMap<Vec<Contribution>, (Value, u32, usize)> = BTreeMap::new();
    for rank in 0..plan.world {
        for index in 0..plan.output_chunks(rank) {
            let cell = Cell { rank, buffer: Buffer::Output, index };
            let held = outcome.cells.get(&Run::memory_of(plan, in_place, cell));
            let mut expected = plan.expected(rank, index);
            expected.sort_unstable();
            let last = plan.programs[rank as usize].len().saturating_sub(1);
            let (value, (by, at)) = match held {
                Some(held) => (held.value, held.writer.unwrap_or((rank, last))),
                None => {
                    let message = format!("{cell} is never written");
                    return Err(run::error(plan, PlanErrorKind::WrongResult, rank, last, message));
                }
            };
            let found = outcome.values.contributions(value);
            if found.as_ref() != Some(&expected) {
                let why = difference(found.as_deref(), &expected);
                let message = format!("{} leaves {cell} wrong: {why}", name_of(plan, by, at));
                return Err(run::error(plan, PlanErrorKind::WrongResult, by, at, message));
            }
            if expected.len() < 2 || !plan.reproducible {
                continue;
            }
            let (first, first_by, first_at) = *orders.entry(expected).or_insert((value, by, at));
            if first != value {
                let message = format!(
                    "{} and {} leave the same reduction in different orders, so its last bits may differ: reduce in \
                     rank order on all ranks, or say reproducible=False",
                    name_of(plan, first_by, first_at),
                    name_of(plan, by, at)
                );
                return Err(run::error(plan, PlanErrorKind::NotReproducible, by, at, message));
            }
        }
    }
    Ok(())
}

/// What is missing in a chunk, and what is too much.
fn difference(found: Option<&[Contribution]>, expected: &[Contribution]) -> String {
    let Some(found) = found else { return "far too many inputs take part in it".to_owned() };
    let count =
        |of: &[Contribution], each: &Contribution| of.iter().filter(|other| *other == each).count();
    for each in expected {
        let (has, must) = (count(found, each), count(expected, each));
        if has < must {
            return format!("it lacks {each}");
        }
    }
    for each in found {
        let (has, must) = (count(found, each), count(expected, each));
        if must == 0 {
            return format!("{each} does not belong there");
        }
        if has > must {
            return format!("{each} takes part {has} times");
        }
    }
    "it differs".to_owned()
}

/// Refuses what LL cannot do: its data is read by polling, once, so peers are reached only by puts into scratch.
fn check_protocol(plan: &Plan) -> Result<(), PlanError> {
    if plan.protocol == Protocol::Simple {
        return Ok(());
    }
    let mut written: BTreeMap<Cell, (u32, usize)> = BTreeMap::new();
    for (rank, program) in (0u32..).zip(&plan.programs) {
        for (index, each) in program.iter().enumerate() {
            let refuse = |why: &str| {
                let message = format!("{}: {why}", name_of(plan, rank, index));
                Err(run::error(plan, PlanErrorKind::Protocol, rank, index, message))
            };
            let operation = &each.operation;
            if operation.sources().iter().any(|src| src.rank != rank) {
                return refuse("in LL no rank reads a peer's memory");
            }
            if *operation == Operation::Barrier {
                return refuse(
                    "in LL there are no barriers: data shows itself that it has arrived",
                );
            }
            let Some(dst) = operation.destination() else { continue };
            if dst.rank != rank && dst.buffer != Buffer::Scratch {
                return refuse("in LL ranks reach their peers by puts into scratch alone");
            }
            if dst.buffer != Buffer::Scratch {
                continue;
            }
            for offset in 0..dst.count {
                if written.insert(dst.cell(offset), (rank, index)).is_some() {
                    return refuse("in LL a chunk of scratch is written once a call");
                }
            }
        }
    }
    Ok(())
}

/// Whether the plan is right where input and output are one memory.
fn check_in_place(plan: &Plan) -> Result<(), PlanError> {
    let outcome = Run::new(plan, true).run()?;
    check_results(plan, true, &outcome)
}
