"""A group's first call, where this rank's own arguments are wrong.

What serves a group is made at its first call, which all ranks meet in. A rank that refuses its arguments
raises the reason before that, wherever the others are, and a thread meets them, to report the refusal to
them. The rank's next call on the group comes behind that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from symmpool._symmpool import check_call
from symmpool.communicators.work import reason_of
from symmpool.groups import declined_calls

if TYPE_CHECKING:
    from symmpool.communicators.entry import CommunicatorEntry
    from symmpool.groups.types import GroupKey

# A communicator's method and its arguments; or what gives them for this rank of a number of ranks, or raises
# what is wrong with the call.
Call = tuple[str, tuple[Any, ...]] | Callable[[int, int], tuple[str, tuple[Any, ...]]]


def check(
    key: GroupKey, device: int, member: tuple[int, int], call: Call, make: Callable[[], CommunicatorEntry]
) -> None:
    """Raises what is wrong with a call on a group that has no communicator yet, and has a thread `make` the
    communicator's entry and report the refusal. `member` is this process's rank, and the number of ranks."""
    try:
        name, arguments = call if isinstance(call, tuple) else call(*member)
        check_call(device, *member, name, arguments)
    except BaseException as why:
        report(key, why, make)
        raise


def report(key: GroupKey, why: BaseException, make: Callable[[], CommunicatorEntry], calls: int = 1) -> None:
    """Has a thread `make` the entry of a group's communicator and report that this rank refuses a call, or
    several that are begun together."""
    reason = reason_of(why)

    def decline() -> None:
        entry = make()
        for _ in range(calls):
            entry.decline_call(reason)

    # An error there is raised again by the next call, which makes it anew, or finds it closed.
    declined_calls.report(key, decline)
