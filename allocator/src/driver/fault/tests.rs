//! Planned faults happen where they were planned, and nowhere else.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::super::{Driver, MemoryDriver, Step, Stream, child};
use super::call::{DriverCall, Point};
use super::{FaultAction, FaultDriver, FaultPlan};
use crate::Error;

fn sim(plan: FaultPlan) -> FaultDriver {
    FaultDriver::new(Driver::sim(1), plan)
}

const SIZE: u64 = 2 << 20;

#[test]
fn the_nth_call_fails_and_only_that_one() {
    let out = FaultAction::Fail(Error::out_of_memory("planned"));
    let driver = sim(FaultPlan::new().at_call(DriverCall::Create, 2, out));
    let first = driver.create(SIZE).unwrap();
    assert!(driver.create(SIZE).unwrap_err().is_out_of_memory());
    let third = driver.create(SIZE).unwrap();
    let counts = driver.counts();
    assert_eq!((counts.made(DriverCall::Create), counts.succeeded(DriverCall::Create)), (3, 2));
    assert_eq!(counts.leaks().unwrap(), "segments: 2 taken, 0 given back");
    driver.release(first).unwrap();
    driver.release(third).unwrap();
    assert_eq!(driver.counts().leaks(), None);
}

#[test]
fn steps_notify_then_fail_in_the_order_of_the_plan() {
    let seen = Arc::new(AtomicU64::new(0));
    let notify = {
        let seen = seen.clone();
        FaultAction::Notify(Arc::new(move || {
            seen.fetch_add(1, Ordering::SeqCst);
        }))
    };
    let refuse = FaultAction::Fail(Error::refused("planned"));
    let plan = FaultPlan::new()
        .at_step(Step::CommitMap, 0, notify.clone())
        .at_step(Step::CommitMap, 2, refuse)
        .at_step(Step::CommitMap, 2, notify);
    let driver = sim(plan);
    driver.at_step(Step::CommitMap).unwrap();
    driver.at_step(Step::CommitSend).unwrap();
    assert!(driver.at_step(Step::CommitMap).unwrap_err().is_refused());
    assert_eq!(seen.load(Ordering::SeqCst), 2, "what follows a failure does not happen");
    assert_eq!(driver.counts().steps(Step::CommitMap), 2);
    assert_eq!(driver.counts().steps(Step::CommitAgree), 0);
}

#[test]
fn every_word_of_a_plan_is_understood() {
    let plan = "kill@step:commit-map, fail-oom@create:3,delay-500ms@map:1,hang@step:handshake-publish:2,\
                delay-3us@synchronize:*,fail-timeout@record-event";
    let plan = FaultPlan::parse(plan).unwrap();
    let shown = |point, nth| format!("{:?}", plan.actions(point, nth).collect::<Vec<_>>());
    assert_eq!(shown(Point::Step(Step::CommitMap), 1), "[Kill]");
    assert_eq!(shown(Point::Step(Step::CommitMap), 2), "[]");
    assert!(shown(Point::Call(DriverCall::Create), 3).contains("planned fault at create"));
    assert_eq!(shown(Point::Call(DriverCall::Map), 1), "[Delay(500ms)]");
    assert_eq!(shown(Point::Step(Step::HandshakePublish), 2), "[Hang]");
    assert_eq!(shown(Point::Call(DriverCall::Synchronize), 77), "[Delay(3µs)]");
    for point in Point::all() {
        let parsed = FaultPlan::parse(&format!("kill@{point}:7")).unwrap();
        assert_eq!(parsed.actions(point, 7).count(), 1, "{point}");
        assert_eq!(Point::all().nth(point.index()), Some(point));
    }
}

#[test]
fn nonsense_is_refused_with_the_words_there_are() {
    for (plan, hint) in [
        ("", "action@point"),
        ("kill", "action@point"),
        ("kill@", "commit-map"),
        ("kill@step:commit", "commit-map"),
        ("kill@create:0", "number from 1"),
        ("kill@create:-1", "number from 1"),
        ("kill@create:99999999999999999999", "number from 1"),
        ("kill@create:1:2", "no point"),
        ("explode@create", "expected kill"),
        ("delay-@create", "delay-500ms"),
        ("delay-5h@create", "delay-500ms"),
        ("delay-5@create", "delay-500ms"),
        ("fail@release-event", "cannot fail"),
        ("kill@create,", "action@point"),
    ] {
        let error = FaultPlan::parse(plan).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains(hint), "{plan}: {error}");
    }
}

#[test]
fn a_delay_delays_and_then_calls() {
    let driver = sim(FaultPlan::parse("delay-20ms@create").unwrap());
    let start = Instant::now();
    let physical = driver.create(SIZE).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(20));
    driver.release(physical).unwrap();
}

#[test]
fn a_hung_rank_stays_hung_and_others_do_not() {
    let (reached, wait) = std::sync::mpsc::channel();
    let plan = FaultPlan::new()
        .at_step(
            Step::CommitAgree,
            1,
            FaultAction::Notify(Arc::new(move || reached.send(()).unwrap())),
        )
        .at_step(Step::CommitAgree, 1, FaultAction::Hang);
    let driver = sim(plan);
    let hung = std::thread::spawn({
        let driver = driver.clone();
        move || driver.at_step(Step::CommitAgree)
    });
    wait.recv().unwrap();
    hung.thread().unpark();
    driver.at_step(Step::CommitAgree).unwrap();
    assert!(!hung.is_finished());
}

#[test]
fn a_killed_rank_dies_at_its_step_without_a_word() {
    use std::os::unix::process::ExitStatusExt;

    if let Some(_parent) = child::parent() {
        let driver = sim(FaultPlan::parse("kill@step:commit-confirm").unwrap());
        driver.at_step(Step::CommitMap).unwrap();
        let _ = driver.at_step(Step::CommitConfirm);
        unreachable!("outlived its own death");
    }
    let (mut child, _socket) =
        child::start("fault::tests::a_killed_rank_dies_at_its_step_without_a_word");
    assert_eq!(child.wait().unwrap().signal(), Some(9));
}

#[test]
fn events_are_given_back_whatever_is_planned() {
    let fail = FaultAction::Fail(Error::refused("planned"));
    let driver = sim(FaultPlan::new().at_call(DriverCall::ReleaseEvent, 0, fail));
    let event = driver.record_event(Stream::DEFAULT).unwrap();
    driver.release_event(event);
    assert_eq!(driver.counts().leaks(), None);
}
