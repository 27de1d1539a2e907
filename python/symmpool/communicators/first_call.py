"""A group's first call, where this rank's own arguments are wrong.

What serves a group is made at its first call, which all ranks meet in. A rank that refuses its arguments has
its reason before that, wherever the others are, and a thread meets them, to tell them of it. The rank's next
call on the group comes behind that.
"""

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
from symmpool.groups.names import decline

# A communicator's method, its arguments, and what is known to be wrong with them.
Call = tuple[str, tuple[Any, ...], Exception | None]

# How long a rank waits for the others all the same, in seconds: ranks that are there come in less, and
# everything is then as after any other call.
GRACE = 0.5
# How long a program that ends waits for a thread to stop, in seconds: those that wait in a store look up
# once a slice of it.
LAST_WAIT = store.SLICE + 1.0

# Threads that tell of a refused call, by what it was on: a group's key, or a pool.
_telling: weakref.WeakKeyDictionary[Any, threading.Thread] = weakref.WeakKeyDictionary()


def await_telling(key: Any) -> None:
    """Waits until the other ranks were told of calls on a group that were refused, if there are such."""
    thread = _telling.get(key)
    if thread is not None and thread is not threading.current_thread():
        thread.join()
        _telling.pop(key, None)


def check_first(key: Any, device: int, member: tuple[int, int], call: Call, make: Callable[[], Any]) -> None:
    """Raises what is wrong with a call on a group that nothing serves yet, and has a thread `make` what
    does, and tell the other ranks. `member` is this process's rank, and the number of ranks."""
    name, arguments, wrong = call
    try:
        if wrong is not None:
            raise wrong
        check_call(device, *member, name, arguments)
    except (InvalidArgumentError, TypeError):
        thread = threading.Thread(
            target=_tell, args=(name, arguments, make), name="symmpool refusal", daemon=True
        )
        _end_all_at_exit()
        _telling[key] = thread
        thread.start()
        thread.join(GRACE)
        raise


def _tell(name: str, arguments: tuple[Any, ...], make: Callable[[], Any]) -> None:
    # What goes wrong here the next call hears of, which makes the same anew, or finds it closed.
    with contextlib.suppress(Error):
        seat = make()
        decline(seat, getattr(seat.comm, name), *arguments)


@functools.cache
def _end_all_at_exit() -> None:
    atexit.register(_end_all)


def _end_all() -> None:
    """A thread that comes back from torch's code to a finished interpreter ends the process: they stop
    before, where they wait in a store."""
    for thread in list(_telling.values()):
        if thread.is_alive() and thread.ident is not None:
            store.given_up.add(thread.ident)
            thread.join(LAST_WAIT)
