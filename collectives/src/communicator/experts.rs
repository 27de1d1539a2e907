//! Mixture of experts: dispatch and combine.

#![allow(unsafe_code)] // passes on memory by address

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};

use symmpool_allocator::{CONTROL_LANE, Error, Result, Stream};

use super::expert_memory::ExpertMemory;
use super::{Communicator, Inner};
use crate::call::experts::{
    ExpertCall, ExpertMode, ExpertsWork, HandleParts, RegionParts, SCALE_GROUP,
};
use crate::call::{CallDescription, OpType};
use crate::sync::MutexGuard;
use crate::{
    CombineAt, DType, DispatchAt, ExpertLayout, ExpertQuantization, ExpertShape, Place,
    ReceivedSizes,
};

/// Sends tokens to the ranks of their experts, and sums up what comes back.
///
/// It is made ahead of calls, and has all memory that they need: symmetric memory, into which peers write rows directly.
/// A call of [`Self::dispatch_at`] sends tokens, and [`Self::combine_at`] sends rows back. What connects the two is a
/// *handle*, memory of the caller in which dispatch keeps how tokens were routed ([`HandleParts`]). There may be several
/// handles. All calls are collective: every rank makes them in the same order, with tokens or without.
///
/// Received rows are in the buffer's memory ([`Self::received`]) if they lie by rank. They stay there until the next
/// dispatch of the buffer; no peer writes them before this rank's stream has come to that call.
pub struct ExpertBuffer<C: Deref<Target = Communicator>> {
    comm: C,
    shape: ExpertShape,
    /// The most SMs that kernels take; 0 for what is best.
    num_sms: AtomicU32,
    /// Whether calls by rank take handles whose rows lie by expert.
    any_layout: bool,
    /// Where the symmetric memory begins.
    region: u64,
    /// Keeps that memory, if it is the buffer's own.
    _memory: Option<ExpertMemory>,
}

/// Where received rows and what belongs to them lie: addresses. Each part has room for as many rows as the buffer's
/// capacity.
#[derive(Clone, Copy, Debug)]
pub struct ReceivedParts {
    /// The rows.
    pub rows: *mut u8,
    /// Their scales, as many bytes for each as were sent.
    pub scales: *mut u8,
    /// Which experts of this rank each row is for: for each of its `top_k` ids the number of the expert among those of
    /// this rank, or -1, as `i32`.
    pub ids: *mut i32,
    /// The weights of these.
    pub weights: *mut f32,
}

impl<C: Deref<Target = Communicator>> ExpertBuffer<C> {
    /// A buffer for this shape. Its kernels take at most `num_sms` SMs, or what is best. It allocates memory of the
    /// pool: every rank makes its buffers, with the same arguments, at the same place of its sequence of allocations, and
    /// none while a graph is captured. Commit the pool before a capture. On a device it waits for running kernels.
    /// Dropping it waits for nothing, and is possible during a capture: the commit by which its memory returns waits for
    /// the device. Drop it after the graphs that use it.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for an invalid shape; the errors of allocating, and of compiling kernels.
    pub fn new(comm: C, shape: ExpertShape, num_sms: Option<u32>) -> Result<Self> {
        let shape = shape.checked(comm.rank(), comm.world())?;
        // Before memory is allocated: a rank that is refused has allocated as little as one that did not call.
        Self::check_sms(comm.rank(), num_sms)?;
        let bytes = comm.expert_region_bytes(&shape) as u64;
        let memory = ExpertMemory::new(comm.pool(), CONTROL_LANE, bytes)?;
        let region = memory.block().address();
        // SAFETY: the memory is new, has as many bytes, and is kept by the value.
        let buffer = unsafe { Self::in_region(comm, shape, num_sms, region as *mut u8) }?;
        Ok(Self { _memory: Some(memory), ..buffer })
    }

    /// A buffer in memory of the caller.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::new`]; `is_unsupported` where hosts have different numbers of ranks, as buffers need more memory
    /// there.
    ///
    /// # Safety
    ///
    /// `region` is a block of the communicator's pool of at least [`Self::region_bytes`] bytes, at the same offset on every
    /// rank, that stays allocated while the value and calls of it live. Nobody but its calls writes it.
    pub unsafe fn at(
        comm: C,
        shape: ExpertShape,
        num_sms: Option<u32>,
        region: *mut u8,
    ) -> Result<Self> {
        let needed = comm.expert_region_bytes(&shape.checked(comm.rank(), comm.world())?);
        if needed > Self::region_bytes(shape, comm.rank(), comm.world())? {
            return Err(Error::unsupported(format!(
                "experts on rank {}: a buffer in memory of the caller, where hosts have different numbers of ranks: it needs \
                 {needed} bytes; make the buffer with memory of its own",
                comm.rank()
            )));
        }
        // SAFETY: the caller promised the block, which is long enough.
        unsafe { Self::in_region(comm, shape, num_sms, region) }
    }

    /// A buffer in a block that is as long as the communicator needs.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::at`]. The block has as many bytes as `expert_region_bytes` says.
    pub(super) unsafe fn in_region(
        comm: C,
        shape: ExpertShape,
        num_sms: Option<u32>,
        region: *mut u8,
    ) -> Result<Self> {
        let shape = shape.checked(comm.rank(), comm.world())?;
        Self::check_sms(comm.rank(), num_sms)?;
        let num_sms = AtomicU32::new(num_sms.unwrap_or(0));
        comm.lock().engine.load_experts(&shape)?;
        Ok(Self { comm, shape, num_sms, any_layout: false, region: region as u64, _memory: None })
    }

    /// Bytes of the symmetric memory of a buffer of this shape among `world` ranks, on one host or on hosts with equally many
    /// ranks.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for an invalid shape.
    pub fn region_bytes(shape: ExpertShape, rank: u32, world: u32) -> Result<usize> {
        Ok(RegionParts::new(&shape.checked(rank, world)?, world).bytes as usize)
    }

    /// Lets calls by rank take handles whose rows lie by expert. It is for a second buffer of data that belongs to the tokens
    /// of a first one, such as their weights, and that is sent by the first buffer's handles.
    #[must_use]
    pub fn with_any_layout(self) -> Self {
        Self { any_layout: true, ..self }
    }

    /// Returns the shape that the buffer was made for.
    pub fn shape(&self) -> ExpertShape {
        self.shape
    }

    /// The most SMs that its kernels take, if that was given.
    pub fn num_sms(&self) -> Option<u32> {
        Some(self.num_sms.load(Ordering::Relaxed)).filter(|count| *count > 0)
    }

    /// Limits kernels of later calls to `num_sms` SMs; `None` is what is best. A captured call keeps what it was captured with.
    /// It exchanges nothing with other ranks, which may differ.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for less than 2.
    pub fn set_num_sms(&self, num_sms: Option<u32>) -> Result<()> {
        Self::check_sms(self.comm.rank(), num_sms)?;
        self.num_sms.store(num_sms.unwrap_or(0), Ordering::Relaxed);
        Ok(())
    }

    /// Checks that kernels can be limited to `num_sms` SMs. `rank` is for the error's text.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for less than 2.
    pub fn check_sms(rank: u32, num_sms: Option<u32>) -> Result<()> {
        match num_sms {
            Some(count @ 0..2) => Err(Error::invalid_argument(format!(
                "a buffer for experts on rank {rank}: num_sms={count}: kernels take 2 SMs or more"
            ))),
            _ => Ok(()),
        }
    }

    /// The communicator whose calls it makes.
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// Where the parts of a handle lie, as offsets in bytes, and how many bytes it has.
    pub fn handle_parts(&self) -> HandleParts {
        HandleParts::new(&self.shape, self.comm.world())
    }

    /// Where received rows lie.
    pub fn received(&self) -> ReceivedParts {
        let parts = RegionParts::new(&self.shape, self.comm.world());
        ReceivedParts {
            rows: (self.region + parts.rows) as *mut u8,
            scales: (self.region + parts.scales) as *mut u8,
            ids: (self.region + parts.ids) as *mut i32,
            weights: (self.region + parts.weights) as *mut f32,
        }
    }

    /// Returns the parts of the buffer's symmetric memory, in bytes.
    pub fn memory(&self) -> [(&'static str, usize); 4] {
        let parts = RegionParts::new(&self.shape, self.comm.world());
        let end = self.comm.expert_region_bytes(&self.shape) as u64;
        let bytes = |begin: u64, end: u64| (end - begin) as usize;
        [
            ("received_rows", bytes(parts.rows, parts.scales)),
            ("received_scales", bytes(parts.scales, parts.ids)),
            ("routing", bytes(parts.ids, parts.combined)),
            ("combined_rows", bytes(parts.combined, end)),
        ]
    }

    /// The most rows that an output needs room for. By expert, a token has a row for each of its experts here, and each expert's
    /// rows are padded to a multiple of `alignment` rows, which must not be 0. By rank `alignment` says nothing.
    pub fn capacity(&self, by_expert: bool, alignment: u32) -> usize {
        let rows = self.shape.received(self.comm.world());
        if !by_expert {
            return rows;
        }
        let local = self.shape.local_experts(self.comm.world()) as usize;
        rows * self.shape.top_k as usize + local * (alignment.max(1) as usize - 1)
    }

    /// Sends tokens to the ranks of their experts. Ids, weights and tokens are read when the call runs, so that each
    /// replay of a captured graph uses those of that moment; how many tokens there are is captured.
    ///
    /// # Errors
    ///
    /// Besides those of every call, on every rank: `is_invalid_argument` if an id is neither an expert nor -1, which is
    /// named; that id counts as -1. `is_overflow` if a rank has no room for all its rows; the last ones were not written.
    /// The communicator stays usable after these. In host memory the call itself returns the error, on a device
    /// [`Communicator::synchronize`] does.
    ///
    /// # Safety
    ///
    /// Memory that `dispatch` points to is readable, or writable, for its lengths by whoever runs the call, until the
    /// stream is past it, and nobody else touches it meanwhile. `handle` is aligned to 16 bytes, and writable for
    /// [`HandleParts::bytes`]; where `known`, only calls of this buffer wrote it. Where `dispatch.known`, there are
    /// as many tokens as in the call that made the handle.
    pub unsafe fn dispatch_at(
        &self,
        handle: *mut u8,
        dispatch: &DispatchAt,
        stream: &Stream,
    ) -> Result<()> {
        let (mut inner, call) = self.begin_dispatch(handle, dispatch, stream)?;
        // SAFETY: the caller promised that `dispatch` names memory of its lengths, and that the handle is writable
        // for its bytes and, where `known`, one of this buffer; the rest lies in the buffer's own memory, which is as
        // long as `ExpertsWork` takes it to be.
        unsafe { inner.engine.dispatch(&call, stream) }
    }

    /// [`Self::dispatch_at`] of a new routing that waits until it is known how many rows this rank receives. They may
    /// still be on their way then: what `stream` is given next finds them there.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::dispatch_at`], with those that [`Communicator::synchronize`] returns on a device, where
    /// errors about ids and room are those of all calls since it was called last. `is_invalid_argument` where
    /// `dispatch.known`, and `is_invalid_state` while `stream` is captured.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::dispatch_at`].
    pub unsafe fn dispatch_exact_at(
        &self,
        handle: *mut u8,
        dispatch: &DispatchAt,
        stream: &Stream,
    ) -> Result<ReceivedSizes> {
        if dispatch.known {
            let why = "exact sizes of a dispatch with a handle: they are those of the handle";
            return Err(self.decline(why, stream));
        }
        let (mut inner, call) = self.begin_dispatch(handle, dispatch, stream)?;
        // SAFETY: the caller promised that `dispatch` names memory of its lengths, and that the handle is writable
        // for its bytes; the rest lies in the buffer's own memory, which is as long as `ExpertsWork` takes it to be.
        let sizes = unsafe { inner.engine.dispatch_exact(&call, stream) }?;
        let rows_by_expert = if call.mode.by_expert { sizes.rows_by_expert } else { 0 };
        Ok(ReceivedSizes { rows_by_expert, ..sizes })
    }

    /// Checks what a dispatch is given, and begins the call.
    fn begin_dispatch(
        &self,
        handle: *mut u8,
        dispatch: &DispatchAt,
        stream: &Stream,
    ) -> Result<(MutexGuard<'_, Inner>, ExpertCall)> {
        if let Err(why) = self.check_dispatch(handle, dispatch) {
            return Err(self.decline(&why, stream));
        }
        let row_bytes = match dispatch.quantized || dispatch.quantize != ExpertQuantization::None {
            true => self.shape.hidden,
            false => self.shape.row_bytes(),
        };
        let scale_bytes = self.shape.scale_bytes(dispatch.quantize, dispatch.scale_bytes);
        let local = self.shape.local_experts(self.comm.world()) as usize;
        let (output, output_scales, output_capacity, alignment, expert_rows) = match dispatch.layout
        {
            ExpertLayout::ByRank => (std::ptr::null_mut(), std::ptr::null_mut(), 0, 1, 0),
            ExpertLayout::ByExpert { output, scales, capacity, alignment } => {
                (output, scales, capacity, alignment, 0)
            }
            ExpertLayout::Packed { output, scales, rows } => {
                (output, scales, local * rows, 1, rows)
            }
        };
        let work = ExpertsWork {
            input: dispatch.input as u64,
            input_scales: dispatch.scales as u64,
            ids: dispatch.ids as u64,
            weights: dispatch.weights as u64,
            output: output as u64,
            output_scales: output_scales as u64,
            output_capacity: output_capacity as u64,
            expert_rows: expert_rows as u64,
            row_bytes: row_bytes as u64,
            scale_bytes: scale_bytes as u64,
            tokens: dispatch.tokens as u32,
            alignment,
            wide: u32::from(dispatch.ids_dtype == DType::I64),
            known: u32::from(dispatch.known),
            quantize: dispatch.quantize as u32,
            ..self.work(handle)
        };
        let mode = ExpertMode {
            by_expert: !matches!(dispatch.layout, ExpertLayout::ByRank),
            known: dispatch.known,
            weights: false,
            quantized: row_bytes != self.shape.row_bytes() || dispatch.quantized,
            quantize: dispatch.quantize,
            more: dispatch.more,
            scale_bytes: scale_bytes as u32,
            scale_dtype: match scale_bytes {
                0 => 0,
                _ => ExpertShape::scale_dtype(dispatch.quantize, dispatch.scale_dtype) as u8,
            },
        };
        let mut inner = self.comm.begin(stream)?;
        let call = self.call(&mut inner, (OpType::ExpertDispatch, mode), work, stream)?;
        Ok((inner, call))
    }

    /// Sends rows back to the ranks of their tokens, and sums up the rows of each token, in the order of ranks and
    /// in `f32`, beginning with zero. A token without rows becomes zeros. Rows by expert are multiplied by their
    /// weights and summed up on their rank first, in the order of the token's experts; that sum is rounded to the
    /// buffer's type, as it travels. Over hosts, the sum of each other host is rounded to the buffer's type, too, and hosts are
    /// added up in their order.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::dispatch_at`].
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::dispatch_at`]. `handle` is one that a dispatch of this buffer made, with
    /// rows that lay as `combine` says, and of as many tokens. The input has all rows that were received then.
    pub unsafe fn combine_at(
        &self,
        handle: *mut u8,
        combine: &CombineAt,
        stream: &Stream,
    ) -> Result<()> {
        if let Err(why) = self.check_combine(handle, combine) {
            return Err(self.decline(&why, stream));
        }
        let work = ExpertsWork {
            input: combine.input as u64,
            weights: combine.weights as u64,
            output: combine.output as u64,
            input_rows: combine.input_rows as u64,
            tokens: combine.tokens as u32,
            sends_weights: u32::from(!combine.weights.is_null()),
            ..self.work(handle)
        };
        let (by_expert, weights) = (combine.by_expert, !combine.weights.is_null());
        let mode = ExpertMode { by_expert, weights, more: combine.more, ..ExpertMode::default() };
        let mut inner = self.comm.begin(stream)?;
        let call = self.call(&mut inner, (OpType::ExpertCombine, mode), work, stream)?;
        // SAFETY: the caller promised that `combine` names memory of its lengths, and that a dispatch of this buffer
        // made the handle; the rest lies in the buffer's own memory, which is as long as `ExpertsWork` takes it to
        // be.
        unsafe { inner.engine.combine(&call, stream) }
    }

    fn work(&self, handle: *mut u8) -> ExpertsWork {
        ExpertsWork {
            any_layout: self.any_layout.into(),
            ..ExpertsWork::new(&self.shape, self.comm.world(), self.region, handle as u64)
        }
    }

    /// A call, with the buffer's memory in a window, as `begin` has committed what was due.
    fn call(
        &self,
        inner: &mut Inner,
        (operation, mode): (OpType, ExpertMode),
        work: ExpertsWork,
        stream: &Stream,
    ) -> Result<ExpertCall> {
        let described = CallDescription::new(operation).experts(&self.shape, mode);
        self.comm.grow_for_experts(inner, described, stream)?;
        let bytes = self.comm.expert_region_bytes(&self.shape);
        let place = self.comm.place_at(inner, self.region as *mut u8, bytes, stream)?;
        match place {
            Place::Window(_) => {
                let (shape, num_sms) = (self.shape, self.num_sms());
                Ok(ExpertCall { shape, mode, num_sms, work, region: place })
            }
            Place::Unregistered(_) => {
                let why = "its memory is in no window: commit the pool before a capture";
                let why =
                    Error::invalid_state(format!("experts on rank {}: {why}", self.comm.rank()));
                Err(inner.engine.decline(why, stream))
            }
        }
    }

    fn decline(&self, why: &str, stream: &Stream) -> Error {
        let why = Error::invalid_argument(format!("experts on rank {}: {why}", self.comm.rank()));
        self.comm.decline(why, stream)
    }

    fn check_dispatch(
        &self,
        handle: *mut u8,
        dispatch: &DispatchAt,
    ) -> std::result::Result<(), String> {
        let shape = &self.shape;
        let there =
            |at: *const u8, what: &str, align: usize| match (at as usize).is_multiple_of(align) {
                _ if dispatch.tokens > 0 && at.is_null() => Err(format!("no {what}")),
                false => Err(format!("{what} at {at:?}: the address is no multiple of {align}")),
                true => Ok(()),
            };
        self.check_call(handle, dispatch.tokens)?;
        there(dispatch.input, "tokens", 16)?;
        if !dispatch.known {
            if !matches!(dispatch.ids_dtype, DType::I32 | DType::I64) {
                return Err(format!("ids of {}: they are i32 or i64", dispatch.ids_dtype.name()));
            }
            there(dispatch.ids, "ids", dispatch.ids_dtype.size())?;
        }
        let quantizes = dispatch.quantize != ExpertQuantization::None;
        if quantizes && (dispatch.quantized || !shape.hidden.is_multiple_of(SCALE_GROUP)) {
            return Err(format!(
                "{:?} of tokens of {} {}: tokens that are quantised by dispatch are not so before, and have a \
                 multiple of {SCALE_GROUP} channels",
                dispatch.quantize,
                shape.hidden,
                if dispatch.quantized { "f8e4m3" } else { shape.dtype.name() }
            ));
        }
        if dispatch.quantized && !shape.hidden.is_multiple_of(16) {
            return Err(format!(
                "quantised tokens of {} channels: they have a multiple of 16",
                shape.hidden
            ));
        }
        let most = shape.most_scale_bytes();
        if dispatch.scale_bytes > most || (quantizes && dispatch.scale_bytes > 0) {
            return Err(format!(
                "{} bytes of scales for each token: there are at most {most}, an f32 for {SCALE_GROUP} channels each, \
                 and none where dispatch quantises",
                dispatch.scale_bytes
            ));
        }
        if dispatch.scale_bytes > 0 {
            there(dispatch.scales, "scales", 1)?;
        }
        let scale_bytes = shape.scale_bytes(dispatch.quantize, dispatch.scale_bytes);
        if let ExpertLayout::ByExpert { scales, .. } | ExpertLayout::Packed { scales, .. } =
            dispatch.layout
            && scale_bytes > 0
            && scale_bytes.is_multiple_of(4)
            && !(scales as usize).is_multiple_of(4)
        {
            return Err(format!(
                "an output for scales at {scales:?}: where a row has a multiple of 4 bytes of them, so is its address"
            ));
        }
        let local = shape.local_experts(self.comm.world()) as usize;
        let by_expert = match dispatch.layout {
            ExpertLayout::ByRank => None,
            ExpertLayout::ByExpert { output, alignment, capacity, .. } => {
                if alignment == 0 || alignment > 1 << 16 {
                    return Err(format!("alignment={alignment}: it is 1 to 65536"));
                }
                Some((output, capacity))
            }
            ExpertLayout::Packed { output, rows, .. } => {
                if rows == 0 {
                    return Err("an output with no rows for each expert".to_owned());
                }
                if dispatch.known {
                    return Err("a part for each expert, with the routing of a handle".to_owned());
                }
                Some((output, local.saturating_mul(rows)))
            }
        };
        if let Some((output, capacity)) = by_expert {
            if !(output as usize).is_multiple_of(16) || (output.is_null() && capacity > 0) {
                return Err(format!("an output at {output:?}: its address is a multiple of 16"));
            }
            if capacity > i32::MAX as usize {
                return Err(format!("an output of {capacity} rows: it has less than 2^31"));
            }
        }
        Ok(())
    }

    fn check_combine(
        &self,
        handle: *mut u8,
        combine: &CombineAt,
    ) -> std::result::Result<(), String> {
        self.check_call(handle, combine.tokens)?;
        for (at, what) in [(combine.input, "input"), (combine.output.cast_const(), "output")] {
            if !(at as usize).is_multiple_of(16) {
                return Err(format!("{what} at {at:?}: the address is no multiple of 16"));
            }
        }
        if combine.tokens > 0 && combine.output.is_null() {
            return Err("no output".to_owned());
        }
        if !combine.weights.is_null() && !combine.by_expert {
            return Err("weights for rows by rank: those are summed as they are".to_owned());
        }
        Ok(())
    }

    fn check_call(&self, handle: *mut u8, tokens: usize) -> std::result::Result<(), String> {
        if handle.is_null() || !(handle as usize).is_multiple_of(16) {
            return Err(format!("a handle at {handle:?}: its address is a multiple of 16"));
        }
        if tokens > self.shape.max_tokens {
            return Err(format!(
                "{tokens} tokens where the buffer is made for {} (max_tokens)",
                self.shape.max_tokens
            ));
        }
        Ok(())
    }
}

impl<C: Deref<Target = Communicator>> fmt::Debug for ExpertBuffer<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExpertBuffer")
            .field("rank", &self.comm.rank())
            .field("shape", &self.shape)
            .field("num_sms", &self.num_sms())
            .finish_non_exhaustive()
    }
}
