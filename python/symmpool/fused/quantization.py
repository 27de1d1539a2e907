"""How norms are quantised, and where their scales lie."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from symmpool.errors import InvalidArgumentError

__all__ = ["Fused", "Quantization", "fp8_per_group", "fp8_per_token", "fp8_static"]

# Elements that share a scale.
GROUP = 128
LAYOUTS = ("row", "column", "column_aligned")
FP8 = torch.float8_e4m3fn


class Fused(NamedTuple):
    """Results of a fused call: the norm, or its 8-bit floats; the sum with bias and residual, which is the
    next residual; and the scales that the call made, or None."""

    out: torch.Tensor
    residual: torch.Tensor
    scale: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A way to quantise norms to `torch.float8_e4m3fn`; made by `fp8_static`, `fp8_per_token` and
    `fp8_per_group`."""

    kind: str
    scale: torch.Tensor | None = None
    layout: str = "row"
    powers_of_two: bool = False


def fp8_static(scale: torch.Tensor) -> Quantization:
    """`out = norm / scale`, with one float32 in a tensor on the call's device."""
    return Quantization("fp8_static", scale)


def fp8_per_token(scale: torch.Tensor | None = None, *, powers_of_two: bool = False) -> Quantization:
    """A scale for each token, of shape (tokens, 1): the largest magnitude / 448, at least 1 / (448 * 512).
    They are written to `scale`, or to a new tensor. With `powers_of_two` they are rounded up to such."""
    return Quantization("fp8_token", scale, "row", powers_of_two)


def fp8_per_group(
    scale: torch.Tensor | None = None, *, layout: str = "row", powers_of_two: bool = False
) -> Quantization:
    """A scale for each 128 elements of a token, of shape (tokens, hidden / 128): their largest magnitude /
    448, at least 1e-10 / 448. They are written to `scale`, of any strides, or to a new tensor whose
    `layout` is "row", "column" (tokens lie next to each other) or "column_aligned" (the same, and columns
    are a multiple of 4 scales apart, as DeepGEMM loads them). With `powers_of_two` they are rounded up to
    such."""
    return Quantization("fp8_group", scale, layout, powers_of_two)


def new_scales(quant: Quantization, tokens: int, hidden: int, device: torch.device) -> torch.Tensor:
    """A tensor for the scales that a call makes."""
    groups = hidden // GROUP if quant.kind == "fp8_group" else 1
    if quant.layout == "row":
        return torch.empty((tokens, groups), dtype=torch.float32, device=device)
    apart = -(-tokens // 4) * 4 if quant.layout == "column_aligned" else tokens
    memory = torch.empty((groups, apart), dtype=torch.float32, device=device)
    return memory.t()[:tokens]


def check(quant: Quantization | None, tokens: int, hidden: int) -> None:
    """Refuses what is no quantisation of rows of this length."""
    if quant is None:
        return
    if not isinstance(quant, Quantization):
        raise InvalidArgumentError(
            f"quant: {quant!r} is no quantisation; pass fused.fp8_static(scale), fused.fp8_per_token() or "
            "fused.fp8_per_group()"
        )
    if quant.kind not in ("fp8_static", "fp8_token", "fp8_group") or quant.layout not in LAYOUTS:
        raise InvalidArgumentError(
            f"quant: {quant.kind!r} with scales in the layout {quant.layout!r}; layouts are "
            f"{', '.join(LAYOUTS)}"
        )
    if quant.kind == "fp8_group" and hidden % GROUP:
        raise InvalidArgumentError(f"quant: groups of {GROUP} elements do not divide rows of {hidden}")
    scale = quant.scale
    if scale is None:
        if quant.kind == "fp8_static":
            raise InvalidArgumentError("quant: fp8_static needs a scale, a float32 in a tensor")
        return
    if not isinstance(scale, torch.Tensor):
        raise InvalidArgumentError(f"quant: a scale of type {type(scale).__name__}; pass a tensor of float32")
    if scale.dtype != torch.float32:
        raise InvalidArgumentError(f"quant: scales of {scale.dtype}, not of torch.float32")
    groups = hidden // GROUP if quant.kind == "fp8_group" else 1
    wanted = (tokens, groups)
    if quant.kind == "fp8_static" and scale.numel() != 1:
        raise InvalidArgumentError(f"quant: one scale is needed, not a tensor of shape {tuple(scale.shape)}")
    if quant.kind != "fp8_static" and tuple(scale.shape) != wanted:
        raise InvalidArgumentError(f"quant: scales of shape {tuple(scale.shape)}, not {wanted}")
    if quant.kind != "fp8_static" and scale.numel() > 1 and (scale.stride(0) < 1 or scale.stride(1) < 0):
        raise InvalidArgumentError(f"quant: scales with strides {scale.stride()} share memory")
