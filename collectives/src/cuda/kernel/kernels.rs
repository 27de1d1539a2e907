//! The kernels of one communicator: how much of a device they may occupy, and how they are launched.

#![allow(unsafe_code)] // FFI: launching kernels

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;
use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Result, Stream};

use super::generated_kernel::{GeneratedKernel, GeneratedSource};
use super::modules::Modules;
use super::sm_budget::{BudgetMember, BudgetOptions, Lifted, SmBudget};
use super::spec::KernelSpec;
use crate::cuda::driver::api::Api;
use crate::cuda::kernel::loaded_kernel::LoadedKernel;
use crate::cuda::layout::params::{CallParams, CommFields, Traffic};
use crate::jit::Arch;

/// The kernels of one communicator.
pub(in crate::cuda) struct Kernels {
    api: &'static Api,
    modules: Arc<Modules>,
    member: BudgetMember,
    /// The budget of the call under way.
    budget: SmBudget,
    world: u32,
    /// The kernels that calls have used already.
    known: BTreeMap<KernelSpec, LoadedKernel>,
    known_generated: BTreeMap<GeneratedKernel, LoadedKernel>,
}

impl Kernels {
    /// The kernels of a communicator of `world` ranks.
    pub(in crate::cuda) fn new(
        api: &'static Api,
        modules: Arc<Modules>,
        driver: &CudaDriver,
        world: u32,
        options: BudgetOptions,
    ) -> Self {
        let (ordinal, sm_count) = (driver.facts().ordinal, modules.sm_count());
        let member = BudgetMember::new(ordinal, sm_count, world, options);
        let (known, known_generated) = (BTreeMap::new(), BTreeMap::new());
        Self { api, modules, member, budget: SmBudget::ALL, world, known, known_generated }
    }

    /// Whether there are other communicators on the device. Kernels of theirs that are still to come may have all of it.
    pub(in crate::cuda) fn has_company(&self) -> bool {
        self.member.has_company()
    }

    /// How many these are.
    pub(in crate::cuda) fn other_communicators(&self) -> u32 {
        self.member.others()
    }

    /// Begins a call on that stream. Returns its budget.
    pub(in crate::cuda) fn begin(
        &mut self,
        stream: Stream,
        is_captured: impl FnOnce() -> bool,
    ) -> SmBudget {
        self.budget = self.member.budget_in_call(stream, is_captured);
        self.budget
    }

    /// The budget of the call under way.
    pub(in crate::cuda) fn budget(&self) -> SmBudget {
        self.budget
    }

    /// The call under way goes on with that budget.
    pub(in crate::cuda) fn set_budget(&mut self, budget: SmBudget) {
        self.budget = budget;
    }

    /// The budget that a call on that stream would have now. Changes nothing.
    pub(in crate::cuda) fn budget_if_called(
        &self,
        stream: Stream,
        is_captured: bool,
        lifted: Lifted,
    ) -> SmBudget {
        self.member.budget_if_called(stream, is_captured, lifted)
    }

    /// Calls [`BudgetMember::share_sms_of_several`], for a kernel that has as many blocks on all ranks.
    pub(in crate::cuda) fn share_sms_of_several(&self) {
        self.member.share_sms_of_several();
    }

    /// Later calls take no more SMs than that.
    pub(in crate::cuda) fn set_sm_budget(&mut self, most: Option<u32>) {
        self.member.set_most(most);
    }

    /// The device's compute capability.
    pub(in crate::cuda) fn arch(&self) -> Arch {
        self.modules.arch()
    }

    /// The device's SMs.
    pub(in crate::cuda) fn sm_count(&self) -> u32 {
        self.modules.sm_count()
    }

    /// The most SMs that kernels of the call under way take.
    pub(in crate::cuda) fn max_sms(&self) -> u32 {
        self.budget.most_blocks.min(self.sm_count())
    }

    /// Begins an operation that is no call of all ranks. Returns its budget.
    pub(in crate::cuda) fn begin_outside_calls(&mut self) -> SmBudget {
        self.budget = self.member.budget_outside_calls();
        self.budget
    }

    /// Compiles and loads kernels ahead of calls, several at a time.
    pub(in crate::cuda) fn prepare(&self, rank: u32, specs: &[KernelSpec]) -> Result<()> {
        let specs = Modules::in_company(specs, self.has_company());
        self.modules.make_ready((rank, self.world), &specs)
    }

    /// Lets kernels of a call share the device's SMs with others as its budget says.
    pub(in crate::cuda) fn share(&self, comm: &mut CommFields) {
        let budget = self.budget;
        comm.early = budget.early.into();
        comm.narrow_blocks = budget.narrow_blocks.unwrap_or(0);
        comm.sm_lock = self.modules.sm_lock();
        (comm.member, comm.sm_tag) = self.member.place();
    }

    /// The kernel with its budget. Compiles and loads it if need be.
    pub(in crate::cuda) fn get(&mut self, spec: KernelSpec) -> Result<LoadedKernel> {
        let (alone, sharing) = (self.load(spec)?, spec.sharing(self.budget.shares()));
        let loaded = if sharing == spec { alone } else { self.load(sharing)?.sharing(alone) };
        Ok(loaded.with_budget(self.budget))
    }

    fn load(&mut self, spec: KernelSpec) -> Result<LoadedKernel> {
        if let Some(loaded) = self.known.get(&spec) {
            return Ok(*loaded);
        }
        let loaded = self.modules.get(self.world, spec)?;
        self.known.insert(spec, loaded);
        Ok(loaded)
    }

    /// The kernel with its budget, if some communicator of the process has loaded it.
    pub(in crate::cuda) fn find(&self, spec: KernelSpec) -> Option<LoadedKernel> {
        let found = |spec: KernelSpec| {
            self.known.get(&spec).copied().or_else(|| self.modules.find(self.world, spec))
        };
        let (alone, sharing) = (found(spec)?, spec.sharing(self.budget.shares()));
        let loaded = if sharing == spec { alone } else { found(sharing)?.sharing(alone) };
        Some(loaded.with_budget(self.budget))
    }

    /// [`Self::find`] for a generated kernel.
    pub(in crate::cuda) fn find_generated(&self, key: &GeneratedKernel) -> Option<LoadedKernel> {
        let found = |key: &GeneratedKernel| {
            self.known_generated.get(key).copied().or_else(|| self.modules.find_generated(key))
        };
        let alone = found(&GeneratedKernel { shares_sms: false, ..*key })?;
        let loaded = if key.shares_sms { found(key)?.sharing(alone) } else { alone };
        Some(loaded.with_budget(self.budget))
    }

    /// A generated kernel, with its budget. `source` gives its source, if it is not compiled yet.
    pub(in crate::cuda) fn get_generated(
        &mut self,
        key: GeneratedKernel,
        source: impl Fn() -> GeneratedSource,
    ) -> Result<LoadedKernel> {
        let alone = self.load_generated(GeneratedKernel { shares_sms: false, ..key }, &source)?;
        let loaded =
            if key.shares_sms { self.load_generated(key, source)?.sharing(alone) } else { alone };
        Ok(loaded.with_budget(self.budget))
    }

    fn load_generated(
        &mut self,
        key: GeneratedKernel,
        source: impl FnOnce() -> GeneratedSource,
    ) -> Result<LoadedKernel> {
        if let Some(loaded) = self.known_generated.get(&key) {
            return Ok(*loaded);
        }
        let loaded = self.modules.get_generated(key, source)?;
        self.known_generated.insert(key, loaded);
        Ok(loaded)
    }

    /// Compiles generated kernels, `threads` at a time, and loads none.
    pub(in crate::cuda) fn compile_generated(
        &self,
        kernels: &[(GeneratedKernel, GeneratedSource)],
        threads: usize,
    ) {
        self.modules.compile_generated(kernels, threads);
    }

    /// Keeps loaded kernels for as long as the process runs, as one of them may never end.
    pub(in crate::cuda) fn keep(&self) {
        std::mem::forget(Arc::clone(&self.modules));
    }

    /// Keeps the communicator among those of the device for as long as the process runs, for the same reason.
    pub(in crate::cuda) fn keep_place(&mut self) {
        self.member.keep();
    }

    /// Puts a kernel on a stream. The device's context must be current.
    ///
    /// # Safety
    ///
    /// What the parameters point to stays mapped until the kernel has run, and nothing else
    /// touches it meanwhile but kernels of peers in the same call. The kernel has two parameters, or its third is
    /// [`Traffic`] and `traffic` is not `None`.
    pub(in crate::cuda) unsafe fn launch(
        &self,
        kernel: LoadedKernel,
        grid: (u32, u32),
        stream: Stream,
        comm: &CommFields,
        call: &CallParams,
        traffic: Option<&Traffic>,
    ) -> Result<()> {
        // The driver reads as many of these as the kernel has parameters.
        let traffic = traffic.map_or(std::ptr::null_mut(), |traffic| {
            (&raw const *traffic).cast_mut().cast::<c_void>()
        });
        let mut arguments: [*mut c_void; 3] =
            [(&raw const *comm).cast_mut().cast(), (&raw const *call).cast_mut().cast(), traffic];
        // SAFETY: the arguments point to the first two parameters, which all kernels have, and to the traffic, which
        // the caller promised to give to kernels that have it. What these point to stays mapped, as the caller
        // promised, until the kernel has run.
        unsafe { self.launch_with(kernel, grid, stream, &mut arguments) }
    }

    /// Puts a kernel on a stream that is given `work` besides the call. The device's context must be current.
    ///
    /// # Safety
    ///
    /// Callers promise what [`Kernels::launch`] says, and that `work` has the layout of the kernel's third parameter, if it has one.
    pub(in crate::cuda) unsafe fn launch_with_work<W>(
        &self,
        kernel: LoadedKernel,
        grid: (u32, u32),
        stream: Stream,
        (comm, call): (&CommFields, &CallParams),
        work: &W,
    ) -> Result<()> {
        let mut arguments: [*mut c_void; 3] = [
            (&raw const *comm).cast_mut().cast(),
            (&raw const *call).cast_mut().cast(),
            (&raw const *work).cast_mut().cast(),
        ];
        // SAFETY: the arguments point to the first two parameters, which all kernels have, and to `work`, which the
        // caller promised to have the layout of the third. What these point to stays mapped, as the caller promised,
        // until the kernel has run.
        unsafe { self.launch_with(kernel, grid, stream, &mut arguments) }
    }

    /// # Safety
    ///
    /// The arguments point to as many values as the kernel has parameters, of their types, and what
    /// these point to is as [`Kernels::launch`] says.
    unsafe fn launch_with(
        &self,
        kernel: LoadedKernel,
        (blocks, threads): (u32, u32),
        stream: Stream,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        // The kernel may start before the one before it on the stream has ended; its blocks wait for that end
        // themselves (`begin_kernel` in `symmpool/impl/ptx.cuh`).
        let mut overlap = sys::CUlaunchAttribute {
            id:
                sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue_union { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: kernel.shared_bytes,
            hStream: stream.raw() as usize as sys::CUstream,
            attrs: &raw mut overlap,
            numAttrs: kernel.budget.starts_early.into(),
        };
        // SAFETY: the configuration and the arguments, which have the kernel's parameter types,
        // as the caller promised, live until the call returns; the driver copies
        // them. What they point to is the caller's promise.
        let code = unsafe {
            (self.api.launch)(
                &raw const config,
                kernel.function_for(blocks),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        CudaDriver::check(code, || format!("launching {blocks} blocks of {threads} threads"))
    }
}
