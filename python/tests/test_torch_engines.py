"""The adapters for serving engines. Scopes of torch's allocator need a GPU; here they are stood in
for, between processes the all-reduce is real."""

import contextlib
import inspect
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
        def leave(pool, kind, value, settles):
            assert (pool, kind, value, settles) == (self, None, None, False)
            self.said.append("pause")

        return types.SimpleNamespace(mempool=f"mempool of {self.group}", leave=leave)

    def zeros(self, shape, dtype):
        self.said.append("zeros")
        return torch.zeros(shape, dtype=dtype)

    def commit(self):
        self.said.append("commit")

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
    for name, fresh in {"_pools": {}, "_buffers": {}, "_warned": set(), "_active": [None]}.items():
        monkeypatch.setattr(sglang, name, fresh)
    monkeypatch.setattr(core, "has_cuda", lambda: True)
    for module in (vllm, sglang):
        monkeypatch.setattr(module, "_graph_pool_id", [None])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for name in ("_cuda_endAllocateToPool", "_cuda_beginAllocateCurrentThreadToPool"):
        note = lambda *where, name=name: state["paused"].append((name, *where))  # noqa: E731
        monkeypatch.setattr(torch._C, name, note, raising=False)
    return state


def communicator(world=4, address=4096, unique=b"first"):
    group = types.SimpleNamespace(store="a store", rank=1, world_size=world)
    comm, unique = types.SimpleNamespace(value=address), types.SimpleNamespace(internal=unique)
    return types.SimpleNamespace(comm=comm, group=group, world_size=world, device="cuda:3", unique_id=unique)


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
    # A communicator that was destroyed, and another at its address: with windows of its own.
    with vllm.nccl_symm_mem_context(communicator(unique=b"second")):
        assert len(FakePool.made) == 3 and FakePool.made[2].said[0] == ("register", 4096)
    homeless = communicator(unique=b"third")
    homeless.group = None
    with pytest.raises(symmpool.InvalidStateError, match="without a group"):
        vllm.nccl_symm_mem_context(homeless).__enter__()


def test_vllms_context_does_nothing_where_it_is_off(torn_off, monkeypatch):
    monkeypatch.setenv("VLLM_USE_NCCL_SYMM_MEM", "1")
    for arguments in [(communicator(world=1),), (communicator(), True), (None,)]:
        with vllm.nccl_symm_mem_context(*arguments) as context:
            assert context.disabled
    monkeypatch.setattr(core, "has_cuda", lambda: False)
    with vllm.nccl_symm_mem_context(communicator()) as context:
        assert context.disabled
    monkeypatch.setattr(core, "has_cuda", lambda: True)
    # vLLM's own reading of the environment goes first, where there is one.
    variables = types.SimpleNamespace(VLLM_USE_NCCL_SYMM_MEM=False)
    monkeypatch.setitem(sys.modules, "vllm.envs", variables)
    assert not vllm.is_symmetric_memory_enabled()
    monkeypatch.delitem(sys.modules, "vllm.envs")
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
    return types.SimpleNamespace(
        unique_name=name, pynccl_comm=communicator(), world_size=world, device="cuda:0",
        cpu_group=f"group {name}", is_first_rank=True,
    )  # fmt: skip


@pytest.fixture
def observed(monkeypatch):
    """The options of SGLang 0.5.17 and newer."""
    flags = types.SimpleNamespace(enable_symm_mem=True)
    context = types.SimpleNamespace(get_exec=lambda: types.SimpleNamespace(comm=flags))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    return flags


def variables(monkeypatch, **values):
    """SGLang's own reading of the environment."""
    found = {name: types.SimpleNamespace(get=lambda value=value: value) for name, value in values.items()}
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    environ = types.ModuleType("sglang.srt.environ")
    environ.envs = types.SimpleNamespace(**found)
    monkeypatch.setitem(sys.modules, "sglang.srt.environ", environ)


def test_sglangs_context_is_a_pool_a_group(torn_off, observed):
    context = sglang.use_symmetric_memory(coordinator())
    for _ in range(2):
        with context:
            assert sglang._active == [context]
    (pool,) = FakePool.made
    assert pool.group == "group tp" and sglang._active == [None]
    assert pool.said == [("register", 4096), *["enter", "leave"] * 2]
    assert sglang.get_nccl_mem_pool("tp") == sglang.get_nccl_mem_pool() == "mempool of group tp"
    assert sglang.get_nccl_mem_pool("other") is None
    assert sglang.is_tensor_in_symmetric_mempool(torch.ones(2))
    for other in (
        sglang.use_symmetric_memory(coordinator(), disabled=True),
        sglang.use_symmetric_memory(coordinator(world=1)),
    ):
        assert isinstance(other, contextlib.nullcontext)
    without = coordinator("pp")
    without.pynccl_comm = None
    with pytest.raises(symmpool.InvalidStateError, match="pynccl"):
        sglang.use_symmetric_memory(without).__enter__()
    assert sglang._active == [None] and sglang.describe_registration_in_progress() is None
    observed.enable_symm_mem = False
    assert isinstance(sglang.use_symmetric_memory(coordinator()), contextlib.nullcontext)


def test_sglangs_context_is_set_aside_by_one_rank_alone(torn_off, observed):
    with sglang.use_symmetric_memory(coordinator()), sglang.use_symmetric_memory(coordinator("ep")):
        first, second = FakePool.made
        saved = sglang.disable_symmetric_memory_context()
        assert sglang._active == [None] and sglang.disable_symmetric_memory_context() is None
        sglang.restore_symmetric_memory_context(None)
        sglang.restore_symmetric_memory_context(saved)
        assert sglang._active == [saved]
    # Without a commit, for the other ranks make none there.
    for pool in (first, second):
        assert pool.said == [("register", 4096), "enter", "pause", "enter", "leave"]
    assert sglang._active == [None]


def test_sglang_is_asked_as_its_versions_answer(monkeypatch):
    def unset():
        raise ValueError("not set")

    def retired():
        raise RuntimeError("retired")

    flags = types.SimpleNamespace(enable_symm_mem=True)
    arguments = types.SimpleNamespace(get_global_server_args=lambda: flags)
    assert not sglang.is_symmetric_memory_enabled()
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", arguments)
    assert sglang.is_symmetric_memory_enabled()
    arguments.get_global_server_args = unset
    assert not sglang.is_symmetric_memory_enabled()
    arguments.get_global_server_args = retired
    context = types.SimpleNamespace(get_exec=lambda: types.SimpleNamespace(comm=flags))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    assert sglang.is_symmetric_memory_enabled()
    context.get_exec = unset
    assert not sglang.is_symmetric_memory_enabled()


def test_sglangs_buffers_of_a_communicator(torn_off, monkeypatch):
    comm = communicator()
    for _ in range(2):
        buffer, registered = sglang.allocate_symmetric_buffer(comm, 100)
        assert registered and buffer.dtype == torch.uint8 and buffer.tolist() == [0] * 100
        assert sglang.is_tensor_in_symmetric_mempool(buffer)
    (pool,) = FakePool.made
    assert (pool.group, pool.device) == (("a store", 1, 4), "cuda:3")
    assert pool.said == ["zeros", "commit", ("register", 4096), "zeros", "commit"]

    def refuse(self, communicator):
        raise symmpool.UnsupportedError("no windows")

    monkeypatch.setattr(FakePool, "register_nccl", refuse)
    assert sglang.allocate_symmetric_buffer(communicator(address=1), 8)[1] is False


def test_sglang_makes_room_ahead(torn_off, observed, monkeypatch):
    variables(monkeypatch, SGLANG_SYMM_MEM_PREALLOC_GB_SIZE=1 / 1024)
    state = types.ModuleType("sglang.srt.distributed.parallel_state")
    state.get_tp_group = coordinator
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed", types.ModuleType("distributed"))
    monkeypatch.setitem(sys.modules, state.__name__, state)
    made = []
    monkeypatch.setattr(torch, "empty", lambda size, **options: made.append((size, options)))
    streams = types.SimpleNamespace(stream=lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    asked = {"is_draft_worker": False, "enable_symm_mem": True, "device": "cuda", "forward_stream": 5}
    for no in ({"is_draft_worker": True}, {"enable_symm_mem": False}):
        sglang.prealloc_symmetric_memory_pool(**{**asked, **no})
    assert not FakePool.made
    sglang.prealloc_symmetric_memory_pool(**asked)
    assert made == [((1 << 20,), {"dtype": torch.uint8, "device": "cuda"})]
    assert FakePool.made[0].said == [("register", 4096), "enter", "leave"]


def test_sglang_is_warned_of_tensors_elsewhere_once_a_place(torn_off, observed, monkeypatch, caplog):
    variables(monkeypatch, SGLANG_DEBUG_SYMM_MEM=True)
    group = coordinator()
    for _ in range(2):
        sglang.debug_check_symmetric_mempool(group, {"input": torch.ones(3)}, "all_reduce")
    (said,) = caplog.records
    assert "all_reduce in group 'tp'" in said.message and "input, [3] torch.float32" in said.message
    group.is_first_rank = False
    sglang.debug_check_symmetric_mempool(group, {"input": torch.ones(3)}, "all_reduce")
    group.is_first_rank, observed.enable_symm_mem = True, False
    sglang.debug_check_symmetric_mempool(group, {"input": torch.ones(3)}, "all_reduce")
    assert len(caplog.records) == 1


# Names that the engines' modules have for their callers: in vLLM 0.16.0 to 0.33.0, and in SGLang 0.5.9 to
# 0.5.23, of which older versions have a part. `*` comes before what is given by name.
NAMES = {
    vllm: {
        "compile_nccl_allocator": "",
        "get_nccl_mem_pool": "",
        "is_symmetric_memory_enabled": "",
        "is_symmetric_memory_tensor": "tensor",
        "nccl_symm_mem_context": "pynccl_comm disabled=False",
        "set_graph_pool_id": "graph_pool_id",
    },
    sglang: {
        "SymmetricMemoryContext": "group_coordinator",
        "allocate_symmetric_buffer": "comm nbytes",
        "debug_check_symmetric_mempool": "group_coordinator tensors op_name",
        "describe_registration_in_progress": "",
        "disable_symmetric_memory_context": "",
        "get_nccl_mem_pool": "",
        "is_symmetric_memory_enabled": "",
        "is_tensor_in_symmetric_mempool": "tensor",
        "prealloc_symmetric_memory_pool": "* is_draft_worker enable_symm_mem device forward_stream",
        "restore_symmetric_memory_context": "saved_context",
        "set_graph_pool_id": "graph_pool_id",
        "use_symmetric_memory": "group_coordinator disabled=False",
    },
}
# Their classes CustomAllreduce, of the newest versions.
METHODS = {
    "__init__": (
        "self group device max_size=8388608 max_all_gather_size=2097152 max_mnnvl_all_gather_size=None "
        "max_reduce_scatter_size=16777216 max_mnnvl_reduce_scatter_size "
        "max_mnnvl_multimem_reduce_scatter_size symm_mem_enabled=False * register_graph_buffers=True"
    ),
    "all_reduce": "self inp * out=None registered=False",
    "capture": "self",
    "close": "self",
    "custom_all_gather": "self inp",
    "custom_all_reduce": "self input",
    "custom_reduce_scatter": "self inp",
    "register_graph_buffers": "self",
    "should_custom_all_gather": "self inp",
    "should_custom_ar": "self inp",
    "should_custom_reduce_scatter": "self inp",
    "should_mnnvl_multimem_reduce_scatter": "self inp",
}


def check_signature(function, said):
    """Ours takes what theirs takes, in the same ways; what it takes besides need not be given."""
    ours = list(inspect.signature(function).parameters.values())
    by_name, count = False, 0
    for word in said.split():
        if word == "*":
            by_name = True
            continue
        name, _, default = word.partition("=")
        parameter = ours[count]
        assert parameter.name == name, (function, name)
        assert not default or str(parameter.default) == default, (function, name)
        assert by_name or parameter.kind is parameter.POSITIONAL_OR_KEYWORD, (function, name)
        count += 1
    assert all(each.default is not each.empty for each in ours[count:]), function


def test_names_and_arguments_are_those_of_the_engines():
    for module, names in NAMES.items():
        assert set(names) <= set(module.__all__)
        for name, said in names.items():
            check_signature(getattr(module, name), said)
    for name, said in METHODS.items():
        check_signature(getattr(CustomAllreduce, name), said)
    # SGLang asks whether there are these, which are others' and take other arguments.
    for name in ("reduce_scatter", "should_custom_ag", "fused_allreduce_rmsnorm", "custom_fused_ar_rms"):
        assert not hasattr(CustomAllreduce, name)


def test_modules_go_in_the_places_of_the_engines(monkeypatch):
    for module in (vllm, sglang):
        monkeypatch.setitem(sys.modules, module.REPLACES, module)
        monkeypatch.delitem(sys.modules, module.REPLACES)
        module.install()
        assert sys.modules[module.REPLACES] is module
        module.install()
    assert core.address_of(None) == 0 and core.address_of(5) == 5


def test_modules_that_are_imported_already_are_replaced_where_they_are_held(monkeypatch):
    for module in (vllm, sglang):
        package = module.REPLACES.partition(".")[0]
        names = [f"{package}.holder", f"{package}_kernels", module.REPLACES]
        holder, stranger, theirs = (types.ModuleType(name) for name in names)
        for each in (holder, stranger, theirs):
            monkeypatch.setitem(sys.modules, each.__name__, each)
        theirs.set_graph_pool_id = holder.set_graph_pool_id = lambda pool: None
        stranger.set_graph_pool_id = theirs.set_graph_pool_id
        holder.is_symmetric_memory_enabled = theirs.is_symmetric_memory_enabled = lambda: None
        holder.get_nccl_mem_pool = of_its_own = lambda: None
        theirs.get_nccl_mem_pool = lambda: None
        theirs._mem_pool = "a pool"
        with pytest.raises(symmpool.InvalidStateError, match="made its own memory pool"):
            module.install()
        theirs._mem_pool = None
        module.install()
        assert sys.modules[module.REPLACES] is module
        assert holder.set_graph_pool_id is module.set_graph_pool_id
        assert holder.is_symmetric_memory_enabled is module.is_symmetric_memory_enabled
        assert holder.get_nccl_mem_pool is of_its_own
        assert stranger.set_graph_pool_id is theirs.set_graph_pool_id


def test_the_all_reduce_goes_where_engines_look_for_it(monkeypatch):
    theirs = types.ModuleType("theirs")
    for module in (vllm, sglang):
        monkeypatch.setitem(sys.modules, module.ALL_REDUCE, theirs)
        module.install_custom_allreduce()
    assert theirs.CustomAllreduce is CustomAllreduce
    assert theirs.dispatch_custom_allreduce(group="a group", device="cuda:0") is CustomAllreduce


def test_without_scopes_it_is_said(monkeypatch):
    monkeypatch.delattr(symmpool, "use_pool", raising=False)
    with pytest.raises(symmpool.UnsupportedError, match="scopes"):
        core.EnginePool(("a store", 0, 1), "cuda:0", 1)


def test_groups_that_torch_does_not_list_meet_in_their_store():
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    found, *place = core.group_of(group)
    assert place == [0, 1]
    found.set("key", "value")
    assert store.get("key") == b"value"


def custom(group, folder):
    me, world = begin(group, folder)
    serving = CustomAllreduce(dist.group.WORLD, torch.device("cpu"), max_size=4096)
    right = [not serving.disabled, (serving.rank, serving.world_size) == (me, world)]
    # A rank that compiles its kernels may be late as long as the group's ranks wait.
    right.append(serving._comm.timeout == 30)
    x = torch.full((100,), me + 1.0, dtype=torch.bfloat16)
    expected = [world * (world + 1) / 2] * 100
    right.append(serving.all_reduce(x).tolist() == expected and x[0].item() == me + 1)
    out = torch.empty_like(x)
    right.append(serving.all_reduce(x, out=out, registered=True) is out and out[0] == expected[0])
    with serving.capture():
        right.append(serving.custom_all_reduce(x).tolist() == expected)
    for no in (torch.ones(2000), torch.ones(0), torch.ones(4, 6).t(), torch.ones(3).bool()):
        right.append(not serving.should_use(no) and serving.custom_all_reduce(no) is None)
    rows = torch.arange(2.0 * world).reshape(world, 2) + me
    gathered = serving.custom_all_gather(rows)
    right.append(torch.equal(gathered, torch.cat([rows - me + rank for rank in range(world)])))
    part = serving.custom_reduce_scatter(rows)
    right.append(part.tolist() == [[2 * world * me + 1, (2 * me + 1) * world + 1]])
    for no in (torch.ones(()), torch.ones(3 << 20, dtype=torch.uint8), torch.ones(4, 6).t()):
        right.append(serving.custom_all_gather(no) is None)
    right.append(serving.custom_reduce_scatter(torch.ones(2 * world + 1)) is None)
    right.append(serving.fully_connected and not serving.mnnvl_lamport_ag_multicast_ptr)
    serving.batch_invariant = True
    large = torch.ones(2000)
    right.append(serving.custom_all_reduce(large).tolist() == [world] * 2000)
    right.append(serving.custom_reduce_scatter(rows) is None)
    serving.close()
    right.append(not serving.should_custom_ar(x) and not serving.should_custom_all_gather(rows))
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
    nothing = serving.custom_reduce_scatter(torch.ones(4)) is None and not serving.fully_connected
    return serving.disabled and nothing, serving.should_use(torch.ones(4))


def test_where_one_rank_cannot_none_does(tmp_path):
    assert values(2, one_cannot, str(tmp_path)) == [(True, False)] * 2
