"""Agreements between the ranks of a process group of torch, made in the store that they met in."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from symmpool.errors import TimeoutError
from symmpool.groups.process_groups import description_of, distributed, member_of
from symmpool.groups.store import RunOfStore, StoreAdapter

if TYPE_CHECKING:
    import torch.distributed

# How often ranks have agreed on something, by the store that they did it in.
_agreements: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
# Runs of the ranks in which agreements were made: to find out takes a round trip to the store.
_runs: weakref.WeakKeyDictionary[Any, dict[int, int | str]] = weakref.WeakKeyDictionary()
# The rank and its run, by stores of which that is known.
_known: weakref.WeakKeyDictionary[Any, tuple[int, int | str]] = weakref.WeakKeyDictionary()


def know_run(run: RunOfStore) -> None:
    """Agreements in the store are of this run."""
    _known[run.store] = (run.rank, run.run)


def announce(group: torch.distributed.ProcessGroup, what: str) -> str:
    """Says that this rank comes to something, and waits for nobody. Returns what `check_all_came` takes."""
    rank, world, store = member_of(distributed(), group)
    count = _agreements[store] = _agreements.get(store, 0) + 1
    key = f"agree/{what}/{count}"
    if world > 1:
        _adapter(store).announce(key, rank, world, b"")
    return key


def has_announced(group: torch.distributed.ProcessGroup, what: str, ranks: list[int]) -> bool:
    """Whether one of these ranks has announced what this rank would announce next, or has come to an
    agreement on it."""
    rank, _, store = member_of(distributed(), group)
    key = f"agree/{what}/{_agreements.get(store, 0) + 1}"
    return _adapter(store).has_parts(key, rank, ranks)


def check_all_came(group: torch.distributed.ProcessGroup, key: str, waited: float, to: str) -> None:
    """Raises TimeoutError if a rank has not announced itself, for a rank that has waited in vain for what
    comes after that. A second try of this rank meets those that come later."""
    rank, world, store = member_of(distributed(), group)
    try:
        _adapter(store).all_gather(key, rank, world, b"", 0.0, waited)
    except TimeoutError as error:
        _agreements[store] -= 1
        if not error.ranks:
            raise
        raise _absent(group, error.ranks, f"rank {rank} of {world}", waited, to) from None


def _adapter(store: torch.distributed.Store) -> StoreAdapter:
    """Returns the adapter that agreements are made by. It keeps the store, so nothing keeps it."""
    known = _known.get(store)
    if known is not None:
        return StoreAdapter(RunOfStore(store, *known))
    return StoreAdapter(store, _runs.setdefault(store, {}))


def agree(
    group: torch.distributed.ProcessGroup, what: str, why: str | None, seconds: float, to: str
) -> dict[int, str]:
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
        answers = _adapter(store).all_gather(key, rank, world, said, seconds)
    except TimeoutError as error:
        # So that a second try meets the ranks that have not been here yet.
        _agreements[store] -= 1
        if not error.ranks:
            raise
        raise _absent(group, error.ranks, f"rank {rank} of {world}", seconds, to) from None
    return {rank: said.decode("utf-8", "replace") for rank, said in enumerate(answers) if said}


def reasons(found: dict[int, str]) -> str:
    """Reasons that `agree` has returned, each once: `ranks 0-7: no memory; rank 8: no device`."""
    by_reason: dict[str, list[int]] = {}
    for rank, why in found.items():
        by_reason.setdefault(why.removeprefix("symmpool: "), []).append(rank)
    return "; ".join(f"{named(ranks)}: {why}" for why, ranks in by_reason.items())


def named(ranks: list[int] | tuple[int, ...]) -> str:
    """Ranks in ascending order in words: `rank 3`, or `ranks 0, 2-5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    shown = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def absent(
    group: torch.distributed.ProcessGroup, ranks: tuple[int, ...], seconds: float, to: str
) -> TimeoutError:
    """The error of this rank, which has waited in vain for some ranks that do not come `to` something."""
    rank, world, _ = member_of(distributed(), group)
    return _absent(group, ranks, f"rank {rank} of {world}", seconds, to)


def _absent(
    group: torch.distributed.ProcessGroup, ranks: tuple[int, ...], here: str, seconds: float, to: str
) -> TimeoutError:
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
