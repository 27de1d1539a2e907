"""The example that needs no torch runs where there is none."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SORT = Path(__file__).parents[2] / "examples/sort.py"
#: What a process begins with in which torch cannot be imported.
WITHOUT_TORCH = "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
WITHOUT_TORCH += "runpy.run_path(sys.argv[0], run_name='__main__')"


def start(*arguments, **variables):
    """Starts the example with the variables of a launcher."""
    variables |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TORCH, str(SORT), *arguments],
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process):
    """The exit status of a process, and what it printed."""
    try:
        said, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    return process.returncode, said + errors


@pytest.mark.parametrize(("world", "count"), [(1, 10), (2, 1), (3, 1000)])
def test_numbers_are_sorted_over_the_ranks(world, count):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    launched = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [start("--count", str(count), RANK=str(rank), **launched) for rank in range(world)]
    ended = [end(rank) for rank in ranks]
    assert [status for status, _ in ended] == [0] * world, ended
    held = [re.fullmatch(rf"rank {rank} has (\d+) of (\d+) numbers, from .*\n", said)
            for rank, (_, said) in enumerate(ended)]  # fmt: skip
    assert all(held), ended
    assert {int(each[2]) for each in held} == {world * count} == {sum(int(each[1]) for each in held)}


def test_it_describes_itself_and_says_what_it_needs():
    status, said = end(start("--help"))
    assert status == 0 and "without torch" in said and "usage:" in said
    assert "RANK is not set" in end(start())[1]
    status, said = end(start("--count", "0", RANK="0"))
    assert status == 2 and "--count 0" in said
    status, said = end(start("--no-such-option"))
    assert status == 2 and "--no-such-option" in said
