"""Tensors that torch's dispatcher does not hand to backends as they are, in calls on groups of ours.

It gives a backend copies of negative and conjugate views, and nobody copies results back: the call would
leave them as they were. Ours takes views as they are. Sparse and quantized tensors it hands to no backend in
most calls: their rank would raise an error, and the others wait. So the dispatcher asks here first, for calls
with such a tensor alone; those of other groups go on as before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from symmpool.collectives import layout
from symmpool.errors import InvalidArgumentError, UnsupportedError
from symmpool.groups import process_groups

__all__ = ["register"]

_VIEWS = ("Conjugate", "Negative")
_WITHOUT_ROWS = (
    "SparseCPU",
    "SparseCUDA",
    "SparseCsrCPU",
    "SparseCsrCUDA",
    "QuantizedCPU",
    "QuantizedCUDA",
    "MkldnnCPU",
)
_MESSAGES = ("send", "recv_", "recv_any_source_")
# Registrations end with these objects.
_libraries: list[Any] = []


@functools.cache
def register() -> None:
    """Has the dispatcher ask here. Further calls change nothing."""
    for key in (*_VIEWS, *_WITHOUT_ROWS):
        library = torch.library.Library("c10d", "IMPL", key)
        make = _as_it_is if key in _VIEWS else _refused
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("c10d::") and not torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
                op, _, overload = name.removeprefix("c10d::").partition(".")
                library.impl(name, make(getattr(getattr(torch.ops.c10d, op), overload or "default"), key))
        _libraries.append(library)


def _without(key: str, op: torch._ops.OpOverload, arguments: Any) -> Any:
    """Makes a call as if its tensors had no such key."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
        return op(*arguments)


def _as_it_is(op: torch._ops.OpOverload, key: str) -> Callable[..., Any]:
    def call(*arguments: object) -> Any:
        if _ours(arguments) is None:
            plain = torch.utils._pytree.tree_map_only(torch.Tensor, _resolved, arguments)
            return _without(key, op, plain)
        return _without(key, op, arguments)

    return call


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg()


def _refused(op: torch._ops.OpOverload, key: str) -> Callable[..., Any]:
    name = op._schema.name.removeprefix("c10d::")

    def call(*arguments: object) -> Any:
        ours = _ours(arguments)
        if ours is None:
            raise NotImplementedError(f"Could not run 'c10d::{name}' with arguments of the key '{key}'")
        if name in _MESSAGES:
            raise UnsupportedError("symmpool: messages are strided tensors, neither sparse nor quantized")
        tensor = layout.first_tensor(arguments)
        assert tensor is not None  # it has brought the call here
        why = InvalidArgumentError(
            f"symmpool: {name.rstrip('_')} of a tensor of layout {tensor.layout}, of {tensor.dtype}: its "
            "elements must lie in memory as they are; pass tensor.to_dense(), tensor.int_repr() or "
            "tensor.values()"
        )
        ours._decline(torch.device(tensor.device.type), why)
        raise why

    return call


def _ours(arguments: Any) -> Any:
    """Finds the object of ours that has the calls of a call's group; None for other groups."""
    for each in arguments:
        if isinstance(each, torch.ScriptObject):
            try:
                return process_groups.ours(dist.ProcessGroup.unbox(each))
            except (RuntimeError, TypeError):
                continue
    return None
