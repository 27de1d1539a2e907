"""Programs of the benchmarks that need GPUs describe themselves and run on the CPU, as far as they can."""

import ast
import itertools
import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch  # whose import the ranks share
from programs import ends, helps
from ranks import values

PROGRAMS = Path(__file__).parents[2] / "bench/programs"


@pytest.mark.parametrize("name", ["tensor_parallel", "tensor_parallel_fused", "wrong_sums"])
def test_a_program_without_a_launcher_or_a_gpu_says_what_it_needs(name):
    [(alone, launched)] = values(1, ends, PROGRAMS / f"{name}.py", limit=120)
    assert "torchrun" in alone and "GPU" in launched


@pytest.mark.parametrize("name", sorted(path.stem for path in PROGRAMS.glob("*.py")))
def test_every_program_describes_itself(name):
    path = PROGRAMS / f"{name}.py"
    [[(status, shown), (unknown, refused)]] = values(1, helps, path, limit=120)
    first = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
    assert status == 0 and first in shown and "usage:" in shown, shown
    assert unknown == 2 and "--no-such-option" in refused, refused


def tensor_parallel(group, port, report):
    sys.path.insert(0, str(PROGRAMS))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(group.rank), "WORLD_SIZE": str(group.world)}
    small = "--device cpu --dtype float32 --layers 2 --width 64 --heads 4 --vocabulary 128 --batch 2"
    short = f"--length 16 --steps 6 --rounds 1 --json {report}"
    sys.argv = ["tensor_parallel.py", *small.split(), *short.split()]
    import tensor_parallel as program

    program.main()


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
    sys.path.insert(0, str(PROGRAMS))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(group.rank), "WORLD_SIZE": str(group.world)}
    small = "--device cpu --hidden 64 --heads 4 --kv-heads 2 --wide 64 --layers 1 --vocabulary 64 --length 8"
    few = f"--rounds 1 --seconds 0.01 --compared 3 --modes {modes} --programs {programs} --json {report}"
    sys.argv = ["tensor_parallel_fused.py", *small.split(), *few.split()]
    import tensor_parallel_fused as program

    program.main()


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


def test_random_programs_of_wrong_sums_end_in_time_and_are_counted(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import wrong_sums as program

    clock = itertools.count()
    monkeypatch.setattr(program.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(program, "totals", lambda *values: list(values))
    # Every third program has two sums wrong.
    monkeypatch.setattr(program, "program", lambda *of: 2 * (of[3] % 3 == 0))
    allocator = SimpleNamespace(name="some", count_windows=lambda: 7)
    found = program.programs(allocator, 0, 2, 100, None, True)
    assert (found["programs"], found["wrong_programs"], found["wrong_sums"]) == (100, 34, 68)
    assert found["with"] == "some" and found["windows_of_rank_0"] == 7 and found["sizes"] == "any"
    # A second a program, and one more than there is time for.
    assert program.programs(allocator, 0, 2, 100, 9, False)["programs"] == 10
    assert program.programs(allocator, 0, 2, 3, 0, False)["programs"] == 1
    # Rank 0 sends the result to rank 1.
    assert program.programs(allocator, 1, 2, 100, 9, False)["programs"] == 100


def test_sums_that_are_wrong_are_counted(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import wrong_sums as program

    tensors = [torch.empty(1000) for _ in range(5)]
    number = itertools.count()

    def all_reduce(tensor):
        tensor.fill_(3 * (next(number) % 5 + 1 + 7))
        # One element of the second and of the fourth tensor is another's.
        if tensor is tensors[1] or tensor is tensors[3]:
            tensor[999] += 1

    zeros = torch.zeros
    monkeypatch.setattr(program.torch, "zeros", lambda *of, device, **more: zeros(*of, **more))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(program.dist, "barrier", lambda: None)
    monkeypatch.setattr(program.dist, "all_reduce", all_reduce)
    assert program.wrong(tensors, 0, 2, 7) == 2
