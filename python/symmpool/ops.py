"""The collectives as operators of torch, for `torch.compile` and for functional code.

Importing this module registers them under `torch.ops.symmpool`:

    all_reduce_(x, op, group)                  in place
    all_reduce(x, op, group) -> Tensor         and all that follow give a new tensor
    all_gather(x, world, group) -> Tensor      parts along the first dimension
    reduce_scatter(x, op, world, group) -> Tensor
    all_to_all(x, output_splits, input_splits, world, group) -> Tensor
    broadcast_(x, src, group)                  in place; src is a rank of the group
    broadcast_from_(x, src, group)             in place; src is a rank of torch's default group
    barrier_(x, group)                         x stays as it is

`group` is text, as in torch's own operators: "" is the default group, other text the name of a process
group of torch (`group.group_name`) or one that `name_of(group)` gave. `op` is a name. Gradients flow
through the sums, and through what only moves data: that of an all-reduce is an all-reduce, of an
all-gather a reduce-scatter, of a reduce-scatter an all-gather, of an all-to-all one with its sizes swapped.
In place there are no gradients: torch warns where one comes back by way of such a tensor.

`barrier_` is for graphs that run as they were recorded, as `make_fx` does; `x` says on which device, and
may be empty. There is none for compilers: their graphs are of values, and write to memory that they were
given at their end, wherever the program did. Whatever stood for a barrier within would come before the very
writes that peers are to see after it. So `symmpool.barrier` ends a compiled graph, as
`torch.distributed.barrier` does.

The functions of this module take the group itself. They give new tensors, as torch's functional collectives,
whose names and arguments they have."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from symmpool._symmpool import Group, Pool
from symmpool.collectives import plans
from symmpool.collectives.calls import make, needs_plan, op_name, reduction_needs_plan
from symmpool.collectives.layout import plain
from symmpool.collectives.reduce_op import ReduceOp
from symmpool.communicators.cache import communicator_for
from symmpool.communicators.work import DoneWork
from symmpool.errors import InvalidArgumentError
from symmpool.groups import process_groups, resolution
from symmpool.groups.names import group_of, name_of, rank_in, resolved

__all__ = ["all_gather_tensor", "all_reduce", "all_to_all_single", "name_of", "reduce_scatter_tensor"]

_library = torch.library.Library("symmpool", "DEF")

for _signature in (
    "all_reduce_(Tensor(a!) x, str op, str group) -> ()",
    "all_reduce(Tensor x, str op, str group) -> Tensor",
    "all_gather(Tensor x, int world, str group) -> Tensor",
    "all_gather_into_(Tensor(a!) out, Tensor x, str group) -> ()",
    "reduce_scatter(Tensor x, str op, int world, str group) -> Tensor",
    "reduce_scatter_into_(Tensor(a!) out, Tensor x, str op, str group) -> ()",
    "all_to_all(Tensor x, SymInt[] output_splits, SymInt[] input_splits, int world, str group) -> Tensor",
    "all_to_all_into_(Tensor(a!) out, Tensor x, SymInt[] output_splits, SymInt[] input_splits,"
    " str group) -> ()",
    "broadcast_(Tensor(a!) x, int src, str group) -> ()",
    "broadcast_from_(Tensor(a!) x, int src, str group) -> ()",
    "barrier_(Tensor(a!) x, str group) -> ()",
):
    _library.define(_signature, tags=(torch.Tag.pt2_compliant_tag,))


def world_of(group: Any) -> int:
    """The number of ranks of a group."""
    group = resolved(group)
    if isinstance(group, (Group, Pool)):
        return group.world
    dist = process_groups.distributed()
    if dist is not None and (group is not None or dist.is_initialized()):
        return dist.get_world_size(group)
    return resolution.key_of(group).world


def _text_of(group: Any) -> str:
    """As `name_of`, also of names, in words that the compiler reads."""
    if isinstance(group, str):
        return group
    if group is not None and torch.compiler.is_dynamo_compiling():
        return group.group_name
    return name_of(group)


def _parts(x: torch.Tensor, world: int, what: str) -> Any:
    if x.dim() == 0 or x.shape[0] % world:
        raise InvalidArgumentError(
            f"{what}: the first dimension of {tuple(x.shape)} is not for {world} ranks"
        )
    return x.shape[0] // world


# What they do.


def _make(x: torch.Tensor, group: str, plan: Any) -> None:
    """Makes a call on the communicator that serves a group on the tensor's device."""
    make(x, group_of(group), plan, False)


def _shape_of(fake: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """What `fake` gives for a call. What it refuses is reported to the other ranks."""
    try:
        return fake(x, *arguments)
    except InvalidArgumentError as why:
        entry = communicator_for(x, group_of(arguments[-1]))
        if entry is not None:
            entry.refuse(str(why))
        raise


def _all_reduce_(x: torch.Tensor, op: str, group: str) -> None:
    def plan(rank: int, world: int) -> Any:
        if needs_plan(x) or reduction_needs_plan(op, x):
            return plans.all_reduce(x, op_name(op), world)
        return ("all_reduce", (x, op), None, [])

    _make(x, group, plan)


def _all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    x = plain(x)
    out = torch.empty_like(x)

    def plan(rank: int, world: int) -> Any:
        if reduction_needs_plan(op, x):
            return plans.all_reduce(x, op_name(op), world, out)
        return ("all_reduce", (x, op, out), None, [])

    _make(x, group, plan)
    return out


def _all_gather(x: torch.Tensor, world: int, group: str) -> torch.Tensor:
    out = _all_gather_fake(x, world, group)
    _all_gather_into_(out, x, group)
    return out


def _all_gather_into_(out: torch.Tensor, x: torch.Tensor, group: str) -> None:
    _make(out, group, lambda rank, world: plans.all_gather_into_tensor(out, x))


def _reduce_scatter(x: torch.Tensor, op: str, world: int, group: str) -> torch.Tensor:
    out = _shape_of(_reduce_scatter_fake, x, op, world, group)
    _reduce_scatter_into_(out, x, op, group)
    return out


def _reduce_scatter_into_(out: torch.Tensor, x: torch.Tensor, op: str, group: str) -> None:
    def plan(rank: int, world: int) -> Any:
        if needs_plan(out) or reduction_needs_plan(op, x):
            return plans.reduce_scatter_tensor(out, x, op_name(op), world)
        return ("reduce_scatter_tensor", (out, plain(x), op), None, [])

    _make(out, group, plan)


def _all_to_all(
    x: torch.Tensor, output_splits: Any, input_splits: Any, world: int, group: str
) -> torch.Tensor:
    splits = (output_splits, input_splits)
    out = _shape_of(_all_to_all_fake, x, *splits, world, group)
    _all_to_all_into_(out, x, output_splits, input_splits, group)
    return out


def _all_to_all_into_(
    out: torch.Tensor, x: torch.Tensor, output_splits: Any, input_splits: Any, group: str
) -> None:
    sizes = (list(output_splits) or None, list(input_splits) or None)
    _make(out, group, lambda rank, world: plans.all_to_all_single(out, x, *sizes))


def _broadcast_(x: torch.Tensor, src: int, group: str) -> None:
    _make(x, group, lambda rank, world: plans.broadcast(x, src, rank))


def _broadcast_from_(x: torch.Tensor, src: int, group: str) -> None:
    def plan(rank: int, world: int) -> Any:
        return plans.broadcast(x, rank_in(group, "broadcast", src=src, group_src=None), rank)

    _make(x, group, plan)


def _barrier_(x: torch.Tensor, group: str) -> None:
    _make(x, group, lambda rank, world: ("barrier", (), None, []))


# What comes out of them, without doing it.


def _all_reduce_fake(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _all_gather_fake(x: torch.Tensor, world: int, group: str) -> torch.Tensor:
    if x.dim() == 0:
        return x.new_empty((world,))
    return x.new_empty((x.shape[0] * world, *x.shape[1:]))


def _reduce_scatter_fake(x: torch.Tensor, op: str, world: int, group: str) -> torch.Tensor:
    return x.new_empty((_parts(x, world, "reduce_scatter"), *x.shape[1:]))


def _all_to_all_fake(
    x: torch.Tensor, output_splits: Any, input_splits: Any, world: int, group: str
) -> torch.Tensor:
    if bool(output_splits) != bool(input_splits):
        raise InvalidArgumentError("all_to_all: both kinds of split sizes are needed, or none")
    if not output_splits:
        _parts(x, world, "all_to_all")
        return x.new_empty(x.shape)
    return x.new_empty((sum(output_splits), *x.shape[1:]))


def _nothing(*_: Any) -> None:
    return None


_OPERATORS = {
    "all_reduce_": (_all_reduce_, _nothing),
    "all_reduce": (_all_reduce, _all_reduce_fake),
    "all_gather": (_all_gather, _all_gather_fake),
    "all_gather_into_": (_all_gather_into_, _nothing),
    "reduce_scatter": (_reduce_scatter, _reduce_scatter_fake),
    "reduce_scatter_into_": (_reduce_scatter_into_, _nothing),
    "all_to_all": (_all_to_all, _all_to_all_fake),
    "all_to_all_into_": (_all_to_all_into_, _nothing),
    "broadcast_": (_broadcast_, _nothing),
    "broadcast_from_": (_broadcast_from_, _nothing),
    "barrier_": (_barrier_, _nothing),
}
for _name, (_does, _gives) in _OPERATORS.items():
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _does, _key)
    torch.library.register_fake(f"symmpool::{_name}", _gives, lib=_library)

_ops = torch.ops.symmpool


# Gradients.


def _keep_reduction(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.op, ctx.group = inputs[1], inputs[-1]


def _needs_sum(ctx: Any, what: str) -> None:
    if ctx.op not in ("sum", "avg"):
        raise InvalidArgumentError(f"{what}: no gradient flows through {ctx.op!r}")


def _all_reduce_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    _needs_sum(ctx, "all_reduce")
    return _ops.all_reduce(gradient, ctx.op, ctx.group), None, None


def _keep_gather(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.world, ctx.group = inputs
    ctx.scalar = x.dim() == 0


def _all_gather_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    if gradient.is_complex():
        pairs = torch.view_as_real(gradient.resolve_conj())
        pairs = _ops.reduce_scatter(pairs, "sum", ctx.world, ctx.group)
        part = torch.view_as_complex(pairs)
    else:
        part = _ops.reduce_scatter(gradient, "sum", ctx.world, ctx.group)
    return part.reshape(()) if ctx.scalar else part, None, None


def _keep_scatter(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.op, ctx.world, ctx.group = inputs


def _reduce_scatter_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    _needs_sum(ctx, "reduce_scatter")
    whole = _ops.all_gather(gradient, ctx.world, ctx.group)
    return whole / ctx.world if ctx.op == "avg" else whole, None, None, None


def _keep_splits(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.received, ctx.sent, ctx.world, ctx.group = inputs
    ctx.rows = x.shape[0]


def _all_to_all_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    back = _ops.all_to_all(gradient, ctx.sent, ctx.received, ctx.world, ctx.group)
    if back.shape[0] != ctx.rows:
        # Rows that were sent to nobody.
        rest = back.new_zeros((ctx.rows - back.shape[0], *back.shape[1:]))
        back = torch.cat([back, rest])
    return back, None, None, None, None


for _name, _backward, _keep in (
    ("all_reduce", _all_reduce_backward, _keep_reduction),
    ("all_gather", _all_gather_backward, _keep_gather),
    ("reduce_scatter", _reduce_scatter_backward, _keep_scatter),
    ("all_to_all", _all_to_all_backward, _keep_splits),
):
    torch.library.register_autograd(f"symmpool::{_name}", _backward, setup_context=_keep, lib=_library)


# A barrier changes nothing, so gradients pass by it.
_library.impl("barrier_", torch.library.fallthrough_kernel, "Autograd")


# With the group itself.


def all_reduce(x: torch.Tensor, op: str = "sum", group: Any = None) -> torch.Tensor:
    """Every rank's `x` reduced, as a new tensor; with a gradient for "sum" and "avg"."""
    return _ops.all_reduce(x, _op_name(op), _text_of(group))


def all_gather_tensor(x: torch.Tensor, gather_dim: int = 0, group: Any = None) -> torch.Tensor:
    """Every rank's `x`, one after the other along a dimension; with a gradient."""
    world = world_of(group)
    found = _ops.all_gather(x, world, _text_of(group))
    return found if gather_dim == 0 else torch.cat(found.chunk(world), dim=gather_dim)


def reduce_scatter_tensor(
    x: torch.Tensor, op: str = "sum", scatter_dim: int = 0, group: Any = None
) -> torch.Tensor:
    """This rank's part of every rank's `x` reduced, in equal parts along a dimension; with a gradient for
    "sum" and "avg"."""
    world = world_of(group)
    if scatter_dim != 0:
        if x.shape[scatter_dim] % world:
            raise InvalidArgumentError(
                f"reduce_scatter_tensor: dimension {scatter_dim} of {tuple(x.shape)} is not for {world} ranks"
            )
        x = torch.cat(x.chunk(world, dim=scatter_dim))
    return _ops.reduce_scatter(x, _op_name(op), world, _text_of(group))


def all_to_all_single(
    x: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
) -> torch.Tensor:
    """What every rank sends to this one; rows are sent in equal parts, or by split sizes (both are
    needed then); with a gradient."""
    received = [] if output_split_sizes is None else list(output_split_sizes)
    sent = [] if input_split_sizes is None else list(input_split_sizes)
    return _ops.all_to_all(x, received, sent, world_of(group), _text_of(group))


def _warn_of_earlier(name: str, new: str) -> None:
    warnings.warn(
        f"symmpool.ops.{name} is deprecated; use symmpool.ops.{new}", DeprecationWarning, stacklevel=3
    )


def all_gather(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """An earlier name of `all_gather_tensor`."""
    _warn_of_earlier("all_gather", "all_gather_tensor")
    return all_gather_tensor(x, 0, group)


def reduce_scatter(x: torch.Tensor, op: str = "sum", group: Any = None) -> torch.Tensor:
    """An earlier name of `reduce_scatter_tensor`."""
    _warn_of_earlier("reduce_scatter", "reduce_scatter_tensor")
    return reduce_scatter_tensor(x, op, 0, group)


def all_to_all(
    x: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
) -> torch.Tensor:
    """An earlier name of `all_to_all_single`."""
    _warn_of_earlier("all_to_all", "all_to_all_single")
    return all_to_all_single(x, output_split_sizes, input_split_sizes, group)


# What compiled calls become, and what modes of torch see. The compiler reads these, so they are plain.


def _op_name(op: Any) -> str:
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
    raise InvalidArgumentError(f"op: {op} is none of {', '.join(name for _, name in constants)}")


def _not_async(async_op: bool) -> None:
    if async_op and torch.compiler.is_dynamo_compiling():
        raise InvalidArgumentError("async_op: not in compiled code; it orders calls by itself")


def _done(async_op: bool, *results: torch.Tensor) -> Any:
    """What a call returns that was made as an operator, and is done."""
    return DoneWork(list(results)) if async_op else None


def traced_all_reduce(tensor: Any, op: Any, group: Any, async_op: bool, out: Any) -> Any:
    _not_async(async_op)
    if out is not None:
        out.copy_(tensor)
        tensor = out
    torch.ops.symmpool.all_reduce_(tensor, _op_name(op), _text_of(group))
    return _done(async_op, tensor)


def traced_reduce_scatter(output: Any, input: Any, op: Any, group: Any, async_op: bool) -> Any:
    _not_async(async_op)
    name = _text_of(group)
    torch.ops.symmpool.reduce_scatter_into_(output, input, _op_name(op), name)
    return _done(async_op, output)


def traced_all_gather(output: Any, input: Any, group: Any, async_op: bool) -> Any:
    _not_async(async_op)
    torch.ops.symmpool.all_gather_into_(output, input, _text_of(group))
    return _done(async_op, output)


def traced_all_to_all(output: Any, input: Any, sizes: Any, group: Any, async_op: bool) -> Any:
    _not_async(async_op)
    received, sent = ([] if each is None else list(each) for each in sizes)
    torch.ops.symmpool.all_to_all_into_(output, input, received, sent, _text_of(group))
    return _done(async_op, output)


def traced_broadcast(tensor: Any, src: Any, group: Any, group_src: Any, async_op: bool) -> Any:
    _not_async(async_op)
    name = _text_of(group)
    if (src is None) == (group_src is None):
        raise InvalidArgumentError("broadcast: one of src and group_src is needed")
    if src is None:
        torch.ops.symmpool.broadcast_(tensor, group_src, name)
    else:
        torch.ops.symmpool.broadcast_from_(tensor, src, name)
    return _done(async_op, tensor)


def dispatched_barrier(device: int, group: Any, async_op: bool) -> Any:
    tensor = torch.empty(0, device="cpu" if device < 0 else f"cuda:{device}")
    torch.ops.symmpool.barrier_(tensor, _text_of(group))
    return _done(async_op)


def end_graph(call: str) -> None:
    """Ends a compiled graph before a call that is no operator for compilers."""
    why = "it is no operator"
    if call == "barrier":
        why = "a compiled graph writes to memory that it was given at its end, after any barrier within"
    torch._dynamo.graph_break(
        msg=f"symmpool.{call} has no place in a compiled graph: {why}; call it between compiled functions"
    )
