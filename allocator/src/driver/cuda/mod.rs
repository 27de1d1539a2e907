//! Memory of NVIDIA GPUs, through CUDA's virtual memory management.
//!
//! Works with drivers for CUDA 12.4 and newer, found at run time; a machine without one gets
//! [`is_unsupported`](crate::Error::is_unsupported) errors that say what was tried.
//!
//! | file | owns |
//! | --- | --- |
//! | `api` | the driver library's functions, and what their error codes mean |
//! | `calls` | the calls about memory, one CUDA call a function |
//! | `context` | the primary context: retained while a driver lives, current only during its calls |
//! | `probe` | what a device really grants: handle types, granularity, network access |
//! | `vmm` | what is held: reservations, allocations, mappings, exported and imported handles |
//! | `stream` | events, capture, synchronisation, copies to and from the host |
//!
//! Managed memory and NVLink multicast are not used.
#![allow(unsafe_code)] // The copies are `unsafe fn`: their callers pass raw addresses.

mod api;
mod calls;
mod context;
mod probe;
mod stream;
#[cfg(test)]
mod tests;
mod vmm;

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::api::{AllocationProp, CudaResult, DriverApi};
use self::context::Context;
pub use self::probe::{CudaFacts, Fabric};
use self::stream::CaptureId;
use self::vmm::DriverMemory;
use super::{
    DeviceIdentity, Event, Exported, MemoryDriver, Physical, Reservation, Stream, Transport,
};
use crate::{Deadline, Error, Result};

/// The environment variable that launchers put a process's rank on its host in.
const LOCAL_RANK: &str = "LOCAL_RANK";

/// How a [`CudaDriver`] makes and hands over memory. All ranks of a group use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaOptions {
    /// Hand segments over as FABRIC handles through the store where the device grants them, so
    /// that ranks may be on several hosts of one NVLink domain. Otherwise, and by default, they
    /// travel as file descriptors between the processes of one host.
    pub prefer_fabric: bool,
    /// Make segments that network cards may read and write, where the device can. On by default.
    pub gpu_direct_rdma: bool,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self { prefer_fabric: false, gpu_direct_rdma: true }
    }
}

/// Memory of one CUDA device.
///
/// Calls work on any thread, with any context or none current; the caller's context is current
/// again afterwards. Calls that manage memory also work while this thread captures a graph.
/// Addresses are device addresses: the host reaches them only with
/// [`copy_to_host`](Self::copy_to_host), [`copy_from_host`](Self::copy_from_host) and
/// [`fill`](Self::fill).
///
/// A stream passed to a driver must be a live stream of its device; CUDA follows the handle. This is what
/// [`Stream::from_raw`] has callers promise.
pub struct CudaDriver {
    facts: CudaFacts,
    prop: AllocationProp,
    transport: Transport,
    memory: DriverMemory,
    /// Events that are not given back yet, and the capture that each is part of.
    events: Mutex<BTreeMap<u64, CaptureId>>,
    /// Last, so that it outlives what is made in it. Shared with threads that wait for the device.
    context: Arc<Context>,
}

impl CudaDriver {
    /// The device with this ordinal among those the process can see.
    ///
    /// # Errors
    ///
    /// `is_unsupported` without a CUDA driver, a device, or the means to share its memory;
    /// `is_invalid_argument`, naming the count, when the ordinal is too large.
    pub fn new(ordinal: u32) -> Result<Self> {
        Self::with_options(ordinal, CudaOptions::default())
    }

    /// The device whose ordinal is in `LOCAL_RANK`, or device 0 if that is not set. If each process sees only
    /// one device (`CUDA_VISIBLE_DEVICES`), use `new(0)` instead.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new); `is_invalid_argument` also when `LOCAL_RANK` is no number.
    pub fn from_env() -> Result<Self> {
        // Without CUDA this is `is_unsupported`, whatever LOCAL_RANK holds.
        DriverApi::get()?;
        let set = std::env::var_os(LOCAL_RANK);
        Self::new(ordinal_from(set.as_deref().map(|set| set.to_string_lossy()).as_deref())?)
    }

    /// Makes a driver like [`new`](Self::new), with options.
    pub fn with_options(ordinal: u32, options: CudaOptions) -> Result<Self> {
        let api = DriverApi::get()?;
        let context = Arc::new(Context::retain(api, probe::device(api, ordinal)?)?);
        let (facts, prop) = probe::probe(&context, ordinal, options)?;
        let fabric = facts.fabric == Fabric::Works && (options.prefer_fabric || !facts.posix_fd);
        if options.prefer_fabric && !fabric {
            tracing::info!(fabric = %facts.fabric, "segments travel as file descriptors instead");
        }
        Ok(Self {
            transport: if fabric { Transport::Store } else { Transport::UnixSocket },
            memory: DriverMemory::new(facts.granularity),
            events: Mutex::new(BTreeMap::new()),
            facts,
            prop,
            context,
        })
    }

    /// The number of devices that this process can see; `is_unsupported` without a CUDA driver.
    pub fn device_count() -> Result<u32> {
        probe::device_count(DriverApi::get()?)
    }

    /// The properties of the device.
    pub fn facts(&self) -> &CudaFacts {
        &self.facts
    }

    /// The number by which the driver tells the capture that a stream is part of from others; `None` if it is part of
    /// none, or if that cannot be told.
    pub fn capture_of(&self, stream: Stream) -> Option<u64> {
        stream::capture(&self.context, stream)
    }

    /// Runs `work` with the device's primary context current on this thread; the caller's own is
    /// current again afterwards. For calls of the CUDA driver library on this device.
    pub fn with_context<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let _current = self.context.enter()?;
        work()
    }

    /// Does the work of [`with_context`](Self::with_context) for calls that are not part of any stream (loading code,
    /// making memory): they also work while this thread captures a graph.
    pub fn with_context_unordered<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let _current = self.context.enter_for_memory()?;
        work()
    }

    /// The address of a function of the CUDA driver library, for functions that this crate does not call.
    /// `is_unsupported` without a library, or if the library lacks the function.
    pub fn function(name: &str) -> Result<NonNull<c_void>> {
        DriverApi::get()?;
        api::function(name)
    }

    /// Success, or an error of the kind that the `CUresult` stands for, about `what` was done.
    pub fn check(code: u32, what: impl FnOnce() -> String) -> Result<()> {
        DriverApi::get()?.check(CudaResult(code), what)
    }

    /// The handle of a stream, a `CUstream`; `is_invalid_argument` for one of no device
    /// ([`Stream::numbered`]).
    pub fn stream_handle(&self, stream: Stream) -> Result<usize> {
        stream::handle(stream)
    }

    /// A number that the driver knows of the device; `which` is a `CUdevice_attribute`.
    pub fn attribute(&self, which: u32) -> Result<i32> {
        probe::number(self.context.api, self.context.device, which)
    }

    /// Free and total bytes of the device's memory at this moment.
    pub fn memory_info(&self) -> Result<(u64, u64)> {
        let _current = self.context.enter_for_memory()?;
        calls::memory_info(self.context.api)
    }

    /// Copies `source` to the device address `target`, which may be in a peer's slot. On return
    /// the bytes are there, for every device and process to see.
    ///
    /// # Safety
    ///
    /// `[target, target + source.len())` must be mapped for this driver's device, and nothing
    /// else may use it meanwhile.
    pub unsafe fn copy_from_host(&self, target: u64, source: &[u8]) -> Result<()> {
        // SAFETY: the slice is readable; the caller promised that the target is mapped.
        unsafe { stream::copy_to_device(&self.context, target, source.as_ptr(), source.len()) }
    }

    /// Fills `target` from the device address `source`, which may be in a peer's slot.
    ///
    /// # Safety
    ///
    /// `[source, source + target.len())` must be mapped for this driver's device, and nothing
    /// may write it meanwhile.
    pub unsafe fn copy_to_host(&self, target: &mut [u8], source: u64) -> Result<()> {
        // SAFETY: the slice is writable; the caller promised that the source is mapped.
        unsafe { stream::copy_to_host(&self.context, target.as_mut_ptr(), source, target.len()) }
    }

    /// Writes `value` to `words` 32-bit words from the device address `target` on. On return they
    /// are there, for every device and process to see.
    ///
    /// # Safety
    ///
    /// `target` must be a multiple of 4, the words must be mapped for this driver's device, and
    /// nothing else may use them meanwhile.
    pub unsafe fn fill(&self, target: u64, value: u32, words: u64) -> Result<()> {
        // SAFETY: the caller promised that `target` is a multiple of 4, and that the words are mapped for this device
        // and used by nothing else.
        unsafe { stream::fill(&self.context, target, value, words) }
    }

    /// Which capture a live event is part of.
    fn check_event(&self, event: &Event) -> Result<CaptureId> {
        let known =
            (!event.is_numbered()).then(|| self.events().get(&event.raw()).copied()).flatten();
        known.ok_or_else(|| {
            Error::invalid_argument(format!("no live event {:#x} in this driver", event.raw()))
        })
    }

    fn events(&self) -> MutexGuard<'_, BTreeMap<u64, CaptureId>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The ordinal that `LOCAL_RANK` asks for.
fn ordinal_from(local_rank: Option<&str>) -> Result<u32> {
    let Some(text) = local_rank else { return Ok(0) };
    text.trim().parse().map_err(|_| {
        Error::invalid_argument(format!("{LOCAL_RANK}={text:?} is not the number of a device"))
    })
}

// SAFETY: `DriverMemory` knows what is reserved and mapped, and refuses anything else; the device's mappings stay
// until they are removed here. The host cannot reach them.
unsafe impl MemoryDriver for CudaDriver {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn device(&self) -> DeviceIdentity {
        DeviceIdentity {
            kind: "cuda".to_owned(),
            name: self.facts.name.clone(),
            uuid: self.facts.uuid.clone(),
        }
    }

    fn granularity(&self) -> u64 {
        self.facts.granularity
    }

    fn transport(&self) -> Transport {
        self.transport
    }

    fn as_cuda(&self) -> Option<&CudaDriver> {
        Some(self)
    }

    fn host_accessible(&self) -> bool {
        false
    }

    fn reserve(&self, bytes: u64, align: u64) -> Result<Reservation> {
        self.memory.reserve(&self.context, bytes, align)
    }

    fn unreserve(&self, reservation: Reservation) -> Result<()> {
        self.memory.unreserve(&self.context, &reservation)
    }

    fn create(&self, bytes: u64) -> Result<Physical> {
        self.memory.create(&self.context, bytes, &self.prop)
    }

    fn export(&self, physical: &Physical) -> Result<Exported> {
        self.memory.export(&self.context, physical, self.transport == Transport::Store)
    }

    fn has_slow_handles(&self) -> bool {
        true
    }

    fn import(&self, exported: Exported, bytes: u64) -> Result<Physical> {
        self.memory.import(&self.context, exported, bytes)
    }

    fn map(&self, reservation: &Reservation, offset: u64, physical: &Physical) -> Result<()> {
        self.map_all(reservation, offset, std::slice::from_ref(physical))
    }

    fn map_all(
        &self,
        reservation: &Reservation,
        offset: u64,
        physicals: &[Physical],
    ) -> Result<()> {
        self.memory.map_all(&self.context, reservation, offset, physicals)
    }

    fn unmap(&self, reservation: &Reservation, offset: u64, bytes: u64) -> Result<()> {
        self.memory.unmap(&self.context, reservation, offset, bytes)
    }

    fn release(&self, physical: Physical) -> Result<()> {
        self.memory.release(&self.context, &physical)
    }

    fn record_event(&self, stream: Stream) -> Result<Event> {
        let (event, capture) = stream::record(&self.context, stream)?;
        self.events().insert(event.raw(), capture);
        Ok(event)
    }

    fn wait_event(&self, stream: Stream, event: &Event) -> Result<()> {
        // Not under the lock: the call may block until the device's queue has room, and another thread may
        // have to record an event for that. The borrow keeps this event from being released.
        let capture = self.check_event(event)?;
        stream::wait(&self.context, stream, event.raw(), capture)
    }

    fn is_event_done(&self, event: &Event) -> Result<bool> {
        let capture = self.check_event(event)?;
        stream::is_done(&self.context, event.raw(), capture)
    }

    fn release_event(&self, event: Event) {
        let live = !event.is_numbered() && self.events().remove(&event.raw()).is_some();
        if live {
            stream::release(&self.context, event.raw());
        }
    }

    fn synchronize(&self) -> Result<()> {
        stream::synchronize(&self.context)
    }

    fn synchronize_by(&self, deadline: Deadline) -> Result<()> {
        stream::synchronize_by(&self.context, deadline)
    }

    fn is_capturing(&self, stream: Stream) -> bool {
        stream::is_capturing(&self.context, stream)
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        let events = std::mem::take(&mut *self.events());
        for event in events.into_keys() {
            stream::release(&self.context, event);
        }
        // Kernels and peers may still use what is mapped, so it stays mapped until the process ends.
        let (reservations, mappings, handles) = self.memory.held();
        if reservations + mappings + handles > 0 {
            tracing::warn!(
                reservations,
                mappings,
                handles,
                device = self.facts.ordinal,
                "a CUDA driver was dropped with memory still held"
            );
        }
    }
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDriver")
            .field("facts", &self.facts)
            .field("transport", &self.transport)
            .finish_non_exhaustive()
    }
}
