//! Row exchanges: each row is sent to the rank that it names, and can be sent back.

#![allow(unsafe_code)] // passes on blocks as raw memory that the pool keeps mapped

mod layout;

use std::fmt;
use std::ops::Deref;

use symmpool_allocator::{Block, CONTROL_LANE, Error, Result, Stream};

use super::Communicator;
use crate::row_exchange::{LayoutParts, RowPlaces, RowWork, Scratch};
use crate::{DType, Element, RowShape};
pub(super) use layout::Memory;
pub use layout::{Received, RowLayout};

/// An all-to-all of rows that each have a destination, and the way back: what a mixture of experts does
/// with its tokens. It is made ahead of calls, and has all memory that they need.
///
/// [`Self::send`] sends rows to the ranks that `destinations` name. Received rows are ordered by source rank,
/// and rows of one source are in that rank's order. A [`RowLayout`] holds how many rows came from each rank, where
/// these begin, and which row of its source each row was. [`Self::send_back`] sends as many rows, in the
/// same order, back to where they came from.
///
/// An exchange has one call under way at a time, as its communicator has. Several layouts may be
/// kept, and sent back in any order that is the same on every rank.
///
/// ```
/// # use std::thread;
/// use symmpool_allocator::{Driver, Group, Pool, Result, Stream};
/// use symmpool_collectives::{Communicator, DType, RowExchange, RowShape};
///
/// fn rank(group: Group) -> Result<(Vec<f32>, Vec<f32>)> {
///     let stream = &Stream::DEFAULT;
///     let me = group.rank() as f32;
///     let pool = Pool::builder(group).driver(Driver::host()?).build()?;
///     let comm = Communicator::new(&pool)?;
///     let shape = RowShape { rows: 3, row: 2, dtype: DType::F32 };
///     let exchange = RowExchange::new(&comm, shape)?;
///     let layout = exchange.layout()?;
///
///     let (x, y) = (pool.alloc::<f32>(6)?, pool.alloc::<f32>(12)?);
///     x.write(&[me, 0.0, me, 1.0, me, 2.0])?;
///     let destinations = pool.alloc::<i32>(3)?;
///     destinations.write(&[1, -1, 0])?; // to rank 1, nowhere, to rank 0
///     exchange.send(&layout, &y, &x, &destinations, stream)?;
///     let came = y.read()?[..4].to_vec();
///     assert_eq!(layout.read()?.counts, [1, 1]);
///     exchange.send_back(&layout, &x, &y, stream)?;
///     Ok((came, x.read()?))
/// }
///
/// let ranks: Vec<_> = Group::in_process(2)?
///     .into_iter()
///     .map(|group| thread::spawn(move || rank(group)))
///     .collect();
/// let results: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect();
/// assert_eq!(results[0].0, [0.0, 2.0, 1.0, 2.0]); // the last rows of both ranks
/// assert_eq!(results[1].1, [1.0, 0.0, 0.0, 0.0, 1.0, 2.0]); // zeros for what went nowhere
/// # Ok::<(), symmpool_allocator::Error>(())
/// ```
pub struct RowExchange<C: Deref<Target = Communicator>> {
    comm: C,
    shape: RowShape,
    scratch: Memory,
}

/// The rows of a call on addresses.
#[derive(Clone, Copy, Debug)]
pub struct RowsAt {
    /// Rows to be sent, or to be sent back.
    pub input: *const u8,
    /// How many rows the input has.
    pub length: usize,
    /// Where rows are written.
    pub output: *mut u8,
    /// How many rows the output has room for.
    pub capacity: usize,
}

impl<C: Deref<Target = Communicator>> RowExchange<C> {
    /// An exchange of rows of that shape. It allocates memory of the pool: every rank makes its exchanges,
    /// with the same shapes, at the same place of its sequence of allocations, and none while a
    /// graph is captured. Commit the pool before a capture. On a device it waits for running kernels,
    /// and so does dropping it; drop it after the graphs that use it.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for an invalid shape; the errors of allocating, and of compiling kernels.
    pub fn new(comm: C, shape: RowShape) -> Result<Self> {
        let shape = shape.checked(comm.rank())?;
        comm.lock().engine.load_rows()?;
        let bytes = Scratch::new(&shape, comm.world()).bytes;
        let scratch = Memory::new(comm.pool(), CONTROL_LANE, bytes)?;
        Ok(Self { comm, shape, scratch })
    }

    /// The shape of the rows.
    pub fn shape(&self) -> RowShape {
        self.shape
    }

    /// The communicator whose calls it makes.
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// A layout of no received rows. It allocates, and waits, as [`Self::new`] does.
    pub fn layout(&self) -> Result<RowLayout> {
        let parts = LayoutParts::new(&self.shape, self.comm.world());
        let lane = self.comm.pool().default_lane().name().to_owned();
        let memory = Memory::new(self.comm.pool(), &lane, parts.bytes)?;
        // SAFETY: the block has as many bytes, and is new.
        unsafe { self.clear_layout_at(memory.block().as_ptr()) }?;
        Ok(RowLayout { shape: self.shape, parts, memory })
    }

    /// Sends row `i` of `input` to rank `destinations[i]`, or nowhere if that is -1. Destinations are
    /// `i32` or `i64`, on devices in memory of the device. They are read when the call runs, so each replay of
    /// a captured graph uses the destinations of that moment. There are at most [`RowShape::rows`]
    /// of them; rows of `input` that have no destination are not read.
    ///
    /// The length of `out` may differ from rank to rank; `out` may be `input`. Received
    /// rows, and `layout`, are as [`RowExchange`] says.
    ///
    /// # Errors
    ///
    /// Besides those of every call, on every rank: `is_overflow` if a rank received more rows than its
    /// `out` has room for; the last ones were not written. `is_invalid_argument` if a rank has a
    /// destination that is no rank; that rank sent nothing. All other rows are where
    /// they should be, and the communicator stays usable. In host memory the call itself returns the error, on a
    /// device [`Communicator::synchronize`] does.
    pub fn send<T: Element, D: Element>(
        &self,
        layout: &RowLayout,
        out: &Block<T>,
        input: &Block<T>,
        destinations: &Block<D>,
        stream: &Stream,
    ) -> Result<()> {
        self.check::<T>(layout, &[out, input], stream)?;
        let rows = self.rows(out, input);
        let at = destinations.as_ptr().cast::<u8>();
        let destinations = (at.cast_const(), destinations.len(), D::DTYPE);
        // SAFETY: the blocks are borrowed, so live and mapped, for these lengths; whoever else
        // touches them does so through raw pointers. The layout is one of this shape.
        unsafe { self.send_at(layout.memory.block().as_ptr(), &rows, destinations, stream) }
    }

    /// Sends the first rows of `input`, as many as [`Self::send`] wrote with `layout`, back to the
    /// ranks they came from, to the place that each had in that rank's input. All other rows of `out` become zeros:
    /// those of rows that were sent nowhere, that the receiver had no room for, or that had no
    /// destination. `out` has at most [`RowShape::rows`] rows; it may be
    /// `input`. All ranks pass the layout of the same send.
    ///
    /// # Errors
    ///
    /// As [`Self::send`]; `is_invalid_argument`, on every rank, if a rank's `input` is shorter than
    /// what it received: that rank sent nothing back, and zeros are in the place of its rows.
    pub fn send_back<T: Element>(
        &self,
        layout: &RowLayout,
        out: &Block<T>,
        input: &Block<T>,
        stream: &Stream,
    ) -> Result<()> {
        self.check::<T>(layout, &[out, input], stream)?;
        let rows = self.rows(out, input);
        // SAFETY: as in `send`.
        unsafe { self.send_back_at(layout.memory.block().as_ptr(), &rows, stream) }
    }

    /// Bytes of a layout, for [`Self::send_at`].
    pub fn layout_bytes(&self) -> usize {
        LayoutParts::new(&self.shape, self.comm.world()).bytes as usize
    }

    /// The bytes at which counts, offsets and source indices begin in a layout. Counts and offsets are an `i64` for
    /// each rank; source indices are as many `i32` as there are rows that all ranks together may send.
    pub fn layout_parts(&self) -> [usize; 3] {
        let parts = LayoutParts::new(&self.shape, self.comm.world());
        [parts.counts, parts.offsets, parts.source_index].map(|at| at as usize)
    }

    /// Makes a layout of no received rows of this memory. On a device it waits for running kernels.
    ///
    /// # Safety
    ///
    /// `layout` begins at a multiple of 8, and is writable for [`Self::layout_bytes`] bytes, by the
    /// CPU in host memory, else by the device. Nothing else uses it meanwhile.
    pub unsafe fn clear_layout_at(&self, layout: *mut u8) -> Result<()> {
        let bytes = self.layout_bytes();
        match self.comm.pool().driver().as_cuda() {
            Some(driver) => {
                let pool = self.comm.pool();
                pool.driver().synchronize_by(pool.group().deadline())?;
                // SAFETY: the caller's promise; a multiple of 4 bytes.
                unsafe { driver.fill(layout as u64, 0, bytes as u64 / 4) }
            }
            None => {
                // SAFETY: the caller's promise.
                unsafe { layout.write_bytes(0, bytes) };
                Ok(())
            }
        }
    }

    /// [`Self::send`] on addresses: `destinations` are where they begin, how many there are, and
    /// their type.
    ///
    /// # Errors
    ///
    /// As [`Self::send`].
    ///
    /// # Safety
    ///
    /// As [`Communicator::all_reduce_at`], of input, output and destinations for these lengths. The
    /// layout was cleared by [`Self::clear_layout_at`] of an exchange of this shape and pool, and
    /// only such exchanges wrote it since.
    pub unsafe fn send_at(
        &self,
        layout: *mut u8,
        rows: &RowsAt,
        (destinations, count, dtype): (*const u8, usize, DType),
        stream: &Stream,
    ) -> Result<()> {
        let integers = matches!(dtype, DType::I32 | DType::I64);
        let aligned = (destinations as usize).is_multiple_of(dtype.size());
        let there = count == 0 || !destinations.is_null();
        if !(integers && aligned && there) || count > self.shape.rows || count > rows.length {
            let why = format!(
                "{count} destinations of {} at {destinations:?} for an input of {} rows: they are \
                 i32 or i64, aligned, and no more than the input has rows, nor than the {} that the \
                 exchange was made for",
                dtype.name(),
                rows.length,
                self.shape.rows
            );
            return Err(self.decline(&why, stream));
        }
        let work = RowWork {
            destinations: destinations as u64,
            input: rows.input as u64,
            given: count as u64,
            capacity: rows.capacity as u64,
            wide: u32::from(dtype == DType::I64),
            ..self.work(layout, rows, stream)?
        };
        let mut inner = self.comm.begin(stream)?;
        let places = self.places(&mut inner, layout, (rows.output, rows.capacity), stream)?;
        // SAFETY: the caller's promises about what it passed; the rest lies in the exchange's own
        // memory and the layout, which are as long as `RowWork` takes them to be.
        unsafe { inner.engine.send_rows(&self.shape, &work, &places, stream) }
    }

    /// [`Self::send_back`] on addresses.
    ///
    /// # Errors
    ///
    /// As [`Self::send_back`].
    ///
    /// # Safety
    ///
    /// As [`Self::send_at`].
    pub unsafe fn send_back_at(
        &self,
        layout: *mut u8,
        rows: &RowsAt,
        stream: &Stream,
    ) -> Result<()> {
        if rows.capacity > self.shape.rows {
            let why = format!(
                "an output of {} rows on the way back, of an exchange made for {}",
                rows.capacity, self.shape.rows
            );
            return Err(self.decline(&why, stream));
        }
        let work = RowWork {
            output: rows.output as u64,
            given: rows.capacity as u64,
            ..self.work(layout, rows, stream)?
        };
        let mut inner = self.comm.begin(stream)?;
        let input = rows.input.cast_mut();
        let places = self.places(&mut inner, layout, (input, rows.length), stream)?;
        // SAFETY: as in `send_at`.
        unsafe { inner.engine.send_rows_back(&self.shape, rows.length, &work, &places, stream) }
    }

    fn rows<T: Element>(&self, out: &Block<T>, input: &Block<T>) -> RowsAt {
        RowsAt {
            input: input.as_ptr().cast::<u8>().cast_const(),
            length: input.len() / self.shape.row,
            output: out.as_ptr().cast(),
            capacity: out.len() / self.shape.row,
        }
    }

    /// Declines the call if elements, blocks or the layout do not belong to this exchange.
    fn check<T: Element>(
        &self,
        layout: &RowLayout,
        blocks: &[&Block<T>],
        stream: &Stream,
    ) -> Result<()> {
        let pool = self.comm.pool();
        let own = |offset, address| pool.layout().locate(address) == Some((pool.rank(), offset));
        let memory = layout.memory.block();
        let why = if T::DTYPE != self.shape.dtype {
            format!("elements of {} where it moves {}", T::DTYPE.name(), self.shape.dtype.name())
        } else if layout.shape != self.shape || !own(memory.offset(), memory.address()) {
            format!("{layout:?} is of another shape, {:?}, or another pool", self.shape)
        } else if let Some(block) = blocks.iter().find(|it| !own(it.offset(), it.address())) {
            format!("{block:?} is not a block of the communicator's pool")
        } else {
            return Ok(());
        };
        Err(self.decline(&why, stream))
    }

    fn decline(&self, why: &str, stream: &Stream) -> Error {
        let rank = self.comm.rank();
        let why = Error::invalid_argument(format!("row exchange on rank {rank}: {why}"));
        self.comm.decline(why, stream)
    }

    /// What every step of a call is given; declines the call if lengths are too large.
    fn work(&self, layout: *mut u8, rows: &RowsAt, stream: &Stream) -> Result<RowWork> {
        let size = self.shape.row_bytes();
        let most = self.comm.pool().layout().stride;
        let too_long =
            |count: usize| (count as u64).checked_mul(size).is_none_or(|bytes| bytes > most);
        if layout.is_null() || [rows.length, rows.capacity].into_iter().any(too_long) {
            let why = format!(
                "{rows:?} of {size} bytes with a layout at {layout:?}: there is no such memory"
            );
            return Err(self.decline(&why, stream));
        }
        let scratch = self.scratch.block().address();
        Ok(RowWork::new(&self.shape, self.comm.world(), scratch, layout as u64))
    }

    /// Where the buffers of the all-to-alls lie; `rows` is the caller's buffer.
    fn places(
        &self,
        inner: &mut super::Inner,
        layout: *mut u8,
        (rows, count): (*mut u8, usize),
        stream: &Stream,
    ) -> Result<RowPlaces> {
        let (shape, world) = (&self.shape, self.comm.world());
        let work = RowWork::new(shape, world, self.scratch.block().address(), layout as u64);
        let size = shape.row_bytes() as usize;
        let mut place = |at: u64, bytes| self.comm.place_at(inner, at as *mut u8, bytes, stream);
        let source_index = layout as u64 + LayoutParts::new(shape, world).source_index;
        Ok(RowPlaces {
            packed: place(work.packed, shape.rows * size)?,
            rows: place(rows as u64, count * size)?,
            order: place(work.order, 4 * shape.rows)?,
            source_index: place(source_index, 4 * LayoutParts::indices(shape, world))?,
        })
    }
}

impl<C: Deref<Target = Communicator>> fmt::Debug for RowExchange<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowExchange")
            .field("rank", &self.comm.rank())
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}
