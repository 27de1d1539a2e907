//! Random sequences of calls, by ranks that run at their own speed.

use crate::flat_heap::{FlatHeap, TestBuffer, small_scratch};
use crate::oracle::{Oracle, bits, input, noise, reduced};
use symmpool_collectives::{AllReduceAlgorithm, DType, HostEngine, HostEngineOptions, ReduceOp};

#[test]
fn epochs_wrap_unnoticed() {
    // S2: the low half of the handshake word passes zero; the number of steps is far from the epoch's value.
    for first_epoch in [(1 << 32) - 3, (1 << 32) - 2, u64::MAX >> 1] {
        let options = || HostEngineOptions { first_epoch, ..small_scratch() };
        let heap = FlatHeap::new(3, 1, 1 << 16, &options());
        heap.ranks(|rank| {
            let mut engine = heap.engine(rank, 0, options());
            for seed in 0..8 {
                let count = if seed % 2 == 0 { 5 } else { 6000 };
                let mut data = input::<f32>(seed, rank, count);
                engine.all_reduce_slice(&mut data, ReduceOp::Sum).unwrap();
                assert!(bits(&data) == bits(&reduced::<f32>(seed, 3, count, ReduceOp::Sum)));
                engine.barrier().unwrap();
            }
        });
    }
}

/// Makes and checks one call of a random kind.
fn any_call(heap: &FlatHeap, engine: &mut HostEngine, windows: (u64, u64), seed: u64) {
    let (rank, world) = (engine.rank(), engine.world());
    let pick = noise(77, seed);
    let count = [0, 1, 7, 64, 300, 2000][(pick >> 8) as usize % 6];
    let ranks = world as usize;
    match pick % 6 {
        0 => engine.barrier().unwrap(),
        1 => {
            let mut data = input::<i32>(seed, rank, count);
            engine.all_reduce_slice(&mut data, ReduceOp::Sum).unwrap();
            assert!(data == reduced::<i32>(seed, world, count, ReduceOp::Sum));
        }
        2 => {
            let from = TestBuffer::window(heap, rank, windows.0, count * 4);
            let to = TestBuffer::window(heap, rank, windows.1, count * 4);
            from.write(&input::<i32>(seed, rank, count));
            let two = AllReduceAlgorithm::TwoShot;
            let (a, b, max) = (from.place, to.place, ReduceOp::Max);
            // SAFETY: both windows hold `count` elements and are this rank's.
            unsafe { engine.all_reduce(a, b, count, DType::I32, max, two) }.unwrap();
            assert!(to.read::<i32>(count) == reduced::<i32>(seed, world, count, max));
        }
        3 => {
            let all = input::<i32>(seed, rank, count * ranks);
            let mut out = vec![0; count * ranks];
            engine.all_to_all_slices(&all, &mut out).unwrap();
            let own = rank as usize * count;
            for (peer, part) in (0..world).zip(out.chunks(count.max(1))) {
                let theirs = i32::from_noise(noise(seed * 64 + u64::from(peer), own as u64));
                assert_eq!(part[0], theirs);
            }
        }
        4 => {
            let mut data = input::<u8>(seed, rank, count);
            let root = (pick >> 32) as u32 % world;
            engine.broadcast_slice(&mut data, root).unwrap();
            assert!(data == input::<u8>(seed, root, count));
        }
        _ => {
            let mine = input::<u8>(seed, rank, count);
            let mut out = vec![0; count * ranks];
            engine.all_gather_slices(&mine, &mut out).unwrap();
            for (peer, part) in (0..world).zip(out.chunks(count.max(1))) {
                assert!(part == input::<u8>(seed, peer, count));
            }
        }
    }
}

fn mixed_calls(world: u32, count: u64) {
    let heap = FlatHeap::new(world, 1, 1 << 16, &small_scratch());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        for seed in 0..count {
            any_call(&heap, &mut engine, (0, 1 << 15), seed);
        }
    });
}

#[test]
fn a_hundred_thousand_mixed_calls() {
    // S1, S2, S4: any call may follow any other, with ranks at their own speed.
    mixed_calls(2, 100_000);
}

#[test]
fn mixed_calls_of_more_ranks_than_cores() {
    mixed_calls(5, 3_000);
}

#[test]
fn two_communicators_do_not_disturb_each_other() {
    let heap = FlatHeap::new(3, 2, 1 << 17, &small_scratch());
    heap.ranks(|rank| {
        std::thread::scope(|scope| {
            for block in 0..2 {
                let heap = &heap;
                scope.spawn(move || {
                    let mut engine = heap.engine(rank, block, small_scratch());
                    let at = block << 16;
                    for seed in 0..2_000 {
                        any_call(heap, &mut engine, (at, at + (1 << 15)), seed + block * 7_919);
                    }
                });
            }
        });
    });
}
