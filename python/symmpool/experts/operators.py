"""Dispatch and combine as operators of torch, for compiled code:

    experts_dispatch(x, topk_ids, topk_weights, buffer, layout, alignment, quantize)
        -> (rows, scales, topk_ids, topk_weights, handle)
    experts_combine(expert_output, handle, weights, tokens, buffer, layout, alignment) -> Tensor

`buffer` is `Buffer.name`. They give new tensors of all rows there may be, and a handle as a tensor: int32, of
which the first three elements are the tokens received, this rank's tokens, and rows by expert. What a layout
does not have is empty. There are no gradients."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from symmpool.errors import InvalidArgumentError
from symmpool.experts.received import SCALES, Handle, scales_of

__all__ = ["name"]

#: Buffers by name, which is the same on every rank, as all make them in the same order.
_buffers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_made = 0


def name(buffer: Any) -> str:
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
    " str? quantize) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "experts_combine(Tensor expert_output, Tensor handle, Tensor? weights, SymInt tokens, str buffer,"
    " str layout, int alignment) -> Tensor",
):
    _library.define(_signature, tags=(torch.Tag.pt2_compliant_tag,))


def _dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    buffer: str,
    layout: str,
    alignment: int,
    quantize: str | None,
) -> Any:
    found = _named(buffer)
    options = {"layout": layout, "alignment": alignment, "quantize": quantize}
    received, handle = found._dispatch(x, topk_ids, topk_weights, **options)
    none = x.new_empty(0)
    scales = none if received.scales is None else received.scales
    if layout == "expert":
        return received.x, scales, none.clone(), none.clone(), handle.memory
    # The next call overwrites the buffer's memory.
    parts = (received.x, scales, received.topk_ids, received.topk_weights)
    own = tuple(part.clone() for part in parts)
    # Received rows were read: the next call, on whatever stream, comes behind that.
    found.extend_order()
    return (*own, handle.memory)


def _dispatch_fake(
    x: torch.Tensor, topk_ids: Any, topk_weights: Any, buffer: str, layout: str, alignment: int, quantize: Any
) -> Any:
    found = _named(buffer)
    by_expert = layout == "expert"
    rows = found.rows_by_expert(alignment) if by_expert else found.capacity
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
    rows = found.rows_by_expert(alignment) if layout == "expert" else found.capacity
    return found._combine(expert_output, Handle(found, tokens, layout, alignment, rows, handle), weights)


def _combine_fake(
    expert_output: torch.Tensor,
    handle: Any,
    weights: Any,
    tokens: int,
    buffer: str,
    layout: str,
    alignment: int,
) -> torch.Tensor:
    return expert_output.new_empty((tokens, _named(buffer).hidden))


for _name, _does, _gives in (
    ("experts_dispatch", _dispatch, _dispatch_fake),
    ("experts_combine", _combine, _combine_fake),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _does, _key)
    torch.library.register_fake(f"symmpool::{_name}", _gives, lib=_library)
