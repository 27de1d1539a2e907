//! The kernels of one communicator: what of a device they may take, and how they are launched.

#![allow(unsafe_code)] // FFI: launching kernels

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;
use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Result, Stream};

use super::api::{Api, Handle};
use super::kernel_spec::Specialty;
use super::modules::Modules;
use super::params::{CallParams, Comm, Traffic};
use super::sm_budget::{Presence, Share};
use crate::row_exchange::RowWork;

/// Threads that blocks have.
pub(super) const SIZES: [u32; 5] = [32, 64, 128, 256, 512];

/// A loaded kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loaded {
    function: Handle,
    /// Blocks that the device runs at once, of each of `SIZES`, as far as the kernel has them.
    resident: [u32; SIZES.len()],
    /// Most threads of a block.
    pub(super) threads: u32,
    /// Of the device.
    pub(super) processors: u32,
    /// What its communicator may take.
    pub(super) share: Share,
}

impl Loaded {
    pub(super) fn new(
        function: Handle,
        resident: [u32; SIZES.len()],
        threads: u32,
        processors: u32,
    ) -> Self {
        Self { function, resident, threads, processors, share: Share::ALL }
    }

    /// Blocks of so many threads that the device runs at once, as it says itself: it counts registers,
    /// shared memory and threads, and has places for blocks, of which devices have 16 to 32 a processor.
    pub(super) fn resident(&self, threads: u32) -> u32 {
        let at = SIZES.iter().position(|size| *size >= threads).unwrap_or(SIZES.len() - 1);
        self.resident[at].max(1)
    }

    /// As if its communicator were alone on the device.
    pub(super) fn alone(self) -> Self {
        Self { share: Share::ALL, ..self }
    }

    /// To be launched behind copies, whose end its blocks cannot wait for by themselves.
    pub(super) fn after_copies(self) -> Self {
        Self { share: Share { early: false, ..self.share }, ..self }
    }
}

/// The kernels of one communicator.
pub(super) struct Kernels {
    api: &'static Api,
    modules: Arc<Modules>,
    presence: Presence,
    /// What the call under way may take.
    share: Share,
    world: u32,
    /// Those that were asked for already.
    known: BTreeMap<Specialty, Loaded>,
}

impl Kernels {
    /// Of a communicator of so many ranks, one of so many that may be at work at once if that was said.
    pub(super) fn new(
        api: &'static Api,
        modules: Arc<Modules>,
        driver: &CudaDriver,
        world: u32,
        concurrent: Option<u32>,
    ) -> Self {
        let (ordinal, processors) = (driver.facts().ordinal, modules.processors());
        let presence = Presence::new(ordinal, processors, world, concurrent);
        let (share, known) = (Share::ALL, BTreeMap::new());
        Self { api, modules, presence, share, world, known }
    }

    /// A call begins, on that stream. What it may take.
    pub(super) fn begin(&mut self, stream: Stream, is_captured: impl FnOnce() -> bool) -> Share {
        self.share = self.presence.share(stream, is_captured);
        self.share
    }

    /// An operation that is no call of all ranks begins. What it may take.
    pub(super) fn begin_apart(&mut self) -> Share {
        self.share = self.presence.apart();
        self.share
    }

    /// The kernel, compiled and loaded if it is not yet, with what it may take.
    pub(super) fn get(&mut self, specialty: Specialty) -> Result<Loaded> {
        let share = self.share;
        if let Some(loaded) = self.known.get(&specialty) {
            return Ok(Loaded { share, ..*loaded });
        }
        let loaded = self.modules.get(self.world, specialty)?;
        self.known.insert(specialty, loaded);
        Ok(Loaded { share, ..loaded })
    }

    /// Keeps what is loaded for as long as the process runs: something of it may be running for ever.
    pub(super) fn keep(&self) {
        std::mem::forget(Arc::clone(&self.modules));
    }

    /// Puts a kernel on a stream. The device's context must be current.
    ///
    /// # Safety
    ///
    /// What the parameters point to stays mapped until the kernel has run, and nothing else
    /// touches it meanwhile but kernels of peers in the same call. Kernels of all-to-alls are given
    /// their traffic.
    pub(super) unsafe fn launch(
        &self,
        kernel: Loaded,
        grid: (u32, u32),
        stream: Stream,
        comm: &Comm,
        call: &CallParams,
        traffic: Option<&Traffic>,
    ) -> Result<()> {
        // As many of them are read as the kernel has parameters.
        let traffic = traffic.map_or(std::ptr::null_mut(), |traffic| {
            (&raw const *traffic).cast_mut().cast::<c_void>()
        });
        let mut arguments: [*mut c_void; 3] =
            [(&raw const *comm).cast_mut().cast(), (&raw const *call).cast_mut().cast(), traffic];
        // SAFETY: the caller's promises; the caller passes traffic to kernels that have it.
        unsafe { self.put(kernel, grid, stream, &mut arguments) }
    }

    /// Puts a kernel of a row exchange on a stream. The device's context must be current.
    ///
    /// # Safety
    ///
    /// As [`Kernels::launch`]; the kernel is one of `row_exchange/row_exchange.cu`.
    pub(super) unsafe fn launch_rows(
        &self,
        kernel: Loaded,
        grid: (u32, u32),
        stream: Stream,
        comm: &Comm,
        work: &RowWork,
    ) -> Result<()> {
        let mut arguments: [*mut c_void; 2] =
            [(&raw const *comm).cast_mut().cast(), (&raw const *work).cast_mut().cast()];
        // SAFETY: the caller's promises.
        unsafe { self.put(kernel, grid, stream, &mut arguments) }
    }

    /// # Safety
    ///
    /// The arguments point to as many values as the kernel has parameters, of their types, and what
    /// these point to is as [`Kernels::launch`] says.
    unsafe fn put(
        &self,
        kernel: Loaded,
        (blocks, threads): (u32, u32),
        stream: Stream,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        // Its blocks may take their places before the stream's kernel before it has ended; they
        // wait for that end themselves (`begin` in `symmpool/ptx.cuh`).
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
            sharedMemBytes: 0,
            hStream: stream.raw() as usize as sys::CUstream,
            attrs: &raw mut overlap,
            numAttrs: kernel.share.early.into(),
        };
        // SAFETY: the configuration and the arguments, which have the kernel's parameter types
        // (checked by size when it was compiled), live until the call returns; the driver copies
        // them. What they point to is the caller's promise.
        let code = unsafe {
            (self.api.launch)(
                &raw const config,
                kernel.function,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        CudaDriver::check(code, || format!("launching {blocks} blocks of {threads} threads"))
    }
}
