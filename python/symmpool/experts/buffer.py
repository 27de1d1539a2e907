"""`ExpertBuffer`: dispatch to experts, and combine."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch

from symmpool._symmpool import ExpertBufferCore, Pool
from symmpool.communicators import cache, devices, torch_state
from symmpool.communicators.tensors import say_written
from symmpool.errors import InvalidArgumentError, InvalidStateError
from symmpool.experts import operators
from symmpool.experts.checks import Dispatch, checked_combine, checked_dispatch, has_grad, in_float32, switch
from symmpool.experts.door import Door
from symmpool.experts.received import Handle, Received, copied, scales_of
from symmpool.groups import pool_registry, resolution
from symmpool.groups.names import resolved

if TYPE_CHECKING:
    from symmpool.communicators.entry import CommunicatorEntry
    from symmpool.experts.gradients import WeightsBuffer
    from symmpool.groups.types import DeviceLike, GroupLike

__all__ = ["ExpertBuffer", "combine", "dispatch"]

_Left = TypeVar("_Left")


class ExpertBuffer:
    """Sends tokens to the ranks of their experts, and sums up what comes back.

    `group` is a process group of torch, a `symmpool.Group` or a `symmpool.Pool`; without one, the default
    group. Every rank makes its buffers with the same arguments, at the same place of its program, and none
    while a graph is captured. A rank has at most `max_tokens` tokens in a call, of `hidden` elements of
    `dtype` (bfloat16, float16 or float32), each with `top_k` of `experts` experts. It can receive `capacity`
    tokens, or all that there may be. Kernels take at most `num_sms` SMs, or what is best. With `count_load`,
    dispatches count the rows of each expert.

    Calls are collective: every rank makes them in the same order, with tokens or without. On CUDA they run on
    the current stream, the host waits for nothing unless `exact` asks for it (but in a group's first large
    call, which takes memory and meets the other ranks), and graphs that captured them replay with the routing
    of that moment. Gradients flow through both calls. Threads take turns: what a call of one has left in
    the buffer is copied before the next one begins. Whatever goes wrong on a rank before its call, a wrong
    argument or a lack of memory, is an error on every rank. After an error about ids or
    room the communicator stays usable; on the CPU the call raises it, on CUDA `synchronize`."""

    def __init__(
        self,
        group: GroupLike = None,
        *,
        hidden: int,
        experts: int,
        top_k: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        device: DeviceLike = None,
        num_sms: int | None = None,
        capacity: int | None = None,
        count_load: bool = False,
    ):
        wrong: Exception | None = None
        try:
            if not (device is None or isinstance(device, (str, torch.device))):
                raise TypeError(f"device: a name or a torch.device is needed, not {type(device)}")
            number = devices.number_of(_device_for(group) if device is None else str(device))
        except (InvalidArgumentError, TypeError, ValueError) as why:
            # The other ranks are most likely where a group's buffers are without a device.
            wrong, number = why, devices.number_of(_device_for(group))
        entry = cache.look_up(None, group, number)
        if entry is None:
            raise InvalidArgumentError("group: this process is no member of it")
        made_for = {
            "hidden": hidden,
            "experts": experts,
            "top_k": top_k,
            "max_tokens": max_tokens,
            "capacity": capacity,
        }
        with Door(entry.preparing) as door:
            if wrong is not None:
                raise wrong
            count_load = switch("count_load", count_load)
            self._make(door, entry, made_for, dtype, num_sms, count_load)
            door.close()

    def _make(
        self,
        door: Door,
        entry: CommunicatorEntry,
        made_for: dict[str, Any],
        dtype: torch.dtype,
        num_sms: int | None = None,
        count_load: bool = False,
    ) -> None:
        """Makes the buffer on a communicator. The door is open behind it."""
        ExpertBufferCore.check(entry.comm, dtype=dtype, num_sms=num_sms, **made_for)
        self._core = made_by_all(entry, door, dtype=dtype, num_sms=num_sms, **made_for)
        self._entry, self._made_for, self._num_sms = entry, made_for, num_sms
        # Held from before a call until what it has left in the buffer's memory was read.
        self._turn = threading.RLock()
        hidden, experts, top_k, max_tokens = (
            int(self._made_for[name]) for name in ("hidden", "experts", "top_k", "max_tokens")
        )
        self.device = torch.device(devices.name_of(entry.device))
        self.hidden, self.experts, self.top_k, self.max_tokens = hidden, experts, top_k, max_tokens
        self.dtype = dtype
        self.rank, self.world = entry.comm.rank, entry.comm.world
        self.local_experts = experts // self.world
        self.capacity = self._core.capacity(False, 1)
        self._parts = self._core.handle_parts()
        self.handle_elements = self._parts["elements"]
        #: The name by which `torch.ops.symmpool.experts_dispatch` and `experts_combine` find the buffer.
        self.name = operators.name(self)
        # The memory of received rows, as bytes: made here, as a capture could not wait for other streams.
        self._memory = {
            part: torch.from_dlpack(self._core.received(part, [self.capacity * row], "uint8"))
            for part, row in self._row_bytes()
        }
        # Views of it by part, width and type.
        self._views: dict[Any, torch.Tensor] = {}
        self._side: Any = None
        self._weights_buffer: Any = None
        self._load: torch.Tensor | None = None
        if count_load:
            self._load = torch.zeros(self.local_experts, dtype=torch.int64, device=self.device)

    @overload
    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        scales: torch.Tensor | None = None,
        quantize: str | None = None,
        layout: str = "rank",
        alignment: int = 1,
        exact: bool = False,
        hook: Literal[False] = False,
        handle: Handle | None = None,
        out: torch.Tensor | None = None,
        out_scales: torch.Tensor | None = None,
        copy: bool | None = None,
    ) -> tuple[Received, Handle]: ...

    @overload
    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        scales: torch.Tensor | None = None,
        quantize: str | None = None,
        layout: str = "rank",
        alignment: int = 1,
        exact: bool = False,
        hook: Literal[True],
        handle: Handle | None = None,
        out: torch.Tensor | None = None,
        out_scales: torch.Tensor | None = None,
        copy: bool | None = None,
    ) -> tuple[Received, Handle, Callable[[], None]]: ...

    @torch_state.opaque
    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        scales: torch.Tensor | None = None,
        quantize: str | None = None,
        layout: str = "rank",
        alignment: int = 1,
        exact: bool = False,
        hook: bool = False,
        handle: Handle | None = None,
        out: torch.Tensor | None = None,
        out_scales: torch.Tensor | None = None,
        copy: bool | None = None,
    ) -> tuple[Received, Handle] | tuple[Received, Handle, Callable[[], None]]:
        """Sends the tokens `x`, `[tokens, hidden]`, to the ranks of their experts `topk_ids`, `[tokens,
        top_k]`, int32 or int64, where -1 stands for none. Returns `(received, handle)`; with `hook=True`
        `(received, handle, wait)`: the call runs on a stream of the buffer's, and `wait()` makes the
        current stream wait for it.

        A token goes to a rank once. In layout "rank" there is a row for each token, by source rank and there
        in the order of tokens. In layout "expert" there is a row for each token and expert of it on this
        rank, by expert, source and token, and the first row of each expert is a multiple of `alignment`; rows
        between experts are not written. They are written to `out` and `out_scales`, `[rows, hidden]` and
        `[rows, n]`, or to new tensors that have room for all there may be.

        Rows by rank lie in the buffer's memory, where the next dispatch, also that of a backward pass, writes
        over them. So where autograd is on (`torch.is_grad_enabled()`), whether `x` requires grad or not,
        `received` has copies of rows, ids, weights and scales, and rows that are not in use are zeros. Under
        `torch.no_grad()` it has views of that memory. `copy` says otherwise: `True` for copies, `False` for
        views, which you must not use in what autograd saves.

        `topk_weights` travel with the rows, in float32; those of float16 and bfloat16 are converted.
        `quantize` makes float8_e4m3fn of tokens, with a scale for each 128 channels: "fp8", "fp8_pow2"
        (powers of two), "fp8_ue8m0" (their exponents, uint8). Tokens of float8_e4m3fn travel as they are,
        with the rows of `scales`, of any type. `exact=True` waits until it is known how many rows arrive,
        which is before they have: all sizes are exact, and `received.host_expert_counts` is there. `handle`
        sends the tokens as those of its dispatch were, without ids and weights.

        Raises InvalidArgumentError, on every rank, for an id that is no expert, which counts as -1, and
        OverflowError where a rank has no room for all its rows, the last of which are not written."""
        with Door(self._entry.preparing) as door:
            options: dict[str, Any] = {
                "scales": scales,
                "quantize": quantize,
                "layout": layout,
                "alignment": alignment,
                "exact": exact,
                "hook": hook,
            }
            options.update(handle=handle, out=out, out_scales=out_scales)
            given = checked_dispatch(self, x, topk_ids, topk_weights, copy, options)
            if torch.is_grad_enabled() and (
                has_grad(x) or (given.layout == "rank" and has_grad(topk_weights))
            ):
                from symmpool.experts import gradients

                return gradients.dispatch(door, self, given, copy)
            received, found, wait = self._dispatch(door, given)
        return (received, found, wait) if given.hook else (received, found)

    @overload
    def combine(
        self,
        expert_output: torch.Tensor,
        handle: Handle,
        *,
        weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        hook: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def combine(
        self,
        expert_output: torch.Tensor,
        handle: Handle,
        *,
        weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        hook: Literal[True],
    ) -> tuple[torch.Tensor, Callable[[], None]]: ...

    @torch_state.opaque
    def combine(
        self,
        expert_output: torch.Tensor,
        handle: Handle,
        *,
        weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        hook: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Callable[[], None]]:
        """Sends the rows of `expert_output`, which lie as `received.x` did, back to the ranks of their
        tokens, and sums up the rows of each token in float32, in the order of ranks. Returns the sums,
        `[tokens, hidden]`, in `out` if it is given; with `hook=True` `(sums, wait)`, as `dispatch`. A token
        without rows becomes zeros.

        In layout "rank" rows are what a rank has summed up over its experts already. In layout "expert" they
        are multiplied by the weights that the dispatch was given, or by `weights`, `[tokens, top_k]`, and
        summed up on their rank in the order of the token's experts; these sums travel rounded to the buffer's
        type.

        Raises InvalidArgumentError for a handle that was written to since its dispatch."""
        with Door(self._entry.preparing) as door:
            hook = switch("hook", hook)
            checked_combine(self, expert_output, handle, out)
            weights = in_float32("weights", weights)
            given = weights
            if weights is None and handle.layout == "expert":
                given = handle.weights
            if torch.is_grad_enabled() and (has_grad(expert_output) or has_grad(given)):
                from symmpool.experts import gradients

                return gradients.combine(door, self, expert_output, handle, weights, out, hook)
            sums, wait = self._combine(door, expert_output, handle, weights, out, hook)
        return (sums, wait) if hook else sums

    def rows_by_expert(self, alignment: int = 1) -> int:
        """The most rows that this rank can receive in layout "expert"."""
        return self._core.capacity(True, alignment)

    def memory(self) -> dict[str, int]:
        """The bytes of the buffer's symmetric memory on this rank, by part; "handle" is what each handle has
        besides, and "total" the sum without handles."""
        parts = dict(self._core.memory())
        total = sum(parts.values())
        if self._weights_buffer is not None:
            parts["weights_gradients"] = self._weights_buffer.memory()["total"]
            total += parts["weights_gradients"]
        return {**parts, "total": total, "handle": 4 * self.handle_elements}

    def load(self) -> torch.Tensor:
        """Rows that each expert of this rank received since the buffer was made or `reset_load`: int64, on
        the buffer's device, for buffers made with `count_load`. Dispatches with a handle do not count."""
        if self._load is None:
            raise InvalidArgumentError("load: the buffer was made without count_load=True")
        return self._load

    def reset_load(self) -> None:
        """Begins to count from zero, on the current stream."""
        self.load().zero_()

    def synchronize(self) -> None:
        """Waits for the current stream, and raises what went wrong in calls on it."""
        self._entry.comm.synchronize()

    def __repr__(self) -> str:
        made_for = ", ".join(f"{name}={value}" for name, value in self._made_for.items() if value is not None)
        return f"symmpool.experts.ExpertBuffer({made_for}, dtype={self.dtype}, device={str(self.device)!r})"

    def _row_bytes(self) -> list[tuple[str, int]]:
        """The parts of received rows, and the most bytes of a row."""
        chosen = 4 * self.top_k
        scales = 4 * scales_of(self.hidden, "fp8")[0]
        return [
            ("rows", self.hidden * self.dtype.itemsize),
            ("scales", scales),
            ("ids", chosen),
            ("weights", chosen),
        ]

    def _dispatch(
        self, door: Door, given: Dispatch, rows_of_each: int = 0
    ) -> tuple[Received, Handle, Callable[[], None]]:
        """Makes a dispatch whose arguments make sense. With `rows_of_each` each expert has a part of so many
        rows in `given.out`."""
        known, by_expert, out, out_scales = given.handle is not None, given.layout == "expert", None, None
        x, scales, quantize, alignment = given.x, given.scales, given.quantize, given.alignment
        dtype = x.dtype if quantize is None else torch.float8_e4m3fn
        scaled: tuple[int, torch.dtype] | None = None
        if quantize is not None:
            scaled = scales_of(self.hidden, quantize)
        elif scales is not None and scales.dim() == 2:
            scaled = (scales.shape[1], scales.dtype)
        handle = given.handle
        if handle is None:
            handle = Handle(self, x.shape[0], given.layout, alignment, self.capacity)
            handle.weights = given.weights
        if by_expert:
            out, out_scales = given.out, given.out_scales
            if out is None:
                if not known:
                    handle.rows = self._core.capacity(True, alignment)
                make = torch.zeros if given.copy else torch.empty
                out = make((handle.rows, self.hidden), dtype=dtype, device=self.device)
            elif not known and out.dim() == 2:
                handle.rows = out.shape[0]
            if scaled is not None and out_scales is None:
                out_scales = torch.empty((out.shape[0], scaled[0]), dtype=scaled[1], device=self.device)
        arguments: tuple[Any, ...] = (
            handle.memory, x, given.ids, given.weights, scales, quantize, out, out_scales, handle.alignment
        )  # fmt: skip
        is_waited_for = given.exact and not known
        if rows_of_each or is_waited_for or given.more:
            arguments = (*arguments, None, rows_of_each, is_waited_for, given.more)

        def left() -> Received:
            """Returns the results of the call. It runs on the call's stream, before another call can
            begin."""
            load = None if known else self._load
            if load is not None:
                load += handle.expert_counts
            if by_expert:
                assert out is not None
                received = Received(out, out_scales, None, None, handle)
            else:
                received = self._received(handle, known, dtype, scaled)
            if given.exact:
                self._cut(received, handle, door.result)
            copies = given.copy and not by_expert
            if copies:
                copied(received, handle, given.exact)
            if copies or load is not None:
                self.extend_order()
            return received

        received, wait = self._run(door, self._core.dispatch, arguments, given.hook, left, given.more)
        if given.out is not None:
            say_written(given.out, given.out_scales)
        return received, handle, wait

    def _received(
        self, handle: Handle, known: bool, dtype: torch.dtype, scaled: tuple[int, torch.dtype] | None
    ) -> Received:
        """Views of the buffer's memory."""
        x = self._view("rows", self.hidden, dtype)
        scales = None if scaled is None else self._view("scales", *scaled)
        ids = None if known else self._view("ids", self.top_k, torch.int32)
        weights = None if known else self._view("weights", self.top_k, torch.float32)
        return Received(x, scales, ids, weights, handle)

    def _cut(self, received: Received, handle: Handle, sizes: tuple[int, list[int]] | None) -> None:
        """Cuts tensors to the rows in use. Where the call gave no sizes, it waits for those of the handle."""
        if sizes is not None:
            count, handle.counts = sizes
        else:
            count = int(handle.num_rows)
            if self.device.type == "cuda":
                self.synchronize()
        for name in ("x", "scales", "topk_ids", "topk_weights"):
            tensor = getattr(received, name)
            setattr(received, name, None if tensor is None else tensor[:count])
        handle.rows = count

    def _view(self, part: str, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Received rows of a part, `[capacity, width]`."""
        key = (part, width, dtype)
        found = self._views.get(key)
        if found is None:
            count = self.capacity * width * dtype.itemsize
            found = self._memory[part][:count].view(dtype).view(self.capacity, width)
            self._views[key] = found
        return found

    def _combine(
        self,
        door: Door,
        expert_output: torch.Tensor,
        handle: Handle,
        weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        hook: bool = False,
        more: int = 0,
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Makes a combine whose arguments make sense. `more` calls follow that belong to it."""
        sums = out
        if sums is None:
            sums = torch.empty((handle.tokens, self.hidden), dtype=self.dtype, device=self.device)
        rows = handle.rows
        if self.device.type == "cpu":
            # Nothing is waited for here.
            rows = min(rows, max(int(handle.num_rows), 0))
        by_expert = handle.layout == "expert"
        arguments = (handle.memory, sums, expert_output, rows, weights, by_expert, None, more)
        _, wait = self._run(door, self._core.combine, arguments, hook, _nothing, more)
        if out is not None:
            say_written(out)
        return sums, wait

    def in_turn(self) -> threading.RLock:
        """The lock of the thread that makes a call and copies what it leaves. On the CPU what was begun is
        waited for before that: its callbacks may make calls of this buffer, too. So who holds the lock waits
        for no callbacks; what another thread begins meanwhile is in no order with this thread's calls."""
        is_held = self._turn._is_owned()  # type: ignore[attr-defined]
        if self._entry.pending is not None and self.device.type == "cpu" and not is_held:
            self._entry.join_pending()
        return self._turn

    def _run(
        self,
        door: Door,
        call: Callable[..., object],
        arguments: tuple[object, ...],
        hook: bool,
        left: Callable[[], _Left],
        more: int = 0,
    ) -> tuple[_Left, Callable[[], None]]:
        """Makes a call on the current stream, or with a hook on another, and `left` behind it. Returns what
        that returns, and what waits for both."""
        if not hook or self.device.type == "cpu":
            with self.in_turn():
                self._entry.run_joined(door.closing(call, not more), arguments)
                return left(), _nothing
        current = torch.cuda.current_stream(self.device)
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        side = self._side
        with self.in_turn(), contextlib.ExitStack() as on:
            side.wait_stream(current)
            on.enter_context(torch.cuda.stream(side))
            self._entry.run_joined(door.closing(call, not more), arguments)
            found = left()
            event = side.record_event()
        for tensor in arguments:
            if isinstance(tensor, torch.Tensor):
                Pool.record_stream(tensor, side)

        def wait() -> None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            if isinstance(found, Received):
                for tensor in found.tensors():
                    Pool.record_stream(tensor, stream)

        return found, wait

    def extend_order(self) -> None:
        """Has the next call, on whatever stream, come behind what the current stream was given so far: for
        whoever reads received rows behind a dispatch, as the next one overwrites them."""
        self._entry.extend_order()

    def _for_weights(self, door: Door) -> WeightsBuffer:
        """A buffer of the same routing whose rows are the weights of a token, for their gradients. Making it
        is collective."""
        if self._weights_buffer is None:
            made_for = {**self._made_for, "hidden": -(-self.top_k // 4) * 4}
            options = {"dtype": torch.float32, "num_sms": self._num_sms, "any_layout": True, **made_for}
            core = made_by_all(self._entry, door, **options)
            from symmpool.experts.gradients import WeightsBuffer

            self._weights_buffer = WeightsBuffer(self, core, made_for["hidden"])
        return self._weights_buffer


def made_by_all(entry: CommunicatorEntry, door: Door, **options: Any) -> ExpertBufferCore:
    """Makes a buffer's memory and kernels, in one call of the communicator: all ranks allocate, with the same
    options, or none does. Memory of buffers that all ranks have dropped is used again."""
    if entry.device >= 0 and torch.cuda.is_current_stream_capturing():
        raise InvalidStateError(
            "a buffer for experts is made while a graph is captured; make the call before"
        )
    entry.run(door.closing(functools.partial(ExpertBufferCore, entry.comm, **options), False), (), [], False)
    return door.result


#: `dispatch(buffer, ...)` is `buffer.dispatch(...)`, and `combine` likewise.
dispatch = ExpertBuffer.dispatch
combine = ExpertBuffer.combine


def _nothing() -> None:
    """On the CPU, and without a hook, a call is on the stream when it returns."""


def _device_for(group: GroupLike) -> str:
    """Where a group's first pool is; without one, the current CUDA device if the program uses CUDA."""
    group = resolved(group)
    if isinstance(group, Pool):
        return group.device
    if not cache.is_outside(group):
        pools = pool_registry.pools_of(resolution.key_of(group))
        if pools:
            return pools[0].device
    return "cuda" if torch.cuda.is_initialized() else "cpu"
