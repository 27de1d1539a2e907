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
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmpool.communicators.module_imports import when_imported

if TYPE_CHECKING:
    import torch.distributed

__all__ = ["use_windows"]

_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
#: What a group of parameters is gathered and scattered by.
_COLLECTIVES = ("_all_gather_comm", "_reduce_scatter_comm")
_SET = "set_allocate_memory_from_process_group"
#: What a program called on parameters is known by.
_CHOSEN = "_symmpool_chosen"

_log = logging.getLogger("symmpool")


def use_windows(is_ours: Callable[[torch.distributed.ProcessGroup, torch.device], bool]) -> None:
    """Has FSDP use windows wherever `is_ours(group, device)`, also if it is imported later. Calls after the
    first change nothing."""
    when_imported(_MODULE, functools.partial(_wrap, is_ours=is_ours))


def _wrap(
    module: ModuleType, is_ours: Callable[[torch.distributed.ProcessGroup, torch.device], bool]
) -> None:
    kind = getattr(module, "FSDPParamGroup", None)
    begin, choose = getattr(kind, "lazy_init", None), getattr(kind, _SET, None)
    if begin is None or choose is None or hasattr(begin, "__wrapped__"):
        return

    @functools.wraps(choose)
    def chosen(self: Any, enable: bool) -> Any:
        found = choose(self, enable)
        setattr(self, _CHOSEN, enable)
        if enable:
            for name in _COLLECTIVES:
                setattr(self, name, _remembering(getattr(self, name)))
        return found

    @functools.wraps(begin)
    def lazy_init(self: Any) -> Any:
        begun = begin(self)
        try:
            if not hasattr(self, _CHOSEN) and _is_usual(self) and _is_served(self, is_ours):
                chosen(self, True)
        except (AttributeError, AssertionError) as error:
            # Models that `replicate` makes have the same class, and refuse to name a group of shards.
            _log.debug("FSDP's buffers lie in memory of torch's own: %s", error)
        return begun

    kind.lazy_init = lazy_init  # type: ignore[union-attr]
    setattr(kind, _SET, chosen)


class _Remembering:
    """How FSDP's collectives ask for memory, some thirty times a step: of the group's backend, which torch
    would look up and ask for what it supports each time."""

    _group: Any
    _backend: Any = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._backend is None:
            backend = self._group._get_backend(device)
            if not backend.supports_tensor_alloc(device):
                return torch.empty(*size, dtype=dtype, device=device)
            self._backend = backend
        return self._backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)


def _remembering(collective: Any) -> Any:
    """A collective of FSDP's that remembers its group's backend. Classes that torch does not make so
    are left alone."""
    if not isinstance(getattr(collective, "_group", None), dist.ProcessGroup):
        return collective
    kind: Any = type(collective)
    return _remembering_kind(kind)(collective._group)


@functools.cache
def _remembering_kind(kind: type) -> Any:
    """A class of torch's for collectives of FSDP, whose objects remember their group's backend."""
    return type(kind.__name__, (_Remembering, kind), {})


def _is_usual(parameters: Any) -> bool:
    """Whether the collectives are torch's own, in memory of its own."""
    made = [getattr(parameters, name) for name in _COLLECTIVES]
    return [type(each).__name__ for each in made] == ["DefaultAllGather", "DefaultReduceScatter"]


def _is_served(
    parameters: Any, is_ours: Callable[[torch.distributed.ProcessGroup, torch.device], bool]
) -> bool:
    """Whether what is gathered and scattered goes through groups of ours."""
    groups = (parameters._all_gather_process_group, parameters._reduce_scatter_process_group)
    return all(is_ours(group, parameters.device) for group in groups)
