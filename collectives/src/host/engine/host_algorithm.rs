//! Entries of the tables of algorithms, and how a call runs by one.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::topology::TopologyKind;
use symmpool_allocator::{Error, Result};

use crate::Place;
use crate::algorithm::{AUTO, AlgorithmId, CallShape};
use crate::call::{CallDescription, StandardCall};
use crate::host::HostEngine;
use crate::host::kernels::ReduceFn;
use crate::host::layout::place::Data;

/// A built-in algorithm of a collective.
pub(crate) struct HostAlgorithm {
    pub(crate) id: AlgorithmId,
    /// Why it cannot serve a call, if it cannot.
    pub(crate) fits: fn(&HostEngine, &CallShape) -> std::result::Result<(), String>,
    /// Runs the algorithm. You must keep the promises of the collective's method, for the resolved buffers.
    pub(crate) run: unsafe fn(&mut HostEngine, &ResolvedCall) -> Result<()>,
}

/// A call whose arguments were checked and resolved.
pub(crate) struct ResolvedCall {
    pub(crate) call: CallDescription,
    pub(crate) data: Data,
    /// Elements of a part.
    pub(crate) count: usize,
    /// Bytes of an element.
    pub(crate) size: usize,
    pub(crate) root: u32,
    /// The loop that reduces; does nothing where the collective only moves data.
    pub(crate) reduce: ReduceFn,
}

impl ResolvedCall {
    /// Bytes of a part.
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.size
    }

    /// Where input and output lie in windows, if both do.
    pub(crate) fn windows(&self) -> Option<(u64, u64)> {
        match (self.data.input, self.data.output) {
            (Place::Window(from), Place::Window(to)) => Some((from, to)),
            _ => None,
        }
    }
}

impl HostEngine {
    /// Runs a call by the algorithm that it names, or else by the one that the collective's rule has found.
    ///
    /// # Safety
    ///
    /// You must keep the promises of the collective's method, for the resolved buffers.
    pub(in crate::host) unsafe fn run_by(
        &mut self,
        table: &'static [HostAlgorithm],
        standard: &StandardCall,
        rule: AlgorithmId,
        work: &ResolvedCall,
    ) -> Result<()> {
        let StandardCall { collective, algorithm, .. } = *standard;
        let id = if algorithm == AUTO { rule } else { algorithm };
        let shape = standard.shape(self.world(), TopologyKind::Unknown);
        let entry = self.entry(table, id, &shape);
        let entry = self.or_decline(entry)?;
        if self.rehearses(collective, id) {
            return Ok(());
        }
        if work.count == 0 {
            return self.handshake(&work.call);
        }
        tracing::debug!(
            call = %work.call,
            bytes = work.bytes(),
            algorithm = id.label(collective),
            why = if algorithm == AUTO { "rule" } else { "requested" },
            "{}", collective.name()
        );
        // SAFETY: the caller promised that the buffers of `work` are readable or writable for its lengths on every
        // rank.
        unsafe { (entry.run)(self, work) }
    }

    /// The entry of an algorithm that can serve the call.
    pub(in crate::host) fn entry(
        &self,
        table: &'static [HostAlgorithm],
        id: AlgorithmId,
        shape: &CallShape,
    ) -> Result<&'static HostAlgorithm> {
        let found = table.iter().find(|entry| entry.id == id);
        let entry = found.ok_or_else(|| self.not_here(id, shape.collective))?;
        (entry.fits)(self, shape).map_err(|why| {
            Error::unsupported(format!(
                "the {} algorithm {} on rank {}: {why}",
                shape.collective.in_words(),
                id.label(shape.collective),
                self.rank()
            ))
        })?;
        Ok(entry)
    }
}

/// For algorithms that serve every call.
#[allow(clippy::unnecessary_wraps)] // functions that may refuse return this
pub(crate) fn always(_: &HostEngine, _: &CallShape) -> std::result::Result<(), String> {
    Ok(())
}

pub(crate) fn with_input_window(
    _: &HostEngine,
    shape: &CallShape,
) -> std::result::Result<(), String> {
    if shape.input_window || shape.bytes == 0 {
        Ok(())
    } else {
        Err("peers read the input, which must be a window".to_owned())
    }
}

pub(crate) fn with_output_window(
    _: &HostEngine,
    shape: &CallShape,
) -> std::result::Result<(), String> {
    if shape.output_window || shape.bytes == 0 {
        Ok(())
    } else {
        Err("peers write the output, which must be a window".to_owned())
    }
}
