//! Rehearsals of calls: a call goes through all of its code, and nothing of it reaches the device or other ranks.
//!
//! So an explanation of a call cannot differ from the call. The doors to the device note what they would put there
//! (`engine/launch`), the order of streams stays as it is (`engine/streams`), a refusal is returned and reported to nobody
//! (`engine/decline`), kernels are looked up and not loaded, and the SM budget is asked and not changed. What a call leaves in
//! the engine is put back at the end.

use std::cell::RefCell;

use symmpool_allocator::{Error, Result, Stream};

use crate::cuda::kernel::loaded_kernel::LoadedKernel;
use super::{Area, CudaEngine};

use crate::cuda::kernel::sm_budget::{Lifted, SmBudget};
use crate::cuda::layout::params::{Comm, Control};

/// What a rehearsal leaves out of what keeps a call from its best case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lifts {
    /// Other communicators on the device, and other libraries.
    pub(crate) company: bool,
    /// The most SMs and compute beside, as options say.
    pub(crate) options: bool,
    /// That the memory has not grown yet.
    pub(crate) memory: bool,
}

/// What a call would do on this rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rehearsed {
    /// The last algorithm that the engine chose.
    pub(crate) algorithm: String,
    /// By what it was chosen, where the engine has several ways.
    pub(crate) chosen_by: Option<&'static str>,
    /// The blocks and threads of each kernel, in the order of launches.
    pub(crate) launches: Vec<(u32, u32)>,
    /// How many copies copy engines make.
    pub(crate) copies: usize,
    /// Whether every kernel may start before the one before it on its stream has ended.
    pub(crate) starts_early: bool,
    /// Whether a kernel is not loaded yet, so that nobody knows its grid.
    pub(crate) is_not_loaded: bool,
    /// Bytes of memory that it takes first, if every rank has room.
    pub(crate) takes: u64,
    /// Why it takes no memory for large calls, where there is none yet and it has use for it.
    pub(crate) takes_none: Option<String>,
}

/// A rehearsal under way.
pub(in crate::cuda) struct Rehearsal {
    lifts: Lifts,
    /// What is noted by doors that have the engine by a shared reference.
    seen: RefCell<Rehearsed>,
    /// Whether it goes on as if the memory had grown.
    pub(in crate::cuda) has_grown: bool,
    kept: Kept,
}

/// What calls leave in an engine.
struct Kept {
    control: Control,
    comm: Comm,
    budget: SmBudget,
    beside_compute: bool,
}

impl CudaEngine {
    /// Begins a rehearsal: until its end calls do nothing but say what they would do. Nothing else may use the engine
    /// meanwhile.
    pub(crate) fn begin_rehearsal(&mut self, lifts: Lifts) {
        let kept = Kept {
            control: self.control,
            comm: self.comm,
            budget: self.kernels().budget(),
            beside_compute: self.beside_compute,
        };
        let seen = RefCell::new(Rehearsed { starts_early: true, ..Rehearsed::default() });
        self.beside_compute &= !lifts.options;
        self.rehearsal = Some(Box::new(Rehearsal { lifts, seen, has_grown: false, kept }));
        self.use_area(Area::Small);
    }

    /// Ends a rehearsal. Returns what was noted.
    pub(crate) fn end_rehearsal(&mut self) -> Rehearsed {
        let Some(rehearsal) = self.rehearsal.take() else { return Rehearsed::default() };
        let Rehearsal { seen, kept, .. } = *rehearsal;
        (self.control, self.comm, self.beside_compute) =
            (kept.control, kept.comm, kept.beside_compute);
        self.kernels_mut().set_budget(kept.budget);
        seen.into_inner()
    }

    #[inline]
    pub(crate) fn is_rehearsing(&self) -> bool {
        self.rehearsal.is_some()
    }

    /// Whether the rehearsal goes on as if the memory had grown, whatever there is.
    pub(crate) fn lifts_memory(&self) -> bool {
        self.rehearsal.as_ref().is_some_and(|rehearsal| rehearsal.lifts.memory)
    }

    /// Goes on as if the memory had grown, by so many bytes in this call.
    pub(crate) fn rehearse_growth(&mut self, takes: u64) {
        if let Some(rehearsal) = &mut self.rehearsal {
            rehearsal.has_grown = true;
            rehearsal.seen.get_mut().takes = takes;
        }
    }

    /// Notes why a call takes no memory that it has use for.
    pub(crate) fn rehearse_no_growth(&mut self, why: String) {
        if let Some(rehearsal) = &mut self.rehearsal {
            rehearsal.seen.get_mut().takes_none = Some(why);
        }
    }

    /// How many other communicators of the process are on the device.
    pub(crate) fn other_communicators(&self) -> u32 {
        self.kernels().other_communicators()
    }

    /// Notes which algorithm a call runs, and by what the engine chose it.
    #[inline]
    pub(in crate::cuda) fn note_algorithm(&self, name: &str, chosen_by: Option<&'static str>) {
        if let Some(rehearsal) = &self.rehearsal {
            rehearsal.note_algorithm(name, chosen_by);
        }
    }

    /// The budget of a call on that stream, while it is rehearsed.
    pub(in crate::cuda) fn rehearsed_budget(
        &self,
        stream: Stream,
        is_captured: impl FnOnce() -> bool,
    ) -> Option<SmBudget> {
        let Lifts { company, options, .. } = self.rehearsal.as_ref()?.lifts;
        let lifted = Lifted { company, options };
        Some(self.kernels().budget_if_called(stream, is_captured(), lifted))
    }
}

impl Rehearsal {
    #[cold]
    fn note_algorithm(&self, name: &str, chosen_by: Option<&'static str>) {
        let mut seen = self.seen.borrow_mut();
        name.clone_into(&mut seen.algorithm);
        seen.chosen_by = chosen_by.or(seen.chosen_by);
    }

    /// Notes a launch.
    #[cold]
    pub(in crate::cuda) fn launch(&self, kernel: &LoadedKernel, grid: (u32, u32)) {
        let mut seen = self.seen.borrow_mut();
        seen.launches.push(grid);
        seen.starts_early &= kernel.budget.early;
    }

    /// Notes a copy.
    #[cold]
    pub(in crate::cuda) fn copy(&self) {
        self.seen.borrow_mut().copies += 1;
    }

    /// A kernel that a call needs. One that is not loaded ends the rehearsal.
    #[cold]
    pub(in crate::cuda) fn loaded(&self, found: Option<LoadedKernel>) -> Result<LoadedKernel> {
        found.ok_or_else(|| {
            self.seen.borrow_mut().is_not_loaded = true;
            Error::invalid_state("a kernel of the call is not loaded yet")
        })
    }
}
