"""Dispatch and combine as operators of torch, for compiled code:

    experts_dispatch(x, topk_ids, topk_weights, buffer, layout, alignment, quantize, *, zero_unused=False)
        -> (rows, scales, topk_ids, topk_weights, handle)
    experts_combine(expert_output, handle, weights, tokens, buffer, layout, alignment) -> Tensor

`buffer` is `ExpertBuffer.name`. They give new tensors of all rows there may be, and a handle as a tensor:
int32, of which the first three elements are the tokens received, this rank's tokens, and rows by expert. What
a layout does not have is empty. Rows by rank that are not in use are zeros; with `zero_unused`, or where
autograd is on, those by expert are too.

Gradients flow through both, to tokens and to weights. By expert the weights that a dispatch is given have
none, as the handle is all that leads to combine: give weights that require grad to `experts_combine`. What no
gradient flows through is refused: such weights, and quantised tokens that require grad."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from symmpool.errors import InvalidArgumentError
from symmpool.experts.checks import (
    alignment_of,
    checked_combine,
    checked_dispatch,
    has_grad,
    in_float32,
    layout_of,
)
from symmpool.experts.door import Door
from symmpool.experts.received import SCALES, Handle, scales_of

if TYPE_CHECKING:
    from symmpool.experts.buffer import ExpertBuffer

__all__ = ["name"]

#: Buffers by name, which is the same on every rank, as all make them in the same order.
_buffers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_made = 0


def name(buffer: ExpertBuffer) -> str:
    """The name under which operators find a new buffer."""
    global _made
    _made += 1
    text = f"experts:{_made}"
    _buffers[text] = buffer
    return text


def _named(text: str) -> Any:
    found = _buffers.get(text)
    if found is None:
        raise InvalidArgumentError(f"buffer: there is no buffer for experts named {text!r}")
    return found


_library = torch.library.Library("symmpool", "FRAGMENT")
for _signature in (
    "experts_dispatch(Tensor x, Tensor topk_ids, Tensor? topk_weights, str buffer, str layout, int alignment,"
    " str? quantize, *, bool zero_unused=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "experts_combine(Tensor expert_output, Tensor handle, Tensor? weights, SymInt tokens, str buffer,"
    " str layout, int alignment) -> Tensor",
    # Backward passes of these.
    "_experts_dispatch_backward(Tensor? rows, Tensor? row_weights, Tensor topk_ids, Tensor handle,"
    " SymInt tokens, str buffer, str layout, int alignment) -> (Tensor, Tensor)",
    "_experts_combine_backward(Tensor gradient, Tensor expert_output, Tensor handle, Tensor? weights,"
    " SymInt tokens, str buffer, str layout, int alignment, bool of_weights) -> (Tensor, Tensor)",
):
    _library.define(_signature, tags=(torch.Tag.pt2_compliant_tag,))


def _handle(buffer: ExpertBuffer, memory: torch.Tensor, tokens: int, layout: str, alignment: int) -> Handle:
    """A handle that an operator was given as a tensor."""
    layout, alignment = layout_of(layout), alignment_of(alignment)
    if memory.dtype != torch.int32 or memory.shape != (buffer.handle_elements,):
        raise InvalidArgumentError(
            f"handle: {tuple(memory.shape)} of {memory.dtype}, where the {buffer.handle_elements} int32 that "
            "experts_dispatch gave are needed"
        )
    if not 0 <= tokens <= buffer.max_tokens:
        raise InvalidArgumentError(f"tokens={tokens}: the buffer is made for 0 to {buffer.max_tokens}")
    rows = buffer.rows_by_expert(alignment) if layout == "expert" else buffer.capacity
    return Handle(buffer, tokens, layout, alignment, rows, memory)


def _dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    buffer: str,
    layout: str,
    alignment: int,
    quantize: str | None,
    *,
    zero_unused: bool = False,
) -> Any:
    found = _named(buffer)
    with Door(found._entry.preparing) as door:
        options: dict[str, Any] = {
            "scales": None,
            "exact": False,
            "hook": False,
            "handle": None,
            "out": None,
            "out_scales": None,
        }
        options.update(layout=layout, alignment=alignment, quantize=quantize)
        # The next call overwrites the buffer's memory.
        copy = layout == "rank" or zero_unused
        given = checked_dispatch(found, x, topk_ids, topk_weights, copy, options)
        received, handle, _ = found._dispatch(door, given)
    none = x.new_empty(0)
    scales = none if received.scales is None else received.scales
    if layout == "expert":
        return received.x, scales, none.clone(), none.clone(), handle.memory
    return received.x, scales, received.topk_ids, received.topk_weights, handle.memory


def _dispatch_fake(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    buffer: str,
    layout: str,
    alignment: int,
    quantize: Any,
    *,
    zero_unused: bool = False,
) -> Any:
    found = _named(buffer)
    by_expert = layout_of(layout) == "expert"
    rows = found.rows_by_expert(alignment_of(alignment)) if by_expert else found.capacity
    dtype = x.dtype if quantize is None else torch.float8_e4m3fn
    none = x.new_empty(0)
    scales = none
    if quantize in SCALES:
        columns, scales_dtype = scales_of(found.hidden, quantize)
        scales = x.new_empty((rows, columns), dtype=scales_dtype)
    ids, weights = none.clone(), none.clone()
    if not by_expert:
        ids = x.new_empty((rows, found.top_k), dtype=torch.int32)
        weights = x.new_empty((rows, found.top_k), dtype=torch.float32)
    handle = x.new_empty(found.handle_elements, dtype=torch.int32)
    return x.new_empty((rows, found.hidden), dtype=dtype), scales, ids, weights, handle


def _combine(
    expert_output: torch.Tensor,
    handle: torch.Tensor,
    weights: torch.Tensor | None,
    tokens: int,
    buffer: str,
    layout: str,
    alignment: int,
) -> torch.Tensor:
    found = _named(buffer)
    with Door(found._entry.preparing) as door:
        made = _handle(found, handle, tokens, layout, alignment)
        checked_combine(found, expert_output, made, None)
        return found._combine(door, expert_output, made, in_float32("weights", weights))[0]


def _combine_fake(
    expert_output: torch.Tensor,
    handle: torch.Tensor,
    weights: torch.Tensor | None,
    tokens: int,
    buffer: str,
    layout: str,
    alignment: int,
) -> torch.Tensor:
    layout_of(layout)
    return expert_output.new_empty((tokens, _named(buffer).hidden))


def _dispatch_backward(
    rows: Any,
    row_weights: Any,
    topk_ids: Any,
    handle: Any,
    tokens: int,
    buffer: str,
    layout: str,
    alignment: int,
) -> Any:
    from symmpool.experts import gradients

    found = _named(buffer)
    with Door(found._entry.preparing) as door:
        made = _handle(found, handle, tokens, layout, alignment)
        x, weights = gradients.dispatched(door, found, made, rows, row_weights, topk_ids >= 0)
    none = torch.empty(0, device=found.device)
    return (none if x is None else x), (none.clone() if weights is None else weights)


def _dispatch_backward_fake(
    rows: torch.Tensor,
    row_weights: torch.Tensor | None,
    topk_ids: torch.Tensor,
    handle: torch.Tensor,
    tokens: int,
    buffer: str,
    layout: str,
    alignment: int,
) -> Any:
    found, none = _named(buffer), handle.new_empty(0, dtype=torch.float32)
    x = none if rows is None else rows.new_empty((tokens, found.hidden))
    weights = none.clone() if row_weights is None else row_weights.new_empty((tokens, found.top_k))
    return x, weights


def _combine_backward(
    gradient: Any,
    expert_output: Any,
    handle: Any,
    weights: Any,
    tokens: int,
    buffer: str,
    layout: str,
    alignment: int,
    of_weights: bool,
) -> Any:
    from symmpool.experts import gradients

    found = _named(buffer)
    with Door(found._entry.preparing) as door:
        made = _handle(found, handle, tokens, layout, alignment)
        rows, of = gradients.combined(door, found, made, gradient, expert_output, weights, of_weights)
    return rows, torch.empty(0, device=found.device) if of is None else of


def _combine_backward_fake(
    gradient: torch.Tensor,
    expert_output: torch.Tensor,
    handle: torch.Tensor,
    weights: torch.Tensor | None,
    tokens: int,
    buffer: str,
    layout: str,
    alignment: int,
    of_weights: bool,
) -> Any:
    of = gradient.new_empty((tokens, _named(buffer).top_k) if of_weights else 0, dtype=torch.float32)
    return torch.empty_like(expert_output), of


# --- what autograd sees


def _below_autograd(operator: Any, *arguments: object, **options: object) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments, **options)


def _saved(ctx: Any, buffer: str) -> Any:
    """Returns the tensors that a forward pass has saved. Where they were written to since then, which
    autograd refuses, every rank raises an error: this one makes no call."""
    with Door(_named(buffer)._entry.preparing):
        return ctx.saved_tensors


class _DispatchWithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weights: Any, ids: Any, buffer: str, layout: str, alignment: int) -> Any:
        operator = torch.ops.symmpool.experts_dispatch
        arguments = (x, ids, weights, buffer, layout, alignment, None)
        rows, scales, row_ids, row_weights, handle = _below_autograd(operator, *arguments, zero_unused=True)
        ctx.call = (x.shape[0], buffer, layout, alignment)
        ctx.weighted = ctx.needs_input_grad[1]
        ctx.save_for_backward(row_ids, handle)
        ctx.mark_non_differentiable(scales, row_ids, handle, *(() if ctx.weighted else (row_weights,)))
        return rows, scales, row_ids, row_weights, handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Any, scales: Any, ids: Any, row_weights: Any, handle: Any) -> Any:
        row_ids, memory = _saved(ctx, ctx.call[1])
        rows = rows if ctx.needs_input_grad[0] else None
        row_weights = row_weights if ctx.weighted else None
        operator = torch.ops.symmpool._experts_dispatch_backward
        x, weights = operator(rows, row_weights, row_ids, memory, *ctx.call)
        return None if rows is None else x, weights if ctx.weighted else None, None, None, None, None


class _CombineWithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, expert_output: Any, weights: Any, handle: Any, *call: Any) -> Any:
        ctx.call = call
        ctx.save_for_backward(expert_output, weights, handle)
        return _below_autograd(torch.ops.symmpool.experts_combine, expert_output, handle, weights, *call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:
        expert_output, weights, handle = _saved(ctx, ctx.call[1])
        of_weights = ctx.needs_input_grad[1]
        operator = torch.ops.symmpool._experts_combine_backward
        rows, of = operator(gradient, expert_output, handle, weights, *ctx.call, of_weights)
        return rows, of if of_weights else None, None, None, None, None, None


def _refuse_gradients(x: torch.Tensor, buffer: str, why: str) -> None:
    """Refuses a call for its gradients. Where code is compiled, or a mode sees it, every rank does so."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        raise InvalidArgumentError(why)
    with Door(_named(buffer)._entry.preparing):
        raise InvalidArgumentError(why)


def _dispatch_autograd(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    buffer: str,
    layout: str,
    alignment: int,
    quantize: str | None,
    *,
    zero_unused: bool = False,
) -> Any:
    records = torch.is_grad_enabled()
    if not records or not (x.requires_grad or has_grad(topk_weights)):
        arguments = (x, topk_ids, topk_weights, buffer, layout, alignment, quantize)
        # Tensors that are computed of rows may have gradients all the same.
        zeros = zero_unused or records
        return _below_autograd(torch.ops.symmpool.experts_dispatch, *arguments, zero_unused=zeros)
    if quantize is not None:
        why = "experts_dispatch: quantize: no gradient flows through quantised tokens; pass x.detach()"
        _refuse_gradients(x, buffer, why)
    if layout == "expert" and has_grad(topk_weights):
        why = (
            "experts_dispatch: topk_weights: they require grad, and by expert none flows to them from here; "
        )
        _refuse_gradients(x, buffer, why + "give them to experts_combine, and their detach() here")
    return _DispatchWithGradients.apply(x, topk_weights, topk_ids, buffer, layout, alignment)


def _combine_autograd(
    expert_output: torch.Tensor,
    handle: torch.Tensor,
    weights: torch.Tensor | None,
    tokens: int,
    buffer: str,
    layout: str,
    alignment: int,
) -> torch.Tensor:
    call = (tokens, buffer, layout, alignment)
    if torch.is_grad_enabled() and (expert_output.requires_grad or has_grad(weights)):
        return _CombineWithGradients.apply(expert_output, weights, handle, *call)
    return _below_autograd(torch.ops.symmpool.experts_combine, expert_output, handle, weights, *call)


_does: Callable[..., Any]
for _name, _does, _gives in (
    ("experts_dispatch", _dispatch, _dispatch_fake),
    ("experts_combine", _combine, _combine_fake),
    ("_experts_dispatch_backward", _dispatch_backward, _dispatch_backward_fake),
    ("_experts_combine_backward", _combine_backward, _combine_backward_fake),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _does, _key)
    torch.library.register_fake(f"symmpool::{_name}", _gives, lib=_library)
_library.impl("experts_dispatch", _dispatch_autograd, "Autograd")
_library.impl("experts_combine", _combine_autograd, "Autograd")
