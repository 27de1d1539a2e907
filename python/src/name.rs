//! Names that callers give.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::reading::Refusal;

/// A name as an argument. Extracting one never fails: whoever knows the argument refuses what is none, and reports that to
/// the other ranks, which wait.
pub(crate) struct Name<'a>(PyResult<&'a str>);

impl<'a, 'py> FromPyObject<'a, 'py> for Name<'a> {
    type Error = PyErr;

    #[inline]
    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(object.extract()))
    }
}

impl<'a> Name<'a> {
    /// The name that the argument `argument` is.
    #[inline]
    pub(crate) fn or_refuse(self, argument: &str) -> Result<&'a str, Refusal> {
        self.0.map_err(|error| {
            Python::attach(|py| {
                let why = format!("{argument}: {}", error.value(py));
                match error.is_instance_of::<PyTypeError>(py) {
                    true => Refusal::Raised(PyTypeError::new_err(why)),
                    // Text that has no form in UTF-8.
                    false => Refusal::Invalid(why),
                }
            })
        })
    }
}
