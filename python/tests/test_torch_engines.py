"""The adapters for serving engines. Scopes of torch's allocator need a GPU; here they are stood in
for, between processes the all-reduce is real."""

import contextlib
import sys
import types

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool.engines import CustomAllreduce, core, sglang, vllm


class FakePool:
    """Notes what is done with it."""

    made = []

    def __init__(self, group, device, *, window_policy):
        self.group, self.device, self.policy = group, device, window_policy
        self.said = []
        FakePool.made.append(self)

    def register_nccl(self, communicator):
        self.said.append(("register", communicator._get_backend(None)._comm_ptr()))

    def owns(self, address):
        return address % 2 == 0 and bool(address)

    def _scope(self):
        return types.SimpleNamespace(mempool=f"mempool of {self.group}")

    def __enter__(self):
        self.said.append("enter")

    def __exit__(self, kind, value, traceback):
        self.said.append("leave")


@pytest.fixture
def torn_off(monkeypatch):
    """The adapters on fake pools; a dict says whether a capture is under way."""
    FakePool.made = []
    state = {"capturing": False, "paused": []}
    monkeypatch.setattr(symmpool, "Pool", FakePool)
    monkeypatch.setattr(symmpool, "use_pool", lambda pool: pool, raising=False)
    monkeypatch.setattr(symmpool, "commit_postponed", lambda: None, raising=False)
    monkeypatch.setattr(vllm, "_pools", {})
    monkeypatch.setattr(sglang, "_pools", {})
    for module in (vllm, sglang):
        monkeypatch.setattr(module, "_graph_pool_id", [None])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for name in ("_cuda_endAllocateToPool", "_cuda_beginAllocateCurrentThreadToPool"):
        note = lambda *where, name=name: state["paused"].append((name, *where))  # noqa: E731
        monkeypatch.setattr(torch._C, name, note, raising=False)
    return state


def communicator(world=4, address=4096):
    group = types.SimpleNamespace(store="a store", rank=1, world_size=world)
    comm = types.SimpleNamespace(value=address)
    return types.SimpleNamespace(comm=comm, group=group, world_size=world, device="cuda:3")


def test_vllms_context_allocates_in_a_registered_pool(torn_off, monkeypatch):
    monkeypatch.setenv("VLLM_USE_NCCL_SYMM_MEM", "1")
    assert vllm.get_nccl_mem_pool() is None
    for _ in range(2):
        with vllm.nccl_symm_mem_context(communicator()) as context:
            assert not context.disabled
    (pool,) = FakePool.made
    assert (pool.group, pool.device) == (("a store", 1, 4), "cuda:3")
    assert pool.policy == "per-segment"
    assert pool.said == [("register", 4096), "enter", "leave", "enter", "leave"]
    assert vllm.get_nccl_mem_pool() == f"mempool of {pool.group}"
    assert vllm.is_symmetric_memory_tensor(torch.ones(4))
    with vllm.nccl_symm_mem_context(communicator(address=8192)):
        assert len(FakePool.made) == 2


def test_vllms_context_does_nothing_where_it_is_off(torn_off, monkeypatch):
    monkeypatch.setenv("VLLM_USE_NCCL_SYMM_MEM", "1")
    for arguments in [(communicator(world=1),), (communicator(), True), (None,)]:
        with vllm.nccl_symm_mem_context(*arguments) as context:
            assert context.disabled
    monkeypatch.setenv("VLLM_USE_NCCL_SYMM_MEM", "0")
    with vllm.nccl_symm_mem_context(communicator()) as context:
        assert context.disabled and not vllm.is_symmetric_memory_tensor(torch.ones(4))
    assert FakePool.made == []


def test_under_capture_the_graphs_pool_is_set_aside(torn_off, monkeypatch):
    monkeypatch.setenv("VLLM_USE_NCCL_SYMM_MEM", "1")
    torn_off["capturing"] = True
    with pytest.raises(symmpool.InvalidStateError, match="set_graph_pool_id"):
        vllm.nccl_symm_mem_context(communicator()).__enter__()
    vllm.set_graph_pool_id((0, 7))
    with contextlib.suppress(KeyError), vllm.nccl_symm_mem_context(communicator()):
        raise KeyError
    assert torn_off["paused"] == [
        ("_cuda_endAllocateToPool", 3, (0, 7)),
        ("_cuda_beginAllocateCurrentThreadToPool", 3, (0, 7)),
    ]
    # Nothing collective happens while capturing.
    assert FakePool.made[0].said == ["enter", "leave"]


def coordinator(name="tp", world=4):
    comm = types.SimpleNamespace(comm=types.SimpleNamespace(value=4096))
    return types.SimpleNamespace(
        unique_name=name, pynccl_comm=comm, world_size=world, device="cuda:0", cpu_group="a group"
    )


def test_sglangs_context_is_a_pool_a_group(torn_off, monkeypatch):
    arguments = types.SimpleNamespace(enable_symm_mem=True)
    server = types.SimpleNamespace(get_global_server_args=lambda: arguments)
    assert not sglang.is_symmetric_memory_enabled()
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", server)
    context = sglang.use_symmetric_memory(coordinator())
    for _ in range(2):
        with context:
            saved = sglang.disable_symmetric_memory_context()
            assert saved is context
            sglang.restore_symmetric_memory_context(saved)
    (pool,) = FakePool.made
    assert pool.group == "a group"
    assert pool.said == [("register", 4096), *["enter", "leave"] * 4]
    assert sglang.get_nccl_mem_pool("tp") == "mempool of a group"
    assert sglang.get_nccl_mem_pool("other") is None
    assert sglang.nccl_allocator_register_segments_with_comm(4096) == 0
    assert sglang.nccl_allocator_register_segments_with_comm(1) == 1
    assert sglang.is_symmetric_memory_tensor(torch.ones(2))
    assert sglang.disable_symmetric_memory_context() is None
    sglang.restore_symmetric_memory_context(None)
    for other in (
        sglang.use_symmetric_memory(coordinator(), disabled=True),
        sglang.use_symmetric_memory(coordinator(world=1)),
    ):
        assert isinstance(other, contextlib.nullcontext)
    without = coordinator("pp")
    without.pynccl_comm = None
    with pytest.raises(symmpool.InvalidStateError, match="pynccl"):
        sglang.use_symmetric_memory(without).__enter__()
    arguments.enable_symm_mem = False
    assert isinstance(sglang.use_symmetric_memory(coordinator()), contextlib.nullcontext)


def test_modules_go_in_the_places_of_the_engines(monkeypatch):
    for module in (vllm, sglang):
        monkeypatch.delitem(sys.modules, module.REPLACES, raising=False)
        module.install()
        assert sys.modules[module.REPLACES] is module
        module.install()
        monkeypatch.setitem(sys.modules, module.REPLACES, types.ModuleType("theirs"))
        with pytest.raises(symmpool.InvalidStateError, match="imported already"):
            module.install()
    assert core.address_of(None) == 0 and core.address_of(5) == 5


def test_without_scopes_it_is_said(monkeypatch):
    monkeypatch.delattr(symmpool, "use_pool", raising=False)
    with pytest.raises(symmpool.UnsupportedError, match="scopes"):
        core.EnginePool(None, "cuda:0", 1)


def custom(group, folder):
    me, world = begin(group, folder)
    serving = CustomAllreduce(dist.group.WORLD, torch.device("cpu"), max_size=4096)
    right = [not serving.disabled, (serving.rank, serving.world_size) == (me, world)]
    x = torch.full((100,), me + 1.0, dtype=torch.bfloat16)
    expected = [world * (world + 1) / 2] * 100
    right.append(serving.all_reduce(x).tolist() == expected and x[0].item() == me + 1)
    out = torch.empty_like(x)
    right.append(serving.all_reduce(x, out=out, registered=True) is out and out[0] == expected[0])
    with serving.capture():
        right.append(serving.custom_all_reduce(x).tolist() == expected)
    for no in (torch.ones(2000), torch.ones(0), torch.ones(4, 6).t(), torch.ones(3).bool()):
        right.append(not serving.should_use(no) and serving.custom_all_reduce(no) is None)
    serving.close()
    right.append(not serving.should_custom_ar(x))
    dist.destroy_process_group()
    return right


def test_sums_in_the_shape_of_custom_allreduce(tmp_path):
    for right in values(2, custom, str(tmp_path)):
        assert all(right), right


def one_cannot(group, folder):
    begin(group, folder)
    device = "cpu" if group.rank == 0 else "no such device"
    serving = CustomAllreduce(dist.group.WORLD, device, timeout=3)
    dist.destroy_process_group()
    return serving.disabled, serving.should_use(torch.ones(4))


def test_where_one_rank_cannot_none_does(tmp_path):
    assert values(2, one_cannot, str(tmp_path)) == [(True, False)] * 2
