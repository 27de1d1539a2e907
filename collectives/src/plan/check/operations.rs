//! Checks of a plan's operations before any of them runs: whether their spans and peers are there, whether signals
//! match waits, and whether the protocol can do them.

use std::collections::BTreeMap;

use super::super::model::{Buffer, Cell, Collective, Operation, Plan, Protocol, Span};
use super::error::{PlanError, PlanErrorReason};
use super::run::{error, name_of};

/// Refuses spans, peers and groups that are not there.
pub(super) fn check_places(plan: &Plan) -> Result<(), PlanError> {
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
                return Err(PlanError::new(PlanErrorReason::Promise, rank, 0, message));
            }
        }
    }
    for (rank, program) in (0u32..).zip(&plan.programs) {
        for (index, each) in program.iter().enumerate() {
            let refuse = |(reason, why): (PlanErrorReason, String)| {
                let message = format!("{}: {why}", name_of(plan, rank, index));
                Err(error(plan, reason, rank, index, message))
            };
            if let Operation::Signal { peer, .. } | Operation::Wait { peer, .. } = each.operation
                && (peer >= plan.world || peer == rank)
            {
                let why = format!("rank {peer} is no peer among {} ranks", plan.world);
                return refuse((PlanErrorReason::NoPeer, why));
            }
            if each.operation == Operation::Barrier && each.group.is_some() {
                let why = "a barrier must stand outside of block groups".to_owned();
                return refuse((PlanErrorReason::GroupedBarrier, why));
            }
            for span in each.operation.spans() {
                if let Err(why) = check_span(plan, span) {
                    return refuse((PlanErrorReason::NotThere, why));
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

/// Whether spans have the lengths and ranks that the operation asks for, and whether it may write there.
fn check_shape(rank: u32, operation: &Operation) -> Result<(), (PlanErrorReason, String)> {
    let Some(dst) = operation.destination() else { return Ok(()) };
    let srcs = operation.sources();
    if srcs.is_empty() {
        let why = "there is nothing to reduce".to_owned();
        return Err((PlanErrorReason::NoSources, why));
    }
    if let Some(src) = srcs.iter().find(|src| src.count != dst.count) {
        let why = format!("{} chunks do not fit {}", src.count, dst.count);
        return Err((PlanErrorReason::Lengths, why));
    }
    let overlaps = |src: &Span| {
        let of_one = (src.rank, src.buffer) == (dst.rank, dst.buffer) && src.index != dst.index;
        of_one && src.index < dst.index + dst.count && dst.index < src.index + src.count
    };
    if srcs.iter().any(overlaps) {
        let why = "source and destination overlap, and are not the same".to_owned();
        return Err((PlanErrorReason::Overlap, why));
    }
    let (to_peer, from_peer) = (dst.rank != rank, srcs[0].rank != rank);
    let direction = match operation {
        Operation::Copy { .. } if to_peer || from_peer => {
            "copy is within a rank; put copies to a peer, and get from one"
        }
        Operation::Put { .. } if !to_peer || from_peer => {
            "put copies from the rank's own memory to a peer's"
        }
        Operation::Get { .. } if to_peer || !from_peer => {
            "get copies from a peer's memory to the rank's own"
        }
        _ => "",
    };
    if !direction.is_empty() {
        return Err((PlanErrorReason::Direction, direction.to_owned()));
    }
    if dst.buffer == Buffer::Input {
        let why = "an input is only read; write to the output, which may be the same memory, or to scratch";
        return Err((PlanErrorReason::WritesInput, why.to_owned()));
    }
    Ok(())
}

/// The indices of the signals of a channel, and of its waits.
type Matched = (Vec<usize>, Vec<usize>);

/// Refuses signals that nobody waits for, waits without a signal, and barriers that not all ranks come to.
pub(super) fn check_signals(plan: &Plan) -> Result<(), PlanError> {
    // Signals and waits by sender, receiver and channel.
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
    for ((from, to, channel), (signals, waits)) in ways {
        let counts = format!(
            "rank {from} signals rank {to} {} times on channel {channel}, and that waits for it {} times",
            signals.len(),
            waits.len()
        );
        if let Some(index) = signals.get(waits.len()) {
            let message =
                format!("{}: nobody waits for this signal; {counts}", name_of(plan, from, *index));
            return Err(error(plan, PlanErrorReason::NobodyWaits, from, *index, message));
        }
        if let Some(index) = waits.get(signals.len()) {
            let message =
                format!("{}: nobody sends this signal; {counts}", name_of(plan, to, *index));
            return Err(error(plan, PlanErrorReason::NobodySignals, to, *index, message));
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
            return Err(error(plan, PlanErrorReason::Barriers, rank, *index, message));
        }
    }
    Ok(())
}

/// Refuses what LL cannot do: its data is read by polling, once, so peers are reached only by writes to their scratch.
pub(super) fn check_protocol(plan: &Plan) -> Result<(), PlanError> {
    if plan.protocol == Protocol::Simple {
        return Ok(());
    }
    let mut written: BTreeMap<Cell, (u32, usize)> = BTreeMap::new();
    for (rank, program) in (0u32..).zip(&plan.programs) {
        for (index, each) in program.iter().enumerate() {
            let refuse = |reason, why: &str| {
                let message = format!("{}: {why}", name_of(plan, rank, index));
                Err(error(plan, reason, rank, index, message))
            };
            let operation = &each.operation;
            if operation.sources().iter().any(|src| src.rank != rank) {
                return refuse(PlanErrorReason::LlReads, "in LL no rank reads a peer's memory");
            }
            if *operation == Operation::Barrier {
                return refuse(
                    PlanErrorReason::LlBarrier,
                    "in LL there are no barriers: data shows itself that it has arrived",
                );
            }
            let Some(dst) = operation.destination() else { continue };
            if dst.rank != rank && dst.buffer != Buffer::Scratch {
                return refuse(
                    PlanErrorReason::LlWrites,
                    "in LL ranks write to their peers' scratch alone",
                );
            }
            if dst.buffer != Buffer::Scratch {
                continue;
            }
            for offset in 0..dst.count {
                if written.insert(dst.cell(offset), (rank, index)).is_some() {
                    return refuse(
                        PlanErrorReason::LlTwice,
                        "in LL a chunk of scratch is written once a call",
                    );
                }
            }
        }
    }
    Ok(())
}
