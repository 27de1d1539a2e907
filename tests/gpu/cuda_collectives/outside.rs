//! Checks calls in which ranks disagree on what is moved: nothing is written outside the memory that a rank named as
//! its output (S6). It tries all algorithms whose kernels write into peers' outputs directly, and reduce-scatters.

use std::time::Duration;

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    AllReduceAlgorithm, AllToAllAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp,
    Request, SplitRows, SplitsAt, StandardCollective,
};

use crate::cuda::{download, stream, upload};
use crate::expect_error;

const POISON: u8 = 0xa5;
/// Elements of a part, of one byte or of four.
const COUNT: usize = 3000;
/// Elements of an all-reduce; one rank may have half as many.
const WHOLE: usize = 40_000;
const WAYS: [OutsideCall; 8] = [
    OutsideCall::ToAll,
    OutsideCall::Splits,
    OutsideCall::Gather,
    OutsideCall::Broadcast,
    OutsideCall::Push,
    OutsideCall::Pull,
    OutsideCall::Scatter("direct"),
    OutsideCall::Scatter("copy"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OutsideCall {
    ToAll,
    Splits,
    Gather,
    Broadcast,
    Push,
    Pull,
    Scatter(&'static str),
}

/// Difference of one rank's call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Odd {
    /// Its elements are longer, or there are more.
    Longer,
    Shorter,
    /// Its output is at another offset, which matters where ranks assume the same offset on all.
    Elsewhere,
}

struct Outside<'a> {
    pool: &'a Pool,
    stream: Stream,
    from: Block<u8>,
    to: Block<u8>,
    elsewhere: Block<u8>,
    splits: Block<i64>,
}

/// Runs the checks. Returns how many of them were wrong.
pub(crate) fn run(pool: &Pool, timeout: Duration) -> Result<u32> {
    let room = 8 * (WHOLE + COUNT * pool.world() as usize);
    let outside = Outside {
        pool,
        stream: stream(pool)?,
        from: pool.alloc(room)?,
        to: pool.alloc(room)?,
        elsewhere: pool.alloc(room)?,
        splits: pool.alloc(pool.world() as usize)?,
    };
    pool.commit()?;
    let splits = (COUNT as u64).to_le_bytes().repeat(pool.world() as usize);
    upload(pool, outside.splits.address(), &splits)?;
    upload(pool, outside.from.address(), &vec![0; room])?;
    let meeting = Communicator::new(pool)?;
    let meet =
        || meeting.barrier(&outside.stream).and_then(|()| meeting.synchronize(&outside.stream));
    let mut wrong = 0;
    for way in WAYS {
        for odd in [Odd::Longer, Odd::Shorter, Odd::Elsewhere] {
            if odd == Odd::Elsewhere && !matches!(way, OutsideCall::Push | OutsideCall::Pull) {
                continue;
            }
            for block in [&outside.to, &outside.elsewhere] {
                upload(pool, block.address(), &vec![POISON; room])?;
            }
            let comm = Communicator::with_options(pool, &way.options(timeout))?;
            // Compiles kernels before anything is timed.
            comm.set_timeout(20 * timeout)?;
            meet()?;
            let result =
                outside.call(&comm, way, odd).and_then(|()| comm.synchronize(&outside.stream));
            let error = expect_error(result, "a call in which ranks differ")?;
            meet()?;
            let (mut touched, named) = (0, outside.named(way, odd));
            for block in [&outside.to, &outside.elsewhere] {
                let behind = if block.address() == named.0 { named.1 } else { 0 };
                let rest = download(pool, block.address() + behind as u64, room - behind)?;
                touched += rest.iter().filter(|byte| **byte != POISON).count();
            }
            if touched > 0 || !error.is_diverged() {
                wrong += 1;
                println!(
                    "rank {}: {way:?} {odd:?}: {touched} bytes outside its output: {error}",
                    pool.rank()
                );
            }
            meet()?;
        }
    }
    Ok(wrong)
}

impl OutsideCall {
    fn options(self, timeout: Duration) -> CommunicatorOptions {
        let algorithm = match self {
            Self::Push => AllReduceAlgorithm::TwoShotPush,
            Self::Pull => AllReduceAlgorithm::TwoShotPull,
            _ => AllReduceAlgorithm::Auto,
        };
        let all_to_all = AllToAllAlgorithm::Direct;
        CommunicatorOptions { algorithm, all_to_all, timeout, ..Default::default() }
    }
}

impl Outside<'_> {
    /// Whether this rank has twice as many elements, or longer ones.
    fn is_long(&self, odd: Odd) -> bool {
        (self.pool.rank() == self.pool.world() - 1) == (odd == Odd::Longer)
    }

    /// Output that this rank names: its address, and its length in bytes.
    fn named(&self, way: OutsideCall, odd: Odd) -> (u64, usize) {
        let last = self.pool.rank() == self.pool.world() - 1;
        let (at, all) = match odd {
            Odd::Elsewhere if last => (&self.elsewhere, true),
            Odd::Elsewhere => (&self.to, true),
            _ => (&self.to, self.is_long(odd)),
        };
        let bytes = match way {
            OutsideCall::Push | OutsideCall::Pull => 2 * if all { WHOLE } else { WHOLE / 2 },
            OutsideCall::Broadcast | OutsideCall::Scatter(_) => COUNT * if all { 4 } else { 1 },
            _ => COUNT * self.pool.world() as usize * if all { 4 } else { 1 },
        };
        (at.address(), bytes)
    }

    fn call(&self, comm: &Communicator, way: OutsideCall, odd: Odd) -> Result<()> {
        let world = self.pool.world() as usize;
        let (to, bytes) = self.named(way, odd);
        let (to, from, stream) = (to as *mut u8, self.from.address() as *const u8, &self.stream);
        let long = odd == Odd::Elsewhere || self.is_long(odd);
        let dtype = if long { DType::F32 } else { DType::U8 };
        match way {
            OutsideCall::ToAll => {
                let counts = vec![COUNT; world];
                // SAFETY: both blocks are longer, so they are below.
                unsafe { comm.all_to_all_v_at(to, from, &counts, &counts, dtype, stream) }
            }
            OutsideCall::Splits => {
                let null = std::ptr::null_mut();
                let (length, capacity) = (COUNT * world, COUNT * world);
                let rows = SplitRows { dtype, row: 1, length, capacity };
                let input = self.splits.address() as *const u8;
                let splits = SplitsAt { input, output: null, offsets: null, dtype: DType::I64 };
                // SAFETY: both blocks are longer than the rows; there is a split for every rank.
                unsafe { comm.all_to_all_v_splits_at(to, from, &rows, &splits, stream) }
            }
            // SAFETY: both blocks are longer than what is moved.
            OutsideCall::Gather => unsafe { comm.all_gather_at(to, from, COUNT, dtype, stream) },
            OutsideCall::Broadcast => {
                // The root is the rank that differs.
                let root = self.pool.world() - 1;
                // SAFETY: both blocks are longer than what is moved.
                unsafe { comm.broadcast_at(to, COUNT, dtype, root, stream) }
            }
            OutsideCall::Scatter(name) => {
                let (collective, op) = (StandardCollective::ReduceScatter, ReduceOp::Max);
                // SAFETY: both blocks are longer than what is moved.
                unsafe {
                    comm.call(
                        &Request::at(collective, to, from, COUNT, dtype).op(op).algorithm(name),
                        stream,
                    )
                }
            }
            OutsideCall::Push | OutsideCall::Pull => {
                // SAFETY: both blocks are longer than what is moved.
                unsafe {
                    comm.all_reduce_at(to, from, bytes / 2, DType::Bf16, ReduceOp::Sum, stream)
                }
            }
        }
    }
}
