//! An entry of a table of algorithms, and the calls that such algorithms run.

use symmpool_allocator::Result;

use super::call::Call;
use super::kernels::ReduceFn;
use super::{Data, HostEngine};
use crate::algorithm::CallShape;

/// A built-in algorithm of a collective whose calls are a `W`.
pub(crate) struct HostAlgorithm<W: 'static> {
    /// Its number in call descriptions.
    pub(crate) code: u8,
    /// Why it cannot serve a call, if it cannot.
    pub(crate) fits: fn(&HostEngine, &CallShape) -> std::result::Result<(), String>,
    /// Runs it. The caller promises what it does of the collective's method, for the resolved buffers.
    pub(crate) run: unsafe fn(&mut HostEngine, &W) -> Result<()>,
}

/// A call whose arguments were checked and resolved.
pub(crate) struct Work {
    pub(crate) call: Call,
    pub(crate) data: Data,
    /// Elements of a part.
    pub(crate) count: usize,
    /// Bytes of an element.
    pub(crate) size: usize,
    pub(crate) root: u32,
    /// The loop that reduces, if the collective does.
    pub(crate) reduce: Option<ReduceFn>,
}

/// For algorithms that serve every call.
#[allow(clippy::unnecessary_wraps)] // as those that do not
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
