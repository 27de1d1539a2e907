"""What passes over graphs have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

__all__ = ["VIEWS", "c10d", "made", "remove"]

_aten, c10d = torch.ops.aten, torch.ops._c10d_functional
VIEWS = (_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default)


def made(graph: Graph, target: Any, arguments: tuple[Any, ...], value: Any) -> Node:
    """A call at the graph's place of insertion, with what it returns in the metadata."""
    node = graph.call_function(target, arguments)
    node.meta["val"] = value
    return node


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
