"""Normal mode: dispatches whose sizes the host waits for, and combines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from symmpool.deep_ep import checks
from symmpool.deep_ep.cores import DTYPES, Cores
from symmpool.deep_ep.handles import InternodeHandle, NormalHandle
from symmpool.experts.checks import Dispatch
from symmpool.experts.door import Door

__all__ = ["again", "combine", "dispatch", "layout"]

#: One tensor or two to add to the sums, or None.
Bias = torch.Tensor | tuple[torch.Tensor | None, ...] | list[torch.Tensor] | None
Call = Callable[[], Any]


def layout(
    topk_idx: torch.Tensor, num_experts: int, hosts: tuple[tuple[int, ...], ...]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """`(num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank)`, the second
    one None on one host. An id that is no expert counts as -1, until a dispatch says so."""
    device, world = topk_idx.device, sum(map(len, hosts))
    # Few operations: each is a kernel to launch. What is nowhere is counted in front of the first expert, or
    # behind the last one.
    of_experts = torch.zeros(num_experts + 2, dtype=torch.int32, device=device)
    slots = topk_idx.clamp(-1, num_experts).add_(1).flatten()
    of_experts.scatter_add_(0, slots, torch.ones(1, dtype=torch.int32, device=device).expand(slots.shape))
    ranks = torch.arange(world, dtype=torch.int64, device=device)
    rank = topk_idx.div(num_experts // world, rounding_mode="floor")
    in_rank = (rank[:, :, None] == ranks).any(1)
    of_hosts = None
    if len(hosts) > 1:
        on_host = [in_rank[:, list(there)].any(1).sum(dtype=torch.int32) for there in hosts]
        of_hosts = torch.stack(on_host)
    return in_rank.sum(0, dtype=torch.int32), of_hosts, of_experts[1:-1], in_rank


def dispatch(
    door: Door, owner: Any, cores: Cores, x: torch.Tensor, scales: torch.Tensor | None,
    routing: dict[str, Any], worst: int, alignment: int, num_sms: int,
) -> Call:  # fmt: skip
    """Returns the function that makes a dispatch: it returns `(x, scales, ids, weights, memory of the handle,
    list of counts, handle)`."""
    compared = checks.check_normal(x, scales, cores.world, routing, worst, alignment)
    key = (compared["hidden"], compared["num_experts"], DTYPES[compared["dtype"]])
    ids, weights = routing["topk_idx"], routing["topk_weights"]
    top_k = compared["top_k"] or cores.world
    core = cores.find_worst(key, worst, top_k) if worst else None
    if core is None:
        cores.check_capture("the host waits for sizes" if not worst else "there is no buffer for this shape")
        found = cores.agree(door, **compared)
        make = (cores.worst, worst, top_k) if worst else (cores.normal, top_k)
        core = make[0](door, key, found, *make[1:])
    core._core.set_num_sms(num_sms)

    def call() -> Any:
        local = compared["num_experts"] // cores.world
        given = weights
        if ids is None:
            # Any expert of a rank stands for it.
            ranks = torch.arange(cores.world, dtype=torch.int64, device=x.device) * local
            chosen = torch.where(routing["is_token_in_rank"], ranks, -1)
        else:
            chosen = ids
        if core.top_k > chosen.shape[1]:
            more = core.top_k - chosen.shape[1]
            chosen = pad(chosen, (0, more), value=-1)
            given = None if given is None else pad(given, (0, more))
        lists: list[int] = []
        if ids is None:
            counts = torch.empty((cores.world, local), dtype=torch.int32, device=x.device)
            sent = routing["num_tokens_per_expert"].clone()
            entry = core._entry
            call = door.closing(entry.comm.all_to_all_single, False)
            entry.run(call, (counts.view(-1), sent), [], False)
            if not worst:
                # Read ahead of the dispatch, for whose rows nobody waits then.
                lists = counts.sum(0).tolist()
        asked = Dispatch(
            x.detach(),
            chosen.contiguous(),
            None if given is None else given.detach().contiguous(),
            scales=None if scales is None else scales.detach().contiguous(),
            exact=not worst,
        )
        # Until what the call has left is copied.
        with core.in_turn():
            received, kept, _ = core._dispatch(door, asked)
            rows = worst
            if not worst:
                rows = kept.rows
                counted = lists or kept.counts
                assert counted is not None  # an exact dispatch knows them
                lists = [-(-count // alignment) * alignment for count in counted]
            kept.rows = rows
            of_ids = of_weights = None
            if ids is not None:
                of_ids, of_weights = _chosen(received, kept, rows, compared["top_k"], bool(worst))
            found = _rows(received, rows)
            # Received rows were read: the next call, on whatever stream, comes behind that.
            core.extend_order()
        kind = InternodeHandle if cores.spans_hosts(core) else NormalHandle
        handle = kind(owner, kept, rows, compared["top_k"] or None, routing["is_token_in_rank"])
        return (*found, of_ids, of_weights, kept.memory, lists, handle)

    return call


def _rows(received: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """New tensors of the first rows: the next call writes where they lie."""
    count = received.x.shape[0]

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if rows <= count:
            return tensor[:rows].clone(memory_format=torch.contiguous_format)
        found = tensor.new_empty((rows, tensor.shape[1]))
        found[:count] = tensor
        return found

    return own(received.x), None if received.scales is None else own(received.scales)


def _chosen(received: Any, kept: Any, rows: int, top_k: int, tail: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of rows, int64, and their weights: 0 where an expert is elsewhere. With `tail`, -1 behind the
    rows that were received."""
    ids, weights = (each[:rows, :top_k] for each in (received.topk_ids, received.topk_weights))
    there = ids >= 0
    if tail:
        at = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device)
        there = there & (at < kept.num_received)[:, None]
    missing = rows - ids.shape[0]
    ids = torch.where(there, ids, -1).to(torch.int64)
    weights = torch.where(there, weights, 0.0)
    if missing > 0:
        ids, weights = pad(ids, (0, 0, 0, missing), value=-1), pad(weights, (0, 0, 0, missing))
    return ids, weights


def again(
    door: Door,
    handle: NormalHandle,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    ids: torch.Tensor | None,
    weights: torch.Tensor | None,
    num_sms: int,
) -> Call:
    """A dispatch of other tokens the same way: what returns `(x, scales)`."""
    core = handle.kept.buffer
    checks.check_again(x, scales, handle, ids, weights)
    core._core.set_num_sms(num_sms)

    def call() -> Any:
        given = None if scales is None else scales.detach().contiguous()
        asked = Dispatch(x.detach(), None, None, scales=given, handle=handle.kept)
        with core.in_turn():
            received, _, _ = core._dispatch(door, asked)
            own = _rows(received, handle.rows)
            core.extend_order()
            return own

    return call


def combine(
    door: Door, handle: NormalHandle, x: Any, topk_weights: torch.Tensor | None, bias: Bias, num_sms: int
) -> Call:
    """A combine: what returns `(x, topk_weights)`."""
    core, kept = handle.kept.buffer, handle.kept
    biases = bias if isinstance(bias, (tuple, list)) else (bias,)

    checks.matrix("x", x, core.dtype, (handle.rows, core.hidden), core.device)
    if not x.is_contiguous():
        raise checks.invalid("x: it is not contiguous")
    if topk_weights is not None:
        checks.matrix("topk_weights", topk_weights, torch.float32, (handle.rows, None), core.device)
        if topk_weights.shape[1] > core.top_k:
            raise checks.invalid(
                f"topk_weights: {topk_weights.shape[1]} of a token, where there are {core.top_k}"
            )
    if len(biases) > 2:
        raise checks.invalid(f"bias: {len(biases)} tensors, where there are at most two")
    for each in biases:
        if each is not None:
            checks.matrix("bias", each, core.dtype, (kept.tokens, core.hidden), core.device)
    if topk_weights is not None and core._weights_buffer is None:
        handle.owner._cores_on(core.device).check_capture("the first weights make a buffer, and none is made")
    core._core.set_num_sms(num_sms)

    def call() -> Any:
        sums, _ = core._combine(door, x.detach(), kept, more=int(topk_weights is not None))
        weights = None
        if topk_weights is not None:
            weights = core._for_weights(door).send_back(door, topk_weights.detach(), kept)
            weights = weights[:, : topk_weights.shape[1]].contiguous()
        added = [each for each in biases if each is not None]
        if added:
            exact = sums.float()
            for each in added:
                exact += each
            sums = exact.to(core.dtype)
        return sums, weights

    return call
