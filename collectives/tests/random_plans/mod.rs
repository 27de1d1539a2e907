//! Random programs: right ones in many shapes, the same with mistakes, and some that were never meant to be right. Each follows
//! from a number alone.
//!
//! | file | holds |
//! | --- | --- |
//! | `weaver` | operations of all ranks, and the signals that order them |
//! | `goals` | what a program is to reach, and ways there |
//! | `mistakes` | programs with mistakes, and programs of any operations |
//! | `schedules` | runs of the reference interpreter on random schedules |
//! | `calls` | calls of a program: counts at boundaries, types, data |
//! | `search` | whether something is wrong on any of many schedules |
//! | `shrink` | the smallest program of which something is still wrong |

pub(crate) mod calls;
mod goals;
mod mistakes;
pub(crate) mod schedules;
mod weaver;

use symmpool_allocator::testing::SplitMix64;
use symmpool_collectives::plan::{Collective, Contribution, Plan, Protocol};

/// How a program came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ProgramKind {
    /// Written so that it is right.
    Right,
    /// One of these, with mistakes.
    Mistaken,
    /// A few operations of any kind.
    Wild,
}

/// The program of a number.
pub(crate) fn program(
    seed: u64,
    number: u64,
    world: Option<u32>,
    kind: Option<ProgramKind>,
) -> (ProgramKind, Plan) {
    let mut random = SplitMix64::for_participant(seed, number);
    let drawn = match random.below(20) {
        0..=11 => ProgramKind::Right,
        12..=17 => ProgramKind::Mistaken,
        _ => ProgramKind::Wild,
    };
    let kind = kind.unwrap_or(drawn);
    let drawn = [1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4, 5, 6, 7, 8][random.below(17) as usize];
    let world = world.unwrap_or(if kind == ProgramKind::Wild { drawn.min(2) } else { drawn });
    let plan = Plan {
        name: format!("random_{seed}_{number}"),
        ..blank(world, &mut random, kind == ProgramKind::Wild)
    };
    let plan = match kind {
        ProgramKind::Wild => mistakes::wild(plan, &mut random),
        ProgramKind::Right => goals::write(plan, random),
        ProgramKind::Mistaken => {
            let mut right = goals::write(plan, random.clone());
            mistakes::make(&mut right, &mut random);
            right
        }
    };
    (kind, plan)
}

/// A plan without programs.
fn blank(world: u32, random: &mut SplitMix64, is_small: bool) -> Plan {
    let mut up_to = |most: u64| 1 + random.below(most) as u32;
    let most = match is_small {
        true => 2 - up_to(2) / 2,
        false if world > 4 => 2,
        false => 5,
    };
    let most = u64::from(most);
    let (collective, chunks) = match up_to(6) {
        1 => (Collective::AllReduce, up_to(most)),
        2 => (Collective::AllGather, up_to(most.max(3) - 2)),
        3 => (Collective::ReduceScatter, world * up_to(most.min(2))),
        4 => (Collective::Broadcast, up_to(most)),
        5 => (Collective::AllToAll, world * up_to(most.min(2))),
        _ => {
            let chunks = up_to(most);
            (custom(world, chunks, random), chunks)
        }
    };
    Plan {
        name: String::new(),
        collective,
        world,
        chunks,
        scratch: random.below(4 + 2 * u64::from(world)) as u32,
        reproducible: random.below(4) > 0,
        protocol: Protocol::Simple,
        blocks: [None, None, None, Some(1), Some(3)][random.below(5) as usize],
        source: String::new(),
        programs: vec![Vec::new(); world as usize],
    }
}

/// A collective in which every output is something else, and some ranks have none.
fn custom(world: u32, chunks: u32, random: &mut SplitMix64) -> Collective {
    let mut below = |end: u32| random.below(end.into()) as u32;
    let reduces = below(2) == 0;
    let outputs = (0..world).map(|_| {
        let count = if below(4) == 0 { 0 } else { 1 + below(3) };
        let output = |_| {
            let inputs = if reduces { 1 + below(world + 1) } else { 1 };
            let input = |_| Contribution { rank: below(world), chunk: below(chunks) };
            (0..inputs).map(input).collect()
        };
        (0..count).map(output).collect()
    });
    Collective::Custom { name: "random".to_owned(), outputs: outputs.collect() }
}

/// The inputs of which a chunk of an output must be the reduction.
pub(crate) fn expected(plan: &Plan, rank: u32, index: u32) -> Vec<Contribution> {
    let each = plan.chunks_of_part().max(1);
    let one = |rank, chunk| vec![Contribution { rank, chunk }];
    let all = |chunk| (0..plan.world).map(|rank| Contribution { rank, chunk }).collect();
    match &plan.collective {
        Collective::AllReduce => all(index),
        Collective::ReduceScatter => all(rank * each + index),
        Collective::AllGather => one(index / each, index % each),
        Collective::Broadcast => one(0, index),
        Collective::AllToAll => one(index / each, rank * each + index % each),
        Collective::Custom { outputs, .. } => outputs[rank as usize][index as usize].clone(),
    }
}
