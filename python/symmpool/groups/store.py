"""A store of torch.distributed, or one with its methods, as the allocator's rendezvous uses it.

Keys lie under `symmpool/RUN/`, where RUN counts the groups of a name that a rank has made on the store, so
that what an earlier one left is not taken for a part of a later one. (Two ranks that use one number
have different runs, so they never meet: each finds that the other ranks are missing.) A gather costs two
round trips with a TCPStore, as setting waits for no answer: the number of waiting ranks changes nothing.
A part is removed two gathers later, when every rank must have read it, and while parts of others are on
their way.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from symmpool.errors import DivergedError, Error, PeerLostError, TimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed

# How long a blocking call of a store may last, in seconds: Python handles Ctrl-C between two of them.
SLICE = 1.0
# A rank that does not wait in the store itself asks again after these, in seconds.
FIRST_PAUSE, LONGEST_PAUSE = 20e-6, 5e-3
# One that has waited in a store for a slice in vain asks again after this at most: torch warns of every
# slice that ends so.
LATE_PAUSE = 50e-3
# Threads that are to stop waiting, by their numbers: the program is ending.
stopped_threads: set[int] = set()
# Bytes of a part before its value: the world that its rank knows.
HEADER = 4


_Found = TypeVar("_Found")


class RunOfStore:
    """A store, for a rank that knows which run of it this is: it asks the store less often."""

    def __init__(self, store: torch.distributed.Store, rank: int, run: int | str):
        self.store, self.rank, self.run = store, rank, run


class StoreAdapter:
    """A store with the methods that the binding calls. Values are bytes, times are seconds."""

    def __init__(
        self,
        store: torch.distributed.Store | RunOfStore,
        runs: dict[int, int | str] | None = None,
        name: str | None = None,
    ):
        """With `runs`, several objects take part in the same ones. `name` is that of the group that gathers
        here; without one, runs are counted by their first key."""
        self._name = name
        # Which run of a rank this is; a rank of a group takes part under one number.
        self._runs = {} if runs is None else runs
        self._knows_run = isinstance(store, RunOfStore)
        if isinstance(store, RunOfStore):
            self._runs, store = {store.rank: store.run}, store.store
        for name in ("set", "get", "add", "check", "delete_key"):
            if not callable(getattr(store, name, None)):
                from symmpool.errors import InvalidArgumentError

                raise InvalidArgumentError(
                    f"store: {store!r} has no method {name}; a torch.distributed.Store is needed"
                )
        self._store = store
        below = tcp_below(store)
        self._waits_by_itself = below is not None
        self._connections = None if below is None else _connections_of(below)
        # Prefix of keys on a connection of the store below, in place of this store's own prefix.
        self._prefix = None if below is None or below is not store else ""
        self._met = False
        # The last parts of each sequence of gathers, two at most.
        self._last: dict[str, list[str]] = {}

    def _here(self) -> torch.distributed.Store:
        """This thread's handle of the store: a blocking call holds up those that share its own."""
        return self._store if self._connections is None else self._connections.here()

    def _key(self, key: str) -> str:
        if self._connections is None:
            return f"symmpool/{key}"
        if self._prefix is None:
            self._prefix = _prefix_of(self._store)
        return f"{self._prefix}symmpool/{key}"

    def _run_key(self, key: str, rank: int) -> str:
        """Key that counts this rank's runs, which begin with a gather of `key`."""
        return self._key(f"{key if self._name is None else self._name}/run/{rank}")

    def set(self, key: str, value: bytes, seconds: float) -> None:
        """Writes a value. torch's store has a timeout of its own, so `seconds` is not used."""
        self._call(self._here().set, self._key(key), bytes(value))

    def get(self, key: str, seconds: float) -> bytes:
        """A key's value, for which it waits up to `seconds`. Raises TimeoutError."""
        store, place = self._here(), self._key(key)
        self._wait(store, [place], seconds)
        return self._call(store.get, place)

    def add(self, key: str, delta: int, seconds: float) -> int:
        """Adds to a counter, which is 0 at first; returns the sum."""
        return self._call(self._here().add, self._key(key), delta)

    def delete(self, key: str, seconds: float) -> bool:
        """Removes a key; returns whether there was one."""
        return self._call(self._here().delete_key, self._key(key))

    def all_gather(
        self, key: str, rank: int, world: int, value: bytes, seconds: float, waited: float = 0.0
    ) -> list[bytes]:
        """All ranks' values by rank, for which it waits up to `seconds`. Raises TimeoutError, PeerLostError
        or DivergedError with the ranks that are missing, gone or of another world."""
        if world == 1:
            return [value]
        try:
            return self._all_gather(key, rank, world, value, seconds, waited)
        except PeerLostError as error:
            if rank > 0 and _is_served_by_rank_0(self._store, world):
                error.ranks = (0,)
            raise

    def announce(self, key: str, rank: int, world: int, value: bytes) -> None:
        """Does what a gather does before it waits. `all_gather` does that again, and waits."""
        self._publish(self._here(), key, rank, world, value)

    def has_parts(self, key: str, rank: int, ranks: list[int]) -> bool:
        """Whether one of these ranks has its part of a gather here. `rank` is this one, whose run is
        known."""
        store, prefix = self._here(), self._key(f"{self._runs[rank]}/{key}")
        return any(self._call(store.check, [f"{prefix}/{peer}"]) for peer in ranks)

    def _publish(self, store: torch.distributed.Store, key: str, rank: int, world: int, value: bytes) -> str:
        """Publishes this rank's part of a gather, and returns what keys of all parts begin with."""
        run = self._runs.get(rank)
        if run is None:
            run = self._runs[rank] = self._call(store.add, self._run_key(key, rank), 1)
        prefix = self._key(f"{run}/{key}")
        self._call(store.set, f"{prefix}/{rank}", world.to_bytes(HEADER, "little") + value)
        return prefix

    def _all_gather(
        self, key: str, rank: int, world: int, value: bytes, seconds: float, waited: float = 0.0
    ) -> list[bytes]:
        """`waited` is for how long this rank has waited in vain before, elsewhere."""
        store = self._here()
        sequence = key.rpartition("/")[0].rpartition("/")[0]
        prefix = self._publish(store, key, rank, world, value)
        own = f"{prefix}/{rank}"
        last = self._last.setdefault(sequence, [])
        if len(last) > 1:
            # Every rank came to the last gather, so has read all of the one before.
            self._call(store.delete_key, last.pop(0))
        keys = [f"{prefix}/{peer}" for peer in range(world)]
        began = time.time()
        try:
            parts = self._read(store, keys, seconds)
        except TimeoutError:
            absent = [peer for peer, key in enumerate(keys) if not self._call(store.check, [key])]
            # Those who came and waited in vain did so because of the others, who are to be named.
            others = [peer for peer in absent if peer != rank]
            never = [
                peer for peer in others if not self._has_left(store, keys[peer], began - seconds - waited)
            ]
            if rank not in absent:
                self._call(store.set, f"{own}/left", repr(time.time()).encode())
                # Else a second try would hand this part to those who come before the new one.
                self._call(store.delete_key, own)
            if not self._met and not self._knows_run:
                # Nobody met in this run: a new try, also of another object, begins it again.
                self._call(store.add, self._run_key(key, rank), -1)
                del self._runs[rank]
            error = TimeoutError(f"rank {rank} of {world} waited in the store")
            error.ranks = tuple(never or others)
            raise error from None
        for peer, part in enumerate(parts):
            theirs = int.from_bytes(part[:HEADER], "little")
            if theirs != world:
                differs = DivergedError(f"rank {peer}'s world has {theirs} ranks, rank {rank}'s {world}")
                differs.ranks = (peer,)
                raise differs
        self._met = True
        last.append(own)
        return [part[HEADER:] for part in parts]

    def _has_left(self, store: torch.distributed.Store, key: str, since: float) -> bool:
        """Whether the rank with this part waited in vain, and gave up after that time: what an earlier try
        has left behind says nothing of this one."""
        key = f"{key}/left"
        return self._call(store.check, [key]) and float(self._call(store.get, key)) >= since

    def _read(self, store: torch.distributed.Store, keys: list[str], seconds: float) -> list[bytes]:
        """The values of keys, once all are there."""
        if not (self._waits_by_itself and _has_extended(store)):
            self._wait(store, keys, seconds)
            return [self._call(store.get, key) for key in keys]
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            store.set_timeout(timedelta(seconds=min(max(left, 0.001), SLICE)))
            try:
                return self._call(store.multi_get, keys)
            except TimeoutError:
                if left <= SLICE:
                    raise
            self._wait(store, keys, end - time.monotonic(), LATE_PAUSE)

    def _wait(
        self, store: torch.distributed.Store, keys: list[str], seconds: float, longest: float = LONGEST_PAUSE
    ) -> None:
        """Asks whether keys are there, until they are. Sleeps between, where Python handles Ctrl-C."""
        end = time.monotonic() + seconds
        pause = FIRST_PAUSE
        while not self._call(store.check, keys):
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError("waiting in the store")
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, longest)

    @staticmethod
    def _call(function: Callable[..., _Found], *arguments: object) -> _Found:
        """A call of the store, with our exceptions."""
        if stopped_threads and threading.get_ident() in stopped_threads:
            raise TimeoutError("the program is ending")
        try:
            return function(*arguments)
        except Error:
            raise
        except Exception as error:
            name = type(error).__name__
            text = f"{name}: {str(error).partition(chr(10))[0]}"
            if isinstance(error, ConnectionError) or name == "DistNetworkError":
                raise PeerLostError(f"the process that serves the store is gone ({text})") from error
            if "timeout" in str(error).lower() or "timed out" in str(error).lower():
                raise TimeoutError(text) from error
            raise Error(text) from error


# Prefixes that stand for stores' own, by store.
_prefixes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
# Where a store keeps it.
_PREFIX = "symmpool/prefix"


def _prefix_of(store: torch.distributed.Store) -> str:
    """Returns the prefix of a store's keys on a connection of the store below it. Torch does not say what a
    store with a prefix puts before keys. So the first to ask makes another prefix up, which the store
    keeps."""
    found = _prefixes.get(store)
    if found is None:
        own = f"symmpool/{secrets.token_hex(8)}/"
        kept = StoreAdapter._call(store.compare_set, _PREFIX, "", own)
        found = kept.decode() if isinstance(kept, bytes) else kept
        _prefixes[store] = found
    return found


def tcp_below(store: object) -> torch.distributed.TCPStore | None:
    """The connection to a server that a store is, below its prefixes; None if it is none."""
    try:
        from torch.distributed import PrefixStore, TCPStore
    except ImportError:
        return None
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) and callable(getattr(store, "clone", None)) else None


def _is_served_by_rank_0(store: Any, world: int) -> bool:
    """Whether a store is served by the process of rank 0 of a group of so many ranks, as far as is known
    here: by that of the default group, which has made its own store, where the group has all its ranks."""
    below = tcp_below(store)
    if below is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return False
    from torch import distributed

    if not distributed.is_initialized() or distributed.get_world_size() != world:
        return False
    default = tcp_below(distributed.distributed_c10d._get_default_store())
    return default is not None and (default.host, default.port) == (below.host, below.port)


def own_connection(store: torch.distributed.Store) -> torch.distributed.Store:
    """A store by a connection of its own, where it is one to a server: who waits for a key in a store has
    its connection, and nobody else in the process says or asks anything there meanwhile."""
    # Torch's stores on a server have it, which its stubs do not say.
    return store.clone() if tcp_below(store) is not None else store  # type: ignore[attr-defined]


class _Connections:
    """A store's connections to its server, one for each thread that calls."""

    def __init__(self, store: torch.distributed.Store):
        self._store = store
        self._own = threading.local()

    def here(self) -> torch.distributed.Store:
        own = self._own
        try:
            return own.store
        except AttributeError:
            own.store = StoreAdapter._call(self._store.clone)  # type: ignore[attr-defined]
            return own.store

    def forget(self) -> None:
        self._own = threading.local()


# Entries by the store's id, which is its own for as long as its connections are there: all groups that meet
# in a store share them, under prefixes of their own. Each connection is a thing to wait for: torch has the
# name server say who is at its ends, which takes seconds where that is slow. Each is a descriptor, too.
# References without callbacks: a Ctrl-C that comes while one runs is lost, and adapters go where it is to be
# raised.
_connections: dict[int, weakref.ref[_Connections]] = {}
_lock = threading.Lock()


def _connections_of(store: torch.distributed.Store) -> _Connections:
    with _lock:
        for each in [each for each, kept in _connections.items() if kept() is None]:
            del _connections[each]
        kept = _connections.get(id(store))
        found = kept() if kept is not None else None
        if found is None:
            found = _Connections(store)
            _connections[id(store)] = weakref.ref(found)
        return found


def _forked() -> None:
    """In a forked child. Its parent goes on with the connections that it had."""
    global _lock
    _lock = threading.Lock()
    for kept in list(_connections.values()):
        found = kept()
        if found is not None:
            found.forget()


os.register_at_fork(after_in_child=_forked)


def _has_extended(store: torch.distributed.Store) -> bool:
    found = getattr(store, "has_extended_api", None)
    return bool(found and found())
