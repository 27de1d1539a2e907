//! All-reduces on a stream that the program makes itself with cudarc, eagerly and in a graph.

use std::env;
use std::error::Error;

use cudarc::driver::{CudaContext, sys};
use symmpool_allocator::{Deadline, Driver, Group, Pool, Stream};
use symmpool_collectives::{Communicator, ReduceOp};

const COUNT: usize = 1 << 20;

/// The text of `--help`.
const ABOUT: &str = "\
All-reduces on a stream that the program makes itself with cudarc, eagerly and in a graph. One process for each GPU:

    cargo build --release -p symmpool-collectives --example on_a_stream
    export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
    RANK=0 ./target/release/examples/on_a_stream & RANK=1 ./target/release/examples/on_a_stream";

fn main() -> Result<(), Box<dyn Error>> {
    clap::Command::new("on_a_stream").about(ABOUT).get_matches();
    let device = env::var("LOCAL_RANK").or_else(|_| env::var("RANK")).unwrap_or("0".to_owned());
    let device: u32 = device.parse()?;
    let driver = match Driver::cuda(device) {
        Err(error) if error.is_unsupported() => {
            println!("skipped: no CUDA device: {error}");
            return Ok(());
        }
        found => found?,
    };
    let group = Group::from_env(Deadline::seconds(60))?; // RANK, WORLD_SIZE, MASTER_ADDR, ...
    let (rank, world) = (group.rank(), group.world());
    let pool = Pool::builder(group).driver(driver).build()?;
    let x = pool.alloc::<f32>(COUNT)?;
    let comm = Communicator::new(&pool)?;

    // The device's primary context, which the pool uses too.
    let context = CudaContext::new(device as usize)?;
    let stream = context.new_stream()?;
    // SAFETY: the stream lives as long as the communicator and the pool, which this function ends with.
    let on_stream = unsafe { Stream::from_raw(stream.cu_stream() as u64) };

    // The program's own kernels use the address `x.address()`. A slice of cudarc, as here, must not free the memory.
    // SAFETY: the block has as many floats, and lives longer than the slice.
    let mut data = unsafe { stream.upgrade_device_ptr::<f32>(x.address(), COUNT) };
    stream.memcpy_htod(&vec![rank as f32 + 1.0; COUNT], &mut data)?;

    // The call runs after what is on the stream already; the host does not wait.
    comm.all_reduce(&x, ReduceOp::Sum, &on_stream)?;

    // A graph of calls consists of kernels alone: it can be replayed at once, and as often as needed.
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let captured = comm.all_reduce(&x, ReduceOp::Avg, &on_stream);
    let graph = stream.end_capture(
        sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH,
    )?;
    captured?;
    let graph = graph.ok_or("nothing was captured")?;
    for _ in 0..3 {
        graph.launch()?;
    }

    // Waits, and returns what went wrong on the device: a rank that did not come, or made another call.
    comm.synchronize(&on_stream)?;
    let mut found = vec![0.0; COUNT];
    stream.memcpy_dtoh(&data, &mut found)?;
    stream.synchronize()?;
    data.leak();
    let expected = (world * (world + 1) / 2) as f32;
    let wrong = found.iter().filter(|&&each| each != expected).count();
    println!("rank {rank}: {} and {wrong} wrong", found[0]);
    if wrong == 0 { Ok(()) } else { Err(format!("{wrong} elements are not {expected}").into()) }
}
