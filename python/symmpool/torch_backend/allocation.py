"""Tensors in a group's windows, for code that asks its backend for memory: `Backend.allocate_tensor`.

FSDP does, for what it gathers and scatters (`symmpool.torch_backend.fsdp`).
Collectives on windows take one hop, and copy engines carry the largest, which leaves processors to the
program. Every rank of the group asks for the same, in the same order, as for all memory of a pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from symmpool.communicators import cache
from symmpool.torch_backend.served_devices import number_of

if TYPE_CHECKING:
    from symmpool.torch_backend.group_state import GroupState

__all__ = ["has_windows", "window"]


def has_windows(group: GroupState, device: torch.device) -> bool:
    """Whether `window` has one, as far as is known without asking the other ranks."""
    return group.may_serve(torch.device(device))


def window(group: GroupState, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """A new tensor of `size` elements, not filled; None where ours does not serve the device. Collective
    where it is the first call of the group, and where the pool has to grow."""
    device = torch.device(device)
    key, number = group.key, number_of(device)
    pool = cache.known_pool_of(key, number)
    if pool is None:
        if not group.serves(device):
            return None
        pool = cache.pool_of(key, number)
    if device.type == "cpu":
        return pool.empty(size, dtype)
    # torch's allocator keeps what is freed, so that a program in its stride commits nothing.
    with pool:
        made = torch.empty(size, dtype=dtype, device=device)
    return made
