//! Many calls back to back: all-reduces of random sizes and algorithms, and all-to-alls with other
//! splits in every call, which lie in the device's memory; now and then what came is checked.

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    AllReduceAlgorithm, AllToAllAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp,
    SplitRows, SplitsAt,
};

use crate::Options;
use crate::cuda::{download, stream, upload};
use crate::matrix::{Matrix, bytes};
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
        .enumerate()
        .map(|(nth, algorithm)| {
            let options = CommunicatorOptions {
                algorithm,
                all_to_all: AllToAllAlgorithm::ALL[nth % AllToAllAlgorithm::ALL.len()],
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
    let mut exchanges = Exchanges::new(pool, options.seed)?;
    let mut wrong = 0;
    let began = std::time::Instant::now();
    for call in 0..options.calls {
        let number = random(options.seed, call);
        // Mostly small.
        let count = 1 + (number >> 8) as usize % (MOST >> (number >> 60));
        // Runs of calls on one communicator, and changes between them.
        let which = (random(options.seed, call / 50) >> 3) as usize % comms.len();
        let (algorithm, comm) = &comms[which];
        if number >> 20 & 3 == 0 {
            let checked = number.is_multiple_of(499);
            wrong += u64::from(!exchanges.call(pool, comm, number, checked, &stream)?);
            continue;
        }
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

/// Matrices that splits are taken from, and bytes that a rank sends at most.
const MATRICES: u64 = 64;
const SENT: usize = 1 << 20;

/// All-to-alls whose splits are in the device's memory already, so that no call waits for the host.
struct Exchanges {
    matrices: Vec<Matrix>,
    data: Vec<Vec<u8>>,
    splits: Block<i64>,
    input: Block<u8>,
    output: Block<u8>,
}

impl Exchanges {
    fn new(pool: &Pool, seed: u64) -> Result<Self> {
        let (rank, world) = (pool.rank(), pool.world());
        let matrices: Vec<Matrix> =
            (0..MATRICES).map(|nth| Matrix::random(random(seed ^ 3, nth), world, SENT)).collect();
        let splits = pool.alloc::<i64>(MATRICES as usize * world as usize)?;
        let (input, output) = (pool.alloc::<u8>(SENT)?, pool.alloc::<u8>(SENT)?);
        pool.commit()?;
        let data: Vec<Vec<u8>> = (0..world).map(|rank| bytes(seed, rank, SENT)).collect();
        let all: Vec<u8> = matrices
            .iter()
            .flat_map(|matrix| matrix.sends(rank))
            .flat_map(|count| (count as u64).to_le_bytes())
            .collect();
        upload(pool, splits.address(), &all)?;
        upload(pool, input.address(), &data[rank as usize])?;
        Ok(Self { matrices, data, splits, input, output })
    }

    /// Whether what came is right, if it is looked at.
    fn call(
        &mut self,
        pool: &Pool,
        comm: &Communicator,
        number: u64,
        checked: bool,
        stream: &Stream,
    ) -> Result<bool> {
        let (rank, world) = (pool.rank(), pool.world() as usize);
        let nth = (number >> 24) as usize % self.matrices.len();
        let matrix = &self.matrices[nth];
        let (to, from) = (self.output.as_ptr().cast::<u8>(), self.input.as_ptr() as *const u8);
        let rows = SplitRows { dtype: DType::U8, row: 1, length: SENT, capacity: SENT };
        let null = std::ptr::null_mut();
        let input = self.splits.as_ptr().wrapping_add(nth * world) as *const u8;
        let splits = SplitsAt { input, output: null, offsets: null, dtype: DType::I64 };
        if number >> 40 & 1 == 0 {
            // SAFETY: both blocks have room for all of a matrix, and there is a split for each rank.
            unsafe { comm.all_to_all_v_splits_at(to, from, &rows, &splits, stream) }?;
        } else {
            let (send, receive) = (matrix.sends(rank), matrix.receives(rank));
            // SAFETY: as above.
            unsafe { comm.all_to_all_v_at(to, from, &receive, &send, DType::U8, stream) }?;
        }
        if !checked {
            return Ok(true);
        }
        comm.synchronize(stream)?;
        let wanted = matrix.output(&self.data, rank, 1, SENT);
        let got = download(pool, self.output.address(), wanted.len())?;
        let right = got == wanted;
        if !right {
            let at = got.iter().zip(&wanted).position(|(got, wanted)| got != wanted);
            println!(
                "rank {rank}: an all_to_all by matrix {nth} ({}) is wrong from {at:?} on",
                matrix.name
            );
        }
        Ok(right)
    }
}
