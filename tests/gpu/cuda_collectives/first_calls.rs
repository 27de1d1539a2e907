//! Checks first calls: two communicators, each on a stream, make calls in another order on every other rank, with
//! kernels that this process has not used yet. If code were loaded between two such calls, that might wait for the
//! first call to end, which waits for another rank that waits in the same way.

use std::time::Duration;

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    Communicator, CommunicatorOptions, DType, ReduceOp, SplitRows, SplitsAt,
};

use crate::Options;
use crate::cuda::{download, stream, upload};

/// The timeout of communicators: ranks that wait for each other fail after it.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes of a buffer.
const ROOM: usize = 4 << 20;
/// The bytes of all buffers: a small number in any of these types.
const FILL: u8 = 0x21;

/// Pairs of calls that use other kernels than all others.
const PAIRS: [[SizedCall; 2]; 5] = [
    [SizedCall::Reduce(DType::Bf16, 1 << 10), SizedCall::ToAll(1 << 10)],
    [SizedCall::Scatter(DType::F16, 1 << 10), SizedCall::Gather(1 << 10)],
    [SizedCall::Reduce(DType::F32, 256 << 10), SizedCall::Splits],
    [SizedCall::Barrier, SizedCall::Broadcast(1 << 10)],
    [SizedCall::Reduce(DType::F16, 8 << 10), SizedCall::Gather(512 << 10)],
];

/// A call with so many bytes on every rank.
#[derive(Clone, Copy, Debug)]
enum SizedCall {
    Reduce(DType, usize),
    Scatter(DType, usize),
    Gather(usize),
    Broadcast(usize),
    ToAll(usize),
    Splits,
    Barrier,
}

struct CommunicatorStream {
    comm: Communicator,
    stream: Stream,
    from: Block<u8>,
    to: Block<u8>,
    splits: Block<i64>,
}

/// Runs the checks. Returns how many cases there were, and how many of them were wrong. To be run before anything else.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let usual =
        CommunicatorOptions { timeout: TIMEOUT, concurrent: None, ..options.communicator() };
    let lanes = [CommunicatorStream::new(pool, &usual)?, CommunicatorStream::new(pool, &usual)?];
    let mut wrong = 0;
    for calls in PAIRS {
        let mut order = [0, 1];
        if pool.rank() % 2 == 1 {
            order.reverse();
        }
        let begun: Vec<Result<()>> =
            order.into_iter().map(|nth| lanes[nth].call(pool, calls[nth])).collect();
        let ended = lanes.iter().map(|lane| lane.comm.synchronize(&lane.stream));
        for error in begun.into_iter().chain(ended).filter_map(Result::err) {
            wrong += 1;
            println!("rank {}: first calls {calls:?}: {error}", pool.rank());
        }
        if wrong > 0 {
            break;
        }
        for (lane, call) in lanes.iter().zip(calls) {
            // Sums are compared by other checks.
            let reduced = matches!(call, SizedCall::Reduce(..) | SizedCall::Scatter(..));
            let some = download(pool, lane.to.address(), 64)?;
            if !matches!(call, SizedCall::Barrier)
                && !reduced
                && some.iter().any(|byte| *byte != FILL)
            {
                wrong += 1;
                println!("rank {}: first call {call:?} left {some:?}", pool.rank());
            }
        }
    }
    Ok((2 * PAIRS.len() as u64, wrong))
}

impl CommunicatorStream {
    fn new(pool: &Pool, options: &CommunicatorOptions) -> Result<Self> {
        let lane = Self {
            comm: Communicator::with_options(pool, options)?,
            stream: stream(pool)?,
            from: pool.alloc(ROOM)?,
            to: pool.alloc(ROOM)?,
            splits: pool.alloc(pool.world() as usize)?,
        };
        pool.commit()?;
        upload(pool, lane.from.address(), &vec![FILL; ROOM])?;
        let each = (1_u64 << 10).to_le_bytes();
        upload(pool, lane.splits.address(), &each.repeat(pool.world() as usize))?;
        Ok(lane)
    }

    fn call(&self, pool: &Pool, call: SizedCall) -> Result<()> {
        let Self { comm, stream, from, to, splits } = self;
        let world = pool.world() as usize;
        let (to, from) = (to.address() as *mut u8, from.address() as *const u8);
        let (bytes, sum) = (DType::U8, ReduceOp::Sum);
        match call {
            // SAFETY: both blocks have room for any of these calls, and nothing else uses them; so it is below.
            SizedCall::Reduce(dtype, length) => unsafe {
                comm.all_reduce_at(to, from, length / dtype.size(), dtype, sum, stream)
            },
            // SAFETY: both blocks have room for any of these calls, and nothing else uses them.
            SizedCall::Scatter(dtype, length) => unsafe {
                comm.reduce_scatter_at(to, from, length / dtype.size(), dtype, sum, stream)
            },
            // SAFETY: both blocks have room for any of these calls, and nothing else uses them.
            SizedCall::Gather(length) => unsafe {
                comm.all_gather_at(to, from, length, bytes, stream)
            },
            SizedCall::Broadcast(length) => {
                upload(pool, to as u64, &vec![FILL; length])?;
                // SAFETY: both blocks have room for any of these calls, and nothing else uses them.
                unsafe { comm.broadcast_at(to, length, bytes, 0, stream) }
            }
            // SAFETY: both blocks have room for any of these calls, and nothing else uses them.
            SizedCall::ToAll(length) => unsafe {
                comm.all_to_all_at(to, from, length / world, bytes, stream)
            },
            SizedCall::Splits => {
                let null = std::ptr::null_mut();
                let (length, capacity) = (ROOM, ROOM);
                let rows = SplitRows { dtype: bytes, row: 1, length, capacity };
                let input = splits.address() as *const u8;
                let splits = SplitsAt { input, output: null, offsets: null, dtype: DType::I64 };
                // SAFETY: both blocks have room for the rows, and nothing else uses them; there is a split for every
                // rank.
                unsafe { comm.all_to_all_v_splits_at(to, from, &rows, &splits, stream) }
            }
            SizedCall::Barrier => comm.barrier(stream),
        }
    }
}
