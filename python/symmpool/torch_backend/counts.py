"""Which backend served how many calls: `symmpool.backend.backend_counts`."""

from __future__ import annotations

import collections
import logging

__all__ = ["backend_counts", "last_backend", "note"]

logger = logging.getLogger("symmpool.backend")

# Numbers of calls by backend, then by operation: each call would make a key of both anew.
_counts: dict[str, dict[str, int]]
_counts = collections.defaultdict(lambda: collections.defaultdict(int))
_last: list[str | None] = [None]
_is_logged, _LEVEL = logger.isEnabledFor, logging.DEBUG


def last_backend() -> str | None:
    """Which backend this process's last call on a group of symmpool's backend went to: "symmpool",
    "nccl" or "gloo"; None before the first."""
    return _last[0]


def backend_counts(reset: bool = False) -> dict[str, dict[str, int]]:
    """How many calls went where in this process: numbers by operation and backend. With `reset`
    they begin again at none."""
    found: dict[str, dict[str, int]] = {}
    for backend, operations in list(_counts.items()):
        for operation, count in list(operations.items()):
            found.setdefault(operation, {})[backend] = count
    if reset:
        _counts.clear()
    return found


def note(operation: str, backend: str) -> None:
    """Counts a call that goes to a backend."""
    _counts[backend][operation] += 1
    _last[0] = backend
    if _is_logged(_LEVEL):
        logger.debug("%s: %s", operation, backend)
