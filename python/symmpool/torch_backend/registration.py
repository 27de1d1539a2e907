"""The name "symmpool" among the backends that torch.distributed knows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from symmpool.errors import UnsupportedError
from symmpool.torch_backend.process_group import NAME, SymmpoolProcessGroup

__all__ = ["before_groups", "create", "has_python_backends", "register", "version"]

logger = logging.getLogger("symmpool.backend")

#: Functions that are called with the options of each new group, before it is made.
before_groups: list[Callable[[Any], None]] = []

# The first version of torch whose backends in Python have hooks, a split and a shrink.
_PYTHON_BACKENDS = (2, 14)


def version() -> tuple[int, int]:
    """torch's version, without what follows its second number."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def has_python_backends() -> bool:
    """Whether this torch calls backends in Python as `SymmpoolBackend` needs it: what it has is asked, as
    versions under development have a number before they have all of it."""
    names = ("new_window", "shrink", "split", "suspend", "gather_single")
    return (
        all(hasattr(c10d.Backend, name) for name in names)
        and hasattr(dist.ProcessGroup, "register_pre_hook")
        and hasattr(c10d._DistributedBackendOptions, "process_group")
    )


def create(options: Any, backend_options: object = None) -> dist.ProcessGroup | c10d.Backend:
    """Makes a new group of this backend; torch.distributed calls it."""
    if version() < (2, 7):
        raise UnsupportedError(
            "symmpool: torch.distributed's backend needs torch 2.7 or newer, and this is "
            f"{torch.__version__}, whose DDP and functional collectives wait for ever for a backend written "
            "in Python; symmpool.all_reduce and its like work on groups of gloo and NCCL"
        )
    for function in before_groups:
        function(options)
    place = (options.group_rank, options.group_size)
    given = (options.store, *place, options.timeout, backend_options)
    if has_python_backends() and options.process_group is not None:
        from symmpool.torch_backend.python_backend import SymmpoolBackend

        if options.enable_reconfigure:
            raise UnsupportedError(
                "symmpool: enable_reconfigure is not served: ranks of a group are not replaced; leave it "
                "out, and use shrink_group where ranks are lost"
            )
        return SymmpoolBackend(*given, name=options.group_id, group=options.process_group)
    if version() >= _PYTHON_BACKENDS:
        logger.warning(
            "symmpool: torch %s lacks a part of torch 2.14's backends in Python, so its hooks and its flight "
            "recorder see no calls of the group",
            torch.__version__,
        )
    return SymmpoolProcessGroup(*given, name=options.group_id)


def register() -> None:
    """Makes the name "symmpool" known to torch.distributed. Importing `symmpool.backend` does so, unless the
    package's entry point has when torch was imported."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
