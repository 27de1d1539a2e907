"""Which communicator serves a call, and what is under way on it.

A call finds its communicator by the group that it names: a process group of torch or its name, a
`symmpool.Group` or a `symmpool.Pool`; without one, the default group. On a group with several pools the
one that holds the tensor is meant; a tensor that none holds goes through the first. A group without a
pool gets one at its first call, which is collective like the call itself. Communicators are made when
they are first needed, and kept as long as the group. What waits for other ranks holds up the calls that
need the same communicator, and no others: threads may each use a group of their own.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from symmpool._symmpool import Communicator, Pool, check_call
from symmpool.communicators import first_call, sm_budget, work
from symmpool.errors import (
    Error,
    InvalidArgumentError,
    InvalidStateError,
    TimeoutError,
    UnsupportedError,
)
from symmpool.groups import pool_registry, process_groups, resolution
from symmpool.groups.names import decline, group_of, resolved

__all__ = ["Seat", "communicator", "explain", "find", "first_device", "forget", "run", "search"]

# The address space of a rank in the pools that are made here, which hold what communicators use and little
# else: a program may have hundreds of groups, and a process has 128 TiB. An eighth is the communicator's; on
# CUDA that is as much as in the largest pool.
_CPU_STRIDE, _CUDA_STRIDE = 32 << 30, 128 << 30


class Seat:
    """A pool's communicator, and what is under way on it."""

    __slots__ = ("comm", "device", "tail", "side", "registered", "__weakref__")

    def __init__(self, pool: Pool):
        self.device = number_of(pool.device)
        concurrent = sm_budget.concurrent(pool)
        sm_budget.leave_others_room(self.device)
        self.comm = Communicator(pool, timeout=pool_registry.timeout_of(pool), concurrent=concurrent)
        # The turn of the last call that was made with async_op, until something has waited for it.
        self.tail: Any = None
        # What such calls run on: a stream, or a thread.
        self.side: Any = None
        # Where torch has the process group that the pool is on, for as long as it is not destroyed.
        self.registered: Any = None

    def settle(self) -> None:
        """What follows comes after all that was begun."""
        tail = self.tail
        if tail is None or (self.device < 0 and tail.is_here()):
            # In a callback, which waits for nothing: others still come after what was begun.
            return
        if self.device >= 0:
            # Where a capture cannot wait for it that is an error, and later calls still come after it.
            tail.precede()
            self.tail = None
            return
        self.tail = None
        tail.precede()

    def settle_for(self, call: Any, arguments: tuple[Any, ...]) -> None:
        """What follows is such a call, and comes after all that was begun. Wrong arguments are refused
        before that is waited for: the ranks that it waits for may be elsewhere."""
        try:
            check_call(self.device, self.comm.rank, self.comm.world, call.__name__, arguments)
        except (InvalidArgumentError, TypeError):
            decline(self, call, *arguments)
            raise
        self.settle()

    def finish(self) -> None:
        """Waits for all that was begun, which ends by itself: by an error if a rank does not come."""
        if self.device < 0 and self.side is not None and not self.side.is_alive():
            return  # in a forked child, which has no such thread
        self.settle()
        if self.device >= 0:
            # What went wrong was told to those who made the calls.
            with contextlib.suppress(Error):
                self.comm.synchronize()

    def begin(self, call: Any, arguments: tuple[Any, ...], results: list[Any], finish: Any = None) -> Any:
        """Makes a call without waiting for it, and `finish` behind it, wherever the call is made."""
        if self.device < 0:
            if self.side is None:
                self.side = work.Worker(self, explainer(self))
            begun = self.side.submit(call, arguments, results, finish)
        else:
            if self.side is None:
                import torch

                self.side = work.Side(torch, self.device, explainer(self))
            begun = self.side.submit(self.comm, call, arguments, results, finish)
        self.tail = begun.turn
        return begun


# What serves a group on a device, with the pool that it is on: kept as long as the group is.
_defaults: weakref.WeakKeyDictionary[Any, dict[int, tuple[Pool, Seat]]]
_defaults = weakref.WeakKeyDictionary()
_of_pool: weakref.WeakKeyDictionary[Pool, Seat] = weakref.WeakKeyDictionary()
# Where look-ups by group led, for groups with one pool: by the device, then the group's id. Emptied
# whenever there is a new pool.
looked_up: dict[int, dict[int, Seat]] = {}
# References to these groups, which take out what was found when a group goes, before another object
# can have its id.
_watching: dict[tuple[int, int], weakref.ref] = {}
# For these tables. Nobody waits for another rank while it is held.
_lock = threading.RLock()
# Who makes what: a group's pools, what serves a group on a device, a pool's communicator.
_turns: weakref.WeakKeyDictionary[Any, dict[Any, threading.RLock]] = weakref.WeakKeyDictionary()


def _compiling_yet() -> bool:
    """What `compiling` is while torch is not known: it may have been imported after this package."""
    if "torch" not in sys.modules:
        return False
    import torch

    return torch.compiler.is_dynamo_compiling()


# torch.compiler.is_dynamo_compiling, once torch is known. What it says is put in by who compiles.
compiling: Any = _compiling_yet


class _Modes:
    """Whether a mode of torch sees what is called, as `_is_in_torch_dispatch_mode`: torch's own module
    has it by this name, which costs a call nothing; else it is asked for here."""

    @property
    def _is_in_torch_dispatch_mode(self) -> bool:
        torch = sys.modules.get("torch")
        length = getattr(getattr(torch, "_C", None), "_len_torch_dispatch_stack", None)
        return length is not None and length() > 0


# torch.utils._python_dispatch, once torch is known.
modes: Any = _Modes()


class _World:
    """Where the default group is looked up, as `_default_pg`: in torch's own object if that has it
    by this name, which saves a call, else here."""

    def __init__(self, world: Any = None):
        self.world = world

    @property
    def _default_pg(self) -> Any:
        return getattr(self.world, "default_pg", None)


torch_world: Any = _World()
_torch_is_known = False


def _look_for_torch() -> None:
    global compiling, modes, torch_world, _torch_is_known
    torch = sys.modules.get("torch")
    compiling = getattr(getattr(torch, "compiler", None), "is_dynamo_compiling", _compiling_yet)
    found = sys.modules.get("torch.utils._python_dispatch")
    modes = found if hasattr(found, "_is_in_torch_dispatch_mode") else _Modes()
    dist = process_groups.distributed() if torch is not None else None
    world = getattr(getattr(dist, "distributed_c10d", None), "_world", None)
    _torch_is_known = world is not None
    torch_world = world if "_default_pg" in getattr(world, "__dict__", ()) else _World(world)


def forget_lookups() -> None:
    """What was looked up may be different now."""
    with _lock:
        looked_up.clear()
        _watching.clear()


pool_registry.on_change(forget_lookups)


def _forget_lookup(device: int, group: int) -> None:
    looked_up.get(device, {}).pop(group, None)
    _watching.pop((device, group), None)


def forget(pool: Pool) -> None:
    """Lets go of the communicator that module-level collectives made on a pool, and of the pool,
    which its group keeps otherwise. Every rank does so in the same place of its program."""
    if not isinstance(pool, Pool):
        raise InvalidArgumentError(f"forget: {pool!r} is no pool")
    with _lock:
        forget_lookups()
        _of_pool.pop(pool, None)
        for seats in _defaults.values():
            for device in [each for each, (held, _) in seats.items() if held is pool]:
                del seats[device]


def end(key: Any, wait: bool) -> None:
    """Lets go of what serves a process group of torch that is shut down, and of its pools. What the
    program holds itself stays. With `wait`, what was begun comes to its end before."""
    with _lock:
        pools = pool_registry.pools_of(key)
        found = [_of_pool[pool] for pool in pools if pool in _of_pool]
    if wait:
        for seat in found:
            seat.finish()
    with _lock:
        pool_registry.end(key)
        forget_lookups()
        _defaults.pop(key, None)
        for pool in pools:
            _of_pool.pop(pool, None)


def communicator(group: Any = None, device: Any = "cpu") -> Communicator:
    """The communicator that serves a group, or a pool, on a device ("cpu", "cuda:N"); made if need
    be, which is collective."""
    seat = search(None, group, number_of(str(device)))
    if seat is None:
        raise InvalidArgumentError("group: this process is no member of it")
    return seat.comm


def pool_of(group: Any, device: str) -> Pool:
    """The pool whose communicator serves a group on a device; made if need be, which is collective."""
    number = number_of(device)
    search(None, group, number)
    found = _found(resolution.key_of(group), number)
    assert found is not None
    return found[0]


def set_timeout(group: Any, seconds: float) -> None:
    """Has calls on a process group wait so long for a late rank from now on, those of its communicators
    and of such as are made later. Talks to nobody."""
    pools = pool_registry.pools_of(resolution.key_of(group))
    pool_registry.set_timeout(pools, seconds)
    with _lock:
        found = [_of_pool[pool] for pool in pools if pool in _of_pool]
    for seat in found:
        seat.comm.timeout = seconds


def number_of(device: str) -> int:
    """A CUDA device's number, -1 for the CPU."""
    if device in ("cpu", "cpu:0"):
        return -1
    kind, _, number = device.partition(":")
    if kind == "cpu":
        raise InvalidArgumentError(f'device: {device!r}: the CPU is one device here; pass "cpu"')
    if device == "cuda" and "torch" in sys.modules:
        try:
            return sys.modules["torch"].cuda.current_device()
        except (AssertionError, RuntimeError) as error:
            raise UnsupportedError(f"device: 'cuda': torch has none ({error})") from error
    if kind != "cuda" or not (number.isascii() and number.isdigit()):
        raise InvalidArgumentError(f"device: {device!r} is neither cpu nor cuda:N")
    return int(number)


def is_seen(tensor: Any, group: Any) -> bool:
    """Whether a call can be made as an operator, which modes of torch see: make_fx, fake tensors."""
    import torch

    named = group is None or isinstance(group, str) or hasattr(group, "group_name")
    return named and (tensor is None or isinstance(tensor, torch.Tensor))


def is_traced(tensor: Any, group: Any) -> bool:
    """Whether a call on a tensor is to be made as an operator: it is compiled, or a mode of torch sees it."""
    return compiling() or (modes._is_in_torch_dispatch_mode and is_seen(tensor, group))


def watch(tensor: Any) -> None:
    """A call writes to a tensor that requires grad. As torch.distributed does, says so if a gradient
    comes back by way of it, and not before: results that are only looked at are no mistake."""
    import torch

    if not torch.is_grad_enabled():
        return
    hooks = tensor._backward_hooks
    # Parameters are written to again and again.
    if not hooks or _cut not in hooks.values():
        tensor.register_hook(_cut)


def _cut(gradient: Any) -> None:
    warnings.warn(
        "symmpool: a gradient came back by way of a tensor that a collective has written to, and took "
        "no account of that. symmpool.ops has collectives with gradients; make the call under "
        "torch.no_grad(), or on tensor.detach(), where none is meant to flow",
        stacklevel=2,
    )


# Who pickles the tensor need not be told that this stays here.
_cut.__torch_unserializable__ = True  # type: ignore[attr-defined]


def _device_of(tensor: Any) -> int:
    try:
        return tensor.get_device()
    except AttributeError:
        return number_of(str(getattr(tensor, "device", "cpu")))


def find(tensor: Any, group: Any, call: first_call.Call | None = None) -> Seat | None:
    """Where a call on a tensor goes; made if need be. None where this process has no part in it. With
    `call`, the call itself, wrong arguments are refused before anything is made, which waits for others."""
    try:
        # Of torch's tensors; others come to `_device_of`.
        device = tensor.get_device()
        seat = looked_up[device][id(torch_world._default_pg if group is None else group)]
        if group is None or seat.registered is None or group in seat.registered:
            return seat
    except (AttributeError, KeyError):
        pass
    return search(tensor, group, _device_of(tensor), call)


def find_to_write(
    tensor: Any, group: Any, out: Any = None, call: first_call.Call | None = None
) -> Seat | None:
    """As `find`, for a call that writes to the tensor, or to `out`."""
    seat = find(tensor, group, call)
    written = tensor if out is None else out
    if seat is not None and getattr(written, "requires_grad", False):
        watch(written)
    return seat


def _key_of(group: Any, tensor: Any) -> Any:
    try:
        return resolution.key_of(group)
    except InvalidArgumentError as error:
        if group is not None or tensor is None or not pool_registry.holding(tensor):
            raise
        raise InvalidArgumentError(
            "symmpool: there is no default group, and the tensor is of a pool on another; name either: "
            "group=pool"
        ) from error


def search(tensor: Any, group: Any, device: int, call: first_call.Call | None = None) -> Seat | None:
    """As `find`, for calls whose place is not known yet, or that have no tensor."""
    if isinstance(group, (str, tuple)):
        named = group_of(group)
        # Names lead to groups, and groups to what was looked up: a name's id tells nothing.
        return search(None, named, device) if tensor is None else find(tensor, named, call)
    if group is not None and _outside(group):
        return None
    with _lock:
        if not _torch_is_known:
            _look_for_torch()
    if isinstance(group, Pool):
        return _first_seat_of(group, device, call)
    key = _key_of(group, tensor)
    try:
        members = resolution.resolve(key)  # refuses what is no group, and what is over
    except InvalidStateError:
        # As `shutdown` of our own backend does, with which torch's other backends do not come here.
        end(key, False)
        raise
    pools = _pools_on(key, device)
    if len(pools) > 1 and tensor is not None:
        holding = next((pool for pool in pools if pool.holds(tensor)), None)
        if holding is not None:
            return _first_seat_of(holding, device, call)
    first_call.await_telling(key)
    found = _found(key, device)
    if found is None:
        if call is not None:
            make = functools.partial(_make_default_in_turn, key, device)
            first_call.check_first(key, device, (members.rank, members.world), call, make)
        seat = _make_default_in_turn(key, device)
    else:
        seat = found[1]
    seat.registered = process_groups.registered(key)
    with _lock:
        if len(_pools_on(key, device)) < 2:
            at = id(key)
            _watching[device, at] = weakref.ref(key, lambda _: _forget_lookup(device, at))
            looked_up.setdefault(device, {})[at] = seat
    return seat


def _name_of(device: int) -> str:
    return f"cuda:{device}" if device >= 0 else "cpu"


def _pools_on(key: Any, device: int) -> list[Pool]:
    name = _name_of(device)
    return [pool for pool in pool_registry.pools_of(key) if pool.device == name]


def _turn(owner: Any, what: Any = None) -> threading.RLock:
    """Held by the thread that makes something of a group or of a pool."""
    with _lock:
        return _turns.setdefault(owner, {}).setdefault(what, threading.RLock())


def _found(key: Any, device: int) -> tuple[Pool, Seat] | None:
    with _lock:
        return _defaults.get(key, {}).get(device)


def _make_default(key: Any, device: int) -> tuple[Pool, Seat]:
    """What serves a group on a device: on its first pool there, or on a new one. A new pool on which
    no communicator could be made is forgotten, so that the next call begins anew."""
    pools = _pools_on(key, device)
    if pools:
        found = (pools[0], _seat_of(pools[0]))
    else:
        with _turn(key):
            pool = Pool(key, _name_of(device), stride=_CPU_STRIDE if device < 0 else _CUDA_STRIDE)
        try:
            found = (pool, _seat_of(pool))
        except BaseException:
            pool_registry.withdraw(pool, key)
            raise
    with _lock:
        _defaults.setdefault(key, {})[device] = found
    return found


def _make_default_in_turn(key: Any, device: int) -> Seat:
    with _turn(key, device):
        return (_found(key, device) or _make_default(key, device))[1]


def _first_seat_of(pool: Pool, device: int, call: first_call.Call | None) -> Seat:
    """As `_seat_of`, for a call that may be the first there."""
    first_call.await_telling(pool)
    if call is not None and _of_pool.get(pool) is None:
        make = functools.partial(_seat_of, pool)
        first_call.check_first(pool, device, (pool.rank, pool.world), call, make)
    return _seat_of(pool)


def _seat_of(pool: Pool) -> Seat:
    seat = _of_pool.get(pool)
    if seat is None:
        with _turn(pool):
            seat = _of_pool.get(pool)
            if seat is None:
                try:
                    seat = Seat(pool)
                except TimeoutError as error:
                    _name_pool(pool, error)
                    raise
                with _lock:
                    _of_pool[pool] = seat
    return seat


def explain(seat: Seat, error: TimeoutError) -> None:
    """Has an error of a call say which pool it went to, if there are several."""
    for pool, each in list(_of_pool.items()):
        if each is seat:
            _name_pool(pool, error)


def _name_pool(pool: Pool, error: TimeoutError) -> None:
    place = pool_registry.place_of(pool)
    if place and place not in str(error):
        error.args = (f"{error}; the call went to {place}",)


def explainer(seat: Seat) -> Callable[[Exception], None]:
    """`explain`, for what must not keep the seat."""
    found = weakref.ref(seat)

    def tell(error: Exception) -> None:
        seat = found()
        if seat is not None and isinstance(error, TimeoutError):
            explain(seat, error)

    return tell


def _is_outside(group: Any) -> bool:
    dist = process_groups.distributed()
    return dist is not None and group is dist.GroupMember.NON_GROUP_MEMBER


def _outside(group: Any) -> bool:
    """Whether this process is no member of a group. Such calls do nothing, as torch's."""
    if not _is_outside(group):
        return False
    why = "symmpool: a collective on a group that this process is no member of does nothing"
    # Told of the line that made the call, however many of ours are between.
    level, frame = 1, sys._getframe()
    while frame is not None and (frame.f_globals.get("__package__") or "").startswith("symmpool"):
        level, frame = level + 1, frame.f_back
    warnings.warn(why, stacklevel=level)
    return True


def run(seat: Seat, call: Any, arguments: tuple[Any, ...], results: list[Any], async_op: bool) -> Any:
    """Makes a call in its turn: Work with `async_op`, else None."""
    if async_op:
        return seat.begin(call, arguments, results)
    if seat.tail is not None:
        seat.settle_for(call, arguments)
    try:
        call(*arguments)
    except TimeoutError as error:
        explain(seat, error)
        raise
    return None


def first_device(group: Any) -> str:
    """Where a group's first pool is."""
    group = resolved(group)
    if isinstance(group, Pool):
        return group.device
    if _is_outside(group):
        return "cpu"
    pools = pool_registry.pools_of(resolution.key_of(group))
    return pools[0].device if pools else "cpu"


_look_for_torch()
