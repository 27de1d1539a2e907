//! A store's server in a process that may open only a few files. Every server runs in a process of its own,
//! because it changes the limits of its process.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, setrlimit};
use symmpool_allocator::Deadline;
use symmpool_allocator::store::tcp::{TcpLimits, TcpOptions};
use symmpool_allocator::store::{Store, TcpServer, TcpStore};
use symmpool_allocator::testing::{role, this_test_as};

fn ample() -> Deadline {
    Deadline::seconds(60)
}

/// Limits this process to opening `more` files than it has open.
fn limit_files(more: u64) {
    let used = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let few = Rlimit { current: Some(used + more), maximum: Some(used + more) };
    setrlimit(Resource::Nofile, few).unwrap();
}

/// A server process, and its output.
struct Serving(Child, BufReader<ChildStdout>);

/// Runs the test of this name in another process, as a server; returns that and its address.
fn server(test: &str) -> (Serving, SocketAddr) {
    let mut child =
        this_test_as(test, "serve").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("at ") {
        line.clear();
        assert_ne!(output.read_line(&mut line).unwrap(), 0, "it ended");
    }
    let address = line["at ".len()..].trim_end().parse().unwrap();
    (Serving(child, output), address)
}

/// In the server process: prints the server's address, and serves until the input ends.
fn serve(server: &TcpServer) {
    println!("\nat {}", server.local_addr());
    std::io::stdout().flush().unwrap();
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
}

fn end(serving: Serving) {
    let Serving(mut child, mut output) = serving;
    drop(child.stdin.take());
    // Read to its end, so that the process can write.
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert!(child.wait().unwrap().success(), "{rest}");
}

#[test]
fn a_hundred_idle_connections_keep_no_rank_out() {
    if role().is_some() {
        limit_files(30);
        return serve(&TcpServer::bind("127.0.0.1:0", TcpOptions::default()).unwrap());
    }
    let (child, address) = server("a_hundred_idle_connections_keep_no_rank_out");
    let idle: Vec<_> = (0..100).map(|_| TcpStream::connect(address).unwrap()).collect();
    let begun = Instant::now();
    let stores: Vec<TcpStore> = (0..4)
        .map(|rank| TcpStore::connect_as(address, TcpOptions::default(), rank, ample()).unwrap())
        .collect();
    assert!(begun.elapsed() < TcpLimits::default().handshake / 2, "{:?}", begun.elapsed());
    stores[3].set("k", b"v", ample()).unwrap();
    assert_eq!(stores[0].get("k", ample()).unwrap(), b"v");
    drop((idle, stores));
    end(child);
}

#[test]
fn a_server_without_descriptors_says_so() {
    if role().is_some() {
        limit_files(10);
        let server = TcpServer::bind("127.0.0.1:0", TcpOptions::default()).unwrap();
        let mut open = Vec::new();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            open.push(file);
        }
        return serve(&server);
    }
    let (child, address) = server("a_server_without_descriptors_says_so");
    let options = TcpOptions { hosted_by: Some(0), ..TcpOptions::default() };
    for _ in 0..3 {
        let soon = Deadline::after(Duration::from_millis(300));
        let error = TcpStore::connect_as(address, options.clone(), 1, soon).unwrap_err();
        assert!(error.is_timeout() && error.ranks() == [0], "{error}");
        assert!(error.to_string().contains("no file descriptor is left in process"), "{error}");
        assert!(error.to_string().contains(&child.0.id().to_string()), "{error}");
    }
    end(child);
}

#[test]
fn a_client_without_descriptors_says_so() {
    if role().is_some() {
        let server = TcpServer::bind("127.0.0.1:0", TcpOptions::default()).unwrap();
        limit_files(4);
        let mut open = Vec::new();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            open.push(file);
        }
        let error = TcpStore::connect(server.local_addr(), TcpOptions::default(), ample());
        let error = error.unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        assert!(error.to_string().contains("no file descriptor is left"), "{error}");
        let error = TcpServer::bind("127.0.0.1:0", TcpOptions::default()).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        open.clear();
        return serve(&server);
    }
    let (child, _) = server("a_client_without_descriptors_says_so");
    end(child);
}
