//! An allocator that counts the bytes which this process holds, so that a single one that is leaked is seen.

#![allow(unsafe_code)] // an allocator

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static HELD: AtomicUsize = AtomicUsize::new(0);

struct HeldBytes;

#[global_allocator]
static ALLOCATOR: HeldBytes = HeldBytes;

// SAFETY: memory is the system allocator's, and nothing here touches it.
unsafe impl GlobalAlloc for HeldBytes {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the layout is that of a valid call of `GlobalAlloc::alloc`, and goes to the system unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: pointer and layout are those of a valid call of `GlobalAlloc::dealloc`, and the pointer came from
        // the system, by `alloc` above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Bytes of the heap that this process holds now.
pub(crate) fn held_bytes() -> usize {
    HELD.load(Ordering::Relaxed)
}
