//! Which algorithm a call takes: the one that the call names, that a selector chooses, that options or the environment
//! request, that a loaded table has, or that the engine's own rule finds.

#![allow(unsafe_code)] // passes on the caller's promises about raw memory

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use symmpool_allocator::{Error, Pool, Result, Stream};

use super::{Communicator, CommunicatorOptions, Inner};
use crate::Algorithm;
use crate::algorithm::table_format::TableRow;
use crate::algorithm::{
    AUTO, AlgorithmId, CallShape, RequestedName, Source, StandardCollective, read_rows, table_files,
};
use crate::call::StandardCall;
use crate::cuda::fits_lamport;
use crate::sync::MutexGuard;

/// Chooses algorithms for a collective's calls. Functions are selectors.
pub trait Selector: Send + Sync {
    /// The name of the algorithm for a call; `None` leaves it to options, the environment and the rule. It must be the
    /// same on every rank, and so follow from what ranks have alike: calls with different algorithms are an error on
    /// every rank that names who differs.
    ///
    /// # Errors
    ///
    /// Any error has the call made as if there were no selector; so does a name that is unknown, and an algorithm that
    /// does not fit the call. But one that [is interrupted](Error::is_interrupted) is the call's error: the call is
    /// refused as one with wrong arguments is, so that the other ranks do not wait for it.
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

/// Requests of options, selectors and tables for each collective.
pub(super) struct Choices([CollectiveChoice; StandardCollective::ALL.len()]);

#[derive(Default)]
struct CollectiveChoice {
    /// Whether a request, a selector or a table comes before the engine's rule.
    overrides_rule: bool,
    requested: Option<RequestedName>,
    selector: Option<Arc<dyn Selector>>,
    /// Whether it was said that the selector's choice could not be followed.
    has_warned: bool,
    /// Rows of the tables that were loaded.
    rows: Vec<Measured>,
}

/// A row of a table that was loaded.
struct Measured {
    row: TableRow,
    /// The plan with the row's number of blocks, once it was needed, and the hash of the plan that it was made of.
    with_blocks: Option<(u64, Algorithm)>,
}

impl Choices {
    /// Takes the requests of options and of the environment.
    pub(super) fn new(options: &CommunicatorOptions, devices: &[&str]) -> Result<Self> {
        let mut choices = Self(std::array::from_fn(|_| CollectiveChoice::default()));
        for collective in StandardCollective::ALL {
            let requested = RequestedName::of(collective, options.requested(collective))?;
            let choice = choices.of(collective);
            choice.overrides_rule = requested.is_some();
            choice.requested = requested;
        }
        for path in table_files(&options.tables) {
            choices.load(&read_rows(&path, devices)?);
        }
        Ok(choices)
    }

    /// Adds the rows of tables. They replace those that were loaded before for the same collective.
    fn load(&mut self, rows: &[(StandardCollective, TableRow)]) {
        for collective in StandardCollective::ALL {
            let of = rows.iter().filter(|(each, _)| *each == collective);
            let rows: Vec<Measured> =
                of.map(|(_, row)| Measured { row: row.clone(), with_blocks: None }).collect();
            if !rows.is_empty() {
                let choice = self.of(collective);
                choice.rows = rows;
                choice.overrides_rule = true;
            }
        }
    }

    fn of(&mut self, collective: StandardCollective) -> &mut CollectiveChoice {
        &mut self.0[collective as usize]
    }

    /// Whether a call takes what the engine's rule finds.
    #[inline]
    pub(super) fn uses_rule(&self, collective: StandardCollective) -> bool {
        !self.0[collective as usize].overrides_rule
    }

    /// The function that chooses, if there is one.
    pub(super) fn selector(&self, collective: StandardCollective) -> Option<Arc<dyn Selector>> {
        self.0[collective as usize].selector.clone()
    }

    /// Returns the algorithm that options or the environment request.
    pub(super) fn requested(&self, collective: StandardCollective) -> Option<&RequestedName> {
        self.0[collective as usize].requested.as_ref()
    }
}

/// An algorithm that was found for a call.
pub(super) enum Chosen {
    /// A built-in one.
    BuiltIn(AlgorithmId),
    Registered(Algorithm),
}

/// Decision on the algorithm of a call.
pub(super) struct Decision {
    pub(super) chosen: Chosen,
    /// The party that has decided, by name.
    pub(super) by: &'static str,
    /// Request of options or of the environment, if it names the algorithm.
    requested: Option<RequestedName>,
    /// Why the selector's choice cannot be followed.
    not_followed: Option<Error>,
}

impl Decision {
    fn by(chosen: Chosen, by: &'static str) -> Self {
        Self { chosen, by, requested: None, not_followed: None }
    }
}

/// Asks a selector, whatever it does.
pub(super) fn ask_selector(selector: &dyn Selector, shape: &CallShape) -> Result<Option<String>> {
    catch_unwind(AssertUnwindSafe(|| selector.select(shape)))
        .unwrap_or_else(|_| Err(Error::invalid_state("it panicked")))
}

/// Has a selector warn, whatever it does.
fn warn(selector: &dyn Selector, why: &Error) {
    if catch_unwind(AssertUnwindSafe(|| selector.warn(why))).is_err() {
        tracing::warn!(%why, "a selector panicked in its warning");
    }
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
        choice.overrides_rule =
            selector.is_some() || choice.requested.is_some() || !choice.rows.is_empty();
        choice.selector = selector;
        choice.has_warned = false;
    }

    /// Runs a call with the algorithm that is chosen for it.
    ///
    /// # Safety
    ///
    /// You must keep the promises of the engine's methods.
    #[inline]
    pub(super) unsafe fn run(
        &self,
        mut inner: MutexGuard<'_, Inner>,
        call: &StandardCall,
        stream: &Stream,
    ) -> Result<()> {
        if inner.choices.uses_rule(call.collective) {
            // SAFETY: the caller promised that the call's places are readable or writable for its lengths until
            // `stream` is past it.
            return unsafe { self.run_by_rule(&mut inner, call, stream) };
        }
        // SAFETY: the caller promised that the call's places are readable or writable for its lengths until `stream`
        // is past it.
        unsafe { self.run_chosen(inner, call, stream) }
    }

    /// Runs a call with the algorithm that the engine's rule finds.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::run`].
    #[inline]
    pub(super) unsafe fn run_by_rule(
        &self,
        inner: &mut Inner,
        call: &StandardCall,
        stream: &Stream,
    ) -> Result<()> {
        self.grow_for(inner, call, true, stream)?;
        // SAFETY: the caller promised that the call's places are readable or writable for its lengths until `stream`
        // is past it.
        unsafe { inner.engine.run(call, stream) }
    }

    /// Runs a call with the algorithm that it names.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::run`].
    pub(super) unsafe fn run_named(
        &self,
        inner: &mut Inner,
        chosen: &Chosen,
        call: &StandardCall,
        stream: &Stream,
    ) -> Result<()> {
        self.grow_for(inner, call, false, stream)?;
        self.grow_for_program(inner, chosen, call, stream)?;
        // SAFETY: the caller promised that the call's places are readable or writable for its lengths until `stream`
        // is past it.
        unsafe { Self::run_by(inner, chosen, call, stream) }
    }

    /// # Safety
    ///
    /// You must keep the promises of [`Self::run`].
    unsafe fn run_chosen<'a>(
        &'a self,
        mut inner: MutexGuard<'a, Inner>,
        call: &StandardCall,
        stream: &Stream,
    ) -> Result<()> {
        self.grow_for(&mut inner, call, false, stream)?;
        let collective = call.collective;
        let selector = inner.choices.selector(collective);
        let mut selected = None;
        if let Some(selector) = &selector {
            let (shape, area) = (self.shape(call), inner.engine.area());
            drop(inner);
            let name = ask_selector(&**selector, &shape);
            inner = match name {
                Err(why) if why.is_interrupted() => {
                    return Err(self.decline(why, stream));
                }
                _ => self.resume(area, stream)?,
            };
            selected = Some(name);
        }
        let Decision { chosen, requested, not_followed, .. } =
            self.decide(&mut inner, selected, call, stream)?;
        if let (Some(why), Some(selector)) = (not_followed, selector)
            && !std::mem::replace(&mut inner.choices.of(collective).has_warned, true)
        {
            let area = inner.engine.area();
            drop(inner);
            warn(&*selector, &why);
            inner = self.resume(area, stream)?;
        }
        // SAFETY: the caller promised that the call's places are readable or writable for its lengths until `stream`
        // is past it.
        let ran = unsafe { Self::run_by(&mut inner, &chosen, call, stream) };
        ran.map_err(|error| requested.map_or(error.clone(), |requested| requested.blame(error)))
    }

    /// Finds the algorithm of a call that names none, where something comes before the engine's rule: the name that a selector
    /// returned, what options or the environment request, or a loaded table. The call then uses the memory that the algorithm
    /// needs.
    pub(super) fn decide(
        &self,
        inner: &mut Inner,
        selected: Option<Result<Option<String>>>,
        call: &StandardCall,
        stream: &Stream,
    ) -> Result<Decision> {
        // That of built-in algorithms. Programs have the large one, if there is one.
        let area = inner.engine.area();
        let collective = call.collective;
        let mut not_followed = None;
        if let Some(name) = selected {
            let chosen = self.selected(name, collective);
            if let Ok(Some(chosen)) = &chosen {
                self.grow_for_program(inner, chosen, call, stream)?;
            }
            match self.follow(inner, chosen, call, &self.shape(call)) {
                Ok(None) => {}
                Ok(Some(chosen)) => return Ok(Decision::by(chosen, "selector")),
                Err(why) => {
                    not_followed = Some(why);
                    inner.engine.use_area(area);
                }
            }
        }
        let Some(requested) = inner.choices.requested(collective).cloned() else {
            let measured = self.measured(inner, call, stream)?;
            let decision = match measured {
                Some(chosen) => Decision::by(chosen, "loaded table"),
                None => Decision::by(Chosen::BuiltIn(AUTO), "rule"),
            };
            return Ok(Decision { not_followed, ..decision });
        };
        match self.registry.find(collective, &requested.name) {
            Some(chosen) => {
                self.grow_for_program(inner, &chosen, call, stream)?;
                let by = if requested.by_environment { collective.variable() } else { "requested" };
                Ok(Decision {
                    requested: Some(requested),
                    not_followed,
                    ..Decision::by(chosen, by)
                })
            }
            None => {
                let why = self.registry.unknown(collective.name(), &requested.name, self.rank());
                let why = requested.by_whom(why);
                Err(inner.engine.decline(why, stream))
            }
        }
    }

    /// Loads a table of algorithms, as `python -m symmpool tune` writes it, for calls whose algorithm nothing else
    /// requests. Its rows replace those that were loaded before for the same collectives. It exchanges nothing with other
    /// ranks, which must load the same. A table for other devices, or for another number of ranks, changes nothing.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for a file that cannot be read or is no table; it names the file and the field.
    pub fn load_tables(&self, path: &Path) -> Result<()> {
        let rows = read_rows(path, &device_names(&self.pool)?)?;
        self.lock().choices.load(&rows);
        Ok(())
    }

    /// The algorithm that a loaded table has for a call, if it can serve the call.
    fn measured(
        &self,
        inner: &mut Inner,
        call: &StandardCall,
        stream: &Stream,
    ) -> Result<Option<Chosen>> {
        let (shape, collective) = (self.shape(call), call.collective);
        let lamport = fits_lamport(shape.dtype);
        let fits =
            |measured: &&mut Measured| measured.row.fits(lamport, shape.output_window, shape.bytes);
        let Some(measured) = inner.choices.of(collective).rows.iter_mut().find(fits) else {
            return Ok(None);
        };
        let Some(mut chosen) = self.registry.find(collective, &measured.row.algorithm) else {
            return Ok(None);
        };
        if let (Some(blocks), Chosen::Registered(plan)) = (measured.row.blocks, &chosen) {
            let made = measured.with_blocks.take().filter(|(of, _)| *of == plan.hash());
            let made = made.or_else(|| Some((plan.hash(), plan.with_blocks(blocks)?)));
            if let Some((_, with_blocks)) = &made {
                chosen = Chosen::Registered(with_blocks.clone());
            }
            measured.with_blocks = made;
        }
        let area = inner.engine.area();
        self.grow_for_program(inner, &chosen, call, stream)?;
        if self.check_fit(inner, &chosen, call, &shape).is_err() {
            inner.engine.use_area(area);
            return Ok(None);
        }
        Ok(Some(chosen))
    }

    /// Refuses an algorithm that cannot serve a call.
    fn check_fit(
        &self,
        inner: &Inner,
        chosen: &Chosen,
        call: &StandardCall,
        shape: &CallShape,
    ) -> Result<()> {
        match chosen {
            Chosen::BuiltIn(AUTO) => Ok(()),
            Chosen::BuiltIn(id) => inner.engine.check_fit(*id, shape),
            Chosen::Registered(algorithm) => match algorithm.source() {
                Source::BuiltIn(built_in) => inner.engine.check_fit(built_in.id, shape),
                Source::Plan(plan) => inner.engine.check_plan(plan, &call.arguments),
                Source::Native(kernel) => inner.engine.check_native(kernel, &call.arguments),
            },
        }
    }

    /// The algorithm of the name that a selector returned, if it chose one.
    fn selected(
        &self,
        name: Result<Option<String>>,
        collective: StandardCollective,
    ) -> Result<Option<Chosen>> {
        let Some(name) = name? else { return Ok(None) };
        let chosen = self.registry.find(collective, &name);
        let chosen =
            chosen.ok_or_else(|| self.registry.unknown(collective.name(), &name, self.rank()))?;
        Ok(Some(chosen).filter(|chosen| !matches!(chosen, Chosen::BuiltIn(AUTO))))
    }

    /// The algorithm that a selector chose, if it can serve the call.
    fn follow(
        &self,
        inner: &Inner,
        chosen: Result<Option<Chosen>>,
        call: &StandardCall,
        shape: &CallShape,
    ) -> Result<Option<Chosen>> {
        let fits = |chosen| {
            self.check_fit(inner, &chosen, call, shape)?;
            Ok(chosen)
        };
        let found = chosen.and_then(|chosen| chosen.map(fits).transpose());
        found.map_err(|why| {
            why.context(format!(
                "the selector for {} on rank {}, instead of which the built-in rule chooses",
                call.collective,
                self.rank()
            ))
        })
    }

    /// Runs a call with an algorithm.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::run`].
    pub(super) unsafe fn run_by(
        inner: &mut Inner,
        chosen: &Chosen,
        call: &StandardCall,
        stream: &Stream,
    ) -> Result<()> {
        let (engine, arguments) = (&mut inner.engine, &call.arguments);
        let algorithm = match chosen {
            Chosen::BuiltIn(id) => *id,
            Chosen::Registered(algorithm) => match algorithm.source() {
                Source::BuiltIn(built_in) => built_in.id,
                // SAFETY: the caller promised that the arguments' places are readable or writable for their lengths
                // until `stream` is past it.
                Source::Plan(plan) => return unsafe { engine.run_plan(plan, arguments, stream) },
                Source::Native(kernel) => {
                    // SAFETY: the caller promised that the arguments' places are readable or writable for their
                    // lengths until `stream` is past it.
                    return unsafe { engine.run_native(kernel, arguments, stream) };
                }
            },
        };
        // SAFETY: the caller promised that the call's places are readable or writable for its lengths until `stream`
        // is past it.
        unsafe { engine.run(&StandardCall { algorithm, ..*call }, stream) }
    }

    pub(super) fn shape(&self, call: &StandardCall) -> CallShape {
        call.shape(self.world(), self.mesh)
    }
}

/// The names of the ranks' devices, as tables have them.
pub(super) fn device_names(pool: &Pool) -> Result<Vec<&str>> {
    let on_device = pool.driver().as_cuda().is_some();
    let name = |rank| if on_device { Ok(pool.device(rank)?.name.as_str()) } else { Ok("cpu") };
    (0..pool.world()).map(name).collect()
}
