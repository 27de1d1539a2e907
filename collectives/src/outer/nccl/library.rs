//! The functions of NCCL that carry transfers: of the library that the process has loaded, or of one that is found.

#![allow(unsafe_code)] // FFI: the calls of NCCL

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use symmpool_allocator::{Error, Result};

use crate::outer::MAX_OUTER_BLOCKS;

/// Linux's `RTLD_NOLOAD`: opens a library only if it is loaded already.
const NOLOAD: c_int = 4;
/// Libraries that may be loaded already: NCCL's own, or torch's, which may have it linked in.
const LOADED: [&str; 3] = ["libnccl.so.2", "libnccl.so", "libtorch_cuda.so"];
/// Libraries that are loaded where none is.
const FOUND: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// The first version whose communicators have all that is asked of them without blocking.
const OLDEST: c_int = 21800;

/// `ncclInProgress`
pub(super) const IN_PROGRESS: c_int = 7;
/// `ncclUint8`
const BYTES: c_int = 1;
/// `NCCL_CONFIG_UNDEF_INT`
const UNDEFINED: c_int = c_int::MIN;
/// `ncclConfig_t`'s magic number.
const MAGIC: c_uint = 0xcafe_beef;

/// Bytes of an id from which ranks make a communicator.
pub(super) const ID_BYTES: usize = 128;

/// `ncclUniqueId`
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; ID_BYTES]);

/// `ncclConfig_t` as 2.18 has it. Later versions have more behind it, which they know by its size.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

/// An `ncclComm_t`, which is passed on and never followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RawComm(usize);

impl RawComm {
    fn pointer(self) -> *mut c_void {
        self.0 as *mut c_void
    }
}

macro_rules! functions {
    ($($field:ident = $symbol:literal($($argument:ty),*) -> $result:ty;)*) => {
        /// NCCL's functions.
        struct Functions {
            /// The library's name.
            name: String,
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
            /// Keeps the functions loaded.
            _library: Library,
        }

        impl Functions {
            fn of(library: Library, name: &str) -> Result<Self> {
                $(
                    // SAFETY: the type is the function's in nccl.h since 2.18.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> $result>($symbol.as_bytes())
                    };
                    let $field = *found.map_err(|_| Error::unsupported(format!(
                        "{name} has no function {}, which transfers between hosts need: use NCCL {} or newer",
                        $symbol, readable(OLDEST)
                    )))?;
                )*
                Ok(Self { name: name.to_owned(), $($field,)* _library: library })
            }
        }
    };
}

functions! {
    get_version = "ncclGetVersion"(*mut c_int) -> c_int;
    unique_id = "ncclGetUniqueId"(*mut UniqueId) -> c_int;
    init_rank = "ncclCommInitRankConfig"(*mut usize, c_int, UniqueId, c_int, *const Config) -> c_int;
    async_error = "ncclCommGetAsyncError"(*mut c_void, *mut c_int) -> c_int;
    finalize = "ncclCommFinalize"(*mut c_void) -> c_int;
    destroy = "ncclCommDestroy"(*mut c_void) -> c_int;
    abort = "ncclCommAbort"(*mut c_void) -> c_int;
    group_start = "ncclGroupStart"() -> c_int;
    group_end = "ncclGroupEnd"() -> c_int;
    send = "ncclSend"(*const c_void, usize, c_int, c_int, *mut c_void, usize) -> c_int;
    receive = "ncclRecv"(*mut c_void, usize, c_int, c_int, *mut c_void, usize) -> c_int;
    all_gather = "ncclAllGather"(*const c_void, *mut c_void, usize, c_int, *mut c_void, usize) -> c_int;
    broadcast = "ncclBroadcast"(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, usize) -> c_int;
    error_text = "ncclGetErrorString"(c_int) -> *const c_char;
    last_error = "ncclGetLastError"(*mut c_void) -> *const c_char;
}

/// The NCCL of this process.
#[derive(Clone, Copy)]
pub(super) struct NcclLibrary(&'static Functions);

impl NcclLibrary {
    /// NCCL: the library that is loaded, else one that the system finds. `is_unsupported` where there is none, or it is too
    /// old.
    pub(super) fn open() -> Result<Self> {
        static OPENED: OnceLock<Functions> = OnceLock::new();
        let functions = match OPENED.get() {
            Some(functions) => functions,
            None => {
                let found = find()?;
                OPENED.get_or_init(|| found)
            }
        };
        let library = Self(functions);
        library.version().map(|_| library)
    }

    /// The version as NCCL encodes it, as 22809.
    pub(super) fn version(self) -> Result<c_int> {
        let mut version = 0;
        // SAFETY: writes one int through a valid pointer.
        let code = unsafe { (self.0.get_version)(&raw mut version) };
        self.check(code, None, || "asking NCCL for its version".to_owned())?;
        if version < OLDEST {
            return Err(Error::unsupported(format!(
                "NCCL {} ({}) cannot carry transfers between hosts: use {} or newer",
                readable(version),
                self.0.name,
                readable(OLDEST)
            )));
        }
        Ok(version)
    }

    /// An id from which ranks make a communicator.
    pub(super) fn unique_id(self) -> Result<UniqueId> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: writes one id through a valid pointer.
        let code = unsafe { (self.0.unique_id)(&raw mut id) };
        self.check(code, None, || "ncclGetUniqueId".to_owned())?;
        Ok(id)
    }

    /// Begins to make a communicator that never blocks. Ask [`Self::is_settled`] until it is there. The device's
    /// context must be current.
    pub(super) fn init_rank(self, id: UniqueId, rank: u32, world: u32) -> Result<RawComm> {
        let config = Config {
            size: size_of::<Config>(),
            magic: MAGIC,
            version: OLDEST as c_uint,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: MAX_OUTER_BLOCKS as c_int,
            net_name: null(),
            split_share: UNDEFINED,
        };
        let mut raw = 0;
        // SAFETY: writes one handle through a valid pointer, and reads a configuration of the size that it names.
        let code = unsafe {
            (self.0.init_rank)(&raw mut raw, world as c_int, id, rank as c_int, &raw const config)
        };
        self.check(code, None, || "ncclCommInitRankConfig".to_owned())?;
        if raw == 0 {
            return Err(Error::system("ncclCommInitRankConfig", "it gave no communicator"));
        }
        Ok(RawComm(raw))
    }

    /// Whether a communicator has done what was asked of it; an error where it has failed.
    ///
    /// # Safety
    ///
    /// The communicator was not given back.
    pub(super) unsafe fn is_settled(self, comm: RawComm) -> Result<bool> {
        let mut state = 0;
        // SAFETY: the caller promised that the communicator is there; writes one int.
        let code = unsafe { (self.0.async_error)(comm.pointer(), &raw mut state) };
        self.check(code, None, || "asking a communicator for its state".to_owned())?;
        if state == IN_PROGRESS {
            return Ok(false);
        }
        self.check(state, Some(comm), || "NCCL's communicator between hosts failed".to_owned())?;
        Ok(true)
    }

    /// Has NCCL begin the calls of `calls` together, on the calling thread.
    pub(super) fn grouped(self, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        // SAFETY: takes nothing.
        let code = unsafe { (self.0.group_start)() };
        self.check(code, None, || "ncclGroupStart".to_owned())?;
        let begun = calls();
        // SAFETY: takes nothing; the group was begun on this thread.
        let code = unsafe { (self.0.group_end)() };
        begun?;
        self.check(code, None, || "ncclGroupEnd".to_owned())
    }

    /// Sends bytes to a rank.
    ///
    /// # Safety
    ///
    /// The communicator was not given back, `from` is readable for so many bytes until the stream is past this, and the
    /// stream is live.
    pub(super) unsafe fn send(
        self,
        comm: RawComm,
        (from, bytes): (*const u8, usize),
        peer: usize,
        stream: u64,
    ) -> Result<()> {
        // SAFETY: the caller promised the communicator, the memory and the stream.
        let code = unsafe {
            let from = from.cast();
            (self.0.send)(from, bytes, BYTES, peer as c_int, comm.pointer(), stream as usize)
        };
        self.check(code, Some(comm), || format!("ncclSend of {bytes} bytes to rank {peer}"))
    }

    /// Receives bytes of a rank.
    ///
    /// # Safety
    ///
    /// The communicator was not given back, `to` is writable for so many bytes until the stream is past this, and the stream
    /// is live.
    pub(super) unsafe fn receive(
        self,
        comm: RawComm,
        (to, bytes): (*mut u8, usize),
        peer: usize,
        stream: u64,
    ) -> Result<()> {
        // SAFETY: the caller promised the communicator, the memory and the stream.
        let code = unsafe {
            let to = to.cast();
            (self.0.receive)(to, bytes, BYTES, peer as c_int, comm.pointer(), stream as usize)
        };
        self.check(code, Some(comm), || format!("ncclRecv of {bytes} bytes of rank {peer}"))
    }

    /// Gathers the bytes of all ranks.
    ///
    /// # Safety
    ///
    /// The communicator was not given back, `from` is readable for so many bytes and `to` writable for those of all ranks
    /// until the stream is past this, and the stream is live.
    pub(super) unsafe fn all_gather(
        self,
        comm: RawComm,
        (from, to): (*const u8, *mut u8),
        bytes: usize,
        stream: u64,
    ) -> Result<()> {
        // SAFETY: the caller promised the communicator, the memory and the stream.
        let code = unsafe {
            let (from, to) = (from.cast(), to.cast());
            (self.0.all_gather)(from, to, bytes, BYTES, comm.pointer(), stream as usize)
        };
        self.check(code, Some(comm), || format!("ncclAllGather of {bytes} bytes"))
    }

    /// Copies the root's bytes to all ranks.
    ///
    /// # Safety
    ///
    /// The communicator was not given back, `data` is readable and writable for so many bytes until the stream is past this,
    /// and the stream is live.
    pub(super) unsafe fn broadcast(
        self,
        comm: RawComm,
        (data, bytes): (*mut u8, usize),
        root: u32,
        stream: u64,
    ) -> Result<()> {
        // SAFETY: the caller promised the communicator, the memory and the stream.
        let code = unsafe {
            let (from, to) = (data.cast_const().cast(), data.cast());
            let root = root as c_int;
            (self.0.broadcast)(from, to, bytes, BYTES, root, comm.pointer(), stream as usize)
        };
        self.check(code, Some(comm), || format!("ncclBroadcast of {bytes} bytes"))
    }

    /// Ends a communicator and all that it does. It may block.
    ///
    /// # Safety
    ///
    /// The communicator was not given back, and nobody uses it from now on.
    pub(super) unsafe fn abort(self, comm: RawComm) -> Result<()> {
        // SAFETY: the caller promised that the communicator is there, and that this is the last use of it.
        let code = unsafe { (self.0.abort)(comm.pointer()) };
        if code == IN_PROGRESS {
            return Ok(());
        }
        self.check(code, None, || "ncclCommAbort".to_owned())
    }

    /// Has a communicator deliver all that it was given.
    ///
    /// # Safety
    ///
    /// The communicator was not given back, and nobody begins another call on it.
    pub(super) unsafe fn finalize(self, comm: RawComm) -> Result<()> {
        // SAFETY: the caller promised that the communicator is there.
        let code = unsafe { (self.0.finalize)(comm.pointer()) };
        self.check(code, Some(comm), || "ncclCommFinalize".to_owned())
    }

    /// Gives back a communicator that has delivered all. It may block.
    ///
    /// # Safety
    ///
    /// The communicator was not given back, and nobody uses it from now on.
    pub(super) unsafe fn destroy(self, comm: RawComm) -> Result<()> {
        // SAFETY: the caller promised that the communicator is there, and that this is the last use of it.
        let code = unsafe { (self.0.destroy)(comm.pointer()) };
        self.check(code, None, || "ncclCommDestroy".to_owned())
    }

    /// Turns a result code other than success and "in progress" into an error with NCCL's own texts.
    fn check(
        self,
        code: c_int,
        comm: Option<RawComm>,
        doing: impl FnOnce() -> String,
    ) -> Result<()> {
        if code == 0 || code == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: takes any number.
        let found = unsafe { (self.0.error_text)(code) };
        // SAFETY: NCCL's text of an error is a C string that stays.
        let mut texts = vec![unsafe { text(found) }];
        if let Some(comm) = comm {
            // SAFETY: callers that name a communicator have promised that it is there.
            let found = unsafe { (self.0.last_error)(comm.pointer()) };
            // SAFETY: NCCL's text of the last error stays until the next one, and is copied at once.
            texts.push(unsafe { text(found) });
        }
        texts.retain(|text| !text.is_empty());
        Err(Error::system(doing(), format!("NCCL error {code}: {}", texts.join("; "))))
    }
}

/// Looks for NCCL among the libraries that are loaded, then has the system find one.
fn find() -> Result<Functions> {
    let loaded = LOADED.iter().map(|name| (*name, RTLD_NOW | RTLD_LOCAL | NOLOAD));
    let found = FOUND.iter().map(|name| (*name, RTLD_NOW | RTLD_LOCAL));
    let mut why = None;
    for (name, flags) in loaded.chain(found) {
        // SAFETY: NCCL's initialisation has no preconditions.
        let Ok(library) = (unsafe { Library::open(Some(name), flags) }) else { continue };
        match Functions::of(library, name) {
            Ok(functions) => return Ok(functions),
            // Another library may have the whole of it: torch's may have no NCCL.
            Err(error) => why = why.or(Some(error)),
        }
    }
    Err(why.unwrap_or_else(|| {
        Error::unsupported(format!(
            "no NCCL was found, which carries data of GPUs between hosts (looked for {}): install it, or have \
             LD_LIBRARY_PATH name its folder",
            LOADED.join(", ")
        ))
    }))
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
pub(super) fn readable(version: c_int) -> String {
    format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NCCL reads the configuration by this layout.
    #[test]
    fn the_configuration_is_laid_out_as_nccl_reads_it() {
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(std::mem::offset_of!(Config, split_share), 40);
    }

    #[test]
    fn versions_are_readable() {
        assert_eq!((readable(22809), readable(OLDEST)), ("2.28.9".into(), "2.18.0".into()));
    }
}
