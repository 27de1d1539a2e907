//! Exchanges, with threads as ranks. [`connecting`] tests making the connections, [`gathering`] gathers, and
//! [`processes`] what needs processes: ranks that are killed, and counts of open files.

mod connecting;
mod gathering;
mod processes;

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::Barrier;

use rustix::fs::MemfdFlags;
use rustix::process::{Resource, Rlimit};

use super::packet::{Descriptors, Sent};
use super::*;
use crate::rendezvous::message;

const SECRET: [u8; 32] = [7; 32];

fn soon() -> Deadline {
    Deadline::seconds(60)
}

fn short() -> Deadline {
    Deadline::after(Duration::from_secs(2))
}

/// Runs `body` as each of `world` ranks with a listener made for it; returns what each returned.
fn with_listeners<T: Send>(
    world: u32,
    body: impl Fn(u32, Listener, &[Option<&str>]) -> T + Sync,
) -> Vec<T> {
    let listeners: Vec<Listener> = (0..world).map(|_| Listener::bind().unwrap()).collect();
    let names: Vec<String> = listeners.iter().map(|l| l.name().to_owned()).collect();
    let names: Vec<_> = names.iter().map(|name| Some(name.as_str())).collect();
    let (body, names) = (&body, &names);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .zip(listeners)
            .map(|(rank, listener)| scope.spawn(move || body(rank, listener, names)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Runs `body` as each of `world` ranks, once all are connected.
fn with_sockets<T: Send>(world: u32, body: impl Fn(u32, PeerSockets) -> T + Sync) -> Vec<T> {
    let connected = Barrier::new(world as usize);
    with_listeners(world, |rank, listener, names| {
        let peers = PeerSockets::connect(listener, rank, names, &SECRET, soon());
        connected.wait();
        body(rank, peers.unwrap())
    })
}

/// A memfd that says whose it is.
fn tagged(rank: u32, index: usize) -> OwnedFd {
    let fd = rustix::fs::memfd_create("symmpool-tag", MemfdFlags::CLOEXEC).unwrap();
    let mut file = File::from(fd);
    file.write_all(format!("{rank}:{index}").as_bytes()).unwrap();
    file.into()
}

fn tag(fd: OwnedFd) -> String {
    // The offset is shared with the sender; reading at a position is not.
    let file = File::from(fd);
    let mut text = [0; 64];
    let length = file.read_at(&mut text, 0).unwrap();
    String::from_utf8_lossy(&text[..length]).into_owned()
}

/// Room for thousands of descriptors in this process, as far as its limits allow.
fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(1 << 17, |most| most.min(1 << 17));
    if limit.current.is_some_and(|now| now < wanted) {
        let raised = Rlimit { current: Some(wanted), maximum: limit.maximum };
        rustix::process::setrlimit(Resource::Nofile, raised).unwrap();
    }
}

/// The borrowed form of descriptors that are owned.
fn borrowed(fds: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    fds.iter().map(AsFd::as_fd).collect()
}

fn keep_nothing(_: u32, _: usize, _: Vec<OwnedFd>) -> Result<()> {
    Ok(())
}

/// One exchange of `count` tagged descriptors, all of them checked.
fn exchange_tagged(peers: &mut PeerSockets, rank: u32, world: u32, count: usize) {
    let mine: Vec<OwnedFd> = (0..count).map(|index| tagged(rank, index)).collect();
    let mut next = vec![0; world as usize];
    let sent_nothing = peers.exchange(
        &borrowed(&mine),
        count,
        &mut |from, first, fds| {
            assert_eq!(first, next[from as usize], "descriptors come in order");
            next[from as usize] += fds.len();
            for (index, fd) in (first..).zip(fds) {
                assert_eq!(tag(fd), format!("{from}:{index}"));
            }
            Ok(())
        },
        soon(),
    );
    assert_eq!(sent_nothing.unwrap(), [0; 0], "all gave what was expected, if anything was");
    for peer in 0..world {
        assert_eq!(next[peer as usize], if peer == rank { 0 } else { count });
    }
}

#[test]
fn every_rank_gets_every_descriptor_of_every_other() {
    raise_descriptor_limit();
    for (world, count) in [(1, 5), (2, 0), (2, 1000), (3, 1), (3, 1000), (8, 0), (8, 1), (8, 200)] {
        with_sockets(world, |rank, mut peers| {
            for _ in 1..=2 {
                exchange_tagged(&mut peers, rank, world, count);
            }
            assert_eq!(peers.lost_peers(), [0; 0]);
            // No rank leaves before all have checked.
            exchange_tagged(&mut peers, rank, world, 0);
        });
    }
}

#[test]
fn eight_ranks_exchange_a_thousand_descriptors_each() {
    raise_descriptor_limit();
    // Whoever is connected begins, while others are still connecting.
    with_listeners(8, |rank, listener, names| {
        let mut peers = PeerSockets::connect(listener, rank, names, &SECRET, soon()).unwrap();
        exchange_tagged(&mut peers, rank, 8, 1000);
    });
}

#[test]
fn no_descriptor_outlives_an_exec() {
    with_sockets(2, |rank, mut peers| {
        let mine = [tagged(rank, 0)];
        let mut check = |_, _, fds: Vec<OwnedFd>| {
            let flags = rustix::io::fcntl_getfd(&fds[0]).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
            Ok(())
        };
        peers.exchange(&borrowed(&mine), 1, &mut check, soon()).unwrap();
        // Nor do the connections: rank 1 has dialled, and rank 0 accepted.
        for (_, socket) in connected(&peers.sockets) {
            let flags = rustix::io::fcntl_getfd(socket).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        }
    });
}

#[test]
fn a_rank_that_leaves_during_an_exchange_is_named_by_all() {
    let seen = with_sockets(3, |rank, mut peers| {
        if rank == 1 {
            drop(peers);
            return None;
        }
        let mine = [tagged(rank, 0)];
        let error = peers.exchange(&borrowed(&mine), 1, &mut keep_nothing, soon()).unwrap_err();
        // Later calls fail at once with the same error, and still name the lost rank.
        let again = peers.exchange(&[], 0, &mut keep_nothing, soon()).unwrap_err();
        assert!(again.is_peer_lost() && again.to_string().contains("earlier failure"), "{again}");
        assert!(peers.lost_peers().contains(&1));
        Some(error)
    });
    for error in seen.into_iter().flatten() {
        assert!(error.is_peer_lost(), "{error}");
        assert_eq!(error.ranks(), [1], "{error}");
    }
}

#[test]
fn all_that_left_without_a_word_are_named_before_one_that_gave_up() {
    let gone = Barrier::new(4);
    with_sockets(4, |rank, mut peers| {
        match rank {
            0 => {
                gone.wait();
                let error = peers.exchange(&[], 0, &mut keep_nothing, soon()).unwrap_err();
                assert!(error.is_peer_lost() && error.ranks() == [2, 3], "{error}");
                return;
            }
            1 => peers.fail(&Error::invalid_state("enough")),
            _ => drop(peers),
        }
        gone.wait();
    });
}

#[test]
fn a_rank_that_says_why_it_hangs_up_has_not_left() {
    let (all, hung_up) = (Barrier::new(3), Barrier::new(3));
    with_sockets(3, |rank, mut peers| {
        assert!(!(0..4).any(|peer| peers.has_left(peer)));
        if rank == 0 {
            // The unread data of rank 2 is reported to us before its message.
            let socket = peers.sockets[2].as_ref().unwrap();
            assert_eq!(packet::send(socket, b"unread", &[]).unwrap(), Sent::Yes);
        }
        all.wait();
        match rank {
            1 => drop(peers),
            2 => peers.fail(&Error::invalid_state("enough")),
            _ => {
                hung_up.wait();
                assert_eq!(peers.lost_peers(), [1, 2]);
                assert_eq!([0, 1, 2].map(|peer| peers.has_left(peer)), [false, true, false]);
                return;
            }
        }
        hung_up.wait();
    });
}

#[test]
fn lost_peers_are_seen_without_an_exchange() {
    let left = Barrier::new(3);
    with_sockets(3, |rank, peers| {
        assert_eq!(peers.lost_peers(), [0; 0]);
        left.wait();
        if rank == 1 {
            drop(peers);
            left.wait();
        } else {
            left.wait();
            assert_eq!(peers.lost_peers(), [1]);
        }
        // No rank leaves before all have checked.
        left.wait();
    });
}

#[test]
fn a_rank_with_nothing_to_give_holds_up_nobody() {
    with_sockets(3, |rank, mut peers| {
        for round in [1, 2] {
            let mine = [tagged(rank, 0), tagged(rank, 1)];
            // In the first round rank 1 has failed before, in the second all is well again.
            let silent = (rank, round) == (1, 1);
            let send = if silent { Vec::new() } else { borrowed(&mine) };
            let mut came = Vec::new();
            let mut keep = |peer, first, fds: Vec<OwnedFd>| {
                came.extend((first..first + fds.len()).map(|index| (peer, index)));
                Ok(())
            };
            let sent_nothing = peers.exchange(&send, 2, &mut keep, soon()).unwrap();
            let from = |peer| peer != rank && (peer, round) != (1, 1);
            let expected: Vec<_> =
                (0..3).filter(|&peer| from(peer)).flat_map(|peer| [(peer, 0), (peer, 1)]).collect();
            came.sort_unstable();
            assert_eq!(came, expected);
            assert_eq!(sent_nothing, if round == 1 && rank != 1 { vec![1] } else { vec![] });
        }
    });
}

#[test]
fn a_rank_that_fails_gives_its_reason_to_all() {
    let errors = with_sockets(3, |rank, mut peers| {
        let mine = [tagged(rank, 0)];
        let mut refuse = |_, _, _| {
            if rank == 2 { Err(Error::out_of_memory("cannot map it")) } else { Ok(()) }
        };
        let first = peers.exchange(&borrowed(&mine), 1, &mut refuse, soon());
        // Ranks that had finished the first exchange get the farewell in the next.
        first.and_then(|_| peers.exchange(&[], 0, &mut refuse, soon())).unwrap_err()
    });
    assert!(errors[2].is_out_of_memory(), "{}", errors[2]);
    // A rank that received the farewell from another one still knows whose failure it was.
    for error in &errors[..2] {
        assert!(error.is_out_of_memory(), "{error}");
        assert!(error.to_string().contains("rank 2 gave up: cannot map it"), "{error}");
    }
}

#[test]
fn a_rank_that_stays_away_is_named_when_time_is_up() {
    let done = Barrier::new(3);
    let errors = with_sockets(3, |rank, mut peers| {
        let outcome = (rank != 2).then(|| peers.exchange(&[], 0, &mut keep_nothing, short()));
        done.wait();
        outcome.map(Result::unwrap_err)
    });
    for error in errors.into_iter().flatten() {
        // Whoever is first to give up says so to the other.
        assert!(error.is_timeout(), "{error}");
        assert_eq!(error.ranks(), [2], "{error}");
        assert!(error.to_string().contains("s exchanging handles with the other"), "{error}");
    }
}

#[test]
fn ranks_in_different_rounds_are_distinguished() {
    let errors = with_sockets(2, |rank, mut peers| {
        peers.rounds = 4 + u64::from(rank);
        peers.exchange(&[], 0, &mut keep_nothing, soon()).unwrap_err()
    });
    // The second rank may receive a farewell before it notices the difference itself.
    assert!(errors.iter().any(Error::is_diverged));
    for error in errors {
        assert!(error.to_string().contains("different collective calls"), "{error}");
    }
}

#[test]
fn more_or_fewer_descriptors_than_expected_are_an_error() {
    // None at all is what a rank sends that has failed: see the test above.
    for (sent_by_0, expected_by_1) in [(3, 2), (2, 3), (1, 0)] {
        let errors = with_sockets(2, |rank, mut peers| {
            let (count, expect) = if rank == 0 { (sent_by_0, 0) } else { (0, expected_by_1) };
            let mine: Vec<OwnedFd> = (0..count).map(|index| tagged(rank, index)).collect();
            let first = peers.exchange(&borrowed(&mine), expect, &mut keep_nothing, soon());
            first.and_then(|_| peers.exchange(&[], 0, &mut keep_nothing, soon())).unwrap_err()
        });
        for error in errors {
            assert!(error.is_diverged(), "{error}");
            assert!(error.to_string().contains("rank 0 sends"), "{error}");
        }
    }
}

#[test]
fn descriptors_beyond_what_was_announced_are_an_error() {
    for (announced, sent) in [(1, 2), (2, 1), (1, 0), (0, 0), (3, 3)] {
        with_sockets(2, |rank, mut peers| {
            let fd = tagged(rank, 0);
            if rank == 0 {
                let header = Descriptors { round: 1, first: 0, count: announced, total: 2 };
                let frame = message::encode(&header).unwrap();
                let socket = peers.sockets[1].as_ref().unwrap();
                let fds = vec![fd.as_fd(); sent];
                assert_eq!(packet::send(socket, &frame, &fds).unwrap(), Sent::Yes);
                let first = peers.exchange(&[], 2, &mut keep_nothing, soon());
                let next = first.and_then(|_| peers.exchange(&[], 0, &mut keep_nothing, soon()));
                let error = next.unwrap_err();
                assert!(error.to_string().contains("rank 1 gave up"), "{error}");
            } else {
                let two = [fd.as_fd(), fd.as_fd()];
                let error = peers.exchange(&two, 2, &mut keep_nothing, soon()).unwrap_err();
                assert!(error.is_diverged() && error.to_string().contains("announces"), "{error}");
            }
        });
    }
}
