//! Checks a rank that comes to a call after the others have given up: it gets an error at once, and writes
//! nothing into their memory, which may be used for something else by then (S5).

use std::time::{Duration, Instant};

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    AllReduceAlgorithm, AllToAllAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp,
    StandardCollective,
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

/// All calls whose kernels write into peers' outputs directly, reduce-scatters, and calls in pieces beside compute. Other
/// copies of copy engines cannot be cancelled.
const WAYS: [(&str, AllReduceAlgorithm); 9] = [
    ("two_shot_pull", AllReduceAlgorithm::TwoShotPull),
    ("two_shot_push", AllReduceAlgorithm::TwoShotPush),
    ("all_gather", AllReduceAlgorithm::Auto),
    ("broadcast", AllReduceAlgorithm::Auto),
    ("all_to_all", AllReduceAlgorithm::Auto),
    ("reduce_scatter by direct", AllReduceAlgorithm::Auto),
    ("reduce_scatter by copy", AllReduceAlgorithm::Auto),
    ("reduce_scatter by copy in pieces", AllReduceAlgorithm::Auto),
    ("two_shot_copy in pieces", AllReduceAlgorithm::TwoShotCopy),
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
    for (way, algorithm) in WAYS {
        let all_to_all = AllToAllAlgorithm::Direct;
        let beside_compute = way.ends_with("in pieces");
        let options = CommunicatorOptions {
            algorithm,
            all_to_all,
            timeout,
            beside_compute,
            ..Default::default()
        };
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
                let whole = algorithm == AllReduceAlgorithm::TwoShotCopy;
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

    fn call(&self, comm: &Communicator, way: &str) -> Result<()> {
        let (to, from) = (self.to.address() as *mut u8, self.from.address() as *const u8);
        let (world, stream) = (self.pool.world() as usize, &self.stream);
        let part = COUNT / world;
        match way {
            // SAFETY: both blocks hold `COUNT` elements, which is what all ranks' parts are together.
            "all_gather" => unsafe { comm.all_gather_at(to, from, part, DTYPE, stream) },
            // SAFETY: as above; so it is below.
            "all_to_all" => unsafe { comm.all_to_all_at(to, from, part, DTYPE, stream) },
            "broadcast" => {
                let root = self.pool.world() - 1;
                // SAFETY: as above.
                unsafe { comm.broadcast_at(to, COUNT, DTYPE, root, stream) }
            }
            _ if way.starts_with("reduce_scatter") => {
                let name = if way.contains("direct") { "direct" } else { "copy" };
                let (collective, op) = (StandardCollective::ReduceScatter, ReduceOp::Sum);
                // SAFETY: as above.
                unsafe {
                    comm.call_at(collective, Some(name), to, from, part, DTYPE, op, 0, stream)
                }
            }
            _ => {
                // SAFETY: as above.
                unsafe { comm.all_reduce_at(to, from, COUNT, DTYPE, ReduceOp::Sum, stream) }
            }
        }
    }
}
