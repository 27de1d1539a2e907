"""Point-to-point calls of CUDA tensors, for the backend: what carries each.

Once a group has a communicator of ours, its sends and receives go through the communicator's memory
(`Communicator.send`, `Communicator.recv`): nothing has to be connected, loaded or allocated for them, so none
waits for kernels that are under way, and no host waits for another rank. What a rank begins before the
group's first collective goes by NCCL (`symmpool.torch_backend.nccl_p2p`), as making a communicator takes all
ranks and only two are there; such a channel stays NCCL's. At the first collective all ranks exchange which
channels those are, so that both ends of a channel use the same.

Each direction to each peer has a stream of its own, on which calls follow each other: ranks that all send
first do not wait for ever, nor do those that all receive first."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmpool._symmpool import Pool
from symmpool.collectives import layout
from symmpool.communicators.stream_work import SideStream
from symmpool.communicators.work import Prepared, reason_of
from symmpool.errors import Error, InvalidArgumentError, InvalidStateError
from symmpool.torch_backend.work import CopyingWork, TorchWork, is_asked, opaque

if TYPE_CHECKING:
    from symmpool._symmpool import Communicator
    from symmpool.groups.types import Timeout

__all__ = ["PointToPoint"]

# A channel: the rank that sends and the rank that receives.
Channel = tuple[int, int]


@opaque
class PointToPoint:
    """The point-to-point calls of one group. `fallback(channel, tensor)` begins a call that ours does not
    carry: it returns torch's Work, or raises where nothing carries it."""

    def __init__(self, rank: int, size: int, fallback: Callable[[Channel, torch.Tensor], dist.Work]):
        self._rank, self._size, self._fallback = rank, size, fallback
        # Held while it is decided what carries a channel, and so while the ranks agree on that.
        self._lock = threading.RLock()
        # Channels that NCCL carries, here or at another rank.
        self._nccl_channels: set[Channel] = set()
        # The communicator that carries all others, and its device's number.
        self._comm: Any = None
        self._device = -1
        # Adds to an error what is known of a call.
        self._explain: Any = None
        self._streams: dict[tuple[int, bool], SideStream] = {}
        self._to_self = _SelfChannel()

    def carries(self, tensors: list[torch.Tensor], peer: int) -> bool:
        """Whether such tensors are for `begin`; both ranks answer alike. Others go to the fallback backends,
        which refuse those that nobody takes."""
        return (
            len(tensors) == 1
            and tensors[0].device.type == "cuda"
            and tensors[0].layout is torch.strided
            and not tensors[0].is_quantized
            and 0 <= peer < self._size
        )

    def begin(self, tensor: torch.Tensor, peer: int, sends: bool) -> tuple[dist.Work, bool]:
        """Begins to send or to receive a tensor. Returns its Work, and whether ours carries it, at once."""
        if peer == self._rank:
            return self._to_self.begin(tensor, sends), True
        channel = (self._rank, peer) if sends else (peer, self._rank)
        number = tensor.device.index
        with self._lock:
            comm = self._comm if number == self._device and channel not in self._nccl_channels else None
            if comm is None:
                (place,), finish = layout.contiguous((tensor,), writes=not sends)
                begun = self._fallback(channel, place)
                self._nccl_channels.add(channel)
                return begun if finish is None else CopyingWork(begun, finish, [tensor]), False
            stream = self._streams.get((peer, sends))
            if stream is None:
                stream = self._streams[peer, sends] = SideStream(torch, number, self._explain)
        call, prepared = comm.send if sends else comm.recv, None
        if not layout.is_plain(tensor):
            # The other rank's call fails too, where it would wait or take the next message.
            message = (call.__name__, peer)
            try:
                prepare = layout.message(tensor, peer, sends)
            except BaseException as error:
                with contextlib.suppress(Error):
                    stream.submit(comm, comm._decline, (reason_of(error), message), [])
                raise
            prepared = Prepared(prepare, lambda why, **on: comm._decline(why, message, **on))
        return TorchWork(stream.submit(comm, call, (tensor, peer), [tensor], prepared)), True

    def use_communicator(
        self,
        exchange: Callable[[str], list[str]],
        comm: Communicator,
        device: int,
        explain: Callable[[TimeoutError], None],
    ) -> None:
        """A communicator carries calls from now on, but on channels that are NCCL's at any rank. `exchange`
        sends the other ranks which are so here ("0>1 2>0"), and returns what all ranks sent. Meanwhile no
        call is begun here."""
        with self._lock:
            here = " ".join(f"{source}>{target}" for source, target in sorted(self._nccl_channels))
            for channel in " ".join(exchange(here)).split():
                source, _, target = channel.partition(">")
                self._nccl_channels.add((int(source), int(target)))
            if self._comm is None:
                self._comm, self._device, self._explain = comm, device, explain

    def end(self, wait: bool) -> None:
        """Lets go of the communicator. With `wait`, what was begun comes to its end before, by an error
        if its other rank does not come."""
        with self._lock:
            comm, streams = self._comm, list(self._streams.values())
            self._comm, self._device = None, -1
            self._streams.clear()
        if wait and comm is not None:
            for stream in streams:
                # Errors of the calls were raised to those who made them.
                with contextlib.suppress(Error):
                    comm.synchronize(stream.handle)


@opaque
class _SelfChannel:
    """Messages of a rank to itself: sends and receives are paired in the order in which they were begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: collections.deque[tuple[_SelfWork, torch.Tensor, Any]] = collections.deque()
        self._waiting_send = False

    def begin(self, tensor: torch.Tensor, sends: bool) -> dist.Work:
        ready = torch.cuda.current_stream(tensor.device).record_event()
        begun = _SelfWork(tensor)
        with self._lock:
            if not self._waiting or self._waiting_send == sends:
                self._waiting_send = sends
                self._waiting.append((begun, tensor, ready))
                return begun
            other, partner, since = self._waiting[0]
            source, target = (tensor, partner) if sends else (partner, tensor)
            self._waiting.popleft()
            if source.numel() != target.numel() or source.dtype != target.dtype:
                error = InvalidArgumentError(
                    f"symmpool: this rank sends itself {source.numel()} elements of {source.dtype} and "
                    f"receives {target.numel()} of {target.dtype}; both must be the same"
                )
                other.fail(error)
                raise error
        stream = torch.cuda.Stream(tensor.device)
        with torch.cuda.stream(stream), torch.no_grad():
            stream.wait_event(ready)
            stream.wait_event(since)
            target.detach().copy_(source.detach().reshape(target.shape))
        for each in (source, target):
            Pool.record_stream(each, stream)
        done = stream.record_event()
        begun.meet(done)
        other.meet(done)
        return begun


@opaque
class _SelfWork(dist.Work):
    """Work of a send or a receive between a rank and itself."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__()
        self._tensor = tensor
        self._done: Any = None
        self._failed: Exception | None = None

    def fail(self, error: Exception) -> None:
        """The other end was begun, and does not fit."""
        self._failed = error

    def meet(self, done: torch.Event) -> None:
        """The other end was begun, and the data is there behind this event."""
        self._done = done

    def wait(self, timeout: Timeout = None) -> bool:
        if self._failed is not None:
            raise self._failed
        if self._done is None:
            raise InvalidStateError(
                "symmpool: a rank waits for what it sends to itself, or receives from itself, before it has "
                "begun both; the wait would never end. Begin both, then wait"
            )
        torch.cuda.current_stream(self._tensor.device).wait_event(self._done)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._failed is not None or (self._done is not None and self._done.query())

    def is_success(self) -> bool:
        return self._failed is None and self.is_completed()

    def exception(self) -> Any:
        return self._failed

    def result(self) -> list[torch.Tensor]:
        return [self._tensor]

    def get_future(self) -> torch.futures.Future:
        if is_asked(self):
            return torch.futures.Future()
        self.wait()
        future: torch.futures.Future = torch.futures.Future(devices=[self._tensor.device])
        future.set_result([self._tensor])
        return future
