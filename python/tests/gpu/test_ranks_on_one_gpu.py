"""Programs of several ranks, which share a GPU here (SYMMPOOL_SHARED_DEVICE), compared with gloo.

    python -m pytest python/tests/gpu/test_ranks_on_one_gpu.py -q

Only results are tested, not times: ranks on one GPU take turns. With one GPU each they are compared with
NCCL, by torch.distributed.run."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def run(tmp_path):
    """Runs a program of this folder (the launcher's logs go to the test's folder); what they print."""
    return partial(launched, tmp_path)


def launched(logs, world, program, *arguments):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--log-dir", logs]
    variables = {**os.environ, "SYMMPOOL_SHARED_DEVICE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(part) for part in [*launch, "--nproc-per-node", world, HERE / program, *arguments]]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_everything_with_torchs_signatures(run):
    said = run(2, "ranks_torch.py")
    assert "ok    data-parallel training, as with NCCL" in said and "WRONG" not in said


@pytest.mark.parametrize("world", [2, 3])
def test_calls_by_way_of_copies_are_in_order(run, world):
    assert f"calls in order on {world} ranks, 0 wrong" in run(world, "ranks_calls_in_order.py")


@pytest.mark.parametrize("world", [2, 3])
def test_random_programs_on_several_groups(run, world):
    assert f"programs on {world} ranks" in run(world, "ranks_programs.py", "--count", 20, "--most", 65536)


@pytest.mark.parametrize("hosts", ["a,b", "a,a,b,b", "a,b,a"])
def test_collectives_over_pretended_hosts(run, hosts):
    said = run(len(hosts.split(",")), "ranks_over_hosts.py", "--hosts", hosts)
    assert f"calls over hosts {hosts}, 0 wrong" in said


def test_random_traffic_matrices(run):
    assert "200 matrices" in run(2, "ranks_matrices.py", "--count", 200)


def test_random_programs_in_a_pools_scope(run):
    assert ": 0 wrong sums" in run(2, "ranks_mempool.py", 4)


def test_what_engines_call(run):
    said = run(2, "ranks_engines.py")
    assert "ok    CustomAllreduce" in said and "ok    PyNcclCommunicator" in said


def test_what_groups_hold_of_memory(run):
    said = run(2, "ranks_memory.py")
    assert "groups on 2 ranks, 0 wrong" in said and "WRONG" not in said


def test_torchs_symmetric_memory_on_pools(run):
    said = run(2, "ranks_symmetric_memory.py")
    assert "symmetric memory on 2 ranks, 0 wrong" in said and "WRONG" not in said
