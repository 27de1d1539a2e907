"""Handles: tuples whose parts are made when a program looks at them. Most programs only pass handles on.

Python's own operations of tuples see the parts. Code in C that reads a tuple's memory, past its methods, sees
None: give it `tuple(handle)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from symmpool.experts.received import Handle

__all__ = ["InternodeHandle", "LowLatencyHandle", "NormalHandle"]


class _LazyTuple(tuple):
    """A tuple of parts that functions make, each once; or, where the call is captured in a graph, whenever
    they are looked at, as each replay changes them."""

    _makers: list[Callable[[], Any]]
    _made: dict[int, Any]
    _is_captured: bool

    def __new__(cls, makers: list[Callable[[], Any]], device: torch.device) -> Any:
        found = super().__new__(cls, (None,) * len(makers))
        found._makers, found._made = makers, {}
        found._is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return found

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        at = range(len(self._makers))[index]
        if at not in self._made:
            made = self._makers[at]()
            if self._is_captured:
                return made
            self._made[at] = made
        return self._made[at]

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self._makers)))

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = object.__hash__

    # The other methods of tuples.

    def __contains__(self, value: object) -> bool:
        return value in tuple(self)

    def __add__(self, other: Any) -> Any:
        return tuple(self) + tuple(other) if isinstance(other, tuple) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return tuple(other) + tuple(self) if isinstance(other, tuple) else NotImplemented

    def __mul__(self, times: Any) -> Any:
        return tuple(self) * times

    __rmul__ = __mul__

    def __lt__(self, other: Any) -> bool:
        return tuple(self) < other

    def __le__(self, other: Any) -> bool:
        return tuple(self) <= other

    def __gt__(self, other: Any) -> bool:
        return tuple(self) > other

    def __ge__(self, other: Any) -> bool:
        return tuple(self) >= other

    def count(self, value: object) -> int:
        return tuple(self).count(value)

    def index(self, value: object, *bounds: Any) -> int:
        return tuple(self).index(value, *bounds)

    def __repr__(self) -> str:
        return f"<symmpool.deep_ep.{type(self).__name__} of {len(self)} parts>"

    # A copy of a tuple is the tuple. A handle is of no use elsewhere.

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__}: a handle belongs to its dispatch and has no deep copy; pass it on as it "
            "is, or copy.deepcopy(tuple(handle)) for its parts"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__}: a handle belongs to its dispatch in this process and cannot be pickled; "
            "pickle tuple(handle) for its parts"
        )


class NormalHandle(_LazyTuple):
    """Handle of `Buffer.dispatch`: `(rank_prefix_matrix, None, None, recv_src_idx, is_token_in_rank, None)`.

    Of the matrix, int32 `[ranks, ranks]`, this rank knows its own column, where the rows of each rank end
    among those that it received; all else is -1. `recv_src_idx`, int32, says which token of its rank each row
    is. The other parts describe DeepEP's channels, of which there are none."""

    owner: Any
    kept: Handle
    rows: int
    top_k: int | None

    def __new__(
        cls, owner: Any, kept: Handle, rows: int, top_k: int | None, is_token_in_rank: torch.Tensor | None
    ) -> Any:
        """A handle of a dispatch's `kept` rows; its parts are made when they are looked at."""
        found = super().__new__(cls, cls._parts(kept, rows, is_token_in_rank), kept.memory.device)
        found.owner, found.kept, found.rows, found.top_k = owner, kept, rows, top_k
        return found

    @staticmethod
    def _parts(kept: Handle, rows: int, is_token_in_rank: torch.Tensor | None) -> list[Callable[[], Any]]:
        def matrix() -> torch.Tensor:
            ranks = kept.buffer.world
            found = torch.full((ranks, ranks), -1, dtype=torch.int32, device=kept.memory.device)
            found[:, kept.buffer.rank] = kept.source_offsets[1:]
            return found

        def sources() -> torch.Tensor:
            return kept.source_index[:rows]

        return [matrix, _none, _none, sources, lambda: is_token_in_rank, _none]


class InternodeHandle(NormalHandle):
    """Handle of `Buffer.dispatch` over hosts, as DeepEP's has its ten parts. Two of them are there: the first
    is `is_token_in_rank`, and the fourth from the end, int32 `[ranks]`, says where the rows of each rank end
    among those that this one received. The others describe DeepEP's channels, and are None."""

    @staticmethod
    def _parts(kept: Handle, rows: int, is_token_in_rank: torch.Tensor | None) -> list[Callable[[], Any]]:
        ends = [lambda: kept.source_offsets[1:]]
        return [lambda: is_token_in_rank, *[_none] * 5, *ends, *[_none] * 3]


class LowLatencyHandle(_LazyTuple):
    """Handle of `Buffer.low_latency_dispatch`: `(src_info, layout_range, num_max_dispatch_tokens_per_rank,
    hidden, num_experts)`.

    `src_info`, int32 `[local experts, rows]`, says which token of its rank each row is, and -1 where there is
    no row. `layout_range`, int64 `[local experts, ranks]`, has for each rank where its rows of an expert
    begin, in the upper 32 bits, and how many there are. Both are made on the current stream when they are
    looked at first: after the call's hook or event. Of a call in a graph they are made at each look, for the
    last replay."""

    owner: Any
    kept: Handle
    most: int
    shape: tuple[int, int]

    def __new__(cls, owner: Any, kept: Handle, most: int, shape: tuple[int, int]) -> Any:
        """A handle of a dispatch's `kept` rows, of `shape` (local experts, rows of each); its parts are made
        when they are looked at."""
        local, rows = shape
        parts: dict[str, torch.Tensor] = {}

        def look(name: str) -> torch.Tensor:
            if found._is_captured or not parts:
                parts.update(_layout(kept, local, rows))
            return parts[name]

        makers = [
            lambda: look("src_info"),
            lambda: look("layout_range"),
            lambda: most,
            lambda: kept.buffer.hidden,
            lambda: kept.buffer.experts,
        ]
        found = super().__new__(cls, makers, kept.memory.device)
        found.owner, found.kept, found.most, found.shape = owner, kept, most, shape
        return found


def _none() -> None:
    return None


def _layout(kept: Handle, local: int, rows: int) -> dict[str, torch.Tensor]:
    device, world, capacity = kept.memory.device, kept.buffer.world, kept.buffer.capacity
    places = kept.places.long()
    at = torch.arange(capacity, dtype=torch.int32, device=device)
    # Places behind the received rows mean nothing; they go behind the last row.
    there = (at < kept.num_received)[:, None] & (places >= 0)
    to = torch.where(there, places, local * rows)
    src_info = torch.full((local * rows + 1,), -1, dtype=torch.int32, device=device)
    src_info[to] = kept.source_index[:, None].expand_as(to)
    # The rows of an expert lie by source, so how many each source has says where they are.
    source = torch.searchsorted(kept.source_offsets[1:].contiguous(), at, right=True).clamp(max=world - 1)
    pair = torch.where(there, places // rows * world + source[:, None], local * world)
    counts = torch.zeros(local * world + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, pair.flatten(), torch.ones_like(pair).flatten())
    counts = counts[:-1].view(local, world)
    begins = counts.cumsum(1) - counts
    return {"src_info": src_info[:-1].view(local, rows), "layout_range": begins << 32 | counts}
