"""`PrepareAndFinalize`: what vLLM's modular mixture-of-experts kernels ask of a way to send tokens, on this
package's `experts.ExpertBuffer`.

    from symmpool import experts
    from symmpool.engines import fused_moe

    buffer = experts.ExpertBuffer(group, hidden=7168, experts=256, top_k=8, max_tokens=4096)
    kernel = FusedMoEModularKernel(fused_moe.for_vllm()(buffer), fused_experts)

`for_vllm()` makes a class that is also vLLM's own `FusedMoEPrepareAndFinalizeModular` (or, in versions
before, its `FusedMoEPrepareAndFinalize`). The class itself needs no vLLM."""

from __future__ import annotations

import enum
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from symmpool._symmpool import Pool
from symmpool.errors import InvalidArgumentError, InvalidStateError, UnsupportedError
from symmpool.experts import ExpertBuffer
from symmpool.experts.checks import Dispatch, checked_combine, readable, shown, switch, tensor
from symmpool.experts.door import Door
from symmpool.experts.packed import combine_packed, dispatch_packed

if TYPE_CHECKING:
    from typing import TypeAlias

    from symmpool.engines.types import QuantConfig

    #: Quantises received rows, as experts take them: rows, and their scales or None.
    Quantize: TypeAlias = Callable[[torch.Tensor, QuantConfig], tuple[torch.Tensor, torch.Tensor | None]]
    #: Results of `prepare`: rows, scales, counts (of vLLM's class where that is there), ids and weights.
    Prepared: TypeAlias = tuple[
        torch.Tensor, torch.Tensor | None, "ExpertTokensMetadata", torch.Tensor | None, torch.Tensor | None
    ]

__all__ = ["ActivationFormat", "ExpertTokensMetadata", "PrepareAndFinalize", "for_vllm"]

_KERNELS = "vllm.model_executor.layers.fused_moe.modular_kernel"
_UTILITIES = "vllm.model_executor.layers.fused_moe.utils"
_BLOCK = 128


class ActivationFormat(enum.Enum):
    """How rows lie that experts get, where vLLM's own names are not there: `[tokens, hidden]`, or a part for
    each expert."""

    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


@dataclass
class ExpertTokensMetadata:
    """The rows of each expert of the rank, where vLLM's own class is not there."""

    expert_num_tokens: torch.Tensor | None
    expert_num_tokens_cpu: torch.Tensor | None


class PrepareAndFinalize:
    """Sends tokens to the ranks of their experts (`prepare`), and sums up what these make of them
    (`finalize`).

    Rows of tokens are `[rows, hidden]`, with the numbers of their experts and weights; with `batched` there
    is a part for each expert of the rank, `[local experts, ranks * max_tokens, hidden]`. With `exact` the
    host waits for the number of rows; else there are as many as can be, those behind the last one name
    experts of other ranks, and calls can be captured. `batched` never waits.

    Tokens are quantised when they are sent where experts take float8_e4m3fn with scales for 128 channels
    each; otherwise they are sent as they are, and `quantize` makes of the received rows what experts take:
    `(rows, quant_config) -> (rows, scales)`. Without it, vLLM's own function does.

    Calls run on the current stream. Those that return callbacks run beside it, and the callback makes the
    current stream wait. One object may have two batches under way, by turns: `batch` says which one the next
    calls are of."""

    _types: Any = None

    def __init__(
        self,
        buffer: ExpertBuffer,
        *,
        batched: bool = False,
        exact: bool = True,
        quantize: Quantize | None = None,
        batch: Callable[[], int] = lambda: 0,
    ):
        if not isinstance(buffer, ExpertBuffer):
            raise TypeError(f"buffer: a symmpool.experts.ExpertBuffer is needed, not {type(buffer)}")
        self.buffer, self.batched, self.exact = buffer, batched, exact
        self._quantize, self._batch = quantize, batch
        self._handles: dict[int, Any] = {}
        self._stream: Any = None

    # --- what kernels ask about it

    @property
    def activation_format(self) -> enum.Enum:
        """vLLM's `FusedMoEActivationFormat`, or this module's."""
        formats = getattr(self._types, "FusedMoEActivationFormat", ActivationFormat)
        return formats.BatchedExperts if self.batched else formats.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        """None: ids are int32 or int64."""
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        """The most tokens of a rank, where that gives parts their size."""
        return self.buffer.max_tokens if self.batched else None

    def num_dispatchers(self) -> int:
        """How many ranks there are."""
        return self.buffer.world

    def output_is_reduced(self) -> bool:
        """True: `finalize` gives complete sums."""
        return True

    def supports_async(self) -> bool:
        """True."""
        return True

    def post_init_setup(self, fused_experts: object) -> None:
        """Does nothing."""

    # --- sending

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: QuantConfig,
        defer_input_quant: bool = False,
    ) -> Prepared:
        """Sends `a1`, `[tokens, hidden]`. Returns `(rows, scales or None, counts, ids or None, weights or
        None)`. Ids are numbers of all experts; those of other ranks are one of another rank's."""
        with Door(self.buffer._entry.preparing) as door:
            self._check(a1, topk_weights, topk_ids, num_experts, apply_router_weight_on_input)
            switch("defer_input_quant", defer_input_quant)
            sent = self._send(
                door,
                a1,
                topk_weights,
                topk_ids,
                apply_router_weight_on_input,
                quant_config,
                defer_input_quant,
            )
        return self._given(sent, quant_config, defer_input_quant)

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: QuantConfig,
        defer_input_quant: bool = False,
    ) -> tuple[Callable[[], None], Callable[[], Prepared]]:
        """Prepares like `prepare`, beside the current stream: `(hook, receiver)`. `hook()` makes the current
        stream wait, and `receiver()` then returns what `prepare` does."""
        with Door(self.buffer._entry.preparing) as door:
            self._check(a1, topk_weights, topk_ids, num_experts, apply_router_weight_on_input)
            on_input, defer = apply_router_weight_on_input, switch("defer_input_quant", defer_input_quant)
            sent, wait = self._beside(
                lambda: self._send(door, a1, topk_weights, topk_ids, on_input, quant_config, defer),
                (a1, topk_weights, topk_ids),
            )
        return wait, lambda: self._given(sent, quant_config, defer_input_quant)

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: object = None,
    ) -> None:
        """Writes the sums of this rank's tokens to `output`. Experts have left weights and the sum over a
        token's experts to `weight_and_reduce_impl`; where that only passes them on, they are done here."""
        with Door(self.buffer._entry.preparing) as door:
            self._return(
                door,
                output,
                fused_expert_output,
                topk_weights,
                topk_ids,
                apply_router_weight_on_input,
                weight_and_reduce_impl,
            )

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: object = None,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Finalizes like `finalize`, beside the current stream: `(hook, receiver)`."""
        with Door(self.buffer._entry.preparing) as door:
            _, wait = self._beside(
                lambda: self._return(
                    door,
                    output,
                    fused_expert_output,
                    topk_weights,
                    topk_ids,
                    apply_router_weight_on_input,
                    weight_and_reduce_impl,
                ),
                (output, fused_expert_output, topk_weights, topk_ids),
            )
        return wait, lambda: None

    # --- how

    def _check(
        self, a1: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, num_experts: int, on_input: bool
    ) -> None:
        for what, given in (("a1", a1), ("topk_weights", weights), ("topk_ids", ids)):
            _readable(f"prepare: {what}", given)
            if given.dim() != 2 or given.shape[0] != a1.shape[0]:
                raise InvalidArgumentError(
                    f"prepare: {what}: of shape {tuple(given.shape)}, with tokens of shape {tuple(a1.shape)}"
                )
        if not isinstance(num_experts, int) or num_experts != self.buffer.experts:
            why = f"num_experts={shown(num_experts)}, and the buffer is made for {self.buffer.experts}"
        elif switch("apply_router_weight_on_input", on_input) and ids.shape[1] != 1:
            why = f"apply_router_weight_on_input with {ids.shape[1]} experts a token: there may be one"
        else:
            return
        raise InvalidArgumentError(f"prepare: {why}")

    def _send(
        self,
        door: Door,
        a1: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        on_input: bool,
        quant_config: QuantConfig,
        defer: bool,
    ) -> tuple[Any, ...]:
        # A program's function says it, before there is anything to keep.
        batch = self._batch()
        if on_input:
            a1 = a1 * weights.to(a1.dtype)
        quantize = "fp8" if _in_blocks(quant_config) and not defer else None
        ids = ids.contiguous()
        buffer = self.buffer
        if self.batched:
            rows, scales, handle = dispatch_packed(
                door, buffer, a1.contiguous(), ids, buffer.world * buffer.max_tokens, quantize
            )
            self._handles[batch] = handle
            return rows, scales, handle, None, None
        asked = Dispatch(
            a1.detach().contiguous(),
            ids,
            weights.detach().float().contiguous(),
            quantize=quantize,
            exact=self.exact,
        )
        # Until what the call has left is copied: the next dispatch writes where received rows lie.
        with buffer.in_turn():
            received, handle, _ = buffer._dispatch(door, asked)
            # Rows by rank come with both.
            assert received.topk_ids is not None and received.topk_weights is not None
            self._handles[batch] = handle
            first = buffer.rank * buffer.local_experts
            # Experts of another rank, which kernels leave out by the map of experts.
            elsewhere = buffer.experts - 1 if first == 0 else 0
            there = received.topk_ids >= 0
            if not self.exact:
                at = torch.arange(len(there), device=there.device)
                there = there & (at < handle.num_received)[:, None]
            shown = torch.where(there, received.topk_ids + first, elsewhere).to(ids.dtype)
            row_weights = torch.where(there, received.topk_weights, 0)
            scales = None if received.scales is None else received.scales.clone()
            rows = received.x.clone()
            buffer.extend_order()
            return rows, scales, handle, shown, row_weights

    def _given(self, sent: tuple[Any, ...], quant_config: QuantConfig, defer: bool) -> Prepared:
        rows, scales, handle, ids, weights = sent
        known = (
            None if handle.counts is None else torch.tensor(handle.counts, dtype=torch.int32, device="cpu")
        )
        counts = getattr(self._types, "ExpertTokensMetadata", ExpertTokensMetadata)(
            handle.expert_counts, known
        )
        if scales is None and not defer and getattr(quant_config, "quant_dtype", None) is not None:
            shape = rows.shape
            if rows.numel() != 0:
                rows, scales = self._quantized(rows.view(-1, shape[-1]), quant_config)
                rows = rows.view(*shape[:-1], -1)
                if (
                    self.batched
                    and scales is not None
                    and scales.dim() == 2
                    and scales.shape[0] == rows[..., 0].numel()
                ):
                    scales = scales.view(*shape[:-1], -1)
        return rows, scales, counts, ids, weights

    def _quantized(
        self, rows: torch.Tensor, quant_config: QuantConfig
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._quantize is not None:
            return self._quantize(rows, quant_config)
        try:
            function = importlib.import_module(_UTILITIES).moe_kernel_quantize_input
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(
                f"prepare: experts take {quant_config.quant_dtype}, and vLLM has no function for that here; "
                "pass quantize= to PrepareAndFinalize"
            ) from error
        return function(
            rows,
            quant_config.a1_scale,
            quant_config.quant_dtype,
            quant_config.per_act_token_quant,
            quant_config.block_shape,
        )

    def _return(
        self,
        door: Door,
        output: torch.Tensor,
        made: Any,
        weights: Any,
        ids: torch.Tensor,
        on_input: bool,
        reduce: Any,
    ) -> tuple[torch.Tensor, ...]:
        batch = self._batch()
        handle = self._handles.get(batch)
        if handle is None:
            raise InvalidStateError("finalize: there was no prepare before")
        for what, given in (("output", output), ("fused_expert_output", made)):
            _readable(f"finalize: {what}", given)
        if output.shape != (handle.tokens, self.buffer.hidden):
            raise InvalidArgumentError(
                f"finalize: output: of shape {tuple(output.shape)}, where [{handle.tokens}, "
                f"{self.buffer.hidden}] is needed"
            )
        if output.requires_grad or any(
            step == 0 and length > 1 for step, length in zip(output.stride(), output.shape)
        ):
            raise InvalidArgumentError("finalize: output: sums cannot be written to it; pass a plain tensor")
        if not made.is_floating_point():
            raise InvalidArgumentError(f"finalize: fused_expert_output: elements of {made.dtype}")
        if not _passes_on(reduce) and not callable(getattr(reduce, "apply", None)):
            raise TypeError(f"finalize: weight_and_reduce_impl: {shown(reduce)} has no apply")
        on_input = switch("apply_router_weight_on_input", on_input)
        if self.batched or made.dim() == 3:
            _readable("finalize: topk_weights", weights)
        same_type = output.dtype == self.buffer.dtype and output.is_contiguous()
        out = output if same_type else None
        if self.batched:
            given = (
                torch.ones_like(weights, dtype=torch.float32) if on_input else weights.float().contiguous()
            )
            sums = combine_packed(door, self.buffer, made.contiguous(), handle, given, out)
        else:
            rows = _reduced(made, weights, ids, on_input, reduce)
            rows = rows.to(self.buffer.dtype).contiguous()
            checked_combine(self.buffer, rows, handle, out)
            sums, _ = self.buffer._combine(door, rows, handle, None, out)
        # A finalize that is refused can be made again.
        self._handles.pop(batch, None)
        if out is None:
            output.copy_(sums)
        return (sums, handle.memory)

    def _beside(self, call: Callable[[], Any], inputs: tuple[Any, ...]) -> tuple[Any, Callable[[], None]]:
        """Makes a call on a stream of this object. Returns what it does, and what waits for it."""
        device = self.buffer.device
        if device.type != "cuda":
            return call(), lambda: None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        current, stream = torch.cuda.current_stream(device), self._stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            found = call()
            event = stream.record_event()
        for given in inputs:
            Pool.record_stream(given, stream)
        made = [getattr(each, "memory", each) for each in found]
        for each in made:
            if isinstance(each, torch.Tensor):
                Pool.record_stream(each, current)
        return found, lambda: torch.cuda.current_stream(device).wait_event(event)


def _readable(name: str, given: object) -> None:
    readable(name, tensor(name, given, optional=False))


def _in_blocks(quant_config: QuantConfig) -> bool:
    """Whether experts take float8_e4m3fn with a scale for each 128 channels."""
    shape = getattr(quant_config, "block_shape", None)
    of_type = getattr(quant_config, "quant_dtype", None) == torch.float8_e4m3fn
    return of_type and shape is not None and shape[1] == _BLOCK


def _passes_on(reduce: Any) -> bool:
    """Whether experts leave weights and sums to what takes the rows back."""
    return reduce is None or "Delegate" in type(reduce).__name__


def _reduced(
    made: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, on_input: bool, reduce: Any
) -> Any:
    """The sum over the experts of each row, with weights: `[rows, hidden]`."""
    if not _passes_on(reduce) and made.numel() != 0:
        return reduce.apply(
            output=None,
            fused_expert_output=made,
            topk_weights=weights,
            topk_ids=ids,
            apply_router_weight_on_input=on_input,
        )
    if made.dim() == 2:
        return made
    made = made.float()
    return (made if on_input else made * weights[:, :, None]).sum(1)


@functools.cache
def for_vllm() -> type:
    """The class for vLLM's kernels. Raises UnsupportedError where vLLM is not there."""
    try:
        kernels = importlib.import_module(_KERNELS)
    except ImportError as error:
        raise UnsupportedError(f"for_vllm: {_KERNELS} cannot be imported: {error}") from error
    base = getattr(kernels, "FusedMoEPrepareAndFinalizeModular", None) or kernels.FusedMoEPrepareAndFinalize
    return type("SymmpoolPrepareAndFinalize", (PrepareAndFinalize, base), {"_types": kernels})
