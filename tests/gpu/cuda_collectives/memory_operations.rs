//! Checks copies by copy engines with signals by memory operations: rings of puts and gets, graphs of them that are replayed,
//! the steps of fused matmuls, and waits that run out.

use std::time::{Duration, Instant};

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{Communicator, DType, MatmulKind, MatmulShape};

use crate::cuda::{CallGraph, download, stream, upload};
use crate::expect_error;
use crate::oracle::{input, random};
use crate::tally::Tally;
use crate::{ORDINARY, Options};

/// The timeout of waits that must not succeed.
const SHORT: Duration = Duration::from_millis(1500);
const BYTES: usize = 300_007;

// The channels, by what a signal on each means.
const READY: u32 = 0;
const HERE: u32 = 15;

struct Ring<'a> {
    pool: &'a Pool,
    comm: Communicator,
    stream: Stream,
    options: &'a Options,
    next: u32,
    before: u32,
    inbox: Block<u8>,
    /// Memory outside windows.
    source: Block<u8>,
    got: Block<u8>,
    tally: Tally,
}

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let (rank, world) = (pool.rank(), pool.world());
    let ordinary = pool.lane(ORDINARY)?;
    let mut ring = Ring {
        pool,
        comm: Communicator::with_options(pool, &options.communicator())?,
        stream: stream(pool)?,
        options,
        next: (rank + 1) % world,
        before: (rank + world - 1) % world,
        inbox: pool.alloc(BYTES)?,
        source: ordinary.alloc(BYTES)?,
        got: ordinary.alloc(BYTES)?,
        tally: Tally::new(pool),
    };
    pool.commit()?;
    ring.rings()?;
    ring.products()?;
    ring.late()?;
    if rank == 0 {
        println!("memory operations: {} cases, {} wrong", ring.tally.cases, ring.tally.wrong);
    }
    Ok(ring.tally.counts())
}

impl Ring<'_> {
    fn data(&self, rank: u32, round: u64) -> Vec<u8> {
        input(random(self.options.seed, 900 + round), rank, DType::U8, BYTES)
    }

    /// Runs `around` eagerly and in graphs, with new data each time, and compares what has arrived.
    fn replay(&mut self, what: &str, around: impl Fn(&Self) -> Result<()>) -> Result<()> {
        let graph = CallGraph::capture(self.pool, self.stream, || around(self))?;
        for round in 0..self.options.few(40, 6) {
            upload(self.pool, self.inbox.address(), &vec![0xa5; BYTES])?;
            upload(self.pool, self.source.address(), &self.data(self.pool.rank(), round))?;
            // Nobody writes into an inbox that is still filled.
            self.comm.barrier(&self.stream)?;
            if random(self.options.seed, round).is_multiple_of(3) {
                around(self)?;
            } else {
                graph.launch(self.pool, self.stream)?;
            }
            self.comm.synchronize(&self.stream)?;
            let wanted = self.data(self.before, round);
            let arrived = download(self.pool, self.inbox.address(), BYTES)?;
            self.tally.expect(&format!("{what}, round {round}: what arrived"), arrived == wanted);
            let got = download(self.pool, self.got.address(), BYTES)?;
            let theirs =
                self.data((self.before + self.pool.world() - 1) % self.pool.world(), round);
            self.tally.expect(&format!("{what}, round {round}: what was got"), got == theirs);
            // The next rank may still read the inbox, which the next round fills anew.
            self.comm.barrier(&self.stream)?;
            self.comm.synchronize(&self.stream)?;
        }
        for _ in 0..self.options.few(200, 10) {
            graph.launch(self.pool, self.stream)?;
        }
        self.comm.synchronize(&self.stream)?;
        let failed = self.comm.failure().is_some();
        self.tally.expect(&format!("{what}: replays in a row"), !failed);
        self.comm.barrier(&self.stream)?;
        self.comm.synchronize(&self.stream)?;
        graph.destroy(self.pool)
    }

    /// Public operations: a put to the next rank, and a get of what the rank before was sent.
    fn rings(&mut self) -> Result<()> {
        let long = self.options.communicator().timeout;
        self.replay("a ring", |ring| {
            let Ring { comm, next, before, stream, .. } = ring;
            comm.signal_by_memory(*before, READY, stream)?;
            comm.wait_by_memory(*next, READY, long, stream)?;
            let (to, from) = (ring.inbox.as_ptr(), ring.source.as_ptr().cast_const());
            // SAFETY: the blocks are as long, and nothing else uses them between these signals.
            unsafe { comm.put_by_copy_engine_at(to, from, BYTES, *next, stream) }?;
            comm.signal_by_memory(*next, HERE, stream)?;
            comm.wait_by_memory(*before, HERE, long, stream)?;
            // The inbox of the rank before is complete only when that rank says so.
            comm.signal_by_memory(*next, 3, stream)?;
            comm.wait_by_memory(*before, 3, long, stream)?;
            // SAFETY: the blocks are as long, and nothing else uses them between these signals.
            unsafe { comm.get_by_copy_engine_at(ring.got.as_ptr(), to, BYTES, *before, stream) }?;
            comm.signal_by_memory(*before, 4, stream)?;
            comm.wait_by_memory(*next, 4, long, stream)
        })
    }

    /// The steps of a fused matmul.
    fn products(&mut self) -> Result<()> {
        let shape = MatmulShape {
            kind: MatmulKind::AllGatherMatmul,
            dtype: DType::Bf16,
            rows: 128,
            inner: 64,
            columns: 0,
            rest: 7,
        };
        self.replay("a product", |ring| {
            let Ring { comm, next, before, stream, .. } = ring;
            comm.begin_matmul(&shape, stream)?;
            let ends = (ring.inbox.as_ptr(), ring.source.as_ptr().cast_const());
            // SAFETY: the blocks are as long, and all ranks have begun the product.
            unsafe { comm.push_step(ends, BYTES, (*next, 0), stream) }?;
            comm.await_step((*before, 0), stream)?;
            comm.signal_step((*next, 1), stream)?;
            comm.await_step((*before, 1), stream)?;
            let got = ring.got.as_ptr();
            // SAFETY: the blocks are as long, and all ranks have begun the product.
            unsafe { comm.get_by_copy_engine_at(got, ends.0, BYTES, *before, stream) }
        })?;
        let error = expect_error(
            self.comm.await_step((self.before, Communicator::STEPS), &self.stream),
            "a step that there is not",
        )?;
        self.tally.expect(&format!("{error}"), error.is_invalid_argument());
        let comm = Communicator::new(self.pool)?;
        let other = MatmulShape { rows: 128 + u64::from(self.pool.rank()), ..shape };
        let result = comm.begin_matmul(&other, &self.stream);
        let result = result.and_then(|()| comm.synchronize(&self.stream));
        let error = expect_error(result, "products of different shapes")?;
        // Any one of several other ranks may be named.
        let text = error.to_string();
        let own = format!("a shard of {} x 64 bf16", other.rows);
        let named = text.contains(&own) && text.matches("a shard of").count() == 2;
        self.tally.expect(&format!("{error}"), error.is_diverged() && named);
        Ok(())
    }

    /// S5: waits for signals that nobody sends, and signals that nobody takes.
    fn late(&mut self) -> Result<()> {
        let (stream, before, next) = (self.stream, self.before, self.next);
        for untaken in [false, true] {
            let mut options = self.options.communicator();
            options.timeout = SHORT;
            let comm = Communicator::with_options(self.pool, &options)?;
            comm.signal_by_memory(next, 5, &stream)?;
            comm.wait_by_memory(before, 5, SHORT, &stream)?;
            comm.synchronize(&stream)?;
            let began = Instant::now();
            let result = match untaken {
                false => comm.wait_by_memory(before, 5, SHORT, &stream),
                true => (0..2).try_for_each(|_| comm.signal_by_memory(next, 6, &stream)),
            };
            let result = result.and_then(|()| comm.synchronize(&stream));
            let error = expect_error(result, "a wait that nobody ends")?;
            let took = began.elapsed();
            let (peer, what) = match untaken {
                false => (before, format!("rank {before} to signal on channel 5")),
                true => (next, format!("rank {next} to take the last signal on channel 6")),
            };
            let named = error.ranks() == [peer] && error.to_string().contains(&what);
            let in_time = took + Duration::from_millis(10) >= SHORT && took < 3 * SHORT;
            self.tally.expect(
                &format!("after {took:?}: {error}"),
                error.is_timeout() && named && in_time,
            );
            let again = expect_error(comm.signal_by_memory(next, 5, &stream), "a later signal")?;
            self.tally.expect(&format!("after a failure: {again}"), again.is_timeout());
        }
        self.comm.barrier(&stream)?;
        self.comm.synchronize(&stream)
    }
}
