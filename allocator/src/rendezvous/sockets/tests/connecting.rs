//! Who is let in, who is turned away, and what is said of those who do not come.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::{SECRET, exchange_tagged, keep_nothing, short, soon, with_listeners};
use crate::Deadline;
use crate::Error;
use crate::rendezvous::message;
use crate::rendezvous::sockets::packet::{self, Introduction};
use crate::rendezvous::sockets::{Listener, PeerSockets};

#[test]
fn a_rank_that_leaves_before_it_connects_is_named() {
    for gone in 0..3 {
        let errors = with_listeners(3, |rank, listener, names| {
            if rank == gone {
                drop(listener);
                return None;
            }
            Some(PeerSockets::connect(listener, rank, names, &SECRET, soon()).unwrap_err())
        });
        for error in errors.into_iter().flatten() {
            assert!(error.is_peer_lost(), "{error}");
        }
    }
}

#[test]
fn a_rank_that_declines_says_why_and_everybody_hears_it() {
    let started = Instant::now();
    for declines in 0..3u32 {
        let errors = with_listeners(3, |rank, listener, names| {
            if rank == declines {
                let why = Error::out_of_memory("no room for sockets");
                PeerSockets::decline(listener, rank, names, &SECRET, &why);
                return None;
            }
            // A rank may have connected before it receives the farewell.
            let mut peers = match PeerSockets::connect(listener, rank, names, &SECRET, soon()) {
                Ok(peers) => peers,
                Err(error) => return Some(error),
            };
            Some(peers.exchange(&[], 0, &mut keep_nothing, soon()).unwrap_err())
        });
        for (rank, error) in errors.into_iter().enumerate() {
            let Some(error) = error else { continue };
            // In an exchange the farewell is the error itself; while connecting it is the loss of a rank.
            assert!(error.is_peer_lost() || error.is_out_of_memory(), "rank {rank}: {error}");
            // A rank that dials may find the other's socket closed before it received a farewell, whether that
            // is the first rank that gave up or a later one. Rank 0 dials nobody.
            let received = error.to_string().contains("gave up: no room for sockets");
            assert!(received || rank > 0, "rank {rank}: {error}");
        }
    }
    assert!(started.elapsed() < Duration::from_secs(30), "nobody waited for a deadline");
}

#[test]
fn a_rank_that_does_not_come_is_named_when_time_is_up() {
    let barrier = Barrier::new(3);
    with_listeners(3, |rank, listener, names| {
        if rank == 2 {
            // It exists, but does not connect.
            barrier.wait();
            drop(listener);
            return;
        }
        let error = PeerSockets::connect(listener, rank, names, &SECRET, short()).unwrap_err();
        barrier.wait();
        assert!(error.is_timeout(), "{error}");
        assert!(error.ranks().contains(&2), "{error}");
    });
}

fn stranger(name: &str) -> OwnedFd {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    rustix::net::connect(&socket, &address).unwrap();
    socket
}

#[test]
fn intruders_are_turned_away_and_disturb_nobody() {
    let intruded = Barrier::new(3);
    with_listeners(3, |rank, listener, names| {
        let mut intruders = Vec::new();
        if rank == 2 {
            for name in names.iter().flatten() {
                // One that stays silent, one that leaves, one with garbage and a descriptor, one
                // with another secret, one with the right secret that claims to be rank 0 (which
                // nobody waits for), and one that means another rank.
                intruders.push(stranger(name));
                drop(stranger(name));
                let garbage = stranger(name);
                packet::send(&garbage, b"let me in", &[garbage.as_fd()]).unwrap();
                intruders.push(garbage);
                let to = names.iter().position(|n| *n == Some(*name)).unwrap() as u32;
                for claim in [
                    Introduction::new(&[8; 32], 2, to),
                    Introduction::new(&SECRET, 0, to),
                    Introduction::new(&SECRET, 2, to + 1),
                    Introduction::new(&SECRET, u32::MAX, to),
                ] {
                    let liar = stranger(name);
                    packet::send(&liar, &message::encode(&claim).unwrap(), &[]).unwrap();
                    intruders.push(liar);
                }
            }
        }
        intruded.wait();
        let mut peers = PeerSockets::connect(listener, rank, names, &SECRET, soon()).unwrap();
        exchange_tagged(&mut peers, rank, 3, 10);
        for intruder in intruders {
            // Turned away: nothing was said, and the connection is closed (or reset).
            let mut said = [0; 64];
            match rustix::net::recv(&intruder, &mut said, rustix::net::RecvFlags::empty()) {
                Ok((length, _)) => assert_eq!(length, 0),
                Err(error) => assert_eq!(error, Errno::CONNRESET),
            }
        }
    });
}

#[test]
fn another_user_who_knows_the_secret_is_turned_away() {
    if !rustix::process::geteuid().is_root() {
        // Only root can be somebody else.
        return;
    }
    let (listener, absent) = (Listener::bind().unwrap(), Listener::bind().unwrap());
    let names = [listener.name().to_owned(), absent.name().to_owned()];
    let caller = std::thread::scope(|scope| {
        let dial = || {
            let nobody = rustix::process::Uid::from_raw(65534);
            // This changes the user of this thread alone.
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            stranger(&names[0])
        };
        scope.spawn(dial).join().unwrap()
    });
    let claim = message::encode(&Introduction::new(&SECRET, 1, 0)).unwrap();
    packet::send(&caller, &claim, &[]).unwrap();
    let names: Vec<_> = names.iter().map(|name| Some(name.as_str())).collect();
    let deadline = Deadline::after(Duration::from_millis(300));
    let error = PeerSockets::connect(listener, 0, &names, &SECRET, deadline).unwrap_err();
    assert!(error.is_timeout() && error.ranks() == [1], "{error}");
}

#[test]
fn an_impostor_in_a_peers_place_is_refused() {
    let listener = Listener::bind().unwrap();
    let impostor = Listener::bind().unwrap();
    let names = [impostor.name().to_owned(), listener.name().to_owned()];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let names: Vec<_> = names.iter().map(|name| Some(name.as_str())).collect();
            // It turns us away, as we do it, and hangs up when its time is out.
            PeerSockets::connect(impostor, 0, &names, &[9; 32], short()).unwrap_err();
        });
        let names: Vec<_> = names.iter().map(|name| Some(name.as_str())).collect();
        let error = PeerSockets::connect(listener, 1, &names, &SECRET, soon()).unwrap_err();
        assert!(error.is_peer_lost() && error.ranks() == [0], "{error}");
    });
    let socket = stranger_that_answers_wrongly();
    assert!(socket.is_refused() && socket.to_string().contains("rank 0"), "{socket}");
}

/// Error of a rank whose peer's socket answers with the proof of another secret.
fn stranger_that_answers_wrongly() -> Error {
    let listener = Listener::bind().unwrap();
    let name = "symmpool-test-".to_owned() + listener.name();
    let flags = SocketFlags::CLOEXEC;
    let fake =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    rustix::net::bind(&fake, &address).unwrap();
    rustix::net::listen(&fake, 1).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let caller = rustix::net::accept(&fake).unwrap();
            let answer = message::encode(&Introduction::new(&[9; 32], 0, 1)).unwrap();
            packet::send(&caller, &answer, &[]).unwrap();
            // Until the other side hangs up.
            let _ = File::from(caller).read(&mut [0; 4096]);
        });
        let names = [name.as_str(), listener.name()];
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let names: Vec<_> = names.iter().map(|name| Some(name.as_str())).collect();
        PeerSockets::connect(listener, 1, &names, &SECRET, soon()).unwrap_err()
    })
}

#[test]
fn callers_without_end_do_not_hold_up_the_deadline() {
    let listener = Listener::bind().unwrap();
    let (name, done) = (listener.name().to_owned(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                while !done.load(Ordering::Relaxed) {
                    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
                    let caller = rustix::net::socket_with(family, kind, flags, None).unwrap();
                    // The listener may be full, or closed.
                    let _ = rustix::net::connect(&caller, &address);
                }
            });
        }
        // Rank 1 is there, and does not come.
        let other = Listener::bind().unwrap();
        let names = [Some(name.as_str()), Some(other.name())];
        let begin = Instant::now();
        let deadline = Deadline::after(Duration::from_millis(500));
        let outcome = PeerSockets::connect(listener, 0, &names, &SECRET, deadline);
        let took = begin.elapsed();
        done.store(true, Ordering::Relaxed);
        let error = outcome.unwrap_err();
        assert!(error.is_timeout() && error.ranks() == [1], "{error}");
        assert!(took < Duration::from_secs(5), "{took:?}");
    });
}
