//! The class `Communicator`, whose methods are in `communicator_methods`: what other classes use of one.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::arguments::{Argument, CommunicatorCalls};
use crate::selection::Selectors;
use crate::written::say_written;

#[doc = include_str!("communicator.md")]
#[pyclass(frozen, weakref, module = "symmpool")]
pub(crate) struct Communicator {
    pub(crate) calls: Arc<CommunicatorCalls>,
    pub(crate) algorithm: String,
    pub(crate) selectors: Selectors,
    /// Whether calls say to autograd what they write to.
    pub(crate) is_seen: bool,
}

impl Communicator {
    pub(crate) fn on(calls: Arc<CommunicatorCalls>, algorithm: String, is_seen: bool) -> Self {
        Self { calls, algorithm, selectors: Selectors::default(), is_seen }
    }

    /// The calls, for those that are other classes' methods.
    pub(crate) fn calls(&self) -> &CommunicatorCalls {
        &self.calls
    }

    /// Says to autograd that a call has written to tensors: their versions count up, so that a backward pass that needs
    /// what was there before raises; and where they require grad, a gradient that comes back by way of them warns.
    pub(crate) fn wrote(&self, tensors: &[Option<Argument<'_, '_>>]) -> PyResult<()> {
        if self.is_seen { say_written(tensors) } else { Ok(()) }
    }
}
