"""Which group an argument means.

A process group of torch becomes one `Group`, which meets in that group's own store, so that several
pools on it count their steps together. It is kept as long as torch keeps the process group, and waits
as long as that: its timeout is the process group's, unless the call that makes it names another. A
group made of `(store, rank, world)` waits as long as the store likewise, where that has a timeout.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from symmpool._symmpool import Group
from symmpool.errors import InvalidArgumentError, InvalidStateError
from symmpool.groups.process_groups import (
    description_of,
    distributed,
    member_of,
    registered,
    seconds_of,
    timeout_of_torch,
)

if TYPE_CHECKING:
    import torch.distributed

    from symmpool.groups.types import GroupKey, GroupLike

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
# The group that the program has last made of the environment itself, while that lives.
_made_by_program: list[weakref.ref[Group]] = []
# For these tables. Nobody waits for another rank while it is held.
_lock = threading.RLock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
# Held while the group of the environment is made, which waits for the rank that serves its store.
_first = threading.Lock()
os.register_at_fork(after_in_child=_first._at_fork_reinit)  # type: ignore[attr-defined]


def key_of(argument: GroupLike) -> GroupKey:
    """The object that stands for a group: what pools and communicators are found by."""
    if argument is not None:
        return argument  # type: ignore[return-value]  # others are refused where they are used
    dist = distributed()
    if dist is not None and dist.is_initialized():
        _default_was_torchs[:] = [True]
        return dist.group.WORLD
    return _environment({})


def remember(group: Group) -> None:
    """The program has made a group of the environment: calls that name none use it, while it lives."""
    _made_by_program[:] = [weakref.ref(group)]


def _environment(options: dict[str, float]) -> Group:
    with _first:
        if not _of_environment:
            if _default_was_torchs:
                # A launcher's variables are still there, and would lead to a group that nobody meant.
                raise InvalidStateError(
                    "symmpool: torch's default process group was destroyed; what comes after needs another "
                    "group: init_process_group makes one, and Group.from_env() one without torch"
                )
            made = _made_by_program[0]() if _made_by_program else None
            _of_environment.append(made or Group.from_env(**options))
        return _of_environment[0]


def resolve(argument: GroupLike, timeout: float | None = None) -> Group:
    """The group that `Pool(group)` means. `timeout` is for a group that is made now, in seconds."""
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
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
                rank, world, store = member_of(dist, argument)
                seconds = None if options else timeout_of_torch(argument, None)
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


def adopt(group: torch.distributed.ProcessGroup, ours: Group) -> None:
    """Has a process group of torch stand for a group that was made of it already."""
    with _lock:
        _of_torch[group] = ours


def end(group: GroupKey) -> None:
    """A process group of torch is shut down: the group made of it is let go of, and no more is made."""
    with _lock:
        _ended.add(group)
        _of_torch.pop(group, None)


def ended(group: torch.distributed.ProcessGroup) -> InvalidStateError:
    """The error of calls on a process group that was shut down."""
    return InvalidStateError(
        f"symmpool: {description_of(group)} was shut down on rank {group.rank()}, as destroy_process_group "
        "does; what comes after needs another group"
    )
