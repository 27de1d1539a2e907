"""One call of an all-gather and the matrix products with what it gathers, in place of those of a graph.

torch's own micro-pipelining finds the same, but its results lie in memory with the gathered dimension in
front, which costs copies where that is not the first one."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from symmpool.fused.inductor.graphs import (
    VIEWS,
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

__all__ = ["fuse_gathers"]

_aten = torch.ops.aten
# Views of a weight that a matmul is made with.
_MOVES = (*VIEWS, _aten.permute.default, _aten.t.default, _aten.transpose.int)


class _Gather(NamedTuple):
    """An all-gather: what each rank has, what there is of all, along which dimension, and whose group."""

    shard: Node
    whole: Node
    dim: int
    group: str


def fuse_gathers(graph: Graph) -> int:
    """Makes one call of each all-gather and the matmuls of what it gathers, and returns how many there
    are."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    fused = []
    for wait in waits_of(graph):
        if _fuse(graph, wait, order):
            fused.append(wait)
            # A node that nobody needs any more would count as a user of later gathers' results.
            graph.eliminate_dead_code()
    return remove(graph, fused)


def _fuse(graph: Graph, wait: Node, order: dict[Node, int]) -> bool:
    """Replaces an all-gather, if there are matmuls of what it gathers; says whether it did."""
    found = _gather_of(wait)
    if found is None or not fits(found.whole, found.shard, found.dim) or not has_ours(found.group):
        return False
    here = order[wait]
    matmuls = [each for each in _matmuls(found.whole) if _is_there(each.args[1], order, here)]
    matmuls = matmuls[:MAX_MATMULS]
    if not matmuls:
        return False
    whole = found.whole.meta["val"]
    shapes = [(*whole.shape[:-1], each.meta["val"].shape[1]) for each in matmuls]
    values = whole.new_empty(whole.shape), [whole.new_empty(shape) for shape in shapes]
    with graph.inserting_before(wait):
        rights = [_brought(graph, arguments_of(each)[1], order, here) for each in matmuls]
        is_used = _is_used_by_others(found.whole, matmuls)
        target = torch.ops.symmpool.fused_all_gather_matmul.default
        call = made(graph, target, (found.shard, rights, found.dim, found.group), values)
        call.kwargs = {"return_A": is_used}
        outs = made(graph, operator.getitem, (call, 1), values[1])
        for nth, matmul in enumerate(matmuls):
            out = made(graph, operator.getitem, (outs, nth), values[1][nth])
            value = matmul.meta["val"]
            rows = made(graph, _aten.reshape.default, (out, list(value.shape)), value)
            matmul.replace_all_uses_with(rows)
            order[rows] = here
        if is_used:
            gathered = made(graph, operator.getitem, (call, 0), values[0])
            found.whole.replace_all_uses_with(gathered)
            order[gathered] = here
    return True


def _gather_of(wait: Node) -> _Gather | None:
    """The all-gather that a node waits for."""
    gather = wait.args[0]
    if not isinstance(gather, Node) or gather.target != c10d.all_gather_into_tensor.default:
        return None
    shard, world, group = arguments_of(gather)
    if len(gather.users) != 1 or not isinstance(group, str) or not isinstance(shard, Node):
        return None
    whole, dim = _concatenated(wait, world)
    return _Gather(shard, whole, dim, group)


def _concatenated(wait: Node, world: int) -> tuple[Node, int]:
    """Returns the gathered tensor and its dimension: along others than the first one, the ranks' parts are
    concatenated along that."""
    split = next(iter(wait.users), None)
    if split is None or len(wait.users) != 1 or split.target != _aten.split.Tensor:
        return wait, 0
    parts = list(split.users)
    cats = {user for part in parts for user in part.users}
    whole = next(iter(cats), None)
    if whole is None or len(cats) != 1 or whole.target != _aten.cat.default or len(whole.args) != 2:
        return wait, 0
    wanted = [(split, nth) for nth in range(world)]
    is_whole = whole.args[0] == parts and [part.args for part in parts] == wanted
    size = wait.meta["val"].shape[0] // world
    if not is_whole or split.args[1:] not in ((size,), (size, 0)):
        return wait, 0
    return whole, arguments_of(whole)[1] % wait.meta["val"].dim()


def _matmuls(node: Node) -> list[Node]:
    """The matmuls whose left matrix has the rows of a node."""
    found = []
    for user in node.users:
        if user.target == _aten.mm.default:
            left, right = arguments_of(user)
            if left is node and is_static(right.meta["val"]):
                found.append(user)
        elif keeps_rows(user):
            found += _matmuls(user)
    return found


def _is_used_by_others(node: Node, matmuls: list[Node]) -> bool:
    """Whether anything but these matmuls needs the rows of a node."""
    return any(
        _is_used_by_others(user, matmuls) if keeps_rows(user) else user not in matmuls for user in node.users
    )


def _is_there(node: object, order: dict[Node, int], here: int) -> bool:
    """Whether a right matrix is there at a place of the graph, or is a view of what is there."""
    if not isinstance(node, Node):
        return False
    if order.get(node, here) < here:
        return True
    return node.target in _MOVES and _is_there(node.args[0], order, here)


def _brought(graph: Graph, node: Node, order: dict[Node, int], here: int) -> Node:
    """A right matrix at the graph's place of insertion, to which views are brought."""
    if order.get(node, here) < here:
        return node
    base = _brought(graph, arguments_of(node)[0], order, here)
    return made(graph, node.target, (base, *node.args[1:]), node.meta["val"])
