"""Communicators of groups whose ranks are in the default group, without a rendezvous in the store.

The ranks of the default group share its communicator's memory. A rank that comes to a group's first call says
so there, and finds the others there. Where one comes another way, because it has no room or had no such
memory when it came, it says so, or is seen in the store; then all meet in the store."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from symmpool.communicators.cache import cache, pools_on
from symmpool.communicators.entry import CommunicatorEntry
from symmpool.errors import TimeoutError
from symmpool.groups import pool_registry, process_groups

if TYPE_CHECKING:
    import torch.distributed

    from symmpool._symmpool import GroupOffer

__all__ = ["let_go", "make"]

_CPU = -1
# How long a rank waits before it looks, in the store, for ranks that come another way, in seconds; and how
# long at most before it looks again.
_FIRST_LOOK, _LONGEST_PAUSE = 0.05, 1.0


def make(
    group: Any,
    around: torch.distributed.ProcessGroup,
    name: str,
    seconds: float,
    comes_otherwise: Callable[[list[int]], bool],
) -> CommunicatorEntry | None:
    """Makes what serves a process group on the CPU, in the memory of the group `around` it. Collective.
    `name` is the group's, the same on its ranks, and never another one's of theirs. `comes_otherwise` says
    whether one of some ranks meets in the store. None where the ranks do that. Raises TimeoutError, with
    `ranks`, where some do not come."""
    with cache.lock_for(group, _CPU):
        found = cache.of_group(group, _CPU)
        if found is not None:
            return found[1]
        parent = cache.of_group(around, _CPU)
        if parent is None or pools_on(group, _CPU):
            return None
        dist = process_groups.distributed()
        ranks = dist.get_process_group_ranks(group)
        digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
        key = (int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little"))
        offer = parent[1].comm._offer(ranks, key, timeout=seconds)
        if offer is None:
            return None
        try:
            if not _all_come(offer, seconds, comes_otherwise):
                offer.decline()
                return None
            pool, communicator = offer.accept(group)
        except BaseException:
            offer.decline()
            raise
        pool_registry.register(pool, group)
        entry = CommunicatorEntry(pool, communicator)
        cache.add_pool(pool, entry)
        cache.add(group, _CPU, pool, entry)
        return entry


def let_go(entry: CommunicatorEntry) -> None:
    """Has calls find what was made no more."""
    pool = entry.pool()
    if pool is not None:
        key = pool_registry.key_holding(pool)
        cache.forget(pool)
        if key is not None:
            pool_registry.unregister(pool, key)


def _all_come(offer: GroupOffer, seconds: float, comes_otherwise: Callable[[list[int]], bool]) -> bool:
    begun = time.monotonic()
    end, pause, look = begun + seconds, _FIRST_LOOK, begun + _FIRST_LOOK
    while True:
        left = end - time.monotonic()
        met = offer.wait(max(min(left, look - time.monotonic()), 1e-6))
        if met is not None:
            return met
        if left <= 0:
            error = TimeoutError("waiting in shared memory")
            error.ranks = tuple(offer.missing())
            raise error
        if time.monotonic() >= look:
            if comes_otherwise(offer.missing()):
                return False
            pause = min(2 * pause, _LONGEST_PAUSE)
            look = time.monotonic() + pause
