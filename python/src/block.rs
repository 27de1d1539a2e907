//! The class `Block`: memory of a pool in Python's hands, with a shape and a type.

use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use symmpool_allocator::{Error, Stream};
use symmpool_collectives::DType;

use crate::convert::{MemoryDevice, long_name};
use crate::dlpack::{self, Description};
use crate::errors::{OrRaise, exception};
use crate::memory::UnorderedBlock;
use crate::number::Number;
use crate::stream;

/// Symmetric memory of a pool with a shape and an element type: at the same offset on every rank.
///
/// Made by `Pool.block`. Collectives take it as it is; `torch.from_dlpack`, `numpy.from_dlpack`
/// and other consumers of DLPack make tensors of it without a copy. The memory is uninitialised,
/// lives as long as the Block or a tensor made of it does, and is then freed without order: see
/// `Pool.empty`.
#[pyclass(frozen, module = "symmpool")]
pub(crate) struct Block {
    memory: Arc<UnorderedBlock>,
    /// Where in the memory it begins, in bytes.
    begin: usize,
    shape: Vec<i64>,
    dtype: DType,
}

impl Block {
    pub(crate) fn new(memory: Arc<UnorderedBlock>, shape: Vec<i64>, dtype: DType) -> Self {
        Self::part(memory, 0, shape, dtype)
    }

    /// A part of what is longer.
    pub(crate) fn part(
        memory: Arc<UnorderedBlock>,
        begin: usize,
        shape: Vec<i64>,
        dtype: DType,
    ) -> Self {
        Self { memory, begin, shape, dtype }
    }

    pub(crate) fn address(&self) -> usize {
        self.memory.block().address() as usize + self.begin
    }

    pub(crate) fn count(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }

    pub(crate) fn element(&self) -> DType {
        self.dtype
    }

    pub(crate) fn device_of(&self) -> MemoryDevice {
        self.memory.device
    }
}

#[pymethods]
impl Block {
    /// The shape, a tuple.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// The element type's name, as torch and numpy have it: "float32", "bfloat16", ...
    #[getter]
    fn dtype(&self) -> &'static str {
        long_name(self.dtype)
    }

    /// Where the memory is: "cpu" or "cuda:N".
    #[getter]
    fn device(&self) -> String {
        self.memory.device.name()
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.count() * self.dtype.size()
    }

    /// The first byte's address in this process. On CUDA only the device can follow it.
    #[getter]
    fn data_ptr(&self) -> usize {
        self.address()
    }

    /// Offset in bytes from the start of a rank's slot: the same on every rank.
    #[getter]
    fn offset(&self) -> u64 {
        self.memory.block().offset() + self.begin as u64
    }

    /// Counter of the allocation: the same on every rank.
    #[getter]
    fn counter(&self) -> u64 {
        self.memory.block().counter()
    }

    /// Where `rank`'s copy of the first byte lies in this process. It can be followed once the
    /// memory is a window (see `Pool.is_window`). Raises InvalidArgumentError for a rank that the
    /// pool does not have.
    fn peer_ptr(&self, py: Python<'_>, rank: Number<u32>) -> PyResult<usize> {
        let rank = rank.or_raise(py, "rank")?;
        Ok(self.memory.block().peer_ptr(rank).or_raise(py)? as usize + self.begin)
    }

    /// The memory as a numpy.ndarray, without a copy; of `dtype`, which has the same size, where
    /// that is given. Raises UnsupportedError on CUDA.
    #[pyo3(signature = (dtype = None))]
    pub(crate) fn numpy<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let numpy = py.import("numpy")?;
        let array = numpy.call_method1("asarray", (slf,))?;
        let dtype = match dtype {
            Some(dtype) => dtype.clone(),
            None => match slf.get().dtype {
                foreign @ (DType::Bf16
                | DType::F8E4m3
                | DType::F8E5m2
                | DType::F8E4m3Fnuz
                | DType::F8E5m2Fnuz
                | DType::F8E8m0) => py.import("ml_dtypes")?.getattr(long_name(foreign))?,
                _ => return Ok(array),
            },
        };
        array.call_method1("view", (dtype,))
    }

    /// numpy's array interface, on the CPU. bfloat16, the floats of 8 and 4 bits and complex32 show
    /// as bytes without a meaning: numpy knows no such types by itself.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.memory.device != MemoryDevice::Cpu {
            let why = format!("numpy cannot reach memory of {}", self.memory.device.name());
            return Err(exception(py, &Error::unsupported(why)));
        }
        let kind = match self.dtype {
            DType::F32 | DType::F64 | DType::F16 => "<f",
            DType::I16 | DType::I32 | DType::I64 => "<i",
            DType::U16 | DType::U32 | DType::U64 => "<u",
            DType::Complex64 | DType::Complex128 => "<c",
            DType::U8 => "|u",
            DType::I8 => "|i",
            DType::Bool => "|b",
            _ => "|V",
        };
        let dict = PyDict::new(py);
        dict.set_item("version", 3)?;
        dict.set_item("shape", self.shape(py)?)?;
        dict.set_item("typestr", format!("{kind}{}", self.dtype.size()))?;
        dict.set_item("data", (self.address(), false))?;
        Ok(dict)
    }

    /// DLPack: the memory's device as (type, number).
    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::device(self.memory.device)
    }

    /// DLPack: a capsule that keeps the memory alive. `stream` is the consumer's, on CUDA: it is
    /// made to wait for what the block's own stream was given so far. -1 says not to.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if copy == Some(true) || dl_device.is_some_and(|asked| asked != self.__dlpack_device__()) {
            return Err(PyBufferError::new_err(
                "symmetric memory is handed out where it lies, without a copy",
            ));
        }
        if self.memory.device != MemoryDevice::Cpu && stream != Some(-1) {
            // DLPack writes the default stream as 1.
            let consumer = match stream {
                None | Some(1) => Stream::DEFAULT,
                Some(raw) => stream::from_handle(raw as u64),
            };
            // The lane may be in a commit, which asks this interpreter for signals meanwhile.
            py.detach(|| self.memory.use_on(consumer)).or_raise(py)?;
        }
        let description = Description {
            address: self.address(),
            device: self.memory.device,
            dtype: self.dtype,
            shape: &self.shape,
        };
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        dlpack::capsule(py, description, versioned, self.memory.clone())
    }

    fn __repr__(&self) -> String {
        format!(
            "symmpool.Block(shape={:?}, dtype={:?}, device={:?}, offset={:#x})",
            self.shape,
            long_name(self.dtype),
            self.memory.device.name(),
            self.offset()
        )
    }
}
