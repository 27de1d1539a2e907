"""Work: what a collective with `async_op=True` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from symmpool.errors import Error, InvalidArgumentError

if TYPE_CHECKING:
    import torch

    from symmpool.collectives.types import Tensor
    from symmpool.groups.types import Timeout

__all__ = ["DoneWork", "Prepared", "Work", "reason_of"]

# Adds to an error what is known of the call.
Explain = Callable[[Exception], None]
# Arguments of a call, and what copies its results to where they belong, or None.
PreparedCall = tuple[tuple[Any, ...], Callable[[], None] | None]
# Preparation of a call.
Prepare = Callable[[], PreparedCall]


class Prepared:
    """The preparation of a call, for whoever makes the call when its turn has come. What goes wrong in it is
    reported to the other ranks by `decline`, which is given the reason, and raised."""

    __slots__ = ("_prepare", "_decline")

    def __init__(self, prepare: Prepare, decline: Callable[..., object]):
        self._prepare, self._decline = prepare, decline

    def __call__(self, **stream: int) -> PreparedCall:
        """The arguments of the call, and what copies its results to where they belong, or None. `stream` is
        where the call is made, as it is passed to a communicator's methods."""
        try:
            return self._prepare()
        except BaseException as why:
            with contextlib.suppress(InvalidArgumentError, TypeError):
                self._decline(reason_of(why), **stream)
            raise


def reason_of(error: BaseException) -> str:
    """Returns the text that other ranks are told of an error of this one's. Errors of ours speak for
    themselves."""
    if isinstance(error, (Error, TypeError)) and str(error):
        return str(error).removeprefix("symmpool: ")
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else name


def leave_as_it_is(error: Exception) -> None:
    """An `Explain` that adds nothing."""


class Work:
    """A collective under way, with the methods of torch.distributed's Work."""

    __slots__ = ("_results", "_future")

    def __init__(self, results: list[Tensor]):
        self._results = results
        self._future: Any = None

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
        """Returns the error of the call, as far as one is known."""
        raise NotImplementedError

    def join(self) -> None:
        """Whatever this thread, or the current stream, does next comes after the call."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Waits like `wait`."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that hold results, once the call is done."""
        self.wait()
        return self._results

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A torch.futures.Future of the tensors that hold results."""
        raise NotImplementedError


def seconds_or_none(timeout: Timeout) -> float | None:
    """A timeout in seconds. None stands for no limit, as does torch's timeout of 0."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if hasattr(timeout, "total_seconds") else float(timeout)
    return seconds if seconds > 0 else None


class DoneWork(Work):
    """A call that was done, or put on the current stream, before it returned."""

    __slots__ = ()

    def wait(self, timeout: Timeout = None) -> bool:
        """Returns True at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def exception(self) -> Exception | None:
        """None."""
        return None

    def join(self) -> None:
        """Returns at once."""

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """torch's future of the results, which is completed."""
        if self._future is None:
            import torch

            # Who has torch's futures has its tensors.
            devices: list[Any] = [each.device for each in self._results[:1] if each.is_cuda]  # type: ignore[union-attr]
            self._future = torch.futures.Future(devices=devices or None)
            self._future.set_result(self._results)
        return self._future
