"""Facts about this machine. Nothing here raises: an error is a value of the report."""

from __future__ import annotations

import ctypes
import importlib.metadata
import mmap
import os
import platform
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from symmpool.memory.held import HeldMemory

#: A pool's default stride: the address space of one rank, in bytes.
STRIDE = 1 << 40


def collect(with_torch: bool = True) -> dict[str, Any]:
    """All facts as values for JSON. torch is imported if it is installed, because kernels and windows use
    the libraries that it loads."""
    torch = torch_facts() if with_torch else {"version": None, "error": "not asked for"}
    from symmpool import _symmpool

    found = _symmpool.machine()
    return {
        "symmpool": _symmpool.version(),
        "commit": _symmpool.built()[0],
        "system": system_facts(),
        "memory": memory_facts(),
        "torch": torch,
        "cuda": {
            "error": found["cuda"],
            "devices": found["devices"],
            "links": found["links"],
            "mesh": found["mesh"],
        },
        "communicators": {
            "error": found["communicator_error"],
            "bytes": found["communicator_bytes"],
            "growing_bytes": found["growing_communicator_bytes"],
            "held": held_facts(),
        },
        "host_error": found["host"],
        "nvrtc": found["compiler"],
        "kernel_cache": cache_facts(found["cache"]),
        "nccl": nccl_facts(),
        "triton": triton_facts(),
        "engines": engine_facts(),
        "launcher": launcher_facts(),
        "launch": launch_facts(),
        "variables": variable_facts(),
    }


def held_facts() -> list[HeldMemory]:
    """Returns the memory that the communicators of this process hold. Some hold, where a program asks."""
    from symmpool.errors import Error
    from symmpool.memory.held import communicator_memory

    try:
        return communicator_memory()
    except Error:
        return []


def system_facts() -> dict[str, Any]:
    """The kernel, the machine, Python and how many CPUs this process may use."""
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
    }


def _limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _number_in(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
        return int(text)
    except (OSError, ValueError):
        return None


def memory_facts() -> dict[str, Any]:
    """Limits of memory. Shared memory is anonymous (memfd), so the size of /dev/shm does not matter."""
    available = None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    return {
        "available_bytes": available,
        "cgroup_bytes": _number_in("/sys/fs/cgroup/memory.max"),
        "address_space_bytes": _limit(resource.RLIMIT_AS),
        "file_bytes": _limit(resource.RLIMIT_FSIZE),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "mappings": _number_in("/proc/sys/vm/max_map_count"),
        "memfd_error": _try_memfd(),
        "reserve_error": _try_reserve(),
    }


def _try_memfd() -> str | None:
    """Why memory cannot be shared by descriptors; None where it can."""
    try:
        descriptor = os.memfd_create("symmpool-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, 1 << 21)
            with mmap.mmap(descriptor, 1 << 21) as memory:
                memory[:5] = b"hello"
        finally:
            os.close(descriptor)
    except (OSError, AttributeError, ValueError) as error:
        return str(error)
    return None


def _try_reserve() -> str | None:
    """Why the address space of two ranks cannot be reserved; None where it can."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    # Private, anonymous, not reserved in swap, with no access.
    address = libc.mmap(None, 2 * STRIDE, 0, 0x02 | 0x20 | 0x4000, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        return os.strerror(ctypes.get_errno())
    libc.munmap(address, 2 * STRIDE)
    return None


def torch_facts() -> dict[str, Any]:
    """torch's version and what it was built with; or the error of importing it."""
    try:
        import torch
    except Exception as error:  # a broken installation raises anything
        return {"version": None, "error": f"{type(error).__name__}: {error}"}
    from symmpool.plugins.versions import TORCH

    distributed = torch.distributed.is_available()
    return {
        "version": torch.__version__,
        "error": None,
        "served": [TORCH.oldest, TORCH.newest],
        "tested": list(TORCH.tested),
        "problem": TORCH.problem(torch.__version__),
        "python_backends": distributed and _has_python_backends(),
        "cuda": torch.version.cuda,
        "devices": torch.cuda.device_count() if torch.version.cuda else 0,
        "distributed": distributed,
        "nccl": distributed and torch.distributed.is_nccl_available(),
        "gloo": distributed and torch.distributed.is_gloo_available(),
        "fast_exchange": hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
        "allocator": allocator_facts(torch),
    }


def _has_python_backends() -> bool:
    """Whether groups of the backend are torch's own, with its hooks and its flight recorder."""
    from symmpool.torch_backend import registration

    return registration.has_python_backends()


def allocator_facts(torch: ModuleType) -> dict[str, Any]:
    """Returns the interfaces of torch for allocators that replace its own."""
    from symmpool.memory import install

    cuda = torch.cuda
    found: dict[str, Any] = {
        "pluggable": hasattr(torch._C, "_cuda_customAllocator"),
        "mempool": all(hasattr(cuda, name) for name in ("MemPool", "use_mem_pool")),
        "backend": None,
        "install_error": None,
    }
    try:
        # torch reads this from the environment, without initializing a device.
        found["backend"] = cuda.get_allocator_backend()
    except Exception as error:  # a torch without CUDA may raise any exception
        found["install_error"] = f"{type(error).__name__}: {error}"
    try:
        install._throw(torch)
    except Exception as error:
        found["install_error"] = str(error)
    return found


def triton_facts() -> dict[str, Any]:
    """The version of Triton, without importing it, which would search for compilers and devices."""
    for name in ("triton", "pytorch-triton", "triton-rocm"):
        try:
            return {"version": importlib.metadata.version(name), "error": None}
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"version": None, "error": "the package triton is not installed"}


def nccl_facts() -> dict[str, Any]:
    """The NCCL that this process has loaded, as windows are registered with its communicators; or the one
    that it would load."""
    loaded = sorted(
        {
            line.split()[-1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "libnccl.so" in line
        }
    )
    for name in [*loaded, "libnccl.so.2"]:
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            last = str(error)
            continue
        number = ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(number)) != 0:
            return {"version": None, "error": f"{name} does not report its version"}
        code = number.value
        return {
            "version": [code // 10000, code // 100 % 100, code % 100],
            "error": None,
            "place": name,
            "loaded": bool(loaded),
            "windows": hasattr(library, "ncclCommWindowRegister"),
        }
    return {"version": None, "error": last}


def engine_facts() -> dict[str, Any]:
    """Serving engines and the libraries that they call: which versions are served, which ran, and which is
    installed. Nothing of them is imported."""
    from symmpool.plugins.versions import ENGINES, installed

    found = {}
    for key, engine in ENGINES.items():
        version = installed(engine)
        found[key] = {
            "name": engine.name,
            "served": [engine.oldest, engine.newest],
            "tested": list(engine.tested),
            "installed": version,
            "problem": None if version is None else engine.problem(version),
        }
    return found


def cache_facts(folder: str | None) -> dict[str, Any]:
    """Where compiled kernels are stored on disk, or why they are not."""
    if folder is None:
        return {"place": None, "error": "SYMMPOOL_CACHE_DIR is empty, or there is no home directory"}
    place = Path(folder)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return {"place": folder, "error": f"{place} cannot be written to"}
    status = place.stat()
    if place == Path(folder) and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        return {"place": folder, "error": "it belongs to another user, or others may write to it"}
    return {"place": folder, "error": None}


#: Variables that say where rank 0 is, and those of symmpool that are no secret.
LEADER = ("MASTER_ADDR", "MASTER_PORT")
SHOWN = (
    "SYMMPOOL_HOST_ID",
    "SYMMPOOL_LAUNCHER",
    "SYMMPOOL_STORE",
    "SYMMPOOL_PORT",
    "SYMMPOOL_NVRTC",
    "SYMMPOOL_CACHE_DIR",
    "SYMMPOOL_ALL_REDUCE",
    "SYMMPOOL_ALL_TO_ALL",
    "SYMMPOOL_ALL_GATHER",
    "SYMMPOOL_BROADCAST",
    "SYMMPOOL_REDUCE_SCATTER",
    "SYMMPOOL_CONCURRENT",
    "SYMMPOOL_SM_BUDGET",
    "SYMMPOOL_DEVICE_MEMORY",
    "SYMMPOOL_READY",
    "SYMMPOOL_SHARED_DEVICE",
    "SYMMPOOL_BACKEND_OVER_HOSTS",
    "SYMMPOOL_ENGINES",
    "SYMMPOOL_TABLES",
)
#: The largest number of ranks in a group.
MAX_RANKS = 1 << 16


def _is_memory(value: str) -> bool:
    """Whether communicators take this for the bytes of a device's memory."""
    parts = value.split(",")
    return not value.strip() or (
        len(parts) <= 2 and all(re.fullmatch(r"\s*\d{1,12}[KMGkmg]?\s*", part, re.ASCII) for part in parts)
    )


def launcher_facts() -> dict[str, Any]:
    """Variables that a launcher has set for this process."""
    from symmpool import _symmpool

    names = (*_symmpool.launcher_variables(), *LEADER, *SHOWN)
    found = {name: os.environ[name] for name in names if name in os.environ}
    found["executable"] = sys.executable
    return found


def launch_facts() -> dict[str, Any]:
    """Returns the group that a launcher describes, or what is wrong with it. All is None without one."""
    from symmpool import _symmpool
    from symmpool.errors import Error

    nothing = dict.fromkeys(("launcher", "rank", "world", "local_rank", "rendezvous", "error"))
    try:
        return {**nothing, **(_symmpool.launch() or {})}
    except Error as error:
        return {**nothing, "error": str(error).removeprefix("symmpool: ")}


def variable_facts() -> dict[str, Any]:
    """Variables with a wrong value, and what was expected; and variables with symmpool's prefix that do not
    exist. A secret is not shown."""
    from symmpool import _symmpool
    from symmpool.communicators import sm_budget

    algorithms, all_to_all = _symmpool.algorithms(), _symmpool.all_to_all_algorithms()
    scatters = ["auto", "scratch", "direct", "lamport", "ll", "pipeline", "copy"]
    gathers = [*all_to_all, "scratch", "ll"]
    broadcasts = [*(name for name in gathers if name != "copy"), "pipeline"]
    expected = {
        "SYMMPOOL_ALL_REDUCE": (_one_of(algorithms), f"one of {', '.join(algorithms)}"),
        "SYMMPOOL_ALL_TO_ALL": (_one_of(all_to_all), f"one of {', '.join(all_to_all)}"),
        "SYMMPOOL_REDUCE_SCATTER": (_one_of(scatters), f"one of {', '.join(scatters)}"),
        "SYMMPOOL_ALL_GATHER": (_one_of(gathers), f"one of {', '.join(gathers)}"),
        "SYMMPOOL_BROADCAST": (_one_of(broadcasts), f"one of {', '.join(broadcasts)}"),
        "SYMMPOOL_TABLES": (_are_files, "files, separated by colons"),
        "SYMMPOOL_NVRTC": (lambda path: not path or os.path.isfile(path), "an NVRTC library"),
        "SYMMPOOL_CACHE_DIR": (lambda path: os.path.isdir(path) or not os.path.exists(path), "a folder"),
        "SYMMPOOL_PORT": (_number(1, 65535), "a port from 1 to 65535"),
        "SYMMPOOL_HOST_ID": (_is_host_id, "1 to 255 printable characters without blanks"),
        "SYMMPOOL_STORE": (lambda value: not value or value.startswith("file:///"), "file:///DIRECTORY"),
        "SYMMPOOL_CONCURRENT": (lambda value: not value or sm_budget.is_count(value), "1 to 16"),
        "SYMMPOOL_SM_BUDGET": (lambda value: not value or sm_budget.is_budget(value), "2 or more"),
        "SYMMPOOL_DEVICE_MEMORY": (_is_memory, "bytes such as 64M, or two such as 96M,16M"),
        "SYMMPOOL_READY": (_are_reductions, "none, or a list of types or type:operation"),
        "SYMMPOOL_ENGINES": (_one_of(("on", "off", "any")), "on, off or any"),
        "SYMMPOOL_SHARED_DEVICE": (_one_of(("0", "1")), "1, or 0"),
        "SYMMPOOL_BACKEND_OVER_HOSTS": (_one_of(("0", "1")), "1, or 0"),
        "MASTER_ADDR": (lambda host: bool(host.strip()), "the machine of rank 0"),
        "MASTER_PORT": (_number(1, 65535), "a port from 1 to 65535"),
        "LOCAL_RANK": (_number(0, (1 << 32) - 1), "a rank"),
        "WORLD_SIZE": (_number(1, MAX_RANKS), f"1 to {MAX_RANKS}"),
    }
    world = os.environ.get("WORLD_SIZE", "")
    ranks = int(world) if expected["WORLD_SIZE"][0](world) else MAX_RANKS
    expected["RANK"] = (_number(0, ranks - 1), f"a rank from 0 to {ranks - 1}")
    for name in ("ALL_REDUCE", "REDUCE_SCATTER", "ALL_GATHER", "BROADCAST", "ALL_TO_ALL"):
        is_right, what = expected[f"SYMMPOOL_{name}"]
        expected[f"SYMMPOOL_{name}"] = (is_right, f"{what}, or one that the program registers")
    wrong = {
        name: f"{os.environ[name]!r}: expected {what}"
        for name, (is_right, what) in expected.items()
        if name in os.environ and not is_right(os.environ[name])
    }
    known = (*SHOWN, "SYMMPOOL_SECRET")
    ours = [name for name in sorted(os.environ) if name.startswith("SYMMPOOL_")]
    return {"wrong": wrong, "unknown": [name for name in ours if name not in known]}


def _is_host_id(value: str) -> bool:
    return 0 < len(value) <= 255 and value.isprintable() and not any(map(str.isspace, value))


def _are_files(value: str) -> bool:
    return all(os.path.isfile(path) for path in value.split(os.pathsep) if path)


#: Types and operations that devices reduce, as SYMMPOOL_READY names them.
REDUCED = "f32 f64 f16 bf16 i32 i64 u8 i8 f8e4m3 f8e5m2".split()
OPERATIONS = "sum prod min max avg".split()


def _are_reductions(value: str) -> bool:
    def is_one(part: str) -> bool:
        dtype, colon, operation = part.partition(":")
        return dtype.strip() in REDUCED and (not colon or operation.strip() in OPERATIONS)

    parts = [part.strip() for part in value.split(",") if part.strip()]
    return value.strip() == "none" or all(is_one(part) for part in parts)


def _one_of(names: Any) -> Callable[[str], bool]:
    # An empty variable counts as not set.
    return lambda value: not value or value in names


def _number(least: int, most: int) -> Callable[[str], bool]:
    def is_right(value: str) -> bool:
        text = value.strip().removeprefix("+")
        return text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most

    return is_right
