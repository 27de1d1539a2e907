//! The steps of fused matmuls, for the package `symmpool.fused`, which puts the products themselves on
//! streams between them.

#![allow(unsafe_code)] // passes on addresses that tensors gave

use pyo3::prelude::*;
use symmpool_allocator::Error;
use symmpool_collectives::{
    DType, MatmulAllReduce, MatmulGather, MatmulKind, MatmulScatter, MatmulShape, MatmulTerm,
    MatrixView, RightMatrix,
};

use crate::communicator::Communicator;
use crate::reading::Refusal;
use crate::stream::from_handle;

/// The ends of a copy, which are only handed on to it.
struct Ends(*mut u8, *const u8);

// SAFETY: the addresses are only handed on to a call, whose contract says who may touch what they point to.
unsafe impl Send for Ends {}

/// Opens a fused matmul of an operator's name on the current stream. `sizes` are rows and columns of the left matrix of
/// this rank, and the columns of all products; `rest` is a hash of all else that ranks
/// must pass alike.
#[pyfunction]
#[pyo3(name = "_begin_matmul")]
pub(crate) fn begin_matmul(
    py: Python<'_>,
    communicator: &Bound<'_, Communicator>,
    kind: &str,
    dtype: &str,
    sizes: (u64, u32, u32),
    rest: u64,
) -> PyResult<()> {
    let calls = communicator.get().calls();
    let stream = calls.stream(py, None)?;
    let found = named(kind, dtype).ok_or_else(|| {
        Refusal::Invalid(format!(
            "{kind} of {dtype}: it takes float32, float16, bfloat16, float8_e4m3fn and float8_e5m2"
        ))
    });
    let (kind, dtype) = calls.or_decline(py, stream, found)?;
    let (rows, inner, columns) = sizes;
    let shape = MatmulShape { kind, dtype, rows, inner, columns, rest };
    calls.run(py, || calls.comm.begin_matmul(&shape, &stream))
}

/// Fails the communicator where a fused matmul fails for a reason of this rank's behind its handshake, and notifies the other
/// ranks.
#[pyfunction]
#[pyo3(name = "_fail_matmul")]
pub(crate) fn fail_matmul(
    py: Python<'_>,
    communicator: &Bound<'_, Communicator>,
    why: String,
) -> PyResult<()> {
    let calls = communicator.get().calls();
    let stream = calls.stream(py, None)?;
    let why = Error::invalid_state(why);
    py.detach(|| calls.comm.fail_matmul(why, &stream));
    Ok(())
}

/// Copies `bytes` bytes of this rank at `src` to where a peer has what this rank has at `dst`, by a copy engine, and tells the
/// peer so in a step if one is given. The caller keeps the memory alive until `stream`, a raw handle, is past it.
#[pyfunction]
#[pyo3(name = "_push_step")]
pub(crate) fn push_step(
    py: Python<'_>,
    communicator: &Bound<'_, Communicator>,
    ends: (usize, usize, usize),
    to: (u32, Option<u32>),
    stream: u64,
) -> PyResult<()> {
    let calls = communicator.get().calls();
    let ((dst, src, bytes), stream) = (ends, from_handle(stream));
    let ends = Ends(dst as *mut u8, src as *const u8);
    calls.run(py, move || {
        let ends = ends;
        let (peer, step) = to;
        match step {
            // SAFETY: the package passes tensors of the communicator's device of so many bytes, which it keeps alive.
            Some(step) => unsafe {
                calls.comm.push_step((ends.0, ends.1), bytes, (peer, step), &stream)
            },
            // SAFETY: the package passes tensors of the communicator's device of so many bytes, which it keeps alive.
            None => unsafe {
                calls.comm.put_by_copy_engine_at(ends.0, ends.1, bytes, peer, &stream)
            },
        }
    })
}

/// Copies `bytes` bytes from where a peer has what this rank has at `src` to `dst`, by a copy engine.
#[pyfunction]
#[pyo3(name = "_pull")]
pub(crate) fn pull(
    py: Python<'_>,
    communicator: &Bound<'_, Communicator>,
    ends: (usize, usize, usize),
    peer: u32,
    stream: u64,
) -> PyResult<()> {
    let calls = communicator.get().calls();
    let ((dst, src, bytes), stream) = (ends, from_handle(stream));
    let ends = Ends(dst as *mut u8, src as *const u8);
    calls.run(py, move || {
        let ends = ends;
        // SAFETY: the package passes tensors of the communicator's device of so many bytes, which it keeps alive.
        unsafe { calls.comm.get_by_copy_engine_at(ends.0, ends.1, bytes, peer, &stream) }
    })
}

/// Makes `stream` wait for a peer's step, if it `waits`; else tells the peer in a step what `stream` has done before.
#[pyfunction]
#[pyo3(name = "_step")]
pub(crate) fn step(
    py: Python<'_>,
    communicator: &Bound<'_, Communicator>,
    waits: bool,
    pair: (u32, u32),
    stream: u64,
) -> PyResult<()> {
    let calls = communicator.get().calls();
    let stream = from_handle(stream);
    calls.run(py, || match waits {
        true => calls.comm.await_step(pair, &stream),
        false => calls.comm.signal_step(pair, &stream),
    })
}

/// Whether [`multiply_scatter`] and [`gather_multiply`] have kernels for the communicator's device.
#[pyfunction]
#[pyo3(name = "_has_tensor_kernels")]
pub(crate) fn has_tensor_kernels(py: Python<'_>, communicator: &Bound<'_, Communicator>) -> bool {
    let calls = communicator.get().calls();
    // Another thread of this process may be in a call of the communicator, which waits for this one.
    py.detach(|| calls.comm.has_tensor_kernels())
}

/// Bytes of the memory of the pool through which parts of `rows` x `columns` elements travel, of memory for the kernel's own
/// sums, and of the memory of the pool in which calls keep their flags.
#[pyfunction]
#[pyo3(name = "_matmul_memory")]
pub(crate) fn matmul_memory(rows: usize, columns: usize, world: u32) -> (usize, usize, usize) {
    let parts = MatmulScatter::parts_bytes(rows, columns, world);
    (parts, MatmulScatter::SCRATCH_BYTES, MatmulScatter::CONTROL_BYTES)
}

/// A product that is added up: its left matrix, an address and bytes from one row and from one batch to the next; its right
/// matrix, an address and bytes from one row, or column, to the next; and the inner dimension.
type Term = ((u64, u64, u64), (u64, u64), usize);

/// Multiplies matrices and adds up the parts of the products over all ranks, on the current stream. `out` is an address and
/// bytes from one row to the next; `sizes` are rows of a part, batches and columns; `memory` is the parts and the flags, at
/// the same place of the pool on all ranks; `scratch` the memory for sums and its bytes.
#[pyfunction]
#[pyo3(name = "_multiply_scatter")]
#[expect(clippy::too_many_arguments, reason = "they are what a product has")]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 makes lists of its own")]
pub(crate) fn multiply_scatter(
    py: Python<'_>,
    communicator: &Bound<'_, Communicator>,
    dtypes: (&str, &str),
    terms: Vec<Term>,
    right_by_rows: bool,
    out: (u64, u64),
    scales: (u64, u64),
    sizes: (usize, usize, usize),
    mean: bool,
    memory: (u64, u64),
    scratch: (u64, usize),
    rest: u64,
) -> PyResult<()> {
    let calls = communicator.get().calls();
    let stream = calls.stream(py, None)?;
    let (dtype, out_dtype) = calls.or_decline(py, stream, types_named(dtypes))?;
    let terms: Vec<MatmulTerm> = terms
        .iter()
        .map(|&(left, right, inner)| MatmulTerm {
            left: rows_at((left.0, left.1)),
            batch_pitch: left.2,
            right: rows_at(right),
            inner,
        })
        .collect();
    let gemm = MatmulScatter {
        dtype,
        out_dtype,
        terms: &terms,
        right_by_rows,
        out: rows_at(out),
        scales,
        rows: sizes.0,
        batches: sizes.1,
        columns: sizes.2,
        mean,
        parts: memory.0,
        control: memory.1,
        scratch,
    };
    // SAFETY: the package passes tensors of the communicator's device of these sizes, which it keeps alive, and memory of
    // the group's pool that its calls alone use.
    calls.run(py, move || unsafe { calls.comm.matmul_reduce_scatter_at(&gemm, rest, &stream) })
}

/// Whether [`multiply_all_reduce`] has memory for products of so many rows and columns.
#[pyfunction]
#[pyo3(name = "_has_room_for_matmul")]
pub(crate) fn has_room_for_matmul(
    py: Python<'_>,
    communicator: &Bound<'_, Communicator>,
    rows: usize,
    columns: usize,
) -> bool {
    let calls = communicator.get().calls();
    // Another thread of this process may be in a call of the communicator, which waits for this one.
    py.detach(|| calls.comm.has_room_for_matmul(rows, columns))
}

/// Takes memory for such products, where the communicator's memory grows, and says whether there is room then. A call like any
/// other, on the current stream.
#[pyfunction]
#[pyo3(name = "_make_room_for_matmul")]
pub(crate) fn make_room_for_matmul(
    py: Python<'_>,
    communicator: &Bound<'_, Communicator>,
    dtype: &str,
    rows: usize,
    columns: usize,
) -> PyResult<bool> {
    let calls = communicator.get().calls();
    let stream = calls.stream(py, None)?;
    let (dtype, _) = calls.or_decline(py, stream, types_named((dtype, dtype)))?;
    calls.run(py, || calls.comm.make_room_for_matmul(dtype, (rows, columns), &stream))
}

/// Multiplies matrices, of which the left one has few rows, and adds up the products of all ranks, on the current stream.
/// Matrices are as those of [`multiply_scatter`], and `out` is an address; `sizes` are rows, the inner dimension and columns.
#[pyfunction]
#[pyo3(name = "_multiply_all_reduce")]
#[expect(clippy::too_many_arguments, reason = "they are what a product has")]
pub(crate) fn multiply_all_reduce(
    py: Python<'_>,
    communicator: &Bound<'_, Communicator>,
    dtype: &str,
    left: (u64, u64),
    right: (u64, u64),
    right_by_rows: bool,
    out: u64,
    sizes: (usize, usize, usize),
    mean: bool,
) -> PyResult<()> {
    let calls = communicator.get().calls();
    let stream = calls.stream(py, None)?;
    let (dtype, _) = calls.or_decline(py, stream, types_named((dtype, dtype)))?;
    let (rows, inner, columns) = sizes;
    let (left, right) = (rows_at(left), rows_at(right));
    let gemm =
        MatmulAllReduce { dtype, left, right, right_by_rows, out, rows, inner, columns, mean };
    // SAFETY: the package passes matrices of these sizes on the communicator's device, which it keeps alive until the
    // work is done.
    calls.run(py, move || unsafe { calls.comm.matmul_all_reduce_at(&gemm, 0, &stream) })
}

/// Returns the memory that [`matmul_memory`] does, for `rows` rows of `inner` columns that are gathered from each
/// rank.
#[pyfunction]
#[pyo3(name = "_gather_memory")]
pub(crate) fn gather_memory(
    py: Python<'_>,
    dtype: &str,
    rows: usize,
    inner: usize,
    world: u32,
) -> PyResult<(usize, usize, usize)> {
    let (dtype, _) = types_named((dtype, dtype)).map_err(|why| why.raise(py))?;
    let slots = MatmulGather::slots_bytes(dtype, rows, inner, world);
    Ok((slots, MatmulGather::SCRATCH_BYTES, MatmulGather::CONTROL_BYTES))
}

/// A right matrix: its address and bytes from one row, or column, to the next, and its columns; its product's address and
/// bytes; and its scale.
type Right = ((u64, u64), usize, (u64, u64), u64);

/// Gathers the rows of all ranks and multiplies them, on the current stream. `left` is this rank's rows and their scale;
/// `sizes` are rows of each rank, batches and the inner dimension; `memory` is where gathered rows go or 0, and what rows travel through
/// and the flags, at the same place of the pool on all ranks; `scratch` is as there.
#[pyfunction]
#[pyo3(name = "_gather_multiply")]
#[expect(clippy::too_many_arguments, reason = "they are what a product has")]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 makes lists of its own")]
pub(crate) fn gather_multiply(
    py: Python<'_>,
    communicator: &Bound<'_, Communicator>,
    dtypes: (&str, &str),
    left: (u64, u64, u64),
    rights: Vec<Right>,
    right_by_rows: bool,
    sizes: (usize, usize, usize),
    memory: (u64, u64, u64),
    scratch: (u64, usize),
    rest: u64,
) -> PyResult<()> {
    let calls = communicator.get().calls();
    let stream = calls.stream(py, None)?;
    let (dtype, out_dtype) = calls.or_decline(py, stream, types_named(dtypes))?;
    let rights: Vec<RightMatrix> = rights
        .iter()
        .map(|&(right, columns, out, scale)| RightMatrix {
            right: rows_at(right),
            columns,
            out: rows_at(out),
            scale,
        })
        .collect();
    let gemm = MatmulGather {
        dtype,
        out_dtype,
        left: rows_at((left.0, left.1)),
        left_scale: left.2,
        rights: &rights,
        right_by_rows,
        rows: sizes.0,
        batches: sizes.1,
        inner: sizes.2,
        gathered: memory.0,
        slots: memory.1,
        control: memory.2,
        scratch,
    };
    // SAFETY: the package passes matrices and memory of these sizes on the communicator's device, which it keeps
    // alive until the work is done.
    calls.run(py, move || unsafe { calls.comm.all_gather_matmul_at(&gemm, rest, &stream) })
}

/// Ends the threads that watch streams' waits: the program is ending.
#[pyfunction]
#[pyo3(name = "_end_watching")]
pub(crate) fn end_watching() {
    symmpool_collectives::end_watching();
}

fn named(kind: &str, dtype: &str) -> Option<(MatmulKind, DType)> {
    Some((MatmulKind::named(kind)?, dtype_named(dtype)?))
}

/// A matrix by its address and bytes from one row to the next.
fn rows_at((begin, pitch): (u64, u64)) -> MatrixView {
    MatrixView { begin, pitch }
}

fn types_named((dtype, out): (&str, &str)) -> Result<(DType, DType), Refusal> {
    dtype_named(dtype)
        .zip(dtype_named(out))
        .ok_or_else(|| Refusal::Invalid(format!("a product of {dtype} with a result of {out}")))
}

fn dtype_named(dtype: &str) -> Option<DType> {
    Some(match dtype {
        "float32" => DType::F32,
        "float64" => DType::F64,
        "float16" => DType::F16,
        "bfloat16" => DType::Bf16,
        "float8_e4m3fn" => DType::F8E4m3,
        "float8_e5m2" => DType::F8E5m2,
        _ => return None,
    })
}
