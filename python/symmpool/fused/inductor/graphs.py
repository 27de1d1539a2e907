"""Helpers of the passes over graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from symmpool.fused.tensor_cores import MIN_ROWS

__all__ = ["VIEWS", "arguments_of", "c10d", "fits", "is_static", "keeps_rows", "made", "remove", "waits_of"]

_aten, c10d = torch.ops.aten, torch.ops._c10d_functional
#: Calls that give the same elements another shape.
VIEWS = (_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default)


def arguments_of(node: Node) -> tuple[Any, ...]:
    """The arguments of a node. To torch's types each may be anything; patterns look at what it is."""
    return node.args


def waits_of(graph: Graph) -> list[Node]:
    """Returns the nodes that wait for collectives, in order."""
    return [node for node in graph.nodes if node.target == c10d.wait_tensor.default]


def made(graph: Graph, target: Any, arguments: tuple[Any, ...], value: Any) -> Node:
    """A call at the graph's place of insertion, with what it returns in the metadata."""
    node = graph.call_function(target, arguments)
    node.meta["val"] = value
    return node


def is_static(*values: torch.Tensor) -> bool:
    """Whether matrices are of types for tensor cores, with sizes that are known when the program is compiled.
    Sizes that differ between ranks decide nothing, as all ranks must make the same calls."""
    types = (torch.float16, torch.bfloat16)
    return all(
        value.dtype in types and all(isinstance(size, int) for size in value.shape) for value in values
    )


def fits(whole: Node, part: Node, dim: int) -> bool:
    """Whether a fused call takes a tensor of which each rank has, or gets, a part along a dimension, and is
    faster than separate calls: with so many rows in a part."""
    value, of_rank = whole.meta.get("val"), part.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(of_rank, torch.Tensor):
        return False
    if not is_static(value, of_rank) or dim >= value.dim() - 1:
        return False
    return math.prod(of_rank.shape[:-1]) >= MIN_ROWS and of_rank.shape[-1] > 0


def keeps_rows(node: Node) -> bool:
    """Whether a node is a view of another one in which rows are rows. Slices of all of a tensor are, such as
    torch 2.15 has behind the gathers of its sharded tensors."""
    is_slice = node.target == _aten.slice.Tensor
    if node.target not in VIEWS and not is_slice:
        return False
    value, viewed = node.meta.get("val"), arguments_of(node)[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(viewed, torch.Tensor):
        return False
    return value.shape == viewed.shape if is_slice else value.shape[-1:] == viewed.shape[-1:]


def remove(graph: Graph, waits: Sequence[Node]) -> int:
    """Takes away the waits whose results nobody uses any more, with their collectives and what led to these.
    Returns how many there were."""
    if not waits:
        return 0
    graph.eliminate_dead_code()
    # Collectives count as needed, so they are taken away by hand, the last one first.
    for wait in reversed(waits):
        for each in (wait, *arguments_of(wait)):
            if not each.users:
                graph.erase_node(each)
    graph.eliminate_dead_code()
    return len(waits)
