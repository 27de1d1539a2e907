//! Reports to autograd which tensors calls write to.

use pyo3::intern;
use pyo3::prelude::*;

use crate::torch::torch;

/// Says to autograd that tensors were written to, of which some may be none or no tensors of torch.
pub(crate) fn say_written(tensors: &[Option<&Bound<'_, PyAny>>]) -> PyResult<()> {
    for tensor in tensors.iter().flatten() {
        count_version(tensor)?;
        let py = tensor.py();
        let grad = tensor.getattr_opt(intern!(py, "requires_grad"))?;
        if grad.is_some_and(|grad| grad.is_truthy().unwrap_or(false)) {
            let gradients = py.import(intern!(py, "symmpool.communicators.gradients"))?;
            gradients.getattr(intern!(py, "watch"))?.call1((*tensor,))?;
        }
    }
    Ok(())
}

/// Counts up the versions of what a call writes to, as far as it is tensors of torch.
#[pyfunction]
#[pyo3(name = "_count_versions")]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 makes lists of its own")]
pub(crate) fn count_versions(tensors: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
    tensors.iter().try_for_each(count_version)
}

/// Counts up the version of a tensor of torch that a call has written to, so that autograd notices where a backward pass
/// needs what was there before.
#[inline]
pub(crate) fn count_version(tensor: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = tensor.py();
    let kind = tensor.get_type();
    match torch(py) {
        Some(torch) if kind.is(&torch.tensor) || kind.is_subclass(torch.tensor.bind(py))? => {
            torch.count_version(tensor)
        }
        _ => Ok(()),
    }
}
