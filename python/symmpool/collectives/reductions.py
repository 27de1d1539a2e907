"""Which of torch's reductions the package's collectives serve."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["named"]

# By number, as a `ReduceOp` and its constants both give it.
_OPS = {
    int(getattr(dist.ReduceOp, theirs)): ours
    for theirs, ours in (
        ("SUM", "sum"),
        ("PRODUCT", "prod"),
        ("MIN", "min"),
        ("MAX", "max"),
        ("AVG", "avg"),
    )
}
# What is moved and not reduced may be of other types, too.
_REDUCED = {
    getattr(torch, name)
    for name in ("float32 float64 float16 bfloat16 int32 int64 uint8 int8 float8_e4m3fn float8_e5m2".split())
}


def named(op: Any, tensors: Iterable[torch.Tensor]) -> str | None:
    """What ours calls an operation of torch's on such tensors; None where it has no such."""
    # Small calls are about as short as this: no generator, which costs as much as all the rest.
    for tensor in tensors:
        if tensor.dtype not in _REDUCED:
            return None
    return _OPS.get(int(getattr(op, "op", op))) or _sum_of_inputs(op)


def _sum_of_inputs(op: Any) -> str | None:
    """The sum's name, where an operation sums inputs times 1: what FSDP2 asks for where it is told to
    divide gradients by 1, as torchtitan tells it."""
    state = op.__getstate__() if isinstance(op, dist.ReduceOp) else (None, None)
    by_one = state[0] == dist.ReduceOp.PREMUL_SUM and isinstance(state[1], float) and state[1] == 1
    return "sum" if by_one else None
