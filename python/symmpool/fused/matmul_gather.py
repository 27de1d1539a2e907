"""Matmuls of the rows, or of the columns, of all ranks, which arrive while they are made. Names, arguments
and meaning are those of torch.ops.symm_mem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from symmpool.communicators.tensors import to_read
from symmpool.errors import InvalidArgumentError
from symmpool.fused import pipeline, tensor_cores
from symmpool.fused.arguments import wrong_lists
from symmpool.fused.entry import entry_for, gathered_rows, is_pipelined
from symmpool.fused.matmuls import (
    Matmul,
    aligned,
    check_left,
    check_right,
    check_scales,
    fingerprint,
    rows_of,
    scales_of_rows,
)

if TYPE_CHECKING:
    from symmpool.groups.types import GroupLike

__all__ = ["fused_all_gather_matmul", "fused_all_gather_scaled_matmul"]


def fused_all_gather_matmul(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    gather_dim: int,
    group: GroupLike,
    *,
    return_A: bool = True,
    in_front: bool = False,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Every rank's `A_shard` of shape (..., K), one after the other along `gather_dim`, and its matmuls
    with `Bs`, each of shape (K, N): `A @ B`. If `gather_dim` is the last dimension, `Bs` have `world` times
    K rows. The gathered tensor is None unless `return_A`.

    Results are contiguous; or with `in_front` they lie in memory as torch's operators give them, so that
    `result.movedim(gather_dim, 0)` is contiguous.

    On CUDA this rank's own rows are multiplied first; meanwhile the others arrive by copy engines. On devices
    of compute capability 9.0 a shard that is contiguous is not copied if the dimension is the first one, or
    if the dimensions from it to the last one have a multiple of 128 rows; with `in_front`, and
    elsewhere, one that lies as `in_front` says. The call is on the current stream; on the CPU it returns when
    it is done, with the bits of separate operations. `group` is a group, its name or a pool.

    Raises InvalidArgumentError for tensors that do not fit or require grad, and then DivergedError on the
    other ranks; DivergedError where ranks pass shards of different shapes or types, or another dimension;
    InvalidStateError where a capture would need new memory of the pool; TimeoutError and PeerLostError
    where a rank does not come."""
    name = "fused_all_gather_matmul"
    wrong = wrong_lists(Bs=Bs)
    matmuls = [] if wrong else [Matmul(right) for right in Bs]
    return _gather_matmul(name, A_shard, matmuls, None, gather_dim, group, return_A, in_front, wrong)


def fused_all_gather_scaled_matmul(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: Sequence[torch.Tensor],
    gather_dim: int,
    group: GroupLike,
    biases: Sequence[torch.Tensor | None],
    result_scales: Sequence[torch.Tensor | None],
    out_dtypes: Sequence[torch.dtype | None],
    use_fast_accum: Sequence[bool],
    *,
    in_front: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Multiplies like `fused_all_gather_matmul`, for 8-bit floats with scales. `A_scale` is one number, or
    has one for each row of the shard, (..., 1), or one for each row of the gathered tensor."""
    name = "fused_all_gather_scaled_matmul"
    of_each = {
        "B_scales": B_scales,
        "biases": biases,
        "result_scales": result_scales,
        "out_dtypes": out_dtypes,
        "use_fast_accum": use_fast_accum,
    }
    wrong = wrong_lists(Bs=Bs, **of_each)
    matmuls = [] if wrong else [Matmul(*each) for each in zip(Bs, *of_each.values(), strict=True)]
    how = (True, in_front, wrong)
    A, found = _gather_matmul(name, A_shard, matmuls, A_scale, gather_dim, group, *how, is_scaled=True)
    assert A is not None
    return A, found


def _gather_matmul(
    name: str,
    shard: torch.Tensor,
    matmuls: list[Matmul],
    scale: torch.Tensor | None,
    dim: int,
    group: GroupLike,
    return_A: bool,
    in_front: bool,
    wrong: str | None,
    is_scaled: bool = False,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    def check(world: int) -> None:
        if wrong is not None:
            raise InvalidArgumentError(f"{name}: {wrong}")
        check_left(name, "A_shard", shard, dim, "gather_dim")
        inner = shard.shape[-1] * (world if dim == shard.dim() - 1 else 1)
        for nth, matmul in enumerate(matmuls):
            if is_scaled:
                check_scales(name, ("A_shard", f"Bs[{nth}]"), shard, matmul, scale)
            check_right(name, f"Bs[{nth}]", matmul, shard, inner)
        scales_of_rows(name, scale, shard.shape, dim, world)

    entry = entry_for(name, shard, group, check)
    world = entry.comm.world
    with entry.preparing():
        is_last = dim == shard.dim() - 1
        shard = to_read(f"{name}: A_shard", shard)
        matmuls = [each.in_memory(name, f"Bs[{nth}]") for nth, each in enumerate(matmuls)]
        scale = None if scale is None else to_read(f"{name}: A_scale", scale)
        kind, scales = scales_of_rows(name, scale, shard.shape, dim, world)
        by_tensor_cores = (
            kind == "one"
            and not is_last
            and is_pipelined(shard, world)
            and tensor_cores.serves_all(entry, shard, scales, matmuls, rows_of(shard.shape))
        )
        batches, in_batch = math.prod(shard.shape[:dim]), math.prod(shard.shape[dim:-1])
        in_batches = by_tensor_cores and not in_front
        in_batches = in_batches and (batches == 1 or in_batch % tensor_cores.BATCH_ROWS == 0)
        front = shard if is_last or in_batches else shard.movedim(dim, 0)
        rows = front.reshape(rows_of(front.shape), shard.shape[-1]).contiguous()
        scales = scales.contiguous() if kind == "shard" and scales is not None else scales
        rest = fingerprint(tuple(shard.shape), dim, len(matmuls) > 0, kind, by_tensor_cores)
        sizes = (rows_of(shard.shape), shard.shape[-1], 0)
        call = pipeline.MatmulCall(entry, "fused_all_gather_matmul", shard, sizes, rest)
        is_carried = is_pipelined(shard, world)
        leading = list(front.shape[:-1])
        if in_batches:
            leading[dim] *= world
        elif not is_last:
            leading[0] *= world
    if in_batches:
        whole, found = tensor_cores.gather_multiply(call, rows, batches, scales, matmuls, return_A)
        shaped_rows = None if whole is None else whole.view(*leading, whole.shape[-1])
        return shaped_rows, [out.view(*leading, out.shape[-1]) for out in found]
    if is_last:
        return _gather_columns(call, rows, leading, matmuls, scales, return_A)

    def shaped(found: torch.Tensor) -> torch.Tensor:
        found = found.view(*leading, found.shape[-1]).movedim(0, dim)
        return found if in_front else found.contiguous()

    if by_tensor_cores:
        whole, found = tensor_cores.gather_multiply(call, rows, 1, scales, matmuls, return_A)
        return None if whole is None else shaped(whole), [shaped(out) for out in found]
    if not is_carried or not matmuls:
        call.begin(0)
        whole = gathered_rows(entry, rows)
        if scales is not None and kind == "shard":
            scales = gathered_rows(entry, scales)
        found = [shaped(matmul.make(whole, scales, None)) for matmul in matmuls]
        return shaped(whole) if return_A else None, found
    with entry.preparing():
        outs = [
            rows.new_empty((world, rows.shape[0], matmul.right.shape[1]), dtype=matmul.dtype_for(shard))
            for matmul in matmuls
        ]
        gathered = rows.new_empty((world, *rows.shape)) if return_A else None
        sent = scales if kind == "shard" else None
        of_rank = _scales_of_ranks(kind, scales, world)

    def multiply(given: torch.Tensor, received: torch.Tensor | None, rank: int) -> None:
        for matmul, out in zip(matmuls, outs, strict=True):
            matmul.make(given, received if kind == "shard" else of_rank[rank], out[rank])

    pipeline.gather_multiply(call, rows, sent, multiply, gathered)
    found = [shaped(out.flatten(0, 1)) for out in outs]
    return None if gathered is None else shaped(gathered.flatten(0, 1)), found


def _scales_of_ranks(kind: str, scales: torch.Tensor | None, world: int) -> list[torch.Tensor | None]:
    """The scales of each rank's rows, where they are on every rank."""
    if scales is None or kind != "whole":
        return [scales] * world
    return [aligned(part) for part in scales.chunk(world)]


def _gather_columns(
    call: pipeline.MatmulCall,
    rows: torch.Tensor,
    leading: list[int],
    matmuls: list[Matmul],
    scales: torch.Tensor | None,
    return_A: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Shards are columns: the matmul is the sum of those of all shards."""
    world = call.world

    def shaped(found: torch.Tensor) -> torch.Tensor:
        return found.view(*leading, found.shape[-1])

    with call.entry.preparing():
        is_sum = is_pipelined(rows, world) and not any(matmul.is_scaled for matmul in matmuls)
    if not is_sum or not matmuls:
        call.begin(0)
        whole = gathered_rows(call.entry, rows).view(world, *rows.shape)
        count = rows.shape[0]
        whole = whole.movedim(0, 1).reshape(count, world * rows.shape[1])
        found = [shaped(matmul.make(whole, scales, None)) for matmul in matmuls]
        return shaped(whole) if return_A else None, found
    with call.entry.preparing():
        outs = [
            rows.new_empty((rows.shape[0], matmul.right.shape[1]), dtype=matmul.dtype_for(rows))
            for matmul in matmuls
        ]
        rights = [matmul.right.chunk(world) for matmul in matmuls]
        gathered = rows.new_empty((world, *rows.shape)) if return_A else None
    done: list[Any] = []

    def multiply(given: torch.Tensor, _: object, rank: int) -> None:
        # Sums grow in one tensor, so each matmul waits for the last one.
        for event in done:
            torch.cuda.current_stream(rows.device).wait_event(event)
        for out, parts in zip(outs, rights, strict=True):
            if done:
                out.addmm_(given, parts[rank])
            else:
                torch.mm(given, parts[rank], out=out)
        done.append(torch.cuda.current_stream(rows.device).record_event())

    pipeline.gather_multiply(call, rows, None, multiply, gathered)
    found = [shaped(out) for out in outs]
    if gathered is None:
        return None, found
    return shaped(gathered.movedim(0, 1).reshape(rows.shape[0], world * rows.shape[1])), found
