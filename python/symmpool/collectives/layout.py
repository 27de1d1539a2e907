"""Tensors whose elements do not lie row by row: copies of them to send, and copies back to them.

Functions take tensors of torch, but for `as_torch`, which makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from symmpool._symmpool import Block
from symmpool.errors import InvalidArgumentError

__all__ = ["as_torch", "copy_back", "destination", "first_tensor", "plain", "row"]


def as_torch(name: str, tensor: Any) -> torch.Tensor:
    """A tensor of torch on the memory of one of torch, numpy or this package. `name` is the argument's."""
    if isinstance(tensor, torch.Tensor):
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise InvalidArgumentError(
                f"{name}: a tensor of layout {tensor.layout}, of {tensor.dtype}; its elements must lie in "
                "memory as they are: pass tensor.to_dense(), tensor.int_repr() or tensor.values()"
            )
        return tensor
    if isinstance(tensor, Block):
        return torch.from_dlpack(tensor)
    if type(tensor).__module__.partition(".")[0] == "numpy" and hasattr(tensor, "__array_interface__"):
        try:
            return torch.from_numpy(tensor)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"{name}: torch takes no such array of numpy ({error})") from None
    kind = type(tensor)
    raise TypeError(f"{name}: a torch.Tensor, numpy.ndarray or symmpool.Block is needed, not {kind}")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory holds its elements row by row: itself, or a copy. No gradient flows through the
    copy."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def row(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as one row: a view of it, or of a copy."""
    return plain(tensor.detach()).reshape(-1)


def destination(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """What a call writes to where a tensor is meant, and what copies that to the tensor, if need be."""
    copy = plain(tensor)
    return (tensor, None) if copy is tensor else (copy, copy_back([(tensor, copy)]))


def check_destination(tensor: torch.Tensor) -> None:
    """Refuses a tensor whose elements share their memory."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in sizes):
        raise InvalidArgumentError(
            "symmpool: a tensor to write to has elements that share their memory, as expand() makes "
            "them; pass tensor.clone()"
        )


def copy_back(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    """What copies results to where they belong: pairs of a destination and a source. It may run in another
    thread, whose modes are not the caller's: a tensor made in inference mode, or one that requires grad, is
    written to in that mode only."""
    for to, _ in pairs:
        check_destination(to)

    def copy() -> None:
        with torch.inference_mode():
            for to, found in pairs:
                to.copy_(found)

    return copy


def first_tensor(arguments: Any) -> torch.Tensor | None:
    """The first tensor among the arguments of a call, or in lists among them."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument
        if isinstance(argument, (list, tuple)):
            found = first_tensor(argument)
            if found is not None:
                return found
    return None
