"""Symmetric memory for several ranks, and collectives on it.

Every rank of a group makes the same pool and allocates the same sizes in the same order; then the
nth tensor lies at the same place of every rank's memory, and peers reach it directly.

    import symmpool, torch

    group = symmpool.Group.from_env()              # RANK, WORLD_SIZE, MASTER_ADDR, ...
    pool = symmpool.Pool(group, device="cpu")      # or "cuda"
    comm = symmpool.Communicator(pool)

    x = pool.empty((4096, 7168), torch.bfloat16)   # a torch.Tensor in symmetric memory
    x.normal_()
    comm.all_reduce(x)                             # in place, on torch's current stream

On a GPU, `with pool:` sends torch's own allocations to the pool.

torch and numpy are used where the program has them; importing symmpool imports neither.
`python -m symmpool bench --help` measures.
"""

import sys as _sys
import typing as _typing

from symmpool._symmpool import (
    Block,
    Communicator,
    Group,
    Pool,
    RowExchange,
    RowLayout,
    Slot,
    algorithms,
    leave_room,
    version,
)
from symmpool.collectives.functions import (
    all_gather_into_tensor,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    communicator,
    forget,
    reduce_scatter_tensor,
)
from symmpool.errors import (
    DivergedError,
    Error,
    InvalidArgumentError,
    InvalidStateError,
    OutOfMemoryError,
    OverflowError,
    PeerLostError,
    RefusedError,
    TimeoutError,
    UnsupportedError,
)
from symmpool.memory.handle import SymmetricMemory, rendezvous
from symmpool.memory.install import (
    install,
    is_installed,
    memory_stats,
    memory_summary,
    reset_peak_memory_stats,
)
from symmpool.memory.scope import commit_postponed, graph, use_pool

if _typing.TYPE_CHECKING:
    from symmpool import backend as backend
    from symmpool import doctor as doctor
    from symmpool import engines as engines
    from symmpool import ops as ops

__version__ = version()


def __getattr__(name: str) -> _typing.Any:
    """Modules that a program need not import are imported where they are first named; some need torch."""
    if name not in ("backend", "doctor", "engines", "ops"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return importlib.import_module(f"symmpool.{name}")
    except ModuleNotFoundError as error:
        raise AttributeError(f"symmpool.{name} needs torch ({error})") from error


__all__ = [
    "Block",
    "Communicator",
    "DivergedError",
    "Error",
    "Group",
    "InvalidArgumentError",
    "InvalidStateError",
    "OutOfMemoryError",
    "OverflowError",
    "PeerLostError",
    "Pool",
    "RefusedError",
    "RowExchange",
    "RowLayout",
    "Slot",
    "SymmetricMemory",
    "TimeoutError",
    "UnsupportedError",
    "algorithms",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "commit_postponed",
    "communicator",
    "forget",
    "graph",
    "install",
    "is_installed",
    "leave_room",
    "memory_stats",
    "memory_summary",
    "reduce_scatter_tensor",
    "rendezvous",
    "reset_peak_memory_stats",
    "use_pool",
]

if "torch.distributed" in _sys.modules:
    # The program has torch, so that its process groups may name ours.
    from symmpool import backend as _backend  # noqa: F401
