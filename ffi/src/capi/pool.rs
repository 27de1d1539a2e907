//! Pools, their memory and their windows, in C.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::lane::{LaneConfig, WindowPolicy, at_site};
use symmpool_allocator::{CONTROL_LANE, Driver, Error, Pool, Result, Stream};
use symmpool_collectives::Communicator;

use super::group::{GROUPS, symmpool_group};
use super::{Handles, Out, text};
use crate::guard::{Status, lock, status};
use crate::slots::{self, Slot};

/// Symmetric memory of one rank, and windows on its peers'. 0 is never one.
#[allow(non_camel_case_types)] // as in C
pub type symmpool_pool = u64;

/// A flag of symmpool_pool_create: several ranks may use one GPU.
pub const SYMMPOOL_SHARED_DEVICE: u32 = 1;
/// A flag of symmpool_pool_create: every block lies in one physical allocation, as NCCL before
/// 2.30.3 needs of its windows. Packs less tightly.
pub const SYMMPOOL_PER_SEGMENT: u32 = 2;

/// What a commit did.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CommitReport {
    /// Its number, from 1.
    pub number: u64,
    /// Windows that are new.
    pub windows_added: u64,
    /// Windows that are gone.
    pub windows_removed: u64,
    /// Blocks freed without order that came back.
    pub blocks_returned: u64,
}

/// Where every rank's memory lies in this process: rank b's copy of an address p of rank a is
/// p + (b - a) * stride.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// First address of slot 0.
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
    /// Serial number of the segment in its lane.
    pub counter: u64,
}

/// A pool's numbers, in bytes and counts, over all lanes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolStats {
    /// Bytes handed out.
    pub allocated: u64,
    /// Bytes of physical memory.
    pub reserved: u64,
    /// Successful commits.
    pub commits: u64,
    /// Windows now.
    pub windows: u64,
}

pub(super) static POOLS: Handles<Pool> = Handles::new("pool");
static BOUND: std::sync::Mutex<Vec<Slot>> = std::sync::Mutex::new(Vec::new());

fn driver(name: Option<&str>) -> Result<Driver> {
    match name {
        None => Driver::best(),
        Some("cpu") => Driver::host(),
        Some("cuda") => CudaDriver::from_env().map(Driver::new),
        Some(name) => {
            let ordinal = name.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
            Driver::cuda(ordinal.ok_or_else(|| {
                Error::invalid_argument(format!("device: {name:?} is none of cpu, cuda, cuda:N"))
            })?)
        }
    }
}

fn find(pool: symmpool_pool) -> Result<Arc<Pool>> {
    POOLS.get(pool)
}

/// # Safety
///
/// `stream` is NULL or a stream that lives as [`Stream::from_raw`] says.
pub(super) unsafe fn on(stream: *mut c_void) -> Stream {
    // SAFETY: the caller's promise.
    unsafe { Stream::from_raw(stream as u64) }
}

/// Makes a pool together with the other ranks of `group`, which call this with the same settings.
/// `device` is "cpu", "cuda:N", "cuda" (device LOCAL_RANK), or NULL: a CUDA device if there is one,
/// else the CPU. `stride` is the address space of a rank in bytes, a multiple of 2 MiB, or 0 for
/// 1 TiB. `flags` are SYMMPOOL_SHARED_DEVICE and SYMMPOOL_PER_SEGMENT. Errors: DIVERGED for other
/// settings elsewhere, UNSUPPORTED where memory cannot travel, TIMEOUT and PEER_LOST. What one rank
/// cannot do, or was asked in vain, is the error of all.
///
/// # Safety
///
/// `device` is NULL or a C string, `pool` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_pool_create(
    group: symmpool_group,
    device: *const c_char,
    stride: u64,
    flags: u32,
    pool: *mut symmpool_pool,
) -> Status {
    status(|| {
        let group = GROUPS.get(group)?;
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(pool, "pool") };
        let name = if device.is_null() {
            Ok(None)
        } else {
            // SAFETY: the caller's promise.
            unsafe { text(device, "device") }.map(Some)
        };
        // What is refused here the other ranks hear of.
        let driver = match &out {
            Err(error) => Err(error.clone()),
            Ok(_) if flags & !(SYMMPOOL_SHARED_DEVICE | SYMMPOOL_PER_SEGMENT) != 0 => {
                Err(Error::invalid_argument(format!("flags: {flags:#x} has unknown ones")))
            }
            Ok(_) => name.and_then(driver),
        };
        let mut builder = Pool::builder(Arc::unwrap_or_clone(group)).driver_or_failure(driver);
        if stride != 0 {
            builder = builder.stride(stride);
        }
        if flags & SYMMPOOL_SHARED_DEVICE != 0 {
            builder = builder.allow_shared_device();
        }
        if flags & SYMMPOOL_PER_SEGMENT != 0 {
            let lane = LaneConfig::symmetric("default").window_policy(WindowPolicy::PerSegment);
            builder = builder.lane(lane);
        }
        let built = builder.build()?;
        out?.put(POOLS.insert(built));
        Ok(())
    })
}

/// Lets go of a pool. Its memory goes too, once no communicator, slot or call uses the pool.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_pool_destroy(pool: symmpool_pool) -> Status {
    status(|| POOLS.remove(pool))
}

/// Allocates `bytes` at a multiple of `align` (a power of two up to 2 MiB; 0 for 512) for use on
/// `stream`, a CUstream, NULL for the default one and in host memory. Talks to no other rank; every
/// rank makes the same calls in the same order. Errors: OUT_OF_MEMORY, INVALID_ARGUMENT, INVALID_STATE in
/// a child that was forked from the pool's process.
///
/// # Safety
///
/// `stream` is NULL or a stream of the pool's device that lives until symmpool_forget_stream, or as long as
/// the pool; `pointer` is NULL (an error) or can be
/// written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_alloc(
    pool: symmpool_pool,
    bytes: usize,
    align: u64,
    stream: *mut c_void,
    pointer: *mut *mut c_void,
) -> Status {
    // SAFETY: the caller's promise.
    let stream = unsafe { on(stream) };
    status(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(pointer, "pointer") }?;
        let align = if align == 0 { 512 } else { align };
        let block = at_site(None, || find(pool)?.default_lane().alloc_bytes(bytes, align, stream))?;
        out.put(block.into_address() as *mut c_void);
        Ok(())
    })
}

/// Frees a block as part of the sequence: every rank does so at the same place, and its memory may
/// be used again by the next call. INVALID_ARGUMENT for anything that is no live block.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_free(pool: symmpool_pool, pointer: *mut c_void) -> Status {
    status(|| find(pool)?.default_lane().free_address(pointer as u64))
}

/// Frees a block at a time that differs between ranks. Its memory is used again after the commit by
/// which every rank has freed it. INVALID_ARGUMENT for anything that is no live block.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_free_unordered(pool: symmpool_pool, pointer: *mut c_void) -> Status {
    status(|| find(pool)?.default_lane().free_address_unordered(pointer as u64))
}

/// Notes that a block is used on `stream` too: its memory is used again only behind that work.
/// INVALID_ARGUMENT for anything that is no live block.
///
/// # Safety
///
/// As for symmpool_alloc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_record_stream(
    pool: symmpool_pool,
    pointer: *mut c_void,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller's promise.
    let stream = unsafe { on(stream) };
    status(|| find(pool)?.default_lane().record_stream_address(pointer as u64, stream))
}

/// Makes sure that `bytes` more fit on `stream`, as one block, without growing. Every rank calls it
/// at the same place. Errors as for symmpool_alloc.
///
/// # Safety
///
/// As for symmpool_alloc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_reserve(
    pool: symmpool_pool,
    bytes: u64,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller's promise.
    let stream = unsafe { on(stream) };
    status(|| at_site(None, || find(pool)?.default_lane().reserve_on(bytes, stream)))
}

/// Lets go of a stream that is about to be destroyed. A pool remembers the streams that it was given, up to
/// 64, and touches them until then; what was theirs goes to the next stream that is new to the pool. Every
/// rank calls it at the same place. Nothing happens for a stream that the pool does not know. Errors:
/// INVALID_STATE while the stream is being captured, and in a forked child.
///
/// # Safety
///
/// `stream` is NULL or a live stream of the pool's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_forget_stream(
    pool: symmpool_pool,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller's promise.
    let stream = unsafe { on(stream) };
    status(|| at_site(None, || find(pool)?.forget_stream(stream)))
}

/// Stands in for a commit that this rank was asked for in vain: the other ranks hear of it in theirs.
/// They do where sequences differ, so this rank's has an event that theirs have not.
fn refuse_commit(pool: &Pool, why: Error) -> Error {
    if let Ok(lane) = pool.lane(CONTROL_LANE) {
        lane.note_failure(&why);
        drop(lane.alloc_bytes(1, 1, Stream::DEFAULT));
    }
    Communicator::refuse(pool, why)
}

/// Checks that all ranks did the same, and makes windows of new memory. Collective. `report` may be
/// NULL. Errors: DIVERGED, saying where ranks differ, TIMEOUT, PEER_LOST, INVALID_STATE while a
/// stream is being captured or another thread commits, and what another rank could not do, or asked
/// for in vain; then nothing is shared, and the pool can be used after symmpool_resync.
///
/// # Safety
///
/// `report` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_commit(pool: symmpool_pool, report: *mut CommitReport) -> Status {
    status(|| {
        let pool = find(pool)?;
        // SAFETY: the caller's promise.
        let out = unsafe { Out::if_wanted(report, "report") };
        let out = out.map_err(|why| refuse_commit(&pool, why))?;
        let done = pool.commit()?;
        if let Some(out) = out {
            out.put(CommitReport {
                number: done.number,
                windows_added: done.windows_added,
                windows_removed: done.windows_removed,
                blocks_returned: done.blocks_returned,
            });
        }
        Ok(())
    })
}

/// Whether the pool has grown since the last commit, or much that was freed waits to be taken back; the same on
/// every rank.
///
/// # Safety
///
/// `due` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_is_commit_due(pool: symmpool_pool, due: *mut bool) -> Status {
    status(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(due, "due") }?;
        out.put(find(pool)?.is_commit_due());
        Ok(())
    })
}

/// Agrees on a state again after DIVERGED. Collective. What was allocated since must have been
/// freed.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_resync(pool: symmpool_pool) -> Status {
    status(|| find(pool)?.resync().map(drop))
}

/// Where every rank's memory lies in this process.
///
/// # Safety
///
/// `layout` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_layout(pool: symmpool_pool, layout: *mut Layout) -> Status {
    status(|| {
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(is, "is") }?;
        out.put(find(pool)?.is_window(pointer as u64, bytes));
        Ok(())
    })
}

/// `rank`'s copy of an address inside a window. INVALID_ARGUMENT for an address in none.
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
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(peer, "peer") }?;
        out.put(find(pool)?.peer_ptr(rank, pointer as u64)? as *mut c_void);
        Ok(())
    })
}

/// The windows by offset: writes at most `capacity` of them to `windows`, and how many there are
/// to `count`. With a capacity of 0, `windows` may be NULL.
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
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(count, "count") }?;
        let found = find(pool)?.windows();
        for (at, window) in found.list().iter().take(capacity).enumerate() {
            let entry = windows.wrapping_add(at);
            // SAFETY: below the capacity, within which the caller promised that it can be written.
            let entry = unsafe { Out::new(entry, "windows") }?;
            let (offset, bytes) = (window.offset, window.bytes);
            entry.put(Window { offset, bytes, counter: window.counter });
        }
        out.put(found.list().len());
        Ok(())
    })
}

/// The pool's numbers.
///
/// # Safety
///
/// `stats` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_stats(pool: symmpool_pool, stats: *mut PoolStats) -> Status {
    status(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(stats, "stats") }?;
        let found = find(pool)?.stats()?;
        out.put(PoolStats {
            allocated: found.allocated(),
            reserved: found.reserved(),
            commits: found.commits,
            windows: found.windows,
        });
        Ok(())
    })
}

/// Registers every window, those of later commits too, with a communicator of NCCL, an `ncclComm_t`
/// whose ranks are those of the pool. `count`, which may be NULL, is how many windows there are now.
/// Collective. The pool needs SYMMPOOL_PER_SEGMENT. UNSUPPORTED where no NCCL is loaded, where it is
/// older than 2.27, or where it makes no symmetric windows.
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
        // SAFETY: the caller's promise.
        let out = unsafe { Out::if_wanted(count, "count") };
        // Where there is no place for the answer it asks for no communicator, which the others hear of.
        let comm = if out.is_ok() { comm as usize } else { 0 };
        // SAFETY: the caller's promise; 0 is refused.
        let registered = unsafe { pool.register_nccl(comm) };
        if let Some(out) = out? {
            out.put(registered?);
        } else {
            registered?;
        }
        Ok(())
    })
}

/// Takes the windows back from a communicator of NCCL. Collective; before it is destroyed. Errors as for
/// symmpool_register_nccl.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_unregister_nccl(pool: symmpool_pool, comm: *mut c_void) -> Status {
    status(|| find(pool)?.unregister_nccl(comm as usize))
}

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
