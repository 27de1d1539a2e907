"""Groups and ranks by what callers write for them.

Needs no torch: names of its process groups are looked up where the program has imported it.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from symmpool._symmpool import Group, Pool
from symmpool.errors import InvalidArgumentError
from symmpool.groups import process_groups

if TYPE_CHECKING:
    from symmpool.groups.types import GroupLike

__all__ = ["group_of", "name_of", "rank_in", "resolved", "sizes_or_none"]

# Groups that are none of torch's, by the names that they were given.
_named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
# A number is given once: what was compiled for a group that is gone finds no other.
_numbers = itertools.count()
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def name_of(group: GroupLike) -> str:
    """The text by which operators know a group, the same for as long as the group is there. A
    `Group` or a `Pool` gets its name here: the first is "symmpool:0"."""
    if group is None:
        return ""
    if isinstance(group, (Group, Pool)):
        with _lock:
            name = _names.get(group)
            if name is None:
                name = f"symmpool:{next(_numbers)}"
                _names[group], _named[name] = name, group
        return name
    known: Any = group
    if not hasattr(known, "group_name"):
        raise InvalidArgumentError(f"group: {group!r} has no name that operators could know it by")
    return known.group_name


def group_of(name: Any) -> Any:
    """The group of a name: "" is the default group, as None; other text is what `name_of` gave, or
    the name of a process group of torch. Refuses what is no text: a call's group is no tuple."""
    if name == "":
        return None
    if not isinstance(name, str):
        raise InvalidArgumentError(
            f"group: {name!r} makes a group, and a call needs one that is there: pass the pool that "
            "was made on it, or make it once with Group.from_store"
        )
    if name.startswith("symmpool:"):
        found = _named.get(name)
        if found is None:
            raise InvalidArgumentError(f"group: there is none of the name {name!r} any more")
        return found
    dist = process_groups.distributed()
    try:
        if dist is not None:
            return dist.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, ValueError):
        pass  # which says no more
    raise InvalidArgumentError(f"group: torch has no process group of the name {name!r}")


def resolved(group: GroupLike) -> Any:
    """The group that a call names, by itself or by its name."""
    return group_of(group) if isinstance(group, (str, tuple)) else group


def rank_in(group: GroupLike, call: str, default: int | None = None, **given: Any) -> int:
    """The rank of `group` that a call names. `given` are two arguments by their names, of which one is needed
    unless there is a default: a rank of torch's default group, where `group` is one of torch's ("src"), and a
    rank of `group` ("group_src"). Raises InvalidArgumentError for what is no rank."""
    group = resolved(group)
    (of_default, rank), (of_group, group_rank) = given.items()
    if rank is None and group_rank is None and default is not None:
        rank = default
    if (rank is None) == (group_rank is None):
        raise InvalidArgumentError(f"{call}: one of {of_default} and {of_group} is needed")
    name, value = (of_group, group_rank) if rank is None else (of_default, rank)
    try:
        found = operator.index(value)
    except TypeError:
        found = -1
    if not 0 <= found < 1 << 32:
        raise InvalidArgumentError(f"{call}: {name}: {value!r} is no rank")
    if rank is None or group is None or isinstance(group, (Group, Pool)):
        return found
    dist = process_groups.distributed()
    try:
        return dist.get_group_rank(group, found) if dist is not None else found
    except ValueError as error:
        raise InvalidArgumentError(
            f"{call}: {name}: {found}, of the default group, is no rank of the call's group ({error})"
        ) from None


def rank_of_default(group: GroupLike, rank: int) -> int:
    """A rank of a group as calls name it: one of torch's default group where the group is torch's."""
    group, dist = resolved(group), process_groups.distributed()
    if dist is None or not isinstance(group, dist.ProcessGroup):
        return rank
    return dist.get_global_rank(group, rank)


def sizes_or_none(sizes: object) -> Any:
    """Split sizes; None where there are none, which torch also writes as an empty list."""
    return None if sizes is None or (isinstance(sizes, (list, tuple)) and not sizes) else sizes
