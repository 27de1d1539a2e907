"""For SGLang: the names of its `pynccl_allocator`, on this package's pools.

    import symmpool.engines.sglang
    symmpool.engines.sglang.install()   # before sglang's own module is imported

Each group has a pool of its own, whose windows are registered with the group's own communicator.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from symmpool.engines.core import EnginePool, Scope, address_of, put_in_place_of
from symmpool.errors import Error, InvalidStateError

__all__ = [
    "SymmetricMemoryContext",
    "disable_symmetric_memory_context",
    "get_nccl_mem_pool",
    "install",
    "is_symmetric_memory_enabled",
    "is_symmetric_memory_tensor",
    "nccl_allocator_register_segments_with_comm",
    "restore_symmetric_memory_context",
    "set_graph_pool_id",
    "use_symmetric_memory",
]

#: Where SGLang has its own.
REPLACES = "sglang.srt.distributed.device_communicators.pynccl_allocator"

_pools: dict[str, EnginePool] = {}
_graph_pool_id: list[Any] = [None]
_active: list[Any] = [None]


def install() -> None:
    """Puts this module in the place of SGLang's."""
    put_in_place_of(REPLACES, sys.modules[__name__])


def is_symmetric_memory_enabled() -> bool:
    """As SGLang's server arguments say (`enable_symm_mem`)."""
    arguments = sys.modules.get("sglang.srt.server_args")
    if arguments is None:
        return False
    try:
        return bool(arguments.get_global_server_args().enable_symm_mem)
    except (AttributeError, ValueError):  # not set yet
        return False


def is_symmetric_memory_tensor(tensor: Any) -> bool:
    """Whether a tensor lies in one of the pools."""
    return any(each.holds(tensor) for each in _pools.values())


def set_graph_pool_id(graph_pool_id: Any) -> None:
    """The pool of the graph that is about to be captured."""
    _graph_pool_id[0] = graph_pool_id


def get_nccl_mem_pool(group_name: str | None = None) -> Any:
    """The torch.cuda.MemPool of a group, by its name, or of the first; None before its first
    context."""
    for name, state in _pools.items():
        if group_name is None or name == group_name:
            return state.mem_pool()
    return None


def nccl_allocator_register_segments_with_comm(comm_ptr: Any) -> int:
    """Registers the windows of the pool that belongs to a communicator, those of later commits
    too. 0, or 1 where there is no such pool or NCCL refuses. Contexts do it by themselves."""
    address = address_of(comm_ptr)
    for state in _pools.values():
        if state.address == address:
            try:
                state.register()
            except Error:
                return 1
            return 0
    return 1


def _state(group: Any) -> EnginePool:
    name = group.unique_name
    if group.pynccl_comm is None:
        raise InvalidStateError(f"symmetric memory needs pynccl in group {name!r}")
    if name not in _pools:
        # The group's own for the CPU: its store is the one that is sure to be there.
        meeting = getattr(group, "cpu_group", None) or group.device_group
        address = address_of(group.pynccl_comm.comm)
        _pools[name] = EnginePool(meeting, str(group.device), address)
    return _pools[name]


class SymmetricMemoryContext:
    """`with` it, torch allocates in the group's symmetric memory. The first is collective. It can be
    entered again after it was left."""

    def __init__(self, group_coordinator: Any):
        self.group_coordinator = group_coordinator
        self.group_name = group_coordinator.unique_name
        self._scope: Scope | None = None

    def __enter__(self) -> SymmetricMemoryContext:
        scope = Scope(_state(self.group_coordinator), lambda: _graph_pool_id[0])
        scope.__enter__()
        self._scope, _active[0] = scope, self
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        scope, self._scope, _active[0] = self._scope, None, None
        if scope is not None:
            scope.__exit__(kind, value, traceback)


def disable_symmetric_memory_context() -> Any:
    """Leaves the context that is active, and gives it, or None."""
    saved = _active[0]
    if saved is not None:
        saved.__exit__(None, None, None)
    return saved


def restore_symmetric_memory_context(saved_context: Any) -> None:
    """Enters what `disable_symmetric_memory_context` left."""
    if saved_context is not None:
        saved_context.__enter__()


def use_symmetric_memory(group_coordinator: Any, disabled: bool = False) -> Any:
    """The context for a group, or one that does nothing."""
    if disabled or group_coordinator.world_size == 1 or not is_symmetric_memory_enabled():
        return contextlib.nullcontext()
    return SymmetricMemoryContext(group_coordinator)
