"""The documents' programs run as they stand."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

EXAMPLES = {
    ("README.md", "own"): ("[1, 1, 2, 2]", "[1, 1, 2, 2]"),
    ("docs/python.md", "first"): ("3.0", "3.0"),
    ("docs/language.md", "first"): ("3.0", "3.0"),
    ("docs/python.md", "one_sided"): ("[2.0, 2.0, 2.0, 2.0]", "[1.0, 1.0, 1.0, 1.0]"),
}
if importlib.util.find_spec("torch"):
    EXAMPLES["docs/python.md", "rows"] = ("[3.0, 3.0, 0.0, 3.0]", "[6.0, 6.0, 0.0, 6.0]")
    EXAMPLES["README.md", "torch"] = ("3.0", "3.0")


@pytest.mark.parametrize(("document", "name"), EXAMPLES)
def test_programs_print_what_the_documents_say(document, name):
    text = (ROOT / document).read_text()
    program = re.search(rf"<!-- python: {name} -->\n```python\n(.*?)```", text, re.DOTALL)[1]
    lines = [f"rank {rank}: {said}" for rank, said in enumerate(EXAMPLES[document, name])]
    assert f"`{lines[0]}` and `{lines[1]}`" in text
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
    assert said == [f"{line}\n" for line in lines]
