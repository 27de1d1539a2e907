"""Common part of the adapters: one pool for each group, registered with the engine's NCCL communicator."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
from typing import TYPE_CHECKING, Any

import symmpool
from symmpool.errors import InvalidStateError, UnsupportedError
from symmpool.groups import process_groups

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import torch

    from symmpool.engines.types import EngineCommunicator, GraphPool


class RawCommunicator:
    """An NCCL communicator, known by its address, in the form of a process group."""

    def __init__(self, address: int):
        self._address = address

    def _get_backend(self, device: Any) -> RawCommunicator:
        return self

    def _comm_ptr(self) -> int:
        return self._address


class EnginePool:
    """A group's pool, and the communicator that its windows are registered with."""

    def __init__(self, group: Any, device: str, address: int):
        if not hasattr(symmpool, "use_pool") or not hasattr(symmpool.Pool, "register_nccl"):
            raise UnsupportedError(
                "this build of symmpool has no scopes for torch's allocations; use pool.empty()"
            )
        # NCCL before 2.30.3 accepts only windows of one handle.
        self.pool = symmpool.Pool(group_of(group), device, window_policy="per-segment")
        self.address = address
        self._registered = False

    def register(self) -> None:
        """Registers present and future windows with NCCL. Collective."""
        if not self._registered:
            self.pool.register_nccl(RawCommunicator(self.address))
            self._registered = True

    def mem_pool(self) -> torch.cuda.MemPool:
        """The torch.cuda.MemPool of the pool."""
        return self.pool._scope().mempool

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of torch lies in the pool's memory."""
        return self.pool.owns(tensor.untyped_storage().data_ptr())


def group_of(group: Any) -> Any:
    """An engine's group in a form that `Pool` takes. Some groups of engines are not torch's, and some of
    torch's are not in its list."""
    if group is None:
        # The default group may have other ranks, so it is no substitute.
        raise InvalidStateError(
            "the communicator was made without a group, so its ranks have no store for a rendezvous"
        )
    dist = process_groups.distributed()
    if dist is not None and isinstance(group, dist.ProcessGroup):
        if group in dist.distributed_c10d._world.pg_map:
            return group
        return (group.get_group_store(), group.rank(), group.size())
    if all(hasattr(group, name) for name in ("store", "rank", "world_size")):
        return (group.store, group.rank, group.world_size)
    return group


class EngineScope:
    """A context manager, in which torch allocates in an engine's pool. It can be used again.

    During a capture torch allocates in the graph's own pool, which is suspended inside the scope. The pool
    commits after the capture: at the next scope outside of one, or by `symmpool.commit_postponed()`."""

    def __init__(self, state: EnginePool, graph_pool: Callable[[], GraphPool | None]):
        self._state, self._graph_pool = state, graph_pool
        self._paused: tuple[int, GraphPool] | None = None

    def __enter__(self) -> EngineScope:
        import torch

        if not torch.cuda.is_current_stream_capturing():
            symmpool.commit_postponed()
            self._state.register()
        self.resume()
        return self

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        try:
            symmpool.use_pool(self._state.pool).__exit__(kind, value, traceback)
        finally:
            self._resume_graph_pool()

    def pause(self) -> None:
        """Sends allocations to where they went before the scope, until `resume`. There is no commit, so one
        rank may do this alone."""
        pool = self._state.pool
        try:
            pool._scope().leave(pool, None, None, False)
        finally:
            self._resume_graph_pool()

    def resume(self) -> None:
        """Sends allocations to the pool."""
        import torch

        if torch.cuda.is_current_stream_capturing():
            graph_pool = self._graph_pool()
            if graph_pool is None:
                raise InvalidStateError(
                    "the graph's memory pool is not known: call set_graph_pool_id before capturing"
                )
            self._paused = (torch.cuda.current_device(), graph_pool)
            torch._C._cuda_endAllocateToPool(*self._paused)
        try:
            symmpool.use_pool(self._state.pool).__enter__()
        except BaseException:
            self._resume_graph_pool()
            raise

    def _resume_graph_pool(self) -> None:
        import torch

        paused, self._paused = self._paused, None
        if paused is not None:
            torch._C._cuda_beginAllocateCurrentThreadToPool(*paused)


def address_of(communicator: Any) -> int:
    """The address of an `ncclComm_t`, as engines hold it: a number, or a C pointer."""
    value = getattr(communicator, "value", communicator)
    return int(value or 0)


def identity_of(communicator: EngineCommunicator) -> tuple[int, bytes]:
    """The identity of an engine's communicator. An address alone can be reused after one was destroyed."""
    unique = getattr(getattr(communicator, "unique_id", None), "internal", b"")
    return address_of(communicator.comm), bytes(unique)


def is_enabled(module: str, variable: str) -> bool:
    """Whether a variable of the environment is set. If the engine's own module of variables is imported, its
    value counts."""
    found = sys.modules.get(module)
    if hasattr(found, variable):
        return bool(getattr(found, variable))
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "false")


@functools.cache
def has_cuda() -> bool:
    """Whether this process has a GPU."""
    import torch

    return torch.cuda.is_available()


def replace_module(name: str, module: ModuleType) -> None:
    """Makes `import name` give `module`, also in the engine's modules that have imported names from it
    already, as plugins are called after these imports. Raises InvalidStateError if the engine's own module
    has made a pool."""
    found = sys.modules.get(name)
    if found is not None and found is not module:
        if getattr(found, "_mem_pool", None) is not None:
            raise InvalidStateError(
                f"{name} has made its own memory pool already; install symmpool's before that"
            )
        _rebind(name, found, module)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(importlib.import_module(parent), last, module)


def rebind(old: object, new: object, package: str | None = None, but: str | None = None) -> None:
    """Replaces a function or a class under every name that a module of a package has for it; without one, of
    any module. The module `but` stays as it is."""
    for name, module in list(sys.modules.items()):
        if name == but or (package is not None and name.partition(".")[0] != package):
            continue
        names = [key for key, value in list(getattr(module, "__dict__", {}).items()) if value is old]
        for key in names:
            setattr(module, key, new)


def _rebind(name: str, found: object, module: ModuleType) -> None:
    """Replaces names that the engine's modules have imported from `found` by those of `module`."""
    replaced = {key: getattr(found, key) for key in module.__all__ if hasattr(found, key)}
    package = name.partition(".")[0]
    for each, loaded in list(sys.modules.items()):
        if each == name or each.partition(".")[0] != package:
            continue
        held = vars(loaded) if isinstance(loaded, types.ModuleType) else {}
        for key, own in replaced.items():
            if held.get(key) is own:
                setattr(loaded, key, getattr(module, key))
