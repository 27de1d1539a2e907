//! How an engine puts kernels and copies on streams.

#![allow(unsafe_code)] // launches kernels, and copies by address

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Result, Stream};

use super::CudaEngine;
use crate::call::CallDescription;
use crate::cuda::driver::api::{CudaHandle, cuda};
use crate::cuda::kernel::generated_kernel::{GeneratedKernel, GeneratedSource};
use crate::cuda::kernel::loaded_kernel::LoadedKernel;
use crate::cuda::kernel::spec::{BARRIER_THREADS, KernelSpec};
use crate::cuda::layout::params::{CallParams, CommFields, Traffic};
use crate::jit::Arch;

impl CudaEngine {
    pub(in super::super) fn kernel(&mut self, spec: KernelSpec) -> Result<LoadedKernel> {
        match &self.rehearsal {
            None => self.kernels.get(spec),
            Some(rehearsal) => rehearsal.loaded(self.kernels.find(spec)),
        }
    }

    pub(in super::super) fn generated_kernel(
        &mut self,
        key: GeneratedKernel,
        source: impl Fn() -> GeneratedSource,
    ) -> Result<LoadedKernel> {
        match &self.rehearsal {
            None => self.kernels.get_generated(key, source),
            Some(rehearsal) => rehearsal.loaded(self.kernels.find_generated(&key)),
        }
    }

    /// Compiles generated kernels, `threads` at a time.
    pub(in super::super) fn compile_generated(
        &self,
        kernels: &[(GeneratedKernel, GeneratedSource)],
        threads: usize,
    ) {
        self.kernels.compile_generated(kernels, threads);
    }

    /// The device's compute capability.
    pub(in super::super) fn arch(&self) -> Arch {
        self.kernels.arch()
    }

    /// The most SMs that kernels of the call under way take.
    pub(in super::super) fn max_sms(&self) -> u32 {
        self.kernels.max_sms()
    }

    /// A call without data: the handshake alone.
    pub(crate) fn handshake_only(&mut self, call: CallDescription, stream: Stream) -> Result<()> {
        self.begin(stream)?;
        self.handshake_before_copies(call, stream)
    }

    /// Opens a fused matmul, whose steps the caller puts on streams.
    pub(crate) fn open_matmul(&mut self, call: CallDescription, stream: Stream) -> Result<()> {
        self.handshake_only(call, stream)?;
        self.mark_earlier_calls(stream)
    }

    /// A call without data that notifies a companion kernel, which is launched after it, when all ranks have
    /// made the call.
    pub(in super::super) fn handshake_with_companion(
        &mut self,
        call: CallDescription,
        stream: Stream,
    ) -> Result<()> {
        let kernel = self.kernel(KernelSpec::barrier(true))?;
        self.launch_handshake(kernel, call, stream)
    }

    /// A call without data before copies, which begin when all ranks have made the call.
    pub(in super::super) fn handshake_before_copies(
        &mut self,
        call: CallDescription,
        stream: Stream,
    ) -> Result<()> {
        let kernel = self.kernel(KernelSpec::barrier(false))?;
        self.launch_handshake(kernel, call, stream)
    }

    /// A call without data behind copies on the stream. It begins when they have ended.
    pub(in super::super) fn handshake_after_copies(
        &mut self,
        call: CallDescription,
        stream: Stream,
    ) -> Result<()> {
        let kernel = self.kernel(KernelSpec::barrier(false))?;
        self.launch_handshake(kernel.after_copies(), call, stream)
    }

    fn launch_handshake(
        &mut self,
        kernel: LoadedKernel,
        call: CallDescription,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the parameters point to nothing but the control block, which the communicator keeps.
        unsafe { self.launch(kernel, (1, BARRIER_THREADS), &CallParams::of(&call), None, stream) }
    }

    /// Puts a kernel that begins with a handshake on the stream, behind what this communicator put on another one before. `grid`
    /// is the number of its blocks, and of threads in each. Kernels of all-to-alls are given `traffic` too.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Kernels::launch`](crate::cuda::kernel::kernels::Kernels::launch).
    pub(in super::super) unsafe fn launch(
        &mut self,
        kernel: LoadedKernel,
        grid: (u32, u32),
        params: &CallParams,
        traffic: Option<&Traffic>,
        stream: Stream,
    ) -> Result<()> {
        self.switch_to(stream)?;
        let params = self.numbered(params);
        // SAFETY: the caller promised that what `params` points to stays mapped until the kernel has run, that nothing
        // else touches it, and that kernels of all-to-alls get their traffic. Numbering a call changes no address.
        unsafe { self.launch_unordered(kernel, grid, &self.comm, &params, traffic, stream) }?;
        if self.is_rehearsing() {
            return Ok(());
        }
        self.note_handshake();
        self.after_call(kernel, stream)
    }

    /// Puts a kernel on the stream without regard to what this communicator put on other streams.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Kernels::launch`](crate::cuda::kernel::kernels::Kernels::launch).
    pub(in super::super) unsafe fn launch_unordered(
        &self,
        kernel: LoadedKernel,
        grid: (u32, u32),
        comm: &CommFields,
        params: &CallParams,
        traffic: Option<&Traffic>,
        stream: Stream,
    ) -> Result<()> {
        if let Some(rehearsal) = &self.rehearsal {
            rehearsal.launch(&kernel, grid);
            return Ok(());
        }
        cuda(self.pool.driver())?.with_context(|| {
            // SAFETY: the caller promised that what `comm` and `params` point to stays mapped until the kernel has run,
            // that nothing else touches it, and that kernels of all-to-alls get their traffic.
            unsafe { self.kernels.launch(kernel, grid, stream, comm, params, traffic) }
        })
    }

    /// Puts a kernel that opens with a handshake and is given `work` besides the call on the stream, behind what this
    /// communicator put on another one before.
    ///
    /// # Safety
    ///
    /// You must keep the promises of
    /// [`Kernels::launch_with_work`](crate::cuda::kernel::kernels::Kernels::launch_with_work).
    pub(in super::super) unsafe fn launch_with_work<W>(
        &mut self,
        kernel: LoadedKernel,
        grid: (u32, u32),
        params: &CallParams,
        work: &W,
        stream: Stream,
    ) -> Result<()> {
        let params = self.numbered(params);
        // SAFETY: the caller promised that what `params` and `work` point to stays mapped until the kernel has run,
        // that nothing else touches it, and that `work` has the layout of the third parameter. Numbering a call changes
        // no address.
        unsafe { self.launch_rest(kernel, grid, &params, work, stream) }?;
        if self.is_rehearsing() {
            return Ok(());
        }
        self.note_handshake();
        Ok(())
    }

    /// [`Self::launch_with_work`] of a kernel without a handshake of its own, which goes on with a call.
    ///
    /// # Safety
    ///
    /// You must keep the promises of
    /// [`Kernels::launch_with_work`](crate::cuda::kernel::kernels::Kernels::launch_with_work).
    pub(in super::super) unsafe fn launch_rest<W>(
        &mut self,
        kernel: LoadedKernel,
        grid: (u32, u32),
        params: &CallParams,
        work: &W,
        stream: Stream,
    ) -> Result<()> {
        self.switch_to(stream)?;
        if let Some(rehearsal) = &self.rehearsal {
            rehearsal.launch(&kernel, grid);
            return Ok(());
        }
        let both = (&self.comm, params);
        cuda(self.pool.driver())?.with_context(|| {
            // SAFETY: the caller promised that what `params` and `work` point to stays mapped until the kernel has run,
            // that nothing else touches it, and that `work` has the layout of the third parameter.
            unsafe { self.kernels.launch_with_work(kernel, grid, stream, both, work) }
        })?;
        self.after_call(kernel, stream)
    }

    /// Compiles and loads kernels ahead of calls.
    pub(in super::super) fn prepare_kernels(&self, specs: &[KernelSpec]) -> Result<()> {
        self.kernels.prepare(self.comm.rank, specs)
    }

    /// Puts one copy on the stream, by a copy engine.
    ///
    /// # Safety
    ///
    /// So many bytes are readable and writable on the device until the stream has done the copy, and nothing else touches
    /// them in a way that collides.
    pub(in super::super) unsafe fn copy_by_engine(
        &self,
        to: u64,
        from: u64,
        bytes: u64,
        stream: Stream,
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        if let Some(rehearsal) = &self.rehearsal {
            rehearsal.copy();
            return Ok(());
        }
        let api = self.api;
        cuda(self.pool.driver())?.with_context(|| {
            // SAFETY: the caller promised that `bytes` bytes are readable at `from` and writable at `to` until the
            // stream has done the copy; the stream is live, as whoever made it of a raw handle promised.
            let code = unsafe { (api.copy)(to, from, bytes as usize, stream.raw() as CudaHandle) };
            CudaDriver::check(code, || format!("copying {bytes} bytes to {to:#x}"))
        })
    }
}
