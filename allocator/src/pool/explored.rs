//! Commits of real pools in every order of faults: a search over which rank fails, dies or is late at which step, and who
//! misses what the others have sent.
//!
//! The steps are those of the driver's fault plan ([`Step`]). Ranks are threads that run one at a time, and meet in a store that plays time: when nobody can go on, the wait that ends
//! first is over. Each choice is made in all ways, one run after the other, with a limited number of faults in each run.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::exchange_segments::GRACE;
use super::*;
use crate::Deadline;
use crate::driver::{SimDriver, Step};
use crate::lane::LaneConfig;
use crate::models::with_fault;
use crate::store::{Gathered, Stop, Store};

const SEGMENT: usize = 1 << 16;
/// Time that a commit is given. It does not pass, as the store plays time.
const BUDGET: Duration = Duration::from_secs(60);

/// A rank at one moment.
#[derive(Clone, Debug, PartialEq)]
enum Doing {
    Runs,
    /// It waits for a gather until then.
    Waits(String, Instant),
    /// Its wait is over because time has passed.
    Late,
    /// It sleeps at a step.
    Sleeps,
    /// It has ended its first commit, as others may not have.
    AtEnd,
    Ended,
}

/// A gather that ranks have come to, with the parts of those that did.
#[derive(Default)]
struct Open {
    parts: BTreeMap<u32, Vec<u8>>,
    /// The result, and how each rank misses it: 1 is too late, 2 by an error of its own.
    result: Option<(Gathered, Vec<usize>)>,
}

/// Choices of a run: which one was made, out of how many.
#[derive(Default)]
struct RunChoices {
    made: Vec<(usize, usize)>,
    at: usize,
}

impl RunChoices {
    fn choose(&mut self, of: usize) -> usize {
        if self.at == self.made.len() {
            self.made.push((0, of));
        }
        self.at += 1;
        let (chosen, before) = self.made[self.at - 1];
        assert_eq!(of, before, "a run differs from the one before");
        chosen
    }

    /// Moves on to the next run. Returns false if there is none.
    fn next_run(&mut self) -> bool {
        self.at = 0;
        while let Some((chosen, of)) = self.made.pop() {
            if chosen + 1 < of {
                self.made.push((chosen + 1, of));
                return true;
            }
        }
        false
    }
}

struct State {
    doing: Vec<Doing>,
    /// Whose turn it is.
    turn: usize,
    gathers: BTreeMap<String, Open>,
    choices: RunChoices,
    /// Faults that may still come, once the first commit has begun.
    faults: usize,
    has_begun: bool,
    log: Vec<String>,
    /// The latest end of any wait that is allowed.
    limit: Instant,
    /// A wait that would have ended later.
    too_long: Option<String>,
}

/// The world of one run.
struct World {
    state: Mutex<State>,
    turns: Condvar,
}

/// Payload of the panic by which a rank dies.
struct Died;

impl World {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets other ranks run until it is this rank's turn again.
    fn pass<'a>(&'a self, mut state: MutexGuard<'a, State>, rank: usize) -> MutexGuard<'a, State> {
        state.pass_turn();
        self.turns.notify_all();
        while state.turn != rank && state.doing[rank] != Doing::Ended {
            state = self.turns.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    /// Ends a rank, and lets the others run.
    fn end(&self, rank: usize) {
        let mut state = self.lock();
        state.doing[rank] = Doing::Ended;
        drop(self.pass(state, rank));
    }

    /// Waits for this rank's first turn.
    fn begin(&self, rank: usize) {
        let mut state = self.lock();
        while state.turn != rank {
            state = self.turns.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl State {
    fn pass_turn(&mut self) {
        let runs = |doing: &Doing| matches!(doing, Doing::Runs | Doing::Late);
        if let Some(next) = self.doing.iter().position(runs) {
            self.turn = next;
            return;
        }
        // Nobody can go on, so time passes.
        let ends = |(rank, doing): (usize, &Doing)| match doing {
            Doing::Waits(_, until) => Some((*until, rank)),
            _ => None,
        };
        let first = self.doing.iter().enumerate().filter_map(ends).min().map(|(_, rank)| rank);
        let sleeper = self.doing.iter().position(|doing| *doing == Doing::Sleeps);
        let next = match (first, sleeper) {
            (Some(first), Some(sleeper)) => [first, sleeper][self.choices.choose(2)],
            (Some(next), None) | (None, Some(next)) => next,
            (None, None) => return self.begin_second(),
        };
        self.doing[next] = match self.doing[next] {
            Doing::Sleeps => Doing::Runs,
            _ => Doing::Late,
        };
        self.log.push(format!("rank {next} goes on, as time passes"));
        self.turn = next;
    }

    /// All that live have ended their first commit.
    fn begin_second(&mut self) {
        self.faults = 0;
        for doing in self.doing.iter_mut().filter(|doing| **doing == Doing::AtEnd) {
            *doing = Doing::Runs;
        }
        if let Some(next) = self.doing.iter().position(|doing| *doing == Doing::Runs) {
            self.turn = next;
        }
    }

    /// Chooses one of several kinds of fault, or none, which is 0.
    fn fault(&mut self, kinds: usize) -> usize {
        if self.faults == 0 {
            return 0;
        }
        let fault = self.choices.choose(kinds + 1);
        self.faults -= usize::from(fault > 0);
        fault
    }
}

/// The store of the ranks of a world.
struct PlayedStore(Arc<World>);

impl Store for PlayedStore {
    fn set(&self, _: &str, _: &[u8], _: Deadline) -> Result<()> {
        Ok(())
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        Err(Error::timeout(format!("{key} is not kept"), deadline.budget(), Vec::new()))
    }

    fn add(&self, _: &str, delta: i64, _: Deadline) -> Result<i64> {
        Ok(delta)
    }

    fn delete(&self, _: &str, _: Deadline) -> Result<bool> {
        Ok(false)
    }

    fn all_gather_until(
        &self,
        key: &str,
        rank: u32,
        world: u32,
        value: &[u8],
        deadline: Deadline,
        _: Option<Stop<'_>>,
    ) -> Result<Gathered> {
        let me = rank as usize;
        let mut state = self.0.lock();
        if deadline.at() > state.limit {
            state.too_long = Some(format!("rank {rank} at {key}"));
        }
        let open = state.gathers.entry(key.to_owned()).or_default();
        open.parts.insert(rank, value.to_vec());
        if open.parts.len() == world as usize {
            let parts: Vec<Arc<[u8]>> = open.parts.values().map(|part| part[..].into()).collect();
            let which = (0..world).collect();
            let gathered = Gathered::from_distinct(parts, which).expect("a part of each rank");
            let misses: Vec<usize> = (0..world).map(|_| state.fault(2)).collect();
            for (rank, doing) in state.doing.iter_mut().enumerate() {
                if rank == me || matches!(doing, Doing::Waits(at, _) if at == key) {
                    *doing = Doing::Runs;
                }
            }
            let who = (0..world).filter(|rank| misses[*rank as usize] > 0);
            let who: Vec<String> = who.map(|rank| format!("rank {rank} misses {key}")).collect();
            state.log.extend(who);
            let open = state.gathers.get_mut(key).expect("open");
            open.result = Some((gathered, misses));
        } else {
            state.doing[me] = Doing::Waits(key.to_owned(), deadline.at());
            state = self.0.pass(state, me);
        }
        let late = std::mem::replace(&mut state.doing[me], Doing::Runs) == Doing::Late;
        let open = state.gathers.get_mut(key).expect("open");
        match &open.result {
            Some((gathered, misses)) if !late && misses[me] == 0 => Ok(gathered.clone()),
            Some((_, misses)) if misses[me] == 2 => {
                Err(Error::invalid_state(format!("rank {rank} misses {key}")))
            }
            Some(_) => Err(Error::timeout(format!("in {key}"), deadline.budget(), Vec::new())),
            None => {
                open.parts.remove(&rank);
                let missing = (0..world).filter(|other| *other != rank);
                let missing = missing.filter(|other| !open.parts.contains_key(other)).collect();
                Err(Error::timeout(format!("in {key}"), deadline.budget(), missing))
            }
        }
    }
}

/// The driver of a rank of a world, which has faults at its steps.
struct Faulty {
    inner: SimDriver,
    world: Arc<World>,
    rank: usize,
}

#[allow(unsafe_code)] // a driver
mod faulty {
    use super::{Died, Doing, Faulty, Step, resume_unwind};
    use crate::driver::{DriverWrapper, MemoryDriver};
    use crate::{Error, Result};

    // SAFETY: all memory is the inner driver's.
    unsafe impl DriverWrapper for Faulty {
        fn inner(&self) -> &dyn MemoryDriver {
            &self.inner
        }

        fn at_step(&self, step: Step) -> Result<()> {
            let mut state = self.world.lock();
            let fault = state.fault(3);
            let rank = self.rank;
            match fault {
                1 => {
                    state.log.push(format!("rank {rank} fails at {step:?}"));
                    Err(Error::out_of_memory(format!("a fault of rank {rank} at {step:?}")))
                }
                2 => {
                    state.log.push(format!("rank {rank} dies at {step:?}"));
                    drop(state);
                    resume_unwind(Box::new(Died));
                }
                3 => {
                    state.log.push(format!("rank {rank} sleeps at {step:?}"));
                    state.doing[rank] = Doing::Sleeps;
                    drop(self.world.pass(state, rank));
                    Ok(())
                }
                _ => Ok(()),
            }
        }
    }
}

/// A rank after its commits: the error of each, if it failed, and the windows, as lists of offsets, that it has and that
/// it has mapped of its peers.
#[derive(Debug)]
struct RankOutcome {
    first: Option<Error>,
    windows: Vec<u64>,
    mapped: Vec<u64>,
    second: Option<Error>,
    windows_then: Vec<u64>,
}

/// One rank: two commits, of which the first may meet faults.
fn live(world: &Arc<World>, rank: usize, size: u32, faults: usize) -> RankOutcome {
    world.begin(rank);
    let store = Arc::new(PlayedStore(world.clone()));
    let group = Group::new(rank as u32, size, store).unwrap().with_timeout(BUDGET);
    let inner = SimDriver::with_granularity(7 + rank as u64, u64::MAX, SEGMENT as u64).unwrap();
    let driver = Driver::new(Faulty { inner, world: world.clone(), rank });
    let lane = LaneConfig::symmetric("blocks");
    let pool = Pool::builder(group.clone()).driver(driver).lane(lane).build().unwrap();
    let block = pool.alloc::<u8>(SEGMENT).unwrap();
    let windows = || pool.windows().list().iter().map(|window| window.offset).collect();
    group.all_gather("begin", &[], Deadline::after(BUDGET)).unwrap();
    let mut state = world.lock();
    if !std::mem::replace(&mut state.has_begun, true) {
        state.faults = faults;
    }
    drop(state);
    let first = pool.commit().err();
    let (windows_now, mapped) = (windows(), pool.0.heap.mapped_of_peers());
    let mut state = world.lock();
    state.doing[rank] = Doing::AtEnd;
    drop(world.pass(state, rank));
    let second = pool.commit().err();
    let outcome =
        RankOutcome { first, windows: windows_now, mapped, second, windows_then: windows() };
    // A pool that lost its peers is dropped like any other.
    drop((block, pool));
    outcome
}

/// Checks what all ranks that live have seen. Returns what is wrong.
fn judge(outcomes: &[Option<RankOutcome>], log: &[String]) -> std::result::Result<(), String> {
    let living: Vec<&RankOutcome> = outcomes.iter().flatten().collect();
    let all_live = living.len() == outcomes.len();
    // Whoever fails behind the confirmation is the only one, and says so in the next commit.
    let is_undone = |line: &&String| line.contains("fails at") && !line.contains("CommitFinish");
    let mut faults = log.iter().filter(|line| !line.contains("as time passes"));
    let only_failures = all_live && faults.all(|line| is_undone(&line));
    let ok = living.iter().filter(|outcome| outcome.first.is_none()).count();
    let again = living.iter().filter(|outcome| outcome.second.is_none()).count();
    let same =
        |of: fn(&RankOutcome) -> &Vec<u64>| living.windows(2).all(|two| of(two[0]) == of(two[1]));
    let check = |holds: bool, what: &str| if holds { Ok(()) } else { Err(what.to_owned()) };
    for outcome in &living {
        let is_mapped = |window| outcome.mapped.contains(window);
        check(outcome.windows.iter().all(is_mapped), "every window is mapped")?;
        check(outcome.first.is_none() != outcome.windows.is_empty(), "a commit makes windows")?;
        let kept = outcome.second.is_some() || !outcome.windows_then.is_empty();
        check(kept, "the next commit leaves all with windows")?;
    }
    check(!log.is_empty() || ok == living.len(), "a commit without faults succeeds")?;
    check(again == 0 || again == living.len(), "all can commit again, or none")?;
    check(again == 0 || same(|outcome| &outcome.windows_then), "all have the same windows then")?;
    check(all_live || again == 0, "nobody commits without a rank that died")?;
    if only_failures {
        check(ok == 0 || ok == living.len(), "all commit, or none")?;
        check(same(|outcome| &outcome.windows), "all have the same windows")?;
        check(again == living.len(), "all commit once nobody fails")?;
    }
    Ok(())
}

/// Runs all worlds of `size` ranks with at most `faults` faults. Returns how many there are, or what is wrong in one.
fn search(
    size: u32,
    faults: usize,
    mutant: Option<&'static str>,
) -> std::result::Result<usize, String> {
    let mut choices = RunChoices::default();
    for run in 1.. {
        let state = State {
            doing: vec![Doing::Runs; size as usize],
            turn: 0,
            gathers: BTreeMap::new(),
            choices,
            faults: 0,
            has_begun: false,
            log: Vec::new(),
            limit: Instant::now() + BUDGET + GRACE + Duration::from_secs(30),
            too_long: None,
        };
        let world = Arc::new(World { state: Mutex::new(state), turns: Condvar::new() });
        let outcomes = crate::testing::on_each(0..size as usize, |rank| {
            let lived = catch_unwind(AssertUnwindSafe(|| {
                with_fault(mutant, || live(&world, rank, size, faults))
            }));
            world.end(rank);
            lived.map_err(|panic| assert!(panic.is::<Died>(), "rank {rank} panicked")).ok()
        });
        let mut state = world.lock();
        let log = std::mem::take(&mut state.log);
        let too_long = state.too_long.take().map(|what| format!("a wait beyond its end: {what}"));
        let judged = too_long.map_or_else(|| judge(&outcomes, &log), Err);
        judged.map_err(|what| format!("run {run}: not so: {what}\n{log:#?}\n{outcomes:#?}"))?;
        choices = std::mem::take(&mut state.choices);
        if !choices.next_run() {
            return Ok(run);
        }
    }
    unreachable!("there are not so many runs")
}

/// Rule S5.
#[test]
fn commits_are_made_by_all_or_none_whatever_fails() {
    let deeper = std::env::var_os(crate::models::DEEPER).is_some();
    let more: &[(u32, usize)] = if deeper { &[(2, 3), (3, 3), (4, 2)] } else { &[] };
    for &(ranks, faults) in [(2, 1), (2, 2), (3, 2)].iter().chain(more) {
        let runs = search(ranks, faults, None).unwrap_or_else(|what| panic!("{what}"));
        eprintln!("{ranks} ranks, {faults} faults: {runs} runs");
    }
}

#[test]
fn commits_with_faults_in_their_protocol_are_noticed() {
    let mutants = [
        "mutant_unconfirmed",
        "mutant_leaves_unconfirmed",
        "mutant_failure_unreported",
        "mutant_not_undone",
        "mutant_waits_longer",
    ];
    for mutant in mutants {
        let noticed = search(2, 1, Some(mutant)).expect_err(mutant);
        eprintln!("{mutant}: {}", noticed.lines().next().unwrap_or_default());
    }
}
