//! Slots: pools behind pairs of exported functions.
//!
//! [`bind`] puts a lane of a pool behind the lowest vacant slot. The slot's functions then allocate in that lane, and
//! their frees are *unordered* (rule D5), because torch frees memory when garbage is collected or its cache is emptied,
//! at different times on different ranks. A slot keeps its pool until its [`Slot`] is dropped and every block that it
//! allocated is freed, because tensors may outlive both the slot and the pool.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Mutex;

use symmpool_allocator::lane::at_site;
use symmpool_allocator::{Error, Lane, Maker, Pool, Result};

use crate::guard::lock;
use crate::named;

/// The number of slots.
pub const SLOTS: usize = 64;

/// Blocks start at multiples of this, as CUDA's do.
const ALIGN: u64 = 512;

struct Bound {
    pool: Pool,
    lane: Lane,
    /// The device that callers must pass; in host memory they may pass any.
    device: Option<u32>,
    /// The process that bound the slot. A forked child has a copy of this table, but not of the memory.
    maker: Maker,
    /// Addresses that are allocated.
    live: BTreeSet<u64>,
    /// Addresses whose use on another stream could not be recorded. Their memory is never reused.
    stuck: BTreeSet<u64>,
    /// Whether the [`Slot`] was dropped.
    retired: bool,
    failure: Option<Error>,
}

static TABLE: [Mutex<Option<Bound>>; SLOTS] = [const { Mutex::new(None) }; SLOTS];

/// A bound slot. Dropping it closes the slot to allocations; its blocks can still be freed.
pub struct Slot(usize);

/// Binds `lane`, a lane of `pool`, to a vacant slot. If there is none, the error is
/// [`Error::is_invalid_state`].
pub fn bind(pool: &Pool, lane: &Lane) -> Result<Slot> {
    let device = pool.driver().as_cuda().map(|cuda| cuda.facts().ordinal);
    for (index, slot) in TABLE.iter().enumerate() {
        let mut slot = lock(slot);
        if slot.is_none() {
            *slot = Some(Bound {
                pool: pool.clone(),
                lane: lane.clone(),
                device,
                maker: Maker::here(),
                live: BTreeSet::new(),
                stuck: BTreeSet::new(),
                retired: false,
                failure: None,
            });
            return Ok(Slot(index));
        }
    }
    Err(Error::invalid_state(format!(
        "all {SLOTS} slots serve pools, or memory of pools that were dropped; drop a pool and its \
         tensors"
    )))
}

impl Slot {
    /// The number N of the slot; its functions are `symmpool_alloc_N` and `symmpool_free_N`.
    pub fn index(&self) -> usize {
        self.0
    }

    /// The number of blocks that are allocated through the slot.
    pub fn live(&self) -> usize {
        lock(&TABLE[self.0]).as_ref().map_or(0, |bound| bound.live.len())
    }

    /// The error of the latest call that failed.
    pub fn failure(&self) -> Option<Error> {
        lock(&TABLE[self.0]).as_ref().and_then(|bound| bound.failure.clone())
    }

    /// Returns [`failure`](Self::failure) and clears it.
    pub fn take_failure(&self) -> Option<Error> {
        lock(&TABLE[self.0]).as_mut().and_then(|bound| bound.failure.take())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut slot = lock(&TABLE[self.0]);
        let Some(bound) = slot.as_mut() else { return };
        bound.retired = true;
        let unused = if bound.live.is_empty() { slot.take() } else { None };
        drop(slot);
        // This may drop the pool, which must not happen under the lock.
        drop(unused);
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Slot").field(&self.0).finish()
    }
}

/// Allocates through a slot. An error is kept in the slot too.
pub(crate) fn alloc(index: usize, size: isize, device: i32, stream: u64) -> Result<u64> {
    let mut slot = lock(&TABLE[index]);
    let Some(bound) = slot.as_mut() else { return Err(not_bound(index)) };
    let placed = bound.alloc(index, size, device, stream);
    match placed {
        Ok(address) => {
            bound.live.insert(address);
            Ok(address)
        }
        Err(error) => {
            bound.failure = Some(error.clone());
            Err(error)
        }
    }
}

/// Frees what a slot allocated, unordered. Does nothing for NULL.
pub(crate) fn free(index: usize, address: u64) -> Result<()> {
    if address == 0 {
        return Ok(());
    }
    let mut slot = lock(&TABLE[index]);
    let Some(bound) = slot.as_mut() else {
        return Err(logged(not_bound(index)));
    };
    let freed = bound.free(index, address);
    if let Err(error) = &freed {
        bound.failure = Some(error.clone());
    }
    let unused = if bound.retired && bound.live.is_empty() { slot.take() } else { None };
    drop(slot);
    // This may drop the pool, which must not happen under the lock.
    drop(unused);
    freed.map_err(logged)
}

impl Bound {
    fn alloc(&self, index: usize, size: isize, device: i32, stream: u64) -> Result<u64> {
        self.own_process(index)?;
        if self.retired {
            return Err(Error::invalid_state(format!(
                "symmpool_alloc_{index}: the slot was released; it only frees what it allocated before"
            )));
        }
        let bytes = usize::try_from(size).map_err(|_| {
            Error::invalid_argument(format!("symmpool_alloc_{index}: a size of {size} bytes"))
        })?;
        if let Some(own) = self.device
            && i64::from(own) != i64::from(device)
        {
            return Err(Error::invalid_argument(format!(
                "symmpool_alloc_{index}: asked for memory of device {device}, but the pool is on \
                 device {own}; make a pool for each device"
            )));
        }
        // The code that asked torch for memory is not known here, so no call site is recorded.
        let alloc = || self.lane.try_alloc_bytes(bytes, ALIGN, named(stream));
        let block = at_site(None, alloc)?;
        Ok(block.into_address())
    }

    fn free(&mut self, index: usize, address: u64) -> Result<()> {
        self.own_process(index)?;
        if !self.live.remove(&address) {
            return Err(Error::invalid_argument(format!(
                "symmpool_free_{index}: {address:#x} is no block that symmpool_alloc_{index} \
                 allocated, or was freed before"
            )));
        }
        if self.stuck.remove(&address) {
            return Err(Error::invalid_state(format!(
                "symmpool_free_{index}: {address:#x} was used on a stream that could not be recorded; \
                 its memory is not reused"
            )));
        }
        self.lane.free_address_unordered(address)
    }

    /// Refuses calls in a forked child. It shares the parent's host memory and cannot use the parent's CUDA context,
    /// and changing its copy of the lane would only make it differ from the other ranks.
    fn own_process(&self, index: usize) -> Result<()> {
        self.maker.check("a pool").map_err(|error| error.context(format!("slot {index}")))
    }
}

/// The pool behind slot `index`, if there is one.
pub fn pool(index: usize) -> Option<Pool> {
    let slot = TABLE.get(index)?;
    lock(slot).as_ref().map(|bound| bound.pool.clone())
}

/// The slot through which the live block at `address` was allocated, if there is one.
pub(crate) fn owner(address: u64) -> Option<usize> {
    TABLE
        .iter()
        .position(|slot| lock(slot).as_ref().is_some_and(|bound| bound.live.contains(&address)))
}

/// Records that a block is used on another stream (rule D4). If that fails, the block's memory is never reused.
pub(crate) fn record_stream(index: usize, address: u64, stream: u64) -> Result<()> {
    let mut slot = lock(&TABLE[index]);
    let Some(bound) = slot.as_mut() else { return Err(not_bound(index)) };
    bound.own_process(index)?;
    let recorded = bound.lane.record_stream_address(address, named(stream));
    recorded.inspect_err(|error| {
        if bound.live.contains(&address) {
            bound.stuck.insert(address);
        }
        bound.failure = Some(error.clone());
    })
}

/// Whether a slot serves memory of this device.
pub(crate) fn is_on(index: usize, device: i32) -> bool {
    lock(&TABLE[index])
        .as_ref()
        .is_some_and(|bound| bound.device.is_none_or(|own| i64::from(own) == i64::from(device)))
}

fn not_bound(index: usize) -> Error {
    Error::invalid_state(format!("slot {index} serves no pool; bind one before it is used"))
}

/// Logs an error of a free, because the exported function cannot return it.
fn logged(error: Error) -> Error {
    tracing::error!(%error, "a free failed");
    error
}
