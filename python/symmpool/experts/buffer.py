"""`Buffer`: dispatch to experts, and combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from symmpool._symmpool import ExpertBuffer, Pool
from symmpool.communicators import cache, devices, torch_state
from symmpool.errors import InvalidArgumentError
from symmpool.experts import operators
from symmpool.experts.received import SCALES, Handle, Received, scales_of
from symmpool.groups import pool_registry, resolution
from symmpool.groups.names import resolved

__all__ = ["Buffer", "combine", "dispatch"]

_LAYOUTS = ("rank", "expert")


class Buffer:
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
    of that moment. Gradients flow through both calls. After an error about ids or
    room the communicator stays usable; on the CPU the call raises it, on CUDA `synchronize`."""

    def __init__(
        self,
        group: Any = None,
        *,
        hidden: int,
        experts: int,
        top_k: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        device: Any = None,
        num_sms: int | None = None,
        capacity: int | None = None,
        count_load: bool = False,
    ):
        number = devices.number_of(_device_for(group) if device is None else str(device))
        entry = cache.look_up(None, group, number)
        if entry is None:
            raise InvalidArgumentError("group: this process is no member of it")
        entry.join_pending()
        made_for = {
            "hidden": hidden,
            "experts": experts,
            "top_k": top_k,
            "max_tokens": max_tokens,
            "capacity": capacity,
        }
        self._core = ExpertBuffer(entry.comm, dtype=dtype, num_sms=num_sms, **made_for)
        self._entry, self._made_for, self._num_sms = entry, made_for, num_sms
        self.device = torch.device(devices.name_of(number))
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
    ) -> Any:
        """Sends the tokens `x`, `[tokens, hidden]`, to the ranks of their experts `topk_ids`, `[tokens,
        top_k]`, int32 or int64, where -1 stands for none. Returns `(received, handle)`; with `hook=True`
        `(received, handle, wait)`: the call runs on a stream of the buffer's, and `wait()` makes the
        current stream wait for it.

        A token goes to a rank once. In layout "rank" there is a row for each token, by source rank and there
        in the order of tokens; `received.x` is a view of the buffer's memory, which the next dispatch
        overwrites. In layout "expert" there is a row for each token and expert of it on this rank, by expert,
        source and token, and the first row of each expert is a multiple of `alignment`; rows between experts
        are not written. They are written to `out` and `out_scales`, `[rows, hidden]` and `[rows, n]`, or to
        new tensors that have room for all there may be.

        `topk_weights`, float32, travel with the rows. `quantize` makes float8_e4m3fn of tokens, with a scale
        for each 128 channels: "fp8", "fp8_pow2" (powers of two), "fp8_ue8m0" (their exponents, uint8). Tokens
        of float8_e4m3fn travel as they are, with the rows of `scales`, of any type. `exact=True` waits until
        it is known how many rows arrive, which is before they have: all sizes are exact, and
        `received.host_expert_counts` is there. `handle` sends the tokens as those of its dispatch were,
        without ids and weights.

        Raises InvalidArgumentError, on every rank, for an id that is no expert, which counts as -1, and
        OverflowError where a rank has no room for all its rows, the last of which are not written."""
        options = {
            "scales": scales,
            "quantize": quantize,
            "layout": layout,
            "alignment": alignment,
            "exact": exact,
            "hook": hook,
        }
        options.update(handle=handle, out=out, out_scales=out_scales)
        weighted = topk_weights is not None and layout == "rank"
        if torch.is_grad_enabled() and (_has_grad(x) or (weighted and _has_grad(topk_weights))):
            from symmpool.experts import gradients

            return gradients.dispatch(self, x, topk_ids, topk_weights, options)
        return self._dispatch(x, topk_ids, topk_weights, **options)

    @torch_state.opaque
    def combine(
        self,
        expert_output: torch.Tensor,
        handle: Handle,
        *,
        weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        hook: bool = False,
    ) -> Any:
        """Sends the rows of `expert_output`, which lie as `received.x` did, back to the ranks of their
        tokens, and sums up the rows of each token in float32, in the order of ranks. Returns the sums,
        `[tokens, hidden]`, in `out` if it is given; with `hook=True` `(sums, wait)`, as `dispatch`. A token
        without rows becomes zeros.

        In layout "rank" rows are what a rank has summed up over its experts already. In layout "expert" they
        are multiplied by the weights that the dispatch was given, or by `weights`, `[tokens, top_k]`, and
        summed up on their rank in the order of the token's experts; these sums travel rounded to the buffer's
        type."""
        given = weights
        if weights is None and isinstance(handle, Handle) and handle.layout == "expert":
            given = handle.weights
        if torch.is_grad_enabled() and (_has_grad(expert_output) or _has_grad(given)):
            from symmpool.experts import gradients

            return gradients.combine(self, expert_output, handle, weights, out, hook)
        return self._combine(expert_output, handle, weights, out, hook)

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
        return f"symmpool.experts.Buffer({made_for}, dtype={self.dtype}, device={str(self.device)!r})"

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

    def _refusing(self, check: Callable[..., None], *arguments: Any) -> None:
        """Checks arguments. What is refused is reported to the other ranks."""
        try:
            check(*arguments)
        except (InvalidArgumentError, TypeError) as why:
            self._entry.refuse(str(why))
            raise

    def _check_handle(self, handle: Any) -> None:
        if not isinstance(handle, Handle):
            raise TypeError(f"handle: one that dispatch returned is needed, not {type(handle)}")
        if handle.buffer is not self:
            raise InvalidArgumentError(f"handle: of another buffer, {handle.buffer!r}")

    def _check_dispatch(self, x: Any, topk_ids: Any, topk_weights: Any, layout: Any, handle: Any) -> None:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x: a torch.Tensor is needed, not {type(x)}")
        if x.dim() != 2:
            raise InvalidArgumentError(
                f"x: of shape {tuple(x.shape)}, where [tokens, {self.hidden}] is needed"
            )
        if layout not in _LAYOUTS:
            raise InvalidArgumentError(f"layout: {layout!r} is neither 'rank' nor 'expert'")
        if handle is None:
            if topk_ids is None:
                raise InvalidArgumentError("topk_ids: they are missing, and there is no handle")
            return
        self._check_handle(handle)
        if topk_ids is not None or topk_weights is not None:
            raise InvalidArgumentError("topk_ids, topk_weights: a handle says where tokens go; pass None")
        if layout != handle.layout:
            raise InvalidArgumentError(f"layout: {layout!r} with a handle of layout {handle.layout!r}")
        if x.shape[0] != handle.tokens:
            raise InvalidArgumentError(f"x: {x.shape[0]} tokens with a handle of {handle.tokens}")

    def _check_exact(self, exact: bool, hook: bool) -> None:
        if exact and hook:
            raise InvalidArgumentError("exact, hook: exact sizes are waited for at once; ask for one of them")

    def _dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
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
    ) -> Any:
        self._refusing(self._check_dispatch, x, topk_ids, topk_weights, layout, handle)
        self._refusing(self._check_exact, exact, hook)
        known, by_expert = handle is not None, layout == "expert"
        dtype = torch.float8_e4m3fn if quantize in SCALES else x.dtype
        scaled: tuple[int, torch.dtype] | None = None
        if quantize in SCALES:
            scaled = scales_of(self.hidden, quantize)
        elif isinstance(scales, torch.Tensor) and scales.dim() == 2:
            scaled = (scales.shape[1], scales.dtype)
        if handle is None:
            handle = Handle(self, x.shape[0], layout, alignment, self.capacity)
            handle.weights = topk_weights
            if by_expert and out is None:
                handle.rows = self._core.capacity(True, alignment)
        if by_expert:
            if out is None:
                out = torch.empty((handle.rows, self.hidden), dtype=dtype, device=self.device)
            elif not known and isinstance(out, torch.Tensor) and out.dim() == 2:
                handle.rows = out.shape[0]
            if scaled is not None and out_scales is None:
                out_scales = torch.empty((out.shape[0], scaled[0]), dtype=scaled[1], device=self.device)
        else:
            out = out_scales = None
        arguments = (
            handle.memory, x, topk_ids, topk_weights, scales, quantize, out, out_scales, handle.alignment
        )  # fmt: skip
        call, sizes = self._core.dispatch, []
        if exact and not known:
            call = self._exact_dispatch(sizes)
        wait = self._run(call, arguments, hook, None if known else handle)
        received = self._received(handle, known, dtype, scaled, out, out_scales)
        if exact:
            self._cut(received, handle, *sizes)
        return (received, handle, wait) if hook else (received, handle)

    def _received(
        self, handle: Handle, known: bool, dtype: torch.dtype, scaled: Any, out: Any, out_scales: Any
    ) -> Received:
        if handle.layout == "expert":
            return Received(out, out_scales, None, None, handle)
        x = self._view("rows", self.hidden, dtype)
        scales = None if scaled is None else self._view("scales", *scaled)
        ids = None if known else self._view("ids", self.top_k, torch.int32)
        weights = None if known else self._view("weights", self.top_k, torch.float32)
        return Received(x, scales, ids, weights, handle)

    def _exact_dispatch(self, sizes: list[tuple[int, list[int]]]) -> Callable[..., None]:
        """The dispatch that waits until it is known how many rows arrive, which it appends to `sizes`."""

        def dispatch(*arguments: Any) -> None:
            sizes.append(self._core.dispatch(*arguments, exact=True))

        return dispatch

    def _cut(self, received: Received, handle: Handle, sizes: tuple[int, list[int]] | None = None) -> None:
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
        self, expert_output: Any, handle: Handle, weights: Any = None, out: Any = None, hook: bool = False
    ) -> Any:
        self._refusing(self._check_handle, handle)
        if out is None:
            out = torch.empty((handle.tokens, self.hidden), dtype=self.dtype, device=self.device)
        else:
            self._refusing(self._check_out, out, handle)
        rows = handle.rows
        if self.device.type == "cpu":
            # Nothing is waited for here.
            rows = min(rows, int(handle.num_rows))
        arguments = (handle.memory, out, expert_output, rows, weights, handle.layout == "expert")
        wait = self._run(self._core.combine, arguments, hook, None)
        return (out, wait) if hook else out

    def _check_out(self, out: Any, handle: Handle) -> None:
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"out: a torch.Tensor is needed, not {type(out)}")
        if out.requires_grad:
            raise InvalidArgumentError("out: it requires grad, and no gradient flows through what is written")
        if out.dim() != 2 or out.shape[0] != handle.tokens:
            raise InvalidArgumentError(
                f"out: of shape {tuple(out.shape)}, where [{handle.tokens}, {self.hidden}] is needed"
            )

    def _run(
        self, call: Any, arguments: tuple[Any, ...], hook: bool, counted: Handle | None
    ) -> Callable[[], None]:
        """Makes a call on the current stream, or with a hook on another. Returns what waits for it."""
        if not hook or self.device.type == "cpu":
            self._make(call, arguments, counted)
            return _nothing
        current = torch.cuda.current_stream(self.device)
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        side = self._side
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._make(call, arguments, counted)
            event = side.record_event()
        for tensor in arguments:
            if isinstance(tensor, torch.Tensor):
                Pool.record_stream(tensor, side)
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)

    def _make(self, call: Any, arguments: tuple[Any, ...], counted: Handle | None) -> None:
        self._entry.run(call, arguments, [], False)
        if counted is not None and self._load is not None:
            self._load += counted.expert_counts
            self.extend_order()

    def extend_order(self) -> None:
        """Has the next call, on whatever stream, come behind what the current stream was given so far: for
        whoever reads received rows behind a dispatch, as the next one overwrites them."""
        self._entry.extend_order()

    def _for_weights(self) -> Any:
        """A buffer of the same routing whose rows are the weights of a token, for their gradients. Making it
        is collective."""
        if self._weights_buffer is None:
            made_for = {**self._made_for, "hidden": -(-self.top_k // 4) * 4}
            core = ExpertBuffer(self._entry.comm, dtype=torch.float32, num_sms=self._num_sms, **made_for)
            from symmpool.experts.gradients import WeightsBuffer

            self._weights_buffer = WeightsBuffer(self, core, made_for["hidden"])
        return self._weights_buffer


def dispatch(buffer: Buffer, *arguments: Any, **options: Any) -> Any:
    """`buffer.dispatch`."""
    return buffer.dispatch(*arguments, **options)


def combine(buffer: Buffer, *arguments: Any, **options: Any) -> Any:
    """`buffer.combine`."""
    return buffer.combine(*arguments, **options)


def _has_grad(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad


def _nothing() -> None:
    """On the CPU, and without a hook, a call is on the stream when it returns."""


def _device_for(group: Any) -> str:
    """Where a group's first pool is; without one, the current CUDA device if the program uses CUDA."""
    group = resolved(group)
    if isinstance(group, Pool):
        return group.device
    if not cache.is_outside(group):
        pools = pool_registry.pools_of(resolution.key_of(group))
        if pools:
            return pools[0].device
    return "cuda" if torch.cuda.is_initialized() else "cpu"
