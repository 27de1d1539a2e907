"""Messages between two ranks that NCCL carries: a channel of two ranks for each direction.

On CUDA torch puts what two ranks send each other on one stream, where a send waits for its receive, and
meets the other rank in the first call. A batch of both goes at once (`batch_isend_irecv`), but only in
groups of torch's own class. In ours, ranks that all send first would wait for ever, for NCCL to meet and
then on the device. So each direction has a stream of its own, and a channel is met in a thread: messages
that come before wait in line, and the program goes on to what the other rank may be waiting for.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from symmpool.errors import InvalidStateError, TimeoutError  # noqa: A004
from symmpool.groups import seconds_of
from symmpool.torch_work import opaque

__all__ = ["Messages"]

# What sends or receives, in a group of the two ranks: of numbers 0, which sends, and 1.
Call = Callable[[Any], Any]


def _alone(group: Any, device: torch.device, call: Call) -> Any:
    """Makes a call as a batch of its own where there are batches: NCCL has another communicator for what
    comes in none, and warns."""
    if not group._get_backend(device).supports_coalescing:
        return call(group)
    group._start_coalescing(device)
    try:
        call(group)
    finally:
        work = group._end_coalescing(device)
    return work


@opaque
class _FirstWork(dist.Work):
    """Work of a message that waits for its channel. Questions of its result wait until it is begun."""

    def __init__(self, name: str, begun: concurrent.futures.Future[Any]):
        super().__init__()
        self._name, self._begun = name, begun

    def wait(self, timeout: Any = None) -> bool:
        try:
            work = self._begun.result(seconds_of(timeout))
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"symmpool: {self._name}: the other rank has not come to it") from None
        return work.wait() if timeout is None else work.wait(timeout)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._begun.done():
            return False
        return self._begun.exception() is not None or self._begun.result().is_completed()

    def is_success(self) -> bool:
        begun = self._begun.done() and self._begun.exception() is None
        return begun and self._begun.result().is_success()

    def exception(self) -> Any:
        return self._begun.exception()

    def result(self) -> list[torch.Tensor]:
        return self._begun.result().result()

    def get_future(self) -> torch.futures.Future:
        return self._begun.result().get_future()


class _Message:
    """A message in line."""

    def __init__(self, device: torch.device, call: Call):
        self.device, self.call = device, call
        self.begun: concurrent.futures.Future[Any] = concurrent.futures.Future()
        cuda = device.type == "cuda"
        self._ready = torch.cuda.current_stream(device).record_event() if cuda else None

    def begin(self, group: Any) -> Any:
        """Begins it behind what its program had put on the stream."""
        with contextlib.ExitStack() as stack:
            if self._ready is not None:
                stack.enter_context(torch.cuda.device(self.device))
                stream = torch.cuda.Stream(self.device)
                stack.enter_context(torch.cuda.stream(stream))
                stream.wait_event(self._ready)
            return _alone(group, self.device, self.call)


class _Channel:
    """What carries messages from one rank to another, in the order in which they are begun."""

    def __init__(self, name: str, connect: Callable[[], Any]):
        self._name, self._connect = name, connect
        self._lock = threading.Lock()
        self._line: collections.deque[_Message] = collections.deque()
        self._thread: threading.Thread | None = None
        self._group: Any = None
        self._open = False
        self._failed: BaseException | None = None

    def begin(self, device: torch.device, call: Call) -> Any:
        with self._lock:
            if self._failed is not None:
                raise InvalidStateError(f"symmpool: {self._name}: {self._failed}") from self._failed
            if not self._open:
                return self._queue(device, call)
        return _alone(self._group, device, call)

    def _queue(self, device: torch.device, call: Call) -> Any:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidStateError(
                f"symmpool: {self._name}: the first message between two ranks cannot be captured in a "
                f"graph; send one before, and wait for it"
            )
        message = _Message(device, call)
        self._line.append(message)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        return _FirstWork(self._name, message.begun)

    def _serve(self) -> None:
        """Meets the other rank, and begins what is in line. What comes later needs no thread."""
        while True:
            with self._lock:
                if self._failed is not None or not self._line:
                    self._open, self._thread = self._failed is None, None
                    return
                message = self._line[0]
            try:
                if self._group is None:
                    self._group = self._connect()
                begun, error = message.begin(self._group), None
            except BaseException as found:  # noqa: BLE001
                begun, error = None, found
            with self._lock:
                if not self._line:
                    # Ended meanwhile, and all in line were told.
                    continue
                self._line.popleft()
            if error is None:
                message.begun.set_result(begun)
                continue
            message.begun.set_exception(error)
            # Another message may be all right where this one was at fault.
            if self._group is None or isinstance(error, dist.DistError):
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """What is in line and what comes later fails so."""
        with self._lock:
            self._failed = self._failed or error
            left, self._line = self._line, collections.deque()
        for message in left:
            message.begun.set_exception(error)

    def settle(self, seconds: float) -> None:
        """Waits until what is in line was begun, or failed."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def group(self) -> Any:
        """What carries the messages, once the other rank was met."""
        return self._group


class Messages:
    """The channels of one group, which open as they are needed.

    `connect`, called with a sender and a receiver, gives the group of these two, or waits there."""

    def __init__(self, connect: Callable[[int, int], Any]):
        self._connect = connect
        self._lock = threading.Lock()
        self._channels: dict[tuple[int, int], _Channel] = {}

    def begin(self, source: int, target: int, device: torch.device, call: Call) -> Any:
        """Begins a message. Work that waits as that of NCCL does; where a channel opens, also on the
        host, until the other rank comes to it."""
        with self._lock:
            channel = self._channels.get((source, target))
            if channel is None:
                name = f"message from rank {source} to rank {target}"
                channel = _Channel(name, lambda: self._connect(source, target))
                self._channels[source, target] = channel
        return channel.begin(device, call)

    def _in_order(self) -> list[_Channel]:
        """One order for all ranks: ends of channels may wait for each other."""
        with self._lock:
            return [self._channels[key] for key in sorted(self._channels)]

    def groups(self) -> list[Any]:
        """What carries messages now."""
        groups = [channel.group() for channel in self._in_order()]
        return [group for group in groups if group is not None]

    def shutdown(self, seconds: float) -> None:
        """Waits for what was begun, `seconds` at most, and ends the channels."""
        end = time.monotonic() + seconds
        for channel in self._in_order():
            channel.settle(max(0.0, end - time.monotonic()))
        self._end("shutdown")

    def abort(self) -> None:
        """As `shutdown`, without waiting for anything."""
        self._end("abort")

    def _end(self, how: str) -> None:
        for channel in self._in_order():
            channel.fail(InvalidStateError("the group has ended"))
        for group in self.groups():
            getattr(group, how)()
