//! Which line of a Python program makes a call, for messages about ranks that differ.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyString;
use symmpool_allocator::lane::{Origin, Site, at_site};

/// Does `work` without the interpreter's lock. Lane events in it are recorded with the line of
/// Python that made the call: the nearest frame that is not this package's.
pub(crate) fn detach<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    // Messages name no line where none can be found.
    let site = caller(py).unwrap_or(None);
    py.detach(|| at_site(site, work))
}

fn caller(py: Python<'_>) -> PyResult<Site> {
    static GET_FRAME: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let mut frame = GET_FRAME.import(py, "sys", "_getframe")?.call0()?;
    while !frame.is_none() {
        let module = frame.getattr(intern!(py, "f_globals"))?.get_item(intern!(py, "__name__"));
        let module = module.and_then(|name| Ok(name.cast_into::<PyString>()?));
        let own = module.is_ok_and(|name| {
            name.to_str().is_ok_and(|name| name.split('.').next() == Some("symmpool"))
        });
        if !own {
            let code = frame.getattr(intern!(py, "f_code"))?;
            let file = code.getattr(intern!(py, "co_filename"))?.cast_into::<PyString>()?;
            let number = frame.getattr(intern!(py, "f_lineno"))?.extract()?;
            return Ok(Some(Origin::line(file.to_str()?, number)));
        }
        frame = frame.getattr(intern!(py, "f_back"))?;
    }
    Ok(None)
}
