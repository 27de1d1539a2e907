"""The backends of torch that a group of ours has beside it: gloo for the CPU, NCCL for CUDA. NCCL takes one
rank a GPU, so that gloo, which goes by way of the host, is for both where ranks may share one."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from symmpool.communicators import sm_budget
from symmpool.errors import InvalidStateError, UnsupportedError
from symmpool.groups.process_groups import DEFAULT_TIMEOUT, seconds_of
from symmpool.groups.store import own_connection
from symmpool.torch_backend import allocation
from symmpool.torch_backend.nccl_p2p import Messages

__all__ = ["Beside"]

# What messages that wait may take of a device together, in multiprocessors, of which an A100 has 108: fewer
# than all, as those that they wait for must run. NCCL gives each of its blocks one.
_MULTIPROCESSORS = 96
# More are none the faster: as many as NCCL has channels at most.
_MOST_BLOCKS = 32


def _in_group(kind: type) -> type:
    """A backend of torch's in a group of ours, which `group` refers to, for what torch asks a group's
    backends alone: it tells the group of a new timeout, and has memory in windows."""

    def _set_default_timeout(self: Any, timeout: Any) -> None:
        super(found, self)._set_default_timeout(timeout)
        group = self.group()
        if group is not None:
            group.timeout_is(timeout)

    def supports_tensor_alloc(self: Any, device: Any) -> bool:
        group = self.group()
        if group is not None and allocation.has_windows(group, device):
            return True
        return super(found, self).supports_tensor_alloc(device)

    def allocate_tensor(self: Any, size: int, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        group = self.group()
        tensor = allocation.window(group, size, dtype, device) if group is not None else None
        if tensor is not None:
            return tensor
        if super(found, self).supports_tensor_alloc(device):
            return super(found, self).allocate_tensor(size, dtype=dtype, device=device)
        return torch.empty(size, dtype=dtype, device=device)

    methods = [_set_default_timeout]
    # torch 2.8 and newer.
    if hasattr(kind, "allocate_tensor"):
        methods += [supports_tensor_alloc, allocate_tensor]
    found = type(kind.__name__, (kind,), {method.__name__: method for method in methods})
    return found


_Gloo = _in_group(dist.ProcessGroupGloo) if dist.is_gloo_available() else None
_Nccl = _in_group(dist.ProcessGroupNCCL) if dist.is_nccl_available() else None


def _registered(group: dist.ProcessGroup, found: list[tuple[str, Any, Any]]) -> dist.ProcessGroup:
    for number, (device, kind, backend) in enumerate(found):
        group._register_backend(torch.device(device), kind, backend)
        if number == 0:
            group._set_default_backend(kind)
    return group


def _there(method: Any) -> Any:
    if method is None:
        raise InvalidStateError("symmpool: the group is gone")
    return method


class Beside:
    """The backends of one group of ours, which meet in stores of their own within the group's.

    `names` says by kind of device which they are; calls of `rest` do not come back to our class.
    `messages` are what NCCL sends from one rank to another."""

    def __init__(self, group: Any, store: Any, timeout: Any, options: Any):
        """`options` are NCCL's."""
        self._store, self._place, self._options = store, (group.rank(), group.size()), options
        self._timeout = timeout
        # Weakly: a group that is let go of is to go at once, with its store.
        connected = weakref.WeakMethod(self._connected)
        self.messages = Messages(lambda *which: _there(connected())(*which))
        # Each rank counts its groups in a store: one that outlives them, as a launcher's does, still has
        # the addresses of the last one's backends.
        count = f"symmpool/backend/{group.rank()}"
        self._run = store.add(count, 1)
        kinds = dist.ProcessGroup.BackendType
        found = []
        try:
            if _Gloo is not None:
                gloo = _Gloo(self._meeting("gloo", store), *self._place, timeout=timeout)
                found.append(("cpu", kinds.GLOO, gloo))
            if not torch.cuda.is_available():
                pass
            elif sm_budget.shares_device():
                found += [("cuda", kind, backend) for _, kind, backend in found]
            elif _Nccl is not None:
                found.append(("cuda", kinds.NCCL, self._nccl(timeout)))
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

    def _meeting(self, name: str, store: Any) -> Any:
        return dist.PrefixStore(f"{name}/{self._run}", store)

    def _nccl(self, timeout: Any) -> Any:
        options = self._options if self._options is not None else dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return _Nccl(self._meeting("nccl", self._store), *self._place, options)

    def begin(self, channel: tuple[int, int], tensor: torch.Tensor) -> Any:
        """Begins a message of a CUDA tensor by NCCL, on the channel from one rank to another: its Work."""
        if self.names.get("cuda") != "nccl":
            raise UnsupportedError(
                "symmpool: before a group's first collective of CUDA tensors its messages of such are "
                "NCCL's, which takes one rank a GPU, and with SYMMPOOL_SHARED_DEVICE=1 ranks may share one; "
                "begin with a collective on the group, or send copies on the CPU"
            )
        source, target = channel
        if self._place[0] == source:
            return self.messages.begin(*channel, [tensor], lambda two, sent: two.send(sent, 1, 0))
        return self.messages.begin(*channel, [tensor], lambda two, to: two.recv(to, 0, 0))

    def _connected(self, source: int, target: int, meet: Callable[..., None]) -> Any:
        """A group of two ranks."""
        number = 0 if self._place[0] == source else 1
        store = self._meeting(f"nccl/{source}-{target}", own_connection(self._store))
        meet(store, number, seconds_of(self._timeout) or DEFAULT_TIMEOUT)
        options = dist.ProcessGroupNCCL.Options()
        if self._options is not None:
            options.config = self._options.config
            options.is_high_priority_stream = self._options.is_high_priority_stream
        options._timeout = self._timeout
        self._bound(options.config)
        nccl = dist.ProcessGroupNCCL(store, number, 2, options)
        kind = dist.ProcessGroup.BackendType.NCCL
        return _registered(dist.ProcessGroup(store, number, 2), [("cuda", kind, nccl)])

    def _bound(self, config: Any) -> None:
        """Has messages of all channels fit on a device side by side: each may wait for its other rank."""
        blocks = max(1, min(_MOST_BLOCKS, _MULTIPROCESSORS // (2 * (self._place[1] - 1))))
        # Below 0 where nobody said so.
        config.max_ctas = min(config.max_ctas, blocks) if config.max_ctas > 0 else blocks
        config.min_ctas = min(config.min_ctas, blocks)

    def timeout_is(self, timeout: Any) -> None:
        """What the backends that torch tells of a new timeout tell the others."""
        self._timeout = timeout
        for group in self.messages.groups():
            group._get_backend(torch.device("cuda"))._set_default_timeout(timeout)

    def shutdown(self) -> None:
        """As the group's own, for what that does not know."""
        self.messages.shutdown(seconds_of(self._timeout) or DEFAULT_TIMEOUT)

    def abort(self) -> None:
        """As `shutdown`."""
        self.messages.abort()
