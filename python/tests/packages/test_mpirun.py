"""Ranks that Open MPI's and MPICH's mpirun start. `test_launchers.py` has their variables without them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
OPEN_MPI = [BIN.parent / "open-mpi" / "bin" / "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3"]
MPICH = [BIN / "mpiexec.hydra", "-n", "3"]


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


PROGRAM = """
import numpy as np
import symmpool

group = symmpool.Group.from_env(timeout=60)
x = np.full(4, group.rank + 1.0, np.float32)
symmpool.Communicator(symmpool.Pool(group, "cpu")).all_reduce(x)
print(f"rank {group.rank} of {group.world}: {group.hosts()}, {x[0]}\\n", end="", flush=True)
"""


def run(tmp_path, command, program=PROGRAM, **variables):
    """Returns the status, the sorted lines and the errors of a program under mpirun."""
    (tmp_path / "job.py").write_text(program)
    (tmp_path / "store").mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": "/tmp", **variables}
    command = [*map(str, command), sys.executable, str(tmp_path / "job.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    return done.returncode, sorted(filter(None, done.stdout.splitlines())), done.stderr


@pytest.mark.parametrize(
    ("command", "place"),
    [(OPEN_MPI, ""), (MPICH, "port"), (OPEN_MPI, "folder"), (MPICH, "folder")],
    ids=["openmpi", "mpich", "openmpi-folder", "mpich-folder"],
)
def test_ranks_of_mpirun_meet(tmp_path, free_port, command, place):
    where = {"": {}, "port": {"MASTER_PORT": str(free_port)}}
    where["folder"] = {"SYMMPOOL_STORE": f"file://{tmp_path}/store"}
    status, lines, errors = run(tmp_path, command, **where[place])
    assert status == 0, errors
    assert lines == [f"rank {rank} of 3: ((0, 1, 2),), 6.0" for rank in range(3)]


def test_the_doctor_recognises_both(tmp_path):
    program = "import sys\nfrom symmpool.doctor import cli\nsys.exit(cli.main(['--no-torch']))\n"
    for command, name in ((OPEN_MPI, "Open MPI's mpirun"), (MPICH, "the mpirun of MPICH or Intel MPI")):
        status, lines, errors = run(tmp_path, command, program, MASTER_PORT="29500")
        assert status == 0, errors
        text = " ".join(" ".join(lines).split())
        assert name in text and "of 3" in text, text


def test_what_must_be_set_is_said(tmp_path):
    status, _, errors = run(tmp_path, MPICH)
    assert status != 0
    assert "MASTER_PORT is not set" in errors and "MPICH" in errors, errors
