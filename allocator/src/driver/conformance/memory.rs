//! Writing and reading mapped memory, where the CPU can.

// Tests of memory go to memory.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::Driver;

/// Every this many bytes a word is written and checked: in each page, at moving places in it.
const EVERY: u64 = 4096 - 64;

fn word(address: u64) -> &'static AtomicU64 {
    // SAFETY: callers pass addresses, multiples of 8, of memory that stays mapped for the call and
    // is only ever accessed through atomics.
    unsafe { AtomicU64::from_ptr(address as *mut u64) }
}

fn pattern(address: u64, start: u64, seed: u64) -> u64 {
    (address - start).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed
}

/// Writes a pattern to `[start, start + bytes)` of mapped memory.
pub(in crate::driver) fn fill(driver: &Driver, start: u64, bytes: u64, seed: u64) {
    if driver.host_accessible() {
        for address in (start..start + bytes).step_by(EVERY as usize) {
            word(address).store(pattern(address, start, seed), Ordering::Release);
        }
    }
}

/// Checks that the pattern is there.
pub(in crate::driver) fn check_contents(driver: &Driver, start: u64, bytes: u64, seed: u64) {
    if driver.host_accessible() {
        for address in (start..start + bytes).step_by(EVERY as usize) {
            let found = word(address).load(Ordering::Acquire);
            assert_eq!(found, pattern(address, start, seed), "at {address:#x} of {start:#x}");
        }
    }
}
