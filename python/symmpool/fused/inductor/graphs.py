"""What passes over graphs have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from symmpool.fused.tensor_cores import LEAST_ROWS

__all__ = ["VIEWS", "c10d", "has_rows", "is_static", "made", "remove"]

_aten, c10d = torch.ops.aten, torch.ops._c10d_functional
#: Calls that give the same elements another shape.
VIEWS = (_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default)


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


def has_rows(part: torch.Tensor) -> bool:
    """Whether one rank's part has so many rows that a fused call is faster than separate ones."""
    return math.prod(part.shape[:-1]) >= LEAST_ROWS and part.shape[-1] > 0


def remove(graph: Graph, waits: Sequence[Node]) -> int:
    """Takes away the waits whose results nobody uses any more, with their collectives and what led to these.
    Returns how many there were."""
    graph.eliminate_dead_code()
    # Collectives count as needed, so they are taken away by hand, the last one first.
    for wait in reversed(waits):
        for each in (wait, *wait.args):
            if not each.users:
                graph.erase_node(each)
    graph.eliminate_dead_code()
    return len(waits)
