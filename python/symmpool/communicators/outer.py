"""Outer engines of communicators that span hosts: gloo between ranks whose memory is not shared.

The binding asks for them when it makes a communicator on a pool whose ranks are on several hosts. An outer
engine only moves bytes; symmpool reduces them itself. Its ranks meet in the pool's own group, so it does not
matter whose store that is. gloo connects by the interfaces that the environment variable GLOO_SOCKET_IFNAME
names, as torch's own groups do.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from symmpool._symmpool import pool_store_add, pool_store_get, pool_store_set
from symmpool.errors import TimeoutError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from symmpool._symmpool import Pool

__all__ = ["GlooOuter", "OuterEngines", "outers_of"]

# How long a wait in the store lasts before the next one, in seconds: Python handles signals in between.
_SLICE = 1.0


class GlooOuter:
    """Ranks connected by gloo. Lengths are in bytes; addresses are those of memory that stays until the
    transfer is finished."""

    name = "gloo"

    def __init__(self, store: Any, rank: int, world: int, seconds: float):
        """Connects to the other ranks, for which it waits so long. `store` is one of torch.distributed's."""
        import torch.distributed as dist

        self.rank, self.world, self._seconds = rank, world, seconds
        timeout = datetime.timedelta(seconds=seconds)
        try:
            self._gloo: Any = dist.ProcessGroupGloo(store, rank, world, timeout) if world > 1 else None
        except RuntimeError as error:
            raise TimeoutError(
                f"symmpool: rank {rank} of {world} did not meet the others of gloo between hosts within "
                f"{seconds:g} s: {str(error).partition(chr(10))[0]}; their addresses must be reachable from "
                "this host (GLOO_SOCKET_IFNAME names the interface)"
            ) from error
        self._closed = False
        # Transfers under way, each with the tensors that it moves.
        self._begun: dict[int, tuple[Any, Any]] = {}
        self._tickets = 0

    def all_gather(self, output: int, source: int, nbytes: int) -> int:
        """Begins an all-gather; returns its ticket."""
        to, own = _bytes_at(output, nbytes * self.world), _bytes_at(source, nbytes)
        return self._begin((to, own), lambda gloo: gloo._allgather_base(to, own), lambda: to.copy_(own))

    def all_to_all(self, output: int, source: int, send: Sequence[int], receive: Sequence[int]) -> int:
        """Begins an all-to-all; returns its ticket."""
        to, own = _bytes_at(output, sum(receive)), _bytes_at(source, sum(send))
        sizes = (list(receive), list(send))
        return self._begin((to, own), lambda gloo: gloo.alltoall_base(to, own, *sizes), lambda: to.copy_(own))

    def broadcast(self, data: int, nbytes: int, root: int) -> int:
        """Begins a broadcast; returns its ticket."""
        import torch.distributed as dist

        both = _bytes_at(data, nbytes)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._begin((both,), lambda gloo: gloo.broadcast([both], options), lambda: None)

    def finish(self, ticket: int) -> None:
        """Waits until a transfer has ended. Raises TimeoutError where ranks do not come to it."""
        work, tensors = self._begun[ticket]
        if work is not None:
            try:
                work.wait(datetime.timedelta(seconds=self._seconds))
            except RuntimeError as error:
                text = str(error).partition("\n")[0]
                if "imed out" in text:
                    raise TimeoutError(f"symmpool: {text}") from error
                raise
        del self._begun[ticket], tensors

    def abort(self) -> None:
        """Closes the connections behind what is under way. gloo cannot end that: it ends when its other ranks
        have gone or close too, or when its time is over."""
        self._closed = True
        for work, _ in list(self._begun.values()):
            if work is not None and not work.is_completed():
                # An error says that it has ended.
                with contextlib.suppress(RuntimeError):
                    work.wait(datetime.timedelta(seconds=self._seconds))
        self._begun.clear()
        self._gloo = None

    def _begin(self, tensors: Any, begin: Callable[[Any], Any], alone: Callable[[], Any]) -> int:
        if self._closed:
            raise RuntimeError("gloo between hosts is closed on this rank")
        self._tickets += 1
        if self._gloo is None:
            alone()
        work = None if self._gloo is None else begin(self._gloo)
        self._begun[self._tickets] = (work, tensors)
        return self._tickets


class OuterEngines:
    """The outer engines of one rank: `rail` between the ranks of equal index on all hosts, None where hosts
    have different numbers of ranks; and `flat` between all ranks."""

    def __init__(self, rail: GlooOuter | None, flat: GlooOuter):
        self.rail, self.flat = rail, flat


def outers_of(pool: Pool, seconds: float) -> OuterEngines:
    """Makes the outer engines of a pool's ranks, which wait so long for each other. Collective."""
    try:
        import torch.distributed as dist
    except ImportError:
        dist = None  # type: ignore[assignment]
    if dist is None or not dist.is_available() or not dist.is_gloo_available():
        raise UnsupportedError(
            f"symmpool: rank {pool.rank}: the group's ranks are on {len(pool.hosts)} hosts, between which "
            "torch.distributed's gloo carries data, and this Python has none; install torch, or make a "
            "group of the ranks of one host"
        )
    rank, hosts = pool.rank, pool.hosts
    # Every rank counts the communicators of its pool, which all make in one order.
    count = pool_store_add(pool, f"outer/count/{rank}", 1, seconds)
    store = _store_of(pool, f"outer/{count}", seconds)
    flat = GlooOuter(dist.PrefixStore("flat", store), rank, pool.world, seconds)
    here = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    if len({len(ranks) for ranks in hosts}) > 1:
        return OuterEngines(None, flat)
    index = hosts[here].index(rank)
    rail = GlooOuter(dist.PrefixStore(f"rail{index}", store), here, len(hosts), seconds)
    return OuterEngines(rail, flat)


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    import torch

    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


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
            while True:
                left = end - time.monotonic()
                try:
                    return pool_store_get(pool, f"{prefix}/{key}", max(min(left, _SLICE), 1e-3))
                except TimeoutError:
                    if left <= _SLICE:
                        raise

    return PoolStore()
