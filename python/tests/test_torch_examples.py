"""Examples that need a GPU to run compile without one; those that do not are run."""

import ast
import contextlib
import importlib.util
import io
import os
import re
import runpy
import socket
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401, whose import the ranks share
from programs import ends, helps, refusal
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


@pytest.mark.parametrize("name", ["data_parallel", "moe", "triton_all_reduce"])
def test_an_example_without_a_launcher_or_a_gpu_says_what_it_needs(name):
    if name == "triton_all_reduce" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    [(alone, launched)] = values(1, ends, EXAMPLES / f"{name}.py", limit=120)
    assert "torchrun" in alone and "GPU" in launched


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_every_example_describes_itself(name):
    if name == "triton_all_reduce" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    [[(status, shown), (unknown, refused)]] = values(1, helps, EXAMPLES / f"{name}.py", limit=120)
    first = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())).splitlines()[0]
    assert status == 0 and first in shown and "usage:" in shown, shown
    assert unknown == 2 and "--no-such-option" in refused, refused


def run(group, name, arguments, port):
    """Runs an example on a rank. Returns what it printed."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(group.rank), "WORLD_SIZE": str(group.world)}
    sys.argv = [f"{name}.py", "--device", "cpu", *arguments]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert end.value.code == 0, said.getvalue()
    return said.getvalue()


def said(world, name, *arguments):
    """Returns what rank 0 of an example prints. The others must print nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    first, *others = values(world, run, name, arguments, port, limit=180)
    assert others == [""] * (world - 1)
    return first


def losses(text):
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]


def test_a_model_learns_on_all_ranks_and_its_weights_stay_equal():
    text = said(2, "data_parallel", "--steps", "30")
    before, after = losses(text)
    assert after < before / 4 and text.endswith("all ranks have equal weights\n")


def test_a_mixture_of_experts_learns_the_same_on_any_number_of_ranks():
    alone, together = (losses(said(world, "moe", "--steps", "4")) for world in (1, 2))
    assert len(alone) == 4 and alone[-1] < alone[0]
    assert together == pytest.approx(alone, rel=1e-4)
    over_hosts = losses(said(2, "moe", "--steps", "4", "--pretend-hosts", "2"))
    assert over_hosts == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(("name", "option"), [("data_parallel", "--steps"), ("moe", "--steps")])
def test_an_option_that_makes_no_sense_is_named(name, option):
    [[code, words]] = values(1, refusal, EXAMPLES / f"{name}.py", [option, "0"])
    assert code == 2 and f"{option} 0" in words
