"""Examples that need a GPU to run compile without one; those that do not are run."""

import ast
import importlib.util
import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401, whose import the ranks share
from programs import ends, helps
from ranks import values

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_example_compiles(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sys.modules.pop("triton_all_reduce", None)
    import triton_all_reduce as example

    constants = {"WORLD": 4, "BLOCK": example.BLOCK, "PROGRAMS": 64, "TRIES": 100}
    signature = {"buffers": "*i64", "pads": "*i64", "out": "*bf16", "count": "i32", "rank": "i32"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=example.sum_of_all, signature=signature, constexprs=constants, attrs={})
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "atom.global.release.sys.cas" in text and "atom.global.acquire.sys.cas" in text


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_example_without_a_launcher_or_a_gpu_says_what_it_needs():
    [(alone, launched)] = values(1, ends, EXAMPLES / "triton_all_reduce.py", limit=120)
    assert "torchrun" in alone and "GPU" in launched


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_every_example_describes_itself(name):
    if name == "triton_all_reduce" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    [[(status, shown), (unknown, refused)]] = values(1, helps, EXAMPLES / f"{name}.py", limit=120)
    first = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())).splitlines()[0]
    assert status == 0 and first in shown and "usage:" in shown, shown
    assert unknown == 2 and "--no-such-option" in refused, refused


def moe(group, port, report):
    sys.path.insert(0, str(EXAMPLES))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(group.rank), "WORLD_SIZE": str(group.world)}
    small = "--device cpu --hidden 64 --heads 4 --layers 2 --experts 8 --top-k 2 --words 64"
    sys.argv = ["moe.py", *f"{small} --batch 2 --length 16 --steps 4 --json {report}".split()]
    import moe as example

    return example.main()


def test_a_mixture_of_experts_learns_the_same_in_every_way(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert values(2, moe, port, str(tmp_path / "report"), limit=180) == [0, 0]
    report = json.loads((tmp_path / "report").read_text())
    assert set(report) == {"symmpool", "all-to-all", "all-gather"}
    assert all(len(set(each["losses"])) == 5 and each["decoded"] > 0 for each in report.values())
