"""Groups that torchrun starts on two machines, which this one pretends to be, and torch's calls there."""

import os
import socket
import subprocess
import sys

import pytest

from symmpool.groups import agreement

GROUP = """
import symmpool
group = symmpool.Group.from_env(timeout=60)
print(f"rank {group.rank}: {group.hosts()}\\n", end="", flush=True)
"""

TORCH = """
import datetime
import torch
import torch.distributed as dist
import symmpool

dist.init_process_group("cpu:symmpool", timeout=datetime.timedelta(seconds=60))
rank = dist.get_rank()
x = torch.full((8,), rank + 1.0)
dist.all_reduce(x)
y = torch.zeros(1)
if rank == 0:
    dist.send(torch.ones(1), 3)
elif rank == 3:
    dist.recv(y, 0)
within = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
z = torch.full((8,), rank + 1.0)
symmpool.all_reduce(z, group=within)
print(f"rank {rank}: {x[0]:g}, {y[0]:g}, {z[0]:g}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def on_two_machines(tmp_path, program):
    """Returns the output of the ranks of one job on two machines, line by line, and their errors."""
    (tmp_path / "job.py").write_text(program)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    # With a fixed endpoint the ranks of the first machine are the first ones.
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    jobs = []
    for number, name in enumerate(("first", "second")):
        environment = {
            **os.environ,
            "SYMMPOOL_HOST_ID": name,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path),
        }
        given = [*command, "--node-rank", str(number), str(tmp_path / "job.py")]
        pipe = subprocess.PIPE
        jobs.append(subprocess.Popen(given, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        found = [job.communicate(timeout=200) for job in jobs]
    finally:
        for job in jobs:
            job.terminate()
            job.wait()
    assert [job.returncode for job in jobs] == [0, 0], found
    lines = sorted(line for output, _ in found for line in output.splitlines() if line)
    return lines, "".join(errors for _, errors in found)


def test_ranks_of_two_machines_know_their_hosts(tmp_path):
    lines, _ = on_two_machines(tmp_path, GROUP)
    assert lines == [f"rank {rank}: ((0, 1), (2, 3))" for rank in range(4)]


def test_calls_of_torch_cross_hosts(tmp_path):
    lines, errors = on_two_machines(tmp_path, TORCH)
    sums = [(10, 0, 3), (10, 0, 3), (10, 0, 7), (10, 1, 7)]
    assert lines == [f"rank {rank}: {x}, {y}, {z}" for rank, (x, y, z) in enumerate(sums)]
    assert "another backend serves" not in errors, errors
    # Messages go by gloo, as the ranks share no memory.
    assert errors.count("gloo carries messages of a group of 4 ranks") == 1, errors


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([0, 2, 3, 4, 7], "ranks 0, 2-4, 7"),
        (range(99), "ranks 0-98"),
    ],
)
def test_ranks_are_named_in_short(ranks, text):
    assert agreement.named(list(ranks)) == text


def test_equal_reasons_are_said_once():
    found = {0: "symmpool: no memory", 1: "no device", 2: "symmpool: no memory", 3: "symmpool: no memory"}
    assert agreement.reasons(found) == "ranks 0, 2-3: no memory; rank 1: no device"
