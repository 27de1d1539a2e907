"""The buffers of `symmpool.experts` behind a `Buffer`, made when a call first needs them.

DeepEP's names give no shape to a buffer when it is made. So the first call of a shape makes one, on all
ranks, and a later call with more tokens makes a larger one. What ranks must do alike is decided by numbers
that all of them have exchanged, so that they make the same buffers in the same calls, and arguments
that differ are an error on every rank before anything is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from symmpool import experts
from symmpool._symmpool import Pool
from symmpool.collectives.functions import all_gather_into_tensor
from symmpool.communicators import cache, devices
from symmpool.errors import DivergedError, InvalidArgumentError, InvalidStateError

__all__ = ["DTYPES", "Cores"]

#: Types of tokens that travel as they are; combine takes these.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CALLS = ("dispatch", "low_latency_dispatch")
# What ranks exchange about a call, and which of these numbers may differ between them.
_FIELDS = (
    "refused", "call", "hidden", "num_experts", "dtype", "quantized tokens", "bytes of scales", "top-k",
    "num_worst_tokens", "num_max_dispatch_tokens_per_rank", "tokens",
)  # fmt: skip
_OWN = ("refused", "tokens")


class Cores:
    """The buffers of a group on a device."""

    def __init__(self, group: Any, rank: int, world: int, device: torch.device):
        self.group, self.rank, self.world, self.device = group, rank, world, device
        self._buffers: dict[tuple[Any, ...], experts.Buffer] = {}
        # Whether the ranks have exchanged anything yet.
        self._met = False
        #: The buffer of the last call in each mode.
        self.last: dict[str, experts.Buffer] = {}

    def memory(self) -> dict[str, int]:
        """The bytes of symmetric memory on this rank, by what it was made for, and their sum."""
        found: dict[str, int] = {}
        for (mode, *_), buffer in self._buffers.items():
            for each in (f"{mode}", "total"):
                found[each] = found.get(each, 0) + buffer.memory()["total"]
        return {"normal": 0, "low_latency": 0, "total": 0, **found}

    @contextlib.contextmanager
    def declining(self, serving: experts.Buffer | None) -> Iterator[None]:
        """Tells the other ranks of arguments that are refused inside. They are in a call of `serving`, or,
        without it, wait for what this rank is given."""
        try:
            yield
        except (TypeError, ValueError) as why:
            if serving is None:
                self.agree(refused=str(why))
            else:
                serving._entry.refuse(str(why))
            raise

    def agree(self, refused: str | None = None, **fields: int) -> list[dict[str, int]]:
        """Exchanges what a call is given; `fields` are by the names above, with `_` for a space. Returns
        those of every rank. Waits for the other ranks' hosts, not for devices.

        Raises on every rank if one refuses its arguments or they differ between ranks."""
        named = {name.replace(" ", "_").replace("-", "_"): name for name in _FIELDS}
        given = {named[name]: value for name, value in fields.items()}
        given["refused"] = int(refused is not None)
        row = [given.get(name, 0) for name in _FIELDS]
        if not self._met:
            # The device's communicator comes first: other calls go to the first pool of a group by default.
            cache.look_up(None, self.group, devices.number_of(str(self.device)))
            self._met = True
        device = self.device if isinstance(self.group, Pool) else torch.device("cpu")
        sent = torch.tensor(row, dtype=torch.int64, device=device)
        rows = torch.empty((self.world, len(row)), dtype=torch.int64, device=device)
        all_gather_into_tensor(rows.view(-1), sent, group=self.group)
        found = [dict(zip(_FIELDS, each)) for each in rows.tolist()]
        if refused is not None:
            return found
        for rank, other in enumerate(found):
            if other["refused"]:
                raise _diverged(
                    rank, f"rank {rank} refused its own arguments; rank {self.rank} was in the call"
                )
        self._compare(found)
        return found

    def _compare(self, found: list[dict[str, int]]) -> None:
        mine = found[self.rank]
        for rank, other in enumerate(found):
            for name in _FIELDS:
                if name not in _OWN and mine[name] != other[name]:
                    here, there = (_shown(name, each[name]) for each in (mine, other))
                    call = f"{_CALLS[mine['call']]} on rank {self.rank}"
                    why = f"{name} is {here}, and {there} on rank {rank}; every rank passes the same"
                    raise _diverged(rank, f"{call}: {why}. Nothing was sent")

    def normal(self, key: tuple[Any, ...], found: list[dict[str, int]], top_k: int) -> experts.Buffer:
        """The buffer of normal mode for tokens of a shape, `(hidden, experts, dtype)`, and for as many as any
        rank has."""
        name = ("normal", *key)
        most = max(each["tokens"] for each in found)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.max_tokens < most or buffer.top_k < top_k:
            had = (0, 0) if buffer is None else (buffer.max_tokens, buffer.top_k)
            # It grows by half at least, so that programs with more and more tokens make few buffers.
            tokens = had[0] if had[0] >= most else max(most, had[0] * 3 // 2, 1)
            buffer = self._make(name, -(-tokens // 64) * 64, max(top_k, had[1]))
        self.last["normal"] = buffer
        return buffer

    def find_worst(self, key: tuple[Any, ...], worst: int, top_k: int) -> experts.Buffer | None:
        """The buffer for calls with `num_worst_tokens`, if there is one. What it is found by is the same on
        every rank."""
        shared = self._buffers.get(("normal", *key))
        if shared is not None and shared.capacity == worst and shared.top_k >= top_k:
            self.last["normal"] = shared
            return shared
        found = self._buffers.get(("normal", *key, worst, top_k))
        if found is not None:
            self.last["normal"] = found
        return found

    def worst(
        self, key: tuple[Any, ...], found: list[dict[str, int]], worst: int, top_k: int
    ) -> experts.Buffer:
        """Makes such a buffer: it receives `worst` tokens and no more."""
        most = max(-(-worst // self.world), *(each["tokens"] for each in found), 1)
        name = ("normal", *key, worst, top_k)
        self.last["normal"] = self._make(name, most, top_k, min(worst, most * self.world))
        return self.last["normal"]

    def serving(self, worst: int) -> experts.Buffer | None:
        """A buffer that serves calls with so many `num_worst_tokens`, of any shape, if there is one."""
        if worst <= 0:
            return None
        for name, buffer in self._buffers.items():
            if name[0] == "normal" and (buffer.capacity == worst or worst in name[4:5]):
                return buffer
        return None

    def find_low_latency(self, key: tuple[int, int, int, int]) -> experts.Buffer | None:
        """The buffer of low-latency mode for `(hidden, experts, top_k, tokens)`, if there is one."""
        found = self._buffers.get(_low_latency_name(key))
        if found is not None:
            self.last["low_latency"] = found
        return found

    def low_latency(self, key: tuple[int, int, int, int]) -> experts.Buffer:
        """Makes such a buffer."""
        _, _, top_k, most = key
        self.last["low_latency"] = self._make(_low_latency_name(key), most, top_k)
        return self.last["low_latency"]

    def _make(
        self, name: tuple[Any, ...], tokens: int, top_k: int, capacity: int | None = None
    ) -> experts.Buffer:
        _, hidden, count, dtype, *_ = name
        # The former one goes when nothing uses it any more: handles keep theirs.
        self._buffers[name] = experts.Buffer(
            self.group,
            hidden=hidden,
            experts=count,
            top_k=top_k,
            max_tokens=tokens,
            dtype=dtype,
            device=self.device,
            capacity=capacity,
        )
        return self._buffers[name]

    def check_capture(self, why: str) -> None:
        """Raises InvalidStateError while a graph is captured."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidStateError(
                f"deep_ep on rank {self.rank}: {why} while a graph is captured; call it once before"
            )


def _low_latency_name(key: tuple[int, int, int, int]) -> tuple[Any, ...]:
    hidden, count, top_k, most = key
    return "low_latency", hidden, count, torch.bfloat16, top_k, most


def _shown(name: str, value: int) -> Any:
    if name == "call":
        return _CALLS[value]
    if name == "dtype":
        return DTYPES[value]
    return bool(value) if name == "quantized tokens" else value


def _diverged(rank: int, why: str) -> DivergedError:
    error = DivergedError(f"deep_ep: {why}")
    error.ranks = (rank,)
    return error


def refuse(why: str) -> InvalidArgumentError:
    """The error of wrong arguments."""
    return InvalidArgumentError(f"deep_ep: {why}")
