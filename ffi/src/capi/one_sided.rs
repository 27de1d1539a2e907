//! One-sided operations, in the C API: copies and signals between two ranks.

use std::ffi::c_void;

use symmpool_allocator::{Error, Result};

use super::comm::{ends_called, find, symmpool_comm};
use super::seconds;
use crate::guard::{Status, status};
use crate::on;

/// Engine that carries out a one-sided operation on CUDA. In host memory it makes no difference.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum OneSidedEngine {
    /// A kernel, which occupies SMs.
    Kernel = 0,
    /// A copy engine for symmpool_put and symmpool_get, memory operations of the stream for symmpool_signal and
    /// symmpool_wait. They occupy no SM. A copy takes some microseconds more to start.
    WithoutSms = 1,
}

/// Whether an engine is the one without SMs.
fn without_sms(engine: u32) -> Result<bool> {
    match engine {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Error::invalid_argument(format!("engine: {engine} is no engine"))),
    }
}

/// Copies `bytes` bytes from `src` to the place in rank `peer`'s memory that corresponds to `dst`, which lies in
/// windows. `peer` may read them after it has received a later symmpool_signal of this thread or stream. In host memory
/// the copy is done when the call returns; on CUDA it is work on `stream`. `engine` is a symmpool_engine. Only this
/// rank calls it; the other ranks need not do anything. Errors: INVALID_ARGUMENT if there is no such rank or engine, or
/// if `dst` is in no window.
///
/// # Safety
///
/// `src` can be read for `bytes` bytes by the CPU or, on CUDA, the device, and nobody else writes there or accesses
/// the destination until the work is done. `stream` is as for symmpool_all_reduce.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_put(
    comm: symmpool_comm,
    dst: *mut c_void,
    src: *const c_void,
    bytes: usize,
    peer: u32,
    engine: u32,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller promised that `stream` is NULL or a live stream.
    let stream = unsafe { on(stream) };
    status(|| {
        let (comm, (dst, src)) = (find(comm)?, ends_called(("dst", dst), ("src", src), bytes)?);
        match without_sms(engine)? {
            // SAFETY: the caller promised that `src` can be read for `bytes` bytes, and that nobody writes there or
            // accesses the destination until the work is done.
            false => unsafe { comm.put_at(dst, src, bytes, peer, &stream) },
            // SAFETY: the caller promised that `src` can be read for `bytes` bytes, and that nobody writes there or
            // accesses the destination until the work is done.
            true => unsafe { comm.put_by_copy_engine_at(dst, src, bytes, peer, &stream) },
        }
    })
}

/// Copies `bytes` bytes to `dst` from the place in rank `peer`'s memory that corresponds to `src`, which lies in
/// windows. `peer` has written them before a symmpool_signal that this rank has received. Otherwise as symmpool_put,
/// with `src` in the place of `dst`.
///
/// # Safety
///
/// `dst` can be written to for `bytes` bytes by the CPU or, on CUDA, the device, and nobody else accesses it or writes
/// the source until the work is done. `stream` is as for symmpool_all_reduce.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_get(
    comm: symmpool_comm,
    dst: *mut c_void,
    src: *const c_void,
    bytes: usize,
    peer: u32,
    engine: u32,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller promised that `stream` is NULL or a live stream.
    let stream = unsafe { on(stream) };
    status(|| {
        let (comm, (dst, src)) = (find(comm)?, ends_called(("dst", dst), ("src", src), bytes)?);
        match without_sms(engine)? {
            // SAFETY: the caller promised that `dst` can be written to for `bytes` bytes, and that nobody accesses it
            // or writes the source until the work is done.
            false => unsafe { comm.get_at(dst, src, bytes, peer, &stream) },
            // SAFETY: the caller promised that `dst` can be written to for `bytes` bytes, and that nobody accesses it
            // or writes the source until the work is done.
            true => unsafe { comm.get_by_copy_engine_at(dst, src, bytes, peer, &stream) },
        }
    })
}

/// Signals rank `peer` on a channel from 0 to 15. What this thread or, on CUDA, `stream` did before is visible to
/// `peer` after its symmpool_wait with the same engine. Signals are counted. Those without SMs have channels of their
/// own, which on CUDA hold one signal each: the next one waits on the stream until the last was received. Errors:
/// INVALID_ARGUMENT if there is no such rank, channel or engine.
///
/// # Safety
///
/// `stream` is as for symmpool_all_reduce.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_signal(
    comm: symmpool_comm,
    peer: u32,
    channel: u32,
    engine: u32,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller promised that `stream` is NULL or a live stream.
    let stream = unsafe { on(stream) };
    status(|| {
        let comm = find(comm)?;
        match without_sms(engine)? {
            false => comm.signal(peer, channel, &stream),
            true => comm.signal_by_memory(peer, channel, &stream),
        }
    })
}

/// Receives the next signal of rank `peer` on a channel: waits for it for `timeout` seconds at most. In host memory the
/// calling thread waits, on CUDA `stream` does. Errors as for symmpool_signal, PEER_LOST, and TIMEOUT: in host memory
/// from this call, after which the communicator can be used; on CUDA from a later call, and all calls of the
/// communicator fail from then on.
///
/// # Safety
///
/// `stream` is as for symmpool_all_reduce.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_wait(
    comm: symmpool_comm,
    peer: u32,
    channel: u32,
    timeout: f64,
    engine: u32,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller promised that `stream` is NULL or a live stream.
    let stream = unsafe { on(stream) };
    status(|| {
        let (comm, timeout) = (find(comm)?, seconds(timeout, "timeout")?);
        match without_sms(engine)? {
            false => comm.wait(peer, channel, timeout, &stream),
            true => comm.wait_by_memory(peer, channel, timeout, &stream),
        }
    })
}
