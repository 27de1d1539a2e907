"""Which group an argument means, and which pools there are on it.

A process group of torch becomes one `Group`, which meets in that group's own store, so that several
pools on it count their steps together. It is kept as long as torch keeps the process group, and waits
as long as that: its timeout is the process group's, unless the call that makes it names another. A
group made of `(store, rank, world)` waits as long as the store likewise, where that has a timeout.
"""

from __future__ import annotations

import datetime
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from symmpool._symmpool import Group
from symmpool.errors import InvalidArgumentError, InvalidStateError, TimeoutError

# How long collectives wait for a late rank, in seconds, where nothing else says so.
DEFAULT_TIMEOUT = 30.0
# The longest that may be asked for: more than any program runs.
LONGEST_TIMEOUT = 1e9

# Process groups of torch, and the groups made of them.
_of_torch: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()
# Process groups of torch that torch had registered when they were last used.
_registered: weakref.WeakSet[Any] = weakref.WeakSet()
# Whether torch's default group has served calls that named none.
_default_was_torchs: list[bool] = []
# Process groups of torch that were shut down.
_ended: weakref.WeakSet[Any] = weakref.WeakSet()
# The group of the environment, once it was asked for.
_of_environment: list[Group] = []
# Pools by what their group was named with (a process group or a Group; of a tuple, the pool itself), in
# the order they were made.
_pools: weakref.WeakKeyDictionary[Any, list[weakref.ref]] = weakref.WeakKeyDictionary()
# How long the communicator of a pool that serves module-level calls waits, in seconds.
_timeouts: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
# How often ranks have agreed on something, by the store that they did it in.
_agreements: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
# For these tables. Nobody waits for another rank while it is held.
_lock = threading.RLock()
# Held while the group of the environment is made, which waits for the rank that serves its store.
_first = threading.Lock()
# Who wants to hear of new pools.
_told: list[Callable[[], None]] = []


def distributed() -> Any:
    """torch.distributed, if the program has imported it and it works."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() else None


def key_of(argument: Any) -> Any:
    """The object that stands for a group: what pools and communicators are found by."""
    if argument is not None:
        return argument
    dist = distributed()
    if dist is not None and dist.is_initialized():
        _default_was_torchs[:] = [True]
        return dist.group.WORLD
    return _environment({})


def _environment(options: dict[str, float]) -> Group:
    with _first:
        if not _of_environment:
            if _default_was_torchs:
                # A launcher's variables are still there, and would lead to a group that nobody meant.
                raise InvalidStateError(
                    "symmpool: torch's default process group was destroyed; what comes after needs another "
                    "group: init_process_group makes one, and Group.from_env() one without torch"
                )
            _of_environment.append(Group.from_env(**options))
        return _of_environment[0]


def resolve(argument: Any, timeout: float | None = None) -> Group:
    """The group that `Pool(group)` means. `timeout` is for a group that is made now, in seconds."""
    options = {} if timeout is None else {"timeout": timeout}
    if argument is None:
        dist = distributed()
        initialized = dist is not None and dist.is_initialized()
        argument = key_of(None) if initialized else _environment(options)
    if isinstance(argument, Group):
        return argument
    if isinstance(argument, tuple):
        if len(argument) != 3:
            raise InvalidArgumentError(f"group: a tuple of (store, rank, world), not {argument!r}")
        store, rank, world = argument
        seconds = None if options else seconds_of(getattr(store, "timeout", None))
        if seconds is not None:
            options = {"timeout": seconds}
        try:
            return Group.from_store(store, rank, world, **options)
        except TypeError as error:
            raise InvalidArgumentError(f"group: (store, rank, world): {error}") from None
    dist = distributed()
    if dist is not None and isinstance(argument, dist.ProcessGroup):
        with _lock:
            if argument in _ended or (argument in _registered and registered(argument) is None):
                raise ended(argument)
            if registered(argument) is not None:
                _registered.add(argument)
            group = _of_torch.get(argument)
            if group is None:
                rank, world, store = _member(dist, argument)
                seconds = None if options else _timeout_of_torch(argument, None)
                if seconds is not None:
                    options = {"timeout": seconds}
                group = _of_torch[argument] = Group.from_store(store, rank, world, **options)
            return group
    if dist is not None and argument is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgumentError("group: this process is no member of it")
    raise InvalidArgumentError(
        f"group: {argument!r} is no symmpool.Group, no process group of torch.distributed and no "
        "(store, rank, world)"
    )


def _member(dist: Any, group: Any) -> tuple[int, int, Any]:
    """This process's rank in a process group, the number of ranks, and the store they met in."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise InvalidArgumentError("group: this process is no member of it")
    c10d = dist.distributed_c10d
    store = getattr(group, "_store", None)  # of our own backend
    if store is None:
        entry = c10d._world.pg_map.get(group)
        store = entry[1] if entry else None
    if store is None:
        store = group.get_group_store()
    return rank, world, store


def registered(group: Any) -> Any:
    """Where torch has a process group until it is destroyed: what holds it is in there. None for what is
    none of torch's, or is there no more."""
    dist = distributed()
    if dist is None or not isinstance(group, dist.ProcessGroup):
        return None
    known = dist.distributed_c10d._world.pg_map
    return known if group in known else None


def backends_of(group: Any) -> dict[str, str]:
    """The backends of a process group of torch by kind of device, as the program named them: nothing where
    it named none."""
    config = distributed().distributed_c10d._world.pg_backend_config.get(group, "")
    pairs = [pair.partition(":") for pair in str(config).split(",")]
    return {device: backend for device, _, backend in pairs if backend}


def _timeout_of_torch(group: Any, kind: str | None) -> float | None:
    """How long a process group of torch waits, in seconds: what the options of its backend for a kind
    of device say ("cpu", "cuda"), or of any backend; None where none says so."""
    timeout = getattr(group, "_timeout", None)  # of our own backend
    devices = getattr(group, "_device_types", ())
    for device in sorted(devices, key=lambda each: each.type != kind):
        if timeout is not None:
            break
        try:
            timeout = group._get_backend(device).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return seconds_of(timeout)


def seconds_of(timeout: Any) -> float | None:
    """A timeout of torch, a timedelta, in seconds as ours are; None where it says nothing."""
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else 0
    return min(seconds, LONGEST_TIMEOUT) if seconds > 0 else None


def timeout_of(pool: Any) -> float:
    """How long collectives on a pool wait for a late rank, in seconds: as long as the group does that
    it was made on, where that is known."""
    return _timeouts.get(pool, DEFAULT_TIMEOUT)


def set_timeout(pools: list[Any], seconds: float) -> None:
    """Changes what `timeout_of` says."""
    with _lock:
        _timeouts.update((pool, seconds) for pool in pools)


def _timeout_on(key: Any, kind: str) -> float | None:
    if isinstance(key, Group):
        return key.timeout
    return _timeout_of_torch(key, kind)


def made(pool: Any, argument: Any, timeout: float | None = None) -> None:
    """Takes note of a new pool, for collectives on its group. `timeout` is what the pool was given, in
    seconds: on a `(store, rank, world)` it stands before the store's."""
    if isinstance(argument, tuple):
        key = pool  # nothing else stands for its group
        seconds = timeout or seconds_of(getattr(argument[0], "timeout", None))
    else:
        key = key_of(argument)
        seconds = _timeout_on(key, pool.device.partition(":")[0])
    with _lock:
        if seconds is not None:
            _timeouts[pool] = seconds
        _pools.setdefault(key, []).append(weakref.ref(pool))
    for told in _told:
        told()


def when_made(told: Callable[[], None]) -> None:
    """Has `told` called whenever there is a new pool."""
    _told.append(told)


def withdraw(pool: Any, key: Any) -> None:
    """Collectives on a group do not find one of its pools any more."""
    with _lock:
        _pools[key] = [each for each in _pools.get(key, []) if each() is not pool]
    for told in _told:
        told()


def end(key: Any) -> None:
    """A process group of torch is shut down: what was made of it is let go of, and no more is made."""
    with _lock:
        _ended.add(key)
        _of_torch.pop(key, None)
        _pools.pop(key, None)


def ended(group: Any) -> InvalidStateError:
    """What calls on a process group are told that was shut down."""
    return InvalidStateError(
        f"symmpool: {_name_of(group)} was shut down on rank {group.rank()}, as destroy_process_group does; "
        "what comes after needs another group"
    )


def pools_of(key: Any) -> list[Any]:
    """The pools on a group that are alive, in the order they were made."""
    with _lock:
        known = _pools.get(key, [])
        alive = [pool for pool in (each() for each in known) if pool is not None]
        if len(alive) != len(known):
            _pools[key] = [weakref.ref(pool) for pool in alive]
        return alive


def key_holding(pool: Any) -> Any:
    """The object that stands for a pool's group, by which that was made; None for a pool that is gone."""
    return next((key for key in list(_pools) if pool in pools_of(key)), None)


def holding(tensor: Any) -> list[Any]:
    """The pools, on whichever group, that a tensor lies in."""
    pools = [pool for key in list(_pools) for pool in pools_of(key)]
    return [pool for pool in pools if pool.holds(tensor)]


def place_of(pool: Any) -> str:
    """Which pool one is, for errors, where its group has several on its device or the process has several
    groups; else nothing."""
    keys = list(_pools)
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


def agree(group: Any, what: str, why: str | None, seconds: float, to: str) -> dict[int, str]:
    """Tells the other ranks of a process group why this one cannot do something, or None where it
    can. Returns what each of those said that cannot: the same on every rank. Collective. `to` says,
    for errors, what the ranks come to: "the first call"."""
    from symmpool.store import StoreAdapter

    dist = distributed()
    group = group if group is not None else dist.group.WORLD
    rank, world, store = _member(dist, group)
    count = _agreements[store] = _agreements.get(store, 0) + 1
    said = b"" if why is None else why.encode()[:4096] or b"?"
    key = f"agree/{what}/{count}"
    try:
        answers = StoreAdapter(store).all_gather(key, rank, world, said, seconds)
    except TimeoutError as error:
        # So that a second try meets those who have not been here yet.
        _agreements[store] -= 1
        if not error.ranks:
            raise
        raise _absent(group, error.ranks, f"rank {rank} of {world}", seconds, to) from None
    return {rank: said.decode("utf-8", "replace") for rank, said in enumerate(answers) if said}


def _name_of(group: Any) -> str:
    name = getattr(group, "group_desc", None)
    return f"group {group.group_name!r} ({name})" if name else "its group"


def _absent(group: Any, ranks: tuple[int, ...], here: str, seconds: float, to: str) -> TimeoutError:
    """Who did not come to an agreement, as an error."""
    who = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    # A rank whose time is up takes back what it said, so that others may miss it, too.
    left = ", or gave up waiting there" if len(ranks) > 1 else ""
    error = TimeoutError(
        f"symmpool: {who} did not come to {to} of {_name_of(group)}{left}: {here} waited for "
        f"its timeout of {seconds:.1f} s. Every rank of a group makes its calls in the same order"
    )
    error.ranks = tuple(ranks)
    return error
