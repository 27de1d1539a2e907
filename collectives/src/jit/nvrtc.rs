//! NVRTC, the compiler library of CUDA, found at run time.
//!
//! Functions are looked up one by one, so that an error names all that are missing. Results are integers, as newer
//! libraries may return newer codes. A library stays loaded until the process ends.
#![allow(unsafe_code)] // FFI: loading, symbol lookup, and the compiler's calls

use std::error::Error as _;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::mem;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use symmpool_allocator::{Error, Result};

use super::search::Candidate;

/// With this flag `dlopen` returns a library that is loaded already, and loads none. It has the same value on every Linux
/// for which there is CUDA.
const RTLD_NOLOAD: c_int = 4;

/// The oldest version that is used.
const OLDEST: (u32, u32) = (12, 4);

/// An `nvrtcResult`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NvrtcResult(c_int);

/// An `nvrtcProgram`, a pointer that is only passed on.
type Handle = *mut c_void;

macro_rules! functions {
    ($($field:ident = $symbol:ident($($argument:ty),*) -> $result:ty;)*) => {
        /// NVRTC's functions.
        struct NvrtcApi {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl NvrtcApi {
            /// Looks up all functions. The error names those that are missing.
            ///
            /// # Safety
            ///
            /// Symbols of these names in `library` must be NVRTC's functions, and the library must
            /// stay loaded.
            unsafe fn load(library: &Library) -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                $(
                    // SAFETY: the caller promised that a symbol of this name is NVRTC's function,
                    // and the type is that function's in the headers of CUDA 12.4 and 13.0.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> $result>(
                            concat!(stringify!($symbol), "\0").as_bytes(),
                        )
                    };
                    let $field = found.map(|symbol| *symbol).ok();
                    if $field.is_none() {
                        missing.push(stringify!($symbol));
                    }
                )*
                match ($($field,)*) {
                    ($(Some($field),)*) => Ok(Self { $($field,)* }),
                    _ => Err(missing),
                }
            }
        }
    };
}

functions! {
    version = nvrtcVersion(*mut c_int, *mut c_int) -> NvrtcResult;
    error_string = nvrtcGetErrorString(NvrtcResult) -> *const c_char;
    archs_count = nvrtcGetNumSupportedArchs(*mut c_int) -> NvrtcResult;
    archs = nvrtcGetSupportedArchs(*mut c_int) -> NvrtcResult;
    create = nvrtcCreateProgram(
        *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
    ) -> NvrtcResult;
    destroy = nvrtcDestroyProgram(*mut Handle) -> NvrtcResult;
    compile = nvrtcCompileProgram(Handle, c_int, *const *const c_char) -> NvrtcResult;
    cubin_size = nvrtcGetCUBINSize(Handle, *mut usize) -> NvrtcResult;
    cubin = nvrtcGetCUBIN(Handle, *mut c_char) -> NvrtcResult;
    ptx_size = nvrtcGetPTXSize(Handle, *mut usize) -> NvrtcResult;
    ptx = nvrtcGetPTX(Handle, *mut c_char) -> NvrtcResult;
    log_size = nvrtcGetProgramLogSize(Handle, *mut usize) -> NvrtcResult;
    log = nvrtcGetProgramLog(Handle, *mut c_char) -> NvrtcResult;
}

/// The compiler. Threads may use it at the same time.
pub(super) struct Nvrtc {
    api: NvrtcApi,
    /// Its version of CUDA: major and minor.
    pub(super) version: (u32, u32),
    /// The architectures for which it makes code; 90 is 9.0.
    pub(super) archs: Vec<u32>,
    /// Where it was found, for messages.
    pub(super) place: String,
}

/// Program to compile.
pub(super) struct NvrtcProgram<'a> {
    /// The name of the file, for messages.
    pub(super) name: &'a str,
    pub(super) source: &'a str,
    /// Names and texts of headers.
    pub(super) headers: &'a [(&'a str, &'a str)],
    pub(super) options: &'a [String],
    /// Whether to make intermediate code rather than machine code.
    pub(super) ptx: bool,
}

/// The result of a compilation.
pub(super) struct Output {
    /// The code. Intermediate code ends with a NUL.
    pub(super) code: Vec<u8>,
    /// Warnings; usually there are none.
    pub(super) log: String,
}

impl Nvrtc {
    /// The first of the candidates that exists and can be used. One of a later CUDA than `newest_major` is skipped, unless
    /// the user has named it.
    ///
    /// # Errors
    ///
    /// `is_unsupported` if there is none, with the reason for each candidate.
    pub(super) fn open(candidates: &[Candidate], newest_major: Option<u32>) -> Result<Self> {
        let mut tried: Vec<String> = Vec::new();
        for candidate in candidates {
            match Self::open_one(candidate, newest_major) {
                Ok(Some(found)) => return Ok(found),
                Ok(None) => tried.push(describe(candidate)),
                Err(why) => tried.push(format!("{} ({why})", describe(candidate))),
            }
        }
        Err(Error::unsupported(format!(
            "no NVRTC of CUDA {}.{} or newer, which compiles the kernels; tried: {}. Install the \
             CUDA toolkit or the nvidia-cuda-nvrtc package, or name the library in SYMMPOOL_NVRTC",
            OLDEST.0,
            OLDEST.1,
            tried.join(", ")
        )))
    }

    /// Loads a candidate; `None` if it does not exist.
    fn open_one(candidate: &Candidate, newest_major: Option<u32>) -> Result<Option<Self>, String> {
        let chosen = matches!(candidate, Candidate::Chosen(_));
        if let (Some(major), Some(newest), false) = (candidate.major(), newest_major, chosen)
            && major > newest
        {
            return Err("too new for the CUDA driver".to_owned());
        }
        let flags = RTLD_NOW | RTLD_LOCAL;
        let (name, flags): (&Path, c_int) = match candidate {
            Candidate::Chosen(path) => (path, flags),
            Candidate::File(path) if !path.exists() => return Ok(None),
            Candidate::File(path) => (path, flags),
            Candidate::Loaded(name) => (Path::new(name), flags | RTLD_NOLOAD),
            Candidate::Named(name) => (Path::new(name), flags),
        };
        // SAFETY: runs the initialisers of NVRTC, which have no preconditions, or those of
        // whatever the user named as NVRTC.
        let library = match unsafe { Library::open(Some(name), flags) } {
            Ok(library) => library,
            Err(_) if matches!(candidate, Candidate::Loaded(_) | Candidate::Named(_)) => {
                return Ok(None);
            }
            Err(error) => {
                // The linker's own message is the source of this error.
                let why = error.source().map(ToString::to_string);
                return Err(why.unwrap_or_else(|| error.to_string()));
            }
        };
        // It is never unloaded: the compiler keeps state, and torch may use the same copy.
        let library = mem::ManuallyDrop::new(library);
        // SAFETY: a library called NVRTC, by its maker or by the user; it stays loaded.
        let api = unsafe { NvrtcApi::load(&library) }
            .map_err(|missing| format!("it lacks {}", missing.join(", ")))?;
        let version = api.version()?;
        if version < OLDEST {
            return Err(format!("its version is {}.{}", version.0, version.1));
        }
        if newest_major.is_some_and(|newest| version.0 > newest) && !chosen {
            return Err(format!(
                "its version, {}.{}, is too new for the CUDA driver",
                version.0, version.1
            ));
        }
        let archs = api.archs()?;
        let place = mapped_file(api.version as *const () as usize);
        load_builtins(place.as_deref(), version);
        let place = place.map_or_else(|| describe(candidate), |path| path.display().to_string());
        Ok(Some(Self { api, version, archs, place }))
    }

    /// Compiles a program. The error holds the compiler's log.
    pub(super) fn compile(&self, program: &NvrtcProgram<'_>) -> Result<Output, String> {
        let text = |what: &str| {
            CString::new(what).map_err(|_| format!("a NUL byte in {:?}", what.replace('\0', "\\0")))
        };
        let name = text(program.name)?;
        let source = text(program.source)?;
        let header_names: Vec<CString> =
            program.headers.iter().map(|(name, _)| text(name)).collect::<Result<_, _>>()?;
        let headers: Vec<CString> =
            program.headers.iter().map(|(_, header)| text(header)).collect::<Result<_, _>>()?;
        let options: Vec<CString> =
            program.options.iter().map(|option| text(option)).collect::<Result<_, _>>()?;
        let (names, headers, options) =
            (pointers(&header_names), pointers(&headers), pointers(&options));

        let mut handle: Handle = ptr::null_mut();
        // SAFETY: the strings are NUL-terminated, both arrays hold as many as is said, and all
        // outlive the call, which copies them; the handle is written to a local.
        let code = unsafe {
            (self.api.create)(
                &raw mut handle,
                source.as_ptr(),
                name.as_ptr(),
                count(headers.len()),
                headers.as_ptr(),
                names.as_ptr(),
            )
        };
        self.api.check(code, "nvrtcCreateProgram")?;
        let open = Open { api: &self.api, handle };
        // SAFETY: a live program, and an array of as many NUL-terminated strings as is said.
        let code =
            unsafe { (self.api.compile)(open.handle, count(options.len()), options.as_ptr()) };
        let log = open.read("nvrtcGetProgramLog", self.api.log_size, self.api.log);
        let log = log.map(|bytes| {
            String::from_utf8_lossy(&bytes).trim_end_matches(['\0', '\n', ' ']).to_owned()
        });
        if let Err(failed) = self.api.check(code, "nvrtcCompileProgram") {
            return Err(format!("{failed}\n{}", log.unwrap_or_else(|none| none)));
        }
        let code = if program.ptx {
            open.read("nvrtcGetPTX", self.api.ptx_size, self.api.ptx)?
        } else {
            open.read("nvrtcGetCUBIN", self.api.cubin_size, self.api.cubin)?
        };
        if code.is_empty() {
            return Err("the compiler made no code and says nothing about it".to_owned());
        }
        Ok(Output { code, log: log? })
    }
}

/// A program, which is destroyed when this is dropped.
struct Open<'a> {
    api: &'a NvrtcApi,
    handle: Handle,
}

impl Open<'_> {
    /// Reads one of the texts or images of the program by the two functions that return its size and its bytes.
    fn read(
        &self,
        what: &str,
        size: unsafe extern "C" fn(Handle, *mut usize) -> NvrtcResult,
        write: unsafe extern "C" fn(Handle, *mut c_char) -> NvrtcResult,
    ) -> Result<Vec<u8>, String> {
        let mut bytes = 0usize;
        // SAFETY: a live program; the size is written to a local.
        self.api.check(unsafe { size(self.handle, &raw mut bytes) }, what)?;
        let mut buffer = vec![0u8; bytes];
        if bytes != 0 {
            // SAFETY: a live program; as many bytes are written as the buffer has.
            self.api.check(unsafe { write(self.handle, buffer.as_mut_ptr().cast()) }, what)?;
        }
        Ok(buffer)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // SAFETY: a live program, which nobody uses after this.
        unsafe { (self.api.destroy)(&raw mut self.handle) };
    }
}

impl NvrtcApi {
    fn check(&self, code: NvrtcResult, what: &str) -> Result<(), String> {
        if code.0 == 0 {
            return Ok(());
        }
        // SAFETY: takes any code.
        let text = unsafe { (self.error_string)(code) };
        if text.is_null() {
            return Err(format!("{what}: error {}", code.0));
        }
        // SAFETY: not null, so a static NUL-terminated string of the library, which stays loaded.
        let text = unsafe { CStr::from_ptr(text) };
        Err(format!("{what}: {} ({})", text.to_string_lossy(), code.0))
    }

    fn version(&self) -> Result<(u32, u32), String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both numbers are written to locals.
        let code = unsafe { (self.version)(&raw mut major, &raw mut minor) };
        self.check(code, "nvrtcVersion")?;
        Ok((major.unsigned_abs(), minor.unsigned_abs()))
    }

    fn archs(&self) -> Result<Vec<u32>, String> {
        let mut number = 0;
        // SAFETY: the number is written to a local.
        let code = unsafe { (self.archs_count)(&raw mut number) };
        self.check(code, "nvrtcGetNumSupportedArchs")?;
        let mut archs: Vec<c_int> = vec![0; usize::try_from(number).unwrap_or(0)];
        if !archs.is_empty() {
            // SAFETY: the function writes as many numbers as it has said before, and the vector has this length.
            let code = unsafe { (self.archs)(archs.as_mut_ptr()) };
            self.check(code, "nvrtcGetSupportedArchs")?;
        }
        Ok(archs.into_iter().map(c_int::unsigned_abs).collect())
    }
}

/// Loads the library of the compiler's built-in headers from the compiler's folder. The compiler loads it by name alone,
/// from a folder that the dynamic linker need not know; it finds one that is loaded already.
fn load_builtins(nvrtc: Option<&Path>, (major, minor): (u32, u32)) {
    let name = format!("libnvrtc-builtins.so.{major}.{minor}");
    let Some(path) = nvrtc.and_then(Path::parent).map(|folder| folder.join(name)) else { return };
    if !path.exists() {
        return;
    }
    // SAFETY: runs the initialisers of a library that NVRTC is about to load by itself.
    match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) } {
        Ok(library) => mem::forget(library),
        Err(error) => tracing::debug!("{}: {error}", path.display()),
    }
}

/// The file that this process has mapped at an address.
fn mapped_file(address: usize) -> Option<PathBuf> {
    mappings().into_iter().find_map(|(range, path)| range.contains(&address).then_some(path))
}

/// The files that this process has mapped.
pub(super) fn mapped_files() -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = mappings().into_iter().map(|(_, path)| path).collect();
    files.dedup();
    files
}

/// The ranges of addresses at which this process has mapped files, and these files.
fn mappings() -> Vec<(Range<usize>, PathBuf)> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let parse = |line: &str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        Some((range, PathBuf::from(&line[line.find('/')?..])))
    };
    maps.lines().filter_map(parse).collect()
}

fn describe(candidate: &Candidate) -> String {
    match candidate {
        Candidate::Chosen(path) | Candidate::File(path) => path.display().to_string(),
        Candidate::Loaded(name) => format!("{name} in this process"),
        Candidate::Named(name) => (*name).to_owned(),
    }
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).collect()
}

fn count(length: usize) -> c_int {
    c_int::try_from(length).unwrap_or(c_int::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_tried_is_named() {
        let error = Nvrtc::open(
            &[
                Candidate::Loaded("libnvrtc.so.99"),
                Candidate::Named("libnvrtc.so.99"),
                Candidate::File("/nowhere/libnvrtc.so".into()),
            ],
            None,
        );
        let error = error.err().expect("none of these exists");
        assert!(error.is_unsupported(), "{error}");
        for part in ["libnvrtc.so.99 in this process", "/nowhere/libnvrtc.so", "SYMMPOOL_NVRTC"] {
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    #[test]
    fn a_choice_that_is_no_compiler_is_an_error_that_says_why() {
        let folder = tempfile::tempdir().expect("a folder");
        let text = folder.path().join("libnvrtc.so.13");
        fs::write(&text, "not a library").expect("written");
        for (path, why) in [
            (text.as_path(), "libnvrtc.so.13: file too short"),
            (Path::new("/nowhere/libnvrtc.so"), "cannot open shared object file"),
            (Path::new("libc.so.6"), "it lacks nvrtcVersion"),
        ] {
            let error = Nvrtc::open(&[Candidate::Chosen(path.to_owned())], None);
            let error = error.err().expect("not a compiler");
            assert!(error.is_unsupported() && error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn the_file_behind_a_function_is_found() {
        let this = std::env::current_exe().expect("a program").canonicalize().expect("a path");
        assert_eq!(mapped_file(mapped_file as *const () as usize), Some(this));
        assert_eq!(mapped_file(1), None);
    }
}
