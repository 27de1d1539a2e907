//! Dispatch to experts and combine, on a device.

#![allow(unsafe_code)] // launches kernels on the caller's promises about raw memory

use symmpool_allocator::{Error, Result, Stream};

use crate::call::experts::{ExpertCall, ExpertQuantization, ExpertShape};
use crate::call::{CallDescription, OpType};
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::mode::{ExpertsMode, KernelMode};
use crate::cuda::kernel::spec::{KernelSpec, THREADS};
use crate::cuda::layout::control::MAX_STAGE_BLOCKS;
use crate::cuda::layout::params::{CallParams, ControlLayout};
use crate::jit::KernelSource;
use crate::jit::sources::{COMBINE, DISPATCH};
use crate::{DType, ReceivedSizes, ReduceOp};

/// Worker blocks of every call at most. With so many, 128 tokens have a block each.
const MAX_WORKER_BLOCKS: u32 = 128;
/// Peer blocks of every call, among which thousands of tokens are divided evenly. Each has a worker block, wherever other
/// communicators or messages leave so many. Dispatches and combines of 4, 16 and 64 MiB on two H200s, in us:
///
/// | peer blocks | alone | beside a communicator that rests | after messages |
/// | --- | --- | --- | --- |
/// | 128 | 36.6, 93, 265 | 41.3, 102, 294 | 39.9, 99, 289 |
/// | 87 | 37.9, 88, 273 | 39.4, 91, 276 | 37.9, 88, 276 |
/// | 260 | 38.1, 100, 292 | 40.0, 100, 297 | 38.1, 99, 292 |
const PEER_BLOCKS: u32 = MAX_STAGE_BLOCKS;
/// The most tokens that a rank dispatches through inboxes: `TILE` in `experts/params.cuh`. More tokens take longer there, as
/// their receiver copies them, than waiting for peers does.
const MAX_DISPATCH_INBOX_TOKENS: u64 = 128;
/// The most tokens of a rank whose rows come back through its inbox. It reads them once wherever they come, so more do: on
/// two H200s, 512 tokens of 7168 channels take 28.5 us so and 32 with flags, by expert 45 and 53.
const MAX_COMBINE_INBOX_TOKENS: u64 = 512;
/// The threads of a block of few tokens. Of such blocks an SM holds several, so that those of a kernel start while those of
/// the kernel before end: on two H200s, dispatch and combine of 8 tokens take 9.7 us with them and 10.5 with twice as many
/// threads. Of more tokens a block has enough to do for more threads: a combine of 128 tokens takes 9.5 and 8.8 us.
const LOW_LATENCY_THREADS: u32 = 256;
/// The most tokens for which a combine has that many threads.
const MAX_LOW_LATENCY_COMBINED: u32 = 64;
// A combine with flags reads chunks, which a dispatch keeps of ranks that sent with flags. So whoever gets rows back with
// flags must have sent with flags.
const _: () = assert!(MAX_COMBINE_INBOX_TOKENS >= MAX_DISPATCH_INBOX_TOKENS);

impl CudaEngine {
    /// Compiles and loads the kernels of a buffer ahead of calls, for all memory that the communicator may have then. A rank
    /// that cannot declines its next call, which the others make with their buffers.
    pub(crate) fn load_experts(&mut self, shape: &ExpertShape) -> Result<()> {
        self.load_kernels_of(shape).map_err(|why| self.decline_outside_calls(why))
    }

    /// Loads like [`Self::load_experts`], and declines nothing.
    pub(crate) fn load_kernels_of(&mut self, shape: &ExpertShape) -> Result<()> {
        // Low-latency calls may measure their waits, in graphs too, where no kernel is loaded.
        let mut specs = vec![KernelSpec::measured_barrier()];
        for layout in self.layouts() {
            for by_expert in [false, true] {
                specs.push(self.combine_spec(shape, by_expert, 0, &layout));
                specs.push(self.combine_spec(shape, by_expert, shape.max_tokens as u32, &layout));
                specs.push(self.dispatch_spec(shape, by_expert, false, &layout));
                specs.push(self.dispatch_spec(shape, by_expert, true, &layout));
            }
        }
        specs.sort();
        specs.dedup();
        self.prepare_kernels(&specs)?;
        self.make_recv_counts()?;
        // Counts of rows, which the ranks tell each other, travel through the LL inbox.
        let (vectors, room) = (self.count_vectors(shape), self.layouts()[0].ll_vectors());
        if vectors > room {
            return Err(Error::unsupported(format!(
                "{} experts on rank {}: their counts take {vectors} vectors of the LL inbox, which has {room}; \
                 make the communicator with more device memory (device_memory_bytes)",
                shape.experts,
                self.rank()
            )));
        }
        Ok(())
    }

    /// Vectors of the LL inbox in which the ranks tell each other of their rows: `CountVectors` in `experts/counts.cuh`.
    fn count_vectors(&self, shape: &ExpertShape) -> u64 {
        let (world, local) = (u64::from(self.world()), shape.local_experts(self.world()));
        world * (1 + world.div_ceil(4) + u64::from(local).div_ceil(4))
    }

    /// How many tokens a rank may have whose rows travel through inboxes, which must have room for them: `InboxRows` and
    /// `InboxDetails` in `experts/inbox.cuh`. It is the same on every rank, and no less in a combine than in a dispatch.
    fn inbox_tokens(&self, operation: OpType, shape: &ExpertShape, layout: &ControlLayout) -> u32 {
        let row = (shape.row_bytes() as u64 / 16).next_multiple_of(16);
        let rows = layout.escaped_slot(self.world()) / 16 / row;
        let top_k = u64::from(shape.top_k);
        let (before, details, most) = if operation == OpType::ExpertDispatch {
            // A row's ids, then its scales, four groups of them in a vector.
            let details = top_k + (shape.groups() as u64).div_ceil(4);
            (self.count_vectors(shape), details, MAX_DISPATCH_INBOX_TOKENS)
        } else {
            // How many rows each rank returns, and weights, four in a vector.
            (u64::from(self.world()), top_k.div_ceil(4), MAX_COMBINE_INBOX_TOKENS)
        };
        let left = layout.ll_vectors() - before;
        rows.min(left / (u64::from(self.world()) * details)).min(most) as u32
    }

    /// Sends tokens to the ranks of their experts.
    ///
    /// # Errors
    ///
    /// The errors of every call.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`ExpertBuffer::dispatch_at`](crate::ExpertBuffer::dispatch_at).
    pub(crate) unsafe fn dispatch(&mut self, call: &ExpertCall, stream: Stream) -> Result<()> {
        self.begin(stream)?;
        let quantizes = call.work.quantize != ExpertQuantization::None as u32;
        let by_expert = call.mode.by_expert;
        let spec = self.dispatch_spec(&call.shape, by_expert, quantizes, &self.control);
        // SAFETY: the caller promised that what `call` points to is readable, or writable, for its lengths until the
        // stream has done the call.
        unsafe { self.launch_call(OpType::ExpertDispatch, spec, call, stream) }
    }

    /// Dispatches like [`Self::dispatch`], and waits until it is known how many rows arrive.
    ///
    /// # Errors
    ///
    /// The errors of every call, and `is_invalid_state` while the stream is captured.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::dispatch`].
    pub(crate) unsafe fn dispatch_exact(
        &mut self,
        call: &ExpertCall,
        stream: Stream,
    ) -> Result<ReceivedSizes> {
        self.ready()?;
        let number = self.call(stream, |engine| {
            if engine.is_capturing(stream) {
                return Err(Error::invalid_state(format!(
                    "experts on rank {}: exact sizes while a graph is captured: nothing runs that could tell them; \
                     read them on the device",
                    engine.rank()
                )));
            }
            let sizes = engine.recv_counts.as_mut();
            let sizes = sizes.ok_or_else(|| Error::invalid_state("no buffer for experts"))?;
            let (to, number) = sizes.next_call();
            let mut call = *call;
            (call.work.sizes, call.work.sizes_number) = (to, number);
            // SAFETY: the caller promised that what `call` points to is readable, or writable, for its lengths until
            // the stream has done the call. The words for sizes are given back behind all kernels.
            unsafe { engine.dispatch(&call, stream) }?;
            Ok(number)
        })?;
        // The call is made, whatever becomes of the wait for its sizes.
        self.await_sizes(number, call.shape.local_experts(self.world()), stream)
    }

    /// Sends rows of experts back, and sums them up.
    ///
    /// # Errors
    ///
    /// The errors of every call.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`ExpertBuffer::combine_at`](crate::ExpertBuffer::combine_at).
    pub(crate) unsafe fn combine(&mut self, call: &ExpertCall, stream: Stream) -> Result<()> {
        self.begin(stream)?;
        let by_expert = call.mode.by_expert;
        let spec = self.combine_spec(&call.shape, by_expert, call.work.tokens, &self.control);
        // SAFETY: the caller promised that what `call` points to is readable, or writable, for its lengths until the
        // stream has done the call, and that a dispatch of this buffer made its handle.
        unsafe { self.launch_call(OpType::ExpertCombine, spec, call, stream) }
    }

    /// # Safety
    ///
    /// You must keep the promises of [`Self::dispatch`], or those of [`Self::combine`] where that is the operation.
    unsafe fn launch_call(
        &mut self,
        operation: OpType,
        spec: KernelSpec,
        call: &ExpertCall,
        stream: Stream,
    ) -> Result<()> {
        let (kernel, threads) = (self.kernel(spec)?, spec.threads);
        let room = kernel.resident(threads).min(kernel.budget.most_blocks);
        let blocks = room.min(call.num_sms.unwrap_or(u32::MAX)).clamp(2, MAX_WORKER_BLOCKS + 1);
        let described =
            CallDescription::new(operation).experts(&call.shape, call.mode).output(call.region);
        let params = CallParams::of(&described.peer_blocks(PEER_BLOCKS));
        let mut work = call.work;
        work.peer_blocks = PEER_BLOCKS;
        work.inbox_tokens = self.inbox_tokens(operation, &call.shape, &self.control);
        // SAFETY: the caller promised that what `call` points to is there until the stream has done the call, and that
        // nothing else touches it; kernels of both operations take its work as their third parameter.
        unsafe { self.launch_with_work(kernel, (blocks, threads), &params, &work, stream) }?;
        self.keep_expert_area();
        Ok(())
    }

    /// The kernel of a dispatch. Tokens that it does not quantise are bytes to it.
    fn dispatch_spec(
        &self,
        shape: &ExpertShape,
        by_expert: bool,
        quantizes: bool,
        layout: &ControlLayout,
    ) -> KernelSpec {
        let only_low_latency = self.has_only_low_latency(OpType::ExpertDispatch, shape, layout);
        let dtype = if quantizes { shape.dtype } else { DType::U8 };
        let threads = if only_low_latency { LOW_LATENCY_THREADS } else { THREADS };
        spec(&DISPATCH, dtype, ExpertsMode { by_expert, quantizes, only_low_latency }, threads)
    }

    /// The kernel of a combine of `tokens` tokens of this rank.
    fn combine_spec(
        &self,
        shape: &ExpertShape,
        by_expert: bool,
        tokens: u32,
        layout: &ControlLayout,
    ) -> KernelSpec {
        let only_low_latency = self.has_only_low_latency(OpType::ExpertCombine, shape, layout);
        let is_low_latency = only_low_latency && tokens <= MAX_LOW_LATENCY_COMBINED;
        let threads = if is_low_latency { LOW_LATENCY_THREADS } else { THREADS };
        spec(
            &COMBINE,
            shape.dtype,
            ExpertsMode { by_expert, quantizes: false, only_low_latency },
            threads,
        )
    }

    /// Whether all rows of a buffer travel through inboxes.
    fn has_only_low_latency(
        &self,
        operation: OpType,
        shape: &ExpertShape,
        layout: &ControlLayout,
    ) -> bool {
        shape.max_tokens <= self.inbox_tokens(operation, shape, layout) as usize
    }
}

fn spec(
    kernel: &'static KernelSource<'static>,
    dtype: DType,
    mode: ExpertsMode,
    threads: u32,
) -> KernelSpec {
    let spec = KernelSpec::reduces(kernel, (dtype, ReduceOp::Sum));
    KernelSpec { mode: KernelMode::Experts(mode), threads, ..spec }
}
