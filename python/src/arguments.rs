//! The arguments of a communicator's calls, read and checked. A rank that refuses them reports that
//! to the other ranks. `checks` has what each call asks of its arguments.

#![allow(unsafe_code)] // passes on an address that a tensor gave

use std::ops::Deref;
use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use symmpool_allocator::{Result, Stream};
use symmpool_collectives::{DType, ReduceOp, Request, StandardCollective};

use crate::convert::{MemoryDevice, long_name};
use crate::errors::{OrRaise, raised};
use crate::fork_guarded::ForkGuarded;
use crate::name::Name;
use crate::reading::{Refusal, Tensor};
use crate::written::count_version;
use crate::{stream, tensor};

pub(crate) type Argument<'a, 'py> = &'a Bound<'py, PyAny>;

/// How many rows a tensor has, and of how many elements.
pub(crate) fn rows_of(
    name: &'static str,
    object: Argument<'_, '_>,
) -> Result<(usize, usize), Refusal> {
    let shape: Vec<usize> = object.getattr(intern!(object.py(), "shape"))?.extract()?;
    let Some((length, rest)) = shape.split_first() else {
        return Err(Refusal::Invalid(format!("{name}: it has no dimension to be split")));
    };
    Ok((*length, rest.iter().product()))
}

/// A communicator as its calls see it, and those of what is made on it.
pub(crate) struct CommunicatorCalls {
    pub(crate) comm: ForkGuarded<Arc<symmpool_collectives::Communicator>>,
    pub(crate) context: RankContext,
}

impl Deref for CommunicatorCalls {
    type Target = RankContext;

    #[inline]
    fn deref(&self) -> &RankContext {
        &self.context
    }
}

/// Says that a device had no room for the memory of large calls. Whatever becomes of that, the call goes on, as it does on other
/// ranks.
#[cold]
fn warn_of_shortages(py: Python<'_>) {
    let held = py.import("symmpool.memory.held");
    if let Err(error) = held.and_then(|held| held.call_method0("warn_of_shortages")) {
        error.write_unraisable(py, None);
    }
}

/// Context that the arguments of a call must fit: the communicator's device, rank and world.
#[derive(Clone, Copy)]
pub(crate) struct RankContext {
    pub(crate) device: MemoryDevice,
    pub(crate) rank: u32,
    pub(crate) world: u32,
}

impl CommunicatorCalls {
    /// A barrier, which adds its waits to a tensor if there is one.
    pub(crate) fn barrier(
        &self,
        py: Python<'_>,
        stream: Option<Argument<'_, '_>>,
        waits: Option<Argument<'_, '_>>,
    ) -> PyResult<()> {
        let stream = self.stream(py, stream)?;
        let Some(waits) = waits else {
            return self.run(py, || self.comm.barrier(&stream));
        };
        let waits = self.or_decline(py, stream, self.waits(waits))?;
        // SAFETY: the tensor has an element for each rank, contiguous, on the pool's device, and the caller's frame keeps
        // it alive for the length of the call; how long work on a stream needs it, and who else may touch it, is the
        // documented contract of `Communicator`.
        self.run(py, || unsafe { self.comm.measured_barrier_at(waits.to().cast(), &stream) })
    }

    pub(crate) fn core(&self) -> Arc<symmpool_collectives::Communicator> {
        Arc::clone(&self.comm)
    }

    /// Why all calls fail, if they do. In a forked child that is known without the lock, which a thread of the parent
    /// may hold.
    pub(crate) fn failure(&self) -> Option<symmpool_allocator::Error> {
        self.comm.check("a communicator").err().or_else(|| self.comm.failure())
    }

    /// A call, without the interpreter's lock: it may wait for other ranks.
    #[inline]
    pub(crate) fn run<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce() -> Result<T> + Send,
    ) -> PyResult<T> {
        self.comm.check("a communicator").or_raise(py)?;
        let called = py.detach(call);
        if self.comm.take_shortage() {
            warn_of_shortages(py);
        }
        called.or_raise(py)
    }

    /// Makes a call of a collective on tensors, with the algorithm of a name or the one that is chosen for it: for
    /// parts of so many elements; an operation and a root go with the collective.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Request::at`].
    #[allow(unsafe_code)] // passes on the caller's promises
    #[inline]
    pub(crate) unsafe fn make(
        &self,
        py: Python<'_>,
        (collective, algorithm, op, root): (StandardCollective, Option<Name<'_>>, ReduceOp, u32),
        (output, input): (Tensor, Tensor),
        count: usize,
        stream: Stream,
    ) -> PyResult<()> {
        let algorithm = algorithm.map(|name| name.or_refuse("algorithm")).transpose();
        let algorithm = self.or_decline(py, stream, algorithm)?;
        self.run(py, || {
            let (to, from, dtype) = (output.to(), input.from(), input.dtype);
            // SAFETY: the caller promised that input and output have these lengths, and how long they are there and
            // who may touch them.
            unsafe {
                self.comm.call(
                    &Request::at(collective, to, from, count, dtype)
                        .op(op)
                        .root(root)
                        .algorithm(algorithm),
                    &stream,
                )
            }
        })
    }

    /// An all-reduce on the current stream, where it takes these arguments. Returns false otherwise, without a word to the
    /// other ranks.
    #[inline]
    pub(crate) fn try_all_reduce(
        &self,
        py: Python<'_>,
        tensor: Argument<'_, '_>,
        op: Option<Argument<'_, '_>>,
        out: Option<Argument<'_, '_>>,
    ) -> PyResult<bool> {
        let stream = self.stream(py, None)?;
        let Ok((input, output, op)) = self.of_all_reduce(tensor, op, out) else {
            return Ok(false);
        };
        let Tensor { count, dtype, .. } = input;
        // SAFETY: `of_all_reduce` has found contiguous tensors of `count` elements on the pool's device, which the
        // caller's frame keeps alive for the length of the call; the documented contract of the class says how long a
        // stream needs them.
        self.run(py, || unsafe {
            self.comm.all_reduce_at(output.to(), input.from(), count, dtype, op, &stream)
        })?;
        count_version(out.unwrap_or(tensor))?;
        Ok(true)
    }

    /// The stream of a call. One that is none is a refusal like any other.
    #[inline]
    pub(crate) fn stream(
        &self,
        py: Python<'_>,
        stream: Option<Argument<'_, '_>>,
    ) -> PyResult<Stream> {
        // First, as a refusal of arguments is reported to the other ranks, which a forked child must not do.
        self.comm.check("a communicator").or_raise(py)?;
        let found = stream::resolve(py, self.device, stream);
        self.or_decline(py, Stream::DEFAULT, found.map_err(Refusal::Raised))
    }

    /// The stream of what is no call: whoever names a wrong one is alone with that.
    pub(crate) fn own_stream(
        &self,
        py: Python<'_>,
        stream: Option<Argument<'_, '_>>,
    ) -> PyResult<Stream> {
        self.comm.check("a communicator").or_raise(py)?;
        stream::resolve(py, self.device, stream)
    }

    /// The arguments; or an exception, once it was reported to the other ranks that this one
    /// refuses the call.
    #[inline]
    pub(crate) fn or_decline<T>(
        &self,
        py: Python<'_>,
        stream: Stream,
        arguments: Result<T, Refusal>,
    ) -> PyResult<T> {
        arguments.map_err(|refusal| self.decline(py, stream, refusal))
    }

    #[cold]
    pub(crate) fn decline(&self, py: Python<'_>, stream: Stream, refusal: Refusal) -> PyErr {
        let why = refusal.to_error();
        let error = py.detach(|| self.comm.decline(why, &stream));
        // Why the communicator has failed, if it has, comes first.
        if error.is_invalid_argument() { refusal.raise(py) } else { raised(py, &error) }
    }
}

impl RankContext {
    #[inline]
    pub(crate) fn read(
        &self,
        name: &'static str,
        tensor: Argument<'_, '_>,
        write: bool,
    ) -> Result<Tensor, Refusal> {
        tensor::read(name, tensor, self.device, write)
    }

    fn waits(&self, tensor: Argument<'_, '_>) -> Result<Tensor, Refusal> {
        let found = self.read("waits", tensor, true)?;
        if found.dtype != DType::I64 || found.count != self.world as usize {
            return Err(Refusal::Invalid(format!(
                "waits: {} elements of {}, where an int64 for each of {} ranks is needed",
                found.count,
                long_name(found.dtype),
                self.world
            )));
        }
        Ok(found)
    }

    /// A tensor to write to, of the input's type, and of `count` elements if that is given.
    pub(crate) fn output(
        &self,
        name: &'static str,
        tensor: Argument<'_, '_>,
        input: &Tensor,
        count: Option<usize>,
    ) -> Result<Tensor, Refusal> {
        let output = self.read(name, tensor, true)?;
        if output.dtype != input.dtype {
            let (found, expected): (DType, DType) = (output.dtype, input.dtype);
            return Err(Refusal::Invalid(format!(
                "{name}: elements of {} where the input has {}",
                long_name(found),
                long_name(expected)
            )));
        }
        if count.is_some() {
            self.fits(name, output.count, count, "as many as the input")?;
        }
        Ok(output)
    }

    pub(crate) fn fits(
        &self,
        name: &'static str,
        count: usize,
        expected: Option<usize>,
        why: &str,
    ) -> Result<(), Refusal> {
        if expected == Some(count) {
            return Ok(());
        }
        let expected = expected.map_or_else(|| "an impossible number".into(), |n| n.to_string());
        let world = self.world;
        Err(Refusal::Invalid(format!(
            "{name}: {count} elements where {expected} are needed, {why} of {world}"
        )))
    }

    /// Number of elements in `world` parts of `count`.
    pub(crate) fn parts(&self, count: usize) -> Option<usize> {
        count.checked_mul(self.world as usize)
    }
}
