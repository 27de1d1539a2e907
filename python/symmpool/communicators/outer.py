"""Outer engines of communicators that span hosts: gloo between ranks whose memory is not shared. It moves
memory of the CPU, and that of GPUs which several ranks share, as NCCL refuses those.

The binding asks for them when it makes a communicator on a pool whose ranks are on several hosts. An outer
engine only moves bytes; symmpool reduces them itself. Its ranks meet in the pool's own group, so it does not
matter whose store that is. gloo connects by the interfaces that the environment variable GLOO_SOCKET_IFNAME
names, as torch's own groups do.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import os
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from symmpool._symmpool import pool_store_add, pool_store_get, pool_store_set
from symmpool.errors import DivergedError, TimeoutError, UnsupportedError

if TYPE_CHECKING:
    import torch
    import torch.distributed

    from symmpool._symmpool import Pool

__all__ = ["GlooOuter", "OuterRendezvous", "OuterEngines"]

# How long a wait in the store lasts before the next one, in seconds: Python handles signals in between.
_SLICE = 1.0
# The longest timeout that gloo is given, in seconds: it counts nanoseconds.
_LONGEST = 3e8
# How long the store has for a step that waits for no rank, in seconds.
_STORE = 30.0
# How long a process that ends waits for transfers under way, in seconds.
_AT_EXIT = 5.0
# Memory of any length: a type for each length would be made and kept.
_Memory = ctypes.c_char * (1 << 46)
# Engines that exist, and what those leave that could not be closed.
_connected: weakref.WeakSet[GlooOuter] = weakref.WeakSet()
_kept: list[Any] = []


class GlooOuter:
    """Ranks connected by gloo. Lengths are in bytes; addresses are those of memory of `device` that stays
    until the transfer is finished. A stream is a CUDA stream's handle, of no meaning on the CPU. The host
    waits for the end of transfers, on GPUs too."""

    name = "gloo"

    def __init__(
        self, store: torch.distributed.Store, rank: int, world: int, seconds: float, device: str = "cpu"
    ):
        """Connects to the other ranks, for which it waits `seconds`. `store` is torch.distributed's."""
        import torch.distributed as dist

        self.rank, self.world, self._seconds, self._device = rank, world, seconds, device
        self._closed = False
        # Transfers under way: what gloo has made of each, and the tensors that it moves.
        self._begun: dict[int, tuple[list[Any], Any]] = {}
        self._tickets = 0
        timeout = datetime.timedelta(seconds=seconds)
        try:
            self._gloo: Any = dist.ProcessGroupGloo(store, rank, world, timeout) if world > 1 else None
        except RuntimeError as error:
            raise TimeoutError(
                f"symmpool: rank {rank} of {world} did not meet the others of gloo between hosts within "
                f"{seconds:g} s: {str(error).partition(chr(10))[0]}; their addresses must be reachable from "
                "this host (GLOO_SOCKET_IFNAME names the interface)"
            ) from error
        _connected.add(self)

    def set_timeout(self, seconds: float) -> None:
        """Bounds the waits of transfers that are begun from now on. gloo bounds each of its steps by it."""
        self._seconds = seconds
        if self._gloo is not None:
            self._gloo._set_default_timeout(datetime.timedelta(seconds=min(seconds, _LONGEST)))

    def all_gather(self, output: int, source: int, nbytes: int, stream: int = 0) -> int:
        """Begins an all-gather; returns its ticket."""
        to, own = self._bytes_at(output, nbytes * self.world), self._bytes_at(source, nbytes)
        with self._on(stream):
            return self._begin((to, own), "_allgather_base", to, own)

    def all_to_all(
        self, output: int, source: int, send: Sequence[int], receive: Sequence[int], stream: int = 0
    ) -> int:
        """Begins an all-to-all; returns its ticket."""
        to, own = self._bytes_at(output, sum(receive)), self._bytes_at(source, sum(send))
        with self._on(stream):
            return self._begin((to, own), "alltoall_base", to, own, list(receive), list(send))

    def broadcast(self, data: int, nbytes: int, root: int, stream: int = 0) -> int:
        """Begins a broadcast; returns its ticket."""
        import torch.distributed as dist

        both = self._bytes_at(data, nbytes)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        with self._on(stream):
            return self._begin((both,), "broadcast", [both], options)

    def finish(self, ticket: int, stream: int = 0) -> None:
        """Waits until a transfer has ended; what the stream is given next comes behind it. Raises
        TimeoutError where ranks do not come to it."""
        with self._on(stream):
            self._finish(ticket)

    def _finish(self, ticket: int) -> None:
        works, _ = self._begun[ticket]
        work = works[0] if works else None
        end = time.monotonic() + self._seconds
        while work is not None:
            left = end - time.monotonic()
            try:
                # Python handles signals in between.
                work.wait(datetime.timedelta(seconds=max(min(left, _SLICE), 1e-3)))
                break
            except RuntimeError as error:
                # A wait that ended is no end of the transfer.
                if left > _SLICE and not work.is_completed():
                    continue
                text = str(error).partition("\n")[0]
                if "imed out" in text:
                    raise TimeoutError(f"symmpool: {text}") from error
                raise
        del self._begun[ticket]

    def abort(self) -> bool:
        """Closes the connections behind what is under way, and returns whether that has ended. gloo cannot
        end a transfer: it ends when its other ranks have gone or close too, or when its time is over. To be
        called until it returns true: only then no memory is used any more."""
        self._closed = True
        for ticket, (works, _) in list(self._begun.items()):
            if works and not works[0].is_completed():
                return False
            self._begun.pop(ticket, None)
        self._gloo = None
        return True

    def _on(self, stream: int) -> contextlib.AbstractContextManager[object]:
        """The stream as torch's current one, where gloo looks for it."""
        if self._device == "cpu":
            return contextlib.nullcontext()
        import torch

        # A handle of 0 would be a new stream to torch, and 1 is the default stream by its other name.
        is_default = stream in (0, 1)
        default = torch.cuda.default_stream(self._device)
        found = default if is_default else torch.cuda.ExternalStream(stream, device=self._device)
        return torch.cuda.stream(found)

    def _bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """The bytes from an address on, as a tensor that does not own them."""
        import torch

        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        if self._device == "cpu":
            return torch.frombuffer(_Memory.from_address(address), dtype=torch.uint8, count=nbytes)
        return torch.as_tensor(_DeviceBytes(address, nbytes), device=self._device)

    def _begin(self, tensors: tuple[torch.Tensor, ...], method: str, *arguments: object) -> int:
        if self._closed:
            raise RuntimeError("gloo between hosts is closed on this rank")
        ticket = self._tickets = self._tickets + 1
        works: list[Any] = []
        self._begun[ticket] = (works, tensors)
        if self._gloo is not None:
            # Ctrl-C is raised between two steps of Python, of which this is one: no transfer is begun that is
            # not known.
            works.extend(map(getattr(self._gloo, method), *([each] for each in arguments)))
        elif len(tensors) > 1:
            tensors[0].copy_(tensors[1])
        return ticket


def _leave_to_parent() -> None:
    """Keeps a forked child from ending what is its parent's: gloo would wait for threads that it has not."""
    for outer in list(_connected):
        outer._closed = True
        for each in (outer._gloo, outer._begun):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    _connected.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _close_all() -> None:
    """Closes all connections before the interpreter ends, as what is under way holds objects of Python.
    Transfers that do not end soon keep theirs."""
    end = time.monotonic() + _AT_EXIT
    for outer in list(_connected):
        while not outer.abort() and time.monotonic() < end:
            time.sleep(0.01)
        _kept.append(outer._begun)


class OuterEngines:
    """The outer engines of one rank: `rail` between the ranks of equal index on all hosts, and `flat` between
    all ranks. Where hosts have different numbers of ranks, only the first rank of each has a `rail`."""

    def __init__(self, rail: GlooOuter | None, flat: GlooOuter):
        self.rail, self.flat = rail, flat


class OuterRendezvous:
    """Ranks of a pool that make a communicator over hosts. Every rank counts the communicators of its pool,
    which all make in one order, whatever becomes of each."""

    def __init__(self, pool: Pool):
        self._pool = pool
        self._prefix = f"outer/{pool_store_add(pool, f'outer/count/{pool.rank}', 1, _STORE)}"

    def refuse(self, why: str) -> None:
        """Tells the other ranks why this one takes no part. Waits for none of them."""
        self._say(why or "it gave no reason")

    def outers(self, seconds: float) -> OuterEngines:
        """Makes the outer engines, once all ranks have come. Ranks wait so long for each other."""
        pool = self._pool
        try:
            import torch.distributed as dist
        except ImportError:
            dist = None  # type: ignore[assignment]
        if dist is None or not dist.is_available() or not dist.is_gloo_available():
            why = (
                f"the group's ranks are on {len(pool.hosts)} hosts, between which torch.distributed's gloo "
                "carries data, and this Python has none; install torch, or make a group of one host's ranks"
            )
            self._say(why)
            raise UnsupportedError(f"symmpool: rank {pool.rank}: {why}")
        self._say("")
        for rank in range(pool.world):
            if why := _await(pool, f"{self._prefix}/ready/{rank}", time.monotonic() + seconds).decode():
                raise DivergedError(
                    f"symmpool: rank {pool.rank}: a communicator over hosts is made on no rank, as rank "
                    f"{rank} refused to make it: {why.removeprefix('symmpool: ')}"
                )
        rank, hosts = pool.rank, pool.hosts
        store = _store_of(pool, self._prefix, seconds)
        flat = GlooOuter(dist.PrefixStore("flat", store), rank, pool.world, seconds, pool.device)
        here = next(number for number, ranks in enumerate(hosts) if rank in ranks)
        index = hosts[here].index(rank)
        if index > 0 and len({len(ranks) for ranks in hosts}) > 1:
            return OuterEngines(None, flat)
        rail = GlooOuter(dist.PrefixStore(f"rail{index}", store), here, len(hosts), seconds, pool.device)
        return OuterEngines(rail, flat)

    def _say(self, why: str) -> None:
        pool_store_set(self._pool, f"{self._prefix}/ready/{self._pool.rank}", why.encode(), _STORE)


class _DeviceBytes:
    """Bytes of a GPU, as torch takes them."""

    def __init__(self, address: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _await(pool: Pool, key: str, end: float) -> bytes:
    """The value of a key. Python handles signals in between."""
    while True:
        left = end - time.monotonic()
        try:
            return pool_store_get(pool, key, max(min(left, _SLICE), 1e-3))
        except TimeoutError:
            if left <= _SLICE:
                raise


def _store_of(pool: Pool, prefix: str, seconds: float) -> Any:
    """A store of torch.distributed on the store in which a pool's ranks have met."""
    import torch.distributed as dist

    class PoolStore(dist.Store):
        """The store of a pool's group, with the methods by which torch's backends connect."""

        def set(self, key: str, value: Any) -> None:
            data = value.encode() if isinstance(value, str) else bytes(value)
            pool_store_set(pool, f"{prefix}/{key}", data, seconds)

        def get(self, key: str) -> bytes:
            return self._await(key, time.monotonic() + seconds)

        def add(self, key: str, amount: int) -> int:
            return pool_store_add(pool, f"{prefix}/{key}", amount, seconds)

        def check(self, keys: list[str]) -> bool:
            try:
                for key in keys:
                    pool_store_get(pool, f"{prefix}/{key}", 1e-3)
            except TimeoutError:
                return False
            return True

        def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
            limit = seconds if timeout is None else timeout.total_seconds()
            end = time.monotonic() + limit
            for key in keys:
                self._await(key, end)

        def _await(self, key: str, end: float) -> bytes:
            return _await(pool, f"{prefix}/{key}", end)

    return PoolStore()
