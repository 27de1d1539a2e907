"""The plug-ins for serving engines: what they put in place and what they say, with stand-ins for the engines'
modules. `python/tests/engines` runs the engines themselves."""

import logging
import pathlib
import sys
import types

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

from symmpool.errors import InvalidArgumentError
from symmpool.plugins import entry, sglang, vllm, vllm_cpu
from symmpool.plugins.versions import ENGINES, parsed
from symmpool.torch_backend import registration

THEIRS = "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator"


def module(monkeypatch, name, **values):
    """Makes `import name` give a module with these values."""
    made = types.ModuleType(name)
    vars(made).update(values)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def said(monkeypatch, caplog):
    """Returns the messages of plug-ins in a process that none was called in yet."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(entry, "_said", [])
    monkeypatch.setattr(registration, "before_groups", [])
    monkeypatch.delenv("SYMMPOOL_ENGINES", raising=False)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    return lambda: [each.getMessage() for each in caplog.records if each.name.endswith("plugins.symmpool")]


@pytest.fixture
def cpu(monkeypatch):
    """vLLM's platform of CPUs, as far as the plug-in touches it."""

    class CpuPlatform:
        dist_backend = "gloo"
        device_name = "cpu"
        is_cpu = is_cuda = lambda self: False

        @classmethod
        def get_device_communicator_cls(cls):
            return THEIRS

    CpuPlatform.is_cpu = lambda self: True
    module(monkeypatch, "vllm", __version__="0.32.0")
    module(monkeypatch, "vllm.platforms", current_platform=CpuPlatform())
    return CpuPlatform


def test_vllm_on_the_cpu_gets_our_groups_and_all_reduces_and_a_line(said, cpu):
    entry.vllm()
    entry.vllm()
    assert cpu.dist_backend == "symmpool"
    assert cpu().get_device_communicator_cls() == "symmpool.plugins.vllm_cpu.CpuCommunicator"
    (line,) = said()
    assert "serves vLLM 0.32.0 on the CPU: groups (" in line and "all-reduces and gathers" in line
    assert "not served: tensors between pipeline stages" in line and "SYMMPOOL_ENGINES=off" in line
    assert "Beware" not in line and "\n" not in line


def test_ranks_that_are_not_bound_are_advised(said, cpu, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    entry.vllm()
    assert "set VLLM_CPU_OMP_THREADS_BIND to the cores of each rank" in said()[0]


@pytest.mark.parametrize(
    ("version", "mode", "serves", "words"),
    [
        ("0.32.0", "off", False, "serves nothing in this process: SYMMPOOL_ENGINES=off"),
        ("0.34.0", None, False, "vLLM 0.34.0 is newer than 0.33.0, and 0.16.0 to 0.33.0 are known; set "),
        ("0.15.1", None, False, "vLLM 0.15.1 is older than 0.16.0"),
        ("main", None, False, "'main' is no version of vLLM that can be read"),
        ("0.34.0", "any", True, "Beware: vLLM 0.34.0 is newer than 0.33.0"),
        (
            "0.33.1",
            None,
            True,
            "Beware: vLLM 0.33.1 was not run with symmpool on the CPU; 0.32.0",
        ),
    ],
)
def test_versions_that_are_not_known_are_named_and_not_served(
    said, cpu, monkeypatch, version, mode, serves, words
):
    sys.modules["vllm"].__version__ = version
    if mode:
        monkeypatch.setenv("SYMMPOOL_ENGINES", mode)
    entry.vllm()
    (line,) = said()
    assert words in line
    assert (cpu.dist_backend == "symmpool") is serves
    assert (cpu.get_device_communicator_cls() != THEIRS) is serves


def test_a_value_of_the_variable_that_is_none_is_refused_before_anything_is_done(said, cpu, monkeypatch):
    monkeypatch.setenv("SYMMPOOL_ENGINES", "perhaps")
    with pytest.raises(InvalidArgumentError, match="SYMMPOOL_ENGINES='perhaps': it is on, off, or any"):
        entry.vllm()
    assert cpu.dist_backend == "gloo" and said() == []


def test_what_another_plug_in_has_put_in_place_stays(said, cpu, monkeypatch):
    monkeypatch.setattr(cpu, "dist_backend", "ours")
    monkeypatch.setattr(cpu, "get_device_communicator_cls", classmethod(lambda cls: "a.b.C"))
    entry.vllm()
    assert cpu.dist_backend == "ours" and cpu.get_device_communicator_cls() == "a.b.C"
    assert "groups, which another plug-in has put on 'ours'" in said()[0]
    assert "another plug-in has put a.b.C in place" in said()[0]


def test_groups_that_nccl_is_to_split_stay(said, cpu, monkeypatch):
    monkeypatch.setenv("VLLM_DISTRIBUTED_USE_SPLIT_GROUP", "1")
    entry.vllm()
    assert cpu.dist_backend == "gloo" and "unset that" in said()[0]


def test_a_platform_that_is_none_of_ours_is_left_alone(said, cpu, monkeypatch):
    monkeypatch.setattr(cpu, "is_cpu", lambda self: False)
    monkeypatch.setattr(cpu, "device_name", "tpu")
    entry.vllm()
    assert "on tpu: nothing; not served: everything" in said()[0] and cpu.dist_backend == "gloo"


def test_on_cuda_each_part_is_served_or_its_lack_is_explained(said, cpu, monkeypatch):
    monkeypatch.setattr(cpu, "is_cpu", lambda self: False)
    monkeypatch.setattr(cpu, "is_cuda", lambda self: True)
    monkeypatch.setattr(cpu, "dist_backend", "nccl")
    own = type("CustomAllreduce", (), {"__module__": vllm.adapters.ALL_REDUCE})
    theirs = module(monkeypatch, vllm.adapters.ALL_REDUCE, CustomAllreduce=own)
    communicator = type("PyNcclCommunicator", (), {"__module__": vllm.adapters.NCCL})
    nccl = module(monkeypatch, vllm.adapters.NCCL, PyNcclCommunicator=communicator)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    for name in ("deep_ep", "deep_ep.utils", "deep_ep.buffer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType("a stand-in"))
        monkeypatch.delitem(sys.modules, name)
    entry.vllm()
    (line,) = said()
    assert cpu.dist_backend == "symmpool" and theirs.CustomAllreduce is vllm.adapters.CustomAllreduce
    assert sys.modules["deep_ep"].__name__ == "symmpool.deep_ep"
    assert issubclass(nccl.PyNcclCommunicator, communicator) and nccl.PyNcclCommunicator is not communicator
    assert "(CustomAllreduce), large sums, gathers, reduce-scatters and messages (PyNcclComm" in line
    assert "within a host, expert managers deepep_high_throughput" in line
    assert "more than 8 MiB that torch's symmetric memory takes; VLLM_ALLREDUCE_USE_SYMM_MEM=0" in line
    assert "not served: fused norms: flashinfer.comm cannot be imported" in line
    assert "Beware: vLLM 0.32.0 was not run with symmpool on CUDA" in line


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC", "1", "has vLLM ask first; unset that"),
        ("VLLM_DISABLE_PYNCCL", "1", "messages (PyNcclCommunicator), as VLLM_DISABLE_PYNCCL is set"),
        ("VLLM_USE_NCCL_SYMM_MEM", "1", "which VLLM_USE_NCCL_SYMM_MEM leaves to NCCL"),
        ("VLLM_ALLREDUCE_USE_SYMM_MEM", "0", None),
        (None, None, "as another plug-in has put a.plug_in in place"),
    ],
)
def test_settings_that_have_vllm_ask_others_are_named(said, cpu, monkeypatch, variable, value, words):
    own = type("CustomAllreduce", (), {"__module__": vllm.adapters.ALL_REDUCE})
    module(monkeypatch, vllm.adapters.ALL_REDUCE, CustomAllreduce=own)
    place = vllm.adapters.NCCL if variable else "a.plug_in"
    communicator = type("PyNcclCommunicator", (), {"__module__": place})
    nccl = module(monkeypatch, vllm.adapters.NCCL, PyNcclCommunicator=communicator)
    monkeypatch.setattr(cpu, "is_cpu", lambda self: False)
    monkeypatch.setattr(cpu, "is_cuda", lambda self: True)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(vllm.adapters, "install", lambda: None)
    monkeypatch.setattr(vllm.deep_ep_names, "put_in_place", lambda report, managers: None)
    if variable:
        monkeypatch.setenv(variable, value)
    entry.vllm()
    (line,) = said()
    if words is None:
        assert "torch's symmetric memory" not in line
        return
    assert words in line
    assert (nccl.PyNcclCommunicator is communicator) is ("PCIE" not in str(variable))


class Base:
    """Stand-in for the parts of vLLM's communicator that ours touches."""

    def __init__(self, cpu_group, device=None, device_group=None, unique_name="", use_all2all=False):
        self.device_group, self.unique_name, self.made_for = device_group, unique_name, unique_name
        self.rank, self.world_size = dist.get_rank(cpu_group), dist.get_world_size(cpu_group)
        self.rank_in_group = self.rank
        self.dist_module, self.supports_tensor_dict = dist, unique_name.startswith(("tp", "pp"))

    def all_reduce(self, input_):
        self.dist_module.all_reduce(input_, group=self.device_group)
        return input_


def communicators(group, folder):
    me, world = begin(group, folder)
    sys.modules[vllm_cpu._THEIRS] = types.SimpleNamespace(CpuCommunicator=Base)
    kind, group = vllm_cpu.CpuCommunicator, dist.group.WORLD
    pipeline = kind(group, torch.device("cpu"), group, "pp:0")
    right = [issubclass(kind, Base), pipeline.dist_module is dist, pipeline.supports_tensor_dict]
    found = kind(cpu_group=group, device=torch.device("cpu"), device_group=group, unique_name="tp:0")
    # vLLM makes shared memory of its own for names that begin so.
    right += [found.unique_name == "tp:0", not found.made_for.startswith("tp")]
    right.append(not found.supports_tensor_dict)
    with torch.inference_mode():
        x = torch.full((3, 8), me + 1.0, dtype=torch.bfloat16)
        right += [found.all_reduce(x) is x, x.tolist() == [[world * (world + 1) / 2] * 8] * 3]
        every, mine = torch.empty(world * 2, 4), torch.full((2, 4), float(me))
        found.dist_module.all_gather_into_tensor(every, mine, group=group)
        right.append(every[:, 0].tolist() == [float(rank) for rank in range(world) for _ in range(2)])
        # Calls of experts under data parallelism, in groups that are not tensor-parallel.
        sizes = [2, 0, 1]
        one, two = pipeline.all_gatherv([mine[: sizes[me]], mine[: sizes[me], :1].contiguous()], 0, sizes)
        right.append(one[:, 0].tolist() == [0.0, 0.0, 2.0] == two[:, 0].tolist())
        right.append(pipeline.all_gatherv(mine)[::2, 0].tolist() == [0.0, 1.0, 2.0])
        part = pipeline.reduce_scatterv(torch.ones(3, 4) * (me + 1), 0, sizes)
        right.append(part.tolist() == [[6.0] * 4] * sizes[me])
        right.append(pipeline.reduce_scatterv(torch.ones(2 * world, 4), 0).tolist() == [[3.0] * 4] * 2)
        with pytest.raises(NotImplementedError, match="dimension 1"):
            pipeline.all_gatherv(mine, 1)
        parts = [torch.empty(2, 4) for _ in range(world)] if me == 1 else None
        found.dist_module.gather(mine, parts, dst=1, group=group)
        right.append(parts is None or [part[0, 0].item() for part in parts] == list(range(world)))
    dist.destroy_process_group()
    return right


def test_vllms_communicator_makes_tensor_parallel_calls_by_ours(tmp_path):
    assert [set(each) for each in values(3, communicators, str(tmp_path))] == [{True}] * 3


def test_sglangs_groups_are_made_on_our_backend(said, monkeypatch):
    module(monkeypatch, "sglang", __version__="0.5.23")
    registered = []

    class HookRegistry:
        register = staticmethod(lambda *hook: registered.append(hook))

    kinds = types.SimpleNamespace(BEFORE="before")
    module(monkeypatch, "sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry, HookType=kinds)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    entry.sglang()
    assert registered == [(sglang._GROUPS, sglang.on_our_backend, "before")]
    assert "serves SGLang 0.5.23 on the CPU: groups (" in said()[0]


@pytest.fixture
def sglang_on_cuda(monkeypatch):
    """SGLang's modules as far as the plug-in touches them, by the package that their names come from. Returns
    what was put in place."""
    module(monkeypatch, "sglang", __version__="0.5.23")
    hooks = types.SimpleNamespace(register=lambda *hook: None)
    kinds = types.SimpleNamespace(BEFORE="before")
    module(monkeypatch, "sglang.srt.plugins.hook_registry", HookRegistry=hooks, HookType=kinds)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(sglang.deep_ep_names, "put_in_place", lambda report, managers: None)
    made = []

    def names_of(all_reduce, nccl):
        for place, name, package in (
            (sglang.adapters.ALL_REDUCE, "dispatch_custom_allreduce", all_reduce),
            (sglang.adapters.NCCL, "PyNcclCommunicator", nccl),
        ):
            module(monkeypatch, place, **{name: types.SimpleNamespace(__module__=package or place)})
        for name in ("install", "install_custom_allreduce", "install_nccl_communicator"):
            monkeypatch.setattr(sglang.adapters, name, lambda name=name: made.append(name))
        return made

    return names_of


def test_on_cuda_each_part_of_sglang_is_served_or_its_lack_is_explained(said, sglang_on_cuda):
    made = sglang_on_cuda(None, None)
    entry.sglang()
    (line,) = said()
    assert made == ["install_custom_allreduce", "install_nccl_communicator", "install"]
    assert "all-reduces (CustomAllReduceV2" in line and "(PyNcclCommunicator) within a host" in line
    assert "not served: fused norms: flashinfer.comm cannot be imported" in line
    assert "Beware: SGLang 0.5.23 was not run with symmpool on CUDA; 0.5.23 on the CPU was" in line


def test_what_another_plug_in_of_sglang_has_put_in_place_stays(said, sglang_on_cuda):
    made = sglang_on_cuda("a.plug_in", "another.plug_in")
    entry.sglang()
    (line,) = said()
    assert made == ["install"]
    assert "has not that), as another plug-in has put a.plug_in in place" in line
    assert "as another plug-in has put another.plug_in in place" in line


def test_the_backend_that_sglang_names_is_replaced_where_it_is_torchs(caplog):
    five = (2, 0, "env://", 0)
    assert sglang.on_our_backend(*five, "gloo", timeout=3) == ((*five, "symmpool"), {"timeout": 3})
    assert sglang.on_our_backend(*five, "nccl", None) == ((*five, "symmpool", None), {})
    assert sglang.on_our_backend(world_size=2) == ((), {"world_size": 2, "backend": "symmpool"})
    assert sglang.on_our_backend(backend="gloo") == ((), {"backend": "symmpool"})
    assert not caplog.records
    assert sglang.on_our_backend(backend="mooncake") == ((), {"backend": "mooncake"})
    assert "'mooncake'" in caplog.records[0].getMessage()


def test_versions_are_compared_by_their_numbers():
    assert [parsed(each) for each in ("0.33", "v0.33.1rc2+cu130", "dev", "")] == [
        (0, 33, 0),
        (0, 33, 1),
        None,
        None,
    ]
    assert [ENGINES["sglang"].problem(each) for each in ("0.5.20", "0.5.23.post1")] == [None, None]
    for version in ("0.5.19", "0.5.24", "0.6.0"):
        assert ENGINES["sglang"].problem(version)
    for engine in ENGINES.values():
        assert engine.problem(engine.oldest) is None and engine.problem(engine.newest) is None
        assert all(engine.problem(each.partition(" ")[0]) is None for each in engine.tested)


def test_the_package_names_the_functions_that_engines_call():
    tomllib = pytest.importorskip("tomllib")
    text = (pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text()
    points = tomllib.loads(text)["project"]["entry-points"]
    for group, function in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        place, _, name = points[group]["symmpool"].partition(":")
        assert name == function and callable(getattr(sys.modules[place], name))
