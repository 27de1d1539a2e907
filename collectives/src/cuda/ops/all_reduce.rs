//! All-reduce on a device: checks of a call, and launches for the algorithms of `all_reduce`.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::{Result, Stream};

use crate::DType;
use crate::algorithm::{AlgorithmId, CallShape};
use crate::call::{Arguments, StandardCall};
use crate::cuda::all_reduce::constraints::AllReduceShape;
use crate::cuda::all_reduce::row::AllReduceCall;
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::launch_config::LaunchConfig;
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::loaded_kernel::LoadedKernel;
use crate::cuda::kernel::reduction_call::ReductionCall;
use crate::cuda::kernel::spec::KernelSpec;
use crate::cuda::layout::params::{CallParams, ControlLayout};
use crate::cuda::ops::copy_engine::reduce_arrived::PromisedReduction;

impl CudaEngine {
    /// Reduces `count` elements of every rank's `input` into every rank's `output`, on `stream`.
    ///
    /// # Safety
    ///
    /// `input` is readable and `output` writable on the device for `count` elements, until the
    /// stream has done the call; nothing else touches them meanwhile, in any rank's slot if they
    /// are windows.
    pub(crate) unsafe fn all_reduce(&mut self, call: &StandardCall, stream: Stream) -> Result<()> {
        self.begin(stream)?;
        let StandardCall { algorithm, arguments, .. } = *call;
        let Arguments { input, output, count, dtype, op, .. } = arguments;
        self.check_reducible("all_reduce", dtype, stream)?;
        let bytes = self.byte_count("all_reduce", count, dtype, stream)?;
        if bytes == 0 {
            return self.handshake_only(call.describe(), stream);
        }
        let windows = (input.is_window(), output.is_window());
        let shape = self.all_reduce_shape(bytes, dtype, windows);
        let requested = algorithm.all_reduce().unwrap_or_default();
        let (entry, why) = match shape.entry(requested, &self.control, &self.measured) {
            Ok(found) => found,
            Err(error) => return Err(self.decline(error, stream)),
        };
        let (from, to) = (self.address(input), self.address(output));
        if from != to {
            self.check_disjoint("all_reduce", (from, bytes), (to, bytes), stream)?;
        }
        let call = call
            .describe()
            .algorithm(AlgorithmId::of_all_reduce(entry.name))
            .input(input)
            .output(output)
            .in_place(from == to);
        let stride = 0;
        let work = ReductionCall {
            call,
            input: from,
            output: to,
            bytes,
            stride,
            dtype,
            op,
            root: 0,
            stream,
        };
        if self.world() == 1 {
            // SAFETY: the caller promised that `input` is readable and `output` writable for `count` elements until the
            // stream has done the call; `arguments` has both.
            return unsafe { self.copy_alone(call, &arguments, stream) };
        }
        let (dtype, why) = (dtype.name(), why.name());
        let (algorithm, max_sms) = (entry.name.name(), self.max_sms());
        tracing::debug!(bytes, dtype, algorithm, why, max_sms, "all_reduce");
        self.note_algorithm(algorithm, Some(why));
        // SAFETY: the caller promised that `input` is readable and `output` writable for `count` elements until the
        // stream has done the call; `work` has their addresses and their length.
        unsafe {
            (entry.launch)(
                self,
                &AllReduceCall { entry, work: &work, output_window: output.is_window() },
            )
        }
    }

    /// Launches a kernel in that configuration.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the input and output in `params`.
    unsafe fn launch_in(
        &mut self,
        kernel: LoadedKernel,
        config: LaunchConfig,
        params: &CallParams,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that the input and output in `params` are there until the stream has done the
        // call, and that nothing else touches them. All-to-alls, whose kernels are given traffic, are not launched by
        // this.
        unsafe { self.launch(kernel, (config.blocks, config.threads), params, None, stream) }
    }

    /// Returns what the algorithm of an all-reduce here is chosen by.
    pub(in crate::cuda) fn all_reduce_shape(
        &self,
        bytes: u64,
        dtype: DType,
        (input_window, output_window): (bool, bool),
    ) -> AllReduceShape {
        AllReduceShape {
            bytes,
            dtype,
            world: self.world(),
            input_window,
            output_window,
            nvlinked: self.nvlinked,
            beside_compute: self.beside_compute,
            streams_may_wait: self.streams_may_wait,
        }
    }

    /// Refuses an all-reduce algorithm that cannot serve a call.
    pub(in crate::cuda) fn check_all_reduce(
        &self,
        id: AlgorithmId,
        shape: &CallShape,
        layout: &ControlLayout,
    ) -> Result<()> {
        let windows = (shape.input_window, shape.output_window);
        let shape = self.all_reduce_shape(shape.bytes, shape.dtype, windows);
        shape.resolve(id.all_reduce().unwrap_or_default(), layout).map(drop)
    }
}

impl KernelLauncher for CudaEngine {
    fn world(&self) -> u32 {
        Self::world(self)
    }

    fn control(&self) -> &ControlLayout {
        &self.control
    }

    fn kernel(&mut self, spec: KernelSpec) -> Result<LoadedKernel> {
        Self::kernel(self, spec)
    }

    unsafe fn launch_blocks(
        &mut self,
        kernel: LoadedKernel,
        config: LaunchConfig,
        work: &ReductionCall,
    ) -> Result<()> {
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call;
        // the parameters have their addresses.
        unsafe { self.launch_in(kernel, config, &work.params(), work.stream) }
    }

    unsafe fn launch_peer_blocks(
        &mut self,
        kernel: LoadedKernel,
        whole: LaunchConfig,
        work: &ReductionCall,
    ) -> Result<()> {
        let work = ReductionCall { call: work.call.peer_blocks(whole.worker_blocks()), ..*work };
        let params = CallParams { peer_blocks: whole.worker_blocks(), ..work.params() };
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call;
        // the parameters have their addresses.
        unsafe { self.launch_in(kernel, whole.within_budget(&kernel), &params, work.stream) }
    }

    unsafe fn copy_all_reduce(&mut self, work: &ReductionCall, output_window: bool) -> Result<()> {
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
        let work = unsafe { PromisedReduction::new(work) };
        self.two_shot_copy(&work, output_window)
    }

    unsafe fn copy_reduce_scatter(&mut self, work: &ReductionCall) -> Result<()> {
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
        let work = unsafe { PromisedReduction::new(work) };
        self.scatter_by_copies(&work)
    }
}
