"""Products whose parts are added up over all ranks, by a kernel of our own on devices of compute capability
9.0.

The kernel makes the whole product, with the parts of other ranks first; copy engines carry these while the
next ones are made. What decides whether it runs is what all ranks pass alike, so they decide alike.
"""

from __future__ import annotations

from typing import Any

import torch

from symmpool._symmpool import _has_tensor_kernels, _matmul_memory, _multiply_scatter
from symmpool.errors import TimeoutError
from symmpool.fused import workspace
from symmpool.fused.pipeline import Call
from symmpool.fused.products import DTYPES, Product

__all__ = ["multiply_scatter", "serves"]

_HALVES = (torch.float16, torch.bfloat16)
# Parts of fewer rows fill tiles of 128 rows, of which two are made at once, badly.
_LEAST_ROWS = 256
# Bytes by which matrices are addressed.
_ALIGNMENT = 16


def serves(
    entry: Any,
    left: torch.Tensor,
    scale: torch.Tensor | None,
    product: Product,
    rows: int,
    dtype: torch.dtype,
) -> bool:
    """Whether the kernel makes products of this kind: with parts of `rows` rows and results of `dtype`."""
    if not left.is_cuda or rows < _LEAST_ROWS or dtype not in _HALVES or left.shape[-1] == 0:
        return False
    if product.right.shape[1] * dtype.itemsize % _ALIGNMENT or product.right.shape[1] == 0:
        return False
    if product.is_scaled:
        is_plain = product.bias is None and product.result_scale is None and product.use_fast_accum
        factors = (scale, product.right_scale)
        single = all(each is not None and each.numel() == 1 for each in factors)
        e4m3 = left.dtype == product.right.dtype == torch.float8_e4m3fn
        fits = is_plain and single and e4m3
    else:
        fits = left.dtype == product.right.dtype == dtype
    return fits and _has_tensor_kernels(entry.comm)


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows are contiguous, and begin at multiples of 16 bytes."""
    size = matrix.itemsize
    pitch = matrix.stride(0) * size
    begins = matrix.data_ptr() % _ALIGNMENT == 0 and (matrix.shape[0] == 1 or pitch % _ALIGNMENT == 0)
    if begins and (matrix.stride(1) == 1 or matrix.shape[1] == 1) and pitch >= matrix.shape[1] * size:
        return matrix
    columns = -(-matrix.shape[1] * size // _ALIGNMENT) * _ALIGNMENT // size
    padded = matrix.new_empty((matrix.shape[0], columns))
    padded[:, : matrix.shape[1]].copy_(matrix)
    return padded[:, : matrix.shape[1]]


def _pitch(matrix: torch.Tensor) -> int:
    """Bytes from one row to the next, where a single row has any."""
    least = -(-matrix.shape[1] * matrix.itemsize // _ALIGNMENT) * _ALIGNMENT
    return least if matrix.shape[0] == 1 else matrix.stride(0) * matrix.itemsize


def multiply_scatter(
    call: Call,
    left: torch.Tensor,
    scale: torch.Tensor | None,
    product: Product,
    dtype: torch.dtype,
    reduce_op: str,
) -> torch.Tensor:
    """This rank's part of the sum, or with "avg" the mean, of all ranks' products; parts are ranges of rows.
    It runs on the current stream."""
    entry, world = call.entry, call.world
    rows, columns = left.shape[0] // world, product.right.shape[1]
    parts_bytes, control_bytes = _matmul_memory(rows, columns, world)
    memory = call.reserve(parts_bytes, control_bytes)
    left = _aligned(left)
    # A row in memory is one of the matrix, or a column of it.
    by_rows = product.right.stride(1) == 1 and not product.is_scaled
    right = _aligned(product.right if by_rows else product.right.t())
    out = torch.empty((rows, columns), dtype=dtype, device=call.device)
    factors = (scale, product.right_scale) if product.is_scaled else (None, None)
    # A number of another type, such as a scale on the CPU, becomes one that the kernel reads.
    factors = tuple(each if each is None else each.to(call.device, torch.float32) for each in factors)
    try:
        _multiply_scatter(
            entry.comm,
            (DTYPES[left.dtype], DTYPES[dtype]),
            (left.data_ptr(), _pitch(left)),
            (right.data_ptr(), _pitch(right), by_rows),
            (out.data_ptr(), columns * dtype.itemsize),
            tuple(0 if each is None else each.data_ptr() for each in factors),
            (rows, left.shape[1], columns),
            reduce_op == "avg",
            (memory.data_ptr(), workspace.control_of(entry).data_ptr()),
            call.described[3],
        )
    except TimeoutError as error:
        entry.explain(error)
        raise
    return out
