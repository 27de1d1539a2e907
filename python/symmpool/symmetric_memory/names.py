"""torch's names for symmetric memory, which `install` has be ours.

All ways to torch's memory lead through a few functions of the class `_SymmetricMemory`: those of
`torch.distributed._symmetric_memory`, what Inductor writes, and what libraries call. So these are replaced,
and the module's own where it does more than to call them (docs/decisions/symmetric-memory-names.md)."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._symmetric_memory as module
from torch._C._distributed_c10d import _SymmetricMemory

from symmpool.errors import InvalidArgumentError, UnsupportedError
from symmpool.fused import operators as fused_operators
from symmpool.groups.names import group_of
from symmpool.memory import scope
from symmpool.memory.handle import SymmetricMemory
from symmpool.symmetric_memory import allocation, operators

if TYPE_CHECKING:
    from symmpool.groups.types import DeviceLike, GroupLike

__all__ = ["NAME", "install", "is_installed", "uninstall"]

#: What torch's `get_backend` says.
NAME = "symmpool"
#: Backends of torch whose handles have no more than ours: to ask for one changes nothing.
_ALIKE = (NAME, "CUDA")

_lock = threading.Lock()
#: What was in the place of ours: an object, the name, and what it had there.
_replaced: list[tuple[Any, str, Any]] = []
_libraries: list[torch.library.Library] = []


def is_installed() -> bool:
    """Whether torch's symmetric memory is that of pools."""
    return bool(_replaced)


def install() -> None:
    """Has torch's symmetric memory be that of pools in this process: `torch.distributed._symmetric_memory`,
    `_SymmetricMemory`, and `torch.ops.symm_mem`, on the CPU as well. Call it before torch's symmetric memory
    is used, on all ranks. It talks to nobody. Further calls do nothing.

    The `fused_*` and `_low_contention_*` operators are ours on every group from then on, as by
    `symmpool.fused.install`. Tensors that were made before have no handles any more: `rendezvous` raises
    InvalidArgumentError for them."""
    with _lock:
        if _replaced:
            return
        fused_operators.install_for_all()
        of_class: dict[str, Any] = {
            "empty_strided_p2p": allocation.empty_strided_p2p,
            "rendezvous": rendezvous,
            "is_symm_mem_tensor": allocation.is_symm_mem_tensor,
            "has_multicast_support": has_multicast_support,
            "get_backend": get_backend,
            "set_backend": set_backend,
            "get_mempool_allocator": get_mempool_allocator,
        }
        for name, function in of_class.items():
            if name in vars(_SymmetricMemory):
                _replace(_SymmetricMemory, name, staticmethod(function))
        of_module: dict[str, Any] = {
            "empty": empty,
            "rendezvous": rendezvous,
            "get_mem_pool": allocation.get_mem_pool,
            "is_symm_mem_enabled_for_group": _enabled(module.is_symm_mem_enabled_for_group),
            "get": _of_handle("get", get),
            "put_signal": _of_handle("put_signal", put_signal),
            "wait_signal": _of_handle("wait_signal", wait_signal),
        }
        for name, function in of_module.items():
            if hasattr(module, name):
                _replace(module, name, function)
        if hasattr(module, "_use_implicit_mempool"):
            # A copy of `empty` that a program has imported must not ask for a MemPool, which has one group.
            _replace(module, "_use_implicit_mempool", False)
        library = torch.library.Library("symm_mem", "IMPL")
        with warnings.catch_warnings():
            # torch says that a kernel is replaced, which is what was asked for.
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            operators.register(library)
        _libraries.append(library)


def uninstall() -> None:
    """Ends `install`: torch's own names are back. Handles that were made stay valid."""
    with _lock:
        if not _replaced:
            return
        while _libraries:
            _libraries.pop()._destroy()
        while _replaced:
            place, name, before = _replaced.pop()
            setattr(place, name, before)
        fused_operators.end_for_all()


def _replace(place: Any, name: str, ours: Any) -> None:
    _replaced.append((place, name, vars(place)[name]))
    setattr(place, name, ours)


# Functions of the class and of the module, with torch's names and arguments.


def empty(*size: Any, dtype: torch.dtype | None = None, device: DeviceLike = None) -> torch.Tensor:
    """Makes a tensor that `rendezvous` can be called for, with the arguments of torch's `empty`."""
    sizes = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
    stride = torch._prims_common.make_contiguous_strides_for(sizes)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return allocation.empty_strided_p2p(sizes, stride, dtype, device)


def rendezvous(
    tensor: torch.Tensor, group: GroupLike = None, group_name: str | None = None
) -> SymmetricMemory:
    """Finds or makes the handle of a tensor, with the arguments of torch's: `group` is a process group or its
    name."""
    return allocation.rendezvous(tensor, group_name if group is None else group)


def has_multicast_support(device_type: object, device_index: int) -> bool:
    """False: pools have no multicast addresses."""
    return False


def get_backend(device: torch.device) -> str | None:
    """ "symmpool", on the CPU and on CUDA; else None."""
    return NAME if torch.device(device).type in ("cpu", "cuda") else None


def set_backend(name: str) -> None:
    """Refuses backends with which handles have more than addresses of peers."""
    if name not in _ALIKE:
        raise UnsupportedError(
            f"set_backend: {name!r}: symmpool.symmetric_memory.install() has torch's symmetric memory be "
            "that of pools in this process; leave out either"
        )


def get_mempool_allocator(device: torch.device) -> Any:
    """The allocator of `get_mem_pool`."""
    pool = allocation.mem_pool_of(device)
    return scope._allocator(torch, pool._scope().slot).allocator()


def _enabled(theirs: Any) -> Any:
    def is_symm_mem_enabled_for_group(group_name: str) -> bool:
        """Whether there is a group of this name: each may have symmetric memory."""
        if getattr(module, "_is_test_mode", False):
            return theirs(group_name)
        try:
            return group_of(group_name) is not None
        except InvalidArgumentError:
            return False

    return is_symm_mem_enabled_for_group


def _of_handle(name: str, ours: Any) -> Any:
    """A function of the module that is given a handle: ours for ours, else torch's."""
    theirs = getattr(module, name, None)

    def chosen(*arguments: object, **options: object) -> Any:
        if any(isinstance(each, SymmetricMemory) for each in (*arguments, *options.values())):
            return ours(*arguments, **options)
        return theirs(*arguments, **options)  # type: ignore[misc]

    return chosen


def get(dst: torch.Tensor, hdl: SymmetricMemory, peer: int, offset: int = 0) -> None:
    """Copies from a peer's memory, from element `offset` on, as many elements as `dst` has."""
    if dst.device != hdl.device or not dst.is_contiguous():
        raise InvalidArgumentError(f"get: dst: it must be contiguous, and on {hdl.device}")
    dst.view(-1).copy_(hdl.get_buffer(peer, (dst.numel(),), dst.dtype, offset))


def put_signal(src: torch.Tensor, hdl: SymmetricMemory, peer: int) -> None:
    """Copies `src` to the beginning of a peer's memory, and signals it."""
    hdl.get_remote_tensor(peer, src.size(), src.dtype).copy_(src)
    hdl.put_signal(peer)


def wait_signal(hdl: SymmetricMemory, peer: int) -> None:
    """Waits for a peer's `put_signal`."""
    hdl.wait_signal(peer)
