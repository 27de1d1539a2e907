"""A model of what collectives over hosts cost: what each phase takes, for any number of hosts and ranks.

The sizes at which calls take another way are those of `collectives/src/spanning`. Costs inside a host are
measured on one; those between hosts are measured, or given, as networks differ. What is left out: ranks that
come late, networks that others use too, and links that several hosts share.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OPERATIONS", "Costs", "Phases", "predict"]

#: Most bytes that leave a host in a call whose data the leaders exchange: one that reduces, and another one.
MAX_REDUCED, MAX_MOVED = 256 << 10, 2 << 20
#: Most bytes for one host that go with the message by which hosts agree, and those for all hosts.
MAX_ROOM, MAX_ROOM_IN_ALL = 256 << 10, 2 << 20
#: Bytes of such a message without data.
HEAD = 1 << 10
#: Most bytes of an all-reduce that every rank gets whole from the others, where leaders do not exchange it.
SMALL = 16 << 10
#: Bytes of a rank's part of a chunk of an all-reduce.
PART = 2 << 20
#: Bytes of a rank's part from which on an all-to-all between two hosts copies nothing on its way.
DIRECT = 128 << 10

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


@dataclass(frozen=True)
class Costs:
    """Costs in seconds: of a step, and of a byte."""

    #: A handshake of the ranks of a host.
    handshake: float
    #: A byte that a rank reads or writes, while all ranks of its host do so.
    byte: float
    #: A step between two hosts, without data.
    step: float
    #: Each further host to which a step goes.
    peer: float
    #: A byte that leaves a host by one connection of its leader, and by those of all of its ranks.
    alone: float
    leaving: float
    #: Whether phases inside hosts and between them take each other's time, as on pretended hosts, where both
    #: need the same processors. Else the longer one decides where they run beside each other.
    shares: bool = False


@dataclass(frozen=True)
class Phases:
    """Seconds of a call by what takes them. Phases that run beside each other count once."""

    handshakes: float
    inside: float
    between: float

    @property
    def total(self) -> float:
        return self.handshakes + self.inside + self.between

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(("handshakes", "inside", "between"), key=lambda name: getattr(self, name))


def predict(operation: str, size: int, hosts: int, ranks: int, costs: Costs) -> Phases:
    """The phases of a call among so many hosts of so many ranks each. `size` is in bytes of the whole tensor:
    the input of an all-reduce, a reduce-scatter and an all-to-all, the output of an all-gather."""
    if operation not in OPERATIONS:
        raise ValueError(f"operation: {operation!r} is none of {', '.join(OPERATIONS)}")
    if hosts < 2 or ranks < 1 or size < 1:
        raise ValueError(
            f"{size} bytes among {hosts} hosts of {ranks} ranks: 2 hosts of 1 rank and 1 byte are least"
        )
    # Bytes to each other host, where the leaders exchange the data.
    piece = {
        "all_reduce": size,
        "all_gather": size / hosts,
        "reduce_scatter": size / hosts,
        "broadcast": size,
        "all_to_all": size * ranks / hosts,
    }[operation]
    most = MAX_REDUCED if operation in ("all_reduce", "reduce_scatter") else MAX_MOVED
    if piece * (hosts - 1) <= most:
        return _by_leaders(operation, size, piece, hosts, ranks, costs)
    return _by_all_ranks(operation, size, hosts, ranks, costs)


def _step(hosts: int, costs: Costs) -> float:
    return costs.step + costs.peer * (hosts - 2)


def _by_leaders(operation: str, size: int, piece: float, hosts: int, ranks: int, costs: Costs) -> Phases:
    others = hosts - 1
    # Bytes that pass through the rank that has the most of them: it puts its data into the leader's memory,
    # the leader reduces them, and every rank takes its result.
    touched = {
        "all_reduce": 2 * size + (ranks + others) * size + (hosts + 1) * size,
        "reduce_scatter": 2 * size + (ranks + 1) * size + (hosts + 1) * size / (hosts * ranks),
        "all_gather": 2 * others * size / (hosts * ranks) + 2 * size,
        "all_to_all": 4 * size,
        "broadcast": (1 + others) * size + 2 * size,
    }[operation]
    together = piece <= min(MAX_ROOM, MAX_ROOM_IN_ALL / hosts)
    steps = 1 if together else 2
    return Phases(
        handshakes=2 * costs.handshake,
        inside=touched * costs.byte,
        between=steps * _step(hosts, costs) + (HEAD + piece) * others * costs.alone,
    )


def _by_all_ranks(operation: str, size: int, hosts: int, ranks: int, costs: Costs) -> Phases:
    # One message between the leaders, while the hosts work inside, and then all ranks. An all-reduce between
    # two hosts is one exchange of whole parts.
    step = _step(hosts, costs)
    small = operation == "all_reduce" and size <= SMALL
    steps = 2 if operation == "all_reduce" and hosts > 2 and not small else 1
    leaving = {
        "all_reduce": size if hosts == 2 else 2 * (hosts - 1) / hosts * size,
        "small": (hosts - 1) * size * ranks,
        "all_gather": (hosts - 1) / hosts * size,
        "reduce_scatter": (hosts - 1) / hosts * size,
        "broadcast": (hosts - 1) * size,
        "all_to_all": (hosts - 1) / hosts * size * ranks,
    }["small" if small else operation]
    direct = hosts == 2 and size / (hosts * ranks) >= DIRECT
    touched = {
        # Each rank reads its part of all inputs, adds the other hosts' to it, and copies all parts.
        "all_reduce": size + size / ranks + 3 * size / ranks + 2 * size,
        "small": (ranks + hosts + 3) * size,
        "reduce_scatter": size + size / ranks + 2 * size / ranks,
        "all_gather": 2 * size + 2 * size / (hosts * ranks),
        "broadcast": 2 * size,
        "all_to_all": 2 * size / hosts if direct else 2 * size,
    }["small" if small else operation]
    chunks = -(-size // (PART * ranks)) if operation == "all_reduce" else 1
    inside, between = touched * costs.byte, leaving * costs.leaving + steps * chunks * step
    agreement = step if costs.shares else max(0.0, step - inside / chunks)
    if chunks > 1 and not costs.shares:
        # Chunks' phases run beside each other, but for those of the first and the last one.
        if inside > between:
            between /= chunks
        else:
            inside /= chunks
    meetings = 2 + (4 * chunks if ranks > 1 and operation == "all_reduce" else 2 * (ranks > 1))
    return Phases(meetings * costs.handshake, inside, between + agreement)
