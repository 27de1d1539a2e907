"""Groups of the backend within the default one, which is the backend's too: on the CPU nobody meets to make
one.

What ranks meet for otherwise, they know of the default group: that all of them share memory, so that
mailboxes carry messages and gloo is needed by collectives alone that ours does not serve; and in which run of
the ranks this is. So gloo is made by the first call that it carries, and the communicator by the first call
that ours serves, in the memory of the default group's (`symmpool.communicators.subgroups`)."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmpool.communicators import subgroups
from symmpool.errors import TimeoutError
from symmpool.groups import agreement, process_groups

if TYPE_CHECKING:
    from symmpool.torch_backend.group_state import GroupState

__all__ = ["Within", "is_default", "run_within"]

# How many groups of a name this process has made within a default group.
_made: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@dataclasses.dataclass
class Within:
    """A group's place in the default one."""

    default: weakref.ref[Any]
    # The name is equal on the group's ranks, and no other group of the default one has it.
    name: str
    # Whether the group's communicator may be made in the default group's memory: until that has failed.
    may_share: bool = True


def is_default(group: dist.ProcessGroup) -> bool:
    """Whether a group is torch's default one."""
    return dist.is_initialized() and dist.group.WORLD is group


def run_within(name: str | None) -> tuple[Within | None, str | None]:
    """The place of a group that is made now, which torch names so, and the run of the ranks that it is of.
    None for groups whose ranks meet. All ranks of a group answer alike."""
    default: Any = dist.group.WORLD if dist.is_initialized() else None
    ours = None if default is None else process_groups.ours(default)
    if name is None or ours is None or ours._served.ended:
        return None, None
    if not ours._served.is_named(ours, torch.device("cpu")) or not ours._messages.may_wait:
        return None, None
    with _lock:
        counts = _made.setdefault(default, {})
        count = counts[name] = counts.get(name, 0) + 1
    # A name is given again when its group is gone.
    return Within(weakref.ref(default), f"{name}#{count}"), f"{ours._fallbacks.run}.{count}"


def make(group: GroupState, what: str, seconds: float, first: str) -> bool:
    """Makes what serves a group on the CPU in the default group's memory, behind a barrier of its ranks.
    False where they meet in the store, as they do from then on. Raises TimeoutError, with `ranks`, where some
    do not come to `first`."""
    within: Within | None = group.within
    if within is None or not within.may_share:
        return False
    default = within.default()
    made, within.may_share = None, False
    if default is not None:

        def comes_otherwise(ranks: list[int]) -> bool:
            return agreement.has_announced(group.key, what, ranks)

        try:
            made = subgroups.make(group.key, default, within.name, seconds, comes_otherwise)
        except TimeoutError as error:
            raise agreement.absent(group.key, error.ranks, seconds, first) from None
    if made is None:
        return False
    try:
        made.comm.barrier()
    except BaseException:
        subgroups.let_go(made)
        raise
    made.comm._all_are_here()
    within.may_share = True
    return True
