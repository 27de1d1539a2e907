"""A backend of torch.distributed: `init_process_group("cuda:symmpool,cpu:gloo")`.

It needs torch 2.7. The installed package registers it under the name "symmpool", for "cpu" and "cuda",
when torch is imported (`symmpool_torch`). With TORCH_DEVICE_BACKEND_AUTOLOAD=0, where torch asks nobody,
importing this module does so, or `symmpool` behind torch. What the package's collectives serve
goes to them; the rest, and what they cannot serve, goes to NCCL on CUDA and to gloo on the CPU, which
the group has beside them. The choice is made call by call, from what is the same on every rank:
operation, element type, device. `last_backend()` and `backend_counts()` say what was chosen.

With `async_op=False` a call on CUDA runs on the current stream. Ours waits for a late rank as long as
the process group's timeout says. Where groups have calls on several streams, or NCCL has had something
to do, large calls take a part of the device only: what others call may have to run while they wait
(`symmpool.sharing`).

Messages (`dist.send` and its like) of CUDA tensors go through the memory of the group's communicator once
the group has had a collective on CUDA, on a stream for each direction between two ranks: those of a batch
may be begun in any order, no host waits for another rank, and graphs may have them (`symmpool.p2p`). Before
that, and for good between two ranks that began so, they are NCCL's: the first, and what follows until the
other rank comes to it, waits beside the program, and the first cannot be captured in a graph. Connecting
takes NCCL the device for itself, so a program that has calls of other groups under way at its first message
does well to begin with a collective of CUDA tensors on the group. A message to oneself is a copy.

A group's first call on a kind of device meets the other ranks before it returns, with `async_op=True`
too: first calls of several groups are begun in one order on all ranks, and none waits for what another
rank does after its own. `destroy_process_group` waits for what was begun and lets go of the group's
memory; calls that come after raise InvalidStateError. `dist.monitored_barrier` asks for gloo by its
name before torch 2.15, so it needs a group of gloo's there. Calls of a group of this backend are not seen
by modes of torch (fake tensors, `make_fx`, `CommDebugMode`), nor traced by its compiler; those of
`symmpool` itself are. DDP's hooks written in Python are served, its built-in ones in C++ are not.

With SYMMPOOL_SHARED_DEVICE=1 on every rank several may use one GPU, to try a program where there are fewer:
gloo stands beside ours on CUDA then, and messages of CUDA tensors need a collective on the group before.

Memory that torch asks the group for lies in windows (`symmpool.staging`): FSDP's buffers do, once it is told
`set_allocate_memory_from_process_group_for_comm(True)`.
"""

from __future__ import annotations

import collections
import logging
from typing import Any

import torch
import torch.distributed as dist

# torch.distributed has the other operations' options, and not these.
from torch._C._distributed_c10d import AllgatherOptions

from symmpool._symmpool import Group, leave_room
from symmpool.collectives import layout, lists, reductions
from symmpool.communicators import cache
from symmpool.errors import (
    Error,
    TimeoutError,
    UnsupportedError,
)
from symmpool.groups import agreement, process_groups, resolution
from symmpool.torch_backend import teardown
from symmpool.torch_backend.fallback import Beside
from symmpool.torch_backend.p2p import PointToPoint
from symmpool.torch_backend.work import DoneWork, Noting, TorchWork, joined, opaque

__all__ = ["SymmpoolProcessGroup", "backend_counts", "last_backend"]

logger = logging.getLogger("symmpool.backend")

NAME = "symmpool"

# How much Work of one number a group keeps: more than a forward pass makes.
_SMALL_KEPT = 256
# How far apart ranks may be that began to wait at one time, in seconds, when they have waited.
_LATENESS = 2.0

_counts: collections.Counter[tuple[str, str]] = collections.Counter()
_last: list[str | None] = [None]


def last_backend() -> str | None:
    """Which backend this process's last call on a group of symmpool's backend went to: "symmpool",
    "nccl" or "gloo"; None before the first."""
    return _last[0]


def backend_counts(reset: bool = False) -> dict[str, dict[str, int]]:
    """How many calls went where in this process: numbers by operation and backend. With `reset`
    they begin again at none."""
    found: dict[str, dict[str, int]] = {}
    for (operation, backend), count in _counts.items():
        found.setdefault(operation, {})[backend] = count
    if reset:
        _counts.clear()
    return found


def _note(operation: str, backend: str) -> None:
    _counts[operation, backend] += 1
    _last[0] = backend
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s: %s", operation, backend)


class SymmpoolProcessGroup(dist.ProcessGroup):
    """A process group whose collectives are ours where they serve."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, options: Any = None):
        try:
            super().__init__(store, rank, size)
        except TypeError:
            # Before 2.12 or so torch makes no derived objects so; those made thus know no store.
            super().__init__(rank, size)
        self._store, self._timeout = store, timeout
        self._seconds = process_groups.seconds_of(timeout) or process_groups.DEFAULT_TIMEOUT
        # Apart from groups that the program makes of this store, on the same connection.
        ours = Group.from_store(store, rank, size, name="symmpool.backend", timeout=self._seconds)
        resolution.adopt(self, ours)
        # Whether ours serves a device, by its number; unknown before the first call, and at the end.
        self._served: dict[int, bool] = {}
        self._ended = False
        self._beside = Beside(self, store, timeout, options)
        self._names, self._rest = self._beside.names, self._beside.rest
        self._p2p = PointToPoint(rank, size, self._beside.begin)
        # Work is Python's, and C++ that keeps some keeps nothing of that: once Python has let go of it, it is
        # waited for without end. DDP's `join` keeps that of one number from forward to backward; so the last
        # of such are kept here.
        self._small: collections.deque[Any] = collections.deque(maxlen=_SMALL_KEPT)
        # What was begun between `_start_coalescing` and `_end_coalescing`.
        self._batch: list[Any] | None = None

    def timeout_is(self, timeout: Any) -> None:
        """What the backends beside ours tell, which torch's `_set_pg_timeout` tells them."""
        seconds = process_groups.seconds_of(timeout)
        if seconds is not None:
            self._timeout, self._seconds = timeout, seconds
            self._beside.timeout_is(timeout)
            cache.set_timeout(self, seconds)

    def set_timeout(self, timeout: Any) -> None:
        """What newer torch's `set_timeout` calls, which tells the backends beside ours by itself."""
        super().set_timeout(timeout)
        self.timeout_is(timeout)

    def getBackendName(self) -> str:
        return NAME

    def get_group_store(self) -> Any:
        """The store that the group met in."""
        return self._store

    def shutdown(self) -> None:
        """What torch calls where the group is destroyed. Waits for what was begun, which ends by itself,
        and lets go of the group's communicators and pools; calls that come after are refused."""
        # A default group's store goes with the group, and another may come to its place.
        leaves = not self._ended and dist.group.WORLD is self and self.rank() != 0
        if not self._ended:
            self._end(True)
        self._beside.shutdown()
        super().shutdown()
        # Last: before it goes rank 0 may wait for what this one does here.
        if leaves:
            teardown.await_server(self._store)

    def abort(self) -> None:
        """As `shutdown`, without waiting for anything: what was begun may fail."""
        self._end(False)
        self._beside.abort()
        super().abort()

    def _end(self, wait: bool) -> None:
        self._ended = True
        self._served.clear()
        self._small.clear()
        self._p2p.end(wait)
        cache.end(self, wait)

    def _refuse_at_end(self) -> None:
        if self._ended:
            raise resolution.ended(self)

    def may_serve(self, device: torch.device) -> bool:
        """Whether `serves` may say so: talks to nobody."""
        known = self._served.get(_number_of(device), not self._ended)
        return known and self._is_asked_for(device.type)

    def serves(self, device: torch.device) -> bool:
        """Whether every rank has a communicator of ours there. The first call is collective."""
        number = _number_of(device)
        found = self._served.get(number)
        if found is None:
            self._refuse_at_end()
            found = self._is_asked_for(device.type) and self._found_out(number)
            self._served[number] = found
        return found

    def _is_asked_for(self, kind: str) -> bool:
        """Whether `init_process_group` named ours for such devices: a backend of another name may
        stand beside it."""
        return process_groups.backends_of(self).get(kind, NAME) == NAME

    def _found_out(self, number: int) -> bool:
        name = "cpu" if number < 0 else f"cuda:{number}"
        # Without the device's number: ranks use different ones.
        kind = "cpu" if number < 0 else "cuda"
        first = f"the first call on {kind}"
        # Every rank comes here first, one that cannot as well: who is missing now is absent, and nobody
        # waits for it again. From here on all are at one place of what follows.
        agreement.agree(self, f"backend/{kind}/here", None, self._seconds, first)
        why, left = None, self._seconds + _LATENESS
        try:
            cache.communicator(self, name)
        except TimeoutError as error:
            # Whoever was waited for has said why before, or never will; the others waited as long.
            why, left = str(error), _LATENESS
        except Error as error:
            why = str(error)
        # A rank that cannot is here before those that wait for it in vain, a whole timeout at most.
        refusals = agreement.agree(self, f"backend/{kind}", why, left, first)
        if refusals and self.rank() == 0:
            logger.warning("symmpool serves no collective on %s: %s", name, refusals)
        if kind == "cuda" and not refusals:
            self._decide_messages(number, first)
        return not refusals

    def _decide_messages(self, number: int, first: str) -> None:
        """All ranks have a communicator, which carries messages from now on, but on channels that one of
        them has begun to use before."""
        seat = cache.search(None, self, number)
        assert seat is not None

        def ask(here: str) -> list[str]:
            told = agreement.agree(self, "backend/messages", here or None, self._seconds, first)
            return list(told.values())

        self._p2p.decide(ask, seat.comm, number, cache.explainer(seat))

    def _other(self, operation: str, tensor: torch.Tensor | None) -> str:
        self._refuse_at_end()
        self._note_other(operation, torch.device("cpu") if tensor is None else tensor.device)
        return operation

    def _note_other(self, operation: str, device: torch.device) -> None:
        name = self._names.get(device.type, device.type)
        if name == "nccl":
            leave_room(_number_of(device))
        _note(operation, name)

    def _run(
        self,
        operation: str,
        call: str,
        arguments: tuple[Any, ...],
        finish: Any,
        results: list[torch.Tensor],
        opts: Any,
    ) -> dist.Work:
        """Makes a call of ours, and finishes it: `call` is the name of a method of communicators."""
        _note(operation, NAME)
        seat = cache.find(arguments[0], self)
        function = getattr(seat.comm, call)
        if getattr(opts, "asyncOp", True):
            work = TorchWork(seat.begin(function, arguments, results, finish))
            if results[0].numel() == 1:
                self._small.append(work)
            return self._begun(work)
        cache.run(seat, function, arguments, results, False)
        if finish is not None:
            finish()
        return DoneWork(results, results[0].device)

    def _reduces(self, opts: Any, *tensors: torch.Tensor) -> str | None:
        """The operation's name, where ours reduces such tensors so."""
        name = reductions.named(opts.reduceOp, tensors)
        return name if name is not None and self._moves(*tensors) else None

    def _moves(self, *tensors: torch.Tensor) -> bool:
        """Whether ours takes such tensors at all. What is wrong with them is told by whoever does:
        only what is the same on every rank decides."""
        for tensor in tensors:
            if tensor.layout != torch.strided or tensor.is_quantized:
                return False
        first = tensors[0]
        if not (first.is_cpu or first.is_cuda):
            return False
        # What is known is looked up by the number alone: an object for the device costs as much as a call.
        served = self._served.get(first.get_device())
        return self.serves(first.device) if served is None else served

    # What ours serves. Two names for one call are those of older and newer torch.

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.AllreduceOptions()
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        op = self._reduces(opts, *tensors) if len(tensors) == 1 else None
        if op is None:
            self._other("all_reduce", tensors[0])
            return self._rest.allreduce(tensors, opts)
        (tensor,) = tensors
        place, finish = layout.place(tensor)
        return self._run("all_reduce", "all_reduce", (place, op), finish, tensors, opts)

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if len(tensors) != 1 or not self._moves(*tensors):
            self._other("broadcast", tensors[0])
            return self._rest.broadcast(tensors, opts)
        (tensor,) = tensors
        # The root's is only read.
        root = opts.rootRank == self.rank()
        place, finish = (layout.plain(tensor), None) if root else layout.place(tensor)
        arguments = (place, opts.rootRank)
        return self._run("broadcast", "broadcast", arguments, finish, tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.ReduceOptions()
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        # In host memory an all-reduce takes less than gloo's reduce; on CUDA NCCL moves half as much as one.
        ours = len(tensors) == 1 and tensors[0].is_cpu
        op = self._reduces(opts, *tensors) if ours else None
        if op is None:
            return self._pass("reduce", (tensors, opts))
        (tensor,) = tensors
        # Only the root's tensor is written to, and every rank's call has to look alike to the others.
        source = layout.plain(tensor)
        total = torch.empty_like(source)
        root = opts.rootRank == self.rank()
        finish = layout.copies([(tensor, total)]) if root else None
        return self._run("reduce", "all_reduce", (source, op, total), finish, tensors, opts)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else AllgatherOptions()
        if not self._moves(output, input):
            self._other("all_gather_into_tensor", output)
            return self._rest._allgather_base(output, input, opts)
        place, finish = layout.place(output)
        arguments = (place, layout.plain(input))
        return self._run("all_gather_into_tensor", "all_gather", arguments, finish, [output], opts)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        op = self._reduces(opts, output, input)
        if op is None:
            self._other("reduce_scatter_tensor", output)
            return self._rest._reduce_scatter_base(output, input, opts)
        place, finish = layout.place(output)
        arguments = (place, layout.plain(input), op)
        return self._run("reduce_scatter_tensor", "reduce_scatter", arguments, finish, [output], opts)

    _reduce_scatter_base = reduce_scatter_single

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else AllgatherOptions()
        if not _is_one(inputs, outputs) or not self._moves(*inputs, *outputs[0]):
            return self._pass("allgather", (outputs, inputs, opts))
        (parts,), (tensor,) = outputs, inputs
        lists.check("all_gather", self.size(), single=tensor, output=parts)
        return self._run("allgather", *lists.gathered(parts, tensor), parts, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        one = _is_one(outputs, inputs)
        op = self._reduces(opts, *outputs, *inputs[0]) if one else None
        if op is None:
            return self._pass("reduce_scatter", (outputs, inputs, opts))
        (tensor,), (parts,) = outputs, inputs
        lists.check("reduce_scatter", self.size(), single=tensor, input=parts)
        planned = lists.scattered(tensor, parts, self.rank(), op)
        return self._run("reduce_scatter", *planned, outputs, opts)

    # What functional collectives, DTensor with them, and Megatron's data parallelism call.

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.AllreduceCoalescedOptions()
        if not tensors or self._reduces(opts, *tensors) is None:
            return self._pass("allreduce_coalesced", (tensors, opts))
        return joined([self.allreduce([tensor], opts) for tensor in tensors])

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else AllgatherOptions()
        if _are_pairs(outputs, inputs) and self._moves(*outputs, *inputs):
            pairs = zip(outputs, inputs, strict=True)
            return joined([self.all_gather_single(*pair, opts) for pair in pairs])
        return self._pass("allgather_into_tensor_coalesced", (outputs, inputs, opts))

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        if _are_pairs(outputs, inputs) and self._reduces(opts, *outputs, *inputs) is not None:
            pairs = zip(outputs, inputs, strict=True)
            return joined([self.reduce_scatter_single(*pair, opts) for pair in pairs])
        return self._pass("reduce_scatter_tensor_coalesced", (outputs, inputs, opts))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work:
        if not self._p2p.carries(tensors, to):
            self._other("send", layout.first_tensor(tensors))
            return self._rest.send(tensors, to, tag)
        return self._message("send", tensors[0], to)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        if not self._p2p.carries(tensors, source):
            self._other("recv", layout.first_tensor(tensors))
            return self._rest.recv(tensors, source, tag)
        return self._message("recv", tensors[0], source)

    def _message(self, operation: str, tensor: torch.Tensor, peer: int) -> dist.Work:
        """Tags are not looked at, as NCCL does not look at them."""
        self._refuse_at_end()
        work, ours = self._p2p.begin(tensor, peer, operation == "send")
        if ours:
            _note(operation, NAME)
        else:
            self._note_other(operation, tensor.device)
        return self._begun(work)

    # What torch makes a batch of (`_coalescing_manager`; before 2.6 or so `batch_isend_irecv`, too): calls
    # are begun as always, and their work is one. NCCL beside ours is told nothing, as to NCCL a batch is a
    # state of the thread: messages, which are on channels, would be begun at its end, and waited for before.

    def _start_coalescing(self, device: torch.device) -> None:
        self._refuse_at_end()
        self._batch = []
        self._rest = Noting(self._beside.rest, self._batch)

    def _end_coalescing(self, device: torch.device) -> dist.Work | None:
        works, self._batch, self._rest = self._batch, None, self._beside.rest
        return joined(works) if works else None

    def _begun(self, work: dist.Work) -> dist.Work:
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _pass(self, method: str, arguments: tuple[Any, ...], **options: Any) -> Any:
        self._other(method, layout.first_tensor(arguments))
        return getattr(self._rest, method)(*arguments, **options)

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> dist.Work:
        opts = opts if opts is not None else dist.AllToAllOptions()
        if not self._moves(output, input):
            self._other("all_to_all_single", output)
            return self._rest.alltoall_base(output, input, output_splits, input_splits, opts)
        place, finish = layout.place(output)
        arguments = (place, layout.plain(input))
        arguments += (list(output_splits) or None, list(input_splits) or None)
        return self._run("all_to_all_single", "all_to_all_single", arguments, finish, [output], opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.AllToAllOptions()
        # NCCL takes lists as they are; gloo takes none.
        if not outputs or self._names.get(outputs[0].device.type) == "nccl":
            self._other("alltoall", layout.first_tensor((outputs, inputs)))
            return self._rest.alltoall(outputs, inputs, opts)
        lists.check("all_to_all", self.size(), output=outputs, input=inputs)
        if not self._moves(*outputs, *inputs):
            self._other("alltoall", outputs[0])
            return self._rest.alltoall(outputs, inputs, opts)
        return self._run("alltoall", *lists.exchanged(outputs, inputs), outputs, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.BarrierOptions()
        device = getattr(opts, "device", None)
        if device is None or device.type != "cuda" or "cuda" not in self._names:
            device = torch.device("cpu")
        elif device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if not self.serves(device):
            self._note_other("barrier", device)
            return self._rest.barrier(opts)
        _note("barrier", NAME)
        seat = cache.search(None, self, _number_of(device))
        if getattr(opts, "asyncOp", True):
            return TorchWork(seat.begin(seat.comm.barrier, (), []))
        seat.settle()
        seat.comm.barrier()
        # As NCCL's: this thread waits, too.
        seat.comm.synchronize()
        return DoneWork([], device)


def _number_of(device: torch.device) -> int:
    """As `cache.number_of`, which takes a device's name."""
    if device.type == "cpu":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def _is_one(tensors: Any, lists_of_parts: Any) -> bool:
    """Whether there is one tensor, and one list of its parts."""
    return len(tensors) == 1 and len(lists_of_parts) == 1 and len(lists_of_parts[0]) > 0


def _are_pairs(outputs: Any, inputs: Any) -> bool:
    return len(outputs) > 0 and len(outputs) == len(inputs)


def _passes(method: str) -> Any:
    """A method that ours has nothing for."""

    def pass_on(self: SymmpoolProcessGroup, *arguments: Any, **options: Any) -> Any:
        return self._pass(method, arguments, **options)

    pass_on.__name__ = method
    return pass_on


# Those that classes derived from ProcessGroup may have, in whichever version of torch this is.
for _method in (
    "allgather_coalesced",
    "gather",
    "recv_anysource",
    "scatter",
):
    if hasattr(dist.ProcessGroup, _method):
        setattr(SymmpoolProcessGroup, _method, _passes(_method))


opaque(SymmpoolProcessGroup)


def create(options: Any, backend_options: Any = None) -> SymmpoolProcessGroup:
    """What torch.distributed calls for a new group of this backend."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7):
        raise UnsupportedError(
            "symmpool: torch.distributed's backend needs torch 2.7 or newer, and this is "
            f"{torch.__version__}, whose DDP and functional collectives wait for ever for a backend written "
            "in Python; symmpool.all_reduce and its like work on groups of gloo and NCCL"
        )
    return SymmpoolProcessGroup(
        options.store, options.group_rank, options.group_size, options.timeout, backend_options
    )


def register() -> None:
    """Makes the name "symmpool" known to torch.distributed. Importing this module did so, if the
    package's entry point had not when torch was imported."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


register()
