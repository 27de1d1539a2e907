"""Collectives of this package behind the name `PyNcclCommunicator` of vLLM and of SGLang.

Both engines call NCCL themselves, past torch.distributed, for gathers, scattered sums and messages, and for
sums that `CustomAllreduce` does not serve. What `derived` makes is the engine's class. A communicator of a
process group whose ranks can all take part is ours, and any other is NCCL's, as before."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import symmpool
from symmpool.communicators import cache
from symmpool.communicators.devices import number_of
from symmpool.communicators.entry import explainer
from symmpool.errors import Error, InvalidStateError, UnsupportedError
from symmpool.groups import agreement, process_groups

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from symmpool.collectives.types import Op
    from symmpool.communicators.entry import CommunicatorEntry
    from symmpool.communicators.work import Work

__all__ = ["derived", "is_derived"]

logger = logging.getLogger("symmpool.engines")

# A message that waits for the end of its batch: whether it is sent, its tensor, the other rank, its stream.
Message = tuple[bool, "torch.Tensor", int, Any]

# SGLang's arguments behind the group and the device.
_SGLANGS_OPTIONS = ("library_path", "is_symmetric_memory_enabled", "cta_policy")

# How long a rank waits for the others where a communicator is made.
_SECONDS = 60.0


class EngineCollectives:
    """A pool and a communicator of ours on a process group of torch. Construction is collective. Ranks are
    those of the group. Calls are made on the current stream, and can be captured from the first on; a rank
    that does not come within the group's timeout is an error that names it."""

    def __init__(self, group: Any, device: torch.device):
        self.pool: Any = symmpool.Pool(group, str(device), timeout=_SECONDS)
        self.rank, self.world = self.pool.rank, self.pool.world
        self.device = device
        entry = cache.look_up(None, self.pool, number_of(str(device)))
        assert entry is not None  # this process is a member
        self._entry: CommunicatorEntry | None = entry
        # Ranks come at once to where it is made, and may be late for a call.
        entry.comm.timeout = process_groups.timeout_of_torch(group, device.type) or _SECONDS
        # Messages between `begin_batch` and `end_batch`, and how many of the former had no end yet.
        self._batch: list[Message] = []
        self._batches = 0
        self._messages: Any = None

    def all_reduce(self, tensor: torch.Tensor, op: Op, out: torch.Tensor | None = None) -> None:
        """The sum, or what `op` says, in `out`, or in place."""
        symmpool.all_reduce(tensor, op, group=self.pool, out=out)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, sizes: list[int] | None) -> None:
        """Every rank's rows, one behind the other. `sizes` are the rows of each rank."""
        if sizes is None:
            symmpool.all_gather_into_tensor(output, tensor, group=self.pool)
        else:
            symmpool.all_gather(list(output.split(sizes)), tensor, group=self.pool)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: Op, sizes: list[int] | None
    ) -> None:
        """This rank's rows of the sum."""
        if sizes is None:
            symmpool.reduce_scatter_tensor(output, tensor, op, group=self.pool)
        else:
            symmpool.reduce_scatter(output, list(tensor.split(sizes)), op, group=self.pool)

    def reduce(self, output: torch.Tensor, tensor: torch.Tensor, root: int, op: Op) -> None:
        """The sum, in the root's `output` alone."""
        if self.rank == root and output.data_ptr() != tensor.data_ptr():
            output.copy_(tensor)
        symmpool.reduce(output if self.rank == root else tensor, root, op, group=self.pool)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """The root's rows on every rank."""
        symmpool.broadcast(tensor, root, group=self.pool)

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Equal parts of all elements, one for each rank."""
        symmpool.all_to_all_single(output.view(-1), tensor.view(-1), group=self.pool)

    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, sizes: list[int], root: int) -> None:
        """Rows of the root, as many for each rank as `sizes` says. The root alone passes `tensor`."""
        if self.rank == root:
            assert tensor is not None
            parts = tensor.split(sizes)
            output.copy_(parts[root])
            messages = [(True, part, rank) for rank, part in enumerate(parts) if rank != root and len(part)]
        else:
            messages = [(False, output, root)] if sizes[self.rank] else []
        # Nothing fails between these.
        self.begin_batch()
        for sends, part, peer in messages:
            self.message(sends, part, peer)
        self.end_batch()

    def message(
        self, sends: bool, tensor: torch.Tensor, peer: int, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Sends or receives a tensor, behind what its stream was given so far. In a batch it waits for that's
        end."""
        if self._batches:
            if stream is None and tensor.is_cuda:
                stream = _current_stream(tensor)
            self._batch.append((sends, tensor, peer, stream))
            return
        with _on(stream):
            (symmpool.send if sends else symmpool.recv)(tensor, peer, group=self.pool)

    def begin_batch(self) -> None:
        """Messages wait for `end_batch`, in which ranks may send and receive in any order. Batches within one
        another are one batch."""
        self._batches += 1

    def end_batch(self) -> None:
        """Makes the messages of the outermost batch. Their streams wait for them, and on the CPU the caller
        does. Raises InvalidStateError where no batch has begun."""
        if not self._batches:
            raise InvalidStateError(f"symmpool: group_end on rank {self.rank}: call group_start first")
        self._batches -= 1
        if self._batches:
            return
        batch, self._batch = self._batch, []
        begun: list[tuple[Any, Any]] = []
        try:
            for sends, tensor, peer, stream in batch:
                with _on(stream):
                    begun.append((self._begin(sends, tensor, peer), stream))
        finally:
            # Also where one could not begin: streams come behind those that have.
            for work, stream in begun:
                with _on(stream):
                    work.wait()

    def _begin(self, sends: bool, tensor: torch.Tensor, peer: int) -> Work | dist.Work | None:
        if not tensor.is_cuda:
            return (symmpool.isend if sends else symmpool.irecv)(tensor, peer, group=self.pool)
        if self._messages is None:
            from symmpool.torch_backend.p2p import PointToPoint

            entry = self._entry
            assert entry is not None  # it is not closed
            self._messages = PointToPoint(self.rank, self.world, _nothing_else)
            # All channels are ours at every rank, so nothing has to be exchanged.
            self._messages.use_communicator(lambda said: [said], entry.comm, entry.device, explainer(entry))
        return self._messages.begin(tensor, peer, sends)[0]

    def close(self) -> None:
        """Ends the batches and lets the communicator go."""
        messages, self._messages = self._messages, None
        if messages is not None:
            messages.end(False)
        cache.forget(self.pool)
        self._entry = None


def _nothing_else(channel: tuple[int, int], tensor: torch.Tensor) -> Any:
    raise UnsupportedError(f"symmpool: nothing carries a message of {tensor.device} on channel {channel}")


def derived(base: type, in_place: bool, symmetric: Callable[[], bool]) -> type:
    """The class in place of an engine's `PyNcclCommunicator`, which is `base`. `in_place` is whether its
    `all_reduce` is, and whether it is disabled until `change_state`, as SGLang's. `symmetric` says whether
    the engine uses NCCL's symmetric memory, which needs a communicator of NCCL."""
    return _derived(base, in_place, symmetric)


def is_derived(kind: object) -> bool:
    """Whether a class is one that `derived` made."""
    return isinstance(kind, type) and "_engines_own" in vars(kind)


@functools.cache
def _derived(base: Any, in_place: bool, symmetric: Callable[[], bool]) -> type:
    class PyNcclCommunicator(base):  # type: ignore[misc]
        """Communicator of the engine's name. Construction is collective."""

        _engines_own = base
        _symmpool: EngineCollectives

        def __new__(cls, group: Any, device: Any, *arguments: object, **options: object) -> Any:
            given = {**dict(zip(_SGLANGS_OPTIONS, arguments, strict=False)), **options}
            # NCCL's windows, and its gathers by copy engines.
            needs_nccl = given.get("is_symmetric_memory_enabled") or given.get("cta_policy") is not None
            ours = None if needs_nccl or symmetric() or _is_nccls(group) else _made(group, device)
            if ours is None:
                # An instance of the engine's class, so `__init__` below is not called.
                return base(group, device, *arguments, **options)
            found = super().__new__(cls)
            found._symmpool = ours
            return found

        def __init__(self, group: Any, device: Any, *arguments: object, **options: object):
            ours = self._symmpool
            self.group, self.device = group, ours.device
            self.rank, self.world_size = ours.rank, ours.world
            self.available, self.disabled = True, in_place
            # Engines ask from which version of NCCL on they may use a function.
            self.nccl_version = 0

        @staticmethod
        def from_unique_id_bytes(*arguments: object, **options: object) -> Any:
            """NCCL's, whose other ranks need not be the engine's."""
            return base.from_unique_id_bytes(*arguments, **options)

        def _all_reduce_in_place(
            self, tensor: torch.Tensor, op: Op = "sum", stream: torch.cuda.Stream | None = None
        ) -> None:
            if not self.disabled:
                with _on(stream):
                    self._symmpool.all_reduce(tensor, op)

        def outplace_all_reduce(
            self,
            in_tensor: torch.Tensor,
            out_tensor: torch.Tensor | None = None,
            op: Op = "sum",
            stream: torch.cuda.Stream | None = None,
        ) -> Any:
            if self.disabled:
                return None
            with _on(stream):
                out = in_tensor.new_empty(in_tensor.shape) if out_tensor is None else out_tensor
                self._symmpool.all_reduce(in_tensor, op, out)
            return out

        # SGLang's has other arguments than vLLM's.
        all_reduce: Any = _all_reduce_in_place if in_place else outplace_all_reduce

        def all_gather(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            sizes: list[int] | None = None,
            stream: torch.cuda.Stream | None = None,
        ) -> None:
            if not in_place:
                # vLLM's third argument is the stream.
                sizes, stream = None, stream if stream is not None else sizes
            if not self.disabled:
                with _on(stream):
                    self._symmpool.all_gather(output_tensor, input_tensor, sizes)

        def all_gatherv(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            sizes: list[int],
            stream: torch.cuda.Stream | None = None,
        ) -> None:
            if not self.disabled:
                with _on(stream):
                    self._symmpool.all_gather(output_tensor, input_tensor, sizes)

        def reduce_scatter(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            op: Op = "sum",
            sizes: list[int] | None = None,
            stream: torch.cuda.Stream | None = None,
        ) -> None:
            if not in_place:
                sizes, stream = None, stream if stream is not None else sizes
            if not self.disabled:
                with _on(stream):
                    self._symmpool.reduce_scatter(output_tensor, input_tensor, op, sizes)

        def reduce_scatterv(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            sizes: list[int],
            op: Op = "sum",
            stream: torch.cuda.Stream | None = None,
        ) -> None:
            if not self.disabled:
                with _on(stream):
                    self._symmpool.reduce_scatter(output_tensor, input_tensor, op, sizes)

        def reduce(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            root: int,
            op: Op = "sum",
            stream: torch.cuda.Stream | None = None,
        ) -> None:
            if not self.disabled:
                with _on(stream):
                    self._symmpool.reduce(output_tensor, input_tensor, root, op)

        def scatter(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            sizes: list[int],
            root: int = 0,
            stream: torch.cuda.Stream | None = None,
        ) -> None:
            if not self.disabled:
                with _on(stream):
                    self._symmpool.scatter(output_tensor, input_tensor, sizes, root)

        def all_to_all_single(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor) -> None:
            if not self.disabled:
                self._symmpool.all_to_all(output_tensor, input_tensor)

        def broadcast(self, tensor: torch.Tensor, src: int, stream: torch.cuda.Stream | None = None) -> None:
            if not self.disabled:
                with _on(stream):
                    self._symmpool.broadcast(tensor, src)

        def send(self, tensor: torch.Tensor, dst: int, stream: torch.cuda.Stream | None = None) -> None:
            if not self.disabled:
                self._symmpool.message(True, tensor, dst, stream)

        def recv(self, tensor: torch.Tensor, src: int, stream: torch.cuda.Stream | None = None) -> None:
            if not self.disabled:
                self._symmpool.message(False, tensor, src, stream)

        def group_start(self) -> None:
            self._symmpool.begin_batch()

        def group_end(self) -> None:
            self._symmpool.end_batch()

        def register_comm_window(self, tensor: torch.Tensor) -> Any:
            raise _no_windows("register_comm_window", self.rank)

        def register_comm_window_raw(self, ptr: int, size: int) -> Any:
            raise _no_windows("register_comm_window_raw", self.rank)

        def deregister_comm_window(self, window: Any) -> Any:
            raise _no_windows("deregister_comm_window", self.rank)

        def suspend(self) -> None:
            """Says that the memory stays. NCCL's own does so where its library cannot give it back."""
            logger.warning(
                "symmpool: PyNcclCommunicator.suspend on rank %s: the memory of symmpool's communicators "
                "stays while the engine sleeps; set SYMMPOOL_ENGINES=off on every rank for NCCL's, which is "
                "given back",
                self.rank,
            )

        def resume(self) -> None:
            """Nothing to be restored."""

        def destroy(self) -> None:
            if self.available:
                self.available, self.disabled = False, True
                self._symmpool.close()

    PyNcclCommunicator.__module__ = base.__module__
    return PyNcclCommunicator


def _no_windows(call: str, rank: int) -> UnsupportedError:
    return UnsupportedError(
        f"symmpool: {call} on rank {rank}: this communicator is symmpool's and has no windows of NCCL; turn "
        "the engine's symmetric memory on before it makes its groups, or set SYMMPOOL_ENGINES=off on every "
        "rank"
    )


def _on(stream: torch.cuda.Stream | None) -> Any:
    """The stream as the current one, where it is one of a device."""
    if stream is None or not hasattr(stream, "cuda_stream"):
        return contextlib.nullcontext()
    import torch

    return torch.cuda.stream(stream)


def _current_stream(tensor: torch.Tensor) -> torch.cuda.Stream:
    import torch

    return torch.cuda.current_stream(tensor.device)


def _is_nccls(group: Any) -> bool:
    """Whether a communicator is NCCL's from the beginning: there is one rank, or the group is none of
    torch's. Other programs, which have no plug-ins, are in such groups."""
    dist = process_groups.distributed()
    if dist is None or not isinstance(group, dist.ProcessGroup):
        return True
    return dist.get_world_size(group) == 1


def _made(group: Any, device: Any) -> EngineCollectives | None:
    """Collectives of ours, or None where a rank cannot take part. Collective."""
    import torch

    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    made, why = None, None
    try:
        made = EngineCollectives(group, device)
    except Error as error:
        why = str(error)
    what = "the construction of a PyNcclCommunicator"
    refusals = agreement.agree(group, "nccl_communicator", why, 2 * _SECONDS, what)
    if not refusals:
        return made
    if made is not None:
        made.close()
    logger.warning(
        "symmpool does not serve what the engine asks of NCCL in %s, so NCCL does: %s",
        process_groups.description_of(group),
        agreement.reasons(refusals),
    )
    return None
