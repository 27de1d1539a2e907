"""The backends of torch that a group of ours has beside it: gloo for the CPU, NCCL for CUDA."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Beside"]


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


def _registered(group: dist.ProcessGroup, found: list[tuple[str, Any, Any]]) -> dist.ProcessGroup:
    for number, (device, kind, backend) in enumerate(found):
        group._register_backend(torch.device(device), kind, backend)
        if number == 0:
            group._set_default_backend(kind)
    return group


class Beside:
    """The backends of one group of ours, which meet in stores of their own within the group's.

    `names` says by kind of device which they are; calls of `rest` do not come back to our class."""

    def __init__(self, group: Any, store: Any, timeout: Any, options: Any):
        """`options` are NCCL's."""
        self._store, self._place, self._options = store, (group.rank(), group.size()), options
        self._downward: Any = None
        # Each rank counts its groups in a store: one that outlives them, as a launcher's does, still has
        # the addresses of the last one's backends.
        count = f"symmpool/backend/{group.rank()}"
        self._run = store.add(count, 1)
        kinds = dist.ProcessGroup.BackendType
        found = []
        try:
            if _Gloo is not None:
                gloo = _Gloo(self._meeting("gloo"), *self._place, timeout=timeout)
                found.append(("cpu", kinds.GLOO, gloo))
            if _Nccl is not None and torch.cuda.is_available():
                found.append(("cuda", kinds.NCCL, self._nccl(_Nccl, "nccl", timeout)))
        except BaseException:
            # So that a second try meets those who have not been here yet.
            with contextlib.suppress(Exception):
                store.add(count, -1)
            raise
        # Kept, or torch would find plain ones of its own in their place.
        self._backends = [backend for *_, backend in found]
        for backend in self._backends:
            backend.group = weakref.ref(group)
        self.names = {device: kind.name.lower() for device, kind, _ in found}
        self.rest = _registered(dist.ProcessGroup(store, *self._place), found)
        _registered(group, found)

    def _meeting(self, name: str) -> Any:
        return dist.PrefixStore(f"{name}/{self._run}", self._store)

    def _nccl(self, kind: Any, name: str, timeout: Any) -> Any:
        options = self._options if self._options is not None else dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return kind(self._meeting(name), *self._place, options)

    def between(self, device: str, source: int, target: int, timeout: Any) -> dist.ProcessGroup:
        """What carries messages from one rank to another. On CUDA torch puts what two ranks send each
        other on one stream, where a send waits for its receive; a batch of both goes at once
        (`batch_isend_irecv`), but only in groups of torch's own class. In ours two ranks that both send
        first would wait for ever, so messages to lower ranks have a communicator of their own."""
        if self.names.get(device) != "nccl" or source < target:
            return self.rest
        if self._downward is None:
            nccl = self._nccl(dist.ProcessGroupNCCL, "nccl-downward", timeout)
            group = dist.ProcessGroup(self._store, *self._place)
            kind = dist.ProcessGroup.BackendType.NCCL
            self._downward = _registered(group, [("cuda", kind, nccl)]), nccl
        return self._downward[0]

    def timeout_is(self, timeout: Any) -> None:
        """What the backends that torch tells of a new timeout tell the others."""
        if self._downward is not None:
            self._downward[1]._set_default_timeout(timeout)

    def shutdown(self) -> None:
        """As the group's own, for what that does not know."""
        if self._downward is not None:
            self._downward[0].shutdown()

    def abort(self) -> None:
        """As `shutdown`."""
        if self._downward is not None:
            self._downward[0].abort()
