//! Checks a message that is refused while its sender is in the call before the one that its receiver is in: the sender has
//! entered that call, and has not read the receiver's handshake yet. It finishes the call, and learns of the message by its
//! next one, at once.

use std::thread::sleep;
use std::time::{Duration, Instant};

use symmpool_allocator::{Error, Pool, Result, Stream};
use symmpool_collectives::{
    Algorithm, Communicator, CommunicatorOptions, DType, NativeKernel, Request, StandardCollective,
};

use crate::cuda::{destroy, stream, upload};
use crate::{MAX_LATE, expect_error};

/// Sends the handshake of a call, and reads those of the other ranks when the host has written to the input.
const SLOW_READER: &str = r#"
#include <symmpool/device.cuh>
using namespace symmpool;

extern "C" __global__ void slow_reader(const __grid_constant__ DeviceComm comm, const __grid_constant__ DeviceCall call) {
    begin_kernel(comm.early);
    const Session session(comm);
    if (session.failed) {
        return;
    }
    if (is_leader_block()) {
        send_handshake<true>(session, call, threadIdx.x, blockDim.x);
    }
    session.advance();
    if (is_leader_block()) {
        while (threadIdx.x == 0 && load_acquire(reinterpret_cast<const u64*>(call.input)) == 0) {
        }
        __syncthreads();
        compare_handshakes(session, call, threadIdx.x, blockDim.x);
    }
}
"#;

/// Returns how many checks were wrong.
pub(crate) fn run(pool: &Pool, timeout: Duration) -> Result<u32> {
    let (rank, block) = (pool.rank(), pool.alloc::<u64>(1024)?);
    pool.commit()?;
    let options = CommunicatorOptions { timeout: 4 * timeout, ..Default::default() };
    let comm = Communicator::with_options(pool, &options)?;
    let meeting = Communicator::new(pool)?;
    meeting.set_timeout(20 * timeout)?;
    let [calls, messages, meetings] = [stream(pool)?, stream(pool)?, stream(pool)?];
    let meet = || meeting.barrier(&meetings).and_then(|()| meeting.synchronize(&meetings));
    let kernel = NativeKernel::new(StandardCollective::AllReduce, "slow_reader", SLOW_READER);
    let algorithm = Algorithm::native(kernel)?;
    let slow = |goes: u64, calls: &Stream| {
        upload(pool, block.address(), &goes.to_le_bytes())?;
        let (to, from) = (block.address() + 4096, block.address());
        // SAFETY: both have room for these elements, and nothing else uses them.
        unsafe {
            let (to, from) = (to as *mut u8, from as *const u8);
            comm.call(&Request::at(&algorithm, to, from, 8, DType::U8), calls)
        }
    };
    // The kernels are loaded, and have run, before one of them waits.
    slow(1, &calls)?;
    comm.synchronize(&calls)?;
    meet()?;
    slow(u64::from(rank != 0), &calls)?;
    let mut wrong = 0;
    let mut expect = |what: String, right: bool| {
        if !right {
            wrong += 1;
            println!("rank {rank}: {what}");
        }
    };
    let at = block.address() + 6144;
    match rank {
        // SAFETY: the block has these elements, and nothing else uses them; so it is below.
        0 => unsafe { comm.send_at(at as *const u8, 8, DType::U8, 1, &messages) }?,
        _ => comm.barrier(&calls)?,
    }
    if rank == 1 {
        // The barrier is under way then.
        sleep(Duration::from_millis(300));
        // SAFETY: the block has these elements, and nothing else uses them.
        unsafe { comm.recv_at(at as *mut u8, 16, DType::U8, 0, &messages) }?;
        let refused = comm.synchronize(&messages);
        expect(format!("a message that differs: {refused:?}"), refused.is_err());
    }
    meet()?;
    let began = Instant::now();
    if rank == 0 {
        upload(pool, block.address(), &1_u64.to_le_bytes())?;
        let first = comm.synchronize(&calls);
        expect(format!("the call before the message: {first:?}"), first.is_ok());
        // The receiver is in the next call: it may finish that, and makes no other.
        let call = || comm.barrier(&calls).and_then(|()| comm.synchronize(&calls));
        let error = expect_error(call().and_then(|()| call()), "calls behind a refused message")?;
        let right = error.is_diverged() && error.ranks() == [0, 1];
        expect(format!("the call behind the message: {error}"), right);
    } else {
        // The barrier may find all others.
        let ended = comm.synchronize(&calls);
        let right = ended.as_ref().err().is_none_or(Error::is_diverged);
        expect(format!("the barrier: {ended:?}"), right);
    }
    let took = began.elapsed();
    expect(format!("after {took:?}"), took < timeout + MAX_LATE);
    meet()?;
    drop(comm);
    [calls, messages].into_iter().try_for_each(|stream| destroy(pool, stream))?;
    meeting.forget_stream(&meetings)?;
    drop(meeting);
    destroy(pool, meetings)?;
    Ok(wrong)
}
