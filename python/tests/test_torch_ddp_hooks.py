"""Hooks of DistributedDataParallel on the backend: written in Python, and torch's built-in ones in C++."""

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

BUILT_IN = dist.BuiltinCommHookType
HOOKS = {
    "none": None,
    "built-in all-reduce": BUILT_IN.ALLREDUCE,
    "built-in float16": BUILT_IN.FP16_COMPRESS,
    "all-reduce": default_hooks.allreduce_hook,
    "float16": default_hooks.fp16_compress_hook,
    "bfloat16": default_hooks.bf16_compress_hook,
}


def gradients(me, group, hook, dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).to(dtype)
    # Small buckets, of which there are several.
    ours = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
    if isinstance(hook, BUILT_IN):
        ours._register_builtin_comm_hook(hook)
    elif hook is not None:
        ours.register_comm_hook(group, hook)
    found = []
    for step in range(3):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + me)).to(dtype)
        model.zero_grad()
        ours(x).float().pow(2).sum().backward()
        found.append([each.grad.float().clone() for each in model.parameters()])
    return found


def with_hooks(group, folder, dtype):
    me, _ = begin(group, folder, "symmpool")
    gloo = dist.new_group(backend="gloo")
    wrong = []
    for name, hook in HOOKS.items():
        found, wanted = (gradients(me, each, hook, dtype) for each in (dist.group.WORLD, gloo))
        for one, other in zip(found, wanted, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                if not torch.allclose(mine, theirs, rtol=2e-2, atol=2e-2 * theirs.abs().max().item()):
                    wrong.append((name, (mine - theirs).abs().max().item()))
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_hook_gives_what_it_gives_on_gloo(tmp_path, dtype):
    assert values(2, with_hooks, str(tmp_path), dtype, limit=100) == [[], []]


def late(group, folder):
    """A rank that does not come: the built-in hook's backward pass ends by an error."""
    import datetime

    me, _ = begin(group, folder, "symmpool", datetime.timedelta(seconds=3))
    model = torch.nn.Linear(4, 4)
    ours = DistributedDataParallel(model)
    ours._register_builtin_comm_hook(BUILT_IN.FP16_COMPRESS)
    # Buckets are made anew in the second step.
    for _ in range(2):
        ours(torch.ones(2, 4)).sum().backward()
    raised = None
    if me == 0:
        try:
            ours(torch.ones(2, 4)).sum().backward()
        except RuntimeError as error:
            raised = str(error)
    return raised


def test_a_built_in_hook_reports_that_a_rank_does_not_come(tmp_path):
    zero, _ = values(2, late, str(tmp_path), limit=60)
    assert "all-reduce of gradients failed" in zero
