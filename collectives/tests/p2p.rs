//! Point-to-point messages between the ranks of a pool in host memory; ranks are threads.

mod pool_ranks;

use std::collections::BTreeMap;
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use symmpool_allocator::{Error, Pool, Result, Stream};
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
                            // SAFETY: the memory has this length, and nobody writes it.
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
            // Each round sends as many messages as there is room for; a collective comes between sends and receives.
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

/// Sends or receives in memory of this thread's.
fn send(comm: &Communicator, bytes: &[u8], dtype: DType, peer: u32) -> Result<()> {
    // SAFETY: the memory has this length, and nobody writes it.
    unsafe { comm.send_at(bytes.as_ptr(), bytes.len() / dtype.size(), dtype, peer, STREAM) }
}

fn recv(comm: &Communicator, bytes: &mut [u8], dtype: DType, peer: u32) -> Result<()> {
    let count = bytes.len() / dtype.size();
    // SAFETY: the memory has this length, and only this thread uses it.
    unsafe { comm.recv_at(bytes.as_mut_ptr(), count, dtype, peer, STREAM) }
}

#[test]
fn messages_that_differ_fail_on_both_ranks_and_the_next_ones_arrive() {
    // S6: a message that is sent before its receiver compares it, an empty one, one that is too long for that, other
    // elements, and other elements of the same size.
    for ((sent, as_sent), (expected, as_expected)) in [
        ((10, DType::U8), (11, DType::U8)),
        ((0, DType::U8), (1, DType::U8)),
        ((1 << 20, DType::U8), (10, DType::U8)),
        ((10, DType::U8), (1 << 20, DType::U8)),
        ((4, DType::F64), (8, DType::F32)),
        ((4, DType::F32), (4, DType::I32)),
        ((0, DType::F32), (0, DType::I32)),
        ((100_000, DType::F32), (100_000, DType::I32)),
    ] {
        ranks(3, &small(), |_, comm| {
            let me = comm.rank();
            let mut bytes = vec![7_u8; 1 << 20];
            let error = match me {
                0 => {
                    let first = send(comm, &bytes[..sent * as_sent.size()], as_sent, 1);
                    // A message that was sent before is refused later; then the next one is not sent.
                    Some(first.and_then(|()| loop_until_refused(comm)).unwrap_err())
                }
                1 => {
                    let there = &mut bytes[..expected * as_expected.size()];
                    Some(recv(comm, there, as_expected, 0).unwrap_err())
                }
                _ => None,
            };
            if let Some(error) = error {
                assert!(error.is_diverged() && error.ranks() == [0, 1], "{error}");
                let text = error.to_string();
                for (count, dtype) in [(sent, as_sent), (expected, as_expected)] {
                    let what = format!("{count} {} ({} bytes)", dtype.name(), count * dtype.size());
                    assert!(text.contains(&what), "{text}");
                }
                assert!(text.contains("rank 0 sends") && text.contains("to rank 1"), "{text}");
                assert!(text.contains("stays usable"), "{text}");
            }
            assert!(bytes.iter().all(|byte| *byte == 7), "a refused message was written");
            assert!(comm.failure().is_none());
            // Rank 1 has received what rank 0 sent while it looked for the refusal.
            comm.barrier(STREAM).unwrap();
            match me {
                0 => send(comm, &data(0, 1, 5, 5000), DType::U8, 1).unwrap(),
                1 => {
                    let mut there = vec![0; 5000];
                    recv(comm, &mut there, DType::U8, 0).unwrap();
                    assert!(there == data(0, 1, 5, 5000));
                }
                _ => {}
            }
            comm.barrier(STREAM).unwrap();
        });
    }
}

#[test]
fn a_declined_send_is_reported_to_its_receiver_and_the_next_message_arrives() {
    ranks(3, &small(), |_, comm| {
        let mut there = [0; 8];
        match comm.rank() {
            0 => {
                send(comm, &[1; 8], DType::U8, 1).unwrap();
                assert!(decline(comm, DType::U8, 1, true).is_invalid_argument());
                send(comm, &[3; 8], DType::U8, 1).unwrap();
                // With nothing behind it, and twice.
                decline(comm, DType::U8, 1, true);
                decline(comm, DType::U8, 1, true);
                comm.barrier(STREAM).unwrap();
            }
            1 => {
                recv(comm, &mut there, DType::U8, 0).unwrap();
                let error = recv(comm, &mut there, DType::U8, 0).unwrap_err();
                assert!(error.is_diverged() && error.ranks() == [0], "{error}");
                assert!(error.to_string().contains("its own send to rank 1"), "{error}");
                assert_eq!(there, [1; 8]);
                recv(comm, &mut there, DType::U8, 0).unwrap();
                assert_eq!(there, [3; 8]);
                let began = Instant::now();
                for _ in 0..2 {
                    assert!(recv(comm, &mut there, DType::U8, 0).unwrap_err().is_diverged());
                }
                assert!(began.elapsed() < LONG / 2);
                comm.barrier(STREAM).unwrap();
            }
            _ => comm.barrier(STREAM).unwrap(),
        }
        assert!(comm.failure().is_none());
    });
}

#[test]
fn a_declined_receive_is_reported_to_its_sender_and_the_next_message_arrives() {
    // The receiver declines before the sender comes, while it waits for room, and after it has sent.
    for (count, early) in [(8, true), (8, false), (100_000, true), (100_000, false)] {
        let turn = Barrier::new(2);
        ranks(3, &small(), |_, comm| {
            let mut there = vec![0; count];
            match comm.rank() {
                0 => {
                    if early {
                        turn.wait();
                    }
                    let sent = send(comm, &vec![1; count], DType::U8, 1);
                    if !early {
                        turn.wait();
                    }
                    if early || count > 8 {
                        let error = sent.unwrap_err();
                        assert!(error.is_diverged() && error.ranks() == [1], "{error}");
                        assert!(error.to_string().contains("its own recv from rank 0"), "{error}");
                    } else {
                        sent.unwrap();
                        comm.barrier(STREAM).unwrap();
                        let error = comm.synchronize(STREAM).unwrap_err();
                        assert!(error.is_diverged() && error.ranks() == [1], "{error}");
                        comm.synchronize(STREAM).unwrap();
                    }
                    send(comm, &vec![2; count], DType::U8, 1).unwrap();
                }
                1 => {
                    if !early && count == 8 {
                        turn.wait();
                    } else if !early {
                        thread::sleep(SHORT);
                    }
                    assert!(decline(comm, DType::U8, 0, false).is_invalid_argument());
                    if early || count > 8 {
                        turn.wait();
                    }
                    if !early && count == 8 {
                        comm.barrier(STREAM).unwrap();
                    }
                    recv(comm, &mut there, DType::U8, 0).unwrap();
                    assert!(there.iter().all(|byte| *byte == 2));
                }
                _ if !early && count == 8 => comm.barrier(STREAM).unwrap(),
                _ => {}
            }
            comm.barrier(STREAM).unwrap();
        });
    }
}

/// Declines a message, by memory that is another rank's.
fn decline(comm: &Communicator, dtype: DType, peer: u32, sends: bool) -> Error {
    let null = std::ptr::null_mut();
    // SAFETY: refused before memory is accessed.
    let sent = |()| unsafe { comm.send_at(null, 8, dtype, peer, STREAM) };
    // SAFETY: refused before memory is accessed.
    let received = |()| unsafe { comm.recv_at(null, 8, dtype, peer, STREAM) };
    if sends { sent(()) } else { received(()) }.unwrap_err()
}

#[test]
fn a_declined_receive_does_not_wait_for_another_thread_that_receives() {
    ranks(2, &small(), |_, comm| {
        if comm.rank() == 0 {
            comm.barrier(STREAM).unwrap();
            send(comm, &[1; 8], DType::U8, 1).unwrap();
            // The second message is skipped once the first one has arrived, and this rank learns that.
            let sent = send(comm, &[2; 8], DType::U8, 1);
            let began = Instant::now();
            let mut refused = sent.is_err();
            while !refused && began.elapsed() < LONG / 2 {
                thread::sleep(Duration::from_millis(1));
                refused = comm.synchronize(STREAM).is_err();
            }
            assert!(refused);
            comm.barrier(STREAM).unwrap();
            return;
        }
        let mut there = [0; 8];
        thread::scope(|scope| {
            let receiver = scope.spawn(|| recv(comm, &mut there, DType::U8, 0).unwrap());
            thread::sleep(SHORT);
            let began = Instant::now();
            decline(comm, DType::U8, 0, false);
            assert!(began.elapsed() < LONG / 4, "{:?}", began.elapsed());
            comm.barrier(STREAM).unwrap();
            receiver.join().unwrap();
        });
        assert_eq!(there, [1; 8]);
        comm.barrier(STREAM).unwrap();
    });
}

/// End of a message: a rank makes it with these bytes and this type, or declines it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum MessageEnd {
    Makes(usize, DType),
    Declines,
}

/// A small generator, the same on all ranks.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }

    fn end(&mut self, bytes: usize, dtype: DType) -> MessageEnd {
        match self.below(20) {
            0 => MessageEnd::Declines,
            1 => MessageEnd::Makes(bytes + 4, dtype),
            2 => {
                MessageEnd::Makes(bytes, if dtype == DType::F32 { DType::I32 } else { DType::F32 })
            }
            _ => MessageEnd::Makes(bytes, dtype),
        }
    }
}

/// How a message must end: a naive queue, in which the n-th send meets the n-th receive.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Model {
    Arrives,
    Fails,
}

fn model(ends: (MessageEnd, MessageEnd)) -> Model {
    if ends.0 == ends.1 && ends.0 != MessageEnd::Declines { Model::Arrives } else { Model::Fails }
}

#[test]
fn random_messages_that_fail_leave_all_others_as_in_a_queue() {
    const MESSAGES: usize = 60;
    let rounds: u64 = std::env::var("SYMMPOOL_P2P_ROUNDS").map_or(6, |text| text.parse().unwrap());
    for round in 0..rounds {
        let world = 2 + (round % 2) as u32;
        let script = |source: u32, target: u32| -> Vec<(MessageEnd, MessageEnd)> {
            let mut random = Random(round << 16 | u64::from(source << 8 | target));
            (0..MESSAGES)
                .map(|_| {
                    let bytes = 4 * [0, 1, 7, 100, 600, 5000, 40_000][random.below(7)];
                    let dtype = [DType::F32, DType::I32][random.below(2)];
                    (random.end(bytes, dtype), random.end(bytes, dtype))
                })
                .collect()
        };
        // Findings of the sender and the receiver of each message, by source and target.
        let found = Mutex::new(BTreeMap::new());
        ranks(world, &small(), |_, comm| {
            let me = comm.rank();
            thread::scope(|scope| {
                for peer in (0..world).filter(|peer| *peer != me) {
                    let found = &found;
                    scope.spawn(move || {
                        let outcomes: Vec<_> = (0..)
                            .zip(script(me, peer))
                            .map(|(nth, (end, _))| match end {
                                MessageEnd::Declines => {
                                    decline(comm, DType::F32, peer, true);
                                    false
                                }
                                MessageEnd::Makes(bytes, dtype) => {
                                    let sent = send(comm, &data(me, peer, nth, bytes), dtype, peer);
                                    assert!(
                                        sent.as_ref().err().is_none_or(Error::is_diverged),
                                        "{sent:?}"
                                    );
                                    sent.is_ok()
                                }
                            })
                            .collect();
                        found.lock().unwrap().insert((me, peer, true), outcomes);
                    });
                    scope.spawn(move || {
                        let outcomes: Vec<_> = (0..)
                            .zip(script(peer, me))
                            .map(|(nth, (_, end))| match end {
                                MessageEnd::Declines => {
                                    decline(comm, DType::F32, peer, false);
                                    false
                                }
                                MessageEnd::Makes(bytes, dtype) => {
                                    let mut there = vec![0xa5; bytes];
                                    let came = recv(comm, &mut there, dtype, peer);
                                    assert!(
                                        came.as_ref().err().is_none_or(Error::is_diverged),
                                        "{came:?}"
                                    );
                                    let wanted = if came.is_ok() {
                                        data(peer, me, nth, bytes)
                                    } else {
                                        vec![0xa5; bytes]
                                    };
                                    assert!(
                                        there == wanted,
                                        "message {nth} of rank {peer} to {me}"
                                    );
                                    came.is_ok()
                                }
                            })
                            .collect();
                        found.lock().unwrap().insert((peer, me, false), outcomes);
                    });
                }
                // Collectives are in no order with messages, and fail for none of them.
                for _ in 0..20 {
                    comm.barrier(STREAM).unwrap();
                }
            });
            assert!(comm.failure().is_none());
            comm.barrier(STREAM).unwrap();
        });
        let found = found.into_inner().unwrap();
        let mut arrived = 0;
        for (source, target) in (0..world).flat_map(|a| (0..world).map(move |b| (a, b))) {
            if source == target {
                continue;
            }
            let (sent, came) = (&found[&(source, target, true)], &found[&(source, target, false)]);
            for (nth, ends) in script(source, target).into_iter().enumerate() {
                let what =
                    format!("round {round}: message {nth} of {source} to {target}: {ends:?}");
                // A message that failed on one rank failed on the other, or was sent before its receiver came.
                match model(ends) {
                    Model::Arrives => assert!(!came[nth] || sent[nth], "{what}"),
                    Model::Fails => assert!(!came[nth], "{what}"),
                }
                arrived += usize::from(came[nth]);
            }
        }
        // Each message that fails may make the sender's next one with that peer fail, and no more.
        assert!(arrived > MESSAGES * (world * (world - 1)) as usize / 3, "{arrived}");
    }
}

/// Waits until a receive from rank 1, which sends nothing, says that rank 1 has refused a message.
fn loop_until_refused(comm: &Communicator) -> Result<()> {
    let began = Instant::now();
    let refused = recv(comm, &mut [0; 3], DType::U8, 1);
    assert!(began.elapsed() < LONG / 2, "{:?}", began.elapsed());
    refused
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
                // SAFETY: the memory has this length, and only this thread uses it.
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
                // SAFETY: refused before memory is accessed.
                unsafe { comm.recv_at(std::ptr::null_mut(), 8, DType::U8, peer, STREAM) },
                "not memory",
            ),
            (
                // SAFETY: refused before memory is accessed.
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
