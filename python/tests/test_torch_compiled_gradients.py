"""Compiled calls that write to tensors of the autograd graph: they warn as eager ones do."""

import itertools
import warnings

import pytest
import torch
import torch._functorch.config
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool import ops


def alone():
    (group,) = symmpool.Group.in_process(1)
    return symmpool.Pool(group, "cpu")


def warned(act):
    with warnings.catch_warnings(record=True) as observed:
        warnings.simplefilter("always")
        act()
    return [str(each.message) for each in observed if "a gradient came back" in str(each.message)]


none = torch.zeros(3)
IN_PLACE = {
    "all_reduce": lambda y, pool: symmpool.all_reduce(y, group=pool),
    "all_reduce out": lambda y, pool: symmpool.all_reduce(none, out=y, group=pool),
    "broadcast": lambda y, pool: symmpool.broadcast(y, 0, pool),
    "all_gather_into_tensor": lambda y, pool: symmpool.all_gather_into_tensor(y, none, pool),
    "reduce_scatter_tensor": lambda y, pool: symmpool.reduce_scatter_tensor(y, none, "sum", pool),
    "all_to_all_single": lambda y, pool: symmpool.all_to_all_single(y, none, group=pool),
    "operator": lambda y, pool: torch.ops.symmpool.all_reduce_(y, "sum", pool.group_name),
}


@pytest.mark.parametrize(
    "call, backend",
    [*itertools.product(IN_PLACE, ["eager", "aot_eager"]), ("all_reduce", "inductor")],
)
def test_a_gradient_through_a_compiled_call_gives_a_warning(call, backend):
    # The cache of compiled code does not say whether an input was a leaf.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        gradient_through(IN_PLACE[call], backend)


def gradient_through(act, backend):
    pool = alone()

    def within(x):
        y = x * 2
        act(y, pool)
        return (y * 3).sum()

    def given(y):
        act(y, pool)
        return (y * 3).sum()

    for step, make in (
        (within, lambda leaf: leaf),
        (given, lambda leaf: leaf * 2),
        (given, lambda leaf: leaf),
    ):
        # Compiled code of torch takes an input for a leaf, or not, as the first one was.
        torch._dynamo.reset()
        compiled = torch.compile(step, backend=backend, fullgraph=True)
        for _ in range(2):
            leaf = torch.ones(3, requires_grad=True)
            total = compiled(make(leaf))
            plain = torch.ones(3, requires_grad=True)
            expected = step(make(plain))
            assert len(warned(expected.backward)) == 1
            assert len(warned(total.backward)) == 1, "compiled"
            assert torch.equal(total, expected) and torch.equal(leaf.grad, plain.grad)
    # A call that no gradient comes back through is no mistake.
    compiled = torch.compile(within, backend=backend, fullgraph=True)
    assert not warned(lambda: compiled(torch.ones(3, requires_grad=True)))
    with torch.no_grad():
        assert not warned(lambda: compiled(torch.ones(3, requires_grad=True)))


def test_autograd_notices_what_a_compiled_call_has_overwritten():
    pool = alone()

    def step(x):
        y = x.exp()
        symmpool.all_reduce(y, group=pool)
        return y.sum()

    for run in (step, torch.compile(step, backend="aot_eager"), torch.compile(step, backend="eager")):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(torch.ones(3, requires_grad=True)).backward()


def a_loss(group, folder):
    me, world = begin(group, folder)

    def step(x):
        loss = (x * x).sum()
        symmpool.all_reduce(loss)
        return loss

    found = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        x = (torch.arange(3.0) + me).requires_grad_()
        loss = run(x)
        messages = warned(loss.backward)
        found.append((loss.item(), x.grad.tolist(), len(messages)))
    return found


def test_a_loss_is_added_up_in_compiled_code_as_in_eager_code(tmp_path):
    total = 5.0 + 14.0
    expected = [[2.0 * (at + me) for at in range(3)] for me in range(2)]
    assert values(2, a_loss, str(tmp_path)) == [[(total, expected[me], 1)] * 2 for me in range(2)]


def wrong_outputs(group, folder):
    me, world = begin(group, folder)
    x = torch.ones(4)
    wrong = [torch.empty(4, dtype=torch.float64), torch.empty(2, 4), torch.empty(3), torch.empty(1).expand(4)]
    calls = [lambda out: symmpool.all_reduce(x, out=out)]
    calls += [lambda out: symmpool.all_gather_into_tensor(out, x[: x.numel() // world])]
    calls += [lambda out: symmpool.all_to_all_single(out, x)]
    calls += [lambda out: symmpool.reduce_scatter_tensor(out, x.repeat(world))]
    found = []
    for call in calls:
        for backend in (None, "eager", "aot_eager"):
            torch._dynamo.reset()
            run = call if backend is None else torch.compile(call, backend=backend, fullgraph=True)
            # The compiler itself writes to no tensor whose elements share memory, and says so on one rank.
            for out in wrong[: 3 if backend == "aot_eager" else 4]:
                given = out if me == 1 else torch.empty(4)
                try:
                    run(given)
                    found.append("served")
                except symmpool.Error as error:
                    found.append(type(error).__name__)
                except Exception as error:
                    found.append(repr(error)[:300])
    symmpool.all_reduce(x)
    return found, x.tolist()


def test_compiled_calls_check_their_outputs_as_eager_ones_do(tmp_path):
    (observed, others), (refused, after) = values(2, wrong_outputs, str(tmp_path))
    assert set(observed) == {"DivergedError"} and set(refused) == {"InvalidArgumentError"}, (
        observed,
        refused,
    )
    assert others == after == [2.0] * 4


def refused_when_run(group, folder):
    me, world = begin(group, folder)
    x = torch.ones(5)
    # Compilers could refuse these alone, on the rank that is compiled wrong.
    calls = [
        lambda wrong: symmpool.all_reduce(x, async_op=True) if wrong else symmpool.all_reduce(x),
        lambda wrong: symmpool.all_reduce(x, algorithm="one_shot" if wrong else None),
        lambda wrong: symmpool.all_reduce(x, op="most" if wrong else "sum"),
        lambda wrong: symmpool.broadcast(x, None if wrong else 0),
        lambda wrong: ops.all_reduce(x, "most" if wrong else "sum"),
        lambda wrong: ops.reduce_scatter_tensor(x if wrong else x[:4]),
        lambda wrong: ops.reduce_scatter_tensor(x[:, None], "sum", 1) if wrong else ops.all_reduce(x),
        lambda wrong: ops.all_to_all_single(x if wrong else x[:4]),
        lambda wrong: ops.all_to_all_single(x[:4], [2, 2] if wrong else None),
        lambda wrong: ops.all_to_all_single(x[:4], [-1, 5] if wrong else [2, 2], [2, 2]),
    ]
    found = []
    for nth, call in enumerate(calls):
        for backend in (None, "eager", "aot_eager"):
            if backend is None and nth < 2:
                continue
            torch._dynamo.reset()
            run = call if backend is None else torch.compile(call, backend=backend)
            try:
                run(me == 1)
                found.append((nth, backend, "served"))
            except symmpool.Error as error:
                if type(error) is not (symmpool.InvalidArgumentError if me == 1 else symmpool.DivergedError):
                    found.append((nth, backend, repr(error)))
            except Exception as error:
                found.append((nth, backend, repr(error)[:300]))
    symmpool.all_reduce(x)
    return found, x.tolist()


def test_what_compiled_code_cannot_ask_for_is_refused_on_every_rank(tmp_path):
    assert values(2, refused_when_run, str(tmp_path)) == [([], [2.0] * 5)] * 2
