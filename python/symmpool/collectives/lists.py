"""Calls whose parts are tensors of their own, one for each rank, as calls over one piece of memory.

Each function returns what a communicator is to be called with and what copies results to where they
belong. Parts of any shape and size follow each other, each row by row. Which call it is follows from the
sizes in the lists, which are the same on every rank.
"""

from __future__ import annotations

from typing import Any

import torch

from symmpool.collectives import layout
from symmpool.errors import InvalidArgumentError

__all__ = ["check", "exchanged", "gathered", "scattered"]

# A communicator's method, its arguments, and what is to be done after it.
Planned = tuple[str, tuple[Any, ...], Any]


def check(operation: str, world: int, *, single: torch.Tensor | None = None, **lists: Any) -> None:
    """Refuses lists that have not a tensor for each rank, and tensors of several types or devices."""
    for name, parts in lists.items():
        if len(parts) != world:
            raise InvalidArgumentError(
                f"symmpool: {operation}: {len(parts)} {name} tensors for {world} ranks"
            )
    every = [each for parts in lists.values() for each in parts]
    every += [] if single is None else [single]
    if len({(each.dtype, each.device) for each in every}) > 1:
        raise InvalidArgumentError(f"symmpool: {operation}: all tensors must be of one type, on one device")


def gathered(outputs: list[torch.Tensor], input: torch.Tensor) -> Planned:
    """An all-gather into a tensor for each rank's input."""
    sizes, sent = [each.numel() for each in outputs], _row(input)
    flat, finish = _split(outputs, sizes)
    if len(set(sizes)) == 1:
        return "all_gather", (flat, sent), finish
    # Every rank sends all it has to every rank.
    world = len(outputs)
    counts = [sent.numel()] * world
    return "all_to_all_single", (flat, sent.repeat(world), sizes, counts), finish


def scattered(output: torch.Tensor, inputs: list[torch.Tensor], rank: int, op: str) -> Planned:
    """A reduce-scatter of a tensor for each rank's output."""
    sizes, whole = [each.numel() for each in inputs], _joined(inputs)
    if len(set(sizes)) == 1:
        place, finish = layout.place(output)
        return "reduce_scatter", (place, whole, op), finish
    if output.numel() != sizes[rank]:
        raise InvalidArgumentError(
            f"symmpool: reduce_scatter: rank {rank}'s output has {output.numel()} elements, and input "
            f"tensor {rank} has {sizes[rank]}"
        )
    part = whole.split(sizes)[rank].view(output.shape)
    return "all_reduce", (whole, op), layout.copies([(output, part)])


def exchanged(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Planned:
    """An all-to-all of a tensor to and from each rank."""
    sizes = [each.numel() for each in outputs]
    flat, finish = _split(outputs, sizes)
    counts = [each.numel() for each in inputs]
    return "all_to_all_single", (flat, _joined(inputs), sizes, counts), finish


def _row(tensor: torch.Tensor) -> torch.Tensor:
    return layout.plain(tensor.detach()).reshape(-1)


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """New memory that holds all of them."""
    return torch.cat([_row(each) for each in tensors])


def _split(outputs: list[torch.Tensor], sizes: list[int]) -> tuple[torch.Tensor, Any]:
    """Memory for what is to become of all outputs, and what copies it to them."""
    first = outputs[0]
    flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    parts = zip(outputs, flat.split(sizes), strict=True)
    return flat, layout.copies([(to, part.view(to.shape)) for to, part in parts])
