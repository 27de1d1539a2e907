"""A group's first call, where this rank's own arguments are wrong.

What serves a group is made at its first call, which all ranks meet in. A rank that refuses its arguments
raises the reason before that, wherever the others are, and a thread meets them, to report the refusal to
them. The rank's next call on the group comes behind that."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from symmpool._symmpool import check_call
from symmpool.errors import Error, InvalidArgumentError
from symmpool.groups import store

# A communicator's method and its arguments; or what gives them for this rank of a number of ranks, or raises
# what is wrong with the call.
Call = tuple[str, tuple[Any, ...]] | Callable[[int, int], tuple[str, tuple[Any, ...]]]

# How long a refused call waits for the others all the same, in seconds: ranks that are there come in less,
# and everything is then as after any other call.
GRACE = 0.5
# How long a program that ends waits for a thread to stop, in seconds: those that wait in a store look up
# once a slice of it.
LAST_WAIT = store.SLICE + 1.0

# Threads that report a refused call, by what it was on: a group's key, or a pool.
_reporting: weakref.WeakKeyDictionary[Any, threading.Thread] = weakref.WeakKeyDictionary()


def await_reports(key: Any) -> None:
    """Waits until the refused calls on a group, if there are such, were reported to the other ranks."""
    thread = _reporting.get(key)
    if thread is not None and thread is not threading.current_thread():
        thread.join()
        _reporting.pop(key, None)


def check(key: Any, device: int, member: tuple[int, int], call: Call, make: Callable[[], Any]) -> None:
    """Raises what is wrong with a call on a group that has no communicator yet, and has a thread `make` the
    communicator's entry and report the refusal. `member` is this process's rank, and the number of ranks."""
    try:
        name, arguments = call if isinstance(call, tuple) else call(*member)
        check_call(device, *member, name, arguments)
    except (InvalidArgumentError, TypeError) as why:
        thread = threading.Thread(target=_report, args=(str(why), make), name="symmpool refusal", daemon=True)
        _end_all_at_exit()
        _reporting[key] = thread
        thread.start()
        thread.join(GRACE)
        raise


def _report(why: str, make: Callable[[], Any]) -> None:
    # What goes wrong here is raised again by the next call, which makes the same anew, or finds it closed.
    with contextlib.suppress(Error):
        make().refuse(why)


@functools.cache
def _end_all_at_exit() -> None:
    atexit.register(_end_all)


def _end_all() -> None:
    """A thread that comes back from torch's code to a finished interpreter ends the process: they stop
    before, where they wait in a store."""
    for thread in list(_reporting.values()):
        if thread.is_alive() and thread.ident is not None:
            store.given_up.add(thread.ident)
            thread.join(LAST_WAIT)
