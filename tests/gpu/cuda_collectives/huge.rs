//! Checks calls of more than 2^31 elements: every byte is compared on the device.
//!
//! A rank's data repeats after a number of bytes that is no power of two. So data that is written to a place computed
//! with too few bits is wrong there.

use std::time::Instant;

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    AllReduceAlgorithm, AllToAllAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp,
    SplitRows, SplitsAt,
};

use crate::Options;
use crate::cuda::{driver, stream, upload};
use crate::matrix::bytes;
use crate::oracle::reduce;
use crate::tools::Tools;

/// Elements of a call, or of a part, which are bytes. The number has many bits set.
const COUNT: usize = (2 << 30) + (200 << 20) + 13;
/// The bytes after which data repeats.
const PERIOD: usize = (8 << 20) + 3 * 4096 + 16;
const POISON: u8 = 0xa5;
const DTYPE: DType = DType::U8;

struct Huge<'a> {
    pool: &'a Pool,
    tools: Tools<'a>,
    stream: Stream,
    from: Block<u8>,
    to: Block<u8>,
    splits: Block<i64>,
    /// One period of every rank's data, and of their sum.
    patterns: Vec<Block<u8>>,
    sum: Block<u8>,
    cases: u64,
    wrong: u64,
}

/// Number of elements that one rank sends to another one.
type Count<'a> = &'a dyn Fn(usize, usize) -> usize;

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let world = pool.world() as usize;
    let (free, _) = driver(pool).memory_info()?;
    let needed = (2 * world * COUNT + (2 << 30)) as u64;
    if free < needed {
        println!("skipped: huge calls take {needed} bytes of memory, and there are {free}");
        return Ok((0, 0));
    }
    let patterns = (0..world).map(|_| pool.alloc(PERIOD)).collect::<Result<Vec<_>>>()?;
    let mut huge = Huge {
        pool,
        tools: Tools::new(pool)?,
        stream: stream(pool)?,
        from: pool.alloc(world * COUNT)?,
        to: pool.alloc(world * COUNT)?,
        splits: pool.alloc(world)?,
        patterns,
        sum: pool.alloc(PERIOD)?,
        cases: 0,
        wrong: 0,
    };
    pool.commit()?;
    let all: Vec<Vec<u8>> =
        (0..pool.world()).map(|rank| bytes(options.seed, rank, PERIOD)).collect();
    let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
    for (block, data) in huge.patterns.iter().zip(&all) {
        upload(pool, block.address(), data)?;
    }
    upload(pool, huge.sum.address(), &reduce(&all, DTYPE, ReduceOp::Sum))?;
    let own = huge.patterns[pool.rank() as usize].address();
    for at in (0..world * COUNT).step_by(PERIOD) {
        let bytes = PERIOD.min(world * COUNT - at);
        huge.tools.copy(huge.from.address() + at as u64, own, bytes, &huge.stream)?;
    }
    huge.reductions()?;
    huge.halves()?;
    huge.exchanges()?;
    if pool.rank() == 0 {
        println!("huge: {} cases of {COUNT} elements a part, {} wrong", huge.cases, huge.wrong);
    }
    Ok((huge.cases, huge.wrong))
}

impl Huge<'_> {
    /// Makes a call, and compares the output: ranges that follow each other, each a part of a pattern that begins at
    /// some byte of the data.
    fn case(
        &mut self,
        what: &str,
        comm: &Communicator,
        wanted: &[(u64, usize, usize)],
        call: impl Fn(&Self) -> Result<()>,
    ) -> Result<()> {
        let total: usize = wanted.iter().map(|(.., bytes)| bytes).sum();
        self.tools.fill(self.to.address(), POISON, total, &self.stream)?;
        comm.synchronize(&self.stream)?;
        let began = Instant::now();
        match call(self) {
            Err(error) if error.is_unsupported() => return Ok(()),
            other => other?,
        }
        comm.synchronize(&self.stream)?;
        let took = began.elapsed();
        self.cases += 1;
        let mut at = 0;
        for &(pattern, begin, bytes) in wanted {
            let end = at + bytes;
            let mut phase = begin % PERIOD;
            while at < end {
                let bytes = (PERIOD - phase).min(end - at);
                let (got, pattern) = (self.to.address() + at as u64, pattern + phase as u64);
                self.tools.compare(got, pattern, bytes, at as u64, &self.stream)?;
                (at, phase) = (at + bytes, 0);
            }
        }
        let (differ, first) = self.tools.take()?;
        if differ > 0 {
            self.wrong += 1;
            println!(
                "rank {}: {what} of {COUNT}: {differ} bytes wrong, first in the period at byte \
                 {first:?}",
                self.pool.rank()
            );
        } else if self.pool.rank() == 0 {
            println!("{what} of {COUNT}: right, {took:?}");
        }
        Ok(())
    }

    fn places(&self) -> (*mut u8, *const u8) {
        (self.to.address() as *mut u8, self.from.address() as *const u8)
    }

    fn reductions(&mut self) -> Result<()> {
        for algorithm in AllReduceAlgorithm::ALL {
            let comm = CommunicatorOptions { algorithm, ..Default::default() };
            let comm = Communicator::with_options(self.pool, &comm)?;
            let wanted = [(self.sum.address(), 0, COUNT)];
            self.case(algorithm.name(), &comm, &wanted, |of| {
                let (to, from) = of.places();
                // SAFETY: both blocks hold a part for every rank; so it is below.
                unsafe { comm.all_reduce_at(to, from, COUNT, DTYPE, ReduceOp::Sum, &of.stream) }
            })?;
        }
        Ok(())
    }

    fn halves(&mut self) -> Result<()> {
        let comm = Communicator::new(self.pool)?;
        let rank = self.pool.rank() as usize;
        let wanted = [(self.sum.address(), rank * COUNT, COUNT)];
        self.case("reduce_scatter", &comm, &wanted, |of| {
            let (to, from) = of.places();
            // SAFETY: both blocks hold a part for every rank.
            unsafe { comm.reduce_scatter_at(to, from, COUNT, DTYPE, ReduceOp::Sum, &of.stream) }
        })?;
        let wanted: Vec<_> = self.patterns.iter().map(|of| (of.address(), 0, COUNT)).collect();
        self.case("all_gather", &comm, &wanted, |of| {
            let (to, from) = of.places();
            // SAFETY: both blocks hold a part for every rank.
            unsafe { comm.all_gather_at(to, from, COUNT, DTYPE, &of.stream) }
        })?;
        let root = self.pool.world() - 1;
        let wanted = [(self.patterns[root as usize].address(), 0, COUNT)];
        self.case("broadcast", &comm, &wanted, |of| {
            let (to, from) = of.places();
            of.tools.copy(to as u64, from as u64, COUNT, &of.stream)?;
            // SAFETY: both blocks hold a part for every rank.
            unsafe { comm.broadcast_at(to, COUNT, DTYPE, root, &of.stream) }
        })
    }

    /// All-to-alls in which every pair has as much, and one in which all of rank 0's data goes to the last rank.
    fn exchanges(&mut self) -> Result<()> {
        let (rank, world) = (self.pool.rank() as usize, self.pool.world() as usize);
        for all_to_all in AllToAllAlgorithm::ALL {
            // Calls that do not fit into inboxes go the same ways as with the other algorithms.
            if all_to_all == AllToAllAlgorithm::Lamport {
                continue;
            }
            let comm = CommunicatorOptions { all_to_all, ..Default::default() };
            let comm = Communicator::with_options(self.pool, &comm)?;
            let own = rank * COUNT;
            let wanted: Vec<_> =
                self.patterns.iter().map(|of| (of.address(), own, COUNT)).collect();
            let what = format!("all_to_all {} of equal parts", all_to_all.name());
            self.case(&what, &comm, &wanted, |of| {
                let (to, from) = of.places();
                // SAFETY: both blocks hold a part for every rank.
                unsafe { comm.all_to_all_at(to, from, COUNT, DTYPE, &of.stream) }
            })?;
            let even = |_: usize, _: usize| COUNT;
            let last = |from: usize, to: usize| match (from, to) {
                (0, to) if to == world - 1 => world * COUNT,
                (0, _) => 0,
                (_, to) if to == world - 1 => 0,
                _ => 1000 * to,
            };
            let matrices: [(&str, Count<'_>); 2] = [("even", &even), ("to the last", &last)];
            for (name, count) in matrices {
                let send: Vec<usize> = (0..world).map(|to| count(rank, to)).collect();
                let receive: Vec<usize> = (0..world).map(|from| count(from, rank)).collect();
                let wanted: Vec<_> = (0..world)
                    .map(|from| {
                        let begin = (0..rank).map(|to| count(from, to)).sum();
                        (self.patterns[from].address(), begin, receive[from])
                    })
                    .collect();
                let what = format!("all_to_all {} {name}", all_to_all.name());
                self.case(&format!("{what}, splits of the host"), &comm, &wanted, |of| {
                    let (to, from) = of.places();
                    // SAFETY: both blocks hold a part for every rank.
                    unsafe { comm.all_to_all_v_at(to, from, &receive, &send, DTYPE, &of.stream) }
                })?;
                let numbers: Vec<u8> =
                    send.iter().flat_map(|count| (*count as u64).to_le_bytes()).collect();
                upload(self.pool, self.splits.address(), &numbers)?;
                self.case(&format!("{what}, splits of the device"), &comm, &wanted, |of| {
                    let (to, from) = of.places();
                    let (length, null) = (world * COUNT, std::ptr::null_mut());
                    let rows = SplitRows { dtype: DTYPE, row: 1, length, capacity: length };
                    let input = of.splits.address() as *const u8;
                    let dtype = DType::I64;
                    let splits = SplitsAt { input, output: null, offsets: null, dtype };
                    // SAFETY: both blocks hold a part for every rank, and there is a split for each.
                    unsafe { comm.all_to_all_v_splits_at(to, from, &rows, &splits, &of.stream) }
                })?;
            }
        }
        Ok(())
    }
}
