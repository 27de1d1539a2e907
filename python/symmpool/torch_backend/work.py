"""Work of torch's class, for callers that are C++, which the compiler does not trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from symmpool.communicators import torch_state
from symmpool.errors import TimeoutError
from symmpool.torch_backend.futures import for_caller

if TYPE_CHECKING:
    from symmpool.communicators.work import Work
    from symmpool.groups.types import Timeout
    from symmpool.torch_backend.mailbox import PendingMessage

__all__ = [
    "DONE",
    "BarrierWork",
    "CopyingWork",
    "DoneTorchWork",
    "PassedWork",
    "RegisteredTorchWork",
    "TorchWork",
    "asked_through",
    "is_asked",
    "is_let_go",
    "joined",
    "note_registered",
    "opaque",
    "register",
    "registers",
    "unregister",
]

# Whether torch's `wait_tensor` is to find the Work of collectives of eager code, which may be under way where
# compiled code begins: `allow_inflight_collective_as_graph_input_ctx`. Older versions have no such thing.
registers = getattr(c10d, "_allow_inflight_collective_as_graph_input", lambda: False)
# Work that torch has registered. Torch keeps its C++ half alone.
_registered: set[Any] = set()


class _Asked(threading.local):
    """Work of ours that was asked for its future in this thread, while that is how it is found."""

    works: list[Any] | None = None


_asked = _Asked()


def is_asked(work: dist.Work) -> bool:
    """Whether `asked_through` looks for Work, which needs no future then."""
    if _asked.works is None:
        return False
    _asked.works.append(work)
    return True


def asked_through(work: dist.Work, get_future: Callable[[Any], Any]) -> Any:
    """The Work of ours that torch's Work stands for; None for another backend's. What torch makes of Work of
    a backend in Python passes on `wait` and `get_future` alone, of which this is given torch's own."""
    asked: list[Any] = []
    _asked.works = asked
    try:
        get_future(work)
    except Exception:
        # Other backends' Work need not have a future.
        return None
    finally:
        _asked.works = None
    return asked[0] if asked else None


class _Popped(threading.local):
    """Work that torch lets go of in this thread, while it is not to wait for it."""

    works: list[Any] | None = None


_popped = _Popped()


def opaque(owner: Any) -> Any:
    """A class whose methods the compiler calls as they are: see `torch_state.opaque`. The compiler would take
    their frames for programs to trace, even where a program calls them that is not compiled itself."""
    for method in [each for each in vars(owner).values() if hasattr(each, "__code__")]:
        torch_state.opaque(method)
    return owner


@opaque
class TorchWork(dist.Work):
    """Work of ours, for callers that are C++."""

    def __init__(self, work: Work | dist.Work | PendingMessage):
        super().__init__()
        self._work: Any = work

    def wait(self, timeout: Timeout = None) -> bool:
        """Waits as the Work that it stands for. Tensors that torch would wait for are waited for no more."""
        if is_let_go(self):
            return True
        if self not in _registered:
            return self._work.wait(timeout)
        try:
            return self._work.wait(timeout)
        finally:
            unregister(self, self._work._results)

    def synchronize(self) -> None:
        """Waits like `wait()`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call is over. It never waits."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether the call is over and did not fail. It never waits."""
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        """The call's error, else None. It never waits."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """The tensors that the call writes."""
        return self._work.result()

    def get_future(self) -> torch.futures.Future:
        """torch's future of the results."""
        if is_asked(self):
            return torch.futures.Future()
        return for_caller(self._work.get_future(), self._work, getattr(self._work, "_results", []))


@opaque
class BarrierWork(TorchWork):
    """Work of a barrier. Whoever waits for it waits on the host, as for NCCL's: all ranks have come then."""

    def __init__(self, work: Work, synchronize: Callable[[], None]):
        super().__init__(work)
        self._synchronize = synchronize

    def wait(self, timeout: Timeout = None) -> bool:
        """Waits for the barrier; the host waits for the device too, as with NCCL's."""
        done = super().wait(timeout)
        self._synchronize()
        return done


def register(work: TorchWork, tensors: Iterable[torch.Tensor]) -> None:
    """Has torch's `wait_tensor` wait for Work, where torch's own backends have it do so for theirs."""
    if registers():
        _registered.add(work)
        for tensor in tensors:
            c10d._register_work(tensor, work)


def note_registered(work: dist.Work) -> None:
    """Notes Work that torch registers itself: that of a backend which it calls."""
    if registers():
        _registered.add(work)


def is_let_go(work: dist.Work) -> bool:
    """Whether torch lets go of Work, and is not to wait for it."""
    if _popped.works is None:
        return False
    _popped.works.append(work)
    return True


def unregister(work: dist.Work, tensors: Iterable[torch.Tensor]) -> None:
    """Takes back what `register` did, once the Work was waited for. Torch has a way only for all Work of a
    tensor, so that of later calls is registered again."""
    if work not in _registered:
        return
    _registered.discard(work)
    for tensor in tensors:
        popped: list[Any] = []
        _popped.works = popped
        try:
            with torch.no_grad():
                torch.ops._c10d_functional.wait_tensor(tensor)
        finally:
            _popped.works = None
        for other in dict.fromkeys(popped):
            if other is not work:
                c10d._register_work(tensor, other)


@opaque
class DoneTorchWork(dist.Work):
    """Work that was done, or put on the current stream, before the call returned."""

    def __init__(self, results: list[torch.Tensor], device: torch.device):
        super().__init__()
        self._results, self._device = results, device

    def wait(self, timeout: Timeout = None) -> bool:
        """Returns True at once."""
        return True

    def synchronize(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def exception(self) -> BaseException | None:
        """None."""
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that the call has written."""
        return self._results

    def get_future(self) -> torch.futures.Future:
        """torch's future of the results, which is completed."""
        if is_asked(self):
            return torch.futures.Future()
        devices: list[Any] | None = [self._device] if self._device.type == "cuda" else None
        future: torch.futures.Future = torch.futures.Future(devices=devices)
        future.set_result(self._results)
        return for_caller(future, self, self._results)


@opaque
class RegisteredTorchWork(DoneTorchWork):
    """`DoneTorchWork` that torch has registered. (That of a barrier stays so: its tensor is torch's own.)"""

    def wait(self, timeout: Timeout = None) -> bool:
        """Returns True at once. Tensors that torch would wait for are waited for no more."""
        if not is_let_go(self):
            unregister(self, self._results)
        return True


@opaque
class CopyingWork(TorchWork):
    """Work of a fallback backend in copies of the caller's tensors. Whoever waits copies the results to where
    they belong, once: gloo's receives come to an end by nothing else. `late()` says what may have been
    wrong where a message has not come in time."""

    def __init__(
        self,
        work: dist.Work,
        finish: Callable[[], None] | None,
        results: list[torch.Tensor],
        late: Callable[[], str] | None = None,
    ):
        super().__init__(work)
        self._finish, self._late = finish, late
        self._results = results
        self._lock = threading.Lock()

    def wait(self, timeout: Timeout = None) -> bool:
        """Waits for the call, and copies its results to where the program wants them, once. Raises
        TimeoutError."""
        try:
            # torch's own takes no None.
            done = self._work.wait() if timeout is None else self._work.wait(timeout)
        except RuntimeError as error:
            if self._late is None or "timed out" not in str(error).lower():
                raise
            raise TimeoutError(f"symmpool: {self._late()} ({error})") from error
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
        return done

    def result(self) -> list[torch.Tensor]:
        """Waits, and returns the tensors of the program."""
        self.wait()
        return self._results

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def get_future(self) -> torch.futures.Future:
        """torch's future of the tensors of the program, for which its callbacks wait."""
        if is_asked(self):
            return torch.futures.Future()

        def copied(_: object) -> Any:
            self.wait()
            return self._results

        return self._work.get_future().then(copied)


@opaque
class JoinedWork(dist.Work):
    """Work of several calls, which were begun in this order."""

    def __init__(self, works: list[dist.Work]):
        super().__init__()
        self._works = works

    def wait(self, timeout: Timeout = None) -> bool:
        waited = [work.wait(*(() if timeout is None else (timeout,))) for work in self._works]
        return all(waited)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for error in (work.exception() for work in self._works) if error), None)

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future:
        if is_asked(self):
            return torch.futures.Future()
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda done: [each for one in done.value() for each in one.value()])


@opaque
class PassedWork(TorchWork):
    """Work of a fallback backend as it is, for torch, which would show a program what passes on little."""

    def wait(self, timeout: Timeout = None) -> bool:
        """Waits as the Work that it stands for, whose own `wait` takes no None."""
        return self._work.wait() if timeout is None else self._work.wait(timeout)

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def get_future(self) -> torch.futures.Future:
        """The future of the Work that it stands for."""
        return torch.futures.Future() if is_asked(self) else self._work.get_future()


#: Stands for Work of a call that was made at once, where nobody asks for Work.
DONE = DoneTorchWork([], torch.device("cpu"))


def joined(works: list[dist.Work]) -> dist.Work:
    """Work of several calls, of one at least."""
    left = [work for work in works if work is not DONE]
    if not left:
        return DONE
    return left[0] if len(left) == 1 else JoinedWork(left)
