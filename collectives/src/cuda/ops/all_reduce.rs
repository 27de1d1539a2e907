//! All-reduce on a device, and what reduce-scatter has in common with it: which kernels they launch.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::{Result, Stream};

use crate::DType;
use crate::algorithm::{AlgorithmId, CallShape};
use crate::call::{Arguments, StandardCall};
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::launch_config::LaunchConfig;
use crate::cuda::kernel::loaded_kernel::LoadedKernel;
use crate::cuda::kernel::mode::TwoShotCollective;
use crate::cuda::kernel::spec::{KernelSpec, THREADS};
use crate::cuda::layout::params::{CallParams, Control, LL128_PAYLOAD, MAX_PEER_BLOCKS};
use crate::cuda::ops::reduction_call::Work;
use crate::cuda::select::all_reduce::{AllReduce, AllReduceLaunch};
use crate::cuda::select::constraints::AllReduceShape;

/// Most peer blocks of `two_shot_push`. With so many, which all get the same length, 64 and 128 MiB take four
/// H200s 1.0% and 1.5% less time than with the 131 that fit (`cuda_collectives bench`).
const MAX_PUSH_BLOCKS: u32 = 128;

/// Most SMs of an all-reduce in stages beside compute. Beside matrix products of two H100s, 128 MiB take 697 us with 32 SMs
/// and 511 with 48, and cost the products 118 and 191 us; NCCL's take 716 and cost them 186. Reduce-scatters cost them
/// about the same with either number, and programs wait for those sooner.
const ALL_REDUCE_BESIDE_COMPUTE: u32 = 32;

/// How the results of an all-reduce in stages reach peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Results {
    /// Into outputs, which are windows.
    Direct,
    ThroughScratch,
}

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
        let work =
            Work { call, input: from, output: to, bytes, stride, dtype, op, root: 0, stream };
        if self.world() == 1 {
            // SAFETY: the caller promised that `input` is readable and `output` writable for `count` elements until the
            // stream has done the call; `arguments` has both.
            return unsafe { self.copy_alone(call, &arguments, stream) };
        }
        let (dtype, why) = (dtype.name(), why.name());
        let (algorithm, most_sms) = (entry.name.name(), self.most_sms());
        tracing::debug!(bytes, dtype, algorithm, why, most_sms, "all_reduce");
        self.note_algorithm(algorithm, Some(why));
        let launch: unsafe fn(&mut Self, &AllReduce, &Work, bool) -> Result<()> = match entry.launch
        {
            AllReduceLaunch::OneShot => Self::one_shot,
            AllReduceLaunch::OneShotLl128 => Self::one_shot_ll128,
            AllReduceLaunch::OneShotPull => Self::one_shot_pull,
            AllReduceLaunch::TwoShotLamport => Self::two_shot_lamport,
            AllReduceLaunch::TwoShotPush => Self::two_shot_push,
            AllReduceLaunch::TwoShotLl => Self::two_shot_ll,
            AllReduceLaunch::TwoShotPull => Self::two_shot_pull,
            AllReduceLaunch::TwoShotCopy => Self::two_shot_copy,
            AllReduceLaunch::TwoShotStages => Self::two_shot_stages,
        };
        // SAFETY: the caller promised that `input` is readable and `output` writable for `count` elements until the
        // stream has done the call; `work` has their addresses and their length.
        unsafe { launch(self, entry, &work, output.is_window()) }
    }

    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the input and output of `work`.
    pub(in crate::cuda) unsafe fn one_shot(
        &mut self,
        entry: &AllReduce,
        work: &Work,
        _: bool,
    ) -> Result<()> {
        // Small blocks start and end sooner.
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
        unsafe { self.launch_threads(entry, work, work.bytes.div_ceil(16), 32) }
    }

    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the input and output of `work`.
    pub(in crate::cuda) unsafe fn one_shot_ll128(
        &mut self,
        entry: &AllReduce,
        work: &Work,
        _: bool,
    ) -> Result<()> {
        // Eight threads handle a line.
        let threads = work.bytes.div_ceil(LL128_PAYLOAD) * 8;
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
        unsafe { self.launch_threads(entry, work, threads, 64) }
    }

    /// Launches a kernel whose blocks need no blocks of peers: so many threads in blocks of `size`.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the input and output of `work`.
    unsafe fn launch_threads(
        &mut self,
        entry: &AllReduce,
        work: &Work,
        threads: u64,
        size: u32,
    ) -> Result<()> {
        let loaded = self.kernel_of(entry, work)?;
        let config = LaunchConfig::new(&loaded, threads, size, u32::MAX);
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call;
        // the parameters have their addresses.
        unsafe { self.launch_in(loaded, config, &work.params(), work.stream) }
    }

    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the input and output of `work`.
    pub(in crate::cuda) unsafe fn one_shot_pull(
        &mut self,
        entry: &AllReduce,
        work: &Work,
        _: bool,
    ) -> Result<()> {
        let loaded = self.kernel_of(entry, work)?;
        let vectors = work.bytes.div_ceil(16);
        let config = LaunchConfig::new(&loaded.alone(), vectors, 256, MAX_PEER_BLOCKS);
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
        unsafe { self.launch_peer_blocks(loaded, config, work) }
    }

    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the input and output of `work`.
    pub(in crate::cuda) unsafe fn two_shot_pull(
        &mut self,
        entry: &AllReduce,
        work: &Work,
        _: bool,
    ) -> Result<()> {
        let loaded = self.kernel_of(entry, work)?;
        let share = work.bytes.div_ceil(16).div_ceil(u64::from(self.world()));
        let config = LaunchConfig::new(&loaded.alone(), share, THREADS, 256);
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
        unsafe { self.launch_peer_blocks(loaded, config, work) }
    }

    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the input and output of `work`.
    pub(in crate::cuda) unsafe fn two_shot_lamport(
        &mut self,
        _: &AllReduce,
        work: &Work,
        _: bool,
    ) -> Result<()> {
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
        unsafe { self.two_shot(work, TwoShotCollective::AllReduce, true) }
    }

    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the input and output of `work`.
    pub(in crate::cuda) unsafe fn two_shot_ll(
        &mut self,
        _: &AllReduce,
        work: &Work,
        _: bool,
    ) -> Result<()> {
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
        unsafe { self.two_shot(work, TwoShotCollective::AllReduce, false) }
    }

    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the input and output of `work`.
    pub(in crate::cuda) unsafe fn two_shot_stages(
        &mut self,
        _: &AllReduce,
        work: &Work,
        output_window: bool,
    ) -> Result<()> {
        let results = if output_window { Results::Direct } else { Results::ThroughScratch };
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
        unsafe { self.stages(work, TwoShotCollective::AllReduce, results) }
    }

    fn kernel_of(&mut self, entry: &AllReduce, work: &Work) -> Result<LoadedKernel> {
        self.kernel((entry.kernel)(self.world(), (work.dtype, work.op), work.bytes))
    }

    /// Runs a collective of two shots, or of one of them, through inboxes, in as many launches as the inboxes' size requires.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the input and output of `work`.
    pub(in crate::cuda) unsafe fn two_shot(
        &mut self,
        work: &Work,
        collective: TwoShotCollective,
        lamport: bool,
    ) -> Result<()> {
        let ranks = u64::from(self.world());
        // An all-reduce needs room for the inputs and the results of all shares; one shot, for a part of each rank.
        let (shares, most) = if collective == TwoShotCollective::AllReduce {
            let (control, dtype) = (&self.control, work.dtype);
            let most =
                KernelSpec::two_shot_launch(control, self.world(), dtype, lamport, work.bytes);
            (ranks, most)
        } else {
            (1, self.scatter_launch(lamport))
        };
        let threads = match most.min(work.bytes) {
            0..=524_288 => 64,
            524_289..=1_048_576 => 256,
            _ => THREADS,
        };
        let reduction = (work.dtype, work.op);
        let bytes = most.min(work.bytes);
        let loaded =
            self.kernel(KernelSpec::two_shot(self.world(), reduction, collective, lamport, bytes))?;
        let threads = threads.min(loaded.threads);
        for piece in work.pieces(most, 16 * shares) {
            let each = piece.bytes.div_ceil(16).div_ceil(shares);
            let config = LaunchConfig::new(&loaded, each, threads, 264);
            // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the
            // call; a piece lies within them.
            unsafe { self.launch_in(loaded, config, &piece.params(), piece.stream) }?;
        }
        Ok(())
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

    /// Launches a kernel whose blocks of equal index work together on all ranks, as peer blocks. Ranks compare
    /// how many peer blocks there are, so that is as many as the worker blocks of a communicator that has the
    /// device for itself. Where communicators share a device, fewer blocks run, and each does the work of
    /// several peer blocks.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the input and output of `work`.
    pub(in crate::cuda) unsafe fn launch_peer_blocks(
        &mut self,
        kernel: LoadedKernel,
        whole: LaunchConfig,
        work: &Work,
    ) -> Result<()> {
        let work = Work { call: work.call.peer_blocks(whole.worker_blocks()), ..*work };
        let params = CallParams { peer_blocks: whole.worker_blocks(), ..work.params() };
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call;
        // the parameters have their addresses.
        unsafe { self.launch_in(kernel, whole.within_budget(&kernel), &params, work.stream) }
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
            direct: self.direct,
            beside_compute: self.beside_compute,
            streams_may_wait: self.streams_may_wait,
        }
    }

    /// Refuses an all-reduce algorithm that cannot serve a call.
    pub(in crate::cuda) fn check_all_reduce(
        &self,
        id: AlgorithmId,
        shape: &CallShape,
        layout: &Control,
    ) -> Result<()> {
        let windows = (shape.input_window, shape.output_window);
        let shape = self.all_reduce_shape(shape.bytes, shape.dtype, windows);
        shape.resolve(id.all_reduce().unwrap_or_default(), layout).map(drop)
    }

    /// Sends inputs through scratch in stages, and results of an all-reduce into outputs that are windows or through
    /// scratch too, in one launch.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the input and output of `work`.
    pub(in crate::cuda) unsafe fn stages(
        &mut self,
        work: &Work,
        collective: TwoShotCollective,
        results: Results,
    ) -> Result<()> {
        let reduction = (work.dtype, work.op);
        let loaded = self.kernel(KernelSpec::two_shot_stages(reduction, collective))?;
        // Peer blocks divide a share of an all-reduce, and a part of a reduce-scatter.
        let both = collective == TwoShotCollective::AllReduce;
        let loaded = if both { loaded.beside_compute(ALL_REDUCE_BESIDE_COMPUTE) } else { loaded };
        let shares = if both { u64::from(self.world()) } else { 1 };
        let wanted = work.bytes.div_ceil(16).div_ceil(shares);
        let through_scratch = results == Results::ThroughScratch;
        let most = self.control.stage_blocks(self.world(), through_scratch);
        let config = LaunchConfig::new(&loaded.alone(), wanted, THREADS, most);
        let work = Work { root: through_scratch.into(), ..*work };
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call;
        // they are the same in this copy of it.
        unsafe { self.launch_peer_blocks(loaded, config, &work) }
    }

    /// Pushes inputs through scratch and results into outputs that are windows, in as many launches as the scratch's
    /// size requires. Each begins when the peer blocks of all ranks are in step.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the input and output of `work`.
    pub(in crate::cuda) unsafe fn two_shot_push(
        &mut self,
        entry: &AllReduce,
        work: &Work,
        _: bool,
    ) -> Result<()> {
        let shares = u64::from(self.world());
        let loaded = self.kernel_of(entry, work)?;
        let most = self.control.scratch_room(self.world()) * shares;
        for piece in work.pieces(most, 128 * shares) {
            let wanted = piece.bytes.div_ceil(16).div_ceil(shares);
            let config = LaunchConfig::new(&loaded.alone(), wanted, THREADS, MAX_PUSH_BLOCKS);
            // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the
            // call; a piece lies within them.
            unsafe {
                self.launch_peer_blocks(loaded, config.with_leader_place(&loaded, wanted), &piece)
            }?;
        }
        Ok(())
    }
}
