//! Tests of what a device's allocator promises torch, on the simulated driver.

use super::*;

const MIB: u64 = 1 << 20;

fn device() -> DeviceAllocator {
    DeviceAllocator::new(Driver::sim(1), Some(1 << 30)).unwrap()
}

#[test]
fn ordinary_memory_is_reused_at_once_in_any_order() {
    let device = device();
    let a = device.alloc(1000, Stream::DEFAULT).unwrap();
    let b = device.alloc(1000, Stream::DEFAULT).unwrap();
    device.free(a).unwrap();
    assert_eq!(device.alloc(900, Stream::DEFAULT).unwrap(), a);
    assert!(device.free(b + 512).is_err() && device.free(7).is_err());
    device.free(b).unwrap();
    assert!(device.free(b).unwrap_err().is_invalid_argument());
    let stats = device.stats().unwrap();
    assert_eq!((stats.allocs, stats.frees, stats.allocated), (3, 2, 1024));
    assert_eq!(stats.peak_allocated, 2048);
    let (start, bytes) = device.segment(a).unwrap();
    assert!(start <= a && a < start + bytes);
    device.reset_peaks().unwrap();
    assert_eq!(device.stats().unwrap().peak_allocated, 1024);
}

#[test]
fn a_graphs_memory_is_its_own_until_the_graph_is_gone() {
    let device = device();
    let before = device.alloc(4096, Stream::DEFAULT).unwrap();
    device.begin((0, 1)).unwrap();
    let inside = device.alloc(4096, Stream::DEFAULT).unwrap();
    // The graph's block can be reused at once; the ordinary block waits for the end of the capture.
    device.free(inside).unwrap();
    assert_eq!(device.alloc(4096, Stream::DEFAULT).unwrap(), inside);
    device.free(inside).unwrap();
    device.free(before).unwrap();
    assert_eq!(device.stats().unwrap().frees, 2);
    assert!(device.trim().unwrap_err().is_invalid_state());
    device.end((0, 1)).unwrap();
    assert_eq!(device.stats().unwrap().frees, 3);
    assert_eq!(device.alloc(4096, Stream::DEFAULT).unwrap(), before);
    assert_ne!(device.alloc(4096, Stream::DEFAULT).unwrap(), inside);
    // Then another graph on the same memory, and one with memory of its own.
    device.begin((0, 1)).unwrap();
    assert_eq!(device.alloc(4096, Stream::DEFAULT).unwrap(), inside);
    device.end((0, 1)).unwrap();
    device.begin((0, 2)).unwrap();
    let other = device.alloc(4096, Stream::DEFAULT).unwrap();
    device.end((0, 2)).unwrap();
    assert_eq!(device.stats().unwrap().graphs, 2);
    device.release((0, 1)).unwrap();
    device.release((0, 1)).unwrap();
    assert!(device.release((0, 1)).is_err() && device.end((0, 1)).is_err());
    // A block of the first graph is alive, so its lane is still taken.
    device.begin((0, 3)).unwrap();
    let third = device.alloc(4096, Stream::DEFAULT).unwrap();
    assert!(third != inside && third != other);
    device.end((0, 3)).unwrap();
    device.free(inside).unwrap();
    device.begin((0, 4)).unwrap();
    assert_eq!(device.alloc(4096, Stream::DEFAULT).unwrap(), inside);
    device.end((0, 4)).unwrap();
}

#[test]
fn emptying_the_cache_leaves_graphs_the_memory_that_replays_use() {
    let device = device();
    let ordinary = device.alloc(4096, Stream::DEFAULT).unwrap();
    device.free(ordinary).unwrap();
    let mut segments = Vec::new();
    for graph in [(0, 1), (0, 2)] {
        // torch empties the cache before it captures.
        device.trim().unwrap();
        assert_eq!(
            device.stats().unwrap().reserved,
            segments.iter().map(|(_, bytes)| bytes).sum::<u64>()
        );
        device.begin(graph).unwrap();
        let inside = device.alloc(4096, Stream::DEFAULT).unwrap();
        let segment = device.segment(inside).unwrap();
        device.free(inside).unwrap();
        device.end(graph).unwrap();
        segments.push(segment);
    }
    assert_eq!(device.trim().unwrap(), 0);
    for &(start, bytes) in &segments {
        assert_eq!(device.segment(start).unwrap(), (start, bytes));
    }
    device.release((0, 1)).unwrap();
    assert_eq!(device.trim().unwrap(), segments[0].1);
    assert!(device.segment(segments[0].0).is_err());
    device.release((0, 2)).unwrap();
    device.trim().unwrap();
    assert_eq!(device.stats().unwrap().reserved, 0);
}

#[test]
fn other_threads_allocate_ordinary_memory_meanwhile() {
    let device = device();
    device.begin((0, 1)).unwrap();
    let inside = device.alloc(4096, Stream::DEFAULT).unwrap();
    let outside = std::thread::scope(|scope| {
        scope.spawn(|| device.alloc(4096, Stream::DEFAULT).unwrap()).join().unwrap()
    });
    assert!(device.lane_of(inside).unwrap() > 0);
    assert_eq!(device.lane_of(outside).unwrap(), 0);
}

#[test]
fn graphs_run_out_with_an_error_and_come_back() {
    let device = device();
    for graph in 0..GRAPHS as u64 {
        device.begin((0, graph)).unwrap();
        device.end((0, graph)).unwrap();
    }
    assert!(device.begin((1, 0)).unwrap_err().is_invalid_state());
    device.release((0, 5)).unwrap();
    device.begin((1, 0)).unwrap();
}

#[test]
fn memory_whose_use_could_not_be_recorded_is_not_reused() {
    let device = device();
    let a = device.alloc(4096, Stream::numbered(0)).unwrap();
    assert!((1..64).all(|stream| device.record_stream(a, Stream::numbered(stream)).is_ok()));
    assert!(device.record_stream(a, Stream::numbered(64)).is_err());
    assert!(device.free(a).unwrap_err().is_invalid_state());
    assert_ne!(device.alloc(4096, Stream::numbered(0)).unwrap(), a);
}

#[test]
fn a_fraction_bounds_allocations() {
    let device = device();
    assert!(device.set_fraction(1.5).is_err() && device.set_fraction(f64::NAN).is_err());
    device.set_fraction(0.25).unwrap();
    let a = device.alloc(200 * MIB as usize, Stream::DEFAULT).unwrap();
    assert!(device.alloc(100 * MIB as usize, Stream::DEFAULT).unwrap_err().is_out_of_memory());
    assert_eq!(device.stats().unwrap().ooms, 1);
    device.free(a).unwrap();
    device.alloc(250 * MIB as usize, Stream::DEFAULT).unwrap();
}

#[test]
fn memory_of_two_streams_moves_between_them_and_back_to_the_device() {
    let device = device();
    let (one, two) = (Stream::numbered(1), Stream::numbered(2));
    for _ in 0..200 {
        let a = device.alloc(100 * MIB as usize, one).unwrap();
        device.record_stream(a, two).unwrap();
        device.free(a).unwrap();
        let b = device.alloc(100 * MIB as usize, two).unwrap();
        device.free(b).unwrap();
    }
    let stats = device.stats().unwrap();
    assert!(stats.peak_reserved <= 256 * MIB, "{stats:?}");
    assert!(device.trim().unwrap() >= 100 * MIB);
    let stats = device.stats().unwrap();
    assert_eq!((stats.reserved, stats.allocated), (0, 0));
    assert!(stats.peak_reserved >= 100 * MIB);
}
