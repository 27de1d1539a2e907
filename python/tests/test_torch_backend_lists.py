"""The backend of torch.distributed: calls whose parts are tensors of their own, on the CPU."""

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool import backend


def lists(group, folder):
    import torch.distributed.nn.functional as functional

    me, world = begin(group, folder, "symmpool")
    right = {}
    # Part `to` of rank `me` has `me + to` elements, none among them.
    inputs = [torch.full((me + to,), 10.0 * me + to) for to in range(world)]
    outputs = [torch.empty(me + source, 2)[:, 0] for source in range(world)]
    expected = [[10.0 * source + me] * (me + source) for source in range(world)]
    dist.all_to_all(outputs, inputs)
    right["uneven"] = [each.tolist() for each in outputs] == expected
    outputs = [torch.empty(me + source) for source in range(world)]
    dist.all_to_all(outputs, inputs, async_op=True)
    dist.barrier()
    right["dropped"] = [each.tolist() for each in outputs] == expected
    none = [torch.empty(0) for _ in range(world)]
    dist.all_to_all(none, none)
    x = torch.ones(4, requires_grad=True)
    torch.cat(functional.all_gather(x)).sum().backward()
    right["gradients"] = x.grad.tolist() == [world] * 4
    with pytest.raises(symmpool.InvalidArgumentError, match="one type"):
        dist.group.WORLD.alltoall([torch.ones(1)] * world, [bits(1)] * world)
    with pytest.raises(symmpool.InvalidArgumentError, match="input tensors"):
        dist.all_to_all(outputs, inputs[1:])
    # Split sizes that leave out rows, on one rank: the others learn of it.
    out, rows, ones = torch.empty(world), torch.ones(world + 1), [1] * world
    wrong = (symmpool.InvalidArgumentError, f"input has {world + 1} on rank 0")
    error, what = wrong if me == 0 else (symmpool.DivergedError, "itself declined")
    with pytest.raises(error, match=what):
        dist.all_to_all_single(out, rows if me == 0 else rows[1:], ones, ones)
    dist.barrier()
    served = backend.backend_counts()["alltoall"]
    dist.destroy_process_group()
    return right, set(served)


def bits(value):
    return torch.tensor([value], dtype=torch.int16)


@pytest.mark.parametrize("world", [2, 4])
def test_all_to_alls_over_lists_are_served(world, tmp_path):
    for right, served in values(world, lists, str(tmp_path)):
        assert all(right.values()) and served == {"symmpool"}, right


def gathered_lists(group, folder):
    me, world = begin(group, folder, "symmpool")
    right = {}
    strided = [torch.zeros(3, 2)[:, 0] for _ in range(world)]
    dist.all_gather(strided, torch.full((3,), float(me)))
    right["even"] = [each.tolist() for each in strided] == [[float(r)] * 3 for r in range(world)]
    # Rank `source` gives `source` elements, none among them, as NCCL allows.
    uneven = [torch.zeros(source, dtype=torch.complex64) for source in range(world)]
    work = dist.all_gather(uneven, torch.full((me,), complex(me, 1)), async_op=True)
    work.wait()
    right["uneven"] = [e.tolist() for e in uneven] == [[complex(r, 1)] * r for r in range(world)]
    parts = [torch.full((2, 2), float(me + 10 * to)).t() for to in range(world)]
    out = torch.zeros(4, 2)[:2]
    dist.reduce_scatter(out, parts)
    whole = sum(range(world))
    right["scattered"] = out.tolist() == [[whole + 10.0 * me * world] * 2] * 2
    parts = [torch.full((to,), me + 10 * to) for to in range(world)]
    out = torch.zeros(me, 2, dtype=torch.int64)[:, 0]
    dist.reduce_scatter(out, parts, dist.ReduceOp.MAX, async_op=True)
    dist.barrier()
    right["scattered unevenly"] = out.tolist() == [world - 1 + 10 * me] * me
    right["inputs stay"] = parts[-1].tolist() == [me + 10 * (world - 1)] * (world - 1)
    objects = [None] * world
    dist.all_gather_object(objects, "x" * me)
    right["objects"] = objects == ["x" * rank for rank in range(world)]
    with pytest.raises(symmpool.InvalidArgumentError, match="all_gather: 1 output tensors"):
        dist.all_gather([torch.ones(1)], torch.ones(1))
    with pytest.raises(symmpool.InvalidArgumentError, match="share their memory"):
        dist.all_gather([torch.ones(1).expand(2)] * world, torch.ones(2))
    with pytest.raises(symmpool.InvalidArgumentError, match="output has 7 elements"):
        dist.reduce_scatter(torch.ones(7, dtype=torch.int64), parts)
    with pytest.raises(symmpool.InvalidArgumentError):
        dist.all_gather([torch.ones(2)] * world, torch.ones(3))
    dist.barrier()
    served = backend.backend_counts()
    dist.destroy_process_group()
    return right, set(served["allgather"]) | set(served["reduce_scatter"])


@pytest.mark.parametrize("world", [2, 4])
def test_gathers_and_scatters_over_lists_are_served(world, tmp_path):
    for right, served in values(world, gathered_lists, str(tmp_path)):
        assert all(right.values()) and served == {"symmpool"}, right


def lists_that_differ(group, folder):
    me, world = begin(group, folder, "symmpool")
    sizes = [2, 2] if me else [2, 3]
    try:
        dist.all_gather([torch.ones(size) for size in sizes], torch.ones(2))
    except symmpool.Error as error:
        return type(error).__name__, str(error)


def test_lists_that_differ_between_ranks_are_reported(tmp_path):
    # S6
    for kind, text in values(2, lists_that_differ, str(tmp_path)):
        assert kind == "DivergedError" and "rank 1: all_gather of 2" in text, text
