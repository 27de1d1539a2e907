//! Calls that are refused: by a rank itself, and all-to-alls that differ between ranks in more than their parts.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::flat_heap::{FlatHeap, TestBuffer, small_scratch};
use symmpool_collectives::{AllToAllAlgorithm, DType, Element, HostEngineOptions, Place, ReduceOp};

#[test]
fn wrong_numbers_of_counts_on_one_rank_are_an_error_on_all() {
    let heap = FlatHeap::new(3, 1, 1 << 16, &small_scratch());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let (from, to) = (TestBuffer::plain(16, 0), TestBuffer::plain(16, 0));
        for (sends, receives) in [(2, 3), (3, 2), (4, 3), (3, 4), (0, 0)] {
            let (sends, receives) = if rank == 1 { (sends, receives) } else { (3, 3) };
            let (send, receive) = (vec![1; sends], vec![1; receives]);
            let (from, out) = (from.place, to.place);
            // SAFETY: both buffers hold what is sent and received, and are this rank's.
            let done = unsafe { engine.all_to_all_v(from, &send, out, &receive, i32::DTYPE) };
            let error = done.unwrap_err();
            if rank == 1 {
                let counts = format!("{sends} send and {receives} receive counts for 3 ranks");
                assert!(error.is_invalid_argument(), "{error}");
                assert!(error.to_string().contains(&counts), "{error}");
            } else {
                assert!(error.is_diverged(), "{error}");
            }
        }
        engine.barrier().unwrap();
    });
}

#[test]
fn a_rank_that_refuses_a_call_returns_at_once_and_the_next_call_names_a_missing_rank() {
    // S5: its peers learn of the refusal as of any call.
    let heap = FlatHeap::new(2, 1, 0, &small_scratch());
    let timeout = Duration::from_millis(300);
    let mut engine = heap.engine(0, 0, HostEngineOptions { timeout, ..small_scratch() });
    let began = Instant::now();
    for _ in 0..3 {
        let error = engine.broadcast_slice(&mut [0_u8], 2).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("root 2"), "{error}");
    }
    assert!(began.elapsed() < timeout, "waited for rank 1");
    let error = engine.barrier().unwrap_err();
    assert!(error.is_timeout() && error.ranks() == [1], "{error}");
    assert!(error.to_string().contains("declined its own call before (root 2"), "{error}");
    assert!(engine.barrier().unwrap_err().is_timeout());
}

#[test]
fn calls_that_were_refused_ahead_of_the_other_ranks_are_reported_one_by_one() {
    // S4, S6
    let heap = FlatHeap::new(3, 1, 1 << 16, &small_scratch());
    let refused = Barrier::new(3);
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let mut data = [rank as i32; 8];
        for round in 0..4 {
            // This uses the scratch that the call before the last one used.
            engine.all_reduce_slice(&mut data, ReduceOp::Max).unwrap();
            if rank == round % 3 {
                for _ in 0..3 {
                    assert!(
                        engine.broadcast_slice(&mut data, 9).unwrap_err().is_invalid_argument()
                    );
                }
                refused.wait();
            } else {
                refused.wait();
                for _ in 0..3 {
                    let error = engine.all_reduce_slice(&mut data, ReduceOp::Sum).unwrap_err();
                    assert!(error.is_diverged() && error.ranks() == [round % 3], "{error}");
                }
            }
            engine.all_reduce_slice(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [6 * 3_i32.pow(round); 8]);
        }
    });
}

#[test]
fn all_to_alls_that_differ_in_more_than_their_parts_are_errors() {
    // S6: the rows agree to the byte.
    let heap = FlatHeap::new(3, 1, 1 << 16, &small_scratch());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let (from, to) = (TestBuffer::plain(24, 0), TestBuffer::plain(24, 0));
        to.write(&[7_u8; 24]);
        let (from, out, counts) = (from.place, to.place, [2; 3]);
        for other in 0..4 {
            let done = match other {
                // SAFETY: both buffers hold six elements of four bytes and are this rank's, as below.
                0 if rank == 1 => unsafe {
                    engine.all_to_all_v(from, &counts, out, &counts, DType::F32)
                },
                // SAFETY: both buffers hold six elements of four bytes and are this rank's.
                1 if rank == 1 => unsafe { engine.all_to_all(from, out, 2, DType::F32) },
                // SAFETY: both buffers hold six elements of four bytes and are this rank's.
                2 if rank == 1 => unsafe { engine.all_gather(from, out, 2, DType::I32) },
                3 if rank == 1 => engine.barrier(),
                // SAFETY: both buffers hold six elements of four bytes and are this rank's.
                _ => unsafe { engine.all_to_all_v(from, &counts, out, &counts, DType::I32) },
            };
            let error = done.unwrap_err();
            assert!(error.is_diverged(), "{error}");
            assert!(error.to_string().contains("ranks 0, 2: all_to_all_v of i32"), "{error}");
            assert_eq!(to.read::<u8>(24), [7; 24], "nothing was written");
        }
        engine.barrier().unwrap();
    });
}

#[test]
fn all_to_alls_of_ranks_with_different_options_are_errors() {
    // S6
    let heap = FlatHeap::new(2, 1, 1 << 16, &small_scratch());
    heap.ranks(|rank| {
        let all_to_all = [AllToAllAlgorithm::Lamport, AllToAllAlgorithm::Direct][rank as usize];
        let mut engine = heap.engine(rank, 0, HostEngineOptions { all_to_all, ..small_scratch() });
        let from = TestBuffer::window(&heap, rank, 0, 8);
        let to = TestBuffer::window(&heap, rank, 64, 8);
        // SAFETY: both windows hold two elements and are this rank's.
        let done = unsafe { engine.all_to_all(from.place, to.place, 1, i32::DTYPE) };
        let error = done.unwrap_err();
        assert!(error.is_diverged() && error.to_string().contains("different options"), "{error}");
    });
}

#[test]
fn gathers_and_scatters_at_different_offsets_are_errors() {
    // S6, for few elements and for many, which take different paths.
    let heap = FlatHeap::new(2, 1, 1 << 17, &small_scratch());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let window = TestBuffer::window(&heap, rank, 0, 1 << 17);
        window.write(&vec![7_u8; 1 << 17]);
        let (first, second) = (window.part(0), window.part(1 << 16));
        let (here, there) = (first, window.part(64 * rank as usize));
        for count in [8, 3000] {
            for parity in 0..2 {
                // SAFETY: each place has 64 KiB behind it, more than two parts, as below.
                let sent = unsafe { engine.all_gather(there, second, count, DType::F32) };
                let there_too = window.part((1 << 16) - 64 * rank as usize);
                // SAFETY: each place has 64 KiB behind it, more than two parts.
                let written = unsafe { engine.all_gather(here, there_too, count, DType::F32) };
                let sum = ReduceOp::Sum;
                // SAFETY: each place has 64 KiB behind it, more than two parts.
                let reduced =
                    unsafe { engine.reduce_scatter(there, second, count, DType::F32, sum) };
                for done in [sent, written, reduced] {
                    let error = done.unwrap_err();
                    assert!(error.is_diverged(), "{count}, {parity}: {error}");
                }
            }
        }
        assert!(window.read::<u8>(1 << 17) == vec![7; 1 << 17], "nothing was written");
        engine.barrier().unwrap();
    });
}

#[test]
fn invalid_addresses_are_refused_unless_there_are_no_elements() {
    let heap = FlatHeap::new(2, 1, 0, &small_scratch());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let buffer = TestBuffer::plain(16, 0);
        buffer.write(&[rank as i32; 4]);
        let null = Place::Unregistered(std::ptr::null_mut());
        let last = Place::Unregistered(std::ptr::without_provenance_mut(usize::MAX - 3));
        for place in [null, last] {
            // SAFETY: refused before memory is accessed, which is what is tested.
            let error = unsafe { engine.broadcast(place, 4, DType::I32, 0) }.unwrap_err();
            assert!(error.to_string().contains("is not memory"), "{error}");
        }
        // SAFETY: no element is touched.
        unsafe { engine.broadcast(null, 0, DType::I32, 0) }.unwrap();
        // Rank 0 receives nothing and rank 1 sends nothing, so their empty buffers may overlap the other one.
        let (from, to) = (buffer.place, buffer.part(4));
        let (send, receive) = if rank == 0 { ([0, 4], [0, 0]) } else { ([0, 0], [4, 0]) };
        let (from, to) = if rank == 0 { (from, to) } else { (to, from) };
        // SAFETY: the buffer holds what is sent or received, and is this rank's.
        unsafe { engine.all_to_all_v(from, &send, to, &receive, DType::I32) }.unwrap();
        assert_eq!(buffer.read::<i32>(4), [0; 4]);
    });
}
