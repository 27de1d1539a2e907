//! An allocator that counts what this process holds, so that inputs which take too much memory are found.

#![allow(unsafe_code)] // an allocator

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static TURN: Mutex<()> = Mutex::new(());

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: memory is the system allocator's, and nothing here touches it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(held, Ordering::Relaxed);
        // SAFETY: size, alignment and pointer are those of a valid call of `GlobalAlloc::alloc`, which
        // goes to the system unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(held, Ordering::Relaxed);
        // SAFETY: size, alignment and pointer are those of a valid call of `GlobalAlloc::alloc_zeroed`, which
        // goes to the system unchanged.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: size, alignment and pointer are those of a valid call of `GlobalAlloc::dealloc`, which
        // goes to the system unchanged.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Waits until no other test counts.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins to count: the bytes that are held now.
pub(crate) fn begin() -> usize {
    let held = HELD.load(Ordering::Relaxed);
    PEAK.store(held, Ordering::Relaxed);
    held
}

/// The most bytes that were held at a time since [`begin`], beyond those that were held then.
pub(crate) fn peak_since(begun: usize) -> usize {
    PEAK.load(Ordering::Relaxed).saturating_sub(begun)
}
