"""Matmuls that are added up over all ranks, and whose sums leave while the rest is made. Names, arguments
and meaning are those of torch.ops.symm_mem, where it has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from symmpool.communicators.tensors import to_read
from symmpool.errors import InvalidArgumentError
from symmpool.fused import pipeline, tensor_cores
from symmpool.fused.arguments import wrong_lists
from symmpool.fused.entry import entry_for
from symmpool.fused.matmuls import (
    Matmul,
    aligned,
    check_alike,
    check_left,
    check_reduce,
    check_right,
    check_scales,
    fingerprint,
    rows_of,
)

if TYPE_CHECKING:
    from symmpool.groups.types import GroupLike

__all__ = [
    "fused_matmul_reduce_scatter",
    "fused_matmuls_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
    "parts_of",
]


# With more than two ranks copies of parts that are no larger take longer, one after the other, than a
# reduce-scatter by a kernel that uses all links at once: measured on four H100s and H200s.
_SHORT_PART = 4 << 20


def fused_matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group: GroupLike
) -> torch.Tensor:
    """This rank's part, along `scatter_dim`, of the sum (or with "avg" the mean) of all ranks' `A @ B`; A
    has the shape (..., K) and B (K, N). Ranks may have different K.

    On CUDA other ranks' parts are made first, and this rank's own while theirs arrive by copy engines; sums
    are added in float32. The rest is as in `fused_all_gather_matmul`."""
    name = "fused_matmul_reduce_scatter"
    return _matmul_scatter(name, [A], [Matmul(B)], None, reduce_op, scatter_dim, scatter_dim, None, group)


def fused_matmuls_reduce_scatter(
    As: Sequence[torch.Tensor], Bs: Sequence[torch.Tensor], reduce_op: str, scatter_dim: int, group: GroupLike
) -> torch.Tensor:
    """Works like `fused_matmul_reduce_scatter`, of the sum of matmuls `As[0] @ Bs[0] + As[1] @ Bs[1] + ...`,
    as the backward pass has it where several layers have one input. The `As` have the shapes (..., K) and the
    `Bs` (K, N), with a K for each matmul; the matmuls have one shape.

    On devices of compute capability 9.0 one kernel makes the sums of up to 4 matmuls of float16 or bfloat16,
    in float32, if the `Bs` lie in memory alike, each rank gets 256 rows or more and, of more than two ranks,
    more than 4 MiB. Ranks may then pass different numbers of matmuls. Elsewhere each matmul is
    rounded, and they are added in their order; ranks with one matmul and ranks with several get a
    DivergedError then, on CUDA."""
    name = "fused_matmuls_reduce_scatter"
    wrong = wrong_lists(As=As) or wrong_lists(Bs=Bs)
    if wrong is None and not As:
        wrong = "As: an empty list; it must have a tensor"
    lefts = [None] if wrong else As
    matmuls = [] if wrong else [Matmul(B) for B in Bs]
    dims = (scatter_dim, scatter_dim)
    return _matmul_scatter(name, lefts, matmuls, None, reduce_op, *dims, None, group, wrong)


def fused_scaled_matmul_reduce_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group: GroupLike,
    output_shape: Sequence[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Works like `fused_matmul_reduce_scatter`, for 8-bit floats with scales. `A_scale` is one number, or has
    one for each row of A. `output_shape` is that of the matmul before it is scattered along
    `orig_scatter_dim`; A may have fewer dimensions, of which `scatter_dim_after_maybe_reshape` is the same
    one."""
    name = "fused_scaled_matmul_reduce_scatter"
    matmul = Matmul(B, B_scale, bias, result_scale, out_dtype, use_fast_accum)
    dims = (orig_scatter_dim, scatter_dim_after_maybe_reshape)
    more = (output_shape, group)
    return _matmul_scatter(name, [A], [matmul], A_scale, reduce_op, *dims, *more, is_scaled=True)


def _matmul_scatter(
    name: str,
    As: Sequence[Any],
    matmuls: Sequence[Matmul],
    scale: torch.Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    dim_of_A: int,
    output_shape: Sequence[int] | None,
    group: GroupLike,
    wrong: str | None = None,
    is_scaled: bool = False,
) -> torch.Tensor:
    def check(world: int) -> None:
        if wrong is not None:
            raise InvalidArgumentError(f"{name}: {wrong}")
        check_reduce(name, reduce_op)
        if len(As) != len(matmuls):
            raise InvalidArgumentError(
                f"{name}: {len(As)} As and {len(matmuls)} Bs; it takes as many of both"
            )
        for nth, (left, right) in enumerate(zip(As, matmuls, strict=True)):
            which = (_nth("A", nth, As), _nth("B", nth, As))
            check_left(name, which[0], left, dim_of_A, "scatter_dim")
            if is_scaled:
                check_scales(name, which, left, right, scale)
            check_right(name, which[1], right, left, left.shape[-1])
            check_alike(name, which, (left, right), (As[0], matmuls[0]))
        A, matmul = As[0], matmuls[0]
        whole = _matmul_shape(A, matmul, output_shape)
        if rows_of(whole) != rows_of(A.shape) or whole[-1] != matmul.right.shape[1]:
            raise InvalidArgumentError(
                f"{name}: output_shape: {tuple(whole)} is no shape of a product of {rows_of(A.shape)} x "
                f"{matmul.right.shape[1]} elements"
            )
        if not isinstance(scatter_dim, int) or not 0 <= scatter_dim < len(whole):
            raise InvalidArgumentError(f"{name}: scatter_dim: {scatter_dim!r} is none of {tuple(whole)}")
        if whole[scatter_dim] % world:
            raise InvalidArgumentError(
                f"{name}: scatter_dim: dimension {scatter_dim} of {tuple(whole)} is not for {world} ranks"
            )
        if scale is not None and scale.numel() != 1 and list(scale.shape) != [*A.shape[:-1], 1]:
            raise InvalidArgumentError(
                f"{name}: A_scale: shape {tuple(scale.shape)}; it must have 1 element, or shape "
                f"{(*A.shape[:-1], 1)}"
            )

    entry = entry_for(name, As[0], group, check)
    with entry.preparing():
        several = len(As) > 1
        As = [to_read(f"{name}: As[{nth}]" if several else f"{name}: A", A) for nth, A in enumerate(As)]
        matmuls = [each.in_memory(name, f"Bs[{nth}]" if several else "B") for nth, each in enumerate(matmuls)]
        scale = None if scale is None else to_read(f"{name}: A_scale", scale)
        A, matmul = As[0], matmuls[0]
        world = entry.comm.world
        whole = _matmul_shape(A, matmul, output_shape)
        dtype = matmul.dtype_for(A)
        is_last = scatter_dim == len(whole) - 1
        part = list(whole)
        part[scatter_dim] //= world
        is_short = math.prod(part) == 0 or (world > 2 and math.prod(part) * dtype.itemsize <= _SHORT_PART)
        by_tensor_cores = (
            world > 1
            and not is_last
            and not is_short
            and tensor_cores.serves_sum(entry, As, scale, matmuls, math.prod(part[:-1]), dtype)
        )
        by_parts = A.is_cuda and world > 1 and not is_short and len(As) == 1 and not by_tensor_cores
        scales = scale
        if scale is not None and scale.numel() != 1:
            scales = scale.reshape(*whole[:-1], 1)
            scales = (scales if is_last else scales.movedim(scatter_dim, 0)).reshape(-1, 1)
        elif scale is not None:
            scales = scale.reshape(())
        lefts = [left.reshape(*whole[:-1], left.shape[-1]) for left in As]
        batches = math.prod(whole[:scatter_dim])
        in_batch = math.prod(part[scatter_dim:-1])
        in_batches = by_tensor_cores and (batches == 1 or in_batch % tensor_cores.BATCH_ROWS == 0)
        if in_batches:
            lefts = [left.reshape(batches, in_batch * world, left.shape[-1]) for left in lefts]
        else:
            if not is_last:
                lefts = [left.movedim(scatter_dim, 0) for left in lefts]
            lefts = [left.reshape(rows_of(left.shape), left.shape[-1]) for left in lefts]
        rest = fingerprint(tuple(whole), scatter_dim, str(dtype), reduce_op, by_tensor_cores, by_parts)
        sizes = (rows_of(whole), 0, whole[-1])
        call = pipeline.MatmulCall(entry, "fused_matmul_reduce_scatter", A, sizes, rest)
    if in_batches:
        return tensor_cores.multiply_scatter(call, lefts, scales, matmuls, dtype, reduce_op).view(part)
    if by_tensor_cores:
        one_batch = [left[None] for left in lefts]
        found = tensor_cores.multiply_scatter(call, one_batch, scales, matmuls, dtype, reduce_op)
    elif by_parts:
        with entry.preparing():
            parts = list(parts_of(lefts[0], scales, matmul, world, is_last))
        found = pipeline.multiply_scatter(call, parts, dtype, reduce_op)
    else:
        call.begin(0)
        with entry.preparing():
            made = matmul.make(lefts[0], scales, None)
            for left, right in zip(lefts[1:], matmuls[1:], strict=True):
                made += right.make(left, None, None)
            if is_last:
                made = made.view(made.shape[0], world, made.shape[1] // world).movedim(1, 0)
            found = made.new_empty((made.numel() // world,))
            given = made.reshape(-1).contiguous()
        entry.run(entry.comm.reduce_scatter_tensor, (found, given, reduce_op), [], False)
    if is_last:
        return found.view(part)
    front = [part[scatter_dim], *part[:scatter_dim], *part[scatter_dim + 1 :]]
    return found.view(front).movedim(0, scatter_dim).contiguous()


def _nth(which: str, nth: int, of: Sequence[Any]) -> str:
    """Name of an argument of which there may be several."""
    return which if len(of) == 1 else f"{which}s[{nth}]"


def _matmul_shape(A: torch.Tensor, matmul: Matmul, output_shape: Sequence[int] | None) -> list[int]:
    return list(output_shape) if output_shape is not None else [*A.shape[:-1], matmul.right.shape[1]]


def parts_of(rows: torch.Tensor, scales: Any, matmul: Matmul, world: int, is_last: bool) -> Any:
    """Left rows, their scales and the right matrix of each rank's part."""
    is_per_row = scales is not None and scales.numel() > 1
    if is_last:
        columns = matmul.right.shape[1] // world
        for each in range(world):
            yield rows, scales, matmul.columns(each * columns, (each + 1) * columns)
        return
    count = rows.shape[0] // world
    for each in range(world):
        here = slice(each * count, (each + 1) * count)
        yield rows[here], aligned(scales[here]) if is_per_row else scales, matmul
