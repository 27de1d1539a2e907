"""Agreements between the ranks of a process group of torch, made in the store that they met in."""

from __future__ import annotations

import weakref
from typing import Any

from symmpool.errors import TimeoutError
from symmpool.groups.process_groups import description_of, distributed, member_of
from symmpool.groups.store import StoreAdapter

# How often ranks have agreed on something, by the store that they did it in.
_agreements: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
# And in which runs of the ranks: to find out takes a round trip to the store.
_runs: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()


def agree(group: Any, what: str, why: str | None, seconds: float, to: str) -> dict[int, str]:
    """Exchanges why ranks of a process group cannot do something: `why` of this one, or None where it can.
    Returns the reasons of those that cannot, by rank: the same on every rank. Collective. `to` says, for
    errors, what the ranks come to: "the first call"."""
    dist = distributed()
    group = group if group is not None else dist.group.WORLD
    rank, world, store = member_of(dist, group)
    count = _agreements[store] = _agreements.get(store, 0) + 1
    said = b"" if why is None else why.encode()[:4096] or b"?"
    key = f"agree/{what}/{count}"
    try:
        runs = _runs.setdefault(store, {})
        answers = StoreAdapter(store, runs).all_gather(key, rank, world, said, seconds)
    except TimeoutError as error:
        # So that a second try meets the ranks that have not been here yet.
        _agreements[store] -= 1
        if not error.ranks:
            raise
        raise _absent(group, error.ranks, f"rank {rank} of {world}", seconds, to) from None
    return {rank: said.decode("utf-8", "replace") for rank, said in enumerate(answers) if said}


def _absent(group: Any, ranks: tuple[int, ...], here: str, seconds: float, to: str) -> TimeoutError:
    """Who did not come to an agreement, as an error."""
    who = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    # A rank whose time is up takes back its answer, so that others may miss it, too.
    left = ", or gave up waiting there" if len(ranks) > 1 else ""
    error = TimeoutError(
        f"symmpool: {who} did not come to {to} of {description_of(group)}{left}: {here} waited for "
        f"its timeout of {seconds:.1f} s. Every rank of a group makes its calls in the same order"
    )
    error.ranks = tuple(ranks)
    return error
