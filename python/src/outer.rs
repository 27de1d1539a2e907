//! Outer engines that are objects of Python: what carries data between hosts for a communicator.

#![allow(unsafe_code)] // passes addresses on to whoever moves their bytes

use std::time::Duration;

use pyo3::exceptions::{PyException, PyKeyboardInterrupt, PyTimeoutError};
use pyo3::prelude::*;
use symmpool_allocator::{Error, Result, Stream, short};
use symmpool_collectives::{Outer, Outers, Ticket, Transfer};

use crate::errors::from_within;

/// How long it lasts until an outer engine is asked again whether its transfers have ended.
const ASK_AGAIN: Duration = Duration::from_millis(5);

/// An object with the methods `set_timeout`, `all_gather`, `all_to_all`, `broadcast`, `finish` and `abort`.
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
                if error.is_instance_of::<PyException>(py) {
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

    fn set_timeout(&mut self, limit: Duration) {
        // Without it, the outer engine keeps the timeout that it has.
        let seconds = limit.as_secs_f64();
        let _ = self
            .call("set_timeout", |object| object.call_method1("set_timeout", (seconds,)).map(drop));
    }

    unsafe fn begin(&mut self, transfer: Transfer<'_>, stream: &Stream) -> Result<Ticket> {
        let stream = stream.raw();
        let ticket = match transfer {
            Transfer::AllGather { output, input, bytes } => self.call("all_gather", |object| {
                object
                    .call_method1("all_gather", (output as usize, input as usize, bytes, stream))?
                    .extract()
            }),
            Transfer::AllToAll { output, input, send, receive } => {
                self.call("all_to_all", |object| {
                    let given = (output as usize, input as usize, send, receive, stream);
                    object.call_method1("all_to_all", given)?.extract()
                })
            }
            Transfer::Broadcast { data, bytes, root } => self.call("broadcast", |object| {
                object.call_method1("broadcast", (data as usize, bytes, root, stream))?.extract()
            }),
            _ => Err(Error::unsupported("a transfer that outer engines of Python do not have")),
        };
        ticket.map(Ticket)
    }

    fn finish(&mut self, ticket: Ticket, stream: &Stream) -> Result<()> {
        let given = (ticket.0, stream.raw());
        self.call("finish", |object| object.call_method1("finish", given).map(drop))
    }

    /// Asks until all transfers have ended, which their own timeouts bound: their memory is given to others then. Ctrl-C ends
    /// no transfer, so it is raised behind this.
    fn abort(&mut self) -> Result<()> {
        let mut interrupted = false;
        loop {
            let asked = Python::try_attach(|py| {
                let ended = self.object.bind(py).call_method0("abort").and_then(|is| is.extract());
                ended.unwrap_or_else(|error: PyErr| {
                    interrupted |= error.is_instance_of::<PyKeyboardInterrupt>(py);
                    false
                })
            });
            match asked {
                Some(false) => std::thread::sleep(ASK_AGAIN),
                Some(true) => break,
                // The interpreter has closed the connections when it ended.
                None => return Ok(()),
            }
        }
        if interrupted {
            Python::try_attach(|py| {
                let again = py.import("_thread").and_then(|it| it.call_method0("interrupt_main"));
                again.map(drop).unwrap_or_else(|error| error.write_unraisable(py, None));
            });
        }
        Ok(())
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
