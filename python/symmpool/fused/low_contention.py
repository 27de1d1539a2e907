"""Gathers and scattered sums by copy engines, for the time that SMs are busy with something else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from symmpool.communicators.tensors import to_read
from symmpool.errors import InvalidArgumentError
from symmpool.fused import pipeline
from symmpool.fused.arguments import described
from symmpool.fused.entry import entry_for, gathered_rows, is_pipelined
from symmpool.fused.matmuls import DTYPES, check_reduce, fingerprint

if TYPE_CHECKING:
    from symmpool.communicators.entry import CommunicatorEntry
    from symmpool.groups.types import GroupLike

__all__ = ["low_contention_all_gather", "low_contention_reduce_scatter"]


def _check(name: str, tensor: torch.Tensor, world: int) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or tensor.dtype not in DTYPES:
        raise InvalidArgumentError(
            f"{name}: tensor: {described(tensor)}; it must be a tensor of 1 or more dimensions, of float32, "
            "float64, float16, bfloat16 or 8-bit floats"
        )
    if not tensor.is_contiguous():
        raise InvalidArgumentError(f"{name}: tensor: strides {tensor.stride()}; pass a contiguous one")
    if name.endswith("scatter") and tensor.shape[0] % world:
        raise InvalidArgumentError(
            f"{name}: tensor: the first dimension of {tuple(tensor.shape)} is not for {world} ranks"
        )


def _call(entry: CommunicatorEntry, name: str, tensor: torch.Tensor, *rest: object) -> pipeline.MatmulCall:
    columns = tensor.numel() // max(tensor.shape[0], 1)
    sizes = (tensor.shape[0], min(columns, (1 << 32) - 1), 0)
    return pipeline.MatmulCall(entry, name, tensor, sizes, fingerprint(tuple(tensor.shape), *rest))


def low_contention_all_gather(tensor: torch.Tensor, group: GroupLike) -> torch.Tensor:
    """Every rank's `tensor`, one after the other along the first dimension, carried by copy engines on the
    current stream. SMs only copy the tensor into the pool's memory."""
    name = "_low_contention_all_gather"
    entry = entry_for(name, tensor, group, lambda world: _check(name, tensor, world))
    world = entry.comm.world
    with entry.preparing():
        tensor = to_read(f"{name}: tensor", tensor)
        call = _call(entry, name, tensor)
        is_carried = is_pipelined(tensor, world)
        found = tensor.new_empty((world, *tensor.shape)) if is_carried else None
    if found is None:
        call.begin(0)
        return gathered_rows(entry, tensor)
    pipeline.pull_all(call, [tensor] * world, found)
    return found.flatten(0, 1)


def low_contention_reduce_scatter(tensor: torch.Tensor, reduce_op: str, group: GroupLike) -> torch.Tensor:
    """This rank's part, along the first dimension, of the sum (or with "avg" the mean) of all ranks'
    `tensor`; copy engines exchange the parts, and a kernel adds them up in float32."""
    name = "_low_contention_reduce_scatter"

    def check(world: int) -> None:
        check_reduce(name, reduce_op)
        _check(name, tensor, world)

    entry = entry_for(name, tensor, group, check)
    world = entry.comm.world
    with entry.preparing():
        tensor = to_read(f"{name}: tensor", tensor)
        call = _call(entry, name, tensor, reduce_op)
        is_carried = is_pipelined(tensor, world)
        parts = list(tensor.view(world, tensor.shape[0] // world, *tensor.shape[1:]))
        found = tensor.new_empty((world if is_carried else 1, *parts[0].shape))
    if not is_carried:
        call.begin(0)
        entry.run(entry.comm.reduce_scatter_tensor, (found, tensor, reduce_op), [], False)
        return found[0]
    pipeline.pull_all(call, parts, found)
    return found.sum(dim=0) if reduce_op == "sum" else found.mean(dim=0)
