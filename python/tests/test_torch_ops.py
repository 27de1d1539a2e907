"""The collectives as operators of torch: eager, compiled, and with gradients."""

import functools
import os
import re
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin
from torch.utils._python_dispatch import TorchDispatchMode

import symmpool
from symmpool import ops


def compiled(group, folder):
    me, world = begin(group, folder)
    everyone = dist.new_group(list(range(world)))

    def step(x):
        y = x * 2
        symmpool.all_reduce(y)
        symmpool.all_reduce(y, dist.ReduceOp.MAX, group=everyone)
        gathered = torch.empty(y.shape[0] * world)
        symmpool.all_gather_into_tensor(gathered, y + me)
        part = torch.empty(y.shape[0])
        symmpool.reduce_scatter_tensor(part, gathered, "avg")
        swapped = torch.empty_like(gathered)
        symmpool.all_to_all_single(swapped, gathered)
        sent = torch.empty_like(y)
        symmpool.all_reduce(y, "sum", out=sent)
        return y.sum() + part.sum() * 3 + (swapped * torch.arange(swapped.shape[0])).sum() + sent[0]

    x = torch.arange(4.0) + me
    expected = step(x)
    same = [bool(expected == step(x))]
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        same.append(bool(torch.compile(step, backend=backend, fullgraph=True)(x) == expected))
    dist.destroy_process_group()
    return same


def test_compiled_calls_are_what_eager_ones_are(tmp_path):
    assert values(2, compiled, str(tmp_path)) == [[True] * 3] * 2


def gradients(group, folder):
    begin(group, folder)
    me, world = group.rank, group.world
    splits = [[r + 1 for r in range(world)], [me + 1] * world]

    def loss(x):
        a = ops.all_reduce(x, "avg")
        b = ops.all_gather_tensor(a * x)
        c = ops.reduce_scatter_tensor(b * (me + 1))
        d = ops.all_to_all_single(c.repeat(world * (me + 1), 1), *splits)
        return (d * d).sum()

    found = []
    for run in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        x = (torch.arange(6.0).reshape(2, 3) + me).requires_grad_()
        run(x).backward()
        found.append(x.grad)
    # Against differences: the sum of all ranks' losses, one element of this rank's at a time.
    numbers = []
    for rank in range(world):
        for at in range(6):
            ends = []
            for step in (1e-3, -1e-3):
                x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3) + me
                if rank == me:
                    x.view(-1)[at] += step
                total = loss(x)
                symmpool.all_reduce(total.reshape(1), "sum", out=(out := torch.empty(1).double()))
                ends.append(out.item())
            if rank == me:
                numbers.append((ends[0] - ends[1]) / 2e-3)
    dist.destroy_process_group()
    expected = torch.tensor(numbers).reshape(2, 3)
    return torch.allclose(found[0], expected, rtol=1e-3), torch.equal(*found)


def test_gradients_flow_through_sums_and_moves(tmp_path):
    assert values(2, gradients, str(tmp_path)) == [(True, True)] * 2


def test_operators_keep_their_word():
    (group,) = symmpool.Group.in_process(1)
    name = ops.name_of(group)
    assert name == ops.name_of(group) and ops.name_of(None) == ""
    x = torch.randn(4, 3)
    for operator, arguments in (
        (torch.ops.symmpool.all_reduce, (x, "sum", name)),
        (torch.ops.symmpool.all_reduce_, (x.clone(), "sum", name)),
        (torch.ops.symmpool.all_gather, (x, 1, name)),
        (torch.ops.symmpool.reduce_scatter, (x, "sum", 1, name)),
        (torch.ops.symmpool.all_to_all, (x, [3], [3], 1, name)),
        (torch.ops.symmpool.broadcast_, (x.clone(), 0, name)),
    ):
        torch.library.opcheck(operator, arguments)
    for operator, arguments in (
        (torch.ops.symmpool.all_reduce, (x.clone().requires_grad_(), "sum", name)),
        (torch.ops.symmpool.all_to_all, (x.clone().requires_grad_(), [3], [3], 1, name)),
    ):
        torch.library.opcheck(operator, arguments)
    assert torch.ops.symmpool.all_reduce(x.t(), "max", name).equal(x.t())


def test_operators_refuse_nonsense():
    (group,) = symmpool.Group.in_process(1)
    x = torch.ones(3)
    with pytest.raises(symmpool.InvalidArgumentError, match="none of the name"):
        torch.ops.symmpool.all_reduce(x, "sum", "symmpool:none")
    with pytest.raises(symmpool.InvalidArgumentError, match="3 ranks|not for"):
        torch.ops.symmpool.reduce_scatter(torch.ones(4), "sum", 3, ops.name_of(group))
    with pytest.raises(symmpool.InvalidArgumentError, match="both"):
        ops.all_to_all_single(x, [1], None, group)
    with pytest.raises(symmpool.InvalidArgumentError, match="gradient"):
        y = x.clone().requires_grad_()
        ops.all_reduce(y, "max", group).sum().backward()


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def seen_all_to_all(sizes, wrong):
    out = torch.empty(3)
    with Seen():
        symmpool.all_to_all_single(out, torch.ones(3), sizes if wrong else [1] * 3, [1] * 3)


def refused_here_told_there(group, folder):
    me, world = begin(group, folder)
    # Without rank 0, so that numbers in the group and in the default one differ.
    pair = dist.new_group([1, 2])
    x = torch.ones(8)
    calls = [
        ("src", lambda wrong: symmpool.broadcast(x, "x" if wrong else 0)),
        ("src", lambda wrong: symmpool.broadcast(x, 1.5 if wrong else 0)),
        ("src", lambda wrong: symmpool.broadcast(x, -1 if wrong else 0)),
        ("root 3", lambda wrong: symmpool.broadcast(x, world if wrong else 0)),
        ("one of", lambda wrong: symmpool.broadcast(x, None if wrong else 0)),
        ("not for", lambda wrong: ops.reduce_scatter_tensor(torch.ones(7 if wrong else 9))),
        ("not for", lambda wrong: ops.reduce_scatter_tensor(torch.ones((4, 3) if wrong else (12,)))),
        ("not for", lambda wrong: ops.all_to_all_single(torch.ones(7 if wrong else 9))),
        ("both", lambda wrong: ops.all_to_all_single(torch.ones(3), None if wrong else [1] * 3, [1] * 3)),
    ]
    grad = torch.ones(9, requires_grad=True)
    greatest = [ops.all_reduce(grad, "max"), ops.reduce_scatter_tensor(grad, "min")]
    right = [ops.all_reduce(grad), ops.reduce_scatter_tensor(grad)]
    for wrongs, rights in zip(greatest, right, strict=True):
        calls.append(("no gradient", lambda wrong, w=wrongs, r=rights: (w if wrong else r).sum().backward()))
    for sizes in (5, ["a"] * 3, [1.5] * 3, "abc", {1: 2}):
        calls.append(
            (
                "integers",
                lambda wrong, sizes=sizes: ops.all_to_all_single(
                    torch.ones(3), sizes if wrong else [1] * 3, [1] * 3
                ),
            )
        )
        calls.append(("integers", functools.partial(seen_all_to_all, sizes)))
    for dim in ("1", None, 1.5, 7):
        calls.append(
            (
                "dimension",
                lambda wrong, dim=dim: ops.reduce_scatter_tensor(
                    torch.ones(3, 3), scatter_dim=dim if wrong else 1
                ),
            )
        )
        calls.append(
            ("dimension", lambda wrong, dim=dim: ops.all_gather_tensor(torch.ones(3), dim if wrong else 0))
        )
    if me > 0:
        calls.append(("no rank of", lambda wrong: symmpool.broadcast(x, 0 if wrong else 1, pair)))
    found = []
    for what, call in calls:
        try:
            call(me == 2)
            found.append(None)
        except symmpool.InvalidArgumentError as error:
            assert re.search(what, str(error)), error
            found.append("InvalidArgumentError")
        except symmpool.DivergedError:
            found.append("DivergedError")
    # All are in step still.
    symmpool.all_reduce(x)
    if me > 0:
        symmpool.barrier(pair)
    dist.destroy_process_group()
    return set(found), x.tolist() == [3.0] * 8


def test_what_one_rank_refuses_the_others_hear_of(tmp_path):
    found = values(3, refused_here_told_there, str(tmp_path))
    observed = [({"DivergedError"}, True)] * 2
    assert found == [*observed, ({"InvalidArgumentError"}, True)]


def outside(group, folder):
    me, world = begin(group, folder)
    zero = dist.new_group([0])

    def step(x):
        out, y = torch.zeros_like(x), x + 1
        symmpool.all_reduce(y, group=zero)
        symmpool.all_gather_into_tensor(out, y, group=zero)
        symmpool.reduce_scatter_tensor(out, y, group=zero)
        symmpool.all_to_all_single(out, y, group=zero)
        symmpool.broadcast(y, 0, group=zero)
        return y + out

    found = []
    if me == 1:
        for run in (ops.all_reduce, torch.compile(ops.all_reduce, backend="eager")):
            with pytest.raises(symmpool.InvalidArgumentError, match="no member"):
                run(torch.ones(2), "sum", zero)
    for backend in (None, "eager", "aot_eager"):
        torch._dynamo.reset()
        run = step if backend is None else torch.compile(step, backend=backend, fullgraph=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(run(torch.ones(2)).tolist())
    dist.destroy_process_group()
    return found


def test_compiled_calls_on_a_group_that_this_process_is_no_member_of_do_nothing(tmp_path):
    assert values(2, outside, str(tmp_path)) == [[[4.0] * 2] * 3, [[2.0] * 2] * 3]


def compiled_broadcasts(group, folder):
    me, world = begin(group, folder)
    pair = dist.new_group([1, 2])
    x = torch.arange(4.0) + 10 * me

    def step(x):
        y = x * 2
        symmpool.broadcast(y, 2)
        z = x + 1
        symmpool.broadcast(z, group_src=1)
        return y + z.sum()

    def within(x):
        y = x * 3
        symmpool.broadcast(y, 2, pair)
        z = x * 5
        symmpool.broadcast(z, group=pair, group_src=0)
        return y - z

    same = []
    for function in (step, within) if me > 0 else (step,):
        expected = function(x)
        for backend in ("eager", "aot_eager"):
            torch._dynamo.reset()
            got = torch.compile(function, backend=backend, fullgraph=True)(x)
            same.append(torch.equal(got, expected))
    dist.destroy_process_group()
    return all(same), expected.tolist()


def test_compiled_broadcasts_are_what_eager_ones_are(tmp_path):
    found = values(3, compiled_broadcasts, str(tmp_path))
    y, z = [40.0, 42.0, 44.0, 46.0], 50.0
    assert found[0] == (True, [each + z for each in y])
    within = [3 * (20.0 + i) - 5 * (10.0 + i) for i in range(4)]
    assert found[1] == found[2] == (True, within)


def test_a_program_that_imports_torch_last_compiles_its_first_call():
    program = """
import symmpool, torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

@torch.compile(fullgraph=True, backend="eager")
def step(x):
    y = x * 2
    symmpool.all_reduce(y)
    return y

assert step(torch.ones(3)).tolist() == [2, 2, 2]
dist.destroy_process_group()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
