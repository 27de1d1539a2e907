//! The tensor program, which makes the same calls with both kinds of memory.

use symmpool_allocator::Result;

use crate::common::{data, sum};
use crate::report::{Map, Order, Report};

/// The number of rounds of the program.
pub(crate) const ROUNDS: u32 = 5;
/// The number of new tensors in each round.
pub(crate) const TENSORS: u32 = 10;

/// Memory that tensors live in, with an all-reduce over it.
pub(crate) trait DemoMemory {
    type Tensor;
    /// Allocates a tensor of `count` elements. `number` is its letter in drawings.
    fn alloc(&mut self, number: u32, count: usize) -> Result<Self::Tensor>;
    fn free(&mut self, tensor: Self::Tensor) -> Result<()>;
    fn write(&mut self, tensor: &Self::Tensor, values: &[f32]) -> Result<()>;
    fn read(&mut self, tensor: &Self::Tensor) -> Result<Vec<f32>>;
    /// Adds up the elements of all ranks at the place of this rank's tensor.
    fn all_reduce(&mut self, tensor: &Self::Tensor) -> Result<()>;
    fn map(&self) -> Result<Map>;
}

/// Runs the program: each round frees some tensors, allocates new ones of varying sizes, all-reduces each of them and
/// checks every element. The sizes, and which tensors are freed, depend on round and tensor only, so every rank makes
/// the same calls. `between` runs between rounds.
pub(crate) fn run<M: DemoMemory>(
    memory: &mut M,
    order: Order,
    (rank, world): (u32, u32),
    mut between: impl FnMut() -> Result<()>,
) -> Result<()> {
    let mut live = Vec::new();
    for round in 0..ROUNDS {
        between()?;
        let mut index = 0_u64;
        let (freed, kept): (Vec<_>, Vec<_>) = live.into_iter().partition(|_| {
            index += 1;
            !hash(u64::from(round) << 16 | index).is_multiple_of(3)
        });
        for tensor in freed {
            memory.free(tensor)?;
        }
        live = kept;
        let mut fresh = Vec::new();
        for number in round * TENSORS..(round + 1) * TENSORS {
            // 64 KiB to 1 MiB.
            let count = (16 + hash(u64::from(number)) as usize % 240) << 10;
            let tensor = memory.alloc(number, count)?;
            memory.write(&tensor, &data(number, rank, count))?;
            fresh.push((number, tensor));
        }
        let mut wrong = 0;
        for (number, tensor) in &fresh {
            memory.all_reduce(tensor)?;
            let result = memory.read(tensor)?;
            let right = |(index, value): (usize, &f32)| *value == sum(*number, world, index);
            wrong += u32::from(!result.iter().enumerate().all(right));
        }
        Report::Round { order, round, tensors: TENSORS, wrong }.send();
        live.extend(fresh.into_iter().map(|(_, tensor)| tensor));
    }
    Report::Map { order, map: memory.map()? }.send();
    live.into_iter().try_for_each(|tensor| memory.free(tensor))
}

/// A pseudo-random number, which is the same on every rank.
pub(crate) fn hash(x: u64) -> u64 {
    let x = (x ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
