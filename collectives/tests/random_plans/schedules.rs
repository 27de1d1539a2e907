//! Runs of the reference interpreter on random schedules, and what a program leaves.

use symmpool_allocator::testing::SplitMix64;
use symmpool_collectives::ReduceOp;
use symmpool_collectives::plan::Plan;
use symmpool_collectives::plan::reference::{
    CallSeries, Caller, ChunkLayout, Left, Machine, NextStep, Stopped, Values,
};

use super::calls::RandomCall;

/// Which rank goes on: any, or the one of the highest priority, and priorities change now and then.
struct Scheduler {
    random: SplitMix64,
    priorities: Option<Vec<u64>>,
}

impl Scheduler {
    fn new(mut random: SplitMix64, world: u32) -> Self {
        let with = random.below(3) > 0;
        let priorities = with.then(|| (0..world).map(|_| random.next()).collect());
        Self { random, priorities }
    }

    fn choose(&mut self, choices: &[NextStep]) -> usize {
        let Self { random, priorities } = self;
        let Some(priorities) = priorities else {
            return random.below(choices.len() as u64) as usize;
        };
        if random.below(12) == 0 {
            let rank = random.below(priorities.len() as u64) as usize;
            priorities[rank] = random.next();
        }
        let first = choices.iter().map(|choice| priorities[choice.rank as usize]).max();
        let of_first =
            |choice: &&(usize, &NextStep)| Some(priorities[choice.1.rank as usize]) == first;
        let all: Vec<(usize, &NextStep)> = choices.iter().enumerate().collect();
        let mine: Vec<usize> = all.iter().filter(of_first).map(|(at, _)| *at).collect();
        mine[random.below(mine.len() as u64) as usize]
    }
}

/// Runs calls on a random schedule. `conflict` becomes true if two operations that access one memory could both be next.
pub(crate) fn run(
    calls: &CallSeries<'_>,
    seed: u64,
    values: &mut Values,
    mut conflict: Option<&mut bool>,
) -> Result<Left, Stopped> {
    let mut random = SplitMix64::new(seed);
    let parts = [1, 1, 2, 3][random.below(4) as usize];
    let caller = Caller(random.next());
    let mut scheduler = Scheduler::new(random, calls.plan.world);
    Machine::new(calls, caller, values, parts).run(|machine, choices| {
        if let Some(found) = conflict.as_deref_mut() {
            *found |= machine.conflict().is_some();
        }
        scheduler.choose(choices)
    })
}

/// Outputs of a call on every rank of the plan, and whether averages divide something at its end.
pub(crate) fn outputs(
    plan: &Plan,
    case: &RandomCall,
    layout: ChunkLayout,
    inputs: &[Vec<u8>],
    seed: u64,
) -> Result<(Vec<Vec<u8>>, bool), Stopped> {
    let in_place = vec![false; plan.world as usize];
    let RandomCall { dtype, op, .. } = *case;
    let inputs = [inputs.to_vec()];
    let mut calls = CallSeries { plan, layout, dtype, op, in_place, inputs: &inputs };
    let mut values = Values::default();
    if op == ReduceOp::Avg {
        calls.op = ReduceOp::Sum;
        run(&calls, seed, &mut values, None)?;
        calls.op = op;
    }
    let mut left = run(&calls, seed, &mut values, None)?;
    Ok((left.outputs.remove(0), op == ReduceOp::Avg && values.divides_last()))
}
