//! Checks ranks that call differently, or not at all: all get the same typed error, in bounded time (S5, S6).

use std::time::{Duration, Instant};

use symmpool_allocator::{Error, Pool, Result};
use symmpool_collectives::{
    AllReduceAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp,
};

use crate::cuda::stream;
use crate::{
    MAX_LATE, Options, all_to_all_faults, captures, expect_error, late, launches, native, outside,
    p2p_between, p2p_faults, plans, watched,
};

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<bool> {
    let timeout = Duration::try_from_secs_f64(options.timeout)
        .map_err(|why| Error::invalid_argument(format!("--timeout {}: {why}", options.timeout)))?;
    let block = pool.alloc::<u8>(4 << 20)?;
    let other = pool.alloc::<u8>(4 << 20)?;
    pool.commit()?;
    let (at, elsewhere) = (block.address(), other.address());
    let rank = pool.rank();
    let odd = rank == pool.world() - 1;
    let stream = stream(pool)?;
    let mut wrong = 0;
    // All algorithms of devices.
    for algorithm in AllReduceAlgorithm::ALL {
        if algorithm == AllReduceAlgorithm::CubeMesh || !options.wants(algorithm.name()) {
            continue;
        }
        let options = CommunicatorOptions {
            algorithm,
            timeout,
            beside_compute: options.beside_compute,
            links: options.links(),
            ..Default::default()
        };
        let patient = CommunicatorOptions { timeout: 20 * timeout, ..options.clone() };
        let usual = algorithm.checked().map_or(10_000, |checked| checked.cases.min_count);
        // The call of one rank differs in this: count, type, operation, or offset.
        for difference in 0..4 {
            let call = |comm: &Communicator, differs: bool| {
                let is = |which| differs && difference == which;
                let count = if is(0) { 2 * usual } else { usual };
                let dtype = if is(1) { DType::F16 } else { DType::Bf16 };
                let op = if is(2) { ReduceOp::Max } else { ReduceOp::Sum };
                let to = if is(3) { elsewhere } else { at };
                // SAFETY: both blocks are longer than any of these calls.
                unsafe {
                    comm.all_reduce_at(to as *mut u8, at as *const u8, count, dtype, op, &stream)
                }
            };
            // Compiles kernels before anything is timed.
            let first = Communicator::with_options(pool, &patient)?;
            call(&first, true)?;
            first.synchronize(&stream)?;
            drop(first);
            let comm = Communicator::with_options(pool, &options)?;
            call(&comm, false)?;
            comm.synchronize(&stream)?;
            let began = Instant::now();
            let result = call(&comm, odd).and_then(|()| comm.synchronize(&stream));
            let error = expect_error(result, "a call that differs")?;
            let took = began.elapsed();
            let good = error.is_diverged() && took < timeout + MAX_LATE;
            // No call succeeds after it.
            let again = expect_error(call(&comm, false), "a call after a failure")?;
            if !good || !again.is_diverged() {
                wrong += 1;
                println!(
                    "rank {rank}: {} difference {difference}: after {took:?}: {error}",
                    algorithm.name()
                );
            } else if algorithm == AllReduceAlgorithm::Auto && difference == 0 && rank == 0 {
                println!("{error}");
            }
        }
        // One rank makes no call; the others have another timeout than the communicator was made with.
        let comm = Communicator::with_options(pool, &patient)?;
        if !odd {
            comm.set_timeout(timeout)?;
            let began = Instant::now();
            // SAFETY: the block is longer.
            let called = unsafe {
                comm.all_reduce_at(
                    at as *mut u8,
                    at as *const u8,
                    10 * usual.min(60_000),
                    DType::Bf16,
                    ReduceOp::Sum,
                    &stream,
                )
            };
            // This timeout is for later calls: the error names the timeout of this call.
            comm.set_timeout(20 * timeout)?;
            let result = called.and_then(|()| comm.synchronize(&stream));
            let error = expect_error(result, "a call without a peer")?;
            let took = began.elapsed();
            let named = error.ranks() == [pool.world() - 1]
                && error.to_string().contains(&format!("{timeout:.1?}"));
            if !error.is_timeout() || !named || took > timeout + MAX_LATE {
                wrong += 1;
                println!("rank {rank}: {}: alone, after {took:?}: {error}", algorithm.name());
            } else if algorithm == AllReduceAlgorithm::Auto && rank == 0 {
                println!("{error} (after {took:?})");
            }
        } else {
            std::thread::sleep(timeout + Duration::from_millis(500));
        }
    }
    if options.wants("all_to_all") {
        wrong += all_to_all_faults::run(pool, timeout)?;
    }
    if options.wants("p2p") {
        wrong += p2p_between::run(pool, timeout)?;
        wrong += p2p_faults::run(pool, timeout)?;
    }
    if options.wants("late") {
        wrong += watched::run(pool, timeout)?;
        wrong += late::run(pool, timeout)?;
    }
    if options.wants("outside") {
        wrong += outside::run(pool, timeout)?;
    }
    if options.wants("captures") {
        wrong += captures::run(pool, options, timeout)?;
    }
    if options.wants("launches") {
        wrong += launches::run(pool, options, timeout)?;
    }
    if options.wants("plans") {
        wrong += plans::faults::run(pool, timeout)?;
    }
    if options.wants("native") {
        wrong += native::faults(pool, timeout)?;
    }
    declined(pool)?;
    wrong += lost(pool, timeout)?;
    println!("rank {rank}: faults: {wrong} wrong");
    Ok(wrong == 0)
}

/// A rank's process ends: the others' error says that it is gone, and not that it is late. Another one may have ended by
/// then, as it has found that.
fn lost(pool: &Pool, timeout: Duration) -> Result<u32> {
    let block = pool.alloc::<u8>(1 << 20)?;
    let stream = stream(pool)?;
    let options = CommunicatorOptions { timeout, ..Default::default() };
    let comm = Communicator::with_options(pool, &options)?;
    let last = pool.world() - 1;
    if pool.rank() == last {
        return Ok(0);
    }
    let at = block.address();
    // SAFETY: the block is longer.
    let called = unsafe {
        comm.all_reduce_at(at as *mut u8, at as *const u8, 1000, DType::F32, ReduceOp::Sum, &stream)
    };
    // The process takes a moment to end.
    std::thread::sleep(timeout);
    let result = called.and_then(|()| comm.synchronize(&stream));
    let error = expect_error(result, "a call without a process")?;
    if error.is_peer_lost() && error.ranks().contains(&last) {
        return Ok(0);
    }
    println!("rank {}: a lost rank: {error}", pool.rank());
    Ok(1)
}

/// Arguments that are invalid on every rank: all get an error, and the communicator stays usable.
fn declined(pool: &Pool) -> Result<()> {
    let stream = stream(pool)?;
    let comm = Communicator::new(pool)?;
    let block = pool.alloc::<u8>(1 << 20)?;
    let at = block.address();
    // SAFETY: refused before anything is touched.
    let overlapping = unsafe {
        comm.all_reduce_at(
            (at + 16) as *mut u8,
            at as *const u8,
            1000,
            DType::F32,
            ReduceOp::Sum,
            &stream,
        )
    };
    let error = expect_error(overlapping, "overlapping buffers")?;
    // SAFETY: refused before anything is touched.
    let long = unsafe {
        comm.all_reduce_at(
            at as *mut u8,
            at as *const u8,
            usize::MAX / 2,
            DType::F64,
            ReduceOp::Sum,
            &stream,
        )
    };
    let endless = expect_error(long, "a call of more than there is")?;
    if !error.is_invalid_argument() || !endless.is_invalid_argument() {
        return Err(Error::invalid_state(format!("{error}; {endless}")));
    }
    comm.barrier(&stream)?;
    comm.synchronize(&stream)
}
