"""Matmuls that are added up over all ranks, on every one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from symmpool.communicators.tensors import to_read
from symmpool.errors import InvalidArgumentError, UnsupportedError
from symmpool.fused import pipeline, tensor_cores
from symmpool.fused.entry import entry_for, is_pipelined
from symmpool.fused.matmul_scatter import parts_of
from symmpool.fused.matmuls import Matmul, check_left, check_reduce, check_right, fingerprint

if TYPE_CHECKING:
    from symmpool.groups.types import GroupLike

__all__ = ["ALGORITHMS", "matmul_all_reduce"]

#: Ways to make a matmul and add it up.
ALGORITHMS = ("auto", "separate", "one_kernel")
# A matmul of no more bytes is added up as a whole, which is faster than in parts: measured on two H200s.
_SHORT_SUM = 16 << 20
# Rows and columns of matmuls of two ranks that one kernel makes and adds up no slower than two do. More
# columns than these are two waves of its tiles on 132 SMs, and few columns leave SMs without one: measured on
# two H200s.
_FEW_ROWS, _MAX_COLUMNS, _MIN_COLUMNS = 16, 66 * 128, 3072


def matmul_all_reduce(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, group: GroupLike, *, algorithm: str = "auto"
) -> torch.Tensor:
    """The sum (or with "avg" the mean) of all ranks' `A @ B`, on every rank; A has the shape (..., K) and B
    (K, N). All ranks get the same bits, and pass the same algorithm:

    - "separate": a matmul, and an all-reduce.
    - "one_kernel": both in one kernel, which sends columns while it makes others. For up to 64 rows of
      float16 or bfloat16 and a multiple of 8 columns, on CUDA devices of compute capability 9.0.
    - "auto": "one_kernel" where it serves a matmul of two ranks of up to 8448 columns, and of up to 16 rows
      or at least 3072 columns. On CUDA, where a matmul has more than 16 MiB and the rows divide among the
      ranks, each rank adds up its share of them as `fused_matmul_reduce_scatter` does, and copy engines
      gather the sums. Else "separate".

    Raises InvalidArgumentError for what does not fit, and then DivergedError on the other ranks;
    UnsupportedError where "one_kernel" does not serve the matmul."""
    name = "matmul_all_reduce"

    def check(world: int) -> None:
        check_reduce(name, reduce_op)
        check_left(name, "A", A, 0, "A")
        check_right(name, "B", Matmul(B), A, A.shape[-1])
        if algorithm not in ALGORITHMS:
            raise InvalidArgumentError(f"{name}: algorithm: {algorithm!r} is none of {', '.join(ALGORITHMS)}")

    entry = entry_for(name, A, group, check)
    world = entry.comm.world
    with entry.preparing():
        A, B = to_read(f"{name}: A", A), to_read(f"{name}: B", B)
        rows = A.flatten(0, -2)
        shape = (*A.shape[:-1], B.shape[1])
        matmul = Matmul(B)
        is_one_wanted = algorithm == "one_kernel" or (
            algorithm == "auto" and _is_faster_in_one(world, rows, B)
        )
        is_short = rows.shape[0] * B.shape[1] * A.itemsize <= _SHORT_SUM
        is_whole = algorithm == "separate" or is_short or rows.shape[0] % world != 0
        is_whole = is_whole or not is_pipelined(rows, world)
    if is_one_wanted and tensor_cores.serves_small_m(entry, rows, matmul):
        return tensor_cores.multiply_all_reduce(entry, rows, matmul, reduce_op).view(shape)
    with entry.preparing():
        if algorithm == "one_kernel":
            found = f"{rows.shape[0]} rows of {rows.dtype} and {B.shape[1]} columns on {rows.device}"
            raise UnsupportedError(
                f"{name}: algorithm: one kernel does not serve {found}; it takes up to "
                f"{tensor_cores.MAX_SMALL_M} rows of float16 or bfloat16 and a multiple of 8 columns, for "
                "which a group's inbox has room, on CUDA devices of compute capability 9.0; pass "
                '"auto"'
            )
        if is_whole:
            made = torch.mm(rows, B)
    if is_whole:
        # Ranks compare sizes and types in the all-reduce: a handshake of its own would cost as much as a sum.
        entry.run(entry.comm.all_reduce, (made, reduce_op), [], False)
        return made.view(shape)
    with entry.preparing():
        part = rows.shape[0] // world
        by_tensor_cores = tensor_cores.serves_sum(entry, [A], None, [matmul], part, A.dtype)
        rest = fingerprint(shape, reduce_op, by_tensor_cores)
        call = pipeline.MatmulCall(entry, name, A, (rows.shape[0], 0, B.shape[1]), rest)
        parts = [] if by_tensor_cores else list(parts_of(rows, None, matmul, world, False))
        batch = [rows[None]]
    if by_tensor_cores:
        share = tensor_cores.multiply_scatter(call, batch, None, [matmul], A.dtype, reduce_op)
    else:
        share = pipeline.multiply_scatter(call, parts, A.dtype, reduce_op)
    with entry.preparing():
        found = share.new_empty((world, *share.shape))
        sizes = (share.shape[0], share.shape[1], 0)
        gather = pipeline.MatmulCall(entry, "_low_contention_all_gather", share, sizes, fingerprint(shape))
    pipeline.pull_all(gather, [share] * world, found)
    return found.view(shape)


def _is_faster_in_one(world: int, rows: torch.Tensor, right: torch.Tensor) -> bool:
    columns = right.shape[1]
    is_wide = columns >= _MIN_COLUMNS or rows.shape[0] <= _FEW_ROWS
    return world == 2 and is_wide and columns <= _MAX_COLUMNS
