"""What the documents say works better than on gloo, as programs: jobs that come back after a rank died,
tensors with strides, calls that ranks make differently, and libraries for training that need no patch."""

import datetime
import importlib.util
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from ranks import values

from symmpool import DivergedError, InvalidArgumentError

#: A job whose rank 1 ends in its first life, in a way that is given, in the middle of training.
JOB = """
import os, signal, sys
import torch
import torch.distributed as dist

life, way, folder = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), sys.argv[1], sys.argv[2]
dist.init_process_group("symmpool")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.ones(1 << 16)
for step in range(20):
    dist.all_reduce(x)
    x /= world
    if life == 0 and rank == 1 and step == 7:
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "exits":
            os._exit(3)
        raise RuntimeError("on purpose")
assert (x == 1).all()
open(os.path.join(folder, f"{life}-{rank}"), "w").close()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("way", ["killed", "exits", "raises"])
def test_a_job_whose_rank_died_comes_back_under_torchrun(way, tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += [
        "--max-restarts",
        "1",
        "--monitor-interval",
        "0.2",
        str(tmp_path / "job.py"),
        way,
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    ended = sorted(path.name for path in tmp_path.iterdir() if path.name[0].isdigit())
    assert ended == ["1-0", "1-1", "1-2"]


def begin(group, folder, backend="symmpool", seconds=30):
    store = dist.FileStore(os.path.join(folder, "store"), group.world)
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.world, timeout=timeout)
    return group.rank, group.world


def strided(group, folder, backend="symmpool"):
    me, world = begin(group, folder, backend)
    whole = torch.full((4, 6), 10.0 + me)
    dist.all_reduce(whole[:, 1::3])
    expected = torch.full((4, 6), 10.0 + me)
    expected[:, 1::3] = sum(10.0 + rank for rank in range(world))
    dist.destroy_process_group()
    return torch.equal(whole, expected)


#: What is said of gloo holds for this version of torch; others may have mended it.
GLOO = torch.__version__.startswith("2.11.")


def test_a_reduction_of_a_tensor_with_strides_leaves_its_neighbours_alone(tmp_path):
    assert values(3, strided, str(tmp_path)) == [True] * 3
    if GLOO:
        (tmp_path / "gloo").mkdir()
        assert values(3, strided, str(tmp_path / "gloo"), "gloo") == [False] * 3, "the documents say so"


def wrong_calls(group, folder):
    me, world = begin(group, folder)
    found = []
    x, out = torch.ones(4), torch.zeros(4 * world)
    for call in (
        lambda: dist.all_reduce(torch.ones(4 + (me == 1))),
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.float64 if me == 1 else torch.float32)),
        lambda: dist.all_reduce(x) if me == 1 else dist.all_gather_into_tensor(out, x),
        lambda: dist.broadcast(x, 1 if me == 1 else 0),
    ):
        began = time.monotonic()
        with pytest.raises(DivergedError) as caught:
            call()
        found.append(
            (caught.value.ranks == (1,), "rank 1" in str(caught.value), time.monotonic() - began < 10)
        )
    # Arguments that one rank refuses.
    with pytest.raises(InvalidArgumentError if me == 1 else DivergedError):
        dist.all_gather_into_tensor(torch.zeros(5) if me == 1 else out, x)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return all(all(each) for each in found) and x[0].item() == world


def test_a_call_that_ranks_make_differently_is_named_on_all_at_once(tmp_path):
    assert values(3, wrong_calls, str(tmp_path)) == [True] * 3


def waits(group, folder):
    """How long gloo waits where one rank makes another call, with a timeout of two seconds, and its error."""
    me, world = begin(group, folder, "gloo", 2)
    x, began = torch.ones(4), time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(x) if me == 1 else dist.all_gather_into_tensor(torch.zeros(4 * world), x)
    took = time.monotonic() - began
    # gloo aborts a process that ends its group then.
    print(caught.value, flush=True)
    return took, "Timed out" in str(caught.value)


@pytest.mark.skipif(not GLOO, reason="the documents speak of torch 2.11's gloo")
def test_gloo_waits_for_its_timeout_where_a_call_differs(tmp_path):
    waited = values(3, waits, str(tmp_path))
    # A rank whose time runs out closes its connections, which others may see before their own time runs out.
    assert all(took > 1.8 for took, _ in waited) and any(timed_out for _, timed_out in waited), waited


def needs(package):
    """For tests with packages that `make test` does not fetch."""
    there = importlib.util.find_spec(package.partition(".")[0]) is not None
    return pytest.mark.skipif(not there, reason=f"{package} is not installed")


def run_job(program, tmp_path, *arguments, world=2):
    """What the ranks of a job under torchrun print."""
    (tmp_path / "job.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    environment["TMPDIR"] = str(tmp_path)
    command += [str(tmp_path / "job.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith("losses ")]
    assert len(found) == 1, done.stdout[-2000:]
    return found[0]


MODEL = """
import os, sys
import torch
import torch.distributed as dist

backend = sys.argv[1]
torch.manual_seed(1)
data = torch.randn(64, 16)
target = data.sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
losses = []
"""

LIGHTNING = (
    MODEL
    + """
import logging, warnings
warnings.filterwarnings("ignore")
import lightning
from lightning.pytorch.strategies import DDPStrategy

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data, target), batch_size=8)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=backend), max_epochs=2,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Module(), loader)
assert dist.get_backend() == backend, dist.get_backend()
if dist.get_rank() == 0:
    print("losses", losses, flush=True)
"""
)

DEEPSPEED = (
    MODEL
    + """
import deepspeed
deepspeed.init_distributed(dist_backend=backend)
assert dist.get_backend() == backend
config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
config |= {"zero_optimization": {"stage": int(sys.argv[2])}, "zero_allow_untested_optimizer": True}
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(4):
    part = slice(8 * (step * world + rank), 8 * (step * world + rank + 1))
    loss = torch.nn.functional.mse_loss(engine(data[part]), target[part])
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
if rank == 0:
    print("losses", losses, flush=True)
dist.destroy_process_group()
"""
)

MEGATRON = (
    MODEL
    + """
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel import random

dist.init_process_group(backend)
parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
config = ModelParallelConfig(
    tensor_model_parallel_size=dist.get_world_size(), use_cpu_initialization=True, params_dtype=torch.float32
)
init = torch.nn.init.xavier_normal_
first = ColumnParallelLinear(16, 32, config=config, init_method=init, gather_output=False, bias=True)
second = RowParallelLinear(
    32, 1, config=config, init_method=init, input_is_parallel=True, bias=True, skip_bias_add=False
)
parameters = [*first.parameters(), *second.parameters()]
optimizer = torch.optim.SGD(parameters, 0.01)
for step in range(4):
    hidden, _ = first(data)
    found, _ = second(torch.relu(hidden))
    loss = torch.nn.functional.mse_loss(found, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert dist.get_backend(parallel_state.get_tensor_model_parallel_group()) == backend
if dist.get_rank() == 0:
    print("losses", losses, flush=True)
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        pytest.param(LIGHTNING, (), marks=needs("lightning"), id="lightning"),
        *(
            pytest.param(DEEPSPEED, (str(stage),), marks=needs("deepspeed"), id=f"deepspeed_zero_{stage}")
            for stage in range(3)
        ),
        pytest.param(MEGATRON, (), marks=needs("megatron.core"), id="megatron"),
    ],
)
def test_libraries_train_without_a_patch_and_as_on_gloo(program, arguments, tmp_path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "gloos").mkdir()
    ours = run_job(program, tmp_path / "ours", "symmpool", *arguments)
    assert ours == run_job(program, tmp_path / "gloos", "gloo", *arguments)
