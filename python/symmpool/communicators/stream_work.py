"""Calls with `async_op=True` on CUDA, which run on a stream of their own."""

from __future__ import annotations

import collections
import threading
import time
from typing import TYPE_CHECKING, Any

from symmpool._symmpool import Pool
from symmpool.communicators import forks
from symmpool.communicators.work import Explain, Prepared, Work, leave_as_it_is, seconds_or_none
from symmpool.errors import TimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import torch

    from symmpool._symmpool import Communicator, StreamPosition
    from symmpool.collectives.types import Tensor
    from symmpool.groups.types import Timeout

__all__ = ["SideStream", "StreamWork"]

# CU_STREAM_PER_THREAD: another stream in every thread.
_PER_THREAD = 2


class StreamWork(Work):
    """A call on a side stream. A call that is captured in a graph counts as completed: how often it runs,
    and when, is known to whoever launches the graph."""

    __slots__ = ("_comm", "_side", "_mark", "_held")

    def __init__(
        self,
        comm: Communicator,
        side: SideStream,
        mark: StreamPosition,
        results: list[Tensor],
        held: Held | None,
    ):
        """`held` is None for a captured call."""
        self._results = results
        self._future: Any = None
        self._comm, self._side, self._mark, self._held = comm, side, mark, held

    def wait(self, timeout: Timeout = None) -> bool:
        """Has the current stream wait for the call; with a `timeout` (seconds or a timedelta) the host waits
        too. Raises the communicator's failure, or TimeoutError."""
        self._mark.wait()
        held = self._held
        if held is not None and held.tensors is not None:
            self._side.let_go(held)
        # torch's usual timeout, of 0, is none.
        seconds = seconds_or_none(timeout) if timeout else None
        if seconds is not None and held is not None:
            end = time.monotonic() + seconds
            while not self._mark.query():
                if time.monotonic() > end:
                    raise TimeoutError(f"symmpool: a collective is not done after {timeout}")
                time.sleep(20e-6)
        failure = self.exception()
        if failure is not None:
            raise failure
        return True

    def is_completed(self) -> bool:
        """Whether the device is done with the call, or the communicator has failed. It never waits."""
        return self._held is None or self._mark.query() or self._comm.failure is not None

    def __del__(self) -> None:
        # Nobody may make another call or wait for one, so its tensors are let go of here too.
        if self._held is not None and self._held.tensors is not None:
            self._side.leave(self._held)

    def exception(self) -> Exception | None:
        """The communicator's failure, else None. It never waits."""
        failure = self._comm.failure
        if failure is not None:
            self._side.explain(failure)
        return failure

    def join(self) -> None:
        """Has the current stream wait for the call."""
        self._mark.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """torch's future of the results: who uses its value comes behind the call on the device."""
        if self._future is None:
            # A future records an event of the current stream when it is completed: here the side stream's,
            # so that whoever uses its value comes after the call.
            import torch

            stream = self._side.stream
            with torch.cuda.stream(stream):
                self._future = torch.futures.Future(devices=[stream.device])
                self._future.set_result(self._results)
        return self._future


class Held:
    """A call on a side stream: what later calls come behind, and its tensors, which are not to be given back
    to torch's allocator while it uses them."""

    __slots__ = ("_comm", "_side", "mark", "tensors", "stream")

    def __init__(self, comm: Communicator, side: int):
        self._comm, self._side = comm, side
        # Behind the call, once that is on the side stream.
        self.mark: Any = None
        self.tensors: tuple[Any, ...] | None = None
        self.stream = 0

    def join(self) -> None:
        """Orders later work of the current stream after the call; also after one that Ctrl-C has ended
        somewhere."""
        (self.mark or self._comm.mark(self._side)).wait()

    def ends_with(self, waited: None) -> bool:
        """Whether `join` has waited for all that was begun when this was the last."""
        return True


class SideStream:
    """A stream for calls with `async_op`, and the tensors that calls on it still use.

    A call's tensors are let go of when the stream that was current at the call waits for it, as whatever that
    stream gets from then on comes after the call; otherwise when the call is found to be done, at another
    call. When its Work goes they are left to torch's allocator, which waits for the side stream."""

    def __init__(self, torch: ModuleType, device: int, explain: Explain = leave_as_it_is):
        self._torch, self.device, self.explain = torch, device, explain
        self.stream = torch.cuda.Stream(device)
        self.handle = self.stream.cuda_stream
        self._capturing = torch.cuda.is_current_stream_capturing
        # An object for the current stream would cost as much as the rest of a small call's way through here.
        self._current = torch._C._cuda_getCurrentRawStream
        self._held: collections.deque[Held] = collections.deque()
        # The last call's, which a capture asks for.
        self._last: Any = None
        self._is_lost = False
        forks.renew_in_children(self)
        # Letting go of a tensor may let go of another call's Work, which drains as well.
        self._draining = threading.RLock()

    def forked(self) -> None:
        """In a forked child, which cannot use its parent's device: tensors stay as they are."""
        self._is_lost = True
        self._draining._at_fork_reinit()  # type: ignore[attr-defined]

    def announce(self, comm: Communicator) -> Held:
        """The next call, before it is made."""
        return Held(comm, self.handle)

    def submit(
        self,
        comm: Communicator,
        call: Callable[..., object],
        arguments: tuple[object, ...],
        results: list[Tensor],
        prepared: Prepared | None = None,
        held: Held | None = None,
    ) -> StreamWork:
        """Makes a call on this stream, behind what the current stream has been given so far. Returns its
        Work."""
        # Marks are used, as torch's streams and events cost the host more than the call itself.
        handle = self.handle
        capturing = self._capturing()
        if capturing and self._last is not None:
            # A capture cannot wait for the last call: if that is not done, this raises before anything is
            # captured.
            self._last.wait()
        held = held or self.announce(comm)
        held.stream = self._current(self.device)
        # The side stream reads the arguments, and writes to the results.
        tensors = arguments if prepared is None else (*arguments, *results)
        comm.follow(handle)
        try:
            if prepared is None:
                call(*arguments, stream=handle)
            else:
                # Copies are made behind earlier calls, which may write to what is copied. Their memory is of
                # the side stream, on which it is reused behind the call.
                with self._torch.cuda.stream(self.stream):
                    ready, finish = prepared(stream=handle)
                    call(*ready, stream=handle)
                    if finish is not None:
                        finish()
            held.mark = comm.mark(handle)
            if capturing:
                # An event of a captured call cannot be queried.
                self._leave_to_torch(tensors)
            else:
                held.tensors = tensors
                self._held.append(held)
        except BaseException:
            # The call may be on the stream, as where Ctrl-C comes right behind it.
            self._leave_to_torch(tensors)
            raise
        if capturing:
            return StreamWork(comm, self, held.mark, results, None)
        self.drain()
        self._last = held.mark
        return StreamWork(comm, self, held.mark, results, held)

    def _leave_to_torch(self, tensors: tuple[object, ...]) -> None:
        """Has torch's allocator not reuse the memory of tensors before the side stream has come this far."""
        for tensor in tensors:
            if isinstance(tensor, self._torch.Tensor):
                Pool.record_stream(tensor, self.stream)

    def leave(self, held: Held) -> None:
        """Lets go of the tensors of a call that nobody will wait for."""
        if self._is_lost:
            return
        self.drain()
        tensors, held.tensors = held.tensors, None
        if tensors is not None:
            self._leave_to_torch(tensors)

    def let_go(self, held: Held) -> None:
        """Lets go of the tensors of a call for which the current stream waits, if that was the current one at
        the call. Otherwise of those of completed calls."""
        if held.stream == self._current(self.device) != _PER_THREAD:
            held.tensors = None
        else:
            self.drain()

    def drain(self) -> None:
        """Lets go of the tensors of completed calls."""
        held = self._held
        with self._draining:
            while held and (held[0].tensors is None or held[0].mark.query()):
                # The call's Work may stay for long.
                held.popleft().tensors = None
