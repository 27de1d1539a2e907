"""How communicators that module-level calls and the backend make share a device with others.

A kernel that waits for a peer keeps its place on the device. With calls of several groups under way, on
streams of their own, one that takes all of it keeps others outside, ours and NCCL's, and ranks that began
with different ones wait for each other until time is over. Communicators know of each other, and leave each
other room (`leave_room` tells them of others); of NCCL the backend tells them, before it has anything to do.
Where groups of torch have NCCL itself nobody sees what it does: it is left room if there are several of them.
"""

from __future__ import annotations

import os
from typing import Any

from symmpool._symmpool import leave_room
from symmpool.errors import InvalidArgumentError
from symmpool.groups import process_groups

__all__ = ["concurrent", "leave_others_room", "shares_device"]

VARIABLE = "SYMMPOOL_CONCURRENT"
# Says that several ranks may use one device; pools refuse what makes no sense.
_SHARED_DEVICE = "SYMMPOOL_SHARED_DEVICE"
# As many as the option takes.
_MOST = 16


def shares_device() -> bool:
    """Whether ranks may use one GPU, as the environment says: to try programs where there are fewer."""
    return os.environ.get(_SHARED_DEVICE) == "1"


def is_count(said: str) -> bool:
    """Whether that is a number of communicators."""
    return said.isascii() and said.isdigit() and 1 <= int(said) <= _MOST


def concurrent(pool: Any) -> int | None:
    """How many communicators may have calls under way at once on a pool's device, this one included, where
    the environment says so."""
    said = os.environ.get(VARIABLE, "")
    if pool.device == "cpu" or not said:
        return None
    if not is_count(said):
        raise InvalidArgumentError(
            f"{VARIABLE}={said}: communicators whose calls are under way at once on a device; a "
            f"whole number from 1 to {_MOST} is needed"
        )
    return int(said)


def leave_others_room(device: int) -> None:
    """Has communicators leave room on the device of that number (-1: the CPU) if several groups of torch
    have a backend there whose kernels may wait for other ranks while ours do."""
    dist = process_groups.distributed()
    if device < 0 or dist is None:
        return
    made = list(dist.distributed_c10d._world.pg_map)
    theirs = [group for group in made if group.size() > 1 and _has_kernels(group)]
    if len(theirs) > 1:
        leave_room(device)


def _has_kernels(group: Any) -> bool:
    """Ours know of each other, and gloo has none."""
    return process_groups.backends_of(group).get("cuda", "gloo") not in ("gloo", "symmpool")
