"""The gradients of dispatch and combine: that of one is the other.

Every rank goes backward through the same calls, in the same order: what comes of a dispatch belongs to the
loss on every rank, with rows or without. Received rows are copies here, whose unused rows are zeros, so that
no gradient of parameters depends on what lay there."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch

from symmpool.errors import InvalidArgumentError

__all__ = ["WeightsBuffer", "combine", "dispatch"]


class WeightsBuffer:
    """Sends weights of tokens, or their gradients, the way that rows go; by the handles of another buffer."""

    def __init__(self, buffer: Any, core: Any, width: int):
        # That buffer keeps this one.
        self._buffer, self._core, self._width = weakref.proxy(buffer), core, width
        block = core.received("rows", [buffer.capacity, 4 * width], "uint8")
        self._rows = torch.from_dlpack(block).view(torch.float32)

    def memory(self) -> dict[str, int]:
        return {"total": sum(self._core.memory().values())}

    def _padded(self, values: torch.Tensor) -> torch.Tensor:
        rows = values.new_zeros((values.shape[0], self._width), dtype=torch.float32)
        rows[:, : values.shape[1]] = values
        return rows

    def send(self, weights: torch.Tensor, handle: Any) -> torch.Tensor:
        """The weights of received tokens, `[capacity, top_k]`; of experts elsewhere, too."""
        buffer = self._buffer
        arguments = (handle.memory, self._padded(weights), None)
        buffer._run(self._core.dispatch, arguments, False, None)
        received = self._rows[:, : buffer.top_k].clone()
        buffer.extend_order()
        return received

    def send_back(self, gradients: torch.Tensor, handle: Any) -> torch.Tensor:
        """The sums of `gradients`, `[received, top_k]`, of each token: `[tokens, top_k]`."""
        buffer, rows = self._buffer, self._padded(gradients)
        out = rows.new_empty((handle.tokens, self._width))
        buffer._run(self._core.combine, (handle.memory, out, rows, 0), False, None)
        return out[:, : buffer.top_k].contiguous()


def _received(handle: Any, rows: int) -> torch.Tensor:
    """Which of so many rows are received tokens: `[rows, 1]`."""
    at = torch.arange(rows, device=handle.memory.device)
    return (at < handle.num_received)[:, None]


def _used(rows: torch.Tensor, handle: Any) -> torch.Tensor:
    """A copy of rows by rank, with zeros where none was received."""
    return torch.where(_received(handle, rows.shape[0]), rows, 0)


def _refuse(buffer: Any, why: str) -> None:
    buffer._entry.refuse(why)
    raise InvalidArgumentError(why)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weights: Any, buffer: Any, ids: Any, options: Any, result: Any) -> Any:
        given = None if weights is None else weights.detach()
        received, handle = buffer._dispatch(x.detach(), ids, given, **options)
        result.extend((received, handle))
        ctx.buffer, ctx.handle = buffer, handle
        ctx.weighted = weights is not None and ctx.needs_input_grad[1]
        if handle.layout == "expert":
            return received.x, None
        rows = _used(received.x, handle)
        if received.topk_weights is None:
            buffer.extend_order()
            return rows, None
        here = _received(handle, rows.shape[0]) & (received.topk_ids >= 0)
        ctx.save_for_backward(here)
        row_weights = torch.where(here, received.topk_weights, 0)
        # Received rows were read: the next call, on whatever stream, comes behind that.
        buffer.extend_order()
        if not ctx.weighted:
            ctx.mark_non_differentiable(row_weights)
        return rows, row_weights

    @staticmethod
    def backward(ctx: Any, rows: Any, row_weights: Any) -> Any:
        buffer, handle = ctx.buffer, ctx.handle
        x = weights = None
        if ctx.needs_input_grad[0]:
            ones = None
            if handle.layout == "expert":
                ones = torch.ones((handle.tokens, buffer.top_k), device=buffer.device)
            x = buffer._combine(rows.contiguous(), handle, ones)
        if ctx.weighted and handle.layout == "rank":
            (here,) = ctx.saved_tensors
            weights = buffer._for_weights().send_back(torch.where(here, row_weights, 0), handle)
        return x, weights, None, None, None, None


def dispatch(buffer: Any, x: Any, ids: Any, weights: Any, options: dict[str, Any]) -> Any:
    """`Buffer.dispatch` where a gradient flows."""
    if options["quantize"] is not None or options["scales"] is not None:
        _refuse(buffer, "quantize, scales: no gradient flows through quantised tokens; pass x.detach()")
    if options["hook"]:
        _refuse(buffer, "hook: no gradient flows through calls with hooks; pass x.detach()")
    if options["out"] is not None:
        _refuse(buffer, "out: no gradient flows through what is written; pass x.detach()")
    by_expert = options["layout"] == "expert"
    if by_expert and options["handle"] is None and isinstance(options["alignment"], int):
        rows = buffer._core.capacity(True, options["alignment"])
        options = {**options, "out": x.new_zeros((rows, buffer.hidden))}
    elif by_expert and options["handle"] is not None:
        options = {**options, "out": x.new_zeros((options["handle"].rows, buffer.hidden))}
    if not by_expert and weights is not None and weights.requires_grad:
        buffer._for_weights()
    result: list[Any] = []
    rows, row_weights = _Dispatch.apply(x, weights, buffer, ids, options, result)
    received, handle = result
    if by_expert:
        handle.weights = weights
        row_weights = None
    return dataclasses.replace(received, x=rows, topk_weights=row_weights), handle


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, expert_output: Any, weights: Any, buffer: Any, handle: Any, given: Any) -> Any:
        ctx.buffer, ctx.handle, ctx.given = buffer, handle, given
        ctx.save_for_backward(expert_output, weights)
        sent = weights.detach() if given else None
        return buffer._combine(expert_output.detach(), handle, sent)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        buffer, handle = ctx.buffer, ctx.handle
        expert_output, weights = ctx.saved_tensors
        gradient = gradient.contiguous()
        if handle.layout == "rank":
            received, _ = buffer._dispatch(gradient, None, None, handle=handle)
            count = expert_output.shape[0]
            rows = _used(received.x, handle)[:count]
            buffer.extend_order()
            return rows, None, None, None, None
        out = torch.zeros_like(expert_output)
        buffer._dispatch(gradient, None, None, layout="expert", handle=handle, out=out)
        by_weights = handle.kept_weights
        if ctx.given:
            by_weights = buffer._for_weights().send(weights, handle)
        places = handle.places.long()
        valid = _received(handle, places.shape[0]) & (places >= 0)
        # What is not valid goes to a row behind the last one.
        count = expert_output.shape[0]
        at = torch.where(valid, places, count)
        row_weights = torch.zeros(count + 1, device=buffer.device)
        row_weights[at.flatten()] = by_weights.flatten()
        rows = (out.float() * row_weights[:count, None]).to(buffer.dtype)
        weights_gradient = None
        if weights is not None and ctx.needs_input_grad[1]:
            products = torch.zeros(count + 1, device=buffer.device)
            products[:count] = (out.float() * expert_output.float()).sum(1)
            parts = torch.where(valid, products[at], 0)
            weights_gradient = buffer._for_weights().send_back(parts, handle)
        return rows, weights_gradient, None, None, None


def combine(buffer: Any, expert_output: Any, handle: Any, weights: Any, out: Any, hook: bool) -> Any:
    """`Buffer.combine` where a gradient flows."""
    buffer._refusing(buffer._check_handle, handle)
    if hook or out is not None:
        _refuse(buffer, "out, hook: no gradient flows through such calls; pass expert_output.detach()")
    given = weights is not None
    differentiable = weights if given else handle.weights
    if handle.layout == "expert" and differentiable is not None and (given or differentiable.requires_grad):
        buffer._for_weights()
    if handle.layout == "rank":
        differentiable = weights
    return _Combine.apply(expert_output, differentiable, buffer, handle, given)
