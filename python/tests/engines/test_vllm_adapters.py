"""vLLM's own code on our workspaces: its manager of FlashInfer's workspaces, with FlashInfer's own module."""

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin


def manager(group, folder):
    """Uses the manager as `CudaCommunicator` and the pass for fused norms do. Returns what went otherwise
    than it should."""
    import os

    import flashinfer.comm
    from vllm.distributed.device_communicators import flashinfer_all_reduce as theirs

    from symmpool.engines import flashinfer_comm as ours

    assert theirs.fi_ar_available
    me, world = begin(group, folder)
    cpu_group, wrong = dist.new_group(backend="gloo"), []
    for backend in ("mnnvl", "auto", "trtllm"):
        os.environ["VLLM_FLASHINFER_ALLREDUCE_BACKEND"] = backend
        ours.install()
        given = {"world_size": world, "rank": me, "max_token_num": 64, "hidden_dim": 64}
        given["dtype"] = torch.bfloat16
        found = theirs.get_fi_ar_workspace(**given, group=cpu_group)
        if type(found) is not ours.AllReduceFusionWorkspace:
            wrong.append((backend, "workspace", type(found)))
        if theirs.get_fi_ar_quant_workspace(**given, group=cpu_group) is not found:
            wrong.append((backend, "workspace for quantized norms"))
        # Sleeping with `enable_nccl_comm_suspend`.
        theirs.checkpoint_prepare_fi_ar_workspaces(cpu_group, skip_unsupported=True)
        theirs.checkpoint_restore_fi_ar_workspaces(cpu_group, skip_unsupported=True)
        with pytest.raises(NotImplementedError, match="SYMMPOOL_ENGINES=off"):
            theirs.checkpoint_prepare_fi_ar_workspaces(cpu_group)
        x = torch.full((3, 64), me + 1.0, dtype=torch.bfloat16)
        pattern = flashinfer.comm.AllReduceFusionPattern.kAllReduce
        total = flashinfer.comm.allreduce_fusion(input=x, workspace=found, pattern=pattern)
        if total.tolist() != [[world * (world + 1) / 2] * 64] * 3:
            wrong.append((backend, "sum"))
        theirs.destroy_fi_ar_workspace()
        ours.uninstall()
    dist.destroy_process_group()
    return wrong


def test_vllms_manager_of_workspaces_keeps_ours(tmp_path):
    assert values(2, manager, str(tmp_path)) == [[]] * 2
