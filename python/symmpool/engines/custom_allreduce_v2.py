"""SGLang's class `CustomAllReduceV2` with all-reduces of this package.

SGLang asks in many places whether a group's all-reduce is a `CustomAllReduceV2`, and has kernels that write
to its buffers: those of fused norms, experts and gathers. So what `derived` makes is that class. It has these
buffers as before, and only the all-reduces that SGLang asks it for are made by `CustomAllreduce`."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from symmpool.engines.custom_allreduce import CustomAllreduce

if TYPE_CHECKING:
    import torch

__all__ = ["derived", "is_derived"]

logger = logging.getLogger("symmpool.engines")


@functools.cache
def derived(base: type) -> type:
    """The class in place of SGLang's `CustomAllReduceV2`, which is `base`."""

    class CustomAllReduceV2(base):  # type: ignore[misc]
        """All-reduce of SGLang's name. Construction is collective."""

        _symmpool: CustomAllreduce | None = None

        def __init__(self, group: Any, device: Any, *arguments: object, **options: object):
            super().__init__(group, device, *arguments, **options)
            # An instance without the pull half has buffers for fused kernels, and makes no all-reduces.
            if self.disabled or not getattr(self, "pull_enabled", True):
                return
            ours = CustomAllreduce(group, device, max_size=max(self.max_size, 8 << 20))
            if ours.disabled:
                logger.warning(
                    "symmpool's all-reduce is disabled on rank %s, as said above: SGLang's own makes the "
                    "all-reduces of this group",
                    getattr(ours, "rank", "?"),
                )
                return
            self._symmpool = ours

        def _serves(self, inp: torch.Tensor) -> bool:
            # A program that asks for one of SGLang's algorithms gets it.
            asked = getattr(self, "override_algo", None) is not None
            return self._symmpool is not None and not asked and self._symmpool.should_custom_ar(inp)

        def should_custom_ar(self, inp: torch.Tensor) -> bool:
            return not self.disabled and (self._serves(inp) or super().should_custom_ar(inp))

        def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
            if self._serves(input):
                assert self._symmpool is not None
                return self._symmpool.all_reduce(input)
            return super().custom_all_reduce(input)

        def close(self) -> None:
            ours, self._symmpool = self._symmpool, None
            if ours is not None:
                ours.close()
            super().close()

    CustomAllReduceV2.__module__ = base.__module__
    return CustomAllReduceV2


def is_derived(kind: object) -> bool:
    """Whether a class is one that `derived` made."""
    return isinstance(kind, type) and "_symmpool" in vars(kind)
