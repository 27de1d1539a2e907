//! A communicator's algorithms: those that are built in, those that a program registers, and calls with one.

#![allow(unsafe_code)] // callers hand over raw memory, and promise what it is

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use symmpool_allocator::{Block, Error, Result, Stream, short};

use super::choice::{Chosen, Request};
use super::engine::Places;
use super::growth::described_by;
use super::{Communicator, Inner};
use crate::algorithm::{BuiltIn, Source, StandardCollective, code_of, name_of};
use crate::call::plan_call::Arguments;
use crate::call::{Call, Operation};
use crate::{Algorithm, DType, Element, ReduceOp};

/// The algorithms of a communicator.
pub(super) struct Registry {
    built_in: Vec<Algorithm>,
    /// In the order of collectives and names. Each is there once.
    registered: Mutex<Vec<Algorithm>>,
}

/// Where an algorithm is, or where it would be inserted.
fn find(registry: &[Algorithm], collective: &str, name: &str) -> std::result::Result<usize, usize> {
    registry.binary_search_by(|each| (each.collective(), each.name()).cmp(&(collective, name)))
}

impl Registry {
    pub(super) fn new(built_in: Vec<BuiltIn>) -> Self {
        let built_in = built_in.into_iter().map(Algorithm::built_in).collect();
        Self { built_in, registered: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Algorithm>> {
        // Nothing is half-changed after a panic: insertions are the last thing.
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The algorithm of a name: one that was registered, or a built-in one, of devices or host memory.
    pub(super) fn find(&self, collective: StandardCollective, name: &str) -> Option<Chosen> {
        let registered = self.lock();
        if let Ok(at) = find(&registered, collective.name(), name) {
            return Some(Chosen::Registered(registered[at].clone()));
        }
        code_of(collective, name).map(Chosen::BuiltIn)
    }

    /// The error for a name that no algorithm has.
    #[cold]
    pub(super) fn unknown(&self, collective: &str, name: &str, rank: u32) -> Error {
        let registered = self.lock();
        let all = registered.iter().chain(&self.built_in);
        let mut names: Vec<&str> =
            all.filter(|each| each.collective() == collective).map(Algorithm::name).collect();
        if StandardCollective::named(collective).is_some() {
            names.push("auto");
        }
        let names = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
        Error::invalid_argument(format!(
            "no algorithm for {} is called {:?} on rank {rank}; there are {names}",
            short(collective),
            short(name)
        ))
    }
}

impl Communicator {
    /// Compiles the kernels that this rank needs for calls by programs, `threads` at a time, so that first calls do not
    /// wait for the compiler: each for an element type, an operation and the root of broadcasts, else 0. Compiled kernels
    /// are kept where [`kernel_cache`](crate::kernel_cache) says. It exchanges nothing with other ranks. Algorithms that
    /// are no programs have no kernels here, nor has any in host memory. What does not compile is an error of the call
    /// that needs it.
    pub fn compile_ahead(&self, calls: &[(Algorithm, DType, ReduceOp, u32)], threads: usize) {
        let plan = |(algorithm, dtype, op, root): &(Algorithm, DType, ReduceOp, u32)| {
            Some((Arc::clone(algorithm.plan()?), *dtype, *op, *root))
        };
        let plans: Vec<_> = calls.iter().filter_map(plan).collect();
        let plans: Vec<_> =
            plans.iter().map(|(plan, dtype, op, root)| (&**plan, *dtype, *op, *root)).collect();
        self.lock().engine.compile_plans(&plans, threads);
    }

    /// Makes an algorithm known under its name and collective.
    ///
    /// It exchanges nothing with other ranks. All ranks must have registered the same before a call names it: calls
    /// with different ones are an error on every rank that names who differs. Registering the same once more changes
    /// nothing; so does registering a built-in one.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` if it is for another number of ranks, or another algorithm has its name here, a built-in one
    /// of its collective or one that was registered.
    pub fn register(&self, algorithm: Algorithm) -> Result<()> {
        let (rank, world) = (self.rank(), self.world());
        let made_for = match algorithm.source() {
            Source::BuiltIn(_) => return Ok(()),
            Source::Plan(plan) => plan.plan().world,
            Source::Native(kernel) => kernel.world.unwrap_or(world),
        };
        if made_for != world {
            return Err(Error::invalid_argument(format!(
                "{algorithm:?} on rank {rank}: the communicator has {world} ranks; compile it for them"
            )));
        }
        if algorithm.name() == "auto" {
            return Err(Error::invalid_argument(format!(
                "{algorithm:?} on rank {rank}: \"auto\" leaves the choice open; give it another name"
            )));
        }
        let standard = StandardCollective::named(algorithm.collective());
        if standard.is_some_and(|of| code_of(of, algorithm.name()).is_some()) {
            return Err(Error::invalid_argument(format!(
                "{algorithm:?} on rank {rank}: a built-in algorithm has this name; give it a name of its own"
            )));
        }
        let mut registered = self.registry.lock();
        match find(&registered, algorithm.collective(), algorithm.name()) {
            Ok(at) if registered[at].hash() != algorithm.hash() => {
                Err(Error::invalid_argument(format!(
                    "{algorithm:?} on rank {rank}: another algorithm of this name is registered; give it a name of \
                     its own"
                )))
            }
            Ok(_) => Ok(()),
            Err(at) => {
                registered.insert(at, algorithm);
                Ok(())
            }
        }
    }

    /// The algorithm of this name for a collective: one that was registered, or a built-in one.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` if there is none, with the names that there are.
    pub fn registered(&self, collective: &str, name: &str) -> Result<Algorithm> {
        let registered = self.registry.lock();
        if let Ok(at) = find(&registered, collective, name) {
            return Ok(registered[at].clone());
        }
        drop(registered);
        // By number, as a built-in algorithm may have had another name.
        let standard = StandardCollective::named(collective);
        let now = standard.and_then(|of| name_of(of, code_of(of, name)?));
        let is_meant =
            |each: &&Algorithm| each.collective() == collective && Some(each.name()) == now;
        let found = self.registry.built_in.iter().find(is_meant).cloned();
        found.ok_or_else(|| self.registry.unknown(collective, name, self.rank()))
    }

    /// The registered algorithm of this name, whatever it computes.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` if there is none, with the names that there are, or if algorithms of several collectives
    /// have the name.
    pub fn registered_under(&self, name: &str) -> Result<Algorithm> {
        let registered = self.registry.lock();
        let found: Vec<&Algorithm> = registered.iter().filter(|each| each.name() == name).collect();
        if let [one] = found.as_slice() {
            return Ok((*one).clone());
        }
        let (name, rank) = (short(name), self.rank());
        let listed = |all: &mut dyn Iterator<Item = &str>| {
            let names: Vec<&str> = all.collect();
            if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
        };
        Err(Error::invalid_argument(if found.is_empty() {
            let names = listed(&mut registered.iter().map(Algorithm::name));
            format!("no algorithm called {name:?} is registered on rank {rank}; there are {names}")
        } else {
            let of = listed(&mut found.iter().map(|each| each.collective()));
            format!(
                "{name:?} on rank {rank} is an algorithm of each of {of}: pass the algorithm in place of its name"
            )
        }))
    }

    /// The algorithms for calls of this communicator: those that were registered, by collective and name, and then the
    /// built-in ones that can serve any call here.
    pub fn algorithms(&self) -> Vec<Algorithm> {
        let registered = self.registry.lock();
        let built_in = self.registry.built_in.iter().filter(|each| each.constraints().is_some());
        registered.iter().chain(built_in).cloned().collect()
    }

    /// Makes a call of a collective on addresses, with the algorithm of this name; `None` chooses as other calls do. For
    /// `count` elements of each part; `op` matters to reductions and `root` to broadcasts, which use `output` alone.
    ///
    /// # Errors
    ///
    /// As calls of the collective; `is_invalid_argument` for a name that no algorithm has here, and `is_unsupported`
    /// for an algorithm that does not fit the call. The other ranks get an error too.
    ///
    /// # Safety
    ///
    /// As the call of the collective on addresses.
    #[allow(clippy::too_many_arguments)] // what a call is
    pub unsafe fn call_at(
        &self,
        collective: StandardCollective,
        algorithm: Option<&str>,
        output: *mut u8,
        input: *const u8,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        root: u32,
        stream: &Stream,
    ) -> Result<()> {
        let chosen = match algorithm.map(|name| (name, self.registry.find(collective, name))) {
            None => None,
            Some((_, Some(chosen))) => Some(chosen),
            Some((name, None)) => {
                let why = self.registry.unknown(collective.name(), name, self.rank());
                return Err(self.decline(why, stream));
            }
        };
        // SAFETY: the caller's promise.
        unsafe { self.call_by(collective, chosen, output, input, (count, dtype, op, root), stream) }
    }

    /// Where input and output of a call lie, for parts of so many bytes.
    pub(super) fn places_at(
        &self,
        inner: &mut Inner,
        collective: StandardCollective,
        (input, output): (*const u8, *mut u8),
        bytes: usize,
        stream: &Stream,
    ) -> Result<Places> {
        let (inputs, outputs) = self.lengths_of(collective, bytes);
        let to = self.place_at(inner, output, outputs, stream)?;
        let from = match collective {
            StandardCollective::Broadcast => to,
            _ => self.place_at(inner, input.cast_mut(), inputs, stream)?,
        };
        Ok((from, to))
    }

    /// Bytes of input and output of a call, for parts of so many bytes.
    pub(super) fn lengths_of(
        &self,
        collective: StandardCollective,
        bytes: usize,
    ) -> (usize, usize) {
        let all = self.all_parts(bytes);
        match collective {
            StandardCollective::AllReduce | StandardCollective::Broadcast => (bytes, bytes),
            StandardCollective::ReduceScatter => (all, bytes),
            StandardCollective::AllGather => (bytes, all),
            StandardCollective::AllToAll => (all, all),
        }
    }

    /// # Safety
    ///
    /// As [`Self::call_at`].
    unsafe fn call_by(
        &self,
        collective: StandardCollective,
        chosen: Option<Chosen>,
        output: *mut u8,
        input: *const u8,
        (count, dtype, op, root): (usize, DType, ReduceOp, u32),
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        let bytes = count.saturating_mul(dtype.size());
        let (from, to) = self.places_at(&mut inner, collective, (input, output), bytes, stream)?;
        let request = Request { collective, from, to, count, dtype, op, root };
        match chosen {
            // SAFETY: the caller's promise, for these lengths; windows are covered (`place_at`).
            Some(chosen) => unsafe { self.run_named(&mut inner, &chosen, &request, stream) },
            // SAFETY: as above.
            None => unsafe { self.run(inner, &request, stream) },
        }
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
        if let Source::BuiltIn(built_in) = algorithm.source() {
            let (collective, chosen) = (built_in.collective, Some(Chosen::BuiltIn(built_in.code)));
            let arguments = (count, dtype, op, root);
            // SAFETY: the caller's promise.
            return unsafe { self.call_by(collective, chosen, output, input, arguments, stream) };
        }
        let mut inner = self.begin(stream)?;
        // As in calls that name it, which other ranks may make.
        let call = match StandardCollective::named(algorithm.collective()) {
            Some(collective) => described_by(collective, count, dtype, op, root),
            None => {
                let call = Call::new(Operation::Custom).elements(dtype, count);
                call.registered(algorithm.hash())
            }
        };
        self.grow(&mut inner, call, stream)?;
        let [from, to] = algorithm
            .lengths(self.rank(), self.world(), count)
            .map(|length| length.map_or(usize::MAX, |length| length.saturating_mul(dtype.size())));
        let from = self.place_at(&mut inner, input.cast_mut(), from, stream)?;
        let to = self.place_at(&mut inner, output, to, stream)?;
        let arguments = Arguments { input: from, output: to, count, dtype, op, root };
        match algorithm.source() {
            Source::BuiltIn(_) => Ok(()),
            // SAFETY: the caller's promise, for these lengths; windows are covered (`place_at`).
            Source::Plan(plan) => unsafe { inner.engine.run_plan(plan, &arguments, stream) },
            // SAFETY: as above.
            Source::Native(kernel) => unsafe {
                inner.engine.run_native(kernel, &arguments, stream)
            },
        }
    }

    /// Runs an algorithm on blocks, as [`Self::execute_at`]: `input` and `out` have as many elements as the collective
    /// has there. In a broadcast, `input` of other ranks than the root is not read. A rank that has no output may pass any:
    /// where peers access outputs, it says where they lie.
    ///
    /// # Errors
    ///
    /// As [`Self::execute_at`]; `is_invalid_argument`, and an error on the other ranks, if the blocks' lengths do not
    /// fit each other.
    pub fn execute<T: Element>(
        &self,
        algorithm: &Algorithm,
        out: &Block<T>,
        input: &Block<T>,
        op: ReduceOp,
        root: u32,
        stream: &Stream,
    ) -> Result<()> {
        let lengths = |count: usize| algorithm.lengths(self.rank(), self.world(), count);
        let parts = algorithm.input_parts(self.world());
        let count = input.len() / parts;
        let [inputs, outputs] = lengths(count);
        let fits =
            inputs == Some(input.len()) && (outputs == Some(out.len()) || outputs == Some(0));
        if !fits {
            let why = Error::invalid_argument(format!(
                "{algorithm:?} on rank {}: an input of {} elements and an output of {} do not fit each other among {} \
                 ranks",
                self.rank(),
                input.len(),
                out.len(),
                self.world()
            ));
            return Err(self.decline(why, stream));
        }
        let (output, input) = (out.as_ptr().cast(), input.as_ptr().cast());
        // SAFETY: both blocks are borrowed, so live and mapped, for these lengths.
        unsafe { self.execute_at(algorithm, output, input, count, T::DTYPE, op, root, stream) }
    }
}
