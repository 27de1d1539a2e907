"""Collectives on tensors with torch.distributed's signatures and meaning.

A call finds its communicator by the group that it names: a process group of torch, a
`symmpool.Group` or a `symmpool.Pool`; without one, the default group. On a group with several pools
the one that holds the tensor is meant; a tensor that none holds goes through the first. A group
without a pool gets one at its first call, which is collective like the call itself. Communicators
are made when they are first needed, and kept as long as the group.

With `async_op=True` a call returns a `symmpool.work.Work` at once: on CUDA it runs on a stream of its own,
on the CPU in a thread of its own. Calls keep their order all the same: one that follows waits for
those before, as collectives of one group must run in the same order on every rank.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from typing import Any

from symmpool import groups, work
from symmpool._symmpool import Communicator, Group, Pool
from symmpool.errors import InvalidArgumentError

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


class Seat:
    """A pool's communicator, and what is under way on it."""

    __slots__ = ("comm", "device", "tail", "side", "__weakref__")

    def __init__(self, pool: Pool):
        self.comm = Communicator(pool)
        self.device = _number_of(pool.device)
        # The last call that was made with async_op, until something has waited for it.
        self.tail: Any = None
        # What such calls run on: a stream, or a thread.
        self.side: Any = None

    def settle(self) -> None:
        """What follows comes after all that was begun."""
        tail, self.tail = self.tail, None
        if tail is not None:
            tail.precede()

    def begin(self, call: Any, arguments: tuple[Any, ...], results: list[Any]) -> Any:
        """Makes a call without waiting for it."""
        if self.device < 0:
            if self.side is None:
                self.side = work.Worker(self)
            self.tail = self.side.submit(call, arguments, results)
        else:
            if self.side is None:
                import torch

                self.side = work.Side(torch, self.device)
            self.tail = self.side.submit(self.comm, call, arguments, results)
        return self.tail


# What serves a group on a device, with the pool that it is on: kept as long as the group is.
_defaults: weakref.WeakKeyDictionary[Any, dict[int, tuple[Pool, Seat]]]
_defaults = weakref.WeakKeyDictionary()
_of_pool: weakref.WeakKeyDictionary[Pool, Seat] = weakref.WeakKeyDictionary()
# Where look-ups by group led, for groups with one pool: by the device, then the group's id. Emptied
# whenever there is a new pool.
_found: dict[int, dict[int, Seat]] = {}
# References to these groups, which take out what was found when a group goes, before another object
# can have its id.
_watching: dict[tuple[int, int], weakref.ref] = {}
# Finding and making are for one thread at a time.
_lock = threading.RLock()
# torch.compiler.is_dynamo_compiling, once torch is there. What it says is put in by who compiles.
_compiling: Any = bool


class _World:
    """Where the default group is looked up, as `_default_pg`: in torch's own object if that has it
    by this name, which saves a call, else here."""

    def __init__(self, world: Any = None):
        self.world = world

    @property
    def _default_pg(self) -> Any:
        return getattr(self.world, "default_pg", None)


_torch_world: Any = _World()
_torch_is_known = False


def _look_for_torch() -> None:
    global _compiling, _torch_world, _torch_is_known
    torch = sys.modules.get("torch")
    _compiling = getattr(getattr(torch, "compiler", None), "is_dynamo_compiling", bool)
    dist = groups.distributed() if torch is not None else None
    world = getattr(getattr(dist, "distributed_c10d", None), "_world", None)
    _torch_is_known = world is not None
    _torch_world = world if "_default_pg" in getattr(world, "__dict__", ()) else _World(world)


def forget_lookups() -> None:
    """What was looked up may be different now."""
    _found.clear()
    _watching.clear()


groups.when_made(forget_lookups)


def _forget_lookup(device: int, group: int) -> None:
    _found.get(device, {}).pop(group, None)
    _watching.pop((device, group), None)


def forget(pool: Pool) -> None:
    """Lets go of the communicator that module-level collectives made on a pool, and of the pool,
    which its group keeps otherwise. Every rank does so in the same place of its program."""
    with _lock:
        forget_lookups()
        _of_pool.pop(pool, None)
        for seats in _defaults.values():
            for device in [each for each, found in seats.items() if found[0] is pool]:
                del seats[device]


def communicator(group: Any = None, device: Any = "cpu") -> Communicator:
    """The communicator that serves a group, or a pool, on a device ("cpu", "cuda:N"); made if need
    be, which is collective."""
    seat = _search(None, group, _number_of(str(device)))
    if seat is None:
        raise InvalidArgumentError("group: this process is no member of it")
    return seat.comm


def _number_of(device: str) -> int:
    """A CUDA device's number, -1 for the CPU."""
    if device == "cpu":
        return -1
    kind, _, number = device.partition(":")
    if device == "cuda" and "torch" in sys.modules:
        return sys.modules["torch"].cuda.current_device()
    if kind != "cuda" or not number.isdigit():
        raise InvalidArgumentError(f"device: {device!r} is neither cpu nor cuda:N")
    return int(number)


def _device_of(tensor: Any) -> int:
    try:
        return tensor.get_device()
    except AttributeError:
        return _number_of(str(getattr(tensor, "device", "cpu")))


def _seat(tensor: Any, group: Any) -> Seat | None:
    """Where a call on a tensor goes; made if need be. None where this process has no part in it."""
    try:
        # Of torch's tensors; others come to `_device_of`.
        device = tensor.get_device()
        return _found[device][id(_torch_world._default_pg if group is None else group)]
    except (AttributeError, KeyError):
        return _search(tensor, group, _device_of(tensor))


def _search(tensor: Any, group: Any, device: int) -> Seat | None:
    with _lock:
        if group is not None and _outside(group):
            return None
        if not _torch_is_known:
            _look_for_torch()
        if isinstance(group, Pool):
            return _seat_of(group)
        key = groups.key_of(group)
        groups.resolve(key)  # refuses what is no group
        name = f"cuda:{device}" if device >= 0 else "cpu"
        pools = [pool for pool in groups.pools_of(key) if pool.device == name]
        if len(pools) > 1 and tensor is not None:
            holding = next((pool for pool in pools if pool.holds(tensor)), None)
            if holding is not None:
                return _seat_of(holding)
        seats = _defaults.setdefault(key, {})
        if device not in seats:
            pool = pools[0] if pools else Pool(key, name)
            seats[device] = (pool, _seat_of(pool))
        seat = seats[device][1]
        if len(pools) < 2:
            at = id(key)
            _watching[device, at] = weakref.ref(key, lambda _: _forget_lookup(device, at))
            _found.setdefault(device, {})[at] = seat
        return seat


def _seat_of(pool: Pool) -> Seat:
    seat = _of_pool.get(pool)
    if seat is None:
        seat = _of_pool[pool] = Seat(pool)
    return seat


def _is_outside(group: Any) -> bool:
    dist = groups.distributed()
    return dist is not None and group is dist.GroupMember.NON_GROUP_MEMBER


def _outside(group: Any) -> bool:
    """Whether this process is no member of a group. Such calls do nothing, as torch's."""
    if not _is_outside(group):
        return False
    why = "symmpool: a collective on a group that this process is no member of does nothing"
    warnings.warn(why, stacklevel=4)
    return True


def _run(
    seat: Seat, call: Any, arguments: tuple[Any, ...], results: list[Any], async_op: bool
) -> Any:
    if async_op:
        return seat.begin(call, arguments, results)
    if seat.tail is not None:
        seat.settle()
    call(*arguments)
    return None


def all_reduce(
    tensor: Any, op: Any = "sum", group: Any = None, async_op: bool = False, *, out: Any = None
) -> Any:
    """Reduces every rank's `tensor` in place; or into every rank's `out`, of the same length and
    type. `op` is a name ("sum", "prod", "min", "max", "avg") or a constant of
    torch.distributed.ReduceOp. Returns a Work with `async_op`, else None.

    Tensors are contiguous, of torch, numpy or this package; see `Communicator` for their types and
    for errors."""
    if _compiling():
        from symmpool import ops

        return ops.traced_all_reduce(tensor, op, group, async_op, out)
    try:
        # As `_seat` does: this call is made the most, and a frame more would be felt.
        at = id(_torch_world._default_pg if group is None else group)
        seat: Seat | None = _found[tensor.get_device()][at]
    except (AttributeError, KeyError):
        seat = _seat(tensor, group)
    if seat is None:
        return None
    if async_op:
        results = [tensor if out is None else out]
        return seat.begin(seat.comm.all_reduce, (tensor, op, out), results)
    if seat.tail is not None:
        seat.settle()
    return seat.comm.all_reduce(tensor, op, out)


def reduce_scatter_tensor(
    output: Any, input: Any, op: Any = "sum", group: Any = None, async_op: bool = False
) -> Any:
    """Reduces part r of every rank's `input` into rank r's `output`. Otherwise as `all_reduce`."""
    if _compiling():
        from symmpool import ops

        return ops.traced_reduce_scatter(output, input, op, group, async_op)
    seat = _seat(output, group)
    if seat is None:
        return None
    if async_op:
        return seat.begin(seat.comm.reduce_scatter, (output, input, op), [output])
    if seat.tail is not None:
        seat.settle()
    seat.comm.reduce_scatter(output, input, op)
    return None


def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
) -> Any:
    """Copies rank r's `input_tensor` to part r of every rank's `output_tensor`. Otherwise as
    `all_reduce`."""
    if _compiling():
        from symmpool import ops

        return ops.traced_all_gather(output_tensor, input_tensor, group, async_op)
    seat = _seat(output_tensor, group)
    if seat is None:
        return None
    if async_op:
        return seat.begin(seat.comm.all_gather, (output_tensor, input_tensor), [output_tensor])
    if seat.tail is not None:
        seat.settle()
    seat.comm.all_gather(output_tensor, input_tensor)
    return None


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Sends part r of `input` to rank r, where it becomes part `rank` of `output`. Split sizes are
    rows for every rank; without them parts are equal. Otherwise as `all_reduce`."""
    if _compiling():
        from symmpool import ops

        sizes = (output_split_sizes, input_split_sizes)
        return ops.traced_all_to_all(output, input, sizes, group, async_op)
    seat = _seat(output, group)
    if seat is None:
        return None
    # torch writes "none" as an empty list, too.
    arguments = (output, input, output_split_sizes or None, input_split_sizes or None)
    return _run(seat, seat.comm.all_to_all_single, arguments, [output], async_op)


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
    same. Otherwise as `all_reduce`."""
    if (src is None) == (group_src is None):
        raise InvalidArgumentError("broadcast: one of src and group_src is needed")
    seat = _seat(tensor, group)
    if seat is None:
        return None
    root = group_src if src is None else _rank_in(group, src)
    return _run(seat, seat.comm.broadcast, (tensor, root), [tensor], async_op)


def barrier(group: Any = None, async_op: bool = False, *, device: Any = None) -> Any:
    """On the CPU, returns once every rank has called it; on CUDA, holds the current stream until
    every rank's has come to it. `device` says where; without it, where the group's first pool is,
    or on the CPU if there is none."""
    if device is None:
        device = _first_device(group)
    seat = _search(None, group, _number_of(str(device)))
    if seat is None:
        return None
    return _run(seat, seat.comm.barrier, (), [], async_op)


def _first_device(group: Any) -> str:
    if isinstance(group, Pool):
        return group.device
    if _is_outside(group):
        return "cpu"
    pools = groups.pools_of(groups.key_of(group))
    return pools[0].device if pools else "cpu"


def _rank_in(group: Any, rank: int) -> int:
    """A rank of the default group of torch, as a rank of `group`."""
    if group is None or isinstance(group, (Group, Pool)):
        return rank
    dist = groups.distributed()
    return dist.get_group_rank(group, rank) if dist is not None else rank


_look_for_torch()
