//! Tests of what the TCP store has alone: secrets, declared ranks, lost processes, a lost server.

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use symmpool_allocator::store::tcp::{Secret, TcpLimits, TcpOptions};
use symmpool_allocator::store::{Store, TcpServer, TcpStore};
use symmpool_allocator::testing::{role, this_test_as};
use symmpool_allocator::{Deadline, Error};

fn ample() -> Deadline {
    Deadline::seconds(60)
}

fn brief() -> Deadline {
    Deadline::after(Duration::from_millis(100))
}

fn server() -> TcpServer {
    TcpServer::bind("127.0.0.1:0", TcpOptions::default()).unwrap()
}

fn hosted_by_0() -> TcpOptions {
    TcpOptions { hosted_by: Some(0), ..TcpOptions::default() }
}

fn with_secret(secret: &str) -> TcpOptions {
    TcpOptions { secret: Some(Secret::new(secret).unwrap()), ..TcpOptions::default() }
}

fn declare(server: &TcpServer, rank: u32) -> Result<TcpStore, Error> {
    TcpStore::connect_as(server.local_addr(), hosted_by_0(), rank, ample())
}

/// Waits until the server has seen that `rank`'s connections are closed.
fn declare_again(server: &TcpServer, rank: u32) -> TcpStore {
    let deadline = ample();
    loop {
        match declare(server, rank) {
            Ok(store) => return store,
            Err(error) if error.is_refused() && !deadline.expired() => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_server_without_a_secret_stays_on_loopback() {
    for open in ["0.0.0.0:0", "[::]:0"] {
        let error = TcpServer::bind(open, TcpOptions::default()).unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
        assert!(error.to_string().contains("secret"), "{error}");
    }
    let server = TcpServer::bind("0.0.0.0:0", with_secret("s")).unwrap();
    let addr = SocketAddr::from(([127, 0, 0, 1], server.local_addr().port()));
    TcpStore::connect(addr, with_secret("s"), ample()).unwrap().set("k", b"v", ample()).unwrap();
}

#[test]
fn a_wrong_or_missing_secret_is_refused_and_the_server_stays_up() {
    let server = TcpServer::bind("127.0.0.1:0", with_secret("right")).unwrap();
    let connect = |options| TcpStore::connect(server.local_addr(), options, ample());
    for _ in 0..3 {
        let error = connect(with_secret("wrong")).unwrap_err();
        assert!(error.is_refused(), "{error}");
        assert!(!error.to_string().contains("wrong"), "{error}");
        let error = connect(TcpOptions::default()).unwrap_err();
        assert!(error.is_refused(), "{error}");
    }
    let store = connect(with_secret("right")).unwrap();
    assert_eq!(store.add("n", 1, ample()).unwrap(), 1);
}

#[test]
fn a_client_with_a_secret_does_not_trust_a_server_without() {
    let server = server();
    let error = TcpStore::connect(server.local_addr(), with_secret("s"), ample()).unwrap_err();
    assert!(error.is_refused(), "{error}");
}

#[test]
fn connecting_waits_for_the_server_to_come_up() {
    // The port is free again once this is dropped. No other test uses this address, so none takes the port.
    let addr = TcpListener::bind("127.0.0.7:0").unwrap().local_addr().unwrap();
    std::thread::scope(|scope| {
        let client = scope.spawn(|| TcpStore::connect(addr, TcpOptions::default(), ample()));
        let error = TcpStore::connect(addr, hosted_by_0(), brief()).unwrap_err();
        assert!(error.is_timeout(), "{error}");
        assert_eq!(error.ranks(), [0]);
        let _server = TcpServer::bind(addr, TcpOptions::default()).unwrap();
        client.join().unwrap().unwrap().set("k", b"v", ample()).unwrap();
    });
}

#[test]
fn a_listener_that_says_nothing_is_waited_for_until_the_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let begun = Instant::now();
    let error =
        TcpStore::connect(listener.local_addr().unwrap(), hosted_by_0(), brief()).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(30));
}

#[test]
fn two_live_ranks_with_one_number_are_refused() {
    let server = server();
    let first = declare(&server, 3).unwrap();
    let error = declare(&server, 3).unwrap_err();
    assert!(error.is_refused(), "{error}");
    assert!(error.to_string().contains("two ranks with number 3"), "{error}");
    first.set("k", b"v", ample()).unwrap();
    drop(first);
    assert_eq!(declare_again(&server, 3).get("k", ample()).unwrap(), b"v");
}

#[test]
fn a_declared_rank_has_one_number_on_all_its_connections() {
    let server = server();
    let store = declare(&server, 1).unwrap();
    let error = store.all_gather("g", 0, 2, b"", ample()).unwrap_err();
    assert!(error.is_invalid_argument(), "{error}");
    // A second call at once opens a second connection of the same rank.
    std::thread::scope(|scope| {
        let getter = scope.spawn(|| {
            store.set("started", b"", ample()).unwrap();
            store.get("later", ample())
        });
        store.get("started", ample()).unwrap();
        store.set("later", b"x", ample()).unwrap();
        assert_eq!(getter.join().unwrap().unwrap(), b"x");
    });
}

#[test]
fn a_lost_rank_ends_waits_at_once_and_names_itself() {
    let server = server();
    let stores: Vec<_> = (0..3).map(|rank| declare(&server, rank).unwrap()).collect();
    let [zero, one, two] = <[TcpStore; 3]>::try_from(stores).unwrap();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        // Whether they wait already or come later, ranks 0 and 1 must not wait for rank 2.
        let threads = [(&zero, 0), (&one, 1)].map(|(store, rank)| {
            scope.spawn(move || store.all_gather("g", rank, 3, b"", Deadline::seconds(300)))
        });
        drop(two);
        for thread in threads {
            let error = thread.join().unwrap().unwrap_err();
            assert!(error.is_peer_lost(), "{error}");
            assert_eq!(error.ranks(), [2]);
        }
    });
    assert!(begun.elapsed() < Duration::from_secs(60));
    // Without it they go on, and with its successor too.
    let two = declare_again(&server, 2);
    std::thread::scope(|scope| {
        for (store, rank) in [(&zero, 0), (&one, 1), (&two, 2)] {
            scope.spawn(move || store.all_gather("h", rank, 3, b"", ample()).unwrap());
        }
    });
}

/// The process of this test again, as rank 1 of 2; killed while the others still need it.
#[test]
fn a_killed_process_is_a_lost_rank() {
    if let Some(addr) = role() {
        let store = TcpStore::connect_as(addr, hosted_by_0(), 1, ample()).unwrap();
        store.all_gather("first", 1, 2, b"child", ample()).unwrap();
        // Reports that it is ready, then waits to be killed.
        println!("gathered");
        let _ = store.get("never", Deadline::seconds(300));
        return;
    }
    let server = server();
    let store = declare(&server, 0).unwrap();
    let addr = server.local_addr().to_string();
    let mut child = this_test_as("a_killed_process_is_a_lost_rank", &addr)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let first = store.all_gather("first", 0, 2, b"parent", ample()).unwrap();
    assert_eq!(first.part(1), b"child");
    let stdout = BufReader::new(child.stdout.take().unwrap());
    assert!(stdout.lines().any(|line| line.unwrap().contains("gathered")));
    let second = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| store.all_gather("second", 0, 2, b"", Deadline::seconds(300)));
        child.kill().unwrap();
        child.wait().unwrap();
        waiting.join().unwrap()
    });
    let error = second.unwrap_err();
    assert!(error.is_peer_lost(), "{error}");
    assert_eq!(error.ranks(), [1]);
}

#[test]
fn a_part_outlives_the_connection_it_came_on() {
    let server = server();
    let (zero, one) = (declare(&server, 0).unwrap(), declare(&server, 1).unwrap());
    let undeclared = TcpStore::connect(server.local_addr(), hosted_by_0(), ample()).unwrap();
    std::thread::scope(|scope| {
        let one = scope.spawn(move || one.all_gather("g", 1, 2, b"one", ample()).unwrap());
        assert_eq!(zero.all_gather("g", 0, 2, b"zero", ample()).unwrap().part(1), b"one");
        one.join().unwrap();
    });
    // Rank 1 is gone now, which does not concern a client that declared no rank.
    undeclared.all_gather("solo", 0, 1, b"", ample()).unwrap();
    let error = zero.all_gather("h", 0, 2, b"", ample()).unwrap_err();
    assert_eq!(error.ranks(), [1]);
}

#[test]
fn a_lost_server_is_its_hosts_loss() {
    // An address of its own, so that no other test takes the port before the successor does.
    let server = TcpServer::bind("127.0.0.8:0", TcpOptions::default()).unwrap();
    let addr = server.local_addr();
    let waiting = declare(&server, 1).unwrap();
    let anonymous = TcpStore::connect(addr, TcpOptions::default(), ample()).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let getter = scope.spawn(|| {
            sender.send(()).unwrap();
            waiting.get("never", Deadline::seconds(300))
        });
        receiver.recv().unwrap();
        drop(server);
        let error = getter.join().unwrap().unwrap_err();
        assert!(error.is_peer_lost(), "{error}");
        assert_eq!(error.ranks(), [0]);
        assert!(error.to_string().contains(&addr.to_string()), "{error}");
    });
    // A successor at the same address has none of the content: it is not silently joined.
    let _successor = TcpServer::bind(addr, TcpOptions::default()).unwrap();
    assert!(waiting.set("k", b"", ample()).unwrap_err().is_peer_lost());
    let error = anonymous.set("k", b"", ample()).unwrap_err();
    assert!(!error.is_timeout() && error.to_string().contains("is gone"), "{error}");
}

#[test]
fn a_wait_that_hears_of_a_lost_rank_can_still_be_cancelled() {
    let server = server();
    let [zero, one, two] = [0, 1, 2].map(|rank| declare(&server, rank).unwrap());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let asked = || stop.load(Ordering::Relaxed);
            zero.all_gather_until("g", 0, 2, b"", Deadline::seconds(300), Some(&asked))
        });
        // The server says so to rank 0, which waits or is about to.
        drop(two);
        drop(declare_again(&server, 2));
        stop.store(true, Ordering::Relaxed);
        let error = waiting.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("interrupted while waiting for other ranks"), "{error}");
    });
    // Rank 0's part was taken back and its connection lives, so nobody lost it.
    std::thread::scope(|scope| {
        let gathers = [(&zero, 0), (&one, 1)].map(|(store, rank)| {
            scope.spawn(move || store.all_gather("g", rank, 2, &[rank as u8], ample()).unwrap())
        });
        for gather in gathers {
            assert_eq!(gather.join().unwrap().part(1), [1]);
        }
    });
}

/// How the process of rank 0, which serves the store, ends in the next test.
const ENDS: [&str; 3] = ["dropped", "exited", "killed"];

/// One of the other processes of the next test, by its role: `host END` or `rank 1 ADDRESS`.
fn other_process(role: &str) {
    let Some(("host", end)) = role.split_once(' ') else {
        let addr: SocketAddr = role.rsplit(' ').next().unwrap().parse().unwrap();
        let store = TcpStore::connect_as(addr, hosted_by_0(), 1, ample()).unwrap();
        store.all_gather("all", 1, 3, b"", ample()).unwrap();
        // Until it is killed.
        let _ = store.get("never", Deadline::seconds(300));
        return;
    };
    let server = server();
    println!("address {}", server.local_addr());
    let store = declare(&server, 0).unwrap();
    store.all_gather("all", 0, 3, b"", ample()).unwrap();
    // Only ranks 0 and 1 gather, so the third learns nothing of it. Nobody leaves in the last case but this process.
    let limit = Deadline::seconds(300);
    let lost = store.all_gather("two", 0, 2, b"", limit).unwrap_err();
    assert_eq!(lost.ranks(), [1]);
    if end == "exited" {
        // The process ends as an interpreter does: nothing is dropped.
        std::process::exit(0);
    }
}

/// A process of the next test, which is killed at the latest when the test ends.
struct Other(std::process::Child);

impl Drop for Other {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_server_that_left_because_of_another_rank_does_not_make_its_host_the_lost_one() {
    const NAME: &str =
        "a_server_that_left_because_of_another_rank_does_not_make_its_host_the_lost_one";
    if let Some(role) = role() {
        return other_process(&role);
    }
    for end in ENDS {
        let mut host = this_test_as(NAME, &format!("host {end}"));
        let mut host = Other(host.stdout(Stdio::piped()).spawn().unwrap());
        let stdout = BufReader::new(host.0.stdout.take().unwrap());
        let mut lines = stdout.lines().map(Result::unwrap);
        let addr: SocketAddr = lines
            .find_map(|line| line.split_once("address ").map(|(_, addr)| addr.parse().unwrap()))
            .unwrap();
        let rank_1 = this_test_as(NAME, &format!("rank 1 {addr}")).stdout(Stdio::null()).spawn();
        let mut rank_1 = Other(rank_1.unwrap());
        let store = TcpStore::connect_as(addr, hosted_by_0(), 2, ample()).unwrap();
        store.all_gather("all", 2, 3, b"", ample()).unwrap();
        // This rank is in no call while the first of the others leaves.
        let first = if end == "killed" { &mut host } else { &mut rank_1 };
        first.0.kill().unwrap();
        host.0.wait().unwrap();
        let begun = Instant::now();
        let error = store.all_gather("three", 2, 3, b"", Deadline::seconds(300)).unwrap_err();
        assert!(error.is_peer_lost() && begun.elapsed() < Duration::from_secs(60), "{error}");
        let (lost, other) = if end == "killed" { (0, "no other rank") } else { (1, "rank 0") };
        assert_eq!(error.ranks(), [lost], "{end}: {error}");
        assert!(error.to_string().contains(other), "{end}: {error}");
    }
}

#[test]
fn what_does_not_fit_is_refused_and_the_connection_lives() {
    let limits = TcpLimits { max_memory: 1 << 20, ..TcpLimits::default() };
    let server =
        TcpServer::bind("127.0.0.1:0", TcpOptions { limits, ..TcpOptions::default() }).unwrap();
    let store = declare(&server, 0).unwrap();
    store.set("a", &[1; 600 << 10], ample()).unwrap();
    for _ in 0..3 {
        let error = store.set("b", &[2; 600 << 10], ample()).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
    }
    assert!(store.delete("a", ample()).unwrap());
    store.set("b", &[2; 600 << 10], ample()).unwrap();
    assert_eq!(store.get("b", ample()).unwrap(), [2; 600 << 10]);
}

#[test]
fn connections_are_limited_and_come_free_again() {
    let limits = TcpLimits { max_connections: 2, ..TcpLimits::default() };
    let server =
        TcpServer::bind("127.0.0.1:0", TcpOptions { limits, ..TcpOptions::default() }).unwrap();
    let one = declare(&server, 0).unwrap();
    let two = declare(&server, 1).unwrap();
    let error = declare(&server, 2).unwrap_err();
    assert!(error.is_refused(), "{error}");
    assert!(error.to_string().contains("2 connections"), "{error}");
    one.set("k", b"", ample()).unwrap();
    drop(two);
    declare_again(&server, 2).get("k", ample()).unwrap();
}
