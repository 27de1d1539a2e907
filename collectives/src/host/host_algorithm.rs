//! An entry of a table of algorithms, and the calls that such algorithms run.

use symmpool_allocator::Result;
use symmpool_allocator::topology::Mesh;

use super::kernels::ReduceFn;
use super::{Data, HostEngine};
use crate::DType;
use crate::algorithm::{CallShape, StandardCollective};
use crate::call::Call;

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

impl CallShape {
    /// A call in host memory whose parts have `part` bytes, for the checks of an engine, which knows its links.
    pub(crate) fn of_host(
        engine: &HostEngine,
        collective: StandardCollective,
        part: usize,
        dtype: DType,
        data: &Data,
    ) -> Self {
        let world = engine.world();
        Self {
            collective,
            bytes: part as u64 * u64::from(collective.parts(world)),
            dtype,
            op: None,
            world,
            input_window: data.input.is_window(),
            output_window: data.output.is_window(),
            topology: Mesh::Unknown,
        }
    }
}
