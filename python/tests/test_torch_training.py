"""Tests of torch's parts for training, over the backend on the CPU: losses and weights are gloo's."""

import gc

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

from symmpool import backend
from symmpool.torch_backend import allocation

WIDTH = 16


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.ReLU(), torch.nn.Linear(32, WIDTH))


def batch(step, me, rows=8):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * step + me))


def losses_of(model, optimizer, me, steps=4, after=lambda: None):
    losses = []
    for step in range(steps):
        x = batch(step, me)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after()
        losses.append(loss.item())
    return losses


def parallel(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def fully_sharded(me, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = model_of(), init_device_mesh("cpu", (world,))
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=mesh)
    return losses_of(model, torch.optim.Adam(model.parameters(), 0.01), me)


def fully_sharded_in_memory_of_torch(me, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model, mesh = model_of(), init_device_mesh("cpu", (world,))
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=mesh)
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_allocate_memory_from_process_group_for_comm(False)
    return losses_of(model, torch.optim.Adam(model.parameters(), 0.01), me)


def sharded_in_two_ways(me, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
    model = model_of()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    norms = []

    def clip():
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(norm.full_tensor().item())

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return losses_of(model, optimizer, me // 2, after=clip) + norms


def in_a_pipeline(me, world):
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2 * world)]
    mine = [me, me + world]
    stages = [PipelineStage(layers[i], i, 2 * world, torch.device("cpu")) for i in mine]
    square = torch.nn.MSELoss()
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2 * world, loss_fn=square)
    x, losses = batch(0, 0, 4 * world), []
    last = {"target": x, "losses": losses} if me == world - 1 else {}
    schedule.step(*([x] if me == 0 else []), **last)
    return [float(loss) for loss in losses] + [layers[i].weight.grad.norm().item() for i in mine]


def with_a_sharded_optimizer(me, world):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = parallel(model_of())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    losses = losses_of(model, optimizer, me)
    optimizer.consolidate_state_dict(0)
    return losses


def with_compressed_gradients(me, world):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    losses = []
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    for hook, its in (
        (powerSGD_hook.powerSGD_hook, state),
        (default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), None),
    ):
        model = parallel(model_of())
        model.register_comm_hook(its, hook)
        losses += losses_of(model, torch.optim.SGD(model.parameters(), 0.1), me, steps=6)
    return losses


def averaged_now_and_then(me, world):
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model, (own, _) = parallel(model_of()), dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, own, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    return losses_of(model, PostLocalSGDOptimizer(inner, averager), me, steps=6)


def with_uneven_inputs(me, world):
    from torch.distributed.algorithms.join import Join

    model = parallel(model_of())
    with Join([model]):
        return losses_of(model, torch.optim.SGD(model.parameters(), 0.1), me, steps=2 + me)


def saved_and_loaded(me, world, folder):
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    first, second = (fully_shard(model_of(seed), mesh=mesh) for seed in (0, 5))
    one, two = (torch.optim.Adam(each.parameters(), 0.01) for each in (first, second))
    losses = losses_of(first, one, me, steps=2)
    model, optimizer = get_state_dict(first, one)
    checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"{folder}/kept")
    model, optimizer = get_state_dict(second, two)
    state = {"model": model, "optimizer": optimizer}
    checkpoint.load(state, checkpoint_id=f"{folder}/kept")
    set_state_dict(second, two, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return losses + losses_of(second, two, me, steps=2)


def replicated(me, world):
    """`replicate` has FSDP's classes, with groups that shard nothing."""
    from torch.distributed.device_mesh import init_device_mesh

    made = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    model, mesh = model_of(), init_device_mesh("cpu", (world,))
    made.replicate(model, mesh=mesh)
    return losses_of(model, torch.optim.Adam(model.parameters(), 0.01), me)


# With how many ranks each is tried. They share processes: most of the time goes to importing.
WAYS = {
    2: [
        fully_sharded,
        fully_sharded_in_memory_of_torch,
        replicated,
        in_a_pipeline,
        with_a_sharded_optimizer,
        with_compressed_gradients,
        averaged_now_and_then,
        with_uneven_inputs,
        saved_and_loaded,
    ],
    4: [sharded_in_two_ways],
}

# Those in which FSDP has its buffers in windows, without being asked.
IN_WINDOWS = (fully_sharded, saved_and_loaded, sharded_in_two_ways)


def run(group, folder, name):
    me, world = begin(group, folder, name)
    found, given = {}, []
    make = allocation.window
    allocation.window = lambda *arguments: given.append(make(*arguments)) or given[-1]
    for way in WAYS[world]:
        backend.backend_counts(reset=True)
        losses = way(me, world, *([folder] if way is saved_and_loaded else []))
        served = {kind for counts in backend.backend_counts().values() for kind in counts}
        found[way.__name__] = (losses, served)
        asked = name == "symmpool" and way in IN_WINDOWS
        assert bool(given) == asked and None not in given, (way, len(given))
        given.clear()
        gc.collect()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world", WAYS)
def test_training_is_as_with_gloo(world, tmp_path):
    found = {}
    for name in ("symmpool", "gloo"):
        (tmp_path / name).mkdir()
        found[name] = values(world, run, str(tmp_path / name), name)
    for ours, gloo in zip(found["symmpool"], found["gloo"], strict=True):
        for way, (losses, served) in ours.items():
            assert losses == pytest.approx(gloo[way][0], rel=1e-5), way
            # Sends and receives are gloo's; torch 2.15 has a pipeline's stages tell each other more.
            assert "symmpool" in served or way == "in_a_pipeline", (way, served)


def sharded_with_a_factor(group, folder, factor):
    """A step of FSDP2, whose gradients are divided by a number that is neither 1 nor the number of ranks."""
    from torch.distributed.fsdp import fully_shard

    me, world = begin(group, folder, "symmpool")
    torch.manual_seed(3)
    model = torch.nn.Linear(6, 6, bias=False)
    weight = model.weight.detach().clone()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (world,)))
    model.set_gradient_divide_factor(factor)
    inputs = torch.arange(6.0 * world).view(world, 6)
    model(inputs[me : me + 1]).sum().backward()
    expected = torch.ones(6, 1) @ inputs.sum(0, keepdim=True) / factor
    found = model.weight.grad.full_tensor()
    counts = backend.backend_counts()
    dist.destroy_process_group()
    return torch.allclose(found, expected), weight.shape == found.shape, counts["reduce_scatter_tensor"]


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_gradients_of_fsdp_are_divided_by_any_factor(factor, tmp_path):
    assert values(2, sharded_with_a_factor, str(tmp_path), factor) == [(True, True, {"symmpool": 1})] * 2


def uneven(group, folder, kind):
    """Ranks with inputs for different numbers of steps, whose gradients are divided by how many still have
    some: what says so is waited for by C++, for which Python keeps nothing."""
    me, _ = begin(group, folder, kind)
    model = parallel(torch.nn.Linear(4, 4, bias=False))
    found = []
    for by_all in (False, True):
        with model.join(divide_by_initial_world_size=by_all):
            for _ in range(2 + me):
                model.zero_grad()
                model(torch.ones(1, 4)).sum().backward()
                found.append(next(model.parameters()).grad[0, 0].item())
    dist.destroy_process_group()
    return found


def test_gradients_of_uneven_inputs_are_divided_by_who_is_left(tmp_path):
    right = [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0, 0.5]]
    assert values(2, uneven, str(tmp_path), "symmpool") == right
