"""For SGLang: the names of its `pynccl_allocator`, on this package's pools.

    import symmpool.engines.sglang
    symmpool.engines.sglang.install()   # in every process of SGLang, before it makes its groups

Each group has its own pool, whose windows are registered with the group's own communicator.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import traceback
from typing import TYPE_CHECKING, Any

from symmpool.engines import CustomAllreduce, core, nccl_communicator
from symmpool.engines.core import EnginePool, EngineScope
from symmpool.engines.custom_allreduce_v2 import derived, is_derived
from symmpool.errors import InvalidStateError, UnsupportedError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from symmpool.engines.types import EngineCommunicator, GraphPool, GroupCoordinator

__all__ = [
    "SymmetricMemoryContext",
    "allocate_symmetric_buffer",
    "debug_check_symmetric_mempool",
    "describe_registration_in_progress",
    "disable_symmetric_memory_context",
    "get_nccl_mem_pool",
    "install",
    "install_custom_allreduce",
    "install_fusion",
    "install_nccl_communicator",
    "is_symmetric_memory_enabled",
    "is_tensor_in_symmetric_mempool",
    "prealloc_symmetric_memory_pool",
    "restore_symmetric_memory_context",
    "set_graph_pool_id",
    "use_symmetric_memory",
]

logger = logging.getLogger("symmpool.engines")

#: The modules of SGLang that are replaced.
REPLACES = "sglang.srt.distributed.device_communicators.pynccl_allocator"
ALL_REDUCE = "sglang.srt.distributed.device_communicators.custom_all_reduce"
ALL_REDUCE_V2 = "sglang.srt.distributed.device_communicators.custom_all_reduce_v2"

NCCL = "sglang.srt.distributed.device_communicators.pynccl"
FUSION = "sglang.srt.layers.flashinfer_comm_fusion"
_PREFLIGHT = "_preflight_check_workspace_memory"

# Pools of groups, by the group's name and the identity of its communicator.
_pools: dict[tuple[str, tuple[int, bytes]], EnginePool] = {}
# Pools for `allocate_symmetric_buffer`, by the identity of the communicator.
_buffers: dict[tuple[int, bytes], EnginePool] = {}
_graph_pool_id: list[GraphPool | None] = [None]
_active: list[SymmetricMemoryContext | None] = [None]
# Groups whose ranks are being waited for. A watchdog thread reads this.
_waiting: list[str] = []
_warned: set[Any] = set()


def install() -> None:
    """Replaces SGLang's module by this one. SGLang's may be imported, but must not have been used."""
    core.replace_module(REPLACES, sys.modules[__name__])


def install_custom_allreduce() -> None:
    """Makes SGLang use this package's all-reduces for groups that it makes from now on. Where SGLang chooses
    its `CustomAllReduceV2`, groups have a class derived from that, so models that ask for the class lose
    nothing; elsewhere `CustomAllreduce`."""
    module: Any = importlib.import_module(ALL_REDUCE)
    theirs: Any = getattr(module, "dispatch_custom_allreduce", None)
    if getattr(theirs, "is_of_symmpool", False):
        return
    try:
        # SGLang 0.5.17 and newer; it needs CUDA's compiler package, so it need not be there.
        second: Any = importlib.import_module(ALL_REDUCE_V2)
    except ImportError:
        second = None
    own = getattr(second, "CustomAllReduceV2", None)
    if own is not None and not is_derived(own):
        core.rebind(own, derived(own), "sglang")

    def dispatch_custom_allreduce(group: Any, device: Any) -> Any:
        # On the CPU SGLang's own has no answer.
        asks = theirs is not None and core.has_cuda()
        chosen = theirs(group=group, device=device) if asks else None
        return chosen if is_derived(chosen) else CustomAllreduce

    dispatch_custom_allreduce.is_of_symmpool = True  # type: ignore[attr-defined]
    module.dispatch_custom_allreduce = dispatch_custom_allreduce


def install_nccl_communicator() -> None:
    """Makes SGLang use this package's collectives where it asks its `PyNcclCommunicator`, in groups that it
    makes from now on: what it captures in graphs, gathers and scattered sums of unequal parts, and messages.
    Groups across hosts stay NCCL's, and so do all with --enable-symm-mem."""
    own: Any = importlib.import_module(NCCL).PyNcclCommunicator
    if not nccl_communicator.is_derived(own):
        core.rebind(own, nccl_communicator.derived(own, True, is_symmetric_memory_enabled), "sglang")


def install_fusion() -> None:
    """Puts `flashinfer_comm` in place of FlashInfer's functions, and has SGLang not try before whether a
    device has memory and multicast for FlashInfer's workspace: ours takes neither. Raises UnsupportedError
    where FlashInfer cannot be imported."""
    from symmpool.engines import flashinfer_comm

    flashinfer_comm.install()
    module = importlib.import_module(FUSION)
    if hasattr(module, _PREFLIGHT):
        setattr(module, _PREFLIGHT, _needs_nothing)


def _needs_nothing(*arguments: object, **options: object) -> bool:
    return True


def is_symmetric_memory_enabled() -> bool:
    """SGLang's option `enable_symm_mem`; false before it is set."""
    try:
        # Since 0.5.17; the older way raises there.
        context: Any = sys.modules.get("sglang.srt.runtime_context")
        if hasattr(context, "get_exec"):
            return bool(context.get_exec().comm.enable_symm_mem)
        arguments = sys.modules.get("sglang.srt.server_args")
        if arguments is None:
            return False
        return bool(arguments.get_global_server_args().enable_symm_mem)
    except ValueError:  # not set yet
        return False


def is_tensor_in_symmetric_mempool(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in one of the pools."""
    return any(each.holds(tensor) for each in (*_pools.values(), *_buffers.values()))


def set_graph_pool_id(graph_pool_id: GraphPool | None) -> None:
    """Sets the memory pool of the graph that is about to be captured."""
    _graph_pool_id[0] = graph_pool_id


def get_nccl_mem_pool(group_name: str | None = None) -> torch.cuda.MemPool | None:
    """The torch.cuda.MemPool of the group of that name, or of the first group; None before its first
    context."""
    for (name, _), state in _pools.items():
        if group_name is None or name == group_name:
            return state.mem_pool()
    return None


def _state(group: GroupCoordinator) -> EnginePool:
    name = group.unique_name
    if group.pynccl_comm is None:
        raise InvalidStateError(f"symmetric memory needs pynccl in group {name!r}")
    which = core.identity_of(group.pynccl_comm)
    if (name, which) not in _pools:
        # The CPU group always has a store.
        process_group = getattr(group, "cpu_group", None) or group.device_group
        _pools[name, which] = EnginePool(process_group, str(group.device), which[0])
    return _pools[name, which]


@contextlib.contextmanager
def _waiting_for(name: str) -> Any:
    _waiting.append(name)
    try:
        yield
    finally:
        _waiting.remove(name)


def describe_registration_in_progress() -> str | None:
    """The groups whose ranks this process is waiting for while windows are made and registered, or None."""
    return f"group {', '.join(_waiting)}" if _waiting else None


class SymmetricMemoryContext:
    """A context manager, in which torch allocates in the group's symmetric memory. The first one of a group
    is collective. It can be used again."""

    def __init__(self, group_coordinator: GroupCoordinator):
        self.group_coordinator = group_coordinator
        self.group_name = group_coordinator.unique_name
        self._scope: EngineScope | None = None
        self._before: SymmetricMemoryContext | None = None

    def __enter__(self) -> SymmetricMemoryContext:
        with _waiting_for(self.group_name):
            scope = EngineScope(_state(self.group_coordinator), lambda: _graph_pool_id[0])
            scope.__enter__()
        self._scope, self._before, _active[0] = scope, _active[0], self
        return self

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        scope, self._scope = self._scope, None
        _active[0], self._before = self._before, None
        if scope is not None:
            with _waiting_for(self.group_name):
                scope.__exit__(kind, value, traceback)


def _innermost_first(context: SymmetricMemoryContext | None) -> list[SymmetricMemoryContext]:
    found = []
    while context is not None:
        found.append(context)
        context = context._before
    return found


def disable_symmetric_memory_context() -> SymmetricMemoryContext | None:
    """Suspends symmetric allocations, and returns the active context, or None. One rank may do this alone,
    because nothing is committed before the context ends."""
    saved, _active[0] = _active[0], None
    for each in _innermost_first(saved):
        if each._scope is not None:
            each._scope.pause()
    return saved


def restore_symmetric_memory_context(saved_context: SymmetricMemoryContext | None) -> None:
    """Resumes the context that `disable_symmetric_memory_context` returned."""
    for each in reversed(_innermost_first(saved_context)):
        if each._scope is not None:
            each._scope.resume()
    if saved_context is not None:
        _active[0] = saved_context


def use_symmetric_memory(
    group_coordinator: GroupCoordinator, disabled: bool = False
) -> AbstractContextManager[SymmetricMemoryContext | None]:
    """The context for a group, or one that does nothing."""
    if disabled or group_coordinator.world_size == 1 or not is_symmetric_memory_enabled():
        return contextlib.nullcontext()
    return SymmetricMemoryContext(group_coordinator)


def allocate_symmetric_buffer(comm: EngineCommunicator, nbytes: int) -> tuple[torch.Tensor, bool]:
    """A zeroed tensor of bytes in symmetric memory of a communicator's ranks, and whether it is in a window
    of NCCL. Collective. Its memory is freed when every rank has released all views of it."""
    import torch

    which = core.identity_of(comm)
    if which not in _buffers:
        _buffers[which] = EnginePool(comm.group, str(comm.device), which[0])
    state = _buffers[which]
    tensor = state.pool.zeros((nbytes,), torch.uint8)
    state.pool.commit()
    try:
        state.register()
    except UnsupportedError as error:
        logger.warning("symmpool: no windows of NCCL: %s", error)
        return tensor, False
    return tensor, True


def _variable(name: str) -> Any:
    """The value of one of SGLang's environment variables."""
    from sglang.srt.environ import envs

    return getattr(envs, name).get()


def debug_check_symmetric_mempool(
    group_coordinator: GroupCoordinator, tensors: dict[str, torch.Tensor], op_name: str
) -> None:
    """With SGLANG_DEBUG_SYMM_MEM, warns on the first rank about tensors outside of symmetric memory, once for
    every place in the program."""
    if not is_symmetric_memory_enabled() or not _variable("SGLANG_DEBUG_SYMM_MEM"):
        return
    if not group_coordinator.is_first_rank:
        return
    outside = [name for name, each in tensors.items() if not is_tensor_in_symmetric_mempool(each)]
    if not outside:
        return
    place = tuple((frame.filename, frame.lineno) for frame in traceback.extract_stack())
    if (op_name, *outside, place) not in _warned:
        _warned.add((op_name, *outside, place))
        logger.warning(
            "symmpool: %s in group %r: not in symmetric memory: %s",
            op_name,
            group_coordinator.unique_name,
            ", ".join(f"{name}, {list(tensors[name].shape)} {tensors[name].dtype}" for name in outside),
            stack_info=True,
        )


def prealloc_symmetric_memory_pool(
    *, is_draft_worker: bool, enable_symm_mem: bool, device: str, forward_stream: torch.Stream | None
) -> None:
    """Grows the tensor-parallel group's pool to SGLANG_SYMM_MEM_PREALLOC_GB_SIZE, so that it need not grow
    later. Collective."""
    if is_draft_worker or not enable_symm_mem:
        return
    size = int(_variable("SGLANG_SYMM_MEM_PREALLOC_GB_SIZE") * (1 << 30))
    if size <= 0:
        return
    import torch
    from sglang.srt.distributed.parallel_state import get_tp_group

    # torch reuses a freed tensor on the stream that it was allocated on.
    with (
        torch.get_device_module(device).stream(forward_stream),
        use_symmetric_memory(get_tp_group()),
    ):
        torch.empty((size,), dtype=torch.uint8, device=device)
