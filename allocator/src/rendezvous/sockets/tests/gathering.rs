//! Gathers over the connections of ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::super::packet::{BYTES_PER_PACKET, Part};
use super::*;
use crate::Group;
use crate::store::MAX_VALUE;

/// Different on every rank and in every place.
fn value(rank: u32, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at as u32 * 7 + at as u32 / 251 + rank) as u8).collect()
}

#[test]
fn every_rank_gets_every_value() {
    let one = BYTES_PER_PACKET;
    for (world, bytes) in [(1, 9), (2, 0), (2, one), (3, one + 1), (3, 50 * one), (8, 0), (8, 100)]
    {
        with_sockets(world, |rank, mut peers| {
            // Values of different lengths, and an exchange between gathers.
            let bytes_of = |rank: u32, round: usize| bytes * (1 + (rank as usize + round) % 2);
            for round in 0..5 {
                let mine = value(rank, bytes_of(rank, round));
                let all = peers.all_gather("value", &mine, soon()).unwrap();
                assert_eq!(all.world(), world);
                for (peer, part) in (0..).zip(all.parts()) {
                    assert!(part == value(peer, bytes_of(peer, round)), "rank {peer}");
                }
                exchange_tagged(&mut peers, rank, world, 1);
            }
            assert!(peers.all_gather("same", b"same", soon()).unwrap().is_uniform());
        });
    }
}

#[test]
fn the_longest_value_is_gathered_and_a_longer_one_is_everyones_error() {
    let longest = value(3, MAX_VALUE + 1);
    with_sockets(2, |rank, mut peers| {
        let mine = &longest[..if rank == 0 { MAX_VALUE } else { 0 }];
        let all = peers.all_gather("much", mine, soon()).unwrap();
        assert!(all.part(0) == &longest[..MAX_VALUE] && all.part(1).is_empty());
        let mine = &longest[..if rank == 0 { MAX_VALUE + 1 } else { 0 }];
        let error = peers.all_gather("more", mine, soon()).unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
        assert!(error.to_string().contains("the limit is 16777216"), "{error}");
        assert_eq!(rank == 1, error.to_string().contains("rank 0 gave up"), "{error}");
    });
}

#[test]
fn ranks_that_make_different_calls_get_both_names() {
    for exchange in [false, true] {
        let errors = with_sockets(3, |rank, mut peers| match rank {
            1 if exchange => {
                peers.exchange(&[], 0, &mut keep_nothing, soon()).map(drop).unwrap_err()
            }
            1 => peers.all_gather("standing", b"", soon()).unwrap_err(),
            _ => peers.all_gather("propose", b"", soon()).unwrap_err(),
        });
        for error in errors {
            assert!(error.is_diverged(), "{error}");
            let said = error.to_string();
            let both =
                said.contains("gathers \"standing\"") && said.contains("gathers \"propose\"");
            assert!(both || exchange && said.contains("ranks are at different steps"), "{error}");
        }
    }
}

#[test]
fn a_rank_that_is_gone_is_named_at_once() {
    let errors = with_sockets(3, |rank, mut peers| {
        if rank == 1 {
            return None;
        }
        let begin = Instant::now();
        let error = peers.all_gather("value", b"", soon()).unwrap_err();
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
        let again = peers.all_gather("value", b"", soon()).unwrap_err();
        assert!(again.is_peer_lost() && again.to_string().contains("earlier failure"), "{again}");
        assert!(peers.is_broken());
        Some(error)
    });
    for error in errors.into_iter().flatten() {
        assert!(error.is_peer_lost() && error.ranks() == [1], "{error}");
    }
}

#[test]
fn a_rank_that_comes_too_late_hears_whom_the_others_missed() {
    let failed = Barrier::new(3);
    let errors = with_sockets(3, |rank, mut peers| {
        if rank == 2 {
            failed.wait();
        }
        let deadline = if rank == 2 { soon() } else { short() };
        let error = peers.all_gather("value", b"x", deadline).unwrap_err();
        if rank != 2 {
            failed.wait();
        }
        error
    });
    for error in errors {
        assert!(error.is_timeout() && error.ranks() == [2], "{error}");
        assert!(error.to_string().contains("s in the gather \"value\" with the"), "{error}");
    }
}

#[test]
fn pieces_that_do_not_continue_a_value_are_refused() {
    let part = |first, total, bytes: usize| Part {
        round: 1,
        what: "value".into(),
        first,
        total,
        bytes: vec![1; bytes],
    };
    let wrong = [
        part(1, 5, 2),
        part(0, 5, 6),
        part(0, 5, 0),
        part(0, MAX_VALUE as u64 + 1, 5),
        part(0, u64::MAX, 5),
        Part { round: 2, ..part(0, 5, 5) },
        Part { what: "other".into(), ..part(0, 5, 5) },
    ];
    for part in &wrong {
        let errors = with_sockets(2, |rank, mut peers| {
            if rank == 0 {
                let frame = message::encode(part).unwrap();
                let socket = peers.sockets[1].as_ref().unwrap();
                assert_eq!(packet::send(socket, &frame, &[]).unwrap(), Sent::Yes);
                // The packets behind it are this rank's true part, or not read any more.
            }
            let first = peers.all_gather("value", b"12345", soon());
            first.and_then(|_| peers.all_gather("value", b"", soon())).unwrap_err()
        });
        assert!(errors[1].is_diverged(), "{part:?}: {}", errors[1]);
        let Part { first, total, .. } = part;
        let piece = format!("bytes {first} to {} of {total}", first + part.bytes.len() as u64);
        let of_this = (part.round, part.what.as_str()) == (1, "value");
        let expected = if of_this { &piece } else { "different collective calls" };
        assert!(errors[1].to_string().contains(expected), "{part:?}: {}", errors[1]);
        assert!(errors[0].to_string().contains("rank 1 gave up"), "{part:?}: {}", errors[0]);
    }
}

#[test]
fn a_rank_that_waits_can_be_interrupted() {
    let done = Barrier::new(2);
    with_sockets(2, |rank, mut peers| {
        if rank == 0 {
            let asked = Arc::new(AtomicBool::new(false));
            let interrupt = asked.clone();
            let group = Group::in_process(1).unwrap().remove(0);
            let group =
                group.with_interrupt(move || interrupt.swap(true, Ordering::Relaxed)).child("pool");
            peers = peers.with_interrupt(group.interrupt());
            let begin = Instant::now();
            let error = peers.all_gather("value", b"", soon()).unwrap_err();
            assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
            assert!(asked.load(Ordering::Relaxed));
            assert!(error.is_invalid_state(), "{error}");
            assert!(error.to_string().contains("interrupted while waiting"), "{error}");
        }
        done.wait();
        if rank == 1 {
            let error = peers.all_gather("value", b"", soon()).unwrap_err();
            assert!(error.to_string().contains("rank 0 gave up: interrupted"), "{error}");
        }
    });
}

#[test]
fn a_peer_that_gives_up_after_it_has_said_all_is_heard_at_once() {
    let done = Barrier::new(3);
    with_sockets(3, |rank, mut peers| {
        if rank < 2 {
            let begin = Instant::now();
            let deadline = if rank == 0 { short() } else { soon() };
            let error = peers.all_gather("value", b"x", deadline).unwrap_err();
            assert!(begin.elapsed() < Duration::from_secs(20), "{rank}: {:?}", begin.elapsed());
            assert!(error.is_timeout() && error.ranks() == [2], "{error}");
        }
        done.wait();
    });
}

#[test]
fn a_peer_that_is_gone_after_it_has_said_all_is_not_waited_for_long() {
    let done = Barrier::new(2);
    with_sockets(3, |rank, mut peers| {
        if rank == 0 {
            let part = Part { round: 1, what: "value".into(), first: 0, total: 0, bytes: vec![] };
            let socket = peers.sockets[1].as_ref().unwrap();
            assert_eq!(
                packet::send(socket, &message::encode(&part).unwrap(), &[]).unwrap(),
                Sent::Yes
            );
            return;
        }
        if rank == 1 {
            let begin = Instant::now();
            let error = peers.all_gather("value", b"x", soon()).unwrap_err();
            assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
            assert!(error.is_peer_lost() && error.ranks() == [0], "{error}");
        }
        done.wait();
    });
}

#[test]
fn a_peer_that_gives_up_without_hearing_all_says_why() {
    let done = Barrier::new(2);
    with_sockets(3, |rank, mut peers| {
        if rank == 0 {
            let part = Part { round: 1, what: "value".into(), first: 0, total: 0, bytes: vec![] };
            let socket = peers.sockets[1].as_ref().unwrap();
            let frame = message::encode(&part).unwrap();
            assert_eq!(packet::send(socket, &frame, &[]).unwrap(), Sent::Yes);
            // The other's part is there and left unread, of which the kernel tells it first.
            let mut there = [PollFd::new(socket, PollFlags::IN)];
            assert_eq!(poll_for(&mut there, Duration::from_secs(20)).unwrap(), 1);
            // Time to read what this rank said, and to wait for rank 2.
            std::thread::sleep(Duration::from_millis(100));
            peers.fail(&Error::invalid_state("no room for what came"));
            return;
        }
        let begin = Instant::now();
        let outcome = (rank == 1).then(|| peers.all_gather("value", b"x", soon()).unwrap_err());
        done.wait();
        if let Some(error) = outcome {
            assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
            assert!(error.to_string().contains("rank 0 gave up: no room"), "{error}");
        }
    });
}

#[test]
fn a_farewell_is_heard_behind_more_than_a_socket_holds() {
    let failed = Barrier::new(2);
    let much = value(0, 4 << 20);
    with_sockets(2, |rank, mut peers| {
        if rank == 1 {
            let error = peers.all_gather("value", &much, short()).unwrap_err();
            assert!(error.is_timeout() && error.ranks() == [0], "{error}");
        }
        failed.wait();
        if rank == 0 {
            let error = peers.all_gather("value", b"", soon()).unwrap_err();
            assert!(error.is_timeout() && error.ranks() == [0], "{error}");
        }
    });
}

#[test]
fn copies_of_a_connection_do_not_hide_that_a_rank_left() {
    let left = Barrier::new(2);
    with_sockets(2, |rank, mut peers| {
        // The copies stand for those of a forked child.
        let copies: Vec<_> =
            peers.sockets.iter().flatten().map(|socket| rustix::io::dup(socket).unwrap()).collect();
        if rank == 0 {
            drop(peers);
            left.wait();
        } else {
            left.wait();
            assert_eq!(peers.lost_peers(), [0]);
            let error = peers.all_gather("value", b"", soon()).unwrap_err();
            assert!(error.is_peer_lost() && error.ranks() == [0], "{error}");
        }
        left.wait();
        drop(copies);
    });
}

#[test]
fn who_gives_up_between_talks_is_heard_in_the_next() {
    let errors = with_sockets(3, |rank, mut peers| {
        if rank == 1 {
            peers.fail(&Error::invalid_state("went half-way"));
            peers.fail(&Error::out_of_memory("not the first reason"));
        }
        peers.all_gather("value", b"", soon()).unwrap_err()
    });
    for error in errors {
        assert!(error.is_invalid_state(), "{error}");
        assert!(error.to_string().contains("rank 1 gave up: went half-way"), "{error}");
    }
}

#[test]
fn a_damaged_place_in_a_value_is_an_error() {
    with_sockets(2, |rank, mut peers| {
        if rank == 1 {
            let part = Part {
                round: 1,
                what: "value".into(),
                first: u64::MAX,
                total: 9,
                bytes: vec![0; 9],
            };
            let socket = peers.sockets[0].as_deref().unwrap();
            assert_eq!(
                packet::send(socket, &message::encode(&part).unwrap(), &[]).unwrap(),
                Sent::Yes
            );
        }
        let gathered = peers.all_gather("value", b"mine", soon());
        // The other rank may have all that it waits for by then, or find the connection closed.
        if rank == 0 {
            let error = gathered.unwrap_err();
            assert!(error.is_diverged(), "{error}");
        }
    });
}

#[test]
fn a_peer_that_sends_without_end_does_not_hold_a_round_up() {
    with_sockets(2, |rank, mut peers| {
        if rank == 0 {
            let begun = Instant::now();
            let error = peers.all_gather("value", b"mine", short()).unwrap_err();
            assert!(error.is_timeout(), "{error}");
            assert!(begun.elapsed() < Duration::from_secs(20));
            assert!(peers.barrier_messages.len() <= 1024, "{}", peers.barrier_messages.len());
            return;
        }
        let begun = Instant::now();
        let mut id = 0;
        while !peers.lost_peers().contains(&0) && begun.elapsed() < Duration::from_secs(30) {
            let message = BarrierMessage { id: (id, 0), step: BarrierStep::GoesOn };
            id += u64::from(peers.say(&message, &mut Vec::new()).unwrap_or(false));
        }
        assert!(id > 1024, "{id} messages were sent");
    });
}
