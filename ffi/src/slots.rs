//! Slots: pools behind pairs of exported functions.
//!
//! [`bind`] puts a lane of a pool behind the lowest vacant slot. Its functions then allocate in
//! that lane, and free *without order* (rule D5), because torch returns memory when garbage is
//! collected or its cache is emptied, at different times on different ranks. A slot keeps its pool
//! until its [`Slot`] is dropped and every block that it handed out is freed: tensors may outlive
//! both.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Mutex;

use symmpool_allocator::lane::at_site;
use symmpool_allocator::{Error, Lane, Maker, Pool, Result};

use crate::guard::lock;
use crate::named;

/// How many slots there are.
pub const SLOTS: usize = 64;

/// Blocks start at multiples of this, as CUDA's do.
const ALIGN: u64 = 512;

struct Bound {
    pool: Pool,
    lane: Lane,
    /// The device that callers must name; any in host memory.
    device: Option<u32>,
    /// The process that bound it. A forked child has a copy of this table, but of no memory.
    maker: Maker,
    /// Addresses handed out and not freed.
    live: BTreeSet<u64>,
    /// Those whose use on another stream could not be noted: nobody gets their memory any more.
    stuck: BTreeSet<u64>,
    /// Whether its [`Slot`] is gone.
    retired: bool,
    failure: Option<Error>,
}

static TABLE: [Mutex<Option<Bound>>; SLOTS] = [const { Mutex::new(None) }; SLOTS];

/// A lane's hold on a slot. Dropping it closes the slot to allocations; frees go on.
pub struct Slot(usize);

/// Puts `lane`, one of `pool`'s, behind a vacant slot. Without one it is
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
        "all {SLOTS} slots serve pools, or memory of pools that are gone; let go of a pool and of \
         its tensors"
    )))
}

impl Slot {
    /// Its number; the functions are called `symmpool_alloc_N` and `symmpool_free_N`.
    pub fn index(&self) -> usize {
        self.0
    }

    /// Blocks handed out and not freed.
    pub fn live(&self) -> usize {
        lock(&TABLE[self.0]).as_ref().map_or(0, |bound| bound.live.len())
    }

    /// Why the latest call that failed did so.
    pub fn failure(&self) -> Option<Error> {
        lock(&TABLE[self.0]).as_ref().and_then(|bound| bound.failure.clone())
    }

    /// [`failure`](Self::failure), which is then forgotten.
    pub fn take_failure(&self) -> Option<Error> {
        lock(&TABLE[self.0]).as_mut().and_then(|bound| bound.failure.take())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut slot = lock(&TABLE[self.0]);
        let Some(bound) = slot.as_mut() else { return };
        bound.retired = true;
        let gone = if bound.live.is_empty() { slot.take() } else { None };
        drop(slot);
        // The last hold on a pool, perhaps: not under the lock.
        drop(gone);
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Slot").field(&self.0).finish()
    }
}

/// Allocates through a slot. What fails is remembered there too.
pub(crate) fn alloc(index: usize, size: isize, device: i32, stream: u64) -> Result<u64> {
    let mut slot = lock(&TABLE[index]);
    let Some(bound) = slot.as_mut() else { return Err(nobody(index)) };
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

/// Frees what a slot allocated, without order. NULL is nothing.
pub(crate) fn free(index: usize, address: u64) -> Result<()> {
    if address == 0 {
        return Ok(());
    }
    let mut slot = lock(&TABLE[index]);
    let Some(bound) = slot.as_mut() else {
        return Err(told(nobody(index)));
    };
    let freed = bound.free(index, address);
    if let Err(error) = &freed {
        bound.failure = Some(error.clone());
    }
    let gone = if bound.retired && bound.live.is_empty() { slot.take() } else { None };
    drop(slot);
    drop(gone);
    freed.map_err(told)
}

impl Bound {
    fn alloc(&self, index: usize, size: isize, device: i32, stream: u64) -> Result<u64> {
        self.own_process(index)?;
        if self.retired {
            return Err(Error::invalid_state(format!(
                "symmpool_alloc_{index}: its pool was let go of; only what it handed out is freed"
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
        // Whoever asks torch for memory is not to be seen from here.
        let place = || self.lane.try_alloc_bytes(bytes, ALIGN, named(stream));
        let block = at_site(None, place)?;
        Ok(block.into_address())
    }

    fn free(&mut self, index: usize, address: u64) -> Result<()> {
        self.own_process(index)?;
        if !self.live.remove(&address) {
            return Err(Error::invalid_argument(format!(
                "symmpool_free_{index}: {address:#x} is no block that symmpool_alloc_{index} \
                 handed out, or was freed before"
            )));
        }
        if self.stuck.remove(&address) {
            return Err(Error::invalid_state(format!(
                "symmpool_free_{index}: {address:#x} was used on a stream that could not be noted; \
                 its memory is not used again"
            )));
        }
        self.lane.free_address_unordered(address)
    }

    /// A forked child shares the parent's host memory and cannot use its CUDA; changing the lane
    /// there would set it apart from the other ranks for nothing.
    fn own_process(&self, index: usize) -> Result<()> {
        self.maker.check("a pool").map_err(|error| error.context(format!("slot {index}")))
    }
}

/// The pool behind slot `index`, if there is one: for what the functions cannot say.
pub fn pool(index: usize) -> Option<Pool> {
    let slot = TABLE.get(index)?;
    lock(slot).as_ref().map(|bound| bound.pool.clone())
}

/// The slot that handed out `address`, if one did and it was not freed.
pub(crate) fn owner(address: u64) -> Option<usize> {
    TABLE
        .iter()
        .position(|slot| lock(slot).as_ref().is_some_and(|bound| bound.live.contains(&address)))
}

/// Notes that a block is used on another stream (rule D4). Where that cannot be, the block's memory
/// is not used again.
pub(crate) fn record_stream(index: usize, address: u64, stream: u64) -> Result<()> {
    let mut slot = lock(&TABLE[index]);
    let Some(bound) = slot.as_mut() else { return Err(nobody(index)) };
    bound.own_process(index)?;
    let noted = bound.lane.record_stream_address(address, named(stream));
    noted.inspect_err(|error| {
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

fn nobody(index: usize) -> Error {
    Error::invalid_state(format!("slot {index} serves no pool; bind one before it is used"))
}

/// Frees have nobody to return an error to.
fn told(error: Error) -> Error {
    tracing::error!(%error, "a free");
    error
}
