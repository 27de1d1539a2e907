//! All-to-alls of equal parts among the calls of a soak: by copy engines, where the communicator's algorithm allows
//! it, and so long that companion kernels send the beginnings.

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{Communicator, DType};

use crate::cuda::upload;
use crate::matrix::bytes;
use crate::tools::Tools;

/// Bytes of a part.
const PART: usize = 16 << 20;
/// Most bytes by which the beginning of an input is shifted.
const SHIFTS: usize = 4096;
/// A rank's data repeats after so many bytes, a number that divides no other length.
const PERIOD: usize = (1 << 20) - 13;

pub(super) struct Equal {
    from: Block<u8>,
    to: Block<u8>,
    /// This rank's part of every rank's data, and the bytes behind it that shifts reach.
    wanted: Block<u8>,
    world: usize,
}

impl Equal {
    /// Allocates memory; the caller commits the pool.
    pub(super) fn new(pool: &Pool, seed: u64) -> Result<Self> {
        let (rank, world) = (pool.rank() as usize, pool.world() as usize);
        let from = pool.alloc::<u8>(world * PART + SHIFTS)?;
        let to = pool.alloc::<u8>(world * PART)?;
        let wanted = pool.alloc::<u8>(world * (PART + SHIFTS))?;
        for sender in 0..world {
            let data = bytes(seed, sender as u32, PERIOD);
            let from_byte = |at: usize, bytes: usize| -> Vec<u8> {
                data.iter().cycle().skip(at % PERIOD).take(bytes).copied().collect()
            };
            if sender == rank {
                upload(pool, from.address(), &from_byte(0, world * PART + SHIFTS))?;
            }
            let at = wanted.address() + (sender * (PART + SHIFTS)) as u64;
            upload(pool, at, &from_byte(rank * PART, PART + SHIFTS))?;
        }
        Ok(Self { from, to, wanted, world })
    }

    fn shift(number: u64) -> u64 {
        (number >> 44) % SHIFTS as u64
    }

    pub(super) fn call(&self, comm: &Communicator, number: u64, stream: &Stream) -> Result<()> {
        let from = (self.from.address() + Self::shift(number)) as *const u8;
        // SAFETY: both blocks have room for a part of every rank, behind any shift.
        unsafe { comm.all_to_all_at(self.to.as_ptr().cast(), from, PART, DType::U8, stream) }
    }

    /// Compares the output of the call of that number.
    pub(super) fn compare(
        &self,
        number: u64,
        call: u64,
        tools: &Tools<'_>,
        stream: &Stream,
    ) -> Result<()> {
        (0..self.world).try_for_each(|sender| {
            let to = self.to.address() + (sender * PART) as u64;
            let wanted = (sender * (PART + SHIFTS)) as u64 + Self::shift(number);
            tools.compare(to, self.wanted.address() + wanted, PART, call, stream)
        })
    }
}
