"""Calls of torch.distributed's that are made of several of ours: lists of reductions, and objects."""

from __future__ import annotations

import pickle
import reprlib
from typing import TYPE_CHECKING, Any

from symmpool.collectives.calls import make
from symmpool.collectives.functions import _end_graph, _listed, all_gather_into_tensor
from symmpool.collectives.reduce_op import ReduceOp, op_name
from symmpool.communicators import cache
from symmpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmpool.collectives.plans import Plan
    from symmpool.collectives.types import Op, Tensor
    from symmpool.communicators.work import Work
    from symmpool.groups.types import GroupLike

__all__ = ["all_gather_object", "all_reduce_coalesced"]


def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """Reduces every tensor of a list in place, in one call: they are of one type, and go by way of a copy.
    Otherwise as `all_reduce`."""
    listed = list(tensors) if isinstance(tensors, (list, tuple)) else []
    _end_graph("all_reduce_coalesced", next(iter(listed), None), group)

    def plan(rank: int, world: int) -> Plan:
        from symmpool.collectives import plans

        if not listed:
            raise InvalidArgumentError(f"tensors: a list of tensors is needed, not {reprlib.repr(tensors)}")
        return plans.all_reduce_coalesced(_listed("tensors", listed), op_name(op), world)

    return make(next(iter(listed), None), group, plan, async_op, listed)


def all_gather_object(object_list: list[Any], obj: object, group: GroupLike = None) -> None:
    """Puts every rank's object into `object_list`, in the order of ranks. Objects travel as pickles, in host
    memory; so receive them of ranks only that you trust, as with torch's. It needs torch."""
    import torch

    entry = cache.look_up(None, group, -1)
    if entry is None:
        return
    world = entry.comm.world
    with entry.preparing():
        if not isinstance(object_list, list) or len(object_list) < world:
            raise InvalidArgumentError(f"object_list: a list with room for {world} objects is needed")
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        sizes = torch.zeros(world, dtype=torch.int64, device="cpu")
        mine = torch.tensor([data.numel()], device="cpu")
    all_gather_into_tensor(sizes, mine, group)
    with entry.preparing():
        longest = int(sizes.max())
        sent = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        sent[: data.numel()] = data
        found = torch.empty(world * longest, dtype=torch.uint8, device="cpu")
    all_gather_into_tensor(found, sent, group)
    parts = found.view(world, longest)
    for rank, size in enumerate(sizes.tolist()):
        object_list[rank] = pickle.loads(parts[rank, :size].numpy().tobytes())
