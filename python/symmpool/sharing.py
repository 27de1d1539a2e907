"""How communicators that module-level calls and the backend make share a device with others.

A kernel that waits for a peer keeps its place on the device. With calls of several groups under way, on
streams of their own, one that takes all of it keeps others outside, ours and NCCL's, and ranks that began
with different ones wait for each other until time is over. So where a process has several groups on CUDA,
communicators are told of others (`concurrent`), which large calls pay for.
"""

from __future__ import annotations

import os
from typing import Any

from symmpool import groups
from symmpool.errors import InvalidArgumentError

__all__ = ["at_once", "shares_device"]

VARIABLE = "SYMMPOOL_CONCURRENT"
# Says that several ranks may use one device; pools refuse what makes no sense.
_SHARED_DEVICE = "SYMMPOOL_SHARED_DEVICE"
# What is assumed of programs with several groups.
_SEVERAL = 2
# As many as the option takes.
_MOST = 16


def shares_device() -> bool:
    """Whether ranks may use one GPU, as the environment says: to try programs where there are fewer."""
    return os.environ.get(_SHARED_DEVICE) == "1"


def is_count(said: str) -> bool:
    """Whether that is a number of communicators."""
    return said.isascii() and said.isdigit() and 1 <= int(said) <= _MOST


def at_once(pool: Any) -> int:
    """How many communicators may have calls under way at once on a pool's device, this one included: what
    the environment says, the same on every rank; else by the groups that any rank has. Collective."""
    if pool.device == "cpu":
        return 1
    said = os.environ.get(VARIABLE, "")
    if said:
        if not is_count(said):
            raise InvalidArgumentError(
                f"{VARIABLE}={said}: communicators whose calls are under way at once on a device; a "
                f"whole number from 1 to {_MOST} is needed, the same on every rank"
            )
        return int(said)
    dist, key = groups.distributed(), groups.key_holding(pool)
    if dist is None or not isinstance(key, dist.ProcessGroup):
        return 1
    why = "it has several groups" if _several_groups(dist) else None
    seconds = groups.timeout_of(pool)
    told = groups.agree(key, "concurrent", why, seconds, "the first call on CUDA")
    return _SEVERAL if told else 1


def _several_groups(dist: Any) -> bool:
    """Whether this rank is in several groups of more than one whose calls run on CUDA: gloo's do not."""
    found = [
        group
        for group in list(dist.distributed_c10d._world.pg_map)
        if group.size() > 1 and groups.backends_of(group).get("cuda", "gloo") != "gloo"
    ]
    return len(found) > 1
