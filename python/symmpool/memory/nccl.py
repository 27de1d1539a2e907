"""The NCCL communicator of a process group of torch, for `Pool.register_nccl`."""

from __future__ import annotations

from typing import Any

from symmpool.errors import UnsupportedError


def communicator(group: Any, device: str) -> int:
    """The address of the `ncclComm_t` that torch uses for `group` (None: the default group) on
    `device`. Collective where the group has not communicated yet: torch makes it then."""
    import torch
    import torch.distributed as dist

    if not device.startswith("cuda"):
        raise UnsupportedError(f"register_nccl: NCCL has no windows of memory on {device}")
    if group is None:
        group = dist.group.WORLD
    with torch.cuda.device(device):
        try:
            backend = group._get_backend(torch.device(device))
            address = backend._comm_ptr
        except (AttributeError, RuntimeError) as error:
            raise UnsupportedError(
                f"register_nccl: {group} has no NCCL communicator for {device} ({error}); make it "
                'with backend="nccl"'
            ) from error
        if not address():
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            torch.cuda.synchronize()
        return address()
