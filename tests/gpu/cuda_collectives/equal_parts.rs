//! Checks all-to-alls of equal parts: every algorithm, any alignment and kind of memory, eager and in graphs,
//! and outputs at different offsets where copy engines need them at the same offset.

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{AllToAllAlgorithm, Communicator, CommunicatorOptions, DType};

use crate::cuda::{CallGraph, download, stream, upload};
use crate::matrix::bytes;
use crate::oracle::random;
use crate::{ORDINARY, Options, expect_error};

const POISON: u8 = 0x5a;
/// Bytes behind the output that must not change.
const AROUND: usize = 64;
/// Elements of a part.
const COUNTS: [usize; 7] = [0, 1, 7, 1000, 65_539, 300_000, 1 << 20];
const QUICK: [usize; 2] = [1000, 300_000];
const DTYPES: [DType; 3] = [DType::U8, DType::Bf16, DType::I64];

struct EqualPartsChecks<'a> {
    pool: &'a Pool,
    stream: Stream,
    seed: u64,
    wrong: u64,
    cases: u64,
}

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let ordinary = pool.lane(ORDINARY)?;
    let room = (pool.world() as usize) * (8 << 20) + 2 * AROUND;
    // Indexed by whether it is a window.
    let pair = || Ok([ordinary.alloc::<u8>(room)?, pool.alloc::<u8>(room)?]);
    let (inputs, outputs): ([Block<u8>; 2], [Block<u8>; 2]) = (pair()?, pair()?);
    pool.commit()?;
    let mut parts =
        EqualPartsChecks { pool, stream: stream(pool)?, seed: options.seed, wrong: 0, cases: 0 };
    for all_to_all in AllToAllAlgorithm::ALL {
        let communicator = CommunicatorOptions { all_to_all, ..options.communicator() };
        let comm = Communicator::with_options(pool, &communicator)?;
        let mut nth = 0;
        for count in COUNTS {
            for dtype in DTYPES {
                for kinds in 0..4 {
                    nth += 1;
                    if options.quick && (dtype != DType::U8 || !QUICK.contains(&count)) {
                        continue;
                    }
                    // The shift is equal on all ranks, and a multiple of an element's size only.
                    let shift = random(options_seed(all_to_all), nth) as usize % 4 * dtype.size();
                    let from = inputs[kinds & 1].address() + shift as u64;
                    let to = outputs[kinds >> 1].address() + shift as u64;
                    parts.case(&comm, (from, to), count, dtype, all_to_all)?;
                }
            }
        }
    }
    parts.other_places(options, &inputs[1], &outputs[1])?;
    if pool.rank() == 0 {
        println!("all_to_all of equal parts: {} cases, {} wrong", parts.cases, parts.wrong);
    }
    Ok((parts.cases, parts.wrong))
}

fn options_seed(algorithm: AllToAllAlgorithm) -> u64 {
    0x51 ^ ((algorithm as u64) << 32)
}

impl EqualPartsChecks<'_> {
    /// Checks one size, eagerly and then in a graph of two calls, with other data each time.
    fn case(
        &mut self,
        comm: &Communicator,
        (from, to): (u64, u64),
        count: usize,
        dtype: DType,
        algorithm: AllToAllAlgorithm,
    ) -> Result<()> {
        let (pool, stream) = (self.pool, self.stream);
        let (rank, world) = (pool.rank() as usize, pool.world());
        let part = count * dtype.size();
        let whole = part * world as usize;
        let call = || {
            // SAFETY: both ranges lie in blocks with room for them, which nothing else uses.
            unsafe { comm.all_to_all_at(to as *mut u8, from as *const u8, count, dtype, &stream) }
        };
        let graph = CallGraph::capture(pool, stream, || {
            call()?;
            call()
        })?;
        for round in 0..2 {
            let seed = random(self.seed, self.cases + round);
            let data: Vec<Vec<u8>> = (0..world).map(|rank| bytes(seed, rank, whole)).collect();
            upload(pool, from, &data[rank])?;
            upload(pool, to, &vec![POISON; whole + AROUND])?;
            if round == 0 {
                call()?;
            } else {
                graph.launch(pool, stream)?;
            }
            comm.synchronize(&stream)?;
            let mut wanted: Vec<u8> = data
                .iter()
                .flat_map(|data| &data[rank * part..(rank + 1) * part])
                .copied()
                .collect();
            wanted.resize(whole + AROUND, POISON);
            let got = download(pool, to, whole + AROUND)?;
            self.cases += 1;
            if got != wanted {
                self.wrong += 1;
                if self.wrong < 20 {
                    let at = got.iter().zip(&wanted).position(|(got, wanted)| got != wanted);
                    println!(
                        "rank {rank}: {}, {count} {} a part, {}: wrong from byte {at:?} on",
                        algorithm.name(),
                        dtype.name(),
                        ["eager", "in a graph"][round as usize]
                    );
                }
            }
        }
        graph.destroy(pool)
    }

    /// Copy engines write to the offset of this rank's own output: all ranks get an error if one has its output at
    /// another offset.
    fn other_places(
        &mut self,
        options: &Options,
        input: &Block<u8>,
        output: &Block<u8>,
    ) -> Result<()> {
        let all_to_all = AllToAllAlgorithm::Copy;
        let options = CommunicatorOptions { all_to_all, ..options.communicator() };
        let comm = Communicator::with_options(self.pool, &options)?;
        let elsewhere = if self.pool.rank() == 0 { 4096 } else { 0 };
        let (from, to) = (input.address(), output.address() + elsewhere);
        // SAFETY: both blocks have room, and nothing else uses them.
        let called = unsafe {
            comm.all_to_all_at(to as *mut u8, from as *const u8, 1 << 10, DType::U8, &self.stream)
        };
        let result = called.and_then(|()| comm.synchronize(&self.stream));
        let error = expect_error(result, "an all-to-all with outputs at different places")?;
        self.cases += 1;
        if !error.is_diverged() {
            self.wrong += 1;
            println!("rank {}: outputs at different places: {error}", self.pool.rank());
        }
        Ok(())
    }
}
