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
    Algorithm,
    Block,
    Communicator,
    Group,
    Pool,
    Slot,
    algorithms,
    all_to_all_algorithms,
    share_sms,
    version,
)
from symmpool.collectives.algorithms import load_tables, register, select
from symmpool.collectives.functions import (
    all_gather,
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    all_to_all,
    all_to_all_single,
    all_to_all_v,
    barrier,
    broadcast,
    communicator,
    forget,
    gather,
    gather_single,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scatter,
)
from symmpool.collectives.messages import P2POp, batch_isend_irecv, irecv, isend, recv, send
from symmpool.collectives.reduce_op import ReduceOp
from symmpool.collectives.several import all_gather_object, all_reduce_coalesced
from symmpool.communicators.explanation import Explanation
from symmpool.communicators.work import Work
from symmpool.errors import (
    DivergedError,
    Error,
    InvalidArgumentError,
    InvalidStateError,
    OutOfMemoryError,
    OverflowError,  # noqa: F401
    PeerLostError,
    PlanError,
    RefusedError,
    TimeoutError,  # noqa: F401
    UnsupportedError,
)
from symmpool.kernels import native
from symmpool.memory.handle import SymmetricMemory, rendezvous
from symmpool.memory.held import communicator_memory
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
    from symmpool import experts as experts
    from symmpool import fused as fused
    from symmpool import handle as handle
    from symmpool import language as language
    from symmpool import ops as ops

__version__ = version()


# Modules that a program need not import: they are imported where they are first named. Some need torch.
_LAZY = (
    "backend",
    "deep_ep",
    "doctor",
    "engines",
    "experts",
    "fused",
    "handle",
    "language",
    "ops",
    "symmetric_memory",
)


def __getattr__(name: str) -> _typing.Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return importlib.import_module(f"symmpool.{name}")
    except ModuleNotFoundError as error:
        raise AttributeError(f"symmpool.{name} needs torch ({error})") from error


def __dir__() -> list[str]:
    return sorted([*__all__, *_LAZY, "__version__", "errors"])


# TimeoutError and OverflowError are left out: `from symmpool import *` is not to hide Python's own.
__all__ = [
    "Algorithm",
    "Block",
    "Communicator",
    "DivergedError",
    "Error",
    "Explanation",
    "Group",
    "InvalidArgumentError",
    "InvalidStateError",
    "OutOfMemoryError",
    "P2POp",
    "PeerLostError",
    "PlanError",
    "Pool",
    "ReduceOp",
    "RefusedError",
    "Slot",
    "SymmetricMemory",
    "UnsupportedError",
    "Work",
    "algorithms",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_algorithms",
    "all_to_all_single",
    "all_to_all_v",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "commit_postponed",
    "communicator",
    "forget",
    "gather",
    "gather_single",
    "graph",
    "install",
    "irecv",
    "is_installed",
    "isend",
    "load_tables",
    "communicator_memory",
    "memory_stats",
    "memory_summary",
    "native",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "register",
    "rendezvous",
    "reset_peak_memory_stats",
    "scatter",
    "select",
    "send",
    "share_sms",
    "use_pool",
]

if "torch.distributed" in _sys.modules:
    # The program has torch, so that its process groups may name ours.
    from symmpool import backend as _backend  # noqa: F401
