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
of gloo's there. Calls of a group of this backend are not seen by modes of torch (fake tensors, `make_fx`,
`CommDebugMode`), nor traced by its compiler; those of `symmpool` itself are. DDP's hooks are served, those
in Python and its built-in ones in C++.

With SYMMPOOL_SHARED_DEVICE=1 on every rank several may use one GPU, to try a program where there are fewer:
gloo is the fallback on CUDA then, and point-to-point calls of CUDA tensors need a collective on the group
before.

Memory that torch asks the group for lies in windows (`symmpool.torch_backend.allocation`), and FSDP asks for
that of its buffers (`symmpool.torch_backend.fsdp`).
"""

from __future__ import annotations

import collections
from typing import Any

import torch
import torch.distributed as dist

# torch.distributed has the other operations' options, and not these.
from torch._C._distributed_c10d import AllgatherOptions

from symmpool._symmpool import Group, share_sms
from symmpool.collectives import layout, plans, reductions
from symmpool.collectives.reductions import operation
from symmpool.communicators import cache
from symmpool.errors import InvalidArgumentError, UnsupportedError
from symmpool.groups import agreement, process_groups, resolution
from symmpool.groups.store import RunOfStore
from symmpool.torch_backend import allocation, fsdp, subgroups, teardown
from symmpool.torch_backend.counts import note
from symmpool.torch_backend.fallback import FallbackBackends
from symmpool.torch_backend.mailbox import HostMessages
from symmpool.torch_backend.p2p import PointToPoint
from symmpool.torch_backend.served_calls import ServedCalls
from symmpool.torch_backend.served_devices import NAME, ServedDevices, number_of
from symmpool.torch_backend.work import (
    BarrierWork,
    CopyingWork,
    DoneWork,
    TorchWork,
    joined,
    opaque,
    register,
)

__all__ = ["NAME", "SymmpoolProcessGroup"]

_CPU = torch.device("cpu")
# How many Works of one number a group keeps: more than a forward pass makes.
_SMALL_KEPT = 256


class SymmpoolProcessGroup(dist.ProcessGroup, ServedCalls):
    """A process group whose collectives are ours where they serve."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: Any, options: Any = None, name: str | None = None
    ):
        """`name` is torch's for the group, where it has one."""
        try:
            super().__init__(store, rank, size)
        except TypeError:
            # Before 2.12 or so torch makes no derived objects so; those made thus know no store.
            super().__init__(rank, size)  # type: ignore[call-arg, arg-type]
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
        self.begin_anew(seconds)
        self._names = self._fallbacks.names
        self._p2p = PointToPoint(rank, size, self._fallbacks.begin)
        self._served = ServedDevices(seconds, self._p2p)
        # A Work has a C++ and a Python half, and C++ code that keeps a Work keeps its C++ half alone. Once
        # the Python half is gone, nobody answers the C++ half, and a wait for it never ends. DDP's `join`
        # keeps Work of one number from forward to backward; so the last of these are kept here.
        self._small: collections.deque[Any] = collections.deque(maxlen=_SMALL_KEPT)
        fsdp.use_windows(_has_windows)
        # Work of calls that were begun between `_start_coalescing` and `_end_coalescing`.
        self._batch: list[Any] | None = None

    @property
    def _rest(self) -> dist.ProcessGroup:
        """What makes the calls that ours does not. Asked for by calls that all ranks make."""
        return self._fallbacks.group

    @property
    def serves_subgroups(self) -> bool:
        """Whether other groups' communicators are made in the memory of this one's, on the CPU."""
        return subgroups.is_default(self)

    def begin_anew(self, seconds: float | None = None) -> None:
        """Has the ranks meet as in a new group: at first, and where a rank has waited for others in vain."""
        seconds = self._served.seconds if seconds is None else seconds
        # Its name keeps its keys apart from those of groups that the program makes of this store.
        ours = Group.from_store(
            self._run_of_store, self._rank, self._size, name="symmpool.backend", timeout=seconds
        )
        resolution.adopt(self, ours)

    def timeout_is(self, timeout: Any) -> None:
        """Called by the fallback backends, whose timeout torch's `_set_pg_timeout` sets."""
        seconds = process_groups.seconds_of(timeout)
        if seconds is not None:
            self._timeout = timeout
            self._served.seconds = seconds
            self._messages.set_timeout(seconds)
            self._fallbacks.timeout_is(timeout)
            cache.set_timeout(self, seconds)

    def set_timeout(self, timeout: Any) -> None:
        """Called by newer torch's `set_timeout`, which sets the fallback backends' timeouts by itself."""
        super().set_timeout(timeout)
        self.timeout_is(timeout)

    def getBackendName(self) -> str:
        """ "symmpool"."""
        return NAME

    def get_group_store(self) -> Any:
        """The store that the group met in."""
        return self._store

    def shutdown(self) -> None:
        """Called by torch where the group is destroyed. Waits for what was begun, which ends by itself,
        and lets go of the group's communicators and pools; calls that come after are refused."""
        if self._served.is_lost:
            return  # in a forked child, where nothing of it can be used
        # A default group's store goes with the group, and another may come to its place.
        leaves = not self._served.ended and dist.group.WORLD is self and self.rank() != 0
        if not self._served.ended:
            self._end(True)
        self._fallbacks.shutdown()
        super().shutdown()
        # Last: before rank 0 leaves, it may wait for what this rank does here.
        if leaves:
            teardown.await_server(self._store)

    def abort(self) -> None:
        """As `shutdown`, without waiting for anything: what was begun may fail."""
        if self._served.is_lost:
            return
        self._end(False)
        self._fallbacks.abort()
        super().abort()

    def _end(self, wait: bool) -> None:
        self._served.end()
        self._small.clear()
        self._p2p.end(wait)
        self._messages.end()
        cache.end(self, wait)

    def may_serve(self, device: torch.device) -> bool:
        """Whether `serves` may be True, as far as is known here. Talks to nobody."""
        return self._served.may_serve(self, device)

    def serves(self, device: torch.device) -> bool:
        """Whether every rank has a communicator of ours there. The first call is collective."""
        return self._served.serves(self, device)

    def _note_fallback(self, operation: str, tensor: torch.Tensor | None) -> None:
        """Counts a call that goes to a fallback backend, which is about to make it."""
        self._served.refuse_at_end(self)
        self._count_fallback(operation, torch.device("cpu") if tensor is None else tensor.device)

    def _count_fallback(self, operation: str, device: torch.device) -> None:
        name = self._names.get(device.type, device.type)
        if name == "nccl":
            # Its kernels may wait for other ranks while ours do.
            share_sms(number_of(device))
        note(operation, name)

    # Collectives that ours serves. Two names for one call are those of older and newer torch. torch's stubs
    # have several signatures for some of them, all of which these take.

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Reduces a list of one tensor in place."""
        opts = opts if opts is not None else dist.AllreduceOptions()
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        op, work = operation(opts.reduceOp), None
        if op is not None and len(tensors) == 1 and self._reduces(tensors[0]):
            work = self._run("all_reduce", opts, tensors[0], plans.all_reduce, tensors[0], op, self._size)
        return work if work is not None else self._pass("all_reduce", "allreduce", tensors, opts)

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        """Sends the root's tensor to all ranks."""
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        return self._run_one("broadcast", tensors, opts, plans.broadcast, opts.rootRank, self._rank)

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Reduces a list of one tensor, into the root's."""
        opts = opts if opts is not None else dist.ReduceOptions()
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        op = operation(opts.reduceOp)
        # In host memory an all-reduce takes less time than gloo's reduce; on CUDA NCCL's moves half as much,
        # where it has the operation and the type.
        if op is None or (
            self._names.get(tensors[0].device.type) == "nccl" and _nccl_reduces(op, tensors[0])
        ):
            return self._pass("reduce", "reduce", tensors, opts)
        given = (op, opts.rootRank, self._rank, self._size)
        return self._run_one("reduce", tensors, opts, plans.reduce, *given)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """Gathers all ranks' `input` in `output`, which has as many times its elements as there are ranks."""
        opts, name = opts if opts is not None else AllgatherOptions(), "all_gather_into_tensor"
        work = None
        if self._moves(output):
            work = self._run(name, opts, output, plans.all_gather_into_tensor, output, input, self._size)
        return work if work is not None else self._pass(name, "_allgather_base", output, input, opts)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """Reduces all ranks' `input`, and leaves this rank's part of it in `output`."""
        opts, name = opts if opts is not None else dist.ReduceScatterOptions(), "reduce_scatter_tensor"
        op, work = operation(opts.reduceOp), None
        if op is not None and self._moves(output):
            work = self._run(name, opts, output, plans.reduce_scatter_tensor, output, input, op, self._size)
        return work if work is not None else self._pass(name, "_reduce_scatter_base", output, input, opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gathers all ranks' tensor in a list of as many tensors."""
        opts, work = opts if opts is not None else AllgatherOptions(), None
        if len(inputs) == len(outputs) == 1 and self._moves(inputs[0]):
            given = (outputs[0], inputs[0], self._size)
            work = self._run("allgather", opts, inputs[0], plans.all_gather, *given)
        return work if work is not None else self._pass("allgather", "allgather", outputs, inputs, opts)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        """Reduces lists of tensors, and leaves this rank's one in the output."""
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        op, name, work = operation(opts.reduceOp), "reduce_scatter", None
        if op is not None and len(outputs) == len(inputs) == 1 and self._moves(outputs[0]):
            given = (outputs[0], inputs[0], op, self._rank, self._size)
            work = self._run(name, opts, outputs[0], plans.reduce_scatter, *given)
        return work if work is not None else self._pass(name, name, outputs, inputs, opts)

    # What functional collectives, DTensor with them, and Megatron's data parallelism call. Most lists are of
    # one tensor, which need not be looked at twice.

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduces several tensors in place, each by itself."""
        opts, work = opts if opts is not None else dist.AllreduceCoalescedOptions(), None
        if len(tensors) == 1:
            return self.allreduce(tensors, opts)
        op = operation(opts.reduceOp)
        if tensors and op is not None and all(map(self._reduces, tensors)):
            calls = [(plans.all_reduce, tensor, op, self._size) for tensor in tensors]
            work = self._run_each("all_reduce", opts, calls)
        name = "allreduce_coalesced"
        return work if work is not None else self._pass(name, name, tensors, opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Several gathers as `all_gather_single` makes them."""
        opts, work = opts if opts is not None else AllgatherOptions(), None
        if len(outputs) == len(inputs) == 1:
            return self.all_gather_single(outputs[0], inputs[0], opts)
        if _are_pairs(outputs, inputs) and self._moves(outputs[0]):
            pairs = zip(outputs, inputs, strict=True)
            calls = [(plans.all_gather_into_tensor, *pair, self._size) for pair in pairs]
            work = self._run_each("all_gather_into_tensor", opts, calls)
        name = "allgather_into_tensor_coalesced"
        return work if work is not None else self._pass(name, name, outputs, inputs, opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Several reduce-scatters as `reduce_scatter_single` makes them."""
        opts, work = opts if opts is not None else dist.ReduceScatterOptions(), None
        if len(outputs) == len(inputs) == 1:
            return self.reduce_scatter_single(outputs[0], inputs[0], opts)
        op = operation(opts.reduceOp)
        if op is not None and _are_pairs(outputs, inputs) and self._moves(outputs[0]):
            pairs = zip(outputs, inputs, strict=True)
            calls = [(plans.reduce_scatter_tensor, *pair, op, self._size) for pair in pairs]
            work = self._run_each("reduce_scatter_tensor", opts, calls)
        name = "reduce_scatter_tensor_coalesced"
        return work if work is not None else self._pass(name, name, outputs, inputs, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work:
        """Sends a list of one tensor to a rank of the group."""
        self._check_peer("send", to)
        if self._messages.fits(tensors, to, tag) and self._has_mailbox():
            return self._host_message("send", tensors[0], to, tag)
        if not self._p2p.carries(tensors, to):
            return self._message("send", f"to rank {to}", tensors, (to,), tag)
        return self._point_to_point("send", tensors[0], to)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        """Receives a list of one tensor from a rank of the group."""
        self._check_peer("recv", source)
        if self._messages.fits(tensors, source, tag) and self._has_mailbox():
            return self._host_message("recv", tensors[0], source, tag)
        if not self._p2p.carries(tensors, source):
            return self._message("recv", f"from rank {source}", tensors, (source,), tag)
        return self._point_to_point("recv", tensors[0], source)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        """Receives a list of one tensor from whichever rank sends first."""
        if self._messages.fits(tensors, None, tag) and self._has_mailbox():
            return self._host_message("recv", tensors[0], None, tag)
        return self._message("recv_anysource", "from any rank", tensors, (), tag)

    def _check_peer(self, operation: str, peer: int) -> None:
        """Refuses what is no rank of the group: gloo would read memory that is not its own."""
        if not 0 <= peer < self._size:
            raise InvalidArgumentError(
                f"symmpool: {operation} on rank {self._rank} with rank {peer}: the group has ranks 0 to "
                f"{self._size - 1}; you must name one of them"
            )

    def _has_mailbox(self) -> bool:
        """Whether a mailbox carries messages of CPU tensors. All ranks answer alike at any time, so whether
        collectives are served, which ranks learn one after the other, is not asked."""
        used = self._messages.is_used
        if used is None:
            self._served.refuse_at_end(self)
            # A group within the default one has no gloo for messages, whatever is named for it.
            is_ours = self.within is not None or self._served.is_named(self, _CPU)
            used = is_ours and self._messages.meet()
        return used

    def _host_message(self, operation: str, tensor: torch.Tensor, peer: int | None, tag: int) -> dist.Work:
        """A message that the group's mailbox carries."""
        self._served.refuse_at_end(self)
        if operation == "send":
            assert peer is not None
            work = self._messages.send(tensor, peer, tag)
        else:
            work = self._messages.recv(tensor, peer, tag)
        note(operation, NAME)
        register(work, [tensor])
        return self._begun(work)

    def _message(
        self, method: str, between: str, tensors: list[torch.Tensor], peer: tuple[int, ...], tag: int
    ) -> dist.Work:
        """A message that a fallback backend carries. Gloo's are bytes, which are found by their tag: with the
        elements' type in it, a message of another type is none that was waited for."""
        if not self._fallbacks.is_made:
            raise UnsupportedError(
                f"symmpool: {method} on rank {self._rank} {between}, tag {tag}: messages of a group within "
                "the default one are single tensors of the CPU, strided ones, with a tag of 0 or more, and "
                "the process needs a mailbox (a warning says why it has none); make the group with "
                "new_group(backend='gloo')"
            )
        if len(tensors) != 1 or self._names.get(tensors[0].device.type) != "gloo":
            return self._pass(method, method, tensors, *peer, tag)
        name = str(tensors[0].dtype).removeprefix("torch.")

        def late() -> str:
            return (
                f"{method}: rank {self._rank} waited in vain for a message of {name}, tag {tag}, {between}; "
                "the other rank has made no such call, or one with another type of elements or another tag"
            )

        return self._pass(method, method, tensors, *peer, message_tag(tag, name), late=late)

    def _point_to_point(self, operation: str, tensor: torch.Tensor, peer: int) -> dist.Work:
        """Tags are not looked at, as NCCL does not look at them."""
        self._served.refuse_at_end(self)
        work, ours = self._p2p.begin(tensor, peer, operation == "send")
        if ours:
            note(operation, NAME)
            if isinstance(work, TorchWork):
                register(work, [tensor])
        else:
            self._count_fallback(operation, tensor.device)
        return self._begun(work)

    # torch's batches (`_coalescing_manager`; before 2.6 or so `batch_isend_irecv`, too): calls are begun as
    # always, and one Work stands for theirs. The fallback backends get no batch. To NCCL that is a state of
    # the thread: its point-to-point calls, which have communicators of their own here, would be begun at the
    # batch's end, and be waited for before that.

    def _start_coalescing(self, device: torch.device) -> None:
        self._served.refuse_at_end(self)
        self._batch = []

    def _end_coalescing(  # type: ignore[override]
        self, device: torch.device
    ) -> dist.Work | None:
        works, self._batch = self._batch, None
        return joined(works) if works else None

    def _begun(self, work: dist.Work) -> dist.Work:
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _pass(self, operation: str, method: str, *arguments: Any, late: Any = None, **options: Any) -> Any:
        """Has the fallback backend of the first tensor's device make a call on contiguous tensors."""
        self._note_fallback(operation, layout.first_tensor(arguments))
        plain, finish = layout.contiguous(arguments, writes=method != "send")
        work = getattr(self._rest, method)(*plain, **options)
        if work is None:
            return None
        if finish is not None or late is not None:
            work = CopyingWork(work, finish, arguments[0], late)
        return self._begun(work)

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> dist.Work:
        """Exchanges parts of one tensor. Splits are elements of the first dimension; empty ones are equal
        parts."""
        opts, work = opts if opts is not None else dist.AllToAllOptions(), None
        if self._moves(output):
            given = (output, input, list(output_splits) or None, list(input_splits) or None)
            planner = plans.all_to_all_whole
            work = self._run("all_to_all_single", opts, output, planner, *given, self._rank, self._size)
        if work is not None:
            return work
        arguments = (output, input, output_splits, input_splits, opts)
        return self._pass("all_to_all_single", "alltoall_base", *arguments)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Gathers all ranks' tensor in the root's list."""
        opts, work = opts if opts is not None else dist.GatherOptions(), None
        if len(inputs) == 1 and self._moves(inputs[0]):
            given = (inputs[0], outputs[0] if outputs else None, opts.rootRank, self._rank, self._size)
            work = self._run("gather", opts, inputs[0], plans.gather, *given)
        return work if work is not None else self._pass("gather", "gather", outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Sends each rank one tensor of the root's list."""
        opts, work = opts if opts is not None else dist.ScatterOptions(), None
        if len(outputs) == 1 and self._moves(outputs[0]):
            given = (outputs[0], inputs[0] if inputs else None, opts.rootRank, self._rank, self._size)
            work = self._run("scatter", opts, outputs[0], plans.scatter, *given)
        return work if work is not None else self._pass("scatter", "scatter", outputs, inputs, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Exchanges lists of tensors, one for each rank."""
        opts, work = opts if opts is not None else dist.AllToAllOptions(), None
        first = layout.first_tensor((outputs, inputs))
        first = torch.empty(0) if first is None else first
        # NCCL takes lists as they are; gloo takes none.
        if self._names.get(first.device.type) != "nccl" and self._moves(first):
            work = self._run("alltoall", opts, first, plans.all_to_all, outputs, inputs, self._size)
        return work if work is not None else self._pass("alltoall", "alltoall", outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Returns Work that is done once every rank has called it."""
        opts = opts if opts is not None else dist.BarrierOptions()
        device = getattr(opts, "device", None)
        if device is None or device.type != "cuda" or "cuda" not in self._names:
            device = torch.device("cpu")
        elif device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if not self._served.serves(self, device):
            self._count_fallback("barrier", device)
            return self._rest.barrier(opts)
        note("barrier", NAME)
        entry = cache.look_up(None, self, number_of(device))
        assert entry is not None  # this process is a member
        if getattr(opts, "asyncOp", True):
            return BarrierWork(entry.begin(entry.comm.barrier, (), []), entry.comm.synchronize)
        entry.run(entry.comm.barrier, (), [], False)
        # This thread waits too, as in NCCL's barrier.
        entry.comm.synchronize()
        return DoneWork([], device)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """As gloo's, which carries it, and is made by it if need be."""
        self._note_fallback("monitored_barrier", None)
        limit = self._timeout if timeout is None else timeout
        self._fallbacks.make_gloo_for_monitored_barrier(limit)
        rest: Any = self._rest
        rest.monitored_barrier(limit, wait_all_ranks)

    def split_group(self, *arguments: Any, **options: Any) -> Any:
        """As that of a group on the fallback backends."""
        return self._rest.split_group(*arguments, **options)

    def merge_remote_group(self, *arguments: Any, **options: Any) -> Any:
        """As `split_group`."""
        return self._rest.merge_remote_group(*arguments, **options)


def _has_windows(group: Any, device: Any) -> bool:
    """Whether a group is ours and has windows on the device, of several ranks."""
    ours = isinstance(group, SymmpoolProcessGroup) and group.size() > 1
    return ours and allocation.has_windows(group, device)


def _nccl_reduces(op: Any, tensor: torch.Tensor) -> bool:
    """Whether NCCL reduces such elements by an operation."""
    is_named = op in ("sum", "prod", "min", "max", "avg")
    return is_named and tensor.dtype in reductions.REDUCED and tensor.layout == torch.strided


def _are_pairs(outputs: Any, inputs: Any) -> bool:
    return len(outputs) > 0 and len(outputs) == len(inputs)


# Types of elements, whose places here are a part of a message's tag.
_TYPES = (
    "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64 complex32 "
    "complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
).split()
# Gloo's tags have 31 bits.
_TAG_BITS = 26


def message_tag(tag: int, name: str) -> int:
    """The tag by which gloo finds a message of a type, the same on both ranks. Tags that leave no room for
    the type stay as they are."""
    if not 0 <= tag < 1 << _TAG_BITS:
        return tag
    return (_TYPES.index(name) + 1 if name in _TYPES else 0) << _TAG_BITS | tag


def _passes(method: str) -> Any:
    """A method for which communicators have nothing, so that a fallback backend serves it."""

    def pass_on(self: SymmpoolProcessGroup, *arguments: Any, **options: Any) -> Any:
        return self._pass(method, method, *arguments, **options)

    pass_on.__name__ = method
    return pass_on


# A method that classes derived from ProcessGroup have in some versions of torch.
if hasattr(dist.ProcessGroup, "allgather_coalesced"):
    SymmpoolProcessGroup.allgather_coalesced = _passes(  # type: ignore[method-assign]
        "allgather_coalesced"
    )


opaque(ServedCalls)
opaque(SymmpoolProcessGroup)
