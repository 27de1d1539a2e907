"""How many multiprocessors the communicators of module-level calls and of the backend leave to others.

A kernel that waits for a peer keeps its multiprocessors. With calls of several groups under way on streams of
their own, one that takes all of them keeps the others from starting, ours and NCCL's, and ranks that began
with different ones wait for each other until their time is over. Communicators of one process know of each
other and have the device by turns. Of NCCL's kernels they know what `share_sms` says: the backend calls it
before NCCL has anything to do. Where groups of torch use NCCL by themselves nobody sees their calls. So the
device is shared as soon as there are several such groups. Where there is one, several communicators of ours
share it with that group, and one alone takes the device.

A call that runs beside the program's own kernels, on a side stream with `async_op` or on a stream of FSDP's,
takes few SMs: as many as keep the links busy. SYMMPOOL_SM_BUDGET says another number, for all calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from symmpool._symmpool import share_sms, share_sms_of_several
from symmpool.errors import InvalidArgumentError
from symmpool.groups import process_groups

if TYPE_CHECKING:
    import torch.distributed

    from symmpool._symmpool import Pool

__all__ = ["concurrent", "options", "share_with_other_groups", "shares_device", "sm_budget"]

VARIABLE = "SYMMPOOL_CONCURRENT"
SM_BUDGET = "SYMMPOOL_SM_BUDGET"
# Says that several ranks may use one device; pools refuse values that make no sense.
_SHARED_DEVICE = "SYMMPOOL_SHARED_DEVICE"
# The most that `concurrent` of a communicator takes.
_MAX_NUMBER = 16


def shares_device() -> bool:
    """Whether the environment says that several ranks may use one GPU, to try programs where there are fewer
    GPUs than ranks."""
    return os.environ.get(_SHARED_DEVICE) == "1"


def is_count(said: str) -> bool:
    """Whether a text is a number of communicators that the option takes."""
    return said.isascii() and said.isdigit() and 1 <= int(said) <= _MAX_NUMBER


def concurrent(pool: Pool) -> int | None:
    """How many communicators may have calls under way at once on a pool's device, this one included, where
    the environment says so."""
    what = (
        "communicators whose calls are under way at once on a device; a whole number from 1 to "
        f"{_MAX_NUMBER} is needed"
    )
    return _of_environment(pool, VARIABLE, is_count, what)


def is_budget(said: str) -> bool:
    """Whether a text is a number of SMs that the option takes."""
    return said.isascii() and said.isdigit() and 2 <= int(said) < 1 << 32


def sm_budget(pool: Pool) -> int | None:
    """The most SMs that a call takes on a pool's device, where the environment says so."""
    what = "the most multiprocessors that a collective takes; a whole number from 2 on is needed"
    return _of_environment(pool, SM_BUDGET, is_budget, what)


def _of_environment(pool: Pool, variable: str, accepts: Callable[[str], bool], what: str) -> int | None:
    """A number that the environment has for communicators on CUDA. `what` says what it is."""
    said = os.environ.get(variable, "")
    if pool.device == "cpu" or not said:
        return None
    if not accepts(said):
        raise InvalidArgumentError(f"{variable}={said}: {what}")
    return int(said)


def options(pool: Pool) -> dict[str, Any]:
    """The options of the communicators that module-level calls and the backend make on a pool. Their calls on
    other streams than the default one run beside kernels of the program."""
    return {"concurrent": concurrent(pool), "sm_budget": sm_budget(pool), "beside_compute": True}


def share_with_other_groups(device: int) -> None:
    """Has communicators share the device of that number (-1: the CPU) with those groups of torch that have a
    backend there whose kernels may wait for other ranks while ours do."""
    dist = process_groups.distributed()
    if device < 0 or dist is None:
        return
    made = list(dist.distributed_c10d._world.pg_map)
    theirs = [group for group in made if group.size() > 1 and _has_kernels(group)]
    if len(theirs) > 1:
        share_sms(device)
    elif theirs:
        share_sms_of_several(device)


def _has_kernels(group: torch.distributed.ProcessGroup) -> bool:
    """Whether a group's backend has kernels of which our communicators do not know: gloo has none, and ours
    know of each other."""
    return process_groups.backends_of(group).get("cuda", "gloo") not in ("gloo", "symmpool")
