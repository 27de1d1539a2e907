//! Kills the process of a rank in the middle of a call: the others get a typed error within the
//! deadline, and end.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::process::{Signal, getpid, kill_process};
use symmpool_allocator::{Block, Error, Pool, Result};
use symmpool_collectives::{
    AllReduceAlgorithm, AllToAllAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp,
    Request, SplitRows, SplitsAt, StandardCollective,
};

use crate::cuda::{CallGraph, stream, upload};
use crate::oracle::random;
use crate::{ORDINARY, Options, expect_error};

/// The calls that are under way then.
pub(crate) const KINDS: [&str; 9] = [
    "all_reduce",
    "two_shot_copy",
    "reduce_scatter_copy",
    "all_gather_copy",
    "all_to_all",
    "all_to_all_splits",
    "all_to_all_copy",
    GROWTH,
    CAPTURED_GROWTH,
];
/// First large calls of communicators whose memory grows.
const GROWTH: &str = "growth";
/// Scenario of growth in calls that are captured.
const CAPTURED_GROWTH: &str = "captured_growth";

const TIMEOUT: Duration = Duration::from_millis(1500);
/// How much longer than the timeout ranks may take: until the rank is killed, and until processes end.
const SLACK: Duration = Duration::from_millis(1500);
/// Bytes that a rank sends in a call; fewer where devices are emulated, as copies that wait end in their own time.
const BYTES: usize = 64 << 20;
const EMULATED_BYTES: usize = 1 << 20;
/// Calls of the ranks that stay. The other one ends behind half as many, so that some must be without it, whether devices
/// or hosts take longer for a call.
const CALLS: u64 = 2000;

/// Makes calls until the last rank kills its own process; does not return on that rank.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<bool> {
    let kind = options.kind.as_deref().unwrap_or(KINDS[0]);
    let (rank, world) = (pool.rank(), pool.world() as usize);
    let bytes = if options.emulated { EMULATED_BYTES } else { BYTES };
    let from = pool.alloc::<u8>(bytes)?;
    // Copy engines gather into ordinary memory through scratch.
    let lane = if kind == "all_gather_copy" { pool.lane(ORDINARY)? } else { pool.default_lane() };
    let to = lane.alloc::<u8>(bytes)?;
    let splits = pool.alloc::<i64>(world)?;
    pool.commit()?;
    let stream = stream(pool)?;
    if kind == GROWTH || kind == CAPTURED_GROWTH {
        return while_memory_grows(pool, options, (&to, &from), kind == CAPTURED_GROWTH);
    }
    let algorithm = match kind {
        "two_shot_copy" => AllReduceAlgorithm::TwoShotCopy,
        _ => AllReduceAlgorithm::Auto,
    };
    let all_to_all = match kind {
        "all_to_all_copy" => AllToAllAlgorithm::Copy,
        _ => AllToAllAlgorithm::Auto,
    };
    let timeout = TIMEOUT;
    // With little scratch, pieces outnumber their slots.
    let pieces = matches!(kind, "reduce_scatter_copy" | "all_gather_copy");
    let comm = CommunicatorOptions {
        algorithm,
        device_scratch_bytes: pieces.then(|| (bytes as u64 / 8).max(1 << 20)),
        all_to_all,
        timeout,
        beside_compute: options.beside_compute,
        ..Default::default()
    };
    let comm = Communicator::with_options(pool, &comm)?;
    let counts = vec![bytes / world; world];
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
                // SAFETY: both blocks are as long as all parts together, and nothing else uses them.
                unsafe { comm.all_to_all_at(to, from, bytes / world, DType::U8, &stream) }
            }
            "all_to_all_splits" => {
                let (dtype, null) = (DType::U8, std::ptr::null_mut());
                let rows = SplitRows { dtype, row: 1, length: bytes, capacity: bytes };
                let input = splits.address() as *const u8;
                let splits = SplitsAt { input, output: null, offsets: null, dtype: DType::I64 };
                // SAFETY: both blocks are as long as the rows, and nothing else uses them; there is a split for every
                // rank.
                unsafe { comm.all_to_all_v_splits_at(to, from, &rows, &splits, &stream) }
            }
            "reduce_scatter_copy" | "all_gather_copy" => {
                let scatters = kind == "reduce_scatter_copy";
                let collective = if scatters {
                    StandardCollective::ReduceScatter
                } else {
                    StandardCollective::AllGather
                };
                let (count, sum) = (bytes / 2 / world, ReduceOp::Sum);
                // SAFETY: both blocks are this long, and nothing else uses them.
                unsafe {
                    comm.call(
                        &Request::at(collective, to, from, count, DType::Bf16)
                            .op(sum)
                            .algorithm("copy"),
                        &stream,
                    )
                }
            }
            _ => {
                let (count, sum) = (bytes / 2, ReduceOp::Sum);
                // SAFETY: both blocks are this long, and nothing else uses them.
                unsafe { comm.all_reduce_at(to, from, count, DType::Bf16, sum, &stream) }
            }
        }
    };
    call()?;
    comm.synchronize(&stream)?;
    let began = Instant::now();
    let killed = rank as usize == world - 1;
    let count = if options.emulated { 40 } else { options.seldom(CALLS, 50) };
    let count = if killed { count / 2 } else { count };
    let calls = (0..count).try_for_each(|_| call());
    if killed {
        let _ = kill_process(getpid(), Signal::KILL);
    }
    let error = expect_error(
        calls.and_then(|()| comm.synchronize(&stream)),
        "calls without a peer that was killed",
    )?;
    let took = began.elapsed();
    let again = expect_error(call(), "a call after a failure")?;
    // Others may have found out and left before.
    let named = error.is_peer_lost() && error.ranks().contains(&(world as u32 - 1));
    // With more than two ranks, one may wait for another one that waits for the last rank.
    let typed = named || world > 2 && error.is_timeout() && !error.ranks().is_empty();
    let right = typed && took < TIMEOUT + SLACK && again.ranks() == error.ranks();
    println!(
        "{} rank {rank}, killed in {kind}: after {took:?}: {error}",
        if right { "right:" } else { "WRONG:" }
    );
    Ok(right)
}

/// Makes communicators and their first large calls until the last rank's process is killed, wherever it is then: in a handshake,
/// while it allocates, in a commit. Does not return on that rank.
fn while_memory_grows(
    pool: &Pool,
    options: &Options,
    (to, from): (&Block<u8>, &Block<u8>),
    captured: bool,
) -> Result<bool> {
    let stream = &stream(pool)?;
    let (rank, last) = (pool.rank(), pool.world() - 1);
    let grows = CommunicatorOptions {
        timeout: TIMEOUT,
        device_memory_grows: true,
        ..options.communicator()
    };
    let count = EMULATED_BYTES / 4;
    let grow = || {
        let comm = Communicator::with_options(pool, &grows)?;
        let (to, from) = (to.as_ptr(), from.as_ptr().cast_const());
        let call = || {
            // SAFETY: both blocks are this long, and nothing else uses them.
            unsafe { comm.all_reduce_at(to, from, count, DType::F32, ReduceOp::Sum, stream) }
        };
        if captured {
            let mut called = Ok(());
            let graph = CallGraph::capture(pool, *stream, || {
                called = call();
                Ok(())
            });
            called?;
            graph?.destroy(pool)?;
        } else {
            call()?;
        }
        comm.synchronize(stream)?;
        match comm.memory().total {
            total if total <= 16 << 20 => {
                Err(Error::invalid_state(format!("memory did not grow: {total}")))
            }
            _ => Ok(()),
        }
    };
    // Kernels are there afterwards, and where in a round the process is killed is another one each time.
    let began = Instant::now();
    grow()?;
    let round = began.elapsed();
    if rank == last {
        let nanoseconds = u64::from(
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.subsec_nanos()),
        );
        let delay = round + round.mul_f64(random(nanoseconds, 0) as f64 / u64::MAX as f64);
        std::thread::spawn(move || {
            std::thread::sleep(delay);
            let _ = kill_process(getpid(), Signal::KILL);
        });
    }
    let mut began = Instant::now();
    let error = loop {
        match grow() {
            Ok(()) => began = Instant::now(),
            Err(error) => break error,
        }
    };
    let took = began.elapsed();
    let again = expect_error(grow(), "a communicator without a peer that was killed")?;
    let named = error.is_peer_lost() && error.ranks().contains(&last);
    let typed = named || last > 1 && error.is_timeout() && !error.ranks().is_empty();
    // Others may have ended since.
    let right = typed && took < TIMEOUT + SLACK + 2 * round && again.ranks().contains(&last);
    println!(
        "{} rank {rank}, killed while memory grows, captured: {captured}: after {took:?}: {error}",
        if right { "right:" } else { "WRONG:" }
    );
    Ok(right)
}

/// Whether a process was ended by [`run`].
pub(crate) fn was_killed(status: std::process::ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    status.signal() == Some(Signal::KILL.as_raw())
}
