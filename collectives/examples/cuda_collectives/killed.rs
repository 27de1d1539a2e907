//! Kills the process of a rank in the middle of a call: the others get a typed error within the
//! deadline, and end.

use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid, kill_process};
use symmpool_allocator::{Pool, Result};
use symmpool_collectives::{
    AllReduceAlgorithm, AllToAllAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp,
    SplitRows, SplitsAt,
};

use crate::cuda::{stream, upload};
use crate::{Options, expect_error};

/// The calls that are under way then.
pub(crate) const KINDS: [&str; 5] =
    ["all_reduce", "two_shot_copy", "all_to_all", "all_to_all_splits", "all_to_all_copy"];

const TIMEOUT: Duration = Duration::from_millis(1500);
/// How much longer than the timeout ranks may take: until the rank is killed, and until processes end.
const SLACK: Duration = Duration::from_millis(1500);
/// Bytes that a rank sends in a call.
const BYTES: usize = 64 << 20;
/// More calls than the devices finish before the rank is killed.
const CALLS: u64 = 2000;

/// Makes calls until the last rank kills its own process; does not return on that rank.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<bool> {
    let kind = options.kind.as_deref().unwrap_or(KINDS[0]);
    let (rank, world) = (pool.rank(), pool.world() as usize);
    let (from, to) = (pool.alloc::<u8>(BYTES)?, pool.alloc::<u8>(BYTES)?);
    let splits = pool.alloc::<i64>(world)?;
    pool.commit()?;
    let stream = stream(pool)?;
    let algorithm = match kind {
        "two_shot_copy" => AllReduceAlgorithm::TwoShotCopy,
        _ => AllReduceAlgorithm::Auto,
    };
    let all_to_all = match kind {
        "all_to_all_copy" => AllToAllAlgorithm::Copy,
        _ => AllToAllAlgorithm::Auto,
    };
    let timeout = TIMEOUT;
    let comm = CommunicatorOptions {
        algorithm,
        all_to_all,
        timeout,
        beside_compute: options.beside_compute,
        ..Default::default()
    };
    let comm = Communicator::with_options(pool, &comm)?;
    let counts = vec![BYTES / world; world];
    let numbers: Vec<u8> = counts.iter().flat_map(|count| count.to_le_bytes()).collect();
    upload(pool, splits.address(), &numbers)?;
    let call = || {
        let (to, from) = (to.address() as *mut u8, from.address() as *const u8);
        match kind {
            "all_to_all" => {
                // SAFETY: both blocks are this long, and nothing else uses them; so it is below.
                unsafe { comm.all_to_all_v_at(to, from, &counts, &counts, DType::U8, &stream) }
            }
            "all_to_all_copy" => {
                // SAFETY: as above; parts of all ranks are that long together.
                unsafe { comm.all_to_all_at(to, from, BYTES / world, DType::U8, &stream) }
            }
            "all_to_all_splits" => {
                let (dtype, null) = (DType::U8, std::ptr::null_mut());
                let rows = SplitRows { dtype, row: 1, length: BYTES, capacity: BYTES };
                let input = splits.address() as *const u8;
                let splits = SplitsAt { input, output: null, offsets: null, dtype: DType::I64 };
                // SAFETY: as above; there is a split for every rank.
                unsafe { comm.all_to_all_v_splits_at(to, from, &rows, &splits, &stream) }
            }
            _ => {
                let (count, sum) = (BYTES / 2, ReduceOp::Sum);
                // SAFETY: as above.
                unsafe { comm.all_reduce_at(to, from, count, DType::Bf16, sum, &stream) }
            }
        }
    };
    call()?;
    comm.synchronize(&stream)?;
    let began = Instant::now();
    let calls = (0..options.seldom(CALLS, 50)).try_for_each(|_| call());
    if rank as usize == world - 1 {
        std::thread::sleep(Duration::from_millis(20));
        let _ = kill_process(getpid(), Signal::KILL);
    }
    let error = expect_error(
        calls.and_then(|()| comm.synchronize(&stream)),
        "calls without a peer that was killed",
    )?;
    let took = began.elapsed();
    let again = expect_error(call(), "a call after a failure")?;
    let last = [world as u32 - 1];
    let named = error.is_peer_lost() && error.ranks() == last;
    // With more than two ranks, one may wait for another one that waits for the last rank.
    let typed = named || world > 2 && error.is_timeout() && !error.ranks().is_empty();
    let right = typed && took < TIMEOUT + SLACK && again.ranks() == error.ranks();
    println!(
        "{} rank {rank}, killed in {kind}: after {took:?}: {error}",
        if right { "right:" } else { "WRONG:" }
    );
    Ok(right)
}

/// Whether a process was ended by [`run`].
pub(crate) fn was_killed(status: std::process::ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    status.signal() == Some(Signal::KILL.as_raw())
}
