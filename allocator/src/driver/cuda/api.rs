//! The functions of the CUDA driver library that symmpool calls, found at run time.
//!
//! The library handle, constants and structure layouts are those of `cudarc::driver::sys`. The
//! functions are looked up here, for two reasons. cudarc panics on a missing symbol, where
//! symmpool owes its caller an error that names it. And cudarc declares results as Rust enums of
//! the version it was built for: a newer driver that answers with a newer code would be undefined
//! behaviour. Here every number that the driver hands back is an integer.
#![allow(unsafe_code)] // FFI: symbol lookup and the calls that name an error code.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::{Error, Result};

/// The length of a `CUmemFabricHandle`.
pub(super) const FABRIC_HANDLE_BYTES: usize = 64;

/// A pointer-sized handle (`CUcontext`, `CUstream`, `CUevent`) that is passed on, never followed.
pub(super) type RawHandle = usize;

/// A `CUresult`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CudaResult(pub(super) c_uint);

/// Declares the table of functions and how it is filled.
macro_rules! functions {
    ($($field:ident = $symbol:ident($($argument:ty),*);)*) => {
        /// The driver's entry points. Fields are named after the functions.
        pub(super) struct DriverApi {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> CudaResult,)*
        }

        impl DriverApi {
            /// Looks every function up; the error names all that are missing.
            ///
            /// # Safety
            ///
            /// Symbols of these names in `library` must be the CUDA driver's functions.
            unsafe fn load(library: &libloading::Library) -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                $(
                    // SAFETY: the caller promised that a symbol of this name is the CUDA driver's
                    // function, and the type is that function's in the CUDA 12.4 headers (driver
                    // symbols never change type; a changed function gets a new suffix).
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> CudaResult>(
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
    init = cuInit(c_uint);
    driver_version = cuDriverGetVersion(*mut c_int);
    error_name = cuGetErrorName(CudaResult, *mut *const c_char);
    error_string = cuGetErrorString(CudaResult, *mut *const c_char);
    device_count = cuDeviceGetCount(*mut c_int);
    device_get = cuDeviceGet(*mut c_int, c_int);
    device_name = cuDeviceGetName(*mut c_char, c_int, c_int);
    device_uuid = cuDeviceGetUuid_v2(*mut [u8; 16], c_int);
    device_attribute = cuDeviceGetAttribute(*mut c_int, c_int, c_int);
    device_can_access_peer = cuDeviceCanAccessPeer(*mut c_int, c_int, c_int);
    primary_retain = cuDevicePrimaryCtxRetain(*mut RawHandle, c_int);
    primary_release = cuDevicePrimaryCtxRelease_v2(c_int);
    context_current = cuCtxGetCurrent(*mut RawHandle);
    context_push = cuCtxPushCurrent_v2(RawHandle);
    context_pop = cuCtxPopCurrent_v2(*mut RawHandle);
    context_synchronize = cuCtxSynchronize();
    capture_mode = cuThreadExchangeStreamCaptureMode(*mut c_uint);
    memory_info = cuMemGetInfo_v2(*mut usize, *mut usize);
    granularity = cuMemGetAllocationGranularity(*mut usize, *const AllocationProp, c_uint);
    address_reserve = cuMemAddressReserve(*mut u64, usize, usize, u64, c_ulonglong);
    address_free = cuMemAddressFree(u64, usize);
    create = cuMemCreate(*mut u64, usize, *const AllocationProp, c_ulonglong);
    release = cuMemRelease(u64);
    map = cuMemMap(u64, usize, usize, u64, c_ulonglong);
    unmap = cuMemUnmap(u64, usize);
    set_access = cuMemSetAccess(u64, usize, *const AccessDesc, usize);
    export = cuMemExportToShareableHandle(*mut c_void, u64, c_uint, c_ulonglong);
    import = cuMemImportFromShareableHandle(*mut u64, *mut c_void, c_uint);
    properties = cuMemGetAllocationPropertiesFromHandle(*mut AllocationProp, u64);
    stream_is_capturing = cuStreamIsCapturing(RawHandle, *mut c_uint);
    stream_capture_info = cuStreamGetCaptureInfo_v2(
        RawHandle, *mut c_uint, *mut u64, *mut RawHandle, *mut *const RawHandle, *mut usize
    );
    stream_wait_event = cuStreamWaitEvent(RawHandle, RawHandle, c_uint);
    event_create = cuEventCreate(*mut RawHandle, c_uint);
    event_record = cuEventRecord(RawHandle, RawHandle);
    event_query = cuEventQuery(RawHandle);
    event_destroy = cuEventDestroy_v2(RawHandle);
    copy_to_device = cuMemcpyHtoD_v2(u64, *const c_void, usize);
    copy_to_host = cuMemcpyDtoH_v2(*mut c_void, u64, usize);
    fill_u32 = cuMemsetD32_v2(u64, c_uint, usize);
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Location {
    kind: c_uint,
    pub(super) id: c_int,
}

impl Location {
    /// The memory of a device.
    pub(super) fn device(ordinal: c_int) -> Self {
        Self { kind: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as c_uint, id: ordinal }
    }

    /// The ordinal, where this names a device's memory.
    pub(super) fn as_device(&self) -> Option<c_int> {
        (self.kind == sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as c_uint)
            .then_some(self.id)
    }
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct AllocationProp {
    kind: c_uint,
    pub(super) handle_types: c_uint,
    pub(super) location: Location,
    /// A pointer that CUDA reads on Windows only: always null.
    win32_metadata: usize,
    compression: u8,
    gpu_direct_rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

impl AllocationProp {
    /// Pinned memory of a device, whose handles can be exported as `handle_types`.
    pub(super) fn pinned(ordinal: c_int, handle_types: c_uint, gpu_direct_rdma: bool) -> Self {
        Self {
            kind: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as c_uint,
            handle_types,
            location: Location::device(ordinal),
            win32_metadata: 0,
            compression: 0,
            gpu_direct_rdma: u8::from(gpu_direct_rdma),
            usage: 0,
            reserved: [0; 4],
        }
    }
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct AccessDesc {
    location: Location,
    flags: c_uint,
}

impl AccessDesc {
    /// Reads and writes by a device.
    pub(super) fn read_write(ordinal: c_int) -> Self {
        Self {
            location: Location::device(ordinal),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as c_uint,
        }
    }
}

impl DriverApi {
    /// The driver's functions, initialised. `is_unsupported` where there is no library, it lacks
    /// a function, or it finds no device.
    pub(super) fn get() -> Result<&'static Self> {
        static API: OnceLock<Result<DriverApi>> = OnceLock::new();
        API.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self> {
        let tried = cudarc::get_lib_name_candidates("cuda");
        // SAFETY: runs the initialisers of libcuda, which have no preconditions.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::unsupported(format!(
                "no CUDA driver library on this machine; tried {}",
                tried.join(", ")
            )));
        }
        // SAFETY: the library was just found, so this does not panic, and its initialisers have no preconditions.
        let library = unsafe { sys::culib() };
        // SAFETY: `culib` opened libcuda, whose symbols of these names are the driver's.
        let api = unsafe { Self::load(library) }.map_err(|missing| {
            Error::unsupported(format!(
                "the CUDA driver library lacks {}; symmpool needs a driver for CUDA 12.4 or newer",
                missing.join(", ")
            ))
        })?;
        // SAFETY: flags must be 0, and are.
        let code = unsafe { (api.init)(0) };
        api.started(code)?;
        Ok(api)
    }

    /// Turns the result of `cuInit` into an error.
    fn started(&self, code: CudaResult) -> Result<()> {
        use sys::cudaError_enum as e;
        let text = self.describe(code);
        match code.0 {
            0 => Ok(()),
            // A missing, stubbed or mismatched driver: there is no GPU to be had here.
            c if [
                e::CUDA_ERROR_NO_DEVICE as c_uint,
                e::CUDA_ERROR_STUB_LIBRARY as c_uint,
                e::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH as c_uint,
                e::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE as c_uint,
            ]
            .contains(&c) =>
            {
                Err(Error::unsupported(format!("the CUDA driver finds no usable device: {text}")))
            }
            c if c == e::CUDA_ERROR_NOT_INITIALIZED as c_uint => {
                Err(Error::invalid_state(format!(
                    "CUDA cannot start in this process: {text}. A process forked from one that used \
                 CUDA cannot use it; start ranks with spawn or exec"
                )))
            }
            _ => Err(Error::system("starting the CUDA driver (cuInit)", text)),
        }
    }

    /// A result code as people look it up: `CUDA_ERROR_INVALID_VALUE (1): invalid argument`.
    pub(super) fn describe(&self, code: CudaResult) -> String {
        let name = lookup(code, self.error_name);
        let text = lookup(code, self.error_string);
        let name = name.unwrap_or_else(|| "unknown CUDA error".to_owned());
        match text {
            Some(text) => format!("{name} ({}): {text}", code.0),
            None => format!("{name} ({})", code.0),
        }
    }

    /// Success, or an error of the kind that `code` stands for, about `what` was being done.
    pub(super) fn check(&self, code: CudaResult, what: impl FnOnce() -> String) -> Result<()> {
        use sys::cudaError_enum as e;
        if code.0 == 0 {
            return Ok(());
        }
        let text = self.describe(code);
        let c = code.0;
        Err(if c == e::CUDA_ERROR_OUT_OF_MEMORY as c_uint {
            Error::out_of_memory(format!("{}: {text}", what()))
        } else if c == e::CUDA_ERROR_NOT_SUPPORTED as c_uint
            || c == e::CUDA_ERROR_NOT_PERMITTED as c_uint
            || c == e::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED as c_uint
        {
            Error::unsupported(format!("{}: {text}", what()))
        } else if code.is_capture() {
            Error::invalid_state(format!(
                "{}: {text}; do this before or after the capture of a graph",
                what()
            ))
        } else {
            Error::system(what(), text)
        })
    }
}

impl CudaResult {
    pub(super) fn is_out_of_memory(self) -> bool {
        self.0 == sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY as c_uint
    }

    pub(super) fn is_invalid_value(self) -> bool {
        self.0 == sys::cudaError_enum::CUDA_ERROR_INVALID_VALUE as c_uint
    }

    /// Whether a stream capture stood in the way.
    pub(super) fn is_capture(self) -> bool {
        use sys::cudaError_enum as e;
        let first = e::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as c_uint;
        let last = e::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD as c_uint;
        (first..=last).contains(&self.0)
    }
}

/// The address of any function of the library. Only after [`DriverApi::get`] has opened it.
pub(super) fn function(name: &str) -> Result<NonNull<c_void>> {
    // SAFETY: the library was opened before, so this does not panic.
    let library = unsafe { sys::culib() };
    // SAFETY: the symbol is only taken as an address, which is not followed here.
    let found = unsafe { library.get::<*mut c_void>(name.as_bytes()) };
    let address = found.ok().and_then(|symbol| NonNull::new(*symbol));
    address.ok_or_else(|| {
        Error::unsupported(format!(
            "the CUDA driver library lacks {name}; symmpool needs a driver for CUDA 12.4 or newer"
        ))
    })
}

/// Asks the driver for the name or the text of a code; `None` where it knows none.
fn lookup(
    code: CudaResult,
    ask: unsafe extern "C" fn(CudaResult, *mut *const c_char) -> CudaResult,
) -> Option<String> {
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: the function writes one pointer through its second argument, which is valid.
    let answer = unsafe { ask(code, &raw mut text) };
    if answer.0 != 0 || text.is_null() {
        return None;
    }
    // SAFETY: on success the pointer is to a static, NUL-terminated string of the driver.
    let text = unsafe { CStr::from_ptr(text) };
    Some(text.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use std::mem::{align_of, offset_of, size_of};

    use super::*;

    /// Our structures, which hold integers, are laid out as the headers' are.
    #[test]
    fn structures_are_laid_out_as_in_the_headers() {
        assert_eq!(size_of::<Location>(), size_of::<sys::CUmemLocation>());
        assert_eq!(size_of::<AccessDesc>(), size_of::<sys::CUmemAccessDesc>());
        assert_eq!(offset_of!(AccessDesc, flags), offset_of!(sys::CUmemAccessDesc, flags));
        assert_eq!(size_of::<AllocationProp>(), size_of::<sys::CUmemAllocationProp>());
        assert_eq!(align_of::<AllocationProp>(), align_of::<sys::CUmemAllocationProp>());
        assert_eq!(
            offset_of!(AllocationProp, handle_types),
            offset_of!(sys::CUmemAllocationProp, requestedHandleTypes)
        );
        assert_eq!(
            offset_of!(AllocationProp, location),
            offset_of!(sys::CUmemAllocationProp, location)
        );
        assert_eq!(
            offset_of!(AllocationProp, gpu_direct_rdma),
            offset_of!(sys::CUmemAllocationProp, allocFlags.gpuDirectRDMACapable)
        );
        assert_eq!(size_of::<sys::CUuuid>(), 16);
        assert_eq!(size_of::<sys::CUmemFabricHandle>(), super::FABRIC_HANDLE_BYTES);
        assert_eq!(size_of::<sys::CUstream>(), size_of::<RawHandle>());
    }

    #[test]
    fn missing_functions_are_named() {
        let this = libloading::Library::from(libloading::os::unix::Library::this());
        // SAFETY: test programs do not link libcuda, so no symbol of these names is found.
        let missing = unsafe { DriverApi::load(&this) }.err().expect("this is not libcuda");
        assert_eq!(missing.first(), Some(&"cuInit"));
        assert!(missing.contains(&"cuMemImportFromShareableHandle"));
    }
}
