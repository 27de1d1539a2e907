//! The tensor program's memory with symmpool: blocks of a pool, and a communicator.

use symmpool_allocator::lane::BlockState;
use symmpool_allocator::{Block, Error, Pool, Result, Stream};
use symmpool_collectives::{Communicator, ReduceOp};

use crate::program::DemoMemory;
use crate::report::{LiveBlock, Map};

/// The first lane of a pool, with a communicator.
pub(crate) struct Symmetric<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) comm: &'a Communicator,
    /// The counter of each block's allocation, and the number of its tensor.
    pub(crate) numbers: Vec<(u64, u32)>,
}

impl DemoMemory for Symmetric<'_> {
    type Tensor = Block<f32>;

    fn alloc(&mut self, number: u32, count: usize) -> Result<Block<f32>> {
        let block = self.pool.alloc(count)?;
        self.numbers.push((block.counter(), number));
        Ok(block)
    }

    fn free(&mut self, tensor: Block<f32>) -> Result<()> {
        tensor.free()
    }

    fn write(&mut self, tensor: &Block<f32>, values: &[f32]) -> Result<()> {
        tensor.write(values)
    }

    fn read(&mut self, tensor: &Block<f32>) -> Result<Vec<f32>> {
        tensor.read()
    }

    fn all_reduce(&mut self, tensor: &Block<f32>) -> Result<()> {
        self.comm.all_reduce(tensor, ReduceOp::Sum, &Stream::DEFAULT)
    }

    fn map(&self) -> Result<Map> {
        let (segments, blocks) = self.pool.default_lane().map()?;
        let live = blocks.iter().filter(|block| block.state == BlockState::Live);
        let placed = live.map(|block| {
            let number = self.numbers.iter().find(|(counter, _)| *counter == block.counter);
            let tensor = number.map_or(u32::MAX, |(_, tensor)| *tensor);
            LiveBlock { tensor, offset: block.offset, bytes: block.bytes }
        });
        Ok(Map {
            windows: segments.iter().map(|segment| segment.bytes).collect(),
            live: placed.collect(),
        })
    }
}

/// Checks what [`DemoMemory::map`] assumes: that the lane's segments have no gaps between them.
pub(crate) fn check_map(pool: &Pool) -> Result<()> {
    let (segments, _) = pool.default_lane().map()?;
    let mut end = 0;
    for segment in segments {
        if segment.offset != end {
            return Err(Error::invalid_state("the lane has a hole that the map cannot show"));
        }
        end += segment.bytes;
    }
    Ok(())
}
