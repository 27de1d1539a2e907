//! Rehearsals of calls: a call goes through all of its code, and nothing of it reaches the device or other ranks.
//!
//! So an explanation of a call cannot differ from the call. The doors to the device note what they would put there
//! (`engine/launch`), the order of streams stays as it is (`engine/streams`), a refusal is returned and reported to nobody
//! (`engine/decline`), kernels are looked up and not loaded, and the SM budget is asked and not changed. What a call leaves in
//! the engine is put back at the end (`engine/rehearse`).

use std::cell::RefCell;

use symmpool_allocator::{Error, Result};

use crate::cuda::kernel::loaded_kernel::LoadedKernel;
use crate::cuda::kernel::sm_budget::SmBudget;
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
    /// Whether every kernel may start while the one before it on its stream still waits for peers, or works.
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
    pub(super) lifts: Lifts,
    /// What is noted by doors that have the engine by a shared reference.
    pub(super) seen: RefCell<Rehearsed>,
    /// Whether it goes on as if the memory had grown.
    pub(in crate::cuda) has_grown: bool,
    pub(super) kept: Kept,
}

/// What calls leave in an engine.
pub(in crate::cuda) struct Kept {
    pub(super) control: Control,
    pub(super) comm: Comm,
    pub(super) budget: SmBudget,
    pub(super) beside_compute: bool,
}

impl Rehearsal {
    #[cold]
    pub(super) fn note_algorithm(&self, name: &str, chosen_by: Option<&'static str>) {
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
