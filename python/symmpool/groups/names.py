"""Groups and ranks by what callers write for them, and calls that are refused here.

Needs no torch: names of its process groups are looked up where the program has imported it.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
import weakref
from typing import Any

from symmpool._symmpool import Group, Pool
from symmpool.errors import InvalidArgumentError
from symmpool.groups import process_groups

__all__ = ["decline", "group_of", "name_of", "resolved", "root_of", "sizes_or_none"]

# Groups that are none of torch's, by the names that they were given.
_named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
# A number is given once: what was compiled for a group that is gone finds no other.
_numbers = itertools.count()
_lock = threading.Lock()


def name_of(group: Any) -> str:
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
    if not hasattr(group, "group_name"):
        raise InvalidArgumentError(f"group: {group!r} has no name that operators could know it by")
    return group.group_name


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


def resolved(group: Any) -> Any:
    """The group that a call names, by itself or by its name."""
    return group_of(group) if isinstance(group, (str, tuple)) else group


def root_of(group: Any, src: Any, group_src: Any) -> tuple[int, InvalidArgumentError | None]:
    """The root of a broadcast; or -1, and what is wrong with it, which the other ranks are to hear of."""
    try:
        return _rank_of(group, src, group_src), None
    except InvalidArgumentError as error:
        return -1, error


def _rank_of(group: Any, src: Any, group_src: Any) -> int:
    """The rank of `group` that a call names as `src`, a rank of torch's default group if `group` is
    one of torch's, or as `group_src`, one of `group`."""
    group = resolved(group)
    if (src is None) == (group_src is None):
        raise InvalidArgumentError("broadcast: one of src and group_src is needed")
    name, given = ("group_src", group_src) if src is None else ("src", src)
    try:
        rank = operator.index(given)
    except TypeError:
        rank = -1
    if not 0 <= rank < 1 << 32:
        raise InvalidArgumentError(f"broadcast: {name}: {given!r} is no rank")
    if src is None or group is None or isinstance(group, (Group, Pool)):
        return rank
    dist = process_groups.distributed()
    try:
        return dist.get_group_rank(group, rank) if dist is not None else rank
    except ValueError as error:
        raise InvalidArgumentError(
            f"broadcast: src: {rank}, of the default group, is no rank of the call's group ({error})"
        ) from None


def sizes_or_none(sizes: Any) -> Any:
    """Split sizes; None where there are none, which torch also writes as an empty list."""
    return None if sizes is None or (isinstance(sizes, (list, tuple)) and not sizes) else sizes


def decline(seat: Any, call: Any, *arguments: Any) -> None:
    """Makes a call with arguments that the communicator refuses, so that the other ranks hear that
    this one has no part in it and all stay in step. Waits neither for them nor for what was begun
    before. Raises only what else there is to say, such as why the communicator is closed."""
    with contextlib.suppress(InvalidArgumentError, TypeError):
        if seat.tail is None:
            call(*arguments)
        else:
            seat.begin(call, arguments, [])
