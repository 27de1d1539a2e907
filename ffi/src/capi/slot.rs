//! Pools behind slots, in C: functions that carry no user data, for allocators that take such.

use std::sync::Mutex;

use symmpool_allocator::Error;

use super::Out;
use super::pool::{find, symmpool_pool};
use crate::guard::{Status, lock, status};
use crate::slots::{self, Slot};

static BOUND: Mutex<Vec<Slot>> = Mutex::new(Vec::new());

/// Puts the pool behind a slot: symmpool_alloc_N and symmpool_free_N, N being `slot`, then serve its
/// memory to allocators that take plain functions, such as torch's CUDAPluggableAllocator. Their
/// frees are without order. INVALID_STATE when all 64 slots are in use.
///
/// # Safety
///
/// `slot` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_slot_bind(pool: symmpool_pool, slot: *mut u32) -> Status {
    status(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(slot, "slot") }?;
        let pool = find(pool)?;
        let slot = slots::bind(&pool, &pool.default_lane())?;
        out.put(slot.index() as u32);
        lock(&BOUND).push(slot);
        Ok(())
    })
}

/// Closes a slot to allocations. It keeps its pool until all that it handed out is freed.
/// INVALID_ARGUMENT for a slot that is not bound.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_slot_release(slot: u32) -> Status {
    status(|| {
        let mut bound = lock(&BOUND);
        let at = bound.iter().position(|bound| bound.index() == slot as usize);
        let at = at.ok_or_else(|| {
            Error::invalid_argument(format!("slot {slot} was not bound by symmpool_slot_bind"))
        })?;
        let gone = bound.swap_remove(at);
        drop(bound);
        drop(gone);
        Ok(())
    })
}
