"""Dispatches that give each expert of the rank a part of its own, `[local experts, rows, hidden]`: the form
that batched matrix multiplications take, without the host knowing any size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from symmpool.experts.checks import Dispatch, checked_combine
from symmpool.experts.door import Door
from symmpool.experts.received import Handle, scales_of

if TYPE_CHECKING:
    from symmpool.experts.buffer import ExpertBuffer

__all__ = ["combine_packed", "dispatch_packed"]


def dispatch_packed(
    door: Door,
    buffer: ExpertBuffer,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    rows: int,
    quantize: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, Handle]:
    """Sends tokens of an `ExpertBuffer` as its `dispatch` does. Returns `(x, scales, handle)`: the rows of
    each expert begin its part, by source rank and there in the order of tokens; `handle.expert_counts` says
    how many there are. Scales are `[local experts, rows, n]`, column-major in the last two dimensions;
    exponents (`"fp8_ue8m0"`) are four in an int32, where that comes out even. Runs on the current stream, and
    no gradient flows through it.

    Raises OverflowError where an expert was sent more than `rows` rows."""
    local, hidden = buffer.local_experts, buffer.hidden
    dtype, count, scales_dtype = buffer.dtype, 0, torch.float32
    if quantize is not None:
        dtype = torch.float8_e4m3fn
        count, scales_dtype = scales_of(hidden, quantize)
        if scales_dtype == torch.uint8 and count % 4 == 0:
            count, scales_dtype = count // 4, torch.int32
    out = torch.empty((local, rows, hidden), dtype=dtype, device=buffer.device)
    scales = flat = None
    if count:
        scales = torch.empty((local, count, rows), dtype=scales_dtype, device=buffer.device)
        flat = scales.view(local * rows, count)
    flat_rows = out.view(local * rows, hidden)
    given = Dispatch(x, topk_ids, None, quantize=quantize, layout="expert", out=flat_rows, out_scales=flat)
    _, handle, _ = buffer._dispatch(door, given, rows)
    return out, None if scales is None else scales.transpose(1, 2), handle


def combine_packed(
    door: Door,
    buffer: ExpertBuffer,
    x: torch.Tensor,
    handle: Handle,
    weights: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sends the rows of such parts back, multiplied by `weights`, `[tokens, top_k]`, and sums them up."""
    rows = x.view(-1, buffer.hidden)
    checked_combine(buffer, rows, handle, out)
    return buffer._combine(door, rows, handle, weights, out)[0]
