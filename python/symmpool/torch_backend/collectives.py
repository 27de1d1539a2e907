"""The collectives of a group of the backend: those that communicators serve, and the others, which a fallback
backend makes. The method names are those of torch's classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# torch.distributed has the other operations' options, and not these.
from torch._C._distributed_c10d import AllgatherOptions

from symmpool.collectives import layout, plans, reductions
from symmpool.collectives.reductions import operation
from symmpool.communicators import cache
from symmpool.torch_backend.counts import note
from symmpool.torch_backend.messages import Messages
from symmpool.torch_backend.served_devices import NAME, number_of
from symmpool.torch_backend.work import BarrierWork, CopyingWork, opaque

if TYPE_CHECKING:
    import datetime
    from collections.abc import Sequence

__all__ = ["GroupCollectives"]

_CPU = torch.device("cpu")
# The dictionary of a device that has nothing to look up.
_NONE: dict[int, Any] = {}


@opaque
class GroupCollectives(Messages):
    """The calls of a group of the backend. The class that has them says how a call ends that was made at once
    (`_done`), and what stands for Work of a fallback backend (`_passed`)."""

    # Collectives that ours serves. Two names for one call are those of older and newer torch. torch's stubs
    # have several signatures for some of them, all of which these take.

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.AllreduceOptions | None = None) -> dist.Work:
        """Reduces a list of one tensor in place."""
        opts = opts if opts is not None else dist.AllreduceOptions()
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        op, work = operation(opts.reduceOp), None
        if op is not None and len(tensors) == 1 and self._reduces(tensors[0]):
            work = self._run("all_reduce", opts, tensors[0], plans.all_reduce, tensors[0], op, self._size)
        return work if work is not None else self._pass("all_reduce", "allreduce", tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions) -> dist.Work:
        """Sends the root's tensor to all ranks."""
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        return self._run_one("broadcast", tensors, opts, plans.broadcast, opts.rootRank, self._rank)

    def reduce(self, tensors: list[torch.Tensor], opts: dist.ReduceOptions | None = None) -> dist.Work:
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

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: AllgatherOptions | None = None
    ) -> dist.Work:
        """Gathers all ranks' `input` in `output`, which has as many times its elements as there are ranks."""
        opts, name = opts if opts is not None else AllgatherOptions(), "all_gather_into_tensor"
        work = None
        if self._moves(output):
            work = self._run(name, opts, output, plans.all_gather_into_tensor, output, input, self._size)
        return work if work is not None else self._pass(name, "_allgather_base", output, input, opts)

    _allgather_base = all_gather_single

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: dist.ReduceScatterOptions | None = None
    ) -> dist.Work:
        """Reduces all ranks' `input`, and leaves this rank's part of it in `output`."""
        opts, name = opts if opts is not None else dist.ReduceScatterOptions(), "reduce_scatter_tensor"
        op, work = operation(opts.reduceOp), None
        if op is not None and self._moves(output):
            work = self._run(name, opts, output, plans.reduce_scatter_tensor, output, input, op, self._size)
        return work if work is not None else self._pass(name, "_reduce_scatter_base", output, input, opts)

    _reduce_scatter_base = reduce_scatter_single

    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> dist.Work:
        """Gathers all ranks' tensor in a list of as many tensors."""
        opts, work = opts if opts is not None else AllgatherOptions(), None
        if len(inputs) == len(outputs) == 1 and self._moves(inputs[0]):
            given = (outputs[0], inputs[0], self._size)
            work = self._run("allgather", opts, inputs[0], plans.all_gather, *given)
        return work if work is not None else self._pass("allgather", "allgather", outputs, inputs, opts)

    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: dist.ReduceScatterOptions | None = None,
    ) -> dist.Work:
        """Reduces lists of tensors, and leaves this rank's one in the output."""
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        op, name, work = operation(opts.reduceOp), "reduce_scatter", None
        if op is not None and len(outputs) == len(inputs) == 1 and self._moves(outputs[0]):
            given = (outputs[0], inputs[0], op, self._rank, self._size)
            work = self._run(name, opts, outputs[0], plans.reduce_scatter, *given)
        return work if work is not None else self._pass(name, name, outputs, inputs, opts)

    # Functional collectives, DTensor with them, and Megatron's data parallelism call these. Most lists are of
    # one tensor, which need not be looked at twice.

    def allreduce_coalesced(
        self, tensors: list[torch.Tensor], opts: dist.AllreduceCoalescedOptions | None = None
    ) -> dist.Work:
        """Reduces several tensors in place, each by itself."""
        opts, work = opts if opts is not None else dist.AllreduceCoalescedOptions(), None
        if len(tensors) == 1:
            return GroupCollectives.allreduce(self, tensors, opts)
        op = operation(opts.reduceOp)
        if tensors and op is not None and all(map(self._reduces, tensors)):
            calls = [(plans.all_reduce, tensor, op, self._size) for tensor in tensors]
            work = self._run_each("all_reduce", opts, calls)
        name = "allreduce_coalesced"
        return work if work is not None else self._pass(name, name, tensors, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: AllgatherOptions | None = None
    ) -> dist.Work:
        """Several gathers as `all_gather_single` makes them."""
        opts, work = opts if opts is not None else AllgatherOptions(), None
        if len(outputs) == len(inputs) == 1:
            return GroupCollectives.all_gather_single(self, outputs[0], inputs[0], opts)
        if _are_pairs(outputs, inputs) and self._moves(outputs[0]):
            pairs = zip(outputs, inputs, strict=True)
            calls = [(plans.all_gather_into_tensor, *pair, self._size) for pair in pairs]
            work = self._run_each("all_gather_into_tensor", opts, calls)
        name = "allgather_into_tensor_coalesced"
        return work if work is not None else self._pass(name, name, outputs, inputs, opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter_tensor_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: dist.ReduceScatterOptions | None = None,
    ) -> dist.Work:
        """Several reduce-scatters as `reduce_scatter_single` makes them."""
        opts, work = opts if opts is not None else dist.ReduceScatterOptions(), None
        if len(outputs) == len(inputs) == 1:
            return GroupCollectives.reduce_scatter_single(self, outputs[0], inputs[0], opts)
        op = operation(opts.reduceOp)
        if op is not None and _are_pairs(outputs, inputs) and self._moves(outputs[0]):
            pairs = zip(outputs, inputs, strict=True)
            calls = [(plans.reduce_scatter_tensor, *pair, op, self._size) for pair in pairs]
            work = self._run_each("reduce_scatter_tensor", opts, calls)
        name = "reduce_scatter_tensor_coalesced"
        return work if work is not None else self._pass(name, name, outputs, inputs, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _pass(
        self, operation: str, method: str, *arguments: object, late: Any = None, **options: object
    ) -> Any:
        """Has the fallback backend of the first tensor's device make a call on contiguous tensors."""
        self._note_fallback(operation, layout.first_tensor(arguments))
        plain, finish = layout.contiguous(arguments, writes=method != "send")
        work = getattr(self._rest, method)(*plain, **options)
        if work is None:
            return None
        if finish is not None or late is not None:
            work = CopyingWork(work, finish, arguments[0], late)  # type: ignore[arg-type]  # a list of tensors
        return self._begun(self._passed(work, arguments[0]))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: dist.AllToAllOptions | None = None,
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

    alltoall_base = all_to_all_single

    def gather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: dist.GatherOptions | None = None,
    ) -> dist.Work:
        """Gathers all ranks' tensor in the root's list."""
        opts, work = opts if opts is not None else dist.GatherOptions(), None
        if len(inputs) == 1 and self._moves(inputs[0]):
            given = (inputs[0], outputs[0] if outputs else None, opts.rootRank, self._rank, self._size)
            work = self._run("gather", opts, inputs[0], plans.gather, *given)
        return work if work is not None else self._pass("gather", "gather", outputs, inputs, opts)

    def gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: dist.GatherOptions | None = None
    ) -> dist.Work:
        """Gathers all ranks' `input` in the root's `output`, one behind the other."""
        opts, work = opts if opts is not None else dist.GatherOptions(), None
        if self._moves(input):
            given = (output, input, opts.rootRank, self._rank, self._size)
            work = self._run("gather_single", opts, input, plans.gather_single, *given)
        if work is not None:
            return work
        parts = [plans.parts_of(output, input, self._size)] if opts.rootRank == self._rank else []
        return self._pass("gather_single", "gather", parts, [input], opts)

    def scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: dist.ScatterOptions | None = None,
    ) -> dist.Work:
        """Sends each rank one tensor of the root's list."""
        opts, work = opts if opts is not None else dist.ScatterOptions(), None
        if len(outputs) == 1 and self._moves(outputs[0]):
            given = (outputs[0], inputs[0] if inputs else None, opts.rootRank, self._rank, self._size)
            work = self._run("scatter", opts, outputs[0], plans.scatter, *given)
        return work if work is not None else self._pass("scatter", "scatter", outputs, inputs, opts)

    def alltoall(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: dist.AllToAllOptions | None = None,
    ) -> dist.Work:
        """Exchanges lists of tensors, one for each rank."""
        opts, work = opts if opts is not None else dist.AllToAllOptions(), None
        first = layout.first_tensor((outputs, inputs))
        first = torch.empty(0) if first is None else first
        # NCCL takes lists as they are; gloo takes none.
        if self._names.get(first.device.type) != "nccl" and self._moves(first):
            work = self._run("alltoall", opts, first, plans.all_to_all, outputs, inputs, self._size)
        return work if work is not None else self._pass("alltoall", "alltoall", outputs, inputs, opts)

    def barrier(self, opts: dist.BarrierOptions | None = None) -> dist.Work:
        """Returns Work that is done once every rank has called it."""
        opts = opts if opts is not None else dist.BarrierOptions()
        device = getattr(opts, "device", None)
        if device is None or device.type != "cuda" or "cuda" not in self._names:
            device = _CPU
        elif device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        number = number_of(device)
        if not self._served.known.get(number) and not self._served.serves(self, device):
            self._count_fallback("barrier", device)
            return self._passed(self._rest.barrier(opts), [])
        note("barrier", NAME)
        entry = cache.looked_up.get(number, _NONE).get(self._id)
        if entry is None:
            entry = cache.look_up(None, self.key, number)
            assert entry is not None  # this process is a member
        if getattr(opts, "asyncOp", True):
            return BarrierWork(entry.begin(entry.comm.barrier, (), []), entry.comm.synchronize)
        entry.run(entry.comm.barrier, (), [], False)
        if number >= 0:
            # This thread waits too, as in NCCL's barrier.
            entry.comm.synchronize()
        return self._done([], device)

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Waits for all ranks with gloo's monitored barrier, and makes gloo if need be."""
        self._note_fallback("monitored_barrier", None)
        limit = self._timeout if timeout is None else timeout
        self._fallbacks.make_gloo_for_monitored_barrier(limit)
        rest: Any = self._rest
        rest.monitored_barrier(limit, wait_all_ranks)


def _nccl_reduces(op: Any, tensor: torch.Tensor) -> bool:
    """Whether NCCL reduces such elements by an operation."""
    is_named = op in ("sum", "prod", "min", "max", "avg")
    return is_named and tensor.dtype in reductions.REDUCED and tensor.layout == torch.strided


def _are_pairs(outputs: Sequence[object], inputs: Sequence[object]) -> bool:
    return len(outputs) > 0 and len(outputs) == len(inputs)
