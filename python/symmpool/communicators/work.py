"""What a collective with `async_op=True` gives back.

On the CPU a thread makes such calls one after the other, and is the one that runs the callbacks of
their futures, so these may make calls themselves. A callback's calls come right behind the call that it
follows, before any that was begun since: they are made as they are begun. Where a future is done
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
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from symmpool.errors import InvalidStateError, TimeoutError

# Has an error say more of the call.
Explain = Callable[[Exception], None]
# Puts the results of a call where they belong. Part of the call: nobody need ask how that went.
Finish = Callable[[], None]


def _as_it_is(error: Exception) -> None:
    pass


class Work:
    """A collective under way. The same questions as torch.distributed's Work answers."""

    __slots__ = ("_results", "_future")

    def __init__(self, results: list[Any]):
        self._results = results
        self._future = None

    def wait(self, timeout: float | None = None) -> bool:
        """On the CPU, waits until the call is done, and raises what went wrong in it; at most
        `timeout` seconds (a number, or a timedelta), then TimeoutError. On CUDA, makes the current
        stream wait and returns at once; with a timeout, this thread waits too. True."""
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Whether it is done, well or not. Does not wait."""
        raise NotImplementedError

    def is_success(self) -> bool:
        """Whether it is done, and nothing went wrong."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What went wrong, as far as is known."""
        raise NotImplementedError

    def precede(self) -> None:
        """Whatever this thread, or the current stream, does next comes after the call."""
        raise NotImplementedError

    @property
    def turn(self) -> Any:
        """What has `precede`, for those who do not ask how the call went."""
        return self

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def result(self) -> list[Any]:
        """The tensors that hold results, once the call is done."""
        self.wait()
        return self._results

    def get_future(self) -> Any:
        """A torch.futures.Future of the tensors that hold results."""
        raise NotImplementedError


def _seconds(timeout: Any) -> float | None:
    """torch writes "however long it takes" as no time at all."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if hasattr(timeout, "total_seconds") else float(timeout)
    return seconds if seconds > 0 else None


class _Done:
    """That a call is done, for any number of threads that wait for it. A bare lock, as an Event's queue of
    those who wait adds a third to what the way to the other thread and back takes."""

    __slots__ = ("_held", "_is_set", "told")

    def __init__(self) -> None:
        self._held = threading.Lock()
        self._held.acquire()
        self._is_set = False
        # That callbacks have run too, in the thread that made the call: where a future was asked for before.
        self.told: threading.Event | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Once, by who has made the call."""
        self._is_set = True
        self._held.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is set by then."""
        if self._is_set:
            return True
        if self._held.acquire(timeout=-1 if timeout is None else timeout):
            # Others wait for it as well.
            self._held.release()
        return self._is_set

    def wait_for_callbacks(self) -> None:
        self.wait()
        if self.told is not None:
            self.told.wait()


class HostWork(Work):
    """A call that a thread makes."""

    __slots__ = ("_line", "_done", "_error", "_lock")

    def __init__(self, results: list[Any], line: _Line):
        super().__init__(results)
        self._line = line
        self._done = _Done()
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def run(
        self,
        call: Any,
        arguments: tuple[Any, ...],
        finish: Finish | None,
        explain: Explain,
    ) -> None:
        try:
            self._line.make(call, arguments)
            if finish is not None:
                finish()
        except Exception as error:
            explain(error)
            self._error = error
        self._end()

    def _end(self) -> None:
        """Lets go of who waits, and tells the future, if somebody has it."""
        with self._lock:
            self._done.set()
            # Who asks for a future from now on tells it, too.
            told = self._done.told
        if told is not None:
            try:
                self._tell()
            finally:
                told.set()

    def wait(self, timeout: Any = None) -> bool:
        self._line.advance(self._done)
        if not self._done.wait(_seconds(timeout)):
            raise TimeoutError(f"symmpool: a collective is not done after {timeout}")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def exception(self) -> Exception | None:
        return self._error

    def precede(self) -> None:
        self._line.advance(self._done)
        self._done.wait()

    @property
    def turn(self) -> _Line:
        # Not the work: an error keeps the frames that it came through, and what is in them: the group,
        # often. And not this call's: a callback's calls do not come behind what was begun before.
        return self._line

    def get_future(self) -> Any:
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = _future_class()(self._line, self._done)
            if not self._done.is_set():
                # The thread that makes the call will tell it.
                self._done.told = threading.Event()
                return self._future
        self._tell()
        return self._future

    def _tell(self) -> None:
        if self._error is not None:
            self._future.set_exception(self._error)
        else:
            self._future.set_result(self._results)


@functools.cache
def _future_class() -> Any:
    import torch

    class Future(torch.futures.Future):
        """A future that a callback can wait for: the thread that it keeps makes the call first."""

        def __init__(self, line: _Line, done: _Done):
            super().__init__()
            self._line, self._done = line, done

        def wait(self) -> Any:
            self._line.advance(self._done)
            return super().wait()

    return Future


class DoneWork(Work):
    """A call that was done, or put on the current stream, before it returned."""

    __slots__ = ()

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> Exception | None:
        return None

    def precede(self) -> None:
        pass

    def get_future(self) -> Any:
        if self._future is None:
            import torch

            devices = [each.device for each in self._results[:1] if each.is_cuda]
            self._future = torch.futures.Future(devices=devices or None)
            self._future.set_result(self._results)
        return self._future


class _Line:
    """Calls that wait for a thread, and whether one is being made: a call may wait for a rank that does
    not come, whatever else the thread does will end."""

    def __init__(self, explain: Explain) -> None:
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        self.explain = explain
        # The thread that makes the calls, and the last one begun by another.
        self.thread = 0
        self.last: _Done | None = None
        self._lock = threading.Lock()
        self._calling = self._given_up = False

    def is_here(self) -> bool:
        """Whether this is the thread that makes the calls: it is in a callback, then."""
        return threading.get_ident() == self.thread

    def make(self, call: Any, arguments: tuple[Any, ...]) -> None:
        """Makes a call. Never comes back from one that was given up."""
        with self._lock:
            self._calling = True
        try:
            call(*arguments)
        finally:
            with self._lock:
                self._calling = False
                given_up = self._given_up
            if given_up:
                # The program is ending and waits for this thread no more.
                threading.Event().wait()

    def make_next(self) -> bool:
        """Makes a call, when there is one. False once there are to be no more."""
        item = self.calls.get()
        if item is None:
            return False
        work, call, arguments, finish = item
        work.run(call, arguments, finish, self.explain)
        return True

    def advance(self, done: _Done) -> None:
        """If this is a callback, which keeps the thread from the calls that wait for it: makes those
        up to one that is waited for."""
        if done.is_set() or not self.is_here():
            return
        ends = False
        while not done.is_set():
            ends |= not self.make_next()
        if ends:
            # For `_work`, which this callback was called from: it ends, then.
            self.calls.put(None)

    def precede(self) -> None:
        """Whatever this thread does next comes after all that was begun, and after the callbacks; in a
        callback, after the call that it follows, as it does already."""
        last = self.last
        if last is not None and not self.is_here():
            last.wait_for_callbacks()

    def give_up(self) -> bool:
        """Has the thread stop behind the call that it is making, if it is making one."""
        with self._lock:
            self._given_up = self._calling
            return self._given_up


class Worker:
    """A thread that makes calls one after the other. It ends when its owner is gone."""

    def __init__(self, owner: Any, explain: Explain = _as_it_is):
        self._line = line = _Line(explain)
        name = "symmpool collectives"
        self._thread = threading.Thread(target=_work, args=(line,), name=name, daemon=True)
        self._thread.start()
        line.thread = self._thread.ident or 0
        _end_all_at_exit()
        _running[self._thread] = line
        weakref.finalize(owner, line.calls.put, None)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(
        self,
        call: Any,
        arguments: tuple[Any, ...],
        results: list[Any],
        finish: Finish | None = None,
    ) -> HostWork:
        if not self.is_alive():
            raise InvalidStateError(
                "a communicator of another process is used in one forked from it; make a group, and "
                "what is needed on it, after the fork"
            )
        line = self._line
        work = HostWork(results, line)
        if line.is_here():
            # In a callback: nobody else would make it, for as long as the callback waits for it.
            work.run(call, arguments, finish, line.explain)
        else:
            line.last = work._done
            line.calls.put((work, call, arguments, finish))
        return work


# Threads that may be at work, and what ends them.
_running: weakref.WeakKeyDictionary[threading.Thread, _Line]
_running = weakref.WeakKeyDictionary()


@functools.cache
def _end_all_at_exit() -> None:
    """With the first thread, not before: what is registered last runs first, and what torch has
    registered until then may take away what a call still uses."""
    atexit.register(_end_all)


def _end_all() -> None:
    """A thread that comes back to a finished interpreter is ended where it stands, in the middle of
    torch's code, which ends the process. So they end before, with the callbacks of futures that they
    are in; but for those that wait for a rank that does not come, who do not come back."""
    running = list(_running.items())
    for _, line in running:
        line.calls.put(None)
    end = time.monotonic() + 2
    for thread, line in running:
        thread.join(max(end - time.monotonic(), 0))
        while thread.is_alive() and not line.give_up():
            thread.join(0.01)


def _work(line: _Line) -> None:
    # Tensors are not kept until the next call comes.
    while line.make_next():
        pass


class StreamWork(Work):
    """A call on a stream of its own. One that is captured in a graph is done as far as its Work tells:
    how often it runs, and when, is known to whoever launches the graph."""

    __slots__ = ("_comm", "_side", "_mark", "_explain", "_drain", "_captured")

    def __init__(
        self,
        comm: Any,
        side: Any,
        mark: Any,
        results: list[Any],
        explain: Explain,
        drain: Callable[[], None],
        captured: bool = False,
    ):
        self._results, self._future = results, None
        self._captured = captured
        self._comm, self._side, self._mark, self._explain = comm, side, mark, explain
        self._drain = drain

    def wait(self, timeout: Any = None) -> bool:
        self.precede()
        seconds = _seconds(timeout)
        self._drain()
        if seconds is not None and not self._captured:
            end = time.monotonic() + seconds
            while not self._mark.query():
                if time.monotonic() > end:
                    raise TimeoutError(f"symmpool: a collective is not done after {timeout}")
                time.sleep(20e-6)
        failure = self.exception()
        if failure is not None:
            raise failure
        return True

    def is_completed(self) -> bool:
        return self._captured or self._mark.query() or self._comm.failure is not None

    def __del__(self) -> None:
        # With it goes what calls used that are done: nobody may come to ask for another.
        self._drain()

    def exception(self) -> Exception | None:
        failure = self._comm.failure
        if failure is not None:
            self._explain(failure)
        return failure

    def precede(self) -> None:
        self._mark.wait()

    def get_future(self) -> Any:
        if self._future is None:
            # The future takes the current stream's place in time: what it says waits for the call.
            import torch

            with torch.cuda.stream(self._side):
                self._future = torch.futures.Future(devices=[self._side.device])
                self._future.set_result(self._results)
        return self._future


class Side:
    """A stream for calls with `async_op`, and the tensors that they still use."""

    def __init__(self, torch: Any, device: int, explain: Explain = _as_it_is):
        self._torch, self._explain = torch, explain
        self._stream = torch.cuda.Stream(device)
        self.handle = self._stream.cuda_stream
        self._capturing = torch.cuda.is_current_stream_capturing
        self._kept: collections.deque[Any] = collections.deque()
        # The mark of the last call outside of graphs, for captures, which cannot come behind it.
        self._last: Any = None
        # What is let go of may be another call's Work, which drains as well.
        self._draining = threading.RLock()

    def submit(
        self,
        comm: Any,
        call: Any,
        arguments: tuple[Any, ...],
        results: list[Any],
        finish: Finish | None = None,
    ) -> StreamWork:
        # Marks, not torch's streams and events: those cost the host more than the call itself.
        handle, kept = self.handle, self._kept
        capturing = self._capturing()
        if capturing and self._last is not None:
            # An error, before anything is captured, if that call is not done.
            self._last.wait()
            self._last = None
        comm.follow(handle)
        call(*arguments, stream=handle)
        if finish is not None:
            with self._torch.cuda.stream(self._stream):
                finish()
            # Written to as well, there.
            arguments = (*arguments, *results)
        mark = comm.mark(handle)
        # Whoever lets go of a tensor before the call is done does not free its memory.
        if capturing:
            # What a graph's events have to say is known to the graph alone.
            for tensor in arguments:
                if isinstance(tensor, self._torch.Tensor):
                    tensor.record_stream(self._stream)
        else:
            self._drain()
            kept.append((mark, arguments))
            self._last = mark
        return StreamWork(comm, self._stream, mark, results, self._explain, self._drain, capturing)

    def _drain(self) -> None:
        """Lets go of what calls used that are done."""
        kept = self._kept
        with self._draining:
            while kept and kept[0][0].query():
                kept.popleft()
