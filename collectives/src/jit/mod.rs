//! CUDA kernels, compiled where they run.
//!
//! The sources are part of the program, and NVRTC is loaded when it is first needed. So a build needs no CUDA,
//! and one program serves CUDA 12.4 and newer and every device from compute capability 8.0 on.
//!
//! | file | holds |
//! | --- | --- |
//! | `mod` | compiling a variant of a kernel, through the caches in memory and on disk |
//! | `includes` | which headers a kernel includes |
//! | `sources` | the kernels and headers |
//! | `arch` | which machine code a device runs |
//! | `search` | where NVRTC may be |
//! | `found` | which NVRTC and which cache would be used |
//! | `nvrtc` | the library's functions |
//! | `cache` | compiled kernels on disk |
//! | `usage` | registers, stack and shared memory of compiled kernels, for tests |

mod arch;
mod cache;
mod found;
mod includes;
mod nvrtc;
mod search;
pub(crate) mod sources;
#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
mod usage;

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use symmpool_allocator::{Error, Result};

pub(crate) use arch::Arch;
pub use found::{KernelCompiler, kernel_cache, kernel_compiler, search_packages};
pub(crate) use sources::{KernelSource, kernel_beside};

use arch::Target;
use cache::{Cache, CachedKernel, Key};
use includes::{SourceHeader, headers_of};
pub(crate) use includes::{shares_memory, sources_below};
use nvrtc::{Nvrtc, NvrtcProgram, Output};

/// Part of every cache key. It changes when this module compiles the same sources differently.
const FORMAT: &[u8] = b"symmpool jit 1";

/// Options of every compilation. Each operation rounds by itself (rule S7). Line information is for profilers and
/// sanitizers, and costs nothing at run time.
const OPTIONS: [&str; 3] = ["--std=c++17", "--fmad=false", "-lineinfo"];

/// A kernel with its compile-time parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variant<'a> {
    pub(crate) kernel: &'a KernelSource<'a>,
    /// The names and values of its macros.
    pub(crate) defines: &'a [(&'a str, &'a str)],
}

impl fmt::Display for Variant<'_> {
    /// `reduce_local (DTYPE=4, OP=1)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kernel.name)?;
        let defines: Vec<String> =
            self.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
        if defines.is_empty() { Ok(()) } else { write!(f, " ({})", defines.join(", ")) }
    }
}

/// The kind of an [`Image`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ImageKind {
    /// Machine code of one kind of device.
    Cubin = 1,
    /// Intermediate code that the driver translates, ending with a NUL.
    Ptx = 2,
}

/// A compiled kernel, as `cuModuleLoadData` takes it.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    pub(crate) bytes: Arc<[u8]>,
    pub(crate) kind: ImageKind,
}

/// Where a [`Jit`] finds its compiler and keeps compiled kernels.
#[derive(Clone, Debug)]
pub(crate) struct JitOptions {
    /// The compiler library to use, and no other.
    pub(crate) nvrtc: Option<PathBuf>,
    /// Further folders of Python packages in which it may be.
    pub(crate) packages: Vec<PathBuf>,
    /// The driver's major version of CUDA, if it is known. The driver cannot load what the compiler of a later one
    /// makes.
    pub(crate) driver_major: Option<u32>,
    /// The folder for compiled kernels. Without one they are compiled in every process. It is safe to remove it, or any
    /// file in it, at any time.
    pub(crate) cache: Option<PathBuf>,
    /// Longest wait for another process that compiles the same kernel.
    pub(crate) wait: Duration,
    /// Whether the compiler's warnings are errors, rather than logged.
    pub(crate) strict: bool,
}

impl JitOptions {
    /// The options that the environment gives: `SYMMPOOL_NVRTC` names the library. Compiled kernels are kept below
    /// `SYMMPOOL_CACHE_DIR` (not at all if it is empty), else `$XDG_CACHE_HOME/symmpool`, else `~/.cache/symmpool`.
    pub(crate) fn from_env() -> Self {
        let packages = found::packages();
        Self { packages, ..Self::from_variables(|name| env::var_os(name)) }
    }

    /// Where the compiler may be.
    fn candidates(&self) -> Vec<search::Candidate> {
        let mapped = nvrtc::mapped_files();
        search::candidates(self.nvrtc.as_deref(), &self.packages, &mapped, |name| env::var_os(name))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let path = |name: &str| variable(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        let usual = || {
            let caches = path("XDG_CACHE_HOME").filter(|path| path.is_absolute());
            caches.or_else(|| Some(path("HOME")?.join(".cache"))).map(|at| at.join("symmpool"))
        };
        let cache = match variable("SYMMPOOL_CACHE_DIR") {
            Some(folder) if folder.is_empty() => None,
            Some(folder) => Some(PathBuf::from(folder)),
            None => usual(),
        };
        Self {
            nvrtc: path("SYMMPOOL_NVRTC"),
            packages: Vec::new(),
            driver_major: None,
            // In a folder of its own, which gets the permissions that it needs whatever those of its parents are.
            cache: cache.map(|folder| folder.join("jit")),
            wait: Duration::from_secs(60),
            strict: false,
        }
    }
}

/// Compiles kernels, each variant once. A process makes one, which its threads share.
pub(crate) struct Jit {
    options: JitOptions,
    nvrtc: OnceLock<Result<Nvrtc>>,
    cache: OnceLock<Option<Cache>>,
    images: Mutex<BTreeMap<Wanted, Arc<Mutex<Option<Image>>>>>,
    compiled: AtomicU64,
}

/// A variant, and all that it is compiled with for a device.
struct Compilation<'a> {
    nvrtc: &'a Nvrtc,
    variant: Variant<'a>,
    headers: Vec<SourceHeader>,
    target: Target,
    options: Vec<String>,
}

impl Compilation<'_> {
    fn key(&self) -> Key {
        key(self.nvrtc.version, &self.variant, &self.headers, &self.options)
    }
}

/// Key of images in memory: a hash of name, source and macros; the device.
type Wanted = (Key, Arch);

impl Jit {
    /// Loads no library and accesses no file yet.
    pub(crate) fn new(options: JitOptions) -> Self {
        Self {
            options,
            nvrtc: OnceLock::new(),
            cache: OnceLock::new(),
            images: Mutex::default(),
            compiled: AtomicU64::new(0),
        }
    }

    /// The variant, compiled for a device: from memory, else from disk, else by NVRTC. The first call for a variant
    /// takes up to some seconds, and a bounded time more while another process compiles the same variant. Later calls
    /// take a lookup.
    ///
    /// # Errors
    ///
    /// `is_unsupported` if there is no NVRTC, or none that compiles for this device; otherwise the compiler's error,
    /// with its log. The next call tries again, unless there is no NVRTC.
    pub(crate) fn compile(&self, variant: &Variant<'_>, arch: Arch) -> Result<Image> {
        let KernelSource { name, source, .. } = *variant.kernel;
        let defines = defines(variant).concat();
        let wanted = (Key::of([name, source, &defines].map(str::as_bytes)), arch);
        let slot = Arc::clone(lock(&self.images).entry(wanted).or_default());
        // This lock is held while compiling, so that other threads wait for this one.
        let mut image = lock(&slot);
        if let Some(image) = &*image {
            return Ok(image.clone());
        }
        let made = self.load_or_compile(variant, arch)?;
        *image = Some(made.clone());
        Ok(made)
    }

    /// How many times the compiler ran.
    pub(crate) fn compiled(&self) -> u64 {
        self.compiled.load(Ordering::Relaxed)
    }

    fn load_or_compile(&self, variant: &Variant<'_>, arch: Arch) -> Result<Image> {
        let compilation = self.compilation(variant, arch)?;
        let kind = match compilation.target {
            Target::Cubin(_) => ImageKind::Cubin,
            Target::Ptx(_) => ImageKind::Ptx,
        };
        let make = || Ok(CachedKernel { kind: kind as u8, bytes: self.run(&compilation)? });
        let entry = match self.cache() {
            Some(cache) => cache.get_or_make(compilation.key(), make)?,
            None => make()?,
        };
        Ok(Image { bytes: entry.bytes.into(), kind })
    }

    fn compilation<'a>(&'a self, variant: &Variant<'a>, arch: Arch) -> Result<Compilation<'a>> {
        let nvrtc = self.nvrtc()?;
        let target = arch.target(&nvrtc.archs)?;
        let options = options(variant, &target);
        let headers = headers_of(variant.kernel.source);
        Ok(Compilation { nvrtc, variant: *variant, headers, target, options })
    }

    fn run(&self, compilation: &Compilation<'_>) -> Result<Vec<u8>> {
        let Compilation { nvrtc, variant, headers, target, options } = compilation;
        self.compiled.fetch_add(1, Ordering::Relaxed);
        let program = NvrtcProgram {
            name: variant.kernel.path,
            source: variant.kernel.source,
            headers,
            options,
            ptx: matches!(target, Target::Ptx(_)),
        };
        let (major, minor) = nvrtc.version;
        let what = || {
            format!(
                "compiling the kernel {variant} for {} with NVRTC {major}.{minor} ({})",
                target.name(),
                nvrtc.place
            )
        };
        let Output { code, log } =
            nvrtc.compile(&program).map_err(|why| Error::system(what(), why))?;
        if !log.is_empty() {
            if self.options.strict {
                return Err(Error::system(what(), log));
            }
            tracing::warn!("{}: {log}", what());
        }
        Ok(code)
    }

    fn nvrtc(&self) -> Result<&Nvrtc> {
        let found = self
            .nvrtc
            .get_or_init(|| Nvrtc::open(&self.options.candidates(), self.options.driver_major));
        found.as_ref().map_err(Clone::clone)
    }

    fn cache(&self) -> Option<&Cache> {
        let opened = self.cache.get_or_init(|| {
            let path = self.options.cache.as_deref()?;
            Cache::open(path, self.options.wait)
                .inspect_err(|why| {
                    tracing::warn!("compiled kernels are not kept in {}: {why}", path.display());
                })
                .ok()
        });
        opened.as_ref()
    }
}

fn defines(variant: &Variant<'_>) -> Vec<String> {
    variant.defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect()
}

fn options(variant: &Variant<'_>, target: &Target) -> Vec<String> {
    let mut options: Vec<String> = OPTIONS.map(str::to_owned).into();
    options.push(format!("--gpu-architecture={}", target.name()));
    options.extend(defines(variant));
    options
}

/// The key of a compiled kernel: everything that its image depends on.
fn key(
    (major, minor): (u32, u32),
    variant: &Variant<'_>,
    headers: &[SourceHeader],
    options: &[String],
) -> Key {
    let version = format!("{major}.{minor}");
    let mut parts: Vec<&[u8]> = vec![FORMAT, version.as_bytes()];
    parts.extend([variant.kernel.path.as_bytes(), variant.kernel.source.as_bytes()]);
    parts.extend(headers.iter().flat_map(|(name, text)| [name.as_bytes(), text.as_bytes()]));
    parts.extend(options.iter().map(String::as_bytes));
    Key::of(parts)
}

/// Locks a mutex. A thread that panicked while it held one has left nothing half-done here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
