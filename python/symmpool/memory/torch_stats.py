"""torch's own memory statistics under `symmpool.install()`.

torch asks its allocator for them, and of one that is not its own it says that it "does not yet support" them.
Its functions in Python (`torch.cuda.memory_allocated` and the like) are a few lines above functions in C.
Those in C are replaced here, so programs that have imported the ones in Python get answers too. What this
allocator does not count is 0, as torch has it for cudaMallocAsync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["TorchStats"]

# Reads the numbers of a device, as `symmpool.memory_stats` has them.
Read = Callable[[int], dict[str, int]]

_POOLS = ("all", "large_pool", "small_pool")
_SIZES = (
    "allocated_bytes",
    "active_bytes",
    "requested_bytes",
    "reserved_bytes",
    "inactive_split_bytes",
)
_COUNTS = ("allocation", "active", "segment", "inactive_split")
# Numbers that begin anew where a program resets what was accumulated.
_ACCUMULATED = ("allocs", "frees", "ooms", "retries")


class TorchStats:
    """The functions of `torch._C` that tell of memory, for devices whose numbers `read` has. `reset_peaks`
    begins their peaks anew."""

    def __init__(self, read: Read, reset_peaks: Callable[[int], None]):
        self._read, self._reset_peaks = read, reset_peaks
        # Numbers at the time when a program last reset what was accumulated, by device.
        self._before: dict[int, dict[str, int]] = {}
        self._fractions: dict[int, float] = {}

    def replace(self, functions: Any) -> None:
        """Puts the functions in the place of those of a module, which is `torch._C`. Names that a version of
        torch does not have stay out."""
        set_fraction = getattr(functions, "_cuda_setMemoryFraction", None)

        def remember_fraction(fraction: float, device: int) -> None:
            set_fraction(fraction, device)  # type: ignore[misc]
            self._fractions[device] = fraction

        ours = {
            "_cuda_memoryStats": self.stats,
            "_cuda_resetPeakMemoryStats": self._reset_peaks,
            "_cuda_resetAccumulatedMemoryStats": self.reset_accumulated,
            "_cuda_memorySnapshot": self.snapshot,
            "_cuda_setMemoryFraction": remember_fraction,
            "_cuda_getMemoryFraction": lambda device: self._fractions.get(device, 1.0),
        }
        for name, function in ours.items():
            if hasattr(functions, name):
                setattr(functions, name, function)

    def stats(self, device: int) -> dict[str, Any]:
        """The numbers of a device, in torch's form."""
        now = self._since_reset(device)
        found: dict[str, Any] = {name: _of_pools() for name in (*_SIZES, *_COUNTS)}
        for name in ("allocated_bytes", "active_bytes", "requested_bytes"):
            found[name]["all"].update(current=now["allocated"], peak=now["peak_allocated"])
        found["reserved_bytes"]["all"].update(current=now["reserved"], peak=now["peak_reserved"])
        found["inactive_split_bytes"]["all"].update(current=now["reserved"] - now["allocated"])
        living = self._read(device)
        for name in ("allocation", "active"):
            current = living["allocs"] - living["frees"]
            found[name]["all"].update(current=current, allocated=now["allocs"], freed=now["frees"])
        found["segment"]["all"].update(current=now["segments"])
        for name in ("oversize_allocations", "oversize_segments"):
            found[name] = _numbers()
        return found | {
            "num_alloc_retries": now["retries"],
            "num_ooms": now["ooms"],
            "num_sync_all_streams": 0,
            "num_device_alloc": 0,
            "num_device_free": 0,
            "num_oom_rejections": 0,
            "max_split_size": -1,
            "reserved_bytes_by_private_pools": {},
        }

    def reset_accumulated(self, device: int) -> None:
        """Begins the numbers anew that only grow."""
        now = self._read(device)
        self._before[device] = {name: now[name] for name in _ACCUMULATED}

    def snapshot(self, asked: object = None) -> dict[str, Any]:
        """A segment for each device that has memory, without its blocks."""
        import torch

        segments = []
        for device in range(torch.cuda.device_count()):
            now = self._read(device)
            if now["reserved"]:
                segments.append(
                    {
                        "device": device,
                        "address": 0,
                        "total_size": now["reserved"],
                        "allocated_size": now["allocated"],
                        "active_size": now["allocated"],
                        "requested_size": now["allocated"],
                        "stream": 0,
                        "segment_type": "large",
                        "segment_pool_id": (0, 0),
                        "is_expandable": True,
                        "frames": [],
                        "blocks": [],
                    }
                )
        traces: list[list[Any]] = [[] for _ in range(torch.cuda.device_count())]
        settings: dict[str, Any] = {}
        return {
            "segments": segments,
            "device_traces": traces,
            "allocator_settings": settings,
            "external_annotations": [],
        }

    def _since_reset(self, device: int) -> dict[str, int]:
        now, before = self._read(device), self._before.get(device, {})
        return {name: value - before.get(name, 0) for name, value in now.items()}


def _numbers() -> dict[str, int]:
    return {"current": 0, "peak": 0, "allocated": 0, "freed": 0}


def _of_pools() -> dict[str, dict[str, int]]:
    return {pool: _numbers() for pool in _POOLS}
