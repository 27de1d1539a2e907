//! A pool's memory, in the C API: blocks, and the streams that use them.

use std::ffi::c_void;

use symmpool_allocator::lane::at_site;

use super::Out;
use super::pool::{find, symmpool_pool};
use crate::guard::{Status, status};
use crate::on;

/// Allocates `bytes` at a multiple of `align` (a power of two up to 2 MiB; 0 for 512) for use on
/// `stream`, a CUstream, NULL for the default one and in host memory. The call does not communicate with
/// other ranks; every rank makes the same calls in the same order. Errors: OUT_OF_MEMORY, INVALID_ARGUMENT,
/// INVALID_STATE in a child that was forked from the pool's process.
///
/// # Safety
///
/// `stream` is NULL or a stream of the pool's device that exists until symmpool_forget_stream, or as long as
/// the pool; `pointer` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_alloc(
    pool: symmpool_pool,
    bytes: usize,
    align: u64,
    stream: *mut c_void,
    pointer: *mut *mut c_void,
) -> Status {
    // SAFETY: the caller promised that `stream` is NULL or a live stream.
    let stream = unsafe { on(stream) };
    status(|| {
        // SAFETY: the caller promised that `pointer` is NULL or can be written to.
        let out = unsafe { Out::new(pointer, "pointer") }?;
        let align = if align == 0 { 512 } else { align };
        let block = at_site(None, || find(pool)?.default_lane().alloc_bytes(bytes, align, stream))?;
        out.put(block.into_address() as *mut c_void);
        Ok(())
    })
}

/// Frees a block as part of the sequence of calls: every rank frees it at the same point of the sequence,
/// and the next call may reuse its memory. INVALID_ARGUMENT for anything that is not a live block.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_free(pool: symmpool_pool, pointer: *mut c_void) -> Status {
    status(|| find(pool)?.default_lane().free_address(pointer as u64))
}

/// Frees a block at a time that may differ between ranks. Its memory can be reused after the commit by
/// which every rank has freed it. INVALID_ARGUMENT for anything that is not a live block.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_free_unordered(pool: symmpool_pool, pointer: *mut c_void) -> Status {
    status(|| find(pool)?.default_lane().free_address_unordered(pointer as u64))
}

/// Records that a block is used on `stream` too: its memory is reused only after the work that is on that
/// stream when the block is freed. INVALID_ARGUMENT for anything that is not a live block.
///
/// # Safety
///
/// You must keep the promises of symmpool_alloc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_record_stream(
    pool: symmpool_pool,
    pointer: *mut c_void,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller promised that `stream` is NULL or a live stream.
    let stream = unsafe { on(stream) };
    status(|| find(pool)?.default_lane().record_stream_address(pointer as u64, stream))
}

/// Makes sure that a block of `bytes` can be allocated on `stream` without growing. Every rank calls it
/// at the same point of the sequence of calls. Errors as for symmpool_alloc.
///
/// # Safety
///
/// You must keep the promises of symmpool_alloc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_reserve(
    pool: symmpool_pool,
    bytes: u64,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller promised that `stream` is NULL or a live stream.
    let stream = unsafe { on(stream) };
    status(|| at_site(None, || find(pool)?.default_lane().reserve_on(bytes, stream)))
}

/// Makes the pool forget a stream that is about to be destroyed. A pool remembers up to 64 streams that it was
/// given, and uses them until they are forgotten; the free blocks of a forgotten stream go to the next stream that
/// is new to the pool. Every rank calls it at the same point of the sequence of calls. Does nothing for a stream that
/// the pool does not know. Errors: INVALID_STATE while the stream is being captured, and in a forked child.
///
/// # Safety
///
/// `stream` is NULL or a live stream of the pool's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_forget_stream(
    pool: symmpool_pool,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller promised that `stream` is NULL or a live stream.
    let stream = unsafe { on(stream) };
    status(|| at_site(None, || find(pool)?.forget_stream(stream)))
}
