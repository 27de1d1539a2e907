//! Times all-reduce and all-to-all over the pool's blocks, and checks every element.

use std::time::{Duration, Instant};

use symmpool_allocator::{Pool, Result, Stream};
use symmpool_collectives::{Communicator, ReduceOp};

use crate::common::{data, sizes, sum, value};
use crate::report::Report;

/// About how long the calls of one size are repeated.
const TARGET: Duration = Duration::from_millis(120);
const STREAM: &Stream = &Stream::DEFAULT;

/// Times both operations with all sizes.
pub(crate) fn run(pool: &Pool, comm: &Communicator) -> Result<()> {
    for bytes in sizes() {
        all_reduce(pool, comm, bytes)?;
    }
    for bytes in sizes() {
        all_to_all_v(pool, comm, bytes)?;
    }
    Ok(())
}

fn all_reduce(pool: &Pool, comm: &Communicator, bytes: usize) -> Result<()> {
    let (count, seed) = (bytes / size_of::<f32>(), bytes as u32);
    let (input, out) = (pool.alloc::<f32>(count)?, pool.alloc::<f32>(count)?);
    input.write(&data(seed, comm.rank(), count))?;
    let us = time(comm, || comm.all_reduce_into(&out, &input, ReduceOp::Sum, STREAM))?;
    let result = out.read()?;
    let differs = |(index, value): &(usize, &f32)| **value != sum(seed, comm.world(), *index);
    let wrong = result.iter().enumerate().filter(differs).count();
    Report::Timed { op: "all_reduce".into(), bytes, us, wrong }.send();
    Ok(())
}

/// Times an uneven all-to-all: a rank sends one part to one rank, two to the next, and so on.
fn all_to_all_v(pool: &Pool, comm: &Communicator, bytes: usize) -> Result<()> {
    let (me, world) = (comm.rank(), comm.world());
    let unit = bytes / size_of::<f32>() / (world * (world + 1) / 2) as usize;
    let part = |from: u32, to: u32| unit * ((from + to) % world + 1) as usize;
    let send: Vec<usize> = (0..world).map(|to| part(me, to)).collect();
    let receive: Vec<usize> = (0..world).map(|from| part(from, me)).collect();
    let count = send.iter().sum();
    let (input, out) = (pool.alloc::<f32>(count)?, pool.alloc::<f32>(receive.iter().sum())?);
    let seed = bytes as u32 + 1;
    input.write(&data(seed, me, count))?;
    let us = time(comm, || comm.all_to_all_v_into(&out, &input, &receive, &send, STREAM))?;
    let result = out.read()?;
    let mut results = result.iter();
    let mut wrong = 0;
    for from in 0..world {
        let start: usize = (0..me).map(|to| part(from, to)).sum();
        let theirs = results.by_ref().take(part(from, me)).enumerate();
        wrong += theirs.filter(|(i, got)| **got != value(seed, from, start + i)).count();
    }
    Report::Timed { op: "all_to_all_v".into(), bytes, us, wrong }.send();
    Ok(())
}

/// The mean microseconds of a call on this rank. The slowest rank determines the number of calls.
fn time(comm: &Communicator, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    call()?;
    comm.barrier(STREAM)?;
    let start = Instant::now();
    (0..3).try_for_each(|_| call())?;
    let mut each = [start.elapsed().as_secs_f64() / 3.0];
    comm.all_reduce_slice(&mut each, ReduceOp::Max, STREAM)?;
    let calls = (TARGET.as_secs_f64() / each[0]).clamp(3.0, 5000.0) as u32;
    comm.barrier(STREAM)?;
    let start = Instant::now();
    (0..calls).try_for_each(|_| call())?;
    Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(calls))
}
