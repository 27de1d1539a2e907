"""Dispatch to experts and combine over pretended hosts, compared with plain PyTorch."""

import json
import os
import signal
import threading
import time

import expert_model as model
import pytest
import test_torch_experts as on_one_host
import test_torch_experts_gradients as gradients
import torch
from ranks import run, values
from test_torch import torchrun
from test_torch_experts import BFLOAT16, check_received, make, same

import symmpool
from symmpool import experts

#: Ranks by host: in the order of hosts, in turns, uneven ones, one a host.
LAYOUTS = ["aabb", "abab", "aaab", "abbb", "ab", "abcacb"]
KINDS = ["uniform", "zipf", "one-hot", "empty", "one host"]


def on_hosts(group, ids, function, *arguments):
    """A test's function, whose ranks pretend to be on these hosts."""
    os.environ["SYMMPOOL_HOST_ID"] = ids[group.rank]
    torch.set_num_threads(1)
    return function(group, *arguments)


def over(ids, function, *arguments, **options):
    return values(len(ids), on_hosts, ids, function, *arguments, **options)


@pytest.mark.parametrize("ids", LAYOUTS)
def test_random_routings_have_the_bits_of_the_documented_order(ids):
    # Other routings in each layout.
    first = 100 + 8 * LAYOUTS.index(ids)
    values(len(ids), on_one_host.routings, range(first, first + 8), ids)


def routing_of(kind, world, hosts, tokens, hidden, experts, top_k):
    """A routing of a kind, the same on every rank; no rank has as many tokens as the next one."""
    made = torch.Generator().manual_seed(KINDS.index(kind))
    local = experts // world
    x, ids, weights = [], [], []
    for rank in range(world):
        count = 0 if kind == "empty" else tokens - 3 * rank
        scores = torch.rand((count, experts), generator=made)
        if kind == "zipf":
            scores = scores.log() * torch.arange(1, experts + 1)
        if kind == "one-hot":
            scores[:, -1] = 2
        if kind == "one host":
            elsewhere = [r for r in range(world) if r not in hosts[-1]]
            for other in elsewhere:
                scores[:, other * local : (other + 1) * local] = -1
        width = top_k if kind in ("uniform", "zipf") else min(top_k, local)
        chosen = scores.topk(width).indices
        if kind == "one-hot":
            chosen[:, 1:] = -1
        ids.append(torch.cat([chosen, torch.full((count, top_k - width), -1)], 1))
        x.append(torch.randn((count, hidden), generator=made).to(BFLOAT16))
        weights.append(torch.rand((count, top_k), generator=made))
    return model.Routing(x, ids, weights, experts)


def several_chunks(group, tokens, hidden):
    """Routings of each kind, in both layouts, also quantised, of more tokens than a chunk has."""
    pool = symmpool.Pool(group, "cpu")
    me, world, top_k = pool.rank, pool.world, 4
    bits = []
    for kind in KINDS:
        routing = routing_of(kind, world, pool.hosts, tokens, hidden, 4 * world, top_k)
        buffer = make(pool, routing, hidden, top_k, tokens)
        given = (routing.x[me], routing.ids[me], routing.weights[me])
        for layout, how in (("rank", None), ("expert", None), ("rank", "fp8")):
            received, handle = buffer.dispatch(*given, layout=layout, quantize=how, exact=True)
            check_received(routing, received, handle, me, how, 1)
            answers = model.answers_of(routing, 7, hidden, BFLOAT16, 1 if layout == "expert" else None)
            back = answers
            if layout == "expert":
                back = [routing.weighted(rank, each, 1, BFLOAT16) for rank, each in enumerate(answers)]
            wanted = routing.combined(me, back, BFLOAT16, pool.hosts)
            for _ in range(2):
                assert same(buffer.combine(answers[me], handle), wanted), (kind, layout, how)
            bits.append(wanted.view(torch.int16).sum().item())
        # Tokens that are quantised already, with their scales; once more by the handle.
        rows, scales = model.quantized(routing.x[me], "fp8")
        received, handle = buffer.dispatch(rows, *given[1:], scales=scales)
        check_received(routing, received, handle, me, "fp8", 1)
        received, _ = buffer.dispatch(rows, handle=handle, scales=scales)
        check_received(routing, received, handle, me, "fp8", 1, known=True)
    return bits


@pytest.mark.parametrize("ids, tokens, hidden", [("aabb", 66, 16384), ("ab", 600, 2048), ("aaab", 66, 16384)])
def test_each_kind_of_routing_in_several_chunks(ids, tokens, hidden):
    over(ids, several_chunks, tokens, hidden)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_gradients_are_those_of_plain_pytorch(layout):
    over("ab", gradients.microbatches, layout, True, False, True)
    over("abb", on_one_host.gradients, layout, layout == "expert")


def test_load_and_memory():
    assert over("ab", on_one_host.statistics_and_memory) == [[8, 4], [4, 4]]


def refused(group):
    """Calls that rank 1 refuses, and what all ranks are told of ids and room. All go on."""
    pool = symmpool.Pool(group, "cpu")
    me, world, found = pool.rank, pool.world, []
    shape = {"hidden": 64, "experts": 2 * world, "top_k": 2, "max_tokens": 16}
    buffer = experts.ExpertBuffer(pool, **shape)
    small = experts.ExpertBuffer(pool, capacity=5, **shape)
    x, ids = torch.ones(8, 64, dtype=BFLOAT16), torch.tensor([[0, 2 * world - 1]]).repeat(8, 1)
    wide = torch.ones(8, 128, dtype=BFLOAT16)
    bad = ids.clone()
    bad[3, 1] = 99
    _, handle = buffer.dispatch(x, ids)
    rows = torch.ones(buffer.capacity, 64, dtype=BFLOAT16)
    other = handle.memory.clone()
    other[0] = -5
    broken = experts.Handle(buffer, 8, "rank", 1, buffer.capacity, other)
    out = torch.empty(3, 64, dtype=BFLOAT16)
    mine = me == 1
    calls = [
        lambda: buffer.dispatch(wide if mine else x, ids),
        lambda: buffer.dispatch(torch.ones(17, 64, dtype=BFLOAT16) if mine else x, ids),
        lambda: buffer.combine(rows, broken if mine else handle),
        lambda: buffer.combine(rows, handle, hook="no" if mine else False),
        lambda: buffer.dispatch(x, ids, layout="expert" if mine else "rank"),
        lambda: buffer.dispatch(x, bad if mine else ids),
        lambda: small.dispatch(x, ids),
        lambda: buffer.dispatch(x, ids, layout="expert", out=out if me == world - 1 else None),
        lambda: experts.ExpertBuffer(pool, **{**shape, "hidden": 8 if mine else 64}),
    ]
    for call in calls:
        begun = time.monotonic()
        try:
            call()
            found.append(("no error", "", 0))
        except (symmpool.Error, ValueError, TypeError, OverflowError) as error:
            found.append((type(error).__name__, str(error), time.monotonic() - begun))
        sums = buffer.combine(rows, buffer.dispatch(x, ids)[1])
        assert torch.equal(sums, 2 * x)
    return found


@pytest.mark.parametrize("ids", ["aabb", "abb"])
def test_what_one_rank_refuses_is_an_error_on_all_ranks_of_all_hosts(ids):
    found = over(ids, refused)
    last = len(ids) - 1
    for rank, of_rank in enumerate(found):
        for nth, (kind, text, took) in enumerate(of_rank):
            assert took < 10, (rank, nth, kind, text)
            if nth < 4:
                wanted = ("InvalidArgumentError", "TypeError") if rank == 1 else ("DivergedError",)
                assert kind in wanted and (rank == 1 or "rank 1" in text), (rank, nth, kind, text)
            elif nth in (4, 8):
                assert kind == "DivergedError", (rank, nth, kind, text)
        # The first rank of an overflowing host, what it needed and what it had.
        assert of_rank[5][0] == "InvalidArgumentError", of_rank[5]
        assert "token 3 of rank 1 names expert 99" in of_rank[5][1] and "host" in of_rank[5][1], of_rank[5]
        assert of_rank[6][0] == "OverflowError" and f"rank 0 was sent {8 * len(ids)} rows" in of_rank[6][1]
        assert "host a" in of_rank[6][1], of_rank[6]
        assert of_rank[7][0] == "OverflowError" and f"rank {last} was sent" in of_rank[7][1], of_rank[7]
        assert "room for 3" in of_rank[7][1] and "host b" in of_rank[7][1], of_rank[7]


def kill_soon(how):
    """Sends this process a signal while it makes a call."""
    threading.Timer(0.01, os.kill, (os.getpid(), how)).start()


def left_alone(group, phase, how):
    """The ranks of host b end, or stop, before a phase; what the others get, and when."""
    pool = symmpool.Pool(group, "cpu")
    shape = {"hidden": 2048, "experts": 4, "top_k": 2, "max_tokens": 2000}
    buffer = experts.ExpertBuffer(pool, **shape)
    x = torch.ones(2000, 2048, dtype=BFLOAT16)
    ids = torch.tensor([[0, 3]]).repeat(2000, 1)
    received, handle = buffer.dispatch(x, ids, copy=True)
    # Ranks have come to the first call at different times.
    buffer._entry.public.timeout = 4.0
    for turn in range(40):
        if turn == 2 and pool.rank >= 2 and phase in ("dispatch", "combine"):
            if phase == "combine":
                buffer.dispatch(x, handle=handle)
            os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        if turn == 2 and pool.rank == 3 and phase == "within":
            # In the middle of a call.
            kill_soon(signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        begun = time.monotonic()
        try:
            buffer.dispatch(x, handle=handle)
            buffer.combine(received.x, handle)
        except symmpool.Error as error:
            took = time.monotonic() - begun
            with pytest.raises(symmpool.Error, match="failed"):
                buffer.combine(received.x, handle)
            return type(error).__name__, str(error), took
    return "no error", "", 0


@pytest.mark.parametrize("phase, how", [("dispatch", "dies"), ("combine", "stops"), ("within", "stops")])
def test_a_host_that_is_gone_is_an_error_within_the_deadline(phase, how):
    outcomes = run(4, on_hosts, "aabb", left_alone, phase, how, silent=(2, 3))
    for found in outcomes[:2]:
        assert found.error is None, found.error
        kind, text, took = found.value
        # gloo does not say which rank has closed a connection: that is an error of the base class.
        assert kind in ("TimeoutError", "PeerLostError", "Error"), (kind, text)
        # The communicator's timeout, that of gloo behind it, and the look for a reason.
        assert took < 20 and "host b" in text, (took, text)


def test_a_token_crosses_once_to_each_host(tmp_path):
    report = tmp_path / "report.json"
    few = ["--tokens", "128", "--hidden", "2048", "--experts", "64", "--top-k", "8", "--routing", "uniform"]
    once = ["--rounds", "1", "--calls", "1", "--replays", "1", "--peers", "all-to-all"]
    status, output, errors = torchrun(
        4, "--pretend", "2", *few, *once, "--cases", "exact", "--json", str(report), benchmark="experts"
    )
    assert status == 0, output + errors
    found = json.loads(report.read_text())
    assert found["hosts"] == [[0, 1], [2, 3]] and "crossed hosts" in output
    [row] = found["results"]
    ours, flat = (row["crossed_hosts"][name] for name in ("ours", "all-to-all"))
    assert ours["least"] == flat["least"] > 0
    # The row, and what all ranks tell each other.
    assert ours["least"] < ours["bytes"] <= 1.02 * ours["least"] and flat["bytes"] > 1.5 * ours["least"]
