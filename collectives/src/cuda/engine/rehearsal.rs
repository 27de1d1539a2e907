//! Rehearsals of calls: a call goes through all of its code, and nothing of it reaches the device or other ranks.
//!
//! So an explanation of a call cannot differ from the call. The doors to the device note what they would put there
//! (`engine/launch`), the order of streams stays as it is (`engine/streams`), a refusal is returned and reported to nobody
//! (`engine/decline`), kernels are looked up and not loaded, and the SM budget is asked and not changed. What a call leaves in
//! the engine is put back at the end (`engine/rehearse`).

use std::cell::RefCell;

use symmpool_allocator::{Error, Result};

use crate::call::rehearsal::{Lifts, Rehearsed};
use crate::cuda::kernel::loaded_kernel::LoadedKernel;
use crate::cuda::kernel::sm_budget::SmBudget;
use crate::cuda::layout::params::{CommFields, ControlLayout};

/// A rehearsal under way.
pub(in crate::cuda) struct Rehearsal {
    pub(super) lifts: Lifts,
    /// Notes of doors that have the engine by a shared reference.
    pub(super) seen: RefCell<Rehearsed>,
    /// Whether it goes on as if the memory had grown.
    pub(in crate::cuda) has_grown: bool,
    pub(super) kept: Kept,
}

/// State of an engine that a rehearsal changes, as it was before.
pub(in crate::cuda) struct Kept {
    pub(super) control: ControlLayout,
    pub(super) comm: CommFields,
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
