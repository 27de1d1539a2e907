"""The name "symmpool" among the backends that torch.distributed knows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from symmpool.errors import UnsupportedError
from symmpool.torch_backend.process_group import NAME, SymmpoolProcessGroup

__all__ = ["create", "register"]


def create(options: Any, backend_options: Any = None) -> SymmpoolProcessGroup:
    """What torch.distributed calls for a new group of this backend."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7):
        raise UnsupportedError(
            "symmpool: torch.distributed's backend needs torch 2.7 or newer, and this is "
            f"{torch.__version__}, whose DDP and functional collectives wait for ever for a backend written "
            "in Python; symmpool.all_reduce and its like work on groups of gloo and NCCL"
        )
    place = (options.group_rank, options.group_size)
    return SymmpoolProcessGroup(
        options.store, *place, options.timeout, backend_options, name=options.group_id
    )


def register() -> None:
    """Makes the name "symmpool" known to torch.distributed. Importing `symmpool.backend` does so, unless the
    package's entry point has when torch was imported."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
