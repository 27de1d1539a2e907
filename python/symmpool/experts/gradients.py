"""The gradients of dispatch and combine: that of one is the other.

Every rank goes backward through the same calls, in the same order: what comes of a dispatch belongs to the
loss on every rank, with rows or without. Received rows are copies here, whose unused rows are zeros, so that
no gradient of parameters depends on what lay there.

`ExpertBuffer` and the operators go backward through the same two functions, `dispatched` and `combined`. Each
makes up to three calls, and its door stands open until the last of them."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from symmpool.errors import InvalidArgumentError
from symmpool.experts import checks
from symmpool.experts.checks import Dispatch
from symmpool.experts.door import Door
from symmpool.experts.received import received_rows

if TYPE_CHECKING:
    from symmpool._symmpool import ExpertBufferCore
    from symmpool.experts.buffer import ExpertBuffer
    from symmpool.experts.received import Handle, Received

__all__ = ["WeightsBuffer", "combine", "combined", "dispatch", "dispatched"]


class WeightsBuffer:
    """Sends weights of tokens, or their gradients, the way that rows go; by the handles of another buffer."""

    def __init__(self, buffer: ExpertBuffer, core: ExpertBufferCore, width: int):
        # That buffer keeps this one.
        self._buffer, self._core, self._width = weakref.proxy(buffer), core, width
        block = core.received("rows", [buffer.capacity, 4 * width], "uint8")
        self._rows = torch.from_dlpack(block).view(torch.float32)

    def memory(self) -> dict[str, int]:
        """Bytes of symmetric memory that it takes, as `{"total": bytes}`."""
        return {"total": sum(self._core.memory().values())}

    def _padded(self, values: torch.Tensor) -> torch.Tensor:
        rows = values.new_zeros((values.shape[0], self._width), dtype=torch.float32)
        rows[:, : values.shape[1]] = values
        return rows

    def send(self, door: Door, weights: torch.Tensor, handle: Handle, more: int) -> torch.Tensor:
        """The weights of received tokens, `[capacity, top_k]`; of experts elsewhere, too. `more` calls follow
        that belong to it."""
        buffer = self._buffer
        arguments = (handle.memory, self._padded(weights), None)

        def left() -> torch.Tensor:
            # The next call, on whatever stream, writes where these rows lie.
            received = self._rows[:, : buffer.top_k].clone()
            buffer.extend_order()
            return received

        found, _ = buffer._run(door, self._core.dispatch, arguments, False, left, more)
        return found

    def send_back(self, door: Door, gradients: torch.Tensor, handle: Handle) -> torch.Tensor:
        """The sums of `gradients`, `[received, top_k]`, of each token: `[tokens, top_k]`."""
        buffer, rows = self._buffer, self._padded(gradients)
        out = rows.new_empty((handle.tokens, self._width))
        arguments = (handle.memory, out, rows, 0)
        found, _ = buffer._run(
            door, self._core.combine, arguments, False, lambda: out[:, : buffer.top_k].contiguous()
        )
        return found


# --- what goes backward


def dispatched(
    door: Door,
    buffer: ExpertBuffer,
    handle: Handle,
    rows: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    here: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of a dispatch's tokens and weights, from those of its rows and, by rank, of their
    weights. What there is none of is None. `here` says which weights are of experts of this rank."""
    x = weights = None
    if rows is not None:
        ones = None
        if handle.layout == "expert":
            ones = torch.ones((handle.tokens, buffer.top_k), device=buffer.device)
        more = int(row_weights is not None)
        x, _ = buffer._combine(door, rows.contiguous(), handle, ones, more=more)
    if row_weights is not None:
        assert here is not None  # weights come with it
        gradients = torch.where(here, row_weights, 0)
        weights = buffer._for_weights(door).send_back(door, gradients, handle)
    return x, weights


def combined(
    door: Door,
    buffer: ExpertBuffer,
    handle: Handle,
    gradient: torch.Tensor,
    expert_output: torch.Tensor,
    weights: torch.Tensor | None,
    of_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of a combine's rows and, with `of_weights`, of weights, from that of its sums. Rows by
    expert were multiplied by `weights`, or without them by those that the handle keeps. Rows by rank are as
    many as `expert_output` has."""
    gradient = gradient.contiguous()
    count = expert_output.shape[0]
    if handle.layout == "rank":
        given = Dispatch(gradient, None, None, handle=handle, copy=True)
        received, _, _ = buffer._dispatch(door, given)
        return received.x[:count], None
    out = torch.zeros_like(expert_output)
    more = int(weights is not None) + int(of_weights)
    given = Dispatch(gradient, None, None, layout="expert", handle=handle, out=out, more=more)
    buffer._dispatch(door, given)
    by_weights = handle.kept_weights
    if weights is not None:
        by_weights = buffer._for_weights(door).send(door, weights, handle, int(of_weights))
    places = handle.places.long()
    valid = received_rows(handle, places.shape[0]) & (places >= 0)
    # Places that are not valid go to a row behind the last one.
    at = torch.where(valid, places, count).clamp(max=count)
    row_weights = torch.zeros(count + 1, device=buffer.device)
    row_weights[at.flatten()] = by_weights.flatten()
    rows = (out.float() * row_weights[:count, None]).to(buffer.dtype)
    weights_gradient = None
    if of_weights:
        products = torch.zeros(count + 1, device=buffer.device)
        products[:count] = (out.float() * expert_output.float()).sum(1)
        parts = torch.where(valid, products[at], 0)
        weights_gradient = buffer._for_weights(door).send_back(door, parts, handle)
    return rows, weights_gradient


# --- `ExpertBuffer.dispatch` and `ExpertBuffer.combine` where a gradient flows


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weights: Any, door: Door, buffer: Any, given: Dispatch, result: Any) -> Any:
        detached = None if weights is None else weights.detach()
        given = dataclasses.replace(given, x=x.detach(), weights=detached)
        received, handle, _ = buffer._dispatch(door, given)
        result.extend((received, handle))
        ctx.buffer, ctx.handle = buffer, handle
        ctx.weighted = weights is not None and ctx.needs_input_grad[1] and handle.layout == "rank"
        if received.topk_weights is None:
            return received.x, None
        here = received.topk_ids >= 0
        ctx.save_for_backward(here)
        row_weights = torch.where(here, received.topk_weights, 0)
        if not ctx.weighted:
            ctx.mark_non_differentiable(row_weights)
        return received.x, row_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Any, row_weights: Any) -> Any:
        with Door(ctx.buffer._entry.preparing) as door:
            (here,) = ctx.saved_tensors or (None,)
            rows = rows if ctx.needs_input_grad[0] else None
            row_weights = row_weights if ctx.weighted else None
            x, weights = dispatched(door, ctx.buffer, ctx.handle, rows, row_weights, here)
        return x, weights, None, None, None, None


def dispatch(door: Door, buffer: ExpertBuffer, given: Dispatch, copy: object) -> tuple[Received, Handle]:
    """`ExpertBuffer.dispatch` where a gradient flows."""
    if given.quantize is not None or given.scales is not None:
        raise InvalidArgumentError(
            "quantize, scales: no gradient flows through quantised tokens; pass x.detach()"
        )
    if given.hook:
        raise InvalidArgumentError("hook: no gradient flows through calls with hooks; pass x.detach()")
    if given.out is not None:
        raise InvalidArgumentError("out: no gradient flows through what is written; pass x.detach()")
    if copy is not None and not copy:
        raise InvalidArgumentError("copy=False: gradients flow through copies; pass x.detach()")
    weights = checks.tensor("topk_weights", given.weights)
    for name, tensor in (("x", given.x), ("topk_weights", weights)):
        if tensor is not None:
            checks.readable(name, tensor)
    by_expert = given.layout == "expert"
    if not by_expert and checks.has_grad(weights):
        buffer._for_weights(door)
    result: list[Any] = []
    rows, row_weights = _Dispatch.apply(given.x, weights, door, buffer, given, result)
    received, handle = result
    if by_expert:
        handle.weights = weights
        row_weights = None
    return dataclasses.replace(received, x=rows, topk_weights=row_weights), handle


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, expert_output: Any, weights: Any, door: Door, buffer: Any, handle: Any, is_given: bool
    ) -> Any:
        ctx.buffer, ctx.handle, ctx.is_given = buffer, handle, is_given
        # In layout "rank" the number of rows alone matters.
        by_rank = handle.layout == "rank"
        ctx.save_for_backward(expert_output[:, :0] if by_rank else expert_output, weights)
        sent = weights.detach() if is_given else None
        return buffer._combine(door, expert_output.detach(), handle, sent)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:
        with Door(ctx.buffer._entry.preparing) as door:
            expert_output, weights = ctx.saved_tensors
            of_weights = weights is not None and ctx.needs_input_grad[1]
            given = weights if ctx.is_given else None
            rows, weights_gradient = combined(
                door, ctx.buffer, ctx.handle, gradient, expert_output, given, of_weights
            )
        return rows, weights_gradient, None, None, None, None


def combine(
    door: Door,
    buffer: ExpertBuffer,
    expert_output: torch.Tensor,
    handle: Handle,
    weights: torch.Tensor | None,
    out: torch.Tensor | None,
    hook: bool,
) -> torch.Tensor:
    """`ExpertBuffer.combine` where a gradient flows."""
    if hook or out is not None:
        raise InvalidArgumentError(
            "out, hook: no gradient flows through such calls; pass expert_output.detach()"
        )
    is_given = weights is not None
    checks.readable("expert_output", expert_output)
    if handle.layout == "rank":
        if is_given:
            raise InvalidArgumentError("weights for rows by rank: those are summed as they are")
        return _Combine.apply(expert_output, None, door, buffer, handle, False)
    differentiable = checks.tensor("weights", weights if is_given else handle.weights)
    if is_given or checks.has_grad(differentiable):
        buffer._for_weights(door)
    return _Combine.apply(expert_output, differentiable, door, buffer, handle, is_given)
