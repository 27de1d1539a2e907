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

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from symmpool._symmpool import Group, Pool
from symmpool.collectives import plans, traced
from symmpool.collectives.calls import make, needs_plan, op_name, reduction_needs_plan
from symmpool.collectives.traced import name_of_op, text_of
from symmpool.communicators.gradients import warn_of_gradient, watch
from symmpool.errors import InvalidArgumentError
from symmpool.groups import process_groups, resolution
from symmpool.groups.names import group_of, name_of, rank_in, resolved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmpool.collectives.calls import Planner
    from symmpool.collectives.plans import Plan
    from symmpool.collectives.types import SplitSizes
    from symmpool.groups.types import GroupLike

__all__ = [
    "all_gather_tensor",
    "all_reduce",
    "all_to_all_single",
    "name_of",
    "reduce_scatter_tensor",
    "text_of",
    "traced",
]

_library = torch.library.Library("symmpool", "DEF")

for _signature in (
    "all_reduce_(Tensor(a!) x, str op, str group) -> ()",
    "all_reduce_into_(Tensor(a!) out, Tensor x, str op, str group) -> ()",
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
    # Calls that compiled code makes with arguments that are wrong: they are refused when they run.
    "_refused_(Tensor(a!) x, str why, str group) -> ()",
    "_refused(Tensor x, str why, str group) -> Tensor",
    "_passed_by(Tensor gradient) -> Tensor",
):
    _library.define(_signature, tags=(torch.Tag.pt2_compliant_tag,))


def world_of(group: GroupLike) -> int:
    """The number of ranks of a group."""
    group = resolved(group)
    if isinstance(group, (Group, Pool)):
        return group.world
    dist = process_groups.distributed()
    if dist is not None and (group is not None or dist.is_initialized()):
        return dist.get_world_size(group)
    return resolution.resolve(group).world


def _check_parts(x: torch.Tensor, world: int, what: str) -> None:
    if x.dim() == 0 or x.shape[0] % world:
        raise InvalidArgumentError(
            f"{what}: the first dimension of {tuple(x.shape)} is not for {world} ranks"
        )


# Implementations of the operators.


def _make(x: torch.Tensor, group: str, plan: Planner) -> None:
    """Makes a call on the communicator that serves a group on the tensor's device."""
    make(x, group_of(group), plan, False)


def _make_new(x: torch.Tensor, group: str, give: Any, plan_into: Any) -> torch.Tensor:
    """Makes a call whose result is the new tensor that `give()` gives. Where that fails, for a wrong argument
    or a lack of memory, the other ranks raise the reason."""
    made: torch.Tensor | None = None

    def plan(rank: int, world: int) -> Plan:
        nonlocal made
        made = give()
        return plan_into(made)(rank, world)

    _make(x, group, plan)
    # There was no call if this process is no member of the group.
    return give() if made is None else made


def _all_reduce_(x: torch.Tensor, op: str, group: str) -> None:
    _make(x, group, _plan_all_reduce(None, x, op))


def _plan_all_reduce(out: torch.Tensor | None, x: torch.Tensor, op: str) -> Planner:
    def plan(rank: int, world: int) -> Plan:
        if needs_plan(x, out) or reduction_needs_plan(op, x):
            return plans.all_reduce(x, op_name(op), world, out)
        return ("all_reduce", (x, op, out), None, [])

    return plan


def _all_reduce_into_(out: torch.Tensor, x: torch.Tensor, op: str, group: str) -> None:
    _make(x, group, _plan_all_reduce(out, x, op))


def _all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    give = functools.partial(_all_reduce_fake, x, op, group)
    return _make_new(x, group, give, lambda out: _plan_all_reduce(out, x, op))


def _plan_all_gather(out: torch.Tensor, x: torch.Tensor) -> Planner:
    return lambda rank, world: plans.all_gather_into_tensor(out, x, world)


def _all_gather(x: torch.Tensor, world: int, group: str) -> torch.Tensor:
    give = functools.partial(_all_gather_fake, x, world, group)
    return _make_new(x, group, give, lambda out: _plan_all_gather(out, x))


def _all_gather_into_(out: torch.Tensor, x: torch.Tensor, group: str) -> None:
    _make(out, group, _plan_all_gather(out, x))


def _plan_reduce_scatter(out: torch.Tensor, x: torch.Tensor, op: str) -> Planner:
    def plan(rank: int, world: int) -> Plan:
        if needs_plan(out, x) or reduction_needs_plan(op, x):
            return plans.reduce_scatter_tensor(out, x, op_name(op), world)
        return ("reduce_scatter_tensor", (out, x, op), None, [])

    return plan


def _reduce_scatter(x: torch.Tensor, op: str, world: int, group: str) -> torch.Tensor:
    def give() -> torch.Tensor:
        _check_parts(x, world, "reduce_scatter")
        return _reduce_scatter_fake(x, op, world, group)

    return _make_new(x, group, give, lambda out: _plan_reduce_scatter(out, x, op))


def _reduce_scatter_into_(out: torch.Tensor, x: torch.Tensor, op: str, group: str) -> None:
    _make(out, group, _plan_reduce_scatter(out, x, op))


def _plan_all_to_all(
    out: torch.Tensor, x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
) -> Planner:
    sizes = (list(output_splits) or None, list(input_splits) or None)
    return lambda rank, world: plans.all_to_all_single(out, x, *sizes, world)


def _all_to_all(
    x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], world: int, group: str
) -> torch.Tensor:
    splits = (output_splits, input_splits)

    def give() -> torch.Tensor:
        if bool(output_splits) != bool(input_splits):
            raise InvalidArgumentError("all_to_all: both kinds of split sizes are needed, or none")
        if not output_splits:
            _check_parts(x, world, "all_to_all")
        elif x.dim() == 0 or min(output_splits) < 0:
            raise InvalidArgumentError(
                f"all_to_all: split sizes {list(output_splits)} are not for rows of a tensor of shape "
                f"{tuple(x.shape)}"
            )
        return _all_to_all_fake(x, *splits, world, group)

    return _make_new(x, group, give, lambda out: _plan_all_to_all(out, x, *splits))


def _all_to_all_into_(
    out: torch.Tensor, x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str
) -> None:
    _make(out, group, _plan_all_to_all(out, x, output_splits, input_splits))


def _broadcast_(x: torch.Tensor, src: int, group: str) -> None:
    _make(x, group, lambda rank, world: plans.broadcast(x, src, rank))


def _broadcast_from_(x: torch.Tensor, src: int, group: str) -> None:
    def plan(rank: int, world: int) -> Plan:
        return plans.broadcast(x, rank_in(group, "broadcast", src=src, group_src=None), rank)

    _make(x, group, plan)


def _barrier_(x: torch.Tensor, group: str) -> None:
    _make(x, group, lambda rank, world: ("barrier", (), None, []))


def _refused_(x: torch.Tensor, why: str, group: str) -> None:
    def plan(rank: int, world: int) -> Plan:
        raise InvalidArgumentError(why)

    _make(x, group, plan)


def _refused(x: torch.Tensor, why: str, group: str) -> torch.Tensor:
    _refused_(x, why, group)
    return torch.empty_like(x)


# Shapes of the operators' results, without the calls. Wrong arguments are refused where the calls are made,
# as compilers ask for shapes on each rank alone.


def _all_reduce_fake(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _all_gather_fake(x: torch.Tensor, world: int, group: str) -> torch.Tensor:
    if x.dim() == 0:
        return x.new_empty((world,))
    return x.new_empty((x.shape[0] * world, *x.shape[1:]))


def _reduce_scatter_fake(x: torch.Tensor, op: str, world: int, group: str) -> torch.Tensor:
    return x.new_empty((x.shape[0] // world, *x.shape[1:]) if x.dim() else ())


def _all_to_all_fake(
    x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], world: int, group: str
) -> torch.Tensor:
    return x.new_empty((sum(output_splits), *x.shape[1:]) if output_splits else x.shape)


def _refused_fake(x: torch.Tensor, why: str, group: str) -> torch.Tensor:
    return torch.empty_like(x)


def _nothing(*_: object) -> None:
    return None


_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "all_reduce_": (_all_reduce_, _nothing),
    "all_reduce_into_": (_all_reduce_into_, _nothing),
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
    "_refused_": (_refused_, _nothing),
    "_refused": (_refused, _refused_fake),
}
for _name, (_does, _gives) in _OPERATORS.items():
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _does, _key)
    torch.library.register_fake(f"symmpool::{_name}", _gives, lib=_library)

_ops = torch.ops.symmpool


# Gradients.


def _keep_reduction(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.op, ctx.group = inputs[1], inputs[-1]


def _refused_gradient(ctx: Any, what: str, gradient: torch.Tensor) -> torch.Tensor:
    """Refuses a gradient that there is none of, as a call: another rank may go backward elsewhere."""
    return _ops._refused(gradient, f"{what}: no gradient flows through {ctx.op!r}", ctx.group)


def _all_reduce_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    if ctx.op not in ("sum", "avg"):
        return _refused_gradient(ctx, "all_reduce", gradient), None, None
    return _ops.all_reduce(gradient, ctx.op, ctx.group), None, None


def _keep_gather(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
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


def _keep_scatter(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    _, ctx.op, ctx.world, ctx.group = inputs


def _reduce_scatter_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    if ctx.op not in ("sum", "avg"):
        return _refused_gradient(ctx, "reduce_scatter", gradient), None, None, None
    whole = _ops.all_gather(gradient, ctx.world, ctx.group)
    return whole / ctx.world if ctx.op == "avg" else whole, None, None, None


def _keep_splits(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
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


def _watched(name: str) -> Any:
    """An operator that writes to its first tensor, where autograd sees it. It has no gradient, so what comes
    back by way of the tensor is what comes back in eager code: as it is, with a warning. The warning is a
    hook of the tensor; where autograd itself is recorded, as compilers do, it becomes an operator of the
    backward graph. Autograd refuses a backward pass that needs what the call has overwritten."""
    operator = getattr(_ops, name).default

    def call(written: torch.Tensor, *rest: object) -> None:
        watch(written)
        torch.autograd.graph.increment_version(written)
        with torch._C._AutoDispatchBelowAutograd():
            operator(written, *rest)

    return call


def _passed_by(gradient: torch.Tensor) -> torch.Tensor:
    warn_of_gradient()
    return gradient.clone()


for _key in ("CPU", "CUDA"):
    _library.impl("_passed_by", _passed_by, _key)
torch.library.register_fake("symmpool::_passed_by", torch.empty_like, lib=_library)
# Gradients of gradients pass by as well.
torch.library.register_autograd("symmpool::_passed_by", lambda _, gradient: gradient, lib=_library)

for _name in _OPERATORS:
    if _name.endswith("_"):
        # torch would copy an output that is negated lazily, and lose the result: calls read it as it is.
        for _key in ("Negative", "Conjugate"):
            _library.impl(_name, torch.library.fallthrough_kernel, _key)
    if _name.endswith("_") and _name not in ("barrier_", "_refused_"):
        _library.impl(_name, _watched(_name), "Autograd")

# These change nothing, so gradients pass by them.
for _name in ("barrier_", "_refused_", "_refused"):
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")


# With the group itself.


def all_reduce(x: torch.Tensor, op: str = "sum", group: GroupLike = None) -> torch.Tensor:
    """Every rank's `x` reduced, as a new tensor; with a gradient for "sum" and "avg"."""
    return _ops.all_reduce(x, name_of_op(op), text_of(group))


def all_gather_tensor(x: torch.Tensor, gather_dim: int = 0, group: GroupLike = None) -> torch.Tensor:
    """Every rank's `x`, one after the other along a dimension; with a gradient."""
    world = world_of(group)
    # The result counts: it has a dimension where a single element comes in.
    if not isinstance(gather_dim, (int, torch.SymInt)) or not -max(x.dim(), 1) <= gather_dim < max(
        x.dim(), 1
    ):
        why = f"all_gather_tensor: a tensor of shape {tuple(x.shape)} has no dimension {gather_dim}"
        return _ops._refused(x, why, text_of(group))
    found = _ops.all_gather(x, world, text_of(group))
    return found if gather_dim == 0 else torch.cat(found.chunk(world), dim=gather_dim)


def reduce_scatter_tensor(
    x: torch.Tensor, op: str = "sum", scatter_dim: int = 0, group: GroupLike = None
) -> torch.Tensor:
    """This rank's part of every rank's `x` reduced, in equal parts along a dimension; with a gradient for
    "sum" and "avg"."""
    world = world_of(group)
    if scatter_dim != 0:
        is_dim = isinstance(scatter_dim, (int, torch.SymInt)) and -x.dim() <= scatter_dim < x.dim()
        if not is_dim or x.shape[scatter_dim] % world:
            why = (
                f"reduce_scatter_tensor: dimension {scatter_dim} of {tuple(x.shape)} is not for {world} ranks"
            )
            return _ops._refused(x, why, text_of(group))
        x = torch.cat(x.chunk(world, dim=scatter_dim))
    return _ops.reduce_scatter(x, name_of_op(op), world, text_of(group))


def all_to_all_single(
    x: torch.Tensor,
    output_split_sizes: SplitSizes = None,
    input_split_sizes: SplitSizes = None,
    group: GroupLike = None,
) -> torch.Tensor:
    """Returns the rows that every rank sends to this one; rows are sent in equal parts, or by split sizes
    (both are needed then); with a gradient."""
    for name, given in (("output", output_split_sizes), ("input", input_split_sizes)):
        if not traced.are_sizes(given):
            why = f"all_to_all_single: {name}_split_sizes: a list of integers is needed, or None"
            return _ops._refused(x, why, text_of(group))
    received = [] if output_split_sizes is None else list(output_split_sizes)
    sent = [] if input_split_sizes is None else list(input_split_sizes)
    return _ops.all_to_all(x, received, sent, world_of(group), text_of(group))
