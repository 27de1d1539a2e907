//! Random programs: what the check passes is right in the reference interpreter on many schedules, and on the host engine
//! bit for bit; what it refuses as wrong is wrong on some schedule.
//!
//! `SYMMPOOL_RANDOM_PLANS=PROGRAMS,SEED` runs as many programs of another seed, and prints what there was of each kind.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

use symmpool_allocator::testing::{SplitMix64, on_each};
use symmpool_collectives::plan::{Plan, PlanErrorKind, PlanErrorReason};

use super::random_host::{self, HostProgram};
use crate::random_plans::{ProgramKind, calls, program};
use crate::random_search::{Search, Wrong, flaw};
use crate::random_shrink::shrink;

/// Programs of each run of all tests, and their seed.
const PROGRAMS: u64 = 2000;
const SEED: u64 = 1;
/// Programs whose calls are held in memory at once.
const BATCH: u64 = 200;
/// Programs of one communicator.
const GROUP: usize = 20;

/// Outcome of a program.
#[derive(Debug)]
enum ProgramOutcome {
    /// It passed; and whether something is wrong in place, if it is refused there.
    Passed(Box<HostProgram>, Option<&'static str>),
    /// It passed, and something is wrong.
    Flawed(String),
    Refused(PlanErrorReason, Option<Wrong>, String),
}

fn programs_and_seed() -> (u64, u64) {
    let given = std::env::var("SYMMPOOL_RANDOM_PLANS").unwrap_or_default();
    let mut words = given.split(',').filter_map(|word| word.trim().parse().ok());
    (words.next().unwrap_or(PROGRAMS), words.next().unwrap_or(SEED))
}

/// Whether a reason to refuse says that a program is written against the rules, whatever it does.
fn is_policy(reason: PlanErrorReason) -> bool {
    let kind = reason.kind();
    matches!(kind, PlanErrorKind::OutOfRange | PlanErrorKind::Protocol | PlanErrorKind::ReadOnly)
        || matches!(reason, PlanErrorReason::SharedChannel | PlanErrorReason::Undefined)
}

/// Looks for a schedule on which a refused program is wrong.
fn witness(plan: &Plan, kind: PlanErrorKind, seed: u64) -> Option<Wrong> {
    let few = Search::of(plan, 30);
    let is_shown = |found: &Wrong| *found != Wrong::Conflict;
    let found = few.find(plan, seed).filter(is_shown);
    match kind {
        PlanErrorKind::NotReproducible => {
            found.or_else(|| Search { floats: true, ..few }.find(plan, seed))
        }
        PlanErrorKind::Race => {
            let more = Search { schedules: 300, ..few.clone() };
            let found = found.or_else(|| more.find(plan, !seed));
            let conflict = |schedules| Search { schedules, conflicts: true, ..few.clone() };
            let found = found.or_else(|| conflict(100).find(plan, seed));
            // A few of ten thousand programs have places that meet on rare schedules alone.
            found.or_else(|| conflict(10_000).find(plan, !seed))
        }
        _ => found,
    }
}

/// Looks for a schedule on which a program is wrong in place, on all ranks or on some.
fn in_place_witness(plan: &Plan, seed: u64) -> Option<Wrong> {
    let few = Search::of(plan, 10);
    let in_place = vec![true; plan.world as usize];
    let on_all = Search { in_place, ..few.clone() }.find(plan, seed);
    on_all.or_else(|| {
        let on = |alone: u32| (0..plan.world).map(|rank| rank == alone).collect();
        let alone = |rank| Search { in_place: on(rank), ..few.clone() }.find(plan, seed);
        (0..plan.world).find_map(alone)
    })
}

fn look_at(seed: u64, number: u64) -> (ProgramKind, ProgramOutcome) {
    let (kind, plan) = program(seed, number, None, None);
    let own_seed = SplitMix64::at(seed, number);
    let checked = match plan.clone().check() {
        Ok(checked) => checked,
        Err(error) => {
            let found = match error.kind {
                PlanErrorKind::OutOfRange | PlanErrorKind::Protocol | PlanErrorKind::ReadOnly => {
                    None
                }
                kind => witness(&plan, kind, own_seed),
            };
            let told = format!("{error}\n{}", plan.to_json());
            return (kind, ProgramOutcome::Refused(error.reason, found, told));
        }
    };
    let is_flawed = |plan: &Plan| {
        plan.clone().check().is_ok_and(|checked| flaw(&checked, own_seed, 6).is_some())
    };
    if let Some((what, wrong)) = flaw(&checked, own_seed, 6) {
        let small = shrink(&plan, is_flawed);
        let told = format!("{number} of seed {seed}, {what}: {wrong:?}\n{}", small.to_json());
        return (kind, ProgramOutcome::Flawed(told));
    }
    let mut random = SplitMix64::for_participant(own_seed, 1);
    let cases = calls::cases(&checked, &mut random, 5, &random_host::boundaries());
    let in_place = checked.in_place().is_err().then(|| match in_place_witness(&plan, own_seed) {
        Some(_) => "refused in place and shown to be wrong there",
        None => "refused in place by the rules",
    });
    (
        kind,
        ProgramOutcome::Passed(
            Box::new(HostProgram::new(number, checked, cases, random.next())),
            in_place,
        ),
    )
}

/// Runs a batch on the host engine, and says what was wrong.
fn run_batch(works: Vec<HostProgram>, seed: u64) -> (u64, Vec<String>) {
    let mut by_world: BTreeMap<u32, Vec<HostProgram>> = BTreeMap::new();
    for work in works {
        by_world.entry(work.world()).or_default().push(work);
    }
    // Ranks wait most of the time, so many communicators are at work at once.
    let groups: Vec<(u32, &[HostProgram])> = by_world
        .iter()
        .flat_map(|(world, works)| works.chunks(GROUP).map(|works| (*world, works)))
        .collect();
    let (mut calls, mut wrong) = (0, Vec::new());
    let run = |(nth, (world, works)): (u64, (u32, &[HostProgram]))| {
        random_host::run(world, works, seed ^ nth)
    };
    for (made, mut found) in on_each((0..).zip(groups), run) {
        calls += made;
        wrong.append(&mut found);
    }
    (calls, wrong)
}

#[test]
fn random_programs_do_what_the_check_says() {
    let (programs, seed) = programs_and_seed();
    let began = Instant::now();
    let mut table: BTreeMap<(ProgramKind, String), u64> = BTreeMap::new();
    let mut shapes: BTreeMap<String, u64> = BTreeMap::new();
    let (mut wrong, mut unshown) = (Vec::new(), Vec::new());
    let mut calls_made = 0;
    for first in (0..programs).step_by(BATCH as usize) {
        let last = (first + BATCH).min(programs);
        let next = Mutex::new(first..last);
        let take = || next.lock().expect("no panic").next();
        let found = on_each(0..2, |_| {
            let mut found = Vec::new();
            while let Some(number) = take() {
                found.push(look_at(seed, number));
            }
            found
        });
        let mut works = Vec::new();
        for (kind, outcome) in found.into_iter().flatten() {
            let name = match outcome {
                ProgramOutcome::Passed(work, in_place) => {
                    for shape in work.shapes().into_iter().chain(in_place) {
                        *shapes.entry(shape.to_owned()).or_default() += 1;
                    }
                    works.push(*work);
                    "passed".to_owned()
                }
                ProgramOutcome::Flawed(told) => {
                    wrong.push(told);
                    "passed, and wrong".to_owned()
                }
                ProgramOutcome::Refused(reason, found, told) => {
                    if found.is_none() && !is_policy(reason) {
                        unshown.push(told);
                    }
                    let shown = match found {
                        Some(wrong) => format!("{wrong:?}"),
                        None if is_policy(reason) => "policy".to_owned(),
                        None => "not shown".to_owned(),
                    };
                    format!("{} {reason:?}: {shown}", reason.kind().name())
                }
            };
            *table.entry((kind, name)).or_default() += 1;
        }
        let (made, mut found) = run_batch(works, seed ^ first);
        calls_made += made;
        wrong.append(&mut found);
        if wrong.len() > 20 {
            break;
        }
        if last.is_multiple_of(50 * BATCH) {
            println!("{last} programs, {} wrong, after {:?}", wrong.len(), began.elapsed());
        }
    }
    println!("{programs} programs of seed {seed}, {calls_made} calls, {:?}", began.elapsed());
    for ((kind, name), count) in &table {
        println!("{kind:?}: {name}: {count}");
    }
    for (shape, count) in &shapes {
        println!("passed, {shape}: {count}");
    }
    assert!(
        unshown.is_empty(),
        "{} refusals of which no schedule shows that they must be; is it a rule that the manual should have?\n{}",
        unshown.len(),
        unshown[..unshown.len().min(5)].join("\n")
    );
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong[..wrong.len().min(5)].join("\n"));
}
