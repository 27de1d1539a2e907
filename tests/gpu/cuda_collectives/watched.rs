//! Checks what a watchdog does: it asks why a communicator fails while another thread is in a call of it, here one that waits
//! for the device, on which the call misses a rank.

use std::thread;
use std::time::{Duration, Instant};

use symmpool_allocator::{Pool, Result};
use symmpool_collectives::{Communicator, CommunicatorOptions};

use crate::cuda::stream;
use crate::expect_error;

/// The longest that an answer may take.
const ANSWER: Duration = Duration::from_millis(200);

/// Returns how many checks were wrong.
pub(crate) fn run(pool: &Pool, timeout: Duration) -> Result<u32> {
    let options = CommunicatorOptions { timeout, ..Default::default() };
    let comm = Communicator::with_options(pool, &options)?;
    let (rank, stream) = (pool.rank(), stream(pool)?);
    // The kernel has run before.
    comm.barrier(&stream)?;
    comm.synchronize(&stream)?;
    if rank != 0 {
        thread::sleep(timeout + Duration::from_millis(500));
        return Ok(0);
    }
    comm.barrier(&stream)?;
    let (longest, told, ended) = thread::scope(|scope| {
        let call = scope.spawn(|| comm.synchronize(&stream));
        let mut longest = Duration::ZERO;
        let mut told = 0;
        while !call.is_finished() {
            let asked = Instant::now();
            told += u32::from(comm.failure().is_none());
            longest = longest.max(asked.elapsed());
            thread::sleep(Duration::from_millis(20));
        }
        (longest, told, call.join())
    });
    let error = expect_error(ended.expect("no panic"), "a barrier alone")?;
    let right = longest < ANSWER && told > 10 && error.is_timeout() && comm.failure().is_some();
    if !right {
        println!("rank {rank}: answers in {longest:?}, {told} times none: {error}");
    }
    Ok(u32::from(!right))
}
