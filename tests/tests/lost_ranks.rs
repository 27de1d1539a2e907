//! Ranks that die or fall silent at every step of making a pool and of committing: the others
//! are told who is missing, all the same rank, in time; and nothing is left behind.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use symmpool_allocator::driver::{FaultDriver, Step};
use symmpool_allocator::{Block, Deadline, Driver, Error, Pool, Windows};
use symmpool_tests::launch::{Host, Job, Report};
use symmpool_tests::leftovers::Remains;
use symmpool_tests::rank_process::{PATIENCE, Seat};

/// What the operations in which a rank is lost are given.
const LIMIT: Duration = Duration::from_secs(3);

/// How much later than that survivors may come back.
const LATE: Duration = Duration::from_secs(1);

/// How soon survivors of a commit know of a rank that was killed: its connections are closed.
const SOON: Duration = Duration::from_millis(1500);

/// How soon a pool that lost a peer refuses to commit: without waiting for anybody.
const AT_ONCE: Duration = Duration::from_millis(500);

/// Jobs of one test that run at a time. Most of them wait.
const AT_A_TIME: usize = 4;

const WORLD: u32 = 3;

/// The test function that every rank runs.
#[test]
fn rank() {
    let Some(seat) = Seat::from_env() else { return };
    let before = Remains::now();
    live_through(&seat);
    seat.say("left", Remains::now().beyond(&before).unwrap_or_else(|| "nothing".into()));
}

/// Makes a pool, commits and commits again, until something goes wrong; tells what.
fn live_through(seat: &Seat) {
    let driver = FaultDriver::new(Driver::host().unwrap(), seat.faults.clone());
    {
        let member = seat.join();
        let started = Instant::now();
        let built = Pool::builder(member.group.clone())
            .driver(Driver::new(driver.clone()))
            .stride(1 << 30)
            .deadline(Deadline::after(LIMIT))
            .build();
        match built {
            Ok(pool) => {
                seat.say("built", "");
                commit_until_lost(seat, &pool);
            }
            Err(error) => tell(seat, "build", &error, started),
        }
    }
    // What the driver gave was given back, also after an undone commit.
    seat.say("leaks", driver.counts().leaks().unwrap_or_else(|| "none".into()));
}

fn commit_until_lost(seat: &Seat, pool: &Pool) {
    // The first commit is a good one; faults come at the second occurrence of a step.
    let old = pool.alloc::<u64>(1 << 19).unwrap();
    pool.commit_by(Deadline::after(PATIENCE)).unwrap();
    old.write(&[u64::from(seat.rank) + 70]).unwrap();
    pool.commit_by(Deadline::after(PATIENCE)).unwrap();
    let mut windows = pool.windows();
    let mut kept = Vec::new();
    for round in 0..3 {
        // More than a segment leaves free, so each is a commit of new memory.
        kept.push(pool.alloc::<u64>(1 << 21).unwrap());
        let started = Instant::now();
        match pool.commit_by(Deadline::after(LIMIT)) {
            Ok(_) => windows = pool.windows(),
            Err(error) => {
                tell(seat, &format!("commit {round}"), &error, started);
                use_what_is_left(seat, pool, &old, &windows);
                return;
            }
        }
    }
    seat.say("survived", "");
}

/// After a loss: later commits say so at once, windows stay, memory can be used and freed.
fn use_what_is_left(seat: &Seat, pool: &Pool, old: &Block<u64>, windows: &Windows) {
    let started = Instant::now();
    let again = pool.commit().unwrap_err();
    seat.say("again_after", started.elapsed().as_millis());
    seat.say("again_ranks", format!("{:?}", again.ranks()));
    seat.say("again_says", &again);
    let same = pool.windows().list() == windows.list();
    seat.say("windows", if same { "unchanged" } else { "changed" });
    let mut read = Vec::new();
    for peer in 0..seat.world {
        let at = pool.peer_ptr(peer, old.address()).unwrap() as *const u64;
        // SAFETY: the block lies in a window, so every peer's copy is mapped here, and stays so
        // when the peer is gone.
        read.push(unsafe { at.read_volatile() });
    }
    seat.say("read", format!("{read:?}"));
    let fresh = pool.alloc::<u64>(1 << 20).unwrap();
    fresh.write(&[1, 2, 3]).unwrap();
    seat.say("reach", format!("{}", pool.is_window(fresh.address(), fresh.bytes())));
}

fn tell(seat: &Seat, stage: &str, error: &Error, started: Instant) {
    seat.say("after", started.elapsed().as_millis());
    seat.say("stage", stage);
    seat.say("ranks", format!("{:?}", error.ranks()));
    seat.say("lost", error.is_peer_lost() || error.is_timeout());
    seat.say("says", error);
}

fn is_handshake(step: Step) -> bool {
    step < Step::CommitPublish
}

fn job(step: Step, how: &str, lost: u32, host: Host) -> Job {
    // Steps after agreement are not reached by the second, empty commit; those before are, twice.
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

fn check(step: Step, job: &Job, reports: &[Report]) {
    let (lost, fault) = job.fault.as_ref().expect("a fault");
    for report in reports {
        let told = || format!("{}, rank {}: {:#?}", job.scenario, report.rank, report.said);
        if report.rank == *lost {
            assert!(report.was_killed(), "{:?} {}", report.status, told());
            assert_eq!(report.get("left"), None, "it went on: {}", told());
            assert_eq!(report.get("built").is_some(), !is_handshake(step), "{}", told());
            continue;
        }
        assert!(report.status.success(), "{:?} {}", report.status, told());
        assert_eq!(report.said("lost"), "true", "{}", told());
        assert_eq!(report.said("ranks"), format!("[{lost}]"), "{}", told());
        assert!(report.said("says").contains(&format!("rank {lost}")), "{}", told());
        let after: u128 = report.said("after").parse().unwrap();
        let at_once = fault.starts_with("kill") && !is_handshake(step);
        let most = if at_once { SOON } else { LIMIT + LATE };
        assert!(after < most.as_millis(), "{}", told());
        let stage = report.said("stage");
        match step {
            _ if is_handshake(step) => assert_eq!(stage, "build", "{}", told()),
            // All ranks had confirmed, so those that heard it in time have the windows.
            Step::CommitFinish => {
                assert!(["commit 0", "commit 1"].contains(&stage), "{}", told());
            }
            _ => assert_eq!(stage, "commit 0", "{}", told()),
        }
        if !is_handshake(step) {
            assert_eq!(report.said("windows"), "unchanged", "{}", told());
            assert_eq!(report.said("read"), "[70, 71, 72]", "{}", told());
            assert_eq!(report.said("reach"), "false", "{}", told());
            assert_eq!(report.said("again_ranks"), format!("[{lost}]"), "{}", told());
            assert!(report.said("again_says").contains("build a new one"), "{}", told());
            let after: u128 = report.said("again_after").parse().unwrap();
            assert!(after < AT_ONCE.as_millis(), "{}", told());
        }
        assert_eq!(report.said("leaks"), "none", "{}", told());
        assert_eq!(report.said("left"), "nothing", "{}", told());
    }
}

/// Runs the jobs, some at a time, and proves that this process is then as it was.
fn run_all(jobs: &[(Step, Job)]) {
    if Seat::from_env().is_some() {
        return;
    }
    // The harness starts threads of its own meanwhile.
    let before = Remains { threads: usize::MAX, ..Remains::now() };
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
    assert_eq!(Remains::now().beyond(&before), None);
}

/// Only one test of this file at a time starts processes: each looks at what is left after it.
fn at_every_step(how: &str, steps: &[Step], seats: &[(u32, Host)]) {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let jobs: Vec<(Step, Job)> = steps
        .iter()
        .flat_map(|&step| seats.iter().map(move |&(lost, host)| (step, job(step, how, lost, host))))
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
