//! Slots: pools behind pairs of exported functions.
//!
//! [`bind`] puts a lane of a pool behind the lowest vacant slot. The slot's functions then allocate in that lane, and
//! their frees are *unordered* (rule D5), because torch frees memory when garbage is collected or its cache is emptied,
//! at different times on different ranks. A slot keeps its pool until its [`Slot`] is dropped and every block that it
//! allocated is freed, because tensors may outlive both the slot and the pool.
//!
//! A forked child has a copy of the table, in which a lock that another thread of the parent held stays locked. So the
//! process that bound a slot is known without its lock, and a child never waits for the lock of its parent's slot.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{PoisonError, TryLockError};

use symmpool_allocator::lane::at_site;
use symmpool_allocator::{Error, Lane, Pool, ProcessId, Result, Stream};

use crate::sync::{AtomicU64, Mutex, MutexGuard, mutant, word};

/// The number of slots.
pub const SLOTS: usize = 64;

/// Blocks start at multiples of this, as CUDA's do.
const ALIGN: u64 = 512;

struct Bound {
    pool: Pool,
    lane: Lane,
    /// The device that callers must pass; in host memory they may pass any.
    device: Option<u32>,
    /// Addresses that are allocated.
    live: BTreeSet<u64>,
    /// Addresses whose use on another stream could not be recorded. Their memory is never reused.
    stuck: BTreeSet<u64>,
    /// Whether the [`Slot`] was dropped.
    retired: bool,
    failure: Option<Error>,
}

/// A place in the table.
struct SlotPlace {
    /// The process that bound the slot, or [`VACANT`]. It changes under the lock only.
    maker: AtomicU64,
    bound: Mutex<Option<Bound>>,
}

type Guard<'a> = MutexGuard<'a, Option<Bound>>;

/// No process: no process id is zero.
const VACANT: u64 = 0;

static TABLE: [SlotPlace; SLOTS] = [const { SlotPlace::new(word(VACANT)) }; SLOTS];

impl SlotPlace {
    const fn new(maker: AtomicU64) -> Self {
        Self { maker, bound: Mutex::new(None) }
    }

    /// Who bound the slot, if it is bound.
    fn maker(&self) -> Option<ProcessId> {
        let bits = self.maker.load(Ordering::Acquire);
        (bits != VACANT).then(|| ProcessId::from_bits(bits))
    }

    /// Locks what this process has bound. A slot that is vacant is refused, and so is one of a process that this one
    /// was forked from: the child shares the parent's host memory and cannot use the parent's CUDA context, changing
    /// its copy of the lane would only make it differ from the other ranks, and the lock may never come free.
    fn lock(&self, index: usize) -> Result<Guard<'_>> {
        let maker = self.maker().ok_or_else(|| not_bound(index))?;
        maker.check("a pool").map_err(|error| error.context(format!("slot {index}")))?;
        Ok(self.bound.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The lock, if nobody has it.
    fn try_lock(&self) -> Option<Guard<'_>> {
        match self.bound.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Binds a lane, unless the place is taken.
    fn bind(&self, pool: &Pool, lane: &Lane, device: Option<u32>) -> bool {
        if self.maker().is_some() {
            return false;
        }
        // Whoever holds the lock of a vacant slot is about to bind it or has just vacated it, or did so when this
        // process was forked, and then it never comes free.
        let Some(mut slot) = self.try_lock() else { return false };
        if slot.is_some() && !mutant("mutant_slot_bound_twice") {
            return false;
        }
        *slot = Some(Bound {
            pool: pool.clone(),
            lane: lane.clone(),
            device,
            live: BTreeSet::new(),
            stuck: BTreeSet::new(),
            retired: false,
            failure: None,
        });
        self.maker.store(ProcessId::here().to_bits(), Ordering::Release);
        true
    }

    /// Closes the place to allocations, and vacates it if nothing is allocated.
    fn retire(&self, index: usize) {
        // A forked child gives up its copy if no other thread of its parent had the lock. If one had, it keeps it.
        let Some(mut slot) = self.lock(index).ok().or_else(|| self.try_lock()) else { return };
        if let Some(bound) = slot.as_mut() {
            bound.retired = true;
        }
        let unused = self.vacate(&mut slot);
        drop(slot);
        // This may drop the pool, which must not happen under the lock.
        drop(unused);
    }

    fn alloc(&self, index: usize, size: isize, device: i32, stream: Stream) -> Result<u64> {
        let mut slot = self.lock(index)?;
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

    fn free(&self, index: usize, address: u64) -> Result<()> {
        let mut slot = self.lock(index)?;
        let Some(bound) = slot.as_mut() else { return Err(not_bound(index)) };
        let freed = bound.free(index, address);
        if let Err(error) = &freed {
            bound.failure = Some(error.clone());
        }
        let unused = if mutant("mutant_slot_kept") { None } else { self.vacate(&mut slot) };
        drop(slot);
        // This may drop the pool, which must not happen under the lock.
        drop(unused);
        freed
    }

    /// Takes out what is bound if the slot was dropped and nothing is allocated. The caller drops it, after the lock.
    fn vacate(&self, slot: &mut Option<Bound>) -> Option<Bound> {
        let is_unused = |bound: &Bound| {
            bound.retired && (bound.live.is_empty() || mutant("mutant_vacated_while_used"))
        };
        let unused = slot.as_ref().is_some_and(is_unused);
        if !unused {
            return None;
        }
        self.maker.store(VACANT, Ordering::Release);
        slot.take()
    }
}

/// A bound slot. Dropping it closes the slot to allocations; its blocks can still be freed.
pub struct Slot(usize);

/// Binds `lane`, a lane of `pool`, to a vacant slot. If there is none, the error is
/// [`Error::is_invalid_state`].
pub fn bind(pool: &Pool, lane: &Lane) -> Result<Slot> {
    let device = pool.driver().as_cuda().map(|cuda| cuda.facts().ordinal);
    let bound = TABLE.iter().position(|place| place.bind(pool, lane, device));
    bound.map(Slot).ok_or_else(|| {
        Error::invalid_state(format!(
            "all {SLOTS} slots serve pools, or memory of pools that were dropped; drop a pool and its \
             tensors"
        ))
    })
}

impl Slot {
    /// The number N of the slot; its functions are `symmpool_alloc_N` and `symmpool_free_N`.
    pub fn index(&self) -> usize {
        self.0
    }

    /// The number of blocks that are allocated through the slot; 0 in a forked child.
    pub fn live(&self) -> usize {
        let slot = TABLE[self.0].lock(self.0);
        slot.map_or(0, |slot| slot.as_ref().map_or(0, |bound| bound.live.len()))
    }

    /// The error of the latest call that failed. In a forked child, where every call fails, it is the refusal.
    pub fn failure(&self) -> Option<Error> {
        match TABLE[self.0].lock(self.0) {
            Ok(slot) => slot.as_ref().and_then(|bound| bound.failure.clone()),
            Err(refusal) => Some(refusal),
        }
    }

    /// Returns [`failure`](Self::failure) and clears it.
    pub fn take_failure(&self) -> Option<Error> {
        match TABLE[self.0].lock(self.0) {
            Ok(mut slot) => slot.as_mut().and_then(|bound| bound.failure.take()),
            Err(refusal) => Some(refusal),
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        TABLE[self.0].retire(self.0);
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Slot").field(&self.0).finish()
    }
}

/// Allocates through a slot. An error is kept in the slot too.
pub(crate) fn alloc(index: usize, size: isize, device: i32, stream: Stream) -> Result<u64> {
    TABLE[index].alloc(index, size, device, stream)
}

/// Frees what a slot allocated, unordered. Does nothing for NULL.
pub(crate) fn free(index: usize, address: u64) -> Result<()> {
    if address == 0 {
        return Ok(());
    }
    TABLE[index].free(index, address).map_err(logged)
}

impl Bound {
    fn alloc(&self, index: usize, size: isize, device: i32, stream: Stream) -> Result<u64> {
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
        let alloc = || self.lane.try_alloc_bytes(bytes, ALIGN, stream);
        let block = at_site(None, alloc)?;
        Ok(block.into_address())
    }

    fn free(&mut self, index: usize, address: u64) -> Result<()> {
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
}

/// The pool behind slot `index`, if there is one of this process.
pub fn pool(index: usize) -> Option<Pool> {
    let slot = TABLE.get(index)?.lock(index).ok()?;
    slot.as_ref().map(|bound| bound.pool.clone())
}

/// The slot through which the live block at `address` was allocated, if there is one. In a forked child, where a slot
/// of the parent may have a block there and cannot be asked, the answer is the refusal of that slot.
pub(crate) fn owner(address: u64) -> Result<Option<usize>> {
    let mut none = Ok(None);
    for (index, place) in TABLE.iter().enumerate() {
        let Some(maker) = place.maker() else { continue };
        let slot = match place.lock(index) {
            Ok(slot) => slot,
            // Vacated meanwhile.
            Err(_) if maker.is_here() => continue,
            Err(refusal) => match place.try_lock() {
                Some(slot) => slot,
                None => {
                    none = Err(refusal);
                    continue;
                }
            },
        };
        if slot.as_ref().is_some_and(|bound| bound.live.contains(&address)) {
            return Ok(Some(index));
        }
    }
    none
}

/// Records that a block is used on another stream (rule D4). If that fails, the block's memory is never reused.
pub(crate) fn record_stream(index: usize, address: u64, stream: Stream) -> Result<()> {
    let mut slot = TABLE[index].lock(index)?;
    let Some(bound) = slot.as_mut() else { return Err(not_bound(index)) };
    let recorded = bound.lane.record_stream_address(address, stream);
    recorded.inspect_err(|error| {
        if bound.live.contains(&address) {
            bound.stuck.insert(address);
        }
        bound.failure = Some(error.clone());
    })
}

/// Whether a slot serves memory of this device. A slot that cannot be asked, as it is the parent's of this forked child,
/// is taken to: its functions say why they are refused.
pub(crate) fn is_on(index: usize, device: i32) -> bool {
    let place = &TABLE[index];
    let serves = |bound: &Bound| bound.device.is_none_or(|own| i64::from(own) == i64::from(device));
    match place.lock(index) {
        Ok(slot) => slot.as_ref().is_some_and(serves),
        Err(_) => place.maker().is_some_and(|maker| !maker.is_here()),
    }
}

fn not_bound(index: usize) -> Error {
    Error::invalid_state(format!("slot {index} serves no pool; bind one before it is used"))
}

/// Logs an error of a free, because the exported function cannot return it.
fn logged(error: Error) -> Error {
    tracing::error!(%error, "a free failed");
    error
}

#[cfg(test)]
mod models {
    use std::sync::Arc;

    use symmpool_allocator::driver::SimDriver;
    use symmpool_allocator::models::{prove, thread};
    use symmpool_allocator::{Driver, Group};

    use super::*;

    fn pool() -> (Pool, Lane) {
        let driver = SimDriver::with_granularity(7, u64::MAX, 1 << 16).unwrap();
        let group = Group::in_process(1).unwrap().remove(0);
        let pool = Pool::builder(group).driver(Driver::new(driver)).build().unwrap();
        let lane = pool.default_lane();
        (pool, lane)
    }

    fn vacant() -> Arc<SlotPlace> {
        Arc::new(SlotPlace::new(AtomicU64::new(VACANT)))
    }

    /// A slot is dropped while other threads free the last blocks. It is vacant when both are done, and not before.
    fn a_slot_is_dropped_in_use() {
        let (place, (pool, lane)) = (vacant(), pool());
        assert!(place.bind(&pool, &lane, None));
        let blocks = [0, 1].map(|_| place.alloc(0, 512, 0, Stream::DEFAULT).unwrap());
        let frees = blocks.map(|address| {
            let theirs = place.clone();
            thread::spawn(move || theirs.free(0, address).unwrap())
        });
        place.retire(0);
        frees.into_iter().for_each(|free| free.join().unwrap());
        assert!(place.maker().is_none() && place.try_lock().unwrap().is_none());
        assert!(place.free(0, blocks[0]).is_err());
    }

    /// Two threads bind pools to one slot: it serves the pool of one of them.
    fn two_threads_bind() {
        let place = vacant();
        let binds = [0, 1].map(|_| {
            let (theirs, (pool, lane)) = (place.clone(), pool());
            thread::spawn(move || theirs.bind(&pool, &lane, None))
        });
        let bound = binds.map(|bind| bind.join().unwrap());
        assert!(bound[0] != bound[1], "bound {bound:?}");
    }

    #[test]
    fn loom_a_slot_is_vacant_once_nothing_is_allocated() {
        let mutants = ["mutant_vacated_while_used", "mutant_slot_kept"];
        prove(3, &mutants, a_slot_is_dropped_in_use);
    }

    #[test]
    fn loom_a_slot_serves_one_pool() {
        prove(3, &["mutant_slot_bound_twice"], two_threads_bind);
    }
}
