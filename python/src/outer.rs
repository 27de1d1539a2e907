//! Outer engines that are objects of Python: what carries data between hosts for a communicator.

#![allow(unsafe_code)] // passes addresses on to whoever moves their bytes

use std::time::Duration;

use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;
use symmpool_allocator::{Error, Result, Stream, short};
use symmpool_collectives::{Outer, Outers, Ticket, Transfer};

use crate::errors::from_within;

/// An object with the methods `all_gather`, `all_to_all`, `broadcast`, `finish` and `abort`.
struct PythonOuter {
    object: Py<PyAny>,
    name: String,
    rank: u32,
    world: u32,
}

impl PythonOuter {
    fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self {
            name: object.getattr("name")?.extract()?,
            rank: object.getattr("rank")?.extract()?,
            world: object.getattr("world")?.extract()?,
            object: object.clone().unbind(),
        })
    }

    /// Calls the object. The interpreter's lock is taken here, below the communicator's, as threads of Python let go of
    /// theirs before they make a call.
    fn call<T>(
        &self,
        what: &str,
        call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>,
    ) -> Result<T> {
        let called = Python::try_attach(|py| {
            call(self.object.bind(py)).map_err(|error| {
                let text = error.to_string();
                if error.is_instance_of::<PyTimeoutError>(py) {
                    return Error::timeout(text, Duration::ZERO, Vec::new());
                }
                if error.is_instance_of::<pyo3::exceptions::PyException>(py) {
                    return Error::system(format!("{} {what}", self.name), short(&text));
                }
                from_within(py, error)
            })
        });
        called.unwrap_or_else(|| Err(Error::invalid_state("the interpreter has ended")))
    }
}

// SAFETY: the objects of `symmpool.communicators.outer` use the memory of a transfer until `finish` has returned for it, or
// `abort` has. A program's own objects are no part of the public interface.
unsafe impl Outer for PythonOuter {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn rank(&self) -> u32 {
        self.rank
    }

    fn world(&self) -> u32 {
        self.world
    }

    unsafe fn begin(&mut self, transfer: Transfer<'_>, _: &Stream) -> Result<Ticket> {
        let ticket = match transfer {
            Transfer::AllGather { output, input, bytes } => self.call("all_gather", |object| {
                object
                    .call_method1("all_gather", (output as usize, input as usize, bytes))?
                    .extract()
            }),
            Transfer::AllToAll { output, input, send, receive } => {
                self.call("all_to_all", |object| {
                    let given = (output as usize, input as usize, send, receive);
                    object.call_method1("all_to_all", given)?.extract()
                })
            }
            Transfer::Broadcast { data, bytes, root } => self.call("broadcast", |object| {
                object.call_method1("broadcast", (data as usize, bytes, root))?.extract()
            }),
            _ => Err(Error::unsupported("a transfer that outer engines of Python do not have")),
        };
        ticket.map(Ticket)
    }

    fn finish(&mut self, ticket: Ticket, _: &Stream) -> Result<()> {
        self.call("finish", |object| object.call_method1("finish", (ticket.0,)).map(drop))
    }

    fn abort(&mut self) {
        // A transfer that cannot be ended has a timeout.
        let _ = self.call("abort", |object| object.call_method0("abort").map(drop));
    }
}

/// The outer engines of an object with `rail`, which may be None, and `flat`.
pub(crate) fn outers_of(object: &Bound<'_, PyAny>) -> PyResult<Outers> {
    let boxed = |object: &Bound<'_, PyAny>| -> PyResult<Box<dyn Outer>> {
        Ok(Box::new(PythonOuter::new(object)?))
    };
    let rail = object.getattr("rail")?;
    Ok(Outers {
        rail: if rail.is_none() { None } else { Some(boxed(&rail)?) },
        flat: boxed(&object.getattr("flat")?)?,
    })
}
