"""Calls and results that torch does not pass on to backends and Work that are written in Python.

torch wraps the Work that such a backend returns, and passes on `wait` and `get_future` alone: the wrapper of
a call that is over says that it is not, and a future that fails has the error as its value. `gather_single`
does not reach such a backend at all, and a split ends the process on ranks that are outside of the new group.
So the methods here ask ours, where a group or Work is ours, and are torch's own for all others. Only `close`
puts them in place, which a process calls with its first backend of this kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from symmpool.groups import process_groups
from symmpool.torch_backend.work import asked_through

if TYPE_CHECKING:
    import torch

__all__ = ["close"]

_OF_WORK = (
    "is_completed",
    "is_success",
    "exception",
    "result",
    "synchronize",
    "source_rank",
    "_source_rank",
    "get_future",
)


@functools.cache
def close() -> None:
    """Has torch's Work and groups answer for ours. Further calls change nothing."""
    get_future = dist.Work.get_future
    for name in _OF_WORK:
        theirs = getattr(dist.Work, name, None)
        if theirs is not None:
            setattr(dist.Work, name, _of_work(name, theirs, get_future))
    for name in ("gather_single", "gather_into_tensor"):
        theirs = getattr(dist.ProcessGroup, name, None)
        if theirs is not None:
            setattr(dist.ProcessGroup, name, _gather_single(theirs))
    dist.ProcessGroup.split_group = _split_group(dist.ProcessGroup.split_group)  # type: ignore[method-assign]


def _of_work(name: str, theirs: Callable[..., Any], get_future: Callable[..., Any]) -> Any:
    """A method of Work. Classes that derive from Work have their own."""

    @functools.wraps(theirs)
    def answer(self: Any) -> Any:
        ours = asked_through(self, get_future) if type(self) is dist.Work else None
        if ours is None:
            return theirs(self)
        if name == "source_rank":
            return ours._source_rank()
        return getattr(ours, name)()

    return answer


def _gather_single(theirs: Callable[..., Any]) -> Any:
    @functools.wraps(theirs)
    def gather_single(self: Any, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        ours = process_groups.ours(self)
        given = () if opts is None else (opts,)
        if ours is None:
            return theirs(self, output, input, *given)
        return ours.gather_single(output, input, *given)

    return gather_single


def _split_group(theirs: Callable[..., Any]) -> Any:
    @functools.wraps(theirs)
    def split_group(self: Any, ranks: Any, *arguments: object, **options: object) -> Any:
        ours = process_groups.ours(self)
        if ours is not None and self.rank() not in ranks:
            ours._served.raise_at_end(ours)
            return None
        return theirs(self, ranks, *arguments, **options)

    return split_group
