//! Tests that need a process of their own: its open files are counted or limited, or it is killed.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Stdio};
use std::sync::Barrier;

use rustix::process::{Resource, Rlimit};

use super::{SECRET, borrowed, exchange_tagged, keep_nothing, soon, tagged, with_sockets};
use crate::rendezvous::sockets::{Listener, PeerSockets};
use crate::testing::{role, this_test_as};

#[test]
fn nothing_stays_open() {
    const NAME: &str = "rendezvous::sockets::tests::processes::nothing_stays_open";
    if role().is_none() {
        // Other tests of this process open files too, so this one counts in a process of its own.
        let status = this_test_as(NAME, "count").stdout(Stdio::null()).status().unwrap();
        assert!(status.success());
        return;
    }
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    let done = Barrier::new(3);
    with_sockets(3, |rank, mut peers| {
        exchange_tagged(&mut peers, rank, 3, 300);
        done.wait();
        if rank == 0 {
            return;
        }
        // Descriptors on their way to a rank that gave up are closed as well.
        let mine: Vec<OwnedFd> = (0..300).map(|index| tagged(rank, index)).collect();
        peers.exchange(&borrowed(&mine), 300, &mut keep_nothing, soon()).unwrap_err();
    });
    assert_eq!(open(), before);
}

#[test]
fn at_the_limit_of_open_files_it_says_so() {
    const NAME: &str =
        "rendezvous::sockets::tests::processes::at_the_limit_of_open_files_it_says_so";
    if role().is_none() {
        let status = this_test_as(NAME, "limited").stdout(Stdio::null()).status().unwrap();
        assert!(status.success());
        return;
    }
    with_sockets(2, |rank, mut peers| {
        let mine: Vec<OwnedFd> = (0..20).map(|index| tagged(rank, index)).collect();
        exchange_tagged(&mut peers, rank, 2, 0);
        if rank == 1 {
            let used = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
            let few = Rlimit { current: Some(used + 5), maximum: Some(used + 5) };
            rustix::process::setrlimit(Resource::Nofile, few).unwrap();
        }
        exchange_tagged(&mut peers, rank, 2, 0);
        let mut kept = Vec::new();
        let mut keep = |_, _, fds| {
            kept.push(fds);
            Ok(())
        };
        let first = peers.exchange(&borrowed(&mine), 20, &mut keep, soon());
        // Both ranks are this process; whichever is first runs out, the other hears of it, if
        // only in the next exchange.
        let next = first.and_then(|_| peers.exchange(&[], 0, &mut keep, soon()));
        let error = next.unwrap_err();
        assert!(error.is_out_of_memory() || error.is_peer_lost(), "{error}");
        assert!(error.to_string().contains("RLIMIT_NOFILE"), "{error}");
    });
}

/// A rank in a process of its own: it connects, says so, and exchanges descriptors without end.
fn rank_to_be_killed() {
    let read_line = || {
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line).unwrap();
        line.trim().to_owned()
    };
    let listener = Listener::bind().unwrap();
    println!("\nlistening {}", listener.name());
    let names = read_line();
    let names: Vec<_> = names.split(' ').map(Some).collect();
    let mut peers = PeerSockets::connect(listener, 1, &names, &SECRET, soon()).unwrap();
    let mine: Vec<OwnedFd> = (0..300).map(|index| tagged(1, index)).collect();
    for round in 1.. {
        let done = peers.exchange(&borrowed(&mine), 300, &mut keep_nothing, soon());
        if done.is_err() {
            return;
        }
        if round == 3 {
            println!("\nexchanging");
        }
    }
}

fn line_with(child: &mut BufReader<std::process::ChildStdout>, word: &str) -> String {
    loop {
        let mut line = String::new();
        assert_ne!(child.read_line(&mut line).unwrap(), 0, "the child left");
        if let Some(rest) = line.trim().strip_prefix(word) {
            return rest.trim().to_owned();
        }
    }
}

#[test]
fn a_process_killed_in_an_exchange_is_named_by_all() {
    const NAME: &str =
        "rendezvous::sockets::tests::processes::a_process_killed_in_an_exchange_is_named_by_all";
    if role().is_some() {
        rank_to_be_killed();
        return;
    }
    let mut child: Child =
        this_test_as(NAME, "rank 1").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let theirs = line_with(&mut output, "listening");
    let (zero, two) = (Listener::bind().unwrap(), Listener::bind().unwrap());
    let names = [zero.name().to_owned(), theirs, two.name().to_owned()];
    writeln!(child.stdin.as_ref().unwrap(), "{}", names.join(" ")).unwrap();
    let names: Vec<_> = names.iter().map(|name| Some(name.as_str())).collect();
    let run = |rank: u32, listener: Listener| {
        let mut peers = PeerSockets::connect(listener, rank, &names, &SECRET, soon()).unwrap();
        let mine: Vec<OwnedFd> = (0..300).map(|index| tagged(rank, index)).collect();
        let until_lost = std::iter::repeat_with(|| {
            peers.exchange(&borrowed(&mine), 300, &mut keep_nothing, soon()).err()
        });
        until_lost.flatten().next().unwrap()
    };
    std::thread::scope(|scope| {
        let ranks = [scope.spawn(|| run(0, zero)), scope.spawn(|| run(2, two))];
        line_with(&mut output, "exchanging");
        child.kill().unwrap();
        for rank in ranks {
            let error = rank.join().unwrap();
            assert!(error.is_peer_lost(), "{error}");
            assert_eq!(error.ranks(), [1], "{error}");
        }
    });
    child.wait().unwrap();
}
