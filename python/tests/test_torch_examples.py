"""Examples that need a GPU to run compile without one; those that do not are run."""

import ast
import contextlib
import importlib.util
import io
import itertools
import json
import os
import runpy
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch  # whose import the ranks share
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


@pytest.mark.parametrize(
    "name", ["tensor_parallel", "tensor_parallel_fused", "triton_all_reduce", "wrong_sums"]
)
def test_an_example_without_a_launcher_or_a_gpu_says_what_it_needs(name):
    if name == "triton_all_reduce" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    [(alone, launched)] = values(1, ends_of_an_example, name, limit=120)
    assert "torchrun" in alone and "GPU" in launched


def helps(group, name):
    """Returns the --help of an example, and how the example ends without an argument that it knows."""
    sys.path.insert(0, str(EXAMPLES))
    shown = []
    for argument in ("--help", "--no-such-option"):
        sys.argv = [f"{name}.py", argument]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
            except SystemExit as end:
                shown.append((end.code, out.getvalue() + err.getvalue()))
    return shown


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_every_example_describes_itself(name):
    if name == "triton_all_reduce" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    [[(status, shown), (unknown, refused)]] = values(1, helps, name, limit=120)
    first = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())).splitlines()[0]
    assert status == 0 and first in shown and "usage:" in shown, shown
    assert unknown == 2 and "--no-such-option" in refused, refused


def ends_of_an_example(group, name):
    """With what words the program ends where nobody launched it, and where a launcher did."""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [f"{name}.py"]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    ends = []
    for launched in ({}, {"RANK": "0", "LOCAL_RANK": "0"}):
        for variable in ("RANK", "LOCAL_RANK"):
            os.environ.pop(variable, None)
        os.environ |= launched
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        ends.append(end.value.code)
    return ends


def tensor_parallel(group, port, report):
    sys.path.insert(0, str(EXAMPLES))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(group.rank), "WORLD_SIZE": str(group.world)}
    small = "--device cpu --dtype float32 --layers 2 --width 64 --heads 4 --vocabulary 128 --batch 2"
    short = f"--length 16 --steps 6 --rounds 1 --json {report}"
    sys.argv = ["tensor_parallel.py", *small.split(), *short.split()]
    import tensor_parallel as example

    example.main()


def test_a_transformer_in_parts_learns_the_same_with_gloo_and_with_ours(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    values(2, tensor_parallel, port, str(tmp_path / "report"))
    report = json.loads((tmp_path / "report").read_text())
    assert report["agree"]
    assert report["world"] == 2 and str(tmp_path) not in json.dumps(report)
    theirs, ours = report["results"]
    assert (theirs["with"], ours["with"]) == ("gloo", "symmpool")
    assert ours["last_loss"] == theirs["last_loss"] < theirs["first_loss"] and ours["apart"] == 0
    assert ours["tokens_a_second"] > 0


def fused_calls(group, port, report, modes, programs):
    sys.path.insert(0, str(EXAMPLES))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(group.rank), "WORLD_SIZE": str(group.world)}
    small = "--device cpu --hidden 64 --heads 4 --kv-heads 2 --wide 64 --layers 1 --vocabulary 64 --length 8"
    few = f"--rounds 1 --seconds 0.01 --compared 3 --modes {modes} --programs {programs} --json {report}"
    sys.argv = ["tensor_parallel_fused.py", *small.split(), *few.split()]
    import tensor_parallel_fused as example

    example.main()


@pytest.mark.parametrize(
    ("world", "mode", "programs"),
    [
        (1, "eager", "decode,training"),
        (2, "eager", "decode,prefill,training"),
        (2, "compiled", "prefill"),
    ],
)
def test_a_llama_in_parts_gives_the_same_losses_with_fused_calls(world, mode, programs, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    arguments = (port, str(tmp_path / "report"), mode, programs)
    values(world, fused_calls, *arguments, limit=500)
    report = json.loads((tmp_path / "report").read_text())
    assert report["agree"] and not report["missing"] and str(tmp_path) not in json.dumps(report)
    assert [entry["program"] for entry in report["results"]] == programs.split(",")
    for entry in report["results"]:
        assert list(entry["figures"]) == report["contenders"] == ["gloo", "symmpool", "fused"]
        assert entry["mode"] == mode and all(
            each["tokens_a_second"] > 0 for each in entry["figures"].values()
        )
        # Two gathers and two scattered sums a layer.
        assert entry.get("fused_calls") == (4 if mode == "compiled" else None)


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


def test_random_programs_of_wrong_sums_end_in_time_and_are_counted(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import wrong_sums as example

    clock = itertools.count()
    monkeypatch.setattr(example.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(example, "totals", lambda *values: list(values))
    # Every third program has two sums wrong.
    monkeypatch.setattr(example, "program", lambda *of: 2 * (of[3] % 3 == 0))
    allocator = SimpleNamespace(name="some", count_windows=lambda: 7)
    found = example.programs(allocator, 0, 2, 100, None, True)
    assert (found["programs"], found["wrong_programs"], found["wrong_sums"]) == (100, 34, 68)
    assert found["with"] == "some" and found["windows_of_rank_0"] == 7 and found["sizes"] == "any"
    # A second a program, and one more than there is time for.
    assert example.programs(allocator, 0, 2, 100, 9, False)["programs"] == 10
    assert example.programs(allocator, 0, 2, 3, 0, False)["programs"] == 1
    # Rank 0 sends the result to rank 1.
    assert example.programs(allocator, 1, 2, 100, 9, False)["programs"] == 100


def test_sums_that_are_wrong_are_counted(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import wrong_sums as example

    tensors = [torch.empty(1000) for _ in range(5)]
    number = itertools.count()

    def all_reduce(tensor):
        tensor.fill_(3 * (next(number) % 5 + 1 + 7))
        # One element of the second and of the fourth tensor is another's.
        if tensor is tensors[1] or tensor is tensors[3]:
            tensor[999] += 1

    zeros = torch.zeros
    monkeypatch.setattr(example.torch, "zeros", lambda *of, device, **more: zeros(*of, **more))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(example.dist, "barrier", lambda: None)
    monkeypatch.setattr(example.dist, "all_reduce", all_reduce)
    assert example.wrong(tensors, 0, 2, 7) == 2
