//! Pools, in the C API: creation, commits, statistics.

use std::ffi::c_char;
use std::sync::Arc;

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::lane::{LaneConfig, WindowPolicy};
use symmpool_allocator::{CONTROL_LANE, Driver, Error, Pool, Result, Stream, short};
use symmpool_collectives::Communicator;

use super::group::{GROUPS, symmpool_group};
use super::{Handles, Out, text};
use crate::guard::{Status, status};

/// A handle of a pool: symmetric memory of this rank, and windows of its peers' memory. 0 is never a valid
/// handle.
#[allow(non_camel_case_types)] // the name in C
pub type symmpool_pool = u64;

/// A flag of symmpool_pool_create: several ranks may use one GPU.
pub const SYMMPOOL_SHARED_DEVICE: u32 = 1;
/// A flag of symmpool_pool_create: every block lies in one physical allocation, which NCCL before
/// 2.30.3 needs for its windows. Packs blocks less tightly.
pub const SYMMPOOL_PER_SEGMENT: u32 = 2;

/// Effects of a commit.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CommitReport {
    /// The number of the commit, counted from 1.
    pub number: u64,
    /// How many windows it added.
    pub windows_added: u64,
    /// How many windows it removed.
    pub windows_removed: u64,
    /// How many blocks that every rank had freed without order can be reused now.
    pub blocks_returned: u64,
}

/// Statistics of a pool, over all lanes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolStats {
    /// Bytes that are allocated.
    pub allocated: u64,
    /// Bytes of physical memory.
    pub reserved: u64,
    /// The number of successful commits.
    pub commits: u64,
    /// The number of windows.
    pub windows: u64,
}

static POOLS: Handles<Pool> = Handles::new("pool");

fn driver(name: Option<&str>) -> Result<Driver> {
    match name {
        None => Driver::best(),
        Some("cpu") => Driver::host(),
        Some("cuda") => CudaDriver::from_env().map(Driver::new),
        Some(name) => {
            let ordinal = name.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
            Driver::cuda(ordinal.ok_or_else(|| {
                Error::invalid_argument(format!(
                    "device: {:?} is none of cpu, cuda, cuda:N",
                    short(name)
                ))
            })?)
        }
    }
}

pub(super) fn find(pool: symmpool_pool) -> Result<Arc<Pool>> {
    POOLS.get(pool)
}

/// Creates a pool together with the other ranks of `group`, which call this with the same settings.
/// `device` is "cpu", "cuda:N", "cuda" (device LOCAL_RANK), or NULL: a CUDA device if there is one,
/// else the CPU. `stride` is the address space of a rank in bytes, a multiple of 2 MiB, or 0 for
/// 1 TiB. `flags` are SYMMPOOL_SHARED_DEVICE and SYMMPOOL_PER_SEGMENT. Errors: DIVERGED if ranks have
/// different settings, UNSUPPORTED where memory cannot be shared, TIMEOUT and PEER_LOST. If one rank
/// fails or refuses its arguments, all ranks get that error.
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
        // SAFETY: the caller promised that `pool` is NULL or can be written to.
        let out = unsafe { Out::new(pool, "pool") };
        let name = if device.is_null() {
            Ok(None)
        } else {
            // SAFETY: the caller promised that `device` is NULL or a C string that lives until the call returns.
            unsafe { text(device, "device") }.map(Some)
        };
        // The builder reports an error of this rank to the other ranks, so nothing returns before it.
        let driver = match &out {
            Err(error) => Err(error.clone()),
            Ok(_) if flags & !(SYMMPOOL_SHARED_DEVICE | SYMMPOOL_PER_SEGMENT) != 0 => {
                Err(Error::invalid_argument(format!("flags: {flags:#x} has unknown flags")))
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

/// Destroys a pool. Its memory is freed once no communicator, slot or call uses the pool.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_pool_destroy(pool: symmpool_pool) -> Status {
    status(|| POOLS.remove(pool))
}

/// Takes the place of a commit whose arguments this rank refuses, so that the other ranks get an error in theirs
/// instead of waiting. For that it adds an event to this rank's sequence that theirs do not have.
fn refuse_commit(pool: &Pool, why: Error) -> Error {
    if let Ok(lane) = pool.lane(CONTROL_LANE) {
        lane.note_failure(&why);
        drop(lane.alloc_bytes(1, 1, Stream::DEFAULT));
    }
    Communicator::decline_new(pool, why)
}

/// Checks that all ranks did the same, and makes windows of new memory. Collective. `report` may be
/// NULL. Errors: DIVERGED, whose text says where ranks differ, TIMEOUT, PEER_LOST, INVALID_STATE while a
/// stream is being captured or another thread commits, and errors of another rank. After an error nothing
/// is shared, and the pool can be used again after symmpool_resync.
///
/// # Safety
///
/// `report` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_commit(pool: symmpool_pool, report: *mut CommitReport) -> Status {
    status(|| {
        let pool = find(pool)?;
        // SAFETY: the caller promised that `report` is NULL or can be written to.
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

/// Whether a commit is due: the pool has grown since the last one, or many freed blocks wait for one before they can
/// be reused. The result is the same on every rank.
///
/// # Safety
///
/// `due` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_is_commit_due(pool: symmpool_pool, due: *mut bool) -> Status {
    status(|| {
        // SAFETY: the caller promised that `due` is NULL or can be written to.
        let out = unsafe { Out::new(due, "due") }?;
        out.put(find(pool)?.is_commit_due());
        Ok(())
    })
}

/// Brings all ranks to the same state again after DIVERGED. Collective. Blocks that were allocated since
/// the last commit must have been freed.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_resync(pool: symmpool_pool) -> Status {
    status(|| find(pool)?.resync().map(drop))
}

/// The statistics of a pool.
///
/// # Safety
///
/// `stats` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_stats(pool: symmpool_pool, stats: *mut PoolStats) -> Status {
    status(|| {
        // SAFETY: the caller promised that `stats` is NULL or can be written to.
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
