//! Copies and signals between two ranks of a pool in host memory; ranks are threads.

mod pool_ranks;

use std::collections::BTreeMap;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use symmpool_allocator::{Block, CONTROL_LANE, Driver, Group, Pool, Stream};
use symmpool_collectives::{Communicator, CommunicatorOptions, ReduceOp};

const STREAM: &Stream = &Stream::DEFAULT;
/// The timeout of waits that should succeed.
const LONG: Duration = Duration::from_secs(20);
/// The timeout of waits that should fail.
const SHORT: Duration = Duration::from_millis(50);

fn ranks(world: u32, body: impl Fn(&Pool, &Communicator) + Sync) {
    pool_ranks::ranks(world, |pool| body(pool, &Communicator::new(pool).unwrap()));
}

fn windows(pool: &Pool, values: &[u64]) -> Block<u64> {
    let block = pool.alloc(values.len()).unwrap();
    block.write(values).unwrap();
    pool.commit().unwrap();
    block
}

#[test]
fn a_ring_of_puts_hands_data_on() {
    // S3, without barriers: in every round, the data is there when its signal has arrived.
    ranks(3, |pool, comm| {
        let (me, world) = (comm.rank(), comm.world());
        let (next, before) = ((me + 1) % world, (me + world - 1) % world);
        for count in [1, 1000, 100_000] {
            let inbox = windows(pool, &vec![0; 2 * count]);
            let mine = windows(pool, &vec![u64::from(me); count]);
            for round in 0..6 {
                // The halves are used alternately; a signal on the second channel says that a half is free again.
                let half = round % 2 * count;
                if round >= 2 {
                    comm.wait(next, 1, LONG, STREAM).unwrap();
                }
                if round % 3 == 0 {
                    comm.put(&inbox, half, &mine, next, STREAM).unwrap();
                    comm.signal(next, 0, STREAM).unwrap();
                } else {
                    comm.put_signal(&inbox, half, &mine, next, 0, STREAM).unwrap();
                }
                comm.wait(before, 0, LONG, STREAM).unwrap();
                let expected = (u64::from(me) + u64::from(world) * 6 - 1 - round as u64) % 3;
                let seen = &inbox.read().unwrap()[half..half + count];
                assert!(seen.iter().all(|value| *value == expected), "round {round}: {seen:?}");
                mine.write(&vec![expected; count]).unwrap();
                comm.signal(before, 1, STREAM).unwrap();
            }
            // Takes the remaining signals of that channel, so that the next size begins with none.
            for _ in 0..2 {
                comm.wait(next, 1, LONG, STREAM).unwrap();
            }
        }
    });
}

#[test]
fn a_peers_data_can_be_got_after_its_signal() {
    ranks(3, |pool, comm| {
        let me = u64::from(comm.rank());
        let values: Vec<u64> = (0..500).map(|i| i * 10 + me).collect();
        let shared = windows(pool, &values);
        // The destination is ordinary memory, and then a window.
        let plain = pool.lane("own").unwrap().alloc::<u64>(100).unwrap();
        let window = windows(pool, &[0; 100]);
        for peer in 0..3 {
            comm.signal(peer, 15, STREAM).unwrap();
        }
        for peer in 0..3 {
            comm.wait(peer, 15, LONG, STREAM).unwrap();
            let expected: Vec<u64> = (400..500).map(|i| i * 10 + u64::from(peer)).collect();
            for into in [&plain, &window] {
                comm.get(into, &shared, 400, peer, STREAM).unwrap();
                assert_eq!(into.read().unwrap(), expected);
            }
        }
        comm.barrier(STREAM).unwrap();
    });
}

#[test]
fn a_signal_is_taken_once_and_a_wait_that_times_out_takes_none() {
    // S5
    ranks(2, |_, comm| {
        let peer = 1 - comm.rank();
        for _ in 0..3 {
            comm.signal(peer, 3, STREAM).unwrap();
        }
        comm.barrier(STREAM).unwrap();
        for _ in 0..3 {
            comm.wait(peer, 3, Duration::ZERO, STREAM).unwrap();
        }
        let began = Instant::now();
        for timeout in [Duration::ZERO, SHORT] {
            let error = comm.wait(peer, 3, timeout, STREAM).unwrap_err();
            assert!(error.is_timeout() && error.ranks() == [peer], "{error}");
            assert!(error.to_string().contains(&format!("rank {peer} on channel 3")), "{error}");
        }
        assert!(began.elapsed() >= SHORT && began.elapsed() < Duration::from_secs(5));
        // This and other channels still work.
        comm.barrier(STREAM).unwrap();
        assert!(comm.failure().is_none());
        comm.signal(peer, 3, STREAM).unwrap();
        comm.wait(peer, 3, LONG, STREAM).unwrap();
        comm.barrier(STREAM).unwrap();
    });
}

#[test]
fn a_barrier_that_timed_out_is_continued_by_the_next_one() {
    // S5
    ranks(3, |_, comm| {
        // Rank 2 comes after both others have timed out once.
        if comm.rank() == 2 {
            for peer in 0..2 {
                comm.wait(peer, 1, LONG, STREAM).unwrap();
            }
            assert!(comm.wait(0, 0, Duration::ZERO, STREAM).is_ok(), "a signal of the barrier");
            assert!(comm.wait(0, 0, Duration::ZERO, STREAM).unwrap_err().is_timeout(), "one");
            // A timed-out barrier on channel 4 has the same effect on this rank as none.
            comm.barrier_on(4, LONG, STREAM).unwrap();
        } else {
            for timeout in [Duration::ZERO, SHORT, SHORT] {
                let began = Instant::now();
                let error = comm.barrier_on(4, timeout, STREAM).unwrap_err();
                assert!(error.is_timeout() && error.ranks().contains(&2), "{error}");
                assert!(began.elapsed() < timeout + LONG / 4, "one limit for all ranks");
            }
            let error = comm.barrier_on(0, SHORT, STREAM).unwrap_err();
            assert!(error.to_string().contains("in a barrier on channel 0"), "{error}");
            comm.signal(2, 1, STREAM).unwrap();
            comm.barrier_on(4, LONG, STREAM).unwrap();
        }
        comm.barrier(STREAM).unwrap();
        for peer in (0..3).filter(|peer| *peer != comm.rank()) {
            let more = comm.wait(peer, 4, Duration::ZERO, STREAM).unwrap_err();
            assert!(
                more.is_timeout(),
                "one signal for each barrier, however often it was called: {more}"
            );
        }
        let error = comm.barrier_on(16, SHORT, STREAM).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("0 to 15"), "{error}");
    });
}

#[test]
fn no_rank_passes_a_barrier_before_all_have_reached_it_however_often_it_times_out() {
    // S5
    const ROUNDS: u64 = 400;
    for world in [1, 2, 4] {
        let begun: Vec<AtomicU64> = (0..world).map(|_| AtomicU64::new(0)).collect();
        let (late, began) = (AtomicU64::new(0), Instant::now());
        ranks(world, |_, comm| {
            let mut random = 0x9e37_79b9 + u64::from(comm.rank());
            for round in 1..=ROUNDS {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                if random >> 61 == 0 {
                    thread::sleep(Duration::from_micros(random >> 54 & 127));
                }
                // On busy processors it might be that no barrier takes longer than its limit. Here one does.
                while world > 1
                    && round == ROUNDS / 2
                    && comm.rank() == 0
                    && began.elapsed() < LONG
                    && late.load(Ordering::Relaxed) == 0
                {
                    thread::sleep(Duration::from_micros(100));
                }
                begun[comm.rank() as usize].store(round, Ordering::Release);
                let mut limit = Duration::from_micros(random >> 40 & 15);
                while let Err(error) = comm.barrier_on(5, limit, STREAM) {
                    assert!(error.is_timeout() && began.elapsed() < LONG, "{error}");
                    late.fetch_add(1, Ordering::Relaxed);
                    limit += Duration::from_micros(20);
                }
                for (rank, begun) in begun.iter().enumerate() {
                    let begun = begun.load(Ordering::Acquire);
                    assert!(
                        (round..=round + 1).contains(&begun),
                        "rank {rank} in {begun}: {round}"
                    );
                }
            }
        });
        assert!(world == 1 || late.into_inner() > 0, "some barriers did time out");
    }
}

#[test]
fn threads_wait_while_other_threads_wait_and_make_calls() {
    ranks(2, |pool, comm| {
        let peer = 1 - comm.rank();
        let block = pool.alloc::<i64>(1000).unwrap();
        pool.commit().unwrap();
        const EACH: u32 = 300;
        thread::scope(|scope| {
            let (sender, taken) = channel();
            // Two threads share the signals of one channel.
            for _ in 0..2 {
                let sender = sender.clone();
                scope.spawn(move || {
                    for _ in 0..EACH {
                        comm.wait(peer, 7, LONG, STREAM).unwrap();
                        sender.send(()).unwrap();
                    }
                });
            }
            // Two threads send them.
            for _ in 0..2 {
                scope.spawn(move || (0..EACH).for_each(|_| comm.signal(peer, 7, STREAM).unwrap()));
            }
            for _ in 0..20 {
                comm.all_reduce(&block, ReduceOp::Max, STREAM).unwrap();
            }
            drop(sender);
            assert_eq!(taken.iter().count(), 2 * EACH as usize);
        });
        comm.barrier(STREAM).unwrap();
        assert!(comm.wait(peer, 7, Duration::ZERO, STREAM).unwrap_err().is_timeout());
    });
}

#[test]
fn invalid_arguments_are_refused_with_their_values_and_do_not_affect_other_ranks() {
    ranks(2, |pool, comm| {
        let (me, peer) = (comm.rank(), 1 - comm.rank());
        let block = windows(pool, &[5; 64]);
        let long = windows(pool, &[6; 65]);
        let own = pool.lane("own").unwrap().alloc::<u64>(64).unwrap();
        let other = Pool::builder(pool.group().child("other"))
            .driver(Driver::host().unwrap())
            .build()
            .unwrap();
        let foreign = windows(&other, &[7; 8]);
        let at = block.as_ptr().cast::<u8>();
        let theirs = block.peer_ptr(peer).unwrap().cast::<u8>();
        // This range crosses the boundary of the two slots.
        let across = (pool.layout().address(1, 0) - 8) as *const u8;
        let all = pool.windows();
        let control = all.list().iter().find(|window| window.lane == CONTROL_LANE);
        let control = control.map(|window| pool.layout().address(me, window.offset)).unwrap();
        let refused = [
            (comm.put(&block, 0, &long, peer, STREAM), "put of 65 elements from 0"),
            (comm.put(&block, usize::MAX, &block, peer, STREAM), "64 elements from 184467"),
            (comm.get(&block, &long, 2, peer, STREAM), "get of 64 elements from 2"),
            (comm.put(&block, 0, &block, 2, STREAM), "rank 2: there are 2 ranks"),
            (comm.put(&block, 0, &block, me, STREAM), "both ends overlap"),
            (comm.put(&own, 0, &block, peer, STREAM), "commit the pool"),
            (comm.put(&block, 0, &foreign, peer, STREAM), "not a block of"),
            (comm.put(&foreign, 0, &block, peer, STREAM), "64 elements from 0"),
            (comm.get(&foreign, &block, 0, peer, STREAM), "not a block of"),
            (comm.put_signal(&block, 0, &block, peer, 16, STREAM), "channels are 0 to 15"),
            (comm.signal(peer, 16, STREAM), "channel 16: channels are 0 to 15"),
            (comm.signal(9, 0, STREAM), "rank 9: there are 2"),
            (comm.wait(peer, u32::MAX, LONG, STREAM), "channels are 0 to 15"),
            (comm.wait(2, 0, LONG, STREAM), "there are 2 ranks"),
            // SAFETY: refused before memory is accessed, which is what is tested. So below.
            (unsafe { comm.put_at(theirs, at, 8, peer, STREAM) }, "another rank's slot"),
            // SAFETY: refused before memory is accessed, which is what is tested.
            (unsafe { comm.put_at(at, theirs, 8, peer, STREAM) }, "another rank's slot"),
            // SAFETY: refused before memory is accessed, which is what is tested.
            (unsafe { comm.put_at(at, across, 16, peer, STREAM) }, "another rank's slot"),
            // SAFETY: refused before memory is accessed, which is what is tested.
            (unsafe { comm.put_at(at, std::ptr::null(), 8, peer, STREAM) }, "not memory"),
            // SAFETY: refused before memory is accessed, which is what is tested.
            (unsafe { comm.put_at(at, at, usize::MAX, peer, STREAM) }, "not all in windows"),
            // SAFETY: refused before memory is accessed, which is what is tested.
            (unsafe { comm.get_at(usize::MAX as *mut u8, at, 8, peer, STREAM) }, "that long"),
            // SAFETY: refused before memory is accessed, which is what is tested.
            (unsafe { comm.put_at(8 as *mut u8, at, 8, peer, STREAM) }, "not in the pool's heap"),
            // SAFETY: refused before memory is accessed, which is what is tested.
            (unsafe { comm.put_at(control as *mut u8, at, 8, peer, STREAM) }, "own memory"),
        ];
        for (outcome, why) in refused {
            let error = outcome.expect_err(why);
            assert!(error.is_invalid_argument() && error.to_string().contains(why), "{error}");
            assert!(error.to_string().contains(&format!("rank {me}")), "{error}");
        }
        // A put of no elements is valid at any place.
        let none = pool.alloc::<u64>(0).unwrap();
        comm.put(&block, 64, &none, peer, STREAM).unwrap();
        // Ends that touch do not overlap.
        let half = at.wrapping_add(256);
        for (to, from) in [(at, half), (half, at)] {
            // SAFETY: halves of the block, whose elements are all the same.
            unsafe { comm.put_at(to, from, 256, me, STREAM) }.unwrap();
        }
        assert!(comm.wait(peer, 0, Duration::ZERO, STREAM).unwrap_err().is_timeout());
        comm.barrier(STREAM).unwrap();
        assert_eq!(block.read().unwrap(), [5; 64]);
    });
}

#[test]
fn a_failed_communicator_serves_nothing_and_ends_waits() {
    // S5
    ranks(3, |pool, _| {
        let options = CommunicatorOptions { timeout: 4 * SHORT, ..CommunicatorOptions::default() };
        let comm = Communicator::with_options(pool, &options).unwrap();
        match comm.rank() {
            // Rank 2 stays away. Rank 1 waits for a signal of rank 0, which gives up on rank 2.
            0 => {
                let began = Instant::now();
                thread::scope(|scope| {
                    let waiting = scope.spawn(|| comm.wait(1, 0, LONG, STREAM).unwrap_err());
                    assert!(comm.barrier(STREAM).unwrap_err().is_timeout());
                    let error = waiting.join().unwrap();
                    assert!(error.to_string().contains("barrier, call 1, handshake"), "{error}");
                });
                assert!(began.elapsed() < LONG / 2, "the wait ended before its timeout");
                assert!(comm.signal(1, 0, STREAM).unwrap_err().is_timeout());
            }
            1 => {
                let began = Instant::now();
                let error = comm.wait(0, 0, LONG, STREAM).unwrap_err();
                assert!(error.is_timeout(), "{error}");
                assert!(began.elapsed() < LONG / 2, "the wait ended before its timeout");
            }
            _ => {}
        }
    });
}

/// One signal or one wait of a random sequence.
#[derive(Clone, Copy, Debug)]
struct Act {
    from: u32,
    to: u32,
    channel: u32,
    wait: bool,
}

fn act() -> impl Strategy<Value = Act> {
    (0..2_u32, 0..2_u32, 0..3_u32, any::<bool>()).prop_map(|(from, to, channel, wait)| Act {
        from,
        to,
        channel: channel * 7,
        wait,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn counts_are_those_of_the_model(acts in proptest::collection::vec(act(), 1..60)) {
        // Both communicators are used by one thread after they are made.
        let (sender, made) = channel();
        let together = Barrier::new(2);
        thread::scope(|scope| {
            for group in Group::in_process(2).expect("a small group") {
                let (sender, together) = (sender.clone(), &together);
                scope.spawn(move || {
                    let comm = Communicator::new(&pool_ranks::pool(group)).unwrap();
                    together.wait();
                    sender.send((comm.rank(), comm)).unwrap();
                });
            }
        });
        let comms: BTreeMap<u32, Communicator> = made.try_iter().collect();
        let mut left: BTreeMap<(u32, u32, u32), u64> = BTreeMap::new();
        for Act { from, to, channel, wait } in acts {
            let left = left.entry((from, to, channel)).or_default();
            if wait {
                let outcome = comms[&to].wait(from, channel, Duration::ZERO, STREAM);
                prop_assert_eq!(outcome.is_ok(), *left > 0);
                *left = left.saturating_sub(1);
            } else {
                comms[&from].signal(to, channel, STREAM).unwrap();
                *left += 1;
            }
        }
    }
}
