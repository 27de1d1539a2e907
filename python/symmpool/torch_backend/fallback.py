"""The fallback backends of a group of ours, which are torch's: gloo for the CPU, NCCL for CUDA. NCCL takes
one rank a GPU, so where ranks may share one, gloo is the fallback for both; its data goes by way of the
host."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmpool.communicators import forks, sm_budget
from symmpool.errors import InvalidStateError, TimeoutError, UnsupportedError
from symmpool.groups import agreement
from symmpool.groups.process_groups import DEFAULT_TIMEOUT, seconds_of
from symmpool.groups.store import RunOfStore, StoreAdapter, own_connection
from symmpool.torch_backend import allocation
from symmpool.torch_backend.nccl_p2p import NcclChannels

if TYPE_CHECKING:
    import torch.distributed

    from symmpool.torch_backend.group_state import GroupState

__all__ = ["FallbackBackends"]

# How many multiprocessors waiting point-to-point kernels may take together. An A100 has 108: some are left,
# as the kernels that they wait for must run. NCCL gives each of its blocks one.
_MULTIPROCESSORS = 96
# More blocks are no faster: this is the most channels that NCCL has.
_MAX_BLOCKS = 32


def _in_group(kind: type) -> type:
    """A class of backend of torch's that is one of a group of ours, to which its `group` refers. It does what
    torch asks of a group's backends alone: it passes a new timeout on to the group, and has memory in
    windows."""

    def _set_default_timeout(self: Any, timeout: datetime.timedelta) -> None:
        super(found, self)._set_default_timeout(timeout)
        group = self.group()
        if group is not None:
            group.timeout_is(timeout)

    def supports_tensor_alloc(self: Any, device: torch.device) -> bool:
        group = self.group()
        if group is not None and allocation.has_windows(group, device):
            return True
        return super(found, self).supports_tensor_alloc(device)

    def allocate_tensor(self: Any, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
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


def _later(kind: type) -> Any:
    """A class of gloo's backends that stand for one which is made later: alone, so that nobody meets. Their
    calls go to that one."""

    def passing(name: str) -> Any:
        def call(self: Any, *arguments: object, **options: object) -> Any:
            there = _alive(self.group())._fallbacks.group._get_backend(torch.device("cpu"))
            return getattr(there, name)(*arguments, **options)

        call.__name__ = name
        return call

    calls = [name for name in _CALLS if hasattr(kind, name)]
    methods: dict[str, Any] = {name: passing(name) for name in calls}
    methods["rank"] = lambda self: _alive(self.group()).rank()
    methods["size"] = lambda self: _alive(self.group()).size()
    return type(kind.__name__, (kind,), methods)


# Calls of backends in which ranks talk to each other.
_CALLS = (
    "broadcast allreduce allreduce_sparse allreduce_coalesced reduce allgather _allgather_base alltoall_base "
    "allgather_coalesced allgather_into_tensor_coalesced gather scatter reduce_scatter _reduce_scatter_base "
    "reduce_scatter_tensor_coalesced alltoall send recv recv_anysource barrier monitored_barrier"
).split()
_Later = _later(_Gloo) if _Gloo is not None else None


@functools.cache
def _gloo_devices(process: int, interfaces: str | None) -> list[Any]:
    """Returns the devices that gloo connects by: a thread, a listening socket and what the thread waits for.
    All groups of a process share them, or each would take four descriptors."""
    kind = dist.ProcessGroupGloo
    if not interfaces:
        return [kind.create_default_device()]
    return [kind.create_device(interface=name) for name in interfaces.split(",")]


def _gloo_options(timeout: datetime.timedelta, threads: int | None = None) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = _gloo_devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME"))
    # torch computes it so where it makes the devices.
    options._threads = threads or 2 * len(options._devices)
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

    `names` are the backends' names by kind of device. `channels` are the ways of NCCL from one rank to
    another."""

    def __init__(
        self,
        group: GroupState,
        store: torch.distributed.Store,
        timeout: datetime.timedelta,
        options: Any,
        publish: Callable[[Any], None],
        run: str | None = None,
    ):
        """`options` are NCCL's. `publish` takes `store_for` before ranks meet: what a rank publishes there is
        known to all ranks behind gloo's rendezvous. With `run`, which has been agreed on, nobody meets before
        a call needs gloo, on machines without CUDA."""
        self._store, self._place, self._options = store, (group.rank(), group.size()), options
        self._timeout = timeout
        # A weak reference: a group that the program lets go of is to go at once, with its store.
        connected = weakref.WeakMethod(self._connected)
        self.channels = NcclChannels(lambda *which: _alive(connected())(*which))
        self._is_later = run is not None
        self._owner = weakref.ref(group)
        # Held by the thread that makes gloo later.
        self._lock = threading.Lock()
        # Each rank counts its groups in a store: one that outlives them, as a launcher's does, still has
        # the addresses of the last one's backends.
        count = f"symmpool/backend/{group.rank()}"
        self.run = store.add(count, 1) if run is None else run
        kinds = dist.ProcessGroup.BackendType
        found: list[tuple[str, Any, Any]] = []
        try:
            publish(self.store_for)
            if self._is_later and _Later is not None:
                found.append(("cpu", kinds.GLOO, _Later(dist.HashStore(), 0, 1, _gloo_options(timeout, 1))))
            elif _Gloo is not None:
                gloo = _Gloo(self.store_for("gloo", store), *self._place, _gloo_options(timeout))
                found.append(("cpu", kinds.GLOO, gloo))
            if not torch.cuda.is_available():
                pass
            elif sm_budget.shares_device():
                found += [("cuda", kind, backend) for _, kind, backend in found]
            elif _Nccl is not None:
                found.append(("cuda", kinds.NCCL, self._nccl(timeout)))
        except BaseException:
            # So that a second try meets the ranks that have not been here yet.
            if run is None:
                with contextlib.suppress(Exception):
                    store.add(count, -1)
            raise
        # Kept, or torch would find plain backends of its own in their place.
        self._backends = [backend for *_, backend in found]
        for backend in self._backends:
            backend.group = weakref.ref(group)
        self.names = {device: kind.name.lower() for device, kind, _ in found}
        # `None` where gloo is made later.
        self._group = None if self._is_later else _registered(dist.ProcessGroup(store, *self._place), found)
        self._is_of_torch = isinstance(group, dist.ProcessGroup)
        if self._is_of_torch:
            _registered(group.key, found)
        self._kinds = [device for device, *_ in found]
        forks.renew_in_children(self)

    @property
    def group(self) -> dist.ProcessGroup:
        """A process group of torch's own class on the same backends: its calls do not come back to our class.
        Only calls that all ranks of the group make may ask for it, as gloo may be made now, in which they
        meet."""
        if self._group is None:
            with self._lock:
                if self._group is None:
                    self._group = self._make_gloo()
        return self._group

    @property
    def is_made(self) -> bool:
        """Whether `group` is there."""
        return self._group is not None

    def make_gloo_for_monitored_barrier(self, limit: datetime.timedelta) -> None:
        """Makes `group` within the barrier's time. Raises, if ranks do not come, what gloo's barrier
        would."""
        if self._group is not None:
            return
        with self._lock:
            if self._group is None:
                try:
                    self._group = self._make_gloo(max(limit, datetime.timedelta(milliseconds=1)))
                except TimeoutError as error:
                    # The error has the class of gloo's.
                    raise RuntimeError(
                        f"symmpool: Rank {self._place[0]} timed out in monitoredBarrier after "
                        f"{limit.total_seconds() * 1e3:.0f} ms, in which not all ranks of the group came"
                    ) from error

    def _make_gloo(self, limit: datetime.timedelta | None = None) -> dist.ProcessGroup:
        """Has the ranks meet for gloo, within the group's timeout or another limit."""
        self._await_all(seconds_of(limit or self._timeout) or DEFAULT_TIMEOUT)
        store, options = self.store_for("gloo"), _gloo_options(limit or self._timeout)
        try:
            gloo = dist.ProcessGroupGloo(store, *self._place, options)
        except RuntimeError as error:
            raise TimeoutError(
                f"symmpool: rank {self._place[0]} of {self._place[1]} waited for the other ranks in the "
                f"group's first call that gloo carries: {str(error).partition(chr(10))[0]}"
            ) from error
        if limit is not None:
            gloo._set_default_timeout(self._timeout)
        self._backends.append(gloo)
        kind = dist.ProcessGroup.BackendType.GLOO
        return _registered(dist.ProcessGroup(self._store, *self._place), [("cpu", kind, gloo)])

    def _await_all(self, seconds: float) -> None:
        """Waits until all ranks have come to the first call that gloo carries. No rank publishes its address
        before, so a second try finds none of a first one that was given up."""
        rank, size = self._place
        try:
            adapter = StoreAdapter(RunOfStore(self._store, rank, self.run))
            adapter.all_gather("backend/gloo", rank, size, b"", seconds)
        except TimeoutError as error:
            if not error.ranks:
                raise
            first = "the first call that gloo carries"
            raise agreement.absent(_alive(self._owner()).key, error.ranks, seconds, first) from None

    def forked(self) -> None:
        """In a forked child, where the end of such a backend would wait for threads that its parent has: they
        stay for as long as the child lives."""
        for each in (self._group, *self._backends):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))

    def store_for(self, name: str, store: torch.distributed.Store | None = None) -> torch.distributed.Store:
        """The store of this run of the group for what has that name; on another connection with `store`."""
        store = self._store if store is None else store
        return dist.PrefixStore(f"{name}/{self.run}", store)

    def _nccl(self, timeout: datetime.timedelta) -> dist.Backend:
        options = self._options if self._options is not None else dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        assert _Nccl is not None  # it is among the group's backends
        return _Nccl(self.store_for("nccl", self._store), *self._place, options)

    def begin(self, channel: tuple[int, int], tensor: torch.Tensor) -> dist.Work:
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
        store = self.store_for(f"nccl/{source}-{target}", own_connection(self._store))
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
        blocks = max(1, min(_MAX_BLOCKS, _MULTIPROCESSORS // (2 * (self._place[1] - 1))))
        # Below 0 where nobody has set it.
        config.max_ctas = min(config.max_ctas, blocks) if config.max_ctas > 0 else blocks
        config.min_ctas = min(config.min_ctas, blocks)

    def timeout_is(self, timeout: datetime.timedelta) -> None:
        """Passes a new timeout on to the backends that torch does not know of."""
        self._timeout = timeout
        if self._is_later and self._group is not None:
            self._backends[-1]._set_default_timeout(timeout)
        for group in self.channels.groups():
            group._get_backend(torch.device("cuda"))._set_default_timeout(timeout)

    def backend_for(self, device: torch.device) -> Any:
        """The fallback backend for such devices, which need not have been used; None where there is none."""
        found = dict(zip(self._kinds, self._backends, strict=False))
        return found.get(device.type)

    def set_timeouts(self, timeout: datetime.timedelta) -> None:
        """Sets the timeouts of backends that torch does not know of: their group has another class."""
        for backend in self._backends[: len(self._kinds)]:
            backend._set_default_timeout(timeout)

    def shutdown(self) -> None:
        """Shuts down the backends that torch does not know of."""
        self.channels.shutdown(seconds_of(self._timeout) or DEFAULT_TIMEOUT)
        self._end_unknown("shutdown")

    def abort(self) -> None:
        """Aborts the backends that torch does not know of."""
        self.channels.abort()
        self._end_unknown("abort")

    def _end_unknown(self, how: str) -> None:
        """Ends what is no backend of the group that torch knows, as is gloo that was made later."""
        if self._group is not None and (self._is_later or not self._is_of_torch):
            getattr(self._group, how)()
