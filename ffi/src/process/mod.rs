//! An allocator for all of a process's device memory, which serves every allocation of torch.
//!
//! | file | holds |
//! | --- | --- |
//! | `mod` | the devices, and which of them an address belongs to |
//! | `device` | one device's lanes: ordinary memory, and the memory of CUDA graphs |
//! | `device/captures` | which graph has which lane |
//! | `exceptions` | how errors become torch's exceptions |
//! | `hooks` | the exported functions that torch's pluggable allocator calls |
//!
//! A device's ordinary memory is one *local* lane: a contiguous range, whose memory is reused at once in any order,
//! with a list of free blocks for each stream. Memory that is allocated while a graph is captured comes from a lane
//! of the graph's own, because every replay uses it again. Inside `with pool:` memory comes from the pool.

mod device;
mod exceptions;
mod hooks;

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use symmpool_allocator::{Driver, Error, ProcessId, Result, Stream};

pub use device::{DeviceAllocator, MempoolId, ProcessStats};

use crate::slots::{self, Slot};

/// The number of devices that one process can use.
const DEVICES: usize = 64;

static TABLE: [OnceLock<Result<DeviceAllocator>>; DEVICES] = [const { OnceLock::new() }; DEVICES];

/// The process that first made a device's allocator; 0 before.
static MAKER: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The index, plus one, of the slot that this thread's allocations are redirected to; 0 if they are not.
    static SCOPE: Cell<usize> = const { Cell::new(0) };
}

/// The allocator of a device, which is made at its first use.
fn device(ordinal: i32) -> Result<&'static DeviceAllocator> {
    let slot = usize::try_from(ordinal).ok().and_then(|ordinal| TABLE.get(ordinal));
    let slot = slot.ok_or_else(|| {
        Error::invalid_argument(format!("device {ordinal}: 0 to {} are possible", DEVICES - 1))
    })?;
    if slot.get().is_none() {
        // Another thread of a process that this one was forked from may have been about to make it: then nobody ends that.
        let here = ProcessId::here();
        let first = MAKER.compare_exchange(0, here.to_bits(), Ordering::AcqRel, Ordering::Acquire);
        ProcessId::from_bits(first.err().unwrap_or(here.to_bits()))
            .check("the allocator of devices")?;
    }
    let made = slot.get_or_init(|| DeviceAllocator::new(Driver::cuda(ordinal as u32)?, None));
    made.as_ref().map_err(Clone::clone)
}

/// The allocators of all devices that were used.
fn used() -> impl Iterator<Item = (usize, &'static DeviceAllocator)> {
    let devices = TABLE.iter().enumerate();
    devices.filter_map(|(ordinal, slot)| Some((ordinal, slot.get()?.as_ref().ok()?)))
}

/// The device whose own memory, not a pool's, contains `address`.
fn owner(address: u64) -> Option<&'static DeviceAllocator> {
    used().map(|(_, device)| device).find(|device| device.owns(address))
}

/// The statistics of a device, or `None` if it was not used.
pub fn stats(ordinal: usize) -> Result<Option<ProcessStats>> {
    used().find(|(found, _)| *found == ordinal).map(|(_, device)| device.stats()).transpose()
}

/// Resets the peak statistics of a device.
pub fn reset_peaks(ordinal: usize) -> Result<()> {
    used().find(|(found, _)| *found == ordinal).map_or(Ok(()), |(_, device)| device.reset_peaks())
}

/// Releases segments that are wholly free to their devices, and returns how many bytes that were.
pub fn trim() -> Result<u64> {
    used().try_fold(0, |bytes, (_, device)| Ok(bytes + device.trim()?))
}

/// Redirects this thread's allocations to a slot's pool, or with `None` back to the devices' own memory. Returns where
/// they went before.
pub fn redirect(slot: Option<&Slot>) -> Redirected {
    let now = slot.map_or(0, |slot| slot.index() + 1);
    Redirected(SCOPE.with(|scope| scope.replace(now)))
}

/// Where a thread's allocations went before a [`redirect`].
#[derive(Clone, Copy, Debug)]
pub struct Redirected(usize);

/// Undoes a [`redirect`] of this thread.
pub fn redirect_back(before: Redirected) {
    SCOPE.with(|scope| scope.set(before.0));
}

fn alloc(bytes: isize, ordinal: i32, stream: Stream) -> Result<u64> {
    match SCOPE.try_with(Cell::get).unwrap_or(0).checked_sub(1) {
        // In a pool's scope, allocations on other devices are ordinary ones, as with torch's MemPool.
        Some(slot) if slots::is_on(slot, ordinal) => slots::alloc(slot, bytes, ordinal, stream),
        _ => {
            let bytes = usize::try_from(bytes)
                .map_err(|_| Error::invalid_argument(format!("a size of {bytes} bytes")))?;
            device(ordinal)?.alloc(bytes, stream)
        }
    }
}

fn free(address: u64) -> Result<()> {
    if address == 0 {
        return Ok(());
    }
    match owner(address) {
        Some(device) => device.free(address),
        None => slots::free(slot_of(address)?, address),
    }
}

fn record_stream(address: u64, stream: Stream) -> Result<()> {
    if address == 0 {
        return Ok(());
    }
    match owner(address) {
        Some(device) => device.record_stream(address, stream),
        None => slots::record_stream(slot_of(address)?, address, stream),
    }
}

fn slot_of(address: u64) -> Result<usize> {
    slots::owner(address)?.ok_or_else(|| {
        Error::invalid_argument(format!(
            "{address:#x} is no memory that is allocated (was it freed before?)"
        ))
    })
}
