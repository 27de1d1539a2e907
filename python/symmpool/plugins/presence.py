"""Question whether all ranks of an engine have this package, before their first group is made: on different
backends ranks would wait for each other until the engine's timeout, without a word."""

from __future__ import annotations

import contextlib
import datetime
import logging
import time
from typing import TYPE_CHECKING, Any

from symmpool._symmpool import version as own_version
from symmpool.errors import InvalidStateError
from symmpool.groups.agreement import named
from symmpool.plugins.report import VARIABLE

if TYPE_CHECKING:
    import torch.distributed

__all__ = ["PresenceCheck"]

# After so many seconds a rank says whom it waits for, and after so many it gives up: ranks of one engine may
# start minutes apart.
_FIRST_WORD, _LIMIT = 20.0, 300.0


class PresenceCheck:
    """Called with the options of each group that torch makes on our backend. The first group that has several
    ranks counts."""

    def __init__(self, engine: str, logger: logging.Logger):
        self._engine, self._logger, self._done = engine, logger, False

    def __call__(self, options: Any) -> None:
        """Raises InvalidStateError where a rank does not come with this package, or with another version."""
        rank, size = options.group_rank, options.group_size
        if self._done or size < 2:
            return
        self._done = True
        store, keys = options.store, [f"symmpool/engine/{each}" for each in range(size)]
        store.set(keys[rank], own_version())
        absent = self._await(store, keys, min(_LIMIT, options.timeout.total_seconds()), rank)
        if absent:
            raise InvalidStateError(self._waits(rank, absent) + f"; rank {rank} gave up")
        versions = [store.get(key).decode() for key in keys]
        others = [each for each, version in enumerate(versions) if version != versions[rank]]
        if others:
            raise InvalidStateError(
                f"symmpool: rank {rank} has symmpool {versions[rank]}, and {named(others)} "
                f"{', '.join(sorted({versions[each] for each in others}))}; install one version on every rank"
            )

    def _await(self, store: torch.distributed.Store, keys: list[str], limit: float, rank: int) -> list[int]:
        """The ranks that have not come after so many seconds."""
        begin, said = time.monotonic(), False
        while True:
            waited = time.monotonic() - begin
            pause = min(limit, limit if said else _FIRST_WORD) - waited
            with contextlib.suppress(RuntimeError):  # torch's DistStoreError: they have not come
                store.wait(keys, datetime.timedelta(seconds=max(pause, 0.01)))
                return []
            absent = [each for each, key in enumerate(keys) if not store.check([key])]
            if not absent or time.monotonic() - begin >= limit:
                return absent
            if not said:
                said = True
                self._logger.warning("%s", self._waits(rank, absent))

    def _waits(self, rank: int, absent: list[int]) -> str:
        lack = "lacks" if len(absent) == 1 else "lack"
        return (
            f"symmpool: rank {rank} of {self._engine} waits for {named(absent)}, which is late, or {lack} "
            f"symmpool, or has {VARIABLE}=off; install symmpool on every rank, or set {VARIABLE}=off on all"
        )
