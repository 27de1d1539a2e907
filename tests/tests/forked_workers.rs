//! A rank that dies while a child that it forked lives on, as a data loader's worker does: the other ranks notice it as
//! soon as any other death, although the child has copies of all descriptors that the rank had open.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

use symmpool_allocator::driver::{FaultAction, FaultDriver, FaultPlan, Step};
use symmpool_allocator::{Deadline, Driver, Error, Pool};
use symmpool_tests::launch::{Host, Job};
use symmpool_tests::rank_process::{PATIENCE, RankProcess};

/// The deadline of the operations in which a rank is lost.
const LIMIT: Duration = Duration::from_secs(8);

/// How soon survivors must notice. Where ranks wait for keys in the store, they check about once a second.
const SOON: Duration = Duration::from_secs(4);

/// How long the child lives, which is longer than any rank waits.
const WORKER_LIVES: Duration = Duration::from_secs(15);

const WORLD: u32 = 3;

unsafe extern "C" {
    fn fork() -> c_int;
    fn close(fd: c_int) -> c_int;
    fn _exit(status: c_int) -> !;
}

/// Forks a child, which has copies of all this process's descriptors and does nothing.
fn fork_worker() {
    // SAFETY: the child makes system calls only, and ends by itself.
    if unsafe { fork() } == 0 {
        // The test reads the rank's output until it is closed, so the child must not keep it open.
        for output in [1, 2] {
            // SAFETY: these are the child's own copies, and nothing is written to them any more.
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
    let Some(process) = RankProcess::from_env() else { return };
    let member = process.join();
    let (lost, place) = process.scenario.split_once(' ').expect("a rank and a place");
    let dies = lost.parse() == Ok(process.rank);
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
    let report_error = |what: &str, error: &Error| {
        process.report("stage", what);
        process.report("after", started.elapsed().as_millis());
        process.report("lost", error.is_peer_lost());
        process.report("ranks", format!("{:?}", error.ranks()));
        process.report("says", error);
    };
    let driver = Driver::new(FaultDriver::new(Driver::host().expect("memory"), plan));
    let pool = Pool::builder(member.group.clone()).driver(driver).stride(1 << 30);
    let pool = match pool.deadline(Deadline::after(LIMIT)).build() {
        Ok(pool) => pool,
        Err(error) => return report_error("build", &error),
    };
    let _block = pool.alloc::<u64>(1 << 10).expect("room");
    match pool.commit_by(Deadline::after(LIMIT)) {
        Ok(_) => process.report("stage", "survived"),
        Err(error) => report_error("commit", &error),
    }
}

/// Rank `lost` forks a child and is killed, at a step or, if `place` is not a step, before it makes a pool. Checks that
/// the other ranks name it soon.
fn named_soon(lost: u32, place: &str, host: Host, stage: &str) {
    let mut job = Job::new("rank", format!("{lost} {place}"), WORLD);
    job.host = host;
    job.limit = PATIENCE;
    for report in job.run().iter().filter(|report| report.rank != lost) {
        assert_eq!(report.value("stage"), stage, "{report:?}");
        assert_eq!(report.value("lost"), "true", "{report:?}");
        assert_eq!(report.value("ranks"), format!("[{lost}]"), "{report:?}");
        let after = Duration::from_millis(report.value("after").parse().expect("a number"));
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
