//! Times of a commit's phases: a driver that forwards every call, and records when the pool reaches each step
//! and how long each call takes.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use symmpool_allocator::Result;
use symmpool_allocator::driver::{
    Driver, DriverWrapper, Exported, MemoryDriver, Physical, Reservation, Step,
};

use crate::figures::{Figures, micros};

/// The phases of a commit, in order. Together they are the whole commit.
pub(crate) const PHASES: [&str; 6] = [
    "publish and agree",
    "export",
    "send, wait for a handle",
    "import and map",
    // Includes closing descriptors, or starting the thread that closes them.
    "confirm, close handles",
    "finish",
];

/// The part of a round that is under way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RoundPart {
    Allocate,
    Commit,
    GiveBack,
}

/// Calls that are timed. `Map` includes enabling access.
#[derive(Clone, Copy, Debug, PartialEq)]
enum TimedCall {
    Create,
    Export,
    Import,
    Map,
    Unmap,
    Release,
}

const CALLS: [TimedCall; 6] = [
    TimedCall::Create,
    TimedCall::Export,
    TimedCall::Import,
    TimedCall::Map,
    TimedCall::Unmap,
    TimedCall::Release,
];

struct Noted {
    part: RoundPart,
    call: TimedCall,
    took: Duration,
}

/// Steps of the part that began at `began`, and the measurements of all commits so far.
struct Notes {
    part: RoundPart,
    began: Instant,
    steps: Vec<(Step, Instant)>,
    calls: Vec<Noted>,
    /// When commits began, in nanoseconds of the system clock, which all processes share.
    begins: Vec<u64>,
    /// Durations of the [`PHASES`], for each commit.
    phases: [Vec<f64>; PHASES.len()],
}

impl Notes {
    fn new() -> Self {
        Self {
            part: RoundPart::Allocate,
            began: Instant::now(),
            steps: Vec::new(),
            calls: Vec::new(),
            begins: Vec::new(),
            phases: Default::default(),
        }
    }

    /// Adds the durations of the commit that ended at `end`.
    fn take_commit(&mut self, end: Instant) {
        // A step that was skipped took no time.
        let at = |step, or| {
            self.steps.iter().find(|(found, _)| *found == step).map_or(or, |(_, at)| *at)
        };
        let finish = at(Step::CommitFinish, end);
        let confirm = at(Step::CommitConfirm, finish);
        let received = at(Step::CommitReceive, confirm);
        let sent = at(Step::CommitSend, received);
        let exported = at(Step::CommitExport, sent);
        let agreed = at(Step::CommitAgree, exported);
        let moments = [self.began, agreed, sent, received, confirm, finish, end];
        for (phase, moments) in self.phases.iter_mut().zip(moments.windows(2)) {
            phase.push(micros(moments[1].saturating_duration_since(moments[0])));
        }
    }
}

/// Collects what a [`RecordedDriver`] driver records. Clones share their contents.
#[derive(Clone)]
pub(crate) struct Notebook(Arc<Mutex<Notes>>);

impl Notebook {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(Notes::new())))
    }

    /// Forgets everything.
    pub(crate) fn forget(&self) {
        self.with(|notes| *notes = Notes::new());
    }

    /// Notes that `part` begins now.
    pub(crate) fn begin(&self, part: RoundPart) {
        self.with(|notes| {
            notes.part = part;
            notes.steps.clear();
            if part == RoundPart::Commit {
                let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
                notes.begins.push(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX));
            }
            notes.began = Instant::now();
        });
    }

    /// Notes that the commit has ended.
    pub(crate) fn end_commit(&self) {
        let end = Instant::now();
        self.with(|notes| notes.take_commit(end));
    }

    /// The measurements of all commits.
    pub(crate) fn report(&self) -> Value {
        self.with(|notes| {
            let phases: Vec<Value> =
                notes.phases.iter().map(|times| Figures::of(times).json()).collect();
            json!({
                "begins_ns": notes.begins,
                "phases": phases,
                "calls": calls(notes),
            })
        })
    }

    fn with<T>(&self, look: impl FnOnce(&mut Notes) -> T) -> T {
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// For each kind of call in each part: how many calls per commit, and how long they take.
fn calls(notes: &Notes) -> Vec<Value> {
    let mut all = Vec::new();
    for (part, before) in [
        (RoundPart::Allocate, "allocate: "),
        (RoundPart::Commit, ""),
        (RoundPart::GiveBack, "give back: "),
    ] {
        for call in CALLS {
            let these = notes.calls.iter().filter(|noted| (noted.part, noted.call) == (part, call));
            let times: Vec<f64> = these.map(|noted| micros(noted.took)).collect();
            if times.is_empty() {
                continue;
            }
            let mut entry = Figures::of(&times).json();
            entry["call"] = json!(format!("{before}{call:?}").to_lowercase());
            entry["per_commit"] = json!(times.len() as f64 / notes.begins.len().max(1) as f64);
            all.push(entry);
        }
    }
    all
}

/// A driver whose steps and calls are recorded.
pub(crate) struct RecordedDriver {
    pub(crate) inner: Driver,
    pub(crate) notes: Notebook,
}

impl RecordedDriver {
    fn timed<T>(&self, call: TimedCall, make: impl FnOnce(&Driver) -> T) -> T {
        let began = Instant::now();
        let made = make(&self.inner);
        let took = began.elapsed();
        self.notes.with(|notes| {
            let part = notes.part;
            notes.calls.push(Noted { part, call, took });
        });
        made
    }
}

// SAFETY: every call is forwarded to the wrapped driver, with the same values.
unsafe impl DriverWrapper for RecordedDriver {
    fn inner(&self) -> &dyn MemoryDriver {
        &*self.inner
    }

    fn create(&self, bytes: u64) -> Result<Physical> {
        self.timed(TimedCall::Create, |inner| inner.create(bytes))
    }

    fn export(&self, physical: &Physical) -> Result<Exported> {
        self.timed(TimedCall::Export, |inner| inner.export(physical))
    }

    fn import(&self, exported: Exported, bytes: u64) -> Result<Physical> {
        self.timed(TimedCall::Import, |inner| inner.import(exported, bytes))
    }

    fn map(&self, reservation: &Reservation, offset: u64, physical: &Physical) -> Result<()> {
        self.timed(TimedCall::Map, |inner| inner.map(reservation, offset, physical))
    }

    fn map_all(
        &self,
        reservation: &Reservation,
        offset: u64,
        physicals: &[Physical],
    ) -> Result<()> {
        self.timed(TimedCall::Map, |inner| inner.map_all(reservation, offset, physicals))
    }

    fn unmap(&self, reservation: &Reservation, offset: u64, bytes: u64) -> Result<()> {
        self.timed(TimedCall::Unmap, |inner| inner.unmap(reservation, offset, bytes))
    }

    fn release(&self, physical: Physical) -> Result<()> {
        self.timed(TimedCall::Release, |inner| inner.release(physical))
    }

    fn at_step(&self, step: Step) -> Result<()> {
        self.notes.with(|notes| notes.steps.push((step, Instant::now())));
        self.inner.at_step(step)
    }
}
