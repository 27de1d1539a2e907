//! A rank that measures this library's collectives over blocks of a pool, or plain copies, which are the limit.

use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};
use symmpool_allocator::{Deadline, Driver, Group, Pool, Result, Stream};
use symmpool_collectives::{Communicator, ReduceOp};

use crate::case::{BenchCase, BenchedOp, Figure};
use crate::common::{data, say, sum, value};
use crate::matrix::MatrixKind;

const STREAM: &Stream = &Stream::DEFAULT;
const TIMEOUT: Duration = Duration::from_secs(60);
/// The most calls that a time is the mean of.
const MAX_CALLS: f64 = 4e6;

/// Subject that a rank process of this program measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Role {
    /// The collectives.
    Collectives,
    /// Every rank copies as many bytes within its own memory as a case has.
    Memcpy,
    /// Nothing: the process uses a core.
    Busy,
}

/// Binds this process to the core with the number of its rank.
pub(crate) fn bind() {
    let rank = std::env::var("LOCAL_RANK").ok().and_then(|rank| rank.parse().ok());
    let mut cores = CpuSet::new();
    cores.set(rank.unwrap_or(0));
    if let Err(error) = sched_setaffinity(None, &cores) {
        eprintln!("bench_host: binding to a core: {error}");
    }
}

/// Runs a rank, which the environment describes. Rank 0 prints the results.
pub(crate) fn run(role: Role, cases: &[BenchCase], target: Duration) -> Result<()> {
    let group = Group::from_env(Deadline::after(TIMEOUT))?.with_timeout(TIMEOUT);
    let pool = Pool::builder(group).driver(Driver::host()?).build()?;
    let rank = Rank { comm: Communicator::new(&pool)?, target };
    for case in cases {
        let (us, wrong) = match (role, case.op) {
            (Role::Collectives, BenchedOp::AllReduce) => rank.all_reduce(case.bytes)?,
            (Role::Collectives, BenchedOp::AllToAll) => {
                rank.all_to_all(case.bytes, MatrixKind::Even)?
            }
            (Role::Collectives, BenchedOp::AllToAllV) => {
                rank.all_to_all(case.bytes, case.matrix.unwrap_or(MatrixKind::Even))?
            }
            (Role::Memcpy | Role::Busy, _) => rank.memcpy(case.bytes)?,
        };
        let mut total = [wrong as i64];
        rank.comm.all_reduce_slice(&mut total, ReduceOp::Sum, STREAM)?;
        if rank.comm.rank() == 0 {
            say!("{}", Figure { case: *case, us, wrong: total[0] as u64 });
        }
    }
    rank.comm.barrier(STREAM)
}

struct Rank {
    comm: Communicator,
    target: Duration,
}

impl Rank {
    fn all_reduce(&self, bytes: usize) -> Result<(f64, usize)> {
        let (comm, pool) = (&self.comm, self.comm.pool());
        let (count, seed) = (bytes / size_of::<f32>(), bytes as u32);
        let (input, out) = (pool.alloc::<f32>(count)?, pool.alloc::<f32>(count)?);
        input.write(&data(seed, comm.rank(), count))?;
        out.write(&vec![0.0; count])?;
        let us = self.time(|| comm.all_reduce_into(&out, &input, ReduceOp::Sum, STREAM))?;
        let result = out.read()?;
        let wrong = |(index, got): &(usize, &f32)| **got != sum(seed, comm.world(), *index);
        Ok((us, result.iter().enumerate().filter(wrong).count()))
    }

    /// Measures the call with a count for each rank.
    fn all_to_all(&self, bytes: usize, kind: MatrixKind) -> Result<(f64, usize)> {
        let (comm, pool) = (&self.comm, self.comm.pool());
        let (seed, me) = (bytes as u32, comm.rank() as usize);
        let counts = kind.counts(comm.world() as usize, bytes / size_of::<f32>());
        let receives = |rank: usize| counts.iter().map(move |row| row[rank]);
        let (send, receive) = (&counts[me], receives(me).collect::<Vec<_>>());
        // Blocks are equally long on every rank.
        let most =
            |of: &dyn Fn(usize) -> usize| (0..counts.len()).map(of).max().unwrap_or(0).max(1);
        let input = pool.alloc::<f32>(most(&|rank| counts[rank].iter().sum()))?;
        let out = pool.alloc::<f32>(most(&|rank| receives(rank).sum()))?;
        input.write(&data(seed, me as u32, input.len()))?;
        out.write(&vec![0.0; out.len()])?;
        let us = self.time(|| comm.all_to_all_v_into(&out, &input, &receive, send, STREAM))?;
        let expected = (0_u32..).zip(&counts).flat_map(|(from, row)| {
            let begin: usize = row[..me].iter().sum();
            (0..row[me]).map(move |i| value(seed, from, begin + i))
        });
        let wrong = out.read()?.iter().zip(expected).filter(|(got, want)| **got != *want).count();
        Ok((us, wrong))
    }

    fn memcpy(&self, bytes: usize) -> Result<(f64, usize)> {
        let from = vec![1_u8; bytes];
        let mut to = vec![0_u8; bytes];
        let us = self.time(|| {
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&mut to);
            Ok(())
        })?;
        Ok((us, to.iter().filter(|byte| **byte != 1).count()))
    }

    /// The microseconds of a call on the slowest rank: after a warm-up, makes more and more calls until they fill half
    /// of the target time. A few calls say too little of how many there are to make: other programs may have had the
    /// core meanwhile.
    fn time(&self, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
        call()?;
        let target = self.target.as_secs_f64() * 1e6;
        let mut calls = 3.0;
        loop {
            let each = self.repeat(calls as u32, &mut call)?;
            let more = target / (each * calls);
            if more <= 2.0 || calls >= MAX_CALLS {
                return Ok(each);
            }
            calls = (calls * more.min(10.0)).ceil().min(MAX_CALLS);
        }
    }

    fn repeat(&self, calls: u32, call: &mut impl FnMut() -> Result<()>) -> Result<f64> {
        self.comm.barrier(STREAM)?;
        let start = Instant::now();
        (0..calls).try_for_each(|_| call())?;
        let mut us = [start.elapsed().as_secs_f64() * 1e6 / f64::from(calls)];
        self.comm.all_reduce_slice(&mut us, ReduceOp::Max, STREAM)?;
        Ok(us[0])
    }
}
