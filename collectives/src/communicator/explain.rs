//! Explanations of a call: what it would do now, what it would do in the best case, and what keeps it from that.
//!
//! The call is rehearsed: it goes through its own code, and nothing of it reaches the device or other ranks
//! (`cuda/engine/rehearsal.rs`, `host/engine/rehearsal.rs`). So the explanation cannot differ from the call. It is rehearsed again
//! without all that keeps calls from their best case, and without all of that but one, for each.

#![allow(unsafe_code)] // makes calls that are rehearsed, of which nothing reads or writes memory

use std::fmt;

use symmpool_allocator::{CONTROL_LANE, Error, Lane, Result, Stream};

use super::decision::{Chosen, ask_selector};
use super::engine::AnyEngine;
use super::{Communicator, Inner, Request};
use crate::algorithm::AUTO;
use crate::call::rehearsal::{Lifts, Rehearsed};
use crate::call::{Arguments, StandardCall};
use crate::cuda::Area;
use crate::{DType, Place, StandardCollective};

/// Explanation of a call on this rank, as it would be made now: [`Communicator::explain`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The collective.
    pub collective: StandardCollective,
    /// Bytes of the larger one of input and output.
    pub bytes: u64,
    /// The type of the elements.
    pub dtype: DType,
    /// How it is made, and by what that was chosen.
    pub now: CallPlan,
    /// Party that chose the algorithm: the call, a selector, `requested` (by options), a variable of the environment,
    /// a loaded table, what was measured on such devices, or a rule.
    pub chosen_by: String,
    /// The memory in which data lies on its way: `small` or `large`, `whole` where a communicator's memory does not grow, and
    /// `host` on the CPU.
    pub memory: &'static str,
    /// Bytes of memory that the call takes first, if every rank has room.
    pub takes: u64,
    /// Whether the input lies in a window.
    pub input_window: bool,
    /// Whether the output lies in a window.
    pub output_window: bool,
    /// SMs of the device; `None` on the CPU.
    pub device_sms: Option<u32>,
    /// How it would be made alone on the device, with all of the memory, between windows.
    pub best: CallPlan,
    /// Obstacles to the best case, in words. Empty if there are none.
    pub kept_by: Vec<String>,
}

/// How a call is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallPlan {
    /// The name of the algorithm.
    pub algorithm: String,
    /// Blocks and threads of each kernel, in the order of launches. Empty on the CPU.
    pub launches: Vec<(u32, u32)>,
    /// Whether `launches` has all kernels. It has not where one is not loaded yet: the first call loads it.
    pub is_known: bool,
    /// How many copies copy engines make.
    pub copies: usize,
    /// Whether each kernel may start while the one before it on its stream still waits for peers, or works.
    pub starts_early: bool,
}

impl CallPlan {
    fn of(seen: &Rehearsed) -> Self {
        Self {
            algorithm: seen.algorithm.clone(),
            launches: seen.launches.clone(),
            is_known: !seen.is_not_loaded,
            copies: seen.copies,
            starts_early: seen.starts_early,
        }
    }

    /// Blocks of its largest kernel. `None` on the CPU, and where that is not known yet.
    pub fn blocks(&self) -> Option<u32> {
        let most = self.launches.iter().map(|(blocks, _)| *blocks).max();
        most.filter(|_| self.is_known)
    }

    /// Whether both are the same call, as far as both are known.
    fn is_like(&self, other: &Self) -> bool {
        let is_known = self.is_known && other.is_known;
        self.algorithm == other.algorithm && (!is_known || self == other)
    }

    /// The plan in words, on a device of `sms` SMs.
    fn in_words(&self, sms: Option<u32>) -> String {
        let mut text =
            if self.algorithm.is_empty() { "a handshake" } else { &*self.algorithm }.to_owned();
        let Some(sms) = sms else { return text };
        text += &self.blocks().map_or_else(
            || ", a kernel that is not loaded yet".to_owned(),
            |blocks| format!(", {blocks} blocks on {} of {sms} SMs", blocks.min(sms)),
        );
        match self.launches.len() {
            0 | 1 => {}
            several => text += &format!(", {several} launches"),
        }
        match self.copies {
            0 => {}
            1 => text += ", 1 copy",
            several => text += &format!(", {several} copies"),
        }
        text
    }
}

impl Explanation {
    /// SMs that the call takes at most: each block of a kernel may have one of its own. `None` as
    /// [`blocks`](CallPlan::blocks).
    pub fn sms(&self) -> Option<u32> {
        Some(self.now.blocks()?.min(self.device_sms?))
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, dtype) = (self.collective.name(), self.dtype.name());
        let how = self.now.in_words(self.device_sms);
        write!(f, "{name} of {} bytes of {dtype}: {how} (by {})", self.bytes, self.chosen_by)?;
        match self.memory {
            "small" | "large" => write!(f, ", in the memory for {} calls", self.memory)?,
            _ => {}
        }
        let text = match (self.input_window, self.output_window) {
            (true, true) => "between windows",
            (true, false) => "from a window into other memory",
            (false, true) => "from other memory into a window",
            (false, false) => "outside of windows",
        };
        write!(f, ", {text}")?;
        if self.takes > 0 {
            write!(f, "; it takes {} bytes of memory first", self.takes)?;
        }
        if self.kept_by.is_empty() {
            return f.write_str(". That is its best case.");
        }
        let best = self.best.in_words(self.device_sms);
        write!(f, ". In the best case {best}")?;
        if self.best.starts_early && !self.now.starts_early {
            f.write_str(", which may start while the kernel before it still runs")?;
        }
        write!(f, "; what keeps it from that: {}.", self.kept_by.join("; "))
    }
}

/// Obstacles to a call's best case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Obstacle {
    Company,
    Options,
    Memory,
    Windows,
}

impl Obstacle {
    const ALL: [Self; 4] = [Self::Company, Self::Options, Self::Memory, Self::Windows];
}

/// A call that is explained.
struct Explained<'a> {
    request: StandardCall,
    /// Copy of the request between windows, if these have room for it.
    between_windows: Option<StandardCall>,
    named: Option<Chosen>,
    selected: Option<Result<Option<String>>>,
    stream: &'a Stream,
}

impl Communicator {
    /// Explains a call of a collective on this rank, as it would be made now: which algorithm with how many blocks,
    /// what it would be in the best case, and what keeps it from that.
    ///
    /// It talks to nobody, waits for nothing but calls that other threads are in, and changes nothing: it commits no memory,
    /// loads no kernel and reads no data. If a [selector](Self::select) chooses, that is asked. A call that is made later may
    /// go otherwise, where other communicators were made or have called since.
    ///
    /// ```
    /// use symmpool_allocator::{Driver, Group, Pool, Result, Stream};
    /// use symmpool_collectives::{Communicator, Request, StandardCollective};
    ///
    /// fn rank(group: Group) -> Result<()> {
    ///     let pool = Pool::builder(group).driver(Driver::host()?).build()?;
    ///     let comm = Communicator::new(&pool)?;
    ///     let (x, out) = (pool.alloc::<f32>(1 << 20)?, pool.alloc::<f32>(1 << 20)?);
    ///     let request = Request::new(StandardCollective::AllReduce, &out, &x);
    ///     let said = comm.explain(&request, &Stream::DEFAULT)?;
    ///     // The blocks become windows by the commit that the call makes first.
    ///     assert!(said.input_window && said.output_window && said.kept_by.is_empty());
    ///     assert_eq!(said.now.algorithm, "two_shot");
    ///     println!("{said}");
    ///     Ok(())
    /// }
    ///
    /// let ranks: Vec<_> = Group::in_process(2)?
    ///     .into_iter()
    ///     .map(|group| std::thread::spawn(move || rank(group)))
    ///     .collect();
    /// for rank in ranks {
    ///     rank.join().expect("no panic")?;
    /// }
    /// # Ok::<(), symmpool_allocator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those for which [`Self::call`] would refuse the call, and why calls fail if they do. Other ranks hear nothing of them.
    /// `is_unsupported` for a collective of a program's own.
    pub fn explain(&self, request: &Request<'_>, stream: &Stream) -> Result<Explanation> {
        self.pool.check_process()?;
        let named = self.named(request)?;
        let Some(collective) = request.callee.standard() else {
            return Err(Error::unsupported(format!(
                "a collective of a program's own on rank {} cannot be explained: its algorithm says all of it",
                self.rank()
            )));
        };
        let size = self.size_of(request)?;
        let mut inner = self.lock();
        inner.engine.ready()?;
        inner.engine.begin_rehearsal(Lifts::default());
        let arguments = self.arguments(&mut inner, request, size, stream);
        inner.engine.end_rehearsal();
        let lengths = [size.inputs, size.outputs];
        let arguments = self.after_commit(arguments?, lengths, stream);
        let request_on = (request.input.address() as u64, request.output.address() as u64);
        let request = StandardCall { collective, algorithm: AUTO, arguments };
        let selector = inner.choices.selector(collective).filter(|_| named.is_none());
        drop(inner);
        // The selector is asked outside of all locks, as in calls.
        let selected = selector.map(|selector| ask_selector(&*selector, &self.shape(&request)));
        if let Some(Err(why)) = &selected
            && why.is_interrupted()
        {
            return Err(why.clone());
        }
        let between_windows = self.between_windows(&request, request_on, lengths);
        let call = Explained { request, between_windows, named, selected, stream };
        self.explained(&call)
    }

    fn explained(&self, call: &Explained<'_>) -> Result<Explanation> {
        let mut inner = self.lock();
        inner.engine.ready()?;
        let inner = &mut *inner;
        let (seen, chosen_by, area) = self.rehearsed(inner, call, &Obstacle::ALL)?;
        let now = CallPlan::of(&seen);
        let best = CallPlan::of(&self.rehearsed(inner, call, &[])?.0);
        let mut kept_by = Vec::new();
        if !now.is_like(&best) {
            let of_them = |each: &Obstacle| self.is_there(*each, call, &seen);
            let there: Vec<Obstacle> = Obstacle::ALL.into_iter().filter(of_them).collect();
            let mut decisive = Vec::new();
            for obstacle in &there {
                let alone = CallPlan::of(&self.rehearsed(inner, call, &[*obstacle])?.0);
                if !alone.is_like(&best) {
                    decisive.push(*obstacle);
                }
            }
            // Two of them may keep it from that together.
            let decisive = if decisive.is_empty() { there } else { decisive };
            kept_by = decisive.iter().map(|each| in_words(*each, inner, call, &seen)).collect();
        }
        let device_sms = match &inner.engine {
            AnyEngine::Cuda(cuda) => Some(cuda.sm_count()),
            AnyEngine::Host(_) | AnyEngine::Spanning(_) => None,
        };
        let StandardCall { collective, arguments, .. } = call.request;
        let Arguments { input, output, dtype, .. } = arguments;
        Ok(Explanation {
            collective,
            bytes: self.shape(&call.request).bytes,
            dtype,
            now,
            chosen_by: match (chosen_by, seen.chosen_by) {
                // Only the engine knows by which of its rules.
                ("rule", Some(by)) => by,
                (by, _) => by,
            }
            .to_owned(),
            memory: area,
            takes: seen.takes,
            input_window: input.is_window(),
            output_window: output.is_window(),
            device_sms,
            best,
            kept_by,
        })
    }

    /// Rehearses a call, with these obstacles alone. Returns what it does, what chose its algorithm, and its memory.
    fn rehearsed(
        &self,
        inner: &mut Inner,
        call: &Explained<'_>,
        obstacles: &[Obstacle],
    ) -> Result<(Rehearsed, &'static str, &'static str)> {
        let lifted = |obstacle| !obstacles.contains(&obstacle);
        inner.engine.begin_rehearsal(Lifts {
            company: lifted(Obstacle::Company),
            options: lifted(Obstacle::Options),
            memory: lifted(Obstacle::Memory),
        });
        let windows = call.between_windows.as_ref().filter(|_| lifted(Obstacle::Windows));
        let mut by = "rule";
        let made = self.rehearse(inner, call, windows.unwrap_or(&call.request), &mut by);
        let area = match &inner.engine {
            AnyEngine::Host(_) | AnyEngine::Spanning(_) => "host",
            AnyEngine::Cuda(cuda) if !cuda.may_have_large_area() => "whole",
            AnyEngine::Cuda(cuda) if cuda.area() == Area::Large => "large",
            AnyEngine::Cuda(_) => "small",
        };
        let seen = inner.engine.end_rehearsal();
        match made {
            // It goes no further than to a kernel that is not loaded.
            Err(why) if !seen.is_not_loaded => Err(why),
            _ => Ok((seen, by, area)),
        }
    }

    /// Makes a call, while the engine rehearses, and says what chose its algorithm.
    fn rehearse(
        &self,
        inner: &mut Inner,
        call: &Explained<'_>,
        request: &StandardCall,
        by: &mut &'static str,
    ) -> Result<()> {
        let stream = call.stream;
        if let Some(named) = &call.named {
            *by = "call";
            // SAFETY: nothing is read or written while the engine rehearses; so it is below.
            return unsafe { self.run_named(inner, named, request, stream) };
        }
        if inner.choices.uses_rule(request.collective) {
            // SAFETY: the engine rehearses, so nothing is read or written.
            return unsafe { self.run_by_rule(inner, request, stream) };
        }
        self.grow_for(inner, request, false, stream)?;
        let decision = self.decide(inner, call.selected.clone(), request, stream)?;
        *by = decision.by;
        // SAFETY: the engine rehearses, so nothing is read or written.
        unsafe { Self::run_by(inner, &decision.chosen, request, stream) }
    }

    /// Where memory lies once the commit was made that a call makes first, if one is due.
    fn after_commit(
        &self,
        arguments: Arguments,
        [inputs, outputs]: [usize; 2],
        stream: &Stream,
    ) -> Arguments {
        let commits = self.pool.is_commit_due() && !self.pool.driver().is_capturing(*stream);
        let placed = |place, bytes: usize| match place {
            Place::Unregistered(pointer) if commits => {
                let located = self.pool.layout().locate(pointer as u64);
                let becomes_window = |offset: &u64| {
                    self.pool.lanes().filter(Lane::is_symmetric).any(|lane| {
                        let (base, range) = lane.range();
                        let from = offset.checked_sub(base);
                        from.is_some_and(|from| from.saturating_add(bytes as u64) <= range)
                    })
                };
                let offset = located.map(|(_, offset)| offset).filter(becomes_window);
                offset.map_or(place, Place::Window)
            }
            _ => place,
        };
        let Arguments { input, output, .. } = arguments;
        Arguments { input: placed(input, inputs), output: placed(output, outputs), ..arguments }
    }

    /// A call between windows in place of these buffers, which lie to each other as these do where they overlap.
    fn between_windows(
        &self,
        request: &StandardCall,
        (from, to): (u64, u64),
        lengths: [usize; 2],
    ) -> Option<StandardCall> {
        let [inputs, outputs] = lengths.map(|bytes| bytes as u64);
        let is_broadcast = request.collective == StandardCollective::Broadcast;
        let from = if is_broadcast { to } else { from };
        let overlap = from < to.saturating_add(outputs) && to < from.saturating_add(inputs);
        let (from, to) = match overlap {
            true => (from.saturating_sub(to), to.saturating_sub(from)),
            false => (0, inputs.checked_next_multiple_of(512)?),
        };
        let end = from.checked_add(inputs)?.max(to.checked_add(outputs)?);
        let lanes = self.pool.lanes().filter(Lane::is_symmetric);
        let (base, _) = lanes
            .filter(|lane| lane.name() != CONTROL_LANE)
            .map(|lane| lane.range())
            .find(|(_, range)| *range >= end)?;
        let (input, output) = (Place::Window(base + from), Place::Window(base + to));
        let arguments = Arguments { input, output, ..request.arguments };
        Some(StandardCall { arguments, ..*request })
    }

    /// Whether something that may keep a call from its best case is there.
    fn is_there(&self, obstacle: Obstacle, call: &Explained<'_>, seen: &Rehearsed) -> bool {
        let Arguments { input, output, .. } = call.request.arguments;
        match obstacle {
            Obstacle::Windows => !(input.is_window() && output.is_window()),
            Obstacle::Memory => seen.takes_none.is_some(),
            Obstacle::Company | Obstacle::Options => self.pool.driver().as_cuda().is_some(),
        }
    }
}

/// Describes an obstacle to a call's best case in words.
fn in_words(obstacle: Obstacle, inner: &Inner, call: &Explained<'_>, seen: &Rehearsed) -> String {
    let others = match &inner.engine {
        AnyEngine::Cuda(cuda) => cuda.other_communicators(),
        AnyEngine::Host(_) | AnyEngine::Spanning(_) => 0,
    };
    let Arguments { input, output, .. } = call.request.arguments;
    match obstacle {
        Obstacle::Company if others == 0 => {
            "SMs are left to other libraries, or to as many communicators as `concurrent` says"
                .to_owned()
        }
        Obstacle::Company => format!(
            "calls of {others} other communicator{} of the process may be under way on the device, which has most SMs for one of \
             them at a time",
            if others == 1 { "" } else { "s" }
        ),
        Obstacle::Options => "`sm_budget` or `beside_compute` leaves SMs to others".to_owned(),
        Obstacle::Memory => {
            let why = seen.takes_none.as_deref().unwrap_or("it has not grown");
            format!("there is no memory for large calls: {why}")
        }
        Obstacle::Windows => match (input.is_window(), output.is_window()) {
            (false, true) => "the input is no window of the pool",
            (true, false) => "the output is no window of the pool",
            _ => "input and output are no windows of the pool",
        }
        .to_owned(),
    }
}
