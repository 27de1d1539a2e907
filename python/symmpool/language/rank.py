"""The words of programs: a rank, its peers, and chunks of their buffers.

Nothing here computes. Every operation is written down as an entry of the plan, with the line of the
program that it stands in; `symmpool.language.program` makes a plan of what all ranks have written down.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from symmpool.errors import PlanError

if TYPE_CHECKING:
    from typing import SupportsIndex

#: More operations than a plan may have. A program that makes more is most likely in an endless loop.
MAX_OPERATIONS = 1 << 18

BufferName = Literal["input", "output", "scratch"]


def plan_error(kind: str, rank: int, place: tuple[str, int], why: str) -> PlanError:
    """The error of an operation that cannot be written down."""
    file, line = place
    file = os.path.basename(file)
    return PlanError(f"{file}:{line}: {kind}: line {line} on rank {rank}: {why}", kind, rank, line)


def whole(value: SupportsIndex | str, what: str) -> int:
    """A whole number, also one of numpy or torch."""
    try:
        return operator.index(value)  # type: ignore[arg-type]  # caught below
    except TypeError:
        raise TypeError(f"{what} is {value!r}, not a whole number") from None


class Chunks:
    """Consecutive chunks of one rank's buffer: what operations read and write."""

    __slots__ = ("_count", "_first", "_name", "_rank")

    def __init__(self, rank: int, name: BufferName, first: int, count: int):
        self._rank, self._name, self._first, self._count = rank, name, first, count

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        end = self._first + self._count
        where = self._first if self._count == 1 else f"{self._first}:{end}"
        return f"{self._name}[{where}] of rank {self._rank}"

    def _to_json(self, rank: int) -> dict[str, Any]:
        place: dict[str, Any] = {"buffer": self._name, "index": self._first}
        if self._count != 1:
            place["count"] = self._count
        if self._rank != rank:
            place["rank"] = self._rank
        return place


class ChunkBuffer:
    """A rank's input, output or scratch: `buffer[i]` is a chunk of it, and `buffer[i:j]` are several."""

    __slots__ = ("_begin", "_name", "_owner", "_size", "_tracer")

    def __init__(self, tracer: Tracer, owner: int, name: BufferName, begin: int, size: int):
        self._tracer, self._owner, self._name = tracer, owner, name
        self._begin, self._size = begin, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int | slice) -> Chunks:
        if isinstance(index, slice):
            if index.step not in (None, 1):
                self._refuse(
                    f"{self._name}[::{index.step}]: chunks that are exchanged at once are consecutive"
                )
            first = 0 if index.start is None else whole(index.start, "the first chunk")
            end = self._size if index.stop is None else whole(index.stop, "the end of the chunks")
        else:
            first = whole(index, "the number of a chunk")
            end = first + 1
        if not 0 <= first < end <= self._size:
            shown = first if end == first + 1 else f"{first}:{end}"
            self._refuse(
                f"{self._name}[{shown}]: rank {self._owner} has {self._size} chunks there, from 0 on"
            )
        return Chunks(self._owner, self._name, self._begin + first, end - first)

    def __iter__(self) -> Iterator[Chunks]:
        return (self[index] for index in range(self._size))

    def _refuse(self, why: str) -> None:
        raise self._tracer.error("out_of_range", why)


class Scratch(ChunkBuffer):
    """Scratch chunks that `Rank.scratch` has given. A peer's are at `peer.at(scratch)`."""

    __slots__ = ()


class NamedRank:
    """Buffers that a program can name of a rank, its own or a peer."""

    __slots__ = ("_rank", "_tracer")

    def __init__(self, tracer: Tracer, rank: int):
        self._tracer, self._rank = tracer, rank

    @property
    def rank(self) -> int:
        """The rank's number, from 0."""
        return self._rank

    @property
    def input(self) -> ChunkBuffer:
        """Buffer that the rank's caller passed in."""
        return self._tracer.buffer(self.rank, "input")

    @property
    def output(self) -> ChunkBuffer:
        """Buffer that the rank's caller gets."""
        return self._tracer.buffer(self.rank, "output")


class Peer(NamedRank):
    """Another rank, as this rank's program sees it."""

    __slots__ = ()

    def at(self, scratch: Scratch) -> Scratch:
        """The peer's chunks of a scratch that this rank has too."""
        if not isinstance(scratch, Scratch):
            raise TypeError(f"at() takes what me.scratch(n) returned, not {scratch!r}")
        return Scratch(self._tracer, self.rank, "scratch", scratch._begin, scratch._size)

    def __repr__(self) -> str:
        return f"Peer({self.rank})"


class Rank(NamedRank):
    """One rank: its buffers, its peers, and what it does. A program is a function of it."""

    __slots__ = ()

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self._tracer.world

    def scratch(self, chunks: int) -> Scratch:
        """So many chunks of memory that a call begins with undefined. Every rank has the same, in the
        same order."""
        count = whole(chunks, "the number of chunks of scratch")
        if count < 1:
            raise self._tracer.error("out_of_range", f"scratch({count}): at least one chunk is needed")
        begin = sum(self._tracer.scratch)
        self._tracer.scratch.append(count)
        return Scratch(self._tracer, self.rank, "scratch", begin, count)

    def peer(self, rank: int) -> Peer:
        """The rank of that number, which is another one."""
        number = whole(rank, "the peer's rank")
        if not 0 <= number < self.world or number == self.rank:
            raise self._tracer.error("out_of_range", f"rank {number} is no peer among {self.world} ranks")
        return Peer(self._tracer, number)

    def peers(self) -> list[Peer]:
        """All other ranks, beginning with the next, so that not all ranks go to the same one at once."""
        ranks = ((self.rank + distance) % self.world for distance in range(1, self.world))
        return [Peer(self._tracer, rank) for rank in ranks]

    def copy(self, dst: Chunks, src: Chunks) -> None:
        """Copies this rank's own chunks."""
        self._move("copy", dst, src)

    def put(self, dst: Chunks, src: Chunks) -> None:
        """Copies this rank's chunks to a peer. The peer sees them once it has waited for a signal that
        follows."""
        self._move("put", dst, src)

    def get(self, dst: Chunks, src: Chunks) -> None:
        """Copies a peer's chunks to this rank."""
        self._move("get", dst, src)

    def reduce(self, dst: Chunks, srcs: Iterable[Chunks]) -> None:
        """Reduces chunks, of which any may be peers', in the order in which they are given, and rounds
        once."""
        listed = list(srcs)
        for place in (dst, *listed):
            self._check("reduce", place)
        self._tracer.add(
            "reduce", dst=dst._to_json(self.rank), srcs=[src._to_json(self.rank) for src in listed]
        )

    def signal(self, peer: Peer | int, channel: int = 0) -> None:
        """Signals a peer, behind all that this rank has done before. Channels count; there are 16 to each
        peer."""
        self._tracer.add("signal", **self._way(peer, channel))

    def wait(self, peer: Peer | int, channel: int = 0) -> None:
        """Waits for the peer's next signal on the channel."""
        self._tracer.add("wait", **self._way(peer, channel))

    def barrier(self) -> None:
        """Waits until all ranks have come to it."""
        self._tracer.add("barrier")

    @contextlib.contextmanager
    def block_group(self, group: int) -> Iterator[None]:
        """Runs the operations inside in order, while the other block groups run, until they join. 16 are
        possible."""
        number = whole(group, "the number of a block group")
        if self._tracer.group is not None:
            raise self._tracer.error("out_of_range", "block groups do not lie in each other")
        if not 0 <= number < 16:
            raise self._tracer.error("out_of_range", f"block_group({number}): 0 to 15 are possible")
        self._tracer.group = number
        try:
            yield
        finally:
            self._tracer.group = None

    def join(self) -> None:
        """Orders later operations behind all block groups so far. Operations in no block group are ordered so
        by themselves."""
        self._tracer.add("join")

    def _move(self, op: str, dst: Chunks, src: Chunks) -> None:
        for place in (dst, src):
            self._check(op, place)
        self._tracer.add(op, dst=dst._to_json(self.rank), src=src._to_json(self.rank))

    def _check(self, op: str, place: object) -> None:
        if not isinstance(place, Chunks):
            raise TypeError(f"{op} takes chunks, as me.input[0] is one, not {place!r}")

    def _way(self, peer: Peer | int, channel: int) -> dict[str, int]:
        number = self.peer(peer.rank if isinstance(peer, Peer) else peer).rank
        way = whole(channel, "the number of a channel")
        if not 0 <= way < 16:
            raise self._tracer.error("out_of_range", f"channel {way}: 0 to 15 are possible")
        return {"peer": number, "channel": way} if way else {"peer": number}

    def __repr__(self) -> str:
        return f"Rank({self.rank} of {self.world})"


class Tracer:
    """Recorder of one rank's run of a program."""

    def __init__(self, rank: int, world: int, chunks: dict[str, list[int]], source: str):
        self.rank, self.world, self.source = rank, world, source
        #: Chunks of the input and of the output, by rank.
        self.chunks = chunks
        #: Chunks of each scratch.
        self.scratch: list[int] = []
        self.group: int | None = None
        self.operations: list[dict[str, Any]] = []

    def buffer(self, owner: int, name: BufferName) -> ChunkBuffer:
        """A rank's whole buffer."""
        return ChunkBuffer(self, owner, name, 0, self.chunks[name][owner])

    def add(self, op: str, **operands: Any) -> None:
        """Adds an operation at the program's line. Raises PlanError where there are too many."""
        if len(self.operations) >= MAX_OPERATIONS:
            raise self.error("out_of_range", f"a program of more than {MAX_OPERATIONS} operations")
        entry: dict[str, Any] = {"op": op, **operands, "line": self.place()[1]}
        if self.group is not None and op != "join":
            entry["group"] = self.group
        self.operations.append(entry)

    def place(self) -> tuple[str, int]:
        """The file and line of the program that calls: in the program's own file where it is on the stack."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") == __name__:
            frame = frame.f_back
        nearest = frame
        while frame is not None and frame.f_code.co_filename != self.source:
            frame = frame.f_back
        found = frame or nearest
        return (found.f_code.co_filename, found.f_lineno) if found else (self.source, 0)

    def error(self, kind: str, why: str) -> PlanError:
        """An error at the program's line."""
        return plan_error(kind, self.rank, self.place(), why)
