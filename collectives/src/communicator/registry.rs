//! Algorithms that a program brings along: registering them, and calls with one.

#![allow(unsafe_code)] // callers hand over raw memory, and promise what it is

use std::sync::{Mutex, MutexGuard, PoisonError};

use symmpool_allocator::{Error, Result, Stream};

use super::Communicator;
use crate::host::plan_call::Arguments;
use crate::{Algorithm, AllReduceAlgorithm, DType, ReduceOp};

/// The algorithms that were registered with a communicator, in the order of collectives and names. Each is there once.
#[derive(Default)]
pub(super) struct Registry(Mutex<Vec<Algorithm>>);

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Vec<Algorithm>> {
        // Nothing is half-changed after a panic: insertions are the last thing.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where an algorithm is, or where it would be inserted.
fn find(registry: &[Algorithm], collective: &str, name: &str) -> std::result::Result<usize, usize> {
    registry.binary_search_by(|each| (each.collective(), each.name()).cmp(&(collective, name)))
}

impl Communicator {
    /// Makes an algorithm known under its name and collective. It comes before a built-in one of the same name.
    ///
    /// It exchanges nothing with other ranks. All ranks must have registered the same before a call names it: calls
    /// with different ones are an error on every rank that names who differs. Registering the same once more changes
    /// nothing.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` if it is for another number of ranks, or another algorithm has its name here.
    pub fn register(&self, algorithm: Algorithm) -> Result<()> {
        let (rank, world) = (self.rank(), self.world());
        let made_for = algorithm.plan().plan().world;
        if made_for != world {
            return Err(Error::invalid_argument(format!(
                "{algorithm:?} on rank {rank}: the communicator has {world} ranks; compile it for them"
            )));
        }
        let mut registry = self.registry.lock();
        match find(&registry, algorithm.collective(), algorithm.name()) {
            Ok(at) if registry[at].hash() != algorithm.hash() => {
                Err(Error::invalid_argument(format!(
                    "{algorithm:?} on rank {rank}: another algorithm of this name is registered; give it a name of \
                     its own"
                )))
            }
            Ok(_) => Ok(()),
            Err(at) => {
                registry.insert(at, algorithm);
                Ok(())
            }
        }
    }

    /// The registered algorithm of this name for a collective.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` if there is none, with the names that there are.
    pub fn registered(&self, collective: &str, name: &str) -> Result<Algorithm> {
        let registry = self.registry.lock();
        if let Ok(at) = find(&registry, collective, name) {
            return Ok(registry[at].clone());
        }
        let of_collective = registry.iter().filter(|each| each.collective() == collective);
        let mut names: Vec<&str> = of_collective.map(Algorithm::name).collect();
        if collective == "all_reduce" {
            names.extend(AllReduceAlgorithm::ALL.map(AllReduceAlgorithm::name));
        }
        let names = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
        Err(Error::invalid_argument(format!(
            "no algorithm for {collective} is called {name:?} on rank {}; there are {names}",
            self.rank()
        )))
    }

    /// The algorithms that were registered, by collective and name.
    pub fn registered_algorithms(&self) -> Vec<Algorithm> {
        self.registry.lock().clone()
    }

    /// Runs an algorithm, registered or not, for `count` elements of each part of its input (see
    /// [`Plan::input_parts`](crate::plan::Plan::input_parts)); of a program's own collective, for an input of `count`
    /// elements. `op` matters to reductions and `root` to broadcasts. It is a call like any other: every rank makes
    /// it, in the same order.
    ///
    /// # Errors
    ///
    /// As calls of the collective. `is_invalid_argument` if the elements do not divide as the algorithm needs them, or
    /// buffers are in place where it is wrong; `is_unsupported` if it needs windows and these are none, and on devices
    /// for programs that are too long for a kernel.
    ///
    /// # Safety
    ///
    /// As [`Self::all_reduce_at`], for the elements of all parts.
    #[allow(clippy::too_many_arguments)] // what a call is
    pub unsafe fn execute_at(
        &self,
        algorithm: &Algorithm,
        output: *mut u8,
        input: *const u8,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        root: u32,
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        let checked = algorithm.plan();
        let [from, to] = checked
            .lengths(self.rank(), count)
            .map(|length| length.map_or(usize::MAX, |length| length.saturating_mul(dtype.size())));
        let from = self.place_at(&mut inner, input.cast_mut(), from, stream)?;
        let to = self.place_at(&mut inner, output, to, stream)?;
        let arguments = Arguments { input: from, output: to, count, dtype, op, root };
        // SAFETY: the caller's promise, for these lengths; windows are covered (`place_at`).
        unsafe { inner.engine.run_plan(checked, &arguments, stream) }
    }
}
