"""Calls of serving engines to `deep_ep`, in the order in which several versions of them make them, on the
CPU.

Each class below makes the calls of one of them; the experts between dispatch and combine multiply a token by
a number of their own, so that the answer is known."""

import types

import deep_ep_model as reference
import pytest
import torch
import torch.distributed as dist
from deep_ep_model import BFLOAT16, dequantized, difference
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool import deep_ep


def factor(ids, experts):
    """Returns the factor of an expert; that of experts that are none is zero."""
    return torch.where(ids >= 0, (ids + 1).float() / experts, 0)


def by_token(rows, ids, weights, experts):
    """The work of experts on rows of tokens with numbers of all experts."""
    total = (factor(ids, experts) * weights).sum(1, keepdim=True)
    return (rows.float() * total).to(BFLOAT16)


def by_expert(rows, count, first, experts):
    """The work of experts on a part for each of them; rows behind the last one are left as they are."""
    made = rows.clone()
    for expert in range(len(rows)):
        used = int(count[expert])
        made[expert, :used] = (rows[expert, :used].float() * ((first + expert + 1) / experts)).to(BFLOAT16)
    return made


class VllmHighThroughput:
    """vLLM's manager and its preparation of high throughput, as they were before tokens were sent beside
    others."""

    asynchronous = False

    def __init__(self, group, experts, most, hidden):
        # The manager keeps buffers by what they were made with, and sets the SMs of all of them.
        self.buffer = deep_ep.Buffer(
            group=group,
            num_nvl_bytes=1024 << 20,
            num_rdma_bytes=0,
            low_latency_mode=False,
            num_qps_per_rank=1,
            **({"explicitly_destroy": True} if self.asynchronous else {}),
        )
        deep_ep.Buffer.set_num_sms(20)
        self.ranks, self.experts = group.world, experts
        self.first = group.rank * (experts // group.world)
        self.handles = [None, None]

    def config(self, get):
        return get(self.ranks) if self.ranks in (2, 4, 8, 16, 24, 32, 64, 128, 144, 160) else None

    def dispatch(self, turn, x, ids, weights):
        previous = self.buffer.capture() if self.asynchronous and turn else None
        of_ranks, of_rdma, of_experts, in_rank, event = self.buffer.get_dispatch_layout(
            topk_idx=ids,
            num_experts=self.experts,
            previous_event=previous,
            async_finish=False,
            allocate_on_comm_stream=False,
        )
        tokens, ids, weights, counts, self.handles[turn], event = self.buffer.dispatch(
            x=x,
            handle=None,
            num_tokens_per_rank=of_ranks,
            num_tokens_per_rdma_rank=of_rdma,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=of_experts,
            topk_idx=ids,
            topk_weights=weights,
            expert_alignment=1,
            config=self.config(deep_ep.Buffer.get_dispatch_config),
            previous_event=previous,
            async_finish=self.asynchronous,
            allocate_on_comm_stream=False,
        )
        if event.event is not None:
            event.current_stream_wait()
        assert self.asynchronous or event.event is None
        # Ids of elsewhere become one of another rank's, which its kernels skip.
        elsewhere = self.experts - 1 if self.first == 0 else 0
        shown = torch.where(ids == -1, elsewhere, ids + self.first)
        assert len(counts) == self.experts // self.ranks
        assert sum(counts) == int((ids >= 0).sum())
        here = (shown >= self.first) & (shown < self.first + len(counts))
        return tokens, torch.where(here, shown, -1), weights

    def combine(self, turn, rows, out):
        sums, _, event = self.buffer.combine(
            x=rows,
            handle=self.handles[turn],
            topk_weights=None,
            config=self.config(deep_ep.Buffer.get_combine_config),
            previous_event=self.buffer.capture() if self.asynchronous and turn else None,
            async_finish=self.asynchronous,
            allocate_on_comm_stream=False,
        )
        if event.event is not None:
            event.current_stream_wait()
        out.copy_(sums, non_blocking=True)

    def mixture(self, turn, x, ids, weights):
        rows, here, row_weights = self.dispatch(turn, x, ids, weights)
        out = torch.empty_like(x)
        self.combine(turn, by_token(rows, here, row_weights, self.experts), out)
        return out


class VllmHighThroughputAsync(VllmHighThroughput):
    """The calls since then, with events and two batches by turns."""

    asynchronous = True


class VllmLowLatency:
    """vLLM's manager and preparation of low latency, at first: it waits at once."""

    hooked, formats = False, {"use_fp8": False}

    def __init__(self, group, experts, most, hidden):
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank=most, hidden=hidden, num_ranks=group.world, num_experts=experts
        )
        options = {"explicitly_destroy": True, "enable_shrink": True} if self.hooked else {}
        self.buffer = deep_ep.Buffer(
            group=group,
            num_nvl_bytes=1024 << 20,
            num_rdma_bytes=size,
            low_latency_mode=True,
            num_qps_per_rank=experts // group.world,
            allow_nvlink_for_low_latency_mode=True,
            allow_mnnvl=False,
            **options,
        )
        self.experts, self.most, self.hidden = experts, most, hidden
        self.first, self.world = group.rank * (experts // group.world), group.world

    def mixture(self, turn, x, ids, weights):
        rows, count, handle, event, hook = self.buffer.low_latency_dispatch(
            x, ids, self.most, self.experts, async_finish=False, return_recv_hook=self.hooked, **self.formats
        )
        if self.hooked:
            hook()
        if self.formats["use_fp8"]:
            rows, scales = rows
            assert rows.is_contiguous()
            rows = dequantized(rows, scales, self.hidden)
        out = torch.empty_like(x)
        rows = by_expert(rows, count, self.first, self.experts)
        _, event, hook = self.buffer.low_latency_combine(
            rows,
            ids,
            weights,
            handle,
            async_finish=False,
            zero_copy=False,
            return_recv_hook=self.hooked,
            out=out,
        )
        if self.hooked:
            hook()
        return out


class VllmLowLatencyHooks(VllmLowLatency):
    """The calls since vLLM has hooks, packs scales, and asks which ranks are masked."""

    hooked, formats = True, {"use_fp8": True, "round_scale": True, "use_ue8m0": True}

    def mixture(self, turn, x, ids, weights):
        out = super().mixture(turn, x, ids, weights)
        mask = torch.zeros(self.world, dtype=torch.int32)
        self.buffer.low_latency_query_mask_buffer(mask)
        assert not mask.any()
        if turn:
            self.buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
            self.buffer.low_latency_clean_mask_buffer()
        return out


class SglangNormal:
    """SGLang's dispatcher in normal mode. `asynchronous` is what two batches that overlap set."""

    asynchronous, mode = False, "normal"

    def __init__(self, group, experts, most, hidden):
        self.group, self.experts, self.most, self.hidden = group, experts, most, hidden
        described = {
            "num_sms": 24,
            "num_max_nvl_chunked_send_tokens": 8,
            "num_max_nvl_chunked_recv_tokens": 256,
        }
        self.config = deep_ep.Config(**described) if self.asynchronous else None
        sizes = [0, 0]
        for config in (deep_ep.Buffer.get_dispatch_config(2), deep_ep.Buffer.get_combine_config(2)):
            sizes[0] = max(config.get_nvl_buffer_size_hint(hidden * 2, group.world), sizes[0])
            sizes[1] = max(config.get_rdma_buffer_size_hint(hidden * 2, group.world), sizes[1])
        if self.mode != "normal":
            hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(most, hidden, group.world, experts)
            sizes[1] = max(hint, sizes[1])
        self.buffer = deep_ep.Buffer(
            group,
            *sizes,
            low_latency_mode=self.mode != "normal",
            num_qps_per_rank=max(deep_ep.Buffer.num_sms, experts // group.world),
            allow_mnnvl=True,
        )
        self.first, self.alignment = group.rank * (experts // group.world), 128

    def mixture(self, turn, x, ids, weights):
        previous = deep_ep.Buffer.capture() if self.asynchronous else None
        of_ranks, of_rdma, of_experts, in_rank, previous = self.buffer.get_dispatch_layout(
            ids,
            self.experts,
            previous_event=previous,
            async_finish=self.asynchronous,
            allocate_on_comm_stream=previous is not None,
        )
        rows, row_ids, row_weights, counts, handle, event = self.buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=of_ranks,
            num_tokens_per_rdma_rank=of_rdma,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=of_experts,
            previous_event=previous,
            async_finish=self.asynchronous,
            allocate_on_comm_stream=(previous is not None) and self.asynchronous,
            expert_alignment=self.alignment,
            config=self.config,
        )
        event.current_stream_wait() if self.asynchronous else ()
        assert all(count % 128 == 0 for count in counts) and sum(counts) >= int((row_ids >= 0).sum())
        here = torch.where(row_ids >= 0, row_ids + self.first, -1)
        rows = by_token(rows, here, row_weights, self.experts)
        previous = deep_ep.Buffer.capture() if self.asynchronous else None
        sums, _, event = self.buffer.combine(
            rows,
            handle,
            async_finish=self.asynchronous,
            previous_event=previous,
            allocate_on_comm_stream=previous is not None,
            config=self.config,
        )
        event.current_stream_wait() if self.asynchronous else ()
        return sums


class SglangNormalAsync(SglangNormal):
    asynchronous = True


class SglangLowLatency(SglangNormal):
    """The calls in low-latency mode, with events."""

    mode, hooked, formats = "low latency", False, {}

    def mixture(self, turn, x, ids, weights):
        rows, count, handle, event, hook = self.buffer.low_latency_dispatch(
            x,
            ids,
            self.most,
            self.experts,
            use_fp8=True,
            async_finish=not self.hooked,
            return_recv_hook=self.hooked,
            **self.formats,
        )
        hook() if self.hooked else event.current_stream_wait()
        expected = (x.shape[0] * self.buffer.group_size * ids.shape[1] + self.experts) // self.experts
        assert expected > 0
        rows = by_expert(dequantized(*rows, self.hidden), count, self.first, self.experts)
        sums, event, hook = self.buffer.low_latency_combine(
            x=rows,
            topk_idx=ids,
            topk_weights=weights,
            handle=handle,
            async_finish=not self.hooked,
            return_recv_hook=self.hooked,
        )
        hook() if self.hooked else event.current_stream_wait()
        return sums


class SglangAuto(SglangLowLatency):
    """Both modes in one buffer, which is cleaned when low latency follows normal mode; with hooks and scales
    for newer devices."""

    mode, hooked, formats = "auto", True, {"round_scale": True, "use_ue8m0": True}

    def mixture(self, turn, x, ids, weights):
        if turn == 0:
            return SglangNormal.mixture(self, turn, x, ids, weights)
        self.buffer.clean_low_latency_buffer(self.most, self.hidden, self.experts)
        return super().mixture(turn, x, ids, weights)


ENGINES = [
    VllmHighThroughput, VllmHighThroughputAsync, VllmLowLatency, VllmLowLatencyHooks,
    SglangNormal, SglangNormalAsync, SglangLowLatency, SglangAuto,
]  # fmt: skip


def serve(group, name):
    """Several layers, with two batches by turns and other routings each time."""
    me, world, hidden, most = group.rank, group.world, 1024, 32
    engine = next(each for each in ENGINES if each.__name__ == name)(group, 4 * world, most, hidden)
    for layer in range(3):
        for turn in range(2):
            routing = reference.routing_of(10 * layer + turn, world, hidden, tokens=most - 7 * turn)
            x, ids, weights = routing.x[me], routing.ids[me], routing.weights[me]
            out = engine.mixture(turn, x, ids, weights)
            wanted = x.float() * (factor(ids, routing.experts) * weights).sum(1, keepdim=True)
            assert difference(out, wanted) < 9e-4, f"layer {layer}, batch {turn}"
    if engine.buffer.explicitly_destroy:
        engine.buffer.destroy()


@pytest.mark.parametrize("name", [each.__name__ for each in ENGINES])
def test_what_engines_call(name):
    values(2, serve, name)


def other_groups(group, folder):
    """The forms in which engines give groups: torch's, those that are not in torch's list, what has a store,
    and pools."""
    me, world = begin(group, folder)
    store = dist.FileStore(f"{folder}/unlisted", world)
    unlisted = dist.ProcessGroup(store, me, world)
    stateless = types.SimpleNamespace(store=dist.PrefixStore("own", store), rank=me, world_size=world)
    routing = reference.routing_of(1, world)
    for given in (symmpool.Pool(group, "cpu"), group, dist.group.WORLD, unlisted, unlisted, stateless):
        buffer = deep_ep.Buffer(given)
        assert buffer.group is given and (buffer.rank, buffer.group_size) == (group.rank, group.world)
        arguments = reference.layout_arguments(routing, group.rank, True, buffer)
        *found, _ = buffer.dispatch(routing.x[group.rank], **arguments)
        reference.check_received(routing, group.rank, found, 1, True)


def test_groups_and_pools(tmp_path):
    values(2, other_groups, str(tmp_path))
