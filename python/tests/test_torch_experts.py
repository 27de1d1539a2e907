"""Dispatch to experts and combine on ranks of the CPU, compared with plain PyTorch."""

import json
import os
import signal

import expert_model as model
import pytest
import torch
from ranks import run, values
from test_torch import torchrun

import symmpool
from symmpool import experts

BFLOAT16 = torch.bfloat16


def same(a, b):
    """Whether two tensors have the same bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # Copies have the strides that a view as bytes needs, also of no row.
    copies = (each.clone(memory_format=torch.contiguous_format) for each in (a, b))
    return torch.equal(*(each.view(torch.uint8) for each in copies))


def make(pool, routing, hidden, top_k, most, **options):
    return experts.ExpertBuffer(
        pool, hidden=hidden, experts=routing.experts, top_k=top_k, max_tokens=most, **options
    )


def check_received(routing, received, handle, me, how, alignment, known=False):
    x, ids, weights, offsets, index = routing.received(me)
    count, scales = len(x), None
    if how is not None:
        x, scales = model.quantized(x, how)
    assert int(handle.num_received) == count
    assert handle.source_offsets.tolist() == offsets
    assert torch.equal(handle.source_index[:count].long(), index)
    assert [int((ids == expert).sum()) for expert in range(routing.local)] == received.expert_counts.tolist()
    if handle.layout == "rank":
        assert int(received.num_rows) == count and received.source_offsets.tolist() == offsets
        assert same(received.x[:count], x)
        assert scales is None or same(received.scales[:count], scales)
        if known:
            assert received.topk_ids is None and received.topk_weights is None
        else:
            assert torch.equal(received.topk_ids[:count].long(), ids)
            assert torch.equal(
                torch.where(ids >= 0, received.topk_weights[:count], 0), torch.where(ids >= 0, weights, 0)
            )
        return
    places, begins = routing.by_expert(me, alignment)
    assert received.expert_offsets.tolist() == begins and int(received.num_rows) == begins[-1]
    row, k = (places >= 0).nonzero(as_tuple=True)
    assert same(received.x[places[row, k]], x[row])
    assert scales is None or same(received.scales[places[row, k]], scales[row])


def routings(group, seeds, ids=None):
    """Random routings, on one host or on those of `ids`."""
    if ids is not None:
        os.environ["SYMMPOOL_HOST_ID"] = ids[group.rank]
    torch.set_num_threads(1)
    pool = symmpool.Pool(group, "cpu")
    me = pool.rank
    assert ids is None or len(pool.hosts) == len(set(ids))
    for seed in seeds:
        dtype = [BFLOAT16, BFLOAT16, torch.float32, torch.float16][seed % 4]
        routing, hidden, top_k, most = model.random(seed, pool.world, dtype)
        how = [None, "fp8", None, "fp8_pow2", "fp8_ue8m0"][seed % 5] if hidden % 128 == 0 else None
        layout, alignment = [("rank", 1), ("expert", 1), ("expert", 16)][seed % 3]
        buffer = make(pool, routing, hidden, top_k, most, dtype=dtype)
        ids, weights = routing.ids[me], routing.weights[me]
        if seed % 2:
            ids = ids.to(torch.int32)
        options = {"quantize": how, "layout": layout, "alignment": alignment, "exact": seed % 7 == 0}
        received, handle = buffer.dispatch(routing.x[me], ids, weights, **options)
        check_received(routing, received, handle, me, how, alignment)
        if options["exact"]:
            assert len(received.x) == int(received.num_rows)
            assert received.host_expert_counts == received.expert_counts.tolist()
        else:
            assert received.host_expert_counts is None
        by_expert = alignment if layout == "expert" else None
        answers = model.answers_of(routing, seed, hidden, dtype, by_expert)
        given = None
        if layout == "expert" and seed % 2:
            given = [each * 2 - 1 for each in routing.weights]
        back = answers
        if layout == "expert":
            of = zip(range(pool.world), answers)
            back = [routing.weighted(rank, each, alignment, dtype, given) for rank, each in of]
        wanted = routing.combined(me, back, dtype, pool.hosts)
        found = buffer.combine(answers[me], handle, weights=None if given is None else given[me])
        assert same(found, wanted), f"seed {seed}"
        # The rows go the same way once more, with a hook, which has nothing to wait for here.
        again = model.Routing([x.neg() for x in routing.x], routing.ids, routing.weights, routing.experts)
        del options["exact"]
        received, same_handle, wait = buffer.dispatch(again.x[me], handle=handle, hook=True, **options)
        wait()
        assert same_handle is handle
        check_received(again, received, handle, me, how, alignment, known=True)
        out = torch.empty_like(wanted)
        found, wait = buffer.combine(
            answers[me], handle, weights=None if given is None else given[me], out=out, hook=True
        )
        wait()
        assert found is out and same(out, wanted)


@pytest.mark.parametrize("world, seeds", [(1, range(10)), (2, range(10, 62)), (3, range(62, 90))])
def test_random_routings(world, seeds):
    values(world, routings, seeds)


def statistics_and_memory(group):
    pool = symmpool.Pool(group, "cpu")
    buffer = experts.ExpertBuffer(
        pool, hidden=64, experts=4, top_k=2, max_tokens=8, capacity=12, count_load=True
    )
    ids = torch.tensor([[0, 1], [0, 2], [3, -1]])
    x = torch.ones(3, 64, dtype=BFLOAT16)
    _, handle = buffer.dispatch(x, ids)
    buffer.dispatch(x, ids, layout="expert")
    buffer.dispatch(x, handle=handle)
    counts = buffer.load().tolist()
    buffer.reset_load()
    memory = buffer.memory()
    assert buffer.load().tolist() == [0, 0]
    assert memory["received_rows"] == 12 * 128 and memory["total"] > sum([memory["received_rows"]])
    assert memory["handle"] == handle.memory.nbytes
    plain = experts.ExpertBuffer(pool, hidden=64, experts=4, top_k=2, max_tokens=8)
    with pytest.raises(symmpool.InvalidArgumentError, match="count_load"):
        plain.load()
    # Other orders of calls, with handles of several buffers at once.
    received, other = plain.dispatch(x, ids, layout="expert", exact=True)
    sums = plain.combine(received.x, other)
    assert torch.equal(sums, x * (ids >= 0).sum(1, keepdim=True))
    return counts


def test_load_and_memory():
    assert values(2, statistics_and_memory) == [[8, 4], [4, 4]]


def wrong_arguments(group):
    pool = symmpool.Pool(group, "cpu")
    me = pool.rank
    buffer = experts.ExpertBuffer(pool, hidden=128, experts=4, top_k=2, max_tokens=4)
    other = experts.ExpertBuffer(pool, hidden=128, experts=4, top_k=2, max_tokens=4)
    x, ids = torch.ones(2, 128, dtype=BFLOAT16), torch.tensor([[0, 2], [3, 1]])
    good = {"x": x, "topk_ids": ids}
    _, handle = buffer.dispatch(x, ids)
    _, foreign = other.dispatch(x, ids)
    quantized = x.to(torch.float8_e4m3fn)
    many = {"x": x[:1].repeat(5, 1), "topk_ids": ids[:1].repeat(5, 1)}
    wrong = [
        ("x: a torch.Tensor", dict(good, x=[1]), TypeError),
        ("x: of shape", dict(good, x=x[0]), None),
        ("x: of shape", dict(good, x=x[:, :64].contiguous()), None),
        ("x: not contiguous", dict(good, x=torch.ones(128, 2, dtype=BFLOAT16).t()), None),
        ("x: elements of float32", dict(good, x=x.float()), None),
        ("topk_ids: 1 rows", dict(good, topk_ids=ids[:1]), None),
        ("topk_ids: of shape", dict(good, topk_ids=ids[:, :1].contiguous()), None),
        ("topk_ids: elements of int16", dict(good, topk_ids=ids.to(torch.int16)), None),
        ("topk_ids: they are missing", {"x": x}, None),
        ("topk_weights: elements of float64", dict(good, topk_weights=ids.double()), None),
        ("scales: 1 rows", dict(good, x=quantized, scales=torch.ones(1, 1)), None),
        ("8 bytes of scales", dict(good, x=quantized, scales=torch.ones(2, 2)), None),
        ('quantize: "int8"', dict(good, quantize="int8"), None),
        ("quantised by dispatch are not so before", dict(good, x=quantized, quantize="fp8"), None),
        ("layout: 'experts'", dict(good, layout="experts"), None),
        ("alignment=0", dict(good, layout="expert", alignment=0), None),
        ("out: of shape", dict(good, layout="expert", out=x[0]), None),
        ("exact sizes are waited for", dict(good, exact=True, hook=True), None),
        ("handle: of another buffer", {"x": x, "handle": foreign}, None),
        ("handle: one that dispatch", {"x": x, "handle": 7}, TypeError),
        ("1 tokens with a handle of 2", {"x": x[:1], "handle": handle}, None),
        ("a handle of layout 'rank'", {"x": x, "handle": handle, "layout": "expert"}, None),
        ("a handle says where", dict(good, handle=handle), None),
        ("5 tokens where the buffer is made for 4", many, None),
    ]  # fmt: skip
    for text, arguments, kind in wrong:
        if me == 1:
            with pytest.raises(kind or symmpool.InvalidArgumentError, match=text):
                buffer.dispatch(**arguments)
        else:
            with pytest.raises(symmpool.DivergedError):
                buffer.dispatch(**good)
    rows = torch.ones(4, 128, dtype=BFLOAT16)
    wrong = [
        ("expert_output: 1 rows", (rows[:1], handle), {}, None),
        ("expert_output: elements of float32", (rows.float(), handle), {}, None),
        ("out: of shape", (rows, handle), {"out": rows}, None),
        ("out: it overlaps", (rows, handle), {"out": rows[1:3]}, None),
        ("handle: of another buffer", (rows, foreign), {}, None),
        ("handle: one that dispatch", (rows, None), {}, TypeError),
        ("weights for rows by rank", (rows, handle), {"weights": torch.ones(2, 2)}, None),
    ]
    for text, arguments, options, kind in wrong:
        if me == 1:
            with pytest.raises(kind or symmpool.InvalidArgumentError, match=text):
                buffer.combine(*arguments, **options)
        else:
            with pytest.raises(symmpool.DivergedError):
                buffer.combine(rows, handle)
    # An id that is no expert, and a lack of room, are errors on every rank.
    bad = torch.tensor([[0, 2], [3, 4]]) if me == 1 else ids
    with pytest.raises(symmpool.InvalidArgumentError, match="token 1 of rank 1 names expert 4"):
        buffer.dispatch(x, bad)
    small = experts.ExpertBuffer(pool, hidden=128, experts=4, top_k=2, max_tokens=4, capacity=3)
    with pytest.raises(symmpool.OverflowError, match="rank 0 was sent 4 rows"):
        small.dispatch(x, ids)
    with pytest.raises(symmpool.OverflowError, match="rank 0 was sent 4 rows, and its output"):
        buffer.dispatch(x, ids, layout="expert", out=rows[:3])
    received, handle = buffer.dispatch(x, ids, exact=True)
    assert torch.equal(buffer.combine(received.x, handle), x * 2)
    with pytest.raises(symmpool.InvalidArgumentError, match="experts=5"):
        experts.ExpertBuffer(pool, hidden=128, experts=5, top_k=2, max_tokens=4)


def test_wrong_arguments_are_named_and_an_error_on_the_others():
    values(2, wrong_arguments)


def quantized_before(group):
    pool = symmpool.Pool(group, "cpu")
    me = pool.rank
    routing, hidden, top_k, most = model.random(4, pool.world, hidden=256, top_k=4)
    buffer = make(pool, routing, hidden, top_k, most)
    sent = [model.quantized(x, "fp8") for x in routing.x]
    for layout in ("rank", "expert"):
        received, _ = buffer.dispatch(
            sent[me][0], routing.ids[me], scales=sent[me][1], layout=layout, exact=True
        )
        x, scales = model.quantized(routing.received(me)[0], "fp8")
        at = torch.arange(len(x))
        if layout == "expert":
            places = routing.by_expert(me, 1)[0]
            row, k = (places >= 0).nonzero(as_tuple=True)
            x, scales, at = x[row], scales[row], places[row, k]
        assert same(received.x[at], x) and same(received.scales[at], scales)


def test_tokens_that_are_quantised_already():
    values(2, quantized_before)


class Reference(torch.nn.Module):
    """A mixture of experts on one rank; expert `e` is the e-th of its matrices."""

    def __init__(self, count, hidden):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.matrices = torch.nn.Parameter(torch.randn(count, hidden, hidden, generator=generator) / hidden)

    def forward(self, x, ids, weights):
        out = torch.zeros_like(x)
        for k in range(ids.shape[1]):
            here = (ids[:, k] >= 0)[:, None]
            made = torch.einsum("th,thg->tg", x, self.matrices[ids[:, k].clamp(min=0)])
            out = out + torch.where(here, made * weights[:, k : k + 1], 0)
        return out


def gradients(group, layout, given):
    pool = symmpool.Pool(group, "cpu")
    me, world = pool.rank, pool.world
    routing, hidden, top_k, most = model.random(11, world, torch.float32, hidden=64, top_k=3)
    routing.x[1] = routing.x[1][:0]
    routing.ids[1], routing.weights[1] = routing.ids[1][:0], routing.weights[1][:0]
    reference = Reference(routing.experts, hidden)
    x = [each.clone().requires_grad_() for each in routing.x]
    weights = [each.clone().requires_grad_() for each in routing.weights]
    wanted = [reference(*each) for each in zip(x, routing.ids, weights)]
    sum((each * torch.linspace(-1, 1, hidden)).sum() for each in wanted).backward()

    local = routing.local
    matrices = reference.matrices.detach()[me * local : (me + 1) * local].clone().requires_grad_()
    own, own_weights = routing.x[me].clone().requires_grad_(), routing.weights[me].clone().requires_grad_()
    buffer = make(pool, routing, hidden, top_k, most, dtype=torch.float32)
    received, handle = buffer.dispatch(
        own, routing.ids[me], None if given else own_weights, layout=layout, alignment=4
    )
    rows = received.x
    if layout == "rank":
        made = torch.zeros_like(rows)
        used = torch.arange(len(rows)) < received.num_rows
        for k in range(top_k):
            ids = received.topk_ids[:, k]
            here = ((ids >= 0) & used)[:, None]
            each = torch.einsum("th,thg->tg", rows, matrices[torch.where(here[:, 0], ids, 0)])
            made = made + torch.where(here, each * received.topk_weights[:, k : k + 1], 0)
    else:
        made = torch.zeros_like(rows)
        begins = received.expert_offsets.tolist()
        parts = [rows[a:b] @ matrices[e] for e, (a, b) in enumerate(zip(begins, begins[1:]))]
        made = torch.cat([*parts, made[begins[-1] :]])
    out = buffer.combine(made, handle, weights=own_weights if given else None)
    torch.testing.assert_close(out, wanted[me].detach(), rtol=1e-4, atol=1e-5)
    (out * torch.linspace(-1, 1, hidden)).sum().backward()
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(own.grad, x[me].grad, **close)
    torch.testing.assert_close(own_weights.grad, weights[me].grad, **close)
    torch.testing.assert_close(matrices.grad, reference.matrices.grad[me * local : (me + 1) * local], **close)
    # A dispatch by the handle has a gradient too.
    once_more = routing.x[me].clone().requires_grad_()
    received, _ = buffer.dispatch(once_more, layout=layout, handle=handle, alignment=4)
    received.x.sum().backward()
    rows_of = torch.zeros(len(once_more))
    for rank in range(world):
        ids = routing.on(rank)[me] >= 0
        rows_of += ids.sum(1) if layout == "expert" else ids.any(1)
    torch.testing.assert_close(once_more.grad, rows_of[:, None].expand_as(once_more))
    assert "weights_gradients" in buffer.memory()
    for name, options in [("quantize", {"quantize": "fp8"}), ("hook", {"hook": True})]:
        with pytest.raises(symmpool.InvalidArgumentError, match=name):
            buffer.dispatch(own, routing.ids[me], **options)


@pytest.mark.parametrize("layout, given", [("rank", False), ("expert", False), ("expert", True)])
def test_gradients(layout, given):
    values(2, gradients, layout, given)


def operators(group):
    pool = symmpool.Pool(group, "cpu")
    me = pool.rank
    routing, hidden, top_k, most = model.random(23, pool.world, hidden=128, top_k=4)
    buffer = make(pool, routing, hidden, top_k, most)
    x, ids, weights = routing.x[me], routing.ids[me], routing.weights[me]
    run_dispatch, run_combine = torch.ops.symmpool.experts_dispatch, torch.ops.symmpool.experts_combine

    def mixture(x, ids, weights, layout):
        rows, _, _, _, handle = run_dispatch(x, ids, weights, buffer.name, layout, 4, None)
        return run_combine(rows * 2, handle, None, x.shape[0], buffer.name, layout, 4)

    compiled = torch.compile(mixture, backend="eager", fullgraph=True)
    for layout in ("rank", "expert"):
        received, handle = buffer.dispatch(x, ids, weights, layout=layout, alignment=4)
        wanted = buffer.combine(received.x * 2, handle)
        assert same(mixture(x, ids, weights, layout), wanted)
        assert same(compiled(x, ids, weights, layout), wanted)
        for quantize in (None, "fp8", "fp8_ue8m0"):
            arguments = (x, ids, weights, buffer.name, layout, 4, quantize)
            found = run_dispatch(*arguments)
            with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
                given = [mode.from_tensor(each) for each in arguments[:3]]
                fakes = run_dispatch(*given, *arguments[3:])
            shapes = [[(each.shape, each.dtype) for each in all_] for all_ in (found, fakes)]
            assert shapes[0] == shapes[1]
    with pytest.raises(symmpool.InvalidArgumentError, match="named 'experts:99'"):
        run_dispatch(x, ids, weights, "experts:99", "rank", 1, None)


def test_operators():
    values(2, operators)


def without_a_rank(group, phase):
    pool = symmpool.Pool(group, "cpu")
    buffer = experts.ExpertBuffer(pool, hidden=64, experts=2, top_k=1, max_tokens=4)
    x, ids = torch.ones(2, 64, dtype=BFLOAT16), torch.tensor([[0], [1]])
    if phase == "combine":
        received, handle = buffer.dispatch(x, ids, exact=True)
    if pool.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(symmpool.PeerLostError, match="lost rank 1") as raised:
        if phase == "combine":
            buffer.combine(received.x, handle)
        else:
            buffer.dispatch(x, ids)
    # Calls behind that fail with the same reason, at once.
    with pytest.raises(symmpool.PeerLostError):
        buffer.dispatch(x, ids)
    return phase in str(raised.value)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_rank_that_is_killed_is_named(phase):
    assert run(2, without_a_rank, phase)[0].value is True


def test_the_benchmark_runs_beside_gloo(tmp_path):
    report = tmp_path / "report.json"
    few = ["--tokens", "1,8", "--hidden", "256", "--rounds", "1", "--calls", "2", "--replays", "1"]
    status, output, errors = torchrun(
        2, "--device", "cpu", *few, "--routing", "skewed,one", "--json", str(report), benchmark="experts"
    )
    assert status == 0, output + errors
    found = json.loads(report.read_text())
    assert len(found["results"]) == 6 * 2 * 2
    for row in found["results"]:
        assert {"ours", "all-to-all", "all-gather"} == set(row["figures"]) and not row["missing"]
    assert "top-2 of 16 experts" in output and "routed" in output
