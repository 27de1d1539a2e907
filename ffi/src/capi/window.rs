//! A pool's windows, in the C API: addresses of peers' memory, and windows that are registered with NCCL.

use std::ffi::c_void;

use super::Out;
use super::pool::{find, symmpool_pool};
use crate::guard::{Status, status};

/// Where every rank's memory lies in this process. If p is an address of rank a's memory, the
/// corresponding address of rank b's is p + (b - a) * stride.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// The first address of rank 0's slot.
    pub base: u64,
    /// Bytes from one rank's slot to the next.
    pub stride: u64,
    /// This process's rank.
    pub rank: u32,
    /// The number of ranks.
    pub world: u32,
}

/// Memory that every rank has mapped at the same offset.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Offset in bytes from the start of a rank's slot.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// The serial number of the segment in its lane.
    pub counter: u64,
}

/// Where every rank's memory lies in this process.
///
/// # Safety
///
/// `layout` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_layout(pool: symmpool_pool, layout: *mut Layout) -> Status {
    status(|| {
        // SAFETY: the caller promised that `layout` is NULL or can be written to.
        let out = unsafe { Out::new(layout, "layout") }?;
        let found = find(pool)?.layout();
        let (base, stride) = (found.base, found.stride);
        out.put(Layout { base, stride, rank: found.rank, world: found.world });
        Ok(())
    })
}

/// Whether all `bytes` from `pointer` lie in windows.
///
/// # Safety
///
/// `is` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_is_window(
    pool: symmpool_pool,
    pointer: *const c_void,
    bytes: u64,
    is: *mut bool,
) -> Status {
    status(|| {
        // SAFETY: the caller promised that `is` is NULL or can be written to.
        let out = unsafe { Out::new(is, "is") }?;
        out.put(find(pool)?.is_window(pointer as u64, bytes));
        Ok(())
    })
}

/// The address of `rank`'s memory that corresponds to `pointer`, which lies in a window. INVALID_ARGUMENT
/// for an address in no window.
///
/// # Safety
///
/// `peer` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_peer_pointer(
    pool: symmpool_pool,
    rank: u32,
    pointer: *const c_void,
    peer: *mut *mut c_void,
) -> Status {
    status(|| {
        // SAFETY: the caller promised that `peer` is NULL or can be written to.
        let out = unsafe { Out::new(peer, "peer") }?;
        out.put(find(pool)?.peer_ptr(rank, pointer as u64)? as *mut c_void);
        Ok(())
    })
}

/// The windows in the order of their offsets: writes at most `capacity` of them to `windows`, and the
/// number of all windows to `count`. With a capacity of 0, `windows` may be NULL.
///
/// # Safety
///
/// `windows` can be written to for `capacity` entries; `count` is NULL (an error) or can be written
/// to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_windows(
    pool: symmpool_pool,
    windows: *mut Window,
    capacity: usize,
    count: *mut usize,
) -> Status {
    status(|| {
        // SAFETY: the caller promised that `count` is NULL or can be written to.
        let out = unsafe { Out::new(count, "count") }?;
        let found = find(pool)?.windows();
        for (at, window) in found.list().iter().take(capacity).enumerate() {
            let entry = windows.wrapping_add(at);
            // SAFETY: the index is below the capacity, and the caller promised that so many entries can be written.
            let entry = unsafe { Out::new(entry, "windows") }?;
            let (offset, bytes) = (window.offset, window.bytes);
            entry.put(Window { offset, bytes, counter: window.counter });
        }
        out.put(found.list().len());
        Ok(())
    })
}

/// Registers every window, and those of later commits, with a communicator of NCCL, an `ncclComm_t`
/// whose ranks are those of the pool. Writes the number of windows to `count`, which may be NULL.
/// Collective. The pool needs SYMMPOOL_PER_SEGMENT. UNSUPPORTED if no NCCL is loaded, if it is older than
/// 2.27, or if it cannot make symmetric windows.
///
/// # Safety
///
/// `comm` is NULL (an error) or a communicator of the NCCL that this process has loaded, and lives
/// until symmpool_unregister_nccl; `count` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_register_nccl(
    pool: symmpool_pool,
    comm: *mut c_void,
    count: *mut u64,
) -> Status {
    status(|| {
        let pool = find(pool)?;
        // SAFETY: the caller promised that `count` is NULL or can be written to.
        let out = unsafe { Out::if_wanted(count, "count") };
        // If `count` is invalid, it registers no communicator (0), which is an error on all ranks.
        let comm = if out.is_ok() { comm as usize } else { 0 };
        // SAFETY: the caller promised that `comm` is a communicator of the NCCL of this process, which lives until it
        // is unregistered; 0 is refused.
        let registered = unsafe { pool.register_nccl(comm) };
        if let Some(out) = out? {
            out.put(registered?);
        } else {
            registered?;
        }
        Ok(())
    })
}

/// Deregisters the windows from a communicator of NCCL. Collective; to be called before the communicator is
/// destroyed. Errors as for symmpool_register_nccl.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_unregister_nccl(pool: symmpool_pool, comm: *mut c_void) -> Status {
    status(|| find(pool)?.unregister_nccl(comm as usize))
}
