//! The functions of the CUDA driver library that collectives call, found at run time.
//!
//! As in the allocator's `driver/cuda/api.rs`, and for its reasons: constants and structure layouts
//! are cudarc's, and functions are looked up by name. Results that are enums of C are taken as integers, as a newer driver
//! may return values that cudarc's enums lack.

#![allow(unsafe_code)] // FFI: symbol lookup

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::transmute_copy;
use std::ptr::NonNull;
use std::sync::OnceLock;

use cudarc::driver::sys;
use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Driver, Error, Result, Stream};

/// A pointer-sized handle (`CUmodule`, `CUfunction`, `CUstream`, `CUevent`) that is passed on, never followed.
pub(crate) type CudaHandle = usize;

macro_rules! functions {
    ($($field:ident = $symbol:ident($($argument:ty),*);)*) => {
        /// Entry points, named after the functions.
        pub(crate) struct Api {
            $(pub(in crate::cuda) $field: unsafe extern "C" fn($($argument),*) -> c_uint,)*
        }

        impl Api {
            fn load() -> Result<Self> {
                $(
                    let address: NonNull<c_void> = CudaDriver::function(stringify!($symbol))?;
                    // SAFETY: the address is that of the driver's function of this name, whose type
                    // in the CUDA 12.4 headers is this one; both are pointers.
                    let $field = unsafe {
                        transmute_copy::<_, unsafe extern "C" fn($($argument),*) -> c_uint>(&address)
                    };
                )*
                Ok(Self { $($field,)* })
            }
        }
    };
}

functions! {
    module_load = cuModuleLoadData(*mut CudaHandle, *const c_void);
    module_unload = cuModuleUnload(CudaHandle);
    module_function = cuModuleGetFunction(*mut CudaHandle, CudaHandle, *const c_char);
    occupancy = cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, CudaHandle, c_int, usize);
    function_set = cuFuncSetAttribute(CudaHandle, c_int, c_int);
    launch = cuLaunchKernelEx(*const sys::CUlaunchConfig, CudaHandle, *mut *mut c_void, *mut *mut c_void);
    tensor_map = cuTensorMapEncodeTiled(
        *mut c_void, c_uint, c_uint, u64, *const u64, *const u64, *const u32, *const u32, c_uint, c_uint, c_uint, c_uint
    );
    copy = cuMemcpyDtoDAsync_v2(u64, u64, usize, CudaHandle);
    fill = cuMemsetD32Async(u64, c_uint, usize, CudaHandle);
    batch_mem_op = cuStreamBatchMemOp_v2(CudaHandle, c_uint, *mut sys::CUstreamBatchMemOpParams, c_uint);
    alloc = cuMemAlloc_v2(*mut u64, usize);
    release = cuMemFree_v2(u64);
    host_alloc = cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    host_free = cuMemFreeHost(*mut c_void);
    stream_create = cuStreamCreate(*mut CudaHandle, c_uint);
    stream_destroy = cuStreamDestroy_v2(CudaHandle);
    stream_synchronize = cuStreamSynchronize(CudaHandle);
    stream_query = cuStreamQuery(CudaHandle);
    stream_wait = cuStreamWaitEvent(CudaHandle, CudaHandle, c_uint);
    event_create = cuEventCreate(*mut CudaHandle, c_uint);
    event_record = cuEventRecord(CudaHandle, CudaHandle);
    event_query = cuEventQuery(CudaHandle);
    event_destroy = cuEventDestroy_v2(CudaHandle);
}

impl Api {
    /// `is_unsupported` where there is no driver library, or it lacks a function.
    pub(crate) fn get() -> Result<&'static Self> {
        static API: OnceLock<Result<Api>> = OnceLock::new();
        API.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    /// A stream that does not wait for the default stream. The device's context must be current.
    pub(crate) fn stream(&self) -> Result<Stream> {
        let mut handle: CudaHandle = 0;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: writes one handle through a valid pointer.
        let code = unsafe { (self.stream_create)(&raw mut handle, flags) };
        CudaDriver::check(code, || "making a stream".to_owned())?;
        // SAFETY: the stream was just made, and lives until whoever asked for it gives it back.
        Ok(unsafe { Stream::from_raw(handle as u64) })
    }

    /// An event without timing. The device's context must be current.
    pub(crate) fn event(&self) -> Result<CudaHandle> {
        let mut handle: CudaHandle = 0;
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        // SAFETY: writes one handle through a valid pointer.
        let code = unsafe { (self.event_create)(&raw mut handle, flags) };
        CudaDriver::check(code, || "making an event".to_owned())?;
        Ok(handle)
    }

    /// Marks the end of what the stream was given so far. The device's context must be current.
    ///
    /// # Safety
    ///
    /// The event is of [`Self::event`] and was not destroyed, and the stream is live.
    pub(crate) unsafe fn record(&self, event: CudaHandle, stream: u64) -> Result<()> {
        // SAFETY: the caller promised that event and stream are there.
        let code = unsafe { (self.event_record)(event, stream as CudaHandle) };
        CudaDriver::check(code, || "recording an event".to_owned())
    }

    /// Has a stream wait for what an event marks. The device's context must be current.
    ///
    /// # Safety
    ///
    /// The event is of [`Self::event`] and was not destroyed, and the stream is live.
    pub(crate) unsafe fn wait(&self, stream: u64, event: CudaHandle) -> Result<()> {
        // SAFETY: the caller promised that event and stream are there.
        let code = unsafe { (self.stream_wait)(stream as CudaHandle, event, 0) };
        CudaDriver::check(code, || "having a stream wait for an event".to_owned())
    }

    /// Whether the device has done what an event marks. The device's context must be current.
    ///
    /// # Safety
    ///
    /// The event is of [`Self::event`] and was not destroyed.
    pub(crate) unsafe fn is_done(&self, event: CudaHandle) -> Result<bool> {
        // SAFETY: the caller promised that the event is there.
        let code = unsafe { (self.event_query)(event) };
        if code == sys::CUresult::CUDA_ERROR_NOT_READY as c_uint {
            return Ok(false);
        }
        CudaDriver::check(code, || "asking for an event".to_owned())?;
        Ok(true)
    }

    /// Destroys an event. The device's context must be current.
    ///
    /// # Safety
    ///
    /// The event is of [`Self::event`], and nobody uses it from now on.
    pub(crate) unsafe fn destroy_event(&self, event: CudaHandle) {
        // SAFETY: the caller promised that the event is there, and that this is the last use of it.
        let code = unsafe { (self.event_destroy)(event) };
        if let Err(error) = CudaDriver::check(code, || "giving back an event".to_owned()) {
            tracing::debug!(%error, "at the end of a communicator");
        }
    }

    /// Destroys a stream, which does first what it was given. The device's context must be current.
    ///
    /// # Safety
    ///
    /// The stream is of [`Self::stream`], and nobody uses it from now on.
    pub(crate) unsafe fn destroy_stream(&self, stream: Stream) {
        // SAFETY: the caller promised that the stream is there, and that this is the last use of it.
        let code = unsafe { (self.stream_destroy)(stream.raw() as CudaHandle) };
        if let Err(error) = CudaDriver::check(code, || "giving back a stream".to_owned()) {
            tracing::debug!(%error, "at the end of a communicator");
        }
    }

    /// Makes `bytes` bytes of device memory. The device's context must be current. [`Self::free`] gives them back.
    pub(in crate::cuda) fn memory(&self, bytes: usize) -> Result<u64> {
        let mut address = 0;
        // SAFETY: writes one address through a valid pointer.
        let code = unsafe { (self.alloc)(&raw mut address, bytes) };
        CudaDriver::check(code, || format!("making {bytes} bytes of device memory"))?;
        Ok(address)
    }

    /// Frees device memory. The device's context must be current.
    ///
    /// # Safety
    ///
    /// `address` is of [`Self::memory`], and nothing uses the memory from now on.
    pub(in crate::cuda) unsafe fn free(&self, address: u64) {
        // SAFETY: the caller promised that the memory is of `memory`, and that nothing uses it from now on.
        let code = unsafe { (self.release)(address) };
        if let Err(error) = CudaDriver::check(code, || "freeing device memory".to_owned()) {
            tracing::debug!(%error, "at the end of a device's last communicator");
        }
    }

    /// Makes `bytes` bytes of pinned host memory, all zero, which the device writes and reads at the same address. The
    /// device's context must be current. [`Self::free_pinned`] gives them back.
    pub(in crate::cuda) fn pinned(&self, bytes: usize) -> Result<NonNull<c_void>> {
        // Visible to every context of the process; mapped into the device's addresses.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE;
        let mut address: *mut c_void = std::ptr::null_mut();
        // SAFETY: writes one pointer through a valid one.
        let code = unsafe { (self.host_alloc)(&raw mut address, bytes, flags) };
        CudaDriver::check(code, || "making pinned memory".to_owned())?;
        let begin = NonNull::new(address).ok_or_else(|| {
            Error::system("making pinned memory", "the driver gave a null address")
        })?;
        // SAFETY: the memory is this long, aligned to pages, and nobody else has it yet.
        unsafe { begin.cast::<u8>().write_bytes(0, bytes) };
        Ok(begin)
    }

    /// Frees pinned memory. The device's context must be current.
    ///
    /// # Safety
    ///
    /// `begin` is of [`Self::pinned`], and nothing uses it from now on: neither the host nor work on the device.
    pub(in crate::cuda) unsafe fn free_pinned(&self, begin: NonNull<c_void>) {
        // SAFETY: the caller promised that the memory is of `pinned`, and that nothing uses it from now on.
        let code = unsafe { (self.host_free)(begin.as_ptr()) };
        if let Err(error) = CudaDriver::check(code, || "freeing pinned memory".to_owned()) {
            tracing::debug!(%error, "at the end of a communicator");
        }
    }

    /// Writes `word` to the `words` words from `address` on, when the stream comes to it. The device's context must be current.
    ///
    /// # Safety
    ///
    /// `address` must be a multiple of 4, and `words` words must be mapped there. Nothing else may use them until the stream
    /// is past this.
    pub(in crate::cuda) unsafe fn fill(
        &self,
        address: u64,
        word: u32,
        words: u64,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that `words` words are mapped at the address, and that nothing else uses them
        // until the stream is past this. The stream is live, which whoever made the `Stream` from a raw handle vouched
        // for.
        let code =
            unsafe { (self.fill)(address, word, words as usize, stream.raw() as CudaHandle) };
        CudaDriver::check(code, || format!("filling {words} words at {address:#x}"))
    }

    /// Waits until the stream has done what was put on it. Its device's context must be current.
    pub(in crate::cuda) fn synchronize(&self, stream: Stream) -> Result<()> {
        // SAFETY: the stream is live, which whoever made the `Stream` from a raw handle vouched for.
        let code = unsafe { (self.stream_synchronize)(stream.raw() as CudaHandle) };
        CudaDriver::check(code, || "waiting for a stream".to_owned())
    }

    /// Whether the stream has done what was put on it. Its device's context must be current.
    pub(in crate::cuda) fn is_idle(&self, stream: Stream) -> Result<bool> {
        // SAFETY: the stream is live, which whoever made the `Stream` from a raw handle vouched for.
        let code = unsafe { (self.stream_query)(stream.raw() as CudaHandle) };
        if code == sys::CUresult::CUDA_ERROR_NOT_READY as c_uint {
            return Ok(false);
        }
        CudaDriver::check(code, || "asking whether a stream is idle".to_owned())?;
        Ok(true)
    }
}

/// The CUDA driver of a pool's memory.
pub(crate) fn cuda(driver: &Driver) -> Result<&CudaDriver> {
    driver.as_cuda().ok_or_else(|| {
        Error::unsupported(format!(
            "a communicator over memory of the {} driver: kernels run on CUDA devices",
            driver.name()
        ))
    })
}
