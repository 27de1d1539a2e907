//! The smallest program of which something is still wrong.

use symmpool_collectives::plan::{Operation, Plan, Span};

/// Drops operations, and pairs of a signal and its wait, and shortens ranges, as long as `is_wrong` says that the program is
/// still wrong in the same way.
pub(crate) fn shrink(plan: &Plan, mut is_wrong: impl FnMut(&Plan) -> bool) -> Plan {
    let mut best = plan.clone();
    loop {
        let smaller = candidates(&best).into_iter().find(|candidate| is_wrong(candidate));
        match smaller {
            Some(smaller) => best = smaller,
            None => break,
        }
    }
    for program in &mut best.programs {
        for (line, each) in (1u32..).zip(program) {
            each.line = line;
        }
    }
    best
}

fn candidates(plan: &Plan) -> Vec<Plan> {
    let mut found = Vec::new();
    for rank in 0..plan.programs.len() {
        let length = plan.programs[rank].len();
        // Longer parts first.
        for size in [length / 2, 4, 2, 1] {
            if size == 0 || size > length {
                continue;
            }
            for at in (0..=length - size).step_by(size) {
                let mut smaller = plan.clone();
                smaller.programs[rank].drain(at..at + size);
                found.push(smaller);
            }
        }
        for index in 0..length {
            let operation = &plan.programs[rank][index].operation;
            if let Operation::Signal { peer, channel } = operation {
                found.extend(without_pair(plan, rank as u32, index, *peer, *channel));
            }
            if plan.programs[rank][index].group.is_some() {
                let mut smaller = plan.clone();
                smaller.programs[rank][index].group = None;
                found.push(smaller);
            }
            found.extend(shorter(plan, rank, index));
        }
    }
    let barriers = |program: &Vec<_>| {
        let is =
            |each: &&symmpool_collectives::plan::Instruction| each.operation == Operation::Barrier;
        program.iter().filter(is).count()
    };
    for nth in 0..plan.programs.iter().map(barriers).min().unwrap_or(0) {
        let mut smaller = plan.clone();
        for program in &mut smaller.programs {
            let is = |each: &symmpool_collectives::plan::Instruction| {
                each.operation == Operation::Barrier
            };
            let at = program.iter().enumerate().filter(|(_, each)| is(each)).nth(nth);
            if let Some((at, _)) = at {
                program.remove(at);
            }
        }
        found.push(smaller);
    }
    found
}

/// The plan without a signal and its wait.
fn without_pair(plan: &Plan, rank: u32, index: usize, peer: u32, channel: u32) -> Option<Plan> {
    let signal = Operation::Signal { peer, channel };
    let wait = Operation::Wait { peer: rank, channel };
    let before = plan.programs[rank as usize][..index].iter();
    let nth = before.filter(|each| each.operation == signal).count();
    let waits = plan.programs[peer as usize].iter().enumerate();
    let at = waits.filter(|(_, each)| each.operation == wait).nth(nth)?.0;
    let mut smaller = plan.clone();
    smaller.programs[rank as usize].remove(index);
    smaller.programs[peer as usize].remove(at);
    Some(smaller)
}

/// The plan with a shorter range, or fewer sources.
fn shorter(plan: &Plan, rank: usize, index: usize) -> Option<Plan> {
    let mut smaller = plan.clone();
    let cut = |span: &mut Span| span.count = 1;
    match &mut smaller.programs[rank][index].operation {
        Operation::Copy { dst, src }
        | Operation::Put { dst, src }
        | Operation::Get { dst, src }
            if dst.count > 1 =>
        {
            cut(dst);
            cut(src);
        }
        Operation::Reduce { dst, srcs } if dst.count > 1 => {
            cut(dst);
            srcs.iter_mut().for_each(cut);
        }
        _ => return None,
    }
    Some(smaller)
}
