"""Where a call of the backend reads and writes, for tensors that are not laid out row by row."""

from __future__ import annotations

from typing import Any

import torch

from symmpool.errors import InvalidArgumentError

__all__ = ["copies", "first_tensor", "place", "plain"]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory says what it holds, row by row: itself, or a copy. The copy is no part of
    what gradients flow through."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def place(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """What a call writes to where a tensor is meant, and what copies it from there, if need be."""
    copy = plain(tensor)
    return (tensor, None) if copy is tensor else (copy, copies([(tensor, copy)]))


def copies(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """What copies results to where they belong. In whichever thread: its modes are not the caller's,
    and a tensor made in inference mode, or one that requires grad, is written to in that mode only."""
    for to, _ in pairs:
        sizes = zip(to.shape, to.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in sizes):
            raise InvalidArgumentError(
                "symmpool: a tensor to write to has elements that share their memory, as expand() makes "
                "them; pass tensor.clone()"
            )

    def copy() -> None:
        with torch.inference_mode():
            for to, found in pairs:
                to.copy_(found)

    return copy


def first_tensor(arguments: tuple[Any, ...]) -> torch.Tensor | None:
    """The first tensor among the arguments of a call, or in lists among them."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument
        if isinstance(argument, (list, tuple)):
            found = first_tensor(tuple(argument))
            if found is not None:
                return found
    return None
