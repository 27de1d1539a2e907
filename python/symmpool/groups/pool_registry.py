"""Which pools there are on a group, and how long collectives on them wait."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from symmpool._symmpool import Group, Pool
from symmpool.groups import resolution
from symmpool.groups.process_groups import DEFAULT_TIMEOUT, seconds_of, timeout_of_torch

if TYPE_CHECKING:
    from symmpool.collectives.types import Tensor
    from symmpool.groups.types import GroupKey, GroupLike

# Pools by what their group was named with (a process group or a Group; of a tuple, the pool itself), in
# the order they were made.
_pools: weakref.WeakKeyDictionary[Any, list[weakref.ref]] = weakref.WeakKeyDictionary()
# How long the communicator of a pool that serves module-level calls waits, in seconds.
_timeouts: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
# For these tables. Nobody waits for another rank while it is held.
_lock = threading.RLock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
# Called whenever a group has a pool more or fewer.
_watchers: list[Callable[[], None]] = []


def timeout_of(pool: Pool) -> float:
    """How long collectives on a pool wait for a late rank, in seconds: as long as the group does that
    it was made on, where that is known."""
    return _timeouts.get(pool, DEFAULT_TIMEOUT)


def set_timeout(pools: list[Pool], seconds: float) -> None:
    """Changes what `timeout_of` says."""
    with _lock:
        _timeouts.update((pool, seconds) for pool in pools)


def _timeout_on(key: GroupKey, kind: str) -> float | None:
    if isinstance(key, Group):
        return key.timeout
    return None if isinstance(key, Pool) else timeout_of_torch(key, kind)


def register(pool: Pool, argument: GroupLike, timeout: float | None = None) -> None:
    """Takes note of a new pool, for collectives on its group. `timeout` is what the pool was given, in
    seconds: on a `(store, rank, world)` it stands before the store's."""
    if isinstance(argument, tuple):
        key: GroupKey = pool  # nothing else stands for its group
        seconds = timeout or seconds_of(getattr(argument[0], "timeout", None))
    else:
        key = resolution.key_of(argument)
        seconds = _timeout_on(key, pool.device.partition(":")[0])
    with _lock:
        if seconds is not None:
            _timeouts[pool] = seconds
        _pools.setdefault(key, []).append(weakref.ref(pool))
    for watcher in _watchers:
        watcher()


def on_change(watcher: Callable[[], None]) -> None:
    """Has `watcher` called whenever a group has a pool more or fewer."""
    _watchers.append(watcher)


def unregister(pool: Pool, key: GroupKey) -> None:
    """Collectives on a group do not find one of its pools any more."""
    with _lock:
        _pools[key] = [each for each in _pools.get(key, []) if each() is not pool]
    for watcher in _watchers:
        watcher()


def end(key: GroupKey) -> None:
    """A process group of torch is shut down: its pools are let go of, and no more are made."""
    resolution.end(key)
    with _lock:
        _pools.pop(key, None)


def pools_of(key: GroupKey) -> list[Pool]:
    """The pools on a group that are alive, in the order they were made."""
    with _lock:
        try:
            known = _pools.get(key, [])
        except TypeError:
            return []  # an object that cannot be a key is no group
        alive = [pool for pool in (each() for each in known) if pool is not None]
        if len(alive) != len(known):
            _pools[key] = [weakref.ref(pool) for pool in alive]
        return alive


def all_pools() -> list[Pool]:
    """The pools on every group that are alive."""
    return [pool for key in _keys() for pool in pools_of(key)]


def _keys() -> list[GroupKey]:
    """Returns the keys of the groups that have or had pools. Other threads may make pools meanwhile."""
    with _lock:
        return list(_pools)


def key_holding(pool: Pool | None) -> GroupKey | None:
    """The object that stands for a pool's group, by which that was made; None for a pool that is gone."""
    return next((key for key in _keys() if pool in pools_of(key)), None)


def holding(tensor: Tensor) -> list[Pool]:
    """The pools, on whichever group, that a tensor lies in."""
    return [pool for pool in all_pools() if pool.holds(tensor)]


def place_of(pool: Pool) -> str:
    """Which pool one is, for errors, where its group has several on its device or the process has several
    groups; else nothing."""
    keys = _keys()
    for key in keys:
        pools = [each for each in pools_of(key) if each.device == pool.device]
        if pool in pools:
            number, count = pools.index(pool) + 1, len(pools)
            # A process group of torch has a name already; ours would get one that nobody knows.
            name = None if isinstance(key, type(pool)) else getattr(key, "group_desc", None)
            group = f"group {key.group_name!r} ({name})" if name else "its group"
            if count > 1:
                return (
                    f"pool {number} of the {count} that {group} has on {pool.device}: all ranks must "
                    "pass tensors of the same pool, or name it"
                )
            return f"the pool of {group} on {pool.device}" if name and len(keys) > 1 else ""
    return ""
