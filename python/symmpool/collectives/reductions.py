"""How reductions are made that communicators have not: of other types of elements, and bit by bit.

A communicator reduces floats and integers of most sizes by sum, product, minimum, maximum and average. What
torch reduces beyond that is made of it: elements are encoded as a type that is reduced, and results are
decoded. Where there is no such type, each rank gets all elements and combines them in the order of the ranks,
so that every rank has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from symmpool.collectives.layout import plain, row
from symmpool.collectives.reduce_op import BITWISE, NATIVE
from symmpool.errors import InvalidArgumentError

__all__ = ["REDUCED", "Reduction", "named", "reduction"]

Convert = Callable[[torch.Tensor], torch.Tensor]

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
# What communicators reduce. They move other types, too.
REDUCED = {
    getattr(torch, name)
    for name in ("float32 float64 float16 bfloat16 int32 int64 uint8 int8 float8_e4m3fn float8_e5m2".split())
}


def named(op: Any, tensors: Iterable[torch.Tensor]) -> str | None:
    """The name of torch's operation where communicators reduce such tensors by it; else None."""
    # Small calls take about as long as this, and a generator as long as all the rest.
    for tensor in tensors:
        if tensor.dtype not in REDUCED:
            return None
    return _OPS.get(int(getattr(op, "op", op))) or _sum_of_inputs(op)


def _sum_of_inputs(op: Any) -> str | None:
    """The sum's name, where an operation sums inputs times 1. FSDP2 asks for that where it has to divide
    gradients by 1, as torchtitan does."""
    state = op.__getstate__() if isinstance(op, dist.ReduceOp) else (None, None)
    by_one = state[0] == dist.ReduceOp.PREMUL_SUM and isinstance(state[1], float) and state[1] == 1
    return "sum" if by_one else None


class Reduction(NamedTuple):
    """A reduction made of what communicators have. `encode` makes a row of elements, `decode` undoes it."""

    #: What the encoded elements are reduced by; None where ranks gather them and `combine`.
    op: str | None
    encode: Convert
    decode: Convert
    #: Reduces the first dimension, which has a part for each rank.
    combine: Convert | None = None


def reduction(op: str, dtype: torch.dtype) -> Reduction | None:
    """How elements of a type are reduced by the operation of that name. None where a communicator does so
    itself. Raises InvalidArgumentError where nobody does."""
    if dtype in REDUCED and op in NATIVE:
        return None
    made = _bitwise(op, dtype) if op in BITWISE else _arithmetic(op, dtype)
    if made is None:
        kind = "bitwise operations take integers and bool" if op in BITWISE else "nothing reduces them so"
        name = str(dtype).removeprefix("torch.")
        raise InvalidArgumentError(f"op: {op.upper()} of elements of {name}: {kind}")
    return made


def _arithmetic(op: str, dtype: torch.dtype) -> Reduction | None:
    if dtype == torch.bool:
        ours = {"sum": "max", "max": "max", "prod": "min", "min": "min"}.get(op)
        return Reduction(ours, _as(torch.uint8), _to(torch.bool)) if ours else None
    if dtype in (torch.int16, torch.uint16):
        return Reduction(op, _to(torch.int32), _to(dtype))
    if dtype == torch.uint32:
        return Reduction(op, _to(torch.int64), _to(dtype))
    if dtype == torch.uint64:
        if op in ("sum", "prod"):
            return Reduction(op, _as(torch.int64), _as(dtype))
        if op in ("min", "max"):
            # With the highest bit turned over, the order of signed numbers is that of unsigned ones.
            return Reduction(
                op, lambda x: _turned(_as(torch.int64)(x)), lambda x: _turned(x).view(torch.uint64)
            )
        return None
    if dtype.is_complex:
        if op in ("sum", "avg"):
            return Reduction(op, _as_real, lambda x: torch.view_as_complex(x.view(-1, 2)))
        if op == "prod":
            return Reduction(None, row, _same, lambda parts: _in_order(parts, torch.mul))
    return None


def _bitwise(op: str, dtype: torch.dtype) -> Reduction | None:
    if dtype == torch.bool:
        if op == "bxor":
            # The number of ranks that have True, of whose bits the lowest counts.
            return Reduction("sum", _as(torch.uint8), lambda x: (x & 1).to(torch.bool))
        return Reduction("min" if op == "band" else "max", _as(torch.uint8), _to(torch.bool))
    if dtype.is_floating_point or dtype.is_complex or dtype.itemsize > 8:
        return None
    # torch has bitwise operations of signed integers of each size, and of few unsigned ones.
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    function = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[op]
    return Reduction(None, _as(signed), _as(dtype), lambda parts: _in_order(parts, function))


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _to(dtype: torch.dtype) -> Convert:
    return lambda x: row(x).to(dtype)


def _as(dtype: torch.dtype) -> Convert:
    return lambda x: row(x).view(dtype)


def _as_real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(plain(x.detach())).reshape(-1)


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x ^ torch.iinfo(torch.int64).min


def _in_order(parts: torch.Tensor, function: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Combines parts in the order of the ranks."""
    total = parts[0].clone()
    for part in parts[1:]:
        total = function(total, part)
    return total
