//! The result of reading an argument: where its elements lie, or why it is not taken.

use pyo3::intern;
use pyo3::prelude::*;
use symmpool_allocator::Error;
use symmpool_collectives::DType;

use crate::convert::MemoryDevice;
use crate::errors::exception;

/// A contiguous tensor: `count` elements from `address` on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor {
    pub(crate) address: usize,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
}

impl Tensor {
    #[inline]
    pub(crate) fn from(&self) -> *const u8 {
        self.address as *const u8
    }

    #[inline]
    pub(crate) fn to(&self) -> *mut u8 {
        self.address as *mut u8
    }
}

/// Why an argument is not taken.
pub(crate) enum Refusal {
    /// It makes no sense; the message names the argument.
    Invalid(String),
    /// It is nothing that could be read.
    Raised(PyErr),
}

impl Refusal {
    /// Returns the refusal as an error, for ranks that wait.
    pub(crate) fn to_error(&self) -> Error {
        match self {
            Self::Invalid(why) => Error::invalid_argument(why),
            // An error of ours has the library's name behind the name of its class.
            Self::Raised(error) => {
                Error::invalid_argument(error.to_string().replacen(": symmpool: ", ": ", 1))
            }
        }
    }

    #[cold]
    pub(crate) fn raise(self, py: Python<'_>) -> PyErr {
        match self {
            Self::Invalid(why) => exception(py, &Error::invalid_argument(why)),
            Self::Raised(error) => error,
        }
    }
}

impl From<PyErr> for Refusal {
    fn from(error: PyErr) -> Self {
        Self::Raised(error)
    }
}

#[cold]
pub(crate) fn elsewhere(name: &str, found: &str, device: MemoryDevice) -> Refusal {
    Refusal::Invalid(format!("{name}: on {found}, but the pool is on {}", device.name()))
}

#[cold]
pub(crate) fn wrong_size(name: &str, found: &str, size: usize) -> Refusal {
    Refusal::Invalid(format!(
        "{name}: elements of {found}, {size} bytes each, where those of 1, 2, 4, 8 and 16 travel; \
         pass a view of it as such"
    ))
}

#[cold]
pub(crate) fn not_contiguous(name: &str) -> Refusal {
    Refusal::Invalid(format!("{name}: not contiguous; pass tensor.contiguous(), or a copy"))
}

/// A module that the program has imported; `None` otherwise, or while that is under way.
pub(crate) fn imported<'py>(py: Python<'py>, name: &str, with: &str) -> Option<Bound<'py, PyAny>> {
    let modules = py.import(intern!(py, "sys")).ok()?.getattr(intern!(py, "modules")).ok()?;
    let module = modules.get_item(name).ok()?;
    module.hasattr(with).ok()?.then_some(module)
}
