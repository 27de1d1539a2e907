"""Low-latency mode: dispatches to a part for each expert, without the host, and combines with weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from symmpool.deep_ep import checks
from symmpool.deep_ep.cores import Cores
from symmpool.deep_ep.handles import LowLatencyHandle
from symmpool.experts.door import Door
from symmpool.experts.packed import combine_packed, dispatch_packed

if TYPE_CHECKING:
    from symmpool import experts

__all__ = ["CombineBuffers", "combine", "dispatch"]

Call = Callable[[], Any]


def dispatch(
    door: Door, owner: Any, cores: Cores, x: torch.Tensor, topk_idx: torch.Tensor, most: int, count: int,
    formats: tuple[bool, bool, bool], statistics: torch.Tensor | None, waits: torch.Tensor | None,
    masked: torch.Tensor | None,
) -> Call:  # fmt: skip
    """Returns the function that makes a dispatch: it returns `(x, scales or None, counts, memory of the
    handle, handle)`."""
    world = cores.world
    compared = checks.check_low_latency(x, topk_idx, most, count, world, formats)
    if statistics is not None:
        name, shape = "cumulative_local_expert_recv_stats", (count // world,)
        checks.matrix(name, statistics, torch.int32, shape, x.device)
    checks.check_waits("dispatch_wait_recv_cost_stats", waits, world, x.device)
    key = (compared["hidden"], count, compared["top_k"], most)
    core = cores.find_low_latency(key)
    if core is None:
        cores.check_capture("there is no buffer for this shape, and none is made")
        cores.agree(door, **compared)
        core = cores.low_latency(door, key)
    use_fp8, round_scale, use_ue8m0 = formats
    rows, local = world * most, count // world

    def call() -> Any:
        quantize = None
        if use_fp8:
            quantize = "fp8_ue8m0" if use_ue8m0 else "fp8_pow2" if round_scale else "fp8"
        ids = topk_idx
        if masked is not None:
            ids = torch.where(masked[(ids // local).clamp(0, world - 1)] | masked[cores.rank], -1, ids)
        _measure(door, core, waits)
        out, scales, kept = dispatch_packed(door, core, x.detach(), ids, rows, quantize)
        counts = kept.expert_counts
        if statistics is not None:
            statistics.add_(counts)
            # Calls on several streams add to the same numbers.
            core.extend_order()
        handle = LowLatencyHandle(owner, kept, most, (local, rows))
        return out, scales, counts, kept.memory, handle

    return call


def combine(
    door: Door,
    handle: LowLatencyHandle,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor | None,
    waits: torch.Tensor | None,
) -> Call:
    """Returns the function that makes a combine: it returns `(sums,)`."""
    core, kept = handle.kept.buffer, handle.kept
    local, rows = handle.shape

    checks.matrix("x", x, torch.bfloat16, (local, rows, core.hidden), core.device)
    if not x.is_contiguous():
        raise checks.invalid("x: it is not contiguous")
    chosen = (kept.tokens, core.top_k)
    checks.matrix("topk_idx", topk_idx, torch.int64, chosen, core.device)
    checks.matrix("topk_weights", topk_weights, torch.float32, chosen, core.device)
    if out is not None:
        checks.matrix("out", out, torch.bfloat16, (kept.tokens, core.hidden), core.device)
        if not out.is_contiguous():
            raise checks.invalid("out: it is not contiguous")
    checks.check_waits("combine_wait_recv_cost_stats", waits, core.world, core.device)

    def call() -> Any:
        given = topk_weights.detach().contiguous()
        to = None if out is None else out.detach()
        _measure(door, core, waits)
        sums = combine_packed(door, core, x.detach(), kept, given, to)
        return (sums if out is None else out,)

    return call


def _measure(door: Door, core: experts.ExpertBuffer, waits: torch.Tensor | None) -> None:
    """Waits for all ranks, and adds how long that took for each."""
    if waits is None:
        return
    barrier = functools.partial(core._entry.comm.barrier, waits=waits)
    core._entry.run(door.closing(barrier, False), (), [], False)


class CombineBuffers:
    """Buffers of `get_next_low_latency_combine_buffer`: two tensors of each shape by turns, so that one can
    be filled while a combine still reads the other. Made when they are first asked for."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self._turn: dict[tuple[int, ...], int] = {}

    def _key(self, handle: LowLatencyHandle) -> tuple[int, ...]:
        return (*handle.shape, handle.kept.buffer.hidden)

    def next(self, handle: LowLatencyHandle) -> torch.Tensor:
        """The tensor that the next combine with `zero_copy` reads."""
        key = self._key(handle)
        turn = self._turn.setdefault(key, 0)
        tensors = self._made.setdefault(key, [])
        if turn == len(tensors):
            device = handle.kept.buffer.device
            tensors.append(torch.empty(key, dtype=torch.bfloat16, device=device))
        return tensors[turn]

    def filled(self, handle: LowLatencyHandle) -> torch.Tensor | None:
        """That tensor, for a combine; None if it was not asked for."""
        key = self._key(handle)
        turn, tensors = self._turn.get(key, 0), self._made.get(key, [])
        return tensors[turn] if turn < len(tensors) else None

    def turn(self, handle: LowLatencyHandle) -> None:
        """Has the other tensor come next, once a combine was made of this one."""
        key = self._key(handle)
        self._turn[key] = 1 - self._turn[key]

    def memory(self) -> int:
        """Their bytes."""
        return sum(tensor.nbytes for tensors in self._made.values() for tensor in tensors)
