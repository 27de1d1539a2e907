//! `libsymmpool.so`: memory functions for torch's allocators, and a C API.
//!
//! | file | holds |
//! | --- | --- |
//! | `capi` | the C API |
//! | `slots` | pools behind pairs of exported functions that take no pool |
//! | `exports` | those functions: `symmpool_alloc_0`, `symmpool_free_0`, ... |
//! | `process` | an allocator for all of a process's device memory, and the hooks that torch calls |
//! | `sync` | atomics and locks of slots, which models watch |
//! | `own` | state that forked children do not share |
//! | `guard` | keeps panics from crossing into C, and keeps errors for C code to query |
//!
//! Functions of `slots`, `exports` and `process` may be called under the lock of torch's allocator. So they do local
//! work only: they call neither Python nor torch, and wait for no other rank.

#![allow(unsafe_code)] // exported functions, and what C hands over

pub mod capi;
mod exports;
mod guard;
mod own;
pub mod process;
pub mod slots;
mod sync;

use std::ffi::c_void;

pub use guard::Status;
use symmpool_allocator::Stream;

/// The stream of a handle that C code passed.
///
/// # Safety
///
/// You must pass NULL or a stream that lives as [`Stream::from_raw`] says.
unsafe fn on(stream: *mut c_void) -> Stream {
    // SAFETY: the caller promised NULL, or a stream that lives as `Stream::from_raw` says.
    unsafe { Stream::from_raw(stream as u64) }
}
