//! How an engine begins and ends rehearsals, and what calls note in them.

use std::cell::RefCell;

use symmpool_allocator::Stream;

use super::rehearsal::{Kept, Rehearsal};
use super::{Area, CudaEngine};
use crate::call::rehearsal::{Lifts, Rehearsed};
use crate::cuda::kernel::sm_budget::{Lifted, SmBudget};

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

    /// Goes on as if the memory had grown, by `takes` bytes in this call.
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
