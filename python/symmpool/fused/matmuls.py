"""Arguments of fused matmuls: checked, and laid out as rows."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch

from symmpool.communicators.tensors import to_read
from symmpool.errors import InvalidArgumentError
from symmpool.fused.arguments import described, refuse_gradients

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Matmul",
    "aligned",
    "check_alike",
    "check_left",
    "check_reduce",
    "check_right",
    "check_scales",
    "fingerprint",
    "rows_of",
    "scales_of_rows",
]

#: Types of left matrices.
DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
#: Those that have scales.
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A right matrix, and what else a matmul with it takes."""

    right: torch.Tensor
    #: For matrices of 8-bit floats; None where they are not scaled.
    right_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    result_scale: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False

    @property
    def is_scaled(self) -> bool:
        """Whether the matrices are of 8-bit floats, with scales."""
        return self.right_scale is not None

    def dtype_for(self, left: torch.Tensor) -> torch.dtype:
        """The type of the matmul."""
        return self.out_dtype or (left.dtype if self.is_scaled else self.right.dtype)

    def make(
        self, left: torch.Tensor, left_scale: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """The matmul of rows, in `out` if that is given."""
        if self.right_scale is None:
            return torch.mm(left, self.right) if out is None else torch.mm(left, self.right, out=out)
        assert left_scale is not None
        if not left.is_cuda and not all(each.numel() == 1 for each in (left_scale, self.right_scale)):
            return self._make_by_rows(left, left_scale, out)
        more = {"out": out} if out is not None else {}
        return torch._scaled_mm(
            left,
            self.right,
            scale_a=left_scale,
            scale_b=self.right_scale,
            bias=self.bias,
            scale_result=self.result_scale,
            out_dtype=self.out_dtype,
            use_fast_accum=self.use_fast_accum,
            **more,
        )

    def _make_by_rows(
        self, left: torch.Tensor, left_scale: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """The matmul with scales of rows or columns, which torch has none of on the CPU."""
        assert self.right_scale is not None
        assert left_scale is not None
        made = (left.float() * left_scale) @ (self.right.float() * self.right_scale)
        if self.bias is not None:
            made += self.bias
        if self.result_scale is not None:
            made *= self.result_scale
        made = made.to(self.dtype_for(left))
        return made if out is None else out.copy_(made)

    def in_memory(self, name: str, which: str) -> Matmul:
        """Returns the same matmul, of matrices whose memory holds what they show."""
        found: dict[str, Any] = {
            what: to_read(f"{name}: {of}", given)
            for what, of, given in (
                ("right", which, self.right),
                ("right_scale", f"scale of {which}", self.right_scale),
                ("bias", f"bias of {which}", self.bias),
                ("result_scale", f"result scale of {which}", self.result_scale),
            )
            if given is not None
        }
        if all(found[what] is getattr(self, what) for what in found):
            return self
        return dataclasses.replace(self, **found)

    def columns(self, begin: int, end: int) -> Matmul:
        """The matmul with a range of the right matrix's columns."""

        def part(given: torch.Tensor | None, dim: int) -> torch.Tensor | None:
            if given is None or given.numel() == 1:
                return given
            return given.narrow(dim, begin, end - begin)

        return dataclasses.replace(
            self,
            right=self.right[:, begin:end],
            right_scale=part(self.right_scale, -1),
            bias=part(self.bias, 0),
        )


def check_left(name: str, which: str, left: object, dim: object, what: str) -> None:
    """Refuses what is no left matrix, and what is none of its dimensions."""
    if not isinstance(left, torch.Tensor) or left.dim() < 2 or left.dtype not in DTYPES:
        raise InvalidArgumentError(
            f"{name}: {which}: {described(left)}; it must be a tensor of 2 or more dimensions, of float32, "
            "float64, float16, bfloat16 or 8-bit floats"
        )
    if not isinstance(dim, int) or not 0 <= dim < left.dim():
        raise InvalidArgumentError(
            f"{name}: {what}: {dim!r} is no dimension of {which} of shape {tuple(left.shape)}"
        )
    refuse_gradients(name, **{which: left})


def check_right(name: str, which: str, matmul: Matmul, left: torch.Tensor, inner: int) -> None:
    """Refuses right matrices that do not fit `inner` columns of the left one."""
    right = matmul.right
    if not isinstance(right, torch.Tensor) or right.dim() != 2 or right.shape[0] != inner:
        raise InvalidArgumentError(
            f"{name}: {which}: {described(right)}; it must be a matrix of {inner} rows"
        )
    if right.device != left.device or (not matmul.is_scaled and right.dtype != left.dtype):
        raise InvalidArgumentError(
            f"{name}: {which}: {right.dtype} on {right.device}; it must be {left.dtype} on {left.device}"
        )
    scale, bias = matmul.right_scale, matmul.bias
    for what, given in (("bias", bias), ("result scale", matmul.result_scale)):
        if given is not None and not isinstance(given, torch.Tensor):
            raise InvalidArgumentError(f"{name}: {what} of {which}: {described(given)}; it must be a tensor")
    if scale is not None and scale.numel() not in (1, right.shape[1]):
        raise InvalidArgumentError(
            f"{name}: scale of {which}: shape {tuple(scale.shape)}; it must have 1 element, or one for each "
            f"of {right.shape[1]} columns"
        )
    if bias is not None and (tuple(bias.shape) != (right.shape[1],) or not bias.dtype.is_floating_point):
        raise InvalidArgumentError(
            f"{name}: bias of {which}: {described(bias)}; it must be of shape {(right.shape[1],)}, of floats"
        )
    if matmul.result_scale is not None and matmul.result_scale.numel() != 1:
        raise InvalidArgumentError(
            f"{name}: result scale of {which}: {described(matmul.result_scale)}; it must have 1 element"
        )
    if matmul.out_dtype is not None and matmul.out_dtype not in DTYPES:
        raise InvalidArgumentError(f"{name}: out_dtype: {matmul.out_dtype!r:.80} is no type of a product")
    refuse_gradients(name, **{which: right, "bias": bias})


def check_scales(
    name: str, which: tuple[str, str], left: torch.Tensor, matmul: Matmul, left_scale: torch.Tensor | None
) -> None:
    """Refuses matrices that have no scales, and scales that are no tensors: a matmul without them would be
    another one."""
    for what, matrix in zip(which, (left, matmul.right), strict=True):
        if not isinstance(matrix, torch.Tensor) or matrix.dtype not in EIGHT_BITS:
            raise InvalidArgumentError(
                f"{name}: {what}: {described(matrix)}; with scales it must be of 8-bit floats"
            )
    for what, scale in zip(which, (left_scale, matmul.right_scale), strict=True):
        if not isinstance(scale, torch.Tensor) or not scale.dtype.is_floating_point:
            raise InvalidArgumentError(
                f"{name}: scale of {what}: {described(scale)}; it must be a tensor of float32"
            )


def check_alike(
    name: str,
    which: tuple[str, str],
    given: tuple[torch.Tensor, Matmul],
    first: tuple[torch.Tensor, Matmul],
) -> None:
    """Refuses a matmul that cannot be added to the first one."""
    (left, matmul), (first_left, first_matmul) = given, first
    for what, found, wanted in (
        (which[0], (tuple(left.shape[:-1]), left.dtype), (tuple(first_left.shape[:-1]), first_left.dtype)),
        (which[0], left.device, first_left.device),
        (which[1], matmul.right.shape[1], first_matmul.right.shape[1]),
    ):
        if found != wanted:
            raise InvalidArgumentError(
                f"{name}: {what}: {found}, and {wanted} in the first product; products that are added up "
                "have one shape and type"
            )


def check_reduce(name: str, reduce_op: object) -> None:
    """Refuses reductions other than "sum" and "avg": InvalidArgumentError."""
    if reduce_op not in ("sum", "avg"):
        raise InvalidArgumentError(f"{name}: reduce_op: {reduce_op!r} is none of 'sum' and 'avg'")


def scales_of_rows(
    name: str, scale: torch.Tensor | None, shape: torch.Size, dim: int, world: int
) -> tuple[str, torch.Tensor | None]:
    """Returns the kind of the scales of a shard that is gathered along `dim`: "one" for all of it, the
    "shard"'s own, or those of the "whole"; and the scales of rows, with `dim` in front."""
    whole = list(shape[:-1])
    if dim < len(whole):
        whole[dim] *= world
    if scale is None:
        return "one", None
    if list(scale.shape) == [*shape[:-1], 1]:
        return "shard", scale.movedim(dim, 0).reshape(-1, 1) if dim < len(whole) else scale.reshape(-1, 1)
    if scale.numel() == 1:
        return "one", scale
    if list(scale.shape) == [*whole, 1]:
        return "whole", scale.movedim(dim, 0).reshape(-1, 1) if dim < len(whole) else scale.reshape(-1, 1)
    raise InvalidArgumentError(
        f"{name}: A_scale: shape {tuple(scale.shape)}; it must have 1 element, or shape {(*shape[:-1], 1)}, "
        f"or {(*whole, 1)} for the gathered tensor"
    )


@functools.lru_cache(maxsize=4096)
def fingerprint(*what: Any) -> int:
    """A hash of what ranks must pass alike, the same in every process."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def rows_of(shape: Sequence[int]) -> int:
    """How many rows a shape has: the product of all dimensions but the last."""
    return math.prod(shape[:-1])


def aligned(scales: torch.Tensor) -> torch.Tensor:
    """Scales at an address that matmuls of 8-bit floats take."""
    return scales if scales.data_ptr() % 16 == 0 and scales.is_contiguous() else scales.clone()
