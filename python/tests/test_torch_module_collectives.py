"""The package's own collectives take what torch.distributed's take: lists, roots, types, operations."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

import symmpool

SIGNED = torch.int8, torch.int16, torch.int32, torch.int64
UNSIGNED = torch.uint8, torch.uint16, torch.uint32, torch.uint64


def of_rank(rank, dtype, count=24):
    """Returns the elements that a rank brings, of any type."""
    generator = torch.Generator().manual_seed(7 + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(torch.bool)
    if dtype.is_complex:
        parts = torch.randint(-3, 4, (count, 2), generator=generator).to(dtype.to_real())
        return torch.view_as_complex(parts)
    low, high = (-5, 6) if dtype.is_signed else (0, 11)
    found = torch.randint(low, high, (count,), generator=generator)
    if dtype in (*SIGNED, *UNSIGNED):
        # The largest and the smallest there are, so that sums wrap and signs count.
        bits = 8 * dtype.itemsize - (1 if dtype.is_signed else 0)
        found[rank], found[5] = -1 if dtype.is_signed else (1 << min(bits, 62)) - 1, (1 << min(bits, 62)) - 2
    return found.to(dtype)


def expected(op, dtype, world):
    """Returns the expected result, by numbers of Python."""
    columns = zip(*(of_rank(rank, dtype).tolist() for rank in range(world)), strict=True)
    functions = {
        "sum": lambda a, b: a + b,
        "prod": lambda a, b: a * b,
        "min": min,
        "max": max,
        "band": lambda a, b: a & b,
        "bor": lambda a, b: a | b,
        "bxor": lambda a, b: a ^ b,
    }
    found = []
    for column in columns:
        total = column[0]
        for each in column[1:]:
            total = functions[op](total, each)
        if dtype == torch.bool:
            total = bool(total)
        elif not dtype.is_complex:
            bits = 8 * dtype.itemsize
            total &= (1 << bits) - 1
            if dtype.is_signed and total >> (bits - 1):
                total -= 1 << bits
        found.append(total)
    return found


ARITHMETIC, BITWISE = ("sum", "prod", "min", "max"), ("band", "bor", "bxor")
CASES = [
    *((op, dtype) for dtype in (torch.bool, *SIGNED, *UNSIGNED) for op in (*ARITHMETIC, *BITWISE)),
    *((op, dtype) for dtype in (torch.complex64, torch.complex128) for op in ("sum", "prod")),
]


def every_type(group):
    me, world = group.rank, group.world
    wrong = []
    for op, dtype in CASES:
        right = expected(op, dtype, world)
        x = of_rank(me, dtype)
        symmpool.all_reduce(x, op, group)
        kept, out = of_rank(me, dtype), torch.zeros(24, dtype=dtype)
        symmpool.all_reduce(kept, op, group, out=out)
        # Every other element of a larger tensor.
        loose = torch.zeros(24, 2, dtype=dtype)[:, 0]
        loose.copy_(of_rank(me, dtype))
        work = symmpool.all_reduce(loose, op, group, async_op=True)
        assert work.wait() and work.result()[0] is loose
        part = torch.zeros(24 // world, dtype=dtype)
        symmpool.reduce_scatter_tensor(part, of_rank(me, dtype), op, group)
        rooted = of_rank(me, dtype)
        symmpool.reduce(rooted, 1, op, group)
        length = 24 // world
        found = [
            x.tolist() == right,
            out.tolist() == right and kept.tolist() == of_rank(me, dtype).tolist(),
            loose.tolist() == right,
            part.tolist() == right[me * length : (me + 1) * length],
            rooted.tolist() == (right if me == 1 else of_rank(me, dtype).tolist()),
        ]
        if not all(found):
            wrong.append((op, str(dtype), found))
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_reductions_of_every_type_give_what_numbers_give(world):
    assert values(world, every_type, limit=120) == [[]] * world


def averages(group):
    x = torch.tensor([1 + 2j, 3.0]) * (group.rank + 1)
    symmpool.all_reduce(x, symmpool.ReduceOp.AVG, group)
    y = torch.tensor([30000, -7], dtype=torch.int16)
    symmpool.all_reduce(y, "avg", group)
    return x.tolist(), y.tolist()


def test_averages_do_not_wrap():
    assert values(2, averages) == [([1.5 + 3j, 4.5], [30000, -7])] * 2


def test_reductions_are_known_by_torchs_names():
    ours, theirs = symmpool.ReduceOp, dist.ReduceOp
    (group,) = symmpool.Group.in_process(1)
    for op in ours:
        x = torch.tensor([3, 5])
        for form in (op, op.value, getattr(theirs, op.name), theirs(getattr(theirs, op.name))):
            symmpool.all_reduce(x, form, group)
        assert x.tolist() == [3, 5] and op == op.value
    for wrong in (theirs.PREMUL_SUM, "SUM", "median", 0, True, 1.5, [], object()):
        with pytest.raises(symmpool.InvalidArgumentError, match="op: "):
            symmpool.all_reduce(torch.ones(2), wrong, group)
        with pytest.raises(symmpool.InvalidArgumentError, match="op: "):
            symmpool.all_reduce(torch.ones(2, dtype=torch.bool), wrong, group)


def lists(group):
    me, world = group.rank, group.world
    row, found = torch.arange(3), {}
    gathered = [torch.zeros(3, dtype=torch.int64) for _ in range(world)]
    symmpool.all_gather(gathered, row + 10 * me, group)
    found["all_gather"] = [each.tolist() for each in gathered]
    # Rank r has r + 1 elements; one of the tensors is not contiguous.
    uneven = [torch.zeros(rank + 1, 2)[:, 0] for rank in range(world)]
    symmpool.all_gather(uneven, torch.full((me + 1,), me + 1.0), group)
    found["uneven"] = [each.tolist() for each in uneven]
    part = torch.zeros(2, 3, dtype=torch.int16).t()
    inputs = [torch.full((3, 2), rank + me, dtype=torch.int16) for rank in range(world)]
    symmpool.reduce_scatter(part, inputs, group=group)
    found["reduce_scatter"] = part.tolist()
    share = torch.zeros(me + 1)
    symmpool.reduce_scatter(share, [torch.ones(rank + 1) for rank in range(world)], "sum", group)
    found["uneven shares"] = share.tolist()
    # Rank r sends r + peer elements to each peer.
    outputs = [torch.zeros(me + peer) for peer in range(world)]
    inputs = [torch.full((me + peer,), float(me)) for peer in range(world)]
    symmpool.all_to_all(outputs, inputs, group)
    found["all_to_all"] = [each.tolist() for each in outputs]
    parts = [torch.zeros(3, 2, dtype=torch.int64)[:, 1] for _ in range(world)] if me == 1 else None
    symmpool.gather(row + me, parts, 1, group)
    found["gather"] = [each.tolist() for each in parts or []]
    mine = torch.zeros(3, dtype=torch.complex64)
    sent = [torch.full((3,), 1j * rank).to(torch.complex64) for rank in range(world)] if me == 0 else None
    symmpool.scatter(mine, sent, group=group)
    found["scatter"] = mine.tolist()
    return found


def lists_in_the_background(group):
    me, world = group.rank, group.world
    gathered = [torch.zeros(2) for _ in range(world)]
    parts = [torch.zeros(2) for _ in range(world)] if me == 0 else []
    mine, total = torch.zeros(2), torch.full((2,), me + 1.0)
    first = symmpool.all_gather(gathered, torch.full((2,), float(me)), group, async_op=True)
    assert first.wait()  # the scattered tensors are copied when the call is made
    works = [
        first,
        symmpool.gather(torch.full((2,), float(me)), parts, 0, group, async_op=True),
        symmpool.scatter(mine, gathered if me == 1 else [], 1, group, async_op=True),
        symmpool.reduce(total, 0, group=group, async_op=True),
    ]
    assert all(isinstance(work, symmpool.Work) and work.wait() for work in works)
    assert all(ours is theirs for ours, theirs in zip(works[0].result(), gathered, strict=True))
    return [each[0].item() for each in (*gathered, *parts, mine, total)]


@pytest.mark.parametrize("world", [2, 3])
def test_lists_and_roots_are_as_in_torch(world):
    ranks = range(world)
    for me, found in enumerate(values(world, lists)):
        assert found["all_gather"] == [[10 * rank, 10 * rank + 1, 10 * rank + 2] for rank in ranks]
        assert found["uneven"] == [[rank + 1.0] * (rank + 1) for rank in ranks]
        assert found["reduce_scatter"] == [[sum(ranks) + world * me] * 2] * 3
        assert found["uneven shares"] == [world] * (me + 1)
        assert found["all_to_all"] == [[rank] * (me + rank) for rank in ranks]
        assert found["gather"] == ([[rank, rank + 1, rank + 2] for rank in ranks] if me == 1 else [])
        assert found["scatter"] == [1j * me] * 3


def test_so_are_those_that_are_not_waited_for():
    # Rank 1 scatters what it has gathered by then.
    assert values(2, lists_in_the_background) == [[0, 1, 0, 1, 0, 3], [0, 1, 1, 2]]


def copied_behind_what_was_begun(group):
    x = torch.ones(1 << 20)
    for _ in range(3):
        work = symmpool.all_reduce(x, group=group, async_op=True)
    gathered = [torch.zeros(1 << 20) for _ in range(group.world)]
    symmpool.all_gather(gathered, x, group)
    return work.is_completed(), [each.min().item() for each in gathered]


def test_copies_are_made_behind_what_was_begun():
    assert values(2, copied_behind_what_was_begun) == [(True, [8.0, 8.0])] * 2


def loose(group):
    """Tensors that are not contiguous, to and from."""
    me, world = group.rank, group.world
    wide = torch.zeros(4, 2 * world)
    out, x = wide[:, ::2], torch.full((2, 2), me + 1.0).t()[:, :1]
    symmpool.all_gather_into_tensor(out, torch.full((4, 2), me + 1.0)[:, 1], group)
    gathered = out.reshape(-1).tolist() == [r + 1 for r in range(world) for _ in range(4)]
    kept = wide[:, 1::2].abs().sum().item() == 0
    symmpool.broadcast(x, world - 1, group)
    a = (1j * torch.arange(2 * world) * (me + 1)).to(torch.complex64).conj()
    b = torch.zeros(2 * world, 2, dtype=torch.complex64)[:, 0]
    assert a.is_conj()
    symmpool.all_to_all_single(b, a, group=group)
    swapped = b.imag.tolist() == [-(rank + 1) * (2 * me + at) for rank in range(world) for at in range(2)]
    negative = torch.full((3,), 1j * (me + 1)).conj().imag
    assert negative.is_neg()
    symmpool.all_reduce(negative, group=group)
    return gathered, kept, x.flatten().tolist() == [world] * 2, swapped, negative[0].item()


def test_tensors_need_not_be_contiguous():
    assert values(3, loose) == [(True, True, True, True, -6.0)] * 3


def point_to_point(group):
    me = group.rank
    x = torch.full((5,), float(me))
    with pytest.raises(symmpool.InvalidStateError, match="begin with a collective"):
        symmpool.send(x, 1 - me, group)
    symmpool.barrier(group)
    y = torch.zeros(5, 2)[:, 1]
    if me == 0:
        symmpool.send(x[::2], 1, group, tag=3)
        symmpool.send(x, dst=1, group=group)
    else:
        first, second = torch.zeros(3), torch.ones(5)
        assert symmpool.recv(first, 0, group) == 0 and symmpool.recv(second, group=group, group_src=0) == 0
        symmpool.send(x, 0, group)
        return first.tolist(), second.tolist()
    assert symmpool.recv(y, 1, group) == 1
    for wrong in (
        lambda: symmpool.send(y, 0, group, group_dst=0),
        lambda: symmpool.send(y, -1, group),
        lambda: symmpool.send(y, "1", group),
        lambda: symmpool.send(y, 2, group),
        lambda: symmpool.send(y.to_sparse(), 1, group),
    ):
        with pytest.raises(symmpool.InvalidArgumentError):
            wrong()
    return y.tolist()


def test_ranks_send_to_each_other():
    assert values(2, point_to_point) == [[1.0] * 5, ([0.0] * 3, [0.0] * 5)]


def splits_in_tensors(group):
    me, world = group.rank, group.world
    sent = torch.tensor([me + 1] * world)
    x = torch.full(((me + 1) * world, 2), float(me))
    out, counts, offsets = torch.zeros(8, 2), torch.zeros_like(sent), torch.zeros_like(sent)
    symmpool.all_to_all_v(out, x, sent, counts, offsets, group)
    async_out = torch.zeros(8, 2)
    symmpool.all_to_all_v(async_out, x, sent, group=group, async_op=True).wait()
    return out[:3, 0].tolist(), async_out[:3, 1].tolist(), counts.tolist(), offsets.tolist()


def test_splits_may_be_tensors():
    right = [0.0, 1.0, 1.0]
    assert values(2, splits_in_tensors) == [(right, right, [1, 2], [0, 1])] * 2


def on_a_subgroup(group, folder):
    me, world = begin(group, folder)
    pair = dist.new_group([1, 2])
    found = None
    if me:
        x = torch.tensor([float(me)])
        # Ranks of the default group, or of the pair.
        symmpool.reduce(x, dst=2, group=pair)
        parts = [torch.zeros(1), torch.zeros(1)] if me == 1 else None
        symmpool.gather(torch.tensor([float(me)]), parts, group_dst=0, group=pair)
        mine = torch.zeros(1)
        symmpool.scatter(mine, [torch.ones(1), torch.ones(1) * 2] if me == 2 else None, 2, pair)
        if me == 1:
            symmpool.send(x, 2, pair)
        else:
            assert symmpool.recv(x, 1, pair) == 1
        for call in (symmpool.gather, symmpool.reduce):
            with pytest.raises(symmpool.InvalidArgumentError, match="no rank of the call's group"):
                call(x, dst=0, group=pair)
        symmpool.all_reduce(x, group=pair)
        found = x.item(), mine.item(), [each.item() for each in parts or []]
    else:
        with pytest.warns(UserWarning, match="no member"):
            assert symmpool.gather(torch.ones(1), group=pair) is None
        with pytest.warns(UserWarning, match="no member"):
            symmpool.send(torch.ones(1), 1, pair)
    dist.destroy_process_group()
    return found


def test_roots_of_subgroups_are_torchs(tmp_path):
    assert values(3, on_a_subgroup, str(tmp_path)) == [None, (2.0, 1.0, [1.0, 2.0]), (2.0, 2.0, [])]


def with_numpy(group):
    me, world = group.rank, group.world
    gathered = [np.zeros(2, np.float32) for _ in range(world)]
    symmpool.all_gather(gathered, np.full(2, me, np.float32), group)
    x = np.array([True, me == 0])
    symmpool.all_reduce(x, "band", group)
    y = np.array([me + 1, 4], np.int16)
    symmpool.reduce(y, 0, "max", group)
    pool = symmpool.Pool(group, "cpu")
    block = pool.block(3, "int16")
    block.numpy()[:] = me + 1
    symmpool.all_reduce(block, "bor", pool)
    return [each.tolist() for each in gathered], x.tolist(), y.tolist(), block.numpy().tolist()


def test_arrays_of_numpy_and_blocks_may_be_in_lists_and_of_every_type():
    first, second = values(2, with_numpy)
    assert first == ([[0, 0], [1, 1]], [True, False], [2, 4], [3] * 3)
    assert second == ([[0, 0], [1, 1]], [True, False], [2, 4], [3] * 3)


NONSENSE = {
    "op: none": lambda x, g: symmpool.all_reduce(x, "median", g),
    "op: complex": lambda x, g: symmpool.all_reduce(x.to(torch.complex64), "max", g),
    "op: bits of floats": lambda x, g: symmpool.reduce(x, 0, "bxor", g),
    "op: average of bool": lambda x, g: symmpool.reduce_scatter_tensor(x.bool()[:1], x.bool(), "avg", g),
    "out": lambda x, g: symmpool.all_reduce(x.bool(), "max", g, out=x),
    "length": lambda x, g: symmpool.reduce_scatter_tensor(x.bool(), x.bool(), "max", g),
    "expanded": lambda x, g: symmpool.all_reduce(torch.ones(1).expand(4), "sum", g),
    "expanded bool": lambda x, g: symmpool.all_reduce(torch.ones(1).bool().expand(4), "max", g),
    "root": lambda x, g: symmpool.reduce(x, 7, group=g),
    "root -1": lambda x, g: symmpool.gather(x, None, -1, g),
    "root of text": lambda x, g: symmpool.scatter(x, None, "first", g),
    "no root": lambda x, g: symmpool.reduce(x, group=g),
    "two roots": lambda x, g: symmpool.gather(x, None, 0, g, group_dst=0),
    "too few": lambda x, g: symmpool.all_gather([x], x, g),
    "no list": lambda x, g: symmpool.all_gather(x, x, g),
    "nothing": lambda x, g: symmpool.all_gather(None, x, g),
    "text": lambda x, g: symmpool.all_gather(["a", "b"], x, g),
    "types": lambda x, g: symmpool.all_gather([x, x.double()], x, g),
    "lists": lambda x, g: symmpool.all_to_all([], [], g),
    "list of lists": lambda x, g: symmpool.all_to_all([[x], [x]], [x, x], g),
    "inputs": lambda x, g: symmpool.reduce_scatter(x, [x, None], group=g),
    "uneven": lambda x, g: (
        symmpool.reduce_scatter(x, [x, x[:1]], group=g)
        if g.rank
        else symmpool.reduce_scatter(x, [x[:1], x], group=g)
    ),
    "gather sizes": lambda x, g: symmpool.gather(x, [x, x[:2]], g.rank, g),
    "gather for nobody": lambda x, g: symmpool.gather(x, [], g.rank, g),
    "list at another": lambda x, g: symmpool.scatter(x, [x, x], 1 - g.rank, g),
    "number": lambda x, g: symmpool.reduce(5, 0, group=g),
    "splits": lambda x, g: symmpool.all_to_all_v(x, x, x[:1].long(), group=g),
    "sparse": lambda x, g: symmpool.gather(x.to_sparse(), None, 1 - g.rank, g),
}


def refused_by_one(group, name):
    """Rank 1 makes a call that makes no sense, the other one that does. Then both make one that does."""
    x = torch.ones(4)
    try:
        NONSENSE[name](x, group) if group.rank == 1 else symmpool.barrier(group, device="cpu")
        found = None
    except (symmpool.Error, TypeError) as error:
        found = type(error).__name__, getattr(error, "ranks", ())
    y = torch.ones(2)
    symmpool.all_reduce(y, group=group)
    return found, y.tolist()


def refused_one_by_one(group, names):
    symmpool.barrier(group)
    return [refused_by_one(group, name) for name in names]


def is_refused_by_all(name, zero, one):
    assert one[0][0] in ("InvalidArgumentError", "TypeError"), (name, one)
    assert zero == (("DivergedError", (1,)), [2.0, 2.0]), (name, zero)
    assert one[1] == [2.0, 2.0], (name, one)


def test_what_makes_no_sense_is_an_error_of_all_ranks():
    zero, one = values(2, refused_one_by_one, list(NONSENSE))
    assert len(zero) == len(one) == len(NONSENSE)
    for found in zip(NONSENSE, zero, one, strict=True):
        is_refused_by_all(*found)


@pytest.mark.parametrize("name", ["op: complex", "too few", "root", "number"])
def test_what_makes_no_sense_is_an_error_of_all_ranks_in_a_first_call_too(name):
    is_refused_by_all(name, *values(2, refused_by_one, name))


def test_calls_that_are_no_operators_end_a_compiled_graph():
    (group,) = symmpool.Group.in_process(1)
    pool = symmpool.Pool(group, "cpu")
    symmpool.barrier(pool)

    def step(x):
        out = [torch.zeros_like(x)]
        symmpool.all_gather(out, x * 2, pool)
        return out[0] + 1

    torch._dynamo.reset()
    assert torch.compile(step, backend="eager")(torch.ones(3)).tolist() == [3.0] * 3
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="symmpool.all_gather has no place"):
        torch.compile(step, backend="eager", fullgraph=True)(torch.ones(3))
    with torch._subclasses.FakeTensorMode(), pytest.raises(symmpool.UnsupportedError, match="no operator"):
        step(torch.ones(3))


def test_a_gradient_that_comes_back_by_way_of_a_list_warns():
    (group,) = symmpool.Group.in_process(1)
    x = torch.ones(2, requires_grad=True)
    out = [x * 2]
    symmpool.all_gather(out, torch.ones(2), group)
    with pytest.warns(UserWarning, match="symmpool.ops"):
        out[0].sum().backward()


def along_dimensions(group):
    me, world = group.rank, group.world
    x = torch.full((2, 3), me + 1.0, requires_grad=True)
    wide = symmpool.ops.all_gather_tensor(x, 1, group)
    part = symmpool.ops.reduce_scatter_tensor(wide * (me + 1), "sum", 1, group)
    part.sum().backward()
    with pytest.raises(symmpool.InvalidArgumentError, match="dimension 1"):
        symmpool.ops.reduce_scatter_tensor(torch.ones(1, 2 * world + 1), "sum", 1, group)
    return wide[1].tolist(), part.tolist(), x.grad.tolist()


def test_functional_collectives_go_along_any_dimension():
    for me, (wide, part, gradient) in enumerate(values(2, along_dimensions)):
        assert wide == [1.0] * 3 + [2.0] * 3 and part == [[3.0 * (me + 1)] * 3] * 2
        # The result is scattered to one rank, times 1 here and 2 there.
        assert gradient == [[3.0] * 3] * 2


def test_pools_make_tensors_as_torch_does():
    (group,) = symmpool.Group.in_process(1)
    pool = symmpool.Pool(group, "cpu")
    for made in (pool.empty(2, 3), pool.empty((2, 3)), pool.zeros(2, 3), pool.empty(np.int64(2), 3)):
        assert made.shape == (2, 3) and made.dtype == torch.float32
    for made in (
        pool.zeros(2, 3, dtype=torch.int16),
        pool.zeros((2, 3), torch.int16),
        pool.zeros(2, 3, torch.int16),
        pool.zeros([2, 3], "int16"),
        pool.zeros(shape=(2, 3), dtype="int16"),
        pool.full((2, 3), 0, dtype=torch.int16),
    ):
        assert made.tolist() == [[0] * 3] * 2 and made.dtype == torch.int16
    assert pool.empty(3).shape == (3,) and pool.empty(()).shape == () and pool.empty(3, None).shape == (3,)
    filled = (pool.full(2, 7), pool.full((2,), True), pool.full(2, 0.5), pool.full(2, 1, torch.float16))
    for made, theirs in zip(filled, (7, True, 0.5, 1), strict=True):
        assert made.tolist() == [theirs] * 2
    assert [made.dtype for made in filled] == [torch.int64, torch.bool, torch.float32, torch.float16]
    assert pool.full((2, 2), 3, np.int32).tolist() == [[3, 3]] * 2
    wrong = (
        lambda: pool.empty(),
        lambda: pool.empty(2, -1),
        lambda: pool.empty(2, "3"),
        lambda: pool.empty((2, 3), 4),
        lambda: pool.empty((2, 3), shape=(2, 3)),
        lambda: pool.empty(2, 3, "float33"),
        lambda: pool.zeros(1.5),
        lambda: pool.full(2, "text"),
    )
    for call in wrong:
        with pytest.raises((symmpool.InvalidArgumentError, TypeError)):
            call()


def test_what_is_public_is_shown_and_nothing_else():
    shown = dir(symmpool)
    assert {"all_reduce", "Pool", "ReduceOp", "Work", "backend", "ops", "__version__"} <= set(shown)
    assert not [name for name in shown if name.startswith("_") and name != "__version__"]
    assert not {"groups", "communicators", "collectives", "memory", "torch_backend"} & set(shown)
    for name in shown:
        assert getattr(symmpool, name, None) is not None
