//! Where tensors lie: of torch, of numpy, and our own blocks. On the path of every call, so an
//! argument costs a few attribute reads.
//!
//! Neither package is imported here: a caller that passes a tensor of one has done so.

#![allow(unsafe_code)] // reads a tensor's shape where torch says it is

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use symmpool_collectives::DType;

use crate::block::Block;
use crate::convert::{MemoryDevice, reduced_names};
use crate::dlpack;
use crate::exchange::TensorExchange;
use crate::ndarray;
use crate::reading::{Refusal, Tensor, elsewhere, not_contiguous, wrong_size};
use crate::torch::{Torch, torch};

/// DLPack's code of complex numbers.
const COMPLEX: u8 = 5;

/// Where processes have most of their memory: from here on. A tensor whose storage was freed lies as far above 0 as it lay
/// above the beginning of its storage, so what lies below is looked at more closely.
const USUAL_MEMORY: usize = 1 << 40;

/// Where a tensor on `device` lies. `name` is the argument's, for messages; `write` asks for memory
/// that may be written to.
#[inline]
pub(crate) fn read(
    name: &'static str,
    object: &Bound<'_, PyAny>,
    device: MemoryDevice,
    write: bool,
) -> Result<Tensor, Refusal> {
    let py = object.py();
    let kind = object.get_type();
    if let Some(torch) = torch(py)
        && (kind.is(&torch.tensor) || kind.is_subclass(torch.tensor.bind(py))?)
    {
        let plain = kind.is(&torch.tensor)
            || torch.parameter.as_ref().is_some_and(|parameter| kind.is(parameter));
        if plain
            && let Some(exchange) = &torch.exchange
            && let Some(found) = of_exchange(object, exchange, device)
        {
            return Ok(found);
        }
        return of_torch(name, object, torch, device);
    }
    if let Ok(block) = object.cast::<Block>() {
        return of_block(name, block.get(), device);
    }
    if let Some(array) = ndarray::kind(py)
        && kind.is_subclass(array.bind(py))?
    {
        return ndarray::read(name, object, device, write);
    }
    let message =
        format!("{name}: a torch.Tensor, numpy.ndarray or symmpool.Block is needed, not {kind}");
    Err(Refusal::Raised(PyTypeError::new_err(message)))
}

/// A tensor that can be taken as it is; `None` where its attributes must be asked, if only for what is wrong
/// with it.
#[inline]
fn of_exchange(
    object: &Bound<'_, PyAny>,
    exchange: &TensorExchange,
    device: MemoryDevice,
) -> Option<Tensor> {
    let found = exchange.read(object)?;
    let here = match device {
        // The other is host memory that CUDA has pinned.
        MemoryDevice::Cpu => matches!(found.device.kind, 1 | 3),
        MemoryDevice::Cuda(ordinal) => found.device.kind == 2 && found.device.id == ordinal as i32,
    };
    // SAFETY: torch gave these pointers just now, and the tensor is held by the caller.
    let count = unsafe { found.contiguous_count() }?;
    let address = (found.data as usize).checked_add(usize::try_from(found.byte_offset).ok()?)?;
    let dtype = dlpack::element(&found.dtype)?;
    if !here || address == 0 || count == 0 || found.dtype.code == COMPLEX {
        return None;
    }
    if address < USUAL_MEMORY && !is_held(object).ok()? {
        return None;
    }
    // DLPack does not say whether elements are to be negated when they are read, nor whether
    // complex numbers are to be conjugated.
    (!is_negative(object).ok()?).then_some(Tensor { address, count, dtype })
}

/// Whether a tensor's storage has memory.
#[cold]
fn is_held(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let storage = tensor.call_method0(intern!(tensor.py(), "untyped_storage"))?;
    storage.call_method0(intern!(tensor.py(), "data_ptr"))?.is_truthy()
}

fn is_negative(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.call_method0(intern!(tensor.py(), "is_neg"))?.is_truthy()
}

/// The name of torch's method that brings a tensor's memory up to what it shows, where they differ.
fn is_lazy(tensor: &Bound<'_, PyAny>) -> PyResult<Option<&'static str>> {
    let py = tensor.py();
    if is_negative(tensor)? {
        return Ok(Some("resolve_neg"));
    }
    let conjugate = tensor.call_method0(intern!(py, "is_conj"))?.is_truthy()?;
    Ok(conjugate.then_some("resolve_conj"))
}

#[inline]
fn of_torch(
    name: &'static str,
    tensor: &Bound<'_, PyAny>,
    torch: &Torch,
    device: MemoryDevice,
) -> Result<Tensor, Refusal> {
    let py = tensor.py();
    let here = match device {
        MemoryDevice::Cpu => tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()?,
        // -1 for a tensor of the CPU.
        MemoryDevice::Cuda(ordinal) => {
            tensor.call_method0(intern!(py, "get_device"))?.extract::<i64>()? == i64::from(ordinal)
        }
    };
    if !here {
        return Err(elsewhere(
            name,
            &tensor.getattr(intern!(py, "device"))?.str()?.to_cow()?,
            device,
        ));
    }
    in_rows(name, tensor, torch)?;
    let dtype = tensor.getattr(intern!(py, "dtype"))?;
    let dtype = match torch.dtypes.iter().find(|(known, _)| dtype.is(known)) {
        Some((_, dtype)) => *dtype,
        None => nameless(name, tensor, &dtype)?,
    };
    if let Some(resolve) = is_lazy(tensor)? {
        return Err(Refusal::Invalid(format!(
            "{name}: its memory is not what it shows; pass tensor.{resolve}()"
        )));
    }
    if !tensor.call_method0(intern!(py, "is_contiguous"))?.is_truthy()? {
        return Err(not_contiguous(name));
    }
    let count: usize = tensor.call_method0(intern!(py, "numel"))?.extract()?;
    let Some(storage) = in_storage(name, tensor, count.saturating_mul(dtype.size()))? else {
        return Err(no_memory(name, tensor));
    };
    // torch gives an empty tensor no address, but all ranks must name the same kind of memory.
    let holder = if count == 0 { &storage } else { tensor };
    let address: usize = holder.call_method0(intern!(py, "data_ptr"))?.extract()?;
    Ok(Tensor { address, count, dtype })
}

/// Refuses a tensor of torch that has no memory of its own: a fake one, one without strides, one whose storage was freed.
/// Returns whether its memory holds what it shows; else it is lazily negated or conjugated. Its elements may lie anywhere.
#[pyfunction]
#[pyo3(name = "_shows_memory")]
pub(crate) fn shows_memory(
    py: Python<'_>,
    name: &str,
    tensor: &Bound<'_, PyAny>,
) -> PyResult<bool> {
    let kind = tensor.get_type();
    let torch = torch(py).filter(|torch| {
        kind.is(&torch.tensor) || kind.is_subclass(torch.tensor.bind(py)).unwrap_or(false)
    });
    let Some(torch) = torch else {
        let message = format!("{name}: a torch.Tensor is needed, not {kind}");
        return Err(PyTypeError::new_err(message));
    };
    if kind.is(&torch.tensor)
        && let Some(exchange) = &torch.exchange
        && let Some(found) = exchange.read(tensor)
        && found.data as usize >= USUAL_MEMORY
        && found.dtype.code != COMPLEX
    {
        return Ok(!is_negative(tensor)?);
    }
    reaching_memory(name, tensor, torch).map_err(|why| why.raise(py))?;
    Ok(is_lazy(tensor)?.is_none())
}

/// Refuses a tensor of whose elements some lie in no memory.
fn reaching_memory(name: &str, tensor: &Bound<'_, PyAny>, torch: &Torch) -> Result<(), Refusal> {
    let py = tensor.py();
    in_rows(name, tensor, torch)?;
    let shape: Vec<usize> = tensor.getattr(intern!(py, "shape"))?.extract()?;
    let strides: Vec<usize> = tensor.call_method0(intern!(py, "stride"))?.extract()?;
    let last = shape.iter().zip(&strides).try_fold(0_usize, |last, (length, stride)| {
        last.checked_add(length.saturating_sub(1).checked_mul(*stride)?)
    });
    let size: usize = tensor.call_method0(intern!(py, "element_size"))?.extract()?;
    let elements =
        if shape.contains(&0) { Some(0) } else { last.and_then(|last| last.checked_add(1)) };
    let bytes = elements.and_then(|elements| elements.checked_mul(size)).unwrap_or(usize::MAX);
    match in_storage(name, tensor, bytes)? {
        Some(_) => Ok(()),
        None => Err(no_memory(name, tensor)),
    }
}

#[cold]
fn no_memory(name: &str, tensor: &Bound<'_, PyAny>) -> Refusal {
    let kind = tensor.get_type();
    Refusal::Invalid(format!(
        "{name}: {kind} has no memory of its own; pass the tensor that holds its elements"
    ))
}

/// The storage that a tensor's `bytes` lie in; `None` where it has none in memory. Refuses a tensor whose storage was
/// freed, or is too short for it.
fn in_storage<'py>(
    name: &str,
    tensor: &Bound<'py, PyAny>,
    bytes: usize,
) -> Result<Option<Bound<'py, PyAny>>, Refusal> {
    let py = tensor.py();
    let Ok(storage) = tensor.call_method0(intern!(py, "untyped_storage")) else { return Ok(None) };
    // A fake tensor names the device that it stands for, and its storage none.
    if storage.getattr(intern!(py, "device"))?.str()?.to_cow()?.starts_with("meta") {
        return Ok(None);
    }
    let held: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
    let start: usize = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
    let size: usize = tensor.call_method0(intern!(py, "element_size"))?.extract()?;
    if bytes > 0 && held < start.saturating_mul(size).saturating_add(bytes) {
        return Err(Refusal::Invalid(format!(
            "{name}: its elements begin at byte {} of a storage of {held} bytes, which does not hold them; it \
             was freed, as by untyped_storage().resize_(0), and must be filled first",
            start.saturating_mul(size)
        )));
    }
    if bytes > 0 && storage.call_method0(intern!(py, "data_ptr"))?.extract::<usize>()? == 0 {
        return Ok(None);
    }
    Ok(Some(storage))
}

/// Refuses a tensor whose elements do not lie row by row in a way that its strides do not show.
fn in_rows(name: &str, tensor: &Bound<'_, PyAny>, torch: &Torch) -> Result<(), Refusal> {
    let py = tensor.py();
    if tensor.getattr(intern!(py, "is_nested"))?.is_truthy()? {
        return Err(Refusal::Invalid(format!(
            "{name}: a nested tensor, of parts of different shapes; pass tensor.values()"
        )));
    }
    let layout = tensor.getattr(intern!(py, "layout"))?;
    if layout.is(&torch.strided) {
        return Ok(());
    }
    Err(Refusal::Invalid(format!(
        "{name}: a tensor of layout {layout}, whose elements do not lie row by row; pass tensor.to_dense()"
    )))
}

/// Elements of torch that have no name here.
#[cold]
fn nameless(
    name: &str,
    tensor: &Bound<'_, PyAny>,
    dtype: &Bound<'_, PyAny>,
) -> Result<DType, Refusal> {
    let found = dtype.str()?;
    if tensor.getattr("is_quantized")?.is_truthy()? {
        return Err(Refusal::Invalid(format!(
            "{name}: elements of {found} mean nothing without their scale; pass \
             tensor.int_repr(), and what the scale is"
        )));
    }
    let size = tensor.call_method0("element_size")?.extract()?;
    DType::of_bytes(size).ok_or_else(|| wrong_size(name, &found.to_string_lossy(), size))
}

fn of_block(name: &'static str, block: &Block, device: MemoryDevice) -> Result<Tensor, Refusal> {
    if block.device_of() != device {
        return Err(elsewhere(name, &block.device_of().name(), device));
    }
    Ok(Tensor { address: block.address(), count: block.count(), dtype: block.element() })
}

/// Name that a tensor's maker has for its element type: also where all that travels of the type is its size.
#[cold]
fn name_of_dtype(object: &Bound<'_, PyAny>) -> PyResult<String> {
    let name = object.getattr("dtype")?.str()?;
    let name = name.to_cow()?;
    Ok(name.strip_prefix("torch.").unwrap_or(&name).to_owned())
}

/// Refuses a tensor that no reduction takes.
#[inline]
pub(crate) fn is_reduced(
    name: &'static str,
    object: &Bound<'_, PyAny>,
    found: &Tensor,
) -> Result<(), Refusal> {
    if found.dtype.is_reduced() { Ok(()) } else { Err(only_moved(name, object)) }
}

#[cold]
fn only_moved(name: &str, object: &Bound<'_, PyAny>) -> Refusal {
    match name_of_dtype(object) {
        Ok(found) => Refusal::Invalid(format!(
            "{name}: elements of {found} are moved, not reduced; reductions take {}",
            reduced_names()
        )),
        Err(error) => Refusal::Raised(error),
    }
}
