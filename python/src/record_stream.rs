//! Memory that a stream uses, of whatever object: it is not reused before.

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyInt;

use crate::block::Block;
use crate::convert::MemoryDevice;
use crate::errors::OrRaise;
use crate::memory::UnorderedBlock;
use crate::stream;

/// Has the memory of a tensor, or of a Block, not be reused before `stream` has done what it is given until then. Memory of
/// a pool waits for it on this rank; for a tensor of torch's own memory this is `Tensor.record_stream`. On the CPU there is
/// nothing to wait for.
pub(crate) fn record_stream(tensor: &Bound<'_, PyAny>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = tensor.py();
    if let Ok(block) = tensor.cast::<Block>() {
        let block = block.get();
        let on = stream::resolve(py, block.device_of(), Some(stream))?;
        return match UnorderedBlock::around(block.address() as u64) {
            Some(memory) => py.detach(|| memory.record_use(on)).or_raise(py),
            None => Ok(()),
        };
    }
    let missing = "tensor: a torch.Tensor or a Block is needed";
    match tensor.getattr_opt(intern!(py, "is_cuda"))? {
        Some(is_cuda) if !is_cuda.extract::<bool>()? => {
            return stream::resolve(py, MemoryDevice::Cpu, Some(stream)).map(drop);
        }
        Some(_) => {
            let address = tensor.call_method0(intern!(py, "data_ptr"))?.extract::<u64>()?;
            if let Some(memory) = UnorderedBlock::around(address) {
                let on = stream::resolve(py, memory.device, Some(stream))?;
                return py.detach(|| memory.record_use(on)).or_raise(py);
            }
        }
        None if !tensor.hasattr(intern!(py, "record_stream"))? => {
            return Err(PyTypeError::new_err(missing));
        }
        None => {}
    }
    let of_torch = if stream.is_instance_of::<PyInt>() {
        let cuda = py.import("torch")?.getattr("cuda")?;
        cuda.call_method1("ExternalStream", (stream, tensor.getattr("device")?))?
    } else {
        stream.clone()
    };
    tensor.call_method1(intern!(py, "record_stream"), (of_torch,)).map(drop)
}
