"""The warning for gradients that pass by a collective which has none."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["warn_of_gradient", "watch"]


def watch(tensor: torch.Tensor) -> None:
    """A call writes to a tensor that may require grad. As torch.distributed does, warns if a gradient comes
    back by way of it, and not before: results that are only looked at are no mistake."""
    import torch

    if not tensor.requires_grad or not torch.is_grad_enabled():
        return
    hooks = tensor._backward_hooks
    # A parameter is written to again and again, and needs one hook.
    if not hooks or _warn not in hooks.values():
        tensor.register_hook(_warn)


def _warn(gradient: torch.Tensor) -> Any:
    """Warns, or has the graph warn that this gradient is recorded in."""
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode

    if is_in_torch_dispatch_mode():
        import torch

        return torch.ops.symmpool._passed_by(gradient)
    warn_of_gradient()
    return None


def warn_of_gradient() -> None:
    """Warns that a gradient takes no account of what a collective wrote."""
    warnings.warn(
        "symmpool: a gradient came back by way of a tensor that a collective has written to, and took "
        "no account of that. symmpool.ops has collectives with gradients; make the call under "
        "torch.no_grad(), or on tensor.detach(), where none is meant to flow",
        stacklevel=2,
    )


# A tensor can be pickled all the same: the hook stays in this process.
_warn.__torch_unserializable__ = True  # type: ignore[attr-defined]
