"""Checks of the arguments of `deep_ep.Buffer`, before anything is sent."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from symmpool.deep_ep.cores import DTYPES, invalid
from symmpool.experts.checks import readable, shown, switch

if TYPE_CHECKING:
    from typing import SupportsIndex

    from symmpool.deep_ep.handles import NormalHandle

__all__ = [
    "check_events",
    "check_layout",
    "check_low_latency",
    "check_normal",
    "check_waits",
    "integer",
    "matrix",
    "tokens_and_scales",
]

_INT32, _INT64, _FLOAT32 = torch.int32, torch.int64, torch.float32
# The most tokens, rows or experts that a number may say.
_MAX_NUMBER = (1 << 31) - 1


def matrix(
    name: str, tensor: object, dtypes: object, shape: tuple[int | None, ...], device: object
) -> torch.Tensor:
    """A tensor of one of these types, with a shape in which None stands for any length, on a device."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"deep_ep: {name}: a torch.Tensor is needed, not {type(tensor)}")
    readable(name, tensor)
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if tensor.dtype not in dtypes:
        raise invalid(f"{name}: elements of {tensor.dtype}, where {' or '.join(map(str, dtypes))} is needed")
    fits = len(shape) == tensor.dim()
    if not fits or any(a not in (None, b) for a, b in zip(shape, tensor.shape)):
        needed = ", ".join("n" if length is None else str(length) for length in shape)
        raise invalid(f"{name}: of shape {tuple(tensor.shape)}, where [{needed}] is needed")
    if tensor.device != device:
        raise invalid(f"{name}: on {tensor.device}, and the tokens are on {device}")
    return tensor


def integer(name: str, given: SupportsIndex, least: int = 0) -> int:
    """A number of tokens, of experts and the like."""
    try:
        found = operator.index(given)
    except TypeError:
        raise TypeError(f"deep_ep: {name}: an integer is needed, not {shown(given)}") from None
    if not least <= found <= _MAX_NUMBER:
        raise invalid(f"{name}={shown(found)}: it is {least} to {_MAX_NUMBER}")
    return found


def tokens_and_scales(x: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens, and their scales if they are quantised."""
    scales = None
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise invalid(f"x: {len(x)} tensors, where (tokens, scales) is needed")
        x, scales = x
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"deep_ep: x: a torch.Tensor is needed, not {type(x)}")
    return x, scales


def check_waits(name: str, waits: object, world: int, device: object) -> None:
    """Checks the tensor that times of waits are added to."""
    if waits is not None and not matrix(name, waits, _INT64, (world,), device).is_contiguous():
        raise invalid(f"{name}: it is not contiguous")


def check_events(previous: object, asynchronous: object, on_comm_stream: object) -> None:
    """Checks how a call of normal mode is to run."""
    asynchronous = switch("async_finish", asynchronous)
    on_comm_stream = switch("allocate_on_comm_stream", on_comm_stream)
    if previous is not None and not hasattr(previous, "event"):
        raise TypeError(f"deep_ep: previous_event: an EventOverlap is needed, not {type(previous)}")
    if on_comm_stream and not (asynchronous and previous is not None):
        raise invalid("allocate_on_comm_stream: it needs async_finish=True and a previous_event")


def check_layout(topk_idx: object, num_experts: int, world: int) -> None:
    """Refuses what `get_dispatch_layout` cannot serve: ids that are no int64 matrix on one device, and
    numbers of experts that the ranks do not divide. Raises TypeError or InvalidArgumentError."""
    if not isinstance(topk_idx, torch.Tensor):
        raise TypeError(f"deep_ep: topk_idx: a torch.Tensor is needed, not {type(topk_idx)}")
    matrix("topk_idx", topk_idx, _INT64, (None, None), topk_idx.device)
    num_experts = integer("num_experts", num_experts)
    if num_experts < 1 or num_experts % world != 0:
        raise invalid(f"num_experts={num_experts}: each of {world} ranks has equally many, and one at least")


def _check_rows(x: torch.Tensor, scales: torch.Tensor | None) -> int:
    """Checks tokens and scales; returns the bytes of the scales of a token."""
    quantized = (torch.float8_e4m3fn,) if scales is not None else ()
    matrix("x", x, quantized or DTYPES, (None, None), x.device)
    tokens, hidden = x.shape
    if not x.is_contiguous():
        raise invalid("x: it is not contiguous")
    if hidden == 0 or hidden * x.element_size() % 16 != 0:
        raise invalid(f"x: rows of {hidden * x.element_size()} bytes, where a multiple of 16 is needed")
    if scales is None:
        return 0
    matrix("scales", scales, (_FLOAT32, _INT32), (tokens, None), x.device)
    most = -(-hidden // 128)
    if not 1 <= scales.shape[1] <= most:
        raise invalid(f"scales: {scales.shape[1]} for a token of {hidden} channels, which has 1 to {most}")
    return 4 * scales.shape[1]


def check_normal(
    x: torch.Tensor,
    scales: torch.Tensor | None,
    world: int,
    routing: dict[str, Any],
    worst: int,
    alignment: int,
) -> dict[str, int]:
    """Checks a dispatch without a handle; returns what ranks compare of it."""
    worst, alignment = integer("num_worst_tokens", worst), integer("expert_alignment", alignment, 1)
    scale_bytes = _check_rows(x, scales)
    tokens, hidden = x.shape
    ids, weights = routing["topk_idx"], routing["topk_weights"]
    for name in ("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert"):
        if routing[name] is None:
            raise invalid(f"{name}: it is missing, and there is no handle; get_dispatch_layout has it")
    matrix("num_tokens_per_rank", routing["num_tokens_per_rank"], _INT32, (world,), x.device)
    matrix("is_token_in_rank", routing["is_token_in_rank"], torch.bool, (tokens, world), x.device)
    of_experts = matrix("num_tokens_per_expert", routing["num_tokens_per_expert"], _INT32, (None,), x.device)
    count = of_experts.shape[0]
    if count == 0 or count % world != 0:
        raise invalid(
            f"num_tokens_per_expert: of {count} experts, where each of {world} ranks has equally many"
        )
    of_hosts = routing.get("num_tokens_per_rdma_rank")
    if of_hosts is not None:
        matrix("num_tokens_per_rdma_rank", of_hosts, _INT32, (None,), x.device)
    if (ids is None) != (weights is None):
        raise invalid("topk_idx, topk_weights: one of them is missing")
    top_k = 0
    if ids is not None:
        top_k = matrix("topk_idx", ids, _INT64, (tokens, None), x.device).shape[1]
        matrix("topk_weights", weights, _FLOAT32, (tokens, top_k), x.device)
        if top_k == 0:
            raise invalid("topk_idx: a token has one expert at least")
    if worst > 0 and ids is None:
        raise invalid(f"num_worst_tokens={worst}: 0, or the most tokens of a call with topk_idx")
    dtype = DTYPES.index(x.dtype) if scales is None else 0
    return {
        "call": 0, "hidden": hidden, "num_experts": count, "dtype": dtype, "tokens": tokens,
        "quantized_tokens": int(scales is not None), "bytes_of_scales": scale_bytes, "top_k": top_k,
        "num_worst_tokens": worst,
    }  # fmt: skip


def check_again(
    x: torch.Tensor,
    scales: torch.Tensor | None,
    handle: NormalHandle,
    ids: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> None:
    """Checks a dispatch with a handle."""
    _check_rows(x, scales)
    core = handle.kept.buffer
    if ids is not None or weights is not None:
        raise invalid("topk_idx, topk_weights: a handle says where tokens go; pass None")
    if x.shape[0] != handle.kept.tokens:
        raise invalid(f"x: {x.shape[0]} tokens with a handle of {handle.kept.tokens}")
    if x.shape[1] != core.hidden or (scales is None and x.dtype != core.dtype):
        raise invalid(f"x: {x.shape[1]} channels of {x.dtype} with a handle of {core.hidden} of {core.dtype}")


def check_low_latency(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    most: int,
    count: int,
    world: int,
    formats: tuple[bool, bool, bool],
) -> dict[str, int]:
    """Checks a low-latency dispatch; returns what ranks compare of its shape."""
    most = integer("num_max_dispatch_tokens_per_rank", most, 1)
    count = integer("num_experts", count)
    use_fp8, round_scale, use_ue8m0 = formats
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"deep_ep: x: a torch.Tensor is needed, not {type(x)}")
    matrix("x", x, torch.bfloat16, (None, None), x.device)
    tokens, hidden = x.shape
    top_k = matrix("topk_idx", topk_idx, _INT64, (tokens, None), x.device).shape[1]
    if not x.is_contiguous() or not topk_idx.is_contiguous():
        raise invalid("x, topk_idx: they are not contiguous")
    if hidden == 0 or hidden % 8 != 0:
        raise invalid(f"x: {hidden} channels, where a multiple of 8 is needed")
    if tokens > most:
        raise invalid(f"x: {tokens} tokens, where num_max_dispatch_tokens_per_rank={most}")
    if count < 1 or count % world != 0:
        raise invalid(f"num_experts={count}: each of {world} ranks has equally many, and one at least")
    if top_k == 0:
        raise invalid("topk_idx: a token has one expert at least")
    if use_fp8 and hidden % (512 if use_ue8m0 else 128) != 0:
        raise invalid(
            f"use_fp8: tokens of {hidden} channels; scales are for 128, and four in an integer for ue8m0"
        )
    if use_ue8m0 and not (use_fp8 and round_scale):
        raise invalid("use_ue8m0: it needs use_fp8=True and round_scale=True")
    return {
        "call": 1, "hidden": hidden, "num_experts": count, "top_k": top_k, "tokens": tokens,
        "num_max_dispatch_tokens_per_rank": most,
    }  # fmt: skip
