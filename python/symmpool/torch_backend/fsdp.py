"""FSDP's buffers lie in windows where its group is ours, unless the program says otherwise.

torch's FSDP (`fully_shard`) asks a group for the memory of what it gathers and scatters only after
`set_allocate_memory_from_process_group_for_comm(True)`. Windows cost nothing here: copy engines carry what is
gathered into them, and take no processors from the program's kernels. So FSDP does it by itself for groups of
ours, when a model is about to run for the first time. A program that has called that method with False, or
has set collectives of its own, keeps what it chose.

It needs torch 2.8. Where torch's FSDP is made differently in a version, nothing changes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from symmpool.communicators.module_imports import when_imported

__all__ = ["use_windows"]

_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_SET = "set_allocate_memory_from_process_group"
#: What a program called on parameters is known by.
_CHOSEN = "_symmpool_chosen"

_log = logging.getLogger("symmpool")


def use_windows(is_ours: Callable[[Any, Any], bool]) -> None:
    """Has FSDP use windows wherever `is_ours(group, device)`, also if it is imported later. Calls after the
    first change nothing."""
    when_imported(_MODULE, functools.partial(_wrap, is_ours=is_ours))


def _wrap(module: ModuleType, is_ours: Callable[[Any, Any], bool]) -> None:
    kind = getattr(module, "FSDPParamGroup", None)
    begin, choose = getattr(kind, "lazy_init", None), getattr(kind, _SET, None)
    if begin is None or choose is None or hasattr(begin, "__wrapped__"):
        return

    @functools.wraps(begin)
    def lazy_init(self: Any) -> Any:
        begun = begin(self)
        try:
            if not hasattr(self, _CHOSEN) and _is_usual(self) and _is_served(self, is_ours):
                choose(self, True)
                setattr(self, _CHOSEN, True)
        except (AttributeError, AssertionError) as error:
            # Models that `replicate` makes have the same class, and refuse to name a group of shards.
            _log.debug("FSDP's buffers lie in memory of torch's own: %s", error)
        return begun

    @functools.wraps(choose)
    def chosen(self: Any, enable: bool) -> Any:
        found = choose(self, enable)
        setattr(self, _CHOSEN, enable)
        return found

    kind.lazy_init = lazy_init  # type: ignore[union-attr]
    setattr(kind, _SET, chosen)


def _is_usual(parameters: Any) -> bool:
    """Whether the collectives are torch's own, in memory of its own."""
    made = (parameters._all_gather_comm, parameters._reduce_scatter_comm)
    return [type(each).__name__ for each in made] == ["DefaultAllGather", "DefaultReduceScatter"]


def _is_served(parameters: Any, is_ours: Callable[[Any, Any], bool]) -> bool:
    """Whether what is gathered and scattered goes through groups of ours."""
    groups = (parameters._all_gather_process_group, parameters._reduce_scatter_process_group)
    return all(is_ours(group, parameters.device) for group in groups)
