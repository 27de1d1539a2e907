"""State of a group of the backend on each rank, whichever of torch's classes stands for it: its fallback
backends, its mailbox, and on which devices its calls are ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmpool._symmpool import Group, share_sms
from symmpool.communicators import cache
from symmpool.groups import agreement, process_groups, resolution
from symmpool.groups.store import RunOfStore
from symmpool.torch_backend import allocation, fsdp, subgroups, teardown
from symmpool.torch_backend.counts import note
from symmpool.torch_backend.fallback import FallbackBackends
from symmpool.torch_backend.mailbox import HostMessages
from symmpool.torch_backend.p2p import PointToPoint
from symmpool.torch_backend.served_calls import ServedCalls
from symmpool.torch_backend.served_devices import ServedDevices, number_of
from symmpool.torch_backend.work import opaque

if TYPE_CHECKING:
    import datetime

    import torch.distributed

__all__ = ["GroupState"]


@opaque
class GroupState(ServedCalls):
    """The state of a group of the backend, and its end."""

    # The group's rank here, the number of ranks, and the store that they met in.
    _rank: int
    _size: int
    # The id of `key`, by which look-ups find the group.
    _id: int
    _store: Any
    _timeout: Any
    # Work of calls that were begun between the two ends of a batch.
    _batch: list[Any] | None
    # Methods of the classes of groups: how a call goes to a fallback backend, and Work of each kind of call.
    _pass: Any
    _passed: Any
    _done: Any
    _keep: Any

    if TYPE_CHECKING:
        # torch's classes of groups and of backends have them.
        def rank(self) -> int:
            """The group's rank here."""

        def size(self) -> int:
            """The number of ranks."""

    @property
    def key(self) -> torch.distributed.ProcessGroup:
        """torch's process group, by which the package knows the group."""
        raise NotImplementedError

    def _make(
        self,
        store: torch.distributed.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        options: Any,
        name: str | None,
    ) -> None:
        """Has the ranks meet. `name` is torch's for the group, where it has one."""
        self._store, self._timeout = store, timeout
        # Asking torch's object takes as long as the rest of a small call's way through this one.
        self._rank, self._size = rank, size
        seconds = process_groups.seconds_of(timeout) or process_groups.DEFAULT_TIMEOUT
        self._messages = HostMessages(rank, size, seconds)
        self.within, run = subgroups.run_within(name)
        self._fallbacks = FallbackBackends(self, store, timeout, options, self._messages.publish, run)
        if run is None:
            self._messages.read()
        self._run_of_store = RunOfStore(store, rank, self._fallbacks.run)
        agreement.know_run(self._run_of_store)
        self._names = self._fallbacks.names
        self._p2p = PointToPoint(rank, size, self._fallbacks.begin)
        self._served = ServedDevices(seconds, self._p2p)
        self._batch = None
        fsdp.use_windows(_has_windows)

    @property
    def _rest(self) -> dist.ProcessGroup:
        """Returns the group that makes the calls which ours does not. Asked for by calls that all ranks
        make."""
        return self._fallbacks.group

    @property
    def serves_subgroups(self) -> bool:
        """Whether other groups' communicators are made in the memory of this one's, on the CPU."""
        return subgroups.is_default(self.key)

    def begin_anew(self, seconds: float | None = None) -> None:
        """Has the ranks meet as in a new group: at first, and where a rank has waited for others in vain."""
        seconds = self._served.seconds if seconds is None else seconds
        # Its name keeps its keys apart from those of groups that the program makes of this store.
        ours = Group.from_store(
            self._run_of_store, self._rank, self._size, name="symmpool.backend", timeout=seconds
        )
        resolution.adopt(self.key, ours)

    def timeout_is(self, timeout: datetime.timedelta) -> None:
        """Takes over a new timeout. The fallback backends call this, where torch sets theirs."""
        seconds = process_groups.seconds_of(timeout)
        if seconds is not None:
            self._timeout = timeout
            self._served.seconds = seconds
            self._messages.set_timeout(seconds)
            self._fallbacks.timeout_is(timeout)
            cache.set_timeout(self.key, seconds)

    def _shut_down(self, of_torch: Callable[[], None]) -> None:
        """Waits for what was begun, which ends by itself, and lets go of the group's communicators and pools;
        calls that come after are refused. `of_torch` ends torch's part of the group."""
        if self._served.is_lost:
            return  # in a forked child, where nothing of it can be used
        # A default group's store goes with the group, and another may come to its place.
        leaves = not self._served.ended and subgroups.is_default(self.key) and self._rank != 0
        if not self._served.ended:
            self._end(True)
        self._fallbacks.shutdown()
        of_torch()
        # Last: before rank 0 leaves, it may wait for what this rank does here.
        if leaves:
            teardown.await_server(self._store)

    def _abort(self) -> bool:
        """Ends the group without waiting for anything: what was begun may fail. Returns whether torch's part
        is to be ended as well."""
        if self._served.is_lost:
            return False
        self._end(False)
        self._fallbacks.abort()
        return True

    def _end(self, wait: bool) -> None:
        self._served.end()
        self._p2p.end(wait)
        self._messages.end()
        cache.end(self.key, wait)

    def may_serve(self, device: torch.device) -> bool:
        """Whether `serves` may be True, as far as is known here. Talks to nobody."""
        return self._served.may_serve(self, device)

    def serves(self, device: torch.device) -> bool:
        """Whether every rank has a communicator of ours there. The first call is collective."""
        return self._served.serves(self, device)

    def _note_fallback(self, operation: str, tensor: torch.Tensor | None) -> None:
        """Counts a call that goes to a fallback backend, which is about to make it."""
        self._served.raise_at_end(self)
        self._count_fallback(operation, torch.device("cpu") if tensor is None else tensor.device)

    def _count_fallback(self, operation: str, device: torch.device) -> None:
        name = self._names.get(device.type, device.type)
        if name == "nccl":
            # Its kernels may wait for other ranks while ours do.
            share_sms(number_of(device))
        note(operation, name)


def _has_windows(group: torch.distributed.ProcessGroup, device: torch.device) -> bool:
    """Whether a group is ours and has windows on the device, of several ranks."""
    ours = process_groups.ours(group)
    return ours is not None and group.size() > 1 and allocation.has_windows(ours, device)
