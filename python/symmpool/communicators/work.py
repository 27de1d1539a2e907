"""Work: what a collective with `async_op=True` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["DoneWork", "Work"]

# Adds to an error what is known of the call.
Explain = Callable[[Exception], None]
# Copies the results of a call to where they belong. It is a part of the call.
Finish = Callable[[], None]


def leave_as_it_is(error: Exception) -> None:
    """An `Explain` that adds nothing."""


class Work:
    """A collective under way, with the methods of torch.distributed's Work."""

    __slots__ = ("_results", "_future")

    def __init__(self, results: list[Any]):
        self._results = results
        self._future = None

    def wait(self, timeout: float | None = None) -> bool:
        """On the CPU, waits until the call is done, and raises what went wrong in it; at most
        `timeout` seconds (a number, or a timedelta), then TimeoutError. On CUDA, makes the current
        stream wait and returns at once; with a timeout, this thread waits too. True."""
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Whether it is done, well or not. Does not wait."""
        raise NotImplementedError

    def is_success(self) -> bool:
        """Whether it is done, and nothing went wrong."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What went wrong, as far as is known."""
        raise NotImplementedError

    def join(self) -> None:
        """Whatever this thread, or the current stream, does next comes after the call."""
        raise NotImplementedError

    @property
    def order(self) -> Any:
        """An object with `join` that keeps less than the work does, for calls that come behind it."""
        return self

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def result(self) -> list[Any]:
        """The tensors that hold results, once the call is done."""
        self.wait()
        return self._results

    def get_future(self) -> Any:
        """A torch.futures.Future of the tensors that hold results."""
        raise NotImplementedError


def seconds_or_none(timeout: Any) -> float | None:
    """A timeout in seconds. None stands for no limit, as does torch's timeout of 0."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if hasattr(timeout, "total_seconds") else float(timeout)
    return seconds if seconds > 0 else None


class DoneWork(Work):
    """A call that was done, or put on the current stream, before it returned."""

    __slots__ = ()

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> Exception | None:
        return None

    def join(self) -> None:
        pass

    def get_future(self) -> Any:
        if self._future is None:
            import torch

            devices = [each.device for each in self._results[:1] if each.is_cuda]
            self._future = torch.futures.Future(devices=devices or None)
            self._future.set_result(self._results)
        return self._future
