"""Groups of some of a backend's ranks: `split_group` and `shrink_group` of torch 2.14 and newer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmpool.errors import Error, InvalidArgumentError, TimeoutError

if TYPE_CHECKING:
    import torch.distributed

    from symmpool.torch_backend.python_backend import SymmpoolBackend

__all__ = ["group_of", "shrink", "split"]

# The tag of messages that nobody sends: a rank that lives leaves them open.
_NEVER_SENT = 1 << 61
# How long a rank may take to be seen as lost, in seconds.
_LOOK = 0.5
# torch's flag by which a shrink aborts what is under way.
_ABORTS = 1


def group_of(backend: SymmpoolBackend) -> torch.distributed.ProcessGroup | None:
    """torch's process group above a backend; None where torch knows none."""
    wrapper = getattr(torch._C._distributed_c10d, "_ProcessGroupWrapper", ())
    for group in list(dist.distributed_c10d._world.pg_map):
        for device in group._device_types:
            found: Any = group._get_backend(device)
            while wrapper and isinstance(found, wrapper):
                found = found.wrapped_pg
            if found is backend:
                return group
    return None


def split(
    backend: SymmpoolBackend,
    kind: type[SymmpoolBackend],
    store: torch.distributed.Store,
    ranks: list[int],
    options: object,
) -> SymmpoolBackend | None:
    """The backend of a group of some ranks of another backend's; None where this rank is none of them."""
    if backend._rank not in ranks:
        return None
    backend._served.raise_at_end(backend)
    timeout = getattr(options, "_timeout", None) or backend._timeout
    name = getattr(options, "group_name", None) or None
    return kind(store, ranks.index(backend._rank), len(ranks), timeout, None, name)


def shrink(
    backend: SymmpoolBackend, kind: type[SymmpoolBackend], excluded: list[int], flags: int
) -> SymmpoolBackend:
    """The backend of the ranks that are left. Raises InvalidArgumentError where an excluded one lives: it
    would wait for the others."""
    backend._served.raise_at_end(backend)
    living = [rank for rank in excluded if _lives(backend, rank)]
    if living:
        raise InvalidArgumentError(
            f"symmpool: shrink_group on rank {backend._rank}: rank {living[0]} is alive; only ranks whose "
            "processes have ended can be excluded, so end it first, or make a new group of the others"
        )
    left = [rank for rank in range(backend._size) if rank not in excluded]
    if flags & _ABORTS:
        backend._end(False)
    name = "-".join(map(str, left))
    store = dist.PrefixStore(f"symmpool/shrunk/{backend._fallbacks.run}/{name}", backend._store)
    return kind(store, left.index(backend._rank), len(left), backend._timeout)


def _lives(backend: SymmpoolBackend, rank: int) -> bool:
    """Whether a rank's process is there, as far as its mailbox says: without one nobody can tell."""
    if rank == backend._rank or not backend._has_mailbox():
        return rank == backend._rank
    try:
        backend._messages.recv(torch.empty(1), rank, _NEVER_SENT).wait(_LOOK)
    except TimeoutError:
        return True
    except Error:
        return False
    return True
