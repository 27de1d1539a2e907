"""Groups as launchers describe them, with the variables of each. `packages/test_mpirun.py` runs mpirun."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import symmpool
from symmpool import _symmpool

SECRET = "a secret of these tests"


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def torchrun(rank, world, port):
    return {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "none",
    }


def open_mpi(rank, world, port):
    return {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": world,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": world,
        "PMIX_RANK": rank,
        "PMIX_NAMESPACE": f"prterun-node-{port}@1",
    }


def mpich(rank, world, port):
    return {
        "PMI_RANK": rank,
        "PMI_SIZE": world,
        "MPI_LOCALRANKID": rank,
        "MPI_LOCALNRANKS": world,
        "MASTER_PORT": port,
    }


def slurm(rank, world, port):
    return {
        "SLURM_PROCID": rank,
        "SLURM_NTASKS": world,
        "SLURM_LOCALID": rank,
        "SLURM_STEP_NUM_NODES": 1,
        "SLURM_STEP_NODELIST": "node7",
        "SLURM_JOB_ID": port,
        "SLURM_STEP_ID": 0,
    }


def worker_set(rank, world, port):
    return {
        "LWS_WORKER_INDEX": rank,
        "LWS_GROUP_SIZE": world,
        "LWS_LEADER_ADDRESS": "127.0.0.1",
        "SYMMPOOL_PORT": port,
    }


def indexed_job(rank, world, port):
    return {
        "JOB_COMPLETION_INDEX": rank,
        "WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


LAUNCHERS = [torchrun, open_mpi, mpich, slurm, worker_set, indexed_job]

PROGRAM = """
import symmpool
from symmpool import _symmpool

group = symmpool.Group.from_env(timeout=60)
launch = _symmpool.launch()
assert (launch["rank"], launch["world"], launch["local_rank"]) == (group.rank, group.world, group.local_rank)
print(group.rank, group.world, group.hosts(), symmpool.Pool(group).world)
"""


def environment(variables):
    """This process's variables without those of launchers, and some more."""
    known = {*_symmpool.launcher_variables(), "MASTER_ADDR", "MASTER_PORT", "SYMMPOOL_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in known}
    return {**kept, **{name: str(value) for name, value in variables.items()}}


def outputs(all_variables, program=PROGRAM):
    """Returns what processes print, each with its variables."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program]
    ranks = [
        subprocess.Popen(command, env=environment(variables), stdout=pipe, stderr=pipe, text=True)
        for variables in all_variables
    ]
    try:
        found = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), found
    return [output.strip() for output, _ in found]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_meet_where_the_launcher_says(launcher, free_port):
    hosts = "((0,), (1,), (2,))" if launcher is worker_set else "((0, 1, 2),)"
    ranks = [launcher(rank, 3, free_port) for rank in range(3)]
    if launcher is worker_set:
        # A pod is a host. Pools do not span these pretended ones.
        ranks = [{**each, "SYMMPOOL_HOST_ID": f"pod-{rank}"} for rank, each in enumerate(ranks)]
        found = outputs(ranks, PROGRAM.replace(", symmpool.Pool(group).world", ", 3"))
    else:
        found = outputs(ranks)
    assert found == [f"{rank} 3 {hosts} 3" for rank in range(3)]


WITHOUT_A_NAME = """
import numpy as np
import symmpool

group = symmpool.Group.from_env(timeout=60)
sums = []
for _ in range(2):
    x = np.full(4, group.rank + 1.0, np.float32)
    symmpool.all_reduce(x)
    sums.append(float(x[0]))
print(sums, symmpool.Pool().world, symmpool.Pool(group).world)
"""


def test_calls_that_name_no_group_use_the_one_that_the_program_made_of_the_environment(free_port):
    ranks = [torchrun(rank, 2, free_port) for rank in range(2)]
    assert outputs(ranks, WITHOUT_A_NAME) == ["[3.0, 3.0] 2 2"] * 2


def test_ranks_of_different_launchers_meet_in_a_folder(tmp_path):
    place = {"SYMMPOOL_STORE": f"file://{tmp_path}"}
    ranks = [{**launcher(rank, 3, 1), **place} for rank, launcher in enumerate((slurm, open_mpi, torchrun))]
    assert outputs(ranks) == [f"{rank} 3 ((0, 1, 2),) 3" for rank in range(3)]


@pytest.fixture
def launched(monkeypatch):
    """Sets this process's variables."""
    for name in set(os.environ) - set(environment({})):
        monkeypatch.delenv(name)

    def launch(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return launch


def refusal():
    """Returns the text that a group of the environment and its description refuse with."""
    with pytest.raises(symmpool.InvalidArgumentError) as described:
        _symmpool.launch()
    with pytest.raises(symmpool.InvalidArgumentError) as made:
        symmpool.Group.from_env(timeout=1)
    assert str(described.value) == str(made.value)
    return str(made.value)


def test_without_a_launcher_the_error_says_how_to_start(launched):
    assert _symmpool.launch() is None
    with pytest.raises(symmpool.InvalidArgumentError, match="start the program by torchrun, srun or mpirun"):
        symmpool.Group.from_env(timeout=1)
    launched({"PET_NNODES": 2})
    with pytest.raises(symmpool.InvalidArgumentError, match="PET_.* variables are for torchrun"):
        symmpool.Group.from_env(timeout=1)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_half_of_a_launcher_and_nonsense_are_named(launched, monkeypatch, launcher):
    whole = launcher(1, 3, 29500)
    launched(whole)
    rank, world = list(whole)[:2]
    for name in (rank, world):
        monkeypatch.delenv(name)
        if (launcher, name) == (indexed_job, rank):
            # The rest is half of another launcher.
            name = "RANK"
        assert f"{name} is not set" in refusal()
        launched(whole)
    for value in ("", " ", "x", "-1", "3", "1e3", "9" * 10240, "\u0663", "1\n2"):
        monkeypatch.setenv(rank, value)
        text = refusal()
        assert f"{rank}=" in text and len(text) < 500, text
    launched(whole)
    for value in ("0", "65537", "4294967296", "three"):
        monkeypatch.setenv(world, value)
        assert f"{world}=" in refusal()


def test_launchers_that_contradict_each_other_are_both_named(launched, monkeypatch):
    launched({**slurm(1, 3, 7), "RANK": 0, "WORLD_SIZE": 1})
    text = refusal()
    assert "RANK=0, WORLD_SIZE=1" in text and "SLURM_PROCID=1, SLURM_NTASKS=3" in text, text
    monkeypatch.setenv("SYMMPOOL_LAUNCHER", "slurm")
    assert _symmpool.launch()["launcher"] == "Slurm's srun"
    monkeypatch.setenv("SYMMPOOL_LAUNCHER", "Slurm")
    assert "one of env, openmpi, mpich, slurm, lws, pmix, kubernetes" in refusal()


def test_the_page_on_hosts_lists_what_is_read():
    page = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text()
    missing = [name for name in _symmpool.launcher_variables() if f"`{name}`" not in page]
    assert not missing
