//! Matrix products that hide their communication: how such a call begins, and how its data travels.
//!
//! The products themselves are made by whoever calls, who puts them on streams of its own.

#![allow(unsafe_code)] // passes on addresses, about which callers promise

use symmpool_allocator::{Error, Result, Stream};

use super::engine::AnyEngine;
use super::growth::Inbox;
use super::{Communicator, Inner};
use crate::signal::channel::CHANNELS;
use crate::{DType, MatmulAllReduce, MatmulGather, MatmulKind, MatmulScatter, MatmulShape};

impl Communicator {
    /// How many steps a fused matmul may have: [`Self::push_step`].
    pub const STEPS: u32 = CHANNELS;

    /// Opens a fused matmul: returns, or on a device lets `stream` go on, once every rank has opened the same one. What
    /// ranks did before on the streams that they pass has been done then, so a rank may write into memory that its
    /// peers have read before. Whoever reads such memory behind a product, on the stream or on others that it then waits
    /// for, calls [`Self::extend_order`] behind that.
    ///
    /// # Errors
    ///
    /// `is_diverged` if ranks pass different shapes; else as all calls.
    pub fn begin_matmul(&self, shape: &MatmulShape, stream: &Stream) -> Result<()> {
        let mut inner = self.begin(stream)?;
        match &mut inner.engine {
            AnyEngine::Host(host) => host.handshake_only(&shape.describe()),
            AnyEngine::Spanning(spanning) => Err(spanning.decline_across(shape.kind.name())),
            AnyEngine::Cuda(cuda) => {
                cuda.call(*stream, |cuda| cuda.open_matmul(shape.describe(), *stream))
            }
        }
    }

    /// Fails the communicator. You must call this where a fused matmul fails behind [`Self::begin_matmul`] on this rank:
    /// otherwise a later call of this rank would be taken for what it has not done. The other ranks are notified: their
    /// waits for steps of this rank end in an error, and so do their next calls. Returns what to report: `why`, or why the
    /// communicator has failed already.
    #[cold]
    pub fn fail_matmul(&self, why: Error, stream: &Stream) -> Error {
        self.shared.lock().engine.fail_halfway(why, stream)
    }

    /// In an open fused matmul on a device: copies `bytes` bytes from `src` to where `peer` has what this rank has at
    /// `dst`, by a copy engine, and tells the peer so in a step below [`Self::STEPS`], whose [`Self::await_step`] sees
    /// it. No SM takes part. A step is used once in a product for each pair of ranks.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::put_at`]; `is_unsupported` in host memory.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::put_at`].
    pub unsafe fn push_step(
        &self,
        (dst, src): (*mut u8, *const u8),
        bytes: usize,
        (peer, step): (u32, u32),
        stream: &Stream,
    ) -> Result<()> {
        let channel = self.step("push_step", peer, step)?;
        // SAFETY: the caller promised that `src` is readable for `bytes` bytes until `stream` is past the copy, and
        // that nobody touches the peer's.
        unsafe { self.put_by_copy_engine_at(dst, src, bytes, peer, stream) }?;
        self.lock().engine.cuda()?.signal_by_memory((peer, channel), false, *stream)
    }

    /// Tells `peer` in a step of an open fused matmul that what `stream` did before is done, without data.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::push_step`].
    pub fn signal_step(&self, (peer, step): (u32, u32), stream: &Stream) -> Result<()> {
        let channel = self.step("signal_step", peer, step)?;
        self.lock().engine.cuda()?.signal_by_memory((peer, channel), false, *stream)
    }

    /// Makes `stream` wait until `peer` has come to a step of the open fused matmul. No SM takes part.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::push_step`]; a peer that does not come within the communicator's timeout is named by
    /// [`Self::synchronize`] or the next call, and the communicator fails.
    pub fn await_step(&self, (peer, step): (u32, u32), stream: &Stream) -> Result<()> {
        let channel = self.step("await_step", peer, step)?;
        let timeout = self.timeout();
        self.lock().engine.cuda()?.wait_by_memory((peer, channel), timeout, false, *stream)
    }

    /// Whether [`Self::matmul_reduce_scatter_at`], [`Self::all_gather_matmul_at`] and [`Self::matmul_all_reduce_at`] have
    /// kernels for the device: for those of compute capability 9.0.
    pub fn has_tensor_kernels(&self) -> bool {
        matches!(&self.lock().engine, AnyEngine::Cuda(cuda) if cuda.has_tensor_kernels())
    }

    /// Multiplies matrices on a device, and adds up the products of all ranks: each rank gets the rows of the sum whose
    /// part of the left matrices is its own. One kernel makes a rank's products, parts for other ranks first, and copy engines
    /// carry these while the next ones are made; sums are added in `f32`, and parts travel in the type of the result. `rest`
    /// is a hash of what else must be equal on all ranks.
    ///
    /// The order in which partial sums are added follows from the ranks, so every run gives the same bits.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for what [`MatmulScatter::check`] refuses, and memory that is no window; `is_unsupported` in
    /// host memory, and where [`Self::has_tensor_kernels`] is false; `is_diverged` if ranks pass different shapes; else as
    /// all calls.
    ///
    /// # Safety
    ///
    /// The matrices and scales are readable, the result is writable, and so are [`MatmulScatter::parts_bytes`] and
    /// [`MatmulScatter::CONTROL_BYTES`] bytes of the memory that is used on the way, on the device until `stream` is past
    /// the call; nobody else touches them meanwhile, on any rank.
    pub unsafe fn matmul_reduce_scatter_at(
        &self,
        gemm: &MatmulScatter<'_>,
        rest: u64,
        stream: &Stream,
    ) -> Result<()> {
        let world = self.world();
        let kind = MatmulKind::MatmulReduceScatter;
        let bytes = MatmulScatter::parts_bytes(gemm.rows, gemm.columns, world);
        self.check_windows(
            kind,
            [(gemm.parts, bytes), (gemm.control, MatmulScatter::CONTROL_BYTES)],
            stream,
        )?;
        let shape = MatmulShape {
            kind,
            dtype: gemm.dtype,
            rows: (gemm.rows * world as usize) as u64,
            inner: 0,
            columns: gemm.columns as u32,
            rest: with_batches(rest, gemm.batches),
        };
        let mut inner = self.begin(stream)?;
        match &mut inner.engine {
            AnyEngine::Host(host) => Err(only_for_devices(kind, host.rank())),
            AnyEngine::Spanning(spanning) => Err(spanning.decline_across(kind.name())),
            // SAFETY: the caller promised that the matrices are readable and the result is writable until `stream` is
            // past the call; the memory used on the way is a window, which was checked.
            AnyEngine::Cuda(cuda) => unsafe {
                cuda.call(*stream, |cuda| cuda.matmul_scatter(shape.describe(), gemm, *stream))
            },
        }
    }

    /// Gathers the rows of all ranks' left matrices on a device, and multiplies them with right matrices of this rank. One
    /// kernel makes the products, of this rank's own rows first, while copy engines bring the others. `rest` is a hash of what
    /// else must be equal on all ranks.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::matmul_reduce_scatter_at`], with [`MatmulGather::check`].
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::matmul_reduce_scatter_at`], with [`MatmulGather::slots_bytes`] and
    /// [`MatmulGather::CONTROL_BYTES`] bytes; and [`MatmulGather::gathered`] is 0 or has as many bytes as the slots.
    pub unsafe fn all_gather_matmul_at(
        &self,
        gemm: &MatmulGather<'_>,
        rest: u64,
        stream: &Stream,
    ) -> Result<()> {
        let world = self.world();
        let kind = MatmulKind::AllGatherMatmul;
        let MatmulGather { dtype, rows, inner, .. } = *gemm;
        let bytes = MatmulGather::slots_bytes(dtype, rows, inner, world);
        self.check_windows(
            kind,
            [(gemm.slots, bytes), (gemm.control, MatmulGather::CONTROL_BYTES)],
            stream,
        )?;
        let shape = MatmulShape {
            kind,
            dtype,
            rows: rows as u64,
            inner: inner as u32,
            columns: 0,
            rest: with_batches(rest, gemm.batches),
        };
        let mut inner = self.begin(stream)?;
        match &mut inner.engine {
            AnyEngine::Host(host) => Err(only_for_devices(kind, host.rank())),
            AnyEngine::Spanning(spanning) => Err(spanning.decline_across(kind.name())),
            // SAFETY: the caller promised that the matrices are readable and the results are writable until `stream`
            // is past the call; the memory used on the way is a window, which was checked.
            AnyEngine::Cuda(cuda) => unsafe {
                cuda.call(*stream, |cuda| cuda.matmul_gather(shape.describe(), gemm, *stream))
            },
        }
    }

    /// Whether [`Self::matmul_all_reduce_at`] has memory for the products of all ranks, of `rows` rows and `columns` columns. The same on
    /// every rank.
    pub fn has_room_for_matmul(&self, rows: usize, columns: usize) -> bool {
        match &self.lock().engine {
            AnyEngine::Cuda(cuda) => cuda.has_room_for_matmul(rows, columns),
            AnyEngine::Host(_) | AnyEngine::Spanning(_) => false,
        }
    }

    /// Takes memory for a product of `rows` rows and `columns` columns where the communicator's memory
    /// [grows](super::CommunicatorOptions::device_memory_grows), and says whether there is room for it then. It is a call like
    /// any other where it takes memory: every rank makes it in the same order, and waits for the others.
    ///
    /// # Errors
    ///
    /// The errors of all calls; `is_diverged` if ranks have different products.
    pub fn make_room_for_matmul(
        &self,
        dtype: DType,
        (rows, columns): (usize, usize),
        stream: &Stream,
    ) -> Result<bool> {
        let mut inner = self.begin(stream)?;
        self.grow_for_matmul(&mut inner, dtype, (rows, columns), stream)?;
        Ok(match &inner.engine {
            AnyEngine::Cuda(cuda) => cuda.has_room_for_matmul(rows, columns),
            AnyEngine::Host(_) | AnyEngine::Spanning(_) => false,
        })
    }

    fn grow_for_matmul(
        &self,
        inner: &mut Inner,
        dtype: DType,
        (rows, columns): (usize, usize),
        stream: &Stream,
    ) -> Result<()> {
        let bytes = rows.saturating_mul(columns).saturating_mul(dtype.size()) as u64;
        let kind = MatmulKind::MatmulAllReduce;
        let (rows, columns) = (rows as u64, columns as u32);
        let shape = MatmulShape { kind, dtype, rows, inner: 0, columns, rest: 0 };
        self.grow_above(inner, (bytes, Inbox::Lamport), shape.describe(), stream)
    }

    /// Multiplies matrices on a device, of which the left one has few rows, and adds up the products of all ranks, for each
    /// of them. One kernel does both, and sends columns that it has while it makes others. Products are rounded to the
    /// matrices' type before they are added, in `f32` and in the order of ranks: so all ranks get the same bits, in every run.
    /// `rest` is a hash of what else must be equal on all ranks.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for what [`MatmulAllReduce::check`] refuses; `is_unsupported` in host memory, where
    /// [`Self::has_tensor_kernels`] or [`Self::has_room_for_matmul`] is false; `is_diverged` if ranks pass different shapes;
    /// else as all calls.
    ///
    /// # Safety
    ///
    /// The matrices are readable and the sum is writable on the device until `stream` is past the call; nobody else touches
    /// them meanwhile.
    pub unsafe fn matmul_all_reduce_at(
        &self,
        gemm: &MatmulAllReduce,
        rest: u64,
        stream: &Stream,
    ) -> Result<()> {
        let kind = MatmulKind::MatmulAllReduce;
        let shape = MatmulShape {
            kind,
            dtype: gemm.dtype,
            rows: gemm.rows as u64,
            inner: 0,
            columns: gemm.columns as u32,
            // The mean is another kernel's.
            rest: rest ^ u64::from(gemm.mean) << 63,
        };
        let mut inner = self.begin(stream)?;
        let sizes = (gemm.rows, gemm.columns);
        self.grow_for_matmul(&mut inner, gemm.dtype, sizes, stream)?;
        match &mut inner.engine {
            AnyEngine::Host(host) => Err(only_for_devices(kind, host.rank())),
            AnyEngine::Spanning(spanning) => Err(spanning.decline_across(kind.name())),
            // SAFETY: the caller promised that the matrices are readable and the result is writable until `stream` is
            // past the call.
            AnyEngine::Cuda(cuda) => unsafe {
                cuda.call(*stream, |cuda| cuda.matmul_all_reduce(shape.describe(), gemm, *stream))
            },
        }
    }

    /// Refuses memory that is used on the way and is no window, where there is another rank.
    fn check_windows(
        &self,
        kind: MatmulKind,
        memory: [(u64, usize); 2],
        stream: &Stream,
    ) -> Result<()> {
        if self.world() == 1 {
            return Ok(());
        }
        let next = (self.rank() + 1) % self.world();
        let mut windows = memory.into_iter();
        windows
            .try_for_each(|(begin, bytes)| {
                self.remote(kind.name(), begin, bytes as u64, next).map(drop)
            })
            .map_err(|why| self.decline(why, stream))
    }

    /// The channel of a step.
    fn step(&self, what: &str, peer: u32, step: u32) -> Result<u32> {
        self.check_channel(what, peer, 0)?;
        if step < Self::STEPS {
            return Ok(CHANNELS + step);
        }
        Err(Error::invalid_argument(format!(
            "{what} on rank {} for rank {peer}: step {step} of a fused matmul, of which there are {}",
            self.rank(),
            Self::STEPS
        )))
    }
}

/// A hash of the rest and the batches, by which ranks must divide rows alike.
fn with_batches(rest: u64, batches: usize) -> u64 {
    // The fractional bits of the golden ratio; odd, so that no two numbers of batches give the same.
    rest ^ (batches as u64).wrapping_sub(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn only_for_devices(kind: MatmulKind, rank: u32) -> Error {
    Error::unsupported(format!("{} by tensor cores on rank {rank}: it is for devices", kind.name()))
}
