"""Calls in compiled code, and where modes of torch see them: they become operators of `symmpool.ops`.

The compiler reads these functions, so they are plain. What it could refuse on a rank alone becomes an
operator that is refused on every rank when it runs. `symmpool.ops` registers the operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from symmpool.collectives.reduce_op import ReduceOp
from symmpool.communicators.work import DoneWork
from symmpool.errors import InvalidArgumentError
from symmpool.groups.names import name_of

if TYPE_CHECKING:
    from symmpool.collectives.types import Op, SplitSizes, Tensor
    from symmpool.communicators.work import Work
    from symmpool.groups.types import GroupLike

__all__ = [
    "are_sizes",
    "dispatched_barrier",
    "end_graph",
    "name_of_op",
    "text_of",
    "traced_all_gather",
    "traced_all_reduce",
    "traced_all_to_all",
    "traced_broadcast",
    "traced_reduce_scatter",
]


# Object that torch gives where a process is no member. The compiler does not read it from torch's class.
_NO_MEMBER = torch.distributed.GroupMember.NON_GROUP_MEMBER if torch.distributed.is_available() else object()


def text_of(group: GroupLike) -> str:
    """Returns the name of a group, like `name_of`, also of a name, in words that the compiler reads."""
    if isinstance(group, str):
        return group
    if group is _NO_MEMBER:
        raise InvalidArgumentError("group: this process is no member of it, and has no name for it")
    if group is not None and torch.compiler.is_dynamo_compiling():
        return group.group_name  # type: ignore[union-attr]
    return name_of(group)


def name_of_op(op: Op) -> str:
    """The name of a reduction, as operators of torch are given it: "sum", ... What is none of ours is refused
    by the operator."""
    if isinstance(op, ReduceOp):
        return op.value
    if isinstance(op, str):
        return op
    import torch.distributed as dist

    constants = (
        (dist.ReduceOp.SUM, "sum"),
        (dist.ReduceOp.PRODUCT, "prod"),
        (dist.ReduceOp.MIN, "min"),
        (dist.ReduceOp.MAX, "max"),
        (dist.ReduceOp.AVG, "avg"),
        (dist.ReduceOp.BAND, "band"),
        (dist.ReduceOp.BOR, "bor"),
        (dist.ReduceOp.BXOR, "bxor"),
    )
    # The compiler of torch 2.11 knows them by identity alone; a `ReduceOp` made of one is equal.
    for constant, name in constants:
        if op is constant:
            return name
    # Numbers are equal to some of them, and are none.
    if not isinstance(op, int):
        for constant, name in constants:
            if op == constant:
                return name
    # The call refuses it, on every rank.
    return str(op)


def _is_refused(tensor: Tensor, group: GroupLike, async_op: bool, algorithm: str | None) -> bool:
    """Whether compiled code asks for what it has not. Then the call is refused on every rank when it runs."""
    why = None
    if async_op and torch.compiler.is_dynamo_compiling():
        why = "async_op: not in compiled code; it orders calls by itself"
    elif algorithm is not None:
        why = (
            f"algorithm: {algorithm!r} in compiled code, whose operators name none; set SYMMPOOL_ALL_REDUCE "
            "or the variable of another collective, or use symmpool.select"
        )
    if why is not None:
        torch.ops.symmpool._refused_(tensor, why, text_of(group))
    return why is not None


def _is_outside(group: GroupLike) -> bool:
    """Whether this process is no member of a process group of torch. Such calls do nothing."""
    return group is _NO_MEMBER


def _done(async_op: bool, *results: Tensor) -> Work | None:
    """Returns the result of a call that was made as an operator, and is done."""
    return DoneWork(list(results)) if async_op else None


def traced_all_reduce(
    tensor: Tensor, op: Op, group: GroupLike, async_op: bool, out: Tensor | None, algorithm: str | None = None
) -> Work | None:
    """`symmpool.all_reduce` as an operator. Returns a finished Work with `async_op`, else None."""
    if _is_outside(group) or _is_refused(tensor if out is None else out, group, async_op, algorithm):
        return None
    if out is None:
        torch.ops.symmpool.all_reduce_(tensor, name_of_op(op), text_of(group))
        return _done(async_op, tensor)
    torch.ops.symmpool.all_reduce_into_(out, tensor, name_of_op(op), text_of(group))
    return _done(async_op, out)


def traced_reduce_scatter(
    output: Tensor, input: Tensor, op: Op, group: GroupLike, async_op: bool, algorithm: str | None = None
) -> Work | None:
    """`symmpool.reduce_scatter_tensor` as an operator. Returns a finished Work with `async_op`, else None."""
    if _is_outside(group) or _is_refused(output, group, async_op, algorithm):
        return None
    name = text_of(group)
    torch.ops.symmpool.reduce_scatter_into_(output, input, name_of_op(op), name)
    return _done(async_op, output)


def traced_all_gather(
    output: Tensor, input: Tensor, group: GroupLike, async_op: bool, algorithm: str | None = None
) -> Work | None:
    """`symmpool.all_gather_into_tensor` as an operator. Returns a finished Work with `async_op`, else
    None."""
    if _is_outside(group) or _is_refused(output, group, async_op, algorithm):
        return None
    torch.ops.symmpool.all_gather_into_(output, input, text_of(group))
    return _done(async_op, output)


def are_sizes(given: object) -> bool:
    """Whether split sizes are such as an operator takes."""
    if given is None:
        return True
    if not isinstance(given, (list, tuple)):
        return False
    return all(isinstance(each, (int, torch.SymInt)) for each in given)


def traced_all_to_all(
    output: Tensor,
    input: Tensor,
    sizes: tuple[SplitSizes, SplitSizes],
    group: GroupLike,
    async_op: bool,
    algorithm: str | None = None,
) -> Work | None:
    """`symmpool.all_to_all_single` as an operator. `sizes` are the output's and the input's splits, in
    elements of the first dimension, or None. Returns a finished Work with `async_op`, else None."""
    if _is_outside(group) or _is_refused(output, group, async_op, algorithm):
        return None
    for name, given in zip(("output", "input"), sizes, strict=True):
        if not are_sizes(given):
            why = f"all_to_all_single: {name}_split_sizes: a list of integers is needed, or None"
            torch.ops.symmpool._refused_(output, why, text_of(group))
            return None
    received, sent = ([] if each is None else list(each) for each in sizes)
    torch.ops.symmpool.all_to_all_into_(output, input, received, sent, text_of(group))
    return _done(async_op, output)


def traced_broadcast(
    tensor: Tensor,
    src: int | None,
    group: GroupLike,
    group_src: int | None,
    async_op: bool,
    algorithm: str | None = None,
) -> Work | None:
    """`symmpool.broadcast` as an operator: from the global rank `src` or the group's rank `group_src`.
    Returns a finished Work with `async_op`, else None."""
    if _is_outside(group) or _is_refused(tensor, group, async_op, algorithm):
        return None
    name = text_of(group)
    if (src is None) == (group_src is None):
        torch.ops.symmpool._refused_(tensor, "broadcast: one of src and group_src is needed", name)
    elif src is None:
        torch.ops.symmpool.broadcast_(tensor, group_src, name)
    else:
        torch.ops.symmpool.broadcast_from_(tensor, src, name)
    return _done(async_op, tensor)


def dispatched_barrier(device: int, group: GroupLike, async_op: bool) -> Work | None:
    """`symmpool.barrier` as an operator, on the CPU for a negative device. Returns a finished Work with
    `async_op`, else None."""
    if _is_outside(group):
        return None
    tensor = torch.empty(0, device="cpu" if device < 0 else f"cuda:{device}")
    torch.ops.symmpool.barrier_(tensor, text_of(group))
    return _done(async_op)


def end_graph(call: str) -> None:
    """Ends a compiled graph before a call that is no operator for compilers."""
    why = "it is no operator"
    if call == "barrier":
        why = "a compiled graph writes to memory that it was given at its end, after any barrier within"
    torch._dynamo.graph_break(
        msg=f"symmpool.{call} has no place in a compiled graph: {why}; call it between compiled functions"
    )
