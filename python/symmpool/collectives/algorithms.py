"""Algorithms of the communicators that module-level calls and the backend of torch.distributed use."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from symmpool._symmpool import Algorithm, Communicator
from symmpool.communicators import cache

if TYPE_CHECKING:
    from symmpool.groups.types import DeviceLike, GroupLike

__all__ = ["load_tables", "register", "select"]


def register(algorithm: Algorithm, group: GroupLike = None, *, device: DeviceLike = None) -> None:
    """Calls `Communicator.register` on the communicator that serves a group: module-level calls on it take
    the algorithm by `algorithm=`, and these calls and those of torch.distributed's backend by
    SYMMPOOL_ALL_REDUCE and the like, or by `select`. `device` says where ("cpu", "cuda:N"); without it,
    where the group's first pool is, or on the CPU if there is none. In a program on GPUs pass the device, or
    make a pool or a call there before. The communicator is made if need be, which is collective."""
    _communicator(group, device).register(algorithm)


def load_tables(path: str | os.PathLike[str], group: GroupLike = None, *, device: DeviceLike = None) -> None:
    """Calls `Communicator.load_tables` on the communicator that serves a group; see `register`."""
    _communicator(group, device).load_tables(path)


def select(
    collective: str,
    selector: Callable[[int, str, str | None, int, list[str], str], str | None] | None,
    group: GroupLike = None,
    *,
    device: DeviceLike = None,
) -> None:
    """Calls `Communicator.select` on the communicator that serves a group; see `register`."""
    _communicator(group, device).select(collective, selector)


def _communicator(group: GroupLike, device: DeviceLike) -> Communicator:
    return cache.communicator(group, cache.first_device(group) if device is None else device)
