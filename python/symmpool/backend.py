"""A backend of torch.distributed: `init_process_group("cuda:symmpool,cpu:gloo")`.

Importing this module registers it under the name "symmpool", for "cpu" and "cuda"; importing
`symmpool` in a program that has imported torch does so, too. What the package's collectives serve
goes to them; the rest, and what they cannot serve, goes to NCCL on CUDA and to gloo on the CPU, which
the group has beside them. The choice is made call by call, from what is the same on every rank:
operation, element type, device. `last_backend()` and `backend_counts()` say what was chosen.

With `async_op=False` a call on CUDA runs on the current stream. Ours waits for a late rank as long as
the process group's timeout says; in its first call on a kind of device, twice as long.

That first call meets the group's other ranks before it returns, with `async_op=True` too: first calls
of several groups are begun in one order on all ranks, and none waits for what another rank does after
its own. `dist.monitored_barrier` asks for gloo by its name, so it needs a group of gloo's. Calls of a
group of this backend are not seen by modes of torch (fake tensors, `make_fx`, `CommDebugMode`); those of
`symmpool` itself are. DDP's hooks written in Python are served, its built-in ones in C++ are not.
"""

from __future__ import annotations

import collections
import logging
import time
from typing import Any

import torch
import torch.distributed as dist

from symmpool import groups, seats
from symmpool._symmpool import Group
from symmpool.errors import Error, InvalidArgumentError

__all__ = ["SymmpoolProcessGroup", "backend_counts", "last_backend"]

logger = logging.getLogger("symmpool.backend")

NAME = "symmpool"

_counts: collections.Counter[tuple[str, str]] = collections.Counter()
_last: list[str | None] = [None]

# By number, as a `ReduceOp` and its constants both give it.
_OPS = {
    int(getattr(dist.ReduceOp, theirs)): ours
    for theirs, ours in (
        ("SUM", "sum"),
        ("PRODUCT", "prod"),
        ("MIN", "min"),
        ("MAX", "max"),
        ("AVG", "avg"),
    )
}
# What is moved and not reduced may be of other types, too.
_REDUCED = {
    getattr(torch, name)
    for name in (
        "float32 float64 float16 bfloat16 int32 int64 uint8 int8 float8_e4m3fn float8_e5m2".split()
    )
}


def _sum_of_inputs(op: Any) -> str | None:
    """The sum's name, where an operation sums inputs times 1: what FSDP2 asks for where it is told to
    divide gradients by 1, as torchtitan tells it."""
    state = op.__getstate__() if isinstance(op, dist.ReduceOp) else (None, None)
    by_one = state[0] == dist.ReduceOp.PREMUL_SUM and isinstance(state[1], float) and state[1] == 1
    return "sum" if by_one else None


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


class TorchWork(dist.Work):
    """Work of ours, for callers that are C++."""

    def __init__(self, work: Any):
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        return self._work.wait(timeout)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def get_future(self) -> torch.futures.Future:
        return self._work.get_future()


class DoneWork(dist.Work):
    """Work that was done, or put on the current stream, before the call returned."""

    def __init__(self, results: list[Any], device: torch.device):
        super().__init__()
        self._results, self._device = results, device

    def wait(self, timeout: Any = None) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future:
        devices = [self._device] if self._device.type == "cuda" else None
        future = torch.futures.Future(devices=devices)
        future.set_result(self._results)
        return future


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory says what it holds, row by row: itself, or a copy. The copy is no part of
    what gradients flow through."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _place(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """What a call writes to where a tensor is meant, and what copies it from there, if need be."""
    plain = _plain(tensor)
    if plain is tensor:
        return tensor, None
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in sizes):
        raise InvalidArgumentError(
            "symmpool: a tensor to write to has elements that share their memory, as expand() makes "
            "them; pass tensor.clone()"
        )
    return plain, _copies([(tensor, plain)])


def _copies(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """What copies results to where they belong. In whichever thread: its modes are not the caller's,
    and a tensor made in inference mode, or one that requires grad, is written to in that mode only."""

    def copy() -> None:
        with torch.inference_mode():
            for to, found in pairs:
                to.copy_(found)

    return copy


class SymmpoolProcessGroup(dist.ProcessGroup):
    """A process group whose collectives are ours where they serve."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, options: Any = None):
        try:
            super().__init__(store, rank, size)
        except TypeError:
            # Before 2.12 or so torch makes no derived objects so; those made thus know no store.
            super().__init__(rank, size)
        self._store, self._timeout = store, timeout
        # The group of ours meets apart from the backends beside it.
        meeting = dist.PrefixStore("symmpool", store)
        self._seconds = groups.seconds_of(timeout) or groups.DEFAULT_TIMEOUT
        groups._of_torch[self] = Group.from_store(meeting, rank, size, timeout=self._seconds)
        # Whether ours serves a device, by its number; unknown before the first call.
        self._served: dict[int, bool] = {}
        self._names: dict[str, str] = {}
        # The same backends, where calls of this class do not come back to this class.
        self._rest = dist.ProcessGroup(store, rank, size)
        self._add_gloo(store, rank, size, timeout)
        self._add_nccl(store, rank, size, timeout, options)

    def _add_gloo(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        if not dist.is_gloo_available():
            return
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
        self._add("cpu", "gloo", dist.ProcessGroup.BackendType.GLOO, gloo)

    def _add_nccl(self, store: Any, rank: int, size: int, timeout: Any, options: Any) -> None:
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            return
        if options is None:
            options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        self._add("cuda", "nccl", dist.ProcessGroup.BackendType.NCCL, nccl)

    def _add(self, device: str, name: str, kind: Any, backend: Any) -> None:
        for group in (self._rest, self):
            group._register_backend(torch.device(device), kind, backend)
        if not self._names:
            for group in (self._rest, self):
                group._set_default_backend(kind)
        self._names[device] = name

    def getBackendName(self) -> str:
        return NAME

    def get_group_store(self) -> Any:
        """The store that the group met in."""
        return self._store

    def _serves(self, device: torch.device) -> bool:
        """Whether every rank has a communicator of ours there. The first call is collective."""
        number = -1 if device.type == "cpu" else device.index
        found = self._served.get(number)
        if found is None:
            found = self._is_asked_for(device.type) and self._found_out(number)
            self._served[number] = found
        return found

    def _is_asked_for(self, kind: str) -> bool:
        """Whether `init_process_group` named ours for such devices: a backend of another name may
        stand beside it."""
        config = dist.distributed_c10d._world.pg_backend_config.get(self, "")
        pairs = [pair.partition(":") for pair in str(config).split(",")]
        named = {device: backend for device, _, backend in pairs if backend}
        return named.get(kind, NAME) == NAME

    def _found_out(self, number: int) -> bool:
        name = "cpu" if number < 0 else f"cuda:{number}"
        why = None
        end = time.monotonic() + 2 * self._seconds
        try:
            seats.communicator(self, name)
        except Error as error:
            why = str(error)
        # Without the device's number: ranks use different ones.
        kind = "cpu" if number < 0 else "cuda"
        # A rank that cannot is here before those that wait for it in vain, a whole timeout at most.
        left = max(end - time.monotonic(), self._seconds)
        first = f"the first call on {kind}"
        refusals = groups.agree(self, f"backend/{kind}", why, left, first)
        if refusals and self.rank() == 0:
            logger.warning("symmpool serves no collective on %s: %s", name, refusals)
        return not refusals

    def _other(self, operation: str, tensor: torch.Tensor | None) -> str:
        kind = tensor.device.type if tensor is not None else "cpu"
        _note(operation, self._names.get(kind, kind))
        return operation

    def _run(
        self,
        operation: str,
        call: Any,
        arguments: tuple[Any, ...],
        results: list[torch.Tensor],
        opts: Any,
        finish: Any = None,
    ) -> dist.Work:
        """Makes a call of ours: `call` is the name of a method of communicators."""
        _note(operation, NAME)
        seat = seats.find(arguments[0], self)
        function = getattr(seat.comm, call)
        if getattr(opts, "asyncOp", True):
            return TorchWork(seat.begin(function, arguments, results, finish))
        seats.run(seat, function, arguments, results, False)
        if finish is not None:
            finish()
        return DoneWork(results, results[0].device)

    def _reduces(self, opts: Any, *tensors: torch.Tensor) -> str | None:
        """The operation's name, where ours reduces such tensors so."""
        op = getattr(opts.reduceOp, "op", opts.reduceOp)
        name = _OPS.get(int(op)) or _sum_of_inputs(opts.reduceOp)
        if name is None or any(tensor.dtype not in _REDUCED for tensor in tensors):
            return None
        return name if self._moves(*tensors) else None

    def _moves(self, *tensors: torch.Tensor) -> bool:
        """Whether ours takes such tensors at all. What is wrong with them is told by whoever does:
        only what is the same on every rank decides."""
        first = tensors[0]
        if any(tensor.layout != torch.strided or tensor.is_quantized for tensor in tensors):
            return False
        if first.device.type not in ("cpu", "cuda"):
            return False
        return self._serves(first.device)

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
        place, finish = _place(tensor)
        return self._run("all_reduce", "all_reduce", (place, op), tensors, opts, finish)

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if len(tensors) != 1 or not self._moves(*tensors):
            self._other("broadcast", tensors[0])
            return self._rest.broadcast(tensors, opts)
        (tensor,) = tensors
        # The root's is only read.
        root = opts.rootRank == self.rank()
        place, finish = (_plain(tensor), None) if root else _place(tensor)
        arguments = (place, opts.rootRank)
        return self._run("broadcast", "broadcast", arguments, tensors, opts, finish)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.AllgatherOptions()
        if not self._moves(output, input):
            self._other("all_gather_into_tensor", output)
            return self._rest._allgather_base(output, input, opts)
        place, finish = _place(output)
        arguments = (place, _plain(input))
        return self._run("all_gather_into_tensor", "all_gather", arguments, [output], opts, finish)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        op = self._reduces(opts, output, input)
        if op is None:
            self._other("reduce_scatter_tensor", output)
            return self._rest._reduce_scatter_base(output, input, opts)
        place, finish = _place(output)
        arguments = (place, _plain(input), op)
        return self._run("reduce_scatter_tensor", "reduce_scatter", arguments, [output], opts, finish)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> dist.Work:
        opts = opts if opts is not None else dist.AllToAllOptions()
        if not self._moves(output, input):
            self._other("all_to_all_single", output)
            return self._rest.alltoall_base(output, input, output_splits, input_splits, opts)
        place, finish = _place(output)
        arguments = (place, _plain(input))
        arguments += (list(output_splits) or None, list(input_splits) or None)
        return self._run("all_to_all_single", "all_to_all_single", arguments, [output], opts, finish)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.AllToAllOptions()
        # NCCL takes lists as they are; gloo takes none.
        if not outputs or self._names.get(outputs[0].device.type) == "nccl":
            self._other("alltoall", _first_tensor((outputs, inputs)))
            return self._rest.alltoall(outputs, inputs, opts)
        self._check_parts(outputs, inputs)
        if not self._moves(*outputs, *inputs):
            self._other("alltoall", outputs[0])
            return self._rest.alltoall(outputs, inputs, opts)
        sizes = [each.numel() for each in outputs]
        place = torch.empty(sum(sizes), dtype=outputs[0].dtype, device=outputs[0].device)
        sent = torch.cat([_plain(each.detach()).reshape(-1) for each in inputs])
        parts = zip(outputs, place.split(sizes), strict=True)
        finish = _copies([(to, part.view(to.shape)) for to, part in parts])
        arguments = (place, sent, sizes, [each.numel() for each in inputs])
        return self._run("alltoall", "all_to_all_single", arguments, outputs, opts, finish)

    def _check_parts(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """A list for each side, of a tensor for each rank."""
        for name, parts in (("output", outputs), ("input", inputs)):
            if len(parts) != self.size():
                raise InvalidArgumentError(
                    f"symmpool: all_to_all: {len(parts)} {name} tensors for {self.size()} ranks"
                )
        if len({(each.dtype, each.device) for each in (*outputs, *inputs)}) > 1:
            raise InvalidArgumentError(
                "symmpool: all_to_all: the tensors of both lists must be of one type, on one device"
            )

    def barrier(self, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.BarrierOptions()
        device = getattr(opts, "device", None)
        if device is None or device.type != "cuda" or "cuda" not in self._names:
            device = torch.device("cpu")
        elif device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if not self._serves(device):
            _note("barrier", self._names.get(device.type, device.type))
            return self._rest.barrier(opts)
        _note("barrier", NAME)
        seat = seats.search(None, self, -1 if device.type == "cpu" else device.index)
        if getattr(opts, "asyncOp", True):
            return TorchWork(seat.begin(seat.comm.barrier, (), []))
        seat.settle()
        seat.comm.barrier()
        # As NCCL's: this thread waits, too.
        seat.comm.synchronize()
        return DoneWork([], device)


def _first_tensor(arguments: tuple[Any, ...]) -> torch.Tensor | None:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument
        if isinstance(argument, (list, tuple)):
            found = _first_tensor(tuple(argument))
            if found is not None:
                return found
    return None


def _passes(method: str) -> Any:
    """A method that ours has nothing for."""

    def pass_on(self: SymmpoolProcessGroup, *arguments: Any, **options: Any) -> Any:
        self._other(method, _first_tensor(arguments))
        return getattr(self._rest, method)(*arguments, **options)

    pass_on.__name__ = method
    return pass_on


# Those that classes derived from ProcessGroup may have, in whichever version of torch this is.
for _method in (
    "all_gather_single_coalesced",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
):
    if hasattr(dist.ProcessGroup, _method):
        setattr(SymmpoolProcessGroup, _method, _passes(_method))


def _create(options: Any, backend_options: Any = None) -> SymmpoolProcessGroup:
    return SymmpoolProcessGroup(
        options.store, options.group_rank, options.group_size, options.timeout, backend_options
    )


def register() -> None:
    """Makes the name "symmpool" known to torch.distributed. Importing this module did so."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


register()
