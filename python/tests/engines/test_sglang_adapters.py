"""SGLang's own code on our workspaces and classes: its manager of FlashInfer's workspaces, and its choice of
an all-reduce. Its kernels need CUDA, so what they would do is left out."""

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin


def manager(group, folder):
    """Uses the manager as a layer on Hopper does. Returns what went otherwise than it should."""
    from sglang.srt import utils

    # True on Hopper, and asked when the module is imported.
    utils.is_flashinfer_available = lambda: True
    from sglang.srt.layers import flashinfer_comm_fusion as theirs

    from symmpool.engines import flashinfer_comm, sglang

    me, world = begin(group, folder)
    cpu_group, wrong = dist.new_group(backend="gloo"), []
    sglang.install_fusion()
    for backend in ("trtllm", "mnnvl"):
        for dtype in (torch.bfloat16, torch.float32):
            found = theirs.FlashInferWorkspaceManager()
            found.initialize(world, me, 64, 64, backend, dtype=dtype, group=cpu_group, cpu_group=cpu_group)
            if theirs.is_flashinfer_allreduce_unavailable() or not found.initialized:
                wrong.append((backend, dtype, "off"))
                continue
            if type(found.workspace) is not flashinfer_comm.AllReduceFusionWorkspace:
                wrong.append((backend, dtype, type(found.workspace)))
            if found.use_fp32_lamport != (dtype == torch.float32 if backend == "trtllm" else None):
                wrong.append((backend, dtype, found.use_fp32_lamport))
            if not found.is_buffer_size_sufficient(64, 64, dtype, use_oneshot=True):
                wrong.append((backend, dtype, "size"))
            # An equal request finds the same workspace, and a larger one makes another.
            found.initialize(world, me, 64, 64, backend, dtype=dtype, cpu_group=cpu_group)
            found.initialize(world, me, 1 << 20, 128, backend, dtype=dtype, cpu_group=cpu_group)
            if not found.initialized:
                wrong.append((backend, dtype, "a larger one"))
            found.cleanup()
    dist.destroy_process_group()
    return wrong


def test_sglangs_manager_of_workspaces_stays_on(tmp_path):
    pytest.importorskip("flashinfer.comm")
    assert values(2, manager, str(tmp_path)) == [[]] * 2


def test_the_class_of_sglang_stays_the_class_that_models_ask_for(monkeypatch):
    from sglang.srt.distributed.device_communicators import custom_all_reduce, custom_all_reduce_v2

    from symmpool.engines import CustomAllreduce, core, sglang
    from symmpool.engines.custom_allreduce_v2 import is_derived

    own = custom_all_reduce_v2.CustomAllReduceV2
    from sglang.srt.layers import dp_attention

    held = vars(dp_attention).get("CustomAllReduceV2")
    sglang.install_custom_allreduce()
    now = custom_all_reduce_v2.CustomAllReduceV2
    assert is_derived(now) and issubclass(now, own)
    if held is own:
        assert dp_attention.CustomAllReduceV2 is now
    monkeypatch.setattr(core, "has_cuda", lambda: True)
    monkeypatch.setattr(custom_all_reduce, "_is_cuda", True)
    monkeypatch.setattr(custom_all_reduce_v2, "can_use_custom_all_reduce_v2", lambda group, device: True)
    assert custom_all_reduce.dispatch_custom_allreduce(group=None, device=None) is now
    monkeypatch.setattr(custom_all_reduce_v2, "can_use_custom_all_reduce_v2", lambda group, device: False)
    assert custom_all_reduce.dispatch_custom_allreduce(group=None, device=None) is CustomAllreduce
    # The derived class calls these methods of its own.
    for name in ("should_custom_ar", "custom_all_reduce", "close", "capture"):
        assert callable(getattr(own, name)), name
