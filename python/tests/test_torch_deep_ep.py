"""DeepEP's names on ranks of the CPU: what DeepEP's own tests hold, and more."""

import copy
import pickle
import subprocess
import sys
import time

import expert_model as model
import pytest
import torch
from deep_ep_model import (
    BFLOAT16,
    FORMATS,
    check_low_latency,
    check_received,
    counted,
    dequantized,
    difference,
    layout_arguments,
    low_latency_combine,
    low_latency_dispatch,
    low_latency_routing,
    routing_of,
    same,
)
from ranks import values

import symmpool
from symmpool import deep_ep
from symmpool.deep_ep import handles

FP8 = torch.float8_e4m3fn


def layouts(group):
    buffer = deep_ep.Buffer(group)
    for seed in range(8):
        routing = routing_of(seed, group.world)
        wanted = counted(routing, group.rank)
        ids = routing.ids[group.rank]
        of_ranks, none, of_experts, in_rank, event = buffer.get_dispatch_layout(ids, routing.experts)
        assert none is None and event.event is None
        for found, each in zip((of_ranks, of_experts, in_rank), wanted):
            assert found.dtype == each.dtype and found.is_contiguous() and torch.equal(found, each)
        # Talking to nobody, it counts an id that is no expert as none.
        odd = torch.cat([ids, torch.tensor([[-7, routing.experts, 1 << 40, -1]])])
        found = buffer.get_dispatch_layout(odd, routing.experts, async_finish=True)
        found[4].current_stream_wait()
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[2], wanted[1])
        assert not found[3][-1].any()
    assert buffer.memory()["total"] == 0


def test_a_layout_is_what_a_reference_counts():
    values(3, layouts)


def normal_mode(group, seeds):
    me, world = group.rank, group.world
    buffer = deep_ep.Buffer(group, int(2e9), explicitly_destroy=True)
    for seed in seeds:
        with_topk, previous, asynchronous = bool(seed & 1), bool(seed & 2), bool(seed & 4)
        routing = routing_of(seed, world, hidden=128 * (1 + seed % 3), top_k=1 + seed % 4, tokens=24 + seed)
        x, alignment = routing.x[me], 1 + 7 * (seed % 3)
        given = layout_arguments(routing, me, with_topk, buffer)
        how = {"config": deep_ep.Config(24, 8, 256), "async_finish": asynchronous}
        if previous:
            how["previous_event"] = buffer.capture()
            how["allocate_on_comm_stream"] = asynchronous
        *found, event = buffer.dispatch(x, expert_alignment=alignment, **given, **how)
        event.current_stream_wait()
        assert (event.event is not None) == asynchronous
        check_received(routing, me, found, 1, with_topk, alignment)
        rows, ids, weights, _, handle = found
        again = buffer.dispatch(x * 2, handle=handle, **how)
        again[5].current_stream_wait()
        assert again[1:5] == (None, None, None, None)
        assert same(again[0], rows * 2) and same(rows, routing.received(me)[0])
        if with_topk:
            most = 40 * world + seed
            worst = buffer.dispatch(x, num_worst_tokens=most, **given, **how)
            worst[5].current_stream_wait()
            count = len(rows)
            assert [len(each) for each in worst[:3]] == [most] * 3 and worst[3] == []
            assert same(worst[0][:count], rows) and same(worst[1][:count], ids)
            assert same(worst[2][:count], weights) and bool((worst[1][count:] == -1).all())
            sums, _, event = buffer.combine(worst[0], worst[4], **how)
            event.current_stream_wait()
            assert difference(sums, x * counted(routing, me)[2].sum(1, keepdim=True)) < 5e-6
        sums, sum_weights, event = buffer.combine(rows, handle, topk_weights=weights, **how)
        with event:
            pass
        reached = counted(routing, me)[2].sum(1, keepdim=True)
        assert difference(sums, x * reached) < 5e-6
        assert (sum_weights is None) == (not with_topk)
        if with_topk:
            wanted = torch.where(routing.ids[me] >= 0, routing.weights[me], 0)
            assert difference(sum_weights, wanted) < 1e-9
        biases = torch.randn_like(x), torch.randn_like(x)
        sums, _, _ = buffer.combine(rows, handle, bias=biases)
        torch.testing.assert_close(sums, x * reached + biases[0] + biases[1], rtol=2e-2, atol=2e-2)
        sums, _, _ = buffer.combine(rows, handle, bias=biases[0])
        torch.testing.assert_close(sums, x * reached + biases[0], rtol=2e-2, atol=2e-2)
    held = buffer.memory()
    assert held["normal"] > 0 and held["low_latency"] == 0 and held["total"] == held["normal"]
    buffer.destroy()
    with pytest.raises(symmpool.InvalidStateError, match="was destroyed"):
        buffer.get_dispatch_layout(routing.ids[me], routing.experts)


@pytest.mark.parametrize("world, seeds", [(1, range(8)), (2, range(8, 24)), (3, range(24, 32))])
def test_normal_mode(world, seeds):
    values(world, normal_mode, seeds)


def quantized_tokens(group):
    me, world = group.rank, group.world
    buffer = deep_ep.Buffer(group)
    routing = routing_of(3, world, hidden=512)
    sent = [model.quantized(x, "fp8") for x in routing.x]
    given = layout_arguments(routing, me, True, buffer)
    rows, scales = sent[me]
    # Column-major scales, as matrix multiplications want them.
    columns = scales.t().contiguous().t()
    (found, found_scales), ids, weights, _, handle, _ = buffer.dispatch((rows, columns), **given)
    wanted, wanted_scales = model.quantized(routing.received(me)[0], "fp8")
    assert same(found, wanted) and same(found_scales, wanted_scales) and found_scales.is_contiguous()
    (found, found_scales), *_ = buffer.dispatch((rows, scales), handle=handle)
    assert same(found, wanted) and same(found_scales, wanted_scales)
    worst = buffer.dispatch((rows, scales), num_worst_tokens=100, **given)
    assert same(worst[0][0][: len(wanted)], wanted) and same(worst[0][1][: len(wanted)], wanted_scales)
    packed = torch.randint(1 << 30, (len(rows), 1), dtype=torch.int32)
    (_, found_scales), *_ = buffer.dispatch((rows, packed), **given)
    assert found_scales.dtype == torch.int32 and found_scales.shape == (len(wanted), 1)
    back, _, _ = buffer.combine(routing.received(me)[0], handle)
    assert difference(back, routing.x[me] * counted(routing, me)[2].sum(1, keepdim=True)) < 5e-6


def test_tokens_that_are_quantised_already():
    values(2, quantized_tokens)


def low_latency_mode(group, seed, top_k, experts):
    me, world, tokens, hidden = group.rank, group.world, 20, 1024
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, world, experts)
    buffer = deep_ep.Buffer(group, 0, size, low_latency_mode=True, num_qps_per_rank=experts // world)
    routing = low_latency_routing(seed, world, hidden, top_k, experts, tokens)
    x, ids, weights = routing.x[me], routing.ids[me], routing.weights[me]
    used = torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
    bits = []
    for hooked in (False, True):
        for formats in FORMATS:
            received, count, handle, event, hook = low_latency_dispatch(
                buffer, x, ids, experts, hooked, formats
            )
            assert (hook is None) == (not hooked) and (event.event is None) == hooked
            assert count.dtype == torch.int32
            rows = received
            if formats["use_fp8"]:
                words = hidden // (512 if formats.get("use_ue8m0") else 128)
                assert received[0].dtype == FP8 and received[1].shape == (
                    experts // world,
                    world * tokens,
                    words,
                )
                assert received[1].stride() == (words * world * tokens, 1, world * tokens)
                rows = dequantized(*received, hidden)
            assert rows.shape == (experts // world, world * tokens, hidden) and rows.dtype == BFLOAT16
            exact = not formats["use_fp8"]
            check_low_latency(routing, me, rows, count, handle, exact)
            for zero_copy in (False, True):
                use_logfmt = zero_copy and hooked
                sums = low_latency_combine(
                    buffer, rows, ids, weights, handle, hooked, zero_copy, use_logfmt=use_logfmt
                )
                assert difference(sums, x * used) < (1e-5 if exact else 9e-4)
                bits.append(sums)
    # Equal calls give equal bits, with a hook or without.
    assert all(same(a, b) for a, b in zip(bits, bits[len(bits) // 2 :]))
    held = buffer.memory()
    assert held["normal"] == 0 and held["combine_buffers"] == 2 * 2 * rows.numel()
    assert 0 < held["low_latency"] <= size


@pytest.mark.parametrize("world, top_k, experts", [(1, 2, 6), (2, 4, 8), (3, 6, 12)])
def test_low_latency_mode(world, top_k, experts):
    values(world, low_latency_mode, 5, top_k, experts)


def declined_zero_copy(group):
    """A combine that one rank declines leaves the rows that all have filled for the next try."""
    me, world, tokens, hidden, experts = group.rank, group.world, 4, 128, 2 * group.world
    buffer = deep_ep.Buffer(group, low_latency_mode=True)
    routing = low_latency_routing(9, world, hidden, 2, experts, tokens)
    x, ids, weights = routing.x[me], routing.ids[me], routing.weights[me]
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, tokens, experts, use_fp8=False)
    found, declined = [], 0
    for scale in (1.0, 2.0, 3.0):
        filled = buffer.get_next_low_latency_combine_buffer(handle)
        filled.copy_(rows * scale)
        wrong = ids.int() if me == 1 and scale == 3.0 else ids
        try:
            found.append(buffer.low_latency_combine(filled, wrong, weights, handle, zero_copy=True)[0])
        except symmpool.Error:
            declined += 1
            found.append(buffer.low_latency_combine(filled, ids, weights, handle, zero_copy=True)[0])
    used = torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
    assert declined == 1 and all(
        difference(sums, scale * x * used) < 1e-5 for sums, scale in zip(found, (1.0, 2.0, 3.0), strict=True)
    )


def test_a_declined_combine_without_copy_may_be_made_again():
    values(2, declined_zero_copy)


LATE = 0.3


def waits(group, late):
    """Adds up how long a rank waits for each other one, of which `late` comes later to every call."""
    me, world, tokens, hidden, experts = group.rank, group.world, 4, 128, 2 * group.world
    buffer = deep_ep.Buffer(group, low_latency_mode=True)
    routing = low_latency_routing(7, world, hidden, 2, experts, tokens)
    x, ids, weights = routing.x[me], routing.ids[me], routing.weights[me]
    of_dispatch, of_combine = (torch.zeros(world, dtype=torch.int64) for _ in range(2))
    plain = buffer.low_latency_dispatch(x, ids, tokens, experts, use_fp8=False)
    plain_sums = buffer.low_latency_combine(plain[0], ids, weights, plain[2])[0]
    for hooked in (False, True):
        time.sleep(LATE if me == late else 0)
        received, _, handle, _, hook = buffer.low_latency_dispatch(
            x,
            ids,
            tokens,
            experts,
            use_fp8=False,
            dispatch_wait_recv_cost_stats=of_dispatch,
            return_recv_hook=hooked,
        )
        if hooked:
            hook()
        time.sleep(LATE if me == late else 0)
        sums, _, hook = buffer.low_latency_combine(
            received,
            ids,
            weights,
            handle,
            combine_wait_recv_cost_stats=of_combine,
            return_recv_hook=hooked,
        )
        if hooked:
            hook()
        # The results are those of calls without.
        assert same(sums, plain_sums)
    return [1e-9 * tensor.double() for tensor in (of_dispatch, of_combine)]


@pytest.mark.parametrize("world, late", [(2, 1), (3, 0), (3, 2)])
def test_waits_are_measured_by_rank(world, late):
    for rank, costs in enumerate(values(world, waits, late)):
        for seconds in costs:
            assert seconds[rank] == 0
            if rank == late:
                continue
            # Two calls of each kind. What other processes of the machine take is not the ranks'.
            assert 1.5 * LATE < seconds[late] < 60
            assert all(seconds[late] >= each for each in seconds)


def both_modes(group):
    """Calls of both modes by turns, with handles and hooks of several calls under way."""
    me, world = group.rank, group.world
    buffer = deep_ep.Buffer(group, low_latency_mode=True)
    routing = low_latency_routing(1, world, 512, 4, 8, 20)
    x, ids, weights = routing.x[me], routing.ids[me], routing.weights[me]
    statistics = torch.zeros(routing.local, dtype=torch.int32)
    first = buffer.low_latency_dispatch(x, ids, 20, 8, statistics, use_fp8=False, return_recv_hook=True)
    given = layout_arguments(routing, me, True, buffer)
    rows, *_, handle, _ = buffer.dispatch(x, **given)
    second = buffer.low_latency_dispatch(
        x.flip(0).contiguous(),
        ids.flip(0).contiguous(),
        20,
        8,
        statistics,
        use_fp8=False,
        return_recv_hook=True,
    )
    buffer.clean_low_latency_buffer(20, 512, 8)
    assert torch.equal(statistics, first[1] + second[1])
    sums, _, _ = buffer.combine(rows, handle)
    assert difference(sums, x * counted(routing, me)[2].sum(1, keepdim=True)) < 5e-6
    # The hook of the second call is never called.
    first[4]()
    check_low_latency(routing, me, first[0], first[1], first[2], True)
    used = torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
    sums, _, _ = buffer.low_latency_combine(first[0], ids, weights, first[2])
    assert difference(sums, x * used) < 1e-5
    assert buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_().numel() > 0
    assert buffer.get_local_buffer_tensor(BFLOAT16, torch.Size([4, 8]), offset=8).shape == (4, 8)
    with pytest.raises(symmpool.InvalidArgumentError, match="size:"):
        buffer.get_local_buffer_tensor(BFLOAT16, torch.Size([1 << 30]))
    # Dropped with a hook pending; the next buffer is as good as the first.
    pending = buffer.low_latency_dispatch(x, ids, 20, 8, return_recv_hook=True)
    del buffer, handle, first, second
    other = deep_ep.Buffer(group, low_latency_mode=True)
    found = other.low_latency_dispatch(x, ids, 20, 8, use_fp8=False)
    check_low_latency(routing, me, found[0], found[1], found[2], True)
    pending[4]()


def test_both_modes_by_turns():
    values(2, both_modes)


def masks(group):
    me, world = group.rank, group.world
    buffer = deep_ep.Buffer(group, low_latency_mode=True, enable_shrink=True)
    routing = low_latency_routing(2, world, 512, 4, 9, 20)
    x, ids, weights = routing.x[me], routing.ids[me], routing.weights[me]
    status = torch.full((world,), 7, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0, 0, 0]
    for masked in ([], [1], [1, 2], []):
        buffer.low_latency_clean_mask_buffer()
        for rank in masked:
            buffer.low_latency_update_mask_buffer(rank, True)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [int(rank in masked) for rank in range(world)]
        found, count, handle, _, _ = buffer.low_latency_dispatch(x, ids, 20, 9, use_fp8=False)
        left = [ids.clone() for ids in routing.ids]
        for rank in range(world):
            gone = [expert // 3 in masked for expert in range(9)]
            left[rank][torch.tensor(gone)[left[rank].clamp(min=0)] | (rank in masked)] = -1
        alive = model.Routing(routing.x, left, routing.weights, 9)
        check_low_latency(alive, me, found, count, handle, True)
        sums, _, _ = buffer.low_latency_combine(found, ids, weights, handle)
        used = torch.where(left[me] >= 0, weights, 0).sum(1, keepdim=True)
        assert difference(sums, x * used) < 1e-5
    with pytest.raises(symmpool.InvalidArgumentError, match="rank_to_mask=3"):
        buffer.low_latency_update_mask_buffer(3, True)
    with pytest.raises(symmpool.InvalidStateError, match="enable_shrink"):
        deep_ep.Buffer(group).low_latency_clean_mask_buffer()


def test_masked_ranks_get_nothing_and_send_nothing():
    values(3, masks)


def test_names_configs_and_events():
    assert deep_ep.topk_idx_t == torch.int64 and deep_ep.Buffer.is_sm90_compiled()
    config = deep_ep.Config(num_sms=24, num_max_nvl_chunked_send_tokens=8)
    assert (config.num_sms, config.num_max_nvl_chunked_send_tokens) == (24, 8)
    assert config.get_nvl_buffer_size_hint(14336, 8) == config.get_rdma_buffer_size_hint(14336, 8) == 0
    before = deep_ep.Buffer.num_sms
    try:
        deep_ep.Buffer.set_num_sms(32)
        assert (
            deep_ep.Buffer.get_dispatch_config(2).num_sms
            == deep_ep.Buffer.get_combine_config(3).num_sms
            == 32
        )
    finally:
        deep_ep.Buffer.num_sms = before
    with pytest.raises(symmpool.InvalidArgumentError, match="num_sms=23"):
        deep_ep.Buffer.set_num_sms(23)
    with pytest.raises(symmpool.InvalidArgumentError, match="num_sms=0"):
        deep_ep.Config(0)
    with pytest.raises(TypeError, match="num_sms"):
        deep_ep.Config(2.5)
    with pytest.raises(symmpool.InvalidArgumentError, match="group"):
        deep_ep.Buffer(None)
    with pytest.raises(symmpool.UnsupportedError, match="MPI"):
        deep_ep.Buffer(None, comm=object())
    with deep_ep.Buffer.capture() as event:
        assert event.event is not None
    deep_ep.EventOverlap().current_stream_wait()


PROGRAM = """
import sys
{first}
import deep_ep
from deep_ep import Buffer, Config, EventOverlap, topk_idx_t
from deep_ep.utils import EventHandle
from deep_ep.buffer import Buffer as Again
import symmpool.deep_ep
assert deep_ep is symmpool.deep_ep is sys.modules["deep_ep"] and Buffer is Again
assert find_spec("deep_ep") is not None
print("found")
"""


@pytest.mark.parametrize("way", ["install", "path", "both"])
def test_programs_find_it_as_deep_ep(way):
    first = "from importlib.util import find_spec\n"
    if way != "path":
        first += "import symmpool.deep_ep\nsymmpool.deep_ep.install()\nsymmpool.deep_ep.install()"
    environment = None
    if way != "install":
        import os

        command = [sys.executable, "-m", "symmpool.deep_ep"]
        folder = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        paths = [folder, os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", PROGRAM.format(first=first)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "found", done.stderr


def test_it_does_not_take_the_place_of_another_deep_ep():
    program = (
        "import sys, types\n"
        "sys.modules['deep_ep'] = types.ModuleType('deep_ep')\n"
        "import symmpool.deep_ep\n"
        "try: symmpool.deep_ep.install()\n"
        "except symmpool.InvalidStateError as error: print(error)\n"
        "assert 'deep_ep.utils' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "call install first" in done.stdout, done.stderr


def test_handles_are_tuples_of_their_parts():
    parts = handles._LazyTuple([lambda: 3, lambda: None, lambda: "x"], torch.device("cpu"))
    assert (
        isinstance(parts, tuple) and tuple(parts) == (3, None, "x") == (*parts,) and parts != (3, None, "x")
    )
    assert 3 in parts and 5 not in parts and parts.index("x") == 2 and parts.count(None) == 1
    assert parts + (1,) == (3, None, "x", 1) and (1,) + parts == (1, 3, None, "x") and parts * 2 == 2 * parts
    assert parts[1:] == (None, "x") and list(reversed(parts)) == ["x", None, 3] and len(parts) == 3
    assert parts < (4,) and parts <= (4,) and parts > (2,) and parts >= (2,) and "3 parts" in repr(parts)
    assert copy.copy(parts) is parts
    with pytest.raises(TypeError):
        parts + [1]
    for use in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="belongs to its dispatch"):
            use(parts)


def test_parts_of_a_captured_calls_handle_are_those_of_the_last_replay(monkeypatch):
    times = []
    for is_captured in (True, False):
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda is_captured=is_captured: is_captured
        )
        looks = iter(range(5))
        parts = handles._LazyTuple([lambda looks=looks: next(looks)], torch.device("cuda"))
        times.append([parts[0], parts[0], next(iter(parts))])
    assert times == [[0, 1, 2], [0, 0, 0]]


def no_token_at_first(group):
    buffer = deep_ep.Buffer(group)
    for count in (0, 3):
        x = torch.ones(count, 128, dtype=BFLOAT16)
        ids, weights = torch.zeros(count, 2, dtype=torch.int64), torch.ones(count, 2)
        ids[:, 1] = 1
        of_ranks, _, of_experts, in_rank, _ = buffer.get_dispatch_layout(ids, 2 * group.world)
        rows, found, _, counts, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=of_ranks,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=of_experts,
            topk_idx=ids,
            topk_weights=weights,
        )
        received = count * group.world if group.rank == 0 else 0
        assert rows.shape == (received, 128) and found.shape == (received, 2) and counts == [received] * 2
        sums, _, _ = buffer.combine(rows, handle)
        assert torch.equal(sums, x)


def test_a_first_dispatch_without_a_token():
    values(2, no_token_at_first)
