"""Collectives that are CUDA kernels of one's own; docs/kernels.md teaches how to write them."""

import os
from collections.abc import Iterable
from typing import Literal

from symmpool._symmpool import Algorithm
from symmpool.errors import InvalidArgumentError

__all__ = ["native"]


def native(
    path_or_source: str | os.PathLike[str],
    kernel: str,
    collective: Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"],
    *,
    name: str | None = None,
    world: int | None = None,
    windows: Iterable[Literal["input", "output"]] = (),
    in_place: bool = False,
    max_bytes: int | None = None,
    grid: int | None = None,
    threads: int = 256,
) -> Algorithm:
    """An algorithm that is a CUDA kernel: `comm.register` makes it known, and `algorithm=` of a call names
    it.

    `path_or_source` is a file, or CUDA C++ itself, recognised by its several lines. `kernel` is
    the function in it, `extern "C" __global__`; it is the algorithm's name, too, unless there is another.
    `world` is the number of ranks that it is for, any unless given. Peers may access what `windows` names,
    which calls must pass as memory of the pool; UnsupportedError if they do not. `in_place` says that it is
    right with input and output in one memory, on all ranks; calls in place on some ranks alone are
    DivergedError, but for broadcasts, in which only the root has an input. `max_bytes` bounds the larger one
    of input and output, for kernels whose data has to fit into an inbox; longer calls are UnsupportedError.
    `grid` is the most thread blocks that do its work, each of `threads` threads (32, 64, 128, 256 or 512);
    without it that is left to the size of a call.

    It is compiled by NVRTC when a call first needs it, for the communicator's ranks and, if the collective
    reduces, the element type and the operation; compiled kernels are kept on disk. What the compiler says
    is an InvalidArgumentError of that call, on every rank, with the line in the source. On a communicator
    in host memory calls are UnsupportedError.
    """
    text = os.fspath(path_or_source)
    if not isinstance(text, str):
        raise InvalidArgumentError(f"path_or_source: {path_or_source!r} is neither a path nor text")
    is_source = not isinstance(path_or_source, os.PathLike) and "\n" in text
    path = f"{kernel}.cu" if is_source else text
    if not is_source:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    named = [windows] if isinstance(windows, str) else list(windows)
    for each in named:
        if each not in ("input", "output"):
            raise InvalidArgumentError(f'windows has {each!r}: "input" and "output" can be windows')
    both, name = ("input" in named, "output" in named), name or kernel
    limits = (in_place, max_bytes, grid, threads)
    return Algorithm.native(text, path, kernel, collective, name, world, both, *limits)
