//! `libsymmpool.so`: memory functions for torch's allocators, and a C API.
//!
//! | file | holds |
//! | --- | --- |
//! | `slots` | pools behind pairs of exported functions that carry no user data |
//! | `exports` | those functions: `symmpool_alloc_0`, `symmpool_free_0`, ... |
//! | `process` | an allocator for all of a process's device memory, and the hooks torch asks for |
//! | `guard` | no panic crosses into C, and what was wrong is remembered |
//!
//! Everything here may be called under the lock of torch's allocator. So it does local work only:
//! it calls neither Python nor torch, and waits for no other rank.

#![allow(unsafe_code)] // exported functions, and what C hands over

pub mod capi;
mod exports;
mod guard;
pub mod process;
pub mod slots;

pub use guard::Status;
use symmpool_allocator::Stream;

/// A stream by the handle that an allocator's caller named.
fn named(stream: u64) -> Stream {
    // SAFETY: torch, and whoever else calls the exported functions, names live streams. Torch's live as long
    // as the process; of others callers of these functions promise as much.
    unsafe { Stream::from_raw(stream) }
}
