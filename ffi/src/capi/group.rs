//! Groups of ranks, in the C API.

use std::ffi::c_char;
use std::sync::Arc;

use symmpool_allocator::store::FileStore;
use symmpool_allocator::{Deadline, Group};

use super::{Handles, Out, seconds, text};
use crate::guard::{Status, status};

/// A handle of a group: an ordered set of ranks, of which this process is one. 0 is never a valid handle.
#[allow(non_camel_case_types)] // the name in C
pub type symmpool_group = u64;

pub(super) static GROUPS: Handles<Group> = Handles::new("group");

/// The group that a launcher describes in the environment: torchrun, mpirun, srun or Kubernetes, by the variables in
/// docs/hosts.md (and SYMMPOOL_PORT, SYMMPOOL_SECRET where they are set). `timeout` is how long collective
/// operations of the group wait for other ranks, in seconds. Errors: INVALID_ARGUMENT for variables that
/// are missing or wrong, TIMEOUT, REFUSED if ranks have different secrets.
///
/// # Safety
///
/// `group` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_group_from_env(
    timeout: f64,
    group: *mut symmpool_group,
) -> Status {
    status(|| {
        // SAFETY: the caller promised that `group` is NULL or can be written to.
        let out = unsafe { Out::new(group, "group") }?;
        let timeout = seconds(timeout, "timeout")?;
        let group = Group::from_env(Deadline::after(timeout))?.with_timeout(timeout);
        out.put(GROUPS.insert(group));
        Ok(())
    })
}

/// A group whose ranks connect over TCP to `address`, "HOST:PORT", which rank 0 serves. `secret` must be
/// the same on every rank; it may be NULL if the address is a loopback address. `timeout` and errors as
/// for symmpool_group_from_env.
///
/// # Safety
///
/// `address` and `secret` are NULL or C strings, `group` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_group_over_tcp(
    rank: u32,
    world: u32,
    address: *const c_char,
    secret: *const c_char,
    timeout: f64,
    group: *mut symmpool_group,
) -> Status {
    status(|| {
        // SAFETY: the caller promised that `group` is NULL or can be written to.
        let out = unsafe { Out::new(group, "group") }?;
        // SAFETY: the caller promised that `address` is NULL or a C string that lives until the call returns.
        let address = unsafe { text(address, "address") }?;
        let secret = if secret.is_null() {
            None
        } else {
            // SAFETY: the caller promised that `secret` is NULL or a C string that lives until the call returns.
            Some(unsafe { text(secret, "secret") }?)
        };
        let timeout = seconds(timeout, "timeout")?;
        let group = Group::over_tcp(rank, world, address, secret, Deadline::after(timeout))?;
        out.put(GROUPS.insert(group.with_timeout(timeout)));
        Ok(())
    })
}

/// A group whose ranks exchange files in `directory`, which all ranks see and nothing else uses.
/// `timeout` as for symmpool_group_from_env.
///
/// # Safety
///
/// `directory` is NULL (an error) or a C string, `group` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_group_in_directory(
    rank: u32,
    world: u32,
    directory: *const c_char,
    timeout: f64,
    group: *mut symmpool_group,
) -> Status {
    status(|| {
        // SAFETY: the caller promised that `group` is NULL or can be written to.
        let out = unsafe { Out::new(group, "group") }?;
        // SAFETY: the caller promised that `directory` is NULL or a C string that lives until the call returns.
        let directory = unsafe { text(directory, "directory") }?;
        let timeout = seconds(timeout, "timeout")?;
        let store = Arc::new(FileStore::open(directory)?);
        out.put(GROUPS.insert(Group::new(rank, world, store)?.with_timeout(timeout)));
        Ok(())
    })
}

/// This process's rank in `group`, from 0, and the number of ranks. Either may be NULL.
///
/// # Safety
///
/// `rank` and `world` are NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_group_size(
    group: symmpool_group,
    rank: *mut u32,
    world: *mut u32,
) -> Status {
    status(|| {
        let group = GROUPS.get(group)?;
        for (out, value) in [(rank, group.rank()), (world, group.world())] {
            if !out.is_null() {
                // SAFETY: the caller promised that `out` is NULL or can be written to.
                unsafe { Out::new(out, "rank or world") }?.put(value);
            }
        }
        Ok(())
    })
}

/// Destroys a group. Pools that were made with it keep what they need.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_group_destroy(group: symmpool_group) -> Status {
    status(|| GROUPS.remove(group))
}
