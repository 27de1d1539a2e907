"""The buffers of `symmpool.experts` behind a `Buffer`, made when a call first needs them.

DeepEP's names give no shape to a buffer when it is made. So the first call of a shape makes one, on all
ranks, and a later call with more tokens makes a larger one. What ranks must do alike is decided by numbers
that all of them have exchanged, so that they make the same buffers in the same calls, and arguments
that differ are an error on every rank before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from symmpool import experts
from symmpool._symmpool import Pool
from symmpool.communicators import cache, devices
from symmpool.communicators.entry import CommunicatorEntry, reason_of
from symmpool.errors import DivergedError, InvalidArgumentError, InvalidStateError
from symmpool.experts.door import Door
from symmpool.groups import declined_calls, resolution

if TYPE_CHECKING:
    from symmpool.groups.types import GroupLike

__all__ = ["DTYPES", "Cores"]

#: Types of tokens that travel as they are; combine takes these.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CALLS = ("dispatch", "low_latency_dispatch")
# Numbers that ranks exchange about a call; some of them may differ between ranks.
_FIELDS = (
    "call", "hidden", "num_experts", "dtype", "quantized tokens", "bytes of scales", "top-k",
    "num_worst_tokens", "num_max_dispatch_tokens_per_rank", "tokens",
)  # fmt: skip
_OWN = ("tokens",)


#: What a buffer was made for: its mode, and the numbers of its shape.
BufferName = tuple[Any, ...]


class Cores:
    """The buffers of a group on a device."""

    def __init__(self, group: GroupLike, rank: int, world: int, device: torch.device):
        self.group, self.rank, self.world, self.device = group, rank, world, device
        self._buffers: dict[tuple[Any, ...], experts.ExpertBuffer] = {}
        # Entry of the communicator for the exchanges, once there was one.
        self._exchange: Any = None
        #: The buffer of the last call in each mode.
        self.last: dict[str, experts.ExpertBuffer] = {}

    def memory(self) -> dict[str, int]:
        """The bytes of symmetric memory on this rank, by what it was made for, and their sum."""
        found: dict[str, int] = {}
        for (mode, *_), buffer in self._buffers.items():
            for each in (f"{mode}", "total"):
                found[each] = found.get(each, 0) + buffer.memory()["total"]
        return {"normal": 0, "low_latency": 0, "total": 0, **found}

    def door(self, is_made: Callable[[], bool]) -> Door:
        """The door of a call. The other ranks call a buffer if `is_made`, as far as this rank knows. Else
        they exchange what they are given. In host memory and on a pool both are one communicator."""

        def preparing() -> Any:
            if self._buffers and is_made():
                return next(iter(self._buffers.values()))._entry.preparing()
            return _ArgumentExchange(self)

        return Door(preparing)

    def is_made_for(self, worst: object) -> bool:
        """Whether dispatches with so many `num_worst_tokens`, of any shape, have a buffer already."""
        if not isinstance(worst, int) or worst <= 0:
            return False
        return any(
            name[0] == "normal" and (buffer.capacity == worst or worst in name[4:5])
            for name, buffer in self._buffers.items()
        )

    @staticmethod
    def spans_hosts(buffer: experts.ExpertBuffer) -> bool:
        """Whether the ranks of a buffer are on several hosts."""
        pool = buffer._entry.pool()
        return pool is not None and len(pool.hosts) > 1

    def _entry(self) -> CommunicatorEntry:
        """The device's communicator, made if need be, which is collective."""
        entry = cache.look_up(None, self.group, devices.number_of(str(self.device)))
        if entry is None:
            raise InvalidArgumentError("group: this process is no member of it")
        return entry

    def exchange(self) -> CommunicatorEntry:
        """Returns the entry of the communicator that exchanges the arguments of calls. The first exchange
        makes it, which is collective."""
        if self._exchange is None:
            # The device's communicator comes first: other calls go to the first pool of a group by default.
            self._entry()
            self._exchange = cache.communicator_for(self._row([]), self.group)
        if self._exchange is None:
            raise InvalidArgumentError("group: this process is no member of it")
        return self._exchange

    def _row(self, numbers: list[int]) -> torch.Tensor:
        device = self.device if isinstance(self.group, Pool) else torch.device("cpu")
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    def agree(self, door: Door, **fields: int) -> list[dict[str, int]]:
        """Exchanges what a call is given; `fields` are by the names above, with `_` for a space. Returns
        those of every rank. Waits for the other ranks' hosts, not for devices. The door is open again then:
        the other ranks make a buffer, or call one.

        Raises on every rank if one refuses its arguments or they differ between ranks."""
        named = {name.replace(" ", "_").replace("-", "_"): name for name in _FIELDS}
        given = {named[name]: value for name, value in fields.items()}
        sent = self._row([given.get(name, 0) for name in _FIELDS])
        rows = sent.new_empty((self.world, len(_FIELDS)))
        exchange = self.exchange()
        call = door.closing(exchange.comm.all_gather_into_tensor, False)
        exchange.run(call, (rows.view(-1), sent), [], False)
        found = [dict(zip(_FIELDS, each)) for each in rows.tolist()]
        # The ranks' next call is on the device's communicator.
        door.lead(self._entry().preparing)
        try:
            self._compare(found)
        except DivergedError:
            # Every rank finds that.
            door.close()
            raise
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

    def normal(
        self, door: Door, key: BufferName, found: list[dict[str, int]], top_k: int
    ) -> experts.ExpertBuffer:
        """The buffer of normal mode for tokens of a shape, `(hidden, experts, dtype)`, and for as many as any
        rank has."""
        name = ("normal", *key)
        # A buffer is for one token at least, where no rank has any yet.
        most = max(1, *(each["tokens"] for each in found))
        buffer = self._buffers.get(name)
        if buffer is None or buffer.max_tokens < most or buffer.top_k < top_k:
            had = (0, 0) if buffer is None else (buffer.max_tokens, buffer.top_k)
            # It grows by half at least, so that programs with more and more tokens make few buffers.
            tokens = had[0] if had[0] >= most else max(most, had[0] * 3 // 2)
            buffer = self._make(door, name, -(-tokens // 64) * 64, max(top_k, had[1]))
        self.last["normal"] = buffer
        return buffer

    def find_worst(self, key: BufferName, worst: int, top_k: int) -> experts.ExpertBuffer | None:
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
        self, door: Door, key: BufferName, found: list[dict[str, int]], worst: int, top_k: int
    ) -> experts.ExpertBuffer:
        """Makes such a buffer: it receives `worst` tokens and no more."""
        most = max(-(-worst // self.world), *(each["tokens"] for each in found), 1)
        name = ("normal", *key, worst, top_k)
        self.last["normal"] = self._make(door, name, most, top_k, min(worst, most * self.world))
        return self.last["normal"]

    def find_low_latency(self, key: tuple[int, int, int, int]) -> experts.ExpertBuffer | None:
        """The buffer of low-latency mode for `(hidden, experts, top_k, tokens)`, if there is one."""
        found = self._buffers.get(_low_latency_name(key))
        if found is not None:
            self.last["low_latency"] = found
        return found

    def low_latency(self, door: Door, key: tuple[int, int, int, int]) -> experts.ExpertBuffer:
        """Makes such a buffer."""
        _, _, top_k, most = key
        self.last["low_latency"] = self._make(door, _low_latency_name(key), most, top_k)
        return self.last["low_latency"]

    def _make(
        self, door: Door, name: BufferName, tokens: int, top_k: int, capacity: int | None = None
    ) -> experts.ExpertBuffer:
        _, hidden, count, dtype, *_ = name
        made_for = {
            "hidden": hidden, "experts": count, "top_k": top_k, "max_tokens": tokens, "capacity": capacity
        }  # fmt: skip
        buffer = experts.ExpertBuffer.__new__(experts.ExpertBuffer)
        buffer._make(door, self._entry(), made_for, dtype)
        # The former one goes when nothing uses it any more: handles keep theirs.
        self._buffers[name] = buffer
        return buffer

    def check_capture(self, why: str) -> None:
        """Raises InvalidStateError while a graph is captured."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidStateError(
                f"deep_ep on rank {self.rank}: {why} while a graph is captured; call it once before"
            )


class _ArgumentExchange:
    """The door where the other ranks exchange what they are given, or wait for this rank before the first
    exchange: then a thread meets them, and this rank goes on."""

    def __init__(self, cores: Cores):
        self._cores = cores

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        cores = self._cores
        assert error is not None
        if cores._exchange is not None:
            cores._exchange.decline_call(reason_of(error))
            return
        reason, group = reason_of(error), cores.group
        key = group if isinstance(group, Pool) else resolution.key_of(group)
        declined_calls.report(key, lambda: cores.exchange().decline_call(reason))


def _low_latency_name(key: tuple[int, int, int, int]) -> BufferName:
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


def invalid(why: str) -> InvalidArgumentError:
    """The error of wrong arguments."""
    return InvalidArgumentError(f"deep_ep: {why}")
