"""Checks of the arguments of `experts.ExpertBuffer`, before anything is allocated or sent. The extension
checks types, shapes and strides of the tensors that it reads, in the call."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from symmpool._symmpool import _shows_memory
from symmpool.errors import InvalidArgumentError
from symmpool.experts.received import SCALES, Handle

if TYPE_CHECKING:
    from typing import SupportsIndex

    from symmpool.experts.buffer import ExpertBuffer

__all__ = [
    "LAYOUTS",
    "Dispatch",
    "alignment_of",
    "checked_combine",
    "checked_dispatch",
    "has_grad",
    "in_float32",
    "layout_of",
    "readable",
    "switch",
    "tensor",
]

LAYOUTS = ("rank", "expert")
_MAX_ALIGNMENT = 1 << 16


@dataclass
class Dispatch:
    """A dispatch whose arguments make sense."""

    x: torch.Tensor
    ids: Any
    weights: Any
    scales: Any = None
    quantize: str | None = None
    layout: str = "rank"
    alignment: int = 1
    exact: bool = False
    hook: bool = False
    handle: Handle | None = None
    out: torch.Tensor | None = None
    out_scales: torch.Tensor | None = None
    # Whether rows by rank are copied, and rows by expert that are not used are zeros.
    copy: bool = False
    # How many calls follow that belong to this one. Ranks compare it.
    more: int = 0


def has_grad(tensor: object) -> bool:
    """Whether autograd records what is done with a tensor, if it is one."""
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad


def switch(name: str, given: object) -> bool:
    """An argument that is True or False."""
    if isinstance(given, int) and given in (0, 1):
        return bool(given)
    raise TypeError(f"{name}: True or False is needed, not {shown(given)}")


def alignment_of(given: SupportsIndex) -> int:
    """Returns the number that the first row of each expert is a multiple of."""
    try:
        found = operator.index(given)
    except TypeError:
        raise TypeError(f"alignment: an integer is needed, not {shown(given)}") from None
    if not 1 <= found <= _MAX_ALIGNMENT:
        raise InvalidArgumentError(f"alignment={shown(found)}: it is 1 to {_MAX_ALIGNMENT}")
    return found


def shown(given: object) -> str:
    """Describes an argument in an error. Tensors are not printed: where a storage was freed that ends the
    process."""
    if isinstance(given, int) and not abs(given) < 1 << 64:
        return "a huge number"
    if given is None or isinstance(given, (bool, int, float, str)):
        return f"{given!r:.80}"
    return f"an object of type {type(given).__name__}"


def tensor(name: str, given: object, optional: bool = True) -> Any:
    """A tensor of torch, or None."""
    if isinstance(given, torch.Tensor) or (optional and given is None):
        return given
    raise TypeError(f"{name}: a torch.Tensor is needed, not {type(given)}")


def readable(name: str, given: torch.Tensor) -> torch.Tensor:
    """A tensor whose elements torch can read before the extension looks at it: torch's own operations end the
    process where a storage was freed."""
    _shows_memory(name, given)
    return given


def in_float32(name: str, weights: torch.Tensor | None) -> torch.Tensor | None:
    """Weights in the type in which they travel, where they are of float16 or bfloat16, as autocast makes
    them. Their gradients come back in their own type."""
    if isinstance(weights, torch.Tensor) and weights.dtype in (torch.float16, torch.bfloat16):
        return readable(name, weights).float()
    return weights


def _out(name: str, given: torch.Tensor | None) -> torch.Tensor | None:
    if has_grad(tensor(name, given)):
        raise InvalidArgumentError(f"{name}: it requires grad, and no gradient flows through what is written")
    return given


def _quantize(given: object) -> str | None:
    if given is None or (isinstance(given, str) and given in SCALES):
        return given
    if isinstance(given, str):
        raise InvalidArgumentError(
            f'quantize: "{given:.80}" is none of None, "fp8", "fp8_pow2" and "fp8_ue8m0"'
        )
    raise TypeError(f"quantize: a name or None is needed, not {type(given)}")


def layout_of(given: object) -> str:
    """The name of a layout."""
    if not isinstance(given, str) or given not in LAYOUTS:
        raise InvalidArgumentError(f"layout: {shown(given)} is neither 'rank' nor 'expert'")
    return given


def checked_handle(buffer: ExpertBuffer, handle: Handle) -> Handle:
    """A handle of a buffer."""
    if not isinstance(handle, Handle):
        raise TypeError(f"handle: one that dispatch returned is needed, not {type(handle)}")
    if handle.buffer is not buffer:
        raise InvalidArgumentError(f"handle: of another buffer, {handle.buffer!r}")
    return handle


def checked_dispatch(
    buffer: ExpertBuffer,
    x: torch.Tensor,
    ids: torch.Tensor | None,
    weights: torch.Tensor | None,
    copy: object,
    options: dict[str, Any],
) -> Dispatch:
    """Checks a dispatch. `copy` is None where the caller does not say."""
    x = tensor("x", x, optional=False)
    if x.dim() != 2:
        raise InvalidArgumentError(f"x: of shape {tuple(x.shape)}, where [tokens, {buffer.hidden}] is needed")
    options = {
        **options,
        "scales": tensor("scales", options["scales"]),
        "quantize": _quantize(options["quantize"]),
        "layout": layout_of(options["layout"]),
        "alignment": alignment_of(options["alignment"]),
        "exact": switch("exact", options["exact"]),
        "hook": switch("hook", options["hook"]),
        "out": _out("out", options["out"]),
        "out_scales": _out("out_scales", options["out_scales"]),
    }
    if options["out_scales"] is not None and options["quantize"] is None and options["scales"] is None:
        raise InvalidArgumentError(
            "out_scales: no scales are received; pass quantize or scales, or None here"
        )
    copy = torch.is_grad_enabled() if copy is None else switch("copy", copy)
    found = Dispatch(x, ids, in_float32("topk_weights", weights), copy=copy, **options)
    if found.exact and found.hook:
        raise InvalidArgumentError("exact, hook: exact sizes are waited for at once; ask for one of them")
    if found.layout == "rank" and (found.out is not None or found.out_scales is not None):
        raise InvalidArgumentError("out, out_scales: rows by rank are the buffer's; pass layout='expert'")
    handle = found.handle
    if handle is None:
        if ids is None:
            raise InvalidArgumentError("topk_ids: they are missing, and there is no handle")
        return found
    checked_handle(buffer, handle)
    if ids is not None or weights is not None:
        raise InvalidArgumentError("topk_ids, topk_weights: a handle says where tokens go; pass None")
    if found.layout != handle.layout:
        raise InvalidArgumentError(f"layout: {found.layout!r} with a handle of layout {handle.layout!r}")
    if x.shape[0] != handle.tokens:
        raise InvalidArgumentError(f"x: {x.shape[0]} tokens with a handle of {handle.tokens}")
    return found


def checked_combine(
    buffer: ExpertBuffer, rows: torch.Tensor, handle: Handle, out: torch.Tensor | None
) -> None:
    """Checks a combine."""
    checked_handle(buffer, handle)
    if tensor("expert_output", rows, optional=False).dim() != 2:
        raise InvalidArgumentError(
            f"expert_output: of shape {tuple(rows.shape)}, where [rows, {buffer.hidden}] is needed"
        )
    layout_of(handle.layout)
    if out is None:
        return
    _out("out", out)
    if out.dim() != 2 or out.shape[0] != handle.tokens:
        raise InvalidArgumentError(
            f"out: of shape {tuple(out.shape)}, where [{handle.tokens}, {buffer.hidden}] is needed"
        )
