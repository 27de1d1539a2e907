//! Calls over hosts on devices in which one rank goes wrong: typed errors on all ranks that are left, within a deadline.

#![allow(unsafe_code)] // names blocks by their addresses

use std::thread;
use std::time::{Duration, Instant};

use symmpool_allocator::{Block, Error, Result, Stream};
use symmpool_collectives::{Communicator, DType, ReduceOp};

use crate::HostsOptions;
use crate::collectives::communicator;
use crate::job::{RankOfJob, ensure, run as run_job};

const STREAM: &Stream = &Stream::DEFAULT;
/// The rank that goes wrong, which is not the first of its host where hosts have two ranks.
const FAULTY: u32 = 1;
/// Timeout of all that waits.
const LIMIT: Duration = Duration::from_secs(4);
/// Longest time until all ranks have their error.
const MAX_FAULT: Duration = Duration::from_secs(30);
/// Elements of a call.
const COUNT: usize = 40_000;

/// A way to go wrong, how errors of the other ranks are, and of the one that does.
struct CallFault {
    name: &'static str,
    is: fn(&Error) -> bool,
    own: fn(&Error) -> bool,
}

const CASES: [CallFault; 5] = [
    CallFault { name: "other_operation", is: Error::is_diverged, own: Error::is_diverged },
    CallFault { name: "other_collective", is: is_of_calls, own: is_of_calls },
    CallFault { name: "declined", is: Error::is_invalid_argument, own: Error::is_invalid_argument },
    CallFault { name: "late", is: is_of_peers, own: is_of_peers },
    CallFault { name: "killed", is: is_of_peers, own: is_of_peers },
];

/// Whether ranks made different calls.
fn is_of_calls(error: &Error) -> bool {
    error.is_diverged() || is_of_peers(error)
}

/// Whether a rank did not come: NCCL also says so where others have ended its communicator before.
fn is_of_peers(error: &Error) -> bool {
    let by_nccl = error.to_string().contains("NCCL error 6");
    !error.is_diverged() && (by_nccl || error.is_timeout() || error.is_peer_lost())
}

/// Has one rank go wrong in each way.
pub(crate) fn check(options: &HostsOptions) -> bool {
    let mut passed = true;
    for case in &CASES {
        passed &= run_job(options, &format!("call:{}", case.name), |_| Vec::new());
    }
    passed
}

/// A rank's part in a fault.
pub(crate) fn run(rank: &RankOfJob, name: &str) -> Result<()> {
    let case = CASES.iter().find(|case| case.name == name);
    let case = case.ok_or_else(|| Error::invalid_argument(format!("no fault {name}")))?;
    let pool = rank.pool()?;
    let comm = communicator(&pool, LIMIT)?;
    let bytes = COUNT * 4 * rank.world();
    let (input, output) = (pool.alloc::<u8>(bytes)?, pool.alloc::<u8>(bytes)?);
    pool.commit()?;
    for _ in 0..3 {
        all_reduce(&comm, (&input, &output), COUNT, ReduceOp::Sum)?;
    }
    comm.barrier(STREAM)?;
    comm.synchronize(STREAM)?;
    let began = Instant::now();
    let is_faulty = rank.rank == FAULTY;
    let made = match name {
        _ if !is_faulty => all_reduce(&comm, (&input, &output), COUNT, ReduceOp::Sum),
        "other_operation" => all_reduce(&comm, (&input, &output), COUNT, ReduceOp::Max),
        "other_collective" => {
            // SAFETY: both blocks live and have room for the call.
            unsafe {
                let (to, from) = (output.as_ptr(), input.as_ptr());
                comm.all_gather_at(to, from, COUNT, DType::F32, STREAM)
            }
        }
        // SAFETY: both blocks live; the call is refused.
        "declined" => unsafe {
            comm.broadcast_at(output.as_ptr(), COUNT, DType::F32, 1000, STREAM)
        },
        "late" => {
            thread::sleep(3 * LIMIT);
            all_reduce(&comm, (&input, &output), COUNT, ReduceOp::Sum)
        }
        // Nothing is given back, as where a process is killed.
        _ => std::process::exit(0),
    };
    let again = || {
        comm.synchronize(STREAM)?;
        all_reduce(&comm, (&input, &output), COUNT, ReduceOp::Sum)
    };
    let error = loop {
        match made.clone().and_then(|()| again()) {
            Err(error) => break error,
            Ok(()) => thread::sleep(Duration::from_millis(20)),
        }
        ensure(began.elapsed() < MAX_FAULT, || "no error was seen".to_owned())?;
    };
    println!("rank {} ({name}, {:?}): {error}", rank.rank, began.elapsed());
    ensure(began.elapsed() < MAX_FAULT, || format!("{:?} until: {error}", began.elapsed()))?;
    let is_as_said = if is_faulty { case.own } else { case.is };
    ensure(is_as_said(&error), || format!("another kind of error was expected than: {error}"))?;
    let after = again();
    ensure(after.is_err(), || "a call was made by a communicator that has failed".to_owned())
}

fn all_reduce(
    comm: &Communicator,
    (input, output): (&Block<u8>, &Block<u8>),
    count: usize,
    op: ReduceOp,
) -> Result<()> {
    let (to, from) = (output.as_ptr(), input.as_ptr());
    // SAFETY: both blocks live and have room for the call, and nobody looks at them.
    unsafe { comm.all_reduce_at(to, from, count, DType::F32, op, STREAM) }
}
