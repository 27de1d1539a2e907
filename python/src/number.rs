//! Numbers that callers give: counts, ranks, addresses, seconds.

use std::fmt::Display;
use std::time::Duration;

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;

use crate::errors::{invalid, seconds};
use crate::ndarray;
use crate::reading::Refusal;

/// A number as an argument. Extracting one never fails: whoever knows the argument's name refuses what
/// is none, and reports that to the other ranks where they wait.
pub(crate) struct Number<T>(Result<T, WrongNumber>);

enum WrongNumber {
    /// A number, as Python writes it, that the type does not have.
    Range(String),
    /// The text says why the object is no number of the expected kind.
    Kind(String),
}

impl<T> Number<T> {
    pub(crate) const fn of(number: T) -> Self {
        Self(Ok(number))
    }
}

impl<T: PartialEq> Number<T> {
    /// Whether it is this number.
    pub(crate) fn is(&self, number: &T) -> bool {
        self.0.as_ref().is_ok_and(|found| found == number)
    }
}

impl<'a, 'py, T: FromPyObject<'a, 'py>> FromPyObject<'a, 'py> for Number<T> {
    type Error = PyErr;

    #[inline]
    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(object.extract::<T>().map_err(|error| wrong(object, &error.into()))))
    }
}

#[cold]
fn wrong(object: Borrowed<'_, '_, PyAny>, error: &PyErr) -> WrongNumber {
    let py = object.py();
    if error.is_instance_of::<PyOverflowError>(py) {
        // Python does not write numbers of thousands of digits.
        let text = object.str().map_or_else(|_| String::new(), |text| text.to_string());
        WrongNumber::Range(if (1..40).contains(&text.len()) {
            text
        } else {
            "a huge number".into()
        })
    } else {
        WrongNumber::Kind(error.value(py).to_string())
    }
}

/// Types of counts, ranks and addresses.
pub(crate) trait Whole: Display {
    const MAX_VALUE: Self;
}

impl Whole for u32 {
    const MAX_VALUE: Self = Self::MAX;
}

impl Whole for u64 {
    const MAX_VALUE: Self = Self::MAX;
}

impl Whole for usize {
    const MAX_VALUE: Self = Self::MAX;
}

impl<T: Whole> Number<T> {
    /// The number of the argument `name`.
    #[inline]
    pub(crate) fn or_refuse(self, name: &str) -> Result<T, Refusal> {
        self.0.map_err(|wrong| match wrong {
            WrongNumber::Range(text) => {
                Refusal::Invalid(format!("{name}: {text} is no number from 0 to {}", T::MAX_VALUE))
            }
            WrongNumber::Kind(why) => {
                Refusal::Raised(PyTypeError::new_err(format!("{name}: {why}")))
            }
        })
    }

    #[inline]
    pub(crate) fn or_raise(self, py: Python<'_>, name: &str) -> PyResult<T> {
        self.or_refuse(name).map_err(|refusal| refusal.raise(py))
    }
}

impl Number<f64> {
    /// The time of the argument `name`.
    pub(crate) fn seconds(self, py: Python<'_>, name: &str) -> PyResult<Duration> {
        match self.0 {
            Ok(value) => seconds(py, name, value),
            Err(WrongNumber::Range(text)) => {
                Err(invalid(py, format!("{name}={text}: too long a time")))
            }
            Err(WrongNumber::Kind(why)) => Err(PyTypeError::new_err(format!("{name}: {why}"))),
        }
    }
}

/// An address as an argument. A tensor of one element passes for a number in Python, and is no address.
pub(crate) struct Address(Number<u64>);

impl<'a, 'py> FromPyObject<'a, 'py> for Address {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let array =
            ndarray::kind(py).map_or(Ok(false), |kind| object.is_instance(kind.bind(py)))?;
        if array || object.hasattr(intern!(py, "data_ptr"))? {
            let kind = object.get_type();
            let why = format!("a number is needed, not {kind}; a tensor's data_ptr() is one");
            return Ok(Self(Number(Err(WrongNumber::Kind(why)))));
        }
        Ok(Self(object.extract()?))
    }
}

impl Address {
    pub(crate) fn or_raise(self, py: Python<'_>) -> PyResult<u64> {
        self.0.or_raise(py, "address")
    }
}
