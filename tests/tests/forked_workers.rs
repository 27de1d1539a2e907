//! A rank that dies while a child it forked lives on, as a process that loads data does: the others see
//! it as soon as they see any other death, though the child has a copy of all that the rank had open.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

use symmpool_allocator::driver::{FaultAction, FaultDriver, FaultPlan, Step};
use symmpool_allocator::{Deadline, Driver, Error, Pool};
use symmpool_tests::launch::{Host, Job};
use symmpool_tests::rank_process::{PATIENCE, Seat};

/// What the operations in which a rank is lost are given.
const LIMIT: Duration = Duration::from_secs(8);

/// How soon survivors know. Where ranks meet in the store they look about once a second.
const SOON: Duration = Duration::from_secs(4);

/// How long the child lives: for longer than anybody waits.
const WORKER_LIVES: Duration = Duration::from_secs(15);

const WORLD: u32 = 3;

unsafe extern "C" {
    fn fork() -> c_int;
    fn close(fd: c_int) -> c_int;
    fn _exit(status: c_int) -> !;
}

/// Starts a child that has copies of all this process has, and does nothing.
fn fork_worker() {
    // SAFETY: the child makes system calls only, and ends by itself.
    if unsafe { fork() } == 0 {
        // The test that started this rank reads its output to the end.
        for output in [1, 2] {
            // SAFETY: of the child's own; nothing is written there any more.
            unsafe { close(output) };
        }
        std::thread::sleep(WORKER_LIVES);
        // SAFETY: ends the process at once.
        unsafe { _exit(0) };
    }
}

/// The test function that every rank runs.
#[test]
fn rank() {
    let Some(seat) = Seat::from_env() else { return };
    let member = seat.join();
    let (lost, place) = seat.scenario.split_once(' ').expect("a rank and a place");
    let dies = lost.parse() == Ok(seat.rank);
    let step = Step::ALL.into_iter().find(|step| format!("{step:?}") == place);
    let mut plan = FaultPlan::new();
    if let Some(step) = step.filter(|_| dies) {
        plan = plan.at_step(step, 1, FaultAction::Notify(Arc::new(fork_worker)));
        plan = plan.at_step(step, 1, FaultAction::Kill);
    }
    if dies && step.is_none() {
        fork_worker();
        let me = rustix::process::getpid();
        rustix::process::kill_process(me, rustix::process::Signal::KILL).expect("it is our own");
    }
    let started = Instant::now();
    let tell = |what: &str, error: &Error| {
        seat.say("stage", what);
        seat.say("after", started.elapsed().as_millis());
        seat.say("lost", error.is_peer_lost());
        seat.say("ranks", format!("{:?}", error.ranks()));
        seat.say("says", error);
    };
    let driver = Driver::new(FaultDriver::new(Driver::host().expect("memory"), plan));
    let pool = Pool::builder(member.group.clone()).driver(driver).stride(1 << 30);
    let pool = match pool.deadline(Deadline::after(LIMIT)).build() {
        Ok(pool) => pool,
        Err(error) => return tell("build", &error),
    };
    let _block = pool.alloc::<u64>(1 << 10).expect("room");
    match pool.commit_by(Deadline::after(LIMIT)) {
        Ok(_) => seat.say("stage", "survived"),
        Err(error) => tell("commit", &error),
    }
}

/// Rank `lost` forks a child and is killed, at a step or (where that is no step) before it makes a pool.
fn named_soon(lost: u32, place: &str, host: Host, stage: &str) {
    let mut job = Job::new("rank", format!("{lost} {place}"), WORLD);
    job.host = host;
    job.limit = PATIENCE;
    for report in job.run().iter().filter(|report| report.rank != lost) {
        assert_eq!(report.said("stage"), stage, "{report:?}");
        assert_eq!(report.said("lost"), "true", "{report:?}");
        assert_eq!(report.said("ranks"), format!("[{lost}]"), "{report:?}");
        let after = Duration::from_millis(report.said("after").parse().expect("a number"));
        assert!(after < SOON, "{report:?}");
    }
}

#[test]
fn a_dead_rank_whose_worker_lives_is_named_where_pools_are_made() {
    for place in ["before", "HandshakePublish", "HandshakeConnect", "HandshakeConfirm"] {
        named_soon(1, place, Host::Test, "build");
    }
}

#[test]
fn a_dead_rank_whose_worker_lives_is_named_in_commits() {
    for place in ["CommitPublish", "CommitSend", "CommitConfirm"] {
        named_soon(1, place, Host::Test, "commit");
    }
}

#[test]
fn a_dead_host_of_the_store_whose_worker_lives_is_named() {
    named_soon(0, "before", Host::RankZero, "build");
    named_soon(0, "HandshakeConfirm", Host::RankZero, "build");
    named_soon(0, "CommitPublish", Host::RankZero, "commit");
}
