//! Compiled kernels, loaded into a device's context once for all communicators of the process there.
//!
//! Loading code may wait for kernels that run in the context, as CUDA's documentation of lazy loading says. Our
//! kernels wait on the device for other ranks. If a rank loaded code meanwhile, because it comes to another
//! communicator first, ranks could wait for each other for ever. So the kernels that calls usually need are loaded
//! when a communicator is made, in the same order on all ranks, before any of its calls can wait.

#![allow(unsafe_code)] // FFI: loading modules

use std::collections::BTreeMap;
use std::ffi::{CString, c_int};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Driver, Error, Result};

use super::generated_kernel::{GeneratedKernel, GeneratedSource};
use super::loaded_kernel::{LoadedKernel, SIZES};
use super::spec::KernelSpec;
use crate::cuda::driver::api::{Api, CudaHandle, cuda};
use crate::cuda::layout::params::SmLock;
use crate::jit::{Arch, Image, Jit, JitOptions, KernelSource, Variant};

/// Compiling and loading a kernel that takes longer has waited for something, and is logged.
const LONG: Duration = Duration::from_secs(1);
/// How many threads of a rank compile at once.
const COMPILER_THREADS: usize = 4;

/// The number of ranks of a communicator, and what the kernel is compiled for.
type KernelKey = (u32, KernelSpec);

/// The kernels in one device's context.
pub(in crate::cuda) struct Modules {
    api: &'static Api,
    /// Keeps the context alive.
    driver: Driver,
    arch: Arch,
    sm_count: u32,
    loaded: Mutex<BTreeMap<KernelKey, (LoadedKernel, CudaHandle)>>,
    /// Generated kernels.
    generated: Mutex<BTreeMap<GeneratedKernel, (LoadedKernel, CudaHandle)>>,
    /// The address of the [`SmLock`] of the process's communicators on the device.
    sm_lock: u64,
    /// Held while a kernel is loaded, which may take long. Kernels that are loaded already are found meanwhile.
    loading: Mutex<()>,
}

/// The compiler of the process, made when first needed. Compiled images are shared between devices.
fn jit(driver: &CudaDriver) -> &'static Jit {
    static JIT: OnceLock<Jit> = OnceLock::new();
    JIT.get_or_init(|| {
        let driver_major = Some(driver.facts().driver_version / 1000);
        Jit::new(JitOptions { driver_major, ..JitOptions::from_env() })
    })
}

/// Compiles a kernel for `world` ranks.
fn compile_with(
    jit: &Jit,
    arch: Arch,
    kernel: &KernelSource<'_>,
    world: u32,
    spec: &KernelSpec,
) -> Result<(Image, String)> {
    let KernelSpec {
        dtype, op, mode, lamport, threads, min_blocks_per_sm: blocks, shares_sms, ..
    } = *spec;
    let numbers = [
        ("WORLD", u64::from(world)),
        ("DTYPE", u64::from(dtype)),
        ("OP", u64::from(op)),
        ("THREADS", u64::from(threads)),
        ("BLOCKS", u64::from(blocks)),
    ]
    .map(|(name, value)| (name, value.to_string()));
    let mut defines: Vec<(&str, &str)> =
        numbers.iter().map(|(name, value)| (*name, value.as_str())).collect();
    defines.push(("PROTOCOL", if lamport { "LAMPORT" } else { "LL" }));
    defines.extend(mode.defines());
    if shares_sms {
        defines.push(("SHARES_SMS", "1"));
    }
    let variant = Variant { kernel, defines: &defines };
    let image = jit.compile(&variant, arch)?;
    tracing::debug!(%variant, kind = ?image.kind, compiled = jit.compiled(), "kernel");
    Ok((image, variant.to_string()))
}

/// Compiles a kernel for devices of an architecture, of which none need be there.
pub(in crate::cuda) fn compile_without_device(
    (major, minor): (u32, u32),
    (key, source): (&GeneratedKernel, &GeneratedSource),
) -> Result<Image> {
    static JIT: OnceLock<Jit> = OnceLock::new();
    let jit = JIT.get_or_init(|| Jit::new(JitOptions::from_env()));
    let GeneratedSource { name, path, entry, source } = source;
    let kernel = KernelSource { name, path, entry, source, asks_for_blocks: false, variants: &[] };
    let (image, _) = compile_with(jit, Arch::new(major, minor)?, &kernel, key.world, &key.spec())?;
    Ok(image)
}

/// The number of a device's SMs.
pub(crate) fn sm_count(driver: &Driver) -> Result<u32> {
    let which = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as u32;
    Ok(u32::try_from(cuda(driver)?.attribute(which)?).unwrap_or(0).max(1))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does `work` for every number below `count`, on as many threads as there are cores, but no more than `most`.
fn at_once(count: usize, most: usize, work: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    let threads = thread::available_parallelism().map_or(1, usize::from).min(most);
    thread::scope(|scope| {
        for _ in 0..threads.min(count) {
            scope.spawn(|| {
                loop {
                    let nth = next.fetch_add(1, Ordering::Relaxed);
                    if nth >= count {
                        return;
                    }
                    work(nth);
                }
            });
        }
    });
}

impl Modules {
    /// The modules of the driver's device, which all of the process's communicators on it share.
    pub(in crate::cuda) fn of(driver: &Driver) -> Result<Arc<Self>> {
        static DEVICES: Mutex<BTreeMap<u32, Weak<Modules>>> = Mutex::new(BTreeMap::new());
        let ordinal = cuda(driver)?.facts().ordinal;
        let mut devices = lock(&DEVICES);
        if let Some(there) = devices.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(there);
        }
        let made = Arc::new(Self::new(driver)?);
        devices.insert(ordinal, Arc::downgrade(&made));
        Ok(made)
    }

    fn new(driver: &Driver) -> Result<Self> {
        use sys::CUdevice_attribute as Attribute;
        let device = cuda(driver)?;
        let number = |which: Attribute| {
            device.attribute(which as u32).map(|number| u32::try_from(number).unwrap_or(0))
        };
        let api = Api::get()?;
        let sm_lock = device.with_context_unordered(|| api.memory(size_of::<SmLock>()))?;
        // SAFETY: so many words are mapped there, and nobody else has the memory yet.
        let filled = unsafe { device.fill(sm_lock, 0, size_of::<SmLock>() as u64 / 4) };
        if let Err(error) = filled {
            device.with_context_unordered(|| {
                // SAFETY: the memory is of `memory`, and nothing uses it.
                unsafe { api.free(sm_lock) };
                Ok(())
            })?;
            return Err(error);
        }
        Ok(Self {
            api,
            sm_lock,
            driver: driver.clone(),
            arch: Arch::new(
                number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            )?,
            sm_count: sm_count(driver)?,
            loaded: Mutex::default(),
            generated: Mutex::default(),
            loading: Mutex::default(),
        })
    }

    pub(in crate::cuda) fn sm_count(&self) -> u32 {
        self.sm_count
    }

    /// The address of the device's [`SmLock`].
    pub(in crate::cuda) fn sm_lock(&self) -> u64 {
        self.sm_lock
    }

    /// Loads the forms that share SMs of all kernels that are loaded. For communicators that were alone until now: their next
    /// calls need these, while kernels may run that wait for other ranks.
    pub(in crate::cuda) fn make_sharing_forms_ready(&self, rank: u32) -> Result<()> {
        let mut by_world: BTreeMap<u32, Vec<KernelSpec>> = BTreeMap::new();
        for (world, spec) in lock(&self.loaded).keys() {
            let sharing = spec.sharing(true);
            if sharing.shares_sms {
                by_world.entry(*world).or_default().push(sharing);
            }
        }
        let ready =
            |(world, list): (u32, Vec<KernelSpec>)| self.make_ready((rank % world, world), &list);
        by_world.into_iter().try_for_each(ready)
    }

    /// The kernels, and in company the forms of them that share SMs, too.
    pub(in crate::cuda) fn in_company(specs: &[KernelSpec], has_company: bool) -> Vec<KernelSpec> {
        let sharing = specs.iter().map(|spec| spec.sharing(true)).filter(|spec| spec.shares_sms);
        specs.iter().copied().chain(sharing.filter(|_| has_company)).collect()
    }

    /// The device's compute capability.
    pub(in crate::cuda) fn arch(&self) -> Arch {
        self.arch
    }

    /// The kernel, for communicators of `world` ranks, if it is loaded.
    pub(in crate::cuda) fn find(&self, world: u32, spec: KernelSpec) -> Option<LoadedKernel> {
        lock(&self.loaded).get(&(world, spec)).map(|(kernel, _)| *kernel)
    }

    /// [`Self::find`] for a generated kernel.
    pub(in crate::cuda) fn find_generated(&self, key: &GeneratedKernel) -> Option<LoadedKernel> {
        lock(&self.generated).get(key).map(|(kernel, _)| *kernel)
    }

    /// The kernel, for communicators of `world` ranks: compiled and loaded if it is not yet.
    pub(in crate::cuda) fn get(&self, world: u32, spec: KernelSpec) -> Result<LoadedKernel> {
        let find = || self.find(world, spec);
        if let Some(kernel) = find() {
            return Ok(kernel);
        }
        let _one_at_a_time = lock(&self.loading);
        if let Some(kernel) = find() {
            return Ok(kernel);
        }
        let began = Instant::now();
        let made = cuda(&self.driver)?.with_context_unordered(|| self.load(world, spec))?;
        let took = began.elapsed();
        if took > LONG {
            tracing::debug!(?spec, ?took, "compiling and loading a kernel took long");
        }
        lock(&self.loaded).insert((world, spec), made);
        Ok(made.0)
    }

    /// Compiles and loads kernels before calls can wait. Threads and ranks divide the compilation, as the ranks of
    /// a machine share compiled kernels on disk. Kernels are loaded in the order of the list.
    pub(in crate::cuda) fn make_ready(
        &self,
        (rank, world): (u32, u32),
        list: &[KernelSpec],
    ) -> Result<()> {
        let missing: Vec<KernelSpec> = {
            let loaded = lock(&self.loaded);
            list.iter().copied().filter(|each| !loaded.contains_key(&(world, *each))).collect()
        };
        let (began, count) = (Instant::now(), missing.len());
        if count > 1 {
            let first = count * rank as usize / world.max(1) as usize;
            // An error occurs again below, in the same order on all ranks.
            at_once(count, COMPILER_THREADS, |nth| {
                let _ = self.compile(world, missing[(first + nth) % count]);
            });
        }
        missing.iter().try_for_each(|each| self.get(world, *each).map(|_| ()))?;
        if count > 0 {
            tracing::debug!(count, took = ?began.elapsed(), "kernels are ready");
        }
        Ok(())
    }

    /// A kernel whose source is no file of ours. It is asked for its source if it was not loaded yet.
    pub(in crate::cuda) fn get_generated(
        &self,
        key: GeneratedKernel,
        source: impl FnOnce() -> GeneratedSource,
    ) -> Result<LoadedKernel> {
        let find = || self.find_generated(&key);
        if let Some(kernel) = find() {
            return Ok(kernel);
        }
        let _one_at_a_time = lock(&self.loading);
        if let Some(kernel) = find() {
            return Ok(kernel);
        }
        let GeneratedSource { name, path, entry, source } = source();
        let kernel = KernelSource {
            name: &name,
            path: &path,
            entry: &entry,
            source: &source,
            asks_for_blocks: false,
            variants: &[],
        };
        let made = cuda(&self.driver)?.with_context_unordered(|| {
            let (image, variant) = self.compile_as(&kernel, key.world, &key.spec())?;
            self.load_image(&image, (kernel.entry, key.threads, 0), &variant)
        })?;
        lock(&self.generated).insert(key, made);
        Ok(made.0)
    }

    /// Compiles kernels whose sources are no files of ours, `threads` of them at a time. What fails does so again when it is loaded.
    pub(in crate::cuda) fn compile_generated(
        &self,
        kernels: &[(GeneratedKernel, GeneratedSource)],
        threads: usize,
    ) {
        at_once(kernels.len(), threads, |nth| {
            let (key, GeneratedSource { name, path, entry, source }) = &kernels[nth];
            let kernel =
                KernelSource { name, path, entry, source, asks_for_blocks: false, variants: &[] };
            let _ = self.compile_as(&kernel, key.world, &key.spec());
        });
    }

    fn compile(&self, world: u32, spec: KernelSpec) -> Result<(Image, String)> {
        self.compile_as(spec.kernel, world, &spec)
    }

    fn compile_as(
        &self,
        kernel: &KernelSource<'_>,
        world: u32,
        spec: &KernelSpec,
    ) -> Result<(Image, String)> {
        compile_with(jit(cuda(&self.driver)?), self.arch, kernel, world, spec)
    }

    /// The context must be current.
    fn load(&self, world: u32, spec: KernelSpec) -> Result<(LoadedKernel, CudaHandle)> {
        let (image, variant) = self.compile(world, spec)?;
        let entry = spec.kernel.entry;
        self.load_image(&image, (entry, spec.threads, spec.mode.shared_bytes()), &variant)
    }

    /// The context must be current. The kernel begins at `entry`, and is launched with at most `threads` threads in a block and
    /// `shared` bytes of shared memory besides its own.
    fn load_image(
        &self,
        image: &Image,
        (entry, threads, shared): (&str, u32, u32),
        variant: &str,
    ) -> Result<(LoadedKernel, CudaHandle)> {
        let mut module: CudaHandle = 0;
        // SAFETY: the image is what the compiler made for this device, whole (PTX with its NUL);
        // the driver copies it.
        let code = unsafe { (self.api.module_load)(&raw mut module, image.bytes.as_ptr().cast()) };
        CudaDriver::check(code, || format!("loading the kernel {variant}"))?;
        self.inspect(module, (entry, threads, shared), variant)
            .map(|loaded| (loaded, module))
            .inspect_err(|_| self.unload(module))
    }

    /// The kernel of a module that was just loaded, and how many of its blocks run at once.
    fn inspect(
        &self,
        module: CudaHandle,
        (entry, most, shared): (&str, u32, u32),
        variant: &str,
    ) -> Result<LoadedKernel> {
        let entry = CString::new(entry)
            .map_err(|_| Error::system("loading a kernel", "a name with a NUL"))?;
        let mut function: CudaHandle = 0;
        // SAFETY: the module is loaded; writes one handle through a valid pointer.
        let code = unsafe { (self.api.module_function)(&raw mut function, module, entry.as_ptr()) };
        if code == sys::cudaError_enum::CUDA_ERROR_NOT_FOUND as u32 {
            return Err(Error::invalid_argument(format!(
                "{variant} has no kernel {}: it must have one that is extern \"C\" __global__",
                entry.to_string_lossy()
            )));
        }
        CudaDriver::check(code, || format!("finding {entry:?} in its module"))?;
        // An idle processor divides its memory into cache and shared memory as the next kernel prefers, and
        // runs no block of a kernel with another preference until it is idle again. So all our kernels have the
        // same preference: kernels that wait must not keep away those that they wait for.
        let (which, all_cache) =
            (sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 0);
        // SAFETY: the function is of a loaded module; the attribute is a number.
        let code = unsafe { (self.api.function_set)(function, which as c_int, all_cache) };
        CudaDriver::check(code, || format!("dividing a processor's memory for {variant}"))?;
        if shared > 0 {
            let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is of a loaded module; the attribute is a number.
            let code =
                unsafe { (self.api.function_set)(function, which as c_int, shared as c_int) };
            CudaDriver::check(code, || format!("asking for {shared} bytes of shared memory"))?;
        }
        let mut resident = [0; SIZES.len()];
        for (blocks, threads) in resident.iter_mut().zip(SIZES) {
            if threads > most {
                continue;
            }
            let mut found: c_int = 0;
            let threads = threads as c_int;
            // SAFETY: the function is of a loaded module; writes one int through a valid pointer.
            let code =
                unsafe { (self.api.occupancy)(&raw mut found, function, threads, shared as usize) };
            CudaDriver::check(code, || format!("asking how many blocks of {variant} fit"))?;
            if found < 1 && threads == most as c_int {
                return Err(Error::invalid_argument(format!(
                    "no processor holds a block of {most} threads of {variant}: bound it by \
                     __launch_bounds__(THREADS), or give it fewer threads"
                )));
            }
            *blocks = u32::try_from(found).unwrap_or(0).max(1) * self.sm_count;
        }
        let mut loaded = LoadedKernel::new(function, resident, most, self.sm_count);
        loaded.shared_bytes = shared;
        Ok(loaded)
    }

    /// The context must be current, and nothing of the module may run.
    fn unload(&self, module: CudaHandle) {
        // SAFETY: loaded by this value and given up here.
        let code = unsafe { (self.api.module_unload)(module) };
        if let Err(error) = CudaDriver::check(code, || "unloading a module".to_owned()) {
            tracing::debug!(%error, "a module stays loaded");
        }
    }
}

impl Drop for Modules {
    /// The device's last communicator is gone, and has waited for its kernels before.
    fn drop(&mut self) {
        let loaded = self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner);
        let loaded = std::mem::take(loaded);
        let generated = self.generated.get_mut().unwrap_or_else(PoisonError::into_inner);
        let generated = std::mem::take(generated);
        let unloaded = cuda(&self.driver).and_then(|driver| {
            driver.with_context_unordered(|| {
                let both = loaded.into_values().chain(generated.into_values());
                both.for_each(|(_, module)| self.unload(module));
                // SAFETY: the memory is of `memory`, and no kernel runs any more that knows it.
                unsafe { self.api.free(self.sm_lock) };
                Ok(())
            })
        });
        if let Err(error) = unloaded {
            tracing::debug!(%error, "a module stays loaded");
        }
    }
}

/// Takes the lock of the SMs of a pool's device for ever. From now on all kernels of the process that share them are narrow, as
/// beside another communicator's wide kernel.
///
/// # Errors
///
/// The driver's errors, and that the pool is on no device.
#[cfg(feature = "testing")]
pub fn take_sms(pool: &symmpool_allocator::Pool) -> Result<()> {
    let modules = Modules::of(pool.driver())?;
    // SAFETY: the lock is longer than a word, and kernels access it with atomic operations.
    unsafe { cuda(pool.driver())?.fill(modules.sm_lock, u8::MAX.into(), 1) }?;
    // Communicators that come later find the same.
    std::mem::forget(modules);
    Ok(())
}
