"""Futures for DDP's hooks that are C++.

Such a hook looks at a future's value itself, and needs a list of tensors of C++'s, as the futures of torch's
own backends have; a future that Python completes has an object of Python's. TorchScript makes the other kind.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import torch

__all__ = ["for_caller"]


def for_caller(future: Any, work: Any, results: list[torch.Tensor]) -> Any:
    """The future of Work, as whoever calls `get_future` needs it. A built-in hook that compresses gradients
    makes an all-reduce of float16, and is called by autograd; whatever Python calls is as it was."""
    if len(results) != 1 or results[0].dtype != torch.float16 or not _is_called_by_autograd(sys._getframe(1)):
        return future
    if results[0].is_cuda:
        # Such a future knows no streams: the current one waits.
        work.wait()
    failed = torch.zeros((), dtype=torch.int32, device="cpu")
    ready: torch.futures.Future = torch.futures.Future()

    def complete(done: Any) -> None:
        try:
            done.value()
        except BaseException:
            failed.fill_(1)
        ready.set_result(None)

    found = _script()(ready, failed, results)
    future.add_done_callback(complete)
    if results[0].is_cuda:
        found.wait()
    return found


def _is_called_by_autograd(getter: Any) -> bool:
    """Whether no function of Python calls a method, but C++ code of autograd, in a thread of its own or in
    the program's."""
    caller = getter.f_back
    return caller is None or caller.f_globals.get("__name__", "").startswith("torch.autograd")


@functools.cache
def _script() -> Any:
    with warnings.catch_warnings():
        # TorchScript is deprecated, and there is no other way yet.
        warnings.simplefilter("ignore")
        return torch.jit.script(_begin)


def _after(
    ready: torch.jit.Future[torch.Tensor], failed: torch.Tensor, tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    ready.wait()
    if int(failed) != 0:
        raise Exception("symmpool: an all-reduce of gradients failed on this rank")
    return tensors


def _begin(
    ready: torch.jit.Future[torch.Tensor], failed: torch.Tensor, tensors: list[torch.Tensor]
) -> torch.jit.Future[list[torch.Tensor]]:
    return torch.jit.fork(_after, ready, failed, tensors)
