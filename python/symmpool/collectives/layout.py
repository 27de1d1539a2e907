"""Tensors whose elements do not lie row by row: copies of them to send, and copies back to them.

Functions take tensors of torch, but for `as_torch`, which makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from symmpool._symmpool import Block, _shows_memory
from symmpool.communicators.tensors import check_distinct
from symmpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from symmpool.collectives.types import Tensor
    from symmpool.communicators.work import PreparedCall

__all__ = [
    "as_torch",
    "check_destination",
    "check_source",
    "contiguous",
    "copy_back",
    "destination",
    "first_tensor",
    "is_plain",
    "message",
    "plain",
    "row",
]


def as_torch(name: str, tensor: Tensor) -> torch.Tensor:
    """A tensor of torch on the memory of one of torch, numpy or this package. `name` is the argument's."""
    if isinstance(tensor, torch.Tensor):
        if tensor.is_nested:
            raise _not_dense(name, tensor)
        check_dense(name, tensor)
        return tensor
    if isinstance(tensor, Block):
        return torch.from_dlpack(tensor)
    if type(tensor).__module__.partition(".")[0] == "numpy" and hasattr(tensor, "__array_interface__"):
        try:
            return torch.from_numpy(tensor)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"{name}: torch takes no such array of numpy ({error})") from None
    kind = type(tensor)
    raise TypeError(f"{name}: a torch.Tensor, numpy.ndarray or symmpool.Block is needed, not {kind}")


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor that does not hold its elements as they are, with strides or without."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise _not_dense(name, tensor)


def _not_dense(name: str, tensor: torch.Tensor) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{name}: a tensor of layout {tensor.layout}, of {tensor.dtype}; its elements must lie in memory as "
        "they are: pass tensor.to_dense(), tensor.int_repr() or tensor.values()"
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its elements row by row, as they show. Refuses one that has no rows."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise _not_dense("symmpool", tensor)
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory holds its elements row by row: itself, or a copy. No gradient flows through the
    copy."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def row(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as one row: a view of it, or of a copy."""
    return plain(tensor.detach()).reshape(-1)


def destination(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Returns the tensor that a call writes to in place of this one, and the function that copies it back, if
    need be."""
    copy = plain(tensor)
    return (tensor, None) if copy is tensor else (copy, copy_back([(tensor, copy)]))


def check_source(tensor: torch.Tensor) -> None:
    """Refuses a tensor that has no memory to read: one of torch's fake mode, one on no device, or one whose
    storage was freed, as FSDP frees its parameters'."""
    _shows_memory("symmpool: tensor", tensor)


def check_destination(tensor: torch.Tensor) -> None:
    """Refuses a tensor that cannot be written to: one without memory, or whose elements share theirs."""
    _shows_memory("symmpool: tensor", tensor)
    check_distinct("symmpool: tensor", tensor)


def copy_back(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    """Returns the function that copies results to where they belong: pairs of a destination and a source. It
    may run in another thread, whose modes are not the caller's: a tensor made in inference mode, or one that
    requires grad, is written to in that mode only."""

    def copy() -> None:
        with torch.inference_mode():
            for to, found in pairs:
                to.copy_(found)

    return copy


def message(tensor: torch.Tensor, peer: int, sends: bool) -> Callable[[], PreparedCall]:
    """Returns the function that makes the arguments of a send or a receive of a tensor that is not plain: see
    `symmpool.collectives.plans.Prepare`. Raises an error if the tensor is wrong."""
    (check_source if sends else check_destination)(tensor)

    def prepare() -> PreparedCall:
        place, finish = (plain(tensor), None) if sends else destination(tensor)
        return (place, peer), finish

    return prepare


def contiguous(arguments: tuple[object, ...], writes: bool) -> tuple[list[Any], Callable[[], None] | None]:
    """The arguments of a call of another backend, with copies of tensors that are not plain, also in lists.
    If the call `writes` to those of the first argument, also what copies them back."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def replaced(argument: Any, written: bool) -> Any:
        if isinstance(argument, (list, tuple)):
            found = [replaced(each, written) for each in argument]
            same = all(new is old for new, old in zip(found, argument, strict=True))
            return argument if same else found
        if not isinstance(argument, torch.Tensor) or argument.layout is not torch.strided:
            return argument
        if argument.is_quantized or is_plain(argument):
            return argument
        (check_destination if written else check_source)(argument)
        copy = plain(argument)
        if written:
            pairs.append((argument, copy))
        return copy

    found = [replaced(each, writes and at == 0) for at, each in enumerate(arguments)]
    return found, copy_back(pairs) if pairs else None


def first_tensor(arguments: Iterable[object]) -> torch.Tensor | None:
    """The first tensor among the arguments of a call, or in lists among them."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument
        if isinstance(argument, (list, tuple)):
            found = first_tensor(argument)
            if found is not None:
                return found
    return None
