"""Point-to-point messages of CUDA tensors, for the backend: which way carries one.

Once a group has a communicator of ours, its messages go through that one's memory (`Communicator.send`,
`Communicator.recv`): nothing has to be connected, loaded or allocated for them, so none waits for kernels
that are under way, and no host for another rank. What a rank begins before the group's first collective
goes by NCCL (`symmpool.messages`), which has two ranks meet where only two come; such a channel stays
NCCL's. The first collective tells every rank which channels those are, so that both ends of one go the same
way.

Each direction to each peer has a stream of its own, on which messages follow each other: ranks that all send
first do not wait for ever, nor do those that all receive first.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from symmpool.collectives import layout
from symmpool.communicators import work
from symmpool.errors import Error, InvalidArgumentError, InvalidStateError
from symmpool.torch_backend.work import TorchWork, opaque

__all__ = ["PointToPoint"]

# A channel: the rank that sends and the rank that receives.
Channel = tuple[int, int]


@opaque
class PointToPoint:
    """The messages of one group. `fallback` begins one where ours does not: it takes the channel and the
    tensor, and gives torch's Work, or raises where nothing carries messages."""

    def __init__(self, rank: int, size: int, fallback: Any):
        self._rank, self._size, self._fallback = rank, size, fallback
        # Held while it is decided which way a channel goes, and so while the ranks agree on that.
        self._lock = threading.RLock()
        # Channels that are NCCL's, here or at another rank.
        self._elsewhere: set[Channel] = set()
        # The communicator that carries all others, and its device's number.
        self._comm: Any = None
        self._device = -1
        # Has its errors say more of a call.
        self._explain: Any = None
        self._sides: dict[tuple[int, bool], work.Side] = {}
        self._to_self = _ToSelf()

    def carries(self, tensors: list[torch.Tensor], peer: int) -> bool:
        """Whether messages of such tensors are for `begin`, which both ranks answer alike. What nothing
        would take the group's other backends refuse."""
        return (
            len(tensors) == 1
            and tensors[0].device.type == "cuda"
            and tensors[0].layout is torch.strided
            and not tensors[0].is_quantized
            and 0 <= peer < self._size
        )

    def begin(self, tensor: torch.Tensor, peer: int, sends: bool) -> tuple[Any, bool]:
        """Begins a message: its Work, and whether ours carries it. Returns at once."""
        if peer == self._rank:
            return self._to_self.begin(tensor, sends), True
        channel = (self._rank, peer) if sends else (peer, self._rank)
        number = tensor.device.index
        with self._lock:
            comm = self._comm if number == self._device and channel not in self._elsewhere else None
            if comm is None:
                begun = self._fallback(channel, tensor)
                self._elsewhere.add(channel)
                return begun, False
            side = self._sides.get((peer, sends))
            if side is None:
                side = self._sides[peer, sends] = work.Side(torch, number, self._explain)
        if sends:
            place, finish, call = layout.plain(tensor), None, comm.send
        else:
            (place, finish), call = layout.place(tensor), comm.recv
        return TorchWork(side.submit(comm, call, (place, peer), [tensor], finish)), True

    def decide(self, ask: Callable[[str], list[str]], comm: Any, device: int, explain: Any) -> None:
        """A communicator carries messages from now on, but on channels that are NCCL's at any rank: `ask`
        tells the others which are so here ("0>1 2>0"), and gives what all told. Meanwhile no message is
        begun here."""
        with self._lock:
            here = " ".join(f"{source}>{target}" for source, target in sorted(self._elsewhere))
            for channel in " ".join(ask(here)).split():
                source, _, target = channel.partition(">")
                self._elsewhere.add((int(source), int(target)))
            if self._comm is None:
                self._comm, self._device, self._explain = comm, device, explain

    def end(self, wait: bool) -> None:
        """Lets go of the communicator. With `wait`, what was begun comes to its end before, by an error
        if its other rank does not come."""
        with self._lock:
            comm, sides = self._comm, list(self._sides.values())
            self._comm, self._device = None, -1
            self._sides.clear()
        if wait and comm is not None:
            for side in sides:
                # What went wrong was told to those who made the calls.
                with contextlib.suppress(Error):
                    comm.synchronize(side.handle)


@opaque
class _ToSelf:
    """Messages of a rank to itself: a send meets a receive in the order in which they were begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: collections.deque[tuple[_SelfWork, torch.Tensor, Any]] = collections.deque()
        self._waiting_send = False

    def begin(self, tensor: torch.Tensor, sends: bool) -> Any:
        ready = torch.cuda.current_stream(tensor.device).record_event()
        begun = _SelfWork(tensor)
        with self._lock:
            if not self._waiting or self._waiting_send == sends:
                self._waiting_send = sends
                self._waiting.append((begun, tensor, ready))
                return begun
            other, partner, since = self._waiting[0]
            source, target = (tensor, partner) if sends else (partner, tensor)
            if source.numel() != target.numel() or source.dtype != target.dtype:
                raise InvalidArgumentError(
                    f"symmpool: a message to oneself of {source.numel()} elements of {source.dtype} meets a "
                    f"receive of {target.numel()} of {target.dtype}; both ends are to name the same"
                )
            self._waiting.popleft()
        stream = torch.cuda.Stream(tensor.device)
        with torch.cuda.stream(stream), torch.no_grad():
            stream.wait_event(ready)
            stream.wait_event(since)
            target.detach().copy_(source.detach().reshape(target.shape))
        for each in (source, target):
            each.record_stream(stream)
        done = stream.record_event()
        begun.meet(done)
        other.meet(done)
        return begun


@opaque
class _SelfWork(dist.Work):
    """Work of one end of a message to oneself."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__()
        self._tensor = tensor
        self._done: Any = None

    def meet(self, done: Any) -> None:
        """The other end was begun, and the message is there behind this event."""
        self._done = done

    def wait(self, timeout: Any = None) -> bool:
        if self._done is None:
            raise InvalidStateError(
                "symmpool: a message to oneself is waited for before its other end was begun, which would "
                "take for ever; begin both, then wait"
            )
        torch.cuda.current_stream(self._tensor.device).wait_event(self._done)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done is not None and self._done.query()

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> Any:
        return None

    def result(self) -> list[torch.Tensor]:
        return [self._tensor]

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future = torch.futures.Future(devices=[self._tensor.device])
        future.set_result([self._tensor])
        return future
