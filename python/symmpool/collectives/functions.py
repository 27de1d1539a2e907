"""Collectives on tensors with torch.distributed's signatures and meaning.

Which communicator serves a call follows from the group that it names: see `symmpool.seats`. A process
group of torch may also be given by its name.

No gradient flows through these calls: `symmpool.ops` has those with gradients. Where one writes to a
tensor that requires grad, and a gradient comes back by way of that, torch warns, as it does after a call of
torch.distributed. Modes of torch see calls on its tensors as operators of `torch.ops.symmpool`, so
`make_fx` records them; under `torch.compile` they become operators too, but for `barrier`, which ends a
graph.

A rank whose own arguments are wrong hears so at once, wherever the others are. They hear of it when they
come to the call; where that is the group's first one, which all ranks meet in, a thread tells them.

With `async_op=True` a call returns a `symmpool.work.Work` at once: on CUDA it runs on a stream of its own,
on the CPU in a thread of its own. Calls keep their order all the same: one that follows waits for
those before, as collectives of one group must run in the same order on every rank.

A call waits for a late rank as long as the timeout of the group that it names, or that the pool is on,
when its communicator is made; on a pool made of `(store, rank, world)`, as long as the pool's `timeout`
or else the store's. 30 s where none is known. Then it raises TimeoutError. `communicator(group).timeout`
can be set.
"""

from __future__ import annotations

from typing import Any

from symmpool.communicators import cache
from symmpool.communicators.cache import communicator, forget, looked_up
from symmpool.errors import InvalidArgumentError, TimeoutError
from symmpool.groups.names import decline, root_of, sizes_or_none

__all__ = [
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "communicator",
    "forget",
    "reduce_scatter_tensor",
]


def all_reduce(
    tensor: Any, op: Any = "sum", group: Any = None, async_op: bool = False, *, out: Any = None
) -> Any:
    """Reduces every rank's `tensor` in place; or into every rank's `out`, of the same length and
    type. `op` is a name ("sum", "prod", "min", "max", "avg") or a constant of
    torch.distributed.ReduceOp. Returns a Work with `async_op`, else None.

    Tensors are contiguous, of torch, numpy or this package; see `Communicator` for their types and
    for errors."""
    if cache.compiling() or (cache.modes._is_in_torch_dispatch_mode and cache.is_seen(tensor, group)):
        from symmpool import ops

        return ops.traced_all_reduce(tensor, op, group, async_op, out)
    try:
        # As `cache.is_traced` and `cache.find_to_write` do: this call is made the most, and a frame more
        # would be felt.
        at = id(cache.torch_world._default_pg if group is None else group)
        seat = looked_up[tensor.get_device()][at]
        if group is not None and seat.registered is not None and group not in seat.registered:
            raise KeyError(at)
        if (tensor if out is None else out).requires_grad:
            cache.watch(tensor if out is None else out)
    except (AttributeError, KeyError):
        seat = cache.find_to_write(tensor, group, out, ("all_reduce", (tensor, op, out), None))
        if seat is None:
            return None
    if async_op:
        return seat.begin(seat.comm.all_reduce, (tensor, op, out), [tensor if out is None else out])
    if seat.tail is not None:
        seat.settle_for(seat.comm.all_reduce, (tensor, op, out))
    try:
        return seat.comm.all_reduce(tensor, op, out)
    except TimeoutError as error:
        cache.explain(seat, error)
        raise


def reduce_scatter_tensor(
    output: Any, input: Any, op: Any = "sum", group: Any = None, async_op: bool = False
) -> Any:
    """Reduces part r of every rank's `input` into rank r's `output`. Otherwise as `all_reduce`."""
    if cache.is_traced(output, group):
        from symmpool import ops

        return ops.traced_reduce_scatter(output, input, op, group, async_op)
    arguments = (output, input, op)
    seat = cache.find_to_write(output, group, None, ("reduce_scatter", arguments, None))
    if seat is None:
        return None
    return cache.run(seat, seat.comm.reduce_scatter, arguments, [output], async_op)


def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
) -> Any:
    """Copies rank r's `input_tensor` to part r of every rank's `output_tensor`. Where parts are as large
    as is said of `all_to_all_single`, outputs in a pool's memory lie at one offset on all ranks. Otherwise
    as `all_reduce`, but elements may be of any type that `Communicator` moves."""
    if cache.is_traced(output_tensor, group):
        from symmpool import ops

        return ops.traced_all_gather(output_tensor, input_tensor, group, async_op)
    arguments = (output_tensor, input_tensor)
    seat = cache.find_to_write(output_tensor, group, None, ("all_gather", arguments, None))
    if seat is None:
        return None
    return cache.run(seat, seat.comm.all_gather, arguments, [output_tensor], async_op)


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Sends part r of `input` to rank r, where it becomes part `rank` of `output`. Split sizes are
    rows for every rank; without them parts are equal. On CUDA, where equal parts of 16 MiB or more, 48
    in all, leave a rank, outputs in a pool's memory lie at one offset on all ranks: they are allocated
    in the same order everywhere, or SYMMPOOL_ALL_TO_ALL=direct is set. Otherwise as `all_reduce`, but
    elements may be of any type that `Communicator` moves."""
    if cache.is_traced(output, group):
        from symmpool import ops

        sizes = (output_split_sizes, input_split_sizes)
        return ops.traced_all_to_all(output, input, sizes, group, async_op)
    arguments = (output, input, sizes_or_none(output_split_sizes), sizes_or_none(input_split_sizes))
    seat = cache.find_to_write(output, group, None, ("all_to_all_single", arguments, None))
    if seat is None:
        return None
    return cache.run(seat, seat.comm.all_to_all_single, arguments, [output], async_op)


def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    *,
    group_src: int | None = None,
) -> Any:
    """Copies rank `src`'s `tensor` into every other rank's. On a process group of torch `src` is a
    rank of the default group, as in torch, and `group_src` one of `group`; elsewhere they are the
    same. Otherwise as `all_gather_into_tensor`."""
    if cache.is_traced(tensor, group):
        from symmpool import ops

        return ops.traced_broadcast(tensor, src, group, group_src, async_op)
    root, wrong = root_of(group, src, group_src)
    seat = cache.find_to_write(tensor, group, None, ("broadcast", (tensor, root), wrong))
    if seat is None:
        return None
    if wrong is not None:
        decline(seat, seat.comm.broadcast, tensor, root)
        raise wrong
    return cache.run(seat, seat.comm.broadcast, (tensor, root), [tensor], async_op)


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, *, device: Any = None) -> Any:
    """On the CPU, returns once every rank has called it; on CUDA, holds the current stream until
    every rank's has come to it. `device` says where, or `device_ids`, torch's list of one CUDA device's
    number; without both, where the group's first pool is, or on the CPU if there is none. It ends a
    compiled graph, so there is none under `fullgraph=True`."""
    if cache.compiling():
        from symmpool import ops

        return ops.traced_barrier()
    if device is None and device_ids is not None:
        device = _device_of(device_ids)
    if device is None:
        try:
            device = cache.first_device(group)
        except TypeError:
            device = "cpu"  # of what can be no group, as is said below
    number = cache.number_of(str(device))
    if cache.modes._is_in_torch_dispatch_mode and cache.is_seen(None, group):
        from symmpool import ops

        return ops.dispatched_barrier(number, group, async_op)
    seat = cache.search(None, group, number)
    if seat is None:
        return None
    return cache.run(seat, seat.comm.barrier, (), [], async_op)


def _device_of(device_ids: Any) -> str:
    numbers = list(device_ids) if isinstance(device_ids, (list, tuple)) else []
    if len(numbers) != 1 or not isinstance(numbers[0], int):
        raise InvalidArgumentError(
            f"device_ids: {device_ids!r} is no list of one number; a rank has one device"
        )
    return f"cuda:{numbers[0]}"
