"""torch's allocations in a pool's memory: what `with pool:` does.

A scope is a `torch.cuda.MemPool` whose segments come from the pool's first lane. torch cuts them up
by itself, by size and address; addresses order as offsets do, which are the same on every rank, so
equal programs get equal places (docs/decisions/mempool.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from symmpool import _symmpool
from symmpool.errors import Error, InvalidArgumentError, InvalidStateError, UnsupportedError
from symmpool.memory import install

if TYPE_CHECKING:
    from types import ModuleType

    import torch

# torch keeps a pointer to the allocator of a segment, without owning it, for as long as a tensor lives in the
# segment, which may be longer than the MemPool lives. So an allocator is never freed; there is one for each
# slot.
_allocators: dict[int, Any] = {}

# Pools that became due while a graph was being captured.
_postponed: list[Any] = []

# `scopes` of a thread, the innermost last.
_threads = threading.local()


def _allocator(torch: ModuleType, slot: _symmpool.Slot) -> Any:
    """torch's allocator on the functions of a slot."""
    if slot.index not in _allocators:
        names, library = slot.names, _symmpool.__file__
        found = ctypes.cast(getattr(ctypes.CDLL(library), names[0]), ctypes.c_void_p).value
        if found != slot.addresses[0]:
            raise UnsupportedError(
                f"{library} is not the library that this process has imported; was it replaced "
                "since? Start the program again"
            )
        _allocators[slot.index] = torch.cuda.memory.CUDAPluggableAllocator(library, *names)
    return _allocators[slot.index]


def _steps_of(manager: Any) -> Callable[..., Iterator[None]]:
    """A context manager of torch's as an iterator: its first step enters, the next one leaves. The
    generator that most are made of is one, and takes half the time without the object around it."""
    made_of = getattr(manager, "__wrapped__", None) if inspect.isfunction(manager) else None
    if inspect.isgeneratorfunction(made_of):
        return made_of

    def steps(*arguments: object) -> Iterator[None]:
        with manager(*arguments):
            yield

    return steps


# The calls that `torch.cuda.use_mem_pool` is made of, and the other names in it.
_CALLS = ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool")
_OTHER_NAMES = {"torch", "cuda", "current_device", "_get_device_index", "id"}
# Names of what torch 2.15 does in a capture: it has the graph keep the MemPool.
_IN_CAPTURES = {"is_current_stream_capturing", "CUDAGraph", "get_currently_capturing_graph", "_retain_pool"}


def _names_in(manager: Any) -> set[str]:
    """The names that torch's context manager uses; empty where it is no function."""
    made_of = getattr(manager, "__wrapped__", None)
    return set(getattr(getattr(made_of, "__code__", None), "co_names", ()))


def _calls_of(torch: ModuleType) -> tuple[Callable[..., None], ...] | None:
    """torch's functions that begin a MemPool's scope, end it and let go of the MemPool. Each takes a device's
    number and a MemPool's id. None where this torch's `use_mem_pool` is made of anything else."""
    manager = torch.cuda.use_mem_pool
    if _names_in(manager) - _OTHER_NAMES - _IN_CAPTURES != set(_CALLS):
        return None
    return tuple(manager.__wrapped__.__globals__[name] for name in _CALLS)


def _use_of(
    torch: ModuleType, device: int, mempool: torch.cuda.MemPool
) -> Callable[[], Callable[[], object]]:
    """A function after which this thread allocates in a MemPool. It returns the one that ends this."""
    calls, steps = _calls_of(torch), _steps_of(torch.cuda.use_mem_pool)

    def use() -> Callable[[], object]:
        context = steps(mempool, device)
        next(context)
        return lambda: next(context, None)

    if calls is None:
        return use

    # FSDP comes here some thirty times a step, and torch's context manager takes half of the time.
    (begin, end, release), id = calls, mempool.id

    def leave() -> None:
        end(device, id)
        release(device, id)

    def enter() -> Callable[[], object]:
        begin(device, id)
        return leave

    if not _names_in(torch.cuda.use_mem_pool) & _IN_CAPTURES:
        return enter
    is_capturing = torch.cuda.is_current_stream_capturing
    return lambda: use() if is_capturing() else enter()


class Scope:
    """Parts that a pool needs so that torch allocates in it. Made at its first `with`."""

    # Attributes go in this order: torch gives its cached segments back before the slot closes.
    __slots__ = ("_use", "_mempool", "_slot", "_torch", "_device")

    def __init__(self, pool: _symmpool.Pool, torch: Any = None):
        device = pool.device
        if torch is None:
            if not device.startswith("cuda:"):
                raise UnsupportedError(
                    f"with pool: this pool's memory is on {device}, and torch lets nobody choose "
                    "where tensors on the CPU lie; make them with pool.empty() or pool.zeros()"
                )
            import torch
        self._torch = torch
        self._device = int(device.partition(":")[2] or 0)
        self._slot = _symmpool.Slot(pool)
        self._mempool: Any = None
        if install.is_installed():
            # No MemPool: every allocation comes to us, and goes to the pool by itself.
            return
        with torch.cuda.device(self._device):
            self._mempool = torch.cuda.MemPool(_allocator(torch, self._slot).allocator())
        self._use = _use_of(torch, self._device, self._mempool)

    @property
    def mempool(self) -> torch.cuda.MemPool:
        """The torch.cuda.MemPool; None under `symmpool.install()`, which needs none."""
        return self._mempool

    @property
    def slot(self) -> _symmpool.Slot:
        """The slot its segments come through."""
        return self._slot

    def enter(self) -> None:
        """This thread's allocations go to the pool from now on."""
        try:
            scopes = _threads.scopes
        except AttributeError:
            scopes = _threads.scopes = []
        if self._mempool is None:
            context = _symmpool.process_redirect(self._slot)
        elif scopes and self._is_within(scopes):
            context = None  # they do already, and torch enters a MemPool once
        else:
            context = self._use()
        scopes.append((self, context))

    def _is_within(self, scopes: list[tuple[Scope, Any]]) -> bool:
        """Whether this scope is the innermost."""
        if scopes[-1][0] is self:
            return True
        if any(scope is self for scope, _ in scopes):
            raise InvalidStateError(
                "with pool: this thread is in this pool's scope already, and in another pool's since; "
                "torch does not go back to a MemPool within another. Leave the inner scope first"
            )
        return False

    def leave(
        self,
        pool: _symmpool.Pool,
        kind: type[BaseException] | None,
        value: BaseException | None,
        settles: bool = True,
    ) -> None:
        """They go where they went before. Commits if that is due, and `settles`: who leaves alone, to
        enter again, does not. Scopes are left in the thread that entered them, the innermost first;
        otherwise nothing is changed."""
        scopes = getattr(_threads, "scopes", None)
        if not scopes or scopes[-1][0] is not self:
            self._refuse_to_leave(pool, scopes or ())
        context = scopes.pop()[1]
        if self._mempool is None:
            _symmpool.process_redirect_back(context)
        elif context is not None:
            context()
        if settles and (kind is not None or pool.is_commit_due):
            self._settle(pool, kind, value)

    def _refuse_to_leave(self, pool: _symmpool.Pool, scopes: Any) -> NoReturn:
        if not any(scope is self for scope, _ in scopes):
            raise InvalidStateError(
                f"with pool: this thread is not in the scope of {pool!r}; leave it once for each time "
                "that it was entered, in the thread that entered it"
            )
        raise InvalidStateError(
            f"with pool: the scope of {pool!r} has another pool's within, which this thread entered "
            "later; leave that first"
        )

    def _settle(self, pool: _symmpool.Pool, kind: type[BaseException] | None, value: Any) -> None:
        if kind is None:
            if self._torch.cuda.is_current_stream_capturing():
                _postponed.append(pool)
            else:
                pool.commit()
            return
        reason = self._slot.take_failure()
        if reason is not None:
            _add_note(value, str(reason))
        # A rank that is to stop at once (KeyboardInterrupt, SystemExit) waits for no other: they see that it
        # is gone. Otherwise the others are in the due commit, or will be, and learn there what failed.
        if issubclass(kind, Exception) and pool.is_commit_due:
            if self._torch.cuda.is_current_stream_capturing():
                _postponed.append(pool)
                return
            try:
                pool.commit()
            except Error as error:
                _add_note(value, f"and the commit on leaving the pool's scope: {error}")


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)


def commit_postponed() -> None:
    """Commits the pools whose scopes were left while a graph was being captured and that are still
    due. Collective, as `Pool.commit`. Call it after the capture and before the graph first runs;
    `symmpool.graph` does. All pools are tried; the first error is raised."""
    first = None
    pools, _postponed[:] = _postponed[:], []
    try:
        while pools:
            pool = pools[0]
            try:
                if pool.is_commit_due:
                    pool.commit()
            except Exception as error:
                if first is None:
                    first = error
                else:
                    _add_note(first, f"and the commit of {pool!r}: {error}")
            pools.pop(0)
    finally:
        # Pools that Ctrl-C has kept from their commit are for the next time.
        _postponed[:0] = pools
    if first is not None:
        raise first


@contextlib.contextmanager
def graph(*arguments: Any, **options: Any):
    """Captures like `torch.cuda.graph`, with the same arguments; pools that grew during the capture are
    committed when it has ended, so that the graph can run at once. A capture that fails ends in these
    commits too, so that the other ranks do not wait in vain, but not by KeyboardInterrupt or
    SystemExit."""
    import torch

    try:
        with torch.cuda.graph(*arguments, **options):
            yield
    except Exception as error:
        try:
            commit_postponed()
        except Error as later:
            _add_note(error, f"and the commit after the capture: {later}")
        raise
    commit_postponed()


def use_pool(pool: _symmpool.Pool) -> _symmpool.Pool:
    """`with symmpool.use_pool(pool):` is `with pool:`.

    What this thread allocates on the pool's device with torch inside lies in the pool's memory, at
    the same offset on every rank that does the same. Scopes of one pool may lie within each other, but
    for one thread at a time: torch has a MemPool in one thread's hands. Scopes are left in the reverse of
    the order in which they were entered. On leaving, a commit happens if one is due, as a rule when the
    pool has grown; while a graph is being captured it is postponed until `symmpool.graph` ends the
    capture, or the next commit. It happens on leaving by an exception
    too, so that the other ranks do not wait in vain, but not by KeyboardInterrupt or SystemExit."""
    if not isinstance(pool, _symmpool.Pool):
        raise InvalidArgumentError(f"use_pool: {pool!r} is no pool")
    return pool
