//! Point-to-point messages between the ranks of a pool in host memory; ranks are threads.

mod pool_ranks;

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use symmpool_allocator::{Pool, Stream};
use symmpool_collectives::{Communicator, CommunicatorOptions, DType, ReduceOp};

const STREAM: &Stream = &Stream::DEFAULT;
const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(100);

fn ranks(world: u32, options: &CommunicatorOptions, body: impl Fn(&Pool, &Communicator) + Sync) {
    pool_ranks::ranks(world, |pool| {
        body(pool, &Communicator::with_options(pool, options).unwrap());
    });
}

/// Options with little scratch, so that long messages are divided into many chunks.
fn small() -> CommunicatorOptions {
    CommunicatorOptions { timeout: LONG, scratch_bytes: 4096, ..Default::default() }
}

/// The data that rank `source` sends to rank `target` in a round.
fn data(source: u32, target: u32, round: usize, count: usize) -> Vec<u8> {
    (0..count)
        .map(|at| (at * 7 + at / 251 + round + 16 * source as usize + target as usize) as u8)
        .collect()
}

#[test]
fn messages_of_all_lengths_and_places_arrive_whole() {
    const LENGTHS: [usize; 9] = [0, 1, 15, 128, 1000, 4097, 65_536, 65_537, 1_000_003];
    for options in [small(), CommunicatorOptions { timeout: LONG, ..Default::default() }] {
        ranks(3, &options, |_, comm| {
            let (me, world) = (comm.rank(), comm.world());
            thread::scope(|scope| {
                scope.spawn(|| {
                    for (round, length) in LENGTHS.into_iter().enumerate() {
                        for peer in (1..world).map(|step| (me + step) % world) {
                            let shift = round % 5;
                            let sent = [vec![0; shift], data(me, peer, round, length)].concat();
                            // SAFETY: the memory has this length, and nobody writes it.
                            let at = unsafe { sent.as_ptr().add(shift) };
                            // SAFETY: as above.
                            unsafe { comm.send_at(at, length, DType::U8, peer, STREAM) }.unwrap();
                        }
                    }
                });
                for (round, length) in LENGTHS.into_iter().enumerate() {
                    for peer in (1..world).map(|step| (me + world - step) % world) {
                        let mut there = vec![0xa5; length + 32];
                        let at = there[16 + round % 3..].as_mut_ptr();
                        // SAFETY: the memory has this length, and only this thread uses it.
                        unsafe { comm.recv_at(at, length, DType::U8, peer, STREAM) }.unwrap();
                        let begin = 16 + round % 3;
                        let wanted = data(peer, me, round, length);
                        assert!(
                            there[begin..begin + length] == wanted,
                            "round {round}, rank {peer}"
                        );
                        let around = there[..begin].iter().chain(&there[begin + length..]);
                        assert!(around.into_iter().all(|byte| *byte == 0xa5), "round {round}");
                    }
                }
            });
            comm.barrier(STREAM).unwrap();
        });
    }
}

#[test]
fn blocks_are_sent_ahead_of_their_receiver_and_between_collectives() {
    ranks(2, &small(), |pool, comm| {
        let (me, peer) = (comm.rank(), 1 - comm.rank());
        let mine = pool.lane("own").unwrap().alloc::<i32>(100).unwrap();
        let there = pool.alloc::<i32>(100).unwrap();
        for round in 0..20 {
            // As many messages as there is room for; a collective comes between sends and receives.
            for nth in 0..4 {
                mine.write(&[round * 8 + nth * 2 + me as i32; 100]).unwrap();
                comm.send(&mine, peer, STREAM).unwrap();
            }
            comm.all_reduce(&there, ReduceOp::Max, STREAM).unwrap();
            for nth in 0..4 {
                comm.recv(&there, peer, STREAM).unwrap();
                assert_eq!(there.read().unwrap(), [round * 8 + nth * 2 + peer as i32; 100]);
            }
        }
    });
}

#[test]
fn threads_send_whole_messages() {
    // A thread that sends waits until the message of another thread is sent completely.
    ranks(2, &small(), |_, comm| {
        const EACH: usize = 50;
        if comm.rank() == 0 {
            thread::scope(|scope| {
                for thread in 0..3_u8 {
                    scope.spawn(move || {
                        let sent = vec![thread; 3000];
                        for _ in 0..EACH {
                            // SAFETY: the memory has this length, and nobody writes it.
                            unsafe { comm.send_at(sent.as_ptr(), 3000, DType::U8, 1, STREAM) }
                                .unwrap();
                        }
                    });
                }
            });
        } else {
            let mut seen = [0; 3];
            for _ in 0..3 * EACH {
                let mut there = vec![9; 3000];
                // SAFETY: the memory has this length, and only this thread uses it.
                unsafe { comm.recv_at(there.as_mut_ptr(), 3000, DType::U8, 0, STREAM) }.unwrap();
                assert!(there.iter().all(|byte| *byte == there[0]), "mixed");
                seen[there[0] as usize] += 1;
            }
            assert_eq!(seen, [EACH; 3]);
        }
    });
}

#[test]
fn lengths_that_differ_are_an_error_on_both_ranks_and_nothing_is_written() {
    // S6: a message that is sent before its receiver compares lengths, one that is too long for that, other elements.
    for ((sent, as_sent), (expected, as_expected)) in [
        ((10, DType::U8), (11, DType::U8)),
        ((0, DType::U8), (1, DType::U8)),
        ((1 << 20, DType::U8), (10, DType::U8)),
        ((4, DType::F64), (8, DType::F32)),
    ] {
        ranks(2, &small(), |_, comm| {
            let mut bytes = vec![7_u8; 1 << 20];
            let error = if comm.rank() == 0 {
                loop {
                    // SAFETY: the memory is longer, and only this thread uses it; so below.
                    let call = unsafe { comm.send_at(bytes.as_ptr(), sent, as_sent, 1, STREAM) };
                    if let Err(error) = call {
                        break error;
                    }
                }
            } else {
                let at = bytes.as_mut_ptr();
                // SAFETY: as above.
                unsafe { comm.recv_at(at, expected, as_expected, 0, STREAM) }.unwrap_err()
            };
            assert!(error.is_diverged(), "{error}");
            let text = error.to_string();
            for (count, dtype) in [(sent, as_sent), (expected, as_expected)] {
                assert!(text.contains(&format!("{} bytes", count * dtype.size())), "{text}");
            }
            assert!(text.contains("rank 0 sends") && text.contains("to rank 1"), "{text}");
            assert!(bytes.iter().all(|byte| *byte == 7), "a refused message was written");
            assert!(comm.failure().is_some_and(|error| error.is_diverged()));
        });
    }
}

#[test]
fn a_peer_that_does_not_come_is_named_in_time() {
    // S5
    for sends in [false, true] {
        let done = Barrier::new(2);
        let options = CommunicatorOptions { timeout: SHORT, ..small() };
        ranks(2, &options, |_, comm| {
            if comm.rank() == 1 {
                done.wait();
                // Rank 0's fault was reported to it, so it does not wait.
                let began = Instant::now();
                let error = comm.barrier(STREAM).unwrap_err();
                assert!(error.is_timeout() && began.elapsed() < LONG / 2, "{error}");
                return;
            }
            let mut bytes = vec![0_u8; 1 << 20];
            let began = Instant::now();
            let call = if sends {
                // SAFETY: the memory has this length, and only this thread uses it; so below.
                unsafe { comm.send_at(bytes.as_ptr(), 1 << 20, DType::U8, 1, STREAM) }
            } else {
                // SAFETY: as above.
                unsafe { comm.recv_at(bytes.as_mut_ptr(), 1 << 20, DType::U8, 1, STREAM) }
            };
            let (error, took) = (call.unwrap_err(), began.elapsed());
            assert!(error.is_timeout() && error.ranks() == [1], "{error}");
            let what = if sends { "rank 1 in send" } else { "rank 1 in recv" };
            assert!(error.to_string().contains(what), "{error}");
            assert!(took >= SHORT && took < LONG / 2, "{took:?}");
            assert!(comm.failure().is_some_and(|error| error.is_timeout()));
            assert!(comm.barrier(STREAM).unwrap_err().is_timeout());
            done.wait();
        });
    }
}

#[test]
fn invalid_arguments_are_refused_with_their_values_and_harm_nothing() {
    ranks(2, &small(), |pool, comm| {
        let (me, peer) = (comm.rank(), 1 - comm.rank());
        let block = pool.alloc::<u8>(64).unwrap();
        pool.commit().unwrap();
        let long = pool.alloc::<[u8; 256]>(1).unwrap();
        let theirs = pool.layout().peer(peer, block.address()).unwrap() as *mut u8;
        let refused = [
            (comm.send(&block, me, STREAM), "a rank sends itself nothing"),
            (comm.recv(&block, me, STREAM), "a rank sends itself nothing"),
            (comm.send(&block, 2, STREAM), "rank 2: there are 2 ranks"),
            (comm.recv(&long, peer, STREAM), "elements of 256 bytes"),
            // SAFETY: refused before memory is accessed; so are those below.
            (unsafe { comm.send_at(theirs, 8, DType::U8, peer, STREAM) }, "another rank's slot"),
            (
                // SAFETY: as above.
                unsafe { comm.recv_at(std::ptr::null_mut(), 8, DType::U8, peer, STREAM) },
                "not memory",
            ),
            (
                // SAFETY: as above.
                unsafe { comm.recv_at(theirs, usize::MAX, DType::F64, peer, STREAM) },
                "no memory is that long",
            ),
        ];
        for (outcome, why) in refused {
            let error = outcome.unwrap_err();
            assert!(error.is_invalid_argument() && error.to_string().contains(why), "{error}");
        }
        comm.barrier(STREAM).unwrap();
        assert!(comm.failure().is_none());
    });
}
