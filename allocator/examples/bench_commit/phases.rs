//! Where a commit's time goes: a driver that passes everything on, and notes when the pool comes to
//! each step and how long each call takes.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use symmpool_allocator::Result;
use symmpool_allocator::driver::{
    CudaDriver, DeviceIdentity, Driver, Event, Exported, MemoryDriver, Physical, Reservation, Step,
    Stream, Transport,
};

/// Names of what is told, in the order in which it happens.
pub(crate) const PHASES: [&str; 10] = [
    "publish and agree",
    "export",
    "hand over and map",
    "  of it import",
    "  of it map and allow access",
    "  of it release handles",
    "  of it wait for peers",
    "confirm",
    "finish",
    "finish: unmap",
];

/// Calls whose time is told.
#[derive(Clone, Copy)]
enum Timed {
    Import,
    Map,
    Release,
    Unmap,
}

#[derive(Clone, Default)]
struct Notes {
    steps: Vec<(Step, Instant)>,
    spent: [Duration; 4],
}

/// See the module. Clones note in one place.
#[derive(Clone)]
pub(crate) struct Watched {
    inner: Driver,
    notes: Arc<Mutex<Notes>>,
}

impl Watched {
    pub(crate) fn new(inner: Driver) -> Self {
        Self { inner, notes: Arc::default() }
    }

    /// Forgets what was noted.
    pub(crate) fn begin(&self) {
        self.with(|notes| *notes = Notes::default());
    }

    /// Microseconds of each of [`PHASES`] in the commit since [`begin`](Watched::begin), which has
    /// ended now.
    pub(crate) fn phases(&self) -> [f64; PHASES.len()] {
        let end = Instant::now();
        let Notes { steps, spent } = self.with(|notes| notes.clone());
        let at = |step| steps.iter().find(|(found, _)| *found == step).map_or(end, |(_, at)| *at);
        let between = |from, to: Instant| to.saturating_duration_since(at(from));
        let spent = |call: Timed| spent[call as usize];
        let exchange = between(Step::CommitSend, at(Step::CommitConfirm));
        let used = spent(Timed::Import) + spent(Timed::Map) + spent(Timed::Release);
        [
            between(Step::CommitPublish, at(Step::CommitAgree)),
            between(Step::CommitExport, at(Step::CommitSend)),
            exchange,
            spent(Timed::Import),
            spent(Timed::Map),
            spent(Timed::Release),
            exchange.saturating_sub(used),
            between(Step::CommitConfirm, at(Step::CommitFinish)),
            between(Step::CommitFinish, end),
            spent(Timed::Unmap),
        ]
        .map(|time| time.as_nanos() as f64 / 1e3)
    }

    fn with<T>(&self, look: impl FnOnce(&mut Notes) -> T) -> T {
        look(&mut self.notes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn timed<T>(&self, call: Timed, make: impl FnOnce(&Driver) -> T) -> T {
        let began = Instant::now();
        let made = make(&self.inner);
        let took = began.elapsed();
        self.with(|notes| notes.spent[call as usize] += took);
        made
    }
}

impl MemoryDriver for Watched {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn device(&self) -> DeviceIdentity {
        self.inner.device()
    }

    fn granularity(&self) -> u64 {
        self.inner.granularity()
    }

    fn transport(&self) -> Transport {
        self.inner.transport()
    }

    fn host_accessible(&self) -> bool {
        self.inner.host_accessible()
    }

    fn reserve(&self, bytes: u64, align: u64) -> Result<Reservation> {
        self.inner.reserve(bytes, align)
    }

    fn unreserve(&self, reservation: Reservation) -> Result<()> {
        self.inner.unreserve(reservation)
    }

    fn check_room(&self, bytes: u64) -> Result<()> {
        self.inner.check_room(bytes)
    }

    fn create(&self, bytes: u64) -> Result<Physical> {
        self.inner.create(bytes)
    }

    fn export(&self, physical: &Physical) -> Result<Exported> {
        self.inner.export(physical)
    }

    fn import(&self, exported: Exported, bytes: u64) -> Result<Physical> {
        self.timed(Timed::Import, |inner| inner.import(exported, bytes))
    }

    fn map(&self, reservation: &Reservation, offset: u64, physical: &Physical) -> Result<()> {
        self.timed(Timed::Map, |inner| inner.map(reservation, offset, physical))
    }

    fn map_all(
        &self,
        reservation: &Reservation,
        offset: u64,
        physicals: &[Physical],
    ) -> Result<()> {
        self.timed(Timed::Map, |inner| inner.map_all(reservation, offset, physicals))
    }

    fn unmap(&self, reservation: &Reservation, offset: u64, bytes: u64) -> Result<()> {
        self.timed(Timed::Unmap, |inner| inner.unmap(reservation, offset, bytes))
    }

    fn release(&self, physical: Physical) -> Result<()> {
        self.timed(Timed::Release, |inner| inner.release(physical))
    }

    fn record_event(&self, stream: Stream) -> Result<Event> {
        self.inner.record_event(stream)
    }

    fn wait_event(&self, stream: Stream, event: &Event) -> Result<()> {
        self.inner.wait_event(stream, event)
    }

    fn is_event_done(&self, event: &Event) -> Result<bool> {
        self.inner.is_event_done(event)
    }

    fn release_event(&self, event: Event) {
        self.inner.release_event(event);
    }

    fn synchronize(&self) -> Result<()> {
        self.inner.synchronize()
    }

    fn is_capturing(&self, stream: Stream) -> bool {
        self.inner.is_capturing(stream)
    }

    fn as_cuda(&self) -> Option<&CudaDriver> {
        self.inner.as_cuda()
    }

    fn at_step(&self, step: Step) -> Result<()> {
        self.with(|notes| notes.steps.push((step, Instant::now())));
        self.inner.at_step(step)
    }
}
