//! Planned faults: a driver that wraps another one and fails, delays or kills its rank where a plan says.
//!
//! All that a rank does to memory passes through its driver, and so does every step of rendezvous and
//! commit. Wrapping the driver is therefore enough to test what other ranks see when a rank is out of
//! memory, slow, stuck or dead at any point.

mod call;
mod plan;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use call::{CallCounters, Point};
pub use call::{CallCounts, DriverCall};
pub use plan::{FaultAction, FaultPlan};

use super::{
    Driver, DriverWrapper, Event, Exported, MemoryDriver, Physical, Reservation, Step, Stream,
    map_one_by_one,
};
use crate::{Deadline, Error, Result};

/// Passes calls on to another driver after the faults that its [`FaultPlan`] has for them, and counts them.
///
/// Clones share the counters: keep one to look at [`counts`](FaultDriver::counts) when the other
/// has become a [`Driver`].
#[derive(Clone)]
pub struct FaultDriver {
    inner: Driver,
    plan: Arc<FaultPlan>,
    counters: Arc<CallCounters>,
}

impl FaultDriver {
    /// Wraps `inner`.
    pub fn new(inner: Driver, plan: FaultPlan) -> Self {
        Self { inner, plan: Arc::new(plan), counters: Arc::default() }
    }

    /// Number of calls so far, by kind.
    pub fn counts(&self) -> CallCounts {
        self.counters.snapshot()
    }

    /// Applies the planned faults, calls the inner driver, and counts success.
    fn at<T>(&self, point: Point, call: impl FnOnce(&Driver) -> Result<T>) -> Result<T> {
        self.before(point, None)?;
        let done = call(&self.inner)?;
        self.counters.success(point);
        Ok(done)
    }

    /// Counts a call and applies the faults that are planned for it. A call with a deadline times out at the
    /// deadline instead of being delayed or stopped for longer.
    fn before(&self, point: Point, deadline: Option<Deadline>) -> Result<()> {
        let time_out = |deadline: Deadline| {
            std::thread::sleep(deadline.remaining());
            let what = format!("for the device, by a planned fault at {point}");
            Err(Error::timeout(what, deadline.budget(), Vec::new()))
        };
        let nth = self.counters.begin(point);
        for action in self.plan.actions(point, nth) {
            tracing::debug!(%point, nth, ?action, "planned fault");
            match action {
                FaultAction::Fail(error) => return Err(error.clone()),
                FaultAction::Delay(by) => match deadline {
                    Some(deadline) if *by >= deadline.remaining() => return time_out(deadline),
                    _ => std::thread::sleep(*by),
                },
                FaultAction::Kill => {
                    // Cannot fail: it is our own process.
                    let me = rustix::process::getpid();
                    let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
                    hang();
                }
                FaultAction::Hang => match deadline {
                    Some(deadline) => return time_out(deadline),
                    None => hang(),
                },
                FaultAction::Notify(notify) => notify(),
            }
        }
        Ok(())
    }
}

fn hang() -> ! {
    loop {
        std::thread::park();
    }
}

impl fmt::Debug for FaultDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultDriver").field("inner", &self.inner).field("plan", &self.plan).finish()
    }
}

#[allow(unsafe_code)] // passes on another driver's promise
// SAFETY: all that it does to memory, the inner driver does, with the same values.
unsafe impl DriverWrapper for FaultDriver {
    fn inner(&self) -> &dyn MemoryDriver {
        &*self.inner
    }

    fn reserve(&self, bytes: u64, align: u64) -> Result<Reservation> {
        self.at(Point::Call(DriverCall::Reserve), |inner| inner.reserve(bytes, align))
    }

    fn unreserve(&self, reservation: Reservation) -> Result<()> {
        self.at(Point::Call(DriverCall::Unreserve), |inner| inner.unreserve(reservation))
    }

    fn create(&self, bytes: u64) -> Result<Physical> {
        self.at(Point::Call(DriverCall::Create), |inner| inner.create(bytes))
    }

    fn create_lazily(&self, bytes: u64) -> Result<Physical> {
        self.at(Point::Call(DriverCall::Create), |inner| inner.create_lazily(bytes))
    }

    fn create_sparsely(&self, bytes: u64) -> Result<Physical> {
        self.at(Point::Call(DriverCall::Create), |inner| inner.create_sparsely(bytes))
    }

    fn export(&self, physical: &Physical) -> Result<Exported> {
        self.at(Point::Call(DriverCall::Export), |inner| inner.export(physical))
    }

    fn import(&self, exported: Exported, bytes: u64) -> Result<Physical> {
        self.at(Point::Call(DriverCall::Import), |inner| inner.import(exported, bytes))
    }

    fn map(&self, reservation: &Reservation, offset: u64, physical: &Physical) -> Result<()> {
        self.at(Point::Call(DriverCall::Map), |inner| inner.map(reservation, offset, physical))
    }

    /// One by one, so that each mapping can fail and is counted.
    fn map_all(
        &self,
        reservation: &Reservation,
        offset: u64,
        physicals: &[Physical],
    ) -> Result<()> {
        map_one_by_one(self, reservation, offset, physicals)
    }

    unsafe fn map_again(
        &self,
        reservation: &Reservation,
        offset: u64,
        from: u64,
        bytes: u64,
    ) -> Result<()> {
        let again = |inner: &Driver| {
            // SAFETY: the caller promised that `bytes` of this driver's memory are mapped from `from` on until this
            // returns; they are the inner driver's.
            unsafe { inner.map_again(reservation, offset, from, bytes) }
        };
        self.at(Point::Call(DriverCall::Map), again)
    }

    fn unmap(&self, reservation: &Reservation, offset: u64, bytes: u64) -> Result<()> {
        self.at(Point::Call(DriverCall::Unmap), |inner| inner.unmap(reservation, offset, bytes))
    }

    fn release(&self, physical: Physical) -> Result<()> {
        self.at(Point::Call(DriverCall::Release), |inner| inner.release(physical))
    }

    fn record_event(&self, stream: Stream) -> Result<Event> {
        self.at(Point::Call(DriverCall::RecordEvent), |inner| inner.record_event(stream))
    }

    fn wait_event(&self, stream: Stream, event: &Event) -> Result<()> {
        self.at(Point::Call(DriverCall::WaitEvent), |inner| inner.wait_event(stream, event))
    }

    fn release_event(&self, event: Event) {
        let point = Point::Call(DriverCall::ReleaseEvent);
        // The call has no way to report a planned failure, and must not be skipped for one.
        let _ = self.before(point, None);
        self.inner.release_event(event);
        self.counters.success(point);
    }

    fn synchronize(&self) -> Result<()> {
        self.at(Point::Call(DriverCall::Synchronize), |inner| inner.synchronize())
    }

    fn synchronize_by(&self, deadline: Deadline) -> Result<()> {
        let point = Point::Call(DriverCall::Synchronize);
        self.before(point, Some(deadline))?;
        self.inner.synchronize_by(deadline)?;
        self.counters.success(point);
        Ok(())
    }

    fn at_step(&self, step: Step) -> Result<()> {
        self.at(Point::Step(step), |inner| inner.at_step(step))
    }
}
