//! Copies and signals between ranks that are processes: data is there when its signal has arrived, sleepers wake up,
//! and a process that ends is named instead of waited for.

use std::time::{Duration, Instant};

use symmpool_allocator::{Driver, Pool, Stream};
use symmpool_collectives::Communicator;
use symmpool_tests::launch::{Host, Job};
use symmpool_tests::rank_process::RankProcess;

const STREAM: &Stream = &Stream::DEFAULT;
const WORLD: u32 = 3;
const COUNT: usize = 40_000;
const LONG: Duration = Duration::from_secs(30);

/// The test function that every rank runs.
#[test]
fn rank() {
    let Some(process) = RankProcess::from_env() else { return };
    let member = process.join();
    let pool = Pool::builder(member.group.clone())
        .driver(Driver::host().unwrap())
        .stride(1 << 30)
        .build()
        .unwrap();
    let comm = Communicator::new(&pool).unwrap();
    match process.scenario.as_str() {
        "ring" => ring(&process, &pool, &comm),
        "late" => late(&process, &comm),
        _ => lost(&process, &comm),
    }
}

/// Blocks travel around the ring; every element is what the rank before computed.
fn ring(process: &RankProcess, pool: &Pool, comm: &Communicator) {
    let (next, before) = ((process.rank + 1) % WORLD, (process.rank + WORLD - 1) % WORLD);
    let (inbox, mine) = (pool.alloc::<u32>(COUNT).unwrap(), pool.alloc::<u32>(COUNT).unwrap());
    mine.write(&vec![process.rank; COUNT]).unwrap();
    pool.commit().unwrap();
    for round in 1..=200 {
        comm.put_signal(&inbox, 0, &mine, next, 2, STREAM).unwrap();
        comm.wait(before, 2, LONG, STREAM).unwrap();
        let seen = inbox.read().unwrap();
        let expected = (process.rank + WORLD * round - round) % WORLD + 1000 * (round - 1);
        assert!(seen.iter().all(|value| *value == expected), "round {round}: {:?}", &seen[..8]);
        mine.write(&vec![expected + 1000; COUNT]).unwrap();
        // The inbox may be written again. Now and then the signal comes so late that the waiter sleeps.
        if round % 50 == 0 && process.rank == 0 {
            std::thread::sleep(Duration::from_millis(30));
        }
        comm.signal(before, 3, STREAM).unwrap();
        comm.wait(next, 3, LONG, STREAM).unwrap();
    }
    process.report("sum", mine.read().unwrap()[COUNT - 1]);
}

/// Rank 1 signals once and ends; the others wait for a second signal.
fn lost(process: &RankProcess, comm: &Communicator) {
    if process.rank == 1 {
        for peer in [0, 2] {
            comm.signal(peer, 0, STREAM).unwrap();
        }
        // The process ends as in a crash: nothing is dropped.
        std::process::exit(0);
    }
    comm.wait(1, 0, LONG, STREAM).unwrap();
    let began = Instant::now();
    let error = comm.wait(1, 0, LONG, STREAM).unwrap_err();
    process.report("after", began.elapsed().as_millis());
    process.report("lost", error.is_peer_lost());
    process.report("ranks", format!("{:?}", error.ranks()));
    process.report("says", &error);
    // The channels between the other ranks still work.
    comm.signal(2 - process.rank, 0, STREAM).unwrap();
    comm.wait(2 - process.rank, 0, LONG, STREAM).unwrap();
    process.report("went", "on");
}

/// Rank 1 comes late to one barrier on a channel, and to the next.
fn late(process: &RankProcess, comm: &Communicator) {
    let mut ran_out = 0;
    for round in 0..2 {
        if process.rank == 1 {
            // The others signal this after their timeout.
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
    process.report("ran_out", ran_out);
    comm.barrier(STREAM).unwrap();
    // Rank 1 ends, and a barrier that waits for it names it.
    if process.rank == 1 {
        std::process::exit(0);
    }
    let began = Instant::now();
    let error = comm.barrier_on(8, LONG, STREAM).unwrap_err();
    process.report("lost", format!("{} {:?}", error.is_peer_lost(), error.ranks()));
    process.report("after", began.elapsed().as_millis());
}

#[test]
fn processes_hand_data_around_a_ring() {
    // S3
    for report in Job::new("rank", "ring", WORLD).run() {
        assert!(report.status.success(), "{report:?}");
        // Each value has travelled around, and 1000 was added in each round.
        let expected = (report.rank + WORLD * 200 - 200) % WORLD + 200_000;
        assert_eq!(report.value("sum"), expected.to_string());
    }
}

#[test]
fn a_process_that_ends_is_named_by_ranks_that_wait_for_its_signal() {
    // S5
    let reports = Job { host: Host::Test, ..Job::new("rank", "lost", WORLD) }.run();
    for rank in [0, 2] {
        let report = &reports[rank];
        assert!(report.status.success(), "{report:?}");
        assert_eq!((report.value("lost"), report.value("ranks")), ("true", "[1]"), "{report:?}");
        assert!(report.value("says").contains("channel 0"), "{report:?}");
        assert!(report.value("after").parse::<u64>().unwrap() < 10_000, "{report:?}");
        assert_eq!(report.value("went"), "on");
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
        assert_eq!(report.value("ran_out"), "2", "{report:?}");
        assert_eq!(report.value("lost"), "true [1]", "{report:?}");
        assert!(report.value("after").parse::<u64>().unwrap() < 10_000, "{report:?}");
    }
}
