"""The ranks of a contender's turn, and its process groups: each is the default group, as in a program. Every
kind has a group of its own, and between them the ranks talk by the store that they met in."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    import torch

__all__ = ["TurnRanks"]


class TurnRanks:
    """The ranks of a turn, for as long as it lasts. Its keys in the store have the turn's name."""

    def __init__(self, torch: ModuleType, device: torch.device, timeout: float, turn: str):
        from torch.distributed.rendezvous import rendezvous

        self.torch, self.dist, self.device = torch, torch.distributed, device
        self.timeout = timedelta(seconds=timeout)
        store, self.rank, self.world = next(rendezvous("env://", timeout=self.timeout))
        self.store = torch.distributed.PrefixStore(f"turn/{turn}", store)
        self.store.set_timeout(self.timeout)
        self._gathers = self._groups = 0

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Waits for this rank's device."""
        if self.on_cuda:
            self.torch.cuda.synchronize()

    def gather(self, value: object) -> list[Any]:
        """Every rank's value, in rank order, by way of JSON. Ranks leave at about one time."""
        self._gathers += 1
        key = f"gather/{self._gathers}"
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"{key}/{rank}")) for rank in range(self.world)]

    def barrier(self) -> None:
        """Waits for all ranks and their devices."""
        self.synchronize()
        self.gather(None)

    @contextlib.contextmanager
    def group(self, backend: str) -> Iterator[None]:
        """A default group on a backend, for one round. What that has made must be gone at its end."""
        self._groups += 1
        # A name of its own in the store, which still has what former groups have left there.
        store = self.dist.PrefixStore(f"group/{self._groups}", self.store)
        self.dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world, timeout=self.timeout
        )
        try:
            yield
        finally:
            gc.collect()
            self.synchronize()
            # All ranks are done with the group before one takes its part of it away.
            self.gather(None)
            self.dist.destroy_process_group()
            self.release()

    def release(self) -> None:
        """Gives memory that nothing uses back to the device."""
        gc.collect()
        if self.on_cuda:
            self.torch.cuda.empty_cache()
            self.torch.cuda.reset_peak_memory_stats()

    def attempt(self, action: Callable[[], Any]) -> tuple[Any, str | None]:
        """Returns the result of `action` and None; or, on every rank, None and why it failed on some rank."""
        value, why = None, None
        try:
            value = action()
        except Exception as error:
            why = f"{type(error).__name__}: {error}".strip()
        failed = [(rank, each) for rank, each in enumerate(self.gather(why)) if each]
        if not failed:
            return value, None
        return None, f"rank {failed[0][0]}: {failed[0][1]}"

    def device_bytes(self) -> int | None:
        """Memory of the device that is in use, by whomever; None on the CPU."""
        if not self.on_cuda:
            return None
        free, total = self.torch.cuda.mem_get_info()
        return total - free
