//! Algorithms by name, in the C API: plans, calls that name one, and functions that choose.

use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

use symmpool_allocator::{Error, Result};
use symmpool_collectives::plan::Plan;
use symmpool_collectives::{
    Algorithm, CallShape, NativeKernel, Request, Selector, StandardCollective,
};

use super::comm::{call, dtype, ends, find, op, symmpool_comm};
use super::{Out, text};
use crate::guard::{Status, status};

/// A call as a function sees it that chooses its algorithm.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CallInfo {
    /// Bytes of the larger one of input and output.
    pub bytes: u64,
    /// A symmpool_dtype.
    pub dtype: u32,
    /// A symmpool_op; 0 for what does not reduce.
    pub op: u32,
    /// The number of ranks.
    pub world: u32,
    /// Whether the input and the output lie in windows.
    pub input_window: bool,
    /// See input_window.
    pub output_window: bool,
}

/// Chooses an algorithm for a call: returns its name, which must stay as it is until the function's next call, or NULL
/// to leave it open. `data` is what was given with the function.
#[allow(non_camel_case_types)] // the name in C
pub type symmpool_selector =
    Option<unsafe extern "C" fn(call: *const CallInfo, data: *mut c_void) -> *const c_char>;

/// The collective of a name.
///
/// # Safety
///
/// `name` is NULL or a C string.
unsafe fn collective(name: *const c_char) -> Result<StandardCollective> {
    // SAFETY: the caller promised that `name` is NULL or a C string that lives until the call returns.
    StandardCollective::parse(unsafe { text(name, "collective") }?)
}

/// Registers a plan with a communicator under the plan's name: calls of its collective can name it from now on, as
/// SYMMPOOL_ALL_REDUCE and the like can. `json` is a plan as symmpool.language saves it; it is proved before it is
/// registered. The call does not communicate with other ranks; all must have registered the same before a call names
/// it. INVALID_ARGUMENT for what is no plan, is wrong, is for another number of ranks, or has another one's name.
///
/// # Safety
///
/// `json` is NULL (an error) or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_comm_register_plan(
    comm: symmpool_comm,
    json: *const c_char,
) -> Status {
    status(|| {
        let comm = find(comm)?;
        // SAFETY: the caller promised that `json` is NULL or a C string that lives until the call returns.
        let plan = Plan::from_json(unsafe { text(json, "json") }?)?;
        let algorithm = Algorithm::from_plan(plan).map_err(|error| {
            Error::invalid_argument(format!("the plan is wrong ({}): {error}", error.kind.name()))
        })?;
        comm.register(algorithm)
    })
}

/// Registers a CUDA kernel with a communicator as an algorithm for a collective, under the kernel's name. `source` is CUDA
/// C++ with an extern "C" __global__ function called `kernel`, written against symmpool/device.cuh (docs/kernels.md). Peers
/// may access inputs and outputs, which calls must then pass as windows, if `input_window` and `output_window` say so;
/// `in_place` says that both may be one memory. `max_bytes` bounds the larger one of input and output, for kernels whose
/// data has to fit into an inbox: longer calls are UNSUPPORTED; 0 stands for any size. It has at most `blocks` thread blocks,
/// or as many as a call's size is worth if that is 0, of `threads` threads: 32, 64, 128, 256 or 512. Nothing is compiled
/// before a call needs it. Otherwise as symmpool_comm_register_plan. On a communicator in host memory calls of it are
/// UNSUPPORTED.
///
/// # Safety
///
/// `collective`, `kernel` and `source` are NULL (an error) or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_comm_register_kernel(
    comm: symmpool_comm,
    collective: *const c_char,
    kernel: *const c_char,
    source: *const c_char,
    input_window: bool,
    output_window: bool,
    in_place: bool,
    max_bytes: u64,
    blocks: u32,
    threads: u32,
) -> Status {
    status(|| {
        let comm = find(comm)?;
        // SAFETY: the caller promised that `collective` is NULL or a C string.
        let of = unsafe { self::collective(collective) }?;
        // SAFETY: the caller promised that `kernel` is NULL or a C string that lives until the call returns.
        let kernel = unsafe { text(kernel, "kernel") }?;
        // SAFETY: the caller promised that `source` is NULL or a C string that lives until the call returns.
        let source = unsafe { text(source, "source") }?;
        let blocks = (blocks > 0).then_some(blocks);
        comm.register(Algorithm::native(NativeKernel {
            input_window,
            output_window,
            in_place,
            max_bytes: (max_bytes > 0).then_some(max_bytes),
            blocks,
            threads,
            ..NativeKernel::new(of, kernel, source)
        })?)
    })
}

/// Makes a call of `collective` ("all_reduce", "reduce_scatter", "all_gather", "broadcast" or "all_to_all") as the
/// function of that name does, with the algorithm called `algorithm`, built in or registered; NULL chooses as that function
/// does. `op` matters to what reduces and `root` to a broadcast, whose data is at `output`; `input` may be NULL there.
///
/// # Safety
///
/// You must keep the promises of the collective's own function; `collective` and `algorithm` are NULL or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_collective(
    comm: symmpool_comm,
    collective: *const c_char,
    algorithm: *const c_char,
    output: *mut c_void,
    input: *const c_void,
    count: usize,
    dtype: u32,
    op: u32,
    root: u32,
    stream: *mut c_void,
) -> Status {
    let arguments = || {
        // SAFETY: the caller promised that `collective` is NULL or a C string.
        let of = unsafe { self::collective(collective) }?;
        let name = if algorithm.is_null() {
            None
        } else {
            // SAFETY: the caller promised that `algorithm` is NULL or a C string that lives until the call returns.
            Some(unsafe { text(algorithm, "algorithm") }?)
        };
        let input = if of == StandardCollective::Broadcast { output.cast_const() } else { input };
        let (output, input) = ends(output, input, count)?;
        Ok((of, name, output, input, self::dtype(dtype)?, self::op(op)?))
    };
    call(comm, stream, arguments, |comm, (of, name, output, input, dtype, op), stream| {
        // SAFETY: the caller promised that `input` can be read and `output` written for this collective's lengths
        // until the work is done.
        unsafe {
            comm.call(
                &Request::at(of, output, input, count, dtype).op(op).root(root).algorithm(name),
                stream,
            )
        }
    })
}

/// Writes the names of the algorithms that a communicator has for a collective to `names`, one in each line and with a NUL at the
/// end, as far as `capacity` bytes hold them, and how many bytes all need, the NUL included, to `length`.
///
/// # Safety
///
/// `collective` is NULL (an error) or a C string, `names` can be written to for `capacity` bytes, and `length` is NULL (an
/// error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_comm_algorithms(
    comm: symmpool_comm,
    collective: *const c_char,
    names: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> Status {
    status(|| {
        let comm = find(comm)?;
        // SAFETY: the caller promised that `collective` is NULL or a C string.
        let of = unsafe { self::collective(collective) }?;
        // SAFETY: the caller promised that `length` is NULL or can be written to.
        let length = unsafe { Out::new(length, "length") }?;
        if names.is_null() && capacity > 0 {
            return Err(Error::invalid_argument("names is NULL"));
        }
        let all = comm.algorithms();
        let of = all.iter().filter(|each| each.collective() == of.name());
        let mut list = of.map(Algorithm::name).collect::<Vec<_>>().join("\n").into_bytes();
        list.push(0);
        length.put(list.len());
        let fits = list.len().min(capacity);
        if let Some(last) = fits.checked_sub(1) {
            list[last] = 0;
        }
        // SAFETY: `names` can be written to for this many bytes, and is no memory of ours.
        unsafe { names.cast::<u8>().copy_from_nonoverlapping(list.as_ptr(), fits) };
        Ok(())
    })
}

/// Has a function choose the algorithm of calls of a collective that name none; NULL ends that. It must choose alike on
/// every rank: DIVERGED names those that differ. A name that is unknown or does not fit the call has it made as if NULL
/// was returned. The thread that makes a call calls it, outside of all locks; it must make no calls itself.
///
/// # Safety
///
/// `collective` is NULL (an error) or a C string; the function can be called with `data` from any thread until another one
/// takes its place or the communicator is destroyed and no call is under way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_comm_select(
    comm: symmpool_comm,
    collective: *const c_char,
    selector: symmpool_selector,
    data: *mut c_void,
) -> Status {
    status(|| {
        let comm = find(comm)?;
        // SAFETY: the caller promised that `collective` is NULL or a C string.
        let of = unsafe { self::collective(collective) }?;
        let selector = selector.map(|function| {
            let function = SelectorFunction { function, data };
            let choose = move |call: &CallShape| function.choose(call);
            Arc::new(choose) as Arc<dyn Selector>
        });
        comm.select(of, selector);
        Ok(())
    })
}

/// A selector of C.
struct SelectorFunction {
    function: unsafe extern "C" fn(*const CallInfo, *mut c_void) -> *const c_char,
    data: *mut c_void,
}

// SAFETY: the caller of symmpool_comm_select promised that any thread can call the function with this data.
unsafe impl Send for SelectorFunction {}
// SAFETY: `&Function` allows calls of the function alone, which any thread may make with this data, as above for
// `Send`.
unsafe impl Sync for SelectorFunction {}

impl SelectorFunction {
    fn choose(&self, call: &CallShape) -> Result<Option<String>> {
        let info = CallInfo {
            bytes: call.bytes,
            dtype: super::comm::number_of(call.dtype),
            op: call.op.map_or(0, super::comm::number_of_op),
            world: call.world,
            input_window: call.input_window,
            output_window: call.output_window,
        };
        // SAFETY: the caller of symmpool_comm_select promised that the function can be called with `data` while it is
        // registered; `info` outlives the call.
        let name = unsafe { (self.function)(&raw const info, self.data) };
        if name.is_null() {
            return Ok(None);
        }
        // SAFETY: not NULL, so a C string, which the function's contract promises.
        let name = unsafe { CStr::from_ptr(name) };
        let name = name.to_str().map_err(|_| {
            Error::invalid_argument(format!("the selector's name is not UTF-8: {name:?}"))
        })?;
        Ok(Some(name.to_owned()))
    }
}
