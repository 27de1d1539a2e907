"""Results of a dispatch: received rows, and the handle that leads them back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["SCALES", "Handle", "Received", "copied", "received_rows", "scales_of"]

#: The element type of the scales that dispatch makes.
SCALES = {"fp8": torch.float32, "fp8_pow2": torch.float32, "fp8_ue8m0": torch.uint8}
#: Channels that have a scale together.
GROUP = 128


def scales_of(hidden: int, quantize: str) -> tuple[int, torch.dtype]:
    """How many scales a row has, and their type."""
    return -(-hidden // GROUP), SCALES[quantize]


class HandleOwner(Protocol):
    """The buffer that a handle belongs to, as far as handles need it: an `ExpertBuffer`."""

    world: int
    capacity: int
    local_experts: int
    top_k: int
    device: torch.device
    _parts: dict[str, int]


class Handle:
    """How the tokens of a dispatch were routed. `ExpertBuffer.combine` sends their rows back with it, and a
    later `ExpertBuffer.dispatch(x, handle=handle)` sends other rows the same way. Any number of them may be
    kept; each belongs to the buffer that made it. All tensors are views of its memory, on the buffer's
    device."""

    __slots__ = ("buffer", "memory", "tokens", "layout", "alignment", "rows", "weights", "counts", "_parts")

    def __init__(
        self,
        buffer: HandleOwner,
        tokens: int,
        layout: str,
        alignment: int,
        rows: int,
        memory: torch.Tensor | None = None,
    ):
        self.buffer: Any = buffer
        self._parts = buffer._parts
        if memory is None:
            memory = torch.empty(self._parts["elements"], dtype=torch.int32, device=buffer.device)
        self.memory = memory
        #: Tokens of this rank.
        self.tokens = tokens
        #: "rank" or "expert".
        self.layout = layout
        self.alignment = alignment
        #: Rows that `combine` takes, at least: those of `received.x`.
        self.rows = rows
        #: The weights that the dispatch was given.
        self.weights: torch.Tensor | None = None
        #: Rows of each expert of this rank, known to the host, where the dispatch was exact.
        self.counts: list[int] | None = None

    def part(self, name: str, *shape: int) -> torch.Tensor:
        """A part of the memory, int32."""
        begin, count = self._parts[name], 1
        for length in shape:
            count *= length
        return self.memory[begin : begin + count].view(shape)

    @property
    def num_received(self) -> torch.Tensor:
        """Tokens that this rank received: a scalar."""
        return self.memory[0]

    @property
    def num_rows(self) -> torch.Tensor:
        """Rows of `received.x` that are in use, padding between experts included: a scalar."""
        return self.memory[0 if self.layout == "rank" else 2]

    @property
    def source_offsets(self) -> torch.Tensor:
        """Where the tokens of each rank begin among those received, and the end: `[world + 1]`."""
        return self.part("source_offsets", self.buffer.world + 1)

    @property
    def source_index(self) -> torch.Tensor:
        """Which token of its rank each received one is: `[capacity]`."""
        return self.part("tokens", self.buffer.capacity)

    @property
    def expert_counts(self) -> torch.Tensor:
        """Rows of each expert of this rank."""
        return self.part("expert_counts", self.buffer.local_experts)

    @property
    def expert_offsets(self) -> torch.Tensor:
        """In layout "expert", where the rows of each expert of this rank begin, and the end."""
        return self.part("expert_offsets", self.buffer.local_experts + 1)

    @property
    def places(self) -> torch.Tensor:
        """In layout "expert", for each received token and expert of it its row, -1 for experts elsewhere:
        `[capacity, top_k]`. Behind the received tokens it means nothing."""
        return self.part("places", self.buffer.capacity, self.buffer.top_k)

    @property
    def kept_weights(self) -> torch.Tensor:
        """In layout "expert", the weights of these."""
        return self.part("weights", self.buffer.capacity, self.buffer.top_k).view(torch.float32)

    def __repr__(self) -> str:
        return f"symmpool.experts.Handle({self.tokens} tokens, layout={self.layout!r}, of {self.buffer!r})"


@dataclass
class Received:
    """The rows that a rank received. Of each tensor the first `num_rows` rows are in use, unless the dispatch
    was `exact`."""

    #: `[capacity, hidden]`. In layout "rank" a copy where autograd is on, whose unused rows are zeros. Else a
    #: view of the buffer's memory, until its next dispatch.
    x: torch.Tensor
    #: The scales of quantised rows: `[capacity, n]`, or None.
    scales: torch.Tensor | None
    #: In layout "rank", for each row its experts as numbers of those of this rank, -1 for those elsewhere:
    #: int32, `[capacity, top_k]`. None in layout "expert", and where the routing is that of a handle.
    topk_ids: torch.Tensor | None
    #: Their weights, float32; 1 where none were given.
    topk_weights: torch.Tensor | None
    #: How the rows were routed. The tensors below are views of it, made when they are asked for.
    handle: Handle

    def tensors(self) -> list[torch.Tensor]:
        """Those of the tensors above that there are."""
        all_ = (self.x, self.scales, self.topk_ids, self.topk_weights)
        return [tensor for tensor in all_ if tensor is not None]

    @property
    def num_rows(self) -> torch.Tensor:
        """How many rows are in use: a scalar, int32, on the buffer's device."""
        return self.handle.num_rows

    @property
    def source_offsets(self) -> torch.Tensor | None:
        """In layout "rank", where the rows of each rank begin, and the end: int32, `[world + 1]`."""
        return self.handle.source_offsets if self.handle.layout == "rank" else None

    @property
    def expert_offsets(self) -> torch.Tensor | None:
        """In layout "expert", where the rows of each expert of this rank begin, and the end: int32."""
        return self.handle.expert_offsets if self.handle.layout == "expert" else None

    @property
    def expert_counts(self) -> torch.Tensor:
        """Rows of each expert of this rank, without padding: int32."""
        return self.handle.expert_counts

    @property
    def host_expert_counts(self) -> list[int] | None:
        """Returns the counts as a list of the host; None unless the dispatch that made the handle was
        exact."""
        return self.handle.counts


#: Integers of so many bytes, as which elements of any type are selected.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def received_rows(handle: Handle, rows: int) -> torch.Tensor:
    """Which of so many rows are received tokens: `[rows, 1]`."""
    at = torch.arange(rows, device=handle.memory.device)
    return (at < handle.num_received)[:, None]


def copied(received: Received, handle: Handle, exact: bool) -> None:
    """Has tensors by rank be copies of the views that they are. What is not in use is zeros, so that no
    gradient depends on what lay there; of ids it is -1. With `exact` all is in use."""
    if exact:
        for name in ("x", "scales", "topk_ids", "topk_weights"):
            tensor = getattr(received, name)
            setattr(received, name, None if tensor is None else tensor.clone())
        return
    used = received_rows(handle, received.x.shape[0])
    received.x = _used(used, received.x)
    if received.scales is not None:
        received.scales = _used(used, received.scales)
    if received.topk_ids is not None and received.topk_weights is not None:
        received.topk_ids = torch.where(used, received.topk_ids, -1)
        received.topk_weights = torch.where(used, received.topk_weights, 0)


def _used(used: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if rows.dtype.is_floating_point and rows.dtype.itemsize > 1:
        return torch.where(used, rows, 0)
    integers = rows.view(_INTEGERS.get(rows.dtype.itemsize, torch.uint8))
    return torch.where(used, integers, 0).view(rows.dtype)
