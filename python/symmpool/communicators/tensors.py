"""Reading tensors of torch: every door to calls that take addresses of tensors reads them here.

A tensor may have no memory (a fake one, one on "meta", one whose storage was freed, as FSDP frees those of
parameters), and its memory may not hold what it shows (torch negates and conjugates lazily). An address says
nothing of either. Communicators' methods read their arguments in the same way, in the extension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmpool._symmpool import _count_versions, _shows_memory
from symmpool.communicators.gradients import watch
from symmpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

__all__ = ["check_distinct", "say_written", "to_read", "to_write"]


def to_read(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory holds the elements that this one shows: itself, or a copy. `name` is the
    argument's. Its elements may have any strides. Refuses what has no memory."""
    if _shows_memory(name, tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg()


def to_write(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, once it is known that a call can write to its memory. Refuses what has none, memory that
    does not hold what the tensor shows, and elements that share their memory."""
    if not _shows_memory(name, tensor):
        raise InvalidArgumentError(
            f"{name}: its memory is not what it shows, as torch negates or conjugates it lazily; pass "
            "tensor.resolve_neg() or tensor.resolve_conj()"
        )
    check_distinct(name, tensor)
    return tensor


def check_distinct(name: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor to write to whose elements share their memory, or that are so interleaved that this
    cannot be excluded."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                raise InvalidArgumentError(
                    f"{name}: a tensor to write to has elements that share their memory, as expand() makes "
                    f"them (shape {tuple(tensor.shape)}, strides {tensor.stride()}); pass tensor.clone()"
                )
            reach += stride * (size - 1)


def say_written(*tensors: torch.Tensor | None) -> None:
    """Has autograd notice that a call writes to these, of which some may be None: a backward pass that needs
    what was there raises, and a gradient that comes back by way of them warns."""
    written = [each for each in tensors if each is not None]
    for each in written:
        if getattr(each, "requires_grad", False):
            watch(each)
    _count_versions(written)
