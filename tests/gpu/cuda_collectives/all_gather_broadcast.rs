//! Checks all-gathers and broadcasts: every algorithm, any alignment, kinds of memory that differ from
//! rank to rank, in place, eager and in graphs.

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    AllToAllAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp, Request,
    StandardCollective,
};

use crate::cuda::{CallGraph, download, stream, upload};
use crate::matrix::bytes;
use crate::oracle::random;
use crate::{ORDINARY, Options};

const POISON: u8 = 0x5a;
/// Bytes behind the output that must not change.
const AROUND: usize = 64;
/// Elements that a rank sends to each other rank.
const COUNTS: [usize; 8] = [0, 1, 1000, 65_539, 300_000, (1 << 20) + 1, UNEVEN, 3 << 20];
const QUICK: [usize; 3] = [1000, 300_000, UNEVEN];
/// So many bytes, through 1 MiB of scratch of two ranks, take fewer rounds in the last stages than in the first.
const UNEVEN: usize = (2 << 20) + 1792;
const DTYPES: [DType; 3] = [DType::U8, DType::Bf16, DType::I64];
/// Room for the longest data of one rank.
const ROOM: usize = 24 << 20;

struct Check<'a> {
    pool: &'a Pool,
    stream: Stream,
    seed: u64,
    wrong: u64,
    cases: u64,
}

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let ordinary = pool.lane(ORDINARY)?;
    let room = (pool.world() as usize) * ROOM + 2 * AROUND;
    // Indexed by whether it is a window.
    let pair = || Ok([ordinary.alloc::<u8>(room)?, pool.alloc::<u8>(room)?]);
    let (inputs, outputs): ([Block<u8>; 2], [Block<u8>; 2]) = (pair()?, pair()?);
    pool.commit()?;
    let mut check = Check { pool, stream: stream(pool)?, seed: options.seed, wrong: 0, cases: 0 };
    for all_to_all in AllToAllAlgorithm::ALL {
        // Little scratch, so that data passes through it in many rounds; and the usual scratch.
        for scratch in [Some(1 << 20), None] {
            let communicator = CommunicatorOptions {
                all_to_all,
                device_scratch_bytes: scratch,
                ..options.communicator()
            };
            let comm = Communicator::with_options(pool, &communicator)?;
            let mut nth = 0;
            for count in COUNTS {
                for dtype in DTYPES {
                    nth += 1;
                    if options.quick && (dtype != DType::U8 || !QUICK.contains(&count)) {
                        continue;
                    }
                    let number = random(0x5b ^ ((all_to_all as u64) << 32), nth);
                    // Copy engines need windows at one offset; otherwise each rank has another kind of memory.
                    let alike = all_to_all == AllToAllAlgorithm::Copy || count == 3 << 20;
                    let own = if alike { number } else { random(number, u64::from(pool.rank())) };
                    let shift = |by: u32| (own >> by) as usize % 4 * dtype.size();
                    let mut from = inputs[own as usize & 1].address() + shift(8) as u64;
                    let mut to = outputs[own as usize >> 1 & 1].address() + shift(16) as u64;
                    let mut in_place = number >> 24 & 1 == 1;
                    if count == UNEVEN {
                        // Data passes through scratch into outputs that are no windows, and the own part is copied.
                        (from, to, in_place) = (inputs[0].address(), outputs[0].address(), false);
                    }
                    let what = format!("{} of {count} {}", all_to_all.name(), dtype.name());
                    check.all_gather(&comm, (from, to), (count, dtype), in_place, &what)?;
                    let root = (number >> 32) as u32 % pool.world();
                    check.broadcast(&comm, to, (count, dtype), root, (None, &what))?;
                    if all_to_all == AllToAllAlgorithm::Auto && pool.world() > 1 {
                        let pipeline = (Some("pipeline"), "pipeline, as requested");
                        check.broadcast(&comm, to, (count, dtype), root, pipeline)?;
                    }
                }
            }
        }
    }
    if pool.rank() == 0 {
        println!("all_gather and broadcast: {} cases, {} wrong", check.cases, check.wrong);
    }
    Ok((check.cases, check.wrong))
}

impl Check<'_> {
    fn all_gather(
        &mut self,
        comm: &Communicator,
        (from, to): (u64, u64),
        (count, dtype): (usize, DType),
        in_place: bool,
        what: &str,
    ) -> Result<()> {
        let (rank, world) = (self.pool.rank() as usize, self.pool.world());
        let part = count * dtype.size();
        let from = if in_place { to + (rank * part) as u64 } else { from };
        self.twice(
            comm,
            &format!("all_gather by {what}"),
            to,
            part * world as usize,
            |stream| {
                // SAFETY: both ranges lie in blocks with room for them, which nothing else uses.
                unsafe {
                    comm.all_gather_at(to as *mut u8, from as *const u8, count, dtype, stream)
                }
            },
            |pool, seed| {
                let data: Vec<Vec<u8>> = (0..world).map(|rank| bytes(seed, rank, part)).collect();
                upload(pool, from, &data[rank])?;
                Ok(data.concat())
            },
        )
    }

    fn broadcast(
        &mut self,
        comm: &Communicator,
        at: u64,
        (count, dtype): (usize, DType),
        root: u32,
        (algorithm, what): (Option<&str>, &str),
    ) -> Result<()> {
        let length = count * dtype.size();
        let what = format!("broadcast of {count} {} by {what} from {root}", dtype.name());
        let (collective, op) = (StandardCollective::Broadcast, ReduceOp::Sum);
        self.twice(
            comm,
            &what,
            at,
            length,
            |stream| {
                // SAFETY: the range lies in a block with room for it, which nothing else uses.
                unsafe {
                    let (to, from) = (at as *mut u8, at as *const u8);
                    comm.call(
                        &Request::at(collective, to, from, count, dtype)
                            .op(op)
                            .root(root)
                            .algorithm(algorithm),
                        stream,
                    )
                }
            },
            |pool, seed| {
                let data = bytes(seed, root, length);
                if pool.rank() == root {
                    upload(pool, at, &data)?;
                }
                Ok(data)
            },
        )
    }

    /// Makes a call, eagerly and then twice in a graph, with other data each time. `prepare` writes the input and
    /// returns the expected output.
    fn twice(
        &mut self,
        comm: &Communicator,
        what: &str,
        to: u64,
        length: usize,
        call: impl Fn(&Stream) -> Result<()>,
        prepare: impl Fn(&Pool, u64) -> Result<Vec<u8>>,
    ) -> Result<()> {
        let (pool, stream) = (self.pool, self.stream);
        let graph = CallGraph::capture(pool, stream, || {
            call(&stream)?;
            call(&stream)
        })?;
        for round in 0..2 {
            upload(pool, to, &vec![POISON; length + AROUND])?;
            let mut wanted = prepare(pool, random(self.seed, self.cases))?;
            if round == 0 {
                call(&stream)?;
            } else {
                graph.launch(pool, stream)?;
            }
            comm.synchronize(&stream)?;
            wanted.resize(length + AROUND, POISON);
            let got = download(pool, to, length + AROUND)?;
            self.cases += 1;
            if got != wanted {
                self.wrong += 1;
                if self.wrong < 20 {
                    let at = got.iter().zip(&wanted).position(|(got, wanted)| got != wanted);
                    let how = ["eager", "in a graph"][round];
                    println!("rank {}: {what}, {how}: wrong from byte {at:?} on", pool.rank());
                }
            }
        }
        graph.destroy(pool)
    }
}
