"""Tests of `bench/record_gpu` without a GPU, with programs that only print what real ones print."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "record_gpu"
sys.path.insert(0, str(SCRIPT.parent))
_loader = SourceFileLoader("record_gpu", str(SCRIPT))
record_gpu = importlib.util.module_from_spec(importlib.util.spec_from_loader("record_gpu", _loader))
_loader.exec_module(record_gpu)


@pytest.fixture(autouse=True)
def no_folder_remains(monkeypatch, tmp_path):
    monkeypatch.setattr(record_gpu.tempfile, "tempdir", str(tmp_path))


#: Takes the place of every program, of Python too: it writes a report where `--json` says, and prints a line.
FAKE = """#!{python}
import json, os, subprocess, sys, time
arguments = sys.argv[1:]
words = [os.path.basename(word) for word in [sys.argv[0], *arguments]]
said = " ".join(words)
with open({calls!r}, "a") as file:
    file.write(said + "\\n")
for word, action in json.loads({actions!r}).items():
    if word in said:
        print("about to", action, flush=True)
        if action == "hang":
            # Launchers do so: they start a child in a session of its own, which ignores requests to
            # end.
            deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
            child = subprocess.Popen([{python!r}, "-c", deaf], start_new_session=True)
            with open({calls!r} + ".pid", "w") as file:
                file.write(str(child.pid))
            time.sleep(600)
        if action == "skip":
            print("skipped: no CUDA device")
            sys.exit(0)
        if action == "nothing":
            sys.exit(0)
        sys.exit(int(action))
if "--json" in arguments:
    path = arguments[arguments.index("--json") + 1]
    report = {{"driver": None, "environment": {{"CUDA_HOME": "/usr/local/cuda"}}, "results": [words[0]]}}
    with open(path, "w") as file:
        json.dump(report, file)
print("in /somewhere/else/file.py at 1.5 GB/s")
print("everything was right")
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Runs the script where there are two devices; `actions` say which programs do what else."""
    folder = tmp_path / "programs"
    folder.mkdir()
    calls = folder / "calls"

    def write(name, text):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    def run(*arguments, actions=None, device="NVIDIA H200", count=2):
        text = FAKE.format(python=sys.executable, calls=str(calls), actions=json.dumps(actions or {}))
        for name in ("cuda_collectives", "bench_commit", "cuda_check", "on_a_stream", "python9"):
            write(name, text)
        write("nvidia-smi", "#!/bin/sh\n" + f"echo '{device}, 580.1'\n" * count)
        calls.unlink(missing_ok=True)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        given = ["--ranks", "2", "--programs", str(folder), "--python", str(folder / "python9")]
        given += ["--results", str(tmp_path / "results"), "--logs", str(tmp_path / "logs")]
        return record_gpu.main([*given, *arguments])

    run.results, run.calls = tmp_path / "results", calls
    return run


def everything():
    return [it.name for it in record_gpu.measurements()]


def test_one_command_records_everything(machine, capsys):
    assert machine() == 0
    output = capsys.readouterr().out
    names = sorted(path.name for path in machine.results.iterdir())
    expected = {f"h200x2_{name}.json" for name in everything()}
    checks = {it.name for it in record_gpu.measurements() if it.kind == "log"}
    expected -= {f"h200x2_{name}.json" for name in [*checks, "ranks", "pool", "install"]}
    expected |= {"h200x2_ranks2.json", "h200x2_pool2.json", "h200x1_install.json", "h200x2_checks.log"}
    assert names == sorted(expected)
    assert f"{len(everything())} recorded" in output and "FAILED" not in output
    report = json.loads((machine.results / "h200x2_allreduce.json").read_text())
    assert report["devices"] == ["NVIDIA H200"] * 2 and report["driver"] == "580.1"
    assert report["measured_at"][:2] == "20" and report["took_s"] >= 0
    # The program's own results are kept.
    assert report["results"] == ["python9"]
    assert "--eager --sizes 1K,4K" in report["command"] and report["command"].startswith("python -m torch")
    assert json.loads((machine.results / "h200x1_install.json").read_text())["devices"] == ["NVIDIA H200"]
    assert json.loads((machine.results / "h200x2_pool2.json").read_text())["results"]["results"]


def test_nothing_recorded_names_folders_of_the_machine(machine, tmp_path):
    machine()
    for path in machine.results.iterdir():
        text = path.read_text()
        for folder in (str(tmp_path), str(record_gpu.ROOT), "/usr/local", "/somewhere", "master-port"):
            assert folder not in text, path
    checks = (machine.results / "h200x2_checks.log").read_text()
    assert "in file.py at 1.5 GB/s" in checks


def test_a_failure_does_not_keep_the_others_away(machine, capsys):
    actions = {"bench_commit": "3", "measure_windows": "nothing", "killed": "7", "measure_host": "skip"}
    assert machine("--only", "host,commit,windows,killed,matrices", actions=actions) == 1
    output = capsys.readouterr().out
    assert "FAILED commit: exit status 3" in output and "| about to 3" in output
    assert "FAILED windows: it wrote no report" in output and "FAILED killed: exit status 7" in output
    assert "FAILED host: skipped: no CUDA device" in output
    assert [path.name for path in machine.results.iterdir()] == ["h200x2_checks.log"]
    checks = (machine.results / "h200x2_checks.log").read_text()
    assert "$ cuda_collectives killed --ranks 2\n" in checks and ": rc 7 after" in checks
    assert ": rc 0 after" in checks


def test_checks_that_were_skipped_are_not_noted(machine, capsys):
    assert machine("--only", "matrices", actions={"ranks_matrices": "skip"}) == 1
    assert "FAILED matrices: skipped" in capsys.readouterr().out and not list(machine.results.iterdir())


def test_what_hangs_is_ended_with_all_that_it_started(machine, monkeypatch, capsys):
    monkeypatch.setattr(record_gpu, "GRACE", 1)
    usual = record_gpu.measurements()
    for it in usual:
        it.deadline = 2
    monkeypatch.setattr(record_gpu, "measurements", lambda: usual)
    began = time.monotonic()
    assert machine("--only", "windows,commit", actions={"measure_windows": "hang"}) == 1
    assert time.monotonic() - began < 30
    output = capsys.readouterr().out
    assert "FAILED windows: did not end within 2 s" in output and "h200x2_commit.json" in output
    child = int((machine.calls.parent / "calls.pid").read_text())
    assert not record_gpu.family(child) or "Z" in Path(f"/proc/{child}/stat").read_text()


def test_what_there_is_no_time_for_is_named(machine, capsys):
    assert machine("--only", "host,commit,check", "--limit", "100") == 1
    output = capsys.readouterr().out
    assert "left for want of time: --only check" in output and "2 recorded" in output
    # It is known how long the last time took.
    path = machine.results / "h200x2_commit.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"took_s": 90}))
    assert machine("--only", "commit", "--limit", "100") == 1
    assert "left for want of time: --only commit" in capsys.readouterr().out


def test_what_a_call_asks_for_is_made(machine, capsys):
    assert machine("--only", "commit,wrong_sums", "--skip", "commit", "--random-programs", "77") == 0
    called = machine.calls.read_text()
    assert "--programs 77" in called and "--nproc-per-node 2" in called and "bench_commit" not in called
    assert machine("--quick", "--only", "soak") == 0
    assert "--calls 50000" in machine.calls.read_text()
    with pytest.raises(SystemExit):
        machine("--only", "everything")
    assert "'everything': there are allreduce" in capsys.readouterr().err


def test_files_are_named_after_the_device(machine):
    assert machine("--only", "commit", device="NVIDIA A100-SXM4-80GB") == 0
    assert [path.name for path in machine.results.iterdir()] == ["a100-sxm4-80gbx2_commit.json"]
    assert record_gpu.label("NVIDIA GeForce RTX 4090") == "rtx-4090"
    assert record_gpu.label("NVIDIA H100 80GB HBM3") == "h100"
    assert record_gpu.label("NVIDIA H100 PCIe") == "h100-pcie"


def test_each_rank_needs_a_device(machine, capsys):
    assert machine(count=1) == 2
    assert "skipped: 2 ranks need a device each, there are 1" in capsys.readouterr().out


def test_one_rank_measures_what_needs_no_others(machine, capsys):
    assert machine("--ranks", "1", "--only", "allreduce,selftest,install") == 0
    assert "allreduce: needs 2 ranks" in capsys.readouterr().out
    names = sorted(path.name for path in machine.results.iterdir())
    assert names == ["h200x1_install.json", "h200x1_selftest.json"]


def test_checks_of_several_calls_come_together(tmp_path, capsys):
    there, new = tmp_path / "there", tmp_path / "new"
    there.mkdir()
    new.mkdir()
    (there / "h200x2_checks.log").write_text("Heading\n\n$ a b\nold\n\n$ c\nstays: $ 5\n")
    (new / "h200x2_checks.log").write_text("Other heading\n\n$ d\nnew\n\n$ a b\nnewer\nlines\n")
    (new / "h200x2_commit.json").write_text("{}")
    assert record_gpu.main(["--merge", str(new), "--results", str(there)]) == 0
    merged = (there / "h200x2_checks.log").read_text()
    assert merged == "Other heading\n\n$ a b\nnewer\nlines\n\n$ c\nstays: $ 5\n\n$ d\nnew\n"
    assert (there / "h200x2_commit.json").exists() and "2 files" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("/srv/x/y.json", "y.json"),
        ("--json=/tmp/a/b.json and --sizes 4K", "--json=b.json and --sizes 4K"),
        ("370 GB/s, 1/2, NCCL / ours, a/b/c.py", "370 GB/s, 1/2, NCCL / ours, a/b/c.py"),
        ('File "/opt/x-1/lib/z.py", line 3', 'File "z.py", line 3'),
        ("https://a.example/b/c file:///tmp/x/store", "https://a.example/b/c file://store"),
        (["/a/b", {"k": "/c/d/"}, 3, None], ["b", {"k": ""}, 3, None]),
    ],
)
def test_folders_are_left_out(text, published):
    assert record_gpu.without_folders(text) == published


def test_commands_exist_in_the_repository():
    options = record_gpu.parse(["--ranks", "2"])[0]
    words = record_gpu.Words(options, Path("programs"), Path("logs"))
    for it in record_gpu.measurements():
        assert it.deadline > it.about and it.kind in ("json", "results", "log")
        for word in it.command(words):
            if word.endswith(".py"):
                assert (record_gpu.ROOT / word).exists(), word
        assert not it.program or record_gpu.PROGRAMS[it.program]


def test_cargo_builds_every_program():
    command = ["cargo", "metadata", "--no-deps", "--offline", "--format-version", "1"]
    done = subprocess.run(command, cwd=record_gpu.ROOT, capture_output=True, text=True, check=True)
    packages = json.loads(done.stdout)["packages"]
    found = [
        ["-p", package["name"], f"--{target['kind'][0]}", target["name"]]
        for package in packages
        for target in package["targets"]
    ]
    for name, arguments in record_gpu.PROGRAMS.items():
        assert arguments in found and arguments[-1] == name, name


def test_programs_are_found_where_cargo_puts_them(tmp_path):
    words = record_gpu.Words(record_gpu.parse(["--ranks", "2"])[0], tmp_path, tmp_path)
    assert words.built("on_a_stream") == str(tmp_path / "on_a_stream")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/on_a_stream").touch()
    assert words.built("on_a_stream") == str(tmp_path / "examples/on_a_stream")
    assert words.program("cuda_check", "--pool") == [str(tmp_path / "cuda_check"), "--pool"]


def script(name):
    path = record_gpu.ROOT / f"python/tests/gpu/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def measure_install():
    return script("measure_install")


def test_windows_are_made_in_turns_and_the_first_round_does_not_count(monkeypatch):
    pytest.importorskip("torch")
    measure_windows = script("measure_windows")
    turns = []

    class Ours:
        def __init__(self, clock):
            self.clock = clock

        def turn(self):
            turns.append((type(self).__name__, self.clock.counts))

    class Theirs(Ours):
        pass

    class Broken(Ours):
        def turn(self):
            super().turn()
            raise RuntimeError("no windows here")

    monkeypatch.setattr(measure_windows, "Ours", Ours)
    clock = measure_windows.Clock(None)
    missing = measure_windows.take_turns(clock, [Ours, Theirs, Broken], 2)
    assert missing == {"Broken": "RuntimeError: no windows here"}
    first = [("Ours", False), ("Theirs", False), ("Broken", False)]
    assert turns == [*first, ("Theirs", True), ("Ours", True), ("Ours", True), ("Theirs", True)]


def test_host_times_are_of_the_burst_that_suits_a_call_best(monkeypatch):
    pytest.importorskip("torch")
    measure_host = script("measure_host")
    costs = {"quick when few": {10: 2.0, 100: 5.0}, "quick when many": {10: 4.0, 100: 3.0}}
    monkeypatch.setattr(measure_host, "time_burst", lambda call, burst, device: call[burst])
    monkeypatch.setattr(measure_host.dist, "all_reduce", lambda *_: None)
    found, bursts = measure_host.time_calls(costs, None, 2)
    assert found == {"quick when few": 2.0, "quick when many": 3.0}
    assert bursts == {"quick when few": 10, "quick when many": 100}


def test_installs_take_turns_while_there_is_time(measure_install, monkeypatch, capsys):
    now, order = [0.0], []
    monkeypatch.setattr(measure_install.time, "perf_counter", lambda: now[0])

    class Fake:
        def __init__(self, which):
            self.which, self.turns = which, 0

        def turn(self):
            order.append(self.which)
            seconds = {"torch": 10.0, "expandable": 12.0, "symmpool": 9.5}[self.which] * (
                1 + len(order) / 100
            )
            now[0] += 10
            # The first turn does not count: not its time, not its losses.
            self.turns += 1
            return {"seconds": seconds, "live": 100, "reserved": 100 + self.turns, "losses": [self.turns > 1]}

    def turns(seconds):
        order.clear()
        contenders = {which: Fake(which) for which in measure_install.CONTENDERS}
        found = measure_install.take_turns(Namespace(turns=3, lengths=60, seconds=seconds), contenders)
        assert len({len(reports) for reports in found.values()}) == 1
        return found

    assert [len(turns(seconds)["torch"]) for seconds in (0, 89, 91, 1000)] == [1, 1, 2, 3]
    assert "no time for turn 2: one takes 30 s" in capsys.readouterr().out
    found = turns(1000)
    assert order[3:9] == ["torch", "expandable", "symmpool", "expandable", "symmpool", "torch"]
    table, same = measure_install.summary(found, 60)
    assert same and table["symmpool"]["reserved_over_live"] == 1.04
    assert table["torch"]["rate_over_torch"] == 1 and 1 < table["symmpool"]["rate_over_torch"] < 1.1
    assert table["expandable"]["steps_a_second"] < 5
    found["symmpool"][0]["losses"] = [2.0]
    assert not measure_install.summary(found, 60)[1]


def test_a_contender_that_ends_is_reported_with_its_message(measure_install, monkeypatch):
    monkeypatch.setattr(measure_install, "__file__", "/nowhere/measure_install.py")
    contender = measure_install.Contender("torch", 1)
    with pytest.raises(SystemExit, match="torch ended with 2:(.|\n)*nowhere"):
        contender.turn()
    contender.close()
    assert contender.process.poll() == 2


def test_what_a_launcher_says_does_not_hide_what_failed():
    said = ["ValueError: no", "E1122 05:45 torch/distributed/elastic/api.py:98] failed", "=" * 9]
    assert record_gpu.by_programs(said) == said[:1]
    assert record_gpu.by_programs(said[1:]) == said[1:] and record_gpu.by_programs([]) == []
