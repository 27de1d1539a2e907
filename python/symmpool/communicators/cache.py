"""Which communicator serves a call.

A call finds its communicator by the group that it names: a process group of torch or its name, a
`symmpool.Group` or a `symmpool.Pool`; without one, the default group. On a group with several pools the
one that holds the tensor is meant; a tensor that none holds goes through the first. A group without a
pool gets one at its first call, which is collective like the call itself. Communicators are made when
they are first needed, and kept as long as the group. What waits for other ranks holds up the calls that
need the same communicator, and no others: threads may each use a group of their own.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from symmpool._symmpool import Communicator, Pool, default_device
from symmpool.communicators import first_call, forks, torch_state
from symmpool.communicators.devices import name_of, number_of, number_of_tensor
from symmpool.communicators.entry import CommunicatorEntry, name_pool
from symmpool.communicators.gradients import watch
from symmpool.errors import InvalidArgumentError, InvalidStateError, TimeoutError
from symmpool.groups import declined_calls, pool_registry, process_groups, resolution
from symmpool.groups.names import group_of, resolved

if TYPE_CHECKING:
    from collections.abc import Hashable

    from symmpool.collectives.types import Tensor
    from symmpool.groups.types import DeviceLike, GroupKey, GroupLike

__all__ = ["CommunicatorCache", "communicator", "communicator_for", "first_device", "forget", "look_up"]

# The address space of a rank in the pools that are made here, which hold what communicators use and little
# else: a program may have hundreds of groups, and a process has 128 TiB. An eighth is the communicator's; on
# CUDA that is as much as in the largest pool.
_CPU_STRIDE, _CUDA_STRIDE = 32 << 30, 128 << 30


class CommunicatorCache:
    """The communicators that were made for groups and pools, each kept as long as its group."""

    def __init__(self) -> None:
        # Entries by group and device, each with the pool that it is on.
        self._of_group: weakref.WeakKeyDictionary[Any, dict[int, tuple[Pool, CommunicatorEntry]]]
        self._of_group = weakref.WeakKeyDictionary()
        self._of_pool: weakref.WeakKeyDictionary[Pool, CommunicatorEntry] = weakref.WeakKeyDictionary()
        # Where look-ups by group led, for groups with one pool: by the device, then the group's id. Emptied
        # whenever there is a new pool.
        self.looked_up: dict[int, dict[int, CommunicatorEntry]] = {}
        # References to these groups, which take out what was found when a group goes, before another
        # object can have its id.
        self._references: dict[tuple[int, int], weakref.ref] = {}
        # For these tables. Nobody waits for another rank while it is held.
        self._lock = threading.RLock()
        # Held by the thread that makes a group's pools, what serves a group on a device, or a pool's
        # communicator.
        self._making: weakref.WeakKeyDictionary[Any, dict[Any, threading.RLock]]
        self._making = weakref.WeakKeyDictionary()
        forks.renew_in_children(self)

    def forked(self) -> None:
        """In a forked child, which has none of the threads that hold locks."""
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]
        self._making.clear()

    def lock_for(self, owner: GroupKey, what: Hashable = None) -> threading.RLock:
        """Held by the thread that makes something of a group or of a pool."""
        with self._lock:
            return self._making.setdefault(owner, {}).setdefault(what, threading.RLock())

    def of_group(self, key: GroupKey, device: int) -> tuple[Pool, CommunicatorEntry] | None:
        """Returns the entry that serves a group on a device, if it was made."""
        with self._lock:
            return self._of_group.get(key, {}).get(device)

    def of_pool(self, pool: Pool) -> CommunicatorEntry | None:
        """A pool's communicator, if it was made."""
        return self._of_pool.get(pool)

    def on_group(self, key: GroupKey) -> list[CommunicatorEntry]:
        """The communicators on a group's pools."""
        with self._lock:
            pools = pool_registry.pools_of(key)
            return [self._of_pool[pool] for pool in pools if pool in self._of_pool]

    def add(self, key: GroupKey, device: int, pool: Pool, entry: CommunicatorEntry) -> None:
        """From now on the entry serves the group on the device."""
        with self._lock:
            self._of_group.setdefault(key, {})[device] = (pool, entry)

    def add_pool(self, pool: Pool, entry: CommunicatorEntry) -> None:
        """From now on the entry serves the pool."""
        with self._lock:
            self._of_pool[pool] = entry

    def remember(self, key: GroupKey, device: int, entry: CommunicatorEntry) -> None:
        """Calls on the group find the entry by the group's id, where no second pool could be meant."""
        with self._lock:
            if len(pools_on(key, device)) < 2:
                at = id(key)
                self._references[device, at] = weakref.ref(key, lambda _: self._drop(device, at))
                self.looked_up.setdefault(device, {})[at] = entry

    def _drop(self, device: int, group: int) -> None:
        self.looked_up.get(device, {}).pop(group, None)
        self._references.pop((device, group), None)

    def forget_lookups(self) -> None:
        """Forgets all look-ups, whose results may be different now."""
        with self._lock:
            self.looked_up.clear()
            self._references.clear()

    def forget(self, pool: Pool) -> None:
        """Lets go of a pool and of its communicator."""
        with self._lock:
            self.forget_lookups()
            self._of_pool.pop(pool, None)
            for entries in self._of_group.values():
                for device in [each for each, (held, _) in entries.items() if held is pool]:
                    del entries[device]

    def end(self, key: GroupKey) -> None:
        """Lets go of all that serves a group, and of its pools."""
        with self._lock:
            pools = pool_registry.pools_of(key)
            pool_registry.end(key)
            self.forget_lookups()
            self._of_group.pop(key, None)
            for pool in pools:
                self._of_pool.pop(pool, None)


cache = CommunicatorCache()
# Read by every call.
looked_up = cache.looked_up

pool_registry.on_change(cache.forget_lookups)


def forget(pool: Pool) -> None:
    """Lets go of the communicator that module-level collectives made on a pool, and of the pool,
    which its group keeps otherwise. Every rank does so in the same place of its program."""
    if not isinstance(pool, Pool):
        raise InvalidArgumentError(f"forget: {pool!r} is no pool")
    cache.forget(pool)


def end(key: GroupKey, wait: bool) -> None:
    """Lets go of what serves a process group of torch that is shut down, and of its pools. What the
    program holds itself stays. With `wait`, what was begun comes to its end before."""
    if wait:
        for entry in cache.on_group(key):
            entry.finish()
    cache.end(key)


def communicator(group: GroupLike = None, device: DeviceLike = None) -> Communicator:
    """The communicator that serves a group, or a pool, on a device ("cpu", "cuda:N"); made if need
    be, which is collective. Without `device`, where the group's first pool is, or where `Pool()` would be."""
    if device is None:
        device = first_device(group, default_device)
    entry = look_up(None, group, number_of(str(device)))
    if entry is None:
        raise InvalidArgumentError("group: this process is no member of it")
    return entry.public


def known_pool_of(group: GroupLike, number: int) -> Pool | None:
    """The pool to which the last call of a group on a device led, if none was made or ended since. Talks to
    nobody."""
    # The short way of `communicator_for`: each step of FSDP asks some thirty times.
    entry = looked_up.get(number, {}).get(id(group))
    if entry is None or (entry.registered is not None and group not in entry.registered):
        return None
    return entry.pool()


def pool_of(group: GroupLike, number: int) -> Pool:
    """The pool whose communicator serves a group on the device of a number (-1: the CPU); made if need be,
    which is collective."""
    pool = known_pool_of(group, number)
    if pool is not None:
        return pool
    look_up(None, group, number)
    found = cache.of_group(resolution.key_of(group), number)
    assert found is not None
    return found[0]


def set_timeout(group: GroupLike, seconds: float) -> None:
    """Has calls on a process group wait so long for a late rank from now on, those of its communicators
    and of such as are made later. Talks to nobody."""
    key = resolution.key_of(group)
    pool_registry.set_timeout(pool_registry.pools_of(key), seconds)
    for entry in cache.on_group(key):
        entry.comm.timeout = seconds


def communicator_for(
    tensor: Tensor, group: GroupLike, call: first_call.Call | None = None
) -> CommunicatorEntry | None:
    """Returns the entry that serves a call on a tensor; made if need be. None where this process has no part
    in it. With `call`, the call itself, wrong arguments are refused before anything is made, which waits for
    others."""
    try:
        # Tensors of torch have this method; for others the device is found below.
        device = tensor.get_device()  # type: ignore[union-attr]  # caught below
        entry = looked_up[device][id(torch_state.torch_world._default_pg if group is None else group)]
        if group is None or entry.registered is None or group in entry.registered:
            return entry
    except (AttributeError, KeyError):
        pass
    return look_up(tensor, group, number_of_tensor(tensor), call)


def communicator_to_write(
    tensor: Tensor, group: GroupLike, out: Tensor | None = None, call: first_call.Call | None = None
) -> CommunicatorEntry | None:
    """Returns the entry of `communicator_for`, for a call that writes to the tensor, or to `out`."""
    entry = communicator_for(tensor, group, call)
    written = tensor if out is None else out
    if entry is not None and getattr(written, "requires_grad", False):
        watch(written)  # type: ignore[arg-type]  # only torch's have it
    return entry


def look_up(
    tensor: Tensor | None, group: GroupLike, device: int, call: first_call.Call | None = None
) -> CommunicatorEntry | None:
    """Returns the entry of `communicator_for`, for calls on a group that was not looked up yet, or without a
    tensor."""
    if isinstance(group, (str, tuple)):
        named = group_of(group)
        # Names lead to groups, and groups to what was looked up: a name's id says nothing.
        return look_up(None, named, device) if tensor is None else communicator_for(tensor, named, call)
    if group is not None and _warns_outside(group):
        return None
    torch_state.look_for_torch()
    if isinstance(group, Pool):
        return _on_pool(group, call)
    key = _key_of(group, tensor)
    try:
        members = resolution.resolve(key)  # refuses what is no group, and what is over
    except InvalidStateError:
        # `shutdown` of our own backend does so too; groups of torch's other backends do not call us at their
        # end.
        end(key, False)
        raise
    pools = pools_on(key, device)
    if len(pools) > 1 and tensor is not None:
        holding = next((pool for pool in pools if pool.holds(tensor)), None)
        if holding is not None:
            return _on_pool(holding, call)
    declined_calls.await_reports(key)
    found = cache.of_group(key, device)
    if found is None:
        if call is not None:
            make = functools.partial(_made_on_group, key, device)
            first_call.check(key, device, (members.rank, members.world), call, make)
        entry = _made_on_group(key, device)
    else:
        entry = found[1]
    entry.registered = process_groups.registered(key)
    cache.remember(key, device, entry)
    return entry


def is_ready(tensor: Tensor, group: GroupLike) -> bool:
    """Whether a call on a tensor finds a communicator that was made. Talks to nobody."""
    group = resolved(group)
    if isinstance(group, Pool):
        return cache.of_pool(group) is not None
    key, device = resolution.key_of(group), number_of_tensor(tensor)
    return cache.of_group(key, device) is not None


def _key_of(group: GroupLike, tensor: Tensor | None) -> GroupKey:
    try:
        return resolution.key_of(group)
    except InvalidArgumentError as error:
        if group is not None or tensor is None or not pool_registry.holding(tensor):
            raise
        raise InvalidArgumentError(
            "symmpool: there is no default group, and the tensor is of a pool on another; name either: "
            "group=pool"
        ) from error


def pools_on(key: GroupKey, device: int) -> list[Pool]:
    """The pools on a group and a device, in the order they were made."""
    name = name_of(device)
    return [pool for pool in pool_registry.pools_of(key) if pool.device == name]


def hosts_of(key: GroupKey, device: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host of a group, by its first pool on a device. Collective where there is none yet:
    one is made, and serves the group's calls."""
    with cache.lock_for(key, device):
        pools = pools_on(key, device)
        if pools:
            return pools[0].hosts
        with cache.lock_for(key):
            return _new_pool(key, device).hosts


def _new_pool(key: GroupKey, device: int) -> Pool:
    return Pool(key, name_of(device), stride=_CPU_STRIDE if device < 0 else _CUDA_STRIDE)


def _made_on_group(key: GroupKey, device: int) -> CommunicatorEntry:
    """Returns the entry that serves a group on a device, made by one thread if need be."""
    with cache.lock_for(key, device):
        found = cache.of_group(key, device) or _make_on_group(key, device)
    return found[1]


def _make_on_group(key: GroupKey, device: int) -> tuple[Pool, CommunicatorEntry]:
    """Makes what serves a group on a device: on its first pool there, or on a new one. A new pool on which
    no communicator could be made is forgotten, so that the next call begins anew."""
    pools = pools_on(key, device)
    if pools:
        pool, entry = pools[0], _made_on_pool(pools[0])
    else:
        with cache.lock_for(key):
            pool = _new_pool(key, device)
        try:
            ours = process_groups.ours(key)
            serves = device < 0 and ours is not None and ours.serves_subgroups
            entry = _made_on_pool(pool, serves)
        except BaseException:
            pool_registry.unregister(pool, key)
            raise
    cache.add(key, device, pool, entry)
    return pool, entry


def _on_pool(pool: Pool, call: first_call.Call | None) -> CommunicatorEntry:
    """A pool's communicator, for a call that may be the first there."""
    declined_calls.await_reports(pool)
    if call is not None and cache.of_pool(pool) is None:
        make = functools.partial(_made_on_pool, pool)
        first_call.check(pool, number_of(pool.device), (pool.rank, pool.world), call, make)
    return _made_on_pool(pool)


def _made_on_pool(pool: Pool, serves_subgroups: bool = False) -> CommunicatorEntry:
    """A pool's communicator, made by one thread if need be."""
    entry = cache.of_pool(pool)
    if entry is None:
        with cache.lock_for(pool):
            entry = cache.of_pool(pool)
            if entry is None:
                try:
                    entry = CommunicatorEntry(pool, serves_subgroups=serves_subgroups)
                except TimeoutError as error:
                    name_pool(pool, error)
                    raise
                cache.add_pool(pool, entry)
    return entry


def is_outside(group: GroupLike) -> bool:
    """Whether this process is no member of a process group of torch."""
    dist = process_groups.distributed()
    return dist is not None and group is dist.GroupMember.NON_GROUP_MEMBER


def _warns_outside(group: GroupLike) -> bool:
    """Whether this process is no member of a group. Such calls do nothing and warn, as torch's."""
    if not is_outside(group):
        return False
    why = "symmpool: a collective on a group that this process is no member of does nothing"
    # The warning names the line of the program, however many frames of ours are between.
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_globals.get("__package__") or "").startswith("symmpool"):
        level, frame = level + 1, frame.f_back
    warnings.warn(why, stacklevel=level)
    return True


def first_device(group: GroupLike, otherwise: Callable[[], str] = lambda: "cpu") -> str:
    """Where a group's first pool is; or what the function says, if it has none."""
    group = resolved(group)
    if isinstance(group, Pool):
        return group.device
    if is_outside(group):
        return "cpu"
    pools = pool_registry.pools_of(resolution.key_of(group))
    return pools[0].device if pools else otherwise()
