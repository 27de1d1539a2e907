"""Memory that the communicators of this process hold, for which group, and which found no room."""

from __future__ import annotations

import warnings
from typing import TypedDict

from symmpool.groups import pool_registry
from symmpool.groups.names import name_of

__all__ = ["communicator_memory", "warn_of_shortages"]

#: Groups whose users know that a device had no room.
_warned: set[str] = set()


class HeldMemory(TypedDict):
    """Memory of one communicator: for which group, on which device, and bytes."""

    group: str
    device: str
    total: int
    control: int
    inboxes: int
    scratch: int
    staging: int
    wanted: int


def communicator_memory() -> list[HeldMemory]:
    """Returns the memory that each communicator of this process holds for as long as it lives, on this rank.
    A dict for each: `group`, the name of the process group that it serves (of another kind of group, one like
    "symmpool:0"), `device`, and bytes: `control`, `inboxes`, `scratch`, `staging`, and their sum, `total`.
    They are device memory, or host memory on the CPU. `wanted` is not held: bytes that it would have taken
    for large calls, had each device had room. Those of module-level calls and of the backend are among them.
    Talks to nobody. InvalidStateError in a forked child."""
    found: list[HeldMemory] = []
    for pool in pool_registry.all_pools():
        key = pool_registry.key_holding(pool)
        group = name_of(pool if key is None else key)
        for memory in pool.stats()["communicators"]:
            found.append({"group": group, "device": pool.device, **memory})
    return found


def warn_of_shortages() -> None:
    """Warns of each group for whose large calls a device had no room, once. The call that finds it calls
    this, behind it."""
    for held in communicator_memory():
        if held["wanted"] and held["group"] not in _warned:
            _warned.add(held["group"])
            warnings.warn(
                f"symmpool: a device of the group {held['group']!r} has no room for {held['wanted']:,} bytes "
                f"({held['wanted'] / (1 << 20):,.0f} MiB), which large calls on {held['device']} use. "
                "They go in more pieces meanwhile, and take up to 2.5 times as long; it is tried again. "
                "Leave more memory free on every rank (torch.cuda.set_per_process_memory_fraction does), or "
                "make one large call of the group earlier",
                RuntimeWarning,
                stacklevel=2,
            )
