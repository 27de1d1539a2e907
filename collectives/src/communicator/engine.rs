//! What runs a communicator's calls: the host, or kernels on a device.

#![allow(unsafe_code)] // passes on the caller's promises about raw memory

use symmpool_allocator::{Error, Result, Stream};

use crate::allreduce::Asked;
use crate::cuda::CudaEngine;
use crate::slices::expect_length;
use crate::{DType, HostEngine, Place, ReduceOp, SplitRows, SplitsAt};

/// One of two, with one face. Both are boxed: they are long, and differ in length.
pub(super) enum Engine {
    Host(Box<HostEngine>),
    Cuda(Box<CudaEngine>),
}

/// Input and output, type and operation: what goes together through the calls below.
pub(super) type Places = (Place, Place);

/// # Safety
///
/// Of all unsafe methods: the places are readable or writable for the call's lengths by whoever
/// runs it, until the stream is past it, and nobody else touches them meanwhile, in any rank's
/// slot where they are windows.
impl Engine {
    pub(super) fn rank(&self) -> u32 {
        match self {
            Self::Host(host) => host.rank(),
            Self::Cuda(cuda) => cuda.rank(),
        }
    }

    pub(super) fn failure(&mut self) -> Option<&Error> {
        match self {
            Self::Host(host) => host.failure(),
            Self::Cuda(cuda) => cuda.failure(),
        }
    }

    pub(super) fn ready(&mut self) -> Result<()> {
        match self {
            Self::Host(host) => host.ready(),
            Self::Cuda(cuda) => cuda.ready(),
        }
    }

    pub(super) fn abandon(&mut self) {
        match self {
            Self::Host(host) => host.abandon(),
            Self::Cuda(cuda) => cuda.abandon(),
        }
    }

    /// Tells the other ranks that this one cannot make the call; gives back why.
    pub(super) fn decline(&mut self, why: Error, stream: &Stream) -> Error {
        match self {
            Self::Host(host) => host.decline(why),
            Self::Cuda(cuda) => cuda.decline(why, *stream),
        }
    }

    /// Refuses a length; the other ranks are told, so that they do not wait.
    pub(super) fn fits(
        &mut self,
        what: &str,
        length: usize,
        expected: Option<usize>,
        stream: &Stream,
    ) -> Result<()> {
        self.ready()?;
        expect_length(what, self.rank(), length, expected).map_err(|why| self.decline(why, stream))
    }

    /// The engine in host memory, for what only it does.
    pub(super) fn host(&mut self, what: &str, stream: &Stream) -> Result<&mut HostEngine> {
        if matches!(self, Self::Cuda(_)) {
            self.ready()?;
            let why = Error::unsupported(format!(
                "{what} on rank {}: a communicator on devices has no such call yet; use memory of \
                 the device, or a pool in host memory",
                self.rank()
            ));
            return Err(self.decline(why, stream));
        }
        match self {
            Self::Host(host) => Ok(host),
            Self::Cuda(_) => Err(Error::invalid_state("the engine is on the host")),
        }
    }

    pub(super) unsafe fn all_reduce(
        &mut self,
        places: Places,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        asked: Asked,
        stream: &Stream,
    ) -> Result<()> {
        let (input, output) = places;
        match self {
            Self::Host(host) => {
                let algorithm = asked.algorithm;
                // SAFETY: the caller's promises, as in all that follow.
                let reduced =
                    unsafe { host.all_reduce(input, output, count, dtype, op, algorithm) };
                reduced.map_err(|error| asked.blame(error))
            }
            // SAFETY: as above.
            Self::Cuda(cuda) => unsafe {
                cuda.all_reduce(places, count, (dtype, op), asked, *stream)
            },
        }
    }

    pub(super) unsafe fn reduce_scatter(
        &mut self,
        places: Places,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let (input, output) = places;
        match self {
            // SAFETY: as in `all_reduce`.
            Self::Host(host) => unsafe { host.reduce_scatter(input, output, count, dtype, op) },
            // SAFETY: as in `all_reduce`.
            Self::Cuda(cuda) => unsafe { cuda.reduce_scatter(places, count, (dtype, op), *stream) },
        }
    }

    pub(super) unsafe fn all_gather(
        &mut self,
        places: Places,
        count: usize,
        dtype: DType,
        stream: &Stream,
    ) -> Result<()> {
        let (input, output) = places;
        match self {
            // SAFETY: as in `all_reduce`.
            Self::Host(host) => unsafe { host.all_gather(input, output, count, dtype) },
            // SAFETY: as in `all_reduce`.
            Self::Cuda(cuda) => unsafe { cuda.all_gather(places, count, dtype, *stream) },
        }
    }

    pub(super) unsafe fn broadcast(
        &mut self,
        place: Place,
        count: usize,
        dtype: DType,
        root: u32,
        stream: &Stream,
    ) -> Result<()> {
        match self {
            // SAFETY: as in `all_reduce`.
            Self::Host(host) => unsafe { host.broadcast(place, count, dtype, root) },
            // SAFETY: as in `all_reduce`.
            Self::Cuda(cuda) => unsafe { cuda.broadcast(place, count, dtype, root, *stream) },
        }
    }

    pub(super) unsafe fn all_to_all(
        &mut self,
        places: Places,
        count: usize,
        dtype: DType,
        stream: &Stream,
    ) -> Result<()> {
        let (input, output) = places;
        match self {
            // SAFETY: as in `all_reduce`.
            Self::Host(host) => unsafe { host.all_to_all(input, output, count, dtype) },
            // SAFETY: as in `all_reduce`.
            Self::Cuda(cuda) => unsafe { cuda.all_to_all(places, count, dtype, *stream) },
        }
    }

    pub(super) unsafe fn all_to_all_v(
        &mut self,
        places: Places,
        sizes: (&[usize], &[usize]),
        dtype: DType,
        stream: &Stream,
    ) -> Result<()> {
        let ((input, output), (send, receive)) = (places, sizes);
        match self {
            // SAFETY: as in `all_reduce`.
            Self::Host(host) => unsafe { host.all_to_all_v(input, send, output, receive, dtype) },
            // SAFETY: as in `all_reduce`.
            Self::Cuda(cuda) => unsafe { cuda.all_to_all_v(places, sizes, dtype, *stream) },
        }
    }

    pub(super) unsafe fn all_to_all_splits(
        &mut self,
        places: Places,
        rows: &SplitRows,
        splits: &SplitsAt,
        stream: &Stream,
    ) -> Result<()> {
        let (input, output) = places;
        match self {
            // SAFETY: as in `all_reduce`.
            Self::Host(host) => unsafe { host.all_to_all_splits(input, output, rows, splits) },
            // SAFETY: as in `all_reduce`.
            Self::Cuda(cuda) => unsafe { cuda.all_to_all_splits(places, rows, splits, *stream) },
        }
    }

    /// The engine on a device, for what the host does without one.
    pub(super) fn cuda(&mut self) -> Result<&mut CudaEngine> {
        match self {
            Self::Cuda(cuda) => Ok(cuda),
            Self::Host(_) => Err(Error::invalid_state("the engine is on a device")),
        }
    }

    pub(super) fn barrier(&mut self, stream: &Stream) -> Result<()> {
        match self {
            Self::Host(host) => host.barrier(),
            Self::Cuda(cuda) => cuda.barrier(*stream),
        }
    }

    /// Waits for what was put on the stream, and says what went wrong there.
    pub(super) fn synchronize(&mut self, stream: &Stream) -> Result<()> {
        match self {
            Self::Host(host) => host.ready(),
            Self::Cuda(cuda) => cuda.synchronize(*stream),
        }
    }
}
