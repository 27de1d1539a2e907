"""The fallback backends of a group of ours, which are torch's: gloo for the CPU, NCCL for CUDA. NCCL takes
one rank a GPU, so where ranks may share one, gloo is the fallback for both; its data goes by way of the
host."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from symmpool.communicators import forks, sm_budget
from symmpool.errors import InvalidStateError, UnsupportedError
from symmpool.groups.process_groups import DEFAULT_TIMEOUT, seconds_of
from symmpool.groups.store import own_connection
from symmpool.torch_backend import allocation
from symmpool.torch_backend.nccl_p2p import NcclChannels

__all__ = ["FallbackBackends"]

# How many multiprocessors waiting point-to-point kernels may take together. An A100 has 108: some are left,
# as the kernels that they wait for must run. NCCL gives each of its blocks one.
_MULTIPROCESSORS = 96
# More blocks are no faster: this is the most channels that NCCL has.
_MOST_BLOCKS = 32


def _in_group(kind: type) -> type:
    """A class of backend of torch's that is one of a group of ours, to which its `group` refers. It does what
    torch asks of a group's backends alone: it passes a new timeout on to the group, and has memory in
    windows."""

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

    methods: list[Callable[..., Any]] = [_set_default_timeout]
    # torch 2.8 and newer.
    if hasattr(kind, "allocate_tensor"):
        methods += [supports_tensor_alloc, allocate_tensor]
    found: Any = type(kind.__name__, (kind,), {method.__name__: method for method in methods})
    return found


_Gloo = _in_group(dist.ProcessGroupGloo) if dist.is_gloo_available() else None
_Nccl = _in_group(dist.ProcessGroupNCCL) if dist.is_nccl_available() else None


@functools.cache
def _gloo_devices(process: int, interfaces: str | None) -> list[Any]:
    """What gloo's connections are made by: a thread, a listening socket and what the thread waits for. All
    groups of a process share it, or each would take four descriptors for it."""
    kind = dist.ProcessGroupGloo
    if not interfaces:
        return [kind.create_default_device()]
    return [kind.create_device(interface=name) for name in interfaces.split(",")]


def _gloo_options(timeout: Any) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = _gloo_devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME"))
    # As torch has it where it makes the devices.
    options._threads = 2 * len(options._devices)
    options._timeout = timeout
    return options


def _registered(group: dist.ProcessGroup, found: list[tuple[str, Any, Any]]) -> dist.ProcessGroup:
    for number, (device, kind, backend) in enumerate(found):
        group._register_backend(torch.device(device), kind, backend)
        if number == 0:
            group._set_default_backend(kind)
    return group


def _alive(method: Any) -> Any:
    if method is None:
        raise InvalidStateError("symmpool: the group is gone")
    return method


class FallbackBackends:
    """The fallback backends of one group of ours, which meet in stores of their own within the group's.

    `names` are the backends' names by kind of device. `group` is a process group of torch's own class on the
    same backends: its calls do not come back to our class. `channels` are the ways of NCCL from one rank to
    another."""

    def __init__(self, group: Any, store: Any, timeout: Any, options: Any, publish: Callable[[Any], None]):
        """`options` are NCCL's. `publish` takes `meeting` before ranks meet: what a rank publishes there is
        known to all ranks behind gloo's meeting."""
        self._store, self._place, self._options = store, (group.rank(), group.size()), options
        self._timeout = timeout
        # A weak reference: a group that the program lets go of is to go at once, with its store.
        connected = weakref.WeakMethod(self._connected)
        self.channels = NcclChannels(lambda *which: _alive(connected())(*which))
        # Each rank counts its groups in a store: one that outlives them, as a launcher's does, still has
        # the addresses of the last one's backends.
        count = f"symmpool/backend/{group.rank()}"
        self.run = store.add(count, 1)
        kinds = dist.ProcessGroup.BackendType
        found = []
        try:
            publish(self.meeting)
            if _Gloo is not None:
                gloo = _Gloo(self.meeting("gloo", store), *self._place, _gloo_options(timeout))
                found.append(("cpu", kinds.GLOO, gloo))
            if not torch.cuda.is_available():
                pass
            elif sm_budget.shares_device():
                found += [("cuda", kind, backend) for _, kind, backend in found]
            elif _Nccl is not None:
                found.append(("cuda", kinds.NCCL, self._nccl(timeout)))
        except BaseException:
            # So that a second try meets the ranks that have not been here yet.
            with contextlib.suppress(Exception):
                store.add(count, -1)
            raise
        # Kept, or torch would find plain backends of its own in their place.
        self._backends = [backend for *_, backend in found]
        for backend in self._backends:
            backend.group = weakref.ref(group)
        self.names = {device: kind.name.lower() for device, kind, _ in found}
        self.group = _registered(dist.ProcessGroup(store, *self._place), found)
        _registered(group, found)
        forks.renew_in_children(self)

    def forked(self) -> None:
        """In a forked child, where the end of such a backend would wait for threads that its parent has: they
        stay for as long as the child lives."""
        for each in (self.group, *self._backends):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))

    def meeting(self, name: str, store: Any = None) -> Any:
        """The store of this run of the group for what has that name; on another connection with `store`."""
        store = self._store if store is None else store
        return dist.PrefixStore(f"{name}/{self.run}", store)

    def _nccl(self, timeout: Any) -> Any:
        options = self._options if self._options is not None else dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        assert _Nccl is not None  # it is among the group's backends
        return _Nccl(self.meeting("nccl", self._store), *self._place, options)

    def begin(self, channel: tuple[int, int], tensor: torch.Tensor) -> Any:
        """Begins to send or to receive a CUDA tensor by NCCL, on the channel from one rank to another.
        Returns its Work."""
        if self.names.get("cuda") != "nccl":
            raise UnsupportedError(
                "symmpool: before a group's first collective of CUDA tensors NCCL sends and receives them. "
                "NCCL takes one rank a GPU, and with SYMMPOOL_SHARED_DEVICE=1 ranks may share one; begin "
                "with a collective on the group, or send copies on the CPU"
            )
        source, target = channel
        if self._place[0] == source:
            return self.channels.begin(*channel, [tensor], lambda two, sent: two.send(sent, 1, 0))
        return self.channels.begin(*channel, [tensor], lambda two, to: two.recv(to, 0, 0))

    def _connected(self, source: int, target: int, meet: Callable[..., None]) -> Any:
        """The group of two ranks that carries a channel, made once both are there."""
        number = 0 if self._place[0] == source else 1
        store = self.meeting(f"nccl/{source}-{target}", own_connection(self._store))
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
        """Limits blocks so that the kernels of all channels fit on a device side by side: each may wait for
        its other rank."""
        blocks = max(1, min(_MOST_BLOCKS, _MULTIPROCESSORS // (2 * (self._place[1] - 1))))
        # Below 0 where nobody has set it.
        config.max_ctas = min(config.max_ctas, blocks) if config.max_ctas > 0 else blocks
        config.min_ctas = min(config.min_ctas, blocks)

    def timeout_is(self, timeout: Any) -> None:
        """Passes a new timeout on to the backends that torch does not know of."""
        self._timeout = timeout
        for group in self.channels.groups():
            group._get_backend(torch.device("cuda"))._set_default_timeout(timeout)

    def shutdown(self) -> None:
        """As the group's own, for the backends that torch does not know of."""
        self.channels.shutdown(seconds_of(self._timeout) or DEFAULT_TIMEOUT)

    def abort(self) -> None:
        """As `shutdown`."""
        self.channels.abort()
