"""Libraries for training need no patch: jobs of Lightning, DeepSpeed and Megatron-core under torchrun."""

import os
import subprocess
import sys

import pytest


def run_job(program, tmp_path, *arguments, world=2):
    """Returns the output of the ranks of a job under torchrun."""
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
        pytest.param(LIGHTNING, (), id="lightning"),
        *(pytest.param(DEEPSPEED, (str(stage),), id=f"deepspeed_zero_{stage}") for stage in range(3)),
        pytest.param(MEGATRON, (), id="megatron"),
    ],
)
def test_libraries_train_without_a_patch_and_as_on_gloo(program, arguments, tmp_path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "gloos").mkdir()
    ours = run_job(program, tmp_path / "ours", "symmpool", *arguments)
    assert ours == run_job(program, tmp_path / "gloos", "gloo", *arguments)
