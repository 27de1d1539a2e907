//! Questions of this package to torch: its types, and its current streams and devices.
//!
//! torch is not imported here: a caller that passes a tensor has done so.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};
use symmpool_collectives::DType;

use crate::convert::{self, MemoryDevice, long_name};
use crate::exchange::TensorExchange;
use crate::reading::imported;

/// Objects that are looked up in torch once.
pub(crate) struct Torch {
    pub(crate) tensor: Py<PyType>,
    dtype: Py<PyType>,
    /// torch has one object for each of its element types.
    pub(crate) dtypes: Vec<(Py<PyAny>, DType)>,
    /// The layout of tensors that lie row by row.
    pub(crate) strided: Py<PyAny>,
    /// The raw handle of a device's current stream, where this build of torch has CUDA.
    current_stream: Option<Py<PyAny>>,
    /// The type of parameters, which are plain tensors but for their type.
    pub(crate) parameter: Option<Py<PyAny>>,
    pub(crate) exchange: Option<TensorExchange>,
    /// Function that counts up the versions of tensors, and whether it takes several tensors, at half the time.
    increment_version: Option<(Py<PyAny>, bool)>,
}

impl Torch {
    fn look_up(torch: &Bound<'_, PyAny>) -> PyResult<Self> {
        let dtypes = convert::named()
            // A torch that lacks one has no tensors of it.
            .filter_map(|dtype| Some((torch.getattr(long_name(dtype)).ok()?.unbind(), dtype)))
            .collect();
        let current_stream = torch.getattr("_C")?.getattr_opt("_cuda_getCurrentRawStream")?;
        let tensor = torch.getattr("Tensor")?.cast_into::<PyType>()?;
        let parameter = torch.getattr("nn").and_then(|nn| nn.getattr("Parameter"));
        Ok(Self {
            exchange: TensorExchange::of_type(tensor.as_any()),
            parameter: parameter.ok().map(Bound::unbind),
            tensor: tensor.unbind(),
            strided: torch.getattr("strided")?.unbind(),
            dtype: torch.getattr("dtype")?.cast_into::<PyType>()?.unbind(),
            dtypes,
            increment_version: increment_version(torch),
            current_stream: current_stream.map(Bound::unbind),
        })
    }

    /// The raw handle of a device's current stream.
    #[inline]
    pub(crate) fn current_stream(&self, py: Python<'_>, ordinal: u32) -> PyResult<u64> {
        let known = self.exchange.and_then(|exchange| exchange.current_stream(py, ordinal));
        match (known, &self.current_stream) {
            (Some(stream), _) => Ok(stream),
            (None, Some(current)) => current.bind(py).call1((ordinal,))?.extract::<u64>(),
            (None, None) => Ok(0),
        }
    }

    /// Counts up a tensor's version.
    #[inline]
    pub(crate) fn count_version(&self, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = tensor.py();
        match &self.increment_version {
            Some((of_several, true)) => of_several.call1(py, ((tensor,),)).map(drop),
            Some((function, false)) => function.call1(py, (tensor,)).map(drop),
            None => Ok(()),
        }
    }

    pub(crate) fn is_dtype(&self, object: &Bound<'_, PyAny>) -> bool {
        object.get_type().is(&self.dtype)
    }
}

/// Finds the function that counts up versions in this torch.
fn increment_version(torch: &Bound<'_, PyAny>) -> Option<(Py<PyAny>, bool)> {
    let of_several = torch.getattr("_C").and_then(|inner| inner.getattr("_increment_version"));
    if let Ok(of_several) = of_several
        && of_several.call1((PyTuple::empty(torch.py()),)).is_ok()
    {
        return Some((of_several.unbind(), true));
    }
    let graph = torch.getattr("autograd").and_then(|autograd| autograd.getattr("graph")).ok()?;
    Some((graph.getattr("increment_version").ok()?.unbind(), false))
}

/// torch, if the program has imported it.
pub(crate) fn torch(py: Python<'_>) -> Option<&'static Torch> {
    static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
    if let Some(torch) = TORCH.get(py) {
        return Some(torch);
    }
    // The last name that torch's own initialisation gives itself, of those that are needed.
    let found = Torch::look_up(&imported(py, "torch", "get_default_dtype")?).ok()?;
    Some(TORCH.get_or_init(py, || found))
}

/// The device that a pool is asked for by name, where that is torch's to say: the current one, of a
/// torch that has initialised CUDA.
pub(crate) fn current_device(py: Python<'_>, name: Option<String>) -> PyResult<Option<String>> {
    if !matches!(name.as_deref(), None | Some("cuda")) {
        return Ok(name);
    }
    let Some(torch) = imported(py, "torch", "cuda") else { return Ok(name) };
    let cuda = torch.getattr("cuda")?;
    if !cuda.call_method0("is_initialized")?.is_truthy()? {
        return Ok(name);
    }
    Ok(Some(MemoryDevice::Cuda(cuda.call_method0("current_device")?.extract()?).name()))
}
