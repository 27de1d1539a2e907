"""Point-to-point calls of CPU tensors, for the backend: the group's mailbox carries them in shared memory.

A communicator takes all ranks of a group, and the ranks of a pipeline may never make a collective. So a group
has a mailbox: two ranks connect when one of them first sends or receives, and no third one takes part. Each
rank publishes where its mailbox is before gloo has the ranks of a new group meet, and reads where the others'
are behind that: messages need no store.

Where the ranks cannot share memory, because they run on several machines or as several users, gloo carries
the messages of the whole group. All ranks see that alike, by what they have published."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from symmpool._symmpool import Mailbox, PendingMessage
from symmpool.collectives import layout
from symmpool.communicators import forks
from symmpool.communicators.work import seconds_or_none
from symmpool.errors import Error, TimeoutError
from symmpool.groups.store import FIRST_PAUSE, LONGEST_PAUSE, StoreAdapter
from symmpool.torch_backend.work import CopyingWork, TorchWork, is_asked, is_let_go, opaque, unregister

if TYPE_CHECKING:
    import torch.distributed

    from symmpool.groups.types import Timeout

__all__ = ["HostMessages"]

logger = logging.getLogger("symmpool.backend")

_strided = torch.strided
# The last byte of what a rank publishes: whether it may make groups within this one without a rendezvous.
_NESTS, _ALONE = b"\x01", b"\x00"


def _may_nest() -> bool:
    """Whether this process needs no gloo when it makes a group. With lazy connections gloo has no ranks meet,
    so they do not know of each other what the others have published."""
    is_lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0")
    return not torch.cuda.is_available() and torch.distributed.is_gloo_available() and not is_lazy


@opaque
class HostMessages:
    """The point-to-point calls of CPU tensors of one group."""

    def __init__(self, rank: int, size: int, seconds: float):
        self._rank, self._size, self._seconds = rank, size, seconds
        # For this group's mailboxes alone; and what all ranks have published there, once it is known.
        self._store: Any = None
        self._addresses: list[bytes] | None = None
        # Whether groups of some of the ranks may need no gloo, by what all have published.
        self._may_nest = False
        self._mailbox: Mailbox | None = None
        # Whether the mailbox carries messages; unknown before the first one.
        self.is_used: bool | None = False if size == 1 else None
        # Held by the thread that finds out.
        self._lock = threading.Lock()

    def publish(self, store_for: Callable[[str], torch.distributed.Store]) -> None:
        """Publishes where this rank's mailbox is. `store_for` gives the store of what has a name."""
        if self._size == 1:
            return
        address = b""
        try:
            self._mailbox = Mailbox(self._rank, self._size, self._seconds)
            address = self._mailbox.address() + (_NESTS if _may_nest() else _ALONE)
            _open.add(self)
        except Error as error:
            # No address, by which the other ranks see that gloo carries the messages.
            logger.warning("symmpool carries no messages of rank %d: %s", self._rank, error)
        self._store = store_for("p2p")
        self._store.set(str(self._rank), address)

    def read(self) -> None:
        """Reads what all ranks have published. Where some have not yet, as ranks meet at their first calls
        only, the first message does."""
        if self._store is None:
            return
        keys = self._keys()
        with contextlib.suppress(Exception):
            if self._store.check(keys):
                self._take(self._store.multi_get(keys))

    def _take(self, published: list[bytes]) -> list[bytes]:
        """Takes in what all ranks have published. Returns where their mailboxes are."""
        self._may_nest = all(each.endswith(_NESTS) for each in published)
        self._addresses = addresses = [each[:-1] for each in published]
        return addresses

    def _keys(self) -> list[str]:
        return [str(rank) for rank in range(self._size)]

    @property
    def may_wait(self) -> bool:
        """Whether a group of some of these ranks needs no gloo for its messages: the ranks share memory, so
        mailboxes carry them. Known to all ranks alike, once the group has met: by what all of them have
        published, and so not of a rank that alone has a device or another environment."""
        return self._size > 1 and self._addresses is not None and self._may_nest and self.meet()

    def fits(self, tensors: list[torch.Tensor], peer: int | None, tag: int) -> bool:
        """Whether such calls are for mailboxes. Both ranks answer alike."""
        if len(tensors) != 1 or tag < 0:
            return False
        tensor = tensors[0]
        return tensor.is_cpu and tensor.layout is _strided and (peer is None or 0 <= peer < self._size)

    def meet(self) -> bool:
        """Finds out whether the mailbox carries messages, by what all ranks have published."""
        with self._lock:
            if self.is_used is None:
                self.is_used = self._connect()
        return self.is_used

    def _connect(self) -> bool:
        addresses = self._addresses if self._addresses is not None else self._await_addresses()
        if self._mailbox is None or not all(addresses):
            return False
        obstacle = self._mailbox.connect(addresses)
        if obstacle is not None and self._rank == 0:
            why = "as two of its ranks share no memory"
            logger.warning("gloo carries messages of a group of %d ranks, %s: %s", self._size, why, obstacle)
        return obstacle is None

    def _await_addresses(self) -> list[bytes]:
        call, keys = StoreAdapter._call, self._keys()
        end, pause = time.monotonic() + self._seconds, FIRST_PAUSE
        while not call(self._store.check, keys):
            if time.monotonic() > end:
                missing = [rank for rank, key in enumerate(keys) if not call(self._store.check, [key])]
                error = TimeoutError(
                    f"symmpool: rank {self._rank} of {self._size} has a first message on a group that ranks "
                    f"{', '.join(map(str, missing))} have not made after {self._seconds:g} s"
                )
                error.ranks = tuple(missing)
                raise error
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)
        return self._take([call(self._store.get, key) for key in keys])

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> MessageWork | CopyingWork:
        """Begins to send a tensor. Returns its Work."""
        place = tensor if layout.is_plain(tensor) else layout.contiguous((tensor,), writes=False)[0][0]
        return MessageWork(self._mailbox.send(place, peer, tag), tensor)  # type: ignore[union-attr]

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> MessageWork | CopyingWork:
        """Begins to receive into a tensor, from a rank or from any. Returns its Work."""
        if layout.is_plain(tensor):
            return MessageWork(self._mailbox.recv(tensor, peer, tag), tensor)  # type: ignore[union-attr]
        (place,), finish = layout.contiguous((tensor,), writes=True)
        begun = MessageWork(self._mailbox.recv(place, peer, tag), place)  # type: ignore[union-attr]
        return CopyingWork(begun, finish, [tensor])

    def set_timeout(self, seconds: float) -> None:
        """Messages that are waited for from now on may take so long."""
        self._seconds = seconds
        if self._mailbox is not None:
            self._mailbox.set_timeout(seconds)

    def end(self) -> None:
        """Ends all messages; those that wait for them get an error."""
        if self._mailbox is not None:
            self._mailbox.end()


# Mailboxes whose ends other ranks are to see as such at the end of the program.
_open: weakref.WeakSet[HostMessages] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for each in list(_open):
        with contextlib.suppress(Error):
            each.end()


@opaque
class MessageWork(TorchWork):
    """Work of a message that a mailbox carries."""

    def __init__(self, operation: PendingMessage, tensor: torch.Tensor):
        super().__init__(operation)
        self._tensor = tensor
        self._source: int | None = None
        self._future: Any = None

    def wait(self, timeout: Timeout = None) -> bool:
        if is_let_go(self):
            return True
        try:
            self._source = self._work.wait(None if timeout is None else seconds_or_none(timeout))
        finally:
            unregister(self, [self._tensor])
        return True

    def is_completed(self) -> bool:
        return self._work.is_done()

    def is_success(self) -> bool:
        return self._work.is_done() and self._work.exception() is None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return [self._tensor]

    def _source_rank(self) -> int:
        if self._source is None:
            self.wait()
        assert self._source is not None
        return self._source

    def forked(self) -> None:
        """In a forked child, which has no thread that ends a future."""
        if not self._future.done():
            self._complete()

    def get_future(self) -> torch.futures.Future:
        if is_asked(self):
            return torch.futures.Future()
        if self._future is None:
            self._future = torch.futures.Future()
            if self._work.is_done():
                self._complete()
            else:
                forks.renew_in_children(self)
                threading.Thread(target=self._complete, name="symmpool future", daemon=True).start()
        return self._future

    def _complete(self) -> None:
        try:
            self.wait()
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result([self._tensor])
