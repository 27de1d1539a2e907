//! The class `GroupOffer`: communicators of some of a communicator's ranks, which meet in shared memory.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use symmpool_allocator::Error;
use symmpool_collectives::{Arrivals, CommunicatorOptions};

use crate::arguments::{CommunicatorCalls, RankContext};
use crate::communicator::Communicator;
use crate::convert::MemoryDevice;
use crate::errors::OrRaise;
use crate::fork_guarded::ForkGuarded;
use crate::group::group_of;
use crate::number::Number;
use crate::pool::Pool;
use crate::site;

/// The longest that a wait takes without a look at signals.
const SLICE: Duration = Duration::from_millis(100);

/// Offer of this rank to the others of a group; see `symmpool.communicators.subgroups`.
#[pyclass(frozen, module = "symmpool")]
pub(crate) struct GroupOffer {
    /// `None` once it was accepted.
    offer: Mutex<Option<ForkGuarded<symmpool_collectives::GroupOffer>>>,
    algorithm: String,
}

impl GroupOffer {
    fn lock(&self) -> MutexGuard<'_, Option<ForkGuarded<symmpool_collectives::GroupOffer>>> {
        self.offer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Says to `ranks` of a communicator that this one makes a communicator of them.
pub(crate) fn offer(
    py: Python<'_>,
    calls: &CommunicatorCalls,
    ranks: &[u32],
    key: (u64, u64),
    timeout: Number<f64>,
) -> PyResult<Option<GroupOffer>> {
    let timeout = timeout.seconds(py, "timeout")?;
    let options = CommunicatorOptions { timeout, ..CommunicatorOptions::default() };
    let found = calls.comm.offer(ranks, [key.0, key.1], &options).or_raise(py)?;
    let algorithm = options.algorithm.name().to_owned();
    Ok(found
        .map(|offer| GroupOffer { offer: Mutex::new(Some(ForkGuarded::new(offer))), algorithm }))
}

#[pymethods]
impl GroupOffer {
    /// Waits for the other ranks for `seconds` at most, a tenth of a second in any case. Returns True where all are there,
    /// False where one of them comes another way, else None.
    fn wait(&self, py: Python<'_>, seconds: Number<f64>) -> PyResult<Option<bool>> {
        let longest = seconds.seconds(py, "seconds")?.min(SLICE);
        let waited = py.detach(|| {
            let mut offer = self.lock();
            offer.as_mut().and_then(ForkGuarded::here_mut).map(|offer| offer.wait(longest))
        });
        Ok(match waited {
            Some(Arrivals::All) => Some(true),
            Some(Arrivals::Declined) | None => Some(false),
            Some(Arrivals::Some) => None,
        })
    }

    /// The ranks of the group that were not there.
    fn missing(&self) -> Vec<u32> {
        self.lock().as_ref().map(|offer| offer.missing()).unwrap_or_default()
    }

    /// Says to the others that this rank comes another way.
    fn decline(&self) {
        if let Some(offer) = self.lock().as_ref().filter(|offer| offer.check("an offer").is_ok()) {
            offer.decline();
        }
    }

    /// The pool and the communicator of all ranks, which are there. `group` is what pools of theirs are made on.
    fn accept<'py>(
        &self,
        py: Python<'py>,
        group: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, Pool>, Communicator)> {
        let offer = self.lock().take().and_then(ForkGuarded::into_here);
        let offer = offer.ok_or_else(|| Error::invalid_state("the offer was accepted before"));
        let offer = offer.or_raise(py)?;
        let of = group_of(py, Some(group), None)?;
        let (pool, comm) = site::detach(py, || offer.accept(&of)).or_raise(py)?;
        let made = Bound::new(py, Pool::on(ForkGuarded::new(pool), MemoryDevice::Cpu))?;
        let comm = ForkGuarded::new(Arc::new(comm));
        made.get().communicators.add(&comm);
        let context =
            RankContext { device: MemoryDevice::Cpu, rank: comm.rank(), world: comm.world() };
        let calls = Arc::new(CommunicatorCalls { comm, context });
        let comm = Communicator::on(calls, self.algorithm.clone(), true);
        Ok((made, comm))
    }
}
