//! Drivers: what memory and addresses come from.
//!
//! A driver reserves address ranges, makes physical memory, maps the one into the other, and
//! hands memory to other ranks. It decides nothing: [`lane`](crate::lane) decides about placement, and
//! ranks agree in the rendezvous. So every driver can be small, and everything above it is tested without
//! a GPU.
//!
//! | driver | memory | for |
//! | --- | --- | --- |
//! | [`HostDriver`] | memfd, shared between processes | CPU inference, tests, the demo |
//! | [`CudaDriver`] | CUDA virtual memory management | GPUs |
//!
//! With the feature `testing` there are two more:
//!
//! | driver | memory | for |
//! | --- | --- | --- |
//! | `SimDriver` | none: addresses only | thousands of ranks in one process |
//! | `FaultDriver` | another driver's | failing, delaying or dying at the nth call |

#[cfg(test)]
mod child;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod conformance;
mod cuda;
#[cfg(feature = "testing")]
mod fault;
mod host;
mod mappings;
#[cfg(test)]
mod model_tests;
#[cfg(feature = "testing")]
mod sim;
mod step;
#[cfg(feature = "testing")]
mod wrapper;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use cuda::{CudaDriver, CudaFacts, CudaOptions, Fabric};
#[cfg(feature = "testing")]
pub use fault::{CallCounts, DriverCall, FaultAction, FaultDriver, FaultPlan};
pub use host::{HostDriver, HostOptions};
#[cfg(feature = "testing")]
pub use sim::SimDriver;
#[cfg(not(feature = "testing"))]
pub(crate) use step::Step;
#[cfg(feature = "testing")]
pub use step::Step;
#[cfg(feature = "testing")]
pub use wrapper::DriverWrapper;

use crate::{Deadline, Error, Result};

/// A shared handle to a [`MemoryDriver`], and the place where drivers are chosen.
#[derive(Clone)]
pub struct Driver(Arc<dyn MemoryDriver>);

impl Driver {
    /// Wraps a driver, one of ours or your own.
    pub fn new(driver: impl MemoryDriver + 'static) -> Self {
        Self(Arc::new(driver))
    }

    /// The device of this process if there is one (see [`CudaDriver::from_env`]), else host
    /// memory.
    ///
    /// Host memory is used only where there is no CUDA driver, no device, or no way to share its memory.
    /// Anything else that prevents the use of a device is an error: if single ranks fell back to host
    /// memory, ranks would have different drivers.
    pub fn best() -> Result<Self> {
        match CudaDriver::from_env() {
            Ok(cuda) => Ok(Self::new(cuda)),
            Err(error) if error.is_unsupported() => {
                tracing::info!(%error, "no usable CUDA device; symmetric memory is host memory");
                Ok(Self::new(HostDriver::new()?))
            }
            Err(error) => Err(error),
        }
    }

    /// Host memory shared between the processes of this machine.
    pub fn host() -> Result<Self> {
        Ok(Self::new(HostDriver::new()?))
    }

    /// Memory of the CUDA device with this ordinal.
    pub fn cuda(ordinal: u32) -> Result<Self> {
        Ok(Self::new(CudaDriver::new(ordinal)?))
    }

    /// No memory at all, at addresses that depend on `seed`.
    #[cfg(feature = "testing")]
    pub fn sim(seed: u64) -> Self {
        Self::new(SimDriver::new(seed))
    }

    /// Without the feature `testing`, no driver acts at a step of rendezvous or commit.
    #[cfg(not(feature = "testing"))]
    #[allow(clippy::unused_self, clippy::unnecessary_wraps)] // the signature of `MemoryDriver::at_step`, which may fail
    pub(crate) fn at_step(&self, _step: Step) -> Result<()> {
        Ok(())
    }
}

impl std::ops::Deref for Driver {
    type Target = dyn MemoryDriver;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Driver").field(&self.0.name()).finish()
    }
}

/// `CU_STREAM_LEGACY`: the default stream by its explicit name.
const LEGACY: u64 = 1;

/// A stream as its driver knows it: a `CUstream` as an integer on CUDA (0 is the default stream),
/// meaningless and 0 on the host. Lanes never order by it (rule D3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream {
    raw: u64,
    /// Whether `raw` is a number of the caller's choice and not a device's handle.
    numbered: bool,
}

impl Stream {
    /// The default stream; the only one on the host.
    pub const DEFAULT: Self = Self { raw: 0, numbered: false };

    /// `CU_STREAM_PER_THREAD`: the default stream of whichever thread names it.
    pub const PER_THREAD: Self = Self { raw: 2, numbered: false };

    /// A stream from its raw handle. `CU_STREAM_LEGACY` is the default stream.
    ///
    /// # Safety
    ///
    /// 0, or the handle of a stream of the device that it is used with. CUDA follows the handle and cannot
    /// be asked whether its stream is live, so the stream must live as long as something may name it: as
    /// this value and its copies are passed to anything, and until every lane and communicator that was
    /// given one of them has been dropped, or has forgotten it (`forget_stream` of
    /// [`Lane`](crate::Lane::forget_stream) and [`Pool`](crate::Pool::forget_stream), and of a
    /// communicator). After that nothing touches the stream, and it may be destroyed.
    #[allow(unsafe_code)] // only the caller knows what the handle is
    pub const unsafe fn from_raw(raw: u64) -> Self {
        Self { raw: if raw == LEGACY { 0 } else { raw }, numbered: false }
    }

    /// Whether this is `CU_STREAM_PER_THREAD`: another stream in each thread that names it.
    pub const fn is_per_thread(self) -> bool {
        self.raw == Self::PER_THREAD.raw && !self.numbered
    }

    /// A stream for drivers that have no streams, with a number of the caller's choice: on the host and in
    /// simulations work is done when its call returns, but a lane still treats the streams as different.
    /// Drivers of devices refuse it with [`Error::is_invalid_argument`](crate::Error::is_invalid_argument), except
    /// for 0, which is the default stream.
    pub const fn numbered(number: u64) -> Self {
        Self { raw: number, numbered: number != 0 }
    }

    /// The raw handle, or the number.
    pub const fn raw(self) -> u64 {
        self.raw
    }

    /// Whether it was made by [`numbered`](Self::numbered), and so belongs to no device.
    pub const fn is_numbered(self) -> bool {
        self.numbered
    }
}

/// An address range that a driver reserved. Dropping it does not give the range back:
/// [`MemoryDriver::unreserve`] does.
#[derive(Debug)]
pub struct Reservation {
    base: u64,
    bytes: u64,
}

impl Reservation {
    /// Describes a range. Only drivers make reservations.
    ///
    /// # Safety
    ///
    /// The range is reserved for the caller, who makes one value of it: with a second one, what others have
    /// mapped in it could be taken away while they use it.
    #[allow(unsafe_code)] // whose the range is, only the caller knows
    pub unsafe fn new(base: u64, bytes: u64) -> Self {
        Self { base, bytes }
    }

    /// The first address.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// The length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether `[offset, offset + bytes)` lies inside.
    pub fn contains(&self, offset: u64, bytes: u64) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= self.bytes)
    }
}

/// One physical allocation as its driver knows it (a file descriptor, a CUDA allocation handle, a
/// serial number). Given back with [`MemoryDriver::release`]; mappings keep the memory alive.
#[derive(Debug)]
pub struct Physical {
    raw: u64,
    bytes: u64,
}

impl Physical {
    /// Describes an allocation. Only drivers make them.
    ///
    /// # Safety
    ///
    /// The allocation is the caller's, who makes one value of it: with a second one, it could be given back
    /// while others use it.
    #[allow(unsafe_code)] // whose the allocation is, only the caller knows
    pub unsafe fn new(raw: u64, bytes: u64) -> Self {
        Self { raw, bytes }
    }

    /// The driver's own name for it.
    pub fn raw(&self) -> u64 {
        self.raw
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Form in which a segment travels to a peer, which maps it.
#[derive(Debug)]
pub enum Exported {
    /// A file descriptor; travels over a Unix socket.
    Fd(OwnedFd),
    /// A handle that is plain bytes (CUDA FABRIC); travels through the store.
    Bytes(Vec<u8>),
    /// Nothing: the peer derives the memory from `(rank, segment counter)`. Simulation only.
    Derived,
}

/// How a driver's handles travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    /// File descriptors travel over abstract Unix sockets: all ranks run on one host, in one network namespace and as
    /// one user. Pid and mount namespaces may differ.
    UnixSocket,
    /// Bytes travel through the store.
    Store,
    /// Not at all: see [`Exported::Derived`].
    Derived,
}

/// The device that a driver's memory belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeviceIdentity {
    /// `host`, `cuda`, `sim`.
    pub kind: String,
    /// For people: a model name.
    pub name: String,
    /// The device's UUID, if two ranks must not share it by accident; empty where sharing is normal (host
    /// memory).
    pub uuid: String,
}

/// An event recorded on a stream, for waits between streams (rule D4).
#[derive(Debug)]
pub struct Event {
    raw: u64,
    /// Whether `raw` is a number of the caller's choice and not a device's handle.
    numbered: bool,
}

impl Event {
    /// An event from its raw handle. Only drivers make them.
    ///
    /// # Safety
    ///
    /// The event is the caller's, who makes one value of it: with a second one, it could be given back while
    /// others wait for it.
    #[allow(unsafe_code)] // whose the event is, only the caller knows
    pub const unsafe fn from_raw(raw: u64) -> Self {
        Self { raw, numbered: false }
    }

    /// An event for drivers that have no events, with a number of the caller's choice. Drivers of devices
    /// refuse it.
    pub const fn numbered(number: u64) -> Self {
        Self { raw: number, numbered: true }
    }

    /// The raw handle, or the number.
    pub const fn raw(&self) -> u64 {
        self.raw
    }

    /// Whether it was made by [`numbered`](Self::numbered), and so belongs to no device.
    pub const fn is_numbered(&self) -> bool {
        self.numbered
    }
}

/// Source of memory and addresses. All methods may be called from any thread.
///
/// Offsets and sizes passed to [`map`](MemoryDriver::map) and [`unmap`](MemoryDriver::unmap) are
/// multiples of [`granularity`](MemoryDriver::granularity) and name whole mappings; a driver
/// refuses anything else with [`Error::is_invalid_argument`](crate::Error::is_invalid_argument)
/// and leaves things as they were.
///
/// # Safety
///
/// Pools hand out what a driver has mapped as memory that safe code reads and writes. So whoever writes a
/// driver promises, in addition to what the methods say: a reservation overlaps nothing else that is in use; what
/// [`map`](MemoryDriver::map) has mapped stays there, and is the memory of its `physical` alone, until it is
/// unmapped through the same reservation; and where [`host_accessible`](MemoryDriver::host_accessible) is
/// true, this process can read and write it.
#[allow(unsafe_code)] // only the driver can keep the promises that pools build on
pub unsafe trait MemoryDriver: Send + Sync {
    /// A short name for messages: `host`, `cuda`, `sim`.
    fn name(&self) -> &'static str;

    /// Which device this is.
    fn device(&self) -> DeviceIdentity;

    /// Sizes and offsets of segments are multiples of this many bytes; a power of two.
    fn granularity(&self) -> u64;

    /// How [`export`](MemoryDriver::export)ed handles travel.
    fn transport(&self) -> Transport;

    /// Whether the CPU of this process can read and write mapped memory.
    fn host_accessible(&self) -> bool;

    /// Reserves `bytes` of address space, aligned to `align` (a power of two, at least the
    /// granularity). Nothing is readable in it yet.
    fn reserve(&self, bytes: u64, align: u64) -> Result<Reservation>;

    /// Gives a reservation back. Everything mapped in it must have been unmapped: otherwise this
    /// fails with [`Error::is_invalid_state`](crate::Error::is_invalid_state), and the range stays
    /// reserved.
    fn unreserve(&self, reservation: Reservation) -> Result<()>;

    /// Refuses `bytes` that several calls of [`create`](MemoryDriver::create) could not make together, before
    /// the first of them takes memory. Passes if the driver does not know.
    fn check_room(&self, _bytes: u64) -> Result<()> {
        Ok(())
    }

    /// Makes `bytes` of physical memory; zeroed on the host, undefined on CUDA. Fails with
    /// [`Error::is_out_of_memory`](crate::Error::is_out_of_memory) rather than overcommitting.
    fn create(&self, bytes: u64) -> Result<Physical>;

    /// Makes memory like [`create`](MemoryDriver::create), of which much may never be used. On the host it is refused
    /// where there is not so much memory, but its pages come with their first accesses.
    fn create_lazily(&self, bytes: u64) -> Result<Physical> {
        self.create(bytes)
    }

    /// Makes memory like [`create_lazily`](MemoryDriver::create_lazily), of which far more is made than will be used:
    /// on the host its size is not compared with the memory available.
    fn create_sparsely(&self, bytes: u64) -> Result<Physical> {
        self.create_lazily(bytes)
    }

    /// Makes a handle of `physical` that peers can import.
    fn export(&self, physical: &Physical) -> Result<Exported>;

    /// Whether making a descriptor of a segment, and closing its last descriptor, takes about as long as the
    /// rest of a commit. A pool then makes descriptors together with segments, keeps a number of them until
    /// the commit, and has them closed by another thread.
    fn has_slow_handles(&self) -> bool {
        false
    }

    /// Takes a peer's handle to `bytes` of memory. The size is checked if the system knows it.
    fn import(&self, exported: Exported, bytes: u64) -> Result<Physical>;

    /// Maps all of `physical` at `offset` of the reservation, readable and writable.
    fn map(&self, reservation: &Reservation, offset: u64, physical: &Physical) -> Result<()>;

    /// Maps several allocations, one behind the other from `offset` on: all of them, or none. Each can be
    /// unmapped by itself. Implemented by drivers for which this is cheaper than single calls.
    fn map_all(
        &self,
        reservation: &Reservation,
        offset: u64,
        physicals: &[Physical],
    ) -> Result<()> {
        map_one_by_one(self, reservation, offset, physicals)
    }

    /// Maps `bytes` of memory that is mapped from address `from` on a second time, at `offset` of the reservation. `from` is
    /// a multiple of a page; other numbers are as for [`map`](MemoryDriver::map). What is mapped stays where it is.
    ///
    /// Fails with [`Error::is_unsupported`](crate::Error::is_unsupported) where the driver cannot.
    ///
    /// # Safety
    ///
    /// From `from` on, `bytes` of this driver's memory are mapped, and stay so until this returns.
    unsafe fn map_again(
        &self,
        _reservation: &Reservation,
        _offset: u64,
        _from: u64,
        _bytes: u64,
    ) -> Result<()> {
        Err(Error::unsupported(format!("the {} driver maps no memory twice", self.name())))
    }

    /// Removes the mapping of `bytes` at `offset`; the range stays reserved.
    fn unmap(&self, reservation: &Reservation, offset: u64, bytes: u64) -> Result<()>;

    /// Gives a physical allocation back. Its memory is freed with its last mapping in any process.
    fn release(&self, physical: Physical) -> Result<()>;

    /// Records an event on `stream` (rule D4). This and the six methods that follow are implemented only by
    /// drivers that have streams: elsewhere work is done when its call returns, and there is nothing to wait
    /// for.
    fn record_event(&self, _stream: Stream) -> Result<Event> {
        Ok(Event::numbered(0))
    }

    /// Makes later work of `stream` wait for `event`, on the device; the host does not wait.
    ///
    /// While `stream` is being captured, an event from outside the capture must be complete: otherwise this
    /// fails with `is_invalid_state` and the capture goes on. An event that is part of another graph is
    /// ignored, as the order of graphs is that of their launches; so is an event of a graph while `stream`
    /// is not being captured.
    fn wait_event(&self, _stream: Stream, _event: &Event) -> Result<()> {
        Ok(())
    }

    /// Whether the work that was on the stream when `event` was recorded is done. Does not wait. An event
    /// that was recorded in a capture is never done.
    fn is_event_done(&self, _event: &Event) -> Result<bool> {
        Ok(true)
    }

    /// Gives an event back.
    fn release_event(&self, _event: Event) {}

    /// Waits until the device has done all work submitted so far.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    /// Waits with a deadline: then it fails with [`Error::is_timeout`](crate::Error::is_timeout), and
    /// the device goes on. A driver whose [`synchronize`](MemoryDriver::synchronize) may wait has to
    /// implement this as well: pools call it while other threads wait for their lanes.
    fn synchronize_by(&self, _deadline: Deadline) -> Result<()> {
        self.synchronize()
    }

    /// Whether `stream` is being captured into a graph; commits are refused then.
    fn is_capturing(&self, _stream: Stream) -> bool {
        false
    }

    /// The CUDA driver behind this one, for those who launch kernels on its memory.
    fn as_cuda(&self) -> Option<&CudaDriver> {
        None
    }

    /// Called at each step of rendezvous and commit, so that tests can stop, fail or kill a rank there.
    #[cfg(feature = "testing")]
    fn at_step(&self, _step: Step) -> Result<()> {
        Ok(())
    }
}

/// [`MemoryDriver::map_all`] by a call of [`MemoryDriver::map`] for each.
fn map_one_by_one<D: MemoryDriver + ?Sized>(
    driver: &D,
    reservation: &Reservation,
    offset: u64,
    physicals: &[Physical],
) -> Result<()> {
    let mut end = offset;
    for (at, physical) in physicals.iter().enumerate() {
        if let Err(error) = driver.map(reservation, end, physical) {
            for mapped in physicals[..at].iter().rev() {
                end -= mapped.bytes();
                driver.unmap(reservation, end, mapped.bytes()).map_err(|undo| {
                    error.clone().context(format!("which could not be undone ({undo})"))
                })?;
            }
            return Err(error);
        }
        end += physical.bytes();
    }
    Ok(())
}
