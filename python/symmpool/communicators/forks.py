"""State of a forked child in the place of what its parent's threads did.

A child has none of these threads: nobody makes the calls that were begun, and nobody gives back a lock that
a thread held. Objects of the extension refuse calls there (allocator/src/fork.rs); this is what they cannot
see.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from symmpool.errors import InvalidStateError

if TYPE_CHECKING:
    from typing import NoReturn

    from symmpool._symmpool import Communicator

__all__ = ["FORKED", "Forked", "error", "renew_in_children"]


def error(what: str = "a communicator") -> InvalidStateError:
    """The error of what a child does with an object of its parent."""
    return InvalidStateError(
        f"symmpool: {what} of another process is used in one forked from it, process {os.getpid()}; make a "
        "group, and what is needed on it, after the fork, or start the process by spawn"
    )


class Renewed(Protocol):
    """An object that forked children take over, and what they do to it first."""

    def forked(self) -> None:
        """Has it be as in a process without its parent's threads."""


class Forked:
    """Stands for what makes a parent's calls, and for the calls that it had begun. Refuses both."""

    __slots__ = ()

    def is_here(self) -> bool:
        """Whether calls can be made in this process: never."""
        return False

    @property
    def order(self) -> Forked:
        """This object, in place of a thread's order of calls."""
        return self

    def announce(self, comm: Communicator) -> Forked:
        """This object, in place of a communicator's."""
        return self

    def submit(self, *_: object) -> NoReturn:
        """Raises what every call in a forked child raises."""
        raise error()

    def join(self) -> NoReturn:
        """Raises what every call in a forked child raises."""
        raise error()


FORKED = Forked()

# Objects with `forked()`, which is called in a child before anything else.
_known: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_in_children(known: Renewed) -> None:
    """Has `known.forked()` called in forked children, as long as it is there."""
    _known.add(known)


def _renew() -> None:
    for each in list(_known):
        each.forked()


os.register_at_fork(after_in_child=_renew)
