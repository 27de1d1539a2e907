"""The entry that serves a fused call or a copy of copy engines, found with its arguments checked on every
rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from symmpool.communicators.cache import communicator_for
from symmpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from symmpool.communicators.entry import CommunicatorEntry
    from symmpool.groups.types import GroupLike

__all__ = ["entry_for", "gathered_rows", "is_pipelined"]


def entry_for(
    name: str, tensor: torch.Tensor, group: GroupLike, check: Callable[[int], None]
) -> CommunicatorEntry:
    """Returns the entry that serves a call, whose arguments `check(world)` refuses where they are wrong;
    calls of other ranks on that kind of device fail then, too."""

    def first(rank: int, world: int) -> tuple[str, tuple[object, ...]]:
        _checked(name, check, rank, world)
        return ("barrier", ())

    entry = communicator_for(tensor, group, first)
    if entry is None:
        raise InvalidArgumentError(f"{name}: this process is no rank of the group")
    with entry.preparing():
        _checked(name, check, entry.comm.rank, entry.comm.world)
    return entry


def _checked(name: str, check: Callable[[int], None], rank: int, world: int) -> None:
    """Has every wrong argument be an InvalidArgumentError that names the call and the rank. What has no
    attribute that the checks look at is wrong, too: were that error another one, the other ranks would
    wait for a call that never comes."""
    where = f"{name.lstrip('_')} on rank {rank}: "
    try:
        check(world)
    except InvalidArgumentError as why:
        raise InvalidArgumentError(where + str(why).removeprefix(f"{name}: ")) from why
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError) as why:
        raise InvalidArgumentError(f"{where}an argument makes no sense: {why}") from why


def is_pipelined(tensor: torch.Tensor, world: int) -> bool:
    """Whether there is something to carry by copy engines."""
    return tensor.is_cuda and world > 1 and tensor.numel() > 0


def gathered_rows(entry: CommunicatorEntry, rows: torch.Tensor) -> torch.Tensor:
    """Every rank's rows, one after the other."""
    with entry.preparing():
        whole = rows.new_empty((entry.comm.world * rows.shape[0], *rows.shape[1:]))
        rows = rows.contiguous()
    entry.run(entry.comm.all_gather_into_tensor, (whole, rows), [], False)
    return whole
