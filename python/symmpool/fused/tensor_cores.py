"""Fused matmuls by kernels of our own, on devices of compute capability 9.0: of the rows of all
ranks, or added up over all ranks.

A kernel makes a whole matmul, and copy engines carry what other ranks need of it, or send for it, meanwhile.
What decides whether it runs is what all ranks must pass alike, and they compare the decision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from symmpool._symmpool import (
    _gather_memory,
    _gather_multiply,
    _has_room_for_matmul,
    _has_tensor_kernels,
    _make_room_for_matmul,
    _matmul_memory,
    _multiply_all_reduce,
    _multiply_scatter,
)
from symmpool.fused import workspace
from symmpool.fused.matmuls import DTYPES, Matmul
from symmpool.fused.pipeline import MatmulCall

if TYPE_CHECKING:
    from symmpool.communicators.entry import CommunicatorEntry

__all__ = [
    "BATCH_ROWS",
    "MIN_ROWS",
    "MAX_SMALL_M",
    "MAX_MATMULS",
    "gather_multiply",
    "multiply_all_reduce",
    "multiply_scatter",
    "serves_all",
    "serves_small_m",
    "serves_sum",
]

_HALVES = (torch.float16, torch.bfloat16)
# Elements of a dimension that has none: rows of any type then begin at multiples of 16 bytes.
_FILLED = 16
#: Parts of fewer rows fill tiles of 128 rows, of which two are made at once, badly.
MIN_ROWS = 256
# Bytes by which matrices are addressed.
_ALIGNMENT = 16
#: Rows of a matmul that one kernel makes and adds up on every rank, at most.
MAX_SMALL_M = 64
#: Matmuls that a kernel makes at most.
MAX_MATMULS = 4
#: Of a rank's rows, each of several batches has a multiple of so many.
BATCH_ROWS = 128


def serves_sum(
    entry: CommunicatorEntry,
    lefts: Sequence[torch.Tensor],
    scale: torch.Tensor | None,
    matmuls: Sequence[Matmul],
    rows: int,
    dtype: torch.dtype,
) -> bool:
    """Whether one kernel makes the sum of these matmuls, with parts of `rows` rows and results of
    `dtype`."""
    if len(matmuls) > 1 and any(matmul.is_scaled for matmul in matmuls):
        return False
    if not 1 <= len(matmuls) <= MAX_MATMULS or len({_is_by_rows(matmul) for matmul in matmuls}) != 1:
        return False
    fit = (_fits(left, scale, matmul, rows, dtype) for left, matmul in zip(lefts, matmuls, strict=True))
    return all(fit) and _has_tensor_kernels(entry.comm)


def _fits(
    left: torch.Tensor, scale: torch.Tensor | None, matmul: Matmul, rows: int, dtype: torch.dtype
) -> bool:
    # Neither columns of a right matrix nor those of a left one that is not gathered decide, which ranks may
    # have in other numbers, also none.
    if not left.is_cuda or rows < MIN_ROWS or dtype not in _HALVES:
        return False
    if matmul.is_scaled:
        is_plain = matmul.bias is None and matmul.result_scale is None and matmul.use_fast_accum
        factors = (scale, matmul.right_scale)
        single = all(each is not None and each.numel() == 1 for each in factors)
        e4m3 = left.dtype == matmul.right.dtype == torch.float8_e4m3fn
        return is_plain and single and e4m3
    return left.dtype == matmul.right.dtype == dtype


def serves_all(
    entry: CommunicatorEntry,
    left: torch.Tensor,
    scale: torch.Tensor | None,
    matmuls: Sequence[Matmul],
    rows: int,
) -> bool:
    """Whether one kernel makes all of these matmuls, of so many rows of every rank's `left`."""
    alike = {(matmul.dtype_for(left), _is_by_rows(matmul)) for matmul in matmuls}
    if not 1 <= len(matmuls) <= MAX_MATMULS or len(alike) != 1:
        return False
    # Parts arrive one after the other. The tiles of a short one leave most SMs idle, and take as long as any,
    # so those of the last part would end late: measured on four H100s, with 512 rows of each rank.
    world = entry.comm.world
    if world > 2 and rows < MIN_ROWS * world:
        return False
    fit = (_fits(left, scale, matmul, rows, matmul.dtype_for(left)) for matmul in matmuls)
    return all(fit) and _has_tensor_kernels(entry.comm)


def serves_small_m(entry: CommunicatorEntry, rows: torch.Tensor, matmul: Matmul) -> bool:
    """Whether one kernel makes this matmul and adds it up on every rank. All ranks ask alike: it may take
    memory for it."""
    with entry.preparing():
        count, columns = rows.shape[0], matmul.right.shape[1]
        fit = rows.is_cuda and rows.dtype in _HALVES and matmul.right.dtype == rows.dtype
        if not fit or not 1 <= count <= MAX_SMALL_M or columns == 0 or columns % 8 != 0:
            return False
        if not _has_tensor_kernels(entry.comm):
            return False
        if _has_room_for_matmul(entry.comm, count, columns):
            return True
        dtype = DTYPES[rows.dtype]
    # A group that has had small calls only takes memory for it.
    return entry.run_function(_make_room_for_matmul, dtype, count, columns)


def _is_by_rows(matmul: Matmul) -> bool:
    """Whether a row in memory is one of the right matrix, and not a column of it."""
    return matmul.right.stride(1) == 1 and not matmul.is_scaled


def _right(matmul: Matmul) -> torch.Tensor:
    return _aligned(matmul.right if _is_by_rows(matmul) else matmul.right.t())


def _filled(matmul: Matmul, left: torch.Tensor) -> tuple[torch.Tensor, Matmul]:
    """A matmul with zeros in place of a dimension that has no elements on this rank. Others may have some,
    and kernels need them."""
    (inner, columns), by_rows = matmul.right.shape, _is_by_rows(matmul)
    if inner > 0 and columns > 0:
        return left, matmul
    shape = (inner or _FILLED, columns or _FILLED)
    right = matmul.right.new_zeros(shape if by_rows else shape[::-1])
    if inner == 0:
        left = left.new_zeros((*left.shape[:-1], _FILLED))
    return left, dataclasses.replace(matmul, right=right if by_rows else right.t())


def _whole(columns: int, itemsize: int) -> int:
    """Number of columns, rounded up so that rows begin at multiples of 16 bytes."""
    return -(-columns * itemsize // _ALIGNMENT) * _ALIGNMENT // itemsize


def _empty(rows: int, columns: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A matrix whose rows begin at multiples of 16 bytes."""
    whole = _whole(columns, dtype.itemsize)
    return torch.empty((rows, whole), dtype=dtype, device=like.device)[:, :columns]


def _is_aligned(matrix: torch.Tensor) -> bool:
    """Whether a matrix's rows are contiguous, and begin at multiples of 16 bytes."""
    size = matrix.itemsize
    pitch = matrix.stride(0) * size
    begins = matrix.data_ptr() % _ALIGNMENT == 0 and (matrix.shape[0] == 1 or pitch % _ALIGNMENT == 0)
    return begins and (matrix.stride(1) == 1 or matrix.shape[1] == 1) and pitch >= matrix.shape[1] * size


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix that is aligned: itself, or a copy."""
    if _is_aligned(matrix):
        return matrix
    rows, columns = matrix.shape
    return _empty(rows, columns, matrix, matrix.dtype).copy_(matrix)


def _aligned_batches(left: torch.Tensor) -> torch.Tensor:
    """Batches of rows, of each of which the matrix is aligned: itself, or a copy."""
    batches, rows, columns = left.shape
    pitch = left.stride(0) * left.itemsize
    # Batches that are one in memory, as those of an expanded tensor, are no rows for tensor maps.
    if _is_aligned(left[0]) and (batches == 1 or (pitch > 0 and pitch % _ALIGNMENT == 0)):
        return left
    return _aligned(left.reshape(batches * rows, columns)).unflatten(0, (batches, rows))


def _pitch(matrix: torch.Tensor) -> int:
    """Bytes from one row to the next, where a single row has any."""
    if matrix.shape[0] == 1:
        return _whole(matrix.shape[1], matrix.itemsize) * matrix.itemsize
    return matrix.stride(0) * matrix.itemsize


def _place(matrix: torch.Tensor) -> tuple[int, int]:
    return matrix.data_ptr(), _pitch(matrix)


class _Memory:
    """Memory of a call: what data travels through and what flags are in, both at one place of the pool on all
    ranks, and for sums of the kernel."""

    def __init__(self, call: MatmulCall, bytes: int, scratch: int, control: int) -> None:
        begin = _whole(bytes, 1)
        address = call.reserve(begin + scratch, control).data_ptr()
        self.places = (address, workspace.control_of(call.entry).data_ptr())
        self.scratch = (address + begin, scratch)


class _Scales:
    """Scales as the kernel reads them, which live as long as this: a number of another type, or on the CPU,
    is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kept: list[torch.Tensor] = []

    def address(self, scale: torch.Tensor | None) -> int:
        if scale is None:
            return 0
        self.kept.append(scale.to(self.device, torch.float32))
        return self.kept[-1].data_ptr()


@workspace.in_turn
def gather_multiply(
    call: MatmulCall,
    rows: torch.Tensor,
    batches: int,
    scale: torch.Tensor | None,
    matmuls: Sequence[Matmul],
    returns_rows: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """All ranks' rows, if they are wanted, and the matmuls of them, on the current stream. `rows` are
    contiguous. They have so many batches, of each of which results have the rows of all ranks; several
    batches have a multiple of `BATCH_ROWS` rows of each rank."""
    entry, world = call.entry, call.world
    count, inner = rows.shape
    kind = DTYPES[rows.dtype]
    memory = _Memory(call, *_gather_memory(kind, count, inner, world))
    with entry.preparing():
        left = _aligned(rows)
        dtype = matmuls[0].dtype_for(rows)
        scales = _Scales(call.device)
        columns = [matmul.right.shape[1] for matmul in matmuls]
        matmuls = [_filled(matmul, left)[1] for matmul in matmuls]
        rights = [_right(matmul) for matmul in matmuls]
        outs = [_empty(world * count, matmul.right.shape[1], rows, dtype) for matmul in matmuls]
        gathered = _empty(world * count, inner, rows, rows.dtype) if returns_rows else None
        described = [
            (_place(right), out.shape[1], _place(out), scales.address(matmul.right_scale))
            for matmul, right, out in zip(matmuls, rights, outs, strict=True)
        ]
        scale_address = scales.address(scale)
    entry.run_function(
        _gather_multiply,
        (kind, DTYPES[dtype]),
        (*_place(left), scale_address),
        described,
        _is_by_rows(matmuls[0]),
        (count, batches, inner),
        (0 if gathered is None else gathered.data_ptr(), *memory.places),
        memory.scratch,
        call.described[3],
    )
    found = [out[:, :wanted].contiguous() for out, wanted in zip(outs, columns, strict=True)]
    return None if gathered is None else gathered.contiguous(), found


@workspace.in_turn
def multiply_scatter(
    call: MatmulCall,
    lefts: Sequence[torch.Tensor],
    scale: torch.Tensor | None,
    matmuls: Sequence[Matmul],
    dtype: torch.dtype,
    reduce_op: str,
) -> torch.Tensor:
    """This rank's rows of the sum, or with "avg" the mean, of all ranks' sums of matmuls, on the current
    stream. Left matrices have the shape (batches, rows of all ranks, columns), and the result has the rows of
    one batch after the other. Where there are several batches, each rank has a multiple of `BATCH_ROWS` rows
    of each."""
    entry, world = call.entry, call.world
    batches, in_batch = lefts[0].shape[:2]
    rows, columns = batches * in_batch // world, matmuls[0].right.shape[1]
    memory = _Memory(call, *_matmul_memory(rows, columns, world))
    with entry.preparing():
        filled = [_filled(matmul, left) for matmul, left in zip(matmuls, lefts, strict=True)]
        lefts = [_aligned_batches(left) for left, _ in filled]
        rights = [_right(matmul) for _, matmul in filled]
        out = _empty(rows, columns, lefts[0], dtype)
        scales = _Scales(call.device)
        terms = [
            ((*_place(left[0]), left.stride(0) * left.itemsize), _place(right), left.shape[2])
            for left, right in zip(lefts, rights, strict=True)
        ]
        scale_addresses = (scales.address(scale), scales.address(matmuls[0].right_scale))
    entry.run_function(
        _multiply_scatter,
        (DTYPES[lefts[0].dtype], DTYPES[dtype]),
        terms,
        _is_by_rows(matmuls[0]),
        _place(out),
        scale_addresses,
        (rows, batches, columns),
        reduce_op == "avg",
        memory.places,
        memory.scratch,
        call.described[3],
    )
    return out.contiguous()


def multiply_all_reduce(
    entry: CommunicatorEntry, rows: torch.Tensor, matmul: Matmul, reduce_op: str
) -> torch.Tensor:
    """The sum, or with "avg" the mean, of all ranks' matmuls, where `serves_small_m` says so, on the current
    stream. Ranks compare types and sizes."""
    with entry.preparing():
        rows, filled = _filled(matmul, rows)
        left, right = _aligned(rows), _right(filled)
        out = rows.new_empty((rows.shape[0], matmul.right.shape[1]))
    entry.run_function(
        _multiply_all_reduce,
        DTYPES[left.dtype],
        _place(left),
        _place(right),
        _is_by_rows(filled),
        out.data_ptr(),
        (left.shape[0], left.shape[1], out.shape[1]),
        reduce_op == "avg",
    )
    return out
