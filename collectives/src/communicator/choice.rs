//! Which algorithm a call takes: the one that the call names, that a selector chooses, that options or the environment
//! request, or that the engine's own rule finds.

#![allow(unsafe_code)] // passes on the caller's promises about raw memory

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, MutexGuard};

use symmpool_allocator::{Error, Result, Stream};

use super::{Communicator, CommunicatorOptions, Inner};
use crate::algorithm::{AUTO, CallShape, RequestedName, Source, StandardCollective};
use crate::host::plan_call::Arguments;
use crate::{Algorithm, DType, Place, ReduceOp};

/// Chooses algorithms for a collective's calls. Functions are selectors.
pub trait Selector: Send + Sync {
    /// The name of the algorithm for a call; `None` leaves it to options, the environment and the rule. It must be the
    /// same on every rank, and so follow from what ranks have alike: calls with different algorithms are an error on
    /// every rank that names who differs.
    ///
    /// # Errors
    ///
    /// Any error has the call made as if there were no selector; so does a name that is unknown, and an algorithm that
    /// does not fit the call.
    fn select(&self, call: &CallShape) -> Result<Option<String>>;

    /// Called the first time that the choice could not be followed, with the reason.
    fn warn(&self, why: &Error) {
        tracing::warn!(%why, "a selector's choice could not be followed");
    }
}

impl<F: Fn(&CallShape) -> Result<Option<String>> + Send + Sync> Selector for F {
    fn select(&self, call: &CallShape) -> Result<Option<String>> {
        self(call)
    }
}

/// A call of a collective whose places were found.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) collective: StandardCollective,
    pub(super) from: Place,
    pub(super) to: Place,
    /// Elements of a part.
    pub(super) count: usize,
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    pub(super) root: u32,
}

impl Request {
    /// A call that neither reduces nor has a root.
    pub(super) fn new(
        collective: StandardCollective,
        (from, to): (Place, Place),
        count: usize,
        dtype: DType,
    ) -> Self {
        Self { collective, from, to, count, dtype, op: ReduceOp::Sum, root: 0 }
    }

    /// The same, for a plan.
    fn arguments(&self) -> Arguments {
        let Self { from, to, count, dtype, op, root, .. } = *self;
        Arguments { input: from, output: to, count, dtype, op, root }
    }
}

/// What is requested for each collective.
pub(super) struct Choices([Choice; StandardCollective::ALL.len()]);

#[derive(Default)]
struct Choice {
    /// Whether anything has to be looked at before the engine's rule.
    is_closed: bool,
    requested: Option<RequestedName>,
    selector: Option<Arc<dyn Selector>>,
    /// Whether it was said that the selector's choice could not be followed.
    has_warned: bool,
}

impl Choices {
    /// What options and the environment request.
    pub(super) fn new(options: &CommunicatorOptions) -> Result<Self> {
        let mut choices = Self(std::array::from_fn(|_| Choice::default()));
        for collective in StandardCollective::ALL {
            let requested = RequestedName::of(collective, options.requested(collective))?;
            let choice = choices.of(collective);
            choice.is_closed = requested.is_some();
            choice.requested = requested;
        }
        Ok(choices)
    }

    fn of(&mut self, collective: StandardCollective) -> &mut Choice {
        &mut self.0[collective as usize]
    }

    /// Whether a call takes what the engine's rule finds.
    #[inline]
    pub(super) fn is_open(&self, collective: StandardCollective) -> bool {
        !self.0[collective as usize].is_closed
    }

    /// What options or the environment request.
    pub(super) fn requested(&self, collective: StandardCollective) -> Option<&RequestedName> {
        self.0[collective as usize].requested.as_ref()
    }
}

/// An algorithm that was found for a call.
pub(super) enum Chosen {
    /// A built-in one, by its number.
    BuiltIn(u8),
    Registered(Algorithm),
}

impl Communicator {
    /// Has a function choose the algorithms of a collective's calls, by the name of a registered or built-in algorithm.
    /// `None` ends that. Calls that name an algorithm themselves do not come to it; of all-to-alls only those of
    /// equal parts do.
    ///
    /// It is called by the thread that makes the call, before the call and outside of all locks, so it may use the
    /// communicator, but make no calls. All ranks must choose alike.
    pub fn select(&self, collective: StandardCollective, selector: Option<Arc<dyn Selector>>) {
        let mut inner = self.lock();
        let choice = inner.choices.of(collective);
        choice.is_closed = selector.is_some() || choice.requested.is_some();
        choice.selector = selector;
        choice.has_warned = false;
    }

    /// Runs a call with the algorithm that is chosen for it.
    ///
    /// # Safety
    ///
    /// As the engine's methods.
    #[inline]
    pub(super) unsafe fn run(
        &self,
        mut inner: MutexGuard<'_, Inner>,
        request: &Request,
        stream: &Stream,
    ) -> Result<()> {
        if inner.choices.is_open(request.collective) {
            // SAFETY: passed on.
            return unsafe { inner.engine.run(request, AUTO, false, stream) };
        }
        // SAFETY: passed on.
        unsafe { self.run_chosen(inner, request, stream) }
    }

    /// # Safety
    ///
    /// As [`Self::run`].
    unsafe fn run_chosen<'a>(
        &'a self,
        mut inner: MutexGuard<'a, Inner>,
        request: &Request,
        stream: &Stream,
    ) -> Result<()> {
        let collective = request.collective;
        if let Some(selector) = inner.choices.of(collective).selector.clone() {
            let shape = self.shape(request);
            drop(inner);
            let name = catch_unwind(AssertUnwindSafe(|| selector.select(&shape)))
                .unwrap_or_else(|_| Err(Error::invalid_state("it panicked")));
            inner = self.begin(stream)?;
            match self.follow(&inner, name, request, &shape) {
                Ok(None) => {}
                Ok(Some(chosen)) => {
                    // SAFETY: passed on.
                    return unsafe { Self::run_by(&mut inner, &chosen, request, false, stream) };
                }
                Err(why) => {
                    if !std::mem::replace(&mut inner.choices.of(collective).has_warned, true) {
                        drop(inner);
                        selector.warn(&why);
                        inner = self.begin(stream)?;
                    }
                }
            }
        }
        let Some(requested) = inner.choices.requested(collective) else {
            // SAFETY: passed on.
            return unsafe { inner.engine.run(request, AUTO, false, stream) };
        };
        let requested = requested.clone();
        match self.registry.find(collective, &requested.name) {
            Some(chosen) => {
                let by_environment = requested.by_environment;
                // SAFETY: passed on.
                let ran =
                    unsafe { Self::run_by(&mut inner, &chosen, request, by_environment, stream) };
                ran.map_err(|error| requested.blame(error))
            }
            None => {
                let why = self.registry.unknown(collective.name(), &requested.name, self.rank());
                let why = requested.by_whom(why);
                Err(inner.engine.decline(why, stream))
            }
        }
    }

    /// The algorithm of the name that a selector returned, if it can serve the call.
    fn follow(
        &self,
        inner: &Inner,
        name: Result<Option<String>>,
        request: &Request,
        shape: &CallShape,
    ) -> Result<Option<Chosen>> {
        let collective = request.collective;
        let found = name.and_then(|name| {
            let Some(name) = name else { return Ok(None) };
            let chosen = self.registry.find(collective, &name);
            let chosen = chosen
                .ok_or_else(|| self.registry.unknown(collective.name(), &name, self.rank()))?;
            match &chosen {
                Chosen::BuiltIn(AUTO) => return Ok(None),
                Chosen::BuiltIn(code) => inner.engine.check_fit(*code, shape)?,
                Chosen::Registered(algorithm) => match algorithm.source() {
                    Source::BuiltIn(_) => {}
                    Source::Plan(plan) => inner.engine.check_plan(plan, &request.arguments())?,
                    Source::Native(kernel) => {
                        inner.engine.check_native(kernel, &request.arguments())?;
                    }
                },
            }
            Ok(Some(chosen))
        });
        found.map_err(|why| {
            why.context(format!(
                "the selector for {collective} on rank {}, instead of which the built-in rule chooses",
                self.rank()
            ))
        })
    }

    /// Runs a call with an algorithm.
    ///
    /// # Safety
    ///
    /// As [`Self::run`].
    pub(super) unsafe fn run_by(
        inner: &mut Inner,
        chosen: &Chosen,
        request: &Request,
        by_environment: bool,
        stream: &Stream,
    ) -> Result<()> {
        match chosen {
            // SAFETY: passed on.
            Chosen::BuiltIn(code) => unsafe {
                inner.engine.run(request, *code, by_environment, stream)
            },
            Chosen::Registered(algorithm) => match algorithm.source() {
                // SAFETY: passed on.
                Source::BuiltIn(built_in) => unsafe {
                    inner.engine.run(request, built_in.code, by_environment, stream)
                },
                Source::Plan(plan) => {
                    // SAFETY: passed on.
                    unsafe { inner.engine.run_plan(plan, &request.arguments(), stream) }
                }
                Source::Native(kernel) => {
                    // SAFETY: passed on.
                    unsafe { inner.engine.run_native(kernel, &request.arguments(), stream) }
                }
            },
        }
    }

    fn shape(&self, request: &Request) -> CallShape {
        let Request { collective, from, to, count, dtype, op, .. } = *request;
        let parts = u64::from(collective.parts(self.world()));
        CallShape {
            collective,
            bytes: (count as u64).saturating_mul(dtype.size() as u64).saturating_mul(parts),
            dtype,
            op: collective.reduces().then_some(op),
            world: self.world(),
            input_window: from.is_window(),
            output_window: to.is_window(),
            topology: self.mesh,
        }
    }
}
