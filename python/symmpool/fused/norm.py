"""All-reduce, residual and RMSNorm as one call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from symmpool import ops
from symmpool._symmpool import _all_reduce_norm
from symmpool.communicators import torch_state
from symmpool.communicators.tensors import say_written, to_read, to_write
from symmpool.errors import InvalidArgumentError
from symmpool.fused.arguments import described, refuse_gradients
from symmpool.fused.entry import entry_for
from symmpool.fused.quantization import FP8, Fused, Quantization, check, new_scales
from symmpool.groups.names import group_of

if TYPE_CHECKING:
    from typing import SupportsFloat

    from symmpool.groups.types import GroupLike

__all__ = ["all_reduce_rms_norm"]

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_KINDS = ("none", "fp8_static", "fp8_token", "fp8_group")
#: Ways to send rows.
ALGORITHMS = ("auto", "one_shot", "two_shot")
# The tensors of a call, in the order in which they are handed on.
_NAMES = ("x", "residual", "weight", "bias", "out", "residual_out", "norm_out")
# Number that torch adds to a mean of squares where nothing else is said, whatever the type of the rows.
_EPSILON = torch.finfo(torch.float32).eps


def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    quant: Quantization | None = None,
    bias: torch.Tensor | None = None,
    weight_bias: float = 0.0,
    norm_out: torch.Tensor | None = None,
    group: GroupLike = None,
    algorithm: str = "auto",
) -> Fused:
    """Adds up every rank's `x`, of shape (..., hidden), adds `bias` (hidden) and `residual` (as `x`) to the
    sum, and norms each row: `out = sum / sqrt(mean(sum ** 2) + eps) * (weight + weight_bias)`. The sum goes
    to `residual_out`. Without `weight` there is no norm: `out` is the sum. Without `residual` none is
    added. With `eps=None`, as `torch.nn.RMSNorm` has it unless it was given another, it is float32's.

    `out` and `residual_out` are new tensors where they are not given; they may be `x` and `residual`. With
    `quant` the norm is quantised to `torch.float8_e4m3fn`, and is also written to `norm_out`, if that is
    given. `weight_bias` is 1 for layers whose weights are differences from 1.

    Tensors are contiguous, of one type (float32, float16 or bfloat16) and on one device; `hidden` is a
    multiple of 8, up to 65,536; they need not be a pool's memory. All ranks get the same bits, in every run
    and with every `algorithm` ("auto", "one_shot", "two_shot"); sums are those of `symmpool.all_reduce`.
    Every step is rounded as separate operations would round it.

    On CUDA this is a kernel on the current stream, in as many launches as inboxes have room for; it is
    compiled when a call first needs it, also while a graph is captured. On the CPU the call returns when it
    is done. No gradient flows through it.

    Raises InvalidArgumentError for tensors that do not fit or require grad, and then DivergedError on the
    other ranks; DivergedError where ranks pass different shapes, types, eps or quantisations;
    UnsupportedError for rows that no inbox holds; TimeoutError and PeerLostError where a rank does not
    come."""
    eps = _EPSILON if eps is None else eps
    if torch_state.is_traced(x, group):
        return _traced(
            x, residual, weight, eps, out, residual_out, quant, bias, weight_bias, norm_out, group, algorithm
        )
    given = (x, residual, weight, bias, out, residual_out, norm_out)
    return _make(given, (eps, weight_bias), quant, group, algorithm)


def _make(
    given: tuple[torch.Tensor | None, ...],
    numbers: tuple[float, float],
    quant: Quantization | Callable[[], Quantization | None] | None,
    group: GroupLike,
    algorithm: str,
) -> Fused:
    x: Any
    x = given[0]
    found: Any = None

    def check(_: int) -> None:
        nonlocal found
        found = quant() if isinstance(quant, functools.partial) else quant
        _check_how(numbers, algorithm)
        _check(given, found)

    entry = entry_for("all_reduce_rms_norm", x, group, check)
    with entry.preparing():
        # Copies, where memory does not hold what a tensor shows, and what this call makes.
        tensors, quant = _in_memory(given, found)
        x, residual, weight, bias, out, residual_out, norm_out = tensors
        numbers = (float(numbers[0]), float(numbers[1]))
        hidden = x.shape[-1]
        tokens = x.numel() // hidden
        if residual_out is None:
            residual_out = torch.empty_like(x)
        scale, strides, made = None, (0, 0), "sum"
        if weight is None:
            out = residual_out
        else:
            if out is None:
                out = torch.empty_like(x) if quant is None else torch.empty_like(x, dtype=FP8)
            made = "norm" if quant is None else quant.kind
        if quant is not None:
            scale = quant.scale if quant.scale is not None else new_scales(quant, tokens, hidden, x.device)
            if quant.kind != "fp8_static":
                strides = (scale.stride(0), scale.stride(1))
        operands = (x, residual, weight, bias, out, residual_out, norm_out, scale)
        addresses = tuple(0 if each is None else each.data_ptr() for each in operands)
        powers_of_two = quant is not None and quant.powers_of_two
        sizes, way = (tokens, hidden, *strides), (made, powers_of_two, algorithm)
        dtype = _DTYPES[x.dtype]
        is_static = quant is None or quant.kind == "fp8_static"
        written = [each for each in given[4:] if each is not None]
        if quant is not None and not is_static and quant.scale is not None:
            written.append(quant.scale)
        if written:
            say_written(*written)
    entry.run_function(_all_reduce_norm, addresses, sizes, dtype, numbers, way)
    return Fused(out, residual_out, None if is_static else scale)


def _in_memory(
    given: tuple[torch.Tensor | None, ...], quant: Quantization | None
) -> tuple[tuple[Any, ...], Quantization | None]:
    """The tensors of a call, such that their memory holds what they show."""
    tensors = []
    for name, tensor in zip(_NAMES, given, strict=True):
        if tensor is not None:
            tensor = (to_write if name.endswith("out") else to_read)(name, tensor)
        tensors.append(tensor)
    if quant is not None and quant.scale is not None:
        scale = quant.scale
        if quant.kind == "fp8_static":
            quant = dataclasses.replace(quant, scale=to_read("quant: scale", scale))
        else:
            to_write("quant: scale", scale)
    return tuple(tensors), quant


def _check_how(numbers: tuple[SupportsFloat, SupportsFloat], algorithm: str | None) -> None:
    """Refuses what is no number, and no algorithm."""
    for name, number in zip(("eps", "weight_bias"), numbers, strict=True):
        try:
            float(number)
        except (TypeError, ValueError):
            raise InvalidArgumentError(f"{name}: {number!r:.80} is no number") from None
    if algorithm not in ALGORITHMS:
        raise InvalidArgumentError(f"algorithm: {algorithm!r:.80} is none of {', '.join(ALGORITHMS)}")


def _check(given: tuple[torch.Tensor | None, ...], quant: Quantization | None) -> None:
    """Refuses tensors that do not fit."""
    x, residual, weight, bias, out, residual_out, norm_out = given
    if not isinstance(x, torch.Tensor) or x.dim() == 0 or x.dtype not in _DTYPES:
        raise InvalidArgumentError(
            f"x: {described(x)}; pass a tensor (..., hidden) of float32, float16 or bfloat16"
        )
    if x.device.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"x: a tensor on {x.device}; pass one on the CPU or on CUDA")
    hidden = x.shape[-1]
    if hidden % 8 or not 8 <= hidden <= 65536:
        raise InvalidArgumentError(f"x: rows of {hidden} elements; pass a multiple of 8, up to 65536")
    tokens = x.numel() // hidden
    check(quant, tokens, hidden)
    if weight is None and (quant is not None or norm_out is not None or out is not None):
        raise InvalidArgumentError(
            "weight: there is none, so there is no norm for out, norm_out and quant; the sum goes to "
            "residual_out"
        )
    if norm_out is not None and quant is None:
        raise InvalidArgumentError("norm_out: it is for quantised outputs; without quant, out is the norm")
    row, rows = (hidden,), tuple(x.shape)
    quantized = x.dtype if quant is None else FP8
    for name, tensor, shape, dtype in (
        ("x", x, rows, x.dtype),
        ("residual", residual, rows, x.dtype),
        ("weight", weight, row, x.dtype),
        ("bias", bias, row, x.dtype),
        ("out", out, rows, quantized),
        ("residual_out", residual_out, rows, x.dtype),
        ("norm_out", norm_out, rows, x.dtype),
    ):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(f"{name}: {described(tensor)}; it must be a tensor")
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != x.device:
            raise InvalidArgumentError(
                f"{name}: {described(tensor)} on {tensor.device}; it must be {dtype} of shape {shape} on "
                f"{x.device}"
            )
        if not tensor.is_contiguous():
            raise InvalidArgumentError(
                f"{name}: a tensor with strides {tensor.stride()}; pass a contiguous one"
            )
    outputs = {"out": out, "residual_out": residual_out, "norm_out": norm_out}
    refuse_gradients("all_reduce_rms_norm", x=x, residual=residual, weight=weight, bias=bias, **outputs)
    if quant is not None:
        refuse_gradients("all_reduce_rms_norm", **{"quant: scale": quant.scale})
    if quant is not None and quant.scale is not None and quant.scale.device != x.device:
        raise InvalidArgumentError(f"quant: a scale on {quant.scale.device}; it must be on {x.device}")


# Operators of torch.

_library = torch.library.Library("symmpool", "FRAGMENT")
_ARGUMENTS = (
    "Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, float weight_bias, str quant, "
    "{scale}, str layout, bool powers_of_two, str algorithm, str group"
)
# The second writes to tensors that it is given.
for _signature in (
    f"all_reduce_rms_norm({_ARGUMENTS.format(scale='Tensor? scale')}) -> (Tensor, Tensor, Tensor)",
    "all_reduce_rms_norm_(Tensor(a!)? out, Tensor(b!) residual_out, Tensor(c!)? norm_out, "
    f"{_ARGUMENTS.format(scale='Tensor(d!)? scale')}) -> ()",
):
    _library.define(_signature, tags=(torch.Tag.pt2_compliant_tag,))


def _quant_of(kind: str, scale: torch.Tensor | None, layout: str, powers_of_two: bool) -> Quantization | None:
    if kind not in _KINDS:
        raise InvalidArgumentError(f"quant: {kind!r} is none of {', '.join(_KINDS)}")
    return None if kind == "none" else Quantization(kind, scale, layout, powers_of_two)


def _operator(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    weight_bias: float,
    quant: str,
    scale: torch.Tensor | None,
    layout: str,
    powers_of_two: bool,
    algorithm: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives the norm, the sum and the scales, of which those that there are not are empty."""
    given = (x, residual, weight, bias, None, None, None)
    way = functools.partial(_quant_of, quant, scale, layout, powers_of_two)
    made = _make(given, (eps, weight_bias), way, group_of(group), algorithm)
    out = made.out if weight is not None else x.new_empty(0)
    # An operator gives no tensor that it was given.
    scales = made.scale if made.scale is not None and scale is None else x.new_empty(0, dtype=torch.float32)
    return out, made.residual, scales


def _operator_fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    weight_bias: float,
    quant: str,
    scale: torch.Tensor | None,
    layout: str,
    powers_of_two: bool,
    algorithm: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    refuse_gradients("all_reduce_rms_norm", x=x, residual=residual, weight=weight, bias=bias)
    refuse_gradients("all_reduce_rms_norm", **{"quant: scale": scale})
    way = _quant_of(quant, scale, layout, powers_of_two)
    sums = torch.empty_like(x)
    out = x.new_empty(0)
    if weight is not None:
        out = torch.empty_like(x) if way is None else torch.empty_like(x, dtype=FP8)
    if way is None or way.kind == "fp8_static" or scale is not None:
        return out, sums, x.new_empty(0, dtype=torch.float32)
    return out, sums, new_scales(way, x.numel() // x.shape[-1], x.shape[-1], x.device)


def _operator_into_fake(
    out: Any, residual_out: Any, norm_out: Any, x: Any, residual: Any, weight: Any, bias: Any, *rest: Any
) -> None:
    outputs = {"out": out, "residual_out": residual_out, "norm_out": norm_out}
    refuse_gradients("all_reduce_rms_norm", x=x, residual=residual, weight=weight, bias=bias, **outputs)
    refuse_gradients("all_reduce_rms_norm", **{"quant: scale": rest[3]})


def _operator_into(out: Any, residual_out: Any, norm_out: Any, x: Any, *rest: Any) -> None:
    residual, weight, bias, eps, weight_bias, quant, scale, layout, powers_of_two, algorithm, group = rest
    given = (x, residual, weight, bias, out, residual_out, norm_out)
    way = functools.partial(_quant_of, quant, scale, layout, powers_of_two)
    _make(given, (eps, weight_bias), way, group_of(group), algorithm)


for _key in ("CPU", "CUDA"):
    _library.impl("all_reduce_rms_norm", _operator, _key)
    _library.impl("all_reduce_rms_norm_", _operator_into, _key)
torch.library.register_fake("symmpool::all_reduce_rms_norm", _operator_fake, lib=_library)
torch.library.register_fake("symmpool::all_reduce_rms_norm_", _operator_into_fake, lib=_library)


def _traced(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    quant: Quantization | None,
    bias: torch.Tensor | None,
    weight_bias: float,
    norm_out: torch.Tensor | None,
    group: GroupLike,
    algorithm: str,
) -> Fused:
    """The call as an operator."""
    kind, scale, layout, powers_of_two = "none", None, "row", False
    if quant is not None:
        kind, scale, layout, powers_of_two = quant.kind, quant.scale, quant.layout, quant.powers_of_two
    static = kind == "fp8_static"
    name = ops.text_of(group)
    if out is None and residual_out is None and norm_out is None and (scale is None or static):
        rest = (eps, weight_bias, kind, scale, layout, powers_of_two, algorithm, name)
        made, sums, scales = torch.ops.symmpool.all_reduce_rms_norm(x, residual, weight, bias, *rest)
        return Fused(sums if weight is None else made, sums, None if kind == "none" or static else scales)
    if residual_out is None:
        residual_out = torch.empty_like(x)
    if out is None and weight is not None:
        out = torch.empty_like(x) if quant is None else torch.empty_like(x, dtype=FP8)
    if quant is not None and scale is None:
        scale = new_scales(quant, x.numel() // x.shape[-1], x.shape[-1], x.device)
    rest = (eps, weight_bias, kind, scale, layout, powers_of_two, algorithm, name)
    torch.ops.symmpool.all_reduce_rms_norm_(out, residual_out, norm_out, x, residual, weight, bias, *rest)
    return Fused(
        residual_out if weight is None else out,  # type: ignore[arg-type]  # made above
        residual_out,
        None if kind == "none" or static else scale,
    )
