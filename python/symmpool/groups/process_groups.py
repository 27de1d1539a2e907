"""Questions to torch's process groups: members, stores, backends and timeouts.

Nothing here imports torch: a program that has not imported it has no process groups.
"""

from __future__ import annotations

import datetime
import sys
import weakref
from typing import TYPE_CHECKING, Any

from symmpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    import torch.distributed

# How long collectives wait for a late rank, in seconds, where nothing else says so.
DEFAULT_TIMEOUT = 30.0
# The longest that may be asked for: more than any program runs.
LONGEST_TIMEOUT = 1e9


# Process groups of torch whose backend is ours, and that backend. It is kept as long as the group: what torch
# wraps around a backend keeps its C++ half alone.
_ours: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def know_backend(group: torch.distributed.ProcessGroup, backend: object) -> None:
    """From now on a process group of torch is known by its backend of ours."""
    _ours[group] = backend


def ours(group: object) -> Any:
    """Returns the object with a process group's calls on our backend: the group itself, or its backend. None
    for other groups."""
    if hasattr(group, "_served"):
        return group
    try:
        return _ours.get(group)
    except TypeError:
        return None


def distributed() -> Any:
    """torch.distributed, if the program has imported it and it works."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() else None


def member_of(
    dist: ModuleType, group: torch.distributed.ProcessGroup
) -> tuple[int, int, torch.distributed.Store]:
    """This process's rank in a process group, the number of ranks, and the store they met in."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise InvalidArgumentError("group: this process is no member of it")
    c10d = dist.distributed_c10d
    store = getattr(ours(group), "_store", None)
    if store is None:
        entry = c10d._world.pg_map.get(group)
        store = entry[1] if entry else None
    if store is None:
        store = group.get_group_store()
    return rank, world, store


def registered(group: object) -> Mapping[torch.distributed.ProcessGroup, object] | None:
    """Where torch has a process group until it is destroyed: what holds it is in there. None for what is
    none of torch's, or is there no more."""
    dist = distributed()
    if dist is None or not isinstance(group, dist.ProcessGroup):
        return None
    known = dist.distributed_c10d._world.pg_map
    return known if group in known else None


def backends_of(group: torch.distributed.ProcessGroup) -> dict[str, str]:
    """The backends of a process group of torch by kind of device, as the program named them: nothing where
    it named none."""
    config = distributed().distributed_c10d._world.pg_backend_config.get(group, "")
    pairs = [pair.partition(":") for pair in str(config).split(",")]
    return {device: backend for device, _, backend in pairs if backend}


def timeout_of_torch(group: torch.distributed.ProcessGroup, kind: str | None) -> float | None:
    """How long a process group of torch waits, in seconds: what the options of its backend for a kind
    of device say ("cpu", "cuda"), or of any backend; None where none says so."""
    timeout = getattr(ours(group), "_timeout", None)
    devices = getattr(group, "_device_types", ())
    for device in sorted(devices, key=lambda each: each.type != kind):
        if timeout is not None:
            break
        try:
            timeout = group._get_backend(device).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return seconds_of(timeout)


def seconds_of(timeout: object) -> float | None:
    """A timeout of torch, a timedelta, in seconds as ours are; None where it says nothing."""
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else 0
    return min(seconds, LONGEST_TIMEOUT) if seconds > 0 else None


def description_of(group: torch.distributed.ProcessGroup) -> str:
    """A process group's name and description, for messages."""
    name = getattr(group, "group_desc", None)
    return f"group {group.group_name!r} ({name})" if name else "its group"
