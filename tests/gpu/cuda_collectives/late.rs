//! Checks a rank that comes to a call after the others have given up: it gets an error at once, and writes
//! nothing into their memory, which may be used for something else by then (S5).

use std::fmt;
use std::time::{Duration, Instant};

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    AllReduceAlgorithm, AllToAllAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp,
    Request, StandardCollective,
};

use crate::cuda::{download, stream, upload};
use crate::expect_error;

/// The bytes of each rank's memory after it gave up, and the elements and bytes of a whole call.
const OTHER: u8 = 0x77;
const COUNT: usize = 1 << 20;
const BYTES: usize = 2 * COUNT;
const DTYPE: DType = DType::Bf16;
/// How long a slow rank takes.
const SLOW: Duration = Duration::from_millis(500);

/// A call that a rank is late for.
struct LateCall {
    collective: StandardCollective,
    /// The algorithm, where it is not the one that a communicator chooses by itself.
    algorithm: Option<&'static str>,
    /// Whether the communicator has the option `beside_compute`, with which these calls go in pieces.
    in_pieces: bool,
}

impl LateCall {
    const fn new(collective: StandardCollective, algorithm: Option<&'static str>) -> Self {
        Self { collective, algorithm, in_pieces: false }
    }

    const fn in_pieces(collective: StandardCollective, algorithm: &'static str) -> Self {
        Self { collective, algorithm: Some(algorithm), in_pieces: true }
    }
}

impl fmt::Display for LateCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let algorithm = self.algorithm.unwrap_or("auto");
        let pieces = if self.in_pieces { " in pieces" } else { "" };
        write!(f, "{} by {algorithm}{pieces}", self.collective.name())
    }
}

/// All calls whose kernels write into peers' outputs directly, reduce-scatters, and calls in pieces. Other copies of copy
/// engines cannot be cancelled.
const WAYS: [LateCall; 9] = [
    LateCall::new(StandardCollective::AllReduce, Some("two_shot_pull")),
    LateCall::new(StandardCollective::AllReduce, Some("two_shot_push")),
    LateCall::new(StandardCollective::AllGather, None),
    LateCall::new(StandardCollective::Broadcast, None),
    LateCall::new(StandardCollective::AllToAll, None),
    LateCall::new(StandardCollective::ReduceScatter, Some("direct")),
    LateCall::new(StandardCollective::ReduceScatter, Some("copy")),
    LateCall::in_pieces(StandardCollective::ReduceScatter, "copy"),
    LateCall::in_pieces(StandardCollective::AllReduce, "two_shot_copy"),
];

struct Late<'a> {
    pool: &'a Pool,
    stream: Stream,
    from: Block<u8>,
    to: Block<u8>,
}

/// Runs the checks. Returns how many of them were wrong.
pub(crate) fn run(pool: &Pool, timeout: Duration) -> Result<u32> {
    let (from, to) = (pool.alloc::<u8>(BYTES)?, pool.alloc::<u8>(BYTES)?);
    pool.commit()?;
    let late = Late { pool, stream: stream(pool)?, from, to };
    // The communicator with which ranks wait for each other between the steps.
    let meeting = Communicator::new(pool)?;
    let meet = || meeting.barrier(&late.stream).and_then(|()| meeting.synchronize(&late.stream));
    let odd = pool.world() - 1;
    let mut wrong = 0;
    for way in &WAYS {
        let (all_to_all, beside_compute) = (AllToAllAlgorithm::Direct, way.in_pieces);
        let options =
            CommunicatorOptions { all_to_all, timeout, beside_compute, ..Default::default() };
        let comm = Communicator::with_options(pool, &options)?;
        // Compiles kernels before anything is timed.
        comm.set_timeout(20 * timeout)?;
        late.call(&comm, way)?;
        comm.synchronize(&late.stream)?;
        comm.set_timeout(timeout)?;
        meet()?;
        if pool.rank() != odd {
            let called = late.call(&comm, way);
            let given_up = called.and_then(|()| comm.synchronize(&late.stream));
            let error = expect_error(given_up, "a call without a peer")?;
            wrong += u32::from(!error.is_timeout() || error.ranks() != [odd]);
            upload(pool, late.to.address(), &vec![OTHER; BYTES])?;
        }
        meet()?;
        if pool.rank() == odd {
            let began = Instant::now();
            let called = late.call(&comm, way);
            let result = called.and_then(|()| comm.synchronize(&late.stream));
            let error = expect_error(result, "a call that the others gave up")?;
            let took = began.elapsed();
            let at_once = error.to_string().contains("reported to rank") && took < timeout / 2;
            if !at_once || !error.is_timeout() || error.ranks() != [odd] {
                wrong += 1;
                println!("rank {odd}: late for {way}, after {took:?}: {error}");
            }
        }
        meet()?;
        let touched = download(pool, late.to.address(), BYTES)?;
        if pool.rank() != odd && touched.iter().any(|byte| *byte != OTHER) {
            wrong += 1;
            println!("rank {}: a late {way} wrote into memory of a rank that gave up", pool.rank());
        }
        meet()?;
    }
    Ok(wrong + late.slow_at_the_last_numbers(&meet)?)
}

impl Late<'_> {
    /// A rank that is slow, but comes, is waited for, also in calls with the largest call numbers, whatever
    /// fresh memory holds.
    fn slow_at_the_last_numbers(&self, meet: &dyn Fn() -> Result<()>) -> Result<u32> {
        let mut wrong = 0;
        for first_epoch in [u32::MAX - 1, u32::MAX] {
            for algorithm in [AllReduceAlgorithm::OneShotLl, AllReduceAlgorithm::TwoShotCopy] {
                let options = CommunicatorOptions { algorithm, first_epoch, ..Default::default() };
                let comm = Communicator::with_options(self.pool, &options)?;
                meet()?;
                if self.pool.rank() == self.pool.world() - 1 {
                    std::thread::sleep(SLOW);
                }
                let whole = algorithm.checked().is_some_and(|checked| checked.cases.by_copies);
                let count = if whole { COUNT } else { 1000 };
                let (to, from) = (self.to.address() as *mut u8, self.from.address() as *const u8);
                for _ in 0..3 {
                    // SAFETY: both blocks hold `COUNT` elements.
                    let called = unsafe {
                        comm.all_reduce_at(to, from, count, DTYPE, ReduceOp::Sum, &self.stream)
                    };
                    if let Err(error) = called.and_then(|()| comm.synchronize(&self.stream)) {
                        wrong += 1;
                        println!(
                            "rank {}: {} from call {first_epoch} on: {error}",
                            self.pool.rank(),
                            algorithm.name()
                        );
                    }
                }
                meet()?;
            }
        }
        Ok(wrong)
    }

    fn call(&self, comm: &Communicator, way: &LateCall) -> Result<()> {
        let (to, from) = (self.to.address() as *mut u8, self.from.address() as *const u8);
        let (world, op, root) = (self.pool.world(), ReduceOp::Sum, self.pool.world() - 1);
        let count = match way.collective {
            StandardCollective::AllReduce | StandardCollective::Broadcast => COUNT,
            _ => COUNT / world as usize,
        };
        let (collective, algorithm, stream) = (way.collective, way.algorithm, &self.stream);
        // SAFETY: both blocks hold `COUNT` elements, which is what all ranks' parts are together.
        unsafe {
            comm.call(
                &Request::at(collective, to, from, count, DTYPE)
                    .op(op)
                    .root(root)
                    .algorithm(algorithm),
                stream,
            )
        }
    }
}
