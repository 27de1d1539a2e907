//! Checks that every algorithm gives the same bits, on every rank, in every one of a thousand calls (rule S7).

use symmpool_allocator::{Deadline, Pool, Result};
use symmpool_collectives::{
    AllReduceAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp,
};

use crate::Options;
use crate::cuda::{download, stream, upload};
use crate::oracle::{finite, reduce};
use crate::tools::Tools;

/// How many calls are made where each rank has a device of its own.
const REPEATS: u64 = 1000;
/// Elements of a call: some KiB, and enough for copy engines.
const COUNTS: [usize; 2] = [5003, 300_007];
const POISON: u8 = 0xa5;

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let most = 4 * COUNTS[1];
    let (from, to) = (pool.alloc::<u8>(most)?, pool.alloc::<u8>(most)?);
    let first = pool.alloc::<u8>(most)?;
    pool.commit()?;
    let (tools, stream) = (Tools::new(pool)?, stream(pool)?);
    let repeats = options.seldom(REPEATS, 30);
    let (mut cases, mut wrong) = (0, 0);
    for (nth, dtype) in [DType::F32, DType::Bf16].into_iter().enumerate() {
        for count in COUNTS {
            let bytes = count * dtype.size();
            let all: Vec<Vec<u8>> =
                (0..pool.world()).map(|rank| finite(options.seed, rank, dtype, count)).collect();
            let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
            upload(pool, from.address(), all[pool.rank() as usize])?;
            upload(pool, first.address(), &reduce(&all, dtype, ReduceOp::Sum))?;
            for algorithm in AllReduceAlgorithm::ALL {
                let comm = CommunicatorOptions { algorithm, ..Default::default() };
                let comm = Communicator::with_options(pool, &comm)?;
                let call = || {
                    let (to, from) = (to.address() as *mut u8, from.address() as *const u8);
                    // SAFETY: both blocks are as long, and nothing else uses them.
                    unsafe { comm.all_reduce_at(to, from, count, dtype, ReduceOp::Sum, &stream) }
                };
                match call() {
                    // A call that an algorithm does not support is refused by all ranks alike.
                    Err(error) if error.is_unsupported() => continue,
                    other => other?,
                }
                for repeat in 0..repeats {
                    tools.fill(to.address(), POISON, bytes, &stream)?;
                    call()?;
                    tools.compare(to.address(), first.address(), bytes, repeat, &stream)?;
                }
                comm.synchronize(&stream)?;
                let (differ, repeat) = tools.take()?;
                let mine = blake3::hash(&download(pool, to.address(), bytes)?);
                let name = format!("repeats/{nth}/{count}/{}", algorithm.name());
                let all = pool.group().all_gather(&name, mine.as_bytes(), Deadline::seconds(60))?;
                let alike = all.parts().all(|part| part == mine.as_bytes());
                cases += repeats;
                if differ > 0 || !alike {
                    wrong += 1;
                    println!(
                        "rank {}: {} of {count} {}: {differ} bytes other than the CPU's in {repeats} \
                         repeats, first in {repeat:?}; ranks have the same bits: {alike}",
                        pool.rank(),
                        algorithm.name(),
                        dtype.name(),
                    );
                }
            }
        }
    }
    if pool.rank() == 0 {
        println!("repeats: {cases} calls, {wrong} of their kinds wrong");
    }
    Ok((cases, wrong))
}
