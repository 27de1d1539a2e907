"""A communicator of the cache, and the order of the calls that are made on it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from symmpool._symmpool import Communicator, Pool, check_call
from symmpool.communicators import forks, sm_budget
from symmpool.communicators.devices import number_of
from symmpool.communicators.work import Prepare, Prepared, reason_of
from symmpool.errors import Error, InvalidArgumentError, TimeoutError
from symmpool.groups import pool_registry

if TYPE_CHECKING:
    from symmpool.collectives.types import Tensor
    from symmpool.communicators.work import Work

__all__ = ["CommunicatorEntry", "Preparation", "name_pool", "reason_of"]


_Result = TypeVar("_Result")


class CommunicatorEntry:
    """A pool's communicator, and what is under way on it."""

    __slots__ = (
        "comm",
        "public",
        "device",
        "pending",
        "runner",
        "registered",
        "_pool",
        "lock",
        "begun",
        "__weakref__",
    )

    def __init__(self, pool: Pool, made: Communicator | None = None, serves_subgroups: bool = False):
        """With `made`, the communicator is that one. With `serves_subgroups`, ranks make communicators of
        some of them in the memory of the one that is made."""
        self.device = number_of(pool.device)
        self.public = self._make(pool, serves_subgroups) if made is None else made
        # Module-level calls say to autograd themselves what they write to. On the backend torch decides that.
        self.comm = self.public._unseen()
        self._pool = weakref.ref(pool)
        # Object with a method `join`, for the calls with async_op that nothing has waited for yet.
        self.pending: Any = None
        # Held while `pending` changes. A signal handler may begin a call in the middle of that.
        self.lock = threading.RLock()
        # How many calls were given to the thread.
        self.begun = 0
        # Maker of such calls: a stream, or a thread.
        self.runner: Any = None
        # Where torch has the process group that the pool is on, for as long as it is not destroyed.
        self.registered: Any = None
        forks.renew_in_children(self)

    def _make(self, pool: Pool, serves_subgroups: bool) -> Communicator:
        options = sm_budget.options(pool)
        sm_budget.share_with_other_groups(self.device)
        timeout = pool_registry.timeout_of(pool)
        # A program may have many groups, most of which make small calls only.
        options["device_memory_grows"] = True
        # No part of the signature that programs see.
        options["_serves_subgroups"] = serves_subgroups
        return Communicator(pool, timeout=timeout, **options)

    def pool(self) -> Pool | None:
        """The pool of the communicator, if it is there."""
        return self._pool()

    def forked(self) -> None:
        """In a forked child, which does not wait for what its parent has begun."""
        self.pending = self.runner = forks.FORKED
        self.lock._at_fork_reinit()  # type: ignore[attr-defined]

    def join_pending(self) -> None:
        """Orders later calls after all that was begun. Where the wait for that ends by an error, such as
        Ctrl-C, later calls still come after it."""
        pending = self.pending
        if pending is None or (self.device < 0 and pending.is_here()):
            # In a callback, which waits for nothing: calls of other threads still come after what was begun.
            return
        # On CUDA a capture may be unable to wait for it, which is an error.
        waited = pending.join()
        with self.lock:
            # A callback, or another thread, may have begun a call meanwhile.
            begun = self.begun
            if self.pending is pending and pending.ends_with(waited):
                self.pending = None
                if self.begun != begun:
                    # So has a signal handler in this thread, in the middle of these lines.
                    self.pending = pending

    def _join_for(self, call: Callable[..., object], arguments: tuple[object, ...] | None) -> None:
        """Joins like `join_pending`, before such a call; without arguments, one that was checked. Wrong
        arguments are refused first: what was begun may wait for ranks that are elsewhere."""
        if self.device >= 0:
            # The thread does not wait here. What a capture cannot wait for is no error of this call.
            if arguments is not None:
                with self.preparing():
                    self._check(call, arguments)
            self.join_pending()
            return
        with self.preparing():
            if arguments is not None:
                self._check(call, arguments)
            self.join_pending()

    def _check(self, call: Callable[..., object], arguments: tuple[object, ...]) -> None:
        name = getattr(call, "__name__", "")
        check_call(self.device, self.comm.rank, self.comm.world, name, arguments)

    def decline(self, call: Callable[..., object], *arguments: object) -> None:
        """Makes a call with arguments that the communicator refuses, so that the other ranks raise an error
        with the reason and all ranks stay in step. Waits neither for them nor for what was begun before.
        Raises only what else there is to say, such as why the communicator has failed."""
        with contextlib.suppress(InvalidArgumentError, TypeError):
            if self.pending is None:
                call(*arguments)
            else:
                self.begin(call, arguments, [])

    def decline_call(self, why: str) -> None:
        """Declines a call that this rank refuses for a reason of its own."""
        self.decline(self.comm._decline, why.removeprefix("symmpool: "))

    def preparing(self) -> Preparation:
        """The door to every collective: what checks arguments, allocates results, copies inputs or calls a
        user's code stands in `with entry.preparing():`, and the call itself behind it. Whatever is raised
        inside (a wrong argument, a lack of memory, Ctrl-C) is raised here, and is reported to the other
        ranks, whose calls raise DivergedError at once instead of pairing with this rank's next one."""
        return Preparation(self)

    def preparing_message(self, call: str, peer: int) -> Preparation:
        """Opens the door like `preparing`, for a message ("send" or "recv") to or from a rank, which alone
        learns of it."""
        return _MessagePreparation(self, call, peer)

    def finish(self) -> None:
        """Waits for all that was begun, which ends by itself: by an error if a rank does not come."""
        if self.runner is forks.FORKED:
            return
        self.join_pending()
        if self.device >= 0:
            # Errors of the calls were raised to those who made them.
            with contextlib.suppress(Error):
                self.comm.synchronize()

    def run(
        self,
        call: Callable[..., object],
        arguments: tuple[object, ...],
        results: list[Tensor],
        async_op: bool,
        prepare: Prepare | None = None,
    ) -> Work | None:
        """Makes a call after those that were begun: Work with `async_op`, else None. With a preparation the
        call's arguments are what that gives, and `arguments` the caller's tensors."""
        if async_op:
            return self.begin(call, arguments, results, prepare)
        if self.pending is not None:
            self._join_for(call, arguments if prepare is None else None)
        finish = None
        if prepare is not None:
            with self.preparing():
                arguments, finish = prepare()
        try:
            call(*arguments)
        except TimeoutError as error:
            self.explain(error)
            raise
        if finish is not None:
            finish()
        return None

    def run_joined(self, call: Callable[..., object], arguments: tuple[object, ...]) -> None:
        """Runs a call like `run`, for a thread that holds a lock which callbacks need, and has joined what
        was begun before it took that. On the CPU it waits for no callbacks here."""
        if self.device >= 0:
            self.run(call, arguments, [], False)
            return
        try:
            call(*arguments)
        except TimeoutError as error:
            self.explain(error)
            raise

    def run_function(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Runs a function of the extension like `run`, with the communicator as its first argument. Returns
        its result."""
        if self.pending is not None:
            self._join_for(function, None)
        try:
            return function(self.comm, *arguments)
        except TimeoutError as error:
            self.explain(error)
            raise

    def extend_order(self) -> None:
        """Moves the end of the last call behind what the current stream was given so far.

        You must call this behind whatever belongs to a call and follows its kernel, such as copies out of
        memory that the next call overwrites: that call, on whatever stream, comes after it."""
        if self.device >= 0:
            self.comm.extend_order()

    def run_message(self, name: str, tensor: Tensor, peer: int, prepare: Prepare | None) -> None:
        """Runs a send or a receive like `run`. An error before it is reported to the other rank."""
        call, arguments = getattr(self.comm, name), (tensor, peer)
        finish = None
        if self.pending is not None and self.device >= 0:
            self.join_pending()  # see `_join_for`
        if self.pending is not None or prepare is not None:
            with self.preparing_message(name, peer):
                if self.pending is not None:
                    if prepare is None:
                        self._check(call, arguments)
                    self.join_pending()
                if prepare is not None:
                    arguments, finish = prepare()
        try:
            call(*arguments)
        except TimeoutError as error:
            self.explain(error)
            raise
        if finish is not None:
            finish()

    def begin(
        self,
        call: Callable[..., object],
        arguments: tuple[object, ...],
        results: list[Tensor],
        prepare: Prepare | None = None,
    ) -> Work:
        """Makes a call without waiting for it, and its preparation before it, wherever the call is made."""
        prepared = None if prepare is None else Prepared(prepare, self.comm._decline)
        if self.runner is None:
            with self.preparing():
                self.runner = self._make_runner()
        runner = self.runner
        if self.device >= 0:
            # Before the call: behind it Ctrl-C leaves one that later calls come behind.
            self.pending = held = runner.announce(self.comm)
            return runner.submit(self.comm, call, arguments, results, prepared, held)
        return runner.submit(call, arguments, results, prepared, self)

    def _make_runner(self) -> Any:
        if self.device < 0:
            from symmpool.communicators.host_work import Worker

            return Worker(self, explainer(self))
        import torch

        from symmpool.communicators.stream_work import SideStream

        return SideStream(torch, self.device, explainer(self))

    def explain(self, error: TimeoutError) -> None:
        """Has an error of a call say which pool it went to, if there are several."""
        pool = self._pool()
        if pool is not None:
            name_pool(pool, error)


#: The attribute of an error that the other ranks know already.
REPORTED = "_symmpool_reported"


class Preparation:
    """Part of a call on this rank between finding its communicator and making it."""

    __slots__ = ("_entry",)

    def __init__(self, entry: CommunicatorEntry):
        self._entry = entry

    def __enter__(self) -> CommunicatorEntry:
        return self._entry

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:
            # The door of a call that is made of several parts does not report it again.
            error.__dict__[REPORTED] = True
            self._entry.decline_call(reason_of(error))


class _MessagePreparation(Preparation):
    """Part of a message on this rank between finding its communicator and making it."""

    __slots__ = ("_call", "_peer")

    def __init__(self, entry: CommunicatorEntry, call: str, peer: int):
        super().__init__(entry)
        self._call, self._peer = call, peer

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:
            self._entry.decline(self._entry.comm._decline, reason_of(error), (self._call, self._peer))


def name_pool(pool: Pool, error: TimeoutError) -> None:
    """Adds to an error which pool a call went to, where that is in doubt."""
    place = pool_registry.place_of(pool)
    if place and place not in str(error):
        error.args = (f"{error}; the call went to {place}",)


def explainer(entry: CommunicatorEntry) -> Callable[[Exception], None]:
    """`explain`, for what must not keep the entry."""
    found = weakref.ref(entry)

    def explain(error: Exception) -> None:
        entry = found()
        if entry is not None and isinstance(error, TimeoutError):
            entry.explain(error)

    return explain
