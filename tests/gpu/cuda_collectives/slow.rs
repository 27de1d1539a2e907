//! Checks a slow consumer: one rank's stream reads the output of a call long after the others have
//! made the next call, which writes to the same place. It must read the data of the first call.

use std::time::Duration;

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    AllReduceAlgorithm, AllToAllAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp,
    SplitRows, SplitsAt,
};

use crate::Options;
use crate::cuda::{CallGraph, stream, upload};
use crate::matrix::{Matrix, bytes};
use crate::oracle::{finite, random, reduce};
use crate::tools::Tools;

/// How long it waits before it reads, with the automatic choice of an algorithm, and with all others.
const LONG: Duration = Duration::from_millis(1200);
const SHORT: Duration = Duration::from_millis(200);
/// Elements that a rank sends: in one hop, into outputs directly, and by copy engines.
const COUNTS: [usize; 2] = [3000, 700_000];
/// Bytes of each buffer.
const ROOM: usize = 8 << 20;
/// Elements of an equal part whose beginning a companion kernel sends, on any number of ranks.
const LARGE: usize = 8 << 20;
const POISON: u8 = 0xa5;

struct Slow<'a> {
    pool: &'a Pool,
    tools: Tools<'a>,
    stream: Stream,
    /// The inputs of two calls.
    from: [Block<u8>; 2],
    to: Block<u8>,
    wanted: [Block<u8>; 2],
    splits: [Block<i64>; 2],
    room: usize,
    cases: u64,
    wrong: u64,
}

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let world = pool.world() as usize;
    let mut slow = Slow::new(pool, ROOM)?;
    for count in COUNTS {
        slow.reductions(count, options.seed)?;
        slow.halves(count / world, options.seed)?;
        slow.exchanges(count, options.seed)?;
        slow.equal(count / world, false, options.seed)?;
    }
    if !options.quick {
        let mut large = Slow::new(pool, 2 * LARGE * world)?;
        for in_graphs in [false, true] {
            large.equal(LARGE, in_graphs, options.seed)?;
        }
        slow.cases += large.cases;
        slow.wrong += large.wrong;
    }
    if pool.rank() == 0 {
        println!("slow consumers: {} cases, {} wrong", slow.cases, slow.wrong);
    }
    Ok((slow.cases, slow.wrong))
}

impl<'a> Slow<'a> {
    fn new(pool: &'a Pool, room: usize) -> Result<Self> {
        let world = pool.world() as usize;
        let pair = || Ok::<_, symmpool_allocator::Error>([pool.alloc(room)?, pool.alloc(room)?]);
        let slow = Self {
            pool,
            tools: Tools::new(pool)?,
            stream: stream(pool)?,
            from: pair()?,
            to: pool.alloc(room)?,
            wanted: pair()?,
            splits: [pool.alloc(world)?, pool.alloc(world)?],
            room,
            cases: 0,
            wrong: 0,
        };
        pool.commit()?;
        Ok(slow)
    }

    /// Makes two calls into one output; one rank reads what the first call wrote only after `pause`.
    fn consume(
        &mut self,
        what: &str,
        comm: &Communicator,
        pause: Duration,
        wanted: [&[u8]; 2],
        call: impl Fn(&Self, usize) -> Result<()>,
    ) -> Result<()> {
        for (block, wanted) in self.wanted.iter().zip(wanted) {
            upload(self.pool, block.address(), wanted)?;
        }
        self.tools.fill(self.to.address(), POISON, self.room, &self.stream)?;
        // Loads all kernels first, as loading may wait for running kernels.
        match call(self, 1) {
            Err(error) if error.is_unsupported() => return Ok(()),
            other => other?,
        }
        comm.synchronize(&self.stream)?;
        self.cases += 1;
        let slow = (self.cases % u64::from(self.pool.world())) as u32;
        for (nth, wanted) in wanted.into_iter().enumerate() {
            call(self, nth)?;
            if nth == 0 && self.pool.rank() == slow {
                self.tools.pause(pause, &self.stream)?;
            }
            let (to, from) = (self.to.address(), self.wanted[nth].address());
            self.tools.compare(to, from, wanted.len(), nth as u64, &self.stream)?;
        }
        comm.synchronize(&self.stream)?;
        let (differ, first) = self.tools.take()?;
        if differ > 0 {
            self.wrong += 1;
            println!(
                "rank {}: {what}, rank {slow} slow by {pause:?}: {differ} bytes wrong, from call \
                 {first:?} on",
                self.pool.rank()
            );
        }
        Ok(())
    }

    /// The data that each rank sends in two calls; this rank's data is uploaded.
    fn inputs(&self, count: usize, seed: u64) -> Result<[Vec<Vec<u8>>; 2]> {
        let ranks = 0..self.pool.world();
        let both = [1, 2].map(|nth| {
            let seed = random(seed, nth);
            ranks.clone().map(|rank| finite(seed, rank, DType::Bf16, count)).collect::<Vec<_>>()
        });
        for (block, all) in self.from.iter().zip(&both) {
            upload(self.pool, block.address(), &all[self.pool.rank() as usize])?;
        }
        Ok(both)
    }

    fn places(&self, nth: usize) -> (*mut u8, *const u8) {
        (self.to.address() as *mut u8, self.from[nth].address() as *const u8)
    }

    fn reductions(&mut self, count: usize, seed: u64) -> Result<()> {
        let inputs = self.inputs(count, seed)?;
        let wanted = inputs.each_ref().map(|all| {
            let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
            reduce(&all, DType::Bf16, ReduceOp::Sum)
        });
        for algorithm in AllReduceAlgorithm::ALL {
            let comm = CommunicatorOptions { algorithm, ..Default::default() };
            let comm = Communicator::with_options(self.pool, &comm)?;
            let pause = if algorithm == AllReduceAlgorithm::Auto { LONG } else { SHORT };
            let what = format!("{} of {count}", algorithm.name());
            self.consume(&what, &comm, pause, wanted.each_ref().map(|all| &all[..]), |of, nth| {
                let (to, from) = of.places(nth);
                // SAFETY: the blocks are longer, and nothing but this stream uses them.
                unsafe {
                    comm.all_reduce_at(to, from, count, DType::Bf16, ReduceOp::Sum, &of.stream)
                }
            })?;
        }
        Ok(())
    }

    /// Calls with parts of `count` elements.
    fn halves(&mut self, count: usize, seed: u64) -> Result<()> {
        let comm = Communicator::new(self.pool)?;
        let (rank, part) = (self.pool.rank() as usize, 2 * count);
        let inputs = self.inputs(count * self.pool.world() as usize, seed)?;
        let wanted = inputs.each_ref().map(|all| {
            let own: Vec<&[u8]> =
                all.iter().map(|data| &data[rank * part..(rank + 1) * part]).collect();
            reduce(&own, DType::Bf16, ReduceOp::Sum)
        });
        let what = format!("reduce_scatter of {count}");
        self.consume(&what, &comm, SHORT, wanted.each_ref().map(|all| &all[..]), |of, nth| {
            let (to, from) = of.places(nth);
            // SAFETY: the blocks are longer, and nothing but this stream uses them.
            unsafe {
                comm.reduce_scatter_at(to, from, count, DType::Bf16, ReduceOp::Sum, &of.stream)
            }
        })?;
        let wanted = inputs
            .each_ref()
            .map(|all| all.iter().flat_map(|data| &data[..part]).copied().collect::<Vec<_>>());
        let what = format!("all_gather of {count}");
        self.consume(&what, &comm, SHORT, wanted.each_ref().map(|all| &all[..]), |of, nth| {
            let (to, from) = of.places(nth);
            // SAFETY: the blocks are longer, and nothing but this stream uses them.
            unsafe { comm.all_gather_at(to, from, count, DType::Bf16, &of.stream) }
        })
    }

    fn exchanges(&mut self, count: usize, seed: u64) -> Result<()> {
        let (rank, world, most) = (self.pool.rank(), self.pool.world(), 2 * count);
        let data: Vec<Vec<u8>> = (0..world).map(|rank| bytes(seed, rank, most)).collect();
        let matrices =
            [4, 5].map(|nth| Matrix::new_even(random(seed ^ count as u64, nth), world, most));
        for (nth, matrix) in matrices.iter().enumerate() {
            upload(self.pool, self.from[nth].address(), &data[rank as usize])?;
            let counts = matrix.sends(rank).into_iter().flat_map(|n| (n as u64).to_le_bytes());
            upload(self.pool, self.splits[nth].address(), &counts.collect::<Vec<_>>())?;
        }
        let wanted = matrices.each_ref().map(|matrix| matrix.output(&data, rank, 1, most));
        for all_to_all in AllToAllAlgorithm::ALL {
            let comm = CommunicatorOptions { all_to_all, ..Default::default() };
            let comm = Communicator::with_options(self.pool, &comm)?;
            let pause = if all_to_all == AllToAllAlgorithm::Auto { LONG } else { SHORT };
            for by_device in [false, true] {
                let splits = if by_device { "device" } else { "host" };
                let what = format!(
                    "all_to_all {} of {most} bytes, splits of the {splits}",
                    all_to_all.name()
                );
                self.consume(
                    &what,
                    &comm,
                    pause,
                    wanted.each_ref().map(|all| &all[..]),
                    |of, nth| {
                        let (to, from) = of.places(nth);
                        let null = std::ptr::null_mut();
                        let splits = SplitsAt {
                            input: of.splits[nth].address() as *const u8,
                            output: null,
                            offsets: null,
                            dtype: DType::I64,
                        };
                        let rows =
                            SplitRows { dtype: DType::U8, row: 1, length: most, capacity: ROOM };
                        let (send, receive) =
                            (matrices[nth].sends(rank), matrices[nth].receives(rank));
                        if by_device {
                            // SAFETY: the blocks are longer, and nothing but this stream uses them; there is a split
                            // for every rank.
                            unsafe {
                                comm.all_to_all_v_splits_at(to, from, &rows, &splits, &of.stream)
                            }
                        } else {
                            // SAFETY: the blocks are longer, and nothing but this stream uses them.
                            unsafe {
                                comm.all_to_all_v_at(
                                    to,
                                    from,
                                    &receive,
                                    &send,
                                    DType::U8,
                                    &of.stream,
                                )
                            }
                        }
                    },
                )?;
            }
        }
        Ok(())
    }

    /// Calls with parts of `count` elements, which copy engines carry: copies must wait until the consumer has read.
    fn equal(&mut self, count: usize, in_graphs: bool, seed: u64) -> Result<()> {
        let (rank, part) = (self.pool.rank() as usize, 2 * count);
        let inputs = self.inputs(count * self.pool.world() as usize, seed)?;
        let wanted = inputs.each_ref().map(|all| {
            let own = all.iter().flat_map(|data| &data[rank * part..(rank + 1) * part]);
            own.copied().collect::<Vec<_>>()
        });
        for all_to_all in AllToAllAlgorithm::ALL {
            let comm = CommunicatorOptions { all_to_all, ..Default::default() };
            let comm = Communicator::with_options(self.pool, &comm)?;
            let how = if in_graphs { ", in graphs" } else { "" };
            let what = format!("all_to_all {} of equal parts of {count}{how}", all_to_all.name());
            let wanted = wanted.each_ref().map(|all| &all[..]);
            let call = |of: &Self, nth: usize| {
                let (to, from) = of.places(nth);
                // SAFETY: the blocks are longer, and nothing but this stream uses them.
                unsafe { comm.all_to_all_at(to, from, count, DType::Bf16, &of.stream) }
            };
            if !in_graphs {
                self.consume(&what, &comm, SHORT, wanted, call)?;
                continue;
            }
            let capture = |nth| CallGraph::capture(self.pool, self.stream, || call(self, nth));
            let graphs = [capture(0)?, capture(1)?];
            self.consume(&what, &comm, SHORT, wanted, |of, nth| {
                graphs[nth].launch(of.pool, of.stream)
            })?;
            graphs.into_iter().try_for_each(|graph| graph.destroy(self.pool))?;
        }
        Ok(())
    }
}
