//! Programs with mistakes, and programs that were never meant to be right.

use symmpool_allocator::testing::SplitMix64;
use symmpool_collectives::plan::{Buffer, Instruction, Operation, Plan, Span};

/// Makes one to three mistakes.
pub(super) fn make(plan: &mut Plan, random: &mut SplitMix64) {
    for _ in 0..1 + random.below(3) {
        one(plan, random);
    }
}

fn one(plan: &mut Plan, random: &mut SplitMix64) {
    let (world, scratch, chunks) = (plan.world, plan.scratch, plan.chunks);
    let rank = random.below(world.into()) as u32;
    let outputs = plan.output_chunks(rank);
    let program = &mut plan.programs[rank as usize];
    if program.is_empty() {
        return;
    }
    let length = program.len() as u64;
    let at = random.below(length) as usize;
    match random.below(10) {
        0 | 1 => {
            program.remove(at);
        }
        2 => {
            let copy = program[at].clone();
            program.insert(random.below(length) as usize, copy);
        }
        3 | 4 => {
            // Not far, so that much stays right.
            let to = (at as u64 + random.below(5)).saturating_sub(2).min(length - 1) as usize;
            let moved = program.remove(at);
            program.insert(to, moved);
        }
        5 => {
            let group = [None, Some(0), Some(1)][random.below(3) as usize];
            let last = (at + 1 + random.below(4) as usize).min(program.len());
            for each in &mut program[at..last] {
                each.group = if each.operation == Operation::Barrier { None } else { group };
            }
        }
        6 => program.insert(at, alone(Operation::Join)),
        7 => match &mut program[at].operation {
            Operation::Signal { channel, .. } | Operation::Wait { channel, .. } => {
                *channel = random.below(2) as u32;
            }
            _ => {}
        },
        _ => {
            let most = |buffer: Buffer| match buffer {
                Buffer::Input => chunks,
                Buffer::Output => outputs,
                Buffer::Scratch => scratch,
            };
            let mut change = |span: &mut Span| {
                let most = most(span.buffer).saturating_sub(span.count - 1).max(1);
                span.index = random.below(most.into()) as u32;
            };
            match &mut program[at].operation {
                Operation::Copy { dst, src }
                | Operation::Put { dst, src }
                | Operation::Get { dst, src } => {
                    change(if length.is_multiple_of(2) { dst } else { src });
                }
                Operation::Reduce { dst, srcs } => match srcs.last_mut() {
                    Some(last) if length.is_multiple_of(2) => change(last),
                    _ => change(dst),
                },
                _ => {}
            }
        }
    }
}

fn alone(operation: Operation) -> Instruction {
    Instruction { operation, group: None, line: 0 }
}

/// A few operations of any kind.
pub(super) fn wild(plan: Plan, random: &mut SplitMix64) -> Plan {
    let mut plan = plan;
    plan.scratch = plan.scratch.min(2);
    let world = u64::from(plan.world);
    let begins_with_barrier = random.below(3) > 0;
    let ends_with_barrier = random.below(3) > 0;
    let grouped = random.below(4) == 0;
    let mut programs = Vec::new();
    for rank in 0..plan.world {
        let mut program = Vec::new();
        if begins_with_barrier {
            program.push(alone(Operation::Barrier));
        }
        for _ in 0..1 + random.below(2 + 2 * u64::from(plan.chunks)) {
            let operation = any(&plan, rank, random);
            let group =
                if grouped { [None, Some(0), Some(1)][random.below(3) as usize] } else { None };
            program.push(Instruction { operation, group, line: 0 });
        }
        programs.push(program);
    }
    // A signal for each wait, and the other way round, so that not all programs fail at that.
    for _ in 0..random.below(4) * random.below(2) {
        if world < 2 {
            break;
        }
        let from = random.below(world);
        let to = (from + 1 + random.below(world - 1)) % world;
        let channel = random.below(2) as u32;
        let (peer, other) = (to as u32, from as u32);
        for (rank, operation) in [
            (from, Operation::Signal { peer, channel }),
            (to, Operation::Wait { peer: other, channel }),
        ] {
            let program = &mut programs[rank as usize];
            let at = random.below(program.len() as u64 + 1) as usize;
            program.insert(at, alone(operation));
        }
    }
    if ends_with_barrier {
        programs.iter_mut().for_each(|program| program.push(alone(Operation::Barrier)));
    }
    plan.programs = programs;
    plan
}

/// An operation on data, most often one that writes an output.
fn any(plan: &Plan, rank: u32, random: &mut SplitMix64) -> Operation {
    let other = (rank + random.below(plan.world.into()) as u32) % plan.world;
    let chunks = |rank: u32, buffer| match buffer {
        Buffer::Input => plan.chunks,
        Buffer::Output => plan.output_chunks(rank),
        Buffer::Scratch => plan.scratch,
    };
    let mut place = |rank: u32, buffers: &[Buffer]| {
        let buffer = buffers[random.below(buffers.len() as u64) as usize];
        let index = random.below(chunks(rank, buffer).max(1).into()) as u32;
        Span { rank, buffer, index, count: 1 }
    };
    let (input, output, scratch) = (Buffer::Input, Buffer::Output, Buffer::Scratch);
    let dst = [output, output, scratch];
    let src = [input, input, input, scratch, output];
    match place(rank, &src).index % 4 {
        0 if other != rank => Operation::Put { dst: place(other, &dst), src: place(rank, &src) },
        1 if other != rank => Operation::Get { dst: place(rank, &dst), src: place(other, &src) },
        2 => {
            let srcs = (0..plan.world).map(|each| place(each, &src)).collect();
            Operation::Reduce { dst: place(rank, &dst), srcs }
        }
        _ => Operation::Copy { dst: place(rank, &dst), src: place(rank, &src) },
    }
}
