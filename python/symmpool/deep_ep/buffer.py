"""`Buffer`: DeepEP V1's calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from symmpool._symmpool import ExpertBufferCore, Pool
from symmpool.deep_ep import checks, low_latency, normal
from symmpool.deep_ep.config import Config
from symmpool.deep_ep.cores import Cores, invalid
from symmpool.deep_ep.handles import LowLatencyHandle, NormalHandle
from symmpool.deep_ep.low_latency import CombineBuffers
from symmpool.deep_ep.streams import CommStream, overlap
from symmpool.deep_ep.utils import EventHandle, EventOverlap
from symmpool.engines.core import group_of
from symmpool.errors import InvalidStateError, UnsupportedError
from symmpool.experts.checks import switch
from symmpool.groups import resolution
from symmpool.groups.names import resolved

if TYPE_CHECKING:
    from typing import TypeAlias

    from symmpool.groups.types import GroupLike

    #: Tokens, or quantised ones and their scales.
    Tokens: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

__all__ = ["Buffer"]


class Buffer:
    """Dispatch to experts and combine: on GPUs within a host, on the CPU also over hosts.

    `group` is a process group of torch, a `symmpool.Group` or a `symmpool.Pool`. Making a buffer talks to
    nobody and allocates nothing; the sizes and options of DeepEP are kept as attributes. The first call of a
    shape makes the memory for it on all ranks, and so does a later one with more tokens than there is room
    for: `memory()` says how much there is. Every rank makes the same calls in the same order."""

    #: The most SMs that kernels of normal mode take, where a call names no `config`.
    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: GroupLike,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: object = None,
    ):
        if group is None:
            what = (
                "group: a process group is needed"
                if comm is None
                else "comm: MPI's are not served; pass a group"
            )
            raise UnsupportedError(f"deep_ep: {what}") if comm is not None else invalid(what)
        #: As it was given: programs compare it.
        self.group = group
        found = group_of(resolved(group))
        members = found if isinstance(found, Pool) else resolution.resolve(resolution.key_of(found))
        # Groups of engines that are not in torch's list have a store, of which a group is made once.
        self._calls_on = members if isinstance(found, tuple) else found
        self._members = members
        self.rank, self.group_size = members.rank, members.world
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.num_qps_per_rank = low_latency_mode, num_qps_per_rank
        self.explicitly_destroy, self.enable_shrink = explicitly_destroy, enable_shrink
        self._by_device: dict[torch.device, tuple[Cores, CommStream]] = {}
        self._combine_buffers = CombineBuffers()
        # Which ranks are masked, and where calls read it.
        self._masked = [False] * self.group_size
        self._masks: dict[torch.device, torch.Tensor] = {}
        self._destroyed = False

    # --- names without a call

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether tokens of float8_e4m3fn are served, which they always are."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the most SMs that kernels of normal mode take: an even number."""
        if new_num_sms % 2 != 0 or new_num_sms < 2:
            raise invalid(f"num_sms={new_num_sms}: an even number of SMs is needed, 2 at least")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event recorded on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """The bytes of symmetric memory that low-latency calls of this shape hold on a rank, with 8 experts a
        token. Nobody has to pass them on. Over hosts of different numbers of ranks they hold more, which
        `memory()` says: it has what was made, and this name knows no group."""
        return ExpertBufferCore.bytes_for(
            world=num_ranks,
            hidden=hidden,
            experts=num_experts,
            top_k=8,
            max_tokens=num_max_dispatch_tokens_per_rank,
            dtype=torch.bfloat16,
        )

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """A config of `num_sms` SMs."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """A config of `num_sms` SMs."""
        return Config(Buffer.num_sms)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream on which calls run that are asynchronous, have a hook or a `previous_event`."""
        return self._parts()[1].stream

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: Sequence[int] | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """The memory in which rows of the last call arrive, as a tensor: of low-latency mode with
        `use_rdma_buffer`, else of normal mode. The next call overwrites it. Empty before the first call."""
        cores = self._parts()[0]
        core = cores.last.get("low_latency" if use_rdma_buffer else "normal")
        if core is None:
            found = torch.empty(0, dtype=dtype, device=cores.device)
        else:
            memory = core._memory["rows"]
            found = memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)
        found = found[offset:]
        if size is None:
            return found
        shape = torch.Size(size)
        if shape.numel() > len(found):
            raise invalid(
                f"size: {tuple(shape)}, and {len(found)} elements of {dtype} are there from {offset} on"
            )
        return found[: shape.numel()].view(shape)

    def memory(self) -> dict[str, int]:
        """The bytes that this rank holds: "normal" and "low_latency" symmetric memory, "combine_buffers" of
        `get_next_low_latency_combine_buffer`, and "total"."""
        found = {"normal": 0, "low_latency": 0, "combine_buffers": self._combine_buffers.memory()}
        for cores, _ in self._by_device.values():
            made = cores.memory()
            found["normal"] += made["normal"]
            found["low_latency"] += made["low_latency"]
        return {**found, "total": sum(found.values())}

    def synchronize(self) -> None:
        """Waits for the calls of this buffer, and raises what went wrong in them."""
        for cores, stream in self._by_device.values():
            for core in cores.last.values():
                if cores.device.type == "cuda" and stream._stream is not None:
                    torch.cuda.current_stream(cores.device).wait_stream(stream.stream)
                core.synchronize()

    def destroy(self) -> None:
        """Lets go of the memory, for buffers made with `explicitly_destroy`; handles keep what they need.
        Calls raise InvalidStateError from now on."""
        if not self.explicitly_destroy:
            raise InvalidStateError("deep_ep: destroy: the buffer was made without explicitly_destroy=True")
        self._destroyed = True
        self._by_device.clear()
        self._combine_buffers = CombineBuffers()

    # --- normal mode

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Counts, for `topk_idx`, int64 `[tokens, top_k]` with -1 for none: `(num_tokens_per_rank,
        num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank, event)`, int32 `[ranks]`, int32
        `[hosts]` or None on one host, int32 `[num_experts]` and bool `[tokens, ranks]`.

        The first one looks up which ranks share a host, on all ranks: `symmpool.Group.hosts`. On a
        `symmpool.Pool`, and later, it talks to nobody."""
        hosts = self._hosts()
        checks.check_layout(topk_idx, num_experts, self.group_size)
        checks.check_events(previous_event, async_finish, allocate_on_comm_stream)
        stream = self._parts(topk_idx)[1]
        found, event = stream.run(
            lambda: normal.layout(topk_idx, num_experts, hosts),
            [topk_idx],
            previous_event,
            async_finish,
        )
        of_ranks, of_hosts, of_experts, in_rank = found
        return of_ranks, of_hosts, of_experts, in_rank, overlap(event, found)

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: tuple[object, ...] | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Tokens, torch.Tensor | None, torch.Tensor | None, list[int] | None, NormalHandle | None, EventOverlap
    ]:
        """Sends tokens, `x` `[tokens, hidden]` or `(x, scales)` of float8_e4m3fn, to the ranks of their
        experts `topk_idx`; without these, to the ranks of `is_token_in_rank`. Returns `(recv_x,
        recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle, event)`: new tensors, a row
        for each token, by source rank and there in order. Ids are those of this rank's experts, -1 for
        others, whose weights are 0. The list has the rows of each expert, rounded up to `expert_alignment`.

        The host waits for sizes, and for the other ranks' hosts. With `num_worst_tokens` it does not: tensors
        have so many rows, ids are -1 behind those received, the list is empty, and graphs can capture it
        after a first call. With `handle` tokens go as those of its dispatch did, and the host does not wait
        either; the other parts of the result are None then."""
        cores, stream = self._parts(x)
        with cores.door(lambda: handle is not None or cores.is_made_for(num_worst_tokens)) as door:
            checks.check_events(previous_event, async_finish, allocate_on_comm_stream)
            tokens, scales = checks.tokens_and_scales(x)
            sms = self._sms(config)
            inputs = [tokens, scales, topk_idx, topk_weights, num_tokens_per_expert, is_token_in_rank]
            if handle is not None:
                found_handle = self._own(handle, NormalHandle)
                call = normal.again(door, found_handle, tokens, scales, topk_idx, topk_weights, sms)
                inputs.append(found_handle.kept.memory)
                found, event = stream.run(call, inputs, previous_event, async_finish)
                received = found[0] if scales is None else (found[0], found[1])
                return received, None, None, None, None, overlap(event, found)
            routing = {
                "num_tokens_per_rank": num_tokens_per_rank,
                "num_tokens_per_rdma_rank": num_tokens_per_rdma_rank,
                "is_token_in_rank": is_token_in_rank,
                "num_tokens_per_expert": num_tokens_per_expert,
                "topk_idx": topk_idx,
                "topk_weights": topk_weights,
            }
            call = normal.dispatch(
                door, self, cores, tokens, scales, routing, num_worst_tokens, expert_alignment, sms
            )
            found, event = stream.run(call, inputs, previous_event, async_finish)
        rows, row_scales, ids, weights, _, counts, made = found
        received = rows if scales is None else (rows, row_scales)
        return received, ids, weights, counts, made, overlap(event, found)

    def combine(
        self,
        x: torch.Tensor,
        handle: tuple[object, ...],
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sends the rows `x` back to the ranks of their tokens, and sums up those of each token in float32,
        in the order of ranks: `(combined_x, combined_topk_weights, event)`. Over hosts, a host's sum is
        rounded when it travels, and hosts are added up in their order. Rows of `topk_weights` are summed
        up alike, which takes a small buffer more. Up to two tensors `bias` are added to the sums, which are
        rounded once more then."""
        cores, stream = self._parts(x)
        with cores.door(lambda: True) as door:
            checks.check_events(previous_event, async_finish, allocate_on_comm_stream)
            sms = self._sms(config)
            found_handle = self._own(handle, NormalHandle)
            call = normal.combine(door, found_handle, x, topk_weights, bias, sms)
            biases = bias if isinstance(bias, (tuple, list)) else (bias,)
            inputs = [x, topk_weights, *biases, found_handle.kept.memory]
            found, event = stream.run(call, inputs, previous_event, async_finish)
        sums, weights = found
        return sums, weights, overlap(event, (*inputs, *found))

    #: DeepEP's calls between hosts: a group's hosts decide what a call does, not its name.
    internode_dispatch = dispatch
    internode_combine = combine

    # --- low-latency mode

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Does nothing: no call of one mode leaves anything that disturbs the other."""

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tokens, torch.Tensor, LowLatencyHandle, EventOverlap, Callable[[], None] | None]:
        """Sends tokens, bfloat16 `[tokens, hidden]`, to their experts. Returns `(recv_x, recv_count, handle,
        event, hook)`: `recv_x` is `[local experts, ranks * num_max_dispatch_tokens_per_rank, hidden]`, and
        for each expert the first `recv_count` rows are in use, by source rank. With `use_fp8` it is `(x,
        scales)`: float8_e4m3fn, and a float32 scale for each 128 channels (powers of two with `round_scale`),
        or with `use_ue8m0` four exponents in an int32; scales are column-major in their last two dimensions.

        The host waits for nothing after a first call, and graphs can capture the call after a first one
        of its shape. With `return_recv_hook` it runs on the communication stream, and `hook()` makes the
        current stream wait for it. The counts are added to `cumulative_local_expert_recv_stats`, int32
        `[local experts]`.

        With `dispatch_wait_recv_cost_stats`, int64 `[ranks]`, on every rank, a barrier goes before the
        dispatch, and how long this rank waited there for each other one is added: in clock cycles of an SM,
        on the CPU in nanoseconds."""
        cores, stream = self._parts(x)
        with cores.door(lambda: "low_latency" in cores.last) as door:
            self._check_hook(async_finish, return_recv_hook)
            formats = (
                switch("use_fp8", use_fp8),
                switch("round_scale", round_scale),
                switch("use_ue8m0", use_ue8m0),
            )
            statistics, waits = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
            call = low_latency.dispatch(
                door, self, cores, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, formats,
                statistics, waits, self._mask_on(cores.device),
            )  # fmt: skip
            inputs = [x, topk_idx, statistics, waits]
            found, event = stream.run(call, inputs, None, async_finish or return_recv_hook)
        rows, scales, counts, memory, handle = found
        received = rows if scales is None else (rows, scales)
        hook = stream.hook(event, (rows, scales, memory)) if return_recv_hook else None
        event = None if return_recv_hook else event
        return received, counts, handle, overlap(event, (*inputs, *found)), hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple[object, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Sends the rows `x` of experts, bfloat16, shaped as those of the dispatch, back, and sums up those
        of each token multiplied by `topk_weights`: `(sums, event, hook)`. Sums of a rank's experts are
        rounded to bfloat16 as they travel; with `use_logfmt` too, which lets them be rounded to less. Rows
        are read where they lie in any case; with `zero_copy`, in what `get_next_low_latency_combine_buffer`
        gave. `combine_wait_recv_cost_stats` is as in `low_latency_dispatch`."""
        cores, stream = self._parts(x)
        with cores.door(lambda: True) as door:
            self._check_hook(async_finish, return_recv_hook)
            found_handle = self._own(handle, LowLatencyHandle)
            switch("use_logfmt", use_logfmt)
            if switch("zero_copy", zero_copy):
                filled = self._combine_buffers.filled(found_handle)
                if filled is None:
                    why = "zero_copy: get_next_low_latency_combine_buffer was not called for this shape"
                    raise InvalidStateError(f"deep_ep on rank {self.rank}: {why}")
                x = filled
            waits = combine_wait_recv_cost_stats
            call = low_latency.combine(door, found_handle, x, topk_idx, topk_weights, out, waits)
            inputs = [x, topk_idx, topk_weights, out, found_handle.kept.memory, waits]
            found, event = stream.run(call, inputs, None, async_finish or return_recv_hook)
        if zero_copy:
            # Not where any rank declines the call: all ranks may make it again, with the same rows.
            self._combine_buffers.turn(found_handle)
        hook = stream.hook(event, found) if return_recv_hook else None
        event = None if return_recv_hook else event
        return found[0], overlap(event, (*inputs, *found)), hook

    def get_next_low_latency_combine_buffer(self, handle: tuple[object, ...]) -> torch.Tensor:
        """A tensor, bfloat16 `[local experts, ranks * num_max_dispatch_tokens_per_rank, hidden]`, that the
        next combine with `zero_copy` reads. There are two of each shape, by turns."""
        self._parts()
        return self._combine_buffers.next(self._own(handle, LowLatencyHandle))

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank, or ends that: tokens do not go to the experts of masked ranks, and a masked rank
        sends none. Every rank, the masked one too, sets the same masks and makes all calls; a rank that is
        gone is an error that names it. For buffers made with `enable_shrink`."""
        self._check_shrink()
        if not 0 <= rank_to_mask < self.group_size:
            raise invalid(f"rank_to_mask={rank_to_mask}: there are ranks 0 to {self.group_size - 1}")
        self._masked[rank_to_mask] = bool(mask)
        self._write_masks()

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes to `mask_status`, int32 `[ranks]`, 1 for each masked rank, else 0."""
        self._check_shrink()
        checks.matrix("mask_status", mask_status, torch.int32, (self.group_size,), mask_status.device)
        mask_status.copy_(torch.tensor(self._masked, dtype=torch.int32, device="cpu"))

    def low_latency_clean_mask_buffer(self) -> None:
        """Ends all masks."""
        self._check_shrink()
        self._masked = [False] * self.group_size
        self._write_masks()

    # --- what these share

    def _hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        hosts = self._members.hosts
        return hosts if isinstance(hosts, tuple) else hosts()

    def _parts(self, tensor: Any = None) -> tuple[Cores, CommStream]:
        """Returns the cores and the stream for calls on the device of a tensor, or of tokens with their
        scales. Without a tensor, those for the device of the last call."""
        if self._destroyed:
            raise InvalidStateError(f"deep_ep on rank {self.rank}: the buffer was destroyed")
        if isinstance(tensor, (tuple, list)) and tensor:
            tensor = tensor[0]
        if isinstance(tensor, torch.Tensor) and tensor.device.type in ("cpu", "cuda"):
            device = tensor.device
        elif self._by_device:
            device = next(reversed(self._by_device))
        elif isinstance(self._calls_on, Pool):
            device = torch.device(self._calls_on.device)
        elif torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        else:
            device = torch.device("cpu")
        found = self._by_device.get(device)
        if found is None:
            cores = Cores(self._calls_on, self.rank, self.group_size, device)
            found = self._by_device[device] = (cores, CommStream(device))
        return found

    def _cores_on(self, device: torch.device) -> Cores:
        return self._by_device[device][0]

    def _own(self, handle: object, kind: type) -> Any:
        """A handle that this buffer made in this mode."""
        if not isinstance(handle, (NormalHandle, LowLatencyHandle)):
            raise TypeError(
                f"deep_ep: handle: one that a dispatch of this buffer returned is needed, not {type(handle)}"
            )
        if not isinstance(handle, kind):
            raise invalid("handle: of the other mode's dispatch")
        if handle.owner is not self:
            raise invalid("handle: of another Buffer")
        return handle

    def _sms(self, config: Config | None) -> int:
        if config is None:
            return Buffer.num_sms
        if not hasattr(config, "num_sms"):
            raise TypeError(f"deep_ep: config: a Config is needed, not {type(config)}")
        return config.num_sms

    def _check_hook(self, async_finish: object, return_recv_hook: object) -> None:
        asynchronous, hook = (
            switch("async_finish", async_finish),
            switch("return_recv_hook", return_recv_hook),
        )
        if asynchronous and hook:
            raise invalid("async_finish, return_recv_hook: ask for one of them")

    def _check_shrink(self) -> None:
        if not self.enable_shrink:
            raise InvalidStateError("deep_ep: masks are of buffers made with enable_shrink=True")

    def _mask_on(self, device: torch.device) -> torch.Tensor | None:
        """Which ranks are masked, as calls on a device read it. Captured calls read what was set last."""
        if not self.enable_shrink:
            return None
        if device not in self._masks:
            self._masks[device] = torch.tensor(self._masked, dtype=torch.bool, device=device)
        return self._masks[device]

    def _write_masks(self) -> None:
        for tensor in self._masks.values():
            tensor.copy_(torch.tensor(self._masked, dtype=torch.bool, device="cpu"))
