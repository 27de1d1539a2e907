"""How many bytes cross hosts in a call of experts, and the least that could.

Bytes are counted where they are handed to gloo: by symmpool's outer engine, and by torch.distributed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: Bytes that this rank has sent to each rank since `watch`, by rank of the group.
_sent: dict[int, int] = {}


def watch() -> None:
    """Counts what this process sends from now on. You must call this before communicators are made."""
    import torch.distributed as dist

    from symmpool.communicators import outer

    made = outer.OuterRendezvous.outers

    @functools.wraps(made)
    def outers(self: Any, seconds: float) -> Any:
        found = made(self, seconds)
        pool = self._pool
        here = next(ranks for ranks in pool.hosts if pool.rank in ranks)
        rail = [ranks[min(here.index(pool.rank), len(ranks) - 1)] for ranks in pool.hosts]
        _count(found.flat, list(range(pool.world)))
        if found.rail is not None:
            _count(found.rail, rail)
        return found

    outer.OuterRendezvous.outers = outers  # type: ignore[method-assign]
    exchange = dist.all_to_all_single

    @functools.wraps(exchange)
    def all_to_all_single(output: Any, input: Any, *arguments: Any, **options: Any) -> Any:
        world = dist.get_world_size()
        row = input[:1].nbytes if len(input) else 0
        given = arguments[1] if len(arguments) > 1 and arguments[1] else [len(input) // world] * world
        for rank, count in enumerate(given):
            _add(rank, count * row)
        return exchange(output, input, *arguments, **options)

    dist.all_to_all_single = all_to_all_single
    gather = dist.all_gather_into_tensor

    @functools.wraps(gather)
    def all_gather_into_tensor(output: Any, input: Any, *arguments: Any, **options: Any) -> Any:
        for rank in range(dist.get_world_size()):
            _add(rank, input.nbytes)
        return gather(output, input, *arguments, **options)

    dist.all_gather_into_tensor = all_gather_into_tensor  # type: ignore[assignment]


def measured(ranks: Any, placed: list[list[int]], call: Callable[..., object]) -> int:
    """Bytes that cross hosts in a call of all ranks. Calls before it have told ranks what to expect."""
    for _ in range(2):
        call()
    ranks.meet()
    before = dict(_sent)
    call()
    here = next(each for each in placed if ranks.rank in each)
    own = sum(count - before.get(rank, 0) for rank, count in _sent.items() if rank not in here)
    return sum(ranks.gather(own))


def least(routing: Any, placed: list[list[int]], case: str, hidden: int) -> int:
    """The least bytes that cross hosts: a row and its scales once to each host that has experts of the token,
    and a row of two bytes a channel back, as far as the case has both."""
    quantised = hidden + hidden // 32
    there = 0 if case == "combine" else quantised if "fp8" in case else 2 * hidden
    back = 0 if case in ("dispatch", "dispatch_fp8") else 2 * hidden
    rows = 0
    for source in range(len(routing.x)):
        for host in placed:
            if source not in host:
                needs = sum(routing.on(rank, source).int() for rank in host) > 0
                rows += int(needs.sum())
    return rows * (there + back)


def cells(rows: list[Any]) -> tuple[list[str], list[list[str]]]:
    """The heading and lines of a table."""
    names = sorted({name for row in rows for name in row.crossed})
    lines = []
    for row in rows:
        shown = [row.case, row.routing, str(row.tokens)]
        for name in names:
            found = row.crossed.get(name)
            shown.append("-" if found is None else f"{found['bytes']:,} ({ratio(found):.3f})")
        lines.append(shown)
    return ["call", "routing", "tokens", *names], lines


def ratio(found: dict[str, int]) -> float:
    """How many times the least bytes crossed."""
    return found["bytes"] / max(found["least"], 1)


def _count(engine: Any, ranks: list[int]) -> None:
    exchange, gather = engine.all_to_all, engine.all_gather

    def all_to_all(output: int, source: int, send: Any, receive: Any, stream: int) -> int:
        for rank, count in zip(ranks, send):
            _add(rank, count)
        return exchange(output, source, send, receive, stream)

    def all_gather(output: int, source: int, nbytes: int, stream: int) -> int:
        for rank in ranks:
            _add(rank, nbytes)
        return gather(output, source, nbytes, stream)

    engine.all_to_all, engine.all_gather = all_to_all, all_gather


def _add(rank: int, count: int) -> None:
    _sent[rank] = _sent.get(rank, 0) + count
