//! The steps of a row exchange on a device: kernels before and after its all-to-alls.

#![allow(unsafe_code)] // launches kernels on the caller's promises about raw memory

use symmpool_allocator::{Result, Stream};

use super::engine::CudaEngine;
use super::kernel_spec::Specialty;
use super::kernels::Loaded;
use crate::jit::sources::ROW_EXCHANGE;
use crate::row_exchange::{MOST_BLOCKS, RowWork};

/// `SHOTS` of the kernel.
const COUNT: u8 = 1;
const PLACE: u8 = 2;
const FIT: u8 = 4;
const SPREAD: u8 = 8;

const THREADS: u32 = 256;
/// What a block moves at least, and looks at, for its beginning to be worth it.
const BLOCK_BYTES: u64 = 64 << 10;
const BLOCK_ROWS: u64 = 1024;
/// Blocks of a processor that keep its memory busy.
const BLOCKS: u32 = 4;

impl CudaEngine {
    /// Loads the kernels, so that no call has to.
    pub(crate) fn load_rows(&mut self) -> Result<()> {
        [COUNT, PLACE, FIT, SPREAD].into_iter().try_for_each(|step| self.rows(step).map(|_| ()))
    }

    fn rows(&mut self, shots: u8) -> Result<Loaded> {
        self.kernel(Specialty { shots, ..Specialty::new(&ROW_EXCHANGE, THREADS) })
    }

    /// Puts rows and their numbers in order by destination, and says how many there are for each
    /// rank; -1 for all if a destination is none.
    ///
    /// # Safety
    ///
    /// The addresses are as `RowWork` says, of memory of the device that nobody else touches until
    /// the stream is past it.
    pub(crate) unsafe fn order_rows(&mut self, work: &RowWork, stream: Stream) -> Result<()> {
        // What runs beside these steps now is not what ran beside the call before.
        self.begin(stream)?;
        let (count, place) = (self.rows(COUNT)?, self.rows(PLACE)?);
        let blocks = blocks(&count, work.rows, work.row_bytes);
        // SAFETY: the caller's promise; both have the same grid, as the second one needs.
        unsafe { self.launch_rows(count, (blocks, THREADS), work, stream) }?;
        // SAFETY: as above.
        unsafe { self.launch_rows(place, (blocks, THREADS), work, stream) }
    }

    /// Says how many of the rows that came from each rank had room, which go back.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::order_rows`].
    pub(crate) unsafe fn fit_rows(&mut self, work: &RowWork, stream: Stream) -> Result<()> {
        self.begin(stream)?;
        let kernel = self.rows(FIT)?;
        // SAFETY: the caller's promise.
        unsafe { self.launch_rows(kernel, (1, 32), work, stream) }
    }

    /// Puts rows that came back where they were, and zeros where none did.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::order_rows`].
    pub(crate) unsafe fn spread_rows(&mut self, work: &RowWork, stream: Stream) -> Result<()> {
        self.begin(stream)?;
        let kernel = self.rows(SPREAD)?;
        let blocks = blocks(&kernel, work.given, work.row_bytes);
        // SAFETY: the caller's promise.
        unsafe { self.launch_rows(kernel, (blocks, THREADS), work, stream) }
    }
}

/// Blocks for so many rows: whole waves at most, and one at least, which says that there are none.
fn blocks(kernel: &Loaded, rows: u64, row_bytes: u64) -> u32 {
    let most = (kernel.processors * BLOCKS).min(MOST_BLOCKS);
    let worth = (rows * row_bytes).div_ceil(BLOCK_BYTES).max(rows.div_ceil(BLOCK_ROWS));
    u32::try_from(worth.min(rows)).unwrap_or(most).clamp(1, most)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use symmpool_allocator::driver::CudaDriver;
    use symmpool_allocator::topology::Topology;
    use symmpool_allocator::{CONTROL_LANE, Driver, Group, Pool};

    use super::super::engine::CudaOptions;
    use super::super::leave_room;
    use super::*;
    use crate::algorithm::RequestedAlgorithm;
    use crate::{AllReduceAlgorithm, AllToAllAlgorithm, DType, RowShape};

    #[test]
    fn steps_take_what_may_be_taken_now_and_not_at_the_call_before() {
        let driver = match CudaDriver::new(0) {
            Ok(driver) => driver,
            Err(error) => {
                assert!(error.is_unsupported(), "{error}");
                eprintln!("skipped: no CUDA device: {error}");
                return;
            }
        };
        let group = Group::in_process(1).expect("a group").remove(0);
        let pool = Pool::builder(group).driver(Driver::new(driver)).build().expect("a pool");
        let asked =
            RequestedAlgorithm { algorithm: AllReduceAlgorithm::Auto, by_environment: false };
        let options = CudaOptions {
            timeout: Duration::from_secs(60),
            inbox: 1 << 20,
            scratch: 1 << 20,
            first_epoch: 1,
            asked,
            all_to_all: AllToAllAlgorithm::Auto,
            concurrent: None,
            links: Topology::host(1),
        };
        let bytes = CudaEngine::control_bytes(1, &options).expect("sound options") as usize;
        let lane = pool.lane(CONTROL_LANE).expect("a lane");
        let control = lane.alloc_bytes(bytes, 4096, Stream::DEFAULT).expect("memory");
        let ready = CudaEngine::prepare(&pool, &control, &options).expect("ready");
        let memory = pool.alloc::<u8>(1 << 20).expect("memory");
        pool.commit().expect("windows");
        let alive = Box::new(|_| true);
        let mut engine =
            CudaEngine::new(&pool, control.offset(), &options, ready, alive).expect("an engine");
        engine.barrier(Stream::DEFAULT).expect("a call");
        assert_eq!(engine.comm.early, 1, "it was alone");
        leave_room(0);
        let shape = RowShape { rows: 1, row: 4, dtype: DType::U8 };
        let at = memory.address();
        let work = RowWork::new(&shape, 1, at, at + (1 << 19));
        // SAFETY: the memory is longer than what a single row needs, and nothing else uses it.
        unsafe { engine.fit_rows(&work, Stream::DEFAULT) }.expect("a step");
        assert_eq!(engine.comm.early, 0, "others' kernels may wait beside it now");
        engine.synchronize(Stream::DEFAULT).expect("it ends");
    }
}
