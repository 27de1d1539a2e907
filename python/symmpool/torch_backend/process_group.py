"""A process group of torch.distributed: `init_process_group("cuda:symmpool,cpu:gloo")`.

It needs torch 2.7. The installed package registers it under the name "symmpool", for "cpu" and "cuda", when
torch is imported (`symmpool_torch`). With TORCH_DEVICE_BACKEND_AUTOLOAD=0 torch asks no package; then
importing `symmpool.backend` registers it, or importing `symmpool` after torch. Calls that the package's
collectives serve go to them. All others go to a fallback backend: NCCL on CUDA and gloo on the CPU, which
each group has as well. The choice is made call by call, from what is the same on every rank: operation,
element type, device. `last_backend()` and `backend_counts()` report what was chosen.

With `async_op=False` a call on CUDA runs on the current stream. Ours waits for a late rank as long as the
process group's timeout says. Where groups have calls on several streams, or NCCL has had something to do,
large calls take a part of the device only: kernels of other calls may have to run while they wait
(`symmpool.communicators.sm_budget`).

Point-to-point calls (`dist.send` and the like) of CPU tensors go through shared memory from the first one on,
and only the two ranks take part (`symmpool.torch_backend.mailbox`). Those of CUDA tensors go through the
memory of the group's communicator once the group has had a collective on CUDA. Each direction between two
ranks has a stream of its own: the calls of a batch may be begun in any order, no host waits for another rank,
and graphs may capture them (`symmpool.torch_backend.p2p`). Before that collective, and from then on between
two ranks that began before it, NCCL carries them. The first one, and those that follow before the other rank
comes to it, wait in a queue while the program goes on; the first cannot be captured in a graph. To connect
two ranks, NCCL needs the device for itself. So a program that has calls of other groups under way at its
first point-to-point call should begin with a collective of CUDA tensors on the group. What a rank sends to
itself is copied.

A group's first call on a kind of device meets the other ranks before it returns, with `async_op=True` too:
first calls of several groups are begun in one order on all ranks, and none waits for what another rank does
after its own. So it is with a group's first large call on GPUs, which takes memory (docs/gpus.md).
`destroy_process_group` waits for what was begun and lets go of the group's memory; later calls raise
InvalidStateError. `dist.monitored_barrier` asks for gloo by its name before torch 2.15, so it needs a group
of gloo's there. Before torch 2.14 calls of a group of this backend are not seen by modes of torch (fake
tensors, `make_fx`, `CommDebugMode`); those of `symmpool` itself are. Under `torch.compile` calls on the
backend's groups become the compiler's own functional collectives, as with NCCL: it does not trace into the
backend. DDP's hooks are served, those in Python and its built-in ones in C++.

With SYMMPOOL_SHARED_DEVICE=1 on every rank several may use one GPU, to try a program where there are fewer:
gloo is the fallback on CUDA then, and point-to-point calls of CUDA tensors need a collective on the group
before.

Memory that torch asks the group for lies in windows (`symmpool.torch_backend.allocation`), and FSDP asks for
that of its buffers (`symmpool.torch_backend.fsdp`).
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from symmpool.torch_backend.collectives import GroupCollectives
from symmpool.torch_backend.served_devices import NAME
from symmpool.torch_backend.work import DoneTorchWork, opaque, register

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

__all__ = ["NAME", "SymmpoolProcessGroup"]

# How many Works of one number a group keeps: more than a forward pass makes.
_SMALL_KEPT = 256


class SymmpoolProcessGroup(GroupCollectives, dist.ProcessGroup):  # type: ignore[misc]
    """A process group whose collectives are ours where they serve, in torch before 2.14. Newer torch has a
    group of its own class (`symmpool.torch_backend.python_backend`)."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        options: object = None,
        name: str | None = None,
    ):
        """`name` is torch's for the group, where it has one."""
        try:
            dist.ProcessGroup.__init__(self, store, rank, size)
        except TypeError:
            # Before 2.12 or so torch makes no derived objects so; those made thus know no store.
            dist.ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg, arg-type]
        # A Work has a C++ and a Python half, and C++ code that keeps a Work keeps its C++ half alone. Once
        # the Python half is gone, nobody answers the C++ half, and a wait for it never ends. DDP's `join`
        # keeps Work of one number from forward to backward; so the last of these are kept here.
        self._small: collections.deque[Any] = collections.deque(maxlen=_SMALL_KEPT)
        self._id = id(self)
        self._make(store, rank, size, timeout, options, name)
        self.begin_anew()

    @property
    def key(self) -> SymmpoolProcessGroup:
        """The group itself."""
        return self

    def _done(self, results: list[torch.Tensor], device: torch.device) -> dist.Work:
        return DoneTorchWork(results, device)

    def _passed(self, work: Any, results: list[torch.Tensor]) -> dist.Work:
        return work

    def _keep(self, work: Any, results: list[torch.Tensor]) -> None:
        register(work, results)
        if results and results[0].numel() == 1:
            self._small.append(work)

    def set_timeout(self, timeout: timedelta) -> None:
        """Called by newer torch's `set_timeout`, which sets the fallback backends' timeouts by itself."""
        dist.ProcessGroup.set_timeout(self, timeout)
        self.timeout_is(timeout)

    def getBackendName(self) -> str:
        """ "symmpool"."""
        return NAME

    def get_group_store(self) -> dist.Store:
        """The store that the group met in."""
        return self._store

    def shutdown(self) -> None:
        """Called by torch where the group is destroyed. Waits for what was begun, which ends by itself,
        and lets go of the group's communicators and pools; calls that come after are refused."""
        self._shut_down(super().shutdown)

    def abort(self) -> None:
        """Ends the group without waiting for anything: what was begun may fail."""
        # Called here, as torch calls this method again unless it is the caller.
        if self._abort():
            super().abort()

    def _end(self, wait: bool) -> None:
        self._small.clear()
        super()._end(wait)

    def split_group(self, *arguments: Any, **options: Any) -> dist.ProcessGroup | None:
        """Splits the group on the fallback backends."""
        return self._rest.split_group(*arguments, **options)

    def merge_remote_group(self, *arguments: Any, **options: Any) -> dist.ProcessGroup:
        """Merges the group on the fallback backends with a remote one."""
        return self._rest.merge_remote_group(*arguments, **options)


def _passes(method: str) -> Any:
    """A method for which communicators have nothing, so that a fallback backend serves it."""

    def pass_on(self: SymmpoolProcessGroup, *arguments: object, **options: object) -> Any:
        return self._pass(method, method, *arguments, **options)

    pass_on.__name__ = method
    return pass_on


# A method that classes derived from ProcessGroup have in some versions of torch.
if hasattr(dist.ProcessGroup, "allgather_coalesced"):
    SymmpoolProcessGroup.allgather_coalesced = _passes(  # type: ignore[method-assign]
        "allgather_coalesced"
    )


def _rank_of(self: SymmpoolProcessGroup) -> int:
    return self._rank


def _size_of(self: SymmpoolProcessGroup) -> int:
    return self._size


# Groups that have this ask their default backend, which may stand for gloo that is made later.
if hasattr(dist.ProcessGroup, "supports_reconfigure"):
    SymmpoolProcessGroup.getRank = _rank_of  # type: ignore[attr-defined]
    SymmpoolProcessGroup.getSize = _size_of  # type: ignore[attr-defined]

opaque(SymmpoolProcessGroup)
