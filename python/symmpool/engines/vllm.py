"""For vLLM: the names of its `pynccl_allocator`, on this package's pools.

    import symmpool.engines.vllm
    symmpool.engines.vllm.install()     # in every process of vLLM, before it makes its groups

Tensors made in `nccl_symm_mem_context(pynccl_comm)` are at the same offset on every rank, and their
windows are registered with that communicator in the same order on every rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from typing import TYPE_CHECKING, Any

from symmpool.engines import CustomAllreduce, core, nccl_communicator
from symmpool.engines.core import EnginePool, EngineScope

if TYPE_CHECKING:
    import torch

    from symmpool.engines.types import EngineCommunicator, GraphPool

__all__ = [
    "compile_nccl_allocator",
    "get_nccl_mem_pool",
    "install",
    "install_custom_allreduce",
    "install_nccl_communicator",
    "is_symmetric_memory_enabled",
    "is_symmetric_memory_tensor",
    "nccl_symm_mem_context",
    "set_graph_pool_id",
]

logger = logging.getLogger("symmpool.engines")

#: The modules of vLLM that are replaced.
REPLACES = "vllm.distributed.device_communicators.pynccl_allocator"
ALL_REDUCE = "vllm.distributed.device_communicators.custom_all_reduce"
NCCL = "vllm.distributed.device_communicators.pynccl"

# Pools by the identity of the communicator.
_pools: dict[tuple[int, bytes], EnginePool] = {}
_graph_pool_id: list[GraphPool | None] = [None]


def install() -> None:
    """Replaces vLLM's module by this one. vLLM's may be imported, but must not have been used."""
    core.replace_module(REPLACES, sys.modules[__name__])


def install_custom_allreduce() -> None:
    """Makes vLLM use this package's `CustomAllreduce` for groups that it makes from now on. vLLM 0.33 asks
    FlashInfer before it, where that is installed and VLLM_ALLREDUCE_USE_FLASHINFER is not 0: then
    `flashinfer_comm.install()` is needed besides, and a warning says so where it is missing."""
    module: Any = importlib.import_module(ALL_REDUCE)
    module.CustomAllreduce = CustomAllreduce
    if asks_flashinfer_first() and not _serves_flashinfer():
        logger.warning(
            "symmpool: vLLM asks FlashInfer for all-reduces before symmpool's; call "
            "symmpool.engines.flashinfer_comm.install() too, or set VLLM_ALLREDUCE_USE_FLASHINFER=0"
        )


def install_nccl_communicator() -> None:
    """Makes vLLM use this package's collectives where it asks its `PyNcclCommunicator`, in groups that it
    makes from now on: gathers, scattered sums, messages, and sums that nothing else serves. Groups across
    hosts, and those of other programs with vLLM, stay NCCL's, and so do all with VLLM_USE_NCCL_SYMM_MEM."""
    own: Any = importlib.import_module(NCCL).PyNcclCommunicator
    if not nccl_communicator.is_derived(own):
        made = nccl_communicator.derived(own, False, _needs_nccl)
        core.rebind(own, made, "vllm")


def _needs_nccl() -> bool:
    return is_symmetric_memory_enabled() or core.is_enabled("vllm.envs", "VLLM_DISABLE_PYNCCL")


def asks_flashinfer_first() -> bool:
    """Whether vLLM in this process asks FlashInfer before its custom all-reduce."""
    variables: Any = sys.modules.get("vllm.envs")
    if not hasattr(variables, "VLLM_ALLREDUCE_USE_FLASHINFER"):
        return False
    # Each is a reason for vLLM to do without it.
    if not variables.VLLM_ALLREDUCE_USE_FLASHINFER or getattr(variables, "VLLM_BATCH_INVARIANT", False):
        return False
    return importlib.util.find_spec("flashinfer") is not None


def _serves_flashinfer() -> bool:
    module = sys.modules.get("symmpool.engines.flashinfer_comm")
    return module is not None and module.is_installed()


def is_symmetric_memory_enabled() -> bool:
    """Whether vLLM's variable VLLM_USE_NCCL_SYMM_MEM is set."""
    return core.is_enabled("vllm.envs", "VLLM_USE_NCCL_SYMM_MEM")


def is_symmetric_memory_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in one of the pools."""
    return is_symmetric_memory_enabled() and any(each.holds(tensor) for each in _pools.values())


def set_graph_pool_id(graph_pool_id: GraphPool | None) -> None:
    """Sets the memory pool of the graph that is about to be captured."""
    _graph_pool_id[0] = graph_pool_id


def compile_nccl_allocator() -> None:
    """Nothing has to be compiled."""


def get_nccl_mem_pool() -> torch.cuda.MemPool | None:
    """The torch.cuda.MemPool of the first communicator's pool; None before its first context."""
    for state in _pools.values():
        return state.mem_pool()
    return None


def _state(communicator: EngineCommunicator) -> EnginePool:
    which = core.identity_of(communicator)
    if which not in _pools:
        device = str(communicator.device)
        _pools[which] = EnginePool(communicator.group, device, which[0])
    return _pools[which]


class nccl_symm_mem_context:
    """A context manager, in which torch allocates in symmetric memory. The first one of a communicator is
    collective."""

    def __init__(self, pynccl_comm: EngineCommunicator | None, disabled: bool = False):
        self.disabled = bool(
            disabled
            or not is_symmetric_memory_enabled()
            or pynccl_comm is None
            or pynccl_comm.world_size == 1
            or not core.has_cuda()
        )
        self.pynccl_comm = None if self.disabled else pynccl_comm
        self._scope: EngineScope | None = None

    def __enter__(self) -> nccl_symm_mem_context:
        if not self.disabled and self.pynccl_comm is not None:
            self._scope = EngineScope(_state(self.pynccl_comm), lambda: _graph_pool_id[0])
            self._scope.__enter__()
        return self

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(kind, value, traceback)
