"""Schedules of torch.distributed.pipelining on the backend, whose ranks have messages and no collectives."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin
from torch.distributed.pipelining import PipelineStage, schedules

import symmpool

WIDTH, MICROBATCHES = 16, 4
NAMES = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
)
CORNERS = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def layer():
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())


def stages_of(name, me, world):
    """The stages of a rank, and of how many there are."""
    if name in ("ScheduleGPipe", "Schedule1F1B"):
        return [me], world
    if name in CORNERS:
        return [me, 2 * world - 1 - me], 2 * world
    return [me, me + world], 2 * world


def microbatches_of(name, world):
    return 2 * world if name in CORNERS else MICROBATCHES


def train(name, group, me, world):
    """Losses and gradients of two steps."""
    torch.manual_seed(7)
    mine, total = stages_of(name, me, world)
    layers = [layer() for _ in range(total)]
    x, y = torch.randn(2 * MICROBATCHES, WIDTH), torch.randn(2 * MICROBATCHES, WIDTH)
    stages = [
        PipelineStage(copy.deepcopy(layers[at]), at, total, torch.device("cpu"), group=group) for at in mine
    ]
    kind = getattr(schedules, name)
    is_single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(
        stages[0] if is_single else stages, microbatches_of(name, world), torch.nn.functional.mse_loss
    )
    found = []
    for _ in range(2):
        losses = []
        has_last = total - 1 in mine
        schedule.step(*([x] if 0 in mine else []), target=y if has_last else None, losses=losses)
        found += [loss.item() for loss in losses] if has_last else []
        found += [parameter.grad.sum().item() for stage in stages for parameter in stage.submod.parameters()]
    return found


def alone(name, me, world):
    """Trains like `train`, where one process has all stages."""
    torch.manual_seed(7)
    mine, total = stages_of(name, me, world)
    layers = [layer() for _ in range(total)]
    x, y = torch.randn(2 * MICROBATCHES, WIDTH), torch.randn(2 * MICROBATCHES, WIDTH)
    whole, found = torch.nn.Sequential(*layers), []
    count = microbatches_of(name, world)
    for _ in range(2):
        losses = []
        for part, target in zip(x.chunk(count), y.chunk(count), strict=True):
            loss = torch.nn.functional.mse_loss(whole(part), target)
            losses.append(loss.item())
            loss.backward()
        for parameter in whole.parameters():
            parameter.grad /= count
        found += losses if total - 1 in mine else []
        found += [parameter.grad.sum().item() for at in mine for parameter in layers[at].parameters()]
    return found


def around_a_corner(group, folder, names):
    """Schedules that have a rank send to itself, which gloo cannot."""
    me, world = begin(group, folder, "symmpool")
    found = {
        name: train(name, dist.group.WORLD, me, world) == pytest.approx(alone(name, me, world), rel=1e-3)
        for name in names
    }
    dist.destroy_process_group()
    return found


def both(group, folder, names):
    me, world = begin(group, folder, "symmpool")
    beside = dist.new_group(backend="gloo")
    found = {}
    for name in names:
        ours, expected = (train(name, each, me, world) for each in (dist.group.WORLD, beside))
        found[name] = ours == expected and len(ours) >= 4
    counts = symmpool.backend.backend_counts()
    dist.destroy_process_group()
    return found, set(counts["send"]) | set(counts["recv"])


@pytest.mark.parametrize("world", [2, 4])
def test_pipelines_have_the_bits_that_they_have_on_gloo(world, tmp_path):
    for found, served in values(world, both, str(tmp_path), NAMES):
        assert all(found.values()), found
        assert served == {"symmpool"}


@pytest.mark.parametrize("world", [2, 4])
def test_pipelines_around_a_corner_are_right(world, tmp_path):
    names = [name for name in CORNERS if hasattr(schedules, name)]
    for found in values(world, around_a_corner, str(tmp_path), names):
        assert names and all(found.values()), found
