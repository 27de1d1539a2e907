"""The README's example runs as it stands."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


EXAMPLES = ["first", "torch"] if importlib.util.find_spec("torch") else ["first"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_print_what_the_readme_says(name):
    text = README.read_text()
    program = re.search(rf"<!-- python: {name} -->\n```python\n(.*?)```", text, re.DOTALL)[1]
    assert "`rank 0: 3.0` and `rank 1: 3.0`" in text
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert said == ["rank 0: 3.0\n", "rank 1: 3.0\n"]
