//! Ranks that die or fall silent at every step of making a pool and of committing: the errors of all other ranks name
//! the missing rank, in time, and no resource is leaked.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use symmpool_allocator::driver::{FaultDriver, Step};
use symmpool_allocator::{Block, Deadline, Driver, Error, Pool, Windows};
use symmpool_tests::launch::{Host, Job, RankReport};
use symmpool_tests::leftovers::ProcessResources;
use symmpool_tests::rank_process::{PATIENCE, RankProcess};

/// The deadline of the operations in which a rank is lost.
const LIMIT: Duration = Duration::from_secs(3);

/// How much later than that survivors may return.
const LATE: Duration = Duration::from_secs(1);

/// How soon survivors of a commit must notice that a rank was killed: its connections are closed.
const SOON: Duration = Duration::from_millis(1500);

/// How soon a pool that lost a peer must refuse to commit, which it does without waiting for any rank.
const AT_ONCE: Duration = Duration::from_millis(500);

/// How many jobs of one test run at a time. Most of their time is waiting.
const AT_A_TIME: usize = 4;

const WORLD: u32 = 3;

/// The test function that every rank runs.
#[test]
fn rank() {
    let Some(process) = RankProcess::from_env() else { return };
    let before = ProcessResources::now();
    live_through(&process);
    process.report(
        "left",
        ProcessResources::now().leaks_since(&before).unwrap_or_else(|| "nothing".into()),
    );
}

/// Makes a pool, commits and commits again, until an operation fails, and reports the error.
fn live_through(process: &RankProcess) {
    let driver = FaultDriver::new(Driver::host().unwrap(), process.faults.clone());
    {
        let member = process.join();
        let started = Instant::now();
        let built = Pool::builder(member.group.clone())
            .driver(Driver::new(driver.clone()))
            .stride(1 << 30)
            .deadline(Deadline::after(LIMIT))
            .build();
        match built {
            Ok(pool) => {
                process.report("built", "");
                commit_until_lost(process, &pool);
            }
            Err(error) => report_error(process, "build", &error, started),
        }
    }
    // All that the driver handed out was given back, even after an undone commit.
    process.report("leaks", driver.counts().leaks().unwrap_or_else(|| "none".into()));
}

fn commit_until_lost(process: &RankProcess, pool: &Pool) {
    // The first commit succeeds; faults are injected at the second occurrence of a step.
    let old = pool.alloc::<u64>(1 << 19).unwrap();
    pool.commit_by(Deadline::after(PATIENCE)).unwrap();
    old.write(&[u64::from(process.rank) + 70]).unwrap();
    pool.commit_by(Deadline::after(PATIENCE)).unwrap();
    let mut windows = pool.windows();
    let mut kept = Vec::new();
    for round in 0..3 {
        // More than what is free in a segment, so each commit has new memory to share.
        kept.push(pool.alloc::<u64>(1 << 21).unwrap());
        let started = Instant::now();
        match pool.commit_by(Deadline::after(LIMIT)) {
            Ok(_) => windows = pool.windows(),
            Err(error) => {
                report_error(process, &format!("commit {round}"), &error, started);
                use_what_is_left(process, pool, &old, &windows);
                return;
            }
        }
    }
    process.report("survived", "");
}

/// After a rank was lost: later commits fail at once, windows stay as they are, and memory can be used and freed.
fn use_what_is_left(process: &RankProcess, pool: &Pool, old: &Block<u64>, windows: &Windows) {
    let started = Instant::now();
    let again = pool.commit().unwrap_err();
    process.report("again_after", started.elapsed().as_millis());
    process.report("again_ranks", format!("{:?}", again.ranks()));
    process.report("again_says", &again);
    let same = pool.windows().list() == windows.list();
    process.report("windows", if same { "unchanged" } else { "changed" });
    let mut read = Vec::new();
    for peer in 0..process.world {
        let at = pool.peer_ptr(peer, old.address()).unwrap() as *const u64;
        // SAFETY: the block lies in a window, so every peer's copy is mapped here, and stays so
        // when the peer is gone.
        read.push(unsafe { at.read_volatile() });
    }
    process.report("read", format!("{read:?}"));
    let fresh = pool.alloc::<u64>(1 << 20).unwrap();
    fresh.write(&[1, 2, 3]).unwrap();
    process.report("reach", format!("{}", pool.is_window(fresh.address(), fresh.bytes())));
}

fn report_error(process: &RankProcess, stage: &str, error: &Error, started: Instant) {
    process.report("after", started.elapsed().as_millis());
    process.report("stage", stage);
    process.report("ranks", format!("{:?}", error.ranks()));
    process.report("lost", error.is_peer_lost() || error.is_timeout());
    process.report("says", error);
}

fn is_handshake(step: Step) -> bool {
    step < Step::CommitPublish
}

fn job(step: Step, how: &str, lost: u32, host: Host) -> Job {
    // The second commit is empty and does not reach the steps after agreement, so those occur once less.
    let nth = match step {
        _ if is_handshake(step) => 1,
        Step::CommitPublish | Step::CommitAgree | Step::CommitFinish => 3,
        _ => 2,
    };
    let name = format!("{step:?}").chars().fold(String::new(), |name, c| {
        let dash = if c.is_ascii_uppercase() && !name.is_empty() { "-" } else { "" };
        format!("{name}{dash}{}", c.to_ascii_lowercase())
    });
    let scenario = format!("{how} rank {lost} at {name}, store at {host:?}");
    let mut job = Job::new("rank", scenario, WORLD);
    job.host = host;
    job.fault = Some((lost, format!("{how}@step:{name}:{nth}")));
    if how == "hang" {
        job.silent = vec![lost];
    }
    job
}

fn check(step: Step, job: &Job, reports: &[RankReport]) {
    let (lost, fault) = job.fault.as_ref().expect("a fault");
    for report in reports {
        let context = || format!("{}, rank {}: {:#?}", job.scenario, report.rank, report.values);
        if report.rank == *lost {
            assert!(report.was_killed(), "{:?} {}", report.status, context());
            assert_eq!(report.get("left"), None, "it went on: {}", context());
            assert_eq!(report.get("built").is_some(), !is_handshake(step), "{}", context());
            continue;
        }
        assert!(report.status.success(), "{:?} {}", report.status, context());
        assert_eq!(report.value("lost"), "true", "{}", context());
        assert_eq!(report.value("ranks"), format!("[{lost}]"), "{}", context());
        assert!(report.value("says").contains(&format!("rank {lost}")), "{}", context());
        let after: u128 = report.value("after").parse().unwrap();
        let at_once = fault.starts_with("kill") && !is_handshake(step);
        let most = if at_once { SOON } else { LIMIT + LATE };
        assert!(after < most.as_millis(), "{}", context());
        let stage = report.value("stage");
        match step {
            _ if is_handshake(step) => assert_eq!(stage, "build", "{}", context()),
            // All ranks had confirmed, so those that received all confirmations in time have the windows.
            Step::CommitFinish => {
                assert!(["commit 0", "commit 1"].contains(&stage), "{}", context());
            }
            _ => assert_eq!(stage, "commit 0", "{}", context()),
        }
        if !is_handshake(step) {
            assert_eq!(report.value("windows"), "unchanged", "{}", context());
            assert_eq!(report.value("read"), "[70, 71, 72]", "{}", context());
            assert_eq!(report.value("reach"), "false", "{}", context());
            assert_eq!(report.value("again_ranks"), format!("[{lost}]"), "{}", context());
            assert!(report.value("again_says").contains("build a new one"), "{}", context());
            let after: u128 = report.value("again_after").parse().unwrap();
            assert!(after < AT_ONCE.as_millis(), "{}", context());
        }
        assert_eq!(report.value("leaks"), "none", "{}", context());
        assert_eq!(report.value("left"), "nothing", "{}", context());
    }
}

/// Runs the jobs, some at a time, and checks that this process has leaked nothing.
fn run_all(jobs: &[(Step, Job)]) {
    if RankProcess::from_env().is_some() {
        return;
    }
    // The test harness starts threads of its own meanwhile, so threads are not compared.
    let before = ProcessResources { threads: usize::MAX, ..ProcessResources::now() };
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some((step, job)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    check(*step, job, &job.run());
                }
            });
        }
    });
    assert_eq!(ProcessResources::now().leaks_since(&before), None);
}

/// Only one test of this file starts processes at a time, because each checks what is left after it.
fn at_every_step(how: &str, steps: &[Step], lost_ranks: &[(u32, Host)]) {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let jobs: Vec<(Step, Job)> = steps
        .iter()
        .flat_map(|&step| {
            lost_ranks.iter().map(move |&(lost, host)| (step, job(step, how, lost, host)))
        })
        .collect();
    run_all(&jobs);
}

#[test]
fn a_rank_that_is_killed_is_named_by_all_others() {
    at_every_step("kill", &Step::ALL, &[(0, Host::Test), (WORLD - 1, Host::Test)]);
}

#[test]
fn the_rank_that_serves_the_store_is_named_when_it_is_killed() {
    at_every_step("kill", &Step::ALL, &[(0, Host::RankZero)]);
}

#[test]
fn a_rank_that_falls_silent_is_named_when_time_is_up() {
    let steps = [
        Step::HandshakePublish,
        Step::HandshakeConnect,
        Step::CommitPublish,
        Step::CommitExport,
        Step::CommitReceive,
        Step::CommitConfirm,
        Step::CommitFinish,
    ];
    at_every_step("hang", &steps, &[(WORLD - 1, Host::Test), (0, Host::RankZero)]);
}
