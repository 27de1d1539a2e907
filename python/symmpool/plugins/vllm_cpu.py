"""vLLM's communicator of ranks on the CPU, with tensor-parallel collectives of this package.

vLLM imports `CpuCommunicator` from here by its name, and makes one for each group of several ranks."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch

import symmpool
from symmpool.communicators import cache

__all__ = ["VllmCollectives", "communicator_class"]

logger = logging.getLogger("vllm.plugins.symmpool")

_THEIRS = "vllm.distributed.device_communicators.cpu_communicator"
# Before a group's name it keeps vLLM from making shared memory of its own for the group.
_PREFIX = "symmpool/"


class VllmCollectives:
    """Collectives that vLLM's communicator calls in place of torch.distributed. Each call is collective and
    returns when it is done; a rank that does not come within the group's timeout is an error that names
    it."""

    def __init__(self, group: torch.distributed.ProcessGroup):
        self._group = group
        # Made now, where all ranks are: a first call may be traced.
        cache.communicator(group, "cpu")

    def all_reduce(self, input: torch.Tensor, group: object = None) -> None:
        """Sums up every rank's tensor in place."""
        symmpool.all_reduce(input, group=self._group)

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, group: object = None) -> None:
        """Every rank's `input`, one behind the other, in `output`."""
        symmpool.all_gather_into_tensor(output, input, group=self._group)

    def gather(
        self, input: torch.Tensor, gather_list: list[torch.Tensor] | None, dst: int = 0, group: object = None
    ) -> None:
        """Every rank's tensor in the list of the rank `dst`, a rank of the default group."""
        symmpool.gather(input, gather_list, dst=dst, group=self._group)


@functools.cache
def communicator_class() -> type:
    """vLLM's class with `VllmCollectives` in the groups of tensor parallelism, and collectives of unequal
    parts in all groups."""
    base: Any = importlib.import_module(_THEIRS).CpuCommunicator

    class CpuCommunicator(base):  # type: ignore[misc]
        """Communicator with vLLM's interface. Construction is collective."""

        def __init__(
            self,
            cpu_group: Any,
            device: torch.device | None = None,
            device_group: Any = None,
            unique_name: str = "",
            *arguments: object,
            **options: object,
        ):
            serves = unique_name.startswith("tp")
            name = _PREFIX + unique_name if serves else unique_name
            super().__init__(cpu_group, device, device_group, name, *arguments, **options)
            if not serves:
                return
            self.unique_name = unique_name
            self.dist_module = VllmCollectives(device_group if device_group is not None else cpu_group)
            self.supports_tensor_dict = False
            logger.debug("symmpool serves group %s, rank %s of %s", unique_name, self.rank, self.world_size)

        # Calls of experts under data parallelism, which vLLM has on GPUs only.

        def all_gatherv(self, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
            if dim != 0:
                raise NotImplementedError(f"all_gatherv along dimension {dim}: only 0 is served")
            if isinstance(input_, list):
                return [self._gathered(each, sizes) for each in input_]
            return self._gathered(input_, sizes)

        def _gathered(self, x: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
            sizes = [x.shape[0]] * self.world_size if sizes is None else list(sizes)
            out = x.new_empty((sum(sizes), *x.shape[1:]))
            symmpool.all_gather(list(out.split(sizes)), x, group=self.device_group)
            return out

        def reduce_scatterv(self, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
            dim %= input_.dim()
            x = input_.movedim(0, dim).contiguous()
            parts = x.chunk(self.world_size) if sizes is None else x.split(list(sizes))
            out = x.new_empty(parts[self.rank_in_group].shape)
            symmpool.reduce_scatter(out, list(parts), group=self.device_group)
            return out.movedim(0, dim).contiguous()

    return CpuCommunicator


def __getattr__(name: str) -> Any:
    if name == "CpuCommunicator":
        return communicator_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
