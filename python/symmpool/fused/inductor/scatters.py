"""One call of matrix products, their sum and its reduce-scatter, in place of those of a graph.

torch's own micro-pipelining finds reduce-scatters of one matmul. In the backward pass of layers that share
an input, as queries, keys and values do, its gradient is a sum of matmuls."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from symmpool.fused.inductor.graphs import (
    arguments_of,
    c10d,
    fits,
    is_static,
    keeps_rows,
    made,
    remove,
    waits_of,
)
from symmpool.fused.operators import has_ours
from symmpool.fused.tensor_cores import MAX_MATMULS

__all__ = ["fuse_scatters"]

_aten = torch.ops.aten


class _Scatter(NamedTuple):
    """A reduce-scatter: what is scattered, along which dimension, and the rest of the call."""

    whole: Node
    dim: int
    op: str
    world: int
    group: str


def fuse_scatters(graph: Graph) -> int:
    """Makes one call of each reduce-scatter and the matmuls that it adds up, and returns how many there
    are."""
    return remove(graph, [wait for wait in waits_of(graph) if _fuse(graph, wait)])


def _fuse(graph: Graph, wait: Node) -> bool:
    """Replaces a reduce-scatter and what it scatters, if that is a sum of matmuls; says whether it did."""
    found = _scatter_of(wait)
    if found is None or not fits(found.whole, wait, found.dim) or not has_ours(found.group):
        return False
    matmuls = _matmuls(found.whole)
    if matmuls is None or not 1 <= len(matmuls) <= MAX_MATMULS:
        return False
    leading = list(found.whole.meta["val"].shape[:-1])
    with graph.inserting_before(wait):
        lefts = []
        for matmul in matmuls:
            left = arguments_of(matmul)[0]
            value = left.meta["val"]
            shape = [*leading, value.shape[1]]
            lefts.append(made(graph, _aten.reshape.default, (left, shape), value.reshape(shape)))
        rights = [matmul.args[1] for matmul in matmuls]
        arguments = (lefts, rights, found.op, found.dim, found.group)
        target = torch.ops.symmpool.fused_matmuls_reduce_scatter.default
        wait.replace_all_uses_with(made(graph, target, arguments, wait.meta["val"]))
    return True


def _scatter_of(wait: Node) -> _Scatter | None:
    """The reduce-scatter that a node waits for."""
    scatter = wait.args[0]
    if not isinstance(scatter, Node) or scatter.target != c10d.reduce_scatter_tensor.default:
        return None
    given, op, world, group = arguments_of(scatter)
    if len(scatter.users) != 1 or op not in ("sum", "avg") or not isinstance(group, str):
        return None
    whole, dim = _split(given, world)
    return _Scatter(whole, dim, op, world, group) if isinstance(whole, Node) else None


def _split(given: Any, world: int) -> tuple[Any, int]:
    """Returns the scattered tensor and its dimension: along others than the first one, parts are concatenated
    along that."""
    if not isinstance(given, Node) or given.target != _aten.cat.default or given.args[1:] not in ((), (0,)):
        return given, 0
    parts = arguments_of(given)[0]
    split = parts[0].args[0] if parts[0].target is operator.getitem else None
    if split is None or split.target != _aten.split.Tensor or len(split.args) != 3 or given.kwargs:
        return given, 0
    wanted = [(split, nth) for nth in range(world)]
    if [part.args for part in parts] != wanted or any(part.target is not operator.getitem for part in parts):
        return given, 0
    whole, size, dim = arguments_of(split)
    value = whole.meta.get("val")
    # Where sizes are not known, that of a part is a node.
    if not isinstance(size, int) or not isinstance(value, torch.Tensor) or value.shape[dim] != size * world:
        return given, 0
    is_only = len(given.users) == 1 and len(split.users) == world and all(len(p.users) == 1 for p in parts)
    return (whole, dim % value.dim()) if is_only else (given, 0)


def _matmuls(node: object) -> list[Node] | None:
    """The matmuls whose sum a node is, in the order in which they are added. None if it is no such sum, or
    somebody else needs it or a part of it."""
    if not isinstance(node, Node) or len(node.users) != 1:
        return None
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    if node.target == _aten.mm.default:
        return [node] if is_static(arguments_of(node)[0].meta["val"], value) else None
    if keeps_rows(node):
        return _matmuls(node.args[0])
    if node.target != _aten.add.Tensor or node.kwargs:
        return None
    found: list[Node] = []
    for each in arguments_of(node):
        matmuls = _matmuls(each)
        if matmuls is None or (each.meta["val"].shape, each.meta["val"].dtype) != (value.shape, value.dtype):
            return None
        found += matmuls
    return found
