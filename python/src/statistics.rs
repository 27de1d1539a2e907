//! The numbers of pools and communicators, as Python has them.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use symmpool_allocator::PoolStats;
use symmpool_collectives::{Communicator, CommunicatorMemory, PhaseTimes};

use crate::errors::OrRaise;
use crate::fork_guarded::ForkGuarded;

/// The communicators that were made on a pool.
#[derive(Default)]
pub(crate) struct Communicators(Mutex<Vec<Weak<Communicator>>>);

impl Communicators {
    pub(crate) fn add(&self, made: &Arc<Communicator>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|each| each.strong_count() > 0);
        all.push(Arc::downgrade(made));
    }

    /// Returns the memory of the communicators that live, in the order in which they were made.
    fn memory(&self) -> Vec<CommunicatorMemory> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let alive: Vec<Arc<Communicator>> = all.iter().filter_map(Weak::upgrade).collect();
        // The last one that knows a communicator ends it, which must not happen under the lock.
        drop(all);
        alive.iter().map(|each| each.memory()).collect()
    }
}

/// The numbers of a pool.
pub(crate) fn of_pool<'py>(
    py: Python<'py>,
    stats: &PoolStats,
    communicators: &Communicators,
) -> PyResult<Bound<'py, PyDict>> {
    let lanes = PyDict::new(py);
    for (name, lane) in &stats.lanes {
        let dict = PyDict::new(py);
        let numbers = [
            ("allocated", lane.allocated),
            ("peak_allocated", lane.peak_allocated),
            ("reserved", lane.reserved),
            ("peak_reserved", lane.peak_reserved),
            ("deferred", lane.deferred),
            ("live_blocks", lane.live_blocks),
            ("segments", lane.segments),
            ("events", lane.events),
            ("allocs", lane.allocs),
            ("frees", lane.frees),
            ("unordered_frees", lane.unordered_frees),
        ];
        for (key, value) in numbers {
            dict.set_item(key, value)?;
        }
        lanes.set_item(name, dict)?;
    }
    let memory = py.detach(|| communicators.memory());
    let memory = memory.iter().map(|each| of_communicator(py, each));
    let dict = PyDict::new(py);
    dict.set_item("allocated", stats.allocated())?;
    dict.set_item("reserved", stats.reserved())?;
    dict.set_item("commits", stats.commits)?;
    dict.set_item("windows", stats.windows)?;
    dict.set_item("lanes", lanes)?;
    dict.set_item("communicators", memory.collect::<PyResult<Vec<_>>>()?)?;
    Ok(dict)
}

/// Returns the memory of a communicator as a dictionary.
pub(crate) fn of_communicator<'py>(
    py: Python<'py>,
    memory: &CommunicatorMemory,
) -> PyResult<Bound<'py, PyDict>> {
    let CommunicatorMemory { total, control, inboxes, scratch, staging, wanted } = *memory;
    let dict = PyDict::new(py);
    dict.set_item("total", total)?;
    for (name, bytes) in [
        ("control", control),
        ("inboxes", inboxes),
        ("scratch", scratch),
        ("staging", staging),
        ("wanted", wanted),
    ] {
        dict.set_item(name, bytes)?;
    }
    Ok(dict)
}

/// Returns a rank's phases in seconds as a dictionary; `None` where all ranks are on one host. In a forked child an error.
pub(crate) fn of_phases<'py>(
    py: Python<'py>,
    comm: &ForkGuarded<Arc<Communicator>>,
) -> PyResult<Option<Bound<'py, PyDict>>> {
    comm.check("a communicator").or_raise(py)?;
    let Some(times) = py.detach(|| comm.phase_times()) else { return Ok(None) };
    let PhaseTimes { calls, meeting, agreement, before, between, after, total } = times;
    let dict = PyDict::new(py);
    dict.set_item("calls", calls)?;
    for (name, time) in [
        ("meeting", meeting),
        ("agreement", agreement),
        ("before", before),
        ("between", between),
        ("after", after),
        ("total", total),
    ] {
        dict.set_item(name, time.as_secs_f64())?;
    }
    Ok(Some(dict))
}
