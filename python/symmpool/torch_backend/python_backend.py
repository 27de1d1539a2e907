"""The backend as torch 2.14 and newer has backends: a c10d `Backend`, below a process group of torch's own.

torch's group fires hooks, records flights, wraps groups for TORCH_DISTRIBUTED_DEBUG=DETAIL and calls this
class, whose methods are those of `SymmpoolProcessGroup`. The package knows such a group by torch's object
(`key`), which the backend does not keep: torch's object keeps the backend.

A call that is not asynchronous returns no Work, so torch has none to wait for. torch passes on two methods of
other Work; `symmpool.torch_backend.torch_gaps` has the rest.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from symmpool._symmpool import (
    try_all_gather,
    try_all_reduce,
    try_all_to_all,
    try_broadcast,
    try_reduce_scatter,
)
from symmpool.communicators.cache import looked_up
from symmpool.errors import InvalidStateError, TimeoutError, UnsupportedError
from symmpool.groups import process_groups
from symmpool.torch_backend import dispatched_tensors, membership, torch_gaps
from symmpool.torch_backend.collectives import GroupCollectives
from symmpool.torch_backend.counts import note
from symmpool.torch_backend.served_devices import NAME
from symmpool.torch_backend.work import (
    DONE,
    PassedWork,
    RegisteredTorchWork,
    note_registered,
    opaque,
    registers,
)

if TYPE_CHECKING:
    import torch.distributed


__all__ = ["SymmpoolBackend"]

_profiler_enabled = torch.autograd._profiler_enabled
# The dictionary of a device that has nothing to look up.
_NONE: dict[int, Any] = {}
_NO_TIMEOUT = datetime.timedelta(0)


def _refusing(what: str, instead: str) -> Any:
    """A method of torch's backends that ours refuses."""

    def unsupported(self: Any, *arguments: object, **options: object) -> Any:
        raise UnsupportedError(f"symmpool: {what} is not served: {instead}")

    return unsupported


def _without_work(call: Callable[..., Any]) -> Any:
    """A collective as torch calls it: Work of calls that were made at once is none."""

    def made(self: Any, *arguments: object) -> Any:
        self._sequence += 1
        work = call(self, *arguments)
        return None if work is DONE else work

    made.__name__, made.__doc__ = call.__name__, call.__doc__
    return made


class SymmpoolBackend(GroupCollectives, c10d.Backend):
    """A backend whose collectives are ours where they serve."""

    def __init__(
        self,
        store: torch.distributed.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        options: object = None,
        name: str | None = None,
        group: torch.distributed.ProcessGroup | None = None,
    ):
        """`name` is torch's for the group, and `group` torch's object. Without it the backend looks for the
        group at its first call, when torch has one for it."""
        c10d.Backend.__init__(self, rank, size)
        torch_gaps.close()
        dispatched_tensors.register()
        # How many collectives torch has begun.
        self._sequence = 0
        self._group: weakref.ref[Any] | None = None
        self._id = -1
        self._options = c10d.Backend.Options(NAME, timeout)
        self._options.group_name = cast(Any, name or "")
        self._abort_hooks: dict[int, Callable[[], None]] = {}
        self._make(store, rank, size, timeout, options, name)
        if group is not None:
            self._belong_to(group)

    def _belong_to(self, group: torch.distributed.ProcessGroup) -> None:
        self._group, self._id = weakref.ref(group), id(group)
        process_groups.know_backend(group, self)
        self.begin_anew()

    @property
    def key(self) -> torch.distributed.ProcessGroup:
        """torch's process group, above this backend."""
        found = None if self._group is None else self._group()
        if found is None:
            found = membership.group_of(self)
            if found is None:
                raise InvalidStateError(
                    f"symmpool: torch knows no group of this backend on rank {self._rank} (any more)"
                )
            self._belong_to(found)
        return found

    def _done(self, results: list[torch.Tensor], device: torch.device) -> Any:
        if not registers():
            return DONE
        # torch registers what is returned, and reads it where it waits.
        work = RegisteredTorchWork(results, device)
        note_registered(work)
        return work

    def _passed(self, work: Any, results: list[torch.Tensor]) -> Any:
        return PassedWork(work) if type(work) is dist.Work else work

    def _keep(self, work: Any, results: list[torch.Tensor]) -> None:
        note_registered(work)

    def getBackendName(self) -> str:
        """ "symmpool"."""
        return NAME

    @property
    def options(self) -> c10d.Backend.Options:
        """torch's options of the backend, among which is the timeout."""
        return self._options

    # Answers to what torch asks backends about themselves.

    @property
    def supports_splitting(self) -> bool:
        """True: `split_group` makes a group of some of the ranks."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """False: calls of a batch are begun one after the other, and each has Work."""
        return False

    @property
    def supports_shrinking(self) -> bool:
        """True: `shrink_group` makes a group of the ranks that are left."""
        return True

    @property
    def supports_window(self) -> bool:
        """False: torch lets no backend in Python make windows."""
        return False

    @property
    def supports_reconfigure(self) -> bool:
        """False."""
        return False

    @property
    def supports_abort_hooks(self) -> bool:
        """True: hooks that were registered are called before an abort."""
        return True

    new_window = _refusing(
        "new_window", "torch lets no backend written in Python make one; use symmpool.rendezvous"
    )
    suspend = _refusing("suspend", "the memory of groups stays; destroy the group, and make it again later")
    resume = _refusing("resume", "no group of the backend was suspended")
    memory_stats = _refusing("memory_stats of a backend", "symmpool.communicator_memory() has them")
    reconfigure = _refusing("reconfigure", "use shrink_group for ranks that are left, or make a new group")
    get_reconfigure_handle = _refusing("get_reconfigure_handle", "ranks of a group are not replaced")
    merge = _refusing("merge_remote_group", "make a group of all ranks")

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Does nothing: ranks meet at the group's first call."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing: ranks outside of a new group have no part in it."""

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether the group has memory that its calls are the fastest in."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        there = self._fallbacks.backend_for(device)
        return there is not None and there.supports_tensor_alloc(device)

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor in the group's windows, or as the fallback backend has it."""
        there = self._fallbacks.backend_for(torch.device(device))
        if there is None:
            return torch.empty(size, dtype=dtype, device=device)
        return there.allocate_tensor(size, dtype=dtype, device=device)

    def __getattr__(self, name: str) -> Any:
        # NCCL's own names, such as `register_mem_pool`, are those of the fallback backend.
        if name.startswith("__") or "_fallbacks" not in self.__dict__:
            raise AttributeError(name)
        kind = "cuda" if "cuda" in self._names else "cpu"
        return getattr(self._fallbacks.backend_for(torch.device(kind)), name)

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives were begun here, which ranks compare with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
        return self._sequence

    # Timeouts and the end.

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Called by torch's `set_timeout`: calls wait so long from now on."""
        self._options._timeout = timeout
        self._fallbacks.set_timeouts(timeout)
        self.timeout_is(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Called by torch where the group is destroyed. Waits for what was begun, which ends by itself,
        and lets go of the group's communicators and pools; calls that come after are refused."""
        if self._group is None or self._group() is not None:
            self._shut_down(lambda: None)

    def abort(self) -> None:
        """Ends the group without waiting for anything: what was begun may fail. Calls hooks before."""
        for hook in list(self._abort_hooks.values()):
            hook()
        self._abort()

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Has a function called before an abort."""
        self._abort_hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Takes back `register_abort_hook`."""
        self._abort_hooks.pop(hook_id, None)

    # The names by which C++ calls them.
    registerAbortHook, unregisterAbortHook = register_abort_hook, unregister_abort_hook

    # Groups of some of the ranks.

    def split(self, store: torch.distributed.Store, ranks: Any, opts: Any) -> Any:
        """The backend of a group of some of the ranks, by their numbers here; None on other ranks."""
        return membership.split(self, SymmpoolBackend, store, list(ranks), opts)

    def shrink(self, ranks_to_exclude: Any, shrink_flags: int = 0, opts_override: Any = None) -> Any:
        """The backend of a group without some ranks, which are lost. Called by all others."""
        return membership.shrink(self, SymmpoolBackend, list(ranks_to_exclude), shrink_flags)

    # Collectives. What is not here is as `GroupCollectives` has it. The most frequent calls take a short way
    # first, as torch's own part takes as long as this one: the communicator reads the arguments, and makes
    # the call if they are as it takes them.

    def _ready(self, tensor: torch.Tensor, opts: Any) -> Any:
        """The entry by which a call on a tensor's device can be made now. None for calls that need more than
        the communicator: that are asynchronous, profiled, the first ones on a device, or behind others."""
        if opts is None or opts.asyncOp:
            return None
        number = tensor.get_device()
        entry = looked_up.get(number, _NONE).get(self._id)
        if entry is None or entry.pending is not None or not self._served.known.get(number):
            return None
        return None if _profiler_enabled() or registers() else entry

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.AllreduceOptions | None = None) -> Any:
        """Reduces a list of one tensor in place."""
        self._sequence += 1
        if opts is not None and not opts.asyncOp and len(tensors) == 1:
            # This repeats `_ready`: a call less is felt by the most frequent one.
            tensor = tensors[0]
            number = tensor.get_device()
            entry = looked_up.get(number, _NONE).get(self._id)
            if (
                entry is not None
                and entry.pending is None
                and self._served.known.get(number)
                and not _profiler_enabled()
                and not registers()
            ):
                try:
                    if try_all_reduce(entry.comm, tensor, opts.reduceOp):
                        return note("all_reduce", NAME)
                except TimeoutError as error:
                    entry.explain(error)
                    raise
        work = GroupCollectives.allreduce(self, tensors, opts)
        return None if work is DONE else work

    def broadcast(self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions) -> Any:
        """Sends the root's tensor to all ranks."""
        self._sequence += 1
        entry = self._ready(tensors[0], opts) if len(tensors) == 1 else None
        if entry is not None:
            try:
                if try_broadcast(entry.comm, tensors[0], opts.rootRank):
                    return note("broadcast", NAME)
            except TimeoutError as error:
                entry.explain(error)
                raise
        work = GroupCollectives.broadcast(self, tensors, opts)
        return None if work is DONE else work

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: c10d.AllgatherOptions | None = None
    ) -> Any:
        """Gathers all ranks' `input` in `output`, which has as many times its elements as there are ranks."""
        self._sequence += 1
        entry = self._ready(output, opts)
        if entry is not None:
            try:
                if try_all_gather(entry.comm, output, input):
                    return note("all_gather_into_tensor", NAME)
            except TimeoutError as error:
                entry.explain(error)
                raise
        work = GroupCollectives.all_gather_single(self, output, input, opts)
        return None if work is DONE else work

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """Reduces all ranks' `input`, and leaves this rank's part of it in `output`."""
        self._sequence += 1
        entry = self._ready(output, opts)
        if entry is not None:
            try:
                if try_reduce_scatter(entry.comm, output, input, opts.reduceOp):
                    return note("reduce_scatter_tensor", NAME)
            except TimeoutError as error:
                entry.explain(error)
                raise
        work = GroupCollectives.reduce_scatter_single(self, output, input, opts)
        return None if work is DONE else work

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: dist.AllToAllOptions | None = None,
    ) -> Any:
        """Exchanges parts of one tensor. Splits are elements of the first dimension; empty ones are equal
        parts."""
        self._sequence += 1
        entry = self._ready(output, opts) if not output_splits and not input_splits else None
        if entry is not None:
            try:
                if try_all_to_all(entry.comm, output, input):
                    return note("all_to_all_single", NAME)
            except TimeoutError as error:
                entry.explain(error)
                raise
        work = GroupCollectives.all_to_all_single(self, output, input, output_splits, input_splits, opts)
        return None if work is DONE else work

    allreduce_sparse = allreduce

    reduce = _without_work(GroupCollectives.reduce)
    allgather = _without_work(GroupCollectives.allgather)
    reduce_scatter = _without_work(GroupCollectives.reduce_scatter)
    allreduce_coalesced = _without_work(GroupCollectives.allreduce_coalesced)
    all_gather_single_coalesced = _without_work(GroupCollectives.allgather_into_tensor_coalesced)
    reduce_scatter_single_coalesced = _without_work(GroupCollectives.reduce_scatter_tensor_coalesced)
    alltoall = _without_work(GroupCollectives.alltoall)
    gather = _without_work(GroupCollectives.gather)
    gather_single = _without_work(GroupCollectives.gather_single)
    scatter = _without_work(GroupCollectives.scatter)
    barrier = _without_work(GroupCollectives.barrier)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Several gathers to lists, by the fallback backend."""
        return self._pass("allgather_coalesced", "allgather_coalesced", outputs, inputs, opts)

    def monitored_barrier(  # type: ignore[override]
        self, opts: object, wait_all_ranks: bool = False
    ) -> None:
        """Waits for all ranks with gloo's monitored barrier, and makes gloo if need be."""
        timeout = getattr(opts, "timeout", opts)
        # Times below zero are no limit of the call's own.
        known = timeout if isinstance(timeout, datetime.timedelta) and timeout >= _NO_TIMEOUT else None
        GroupCollectives.monitored_barrier(self, known, wait_all_ranks)

    def start_coalescing(self) -> None:
        """Begins a batch of calls."""
        self._start_coalescing()

    def end_coalescing(self) -> dist.Work | None:
        """Work of the calls since `start_coalescing`."""
        work = self._end_coalescing()
        return None if work is DONE else work


opaque(SymmpoolBackend)
