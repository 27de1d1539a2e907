"""`python -m symmpool doctor`: its facts here, and its verdicts on machines that are not here."""

import copy
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import symmpool
from symmpool import _symmpool
from symmpool.doctor import cli, facts, verdicts

DEVICE = {
    "error": None,
    "name": "NVIDIA H200",
    "uuid": "GPU-0",
    "driver": 13000,
    "free_bytes": 139 << 30,
    "total_bytes": 140 << 30,
    "granularity": 2 << 20,
    "posix_fd": True,
    "fabric": False,
    "fabric_why": "advertised but refused (operation not permitted)",
}
#: A machine with four devices, and torch.
GOOD = {
    "symmpool": "0.1.0",
    "commit": None,
    "system": {"kernel": "6.1", "machine": "x86_64", "python": "3.12.3", "cpus": 64},
    "memory": {
        "available_bytes": 500 << 30,
        "cgroup_bytes": None,
        "address_space_bytes": None,
        "file_bytes": None,
        "open_files": 1 << 20,
        "mappings": 65530,
        "memfd_error": None,
        "reserve_error": None,
    },
    "torch": {
        "version": "2.11.0",
        "error": None,
        "served": ["2.7.0", "2.15.0"],
        "tested": ["2.11.0", "2.15.0"],
        "problem": None,
        "python_backends": False,
        "cuda": "13.0",
        "devices": 4,
        "distributed": True,
        "nccl": True,
        "gloo": True,
        "fast_exchange": True,
        "allocator": {
            "pluggable": True,
            "mempool": True,
            "backend": "native",
            "install_error": None,
        },
    },
    "cuda": {
        "error": None,
        "devices": [{**DEVICE, "ordinal": at} for at in range(4)],
        "links": [["-" if a == b else "NV18" for b in range(4)] for a in range(4)],
        "mesh": "fully connected (18 links)",
    },
    "communicators": {
        "error": None,
        "bytes": [397 << 20, 397 << 20],
        "growing_bytes": [16 << 20, 405 << 20],
    },
    "host_error": None,
    "nvrtc": {"error": None, "version": (13, 0), "place": "/lib/libnvrtc.so.13", "archs": [90]},
    "kernel_cache": {"place": "/home/u/.cache/symmpool/jit", "error": None},
    "nccl": {"version": [2, 28, 9], "error": None, "place": "libnccl.so.2", "windows": True},
    "triton": {"version": "3.6.0", "error": None},
    "engines": {
        "vllm": {
            "name": "vLLM",
            "served": ["0.16.0", "0.33.0"],
            "tested": ["0.32.0 on the CPU"],
            "installed": "0.32.0",
            "problem": None,
        }
    },
    "launcher": {"executable": "/usr/bin/python3", "RANK": "0"},
    "launch": dict.fromkeys(("launcher", "rank", "world", "local_rank", "rendezvous", "error")),
    "variables": {"wrong": {}, "unknown": []},
}


def verdict(change, part):
    """Returns the verdict on what contains `part`, after a change of the good machine."""
    machine = copy.deepcopy(GOOD)
    change(machine)
    (found,) = [each for each in verdicts.judge(machine) if part in each.what]
    assert found.why
    return found.works


def test_everything_works_on_a_good_machine():
    said = {each.what: each.works for each in verdicts.judge(GOOD)}
    assert said == {
        "pools and collectives in host memory": True,
        "pools on CUDA devices": True,
        "collectives between the devices of this machine": True,
        "device memory shared across machines": False,
        "kernels for devices": True,
        "tensors of torch": True,
        "torch's allocations in a pool (with pool:)": True,
        "all of torch's CUDA memory (symmpool.install())": True,
        "Triton on handles of symmetric memory": True,
        "in vLLM": True,
        "backend of torch.distributed": True,
        "windows registered with NCCL": None,
    }
    text = "\n".join(cli.report(GOOD, verdicts.judge(GOOD)))
    for word in (
        "4 x NVIDIA H200",
        "NV18",
        "2.28.9",
        "139.0 GiB of 140.0 GiB",
        "RANK=0",
        "13.0",
        "405 MiB",
        "397 MiB",
        "16 MiB",
    ):
        assert word in text, text
    assert max(map(len, text.splitlines())) <= cli.WIDTH


def test_the_environment_says_what_communicators_take(monkeypatch):
    assert facts.collect()["communicators"]["growing_bytes"] == [16 << 20, 405 << 20]
    monkeypatch.setenv("SYMMPOOL_DEVICE_MEMORY", "96M,24M")
    held = facts.collect()["communicators"]
    assert held.pop("held") == []
    assert held == {"error": None, "bytes": [96 << 20, 24 << 20], "growing_bytes": None}
    text = "\n".join(cli.report({**GOOD, "communicators": held}, verdicts.judge(GOOD)))
    assert "96 MiB of a device, each further one of a process 24 MiB" in text


@pytest.mark.parametrize(
    ("part", "change", "works"),
    [
        ("host memory", lambda m: m["memory"].update(memfd_error="not permitted"), False),
        ("host memory", lambda m: m["memory"].update(reserve_error="no memory"), False),
        ("many segments", lambda m: m["memory"].update(open_files=256), None),
        ("many ranks", lambda m: m["memory"].update(address_space_bytes=1 << 40), None),
        ("large pools", lambda m: m["memory"].update(cgroup_bytes=100 << 20), None),
        ("pools on CUDA", lambda m: m["cuda"].update(error="no driver", devices=[]), False),
        ("pools on CUDA", lambda m: m["cuda"].update(devices=[]), False),
        ("pools on CUDA", lambda m: m["cuda"]["devices"][1].update(error="lost"), None),
        ("pools on CUDA", lambda m: [d.update(driver=12020) for d in m["cuda"]["devices"]], False),
        ("pools on CUDA", lambda m: [d.update(posix_fd=False) for d in m["cuda"]["devices"]], False),
        ("between the devices", lambda m: m["cuda"].update(devices=[DEVICE]), False),
        ("between the devices", lambda m: m["cuda"]["devices"][2].update(posix_fd=False), False),
        ("between the devices", lambda m: m["cuda"].update(devices=[DEVICE] * 9), None),
        ("across machines", lambda m: [d.update(fabric=True) for d in m["cuda"]["devices"]], True),
        ("kernels", lambda m: m["nvrtc"].update(error="no NVRTC"), False),
        ("kernels", lambda m: m["kernel_cache"].update(error="not writable"), None),
        ("tensors", lambda m: m["torch"].update(version=None, error="no module"), False),
        ("tensors", lambda m: m["torch"].update(cuda=None), None),
        ("tensors", lambda m: m["torch"].update(fast_exchange=False), True),
        ("with pool", lambda m: m["torch"].update(version=None, error="no module"), False),
        ("with pool", lambda m: m["torch"].update(cuda=None), False),
        ("with pool", lambda m: m["torch"]["allocator"].update(mempool=False), False),
        ("with pool", lambda m: m["torch"]["allocator"].update(backend="cudaMallocAsync"), False),
        ("with pool", lambda m: m["cuda"].update(devices=[]), False),
        ("install", lambda m: m["torch"].update(version=None, error="no module"), False),
        ("install", lambda m: m["torch"]["allocator"].update(pluggable=False), False),
        ("install", lambda m: m["torch"]["allocator"].update(install_error="no name"), False),
        ("install", lambda m: m["torch"]["allocator"].update(mempool=False), True),
        ("Triton", lambda m: m["triton"].update(version=None, error="not installed"), False),
        ("in vLLM", lambda m: m["engines"]["vllm"].update(problem="vLLM 1.0.0 is newer than 0.33.0"), False),
        ("Triton", lambda m: m["torch"].update(version=None, error="no module"), False),
        ("Triton", lambda m: m["cuda"].update(devices=[]), False),
        ("_PORT", lambda m: m["variables"]["wrong"].update(SYMMPOOL_PORT="'x': expected a port"), False),
        ("_REDUCTION", lambda m: m["variables"]["unknown"].append("SYMMPOOL_REDUCTION"), None),
        ("backend", lambda m: m["torch"].update(distributed=False), False),
        ("backend", lambda m: m["torch"].update(nccl=False, gloo=False), None),
        ("backend", lambda m: m["torch"].update(problem="torch 2.6 is older than 2.7.0"), False),
        ("backend", lambda m: m["torch"].update(problem="torch 2.16 is newer than 2.15.0"), None),
        ("NCCL", lambda m: m["nccl"].update(version=None, error="no library"), False),
        ("NCCL", lambda m: m["nccl"].update(version=[2, 26, 5]), False),
        ("NCCL", lambda m: m["nccl"].update(version=[2, 30, 7]), True),
        ("NCCL", lambda m: m["cuda"].update(devices=[]), False),
    ],
)
def test_what_is_missing_is_reported(part, change, works):
    assert verdict(change, part) is works


def run(*options, **variables):
    command = [sys.executable, "-m", "symmpool", "doctor", *options]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_this_machine_is_reported_as_a_table_and_as_json():
    table = run("--no-torch")
    assert table.returncode == 0, table.stderr
    assert "What will work:" in table.stdout and "memfd works" in table.stdout
    whole = json.loads(run("--no-torch", "--json").stdout)
    assert set(GOOD) == set(whole["facts"])
    assert whole["verdicts"][0]["works"] is True
    assert whole["facts"]["torch"]["error"] == "not asked for"


def test_whoever_reads_the_table_may_stop():
    command = f"{sys.executable} -m symmpool doctor --no-torch | true; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert found.stderr == "" and found.returncode in (0, 141)


def test_the_report_says_what_is_held_and_what_has_no_room():
    memory = {"device": "cuda:0", "total": 16 << 20, "wanted": 389 << 20}
    held = [{"group": "tp", **memory}, {"group": "dp", **memory, "wanted": 0}]
    growing = {"error": None, "bytes": [397 << 20, 16 << 20], "growing_bytes": [16 << 20, 405 << 20]}
    full = dict(GOOD["cuda"]["devices"][0], free_bytes=400 << 20)
    whole = {**GOOD, "communicators": {**growing, "held": held}, "cuda": {**GOOD["cuda"], "devices": [full]}}
    text = "\n".join(cli.report(whole, verdicts.judge(whole)))
    assert re.search(r"held for tp +16.0 MiB of cuda:0, and wants 389 MiB more for large calls", text)
    assert re.search(r"held for dp +16.0 MiB of cuda:0\n", text)
    assert re.search(r"memory of cuda:0 +has no room for 405 MiB: large calls take up to 2.5 times", text)
    assert "how a call is made" in text and "explain" in text
    roomy = {**whole, "communicators": growing, "cuda": GOOD["cuda"]}
    text = "\n".join(cli.report(roomy, verdicts.judge(roomy)))
    assert "has no room for" not in text and "held for" not in text


def test_facts_are_had_without_raising(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("SYMMPOOL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("SYMMPOOL_NVRTC", "/no/such/library")
    found = facts.collect(with_torch=False)
    assert found["kernel_cache"]["error"] and "/no/such/library" in found["nvrtc"]["error"]
    monkeypatch.setenv("SYMMPOOL_CACHE_DIR", "")
    assert facts.collect(with_torch=False)["kernel_cache"]["place"] is None


def test_wrong_variables_are_reported_as_a_table_and_as_json():
    wrong = {
        "SYMMPOOL_ALL_REDUCE": "fastest",
        "SYMMPOOL_ALL_TO_ALL": "Direct",
        "SYMMPOOL_BROADCAST": "copy",
        "SYMMPOOL_NVRTC": "/no/such/library",
        "SYMMPOOL_CACHE_DIR": __file__,
        "SYMMPOOL_PORT": "0",
        "SYMMPOOL_HOST_ID": "node 7",
        "SYMMPOOL_STORE": "/scratch",
        "SYMMPOOL_CONCURRENT": "17",
        "SYMMPOOL_SM_BUDGET": "1",
        "SYMMPOOL_READY": "bf16,f32:xor",
        "SYMMPOOL_SHARED_DEVICE": "yes",
        "SYMMPOOL_BACKEND_OVER_HOSTS": "yes",
        "MASTER_ADDR": " ",
        "MASTER_PORT": "http",
        "LOCAL_RANK": "-1",
        "WORLD_SIZE": "2.5",
        "RANK": "",
    }
    given = {**wrong, "SYMMPOOL_ALLREDUCE": "one_shot", "SYMMPOOL_SECRET": "hunter2"}
    table = run("--no-torch", **given).stdout
    whole = run("--no-torch", "--json", **given).stdout
    assert "hunter2" not in table + whole
    said = {each["what"]: each for each in json.loads(whole)["verdicts"]}
    for name, value in wrong.items():
        found = said[f"variable {name}"]
        assert found["works"] is False and repr(value) in found["why"], found
        assert f"variable {name} " in table
    assert said["variable SYMMPOOL_ALLREDUCE"]["works"] is None
    right = {
        "SYMMPOOL_ALL_REDUCE": "one_shot",
        "SYMMPOOL_ALL_TO_ALL": "",
        "SYMMPOOL_REDUCE_SCATTER": "pipeline",
        "SYMMPOOL_ALL_GATHER": "copy",
        "SYMMPOOL_BROADCAST": "pipeline",
        "SYMMPOOL_NVRTC": __file__,
        "SYMMPOOL_CACHE_DIR": "",
        "SYMMPOOL_PORT": " 7000",
        "SYMMPOOL_HOST_ID": "node-7.example.org",
        "SYMMPOOL_LAUNCHER": "env",
        "SYMMPOOL_CONCURRENT": "2",
        "SYMMPOOL_SM_BUDGET": "16",
        "SYMMPOOL_READY": "bf16, i64:max",
        "SYMMPOOL_SHARED_DEVICE": "1",
        "SYMMPOOL_BACKEND_OVER_HOSTS": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "RANK": "2",
    }
    assert "variable" not in run("--no-torch", **right).stdout
    (found,) = json.loads(run("--no-torch", "--json", **{**right, "RANK": "3"}).stdout)["verdicts"][-1:]
    assert found["what"] == "variable RANK" and "from 0 to 2" in found["why"]


def test_the_launcher_is_recognised():
    slurm = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "16",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "node[07-10]",
        "MASTER_PORT": "29500",
    }
    what = "the group that the launcher describes (Group.from_env)"

    def said(**variables):
        whole = json.loads(run("--no-torch", "--json", **variables).stdout)
        return [each for each in whole["verdicts"] if each["what"] == what], whole["facts"]["launch"]

    (found,), launch = said(**slurm)
    assert found["works"] is True
    assert found["why"] == "Slurm's srun: rank 5 of 16, 1 on its machine; ranks meet at node07:29500"
    assert launch["launcher"] == "Slurm's srun" and launch["error"] is None
    assert "SLURM_PROCID=5" in run("--no-torch", **slurm).stdout
    (found,), launch = said(**slurm, RANK="0", WORLD_SIZE="1")
    assert found["works"] is False
    assert "RANK=0, WORLD_SIZE=1" in found["why"] and "SLURM_PROCID=5" in found["why"], found
    (found,), _ = said(SLURM_NTASKS="16")
    assert found["works"] is False and "SLURM_PROCID is not set" in found["why"], found
    assert said()[0] == []


def test_variables_that_the_documents_tell_of_are_known():
    text = (pathlib.Path(__file__).parents[2] / "docs/gpus.md").read_text()
    observed = set(re.findall(r"^\| `(SYMMPOOL_\w+)` \|", text, re.MULTILINE))
    assert len(observed) > 4 and observed <= set(facts.SHOWN)


def test_reductions_that_can_be_ready_are_those_that_devices_have():
    sources = pathlib.Path(__file__).parents[2] / "collectives/src/types"
    names = {
        file: set(re.findall(r'Self::\w+ => "(\w+)"', (sources / file).read_text()))
        for file in ("dtype.rs", "reduce_op.rs")
    }
    assert set(facts.REDUCED) <= names["dtype.rs"] and set(facts.OPERATIONS) == names["reduce_op.rs"]
    assert len(facts.REDUCED) == 10


def test_the_report_says_if_kernels_are_not_kept():
    table = run("--no-torch", SYMMPOOL_CACHE_DIR="").stdout
    (line,) = [line for line in table.splitlines() if line.startswith("compiled kernels")]
    assert "not kept (SYMMPOOL_CACHE_DIR is empty" in line and "None" not in line


def test_what_variables_may_be_is_what_the_package_takes():
    (group,) = symmpool.Group.in_process(1)
    with pytest.raises(symmpool.InvalidArgumentError) as raised:
        symmpool.Communicator(symmpool.Pool(group, "cpu"), all_to_all="none")
    assert str(raised.value).endswith(f"is none of {', '.join(_symmpool.all_to_all_algorithms())}")
    with pytest.raises(symmpool.InvalidArgumentError, match=f"{facts.MAX_RANKS}\\b"):
        symmpool.Group(0, facts.MAX_RANKS + 1, "127.0.0.1:1")


def test_what_torch_offers_to_allocators_is_found_out():
    torch = pytest.importorskip("torch")
    found = facts.torch_facts()["allocator"]
    assert found["pluggable"] == hasattr(torch._C, "_cuda_customAllocator")
    if found["pluggable"]:
        assert found["mempool"] and found["install_error"] is None
        assert found["backend"] in ("native", "cudaMallocAsync", "pluggable")


def test_long_lists_of_what_was_tried_are_not_in_the_table():
    assert cli.brief("symmpool: no driver; tried a, b, c") == "no driver"
    assert cli.brief("no NVRTC; tried a, b. Install it") == "no NVRTC. Install it"
    assert cli.brief("plain") == "plain"


def test_versions_of_torch_are_named():
    pytest.importorskip("torch")
    found = facts.torch_facts()
    assert found["problem"] is None, "this version of torch is newer or older than what was tested"
    assert "2.7.0 or newer; 2.11.0, 2.13.0, 2.14.0, 2.15.0 were tested" in cli.torch_row(found)
    assert cli.torch_row({"version": None, "error": "no module"}) == "no module"
