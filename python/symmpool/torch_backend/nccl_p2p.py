"""Point-to-point calls that NCCL carries: a channel of two ranks for each direction.

On CUDA torch puts what two ranks send each other on one stream, where a send waits for its receive, and
connects to the other rank in the first call. A batch of both goes at once (`batch_isend_irecv`), but only in
groups of torch's own class. In ours, ranks that all send first would wait for ever, first for NCCL to
connect, then on the device. So each direction has a stream of its own, and a thread connects a channel: calls
that come before that wait in a queue, and the program goes on to what the other rank may be waiting for.

The thread asks a store whether the other rank is here before it calls NCCL, which would wait without a
bound, and in C++: what comes back from there when the program has ended ends the process.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import functools
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmpool.communicators.work import reason_of
from symmpool.errors import InvalidStateError, TimeoutError
from symmpool.groups.process_groups import seconds_of
from symmpool.torch_backend.work import TorchWork, is_asked, opaque

if TYPE_CHECKING:
    import torch.distributed

    from symmpool.groups.types import Timeout

__all__ = ["NcclChannels"]

# Sends or receives in the group of the two ranks: rank 0 of it sends, rank 1 receives.
Call = Callable[[Any, list[torch.Tensor]], Any]
# How long a rank pauses before it asks again whether the other is here, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 1e-4, 50e-3


def _alone(group: torch.distributed.ProcessGroup, tensors: list[torch.Tensor], call: Call) -> Any:
    """Makes a call as a batch of its own, where the backend has batches: outside of one, NCCL uses another
    communicator and warns."""
    device = tensors[0].device
    if not group._get_backend(device).supports_coalescing:
        return call(group, tensors)
    group._start_coalescing(device)
    try:
        call(group, tensors)
    finally:
        work = group._end_coalescing(device)
    return _BatchWork(work, tensors)


@opaque
class _BatchWork(TorchWork):
    """Work of a batch of one call. NCCL's Work of a batch has no results, and reads invalid memory where it
    is asked for them."""

    def __init__(self, work: dist.Work, tensors: list[torch.Tensor]):
        super().__init__(work)
        self._tensors = tensors

    def wait(self, timeout: Timeout = None) -> bool:
        # torch's own takes no None.
        return self._work.wait() if timeout is None else self._work.wait(timeout)

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future:
        if is_asked(self):
            return torch.futures.Future()
        tensors = self._tensors
        return self._work.get_future().then(lambda _: tensors)


@opaque
class _FirstWork(dist.Work):
    """Work of a call that waits for its channel. `result` and `get_future` wait until it is begun."""

    def __init__(self, name: str, begun: concurrent.futures.Future[Any]):
        super().__init__()
        self._name, self._begun = name, begun

    def wait(self, timeout: Timeout = None) -> bool:
        # The call's own error may be a timeout too, so the future's TimeoutError would not tell them apart.
        if seconds_of(timeout) is not None:
            done, _ = concurrent.futures.wait([self._begun], seconds_of(timeout))
            if not done:
                raise TimeoutError(f"symmpool: {self._name}: the other rank has not come to it")
        work = self._begun.result()
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
        # torch shows Python no exception of a call that has begun.
        return self._begun.exception()

    def result(self) -> list[torch.Tensor]:
        return self._begun.result().result()

    def get_future(self) -> torch.futures.Future:
        if is_asked(self):
            return torch.futures.Future()
        return self._begun.result().get_future()


class _QueuedCall:
    """A call that waits for its channel."""

    def __init__(self, tensors: list[torch.Tensor], call: Call):
        self.tensors, self.call = tensors, call
        self.begun: concurrent.futures.Future[Any] = concurrent.futures.Future()
        device = tensors[0].device
        cuda = device.type == "cuda"
        self._ready = torch.cuda.current_stream(device).record_event() if cuda else None

    def begin(self, group: torch.distributed.ProcessGroup) -> dist.Work:
        """Begins the call behind what its program had put on the stream."""
        device = self.tensors[0].device
        with contextlib.ExitStack() as stack:
            if self._ready is not None:
                stack.enter_context(torch.cuda.device(device))
                # torch has 32 streams of each priority and gives them out in turn. One of high priority is no
                # stream of a channel, behind whose calls it would come.
                stream = torch.cuda.Stream(device, priority=-1)
                stack.enter_context(torch.cuda.stream(stream))
                stream.wait_event(self._ready)
            return _alone(group, self.tensors, self.call)


class _Channel:
    """Carries calls from one rank to another, in the order in which they are begun."""

    def __init__(self, name: str, connect: Callable[[Callable[..., None]], torch.distributed.ProcessGroup]):
        self._name, self._connect = name, connect
        self._lock = threading.Lock()
        # Held where a call is begun: two threads cannot make batches at once.
        self._turn = threading.Lock()
        self._waiting: collections.deque[_QueuedCall] = collections.deque()
        self._thread: threading.Thread | None = None
        self._group: Any = None
        self._open = False
        self._failed: BaseException | None = None
        self._ended = threading.Event()

    def begin(self, tensors: list[torch.Tensor], call: Call) -> dist.Work:
        with self._lock:
            if self._failed is not None:
                raise InvalidStateError(
                    f"symmpool: {self._name}: {reason_of(self._failed)}"
                ) from self._failed
            if not self._open:
                return self._queue(tensors, call)
        with self._turn:
            return _alone(self._group, tensors, call)

    def _queue(self, tensors: list[torch.Tensor], call: Call) -> dist.Work:
        if tensors[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidStateError(
                f"symmpool: {self._name}: the first send or receive between two ranks cannot be captured in "
                "a graph; make one before, and wait for it"
            )
        queued = _QueuedCall(tensors, call)
        if self._thread is None:
            _end_all_at_exit()
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            # Where there can be no more threads, nothing is queued.
            thread.start()
            self._thread = thread
            _opening.add(self)
        self._waiting.append(queued)
        return _FirstWork(self._name, queued.begun)

    def _serve(self) -> None:
        """Connects to the other rank, and begins the calls that wait. Later calls need no thread."""
        while True:
            with self._lock:
                if self._failed is not None or not self._waiting:
                    self._open, self._thread = self._failed is None, None
                    _opening.discard(self)
                    return
                queued = self._waiting[0]
            begun, error = self._begun(queued)
            with self._lock:
                if not self._waiting:
                    # The channel has ended meanwhile, and all queued calls have failed.
                    continue
                self._waiting.popleft()
            if error is None:
                queued.begun.set_result(begun)
                continue
            # The error is kept; its frames would keep the group.
            traceback.clear_frames(error.__traceback__)
            queued.begun.set_exception(error)
            # Where this call alone was at fault, another may succeed.
            if self._group is None or isinstance(error, dist.DistError):
                self.fail(error)

    def _begun(self, queued: _QueuedCall) -> tuple[Any, BaseException | None]:
        try:
            if self._group is None:
                group = self._connect(self._meet)
                if self._failed is not None:
                    raise self._failed
                self._group = group
            return queued.begin(self._group), None
        except BaseException as error:
            return None, error

    def _meet(self, store: torch.distributed.Store, rank: int, seconds: float) -> None:
        """Waits until the other of the two ranks is here, too. It asks the store again and again, as a rank
        that waits in the store itself keeps its connection from all other uses."""
        own, other = f"here/{rank}", f"here/{1 - rank}"
        store.set(own, "")
        end, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while not store.check([other]):
            ended = self._ended.wait(pause)
            if not ended and time.monotonic() < end:
                pause = min(1.5 * pause, _LONGEST_PAUSE)
                continue
            # A rank that comes later then waits for another try. One that has seen the key is here already.
            store.delete_key(own)
            if ended:
                raise InvalidStateError(f"symmpool: {self._name}: the group has ended")
            if not store.check([other]):
                raise TimeoutError(
                    f"symmpool: {self._name}: the other rank did not come to it in {seconds:.1f} s"
                )
            store.set(own, "")

    def fail(self, error: BaseException) -> None:
        """Queued and later calls fail with this error."""
        with self._lock:
            self._failed = self._failed or error
            left, self._waiting = self._waiting, collections.deque()
        for queued in left:
            queued.begun.set_exception(error)

    def end(self) -> None:
        """Fails the queued calls at the end of the group: nobody waits for the other rank any more."""
        self.fail(InvalidStateError("the group has ended"))
        self._ended.set()

    def settle(self, seconds: float) -> None:
        """Waits until the queued calls were begun, or failed."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def group(self) -> torch.distributed.ProcessGroup | None:
        """The group of the two ranks, once they are connected."""
        return self._group


# Channels that have a thread. A forked child has none of the threads, but may have a lock that one held.
_opening: weakref.WeakSet[_Channel] = weakref.WeakSet()
os.register_at_fork(after_in_child=_opening.clear)


@functools.cache
def _end_all_at_exit() -> None:
    """Called with the first thread: functions that are registered last run first."""
    atexit.register(_end_all)


def _end_all() -> None:
    """A thread that comes back to a finished interpreter is ended where it is, in the middle of torch's code,
    which aborts the process."""
    channels, end = list(_opening), time.monotonic() + 2
    for channel in channels:
        channel.end()
    for channel in channels:
        channel.settle(max(0.0, end - time.monotonic()))


class NcclChannels:
    """The channels of one group, which open as they are needed.

    `connect(sender, receiver, meet)` returns the group of these two ranks. `meet(store, number, seconds)`
    waits for the other of the two in a store; `number` is 0 on the rank that sends, 1 on the one that
    receives."""

    def __init__(self, connect: Callable[[int, int, Callable[..., None]], torch.distributed.ProcessGroup]):
        self._connect = connect
        self._lock = threading.Lock()
        self._channels: dict[tuple[int, int], _Channel] = {}

    def begin(self, source: int, target: int, tensors: list[torch.Tensor], call: Call) -> dist.Work:
        """Begins a call. Returns Work whose `wait` does as that of NCCL's; while the channel is being
        connected, it also blocks the host until the other rank comes to it."""
        with self._lock:
            channel = self._channels.get((source, target))
            if channel is None:
                name = f"sends from rank {source} to rank {target}"
                channel = _Channel(name, functools.partial(self._connect, source, target))
                self._channels[source, target] = channel
        return channel.begin(tensors, call)

    def _in_order(self) -> list[_Channel]:
        """The channels in one order for all ranks: the ends of channels may wait for each other."""
        with self._lock:
            return [self._channels[key] for key in sorted(self._channels)]

    def groups(self) -> list[torch.distributed.ProcessGroup]:
        """The groups of the channels that are connected."""
        groups = [channel.group() for channel in self._in_order()]
        return [group for group in groups if group is not None]

    def shutdown(self, seconds: float) -> None:
        """Waits for what was begun, `seconds` at most, and ends the channels."""
        end = time.monotonic() + seconds
        for channel in self._in_order():
            channel.settle(max(0.0, end - time.monotonic()))
        self._end("shutdown")

    def abort(self) -> None:
        """Ends all channels without waiting for anything."""
        self._end("abort")

    def _end(self, how: str) -> None:
        for channel in self._in_order():
            channel.end()
        for group in self.groups():
            getattr(group, how)()
