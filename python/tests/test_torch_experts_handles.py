"""Handles of `experts` that do not fit their call, or that a program has written to: errors, and no wrong
memory."""

import pytest
import torch
from ranks import values

import symmpool
from symmpool import experts

BFLOAT16 = torch.bfloat16
HIDDEN, EXPERTS, TOP_K, TOKENS = 64, 4, 2, 5


def made(group, **options):
    pool = symmpool.Pool(group, "cpu")
    options = {"hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K, "max_tokens": TOKENS, **options}
    return pool, experts.ExpertBuffer(pool, **options)


def positions(handle):
    """The places of rows that this rank sent, which no property shows."""
    begin = handle._parts["expert_offsets"] + EXPERTS // 2 + 1
    begin = -(-begin // 128) * 128
    return handle.memory[begin : begin + 2 * TOKENS]


IDS = torch.tensor([[0, 2], [3, 1], [1, 3], [2, -1], [0, 1]])


def both(me, call, good, text):
    """Rank 1 makes a call that it refuses, and the others a good one."""
    if me == 1:
        with pytest.raises(symmpool.InvalidArgumentError, match=text):
            call()
    else:
        with pytest.raises(symmpool.DivergedError):
            good()


def written_to(group):
    pool, buffer = made(group)
    me, x = pool.rank, torch.ones(TOKENS, HIDDEN, dtype=BFLOAT16)
    for layout in ("rank", "expert"):
        received, good = buffer.dispatch(x, IDS, layout=layout, exact=True)
        rows = received.x.clone()
        spoilt = [
            (lambda handle: handle.num_received.fill_(2**30), "number of received rows"),
            (lambda handle: handle.num_received.fill_(-3), "number of received rows"),
            (lambda handle: handle.source_offsets.fill_(2**30), "source offset"),
            (lambda handle: handle.source_offsets.fill_(-1), "source offset"),
            (lambda handle: positions(handle).fill_(2**30), "position"),
            (lambda handle: positions(handle).fill_(-7), "position"),
            (lambda handle: handle.memory.fill_(2**31 - 1), "none that a dispatch has written"),
            (lambda handle: handle.memory.zero_(), "none that a dispatch has written"),
        ]
        if layout == "expert":
            count = len(rows)
            spoilt += [
                (lambda handle: handle.places[0].fill_(2**30), "place"),
                (lambda handle, count=count: handle.places[0].fill_(count), "place"),
                (lambda handle: handle.places[0].fill_(-2), "place"),
            ]
        for spoil, text in spoilt:
            for again in (False, True):
                if again and text == "place":
                    continue  # the next test has more places than outputs
                received, handle = buffer.dispatch(x, IDS, layout=layout, exact=True)
                spoil(handle)
                if again:
                    both(
                        me,
                        lambda handle=handle, layout=layout: buffer.dispatch(x, handle=handle, layout=layout),
                        lambda good=good, layout=layout: buffer.dispatch(x, handle=good, layout=layout),
                        text,
                    )
                else:
                    both(
                        me,
                        lambda handle=handle, rows=rows: buffer.combine(rows, handle),
                        lambda good=good, rows=rows: buffer.combine(rows, good),
                        text,
                    )
        expected = x * (torch.where(IDS >= 0, 1, 0).sum(1, keepdim=True) if layout == "expert" else 1)
        if layout == "rank":
            expected = x * torch.stack([(rank == IDS // 2).any(1) for rank in range(2)]).sum(0)[:, None]
        assert torch.equal(buffer.combine(rows, good), expected)


def test_a_handle_that_was_written_to_is_an_error_on_every_rank():
    values(2, written_to)


def random_writes(group, seeds):
    """Whatever a handle has, nothing but rows is read or written."""
    pool, buffer = made(group)
    me, x = pool.rank, torch.ones(TOKENS, HIDDEN, dtype=BFLOAT16)
    refused = 0
    for seed in seeds:
        layout = ("rank", "expert")[seed % 2]
        generator = torch.Generator().manual_seed(seed)
        received, handle = buffer.dispatch(x, IDS, layout=layout, exact=bool(seed & 2))
        rows = received.x.clone()
        if me == 1:
            parts = [part for part in handle._parts if part not in ("elements", "weights")]
            name = parts[int(torch.randint(len(parts), (1,), generator=generator))]
            begin = handle._parts[name]
            at = begin + int(torch.randint(12, (1,), generator=generator))
            value = [-1, -2, 1, 7, 100, 2**20, 2**30, 2**31 - 1, -(2**31)]
            handle.memory[at] = value[int(torch.randint(len(value), (1,), generator=generator))]
        weights = torch.rand(TOKENS, TOP_K) if layout == "expert" and seed & 4 else None
        try:
            if seed % 3 == 0:
                out = torch.empty(len(rows), HIDDEN, dtype=BFLOAT16) if layout == "expert" else None
                buffer.dispatch(x, handle=handle, layout=layout, out=out)
            else:
                buffer.combine(rows, handle, weights=weights)
        except symmpool.errors.Error:
            refused += 1
        # The ranks are in step.
        step = torch.full((1, HIDDEN), float(seed % 100), dtype=BFLOAT16)
        received, _ = buffer.dispatch(step, torch.tensor([[0, 2]]), exact=True)
        assert torch.equal(received.x, step.expand(2, HIDDEN))
    return refused


def test_random_writes_to_handles_touch_no_other_memory():
    refused = values(2, random_writes, range(400), limit=300)
    assert refused[0] == refused[1] > 30


def layouts(group):
    pool, buffer = made(group)
    x = torch.ones(TOKENS, HIDDEN, dtype=BFLOAT16)
    run_dispatch, run_combine = torch.ops.symmpool.experts_dispatch, torch.ops.symmpool.experts_combine
    parts = {name: run_dispatch(x, IDS, None, buffer.name, name, 1, None) for name in ("rank", "expert")}
    by_rank, by_expert = parts["rank"], parts["expert"]

    def combine(rows, handle, layout, tokens=TOKENS, alignment=1):
        return run_combine(rows, handle, None, tokens, buffer.name, layout, alignment)

    wrong = [
        ("neither 'rank' nor 'expert'", lambda: combine(by_rank[0], by_rank[4], "experts")),
        ("neither 'rank' nor 'expert'", lambda: combine(by_rank[0], by_rank[4], "")),
        ('layout "expert" with a handle', lambda: combine(by_expert[0], by_rank[4], "expert")),
        ('layout "rank" with a handle', lambda: combine(by_rank[0], by_expert[4], "rank")),
        ("4 tokens with a handle of 5", lambda: combine(by_rank[0], by_rank[4], "rank", 4)),
        ("tokens=9", lambda: combine(by_rank[0], by_rank[4], "rank", 9)),
        ("tokens=-1", lambda: combine(by_rank[0], by_rank[4], "rank", -1)),
        ("handle: ", lambda: combine(by_rank[0], by_rank[4][1:], "rank")),
        ("handle: ", lambda: combine(by_rank[0], by_rank[4].float(), "rank")),
        ("alignment=0", lambda: combine(by_expert[0], by_expert[4], "expert", alignment=0)),
        ("none that a dispatch", lambda: combine(by_rank[0], torch.zeros_like(by_rank[4]), "rank")),
        ("neither 'rank' nor", lambda: run_dispatch(x, IDS, None, buffer.name, "ranks", 1, None)),
    ]
    for text, call in wrong:
        # Every rank makes the same mistake, as compiled code does, and one alone.
        with pytest.raises(symmpool.InvalidArgumentError, match=text):
            call()
        both(pool.rank, call, lambda: combine(by_rank[0], by_rank[4], "rank"), text)
    # A handle's attribute does not change how its rows lie.
    received, handle = buffer.dispatch(x, IDS, exact=True)
    handle.layout = "expert"
    with pytest.raises(symmpool.InvalidArgumentError, match='handle of layout "rank"'):
        buffer.combine(received.x, handle)
    assert torch.equal(combine(by_expert[0], by_expert[4], "expert"), x * (IDS >= 0).sum(1, keepdim=True))


def test_layouts_of_operators_are_checked():
    values(2, layouts)


def small_outputs(group):
    """Sends rows by a handle to an output that may be shorter than that of its dispatch."""
    pool, buffer = made(group)
    x = torch.ones(TOKENS, HIDDEN, dtype=BFLOAT16)
    received, handle = buffer.dispatch(x, IDS, layout="expert", exact=True)
    for rows in (len(received.x) - 1, 1, 0):
        out = torch.zeros(rows, HIDDEN, dtype=BFLOAT16)
        with pytest.raises(symmpool.OverflowError, match="has room for"):
            buffer.dispatch(x, handle=handle, layout="expert", out=out)
    again, _ = buffer.dispatch(x, handle=handle, layout="expert", exact=True)
    assert torch.equal(again.x, received.x)


def test_an_output_that_is_too_short_for_a_handle():
    values(2, small_outputs)


def dropped_again_and_again(group):
    pool = symmpool.Pool(group, "cpu")
    reserved, late = [], []
    x, ids = torch.ones(TOKENS, 512, dtype=BFLOAT16), IDS
    for nth in range(200):
        buffer = experts.ExpertBuffer(
            pool, hidden=512, experts=EXPERTS, top_k=TOP_K, max_tokens=64, dtype=BFLOAT16
        )
        if nth % 50 == 49:
            received, handle = buffer.dispatch(x, ids, exact=True)
            assert torch.equal(buffer.combine(received.x, handle)[0], 2 * x[0])
            del received, handle
            reserved.append(pool.stats()["reserved"])
        # Ranks drop them at different times.
        late = [*late[-3:], buffer] if pool.rank == 1 else []
        del buffer
    return reserved


def test_buffers_that_are_made_and_dropped_leave_a_pool_as_it_is():
    for reserved in values(2, dropped_again_and_again):
        assert len(set(reserved)) == 1, reserved
