"""Calls with `async_op=True` on CUDA, which run on a stream of their own."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any

from symmpool.communicators.work import Explain, Finish, Work, leave_as_it_is, seconds_or_none
from symmpool.errors import TimeoutError

__all__ = ["SideStream", "StreamWork"]


class StreamWork(Work):
    """A call on a side stream. A call that is captured in a graph counts as completed: how often it runs,
    and when, is known to whoever launches the graph."""

    __slots__ = ("_comm", "_stream", "_mark", "_explain", "_drain", "_captured")

    def __init__(
        self,
        comm: Any,
        stream: Any,
        mark: Any,
        results: list[Any],
        explain: Explain,
        drain: Callable[[], None],
        captured: bool = False,
    ):
        self._results, self._future = results, None
        self._captured = captured
        self._comm, self._stream, self._mark, self._explain = comm, stream, mark, explain
        self._drain = drain

    def wait(self, timeout: Any = None) -> bool:
        self.join()
        seconds = seconds_or_none(timeout)
        self._drain()
        if seconds is not None and not self._captured:
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
        return self._captured or self._mark.query() or self._comm.failure is not None

    def __del__(self) -> None:
        # Nobody may make another call or wait for one, so tensors of completed calls are let go of here too.
        self._drain()

    def exception(self) -> Exception | None:
        failure = self._comm.failure
        if failure is not None:
            self._explain(failure)
        return failure

    def join(self) -> None:
        self._mark.wait()

    def get_future(self) -> Any:
        if self._future is None:
            # A future records an event of the current stream when it is completed: here the side stream's,
            # so that whoever uses its value comes after the call.
            import torch

            with torch.cuda.stream(self._stream):
                self._future = torch.futures.Future(devices=[self._stream.device])
                self._future.set_result(self._results)
        return self._future


class SideStream:
    """A stream for calls with `async_op`, and the tensors that calls on it still use."""

    def __init__(self, torch: Any, device: int, explain: Explain = leave_as_it_is):
        self._torch, self._explain = torch, explain
        self._stream = torch.cuda.Stream(device)
        self.handle = self._stream.cuda_stream
        self._capturing = torch.cuda.is_current_stream_capturing
        self._kept: collections.deque[Any] = collections.deque()
        # Letting go of a tensor may let go of another call's Work, which drains as well.
        self._draining = threading.RLock()

    def submit(
        self,
        comm: Any,
        call: Any,
        arguments: tuple[Any, ...],
        results: list[Any],
        finish: Finish | None = None,
    ) -> StreamWork:
        # Marks are used, as torch's streams and events cost the host more than the call itself.
        handle, kept = self.handle, self._kept
        capturing = self._capturing()
        if capturing:
            with self._draining:
                last = kept[-1][0] if kept else None
            if last is not None:
                # A capture cannot wait for the last call: if that is not done, this raises before anything
                # is captured.
                last.wait()
        comm.follow(handle)
        call(*arguments, stream=handle)
        if finish is not None:
            with self._torch.cuda.stream(self._stream):
                finish()
            # `finish` writes to the results on the side stream.
            arguments = (*arguments, *results)
        mark = comm.mark(handle)
        # The memory of a tensor that the program lets go of is not reused before the call is done.
        if capturing:
            # An event of a captured call cannot be queried, so torch's allocator is to wait for the stream.
            for tensor in arguments:
                if isinstance(tensor, self._torch.Tensor):
                    tensor.record_stream(self._stream)
        else:
            self._drain()
            kept.append((mark, arguments))
        return StreamWork(comm, self._stream, mark, results, self._explain, self._drain, capturing)

    def _drain(self) -> None:
        """Lets go of the tensors of completed calls."""
        kept = self._kept
        with self._draining:
            while kept and kept[0][0].query():
                kept.popleft()
