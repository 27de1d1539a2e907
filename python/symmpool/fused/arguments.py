"""Refusals that every fused call makes, and how errors describe an argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symmpool.errors import InvalidArgumentError

__all__ = ["described", "refuse_gradients", "wrong_lists"]


def described(given: object) -> str:
    """Describes an argument, in an error that says what it must be."""
    if isinstance(given, torch.Tensor):
        return f"{given.dtype} of shape {tuple(given.shape)}"
    return "None" if given is None else f"an object of type {type(given).__name__}"


def refuse_gradients(name: str, **tensors: torch.Tensor | None) -> None:
    """Refuses tensors that require grad where autograd would record the call."""
    if torch.is_grad_enabled():
        for which, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                raise InvalidArgumentError(
                    f"{name}: {which} requires grad, and no gradient flows through it; call it under "
                    "torch.no_grad()"
                )


def wrong_lists(**lists: object) -> str | None:
    """Returns what is wrong with arguments that are lists, each as long as the first one; None if nothing
    is."""
    counts = []
    for what, given in lists.items():
        if not isinstance(given, Sequence) or isinstance(given, str):
            return f"{what}: {described(given)}; it must be a list"
        counts.append(len(given))
        if counts[-1] != counts[0]:
            return f"{what}: {counts[-1]} for {counts[0]} matrices"
    return None
