//! Many calls back to back: random sizes, operations and algorithms; now and then all is checked.

use symmpool_allocator::{Pool, Result};
use symmpool_collectives::{
    AllReduceAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp,
};

use crate::Options;
use crate::cuda::{download, stream, upload};
use crate::oracle::{differs, input, random, reduce};

/// Elements of the longest call.
const MOST: usize = 300_000;
/// More of them in calls that copy engines carry.
const COPIED: usize = 600_000;

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<bool> {
    let all = MOST + COPIED;
    let (from, to) = (pool.alloc::<u8>(2 * all)?, pool.alloc::<u8>(2 * all)?);
    pool.commit()?;
    let stream = stream(pool)?;
    // Of those that devices have.
    let names = AllReduceAlgorithm::ALL.into_iter().filter(|a| *a != AllReduceAlgorithm::CubeMesh);
    let comms: Vec<(AllReduceAlgorithm, Communicator)> = names
        .map(|algorithm| {
            let options = CommunicatorOptions {
                algorithm,
                device_scratch_bytes: 4 << 20,
                ..Default::default()
            };
            Ok((algorithm, Communicator::with_options(pool, &options)?))
        })
        .collect::<Result<_>>()?;
    let all: Vec<Vec<u8>> =
        (0..pool.world()).map(|rank| input(options.seed, rank, DType::Bf16, all)).collect();
    let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
    upload(pool, from.address(), all[pool.rank() as usize])?;
    let wanted = reduce(&all, DType::Bf16, ReduceOp::Sum);
    let mut wrong = 0;
    let began = std::time::Instant::now();
    for call in 0..options.calls {
        let number = random(options.seed, call);
        // Mostly small.
        let count = 1 + (number >> 8) as usize % (MOST >> (number >> 60));
        // Runs of calls on one communicator, and changes between them.
        let which = (random(options.seed, call / 50) >> 3) as usize % comms.len();
        let (algorithm, comm) = &comms[which];
        // Copy engines carry nothing below 1 MiB.
        let count = count + if *algorithm == AllReduceAlgorithm::TwoShotCopy { COPIED } else { 0 };
        // SAFETY: both blocks have room for the longest call.
        unsafe {
            comm.all_reduce_at(
                to.address() as *mut u8,
                from.address() as *const u8,
                count,
                DType::Bf16,
                ReduceOp::Sum,
                &stream,
            )
        }?;
        if number.is_multiple_of(997) || call + 1 == options.calls {
            comm.synchronize(&stream)?;
            let got = download(pool, to.address(), 2 * count)?;
            if differs(&got, &wanted[..2 * count], DType::Bf16).is_some() {
                wrong += 1;
                println!("rank {}: call {call} of {count} is wrong", pool.rank());
            }
        }
    }
    for (_, comm) in &comms {
        comm.synchronize(&stream)?;
    }
    println!(
        "rank {}: {} calls in {:?}, {wrong} wrong",
        pool.rank(),
        options.calls,
        began.elapsed()
    );
    Ok(wrong == 0)
}
