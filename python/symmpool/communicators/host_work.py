"""Calls with `async_op=True` on the CPU, which a thread makes.

A thread makes such calls one after the other. A program that waits for a call that the thread has not
begun makes it, and those before it, itself: a small call takes a third of the time then, and the thread,
which leaves a call alone for 60 microseconds, does not come into it. The thread is the one that runs the
callbacks of futures, so these may make calls themselves. A callback's calls come right behind the call that
it follows, before any that was begun since: they are made as they are begun. Where a future is done
already, torch runs a callback at once, in the thread that adds it, and its calls come behind all that
was begun. The two are one order on every rank if the program adds a callback that makes calls before it
begins the next call on that communicator. A callback may also wait for a call that was begun before,
by its Work or by its Work's own future (not by what `then` made of it): those up to it are made
first. It must not wait for another thread of the program that waits for a later call, nor for a call on
another communicator whose callbacks wait for this one.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from symmpool._symmpool import CallWakeup
from symmpool.communicators import forks
from symmpool.communicators.work import Explain, Prepared, Work, leave_as_it_is, seconds_or_none
from symmpool.errors import InvalidStateError, TimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from symmpool.collectives.types import Tensor
    from symmpool.communicators.entry import CommunicatorEntry
    from symmpool.groups.types import Timeout

__all__ = ["HostWork", "Worker"]


class _Done:
    """That a call is done, for any number of threads that wait for it. It is made of one lock, as an Event
    takes a third longer from one thread to another and back."""

    __slots__ = ("_held", "_is_set", "callbacks_done")

    def __init__(self) -> None:
        self._held = threading.Lock()
        self._held.acquire()
        self._is_set = False
        # That callbacks have run too, in the thread that made the call. None where nobody asked for a future
        # before the call was done.
        self.callbacks_done: threading.Event | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Called once, by the thread that has made the call."""
        self._is_set = True
        self._release()

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # where another thread has
            self._held.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set, `timeout` seconds at most. Returns whether it is."""
        if self._is_set:
            return True
        try:
            self._held.acquire(timeout=-1 if timeout is None else timeout)
        finally:
            # Other threads may wait for it as well, also where Ctrl-C ends this wait.
            if self._is_set:
                self._release()
        return self._is_set

    def wait_for_callbacks(self) -> None:
        self.wait()
        if self.callbacks_done is not None:
            self.callbacks_done.wait()


class HostWork(Work):
    """A call that a thread makes."""

    __slots__ = ("_queue", "_done", "_error", "_lock", "is_begun")

    def __init__(self, results: list[Tensor], calls: _CallQueue):
        super().__init__(results)
        self._queue = calls
        self._done = _Done()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        # Whether the call is made, or was: Ctrl-C before that leaves it to be made.
        self.is_begun = False

    def run(
        self,
        call: Callable[..., object],
        arguments: tuple[object, ...],
        prepared: Prepared | None,
        explain: Explain,
    ) -> None:
        """Makes the call, on the thread that makes a communicator's calls. An error is kept for `wait`."""
        try:
            finish = None
            if prepared is not None:
                arguments, finish = prepared()
            self._queue.make(self, call, arguments)
            if finish is not None:
                finish()
        except Exception as error:
            explain(error)
            self._error = error
        except BaseException as error:
            # Ctrl-C in a thread of the program that makes the call itself.
            if prepared is None and not self.is_begun:
                raise  # the call is still to be made
            self._error = InvalidStateError(f"symmpool: {type(error).__name__} ended the call")
            self._end()
            raise
        try:
            self._end()
        except BaseException:
            # Ctrl-C, which leaves nobody waiting.
            self._done.set()
            raise

    def _end(self) -> None:
        """Releases those who wait, and completes the future, if somebody has it."""
        with self._lock:
            self._done.set()
            # A future that is asked for from now on is completed where it is made.
            callbacks_done = self._done.callbacks_done
        if callbacks_done is not None:
            try:
                self._complete_future()
            finally:
                callbacks_done.set()

    def wait(self, timeout: Timeout = None) -> bool:
        """Waits until the call is done, `timeout` long: seconds, a timedelta, or None for no limit of its
        own. Raises what the call raised, or TimeoutError. Any thread may wait."""
        seconds = seconds_or_none(timeout)
        calls, done = self._queue, self._done
        if calls.is_lost:
            calls.check_here(done)
        calls.advance(done)
        if seconds is None:
            calls.help(done)
        if not self._done.wait(seconds):
            raise TimeoutError(f"symmpool: a collective is not done after {timeout}")
        if self._error is not None:
            raise self._error
        return True

    def has_future(self) -> bool:
        """Whether somebody has asked for its future, whose callbacks follow the call."""
        return self._future is not None

    def is_completed(self) -> bool:
        """Whether the call is over, with an error or without. It never waits."""
        # In a forked child it ends no other way than by an error.
        return self._done.is_set() or self._queue.is_lost

    def exception(self) -> Exception | None:
        """The error of a call that failed, else None. It never waits."""
        if self._queue.is_lost and not self._done.is_set():
            return forks.error("a call with async_op=True")
        return self._error

    def join(self) -> None:
        """Waits until the call is over, and raises nothing that it raised."""
        self._queue.check_here(self._done)
        self._queue.advance(self._done)
        self._queue.help(self._done)
        self._done.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """torch's future of the results, which callbacks can be added to. Raises nothing."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = _future_class()(self._queue, self._done)
            if not self.is_completed():
                # The thread that makes the call completes it.
                self._done.callbacks_done = threading.Event()
                return self._future
        self._complete_future()
        return self._future

    def _complete_future(self) -> None:
        error = self.exception()
        if error is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._results)


@functools.cache
def _future_class() -> Any:
    import torch

    class Future(torch.futures.Future):
        """A future that a callback can wait for: the callback's thread makes the call first."""

        def __init__(self, calls: _CallQueue, done: _Done):
            super().__init__()
            self._queue, self._done = calls, done

        def wait(self) -> Any:
            self._queue.check_here(self._done)
            self._queue.advance(self._done)
            return super().wait()

    return Future


class _CallQueue:
    """Calls that wait for the thread that makes them, and whether one is being made. Only that may last: a
    call may wait for a rank that does not come."""

    def __init__(self, explain: Explain) -> None:
        self.waiting: collections.deque = collections.deque()
        self.explain = explain
        # The thread that makes the calls, and another that makes one now.
        self.thread = self._helper = 0
        # The last call that was taken to be made.
        self._taken: _Done | None = None
        self._lock = threading.Lock()
        # Held by the thread that takes and makes a call, and runs its callbacks. It knows its owner, as a
        # Ctrl-C may come right behind its acquisition.
        self._turn = threading.RLock()
        self._bell = CallWakeup()
        self._calling = self._stops = False
        # Whether this is a copy in a forked child, which has no such thread.
        self.is_lost = False
        forks.renew_in_children(self)

    def forked(self) -> None:
        self.is_lost = True
        self.thread = self._helper = 0
        self._taken = None
        self.waiting.clear()
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]
        self._turn._at_fork_reinit()  # type: ignore[attr-defined]

    def check_here(self, done: _Done) -> None:
        """Refuses to wait in a forked child for a call that its parent has begun."""
        if self.is_lost and not done.is_set():
            raise forks.error("a call with async_op=True")

    def is_here(self) -> bool:
        """Whether this is the thread that makes the calls: it is in a callback, then."""
        return threading.get_ident() in (self.thread, self._helper)

    def put(self, item: Any) -> None:
        """Has the thread make a call, or end (None), after those that were put before. It is one step: behind
        it Ctrl-C leaves a call that is made."""
        try:
            self.waiting.append(item)
        finally:
            self._bell.ring()

    def newest(self) -> _Done | None:
        """The last call that was put. What waits is looked at before what was taken, as a call is in both
        places while it is taken."""
        waiting = self.waiting.copy()
        while waiting:
            item = waiting.pop()
            if item is not None:
                return item[0]._done
        return self._taken

    def make(self, work: HostWork, call: Callable[..., object], arguments: tuple[object, ...]) -> None:
        """Makes a call. Never comes back from one after which the thread was to stop."""
        try:
            with self._lock:
                self._calling = True
            # Nothing comes between these two, as the call is none of Python's own.
            work.is_begun = True
            call(*arguments)
        finally:
            with self._lock:
                self._calling = False
                stops = self._stops
            if stops:
                # The program is ending and no longer waits for this thread.
                threading.Event().wait()

    def serve(self) -> bool:
        """Waits for a call that nobody makes, and makes it and those behind it. Returns False once there will
        be no more."""
        self._bell.wait()
        with self._turn:
            if not self.waiting:
                # Another thread has made the call before its bell rang.
                self._bell.answer()
            while self.waiting:
                if not self._make_next():
                    return False
        return True

    def _make_next(self) -> bool:
        """Makes the next call, in the thread whose turn it is. Returns False if there will be no more. A call
        that Ctrl-C keeps from being made stays the next one."""
        item = self.waiting[0]
        if item is None:
            self.waiting.popleft()
            self._bell.answer()
            return False
        work, call, arguments, prepared = item
        is_answered = False
        self._taken = work._done
        try:
            self.waiting.popleft()
            self._bell.answer()
            is_answered = True
            work.run(call, arguments, prepared, self.explain)
        except BaseException:
            if not work.is_begun and not work.is_completed():
                if not self.waiting or self.waiting[0] is not item:
                    self.waiting.appendleft(item)
                if is_answered:
                    self._bell.ring()
            raise
        return True

    def help(self, done: _Done) -> None:
        """Makes calls in this thread up to the one that it waits for, as far as they were not begun. Those
        that somebody has a future of are left to the thread that runs callbacks, and so are those that go by
        way of copies."""
        if done.is_set() or self.is_here():
            return
        try:
            self._help(done)
        except BaseException:
            # Ctrl-C may have come while the turn was being given back.
            self._end_turn()
            raise

    def _help(self, done: _Done) -> None:
        try:
            if not self._turn.acquire(blocking=False):
                return
            self._helper = threading.get_ident()
            while not done.is_set() and self.waiting:
                item = self.waiting[0]
                if item is None or item[3] is not None or item[0].has_future():
                    break
                self._make_next()
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        if self._turn._is_owned():  # type: ignore[attr-defined]
            self._helper = 0
            self._turn.release()

    def advance(self, done: _Done) -> None:
        """Where this is a callback, which keeps the thread from its calls: makes the calls up to the one
        that is waited for."""
        if done.is_set() or not self.is_here():
            return
        ends = False
        while not done.is_set():
            ends |= not self._make_next()
        if ends:
            # `_work`, which this callback was called from, ends by it.
            self.put(None)

    def join(self) -> _Done | None:
        """Whatever this thread does next comes after all that was begun, and after the callbacks; in a
        callback, after the call that it follows, as it does already. Returns what was waited for."""
        if self.is_lost:
            raise forks.error()
        newest = self.newest()
        if newest is not None and not self.is_here():
            self.help(newest)
            newest.wait_for_callbacks()
        return newest

    def ends_with(self, waited: _Done | None) -> bool:
        """Whether nothing was begun since `join` began to wait, which returned this."""
        return self.newest() is waited

    def stop_after_call(self) -> bool:
        """Has the thread stop after the call that it is making. Returns whether it is making one."""
        with self._lock:
            self._stops = self._calling
            return self._stops


class Worker:
    """A thread that makes calls one after the other. It ends when its owner is gone."""

    def __init__(self, owner: object, explain: Explain = leave_as_it_is):
        self._queue = calls = _CallQueue(explain)
        # First what ends the thread: Ctrl-C may come behind its start.
        weakref.finalize(owner, calls.put, None)
        _end_all_at_exit()
        name = "symmpool collectives"
        self._thread = threading.Thread(target=_work, args=(calls,), name=name, daemon=True)
        _running[self._thread] = calls
        self._thread.start()
        calls.thread = self._thread.ident or 0

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def order(self) -> _CallQueue:
        """Object that `join`s the calls that were begun. Not one's work: its error keeps the frames that it
        came through, and what is in them, often the group. And not one call alone: calls of a callback do not
        come behind what was begun before."""
        return self._queue

    def submit(
        self,
        call: Callable[..., object],
        arguments: tuple[object, ...],
        results: list[Tensor],
        prepared: Prepared | None = None,
        entry: CommunicatorEntry | None = None,
    ) -> HostWork:
        """Has the thread make a call. Calls that `entry` makes later come behind it."""
        calls = self._queue
        if calls.is_lost:
            raise forks.error()
        if not self.is_alive():
            raise InvalidStateError("symmpool: a call with async_op=True is begun while the program ends")
        work = HostWork(results, calls)
        if calls.is_here():
            # A callback may wait for its calls, so they are made at once: it keeps the thread until it
            # returns.
            work.run(call, arguments, prepared, calls.explain)
        elif entry is None:
            calls.put((work, call, arguments, prepared))
        else:
            # Later calls are ordered before the call is queued: Ctrl-C may come in between. Nobody finds the
            # queue empty meanwhile.
            with entry.lock:
                entry.begun += 1
                entry.pending = calls
                calls.put((work, call, arguments, prepared))
        return work


# Threads that may be making calls, and their queues, by which they are ended.
_running: weakref.WeakKeyDictionary[threading.Thread, _CallQueue]
_running = weakref.WeakKeyDictionary()


@functools.cache
def _end_all_at_exit() -> None:
    """Called with the first thread, not before: functions that are registered last run first, and those that
    torch has registered until then may take away what a call still uses."""
    atexit.register(_end_all)


def _end_all() -> None:
    """A thread that comes back to a finished interpreter is ended where it is, in the middle of torch's code,
    which aborts the process. So threads end before that, after the callbacks that they are in. One that waits
    for a rank that does not come is given up: it never returns from that call."""
    running: list[Any] = []
    while not running and _running:
        # A thread of the program may begin to make calls meanwhile.
        with contextlib.suppress(RuntimeError):
            running = list(_running.items())
    for _, calls in running:
        calls.put(None)
    end = time.monotonic() + 2
    for thread, calls in running:
        if thread.ident is None:
            continue  # Ctrl-C came before its start
        thread.join(max(end - time.monotonic(), 0))
        while thread.is_alive() and not calls.stop_after_call():
            thread.join(0.01)


def _work(calls: _CallQueue) -> None:
    # `serve` makes one call: locals of this loop would keep a call's tensors until the next call.
    while calls.serve():
        pass
