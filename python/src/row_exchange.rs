//! The classes `RowExchange` and `RowLayout`.

#![allow(unsafe_code)] // passes on addresses that tensors gave

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use symmpool_allocator::Stream;
use symmpool_collectives::{DType, RowShape, RowsAt};

use crate::arguments::{Argument, Calls, rows_of};
use crate::block::Block;
use crate::convert::{self, long_name};
use crate::errors::{OrRaise, invalid};
use crate::memory::Memory;
use crate::number::Number;
use crate::own::Own;
use crate::pool::dimensions;
use crate::reading::{Refusal, Tensor};
use crate::{site, stream, torch};

type Exchange = symmpool_collectives::RowExchange<Arc<symmpool_collectives::Communicator>>;

/// An all-to-all of rows with a destination each, and the way back: what a mixture of experts does
/// with its tokens. Made by `Communicator.row_exchange`, ahead of calls, with all memory that they
/// need; it is used on one communicator, whose rules for calls and tensors hold here too.
///
/// `send` takes rows to the ranks that `destinations` name. What comes lies by source rank, and of
/// one source in that one's order; a layout has `counts`, `offsets` and `source_index` of it.
/// `send_back` takes as many rows, in that place, to where they came from. Several layouts may be
/// kept, and sent back in any order that is the same on every rank.
#[pyclass(frozen, weakref, module = "symmpool")]
pub(crate) struct RowExchange {
    exchange: Own<Exchange>,
    calls: Arc<Calls>,
    row_shape: Vec<i64>,
    /// Whether layouts have tensors of torch, or arrays of numpy.
    of_torch: bool,
}

/// How the rows of a `RowExchange.send` lie, for whoever reads them and for the way back. A send
/// overwrites what it holds. It stays alive until the stream is past calls with it, as tensors do.
#[pyclass(frozen, weakref, module = "symmpool")]
pub(crate) struct RowLayout {
    memory: Arc<Memory>,
    shape: RowShape,
    counts: Py<PyAny>,
    offsets: Py<PyAny>,
    source_index: Py<PyAny>,
}

impl RowExchange {
    pub(crate) fn new(
        py: Python<'_>,
        calls: &Arc<Calls>,
        rows: Number<u64>,
        row_shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let rows = rows.or_raise(py, "rows")?;
        let lengths = dimensions(row_shape)?;
        let row = lengths.iter().try_fold(1_usize, |row, length| {
            usize::try_from(*length).ok().and_then(|length| row.checked_mul(length))
        });
        let row = row.ok_or_else(|| invalid(py, format!("row_shape: {lengths:?} is too large")))?;
        let shape = RowShape { rows: rows as usize, row, dtype: convert::dtype(dtype)? };
        let of_torch = dtype.is_instance_of::<PyString>()
            || torch::torch(py).is_some_and(|torch| torch.is_dtype(dtype));
        let core = calls.core();
        let exchange = Own::new(site::detach(py, || Exchange::new(core, shape)).or_raise(py)?);
        Ok(Self { exchange, calls: Arc::clone(calls), row_shape: lengths, of_torch })
    }

    /// Reads the rows of a call, and the layout. A refusal is reported to the other ranks by the caller.
    fn rows(
        &self,
        output: Argument<'_, '_>,
        input: Argument<'_, '_>,
        layout: Argument<'_, '_>,
    ) -> Result<Rows, Refusal> {
        let calls = &*self.calls;
        let RowShape { row, dtype, .. } = self.exchange.shape();
        let from = calls.read("input", input, false)?;
        let to = calls.output("output", output, &from, None)?;
        if from.dtype != dtype {
            let (found, expected) = (long_name(from.dtype), long_name(dtype));
            return Err(Refusal::Invalid(format!(
                "input: elements of {found} where the exchange moves {expected}"
            )));
        }
        let rows = |name, tensor| {
            let (count, found) = rows_of(name, tensor)?;
            if found == row {
                return Ok(count);
            }
            Err(Refusal::Invalid(format!(
                "{name}: rows of {found} elements where the exchange moves rows of {row}"
            )))
        };
        let (length, capacity) = (rows("input", input)?, rows("output", output)?);
        let layout = layout.cast::<RowLayout>().map_err(PyErr::from)?.get();
        let block = layout.memory.block();
        let pool = self.exchange.communicator().pool();
        let own = pool.layout().locate(block.address()) == Some((pool.rank(), block.offset()));
        if layout.shape != self.exchange.shape() || !own {
            return Err(Refusal::Invalid(format!(
                "layout: of {:?} or another pool, where the exchange moves {:?}",
                layout.shape,
                self.exchange.shape()
            )));
        }
        Ok(Rows { from, to, length, capacity, layout: block.address() as usize })
    }
}

/// What a call is given, once it is known to fit.
#[derive(Clone, Copy)]
struct Rows {
    from: Tensor,
    to: Tensor,
    length: usize,
    capacity: usize,
    layout: usize,
}

impl Rows {
    fn at(&self) -> RowsAt {
        RowsAt {
            input: self.from.from(),
            length: self.length,
            output: self.to.to(),
            capacity: self.capacity,
        }
    }
}

#[pymethods]
impl RowExchange {
    /// A layout that says that nothing came. It allocates memory of the pool, as `Pool.empty` does,
    /// and on CUDA waits for what runs; none is made while a graph is captured.
    fn layout(&self, py: Python<'_>) -> PyResult<RowLayout> {
        self.exchange.check("a row exchange").or_raise(py)?;
        let calls = &*self.calls;
        let stream = stream::resolve(py, calls.device, None)?;
        let pool = self.exchange.communicator().pool();
        let make = || {
            let bytes = self.exchange.layout_bytes();
            let memory = Memory::allocate(pool, calls.device, bytes, stream)?;
            // SAFETY: the block is as long, and new.
            unsafe { self.exchange.clear_layout_at(memory.block().as_ptr()) }?;
            symmpool_allocator::Result::Ok(memory)
        };
        let memory = site::detach(py, make).or_raise(py)?;
        let [counts, offsets, source_index] = self.exchange.layout_parts();
        let (shape, world) = (self.exchange.shape(), i64::from(pool.world()));
        let tensor = |begin: usize, length: i64, dtype: DType| {
            let block = Bound::new(py, Block::part(memory.clone(), begin, vec![length], dtype))?;
            let tensor = match self.of_torch {
                true => py.import("torch")?.call_method1("from_dlpack", (block,))?,
                false => Block::numpy(&block, None)?,
            };
            PyResult::Ok(tensor.unbind())
        };
        Ok(RowLayout {
            shape,
            counts: tensor(counts, world, DType::I64)?,
            offsets: tensor(offsets, world, DType::I64)?,
            source_index: tensor(source_index, shape.rows as i64 * world, DType::I32)?,
            memory,
        })
    }

    /// Sends row i of `input` to rank `destinations[i]`; nowhere where that is -1.
    ///
    /// `destinations` is a tensor of int32 or int64, on the pool's device, of at most as many
    /// elements as the exchange was made for. They are read when the call runs: on CUDA when `stream`
    /// comes to it, so that a captured graph replays with what is there then. Rows of `input` behind
    /// the last one's are not looked at. `output` holds what its length says, which may differ from
    /// rank to rank; it may be `input`.
    ///
    /// What `output` has no room for is not written, and counted in `layout.counts` all the same.
    /// Then OverflowError is raised on every rank, and if a rank has a destination that is no rank,
    /// InvalidArgumentError, and that rank sent nothing; on the CPU by the call, on CUDA by the next
    /// `Communicator.synchronize`. All other rows are where they should be, and the communicator
    /// stays usable.
    #[pyo3(signature = (output, input, destinations, layout, stream = None))]
    fn send(
        &self,
        py: Python<'_>,
        output: Argument<'_, '_>,
        input: Argument<'_, '_>,
        destinations: Argument<'_, '_>,
        layout: Argument<'_, '_>,
        stream: Option<Argument<'_, '_>>,
    ) -> PyResult<()> {
        let calls = &*self.calls;
        let stream: Stream = calls.stream(py, stream)?;
        let arguments = || {
            let to = calls.read("destinations", destinations, false)?;
            Ok((self.rows(output, input, layout)?, to))
        };
        let (rows, to) = calls.or_decline(py, stream, arguments())?;
        // SAFETY: the tensors have these rows and destinations, contiguous, on the pool's device,
        // and the caller's frame keeps them and the layout alive for the length of the call; how
        // long work on a stream needs them, and who else may touch them, is the documented contract
        // of the classes.
        calls.run(py, || unsafe {
            let destinations = (to.from(), to.count, to.dtype);
            self.exchange.send_at(rows.layout as *mut u8, &rows.at(), destinations, &stream)
        })
    }

    /// Sends the first rows of `input`, as many as `send` wrote with `layout`, back to the ranks
    /// they came from; each comes to where it was in that rank's input. Rows of `output` of which
    /// none comes are zeros: those that went nowhere, that had no room, and whatever is behind those
    /// that were sent. `output` has at most as many rows as the exchange was made for; it may be
    /// `input`. All ranks name the layout of the same send.
    ///
    /// A rank whose `input` is shorter than what came to it sends nothing, and every rank raises
    /// InvalidArgumentError, as in `send`.
    #[pyo3(signature = (output, input, layout, stream = None))]
    fn send_back(
        &self,
        py: Python<'_>,
        output: Argument<'_, '_>,
        input: Argument<'_, '_>,
        layout: Argument<'_, '_>,
        stream: Option<Argument<'_, '_>>,
    ) -> PyResult<()> {
        let calls = &*self.calls;
        let stream: Stream = calls.stream(py, stream)?;
        let rows = calls.or_decline(py, stream, self.rows(output, input, layout))?;
        // SAFETY: as in `send`.
        calls.run(py, || unsafe {
            self.exchange.send_back_at(rows.layout as *mut u8, &rows.at(), &stream)
        })
    }

    /// The most rows that a rank sends in a call.
    #[getter]
    fn rows_per_rank(&self) -> usize {
        self.exchange.shape().rows
    }

    /// The shape of a row, a tuple.
    #[getter]
    fn row_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.row_shape)
    }

    /// The element type's name, as torch and numpy have it.
    #[getter]
    fn dtype(&self) -> &'static str {
        long_name(self.exchange.shape().dtype)
    }

    fn __repr__(&self) -> String {
        format!(
            "symmpool.RowExchange(rows={}, row_shape={:?}, dtype={:?})",
            self.rows_per_rank(),
            self.row_shape,
            self.dtype()
        )
    }
}

#[pymethods]
impl RowLayout {
    /// Rows that each rank sent, int64, those that had no room included.
    #[getter]
    fn counts(&self, py: Python<'_>) -> Py<PyAny> {
        self.counts.clone_ref(py)
    }

    /// The row of the output at which each rank's begin, int64.
    #[getter]
    fn offsets(&self, py: Python<'_>) -> Py<PyAny> {
        self.offsets.clone_ref(py)
    }

    /// Which row of its source each row is, int32; as many as all ranks may send, of which the first
    /// `counts.sum()` mean something.
    #[getter]
    fn source_index(&self, py: Python<'_>) -> Py<PyAny> {
        self.source_index.clone_ref(py)
    }

    fn __repr__(&self) -> String {
        let RowShape { rows, row, dtype } = self.shape;
        format!("symmpool.RowLayout(rows={rows}, row={row}, dtype={:?})", long_name(dtype))
    }
}
