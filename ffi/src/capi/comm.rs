//! Communicators and collectives, in the C API.

use std::ffi::c_void;
use std::sync::Arc;

use symmpool_allocator::{Error, Result, Stream};
use symmpool_collectives::{Communicator, CommunicatorOptions, DType, ReduceOp};

use super::pool::{self, symmpool_pool};
use super::{Handles, Out, seconds};
use crate::guard::{Status, status};
use crate::on;

/// A handle of a communicator: collectives between the ranks of a pool. 0 is never a valid handle.
#[allow(non_camel_case_types)] // the name in C
pub type symmpool_comm = u64;

static COMMS: Handles<Communicator> = Handles::new("communicator");

/// Element types, for the `dtype` of collectives. The first ten can be reduced; the others are only moved.
/// The last five stand for any other element of that many bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum ElementType {
    F32 = 0,
    F64 = 1,
    F16 = 2,
    Bf16 = 3,
    I32 = 4,
    I64 = 5,
    U8 = 6,
    I8 = 7,
    F8E4m3 = 8,
    F8E5m2 = 9,
    Bool = 10,
    I16 = 11,
    U16 = 12,
    U32 = 13,
    U64 = 14,
    Complex32 = 15,
    Complex64 = 16,
    Complex128 = 17,
    F8E4m3Fnuz = 18,
    F8E5m2Fnuz = 19,
    F8E8m0 = 20,
    F4E2m1x2 = 21,
    Bytes1 = 22,
    Bytes2 = 23,
    Bytes4 = 24,
    Bytes8 = 25,
    Bytes16 = 26,
}

/// Reduction operations, for the `op` of collectives. Results have the same bits on every rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum Reduction {
    Sum = 0,
    Prod = 1,
    Min = 2,
    Max = 3,
    Avg = 4,
}

const OPS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg];

pub(super) fn find(comm: symmpool_comm) -> Result<Arc<Communicator>> {
    COMMS.get(comm)
}

/// Runs a collective. If this rank's arguments are refused, the other ranks get an error instead of waiting.
pub(super) fn call<A>(
    comm: symmpool_comm,
    stream: *mut c_void,
    arguments: impl FnOnce() -> Result<A>,
    run: impl FnOnce(&Communicator, A, &Stream) -> Result<()>,
) -> Status {
    status(|| {
        let comm = find(comm)?;
        // SAFETY: the caller of every collective promises this.
        let stream = unsafe { on(stream) };
        match arguments() {
            Ok(arguments) => run(&comm, arguments, &stream),
            Err(why) => Err(comm.decline(why, &stream)),
        }
    })
}

pub(super) fn dtype(value: u32) -> Result<DType> {
    let known = DType::all().nth(value as usize);
    known.ok_or_else(|| Error::invalid_argument(format!("dtype: {value} is no element type")))
}

pub(super) fn op(value: u32) -> Result<ReduceOp> {
    let known = OPS.get(value as usize).copied();
    known.ok_or_else(|| Error::invalid_argument(format!("op: {value} is no reduction")))
}

/// The number of an element type.
pub(super) fn number_of(dtype: DType) -> u32 {
    DType::all().position(|each| each == dtype).unwrap_or(0) as u32
}

/// The number of a reduction.
pub(super) fn number_of_op(op: ReduceOp) -> u32 {
    OPS.iter().position(|each| *each == op).unwrap_or(0) as u32
}

/// Refuses a NULL pointer to more than 0 elements.
fn filled(pointer: *const c_void, count: usize, name: &str) -> Result<()> {
    if pointer.is_null() && count > 0 {
        return Err(Error::invalid_argument(format!("{name} is NULL")));
    }
    Ok(())
}

/// The output and input of a collective, whose parts have `count` elements.
pub(super) fn ends(
    output: *mut c_void,
    input: *const c_void,
    count: usize,
) -> Result<(*mut u8, *const u8)> {
    ends_called(("output", output), ("input", input), count)
}

/// Checks the two ends of a call that has other names for them.
pub(super) fn ends_called(
    (to, output): (&str, *mut c_void),
    (from, input): (&str, *const c_void),
    count: usize,
) -> Result<(*mut u8, *const u8)> {
    filled(output, count, to)?;
    filled(input, count, from)?;
    Ok((output.cast(), input.cast()))
}

/// Creates a communicator of all ranks of `pool`. Collective: every rank creates its communicators in the
/// same order. `timeout` is how long its calls wait for a late rank, in seconds, or 0 for 30. If one rank's
/// arguments are refused, all ranks get an error, and the pool can be used again after symmpool_resync. Where ranks are on
/// several hosts, all get SYMMPOOL_STATUS_UNSUPPORTED, and the pool stays usable: only Rust and Python give communicators
/// what carries data between hosts.
///
/// # Safety
///
/// `comm` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_comm_create(
    pool: symmpool_pool,
    timeout: f64,
    comm: *mut symmpool_comm,
) -> Status {
    status(|| {
        let pool = pool::find(pool)?;
        let arguments = || {
            // SAFETY: the caller promised that `comm` is NULL or can be written to.
            let out = unsafe { Out::new(comm, "comm") }?;
            let mut options = CommunicatorOptions::default();
            if timeout != 0.0 {
                options.timeout = seconds(timeout, "timeout")?;
            }
            Ok((out, options))
        };
        let (out, options) = arguments().map_err(|why| Communicator::decline_new(&pool, why))?;
        out.put(COMMS.insert(Communicator::with_options(&pool, &options)?));
        Ok(())
    })
}

/// Changes how long this rank's calls wait for a late rank, in seconds. The call does not communicate with
/// other ranks. Calls that are running keep their timeout, and so does work that is on a CUDA stream already, or
/// captured in a graph. Another thread may be in a call.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_comm_set_timeout(comm: symmpool_comm, timeout: f64) -> Status {
    status(|| find(comm)?.set_timeout(seconds(timeout, "timeout")?))
}

/// Destroys a communicator. Ranks may do so at any time, without agreement.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_comm_destroy(comm: symmpool_comm) -> Status {
    status(|| COMMS.remove(comm))
}

/// Reduces `count` elements of every rank's `input` into every rank's `output`, which may be the
/// same address. The following holds for all collectives. Every rank calls them in the same order, with the same
/// arguments except for addresses. Memory in windows is used in place, other memory is copied. On CUDA the call
/// only enqueues work on `stream`, and errors of that work show in later calls or in symmpool_comm_synchronize.
/// Errors: DIVERGED if ranks have different arguments, TIMEOUT, PEER_LOST; after the last two, a peer that is
/// still in the call may continue to write into `output` until it has left the call.
///
/// # Safety
///
/// `input` can be read and `output` written for `count` elements by the CPU or, on CUDA, the device, and nobody
/// else accesses them until the work is done. `stream` is NULL or a stream that exists until
/// symmpool_comm_forget_stream, or as long as the communicator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_all_reduce(
    comm: symmpool_comm,
    output: *mut c_void,
    input: *const c_void,
    count: usize,
    dtype: u32,
    op: u32,
    stream: *mut c_void,
) -> Status {
    let arguments = || Ok((ends(output, input, count)?, self::dtype(dtype)?, self::op(op)?));
    call(comm, stream, arguments, |comm, ((output, input), dtype, op), stream| {
        // SAFETY: the caller promised that `input` can be read and `output` written for `count` elements until the
        // work is done.
        unsafe { comm.all_reduce_at(output, input, count, dtype, op, stream) }
    })
}

/// Reduces part r of every rank's `input` into rank r's `output` of `count` elements; the input has
/// one part for each rank.
///
/// # Safety
///
/// You must keep the promises of symmpool_all_reduce, for these lengths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_reduce_scatter(
    comm: symmpool_comm,
    output: *mut c_void,
    input: *const c_void,
    count: usize,
    dtype: u32,
    op: u32,
    stream: *mut c_void,
) -> Status {
    let arguments = || Ok((ends(output, input, count)?, self::dtype(dtype)?, self::op(op)?));
    call(comm, stream, arguments, |comm, ((output, input), dtype, op), stream| {
        // SAFETY: the caller promised that `input` can be read for `world * count` elements and `output` written for
        // `count` until the work is done.
        unsafe { comm.reduce_scatter_at(output, input, count, dtype, op, stream) }
    })
}

/// Copies rank r's `input` of `count` elements to part r of every rank's `output`.
///
/// # Safety
///
/// You must keep the promises of symmpool_all_reduce; `output` has one part for each rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_all_gather(
    comm: symmpool_comm,
    output: *mut c_void,
    input: *const c_void,
    count: usize,
    dtype: u32,
    stream: *mut c_void,
) -> Status {
    let arguments = || Ok((ends(output, input, count)?, self::dtype(dtype)?));
    call(comm, stream, arguments, |comm, ((output, input), dtype), stream| {
        // SAFETY: the caller promised that `input` can be read for `count` elements and `output` written for `world *
        // count` until the work is done.
        unsafe { comm.all_gather_at(output, input, count, dtype, stream) }
    })
}

/// Copies `count` elements of rank `root`'s `data` to every other rank's.
///
/// # Safety
///
/// You must keep the promises of symmpool_all_reduce, for `data` as input and output.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_broadcast(
    comm: symmpool_comm,
    data: *mut c_void,
    count: usize,
    dtype: u32,
    root: u32,
    stream: *mut c_void,
) -> Status {
    let arguments = || {
        filled(data, count, "data")?;
        self::dtype(dtype)
    };
    call(comm, stream, arguments, |comm, dtype, stream| {
        // SAFETY: the caller promised that `data` can be read and written for `count` elements until the work is
        // done.
        unsafe { comm.broadcast_at(data.cast(), count, dtype, root, stream) }
    })
}

/// Sends part r of `input` to rank r, where it becomes this rank's part of `output`. Both have one
/// part of `count` elements for each rank.
///
/// # Safety
///
/// You must keep the promises of symmpool_all_reduce, for these lengths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_all_to_all(
    comm: symmpool_comm,
    output: *mut c_void,
    input: *const c_void,
    count: usize,
    dtype: u32,
    stream: *mut c_void,
) -> Status {
    let arguments = || Ok((ends(output, input, count)?, self::dtype(dtype)?));
    call(comm, stream, arguments, |comm, ((output, input), dtype), stream| {
        // SAFETY: the caller promised that `input` can be read and `output` written for `world * count` elements
        // until the work is done.
        unsafe { comm.all_to_all_at(output, input, count, dtype, stream) }
    })
}

/// Sends `input_counts[r]` elements to rank r, and receives `output_counts[r]` from it. Parts lie in
/// rank order without gaps; any may be empty. Both arrays have an entry for each rank.
///
/// # Safety
///
/// You must keep the promises of symmpool_all_reduce, for the sums of the counts; the arrays can be read for as many
/// entries as there are ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_all_to_all_v(
    comm: symmpool_comm,
    output: *mut c_void,
    input: *const c_void,
    output_counts: *const usize,
    input_counts: *const usize,
    dtype: u32,
    stream: *mut c_void,
) -> Status {
    let world = find(comm).map_or(0, |comm| comm.world() as usize);
    let counts = |pointer: *const usize, name: &str| {
        if pointer.is_null() || !pointer.is_aligned() {
            return Err(Error::invalid_argument(format!("{name} is {pointer:p}")));
        }
        // SAFETY: the pointer is aligned and not NULL, and the caller promised that an entry for each rank can be
        // read from it.
        Ok(unsafe { std::slice::from_raw_parts(pointer, world) })
    };
    let arguments = || {
        let received = counts(output_counts, "output_counts")?;
        let sent = counts(input_counts, "input_counts")?;
        filled(output, received.iter().copied().max().unwrap_or(0), "output")?;
        filled(input, sent.iter().copied().max().unwrap_or(0), "input")?;
        Ok((received, sent, self::dtype(dtype)?))
    };
    call(comm, stream, arguments, |comm, (received, sent, dtype), stream| {
        let (output, input) = (output.cast(), input.cast());
        // SAFETY: the caller promised that `input` can be read and `output` written for the sums of these counts
        // until the work is done.
        unsafe { comm.all_to_all_v_at(output, input, received, sent, dtype, stream) }
    })
}

/// Returns, or on CUDA lets the work behind it on `stream` run, once every rank has called it. Errors as for
/// symmpool_all_reduce.
///
/// # Safety
///
/// `stream` is NULL or a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_barrier(comm: symmpool_comm, stream: *mut c_void) -> Status {
    call(comm, stream, || Ok(()), |comm, (), stream| comm.barrier(stream))
}

/// Waits until this rank's calls on `stream` are done, and returns their error if they failed.
///
/// # Safety
///
/// `stream` is NULL or a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_comm_synchronize(
    comm: symmpool_comm,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller promised that `stream` is NULL or a live stream.
    let stream = unsafe { on(stream) };
    status(|| find(comm)?.synchronize(&stream))
}

/// Makes the communicator forget a stream that is about to be destroyed: it does not use the stream any more unless a
/// call names it again. Work that is on the stream keeps its place in the order of calls. Ranks may call this at
/// different times. The pool remembers streams too: see symmpool_forget_stream. INVALID_STATE in a forked child, and
/// while the stream is being captured if the communicator's last call is on it.
///
/// # Safety
///
/// `stream` is NULL or a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_comm_forget_stream(
    comm: symmpool_comm,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller promised that `stream` is NULL or a live stream.
    let stream = unsafe { on(stream) };
    status(|| find(comm)?.forget_stream(&stream))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_type_has_its_number() {
        use ElementType as E;
        let ours = [
            E::F32,
            E::F64,
            E::F16,
            E::Bf16,
            E::I32,
            E::I64,
            E::U8,
            E::I8,
            E::F8E4m3,
            E::F8E5m2,
            E::Bool,
            E::I16,
            E::U16,
            E::U32,
            E::U64,
            E::Complex32,
            E::Complex64,
            E::Complex128,
            E::F8E4m3Fnuz,
            E::F8E5m2Fnuz,
            E::F8E8m0,
            E::F4E2m1x2,
            E::Bytes1,
            E::Bytes2,
            E::Bytes4,
            E::Bytes8,
            E::Bytes16,
        ];
        assert_eq!(ours.len(), DType::all().count());
        for ours in ours {
            let theirs = dtype(ours as u32).expect("an element type");
            assert_eq!(format!("{ours:?}"), format!("{theirs:?}"));
        }
        for value in [ours.len() as u32, u32::MAX] {
            assert!(dtype(value).expect_err("none").is_invalid_argument());
        }
    }
}
