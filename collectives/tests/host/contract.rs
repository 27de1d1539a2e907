//! What ranks may rely on when something is wrong: differences are the same error everywhere
//! before data is touched, every wait ends, and whatever failed is told.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Buffer, Heap, Oracle, bits, input, noise, reduced, small_scratch};
use symmpool_allocator::{Error, Result};
use symmpool_collectives::{
    AllReduceAlgorithm, DType, Element, HostEngine, HostOptions, Place, ReduceOp,
};

const AUTO: AllReduceAlgorithm = AllReduceAlgorithm::Auto;

/// Every rank makes its own call; all must get the same mismatch, nothing may be written, and the
/// next call must work. Returns the message.
fn mismatch(
    world: u32,
    call: impl Fn(&mut HostEngine, &Buffer, &Buffer) -> Result<()> + Sync,
) -> String {
    let heap = Heap::new(world, 1, 1 << 18, &small_scratch());
    let messages = heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let window = Buffer::window(&heap, rank, 0, 1 << 16);
        let plain = Buffer::plain(1 << 16, 0);
        let before = input::<u8>(9, rank, 1 << 16);
        window.write(&before);
        plain.write(&before);
        // Twice, for both parities.
        let errors = [(); 2].map(|()| call(&mut engine, &window, &plain).unwrap_err());
        assert!(window.read::<u8>(1 << 16) == before && plain.read::<u8>(1 << 16) == before);
        assert!(engine.failure().is_none());
        let mut sum = [rank as i32 + 1];
        engine.all_reduce_slice(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum[0], (world * (world + 1) / 2) as i32);
        errors
    });
    for errors in &messages {
        assert!(errors[0].is_diverged(), "{}", errors[0]);
        assert_eq!(errors[0].to_string(), messages[0][0].to_string());
        assert_eq!(errors[1].to_string(), messages[0][1].to_string());
    }
    messages[0][0].to_string()
}

fn reduce(engine: &mut HostEngine, place: Place, count: usize, dtype: DType) -> Result<()> {
    // SAFETY: the buffers of `mismatch` hold 64 KiB, more than any count here.
    unsafe { engine.all_reduce(place, place, count, dtype, ReduceOp::Sum, AUTO) }
}

#[test]
fn each_difference_is_the_same_error_on_every_rank() {
    // S6. The large counts take other paths than the small ones; entry comes first on all.
    for count in [8, 12_000] {
        let text = mismatch(3, |engine, window, _| {
            let odd = usize::from(engine.rank() == 1);
            reduce(engine, window.place, count + odd, DType::F32)
        });
        assert!(text.contains(&format!("ranks 0, 2: all_reduce sum of {count} f32")), "{text}");
        assert!(text.contains(&format!("rank 1: all_reduce sum of {} f32", count + 1)), "{text}");

        let text = mismatch(3, |engine, window, _| {
            let dtype = if engine.rank() == 2 { DType::I32 } else { DType::F32 };
            reduce(engine, window.place, count, dtype)
        });
        assert!(text.contains("rank 2: all_reduce sum of"), "{text}");

        let text = mismatch(2, |engine, window, _| {
            let op = if engine.rank() == 0 { ReduceOp::Max } else { ReduceOp::Sum };
            // SAFETY: the window holds 64 KiB.
            unsafe { engine.all_reduce(window.place, window.place, count, DType::F32, op, AUTO) }
        });
        assert!(text.contains("rank 0: all_reduce max"), "{text}");

        let text = mismatch(2, |engine, window, plain| {
            let place = if engine.rank() == 0 { plain.place } else { window.place };
            reduce(engine, place, count, DType::F32)
        });
        assert!(text.contains("ordinary memory") && text.contains("window offset"), "{text}");

        let text = mismatch(2, |engine, window, _| {
            let place = window.part(64 * engine.rank() as usize);
            reduce(engine, place, count, DType::F32)
        });
        assert!(text.contains("window offset"), "{text}");

        let text = mismatch(4, |engine, window, _| {
            let root = u32::from(engine.rank() == 3);
            // SAFETY: the window holds 64 KiB.
            unsafe { engine.broadcast(window.place, count, DType::F32, root) }
        });
        assert!(text.contains("ranks 0-2: broadcast of"), "{text}");
        assert!(text.contains("from rank 1 in place"), "{text}");

        let text = mismatch(2, |engine, window, _| match engine.rank() {
            0 => engine.barrier(),
            _ => reduce(engine, window.place, count, DType::F32),
        });
        assert!(text.contains("rank 0: barrier"), "{text}");

        mismatch(2, |engine, window, _| {
            let algorithm = [AllReduceAlgorithm::OneShot, AllReduceAlgorithm::TwoShot];
            let algorithm = algorithm[engine.rank() as usize];
            let (place, op) = (window.place, ReduceOp::Sum);
            // SAFETY: the window holds 64 KiB.
            unsafe { engine.all_reduce(place, place, count, DType::F32, op, algorithm) }
        });

        mismatch(2, |engine, _, plain| {
            let rank = engine.rank() as usize;
            // In place on one rank, not on the other.
            let to = plain.part(50_000 * rank * usize::from(count == 8));
            if rank == 0 || count == 8 {
                // SAFETY: the buffer holds 64 KiB: 50,000 bytes and 8 elements, or 48,000 bytes.
                unsafe {
                    engine.all_reduce(plain.place, to, count, DType::F32, ReduceOp::Sum, AUTO)
                }
            } else {
                engine.barrier()
            }
        });
    }
}

#[test]
fn counts_that_disagree_name_sender_and_receiver() {
    // S6, for what differs between ranks by design.
    let text = mismatch(3, |engine, window, _| {
        let mut receive = [4, 4, 4];
        if engine.rank() == 2 {
            receive[1] = 3;
        }
        let output = window.part(1024);
        // SAFETY: the window holds 64 KiB: input and output of 12 elements each.
        unsafe { engine.all_to_all_v(window.place, &[4, 4, 4], output, &receive, DType::F64) }
    });
    assert!(text.contains("rank 1 sends 4 elements to rank 2, which expects 3"), "{text}");
}

#[test]
fn a_refused_argument_on_one_rank_is_told_to_all() {
    let heap = Heap::new(3, 1, 4096, &small_scratch());
    let errors = heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let buffer = Buffer::plain(4096, 0);
        let overlapping = if rank == 1 { buffer.part(4) } else { buffer.part(2048) };
        // SAFETY: the buffer holds 4096 bytes; overlap is what is refused.
        let first = unsafe {
            engine.all_reduce(buffer.place, overlapping, 64, DType::F32, ReduceOp::Sum, AUTO)
        };
        // A window past the end of the slot, one over the control block, a root that is no rank.
        // SAFETY: each is refused before memory is touched.
        let beyond = unsafe { engine.broadcast(Place::Window(1 << 40), 8, DType::U8, 0) };
        assert!(beyond.unwrap_err().is_invalid_argument());
        // SAFETY: as above.
        let over = unsafe { engine.broadcast(Place::Window(64), 8, DType::U8, 0) };
        assert!(over.unwrap_err().to_string().contains("control block"));
        let root = engine.broadcast_slice(&mut [0u8], 3);
        assert!(root.unwrap_err().is_invalid_argument());
        let lengths = engine.all_reduce_slices(&[1.0f32; 3], &mut [0.0; 4], ReduceOp::Sum);
        assert!(lengths.unwrap_err().is_invalid_argument());
        engine.barrier().unwrap();
        first.unwrap_err()
    });
    assert!(errors[1].is_invalid_argument(), "{}", errors[1]);
    for rank in [0, 2] {
        assert!(errors[rank].is_diverged());
        assert!(errors[rank].to_string().contains("rank 1: a call with arguments"));
    }
}

#[test]
fn options_that_differ_are_named() {
    let heap = Heap::new(2, 1, 0, &HostOptions::default());
    heap.ranks(|rank| {
        let scratch_bytes = if rank == 0 { 4096 } else { 8192 };
        let options = HostOptions { scratch_bytes, ..HostOptions::default() };
        let error = heap.engine(rank, 0, options).barrier().unwrap_err();
        assert!(error.is_diverged() && error.to_string().contains("different options"), "{error}");
    });
}

#[test]
fn a_missing_rank_is_named_and_the_communicator_stays_closed() {
    // S5: rank 2 never comes; rank 0 gives up first and tells rank 1.
    let heap = Heap::new(3, 1, 0, &small_scratch());
    let began = Instant::now();
    let errors = heap.ranks(|rank| -> Option<[Error; 2]> {
        let timeout = Duration::from_millis(if rank == 0 { 300 } else { 60_000 });
        let mut engine = heap.engine(rank, 0, HostOptions { timeout, ..small_scratch() });
        engine.barrier().unwrap();
        if rank == 2 {
            return None;
        }
        let first = engine.all_reduce_slice(&mut [1.0f32], ReduceOp::Sum).unwrap_err();
        Some([first, engine.barrier().unwrap_err()])
    });
    assert!(began.elapsed() < Duration::from_secs(30), "rank 1 was not told");
    for errors in errors.into_iter().flatten() {
        assert!(errors[0].is_timeout(), "{}", errors[0]);
        assert_eq!(errors[0].ranks(), [2]);
        let text = errors[0].to_string();
        assert!(text.contains("rank 2 in all_reduce, call 2, entry"), "{text}");
        assert!(text.contains("300.0ms"), "not how long rank 0 waited: {text}");
        assert_eq!(errors[1].to_string(), text, "later calls fail with the same cause");
    }
}

#[test]
fn a_late_rank_hears_of_the_abort() {
    // S5: rank 1 comes after rank 0 has given up, and finds rank 0's entry but never its own step.
    let heap = Heap::new(2, 1, 0, &small_scratch());
    let mut late = heap.engine(1, 0, small_scratch());
    let timeout = Duration::from_millis(100);
    let mut first = heap.engine(0, 0, HostOptions { timeout, ..small_scratch() });
    let mut data = vec![1.0f32; 5000];
    assert!(first.all_reduce_slice(&mut data, ReduceOp::Sum).unwrap_err().is_timeout());
    let error = late.all_reduce_slice(&mut data, ReduceOp::Sum).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("rank 0 told rank 1"), "{error}");
    assert_eq!(error.ranks(), [1]);
}

#[test]
fn a_late_rank_writes_no_share_of_what_one_that_gave_up_receives() {
    // S5: rank 1 would write nearly all that it sends to rank 0, which both know from their rows.
    let count = 100_000;
    let heap = Heap::new(2, 1, 16 * count as u64, &small_scratch());
    let mut late = heap.engine(1, 0, small_scratch());
    let timeout = Duration::from_millis(100);
    let mut first = heap.engine(0, 0, HostOptions { timeout, ..small_scratch() });
    let exchange = |engine: &mut HostEngine, rank: u32| {
        let from = Buffer::window(&heap, rank, 0, 4 * count);
        let to = Buffer::window(&heap, rank, 4 * count as u64, 8 * count);
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
    // S5: rank 1 is stopped past its entry, as it waits for rank 0's step, until rank 0, which waits for a
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
    // Through scratch in three pieces; and far above the mean, which rank 1 writes. With more pieces rank 1
    // would meet another step that rank 0 does not come to.
    let (pieces, count) = (1200, 100_000);
    let sends = [[0, 0, 0], [count, 0, 0], [pieces, 0, 0]];
    let heap = Heap::new(3, 1, 16 * count as u64, &small_scratch());
    heap.ranks(|rank| {
        // Whoever is asked waits for that peer.
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
            heap.engine(rank, 0, HostOptions { timeout, peer_alive, ..small_scratch() });
        let from = match rank {
            2 => Buffer::plain(4 * pieces, 0),
            _ => Buffer::window(&heap, rank, 0, 4 * count),
        };
        let to = Buffer::window(&heap, rank, 4 * count as u64, 8 * count);
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
    let to = Buffer::window(&heap, 0, 4 * count as u64, 8 * count);
    assert!(to.read::<f32>(2 * count) == vec![7.0f32; 2 * count]);
}

#[test]
fn a_late_rank_leaves_the_windows_of_one_that_gave_up_alone() {
    // S5: rank 0's entry is there, and matches; but rank 0 has given up on that call, and may use
    // its memory for something else.
    for algorithm in [AllReduceAlgorithm::OneShot, AllReduceAlgorithm::TwoShot] {
        let count = 500;
        let heap = Heap::new(2, 1, 1 << 16, &small_scratch());
        let mut late = heap.engine(1, 0, small_scratch());
        let timeout = Duration::from_millis(100);
        let mut first = heap.engine(0, 0, HostOptions { timeout, ..small_scratch() });
        let windows = [0, 1].map(|rank| Buffer::window(&heap, rank, 0, count * 4));
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
    let heap = Heap::new(3, 1, 0, &small_scratch());
    let began = Instant::now();
    let errors = heap.ranks(|rank| {
        if rank == 1 {
            return None;
        }
        let peer_alive: Box<dyn Fn(u32) -> bool + Send> = Box::new(|peer| peer != 1);
        let options = HostOptions { peer_alive: Some(peer_alive), ..small_scratch() };
        Some(heap.engine(rank, 0, options).barrier().unwrap_err())
    });
    assert!(began.elapsed() < Duration::from_secs(20));
    for error in errors.into_iter().flatten() {
        assert!(error.is_peer_lost() && error.ranks() == [1], "{error}");
    }
}

#[test]
fn epochs_wrap_unnoticed() {
    // S2: the low half of the entry word passes zero; steps are far from the epoch's value.
    for first_epoch in [(1 << 32) - 3, (1 << 32) - 2, u64::MAX >> 1] {
        let options = || HostOptions { first_epoch, ..small_scratch() };
        let heap = Heap::new(3, 1, 1 << 16, &options());
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

/// One call of a random kind, checked.
fn any_call(heap: &Heap, engine: &mut HostEngine, windows: (u64, u64), seed: u64) {
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
            let from = Buffer::window(heap, rank, windows.0, count * 4);
            let to = Buffer::window(heap, rank, windows.1, count * 4);
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

#[test]
fn a_hundred_thousand_mixed_calls() {
    // S1, S2, S4: any call may follow any other, with ranks at their own speed.
    let heap = Heap::new(2, 1, 1 << 16, &small_scratch());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        for seed in 0..100_000 {
            any_call(&heap, &mut engine, (0, 1 << 15), seed);
        }
    });
}

#[test]
fn mixed_calls_of_more_ranks_than_cores() {
    let heap = Heap::new(5, 1, 1 << 16, &small_scratch());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        for seed in 0..3_000 {
            any_call(&heap, &mut engine, (0, 1 << 15), seed);
        }
    });
}

#[test]
fn two_communicators_do_not_disturb_each_other() {
    let heap = Heap::new(3, 2, 1 << 17, &small_scratch());
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

#[test]
fn what_does_not_fit_is_refused_when_built() {
    let heap = Heap::new(2, 1, 0, &small_scratch());
    let layout = heap.layout(0);
    let try_new = |layout, offset, bytes, options| {
        // SAFETY: each is refused before memory is touched.
        unsafe { HostEngine::new(layout, offset, bytes, options) }.unwrap_err()
    };
    let fits = HostEngine::control_bytes(2, &small_scratch()).unwrap();
    let zero_epoch = HostOptions { first_epoch: 0, ..small_scratch() };
    let odd_scratch = HostOptions { scratch_bytes: 100, ..small_scratch() };
    let beyond = symmpool_allocator::HeapLayout { rank: 2, ..layout };
    for error in [
        try_new(layout, 0, fits - 1, small_scratch()),
        try_new(layout, 64, fits, small_scratch()),
        try_new(layout, layout.stride, fits, small_scratch()),
        try_new(layout, u64::MAX - 127, fits, small_scratch()),
        try_new(layout, 0, fits, zero_epoch),
        try_new(layout, 0, fits, odd_scratch),
        try_new(beyond, 0, fits, small_scratch()),
    ] {
        assert!(error.is_invalid_argument(), "{error}");
    }
}

#[test]
fn elements_may_lie_anywhere_an_element_may() {
    // Covered for every type in `exact`; here: a slice of one element at the end of a page.
    let heap = Heap::new(2, 1, 4096, &small_scratch());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let last = Buffer::window(&heap, rank, 4096 - 8, 8);
        last.write(&[f64::from(rank)]);
        let two = AllReduceAlgorithm::TwoShot;
        // SAFETY: the window holds the one element.
        unsafe { engine.all_reduce(last.place, last.place, 1, f64::DTYPE, ReduceOp::Sum, two) }
            .unwrap();
        assert_eq!(last.read::<f64>(1), [1.0]);
    });
}
