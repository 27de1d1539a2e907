"""Calls in which all ranks meet, and which this rank refuses: it raises its reason before they come, and a
thread meets them, to tell them. This rank's next such call on the group comes behind that."""

from __future__ import annotations

import atexit
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from symmpool._symmpool import end_waits
from symmpool.groups import store
from symmpool.groups.process_groups import distributed

# How long a refused call waits for the others all the same, in seconds: ranks that are there come in less,
# and everything is then as after any other call.
GRACE = 0.5
# How long a program that ends waits for a thread to stop, in seconds: those that wait look up once a slice.
LAST_WAIT = store.SLICE + 1.0

# Threads that report a refused call, by what it was on: a group, its key, or a pool.
_reporting: weakref.WeakKeyDictionary[Any, threading.Thread] = weakref.WeakKeyDictionary()


# Those on groups that cannot be keys: a store with a rank and a world is a group of its own in each call.
_unnamed: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class _Environment:
    """Stands for the group of the environment, which may have to meet before it is there."""


_environment = _Environment()


def _named(key: object) -> object:
    """Returns the object that stands for a group that a call names, or for the default one."""
    if key is not None:
        return key
    dist = distributed()
    return dist.group.WORLD if dist is not None and dist.is_initialized() else _environment


def await_reports(key: object) -> None:
    """Waits until the refused calls on a group, if there are such, were reported to the other ranks."""
    if not _reporting:
        return
    key = _named(key)
    try:
        thread = _reporting.get(key)
    except TypeError:
        return
    if thread is not None and thread is not threading.current_thread():
        thread.join()
        if _reporting.get(key) is thread:
            _reporting.pop(key)


def report(key: object, meet: Callable[[], object]) -> BaseException | None:
    """Has a thread `meet` the other ranks of a group. What that raised, if they came soon."""
    await_reports(key)
    raised: list[BaseException] = []

    def work() -> None:
        # A later error is raised again by the next call, or is of no interest any more.
        try:
            meet()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, name="symmpool refusal", daemon=True)
    _end_all_at_exit()
    try:
        _reporting[_named(key)] = thread
    except TypeError:
        _unnamed.add(thread)
    thread.start()
    thread.join(GRACE)
    return raised[0] if raised else None


@functools.cache
def _end_all_at_exit() -> None:
    atexit.register(_end_all)


def _end_all() -> None:
    """A thread that comes back from native code to a finished interpreter ends the process: they stop before,
    where they wait for others."""
    left = [each for each in (*_reporting.values(), *_unnamed) if each.is_alive() and each.ident is not None]
    if not left:
        return
    end_waits()
    for thread in left:
        assert thread.ident is not None  # it has run
        store.stopped_threads.add(thread.ident)
    for thread in left:
        thread.join(LAST_WAIT)
