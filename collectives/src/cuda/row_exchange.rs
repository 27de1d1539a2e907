//! The steps of a row exchange on a device: kernels that run before and after its all-to-alls.

#![allow(unsafe_code)] // launches kernels on the caller's promises about raw memory

use symmpool_allocator::{Result, Stream};

use super::engine::CudaEngine;
use super::kernel_mode::{KernelMode, RowStep};
use super::kernel_spec::KernelSpec;
use super::kernels::LoadedKernel;
use crate::jit::sources::ROW_EXCHANGE;
use crate::row_exchange::{MOST_BLOCKS, RowWork};

const THREADS: u32 = 256;
/// A block is worth its start-up time if it moves at least so many bytes, or handles so many rows.
const BLOCK_BYTES: u64 = 64 << 10;
const BLOCK_ROWS: u64 = 1024;
/// How many blocks a processor needs to keep its memory busy.
const BLOCKS: u32 = 4;

impl CudaEngine {
    /// Loads the kernels ahead of calls.
    pub(crate) fn load_rows(&mut self) -> Result<()> {
        [RowStep::Count, RowStep::Pack, RowStep::Fit, RowStep::Unpack]
            .into_iter()
            .try_for_each(|step| self.rows(step).map(|_| ()))
    }

    fn rows(&mut self, step: RowStep) -> Result<LoadedKernel> {
        let mode = KernelMode::RowExchange(step);
        self.kernel(KernelSpec { mode, ..KernelSpec::new(&ROW_EXCHANGE, THREADS) })
    }

    /// Packs rows and their indices in the order of their destinations, and counts the rows for each rank. All
    /// counts are -1 if a destination is no rank.
    ///
    /// # Safety
    ///
    /// The addresses are as `RowWork` says, of memory of the device that nobody else touches until
    /// the stream is past it.
    pub(crate) unsafe fn pack_rows(&mut self, work: &RowWork, stream: Stream) -> Result<()> {
        // The SM budget may have changed since the last call.
        self.begin(stream)?;
        let (count, pack) = (self.rows(RowStep::Count)?, self.rows(RowStep::Pack)?);
        let blocks = blocks(&count, work.rows, work.row_bytes);
        // SAFETY: the caller's promise; both have the same grid, as the second one needs.
        unsafe { self.launch_rows(count, (blocks, THREADS), work, stream) }?;
        // SAFETY: as above.
        unsafe { self.launch_rows(pack, (blocks, THREADS), work, stream) }
    }

    /// Counts the rows from each rank that the output had room for: those are sent back.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::pack_rows`].
    pub(crate) unsafe fn count_fitting_rows(
        &mut self,
        work: &RowWork,
        stream: Stream,
    ) -> Result<()> {
        self.begin(stream)?;
        let kernel = self.rows(RowStep::Fit)?;
        // SAFETY: the caller's promise.
        unsafe { self.launch_rows(kernel, (1, 32), work, stream) }
    }

    /// Writes rows that were sent back to where they came from, and zeros in place of all others.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::pack_rows`].
    pub(crate) unsafe fn unpack_rows(&mut self, work: &RowWork, stream: Stream) -> Result<()> {
        self.begin(stream)?;
        let kernel = self.rows(RowStep::Unpack)?;
        let blocks = blocks(&kernel, work.given, work.row_bytes);
        // SAFETY: the caller's promise.
        unsafe { self.launch_rows(kernel, (blocks, THREADS), work, stream) }
    }
}

/// How many blocks so many rows get: at most as many as run at once, and at least one, which writes the counts
/// even if there are no rows.
fn blocks(kernel: &LoadedKernel, rows: u64, row_bytes: u64) -> u32 {
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
    use super::super::footprint::Footprint;
    use super::super::share_sms;
    use super::*;
    use crate::algorithm::RequestedAlgorithm;
    use crate::{AllReduceAlgorithm, AllToAllAlgorithm, DType, RowShape};

    #[test]
    fn steps_have_the_budget_of_now_and_not_of_the_last_call() {
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
        let requested =
            RequestedAlgorithm { algorithm: AllReduceAlgorithm::Auto, by_environment: false };
        let options = CudaOptions {
            timeout: Duration::from_secs(60),
            footprint: Footprint::ample(1 << 20, 1 << 20),
            first_epoch: 1,
            requested,
            all_to_all: AllToAllAlgorithm::Auto,
            budget: Default::default(),
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
        share_sms(0);
        let shape = RowShape { rows: 1, row: 4, dtype: DType::U8 };
        let at = memory.address();
        let work = RowWork::new(&shape, 1, at, at + (1 << 19));
        // SAFETY: the memory is longer than what a single row needs, and nothing else uses it.
        unsafe { engine.count_fitting_rows(&work, Stream::DEFAULT) }.expect("a step");
        assert_eq!(engine.comm.early, 0, "other libraries' kernels may wait at the same time now");
        engine.synchronize(Stream::DEFAULT).expect("it ends");
    }
}
