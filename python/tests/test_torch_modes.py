"""Calls under torch's compiler, its modes and its autograd: what they see of them."""

import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import symmpool
from symmpool import ops


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Forgets all compiled code, which keeps the groups that it names."""
    yield
    torch._dynamo.reset()


def alone():
    (group,) = symmpool.Group.in_process(1)
    return group, symmpool.Pool(group, "cpu")


def every_call(x, group):
    y = x + 1
    symmpool.all_reduce(y, group=group)
    symmpool.broadcast(y, 0, group)
    gathered = torch.empty(4)
    symmpool.all_gather_into_tensor(gathered, y, group)
    part = torch.empty(4)
    symmpool.reduce_scatter_tensor(part, gathered, "max", group)
    symmpool.all_to_all_single(gathered, part, group=group)
    return gathered * 2


def names_of(graph):
    return [str(node.target) for node in graph.graph.nodes if "symmpool" in str(node.target)]


CALLS = ["all_reduce_", "broadcast_from_", "all_gather_into_", "reduce_scatter_into_", "all_to_all_into_"]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_what_is_called(mode):
    for named in alone():
        x = torch.arange(4.0)
        graph = make_fx(lambda x: every_call(x, named), tracing_mode=mode)(x)  # noqa: B023
        assert names_of(graph) == [f"symmpool.{name}.default" for name in CALLS]
        assert torch.equal(graph(x + 3), every_call(x + 3, named))


def test_make_fx_records_barriers_and_calls_that_are_not_waited_for():
    group, _ = alone()

    def step(x):
        y = x + 1
        work = symmpool.all_reduce(y, group=group, async_op=True)
        assert work.wait() and work.is_success() and work.result()[0] is y
        assert work.get_future().wait()[0] is y
        symmpool.barrier(group)
        assert symmpool.barrier(group, async_op=True).is_completed()
        return y

    found = names_of(make_fx(step)(torch.ones(3)))
    assert found == ["symmpool.all_reduce_.default", *["symmpool.barrier_.default"] * 2]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_modes_see_calls_on_tensors_and_others_are_made():
    import numpy as np

    seen = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    group, _ = alone()
    x, y = torch.ones(3), np.ones(3, np.float32)
    with See():
        symmpool.all_reduce(x, "sum", group)
        symmpool.all_reduce(y, "sum", group)
        with pytest.raises(symmpool.InvalidArgumentError, match="group"):
            symmpool.all_reduce(x, group=7)
    assert [name for name in seen if "symmpool" in name] == ["symmpool.all_reduce_.default"]
    with FakeTensorMode():
        fake = torch.ones(3)
        symmpool.all_reduce(fake, group=group)
    assert fake.shape == (3,)
    with pytest.raises(Exception, match="no memory of its own|data pointer"):
        symmpool.all_reduce(fake, group=group)
    symmpool.all_reduce(x, group=group)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_groups_and_pools_are_named_in_compiled_code(backend):
    for named in alone():
        torch._dynamo.reset()

        def step(x, group):
            found = ops.all_reduce(every_call(x, group), "sum", group)
            found = ops.reduce_scatter_tensor(ops.all_gather_tensor(found, group=group), "avg", group=group)
            return ops.all_to_all_single(found, group=group)

        x = torch.arange(4.0)
        found = torch.compile(step, backend=backend, fullgraph=True)(x, named)
        assert torch.equal(found, step(x, named))


def test_a_barrier_ends_a_compiled_graph_and_says_so():
    group, pool = alone()

    def step(x):
        y = x + 1
        symmpool.barrier(pool)
        return y * 2

    for function in (step, lambda x: step(x)):
        torch._dynamo.reset()
        counter = CompileCounter()
        assert torch.compile(function, backend=counter)(torch.ones(2)).tolist() == [4, 4]
        assert counter.frame_count == 2
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="symmpool.barrier has no place"):
            torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))


def test_barriers_of_recorded_graphs_change_nothing():
    _, pool = alone()
    torch.library.opcheck(torch.ops.symmpool.barrier_, (torch.ones(2), pool.group_name))
    x = torch.ones(2, requires_grad=True)
    y = x * 3
    torch.ops.symmpool.barrier_(y, pool.group_name)
    y.sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_what_has_no_name_is_no_group_of_an_operator():
    for wrong in (7, dist.GroupMember.NON_GROUP_MEMBER, ()):
        with pytest.raises(symmpool.InvalidArgumentError, match="group"):
            ops.all_reduce(torch.ones(2), "sum", wrong)
        with pytest.raises(symmpool.InvalidArgumentError, match="group"):
            ops.name_of(wrong)


def warned(act):
    with warnings.catch_warnings(record=True) as observed:
        warnings.simplefilter("always")
        act()
    return [str(each.message) for each in observed if "symmpool" in str(each.message)]


def test_a_gradient_through_a_call_gives_a_warning():
    group, _ = alone()
    leaf = torch.nn.Parameter(torch.ones(3))
    none = torch.zeros(3)
    in_place = [
        lambda y: symmpool.all_reduce(y, group=group),
        lambda y: symmpool.all_reduce(y, group=group, async_op=True).wait(),
        lambda y: symmpool.all_reduce(none, out=y, group=group),
        lambda y: symmpool.broadcast(y, 0, group),
        lambda y: symmpool.all_gather_into_tensor(y, none, group),
        lambda y: symmpool.reduce_scatter_tensor(y, none, "sum", group),
        lambda y: symmpool.all_to_all_single(y, none, group=group),
    ]
    for call in in_place:

        def back(y, call=call):
            call(y)
            call(y)
            (y * 1).sum().backward()

        (observed,) = warned(lambda: back(leaf * 2))
        assert "symmpool.ops" in observed and "no_grad" in observed
        with torch.no_grad():
            y = leaf * 2
            call(y)
        assert not warned(lambda: call(leaf * 2)), "nothing has come back"  # noqa: B023
    # A parameter is written to in every step, and there is a warning in every step.
    for _ in range(3):
        symmpool.broadcast(leaf, 0, group)
    assert len(leaf._backward_hooks) == 1
    assert len(warned(lambda: (leaf * 1).sum().backward())) == 1
    assert not warned(lambda: pickle.dumps(leaf))
    # A tensor that is only read is not written to.
    plain = torch.nn.Parameter(torch.ones(3))
    symmpool.all_reduce(plain, out=torch.empty(3), group=group)
    symmpool.all_gather_into_tensor(torch.empty(3), plain, group)
    assert not plain._backward_hooks and not warned(lambda: plain.sum().backward())
