"""How reductions are made that communicators have not: of other types of elements, bit by bit, and of inputs
times a factor.

A communicator reduces floats and integers of most sizes by sum, product, minimum, maximum and average. What
torch reduces beyond that is made of it: elements are encoded as a type that is reduced, and results are
decoded. Where there is no such type, each rank gets all elements and combines them in the order of the ranks,
so that every rank has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from symmpool.collectives.layout import plain, row
from symmpool.collectives.reduce_op import BITWISE, NATIVE
from symmpool.errors import InvalidArgumentError

__all__ = ["REDUCED", "Op", "Premultiplied", "ReductionPlan", "operation", "reduction"]

Convert = Callable[[torch.Tensor], torch.Tensor]


class Premultiplied(NamedTuple):
    """The sum of inputs times a factor, a number or a tensor of one element: torch's PREMUL_SUM, by which
    FSDP2 divides gradients."""

    factor: Any


#: The name of an operation, or the sum of inputs times a factor.
Op = str | Premultiplied

# Operations by number, which is the hash of a `ReduceOp` and of its constants, and found the fastest so.
_OPS = {
    int(getattr(dist.ReduceOp, theirs)): ours
    for theirs, ours in (
        ("SUM", "sum"),
        ("PRODUCT", "prod"),
        ("MIN", "min"),
        ("MAX", "max"),
        ("AVG", "avg"),
        ("BAND", "band"),
        ("BOR", "bor"),
        ("BXOR", "bxor"),
    )
}
# Types of elements that communicators reduce. They move other types, too.
REDUCED = {
    getattr(torch, name)
    for name in ("float32 float64 float16 bfloat16 int32 int64 uint8 int8 float8_e4m3fn float8_e5m2".split())
}
# Types of elements that torch multiplies by a factor before a sum.
_MULTIPLIED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def operation(op: Any) -> Op | None:
    """Returns our operation for torch's; None for one that is not known."""
    return _OPS.get(hash(op)) or _premultiplied(op)


def _premultiplied(op: Any) -> Op | None:
    getstate: Any = getattr(op, "__getstate__", None)
    state = getstate() if isinstance(op, dist.ReduceOp) else (None, None)
    if state[0] != dist.ReduceOp.PREMUL_SUM or state[1] is None:
        return None
    # FSDP2 asks for a factor of 1 where it has to divide gradients by 1, as torchtitan does.
    return "sum" if isinstance(state[1], float) and state[1] == 1 else Premultiplied(state[1])


class ReductionPlan(NamedTuple):
    """A reduction made of what communicators have. `encode` makes a row of elements, `decode` undoes it."""

    #: What the encoded elements are reduced by; None where ranks gather them and `combine`.
    op: str | None
    encode: Convert
    decode: Convert
    #: Reduces the first dimension, which has a part for each rank.
    combine: Convert | None = None


def reduction(op: Op, dtype: torch.dtype) -> ReductionPlan | None:
    """How elements of a type are reduced by an operation. None where a communicator does so itself. Raises
    InvalidArgumentError where nobody does."""
    if isinstance(op, Premultiplied):
        return _multiplied(op.factor, dtype)
    if dtype in REDUCED and op in NATIVE:
        return None
    made = _bitwise(op, dtype) if op in BITWISE else _arithmetic(op, dtype)
    if made is None:
        kind = "bitwise operations take integers and bool" if op in BITWISE else "nothing reduces them so"
        raise InvalidArgumentError(f"op: {op.upper()} of elements of {_name(dtype)}: {kind}")
    return made


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _multiplied(factor: float | torch.Tensor, dtype: torch.dtype) -> ReductionPlan:
    """A sum of inputs times a factor, which is multiplied in the elements' own type, as in NCCL."""
    if dtype not in _MULTIPLIED:
        raise InvalidArgumentError(
            f"op: PREMUL_SUM of elements of {_name(dtype)}: factors are multiplied by elements of "
            f"{', '.join(_name(each) for each in _MULTIPLIED)}"
        )
    if isinstance(factor, torch.Tensor) and factor.numel() != 1:
        raise InvalidArgumentError(
            f"op: PREMUL_SUM: a factor of {factor.numel()} elements; it is a number, or a tensor of one"
        )

    def encode(x: torch.Tensor) -> torch.Tensor:
        values = _as_real(x) if dtype.is_complex else row(x)
        by = factor.detach().reshape(()).to(values) if isinstance(factor, torch.Tensor) else factor
        return values * by

    return ReductionPlan("sum", encode, _as_complex if dtype.is_complex else _same)


def _arithmetic(op: str, dtype: torch.dtype) -> ReductionPlan | None:
    if dtype == torch.bool:
        ours = {"sum": "max", "max": "max", "prod": "min", "min": "min"}.get(op)
        return ReductionPlan(ours, _to(torch.uint8), _to(torch.bool)) if ours else None
    if dtype in (torch.int16, torch.uint16):
        return ReductionPlan(op, _to(torch.int32), _to(dtype))
    if dtype == torch.uint32:
        return ReductionPlan(op, _to(torch.int64), _to(dtype))
    if dtype == torch.uint64:
        if op in ("sum", "prod"):
            return ReductionPlan(op, _as(torch.int64), _as(dtype))
        if op in ("min", "max"):
            # With the highest bit turned over, the order of signed numbers is that of unsigned ones.
            return ReductionPlan(
                op, lambda x: _turned(_as(torch.int64)(x)), lambda x: _turned(x).view(torch.uint64)
            )
        return None
    if dtype.is_complex:
        if op in ("sum", "avg"):
            return ReductionPlan(op, _as_real, _as_complex)
        if op == "prod":
            return ReductionPlan(None, row, _same, lambda parts: _in_order(parts, torch.mul))
    return None


def _bitwise(op: str, dtype: torch.dtype) -> ReductionPlan | None:
    if dtype == torch.bool:
        if op == "bxor":
            # The number of ranks that have True, of whose bits the lowest counts.
            return ReductionPlan("sum", _to(torch.uint8), lambda x: (x & 1).to(torch.bool))
        return ReductionPlan("min" if op == "band" else "max", _to(torch.uint8), _to(torch.bool))
    if dtype.is_floating_point or dtype.is_complex or dtype.itemsize > 8:
        return None
    # torch has bitwise operations of signed integers of each size, and of few unsigned ones.
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    function = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[op]
    return ReductionPlan(None, _as(signed), _as(dtype), lambda parts: _in_order(parts, function))


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _to(dtype: torch.dtype) -> Convert:
    return lambda x: row(x).to(dtype)


def _as(dtype: torch.dtype) -> Convert:
    return lambda x: row(x).view(dtype)


def _as_real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(plain(x.detach())).reshape(-1)


def _as_complex(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.view(-1, 2))


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x ^ torch.iinfo(torch.int64).min


def _in_order(parts: torch.Tensor, function: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Combines parts in the order of the ranks."""
    total = parts[0].clone()
    for part in parts[1:]:
        total = function(total, part)
    return total
