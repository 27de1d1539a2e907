"""Collectives on tensors with torch.distributed's names, signatures and meaning.

Which communicator serves a call follows from the group that it names: see `symmpool.communicators.cache`. A
process group of torch may also be given by its name.

Tensors are torch's, numpy's or this package's, on one device. Calls that only move data take elements of 1,
2, 4, 8 or 16 bytes; reductions take floats, integers and bool, sums and products complex numbers as well, and
bits of integers and bool can be combined (BAND, BOR, BXOR). Tensors of torch need not be contiguous. What a
communicator does not reduce by itself, lists of tensors, `reduce`, `gather` and `scatter` go by way of copies
that torch makes, so they need torch.

No gradient flows through these calls: `symmpool.ops` has those with gradients. Where one writes to a
tensor that requires grad, and a gradient comes back by way of that, torch warns, as it does after a call of
torch.distributed. Modes of torch see `all_reduce`, `all_gather_into_tensor`, `reduce_scatter_tensor`,
`all_to_all_single`, `broadcast` and `barrier` on its tensors as operators of `torch.ops.symmpool`, so
`make_fx` records them; under `torch.compile` they become operators too, but for `barrier`. That and all other
calls end a compiled graph.

A rank whose own arguments are wrong raises that at once, wherever the others are. They raise DivergedError
when they come to the call; where that is the group's first one, which all ranks meet in, a thread reports it.

With `async_op=True` a call returns a `symmpool.Work` at once: on CUDA it runs on a stream of its own,
on the CPU in a thread of its own. Calls keep their order all the same: one that follows waits for
those before, as collectives of one group must run in the same order on every rank. Copies that a call goes by
way of are a part of it: what a call has written is what the next one copies, whoever waited for it. A wait
for earlier calls that ends by Ctrl-C leaves this call out on every rank: the others raise DivergedError.

A call waits for a late rank as long as the timeout of the group that it names, or that the pool is on,
when its communicator is made; on a pool made of `(store, rank, world)`, as long as the pool's `timeout`
or else the store's. 30 s where none is known. Then it raises TimeoutError. `communicator(group).timeout`
can be set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symmpool.collectives.calls import (
    make,
    make_direct,
    needs_plan,
    op_name,
    reduction_needs_plan,
    with_results,
)
from symmpool.collectives.reduce_op import ReduceOp
from symmpool.communicators import cache, devices, torch_state
from symmpool.communicators.cache import communicator, forget, looked_up
from symmpool.communicators.gradients import watch
from symmpool.errors import InvalidArgumentError, TimeoutError, UnsupportedError
from symmpool.groups.names import rank_in, sizes_or_none

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import NoReturn

    import torch

    from symmpool.collectives.plans import Plan
    from symmpool.collectives.types import Op, SplitSizes, Tensor
    from symmpool.communicators.work import Work
    from symmpool.groups.types import GroupLike

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "communicator",
    "forget",
    "gather",
    "gather_single",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
]


def all_reduce(
    tensor: Tensor,
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    out: Tensor | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """Reduces every rank's `tensor` in place; or into every rank's `out`, of the same length and
    type. `op` is one of `ReduceOp`, its name ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor") or a
    constant of torch.distributed.ReduceOp. `algorithm` is the name of a built-in algorithm or of one that
    was registered (`symmpool.register`), the same on every rank. Returns a Work with `async_op`, else None.

    Raises InvalidArgumentError or TypeError for arguments that make no sense, and then DivergedError on the
    other ranks; DivergedError where ranks make different calls; TimeoutError and PeerLostError where a rank
    does not come."""
    if torch_state.compiling() or (
        torch_state.modes._is_in_torch_dispatch_mode and torch_state.is_seen(tensor, group)
    ):
        from symmpool.ops import traced

        return traced.traced_all_reduce(tensor, op, group, async_op, out, algorithm)
    entry = None
    try:
        # These lines repeat `torch_state.is_traced` and `cache.communicator_to_write`: this call is made the
        # most, and another frame would take a tenth of its time.
        at = id(torch_state.torch_world._default_pg if group is None else group)
        entry = looked_up[tensor.get_device()][at]  # type: ignore[union-attr]  # caught below
        if group is not None and entry.registered is not None and group not in entry.registered:
            entry = None
        elif (tensor if out is None else out).requires_grad:  # type: ignore[union-attr]  # caught below too
            watch(tensor if out is None else out)  # type: ignore[arg-type]  # only torch's have it
    except (AttributeError, KeyError):
        entry = None
    if entry is not None and not async_op and entry.pending is None and algorithm is None:
        try:
            if entry.comm._try_all_reduce(tensor, op, out):
                return None
        except TimeoutError as error:
            entry.explain(error)
            raise

    def plan(rank: int, world: int) -> Plan:
        if needs_plan(tensor, out) or reduction_needs_plan(op, tensor):
            from symmpool.collectives import layout, plans

            x = layout.as_torch("tensor", tensor)
            into = None if out is None else layout.as_torch("out", out)
            made = plans.all_reduce(x, op_name(op), world, into)
            return with_results(made, [tensor if out is None else out])
        return ("all_reduce", (tensor, op, out), None, [tensor if out is None else out])

    named = (algorithm, "all_reduce")
    return make(tensor, group, plan, async_op, [tensor if out is None else out], named)


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Reduces part r of every rank's `input` into rank r's `output`. Otherwise as `all_reduce`."""
    if torch_state.is_traced(output, group):
        from symmpool.ops import traced

        return traced.traced_reduce_scatter(output, input, op, group, async_op, algorithm)
    if not needs_plan(output, input) and not reduction_needs_plan(op, input):
        arguments, call = (output, input, op), "reduce_scatter_tensor"
        return make_direct(output, group, call, arguments, [output], async_op, algorithm)

    def plan(rank: int, world: int) -> Plan:
        from symmpool.collectives import layout, plans

        tensors = layout.as_torch("output", output), layout.as_torch("input", input)
        return with_results(plans.reduce_scatter_tensor(*tensors, op_name(op), world), [output])

    return make(output, group, plan, async_op, [output], (algorithm, "reduce_scatter_tensor"))


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Copies rank r's `input_tensor` to part r of every rank's `output_tensor`. Where parts are as large
    as is said of `all_to_all_single`, outputs in a pool's memory lie at one offset on all ranks. Otherwise
    as `all_reduce`, but elements may be of any type that `Communicator` moves."""
    if torch_state.is_traced(output_tensor, group):
        from symmpool.ops import traced

        return traced.traced_all_gather(output_tensor, input_tensor, group, async_op, algorithm)
    if not needs_plan(output_tensor, input_tensor):
        arguments, call = (output_tensor, input_tensor), "all_gather_into_tensor"
        return make_direct(output_tensor, group, call, arguments, [output_tensor], async_op, algorithm)

    def plan(rank: int, world: int) -> Plan:
        from symmpool.collectives import layout, plans

        output = layout.as_torch("output_tensor", output_tensor)
        made = plans.all_gather_into_tensor(output, layout.as_torch("input_tensor", input_tensor), world)
        return with_results(made, [output_tensor])

    named = (algorithm, "all_gather_into_tensor")
    return make(output_tensor, group, plan, async_op, [output_tensor], named)


def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """Calls `all_gather_into_tensor`, whose name this is in newer versions of torch."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Calls `reduce_scatter_tensor`, whose name this is in newer versions of torch."""
    return reduce_scatter_tensor(output, input, op, group, async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: SplitSizes = None,
    input_split_sizes: SplitSizes = None,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Sends part r of `input` to rank r, where it becomes part `rank` of `output`. Split sizes are
    rows for every rank, which may sum to fewer rows than there are (those of torch.distributed, also on the
    backend, are for all rows); without them parts are equal. On CUDA, where equal parts of 16 MiB or more, 48
    in all, leave a rank, outputs in a pool's memory lie at one offset on all ranks: they are allocated
    in the same order everywhere, or SYMMPOOL_ALL_TO_ALL=direct is set. Otherwise as `all_reduce`, but
    elements may be of any type that `Communicator` moves."""
    if torch_state.is_traced(output, group):
        from symmpool.ops import traced

        sizes = (output_split_sizes, input_split_sizes)
        return traced.traced_all_to_all(output, input, sizes, group, async_op, algorithm)
    sizes = (sizes_or_none(output_split_sizes), sizes_or_none(input_split_sizes))
    if not needs_plan(output, input):
        arguments = (output, input, *sizes)
        return make_direct(output, group, "all_to_all_single", arguments, [output], async_op, algorithm)

    def plan(rank: int, world: int) -> Plan:
        from symmpool.collectives import layout, plans

        tensors = layout.as_torch("output", output), layout.as_torch("input", input)
        return with_results(plans.all_to_all_single(*tensors, *sizes, world), [output])

    return make(output, group, plan, async_op, [output], (algorithm, "all_to_all_single"))


def all_to_all_v(
    output: Tensor,
    input: Tensor,
    input_splits: Tensor,
    output_splits: Tensor | None = None,
    output_offsets: Tensor | None = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Sends rows to all ranks like `all_to_all_single`, with sizes in tensors. They are read when the call
    runs: on CUDA no host waits for them. torch.distributed has no such call; see `Communicator.all_to_all_v`.
    Tensors are contiguous."""
    _end_graph("all_to_all_v", output, group)
    arguments = (output, input, input_splits, output_splits, output_offsets)

    def plan(rank: int, world: int) -> Plan:
        return ("all_to_all_v", arguments, None, [output])

    return make(output, group, plan, async_op, [output, output_splits, output_offsets])


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Copies rank `src`'s `tensor` into every other rank's. On a process group of torch `src` is a
    rank of the default group, as in torch, and `group_src` one of `group`; elsewhere they are the
    same. Otherwise as `all_gather_into_tensor`."""
    if torch_state.is_traced(tensor, group):
        from symmpool.ops import traced

        return traced.traced_broadcast(tensor, src, group, group_src, async_op, algorithm)
    planned = needs_plan(tensor)
    try:
        root = rank_in(group, "broadcast", src=src, group_src=group_src)
    except InvalidArgumentError:
        root = None  # the plan raises it again, where it can be reported to the other ranks
    if root is not None and not planned:
        return make_direct(tensor, group, "broadcast", (tensor, root), [tensor], async_op, algorithm)

    def plan(rank: int, world: int) -> Plan:
        root = rank_in(group, "broadcast", src=src, group_src=group_src)
        if not planned:
            return ("broadcast", (tensor, root), None, [tensor])
        from symmpool.collectives import layout, plans

        made = plans.broadcast(layout.as_torch("tensor", tensor), root, rank)
        return with_results(made, [tensor])

    return make(tensor, group, plan, async_op, [tensor], (algorithm, "broadcast"))


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduces every rank's `tensor` into rank `dst`'s; the others keep theirs. `dst` and `group_dst` are as
    `broadcast`'s sources. Otherwise as `all_reduce`, of which it is made."""
    _end_graph("reduce", tensor, group)
    # This rank's call writes to the root's tensor alone.
    written: list[Any] = []

    def plan(rank: int, world: int) -> Plan:
        from symmpool.collectives import layout, plans

        root = rank_in(group, "reduce", dst=dst, group_dst=group_dst)
        _check_rank("reduce", "dst", root, world)
        written[:] = [tensor] if rank == root else []
        x = layout.as_torch("tensor", tensor)
        return with_results(plans.reduce(x, op_name(op), root, rank, world), [tensor])

    return make(tensor, group, plan, async_op, written)


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """Copies rank r's `tensor` into tensor r of every rank's `tensor_list`. Ranks may have tensors of
    different sizes; each list says all of them. Otherwise as `all_gather_into_tensor`, which makes fewer
    copies."""
    _end_graph("all_gather", tensor, group)

    def plan(rank: int, world: int) -> Plan:
        from symmpool.collectives import layout, plans

        outputs = _listed("tensor_list", tensor_list)
        return plans.all_gather(outputs, layout.as_torch("tensor", tensor), world)

    return make(tensor, group, plan, async_op, _each(tensor_list))


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Reduces tensor r of every rank's `input_list` into rank r's `output`. Tensors of one list may be of
    different sizes, the same on every rank. Otherwise as `reduce_scatter_tensor`, which makes fewer
    copies."""
    _end_graph("reduce_scatter", output, group)

    def plan(rank: int, world: int) -> Plan:
        from symmpool.collectives import layout, plans

        inputs, x = _listed("input_list", input_list), layout.as_torch("output", output)
        return with_results(plans.reduce_scatter(x, inputs, op_name(op), rank, world), [output])

    return make(output, group, plan, async_op, [output])


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Sends tensor r of `input_tensor_list` to rank r, where it becomes tensor `rank` of
    `output_tensor_list`. Tensors may be of different sizes. Otherwise as `all_to_all_single`, which makes
    fewer copies."""
    tensor = next(iter(_each(output_tensor_list)), None)
    _end_graph("all_to_all", tensor, group)

    def plan(rank: int, world: int) -> Plan:
        from symmpool.collectives import plans

        outputs = _listed("output_tensor_list", output_tensor_list)
        return plans.all_to_all(outputs, _listed("input_tensor_list", input_tensor_list), world)

    return make(tensor, group, plan, async_op, _each(output_tensor_list))


def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Copies rank r's `tensor` into tensor r of rank `dst`'s `gather_list`; all are of one size. The others
    pass no list. `dst` and `group_dst` are as `broadcast`'s sources; without both it is rank 0. Otherwise as
    `all_gather`."""
    _end_graph("gather", tensor, group)

    def plan(rank: int, world: int) -> Plan:
        from symmpool.collectives import layout, plans

        root = rank_in(group, "gather", dst=dst, group_dst=group_dst, default=0)
        _check_rank("gather", "dst", root, world)
        parts = _listed("gather_list", gather_list) if gather_list else None
        return plans.gather(layout.as_torch("tensor", tensor), parts, root, rank, world)

    return make(tensor, group, plan, async_op, _each(gather_list))


def gather_single(
    tensor: Tensor,
    gather_tensor: Tensor | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Copies rank r's `tensor` to part r of rank `dst`'s `gather_tensor`. The others pass None. Otherwise as
    `gather`."""
    _end_graph("gather_single", tensor, group)

    def plan(rank: int, world: int) -> Plan:
        from symmpool.collectives import layout, plans

        root = rank_in(group, "gather_single", dst=dst, group_dst=group_dst, default=0)
        _check_rank("gather_single", "dst", root, world)
        whole = None if gather_tensor is None else layout.as_torch("gather_tensor", gather_tensor)
        made = plans.gather_single(whole, layout.as_torch("tensor", tensor), root, rank, world)
        return with_results(made, [] if gather_tensor is None else [gather_tensor])

    return make(tensor, group, plan, async_op, _each(None if gather_tensor is None else [gather_tensor]))


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copies tensor r of rank `src`'s `scatter_list` into rank r's `tensor`; all are of one size. The others
    pass no list. `src` and `group_src` are as `broadcast`'s; without both it is rank 0. Otherwise as
    `all_gather`."""
    _end_graph("scatter", tensor, group)

    def plan(rank: int, world: int) -> Plan:
        from symmpool.collectives import layout, plans

        root = rank_in(group, "scatter", src=src, group_src=group_src, default=0)
        _check_rank("scatter", "src", root, world)
        parts = _listed("scatter_list", scatter_list) if scatter_list else None
        return plans.scatter(layout.as_torch("tensor", tensor), parts, root, rank, world)

    return make(tensor, group, plan, async_op, [tensor])


def barrier(
    group: GroupLike = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    *,
    device: str | torch.device | None = None,
) -> Work | None:
    """On the CPU, returns once every rank has called it; on CUDA, holds the current stream until
    every rank's has come to it. `device` says where, or `device_ids`, torch's list of one CUDA device's
    number; without both, where the group's first pool is, or on the CPU if there is none. It ends a
    compiled graph, so there is none under `fullgraph=True`."""
    if torch_state.compiling():
        from symmpool.ops import traced

        traced.end_graph("barrier")
        return None
    try:
        if device is None and device_ids is not None:
            device = _device_of(device_ids)
        if device is None:
            try:
                device = cache.first_device(group)
            except TypeError:
                device = "cpu"  # the device of an object that can be no group, as is said below
        number = devices.number_of(str(device))
    except InvalidArgumentError as why:
        _refuse_barrier(group, why)
        raise
    if torch_state.modes._is_in_torch_dispatch_mode and torch_state.is_seen(None, group):
        from symmpool.ops import traced

        return traced.dispatched_barrier(number, group, async_op)
    entry = cache.look_up(None, group, number)
    return None if entry is None else entry.run(entry.comm.barrier, (), [], async_op)


def _refuse_barrier(group: GroupLike, why: BaseException) -> None:
    """Reports to the other ranks that this one makes no barrier, where the group's first pool is."""

    def refused(rank: int, world: int) -> NoReturn:
        raise why

    entry = cache.look_up(None, group, devices.number_of(cache.first_device(group)), refused)
    if entry is not None:
        with entry.preparing():
            raise why


def _device_of(device_ids: Sequence[int] | None) -> str:
    numbers = list(device_ids) if isinstance(device_ids, (list, tuple)) else []
    if len(numbers) != 1 or not isinstance(numbers[0], int):
        raise InvalidArgumentError(
            f"device_ids: {device_ids!r} is no list of one number; a rank has one device"
        )
    return f"cuda:{numbers[0]}"


def _end_graph(call: str, tensor: Tensor | None, group: GroupLike) -> None:
    """For calls that are no operators: they end a compiled graph, and modes of torch cannot see them."""
    if torch_state.compiling():
        from symmpool.ops import traced

        traced.end_graph(call)
    if torch_state.modes._is_in_torch_dispatch_mode and tensor is not None and _is_fake(tensor):
        raise UnsupportedError(
            f"symmpool.{call}: it is no operator of torch, so a fake tensor has no result of it; all_reduce, "
            "all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single and broadcast are"
        )


def _is_fake(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def _check_rank(call: str, name: str, root: int, world: int) -> None:
    if root >= world:
        raise InvalidArgumentError(f"{call}: {name}: root {root} of a group of {world} ranks")


def _each(tensors: Iterable[Tensor] | None) -> list[Tensor]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else []


def _listed(name: str, tensors: Iterable[Tensor]) -> list[torch.Tensor]:
    """The tensors of a list, as torch's."""
    from symmpool.collectives import layout

    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{name}: a list of tensors is needed, one for each rank, not {type(tensors)}")
    return [layout.as_torch(f"{name}[{at}]", each) for at, each in enumerate(tensors)]
