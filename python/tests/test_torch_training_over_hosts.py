"""Training on two hosts of two ranks, which this machine pretends to be: losses are those of one process that
adds gradients in the documented order, and the same bits in every run."""

import datetime
import os
import re

import numpy as np
import pytest
import ranks
import test_torch_training as training
import torch
import torch.distributed as dist
from documents import blocks
from test_torch_distributed import begin
from test_torch_hosts import on_two_machines

WORLD, STEPS, RATE = 4, 4, 0.5
PATIENCE = datetime.timedelta(seconds=120)

#: Ranks by host: their sums are added up inside the hosts first, and then in the order of hosts.
ORDERS = {"aabb": ((0, 1), (2, 3)), "abab": ((0, 2), (1, 3))}


def linear():
    torch.manual_seed(3)
    return torch.nn.Linear(40, 24, bias=False)


def loss_of(model, step, rank):
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x) - x[:, :24].sin()).square().mean()


def oracle(hosts, divides_first):
    """The losses of all ranks, step by step: sums of gradients are numpy's, in `f32`. DDP divides each rank's
    gradient by the number of ranks, and FSDP2 the sum of all."""
    torch.set_num_threads(1)
    model, losses = linear(), []
    for step in range(STEPS):
        gradients, found = [], []
        for rank in range(WORLD):
            model.zero_grad()
            loss = loss_of(model, step, rank)
            loss.backward()
            gradient = model.weight.grad.numpy().copy()
            gradients.append(gradient / np.float32(WORLD) if divides_first else gradient)
            found.append(loss.item())
        partial = [gradients[first] + gradients[second] for first, second in hosts]
        total = partial[0] + partial[1]
        if not divides_first:
            total = total / np.float32(WORLD)
        with torch.no_grad():
            model.weight -= RATE * torch.from_numpy(total)
        losses.append(found)
    return losses


def in_data_parallel(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def fully_sharded(model):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=dist.init_device_mesh("cpu", (WORLD,)))


WAYS = {"DDP": in_data_parallel, "FSDP2": fully_sharded}


def train(group, folder, ids, way):
    os.environ["SYMMPOOL_HOST_ID"] = ids[group.rank]
    torch.set_num_threads(1)
    me, _ = begin(group, folder, "symmpool", PATIENCE)
    model = WAYS[way](linear())
    optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
    for step in range(STEPS):
        loss = loss_of(model, step, me)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    dist.destroy_process_group()
    return losses


@pytest.mark.parametrize("ids", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_the_documented_order(way, ids, tmp_path):
    found = []
    for run in range(2):
        folder = tmp_path / str(run)
        folder.mkdir()
        found.append(ranks.values(WORLD, train, str(folder), ids, way))
    right = [list(losses) for losses in zip(*oracle(ORDERS[ids], way == "DDP"), strict=True)]
    assert found[0] == right
    assert found[1] == right, "other bits in the second run"
    # The numbers are such that another order has other bits.
    other = oracle(ORDERS["abab" if ids == "aabb" else "aabb"], way == "DDP")
    assert [list(losses) for losses in zip(*other, strict=True)] != right


def in_other_ways(group, folder, ids, name):
    os.environ["SYMMPOOL_HOST_ID"] = ids[group.rank]
    me, world = begin(group, folder, name, PATIENCE)
    ways = (training.fully_sharded, training.sharded_in_two_ways, training.with_a_sharded_optimizer)
    losses = [way(me, world) for way in ways]
    dist.destroy_process_group()
    return losses


def test_tensor_and_data_parallel_training_is_as_with_gloo(tmp_path):
    """Rows of the mesh are hosts, or have ranks of both."""
    for name in ("aabb", "abab", "gloo"):
        (tmp_path / name).mkdir()
    theirs = ranks.values(WORLD, in_other_ways, str(tmp_path / "gloo"), "aabb", "gloo")
    for ids in ORDERS:
        ours = ranks.values(WORLD, in_other_ways, str(tmp_path / ids), ids, "symmpool")
        for mine, gloos in zip(ours, theirs, strict=True):
            for losses, right in zip(mine, gloos, strict=True):
                assert losses == pytest.approx(right, rel=1e-5), ids


TENSOR_PARALLEL = """
import datetime
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import symmpool

dist.init_process_group("cpu:symmpool", timeout=datetime.timedelta(seconds=60))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
x = torch.randn(8, 32)
right = model(x)
mesh = init_device_mesh("cpu", (4,))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
print(f"rank {dist.get_rank()}: {torch.allclose(model(x), right, atol=1e-5)}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def test_a_model_whose_layers_span_two_hosts(tmp_path):
    lines, errors = on_two_machines(tmp_path, TENSOR_PARALLEL)
    assert lines == [f"rank {rank}: True" for rank in range(4)], errors


def test_the_first_program_of_the_readme_runs_on_two_hosts(tmp_path):
    program = next(block.text for block in blocks("README.md") if block.mark == "python: torch")
    lines, errors = on_two_machines(tmp_path, program)
    # Lines of ranks that print at once may run into each other.
    said = sorted(re.findall(r"rank \d: \d+\.\d", "\n".join(lines)))
    # 1 + 2 + 3 + 4
    assert said == [f"rank {rank}: 10.0" for rank in range(4)], errors
