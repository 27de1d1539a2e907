//! All-to-alls with splits in memory, compared with a reference that moves one row at a time.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};

use crate::flat_heap::{FlatHeap, TestBuffer, small_scratch};
use crate::oracle::{input, noise};
use proptest::prelude::*;
use symmpool_allocator::Error;
use symmpool_collectives::{
    AllToAllAlgorithm, DType, Element, HostEngineOptions, SplitRows, SplitsAt,
};

/// Counts of which many are zero, most are small, and some are large enough for every path that data can take.
fn count() -> impl Strategy<Value = usize> {
    prop_oneof![3 => Just(0usize), 4 => 1usize..40, 2 => 500usize..3000]
}

/// Matrices of 1 to 5 ranks, and how many rows more or less than it receives each rank has room for.
fn case() -> impl Strategy<Value = (Vec<Vec<usize>>, Vec<isize>)> {
    (1usize..=5).prop_flat_map(|world| {
        let matrix = proptest::collection::vec(proptest::collection::vec(count(), world), world);
        let room = prop_oneof![2 => Just(0isize), 1 => 1isize..100, 2 => -2000isize..0];
        (matrix, proptest::collection::vec(room, world))
    })
}

fn check(
    (matrix, more): &(Vec<Vec<usize>>, Vec<isize>),
    // A bit for each rank's input, and one for each output after them.
    (windows, row, wide): (u16, usize, bool),
    all_to_all: AllToAllAlgorithm,
) {
    let world = matrix.len();
    let options = || HostEngineOptions { all_to_all, ..small_scratch() };
    let room = 5 * 3100 * 4 * row;
    let heap = FlatHeap::new(world as u32, 1, 2 * room as u64 + 4096, &options());
    let received = |rank: usize| matrix.iter().map(|sends| sends[rank]).sum::<usize>();
    let capacity = |rank: usize| received(rank).saturating_add_signed(more[rank]);
    let overflows = (0..world).any(|rank| received(rank) > capacity(rank));
    heap.ranks(|rank| {
        let me = rank as usize;
        let mut engine = heap.engine(rank, 0, options());
        let sent: usize = matrix[me].iter().sum();
        // Windows may lie at different offsets on each rank.
        let own = 4 * u64::from(rank);
        let from = match windows >> me & 1 {
            1 => TestBuffer::window(&heap, rank, own, room),
            _ => TestBuffer::plain(sent * row * 4, 4),
        };
        let to = match windows >> (world + me) & 1 {
            1 => TestBuffer::window(&heap, rank, room as u64 + 64 + own, room),
            _ => TestBuffer::plain(room, 0),
        };
        let mut expected: Vec<i32> = (0..world)
            .flat_map(|peer| {
                let before: usize = matrix[peer][..me].iter().sum();
                let all = input::<i32>(5, peer as u32, matrix[peer].iter().sum::<usize>() * row);
                all[before * row..(before + matrix[peer][me]) * row].to_vec()
            })
            .collect();
        expected.truncate(capacity(me) * row);
        expected.resize(room / 4, -1);
        from.write(&input::<i32>(5, rank, sent * row));
        let rows = SplitRows { dtype: i32::DTYPE, row, length: sent, capacity: capacity(me) };
        // Room for 64-bit counts, which 32-bit counts use half of.
        let mut numbers = [[0_u64; 8]; 3];
        for (peer, count) in matrix[me].iter().enumerate() {
            if wide {
                numbers[0][peer] = *count as u64;
            } else {
                numbers[0][peer / 2] |= (*count as u64) << (32 * (peer % 2));
            }
        }
        for call in 0..3 {
            to.write(&vec![-1i32; room / 4]);
            let [input, output, offsets] = &mut numbers;
            let splits = SplitsAt {
                input: input.as_ptr().cast(),
                output: if call > 0 { output.as_mut_ptr().cast() } else { std::ptr::null_mut() },
                offsets: if call > 1 { offsets.as_mut_ptr().cast() } else { std::ptr::null_mut() },
                dtype: if wide { DType::I64 } else { DType::I32 },
            };
            // SAFETY: the buffers hold what is sent and what there is room for. They are this rank's, and so are the
            // counts.
            let done = unsafe { engine.all_to_all_splits(from.place, to.place, &rows, &splits) };
            assert_eq!(done.as_ref().is_err_and(Error::is_overflow), overflows, "{done:?}");
            assert_eq!(done.is_err(), overflows);
            assert!(to.read::<i32>(room / 4) == expected, "rank {rank}, call {call}");
        }
        let number = |which: usize, peer: usize| {
            let word = numbers[which][if wide { peer } else { peer / 2 }];
            if wide { word } else { word >> (32 * (peer % 2)) & 0xffff_ffff }
        };
        let mut offset = 0;
        for (peer, sends) in matrix.iter().enumerate() {
            assert_eq!(number(1, peer), sends[me] as u64);
            assert_eq!(number(2, peer), offset);
            offset += sends[me] as u64;
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_splits_arrive_as_far_as_there_is_room(
        case in case(), windows: u16, row in 1usize..4, wide: bool, algorithm in 0usize..3,
    ) {
        check(&case, (windows, row, wide), AllToAllAlgorithm::ALL[algorithm]);
    }
}

#[test]
fn rows_without_room_are_not_written_by_senders_either() {
    // Load balancing has senders write most of what rank 0 receives, as far as there is room: a part of rank 2's
    // rows, or none.
    let matrix = vec![vec![3, 0, 1], vec![5000, 7, 0], vec![5000, 0, 2]];
    for short in [0, 2000, 5000, 5001, 7000] {
        for windows in [0x3f, 0x3d, 0x37] {
            let case = (matrix.clone(), vec![-short, 0, 0]);
            check(&case, (windows, 4, true), AllToAllAlgorithm::Auto);
        }
    }
}

#[test]
fn invalid_splits_are_an_error_on_all_and_the_communicator_stays_usable() {
    const WORLD: usize = 3;
    let heap = FlatHeap::new(WORLD as u32, 1, 1 << 16, &small_scratch());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let (from, to) = (TestBuffer::plain(400, 0), TestBuffer::plain(400, 0));
        from.write(&input::<i32>(1, rank, 100));
        let rows = SplitRows { dtype: i32::DTYPE, row: 1, length: 90, capacity: 90 };
        for (bad, right) in
            [(-1, false), (31, false), (i64::MAX, false), (i64::MIN, false), (30, true)]
        {
            let counts = if rank == 1 { [30, 30, bad] } else { [30, 30, 30] };
            let (input, output) = (counts.as_ptr().cast(), std::ptr::null_mut());
            let splits = SplitsAt { input, output, offsets: output, dtype: DType::I64 };
            // SAFETY: the buffers hold 90 elements and more; there is a count for every rank.
            let done = unsafe { engine.all_to_all_splits(from.place, to.place, &rows, &splits) };
            if right {
                done.unwrap();
            } else {
                let error = done.unwrap_err();
                assert!(error.is_invalid_argument(), "{error}");
                assert!(error.to_string().contains("splits of rank 1 are negative"), "{error}");
            }
        }
        // If a rank can see itself that its arguments are wrong, it declines the call, which the others learn of.
        let (counts, output) = ([0_i64; WORLD], std::ptr::null_mut());
        let input = counts.as_ptr().cast();
        let splits = SplitsAt { input, output, offsets: output, dtype: DType::I64 };
        let empty = SplitRows { row: if rank == 2 { 0 } else { 1 }, ..rows };
        // SAFETY: the buffers hold 90 elements and more; there is a count for every rank.
        let done = unsafe { engine.all_to_all_splits(from.place, to.place, &empty, &splits) };
        let error = done.unwrap_err();
        assert!(
            if rank == 2 { error.is_invalid_argument() } else { error.is_diverged() },
            "{error}"
        );
        let counts = [0_i32; 8];
        let misaligned = counts.as_ptr().cast::<u8>().wrapping_add(usize::from(rank == 2));
        let output = std::ptr::null_mut();
        let splits = SplitsAt { input: misaligned, output, offsets: output, dtype: DType::I32 };
        // SAFETY: the buffers hold 90 elements and more; no misaligned count is read.
        let done = unsafe { engine.all_to_all_splits(from.place, to.place, &rows, &splits) };
        let error = done.unwrap_err();
        assert!(
            if rank == 2 { error.is_invalid_argument() } else { error.is_diverged() },
            "{error}"
        );
        engine.barrier().unwrap();
    });
}

#[test]
fn splits_in_memory_on_one_rank_and_counts_as_arguments_on_another_are_different_calls() {
    let heap = FlatHeap::new(2, 1, 1 << 16, &small_scratch());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let (from, to) = (TestBuffer::plain(400, 0), TestBuffer::plain(400, 0));
        let counts = [noise(1, 0) as i64 & 7; 2];
        let done = if rank == 0 {
            let rows = SplitRows { dtype: i32::DTYPE, row: 1, length: 90, capacity: 90 };
            let (input, output) = (counts.as_ptr().cast(), std::ptr::null_mut());
            let splits = SplitsAt { input, output, offsets: output, dtype: DType::I64 };
            // SAFETY: the buffers hold as many elements; there is a count for every rank.
            unsafe { engine.all_to_all_splits(from.place, to.place, &rows, &splits) }
        } else {
            let counts = counts.map(|count| count as usize);
            // SAFETY: the buffers hold as many elements; there is a count for every rank.
            unsafe { engine.all_to_all_v(from.place, &counts, to.place, &counts, i32::DTYPE) }
        };
        let error = done.unwrap_err();
        assert!(error.is_diverged(), "{error}");
        assert!(error.to_string().contains("rank 0: all_to_all_v of rows of 1 i32"), "{error}");
        engine.barrier().unwrap();
    });
}

#[test]
fn counts_that_change_meanwhile_are_read_once() {
    const WORLD: usize = 4;
    const MAX_COUNT: i64 = 25;
    let heap = FlatHeap::new(WORLD as u32, 1, 1 << 16, &small_scratch());
    let counts: [AtomicI64; WORLD] = std::array::from_fn(|_| AtomicI64::new(1));
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                for value in [1, 1 << 40, MAX_COUNT, -1, i64::MAX] {
                    counts.iter().for_each(|count| count.store(value, Ordering::Relaxed));
                }
            }
        });
        let outcomes = heap.ranks(|rank| {
            let mut engine = heap.engine(rank, 0, small_scratch());
            let (from, to) = (TestBuffer::plain(400, 0), TestBuffer::plain(1600, 0));
            from.write(&vec![rank as i32; 100]);
            let rows = SplitRows { dtype: i32::DTYPE, row: 1, length: 100, capacity: 400 };
            let mut received = [0_i64; WORLD];
            let (mut succeeded, end) = (0, Instant::now() + Duration::from_millis(1500));
            for call in 0.. {
                // Rank 0 decides when the test ends.
                let flag = TestBuffer::plain(4, 0);
                flag.write(&[i32::from(Instant::now() > end)]);
                // SAFETY: one element of the flag, this rank's.
                unsafe { engine.broadcast(flag.place, 1, i32::DTYPE, 0) }.unwrap();
                if flag.read::<i32>(1) == [1] {
                    break;
                }
                let splits = SplitsAt {
                    input: counts.as_ptr().cast(),
                    output: received.as_mut_ptr().cast(),
                    offsets: std::ptr::null_mut(),
                    dtype: DType::I64,
                };
                // SAFETY: the buffers hold as many elements, and there is a count for every rank.
                let sent =
                    unsafe { engine.all_to_all_splits(from.place, to.place, &rows, &splits) };
                match sent {
                    Ok(()) => succeeded += 1,
                    Err(error) => assert!(error.is_invalid_argument(), "call {call}: {error}"),
                }
                let all: i64 = received.iter().sum();
                assert!(received.iter().all(|count| (0..=100).contains(count)), "{received:?}");
                let wanted =
                    (0..).zip(received).flat_map(|(peer, count)| vec![peer; count as usize]);
                assert_eq!(to.read::<i32>(all as usize), wanted.collect::<Vec<_>>());
            }
            succeeded
        });
        ended.store(true, Ordering::Relaxed);
        assert!(outcomes.iter().all(|succeeded| *succeeded == outcomes[0]), "{outcomes:?}");
    });
}
