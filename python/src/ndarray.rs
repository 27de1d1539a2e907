//! Arrays of numpy: where they lie, and what their elements are.

#![allow(unsafe_code)] // reads numpy's C structure of an array

use std::ffi::{c_int, c_void};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyType};
use symmpool_collectives::DType;

use crate::convert::{MemoryDevice, dtype_from_name};
use crate::reading::{Refusal, Tensor, elsewhere, imported, not_contiguous, wrong_size};

/// numpy's array type, if the program has imported numpy.
pub(crate) fn kind(py: Python<'_>) -> Option<&'static Py<PyType>> {
    static NDARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    if let Some(ndarray) = NDARRAY.get(py) {
        return Some(ndarray);
    }
    let found = imported(py, "numpy", "ndarray")?.getattr("ndarray").ok()?;
    let found = found.cast_into::<PyType>().ok()?.unbind();
    Some(NDARRAY.get_or_init(py, || found))
}

/// `PyArrayInterface` of numpy's array protocol, version 3.
#[repr(C)]
struct ArrayInterface {
    two: c_int,
    nd: c_int,
    typekind: u8,
    itemsize: c_int,
    flags: c_int,
    shape: *const isize,
    strides: *const isize,
    data: *mut c_void,
    descr: *mut c_void,
}

const C_CONTIGUOUS: c_int = 0x1;
const ALIGNED: c_int = 0x100;
const NATIVE: c_int = 0x200;
const WRITEABLE: c_int = 0x400;

/// Where an array lies; as [`tensor::read`](crate::tensor::read).
pub(crate) fn read(
    name: &'static str,
    array: &Bound<'_, PyAny>,
    device: MemoryDevice,
    write: bool,
) -> Result<Tensor, Refusal> {
    let py = array.py();
    if device != MemoryDevice::Cpu {
        return Err(elsewhere(name, "cpu", device));
    }
    let capsule = array.getattr(intern!(py, "__array_struct__"))?;
    let capsule = capsule.cast::<PyCapsule>().map_err(PyErr::from)?;
    let pointer = capsule.pointer_checked(None)?.cast::<ArrayInterface>();
    // SAFETY: numpy's own array type makes this capsule, of this structure, which it keeps until
    // the capsule is gone.
    let found = unsafe { pointer.as_ref() };
    if found.two != 2 || found.nd < 0 {
        return Err(Refusal::Invalid(format!("{name}: an array interface of an unknown version")));
    }
    if found.flags == 0 && found.typekind == b'V' {
        // numpy describes the fields of records, but not so that another library could read them.
        return Err(Refusal::Invalid(format!(
            "{name}: numpy does not say how records lie; pass array.view(\"V{}\")",
            found.itemsize
        )));
    }
    if found.flags & NATIVE == 0 {
        return Err(Refusal::Invalid(format!("{name}: its elements are not in native byte order")));
    }
    if found.flags & (C_CONTIGUOUS | ALIGNED) != C_CONTIGUOUS | ALIGNED {
        return Err(not_contiguous(name));
    }
    if write && found.flags & WRITEABLE == 0 {
        return Err(Refusal::Invalid(format!("{name}: the array is read-only")));
    }
    let dtype = match (found.typekind, found.itemsize) {
        (b'f', 4) => Some(DType::F32),
        (b'f', 8) => Some(DType::F64),
        (b'f', 2) => Some(DType::F16),
        (b'i', 4) => Some(DType::I32),
        (b'i', 8) => Some(DType::I64),
        (b'i', 1) => Some(DType::I8),
        (b'u', 1) => Some(DType::U8),
        (b'b', 1) => Some(DType::Bool),
        (b'i', 2) => Some(DType::I16),
        (b'u', 2) => Some(DType::U16),
        (b'u', 4) => Some(DType::U32),
        (b'u', 8) => Some(DType::U64),
        (b'c', 8) => Some(DType::Complex64),
        (b'c', 16) => Some(DType::Complex128),
        _ => None,
    };
    let dtype = match dtype {
        Some(dtype) => dtype,
        None => other_element(name, array, found.itemsize as usize)?,
    };
    let mut count = 1_usize;
    for at in 0..found.nd as usize {
        // SAFETY: the shape has `nd` lengths.
        let length = unsafe { found.shape.add(at) };
        // SAFETY: one of the `nd` lengths; numpy's lengths are not negative, and their product fits an address.
        count *= unsafe { *length } as usize;
    }
    Ok(Tensor { address: found.data as usize, count, dtype })
}

/// Elements that are no numbers of numpy's own: of ml_dtypes, or dates, text and records.
fn other_element(name: &str, array: &Bound<'_, PyAny>, size: usize) -> Result<DType, Refusal> {
    let py = array.py();
    let dtype = array.getattr(intern!(py, "dtype"))?;
    let found: String = dtype.getattr(intern!(py, "name"))?.extract()?;
    if let Some(known) = dtype_from_name(&found).filter(|known| known.size() == size) {
        return Ok(known);
    }
    if dtype.getattr(intern!(py, "hasobject"))?.is_truthy()? {
        return Err(Refusal::Invalid(format!(
            "{name}: elements of {found} refer to objects of this process"
        )));
    }
    DType::of_bytes(size).ok_or_else(|| wrong_size(name, &found, size))
}
