//! What runs a communicator's calls: the host, or kernels on a device.

#![allow(unsafe_code)] // passes on the caller's promises about raw memory

use std::sync::Arc;

use symmpool_allocator::{Error, Result, Stream};

use crate::algorithm::RequestedAlgorithm;
use crate::cuda::CudaEngine;
use crate::host::expect_length;
use crate::row_exchange::{LayoutParts, RowPlaces, RowWork};
use crate::timeout::Timeout;
use crate::{DType, HostEngine, Place, ReduceOp, RowShape, SplitRows, SplitsAt};

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

    fn world(&self) -> u32 {
        match self {
            Self::Host(host) => host.world(),
            Self::Cuda(cuda) => cuda.world(),
        }
    }

    pub(super) fn timeout(&self) -> &Arc<Timeout> {
        match self {
            Self::Host(host) => &host.timeout,
            Self::Cuda(cuda) => &cuda.timeout,
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

    pub(super) fn forget_stream(&mut self, stream: &Stream) -> Result<()> {
        match self {
            // Nothing is ever pending on a stream there.
            Self::Host(_) => Ok(()),
            Self::Cuda(cuda) => cuda.forget_stream(*stream),
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

    /// The same of a rank that cannot make any call any more, which waits for nobody.
    pub(super) fn give_up(&mut self, why: Error, stream: &Stream) -> Error {
        match self {
            Self::Host(host) => host.give_up(why),
            // A kernel waits, not the host; what it finds closes the communicator.
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
        asked: RequestedAlgorithm,
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

    /// Has what row exchanges need on a device ready.
    pub(super) fn load_rows(&mut self) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Cuda(cuda) => cuda.load_rows(),
        }
    }

    /// The way there of a row exchange: order, and then the rows' numbers, which always fit, so that
    /// what is told of the rows themselves ends the call on every rank.
    pub(super) unsafe fn send_rows(
        &mut self,
        shape: &RowShape,
        work: &RowWork,
        places: &RowPlaces,
        stream: &Stream,
    ) -> Result<()> {
        self.ready()?;
        let world = self.world();
        let bad = match self {
            // SAFETY: the caller's promises, as in all that follow.
            Self::Host(_) => unsafe { work.order(world as usize) },
            Self::Cuda(cuda) => {
                // SAFETY: as above.
                unsafe { cuda.order_rows(work, *stream) }?;
                None
            }
        };
        let (length, capacity) = (shape.rows, LayoutParts::indices(shape, world));
        let rows = SplitRows { dtype: DType::I32, row: 1, length, capacity };
        let splits = splits_at(work.index_splits, 0, 0);
        let numbers = (places.order, places.source_index);
        // SAFETY: as above.
        unsafe { self.all_to_all_splits(numbers, &rows, &splits, stream) }?;
        let RowShape { row, dtype, .. } = *shape;
        let rows = SplitRows { dtype, row, length, capacity: work.capacity as usize };
        let splits = splits_at(work.splits, work.counts, work.offsets);
        // SAFETY: as above.
        let sent =
            unsafe { self.all_to_all_splits((places.packed, places.rows), &rows, &splits, stream) };
        sent.map_err(|error| match bad {
            Some(bad) if error.is_invalid_argument() => {
                Error::invalid_argument(bad.why(self.rank(), world))
            }
            _ => error,
        })
    }

    /// The way back of a row exchange, of as many rows as `length` says at most.
    pub(super) unsafe fn send_rows_back(
        &mut self,
        shape: &RowShape,
        length: usize,
        work: &RowWork,
        places: &RowPlaces,
        stream: &Stream,
    ) -> Result<()> {
        self.ready()?;
        let world = self.world() as usize;
        match self {
            // SAFETY: the caller's promises, as in all that follow.
            Self::Host(_) => unsafe { work.fit(world) },
            // SAFETY: as above.
            Self::Cuda(cuda) => unsafe { cuda.fit_rows(work, *stream) }?,
        }
        let RowShape { rows: capacity, row, dtype } = *shape;
        let rows = SplitRows { dtype, row, length, capacity };
        let splits = splits_at(work.splits, work.returned, work.returned_at);
        // SAFETY: as above.
        let sent =
            unsafe { self.all_to_all_splits((places.rows, places.packed), &rows, &splits, stream) };
        match self {
            // Also after an error that left the rest as it should be.
            // SAFETY: as above.
            Self::Host(_) => unsafe { work.unpack(world) },
            Self::Cuda(cuda) if sent.is_ok() => {
                // SAFETY: as above.
                unsafe { cuda.spread_rows(work, *stream) }?;
            }
            Self::Cuda(_) => {}
        }
        sent
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

/// Counts of 64 bits at these addresses; none where that is 0.
fn splits_at(input: u64, output: u64, offsets: u64) -> SplitsAt {
    SplitsAt {
        input: input as *const u8,
        output: output as *mut u8,
        offsets: offsets as *mut u8,
        dtype: DType::I64,
    }
}
