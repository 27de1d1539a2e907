//! Bindings to the NCCL that the process has loaded, as far as registering windows needs them.
//!
//! A communicator works only with the copy of NCCL that made it. The library is therefore looked for
//! among those that are loaded, and never loaded here. Every function is optional. Registration is
//! collective inside NCCL and has no timeout. All ranks therefore agree that they can register before any
//! of them begins, and register the same windows in the same order: by lane, then by counter.
//!
//! A window of NCCL before 2.30.3 lies in one physical handle, and an operation's buffer lies in one
//! window. Only lanes whose blocks do not cross segments are registered (`WindowPolicy::PerSegment`), with
//! one window for each segment.
#![allow(unsafe_code)] // FFI: the calls of NCCL.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::{Deadline, Error, Result};

/// Linux's `RTLD_NOLOAD`: opens a library only if it is loaded already.
const NOLOAD: c_int = 4;

/// The libraries that may hold NCCL: its own, or torch's, which may have it linked in.
const LIBRARIES: [&str; 3] = ["libnccl.so.2", "libnccl.so", "libtorch_cuda.so"];

/// The first version with windows.
const OLDEST: c_int = 22700;

/// `NCCL_WIN_COLL_SYMMETRIC`
const SYMMETRIC: c_int = 1;

/// `ncclInProgress`
const IN_PROGRESS: c_int = 7;

type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
type OfComm = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;
type Register =
    unsafe extern "C" fn(*mut c_void, *mut c_void, usize, *mut *mut c_void, c_int) -> c_int;
type Deregister = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
type ErrorText = unsafe extern "C" fn(c_int) -> *const c_char;
type LastError = unsafe extern "C" fn(*mut c_void) -> *const c_char;

/// NCCL's functions, as far as this version has them.
struct Functions {
    name: String,
    get_version: Option<GetVersion>,
    count: Option<OfComm>,
    user_rank: Option<OfComm>,
    async_error: Option<OfComm>,
    register: Option<Register>,
    deregister: Option<Deregister>,
    error_text: Option<ErrorText>,
    last_error: Option<LastError>,
    /// Keeps the library, and so the functions, loaded.
    _library: Library,
}

/// The NCCL of this process.
#[derive(Clone, Copy)]
pub(crate) struct Nccl(&'static Functions);

/// A communicator of NCCL, made by the program or by torch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NcclComm(usize);

/// A window of NCCL.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NcclWindow(usize);

impl NcclComm {
    /// # Safety
    ///
    /// `raw` is an `ncclComm_t` of the NCCL that is loaded, and lives until `Pool::unregister_nccl` is
    /// called with it or the pool is dropped.
    pub(crate) unsafe fn new(raw: usize) -> Result<Self> {
        if raw == 0 {
            return Err(Error::invalid_argument(
                "no NCCL communicator: the group has not communicated yet, or has another backend",
            ));
        }
        Ok(Self(raw))
    }

    /// Whether it is this `ncclComm_t`.
    pub(crate) fn is(self, raw: usize) -> bool {
        self.0 == raw
    }

    fn raw(self) -> *mut c_void {
        self.0 as *mut c_void
    }
}

/// A function of the library, if it has it.
fn function<T: Copy>(library: &Library, name: &str) -> Option<T> {
    // SAFETY: the types above are those of nccl.h since 2.27.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.ok().map(|symbol| *symbol)
}

impl Nccl {
    /// The NCCL that is loaded; [`Error::is_unsupported`] if there is none.
    pub(crate) fn loaded() -> Result<Self> {
        static FOUND: OnceLock<Functions> = OnceLock::new();
        if let Some(functions) = FOUND.get() {
            return Ok(Self(functions));
        }
        for name in LIBRARIES {
            // SAFETY: the library is loaded already or not at all, so no code of it runs here.
            let opened = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL | NOLOAD) };
            let Ok(library) = opened else { continue };
            let get_version = function(&library, "ncclGetVersion");
            if get_version.is_none() {
                continue;
            }
            let functions = Functions {
                name: name.to_owned(),
                get_version,
                count: function(&library, "ncclCommCount"),
                user_rank: function(&library, "ncclCommUserRank"),
                async_error: function(&library, "ncclCommGetAsyncError"),
                register: function(&library, "ncclCommWindowRegister"),
                deregister: function(&library, "ncclCommWindowDeregister"),
                error_text: function(&library, "ncclGetErrorString"),
                last_error: function(&library, "ncclGetLastError"),
                _library: library,
            };
            return Ok(Self(FOUND.get_or_init(|| functions)));
        }
        Err(Error::unsupported(format!(
            "no NCCL is loaded in this process (looked for {}); the copy that made the communicator \
             is needed",
            LIBRARIES.join(", ")
        )))
    }

    /// The version as NCCL encodes it, such as 22809; [`Error::is_unsupported`] if that has no windows.
    pub(crate) fn version(self) -> Result<c_int> {
        let mut version = 0;
        if let Some(get_version) = self.0.get_version {
            // SAFETY: writes one int through a valid pointer.
            let code = unsafe { get_version(&raw mut version) };
            self.check(code, None, || "asking NCCL for its version".to_owned())?;
        }
        let missing = self.0.register.is_none() || self.0.deregister.is_none();
        if version < OLDEST || missing {
            return Err(Error::unsupported(format!(
                "NCCL {} ({}) has no windows; use 2.27 or newer",
                readable(version),
                self.0.name
            )));
        }
        Ok(version)
    }

    /// A communicator's rank and number of ranks.
    pub(crate) fn place(self, comm: NcclComm) -> Result<(u32, u32)> {
        let ask = |function: Option<OfComm>, what: &str| {
            let function = function.ok_or_else(|| {
                Error::unsupported(format!("{} has no function for {what}", self.0.name))
            })?;
            let mut value = 0;
            // SAFETY: the communicator is live (`NcclComm::new`); writes one int.
            let code = unsafe { function(comm.raw(), &raw mut value) };
            self.check(code, Some(comm), || format!("asking a communicator for {what}"))?;
            Ok(u32::try_from(value).unwrap_or(u32::MAX))
        };
        Ok((ask(self.0.user_rank, "its rank")?, ask(self.0.count, "its number of ranks")?))
    }

    /// Makes a window of `bytes` of this rank at `address`. Collective in NCCL.
    ///
    /// # Safety
    ///
    /// You must pass memory that is mapped for as long as the window is registered.
    pub(crate) unsafe fn register(
        self,
        comm: NcclComm,
        address: u64,
        bytes: u64,
        deadline: Deadline,
    ) -> Result<NcclWindow> {
        let register = self.0.register.ok_or_else(|| {
            Error::unsupported(format!("{} has no ncclCommWindowRegister", self.0.name))
        })?;
        let doing = || format!("ncclCommWindowRegister of {bytes} bytes at {address:#x}");
        let mut window: *mut c_void = null_mut();
        let pointer = address as *mut c_void;
        let at = &raw mut window;
        // SAFETY: the communicator is live (`NcclComm::new`), and the caller promised that the memory stays mapped. NCCL maps it
        // for its peers and touches none of it by itself. The window is written through a valid pointer.
        let code = unsafe { register(comm.raw(), pointer, bytes as usize, at, SYMMETRIC) };
        self.finished(code, comm, deadline, doing)?;
        if window.is_null() {
            return Err(Error::unsupported(format!(
                "NCCL {} returned success but no window of {bytes} bytes at {address:#x}: it has \
                 no symmetric memory between these ranks (check that all of them are linked, and \
                 that NCCL_WIN_ENABLE and NCCL_CUMEM_ENABLE are not 0)",
                readable(self.version()?)
            )));
        }
        Ok(NcclWindow(window as usize))
    }

    /// Deregisters a window.
    ///
    /// # Safety
    ///
    /// You must pass a window that `register` has made of this communicator, and that was deregistered by nobody.
    pub(crate) unsafe fn deregister(
        self,
        comm: NcclComm,
        window: NcclWindow,
        deadline: Deadline,
    ) -> Result<()> {
        let deregister = self.0.deregister.ok_or_else(|| {
            Error::unsupported(format!("{} has no ncclCommWindowDeregister", self.0.name))
        })?;
        // SAFETY: the communicator is live (`NcclComm::new`), and the caller promised a window of it that is registered.
        let code = unsafe { deregister(comm.raw(), window.0 as *mut c_void) };
        self.finished(code, comm, deadline, || "ncclCommWindowDeregister".to_owned())
    }

    /// Waits for a call to complete that a non-blocking communicator has begun.
    fn finished(
        self,
        mut code: c_int,
        comm: NcclComm,
        deadline: Deadline,
        doing: impl Fn() -> String,
    ) -> Result<()> {
        while code == IN_PROGRESS {
            let Some(async_error) = self.0.async_error else { break };
            if deadline.expired() {
                return Err(Error::timeout(format!("for {}", doing()), deadline.budget(), vec![]));
            }
            thread::sleep(Duration::from_micros(50));
            // SAFETY: the communicator is live (`NcclComm::new`); writes one int.
            let asked = unsafe { async_error(comm.raw(), &raw mut code) };
            self.check(asked, Some(comm), || "asking a communicator for its state".to_owned())?;
        }
        self.check(code, Some(comm), doing)
    }

    /// Turns a result code other than success into an error with NCCL's own texts.
    fn check(
        self,
        code: c_int,
        comm: Option<NcclComm>,
        doing: impl FnOnce() -> String,
    ) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut texts = Vec::new();
        if let Some(error_text) = self.0.error_text {
            // SAFETY: takes any number, and returns a text that stays.
            let found = unsafe { error_text(code) };
            // SAFETY: NCCL's text of an error is a C string that stays.
            texts.push(unsafe { text(found) });
        }
        if let (Some(last_error), Some(comm)) = (self.0.last_error, comm) {
            // SAFETY: the communicator is live (`NcclComm::new`).
            let found = unsafe { last_error(comm.raw()) };
            // SAFETY: NCCL's text of the last error is a C string that stays until the next error, and is copied at once.
            texts.push(unsafe { text(found) });
        }
        texts.retain(|text| !text.is_empty());
        Err(Error::system(doing(), format!("NCCL error {code}: {}", texts.join("; "))))
    }
}

/// Copies a C string of NCCL.
///
/// # Safety
///
/// You must pass null or a C string.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: it is not null, so the caller promised a C string.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// A version such as 22809 as `2.28.9`.
fn readable(version: c_int) -> String {
    format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_readable() {
        assert_eq!((readable(22809), readable(23003)), ("2.28.9".into(), "2.30.3".into()));
    }

    #[test]
    fn the_error_without_nccl_names_the_libraries() {
        let Err(error) = Nccl::loaded() else { panic!("no NCCL is loaded in this test") };
        assert!(error.is_unsupported() && error.to_string().contains("libnccl.so.2"), "{error}");
        // SAFETY: `NcclComm::new` refuses 0 before it uses it as a communicator.
        assert!(unsafe { NcclComm::new(0) }.unwrap_err().is_invalid_argument());
    }
}
