//! Collectives on addresses: inside of blocks, in ordinary memory, and addresses that are refused.

mod pool_ranks;

use std::sync::Barrier;
use std::time::{Duration, Instant};

use pool_ranks::ranks;
use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::{Block, Driver, Error, Pool, Stream};
use symmpool_collectives::{
    AllReduceAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp,
};

const STREAM: &Stream = &Stream::DEFAULT;
/// The number of elements of every buffer.
const COUNT: usize = 60;
/// At which element of its block a buffer begins.
const SHIFT: usize = 7;

/// A buffer of the test, in a block or in ordinary memory.
enum Memory {
    Window(Block<i32>),
    Plain(Vec<i32>),
}

impl Memory {
    fn new(pool: &Pool, window: bool, values: &[i32]) -> Self {
        if !window {
            return Self::Plain(values.to_vec());
        }
        let block = pool.alloc(COUNT + SHIFT).unwrap();
        block.write(&[&[-1; SHIFT], values].concat()).unwrap();
        Self::Window(block)
    }

    fn address(&mut self) -> *mut u8 {
        match self {
            Self::Window(block) => block.as_ptr().wrapping_add(SHIFT).cast(),
            Self::Plain(values) => values.as_mut_ptr().cast(),
        }
    }

    fn values(&self) -> Vec<i32> {
        match self {
            Self::Window(block) => block.read().unwrap()[SHIFT..].to_vec(),
            Self::Plain(values) => values.clone(),
        }
    }
}

/// The output of every collective (or its buffer, in place) for the input `i * 10 + rank`.
#[allow(clippy::multiple_unsafe_ops_per_block)] // only one of them runs
fn results(pool: &Pool, comm: &Communicator, window: bool) -> Vec<Vec<i32>> {
    let me = comm.rank();
    let values: Vec<i32> = (0..COUNT as i32).map(|i| i * 10 + me as i32).collect();
    let (op, dtype, part) = (ReduceOp::Sum, DType::I32, COUNT / 3);
    let (send, receive) = ([me as usize + 1; 3], [1, 2, 3]);
    let call = |number| {
        let mut input = Memory::new(pool, window, &values);
        let mut output = Memory::new(pool, window, &[0; COUNT]);
        let (from, to) = (input.address(), output.address());
        // SAFETY: there are COUNT elements from both addresses on, which only this call accesses.
        let outcome = unsafe {
            match number {
                0 => comm.all_reduce_at(to, from, COUNT, dtype, op, STREAM),
                1 => comm.reduce_scatter_at(to, from, part, dtype, op, STREAM),
                2 => comm.all_gather_at(to, from, part, dtype, STREAM),
                3 => comm.all_to_all_at(to, from, part, dtype, STREAM),
                4 => comm.all_to_all_v_at(to, from, &receive, &send, dtype, STREAM),
                5 => comm.broadcast_at(from, COUNT, dtype, 1, STREAM),
                _ => comm.all_reduce_at(from, from, COUNT, dtype, op, STREAM),
            }
        };
        outcome.unwrap();
        if number < 5 { output.values() } else { input.values() }
    };
    (0..7).map(call).collect()
}

#[test]
fn addresses_give_what_blocks_and_slices_give() {
    ranks(3, |pool| {
        let comm = Communicator::new(pool).unwrap();
        let me = comm.rank() as usize;
        let of = |rank: usize, i: usize| (i * 10 + rank) as i32;
        let sum: Vec<i32> = (0..COUNT).map(|i| of(0, i) * 3 + 3).collect();
        let part = COUNT / 3;
        for window in [true, false] {
            let seen = results(pool, &comm, window);
            assert_eq!(seen[0], sum);
            assert_eq!(seen[1][..part], sum[me * part..][..part]);
            for rank in 0..3 {
                let their: Vec<i32> = (0..part).map(|i| of(rank, i)).collect();
                assert_eq!(seen[2][rank * part..][..part], their);
                let sent: Vec<i32> = (0..part).map(|i| of(rank, me * part + i)).collect();
                assert_eq!(seen[3][rank * part..][..part], sent);
                // Rank r sends r + 1 elements to each; they lie behind those of the ranks below.
                let at = rank * (rank + 1) / 2;
                let sent: Vec<i32> = (0..=rank).map(|i| of(rank, me * (rank + 1) + i)).collect();
                assert_eq!(seen[4][at..at + rank + 1], sent);
            }
            assert_eq!(seen[5], (0..COUNT).map(|i| of(1, i)).collect::<Vec<_>>());
            assert_eq!(seen[6], sum);
        }
    });
}

#[test]
fn a_peers_memory_is_refused_and_the_others_get_an_error() {
    ranks(2, |pool| {
        let comm = Communicator::new(pool).unwrap();
        let block = pool.alloc::<u8>(64).unwrap();
        pool.commit().unwrap();
        let own = block.as_ptr();
        let wrong = if comm.rank() == 0 { block.peer_ptr(1).unwrap() } else { own };
        // SAFETY: 64 bytes from either address on are a live window.
        let outcome =
            unsafe { comm.all_reduce_at(wrong, own, 64, DType::U8, ReduceOp::Max, STREAM) };
        let error = outcome.unwrap_err();
        assert!(if comm.rank() == 0 { error.is_invalid_argument() } else { error.is_diverged() });
        comm.barrier(STREAM).unwrap();
    });
}

#[test]
fn lengths_beyond_any_memory_are_refused() {
    ranks(2, |pool| {
        let comm = Communicator::new(pool).unwrap();
        let block = pool.alloc::<u8>(64).unwrap();
        for count in [usize::MAX, usize::MAX / 2, isize::MAX as usize] {
            let at = block.as_ptr();
            // SAFETY: refused before memory is accessed, which is what is tested.
            let outcome = unsafe { comm.all_gather_at(at, at, count, DType::F64, STREAM) };
            assert!(outcome.unwrap_err().is_invalid_argument());
        }
        comm.barrier(STREAM).unwrap();
    });
}

#[test]
fn lengths_beyond_the_pools_memory_are_refused() {
    ranks(2, |pool| {
        let comm = Communicator::new(pool).unwrap();
        let block = pool.alloc::<u8>(4096).unwrap();
        let stride = pool.layout().stride as usize;
        for count in [stride / 2, stride, 1 << 62] {
            let at = block.as_ptr();
            // SAFETY: refused before memory is accessed, which is what is tested.
            let outcome =
                unsafe { comm.all_reduce_at(at, at, count, DType::U8, ReduceOp::Max, STREAM) };
            let error = outcome.unwrap_err();
            assert!(error.is_invalid_argument(), "{error}");
            let (address, text) = (format!("{:#x}", block.address()), error.to_string());
            assert!(text.contains(&format!("{count} bytes")) && text.contains(&address), "{text}");
            assert!(text.contains(&format!("rank {}'s slot", comm.rank())), "{text}");
        }
        comm.barrier(STREAM).unwrap();
    });
}

#[test]
fn parts_that_together_reach_beyond_the_pools_memory_are_refused() {
    ranks(2, |pool| {
        let comm = Communicator::new(pool).unwrap();
        let block = pool.alloc::<u8>(4096).unwrap();
        let count = pool.layout().stride as usize / 8;
        let mut plain = [0_u8; 8];
        let (at, plain, dtype) = (block.as_ptr(), plain.as_mut_ptr(), DType::U8);
        // SAFETY: refused before memory is accessed, which is what is tested.
        let gathered = unsafe { comm.all_gather_at(at, plain, count, dtype, STREAM) };
        let max = ReduceOp::Max;
        // SAFETY: refused before memory is accessed, which is what is tested.
        let scattered = unsafe { comm.reduce_scatter_at(plain, at, count, dtype, max, STREAM) };
        // SAFETY: refused before memory is accessed, which is what is tested.
        let exchanged = unsafe { comm.all_to_all_at(plain, at, count, dtype, STREAM) };
        for outcome in [gathered, scattered, exchanged] {
            let error = outcome.unwrap_err();
            assert!(error.is_invalid_argument(), "{error}");
            assert!(error.to_string().contains(&format!("{} bytes", 2 * count)), "{error}");
        }
        comm.barrier(STREAM).unwrap();
    });
}

#[test]
fn memory_of_a_lane_that_is_not_shared_passes_through_scratch() {
    ranks(2, |pool| {
        let pool = Pool::builder(pool.group().child("lanes"))
            .driver(Driver::host().unwrap())
            .lane(LaneConfig::symmetric("default"))
            .lane(LaneConfig::local("own"))
            .build()
            .unwrap();
        let comm = Communicator::new(&pool).unwrap();
        let block = pool.lane("own").unwrap().alloc::<i32>(COUNT).unwrap();
        block.write(&[1; COUNT]).unwrap();
        let (at, sum) = (block.as_ptr().cast::<u8>(), ReduceOp::Sum);
        // SAFETY: the block has as many elements, which only this call accesses.
        unsafe { comm.all_reduce_at(at, at, COUNT, DType::I32, sum, STREAM) }.unwrap();
        assert_eq!(block.read().unwrap(), [2; COUNT]);
    });
}

#[test]
fn a_caller_that_declines_keeps_the_others_from_waiting() {
    // S6
    ranks(2, |pool| {
        let comm = Communicator::new(pool).unwrap();
        if comm.rank() == 1 {
            let why = comm.decline(Error::invalid_argument("not this tensor"), STREAM);
            assert_eq!(why.to_string(), "symmpool: not this tensor");
        } else {
            assert!(comm.barrier(STREAM).unwrap_err().is_diverged());
        }
        comm.barrier(STREAM).unwrap();
    });
}

#[test]
fn a_caller_that_declines_before_a_due_commit_does_not_wait_either() {
    // S6
    let declined = Barrier::new(2);
    ranks(2, |pool| {
        let comm = Communicator::new(pool).unwrap();
        let x = pool.alloc::<i32>(COUNT).unwrap();
        assert!(pool.is_commit_due());
        if comm.rank() == 1 {
            let began = Instant::now();
            for _ in 0..2 {
                let why = comm.decline(Error::invalid_argument("not this tensor"), STREAM);
                assert_eq!(why.to_string(), "symmpool: not this tensor");
            }
            assert!(began.elapsed() < Duration::from_secs(2), "waited for rank 0");
            declined.wait();
        } else {
            declined.wait();
            for _ in 0..2 {
                let error = comm.all_reduce(&x, ReduceOp::Sum, STREAM).unwrap_err();
                assert!(error.is_diverged() && error.ranks() == [1], "{error}");
            }
        }
        x.write(&[1; COUNT]).unwrap();
        comm.all_reduce(&x, ReduceOp::Sum, STREAM).unwrap();
        assert_eq!(x.read().unwrap(), [2; COUNT]);
    });
}

#[allow(clippy::multiple_unsafe_ops_per_block)] // none of them reads or writes anything
#[test]
fn empty_buffers_may_lie_at_different_places_on_every_rank() {
    // An empty view of a tensor has an address, and an empty tensor has none.
    ranks(3, |pool| {
        let block = pool.alloc::<i32>(COUNT).unwrap();
        let mut plain = vec![0_i32; COUNT];
        pool.commit().unwrap();
        let (window, plain) = (block.as_ptr().cast::<u8>(), plain.as_mut_ptr().cast::<u8>());
        let (op, dtype) = (ReduceOp::Sum, DType::I32);
        let places = [(window, window), (plain, window), (std::ptr::null_mut(), plain)];
        let (to, from) = places[pool.rank() as usize];
        for algorithm in [AllReduceAlgorithm::Auto, AllReduceAlgorithm::TwoShot] {
            let options = CommunicatorOptions { algorithm, ..CommunicatorOptions::default() };
            let comm = Communicator::with_options(pool, &options).unwrap();
            // SAFETY: nothing is read or written.
            unsafe {
                comm.all_reduce_at(to, from, 0, dtype, op, STREAM).unwrap();
                comm.reduce_scatter_at(to, from, 0, dtype, op, STREAM).unwrap();
                comm.all_gather_at(to, from, 0, dtype, STREAM).unwrap();
                comm.all_to_all_at(to, from, 0, dtype, STREAM).unwrap();
                comm.all_to_all_v_at(to, from, &[0; 3], &[0; 3], dtype, STREAM).unwrap();
                comm.broadcast_at(to, 0, dtype, 2, STREAM).unwrap();
            }
            let mut one = [1_i32];
            let at = one.as_mut_ptr().cast();
            // SAFETY: there is one element at this address, which only this call accesses.
            unsafe { comm.all_reduce_at(at, at, 1, dtype, op, STREAM).unwrap() };
            assert_eq!(one, [3]);
        }
    });
}
