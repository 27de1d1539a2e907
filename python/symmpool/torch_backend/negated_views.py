"""Negative and conjugate views as arguments of torch's calls on groups of ours.

torch's dispatcher gives a backend copies of such views, and nobody copies results back: the call would leave
them as they were. Ours takes views as they are. So the dispatcher asks here first, for calls with such a view
alone; those of other groups go on as before."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from symmpool.groups import process_groups

__all__ = ["take_as_they_are"]

_KEYS = ("Conjugate", "Negative")
# Registrations end with these objects.
_libraries: list[Any] = []


@functools.cache
def take_as_they_are() -> None:
    """Has the dispatcher hand such views to groups of ours. Further calls change nothing."""
    for key in _KEYS:
        library = torch.library.Library("c10d", "IMPL", key)
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("c10d::") and not torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
                op, _, overload = name.removeprefix("c10d::").partition(".")
                found = getattr(getattr(torch.ops.c10d, op), overload or "default")
                library.impl(found, _call(found, key))
        _libraries.append(library)


def _call(op: Any, key: str) -> Any:
    key_set = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def call(*arguments: Any) -> Any:
        if not any(_is_ours(each) for each in arguments):
            arguments = torch.utils._pytree.tree_map_only(torch.Tensor, _plain, arguments)
        with torch._C._ExcludeDispatchKeyGuard(key_set):
            return op(*arguments)

    return call


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg()


def _is_ours(argument: Any) -> bool:
    if not isinstance(argument, torch.ScriptObject):
        return False
    try:
        group = dist.ProcessGroup.unbox(argument)
    except (RuntimeError, TypeError):
        return False
    return process_groups.ours(group) is not None
