//! A communicator's algorithms: those that are built in, and those that a program registers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use symmpool_allocator::{Error, Result, short};

use super::Communicator;
use super::decision::Chosen;
use crate::algorithm::{AlgorithmId, BuiltIn, Source, StandardCollective};
use crate::{Algorithm, DType, ReduceOp};

/// The algorithms of a communicator.
pub(super) struct Registry {
    built_in: Vec<Algorithm>,
    /// Registered algorithms, in the order of collectives and names; each is there once.
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
        AlgorithmId::named(collective, name).map(Chosen::BuiltIn)
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
    /// `is_invalid_argument` if it is for another number of ranks, or another algorithm has its name here: one that
    /// was registered, or a built-in one. Built-in algorithms of all collectives but the all-reduce share one list of names.
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
        if standard.is_some_and(|of| AlgorithmId::named(of, algorithm.name()).is_some()) {
            return Err(Error::invalid_argument(format!(
                "{algorithm:?} on rank {rank}: the name is reserved for built-in algorithms; give it a name of its own"
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
        // The number decides, as a built-in algorithm may have had another name.
        let standard = StandardCollective::named(collective);
        let now = standard.and_then(|of| AlgorithmId::named(of, name)?.name(of));
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
}
