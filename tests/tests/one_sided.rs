//! Copies and signals between ranks that are processes: what a signal announces is there, sleepers
//! wake, and a process that ends is named instead of waited for.

use std::time::{Duration, Instant};

use symmpool_allocator::{Driver, Pool, Stream};
use symmpool_collectives::Communicator;
use symmpool_tests::launch::{Host, Job};
use symmpool_tests::rank_process::Seat;

const STREAM: &Stream = &Stream::DEFAULT;
const WORLD: u32 = 3;
const COUNT: usize = 40_000;
const LONG: Duration = Duration::from_secs(30);

/// The test function that every rank runs.
#[test]
fn rank() {
    let Some(seat) = Seat::from_env() else { return };
    let member = seat.join();
    let pool = Pool::builder(member.group.clone())
        .driver(Driver::host().unwrap())
        .stride(1 << 30)
        .build()
        .unwrap();
    let comm = Communicator::new(&pool).unwrap();
    match seat.scenario.as_str() {
        "ring" => ring(&seat, &pool, &comm),
        "late" => late(&seat, &comm),
        _ => lost(&seat, &comm),
    }
}

/// Blocks go around; every element is what the rank before made of it.
fn ring(seat: &Seat, pool: &Pool, comm: &Communicator) {
    let (next, before) = ((seat.rank + 1) % WORLD, (seat.rank + WORLD - 1) % WORLD);
    let (inbox, mine) = (pool.alloc::<u32>(COUNT).unwrap(), pool.alloc::<u32>(COUNT).unwrap());
    mine.write(&vec![seat.rank; COUNT]).unwrap();
    pool.commit().unwrap();
    for round in 1..=200 {
        comm.put_signal(&inbox, 0, &mine, next, 2, STREAM).unwrap();
        comm.wait(before, 2, LONG, STREAM).unwrap();
        let seen = inbox.read().unwrap();
        let expected = (seat.rank + WORLD * round - round) % WORLD + 1000 * (round - 1);
        assert!(seen.iter().all(|value| *value == expected), "round {round}: {:?}", &seen[..8]);
        mine.write(&vec![expected + 1000; COUNT]).unwrap();
        // The inbox may be written again; asleep, now and then, when that is said.
        if round % 50 == 0 && seat.rank == 0 {
            std::thread::sleep(Duration::from_millis(30));
        }
        comm.signal(before, 3, STREAM).unwrap();
        comm.wait(next, 3, LONG, STREAM).unwrap();
    }
    seat.say("sum", mine.read().unwrap()[COUNT - 1]);
}

/// Rank 1 signals once and ends; the others wait for a second signal.
fn lost(seat: &Seat, comm: &Communicator) {
    if seat.rank == 1 {
        for peer in [0, 2] {
            comm.signal(peer, 0, STREAM).unwrap();
        }
        // As if it had crashed: nothing is given back.
        std::process::exit(0);
    }
    comm.wait(1, 0, LONG, STREAM).unwrap();
    let began = Instant::now();
    let error = comm.wait(1, 0, LONG, STREAM).unwrap_err();
    seat.say("after", began.elapsed().as_millis());
    seat.say("lost", error.is_peer_lost());
    seat.say("ranks", format!("{:?}", error.ranks()));
    seat.say("says", &error);
    // The others are well, and so are the channels between them.
    comm.signal(2 - seat.rank, 0, STREAM).unwrap();
    comm.wait(2 - seat.rank, 0, LONG, STREAM).unwrap();
    seat.say("went", "on");
}

/// Rank 1 comes late to one barrier on a channel, and to the next.
fn late(seat: &Seat, comm: &Communicator) {
    let mut ran_out = 0;
    for round in 0..2 {
        if seat.rank == 1 {
            // The others have run out of time.
            for peer in [0, 2] {
                comm.wait(peer, 9, LONG, STREAM).unwrap();
            }
        } else {
            let error = comm.barrier_on(8, Duration::from_millis(20), STREAM).unwrap_err();
            assert!(error.is_timeout() && error.ranks().contains(&1), "round {round}: {error}");
            ran_out += 1;
            comm.signal(1, 9, STREAM).unwrap();
        }
        comm.barrier_on(8, LONG, STREAM).unwrap();
    }
    seat.say("ran_out", ran_out);
    comm.barrier(STREAM).unwrap();
    // It ends, and is named by a barrier that waits for it.
    if seat.rank == 1 {
        std::process::exit(0);
    }
    let began = Instant::now();
    let error = comm.barrier_on(8, LONG, STREAM).unwrap_err();
    seat.say("lost", format!("{} {:?}", error.is_peer_lost(), error.ranks()));
    seat.say("after", began.elapsed().as_millis());
}

#[test]
fn processes_hand_data_around_a_ring() {
    // S3
    for report in Job::new("rank", "ring", WORLD).run() {
        assert!(report.status.success(), "{report:?}");
        // Each went around and had 1000 added in each round.
        let expected = (report.rank + WORLD * 200 - 200) % WORLD + 200_000;
        assert_eq!(report.said("sum"), expected.to_string());
    }
}

#[test]
fn a_process_that_ends_is_named_by_who_waits_for_its_signal() {
    // S5
    let reports = Job { host: Host::Test, ..Job::new("rank", "lost", WORLD) }.run();
    for rank in [0, 2] {
        let report = &reports[rank];
        assert!(report.status.success(), "{report:?}");
        assert_eq!((report.said("lost"), report.said("ranks")), ("true", "[1]"), "{report:?}");
        assert!(report.said("says").contains("channel 0"), "{report:?}");
        assert!(report.said("after").parse::<u64>().unwrap() < 10_000, "{report:?}");
        assert_eq!(report.said("went"), "on");
    }
}

#[test]
fn a_barrier_of_processes_that_ran_out_of_time_is_the_same_when_it_succeeds() {
    // S5
    for report in Job::new("rank", "late", WORLD).run() {
        assert!(report.status.success(), "{report:?}");
        if report.rank == 1 {
            continue;
        }
        assert_eq!(report.said("ran_out"), "2", "{report:?}");
        assert_eq!(report.said("lost"), "true [1]", "{report:?}");
        assert!(report.said("after").parse::<u64>().unwrap() < 10_000, "{report:?}");
    }
}
