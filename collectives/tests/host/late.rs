//! Ranks that come late, are stopped, or never come: every wait ends, and nobody writes to the memory of a rank that
//! has given up.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::flat_heap::{FlatHeap, TestBuffer, small_scratch};
use symmpool_allocator::Error;
use symmpool_collectives::{AllReduceAlgorithm, Element, HostEngine, HostEngineOptions, ReduceOp};

#[test]
fn a_missing_rank_is_named_and_the_communicator_stays_failed() {
    // S5: rank 2 never comes; rank 0 gives up first and reports that to rank 1.
    let heap = FlatHeap::new(3, 1, 0, &small_scratch());
    let began = Instant::now();
    let errors = heap.ranks(|rank| -> Option<[Error; 2]> {
        let timeout = Duration::from_millis(if rank == 0 { 300 } else { 60_000 });
        let mut engine = heap.engine(rank, 0, HostEngineOptions { timeout, ..small_scratch() });
        engine.barrier().unwrap();
        if rank == 2 {
            return None;
        }
        let first = engine.all_reduce_slice(&mut [1.0f32], ReduceOp::Sum).unwrap_err();
        Some([first, engine.barrier().unwrap_err()])
    });
    assert!(began.elapsed() < Duration::from_secs(30), "nothing was reported to rank 1");
    for errors in errors.into_iter().flatten() {
        assert!(errors[0].is_timeout(), "{}", errors[0]);
        assert_eq!(errors[0].ranks(), [2]);
        let text = errors[0].to_string();
        assert!(text.contains("rank 2 in all_reduce, call 2, handshake"), "{text}");
        assert!(text.contains("300.0ms"), "not how long rank 0 waited: {text}");
        assert_eq!(errors[1].to_string(), text, "later calls fail with the same cause");
    }
}

#[test]
fn a_late_rank_notices_the_abort() {
    // S5: rank 1 comes after rank 0 has given up, and finds rank 0's handshake, but rank 0 never makes a step.
    let heap = FlatHeap::new(2, 1, 0, &small_scratch());
    let mut late = heap.engine(1, 0, small_scratch());
    let timeout = Duration::from_millis(100);
    let mut first = heap.engine(0, 0, HostEngineOptions { timeout, ..small_scratch() });
    let mut data = vec![1.0f32; 5000];
    assert!(first.all_reduce_slice(&mut data, ReduceOp::Sum).unwrap_err().is_timeout());
    let error = late.all_reduce_slice(&mut data, ReduceOp::Sum).unwrap_err();
    assert!(
        error.is_timeout() && error.to_string().contains("rank 0 reported to rank 1"),
        "{error}"
    );
    assert_eq!(error.ranks(), [1]);
}

#[test]
fn a_late_rank_writes_no_share_of_what_one_that_gave_up_receives() {
    // S5: by load balancing, rank 1 would write nearly all that it sends to rank 0.
    let count = 100_000;
    let heap = FlatHeap::new(2, 1, 16 * count as u64, &small_scratch());
    let mut late = heap.engine(1, 0, small_scratch());
    let timeout = Duration::from_millis(100);
    let mut first = heap.engine(0, 0, HostEngineOptions { timeout, ..small_scratch() });
    let exchange = |engine: &mut HostEngine, rank: u32| {
        let from = TestBuffer::window(&heap, rank, 0, 4 * count);
        let to = TestBuffer::window(&heap, rank, 4 * count as u64, 8 * count);
        from.write(&vec![1.0f32; count]);
        to.write(&vec![7.0f32; 2 * count]);
        let receive = if rank == 0 { [count, count] } else { [0, 0] };
        let (from, place) = (from.place, to.place);
        // SAFETY: the windows hold what is sent and received, and are this rank's.
        let done = unsafe { engine.all_to_all_v(from, &[count, 0], place, &receive, f32::DTYPE) };
        (done, to)
    };
    let (given_up, to) = exchange(&mut first, 0);
    assert!(given_up.unwrap_err().is_timeout());
    let error = exchange(&mut late, 1).0.unwrap_err();
    assert!(error.is_timeout() && error.ranks() == [1], "{error}");
    assert_eq!(to.read::<f32>(2 * count), vec![7.0f32; 2 * count]);
}

#[test]
fn a_rank_stopped_amid_a_call_writes_no_share_of_what_one_that_gave_up_receives() {
    // S5: rank 1 is stopped after the handshake, while it waits for rank 0's step, until rank 0, which waits for a
    // step of rank 1 then, has given up and uses its output for something else.
    static ENTERED: AtomicBool = AtomicBool::new(false);
    static STOPPED: AtomicBool = AtomicBool::new(false);
    static GIVEN_UP: AtomicBool = AtomicBool::new(false);
    fn until(flag: &AtomicBool) {
        let began = Instant::now();
        while !flag.load(Ordering::SeqCst) {
            assert!(began.elapsed() < Duration::from_secs(20), "a rank does not come so far");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    // Rank 2's data goes through scratch in three pieces. Rank 1's is far above the mean load, so rank 1 writes it
    // itself. With more pieces, rank 1 would wait in another step, which rank 0 does not reach.
    let (pieces, count) = (1200, 100_000);
    let sends = [[0, 0, 0], [count, 0, 0], [pieces, 0, 0]];
    let heap = FlatHeap::new(3, 1, 16 * count as u64, &small_scratch());
    heap.ranks(|rank| {
        // This is called while a rank waits for that peer.
        let peer_alive = move |peer: u32| {
            match (rank, peer) {
                (0, 2) => {
                    ENTERED.store(true, Ordering::SeqCst);
                    until(&STOPPED);
                }
                (1, 0) => {
                    STOPPED.store(true, Ordering::SeqCst);
                    until(&GIVEN_UP);
                }
                _ => {}
            }
            true
        };
        let timeout = Duration::from_millis(if rank == 0 { 300 } else { 60_000 });
        let peer_alive = Some(Box::new(peer_alive) as _);
        let mut engine =
            heap.engine(rank, 0, HostEngineOptions { timeout, peer_alive, ..small_scratch() });
        let from = match rank {
            2 => TestBuffer::plain(4 * pieces, 0),
            _ => TestBuffer::window(&heap, rank, 0, 4 * count),
        };
        let to = TestBuffer::window(&heap, rank, 4 * count as u64, 8 * count);
        from.write(&vec![1.0f32; sends[rank as usize].iter().sum()]);
        if rank == 2 {
            until(&ENTERED);
        }
        let (send, receive) = (sends[rank as usize], sends.map(|row| row[rank as usize]));
        // SAFETY: the buffers hold what is sent and received, and are this rank's.
        let done =
            unsafe { engine.all_to_all_v(from.place, &send, to.place, &receive, f32::DTYPE) };
        let error = done.unwrap_err();
        assert!(error.is_timeout() && error.ranks() == [1], "rank {rank}: {error}");
        if rank == 0 {
            to.write(&vec![7.0f32; 2 * count]);
            GIVEN_UP.store(true, Ordering::SeqCst);
        }
    });
    let to = TestBuffer::window(&heap, 0, 4 * count as u64, 8 * count);
    assert!(to.read::<f32>(2 * count) == vec![7.0f32; 2 * count]);
}

#[test]
fn a_late_rank_leaves_the_windows_of_one_that_gave_up_alone() {
    // S5: rank 0's handshake is there, and matches; but rank 0 has given up on that call, and may use its memory for
    // something else.
    for algorithm in [AllReduceAlgorithm::OneShot, AllReduceAlgorithm::TwoShot] {
        let count = 500;
        let heap = FlatHeap::new(2, 1, 1 << 16, &small_scratch());
        let mut late = heap.engine(1, 0, small_scratch());
        let timeout = Duration::from_millis(100);
        let mut first = heap.engine(0, 0, HostEngineOptions { timeout, ..small_scratch() });
        let windows = [0, 1].map(|rank| TestBuffer::window(&heap, rank, 0, count * 4));
        let reduce = |engine: &mut HostEngine, rank: usize| {
            let place = windows[rank].place;
            // SAFETY: the window holds `count` elements, and both ranks use it in this call only.
            unsafe { engine.all_reduce(place, place, count, f32::DTYPE, ReduceOp::Sum, algorithm) }
        };
        windows[1].write(&vec![1.0f32; count]);
        assert!(reduce(&mut first, 0).unwrap_err().is_timeout());
        windows[0].write(&vec![7.0f32; count]);
        let error = reduce(&mut late, 1).unwrap_err();
        assert!(error.is_timeout() && error.ranks() == [1], "{error}");
        assert_eq!(windows[0].read::<f32>(count), vec![7.0f32; count], "{algorithm:?}");
        assert_eq!(windows[1].read::<f32>(count), vec![1.0f32; count], "{algorithm:?}");
    }
}

#[test]
fn a_dead_peer_is_found_long_before_the_deadline() {
    let heap = FlatHeap::new(3, 1, 0, &small_scratch());
    let began = Instant::now();
    let errors = heap.ranks(|rank| {
        if rank == 1 {
            return None;
        }
        let peer_alive: Box<dyn Fn(u32) -> bool + Send> = Box::new(|peer| peer != 1);
        let options = HostEngineOptions { peer_alive: Some(peer_alive), ..small_scratch() };
        Some(heap.engine(rank, 0, options).barrier().unwrap_err())
    });
    assert!(began.elapsed() < Duration::from_secs(20));
    for error in errors.into_iter().flatten() {
        assert!(error.is_peer_lost() && error.ranks() == [1], "{error}");
    }
}
