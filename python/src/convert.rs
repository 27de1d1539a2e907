//! Names as Python programs write them: element types, operations, algorithms, devices.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyString;
use symmpool_allocator::short;
use symmpool_collectives::{AllReduceAlgorithm, AllToAllAlgorithm, DType, StandardCollective};

use crate::errors::{OrRaise, invalid};

/// Where a pool's memory is, as tensors name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryDevice {
    Cpu,
    /// The ordinal among the devices that the process sees.
    Cuda(u32),
}

impl MemoryDevice {
    pub(crate) fn name(self) -> String {
        match self {
            Self::Cpu => "cpu".into(),
            Self::Cuda(ordinal) => format!("cuda:{ordinal}"),
        }
    }
}

/// Name that torch and numpy both have for an element type.
pub(crate) fn long_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float32",
        DType::F64 => "float64",
        DType::F16 => "float16",
        DType::Bf16 => "bfloat16",
        DType::I32 => "int32",
        DType::I64 => "int64",
        DType::U8 => "uint8",
        DType::I8 => "int8",
        DType::F8E4m3 => "float8_e4m3fn",
        DType::F8E5m2 => "float8_e5m2",
        DType::Bool => "bool",
        DType::I16 => "int16",
        DType::U16 => "uint16",
        DType::U32 => "uint32",
        DType::U64 => "uint64",
        DType::F8E4m3Fnuz => "float8_e4m3fnuz",
        DType::F8E5m2Fnuz => "float8_e5m2fnuz",
        DType::F8E8m0 => "float8_e8m0fnu",
        DType::F4E2m1x2 => "float4_e2m1fn_x2",
        // Complex numbers are called alike, and what is nameless has a name of ours alone.
        same => same.name(),
    }
}

/// The element types that have a name.
pub(crate) fn named() -> impl Iterator<Item = DType> {
    DType::all().filter(|dtype| DType::of_bytes(dtype.size()) != Some(*dtype))
}

/// The element type of a name: ours, or torch's and numpy's.
pub(crate) fn dtype_from_name(name: &str) -> Option<DType> {
    let name = match name {
        "half" => "float16",
        "float" => "float32",
        "double" => "float64",
        name => name,
    };
    named().find(|dtype| dtype.name() == name || long_name(*dtype) == name)
}

/// The element type that a name, a `torch.dtype` or something that numpy takes for a type means.
pub(crate) fn dtype(object: &Bound<'_, PyAny>) -> PyResult<DType> {
    let py = object.py();
    let text = if let Ok(text) = object.cast::<PyString>() {
        text.to_cow()?.into_owned()
    } else {
        // numpy.dtype has a name, numpy.float32 is a class; a torch.dtype reads "torch.float32".
        let name = match object.getattr_opt(intern!(py, "name"))? {
            Some(name) => Some(name),
            None => object.getattr_opt(intern!(py, "__name__"))?,
        };
        let text = name.map_or_else(|| object.str(), |name| name.str())?;
        text.to_cow()?.into_owned()
    };
    let known = dtype_from_name(text.strip_prefix("torch.").unwrap_or(&text));
    // Python's own float is 64 bits to numpy and 32 bits to torch.
    let known = known.filter(|_| object.is_instance_of::<PyString>() || text != "float");
    known.ok_or_else(|| {
        let names = named().map(long_name).collect::<Vec<_>>().join(", ");
        invalid(py, format!("dtype: {:?} is none of {names}", short(&text)))
    })
}

/// The element types that reductions take, for messages.
pub(crate) fn reduced_names() -> String {
    DType::REDUCED.map(long_name).join(", ")
}

/// The names of all-reduce algorithms.
pub(crate) fn algorithm_names() -> Vec<&'static str> {
    AllReduceAlgorithm::ALL.into_iter().map(AllReduceAlgorithm::name).collect()
}

/// The names of ways of all-to-alls.
pub(crate) fn all_to_all_algorithm_names() -> Vec<&'static str> {
    AllToAllAlgorithm::ALL.into_iter().map(AllToAllAlgorithm::name).collect()
}

/// The way of all-to-alls of a name.
pub(crate) fn all_to_all_algorithm(py: Python<'_>, name: &str) -> PyResult<AllToAllAlgorithm> {
    let algorithm = AllToAllAlgorithm::named(name).ok_or_else(|| {
        let names = all_to_all_algorithm_names().join(", ");
        invalid(py, format!("all_to_all: {:?} is none of {names}", short(name)))
    })?;
    Ok(algorithm)
}

/// The algorithm of a name.
pub(crate) fn algorithm(py: Python<'_>, name: &str) -> PyResult<AllReduceAlgorithm> {
    let algorithm = AllReduceAlgorithm::named(name).ok_or_else(|| {
        invalid(
            py,
            format!("algorithm: {:?} is none of {}", short(name), algorithm_names().join(", ")),
        )
    })?;
    Ok(algorithm)
}

/// The collective of a name.
pub(crate) fn standard(py: Python<'_>, name: &str) -> PyResult<StandardCollective> {
    StandardCollective::parse(name).or_raise(py)
}

/// The names of what must be windows, or is one.
pub(crate) fn window_names(input: bool, output: bool) -> Vec<&'static str> {
    let both = [(input, "input"), (output, "output")];
    both.into_iter().filter(|(is, _)| *is).map(|(_, name)| name).collect()
}
