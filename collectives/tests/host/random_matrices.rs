//! Random traffic matrices, compared with a reference that moves one element at a time.

use std::time::Duration;

use crate::flat_heap::{FlatHeap, TestBuffer, small_scratch};
use crate::oracle::input;
use proptest::prelude::*;
use symmpool_collectives::{Element, HostEngineOptions};

/// Counts of which many are zero, most small and some large enough for the direct path.
fn count() -> impl Strategy<Value = usize> {
    prop_oneof![3 => Just(0usize), 4 => 1usize..40, 2 => 500usize..3000, 1 => 9_000usize..20_000]
}

fn matrix() -> impl Strategy<Value = Vec<Vec<usize>>> {
    (1usize..=5).prop_flat_map(|world| {
        proptest::collection::vec(proptest::collection::vec(count(), world), world)
    })
}

/// `windows` has a bit for each rank's input, and one for each output after them.
fn check(matrix: &[Vec<usize>], windows: u16, options: fn() -> HostEngineOptions) {
    let world = matrix.len();
    let longest = |row: &Vec<usize>| row.iter().sum::<usize>();
    let sent = matrix.iter().map(longest).max().unwrap_or(0);
    let column = |me: usize| matrix.iter().map(|row| row[me]).sum::<usize>();
    let received = (0..world).map(column).max().unwrap_or(0);
    let room = (4 * sent.max(received)).next_multiple_of(64);
    let heap = FlatHeap::new(world as u32, 1, 2 * room as u64 + 4096, &options());
    heap.ranks(|rank| {
        let me = rank as usize;
        let mut engine = heap.engine(rank, 0, options());
        let send = &matrix[me];
        let receive: Vec<usize> = matrix.iter().map(|row| row[me]).collect();
        let (sent, received): (usize, usize) = (send.iter().sum(), receive.iter().sum());
        // Windows may lie at different offsets on each rank.
        let own = 4 * u64::from(rank);
        let from = match windows >> me & 1 {
            1 => TestBuffer::window(&heap, rank, own, room),
            _ => TestBuffer::plain(sent * 4, 0),
        };
        let to = match windows >> (world + me) & 1 {
            1 => TestBuffer::window(&heap, rank, room as u64 + 64 + own, room),
            _ => TestBuffer::plain(received * 4, 4),
        };
        let expected: Vec<i32> = (0..world)
            .flat_map(|peer| {
                let before: usize = matrix[peer][..me].iter().sum();
                let all = input::<i32>(5, peer as u32, matrix[peer].iter().sum());
                all[before..before + receive[peer]].to_vec()
            })
            .collect();
        from.write(&input::<i32>(5, rank, sent));
        // Three calls, for both parities and again over the same memory.
        for _ in 0..3 {
            to.write(&vec![-1i32; received]);
            // SAFETY: the buffers hold what is sent and received, and are this rank's.
            unsafe { engine.all_to_all_v(from.place, send, to.place, &receive, i32::DTYPE) }
                .unwrap();
            assert!(to.read::<i32>(received) == expected, "rank {rank}");
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_matrix_arrives_whole(matrix in matrix(), windows: u16) {
        check(&matrix, windows, small_scratch);
    }

    #[test]
    fn any_matrix_arrives_whole_with_default_scratch(matrix in matrix(), windows: u16) {
        check(&matrix, windows, HostEngineOptions::default);
    }
}

#[test]
fn what_all_send_to_one_arrives_whole_whichever_rank_writes_it() {
    // Senders write nearly all of it if rank 0's output is a window, and nothing if it is not. Long outputs are written
    // past the caches.
    for count in [15_001, 400_000] {
        let matrix: Vec<Vec<usize>> = (0..4).map(|rank| vec![count + rank, 3, 0, rank]).collect();
        for windows in [0xff, 0xef, 0xfb] {
            check(&matrix, windows, HostEngineOptions::default);
        }
    }
}

#[test]
fn a_slow_consumer_reads_what_it_was_sent() {
    // S1: ranks 1 and 2 send each other nothing, and in every third call nobody sends anything. S4: they are in the
    // next call while rank 0 still reads what they wrote into its output.
    let count = 50_000;
    let heap = FlatHeap::new(3, 1, 16 * count as u64, &small_scratch());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let from = TestBuffer::window(&heap, rank, 0, 4 * count);
        let to = TestBuffer::window(&heap, rank, 4 * count as u64, 8 * count);
        for call in 0..30 {
            let count = if call % 3 == 2 { 0 } else { count };
            let send = if rank == 0 { [0; 3] } else { [count, 0, 0] };
            let receive = if rank == 0 { [0, count, count] } else { [0; 3] };
            from.write(&vec![10 * call + rank as i32; send[0]]);
            let (from, out) = (from.place, to.place);
            // SAFETY: the windows hold what is sent and received, and are this rank's.
            unsafe { engine.all_to_all_v(from, &send, out, &receive, i32::DTYPE) }.unwrap();
            if rank == 0 {
                std::thread::sleep(Duration::from_millis(3));
                let expected = [vec![10 * call + 1; count], vec![10 * call + 2; count]].concat();
                assert!(to.read::<i32>(2 * count) == expected, "call {call}");
            }
        }
    });
}

#[test]
fn counts_that_disagree_are_an_error_before_a_sender_writes() {
    // S6
    let count = 50_000;
    let heap = FlatHeap::new(2, 1, 16 * count as u64, &small_scratch());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let from = TestBuffer::window(&heap, rank, 0, 4 * count);
        let to = TestBuffer::window(&heap, rank, 4 * count as u64, 8 * count);
        from.write(&vec![1i32; count]);
        to.write(&vec![7i32; 2 * count]);
        for more in [1, 0, 1] {
            let send = if rank == 0 { [0, 0] } else { [count, 0] };
            let receive = if rank == 0 { [0, count + more] } else { [0, 0] };
            let (from, out) = (from.place, to.place);
            // SAFETY: the windows hold what is sent and received, and are this rank's.
            let done = unsafe { engine.all_to_all_v(from, &send, out, &receive, i32::DTYPE) };
            if more == 0 {
                done.unwrap();
                to.write(&vec![7i32; 2 * count]);
            } else {
                assert!(done.unwrap_err().is_diverged());
                engine.barrier().unwrap();
                assert!(to.read::<i32>(2 * count) == vec![7; 2 * count], "rank {rank}");
            }
        }
    });
}

#[test]
fn a_large_direct_exchange_takes_the_streaming_path() {
    let count = 3 << 20;
    let heap = FlatHeap::new(2, 1, 64 << 20, &HostEngineOptions::default());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, HostEngineOptions::default());
        let from = TestBuffer::window(&heap, rank, 4, 2 * count * 4);
        let to = TestBuffer::window(&heap, rank, (32 << 20) + 4, 2 * count * 4);
        from.write(&input::<i32>(6, rank, 2 * count));
        // SAFETY: both windows hold twice `count` elements and are this rank's.
        unsafe { engine.all_to_all(from.place, to.place, count, i32::DTYPE) }.unwrap();
        let got = to.read::<i32>(2 * count);
        let own = rank as usize * count;
        for (peer, part) in (0..2).zip(got.chunks(count)) {
            assert!(part == &input::<i32>(6, peer, 2 * count)[own..own + count]);
        }
    });
}

#[test]
fn all_to_all_on_one_rank_may_meet_all_to_all_v_on_others() {
    const MATRIX: [[usize; 3]; 3] = [[3, 1, 2], [1, 1, 1], [2, 1, 3]];
    let heap = FlatHeap::new(3, 1, 1 << 16, &small_scratch());
    heap.ranks(|rank| {
        let me = rank as usize;
        let mut engine = heap.engine(rank, 0, small_scratch());
        let (from, to) = (TestBuffer::plain(24, 0), TestBuffer::plain(24, 0));
        from.write(&[me as i32; 6]);
        for _ in 0..3 {
            to.write(&[-1; 6]);
            let receive = MATRIX.map(|row| row[me]);
            let (from, out) = (from.place, to.place);
            let done = if rank == 1 {
                // SAFETY: both buffers hold what is sent and received, and are this rank's.
                unsafe { engine.all_to_all(from, out, 1, i32::DTYPE) }
            } else {
                // SAFETY: both buffers hold what is sent and received, and are this rank's.
                unsafe { engine.all_to_all_v(from, &MATRIX[me], out, &receive, i32::DTYPE) }
            };
            done.unwrap();
            let came = (0..).zip(receive).flat_map(|(peer, count)| vec![peer; count]);
            let mut wanted: Vec<i32> = came.collect();
            wanted.resize(6, -1);
            assert_eq!(to.read::<i32>(6), wanted);
        }
        // If the counts do not agree, the error names the counts, not the calls.
        // SAFETY: both buffers hold what is sent and received, and are this rank's.
        let done = unsafe { engine.all_to_all(from.place, to.place, 1 + me / 2, i32::DTYPE) };
        let error = done.unwrap_err();
        assert!(error.is_diverged(), "{error}");
        assert!(error.to_string().contains("rank 2 sends 2 elements to rank 0, which expects 1"));
        engine.barrier().unwrap();
    });
}

#[test]
fn an_error_lists_the_first_counts_that_disagree_and_how_many_more_there_are() {
    // S6
    for world in [2, 3] {
        let heap = FlatHeap::new(world, 1, 1 << 16, &small_scratch());
        heap.ranks(|rank| {
            let mut engine = heap.engine(rank, 0, small_scratch());
            let (from, to) = (TestBuffer::plain(24, 0), TestBuffer::plain(24, 0));
            let (send, receive) = (vec![1; world as usize], vec![2; world as usize]);
            let (from, out) = (from.place, to.place);
            // SAFETY: both buffers hold what is sent and received, and are this rank's.
            let done = unsafe { engine.all_to_all_v(from, &send, out, &receive, i32::DTYPE) };
            let text = done.unwrap_err().to_string();
            assert_eq!(text.matches("sends 1 elements").count(), 4, "{text}");
            assert_eq!(text.contains("and 5 more pairs"), world == 3, "{text}");
            assert_eq!(text.contains("more pairs"), world == 3, "{text}");
        });
    }
}
