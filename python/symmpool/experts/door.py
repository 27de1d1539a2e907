"""The door of calls that are made in the middle of what surrounds them: autograd, a stream, a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from symmpool.communicators.entry import REPORTED

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

__all__ = ["Door"]


class Door:
    """Stands around a whole public function, and reports to the other ranks what is raised inside before its
    call is made. `preparing` gives the door of the communicator that the other ranks call, as
    `CommunicatorEntry.preparing` does, when it is needed.

    The last call closes the door: from then on the ranks have paired their calls, or the communicator itself
    has reported why not. Behind a call that is not the last one it is open again at once."""

    __slots__ = ("_is_open", "_preparing", "result")

    def __init__(self, preparing: Callable[[], AbstractContextManager[object]]):
        self._preparing, self._is_open = preparing, True
        #: What the last call returned.
        self.result: Any = None

    def __enter__(self) -> Door:
        return self

    def closing(self, call: Callable[..., object], last: bool = True) -> Callable[..., None]:
        """A call of the communicator, which closes the door when it is made: for good if it is the last one,
        or if it fails."""

        def made(*arguments: object) -> None:
            # One line: Ctrl-C between its parts would be reported though the call was made, or not at all.
            # fmt: off
            self._is_open = False; self.result = call(*arguments); self._is_open = not last  # noqa: E702
            # fmt: on

        return made

    def close(self) -> None:
        """Closes the door: every rank knows of an error that is raised from here on."""
        self._is_open = False

    def lead(self, preparing: Callable[[], AbstractContextManager[object]]) -> None:
        """The other ranks' next call is on another communicator."""
        self._preparing = preparing

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._is_open and not error.__dict__.pop(REPORTED, False):
            self._is_open = False
            self._preparing().__exit__(kind, error, traceback)
            error.__dict__.pop(REPORTED, None)
