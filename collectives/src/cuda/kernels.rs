//! Compiled kernels, loaded into the device's context when first needed.

#![allow(unsafe_code)] // FFI: loading modules and launching kernels

use std::collections::BTreeMap;
use std::ffi::{CString, c_int, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;
use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Error, Result, Stream};

use super::api::{Api, Handle};
use super::fault::RECORD_BYTES;
use super::params::{CallParams, Comm, Traffic};
use super::sharing::{Presence, Share};
use crate::jit::{Arch, Jit, JitOptions, Kernel, Variant};
use crate::row_exchange::RowWork;
use crate::{DType, ReduceOp};

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Specialty {
    pub(super) kernel: &'static str,
    pub(super) dtype: u8,
    pub(super) op: u8,
    /// Bits of `SHOTS`; 0 where the kernel has none.
    pub(super) shots: u8,
    pub(super) sentinels: bool,
    pub(super) threads: u32,
    /// Blocks that a processor is to hold, within its registers.
    pub(super) blocks: u32,
}

impl Specialty {
    /// For a kernel that moves bytes or nothing.
    pub(super) fn new(kernel: &'static Kernel, threads: u32) -> Self {
        let (dtype, op) = (DType::U8 as u8, ReduceOp::Sum as u8);
        Self { kernel: kernel.name, dtype, op, shots: 0, sentinels: false, threads, blocks: 1 }
    }
}

/// A loaded kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loaded {
    function: Handle,
    /// Blocks that the device runs at once.
    pub(super) resident: u32,
    /// Most threads of a block.
    pub(super) threads: u32,
    /// Of the device.
    pub(super) processors: u32,
    /// What its communicator may take.
    pub(super) share: Share,
}

impl Loaded {
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
    arch: Arch,
    processors: u32,
    presence: Presence,
    /// What the call under way may take.
    share: Share,
    world: u32,
    loaded: BTreeMap<Specialty, Loaded>,
    modules: Vec<Handle>,
}

/// One compiler for the process, made when first needed; images are shared between communicators.
fn jit(driver: &CudaDriver) -> &'static Jit {
    static JIT: OnceLock<Jit> = OnceLock::new();
    JIT.get_or_init(|| {
        let driver_major = Some(driver.facts().driver_version / 1000);
        Jit::new(JitOptions { driver_major, ..JitOptions::from_env() })
    })
}

impl Kernels {
    /// Of a communicator of so many ranks, one of so many that may be at work at once if that was said.
    pub(super) fn new(
        api: &'static Api,
        driver: &CudaDriver,
        world: u32,
        concurrent: Option<u32>,
    ) -> Result<Self> {
        use sys::CUdevice_attribute as Attribute;
        let number = |which: Attribute| {
            driver.attribute(which as u32).map(|number| u32::try_from(number).unwrap_or(0))
        };
        let processors = number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1);
        let presence = Presence::new(driver.facts().ordinal, processors, world, concurrent);
        Ok(Self {
            api,
            arch: Arch::new(
                number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            )?,
            processors,
            presence,
            share: Share::ALL,
            world,
            loaded: BTreeMap::new(),
            modules: Vec::new(),
        })
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
    pub(super) fn get(&mut self, driver: &CudaDriver, specialty: Specialty) -> Result<Loaded> {
        let share = self.share;
        if let Some(loaded) = self.loaded.get(&specialty) {
            return Ok(Loaded { share, ..*loaded });
        }
        let loaded = driver.with_context_unordered(|| self.load(driver, specialty))?;
        self.loaded.insert(specialty, loaded);
        Ok(Loaded { share, ..loaded })
    }

    fn load(&mut self, driver: &CudaDriver, specialty: Specialty) -> Result<Loaded> {
        let Specialty { kernel, dtype, op, shots, sentinels, threads, blocks } = specialty;
        let kernel = Kernel::named(kernel);
        let numbers = [
            ("WORLD", u64::from(self.world)),
            ("DTYPE", u64::from(dtype)),
            ("OP", u64::from(op)),
            ("SHOTS", u64::from(shots)),
            ("THREADS", u64::from(threads)),
            ("BLOCKS", u64::from(blocks)),
            ("COMM_BYTES", size_of::<Comm>() as u64),
            ("CALL_BYTES", size_of::<CallParams>() as u64),
            ("FAULT_BYTES", RECORD_BYTES as u64),
            ("TRAFFIC_BYTES", size_of::<Traffic>() as u64),
            ("ROW_WORK_BYTES", size_of::<RowWork>() as u64),
        ]
        .map(|(name, value)| (name, value.to_string()));
        let mut defines: Vec<(&str, &str)> =
            numbers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        if sentinels {
            defines.push(("SENTINELS", "1"));
        }
        let variant = Variant { kernel, defines: &defines };
        let jit = jit(driver);
        let image = jit.compile(&variant, self.arch)?;
        tracing::debug!(%variant, kind = ?image.kind, compiled = jit.compiled(), "kernel");
        let mut module: Handle = 0;
        // SAFETY: the image is what the compiler made for this device, whole (PTX with its NUL);
        // the driver copies it.
        let code = unsafe { (self.api.module_load)(&raw mut module, image.bytes.as_ptr().cast()) };
        CudaDriver::check(code, || format!("loading the kernel {variant}"))?;
        self.modules.push(module);
        let entry = CString::new(kernel.entry)
            .map_err(|_| Error::system("loading a kernel", "a name with a NUL"))?;
        let mut function: Handle = 0;
        // SAFETY: the module was just loaded; writes one handle through a valid pointer.
        let code = unsafe { (self.api.module_function)(&raw mut function, module, entry.as_ptr()) };
        CudaDriver::check(code, || format!("finding {} in its module", kernel.entry))?;
        // A processor divides its memory into cache and shared memory by the kernel that comes to it
        // when it is idle, and takes no block of one that wants another division until it is idle
        // again. Kernels that wait must not keep away those that they wait for.
        let (which, all_cache) =
            (sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 0);
        // SAFETY: the function is of a loaded module; the attribute is a number.
        let code = unsafe { (self.api.function_set)(function, which as c_int, all_cache) };
        CudaDriver::check(code, || format!("dividing a processor's memory for {variant}"))?;
        let mut blocks: c_int = 0;
        // SAFETY: the function is of a loaded module; writes one int through a valid pointer.
        let code = unsafe { (self.api.occupancy)(&raw mut blocks, function, threads as c_int, 0) };
        CudaDriver::check(code, || format!("asking how many blocks of {variant} fit"))?;
        let resident = u32::try_from(blocks).unwrap_or(0).max(1) * self.processors;
        let (processors, share) = (self.processors, self.share);
        Ok(Loaded { function, resident, threads, processors, share })
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
    /// As [`Kernels::launch`]; the kernel is one of `row_exchange.cu`.
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
        // wait for that end themselves (`begin` in comm.cuh).
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

    /// Unloads everything; nothing of it may be running. The context must be current.
    pub(super) fn unload(&mut self) {
        self.loaded.clear();
        for module in self.modules.drain(..) {
            // SAFETY: loaded by this value and given up here.
            let code = unsafe { (self.api.module_unload)(module) };
            if let Err(error) = CudaDriver::check(code, || "unloading a module".to_owned()) {
                tracing::debug!(%error, "at the end of a communicator");
            }
        }
    }
}
