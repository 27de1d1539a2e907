"""Parts of vLLM and SGLang that their adapters ask for, on NCCL's communicators of torch's groups."""

import sys
import types

import torch
import torch.distributed as dist

from symmpool.engines import core


def pynccl(group, device):
    """A communicator in the shape of theirs, of the ranks of a process group that NCCL serves."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # torch makes NCCL's then
    address = group._get_backend(torch.device(device))._comm_ptr()
    return types.SimpleNamespace(
        comm=types.SimpleNamespace(value=address),
        unique_id=types.SimpleNamespace(internal=b"of torch"),
        group=group,
        # Theirs do nothing for one rank; what they do is to be seen there, too.
        world_size=max(2, group.size()),
        device=device,
    )


def coordinator(communicator, name="tp"):
    """Returns a stand-in for a group coordinator of SGLang."""
    return types.SimpleNamespace(
        unique_name=name,
        pynccl_comm=communicator,
        world_size=communicator.world_size,
        device=communicator.device,
        device_group=communicator.group,
        is_first_rank=True,
    )


def switch_on(environment):
    """Switches symmetric memory on, as either engine has it."""
    environment["VLLM_USE_NCCL_SYMM_MEM"] = "1"
    observed = types.SimpleNamespace(comm=types.SimpleNamespace(enable_symm_mem=True))
    context = types.ModuleType("sglang.srt.runtime_context")
    context.get_exec = lambda: observed
    sys.modules["sglang.srt.runtime_context"] = context
    core.has_cuda.cache_clear()
