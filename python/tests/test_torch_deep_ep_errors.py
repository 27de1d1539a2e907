"""Tests of calls that `symmpool.deep_ep` refuses, on ranks of the CPU: every rank gets an error with the
reason."""

import os
import signal

import pytest
import torch
from deep_ep_model import (
    check_low_latency,
    check_received,
    difference,
    layout_arguments,
    low_latency_routing,
    routing_of,
)
from ranks import run, values

import symmpool
from symmpool import deep_ep

FP8 = torch.float8_e4m3fn


def refused(me, call, good, wrong, text, kind=None):
    """Rank 1 makes a call with wrong arguments, which it refuses, and the others a good one, which fails."""
    if me == 1:
        with pytest.raises(kind or symmpool.InvalidArgumentError, match=text):
            call(**{**good, **wrong})
    else:
        with pytest.raises(symmpool.DivergedError) as raised:
            call(**good)
        assert raised.value.ranks == (1,), raised.value


def normal_arguments(group):
    me, world = group.rank, group.world
    buffer, other = deep_ep.Buffer(group), deep_ep.Buffer(group)
    routing = routing_of(1, world, hidden=256)
    x = routing.x[me]
    given = layout_arguments(routing, me, True, buffer)
    fp8, scales = x.to(FP8), torch.ones(len(x), 2)
    wrong = [
        ("x: a torch.Tensor", {"x": 7}, TypeError),
        ("x: of shape", {"x": x[0]}, None),
        ("x: elements of", {"x": x.to(torch.int16)}, None),
        ("x: not contiguous|x: it is not contiguous", {"x": x.t().contiguous().t()}, None),
        ("rows of 10 bytes", {"x": x[:, :5].contiguous()}, None),
        ("x: elements of", {"x": fp8}, None),
        ("x: elements of", {"x": (x, scales)}, None),
        ("x: 3 tensors", {"x": (fp8, scales, scales)}, None),
        ("scales: of shape", {"x": (fp8, scales[1:])}, None),
        ("scales: elements of", {"x": (fp8, scales.double())}, None),
        ("scales: 3 for a token", {"x": (fp8, torch.ones(len(x), 3))}, None),
        ("num_tokens_per_rank: it is missing", {"num_tokens_per_rank": None}, None),
        ("num_tokens_per_rank: of shape", {"num_tokens_per_rank": torch.ones(5, dtype=torch.int32)}, None),
        ("is_token_in_rank: elements of", {"is_token_in_rank": given["is_token_in_rank"].int()}, None),
        ("is_token_in_rank: of shape", {"is_token_in_rank": given["is_token_in_rank"][1:]}, None),
        ("of 7 experts", {"num_tokens_per_expert": given["num_tokens_per_expert"][:7]}, None),
        ("topk_idx: elements of", {"topk_idx": given["topk_idx"].int()}, None),
        ("topk_idx: of shape", {"topk_idx": given["topk_idx"][1:]}, None),
        ("one of them is missing", {"topk_weights": None}, None),
        ("topk_weights: elements of", {"topk_weights": given["topk_weights"].half()}, None),
        ("topk_weights: of shape", {"topk_weights": given["topk_weights"][:, 1:]}, None),
        ("expert_alignment=0", {"expert_alignment": 0}, None),
        ("num_worst_tokens=-1", {"num_worst_tokens": -1}, None),
        ("allocate_on_comm_stream", {"allocate_on_comm_stream": True}, None),
        ("allocate_on_comm_stream", {"allocate_on_comm_stream": True, "async_finish": True}, None),
        ("previous_event", {"previous_event": 7}, TypeError),
        ("config", {"config": 7}, TypeError),
    ]  # fmt: skip
    # Where every rank refuses its arguments, each raises its own error.
    with pytest.raises(TypeError, match="x: a torch.Tensor"):
        buffer.dispatch(7, **given)
    for text, arguments, kind in wrong:
        refused(me, buffer.dispatch, {"x": x, **given}, arguments, text, kind)
    rows, ids, weights, _, handle, _ = buffer.dispatch(x, **given)
    foreign = other.dispatch(x, **given)[4]
    wrong = [
        ("a handle says where", {"topk_idx": given["topk_idx"]}, None),
        ("tokens with a handle", {"x": x[1:]}, None),
        ("channels of", {"x": x[:, :128].contiguous()}, None),
        ("channels of", {"x": x.float()}, None),
        ("of another Buffer", {"handle": foreign}, None),
        ("one that a dispatch", {"handle": tuple(handle)}, TypeError),
    ]
    for text, arguments, kind in wrong:
        refused(me, buffer.dispatch, {"x": x, "handle": handle}, arguments, text, kind)
    wrong = [
        ("x: of shape", {"x": rows[1:]}, None),
        ("x: elements of", {"x": rows.float()}, None),
        ("topk_weights: of shape", {"topk_weights": weights[1:]}, None),
        ("topk_weights: 9 of a token", {"topk_weights": torch.ones(len(rows), 9)}, None),
        ("bias: of shape", {"bias": rows[:1]}, None),
        ("bias: 3 tensors", {"bias": (x, x, x)}, None),
        ("of another Buffer", {"handle": foreign}, None),
        ("one that a dispatch", {"handle": None}, TypeError),
        ("previous_event", {"previous_event": 7}, TypeError),
    ]
    for text, arguments, kind in wrong:
        refused(me, buffer.combine, {"x": rows, "handle": handle}, arguments, text, kind)
    # Nothing of that is left behind.
    *found, _ = buffer.dispatch(x, **given)
    check_received(routing, me, found, 1, True)


def test_wrong_arguments_of_normal_mode_are_an_error_on_every_rank():
    values(2, normal_arguments, limit=120)


def low_latency_arguments(group):
    me, world = group.rank, group.world
    buffer, other = (deep_ep.Buffer(group, low_latency_mode=True) for _ in range(2))
    routing = low_latency_routing(4, world, 1024, 4, 8, 20)
    x, ids, weights = routing.x[me], routing.ids[me], routing.weights[me]
    good = {
        "x": x,
        "topk_idx": ids,
        "num_max_dispatch_tokens_per_rank": 20,
        "num_experts": 8,
        "use_fp8": False,
    }
    statistics, long = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    wrong = [
        ("x: elements of", {"x": x.float()}),
        ("x: of shape", {"x": x[0]}),
        ("not contiguous", {"x": x.t().contiguous().t()}),
        ("1028 channels|where a multiple of 8", {"x": torch.ones(20, 1028, dtype=x.dtype)}),
        ("topk_idx: elements of", {"topk_idx": ids.int()}),
        ("topk_idx: of shape", {"topk_idx": ids[1:]}),
        ("20 tokens, where", {"num_max_dispatch_tokens_per_rank": 19}),
        ("num_experts=7", {"num_experts": 7}),
        ("use_ue8m0: it needs", {"use_ue8m0": True}),
        ("use_ue8m0: it needs", {"use_ue8m0": True, "use_fp8": True}),
        ("ask for one of them", {"async_finish": True, "return_recv_hook": True}),
        ("tokens of 64 channels", {"x": x[:, :64].contiguous(), "use_fp8": True}),
        ("cumulative_local_expert_recv_stats: of shape", {"cumulative_local_expert_recv_stats": statistics}),
        ("dispatch_wait_recv_cost_stats: of shape", {"dispatch_wait_recv_cost_stats": long[:1]}),
        ("dispatch_wait_recv_cost_stats: of shape", {"dispatch_wait_recv_cost_stats": long.view(2, 1)}),
        ("dispatch_wait_recv_cost_stats: elements of", {"dispatch_wait_recv_cost_stats": long.int()}),
        (
            "dispatch_wait_recv_cost_stats: it is not c",
            {"dispatch_wait_recv_cost_stats": long.repeat(2)[::2]},
        ),
    ]
    for first in (True, False):
        for text, arguments in wrong:
            refused(me, buffer.low_latency_dispatch, good, arguments, text)
        if first:
            # There is a buffer now, and the others are in the call already.
            buffer.low_latency_dispatch(**good)
    found, count, handle, _, _ = buffer.low_latency_dispatch(**good)
    foreign = other.low_latency_dispatch(**good)[2]
    normal = buffer.dispatch(x, **layout_arguments(routing, me, True, buffer))[4]
    call = {"x": found, "topk_idx": ids, "topk_weights": weights, "handle": handle}
    wrong = [
        ("x: of shape", {"x": found[:, 1:]}, None),
        ("x: elements of", {"x": found.float()}, None),
        ("x: it is not contiguous", {"x": found.transpose(1, 2).contiguous().transpose(1, 2)}, None),
        ("topk_idx: of shape", {"topk_idx": ids[:, 1:]}, None),
        ("topk_weights: elements of", {"topk_weights": weights.half()}, None),
        ("topk_weights: of shape", {"topk_weights": weights[1:]}, None),
        ("out: of shape", {"out": x[1:].clone()}, None),
        ("out: elements of", {"out": x.float()}, None),
        ("combine_wait_recv_cost_stats: of shape", {"combine_wait_recv_cost_stats": long[:1]}, None),
        ("combine_wait_recv_cost_stats: elements of", {"combine_wait_recv_cost_stats": long.float()}, None),
        ("of another Buffer", {"handle": foreign}, None),
        ("of the other mode", {"handle": normal}, None),
        ("one that a dispatch", {"handle": tuple(handle)}, TypeError),
        ("was not called for this shape", {"zero_copy": True}, symmpool.InvalidStateError),
    ]
    for text, arguments, kind in wrong:
        refused(me, buffer.low_latency_combine, call, arguments, text, kind)
    sums, _, _ = buffer.low_latency_combine(**call)
    assert difference(sums, x * torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)) < 1e-5


def test_wrong_arguments_of_low_latency_mode_are_an_error_on_every_rank():
    values(2, low_latency_arguments, limit=120)


def ids_and_shapes(group):
    me, world = group.rank, group.world
    buffer = deep_ep.Buffer(group)
    routing = routing_of(1, world, hidden=256)
    x, given = routing.x[me], layout_arguments(routing, me, True, buffer)
    good = {"x": x, **given}
    # An id that is no expert: on every rank, with its token. Everything else was sent.
    bad = dict(good)
    if me == 1:
        bad["topk_idx"] = good["topk_idx"].clone()
        bad["topk_idx"][3, 2] = 8
    for worst in (0, 100):
        with pytest.raises(symmpool.InvalidArgumentError, match="token 3 of rank 1 names expert 8"):
            buffer.dispatch(**bad, num_worst_tokens=worst)
    # More than `num_worst_tokens`.
    with pytest.raises(symmpool.OverflowError, match="has room for 3") as raised:
        buffer.dispatch(**good, num_worst_tokens=3)
    assert raised.value.ranks
    # Other shapes on another rank are named before anything is sent.
    narrow = {**good, "x": x[:, :128].contiguous()}
    with pytest.raises(symmpool.DivergedError, match="hidden is") as raised:
        buffer.dispatch(**(narrow if me == 1 else good))
    assert raised.value.ranks == (1 - me,)
    fewer = {**good, "topk_idx": None, "topk_weights": None}
    with pytest.raises(symmpool.DivergedError, match="top-k is"):
        buffer.dispatch(**(fewer if me == 1 else good))
    with pytest.raises(symmpool.DivergedError):
        buffer.dispatch(**good, num_worst_tokens=100 if me == 1 else 0)
    low_latency = {"topk_idx": given["topk_idx"], "num_max_dispatch_tokens_per_rank": 32, "num_experts": 8}
    with pytest.raises(symmpool.DivergedError):
        buffer.low_latency_dispatch(x, **low_latency) if me == 1 else buffer.dispatch(**good)
    for change in ({"num_max_dispatch_tokens_per_rank": 40}, {"num_experts": 16}):
        with pytest.raises(symmpool.DivergedError, match=f"{next(iter(change))} is"):
            buffer.low_latency_dispatch(x, **(dict(low_latency, **change) if me == 1 else low_latency))
    buffer.low_latency_dispatch(x, **low_latency)
    with pytest.raises(symmpool.DivergedError):
        change = {"num_max_dispatch_tokens_per_rank": 40}
        buffer.low_latency_dispatch(x, **(dict(low_latency, **change) if me == 1 else low_latency))
    # Twice the same expert for every token of everybody is more than an expert has room for.
    twice = torch.zeros_like(given["topk_idx"])
    with pytest.raises(symmpool.OverflowError, match="an expert's part of its output") as raised:
        buffer.low_latency_dispatch(x, twice, 24, 8)
    assert raised.value.ranks == (0,)
    *found, _ = buffer.dispatch(**good)
    check_received(routing, me, found, 1, True)


def test_ids_out_of_range_and_other_shapes_on_another_rank():
    values(2, ids_and_shapes, limit=120)


def growing(group):
    """More tokens than there was room for make a larger buffer, and handles of the former one stay good."""
    me, world = group.rank, group.world
    buffer = deep_ep.Buffer(group)
    held, kept = [], []
    for seed, tokens in enumerate((16, 12, 90, 40, 300)):
        routing = routing_of(seed, world, tokens=tokens, top_k=2 + seed % 2)
        *found, _ = buffer.dispatch(routing.x[me], **layout_arguments(routing, me, True, buffer))
        check_received(routing, me, found, 1, True)
        held.append(buffer.memory()["normal"])
        kept.append((routing, found))
    assert held[0] < held[2] < held[4] and held[2] == held[3]
    for routing, (rows, *_, handle) in reversed(kept):
        sums, _, _ = buffer.combine(rows, handle)
        reached = torch.stack([(routing.on(rank)[me] >= 0).any(1) for rank in range(world)], 1).sum(
            1, keepdim=True
        )
        assert difference(sums, routing.x[me] * reached) < 5e-6


def test_a_buffer_grows_on_all_ranks_at_once():
    values(2, growing)


def without_a_rank(group, phase):
    me, world = group.rank, group.world
    buffer = deep_ep.Buffer(group, low_latency_mode=True)
    routing = low_latency_routing(4, world, 1024, 4, 8, 20)
    x, ids, weights = routing.x[me], routing.ids[me], routing.weights[me]
    given = layout_arguments(routing, me, True, buffer)
    rows, *_, handle, _ = buffer.dispatch(x, **given)
    low = {"num_max_dispatch_tokens_per_rank": 20, "num_experts": 8, "use_fp8": False}
    found, count, low_handle, _, _ = buffer.low_latency_dispatch(x, ids, **low)
    check_low_latency(routing, me, found, count, low_handle, True)
    if me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    calls = {
        "dispatch": lambda: buffer.dispatch(x, **given),
        "again": lambda: buffer.dispatch(x, handle=handle),
        "combine": lambda: buffer.combine(rows, handle),
        "low_latency_dispatch": lambda: buffer.low_latency_dispatch(x, ids, **low),
        "low_latency_combine": lambda: buffer.low_latency_combine(found, ids, weights, low_handle),
    }
    with pytest.raises(symmpool.PeerLostError, match="lost rank 1") as raised:
        calls[phase]()
    return raised.value.ranks == (1,)


@pytest.mark.parametrize(
    "phase", ["dispatch", "again", "combine", "low_latency_dispatch", "low_latency_combine"]
)
def test_a_rank_that_is_killed_is_named(phase):
    assert run(2, without_a_rank, phase)[0].value is True
