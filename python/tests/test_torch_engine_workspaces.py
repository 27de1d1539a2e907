"""Tests of what engines read of our workspaces and classes beside calling them; `python/tests/engines` has
the engines' own code do it."""

import sys
import types

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

from symmpool.engines import CustomAllreduce, flashinfer_comm, sglang, vllm
from symmpool.engines.custom_allreduce_v2 import derived, is_derived
from symmpool.errors import UnsupportedError


def workspaces(group, folder):
    me, world = begin(group, folder)
    wrong = []
    for dtype, lamport in ((torch.bfloat16, False), (torch.float32, True), (None, False)):
        made = flashinfer_comm.create_allreduce_fusion_workspace("auto", world, me, dtype=dtype)
        if made.metadata != {"tp_rank": me, "tp_size": world, "use_fp32_lamport": lamport}:
            wrong.append(("metadata", dtype, made.metadata))
        # An answer to "is there multicast" that only "mnnvl" is asked for.
        if made.mc_ptr:
            wrong.append(("mc_ptr", made.backend))
    mnnvl = flashinfer_comm.create_allreduce_fusion_workspace("mnnvl", world, me, 64, 64, torch.bfloat16)
    if not mnnvl.mc_ptr or int(mnnvl.mc_ptr) != 0 or mnnvl.mc_ptr + 0 != 0:
        wrong.append("mc_ptr of mnnvl")
    for call in (mnnvl.checkpoint_prepare, lambda: mnnvl.checkpoint_restore(object())):
        # vLLM passes over NotImplementedError alone.
        with pytest.raises(NotImplementedError, match=f"on rank {me}.*SYMMPOOL_ENGINES=off") as caught:
            call()
        if caught.type is not UnsupportedError:
            wrong.append(caught.type)
    # It serves afterwards as before.
    x = torch.full((2, 64), me + 1.0, dtype=torch.bfloat16)
    total = flashinfer_comm.allreduce_fusion(x, mnnvl, 0)
    if total.tolist() != [[3.0] * 64] * 2:
        wrong.append("all-reduce")
    mnnvl.destroy()
    if mnnvl.mc_ptr:
        wrong.append("mc_ptr of a destroyed workspace")
    dist.destroy_process_group()
    return wrong


def test_workspaces_say_what_engines_read_of_them(tmp_path):
    assert values(2, workspaces, str(tmp_path)) == [[]] * 2


class CustomAllReduceV2:
    """Stand-in for the parts of SGLang's class that a class touches which is derived from it."""

    made = []

    def __init__(self, group, device, max_size=4096, *, max_pull_size=None, disabled=False):
        self.disabled = disabled
        self.pull_enabled = max_pull_size != 0
        self.max_size, self.override_algo, self.calls, self.obj = max_size, None, [], "planes"
        CustomAllReduceV2.made.append(self)

    def should_custom_ar(self, inp):
        return inp.numel() % 16 == 0

    def custom_all_reduce(self, input):
        self.calls.append(input.numel())
        return "theirs"

    def close(self):
        self.calls.append("closed")


def second_version(group, folder):
    me, world = begin(group, folder)
    kind, cpu = derived(CustomAllReduceV2), torch.device("cpu")
    found = kind(dist.group.WORLD, cpu)
    x = torch.full((32,), me + 1.0)
    right = [isinstance(found, CustomAllReduceV2), found.obj == "planes", found.should_custom_ar(x)]
    right.append(found.custom_all_reduce(x).tolist() == [3.0] * 32 and found.calls == [])
    # Calls that ours does not serve are theirs, as before: here elements that do not lie side by side.
    apart = torch.ones(32, 2)[:, 0]
    right += [found.should_custom_ar(apart), found.custom_all_reduce(apart) == "theirs"]
    right.append(not found.should_custom_ar(torch.ones(2 << 20, 2)[:5, 0]))
    found.override_algo = "one of theirs"
    right.append(found.custom_all_reduce(x) == "theirs")
    found.override_algo = None
    found.close()
    right.append(found.calls[-1] == "closed" and found.custom_all_reduce(x) == "theirs")
    # Instances for fused kernels alone, and such as cannot be had, have no communicator of ours.
    right.append(kind(dist.group.WORLD, cpu, max_pull_size=0)._symmpool is None)
    off = kind(dist.group.WORLD, cpu, disabled=True)
    right += [off._symmpool is None, not off.should_custom_ar(x)]
    dist.destroy_process_group()
    return right


def test_the_class_that_sglang_asks_for_has_our_all_reduce(tmp_path):
    assert [set(each) for each in values(2, second_version, str(tmp_path))] == [{True}] * 2
    assert derived(CustomAllReduceV2) is derived(CustomAllReduceV2)
    assert is_derived(derived(CustomAllReduceV2)) and not is_derived(CustomAllReduceV2)


@pytest.fixture
def modules(monkeypatch):
    """Stand-ins for SGLang's modules, of which one holds the class by its own name."""
    first, second, holder = (
        types.ModuleType(name) for name in (sglang.ALL_REDUCE, sglang.ALL_REDUCE_V2, "sglang.a")
    )
    second.CustomAllReduceV2 = holder.CustomAllReduceV2 = CustomAllReduceV2
    first.dispatch_custom_allreduce = lambda group, device: second.CustomAllReduceV2 if group else "older"
    for each in (first, second, holder):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    return first, second, holder


def test_where_sglang_chooses_its_second_class_it_gets_one_derived_from_that(modules, monkeypatch):
    first, second, holder = modules
    sglang.install_custom_allreduce()
    sglang.install_custom_allreduce()
    assert holder.CustomAllReduceV2 is second.CustomAllReduceV2 is derived(CustomAllReduceV2)
    # Without CUDA SGLang has no choice to make.
    assert first.dispatch_custom_allreduce(group="a group", device="cpu") is CustomAllreduce
    monkeypatch.setattr(sglang.core, "has_cuda", lambda: True)
    assert first.dispatch_custom_allreduce(group="a group", device="cuda:0") is derived(CustomAllReduceV2)
    assert first.dispatch_custom_allreduce(group=None, device="cuda:0") is CustomAllreduce


@pytest.mark.parametrize("installed", [False, True])
def test_vllm_is_said_to_ask_flashinfer_first(monkeypatch, caplog, installed):
    variables = types.SimpleNamespace(VLLM_ALLREDUCE_USE_FLASHINFER=True, VLLM_BATCH_INVARIANT=False)
    monkeypatch.setitem(sys.modules, "vllm.envs", variables)
    monkeypatch.setitem(sys.modules, vllm.ALL_REDUCE, types.ModuleType("theirs"))
    monkeypatch.setattr(flashinfer_comm, "_before", {"a function": None} if installed else {})
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: name)
    vllm.install_custom_allreduce()
    assert [each.message for each in caplog.records if "FlashInfer" in each.message] == (
        []
        if installed
        else [
            "symmpool: vLLM asks FlashInfer for all-reduces before symmpool's; call "
            "symmpool.engines.flashinfer_comm.install() too, or set VLLM_ALLREDUCE_USE_FLASHINFER=0"
        ]
    )
    for name, value in (("VLLM_ALLREDUCE_USE_FLASHINFER", False), ("VLLM_BATCH_INVARIANT", True)):
        monkeypatch.setattr(variables, name, value)
        assert not vllm.asks_flashinfer_first()
        monkeypatch.setattr(variables, name, not value)
    assert vllm.asks_flashinfer_first()
