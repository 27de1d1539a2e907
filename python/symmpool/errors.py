"""Exceptions of the package: one class for each thing that a caller can do about an error.

Each also derives from the builtin exception of its kind, so code that knows nothing of this package
handles them. Messages say what happened, on which rank, what was expected and what to do.
"""

import builtins

__all__ = [
    "DivergedError",
    "Error",
    "InvalidArgumentError",
    "InvalidStateError",
    "OutOfMemoryError",
    "OverflowError",
    "PeerLostError",
    "PlanError",
    "RefusedError",
    "TimeoutError",
    "UnsupportedError",
]


class Error(Exception):
    """Any error of symmpool; by itself, a failed call to the system or a device library."""

    #: The ranks that are missing, lost or different; empty where none are to blame.
    ranks: tuple[int, ...] = ()


class OutOfMemoryError(Error, MemoryError):
    """Memory, address range or a limit is used up. Free something, or raise the limit."""


class DivergedError(Error, RuntimeError):
    """Ranks did different things, or were set up differently. The program must be mended."""


class TimeoutError(Error, builtins.TimeoutError):
    """A wait ran out; `ranks` names who did not answer."""


class PeerLostError(Error, ConnectionError):
    """A rank is gone; `ranks` names it. Rebuild the group without it, or restart."""


class UnsupportedError(Error, NotImplementedError):
    """This machine, library or build cannot do it."""


class InvalidArgumentError(Error, ValueError):
    """An argument makes no sense; nothing was changed."""


class PlanError(InvalidArgumentError):
    """A program of symmpool.language is wrong. The message begins with the file and the line."""

    #: "deadlock", "race", "wrong_result", "unmatched_signal", "out_of_range", "read_only",
    #: "not_reproducible" or "protocol".
    kind: str = ""
    #: The rank whose operation it is.
    rank: int = 0
    #: The line of that operation in the program's file; 0 where it is not known.
    line: int = 0

    def __init__(self, message: str, kind: str = "", rank: int = 0, line: int = 0):
        super().__init__(message)
        self.kind, self.rank, self.line = kind, rank, line


class OverflowError(Error, builtins.OverflowError):
    """An output was too short for what ranks sent; what was beyond its end was not written."""


class RefusedError(Error, PermissionError):
    """Wrong secret, wrong protocol version, wrong user."""


class InvalidStateError(Error, RuntimeError):
    """The call does not fit the current state, such as a commit inside a commit."""
