"""The backends of torch that a group of ours has beside it: gloo for the CPU, NCCL for CUDA."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["backends"]


def _hears_of_timeouts(kind: type) -> type:
    """A backend of torch's that tells its group, which `group` refers to, of a new timeout: torch knows
    how to set those of its own backends only."""

    def _set_default_timeout(self: Any, timeout: Any) -> None:
        super(found, self)._set_default_timeout(timeout)
        group = self.group()
        if group is not None:
            group.timeout_is(timeout)

    found = type(kind.__name__, (kind,), {"_set_default_timeout": _set_default_timeout})
    return found


_Gloo = _hears_of_timeouts(dist.ProcessGroupGloo) if dist.is_gloo_available() else None
_Nccl = _hears_of_timeouts(dist.ProcessGroupNCCL) if dist.is_nccl_available() else None


def backends(
    group: Any, store: Any, rank: int, size: int, timeout: Any, options: Any
) -> list[tuple[str, str, Any, Any]]:
    """Devices' kinds, names, types and backends, as many as there are here. Somebody has to keep them, or
    torch finds plain ones of its own in their place. `options` are NCCL's."""
    # Each rank counts its groups in a store: one that outlives them, as a launcher's does, still has
    # the addresses of the last one's backends.
    count = f"symmpool/backend/{rank}"
    run = store.add(count, 1)
    kinds, found = dist.ProcessGroup.BackendType, []
    try:
        if _Gloo is not None:
            meeting = dist.PrefixStore(f"gloo/{run}", store)
            gloo = _Gloo(meeting, rank, size, timeout=timeout)
            found.append(("cpu", "gloo", kinds.GLOO, gloo))
        if _Nccl is not None and torch.cuda.is_available():
            if options is None:
                options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = _Nccl(dist.PrefixStore(f"nccl/{run}", store), rank, size, options)
            found.append(("cuda", "nccl", kinds.NCCL, nccl))
    except BaseException:
        # So that a second try meets those who have not been here yet.
        with contextlib.suppress(Exception):
            store.add(count, -1)
        raise
    for *_, backend in found:
        backend.group = weakref.ref(group)
    return found
