//! Ranks that are interrupted while they wait for others, and report for which ranks they waited.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use symmpool_allocator::store::FileStore;
use symmpool_allocator::{Deadline, Group};

fn long() -> Deadline {
    Deadline::seconds(300)
}

fn interrupted() -> bool {
    true
}

/// A port of a loopback address that no other test uses, so that nobody else takes the port meanwhile.
fn address(host: &str) -> String {
    TcpListener::bind((host, 0)).unwrap().local_addr().unwrap().to_string()
}

#[test]
fn a_rank_that_waits_for_the_server_can_be_interrupted() {
    let begun = Instant::now();
    // An address where nobody listens, and one where the listener does not answer.
    let silent = TcpListener::bind("127.0.0.26:0").unwrap();
    for address in [address("127.0.0.27"), silent.local_addr().unwrap().to_string()] {
        let asked = AtomicBool::new(false);
        let second = move || asked.swap(true, Ordering::Relaxed);
        let error =
            Group::over_tcp_with_interrupt(1, 2, &address, None, long(), second).unwrap_err();
        assert!(error.is_invalid_state(), "{error}");
        let text = error.to_string();
        assert!(text.contains("interrupted while connecting to the store"), "{text}");
        assert!(text.contains("no answer from rank 0"), "{text}");
    }
    assert!(begun.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_rank_that_waits_in_the_tcp_store_can_be_interrupted() {
    let address = address("127.0.0.28");
    let ask = Arc::new(AtomicBool::new(false));
    let asked = ask.clone();
    let zero = Group::over_tcp_with_interrupt(0, 3, &address, None, long(), move || {
        asked.load(Ordering::Relaxed)
    })
    .unwrap();
    let others = [1, 2].map(|rank| Group::over_tcp(rank, 3, &address, None, long()).unwrap());
    let begun = Instant::now();
    ask.store(true, Ordering::Relaxed);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let soon = Deadline::after(Duration::from_secs(5));
            let error = others[0].all_gather("all", b"", soon).unwrap_err();
            // The interrupted rank takes back its part, so that no rank goes on without it.
            assert!(error.is_timeout() && error.ranks() == [2], "{error}");
        });
        std::thread::sleep(Duration::from_millis(500));
        let error = zero.all_gather("all", b"", long()).unwrap_err();
        assert!(error.is_invalid_state(), "{error}");
        let text = error.to_string();
        assert!(text.contains("interrupted while waiting for other ranks"), "{text}");
        assert!(text.contains("no answer from rank 2"), "{text}");
        assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    });
    // The interrupted rank's connection serves the next call.
    ask.store(false, Ordering::Relaxed);
    std::thread::scope(|scope| {
        for group in others.iter().chain([&zero]) {
            // A child group counts its own gathers, because one rank did not take part in the first.
            let child = group.child("more");
            scope.spawn(move || child.all_gather("all", b"", long()).unwrap());
        }
    });
}

#[test]
fn a_rank_that_waits_in_a_directory_can_be_interrupted() {
    let directory = tempfile::tempdir().unwrap();
    let store = Arc::new(FileStore::open(directory.path()).unwrap());
    let group = Group::new(1, 3, store).unwrap().with_interrupt(interrupted);
    let begun = Instant::now();
    for _ in 0..2 {
        let error = group.all_gather("all", b"", long()).unwrap_err();
        assert!(error.is_invalid_state(), "{error}");
        assert!(error.to_string().contains("no answer from ranks 0, 2"), "{error}");
    }
    assert!(begun.elapsed() < Duration::from_secs(30));
}
