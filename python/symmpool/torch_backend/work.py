"""Work of torch's class, for callers that are C++, which the compiler does not trace."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from symmpool.communicators import torch_state

__all__ = ["DoneWork", "Recording", "TorchWork", "joined", "opaque"]


def opaque(owner: Any) -> Any:
    """A class whose methods the compiler calls as they are: see `torch_state.opaque`. The compiler would take
    their frames for programs to trace, even where a program calls them that is not compiled itself."""
    for method in [each for each in vars(owner).values() if hasattr(each, "__code__")]:
        torch_state.opaque(method)
    return owner


@opaque
class TorchWork(dist.Work):
    """Work of ours, for callers that are C++."""

    def __init__(self, work: Any):
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        return self._work.wait(timeout)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def get_future(self) -> torch.futures.Future:
        return self._work.get_future()


@opaque
class DoneWork(dist.Work):
    """Work that was done, or put on the current stream, before the call returned."""

    def __init__(self, results: list[Any], device: torch.device):
        super().__init__()
        self._results, self._device = results, device

    def wait(self, timeout: Any = None) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future:
        devices = [self._device] if self._device.type == "cuda" else None
        future = torch.futures.Future(devices=devices)
        future.set_result(self._results)
        return future


@opaque
class JoinedWork(dist.Work):
    """Work of several calls, which were begun in this order."""

    def __init__(self, works: list[Any]):
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        waited = [work.wait(*(() if timeout is None else (timeout,))) for work in self._works]
        return all(waited)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((error for error in (work.exception() for work in self._works) if error), None)

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future:
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda done: [each for one in done.value() for each in one.value()])


def joined(works: list[Any]) -> Any:
    """Work of several calls, of one at least."""
    return works[0] if len(works) == 1 else JoinedWork(works)


class Recording:
    """A group whose calls also append their Work to a list."""

    def __init__(self, group: Any, works: list[Any]):
        self._group, self._works = group, works

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)

        def call(*arguments: Any, **options: Any) -> Any:
            work = method(*arguments, **options)
            if work is not None:
                self._works.append(work)
            return work

        return call
