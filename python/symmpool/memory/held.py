"""What the communicators of this process hold of memory, and for which group."""

from __future__ import annotations

from typing import Any

from symmpool.groups import pool_registry
from symmpool.groups.names import name_of

__all__ = ["communicator_memory"]


def communicator_memory() -> list[dict[str, Any]]:
    """What each communicator of this process holds for as long as it lives, on this rank. A dict for each:
    `group`, the name of the process group that it serves (of another kind of group, one like "symmpool:0"),
    `device`, and bytes: `control`, `inboxes`, `scratch`, `staging`, and their sum, `total`. They are device
    memory, or host memory on the CPU. Those of module-level calls and of the backend are among them. Talks to
    nobody. InvalidStateError in a forked child."""
    found = []
    for pool in pool_registry.all_pools():
        key = pool_registry.key_holding(pool)
        group = name_of(pool if key is None else key)
        for memory in pool.stats()["communicators"]:
            found.append({"group": group, "device": pool.device, **memory})
    return found
