//! Times of the host's side of a call: what a rank spends between its call and the engine's work.
//!
//! The group has one rank and the data is a few bytes, so there is nobody to wait for and hardly anything to move.
//! `call` has an all-reduce on blocks and on addresses, the same by the name of its algorithm, and a barrier. `pool`
//! allocates and frees a block, as a program does between two calls.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use symmpool_allocator::{Driver, Group, Pool, Stream};
use symmpool_collectives::{Communicator, DType, ReduceOp, Request, StandardCollective};

/// Elements of a call: 64 bytes.
const COUNT: usize = 16;

fn call(criterion: &mut Criterion) {
    let group = Group::in_process(1).expect("a group").remove(0);
    let pool = Pool::builder(group).driver(Driver::host().expect("a driver")).build();
    let pool = pool.expect("a pool");
    let x = pool.alloc::<f32>(COUNT).expect("room for a block");
    x.write(&[1.0; COUNT]).expect("a block");
    pool.commit().expect("a commit");
    let comm = Communicator::new(&pool).expect("a communicator");
    let stream = Stream::DEFAULT;

    let mut times = criterion.benchmark_group("call");
    times.bench_function("all_reduce, blocks", |bench| {
        bench.iter(|| comm.all_reduce(black_box(&x), ReduceOp::Sum, &stream).expect("a call"));
    });
    times.bench_function("all_reduce, addresses", |bench| {
        bench.iter(|| {
            let address = black_box(x.as_ptr()).cast::<u8>();
            // SAFETY: the block is live and has COUNT elements, and only this thread uses it.
            let request = unsafe {
                Request::at(StandardCollective::AllReduce, address, address, COUNT, DType::F32)
            };
            comm.call(&request, &stream).expect("a call");
        });
    });
    times.bench_function("all_reduce, by name", |bench| {
        bench.iter(|| {
            let request = Request::new(StandardCollective::AllReduce, &x, black_box(&x));
            comm.call(&request.algorithm("two_shot"), &stream).expect("a call");
        });
    });
    times.bench_function("barrier", |bench| {
        bench.iter(|| comm.barrier(&stream).expect("a call"));
    });
    times.finish();

    let mut times = criterion.benchmark_group("pool");
    times.bench_function("alloc and free", |bench| {
        bench.iter(|| drop(pool.alloc::<f32>(black_box(COUNT)).expect("room for a block")));
    });
    times.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(50)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3));
    targets = call
}
criterion_main!(benches);
