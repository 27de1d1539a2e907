"""symmpool under all of torch's CUDA allocations: `symmpool.install()`.

A device's ordinary memory is then one contiguous range: freed in any order, reused at once, with no
symmetry promised. The memory of a CUDA graph is its own until the graph is gone. Inside
`with pool:` memory comes from the pool, tensor by tensor.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from symmpool import _symmpool
from symmpool.errors import InvalidArgumentError, InvalidStateError, UnsupportedError
from symmpool.memory.torch_stats import TorchStats

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from symmpool.groups.types import DeviceLike

logger = logging.getLogger("symmpool")

# torch's allocator object, once installed. torch calls it until the process ends.
_installed: Any = None

_HOOKS = {
    "set_reset_fn": "symmpool_process_reset",
    "set_memory_fraction_fn": "symmpool_process_memory_fraction",
    "set_base_alloc_fn": "symmpool_process_base_alloc",
    "set_record_stream_fn": "symmpool_process_record_stream",
    "set_begin_allocate_to_pool": "symmpool_process_begin",
    "set_end_allocate_to_pool_fn": "symmpool_process_end",
    "set_release_pool": "symmpool_process_release",
}


def is_installed() -> bool:
    """Whether `install` has put symmpool under torch's CUDA allocations."""
    return _installed is not None


def _address(library: Any, name: str) -> int:
    found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert found
    return found


def _throw(torch: ModuleType) -> int:
    """The address of the function by which torch throws an error."""
    folder = os.path.join(os.path.dirname(str(torch.__file__)), "lib")
    name = "_ZN3c106detail14torchCheckFailEPKcS2_jS2_"
    try:
        # The copy that is loaded, or none.
        library = ctypes.CDLL(os.path.join(folder, "libc10.so"), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return _address(library, name)
    except (OSError, AttributeError) as error:
        raise UnsupportedError(
            f"install: torch {torch.__version__} has no {name} in {folder}/libc10.so, by which "
            "running out of memory is raised"
        ) from error


#: Symbols that `c10::OutOfMemoryError` is made by, in the order in which the library takes them, and where
#: they are: in C++'s library, or in one of torch's.
_OUT_OF_MEMORY = (
    ("__cxa_allocate_exception", ""),
    ("__cxa_throw", ""),
    ("_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1EPKcRKS3_", ""),
    ("_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE", "torch"),
    ("_ZTVN3c1016OutOfMemoryErrorE", "torch"),
    ("_ZTIN3c1016OutOfMemoryErrorE", "torch"),
)


def _throw_out_of_memory_by(torch: ModuleType, library: Any) -> bool:
    """Has the library throw torch.OutOfMemoryError; whether this torch exports what that takes."""
    folder = os.path.join(os.path.dirname(str(torch.__file__)), "lib")
    places = {
        "": ["libstdc++.so.6"],
        "torch": [os.path.join(folder, f"lib{name}.so") for name in ("c10", "c10_cuda", "torch_python")],
    }
    found = [next(_found(name, places[kind]), 0) for name, kind in _OUT_OF_MEMORY]
    if not all(found):
        return False
    addresses = (ctypes.c_size_t * len(found))(*found)
    return library.symmpool_process_throw_out_of_memory_by(addresses) == 0


def _found(name: str, places: list[str]) -> Iterator[int]:
    """Addresses of a symbol in libraries that are loaded."""
    for place in places:
        try:
            yield _address(ctypes.CDLL(place, mode=os.RTLD_NOLOAD | os.RTLD_LAZY), name)
        except (OSError, AttributeError):
            continue


def install() -> None:
    """Puts symmpool under every CUDA allocation of torch in this process, on every device.

    Call it once, before torch first uses CUDA; later it raises InvalidStateError. It cannot be
    undone. torch's own statistics (`torch.cuda.memory_stats` and the like) have the numbers of
    `symmpool.memory_stats`, and 0 for what is not counted. Running out of memory is torch.OutOfMemoryError.
    `torch.compile(mode="reduce-overhead")` records a graph for each compiled function, in memory of its own
    (`symmpool.memory.compiled_graphs`). Use `with pool:` in place of torch.cuda.MemPools of your own.

    Meant for one device a process, as launchers set it up: a device's memory is not mapped for the
    process's other devices, so copy tensors between them by way of the CPU."""
    global _installed
    import torch

    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise UnsupportedError(f"install: torch {torch.__version__} was built without CUDA")
    if torch.cuda._is_in_bad_fork():
        raise InvalidStateError(
            "install: this process was forked from one that has used CUDA, so it can use no CUDA; start it "
            "anew (multiprocessing's start method 'spawn')"
        )
    if _installed is not None:
        return
    if torch.cuda.is_initialized():
        raise InvalidStateError(
            "install: torch has used CUDA already; call symmpool.install() at the program's start"
        )
    library = ctypes.CDLL(_symmpool.__file__)
    throw = _throw(torch)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        _symmpool.__file__, "symmpool_process_alloc", "symmpool_process_free"
    )
    raw = allocator.allocator()
    for setter, name in _HOOKS.items():
        getattr(raw, setter)(_address(library, name))
    library.symmpool_process_throw_by(ctypes.c_void_p(throw))
    raises_torchs = _throw_out_of_memory_by(torch, library)
    try:
        torch.cuda.memory.change_current_allocator(allocator)
    except RuntimeError as error:
        raise InvalidStateError(f"install: torch refuses another allocator: {error}") from error
    _installed = allocator
    TorchStats(memory_stats, reset_peak_memory_stats).replace(torch._C)
    # Imported here, as importing `symmpool` imports no torch.
    from symmpool.memory import compiled_graphs

    compiled_graphs.replace_trees()
    if not raises_torchs:
        logger.warning(
            "symmpool.install(): torch %s does not export what torch.OutOfMemoryError is made by, so running "
            "out of memory is a RuntimeError that begins with 'CUDA out of memory'",
            torch.__version__,
        )


def _device(device: torch.device | str | int | None) -> int:
    if isinstance(device, int):
        return device
    try:
        import torch
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"device: {device!r}: without torch, pass a CUDA device's number") from error
    if device is None:
        return _current(torch)
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(f"device: {device!r} is none ({error})") from None
    if device.type != "cuda":
        raise InvalidArgumentError(f"device: {str(device)!r}: only CUDA devices have these numbers")
    return _current(torch) if device.index is None else device.index


def _current(torch: ModuleType) -> int:
    try:
        return torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise UnsupportedError(f"device: torch has no CUDA device here ({error})") from error


def memory_stats(device: DeviceLike | int = None) -> dict[str, int]:
    """The numbers of a device's memory under `install`: bytes `allocated` and `reserved` and their
    peaks (`peak_allocated`, `peak_reserved`), and counts: `allocs`, `frees`, `ooms`, `retries`
    (allocations served after free memory was given back), `segments`, `graphs` with memory of their
    own. Memory of pools is in `Pool.stats`."""
    stats = _symmpool.process_stats(_device(device))
    if stats is not None:
        return stats
    names = ("allocated", "peak_allocated", "reserved", "peak_reserved", "allocs", "frees", "ooms")
    return dict.fromkeys((*names, "retries", "graphs", "segments"), 0)


def reset_peak_memory_stats(device: DeviceLike | int = None) -> None:
    """Begins the peaks of `memory_stats` anew."""
    _symmpool.process_reset_peaks(_device(device))


def memory_summary(device: DeviceLike | int = None) -> str:
    """`memory_stats` as a table."""
    number = _device(device)
    stats = memory_stats(number)
    mib = 1 << 20
    rows = [
        ("allocated", stats["allocated"], stats["peak_allocated"]),
        ("reserved", stats["reserved"], stats["peak_reserved"]),
    ]
    lines = [f"symmpool, device {number}", f"{'':12}{'now (MiB)':>14}{'peak (MiB)':>14}"]
    lines += [f"{name:12}{now / mib:14.1f}{peak / mib:14.1f}" for name, now, peak in rows]
    counts = ("allocs", "frees", "ooms", "retries", "segments", "graphs")
    lines.append(", ".join(f"{stats[name]} {name}" for name in counts))
    return "\n".join(lines)
