//! Programs of several ranks on communicators, beside naive arithmetic. Some calls differ between ranks, and must then be an
//! error on all of them.

use std::time::Duration;

use arbitrary::Arbitrary;
use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::testing::on_ranks;
use symmpool_allocator::{Block, Driver, Pool, Result, Stream};
use symmpool_collectives::{Communicator, ReduceOp};

use crate::{FuzzTarget, value_of};

pub(crate) const TARGET: FuzzTarget = FuzzTarget {
    name: "collective_programs",
    run,
    words: &[],
    quick: 80,
    max_memory: 256 << 20,
    max_input: 512,
};

#[derive(Arbitrary, Clone, Debug)]
struct RankProgram {
    three_ranks: bool,
    steps: Vec<ProgramStep>,
}

#[derive(Arbitrary, Clone, Debug)]
struct ProgramStep {
    call: CollectiveCall,
    count: Count,
    /// Whether blocks of the local lane are used, which lie anywhere.
    outside: bool,
    in_slices: bool,
    /// A rank that asks for something else.
    differs: Option<(u8, Difference)>,
    seed: u32,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Count {
    Small(u8),
    Medium(u16),
    Edge(u8),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum CollectiveCall {
    AllReduce(Op),
    ReduceScatter(Op),
    AllGather,
    AllToAll,
    Broadcast(u8),
    Barrier,
}

#[derive(Arbitrary, Clone, Copy, Debug, PartialEq)]
enum Op {
    Sum,
    Min,
    Max,
    Prod,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Difference {
    Count,
    CollectiveCall,
    Root,
}

const STREAM: &Stream = &Stream::DEFAULT;

fn run(bytes: &[u8]) {
    let Some(program) = value_of::<RankProgram>(bytes) else { return };
    let world = if program.three_ranks { 3 } else { 2 };
    let steps = &program.steps[..program.steps.len().min(12)];
    on_ranks(world, |group| {
        let pool = Pool::builder(group.with_timeout(Duration::from_secs(20)))
            .driver(Driver::host().expect("memory files"))
            .stride(1 << 32)
            .lane(LaneConfig::symmetric("default"))
            .lane(LaneConfig::local("own"))
            .build()
            .expect("a pool");
        let comm = Communicator::new(&pool).expect("a communicator");
        for (nth, step) in steps.iter().enumerate() {
            if step.run(nth, &pool, &comm).is_err() {
                // The error was expected, and is the same from now on, or was that of one call.
                if comm.failure().is_some() {
                    break;
                }
            }
        }
    });
}

impl Count {
    fn elements(self) -> usize {
        match self {
            Self::Small(count) => count.into(),
            Self::Medium(count) => usize::from(count % 8192),
            Self::Edge(which) => {
                [0, 1, 2, 3, 4, 1023, 1024, 1025, 4096, 16_384][usize::from(which % 10)]
            }
        }
    }
}

impl Op {
    fn of(self) -> ReduceOp {
        match self {
            Self::Sum => ReduceOp::Sum,
            Self::Min => ReduceOp::Min,
            Self::Max => ReduceOp::Max,
            Self::Prod => ReduceOp::Prod,
        }
    }

    fn apply(self, a: i64, b: i64) -> i64 {
        match self {
            Self::Sum => a.wrapping_add(b),
            Self::Min => a.min(b),
            Self::Max => a.max(b),
            Self::Prod => a.wrapping_mul(b),
        }
    }
}

/// Element `index` of a rank's input.
fn element(seed: u32, nth: usize, rank: u32, index: usize) -> i64 {
    let mixed = u64::from(seed) << 32 ^ (nth as u64) << 24 ^ u64::from(rank) << 20 ^ index as u64;
    (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as i64 - (1 << 23)
}

impl ProgramStep {
    /// Makes the call, and compares its result.
    fn run(&self, nth: usize, pool: &Pool, comm: &Communicator) -> Result<()> {
        let (world, me) = (comm.world(), comm.rank());
        let parts = world as usize;
        let (mut call, mut count) = (self.call, self.count.elements());
        let mut differs = false;
        if let Some((rank, difference)) = self.differs {
            let odd = u32::from(rank) % world == me;
            match (difference, call) {
                (Difference::Count, _) if !matches!(self.call, CollectiveCall::Barrier) => {
                    count += usize::from(odd);
                    differs = true;
                }
                (Difference::CollectiveCall, _)
                    if !matches!(self.call, CollectiveCall::Barrier) =>
                {
                    call = if odd { CollectiveCall::Barrier } else { call };
                    differs = true;
                }
                (Difference::Root, CollectiveCall::Broadcast(root)) => {
                    let other = (u32::from(root) + u32::from(odd)) % world;
                    call = CollectiveCall::Broadcast(other as u8);
                    differs = true;
                }
                _ => {}
            }
        }
        let (inputs, outputs) = match call {
            CollectiveCall::AllReduce(_) => (count, count),
            CollectiveCall::ReduceScatter(_) => (count * parts, count),
            CollectiveCall::AllGather => (count, count * parts),
            CollectiveCall::AllToAll => (count * parts, count * parts),
            CollectiveCall::Broadcast(_) => (count, count),
            CollectiveCall::Barrier => (0, 0),
        };
        let mine = |rank: u32| (0..inputs).map(move |index| element(self.seed, nth, rank, index));
        let input: Vec<i64> = mine(me).collect();
        let made = if self.in_slices {
            self.in_slices(comm, call, &input, outputs)
        } else {
            self.in_blocks(pool, comm, call, &input, outputs, differs)
        };
        let output = match made {
            Ok(output) => output,
            Err(error) => {
                assert!(differs, "{self:?} as rank {me}: {error}");
                assert!(error.is_diverged(), "{error}");
                return Err(error);
            }
        };
        assert!(!differs, "{self:?} differs, and rank {me} was not told");
        let at = |rank: u32, index: usize| element(self.seed, nth, rank, index);
        let reduced = |op: Op, index: usize| {
            (1..world).fold(at(0, index), |sum, rank| op.apply(sum, at(rank, index)))
        };
        let own = me as usize * count;
        let expected: Vec<i64> = match call {
            CollectiveCall::AllReduce(op) => (0..count).map(|index| reduced(op, index)).collect(),
            CollectiveCall::ReduceScatter(op) => {
                (0..count).map(|index| reduced(op, own + index)).collect()
            }
            CollectiveCall::AllGather => {
                (0..world).flat_map(|rank| (0..count).map(move |index| at(rank, index))).collect()
            }
            CollectiveCall::AllToAll => {
                (0..world).flat_map(|rank| (0..count).map(move |i| at(rank, own + i))).collect()
            }
            CollectiveCall::Broadcast(root) => {
                (0..count).map(|index| at(u32::from(root) % world, index)).collect()
            }
            CollectiveCall::Barrier => Vec::new(),
        };
        assert!(output == expected, "{self:?} as rank {me}");
        Ok(())
    }

    fn in_slices(
        &self,
        comm: &Communicator,
        call: CollectiveCall,
        input: &[i64],
        outputs: usize,
    ) -> Result<Vec<i64>> {
        let mut output = vec![-1; outputs];
        match call {
            CollectiveCall::AllReduce(op) => {
                output.copy_from_slice(input);
                comm.all_reduce_slice(&mut output, op.of(), STREAM)?;
            }
            CollectiveCall::ReduceScatter(op) => {
                comm.reduce_scatter_slice(&mut output, input, op.of(), STREAM)?;
            }
            CollectiveCall::AllGather => comm.all_gather_slice(&mut output, input, STREAM)?,
            CollectiveCall::AllToAll => comm.all_to_all_slice(&mut output, input, STREAM)?,
            CollectiveCall::Broadcast(root) => {
                output.copy_from_slice(input);
                comm.broadcast_slice(&mut output, u32::from(root) % comm.world(), STREAM)?;
            }
            CollectiveCall::Barrier => comm.barrier(STREAM)?,
        }
        Ok(output)
    }

    /// Works in blocks. Where counts differ between ranks, blocks lie in the local lane, as symmetric ones must not.
    fn in_blocks(
        &self,
        pool: &Pool,
        comm: &Communicator,
        call: CollectiveCall,
        input: &[i64],
        outputs: usize,
        differs: bool,
    ) -> Result<Vec<i64>> {
        let lane = pool.lane(if self.outside || differs { "own" } else { "default" })?;
        let from: Block<i64> = lane.alloc(input.len())?;
        from.write(input)?;
        let to: Block<i64> = lane.alloc(outputs)?;
        to.write(&vec![-1; outputs])?;
        let mut result = &to;
        match call {
            CollectiveCall::AllReduce(op) => comm.all_reduce_into(&to, &from, op.of(), STREAM)?,
            CollectiveCall::ReduceScatter(op) => {
                comm.reduce_scatter_into(&to, &from, op.of(), STREAM)?;
            }
            CollectiveCall::AllGather => comm.all_gather_into(&to, &from, STREAM)?,
            CollectiveCall::AllToAll => comm.all_to_all_into(&to, &from, STREAM)?,
            CollectiveCall::Broadcast(root) => {
                comm.broadcast(&from, u32::from(root) % comm.world(), STREAM)?;
                result = &from;
            }
            CollectiveCall::Barrier => comm.barrier(STREAM)?,
        }
        result.read()
    }
}
