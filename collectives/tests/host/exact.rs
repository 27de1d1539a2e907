//! Compares results, bit by bit, with an oracle that computes one element at a time: every type, operation, size,
//! kind of memory and algorithm (rule S7).

use crate::flat_heap::{FlatHeap, TestBuffer, small_scratch};
use crate::oracle::{Oracle, bits, input, reduced};
use half::{bf16, f16};
use symmpool_collectives::{
    AllReduceAlgorithm, DType, Element, F8E4m3, F8E5m2, HostEngine, HostEngineOptions, ReduceOp,
};

const COUNTS: [usize; 7] = [0, 1, 3, 17, 1023, 4096 + 5, 20_011];
const ALGORITHMS: [AllReduceAlgorithm; 4] = [
    AllReduceAlgorithm::Auto,
    AllReduceAlgorithm::OneShot,
    AllReduceAlgorithm::TwoShot,
    AllReduceAlgorithm::CubeMesh,
];
/// Bytes of each of the two windows of a test.
const ROOM: u64 = 1 << 20;

/// An input and an output, both in windows or both in ordinary memory.
fn buffers<T: Oracle>(
    heap: &FlatHeap,
    rank: u32,
    window: bool,
    lengths: (usize, usize),
) -> (TestBuffer, TestBuffer) {
    // They are aligned to an element and no better.
    let size = size_of::<T>();
    let (a, b) = (lengths.0 * size, lengths.1 * size);
    if window {
        let first = TestBuffer::window(heap, rank, size as u64, a);
        (first, TestBuffer::window(heap, rank, ROOM + 3 * size as u64, b))
    } else {
        (TestBuffer::plain(a, size), TestBuffer::plain(b, 3 * size))
    }
}

fn all_reduce<T: Oracle>(heap: &FlatHeap, engine: &mut HostEngine, world: u32) {
    let rank = engine.rank();
    for (seed, count) in (0..).zip(COUNTS) {
        for op in ReduceOp::ALL {
            let expected = reduced::<T>(seed, world, count, op);
            for algorithm in ALGORITHMS {
                for window in [true, false] {
                    let (from, to) = buffers::<T>(heap, rank, window, (count, count));
                    for in_place in [true, false] {
                        let target = if in_place { &from } else { &to };
                        from.write(&input::<T>(seed, rank, count));
                        // SAFETY: both buffers hold `count` elements and belong to this rank.
                        let done = unsafe {
                            engine.all_reduce(
                                from.place,
                                target.place,
                                count,
                                T::DTYPE,
                                op,
                                algorithm,
                            )
                        };
                        done.unwrap();
                        assert!(
                            bits(&target.read::<T>(count)) == bits(&expected),
                            "rank {rank} of {world}: {op:?} of {count} {:?}, {algorithm:?}, \
                             window {window}, in place {in_place}",
                            T::DTYPE
                        );
                    }
                }
            }
        }
    }
}

fn every_type(world: u32) {
    let options = small_scratch;
    let heap = FlatHeap::new(world, 1, 2 * ROOM, &options());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, options());
        all_reduce::<f32>(&heap, &mut engine, world);
        all_reduce::<f64>(&heap, &mut engine, world);
        all_reduce::<f16>(&heap, &mut engine, world);
        all_reduce::<bf16>(&heap, &mut engine, world);
        all_reduce::<i32>(&heap, &mut engine, world);
        all_reduce::<i64>(&heap, &mut engine, world);
        all_reduce::<u8>(&heap, &mut engine, world);
        all_reduce::<i8>(&heap, &mut engine, world);
        all_reduce::<F8E4m3>(&heap, &mut engine, world);
        all_reduce::<F8E5m2>(&heap, &mut engine, world);
    });
}

#[test]
fn all_reduce_of_1_rank() {
    every_type(1);
}

#[test]
fn all_reduce_of_2_ranks() {
    every_type(2);
}

#[test]
fn all_reduce_of_3_ranks() {
    every_type(3);
}

#[test]
fn all_reduce_of_4_ranks() {
    every_type(4);
}

#[test]
fn all_reduce_of_5_ranks() {
    every_type(5);
}

#[test]
fn all_reduce_with_default_scratch_crosses_every_automatic_threshold() {
    for world in [2, 3] {
        let heap = FlatHeap::new(world, 1, 16 << 20, &HostEngineOptions::default());
        heap.ranks(|rank| {
            let mut engine = heap.engine(rank, 0, HostEngineOptions::default());
            for (seed, count) in (0..).zip([256, 8 << 10, 100_003, 600_000]) {
                let expected = reduced::<f32>(seed, world, count, ReduceOp::Sum);
                for window in [true, false] {
                    let buffer = if window {
                        TestBuffer::window(&heap, rank, 0, count * 4)
                    } else {
                        TestBuffer::plain(count * 4, 0)
                    };
                    buffer.write(&input::<f32>(seed, rank, count));
                    let (place, auto) = (buffer.place, AllReduceAlgorithm::Auto);
                    // SAFETY: the buffer holds `count` elements and belongs to this rank.
                    let done = unsafe {
                        engine.all_reduce(place, place, count, f32::DTYPE, ReduceOp::Sum, auto)
                    };
                    done.unwrap();
                    assert!(bits(&buffer.read::<f32>(count)) == bits(&expected));
                }
            }
        });
    }
}

#[test]
fn a_large_sum_into_other_windows_takes_the_streaming_path() {
    // The reduction goes through tiles, of which the last one is not full.
    const COUNT: usize = (2 << 20) + 5;
    let heap = FlatHeap::new(2, 1, 36 << 20, &HostEngineOptions::default());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, HostEngineOptions::default());
        let from = TestBuffer::window(&heap, rank, 8, COUNT * 8);
        let to = TestBuffer::window(&heap, rank, (18 << 20) + 8, COUNT * 8 + 64);
        let sent = input::<f64>(7, rank, COUNT);
        from.write(&sent);
        to.write(&vec![-1.0; COUNT + 8]);
        let (from_place, to_place, auto) = (from.place, to.place, AllReduceAlgorithm::Auto);
        // SAFETY: both windows hold `COUNT` elements and belong to this rank.
        let done = unsafe {
            engine.all_reduce(from_place, to_place, COUNT, f64::DTYPE, ReduceOp::Sum, auto)
        };
        done.unwrap();
        let mut expected = reduced::<f64>(7, 2, COUNT, ReduceOp::Sum);
        expected.resize(COUNT + 8, -1.0);
        assert!(bits(&to.read::<f64>(COUNT + 8)) == bits(&expected), "rank {rank}");
        assert!(bits(&from.read::<f64>(COUNT)) == bits(&sent), "the input is as it was");
    });
}

fn reduce_scatter<T: Oracle>(heap: &FlatHeap, engine: &mut HostEngine, world: u32) {
    let rank = engine.rank();
    for (seed, count) in (0..).zip(COUNTS) {
        let all = count * world as usize;
        let own = rank as usize * count;
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max] {
            let expected = &reduced::<T>(seed, world, all, op)[own..own + count];
            for window in [true, false] {
                let (from, to) = buffers::<T>(heap, rank, window, (all, count));
                for in_place in [true, false] {
                    from.write(&input::<T>(seed, rank, all));
                    let target = if in_place { from.part(own * size_of::<T>()) } else { to.place };
                    // SAFETY: the input holds `all` elements, the target `count`, both this rank's.
                    let done =
                        unsafe { engine.reduce_scatter(from.place, target, count, T::DTYPE, op) };
                    done.unwrap();
                    let got = if in_place {
                        from.read::<T>(all)[own..own + count].to_vec()
                    } else {
                        to.read(count)
                    };
                    assert!(
                        bits(&got) == bits(expected),
                        "rank {rank} of {world}: {op:?} of {count}, window {window}, in place \
                         {in_place}"
                    );
                }
            }
        }
    }
}

fn all_gather<T: Oracle>(heap: &FlatHeap, engine: &mut HostEngine, world: u32) {
    let rank = engine.rank();
    for (seed, count) in (0..).zip(COUNTS) {
        let all = count * world as usize;
        let own = rank as usize * count * size_of::<T>();
        let expected: Vec<T> = (0..world).flat_map(|peer| input::<T>(seed, peer, count)).collect();
        for window in [true, false] {
            for in_place in [true, false] {
                let (to, from) = buffers::<T>(heap, rank, window, (all, count));
                let source = if in_place { to.part(own) } else { from.place };
                let mine = input::<T>(seed, rank, count);
                if in_place {
                    let mut filled = to.read::<T>(all);
                    filled[rank as usize * count..][..count].copy_from_slice(&mine);
                    // Peers write other parts of the buffer only after the handshake, which this rank has not begun, so
                    // the buffer is still this rank's own.
                    to.write(&filled);
                } else {
                    from.write(&mine);
                }
                // SAFETY: the source holds `count` elements, the output `all`, both this rank's.
                unsafe { engine.all_gather(source, to.place, count, T::DTYPE) }.unwrap();
                assert!(
                    bits(&to.read::<T>(all)) == bits(&expected),
                    "rank {rank} of {world}: {count}, window {window}, in place {in_place}"
                );
            }
        }
    }
}

fn broadcast<T: Oracle>(heap: &FlatHeap, engine: &mut HostEngine, world: u32) {
    let rank = engine.rank();
    for (seed, count) in (0..).zip(COUNTS) {
        for root in 0..world {
            for window in [true, false] {
                let (buffer, _) = buffers::<T>(heap, rank, window, (count, 0));
                buffer.write(&input::<T>(seed, rank, count));
                // SAFETY: the buffer holds `count` elements and is this rank's.
                unsafe { engine.broadcast(buffer.place, count, T::DTYPE, root) }.unwrap();
                assert!(
                    bits(&buffer.read::<T>(count)) == bits(&input::<T>(seed, root, count)),
                    "rank {rank} of {world}: {count} from {root}, window {window}"
                );
            }
        }
    }
}

fn all_to_all<T: Oracle>(heap: &FlatHeap, engine: &mut HostEngine, world: u32) {
    let rank = engine.rank();
    for (seed, count) in (0..).zip(COUNTS) {
        let all = count * world as usize;
        let own = rank as usize * count;
        let expected: Vec<T> = (0..world)
            .flat_map(|peer| input::<T>(seed, peer, all)[own..own + count].to_vec())
            .collect();
        for window in [true, false] {
            let (from, to) = buffers::<T>(heap, rank, window, (all, all));
            from.write(&input::<T>(seed, rank, all));
            // SAFETY: both buffers hold `all` elements and are this rank's.
            unsafe { engine.all_to_all(from.place, to.place, count, T::DTYPE) }.unwrap();
            assert!(
                bits(&to.read::<T>(all)) == bits(&expected),
                "rank {rank} of {world}: {count}, window {window}"
            );
        }
    }
}

#[test]
fn windows_of_more_ranks_than_scratch_has_room_for() {
    // 256 bytes are less than 16 bytes for each of 17 ranks.
    let options = || HostEngineOptions { scratch_bytes: 256, ..HostEngineOptions::default() };
    const WORLD: u32 = 17;
    const COUNT: usize = 5;
    let heap = FlatHeap::new(WORLD, 1, 1 << 16, &options());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, options());
        let (all, own) = (COUNT * WORLD as usize, COUNT * rank as usize);
        let from = TestBuffer::window(&heap, rank, 0, all * 8);
        let to = TestBuffer::window(&heap, rank, 1 << 15, all * 8);
        for count in [0, COUNT] {
            from.write(&input::<i64>(3, rank, all));
            // SAFETY: the input holds a part a rank, the output one, both this rank's windows.
            let done = unsafe {
                engine.reduce_scatter(from.place, to.place, count, i64::DTYPE, ReduceOp::Sum)
            };
            done.unwrap();
        }
        let expected = &reduced::<i64>(3, WORLD, all, ReduceOp::Sum)[own..own + COUNT];
        assert_eq!(to.read::<i64>(COUNT), expected);
        // SAFETY: both windows hold `all` elements and are this rank's.
        unsafe { engine.all_to_all(from.place, to.place, COUNT, i64::DTYPE) }.unwrap();
        let expected: Vec<i64> = (0..WORLD)
            .flat_map(|peer| input::<i64>(3, peer, all)[own..own + COUNT].to_vec())
            .collect();
        assert_eq!(to.read::<i64>(all), expected);
        // Ordinary memory has to go through scratch, and the error says how much is needed.
        let mut part = [0_i64; COUNT];
        let error = engine.reduce_scatter_slices(&vec![1_i64; all], &mut part, ReduceOp::Sum);
        assert!(error.unwrap_err().to_string().contains("raise scratch_bytes to 512 or more"));
    });
}

#[test]
fn elements_without_reductions_are_moved_and_not_reduced() {
    const WORLD: u32 = 3;
    const COUNT: usize = 700;
    let heap = FlatHeap::new(WORLD, 1, 2 * ROOM, &small_scratch());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let all = COUNT * WORLD as usize;
        for dtype in DType::MOVED {
            let bytes = COUNT * dtype.size();
            let sent = input::<u8>(9, rank, bytes);
            let everyone: Vec<u8> = (0..WORLD).flat_map(|peer| input(9, peer, bytes)).collect();
            for window in [true, false] {
                let (to, from) = buffers::<u8>(&heap, rank, window, (all * dtype.size(), bytes));
                from.write(&sent);
                // SAFETY: the source holds `COUNT` elements, the output `all`, both this rank's.
                unsafe { engine.all_gather(from.place, to.place, COUNT, dtype) }.unwrap();
                assert_eq!(to.read::<u8>(all * dtype.size()), everyone, "{dtype:?}, {window}");
                // One rank reduces such elements, which is refused, and the others get an error too.
                let named = if rank == 1 { dtype } else { DType::U8 };
                let auto = AllReduceAlgorithm::Auto;
                // SAFETY: the buffer holds `COUNT` elements and is this rank's.
                let reduced = unsafe {
                    engine.all_reduce(from.place, from.place, COUNT, named, ReduceOp::Sum, auto)
                };
                let error = reduced.unwrap_err();
                if rank == 1 {
                    assert!(error.is_invalid_argument(), "{error}");
                    let why = format!("all_reduce of {} on rank 1", dtype.name());
                    assert!(error.to_string().contains(&why), "{error}");
                } else {
                    assert!(error.is_diverged(), "{error}");
                }
                // SAFETY: the input holds `COUNT` elements and the output a part; both are this rank's.
                let reduced = unsafe {
                    engine.reduce_scatter(to.place, from.place, COUNT, dtype, ReduceOp::Max)
                };
                assert!(reduced.unwrap_err().is_invalid_argument());
                assert_eq!(from.read::<u8>(bytes), sent, "nothing was written");
            }
        }
    });
}

#[test]
fn data_movers_and_reduce_scatter_of_1_to_5_ranks() {
    for world in 1..=5 {
        let heap = FlatHeap::new(world, 1, 2 * ROOM, &small_scratch());
        heap.ranks(|rank| {
            let mut engine = heap.engine(rank, 0, small_scratch());
            reduce_scatter::<f32>(&heap, &mut engine, world);
            reduce_scatter::<bf16>(&heap, &mut engine, world);
            reduce_scatter::<i64>(&heap, &mut engine, world);
            reduce_scatter::<F8E5m2>(&heap, &mut engine, world);
            all_gather::<u8>(&heap, &mut engine, world);
            all_gather::<f64>(&heap, &mut engine, world);
            broadcast::<f16>(&heap, &mut engine, world);
            broadcast::<i64>(&heap, &mut engine, world);
            all_to_all::<i8>(&heap, &mut engine, world);
            all_to_all::<F8E4m3>(&heap, &mut engine, world);
            all_to_all::<f32>(&heap, &mut engine, world);
        });
    }
}
