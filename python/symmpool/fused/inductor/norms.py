"""One call of an all-reduce, a residual and a norm, in place of those of a graph.

All-reduces are those of functional collectives, which DTensor and compiled `torch.distributed` calls become,
of sums; norms are `torch.nn.functional.rms_norm` and the form that models of Hugging Face write out."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from symmpool.fused.inductor.graphs import VIEWS, arguments_of, c10d, made, remove, waits_of
from symmpool.fused.operators import has_ours

__all__ = ["fuse_norms"]

_aten, _prims = torch.ops.aten, torch.ops.prims
_ADDS = (_aten.add.Tensor, _aten.add.Scalar)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class _Norm(NamedTuple):
    """A norm of a sum: its weight and eps, and the node that is its result."""

    weight: Node
    eps: float
    result: Node


def fuse_norms(graph: Graph) -> int:
    """Makes one call of each all-reduce, the residual and the norm behind it, and returns how many there
    are."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    return remove(graph, [wait for wait in waits_of(graph) if _fuse(graph, wait, order)])


def _fuse(graph: Graph, wait: Node, order: dict[Node, int]) -> bool:
    """Replaces what follows an all-reduce, if it is what the call does; says whether it did."""
    reduced = wait.args[0]
    if not isinstance(reduced, Node) or reduced.target != c10d.all_reduce.default:
        return False
    x, op, group = reduced.args
    if op != "sum" or len(reduced.users) != 1 or not isinstance(group, str) or not isinstance(x, Node):
        return False
    if not has_ours(group):
        return False
    whole = _reshaped(wait)
    for total, residual in _sums(whole):
        norm = _norm_of(total)
        if norm is None or not _fits(total, residual, norm.weight):
            continue
        # The call's arguments must be there where the sum is made.
        if any(order.get(each, len(order)) > order[total] for each in (residual, norm.weight) if each):
            continue
        with graph.inserting_before(total):
            given = x
            if whole is not wait:
                given = made(graph, whole.target, (x, whole.args[1]), whole.meta["val"])
            rest = (None, norm.eps, 0.0, "none", None, "row", False, "auto", group)
            arguments = (given, residual, norm.weight, *rest)
            empty = total.meta["val"].new_empty(0)
            values = (norm.result.meta["val"], total.meta["val"], empty.float())
            call = made(graph, torch.ops.symmpool.all_reduce_rms_norm.default, arguments, values)
            out, sums = (made(graph, operator.getitem, (call, nth), values[nth]) for nth in range(2))
        # They stand where the sum was, for calls of which they are the residual.
        order[out] = order[sums] = order[total]
        norm.result.replace_all_uses_with(out)
        total.replace_all_uses_with(sums)
        return True
    return False


def _reshaped(wait: Node) -> Node:
    """Returns the node that is computed with: the result of an all-reduce, or the one view of it."""
    users = list(wait.users)
    return users[0] if len(users) == 1 and users[0].target in VIEWS else wait


def _sums(reduced: Node) -> Iterator[tuple[Node, Node | None]]:
    """The sums of a reduced tensor and a residual, and the reduced tensor. Nobody else may use that where
    a residual was added, as it is not there any more."""
    users = list(reduced.users)
    if len(users) == 1 and users[0].target == _aten.add.Tensor and not users[0].kwargs:
        one, other = users[0].args
        residual = other if one is reduced else one
        if isinstance(residual, Node) and residual is not reduced:
            yield users[0], residual
    yield reduced, None


def _fits(total: Node, residual: Node | None, weight: Node) -> bool:
    """Whether the call takes such tensors."""
    value, scale = total.meta.get("val"), weight.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(scale, torch.Tensor) or value.dim() == 0:
        return False
    hidden = value.shape[-1]
    if not isinstance(hidden, int) or hidden % 8 or not 8 <= hidden <= 65536:
        return False
    if value.dtype not in _DTYPES or scale.dtype != value.dtype or tuple(scale.shape) != (hidden,):
        return False
    for each in (total, residual):
        found = each.meta.get("val") if each is not None else value
        if not isinstance(found, torch.Tensor) or found.shape != value.shape or found.dtype != value.dtype:
            return False
        if not found.is_contiguous() or found.device != scale.device:
            return False
    return True


def _only(node: Node | None, target: object) -> Node | None:
    """The one user of a node, if there is one and it calls `target`."""
    users = list(node.users) if node is not None else []
    targets = target if isinstance(target, tuple) else (target,)
    return users[0] if len(users) == 1 and users[0].target in targets else None


def _norm_of(total: Node) -> _Norm | None:
    """The norm that is made of a node, in float32 and with a weight."""
    value = total.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    if value.dtype == torch.float32:
        return _norm_of_wide(total, value)
    for wide in total.users:
        if wide.target == _prims.convert_element_type.default and wide.args[1] == torch.float32:
            found = _norm_of_wide(wide, value)
            if found is not None and len(wide.users) == 2:
                return found
    return None


def _norm_of_wide(wide: Node, value: torch.Tensor) -> _Norm | None:
    """The norm of a node in float32, whose result has the type of `value`."""
    for square in wide.users:
        is_power = square.target == _aten.pow.Tensor_Scalar and square.args[1] == 2
        if not is_power and not (square.target == _aten.mul.Tensor and square.args == (wide, wide)):
            continue
        mean = _only(square, _aten.mean.dim)
        if mean is None or mean.args[1:] not in (([-1], True), ([value.dim() - 1], True)):
            continue
        shifted = _only(mean, _ADDS)
        eps = shifted.args[1] if shifted is not None and not shifted.kwargs else None
        if not isinstance(eps, (int, float)):
            continue
        root = _only(shifted, _aten.rsqrt.default)
        normed = _only(root, _aten.mul.Tensor)
        if normed is None or set(normed.args) != {wide, root}:
            continue
        found = _weighted(normed, value.dtype)
        if found is not None:
            return _Norm(found[0], float(eps), found[1])
    return None


def _weighted(normed: Node, dtype: torch.dtype) -> tuple[Node, Node] | None:
    """The weight by which a norm is multiplied, before or after it is rounded, and the result."""
    convert = _prims.convert_element_type.default
    rounded = normed if dtype == torch.float32 else _only(normed, convert)
    if rounded is not None and (rounded is normed or rounded.args[1] == dtype):
        matmul = _only(rounded, _aten.mul.Tensor)
        return (_factor(matmul, rounded), matmul) if matmul is not None else None
    matmul = _only(normed, _aten.mul.Tensor)
    rounded = _only(matmul, convert)
    if matmul is None or rounded is None or rounded.args[1] != dtype:
        return None
    weight = _factor(matmul, normed)
    # A weight that is widened first, or by the multiplication.
    if weight.target == convert and weight.args[1] == torch.float32:
        weight = arguments_of(weight)[0]
    return weight, rounded


def _factor(matmul: Node, known: Node) -> Node:
    one, other = arguments_of(matmul)
    return other if one is known else one
