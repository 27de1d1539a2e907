"""Programs of several ranks, which share a GPU here (SYMMPOOL_SHARED_DEVICE) beside gloo.

    python -m pytest python/tests/gpu/test_ranks_sharing.py -q

Right or wrong is what is tested: ranks on one GPU take turns. On a GPU each they run beside NCCL, by
torch.distributed.run.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(world, program, *arguments):
    """What the ranks print."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", world, HERE / program, *arguments]
    variables = {**os.environ, "SYMMPOOL_SHARED_DEVICE": "1", "OMP_NUM_THREADS": "1"}
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        command[3:3] = ["--master-port", found.getsockname()[1]]
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=variables, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_everything_with_torchs_signatures():
    said = run(2, "ranks_torch.py")
    assert "ok    data-parallel training, as with NCCL" in said and "WRONG" not in said


@pytest.mark.parametrize("world", [2, 3])
def test_random_programs_on_several_groups(world):
    assert f"programs on {world} ranks" in run(world, "ranks_programs.py", "--count", 20, "--most", 65536)


def test_random_traffic_matrices():
    assert "200 matrices" in run(2, "ranks_matrices.py", "--count", 200)


def test_random_programs_in_a_pools_scope():
    assert ": 0 wrong sums" in run(2, "ranks_mempool.py", 4)
