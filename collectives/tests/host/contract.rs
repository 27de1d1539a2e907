//! Promises to ranks when a call is wrong: different calls are the same error on every rank before data is accessed,
//! and a rank that refuses its arguments is reported to all.

use crate::flat_heap::{FlatHeap, TestBuffer, small_scratch};
use crate::oracle::input;
use symmpool_allocator::Result;
use symmpool_collectives::{
    AllReduceAlgorithm, DType, Element, HostEngine, HostEngineOptions, Place, ReduceOp,
};

const AUTO: AllReduceAlgorithm = AllReduceAlgorithm::Auto;

/// Makes a different call on some ranks. All ranks must get the same mismatch, nothing may be written, and the next
/// call must work. Returns the error's text.
fn mismatch(
    world: u32,
    call: impl Fn(&mut HostEngine, &TestBuffer, &TestBuffer) -> Result<()> + Sync,
) -> String {
    let heap = FlatHeap::new(world, 1, 1 << 18, &small_scratch());
    let messages = heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let window = TestBuffer::window(&heap, rank, 0, 1 << 16);
        let plain = TestBuffer::plain(1 << 16, 0);
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
    // S6. The large counts take other paths than the small ones; the handshake comes first on all of them.
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
            // The call is in place on one rank, and not on the other.
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
    // S6, for arguments that differ between ranks by design.
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
fn a_refused_argument_on_one_rank_is_reported_to_all() {
    let heap = FlatHeap::new(3, 1, 4096, &small_scratch());
    let errors = heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let buffer = TestBuffer::plain(4096, 0);
        let overlapping = if rank == 1 { buffer.part(4) } else { buffer.part(2048) };
        // SAFETY: the buffer holds 4096 bytes; overlap is what is refused.
        let first = unsafe {
            engine.all_reduce(buffer.place, overlapping, 64, DType::F32, ReduceOp::Sum, AUTO)
        };
        // A window past the end of the slot, one that overlaps the control block, and an invalid root.
        // SAFETY: each is refused before memory is accessed.
        let beyond = unsafe { engine.broadcast(Place::Window(1 << 40), 8, DType::U8, 0) };
        assert!(beyond.unwrap_err().is_invalid_argument());
        // SAFETY: it is refused before memory is accessed.
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
        assert!(errors[rank].to_string().contains("rank 1: a call that the rank itself declined"));
    }
}

#[test]
fn options_that_differ_are_named() {
    let heap = FlatHeap::new(2, 1, 0, &HostEngineOptions::default());
    heap.ranks(|rank| {
        let scratch_bytes = if rank == 0 { 4096 } else { 8192 };
        let options = HostEngineOptions { scratch_bytes, ..HostEngineOptions::default() };
        let error = heap.engine(rank, 0, options).barrier().unwrap_err();
        assert!(error.is_diverged() && error.to_string().contains("different options"), "{error}");
    });
}

#[test]
fn what_does_not_fit_is_refused_when_built() {
    let heap = FlatHeap::new(2, 1, 0, &small_scratch());
    let layout = heap.layout(0);
    let try_new = |layout, offset, bytes, options| {
        // SAFETY: each is refused before memory is accessed.
        unsafe { HostEngine::new(layout, offset, bytes, options) }.unwrap_err()
    };
    let fits = HostEngine::control_bytes(2, &small_scratch()).unwrap();
    let zero_epoch = HostEngineOptions { first_epoch: 0, ..small_scratch() };
    let odd_scratch = HostEngineOptions { scratch_bytes: 100, ..small_scratch() };
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
fn elements_may_lie_at_the_end_of_a_page() {
    // `exact` covers other places for every type.
    let heap = FlatHeap::new(2, 1, 4096, &small_scratch());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let last = TestBuffer::window(&heap, rank, 4096 - 8, 8);
        last.write(&[f64::from(rank)]);
        let two = AllReduceAlgorithm::TwoShot;
        // SAFETY: the window holds the one element.
        unsafe { engine.all_reduce(last.place, last.place, 1, f64::DTYPE, ReduceOp::Sum, two) }
            .unwrap();
        assert_eq!(last.read::<f64>(1), [1.0]);
    });
}
