//! Slots, in the C API: pools behind functions that take no pool, for allocators that take plain function pointers.

use symmpool_allocator::Error;

use super::Out;
use super::pool::{find, symmpool_pool};
use crate::guard::{Status, status};
use crate::own::OfProcess;
use crate::slots::{self, Slot};

static BOUND: OfProcess<Vec<Slot>> = OfProcess::new();

/// Binds the pool to a free slot N and writes N to `slot`. The functions symmpool_alloc_N and
/// symmpool_free_N then allocate from the pool, for allocators that take plain functions, such as torch's
/// CUDAPluggableAllocator. Their frees are unordered, as with symmpool_free_unordered. INVALID_STATE if all
/// 64 slots are in use.
///
/// # Safety
///
/// `slot` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_slot_bind(pool: symmpool_pool, slot: *mut u32) -> Status {
    status(|| {
        // SAFETY: the caller promised that `slot` is NULL or can be written to.
        let out = unsafe { Out::new(slot, "slot") }?;
        let pool = find(pool)?;
        let slot = slots::bind(&pool, &pool.default_lane())?;
        out.put(slot.index() as u32);
        BOUND.lock().push(slot);
        Ok(())
    })
}

/// Closes a slot to allocations. It keeps its pool until all blocks that it allocated are freed.
/// INVALID_ARGUMENT for a slot that is not bound.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_slot_release(slot: u32) -> Status {
    status(|| {
        let mut bound = BOUND.lock();
        let at = bound.iter().position(|bound| bound.index() == slot as usize);
        let at = at.ok_or_else(|| {
            Error::invalid_argument(format!("slot {slot} was not bound by symmpool_slot_bind"))
        })?;
        let released = bound.swap_remove(at);
        // Dropping a slot may drop a pool, which must not happen under the lock.
        drop(bound);
        drop(released);
        Ok(())
    })
}
