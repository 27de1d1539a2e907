"""`python -m symmpool tune`: tables of the fastest algorithms."""

import json
import os
import subprocess
import sys
import types

import numpy as np
import pytest
from ranks import values

import symmpool
from symmpool import tune
from symmpool.language import library


def run(*arguments):
    command = [sys.executable, "-m", "symmpool", "tune", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def loads(group, path):
    """Which algorithms a table chooses: of one of two ranks that loads it, the error says."""
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=30)
    comm.register(library.direct_all_gather.compile(2))
    if comm.rank == 0:
        comm.load_tables(path)
    x, out = pool.empty(64, np.float32), pool.empty(128, np.float32)
    with pytest.raises(symmpool.DivergedError) as raised:
        comm.all_gather_into_tensor(out, x)
    if comm.rank == 1:
        symmpool.load_tables(path, pool)  # with the communicator of module-level calls
        comm.load_tables(path)
    else:
        symmpool.load_tables(path, pool)
    comm.all_gather_into_tensor(out, x)
    symmpool.all_gather_into_tensor(out, x, pool)
    with pytest.raises(symmpool.InvalidArgumentError, match="nowhere.json"):
        comm.load_tables("/nowhere.json")
    return str(raised.value)


def test_tables_are_written_and_loaded(tmp_path):
    plan, table = tmp_path / "gather.json", tmp_path / "table.json"
    library.direct_all_gather.compile(2).save(plan)
    done = run("--collective", "all_gather", "--ranks", 2, "--sizes", "1K,4K", "--plan", plan, "--out", table)
    assert done.returncode == 0, done.stderr
    assert "direct_all_gather" in done.stdout and "scratch" in done.stdout
    found = json.loads(table.read_text())
    assert found["symmpool_tables"] == 1 and found["devices"] == ["cpu"]
    assert {row["windows"] for row in found["rows"]} == {True, False}
    assert all(row["collective"] == "all_gather" and row["world"] == 2 for row in found["rows"])
    # Another collective is added, and what is there stays.
    done = run("--collective", "broadcast", "--ranks", 2, "--sizes", "1K", "--out", table)
    assert done.returncode == 0, done.stderr
    rows = json.loads(table.read_text())["rows"]
    assert rows[: len(found["rows"])] == found["rows"] and rows[-1]["collective"] == "broadcast"
    found["rows"] = [{"collective": "all_gather", "world": 2, "algorithm": "direct_all_gather"}]
    table.write_text(json.dumps(found))
    errors = values(2, loads, str(table))
    assert all("registered algorithm" in error for error in errors), errors


MODULE = """
import symmpool
from symmpool import language as sl

@sl.algorithm("all_gather")
def mine(me):
    me.barrier()
    me.copy(me.output[me.rank], me.input[0])
    for peer in me.peers():
        me.put(peer.output[me.rank], me.input[0])
        me.signal(peer)
    for peer in me.peers():
        me.wait(peer)

made = mine.compile(%d, blocks=4)
kernel = symmpool.native(
    "// A kernel that the CPU does not compile.\\n", "of_mine", "all_gather", name="of_mine"
)
"""


def test_algorithms_of_a_module_are_timed(tmp_path):
    module, table = tmp_path / "algorithms.py", tmp_path / "table.json"
    module.write_text(MODULE.replace("made = mine.compile(%d, blocks=4)\n", ""))
    arguments = (
        "--collective",
        "all_gather",
        "--ranks",
        2,
        "--sizes",
        "1K",
        "--module",
        module,
        "--out",
        table,
    )
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert " mine" in done.stdout and "scratch" in done.stdout
    assert "of_mine is a kernel, which host memory cannot have" in done.stdout
    assert len(json.loads(table.read_text())["rows"]) == 2
    # The error names the fault of the module, with its file.
    for text, word in (
        ("x = 1", "neither a program nor an algorithm"),
        ("x = 1 +", "SyntaxError"),
        ("import no_such_module", "no_such_module"),
        (MODULE % 3, "mine"),
        (MODULE.replace("    for peer in me.peers():\n        me.wait(peer)\n", "") % 2, "unmatched_signal"),
    ):
        module.write_text(text)
        done = run(*arguments)
        assert done.returncode == 1 and word in done.stderr, (text, done.stderr)


def test_nonsense_is_refused(tmp_path):
    table = tmp_path / "table.json"
    arguments = ("--collective", "all_reduce", "--out", table)
    for wrong, word in (
        (arguments, "--ranks"),
        ((*arguments, "--ranks", 0), "'0'"),
        (("--collective", "gossip", "--ranks", 2, "--out", table), "'gossip'"),
        ((*arguments, "--ranks", 2, "--plan", tmp_path / "no.json"), "no.json"),
        ((*arguments, "--ranks", 2, "--module", tmp_path / "no.py"), "no.py"),
        (("--ranks", 2), "--out"),
    ):
        done = run(*wrong)
        assert done.returncode != 0 and word in done.stderr, done.stderr
    for text, word in (
        ("{", "no JSON"),
        ("[]", "rows"),
        ('{"devices": ["NVIDIA H200"], "rows": []}', "devices"),
        ('{"symmpool_tables": 2, "devices": ["cpu"], "rows": []}', "symmpool_tables"),
    ):
        table.write_text(text)
        done = run(*arguments, "--ranks", 2)
        assert done.returncode == 1 and word in done.stderr and "table.json" in done.stderr, done.stderr
        assert table.read_text() == text


def test_wrong_tables_in_the_environment_are_errors_that_name_file_and_field(tmp_path):
    table = tmp_path / "mine.json"
    table.write_text('{"devices": ["cpu"], "rows": [{"world": 1, "algorithm": 7}]}')
    program = """if True:
        import symmpool
        pool = symmpool.Pool(symmpool.Group.in_process(1)[0], "cpu")
        symmpool.Communicator(pool)
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "SYMMPOOL_TABLES": str(table)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "InvalidArgumentError" in done.stderr, done.stderr
    assert "mine.json" in done.stderr and "rows[0].algorithm" in done.stderr, done.stderr


def test_the_fastest_up_to_each_size_is_found_and_trifles_do_not_count():
    times = {1024: {"a": 1.0, "b": 2.0}, 2048: {"a": 2.01, "b": 2.0}, 4096: {"a": 3.0, "b@8": 2.0}}
    names = {"b@8": ("b", 8)}
    assert tune.fastest(times, names) == [
        {"up_to": 2048, "algorithm": "a"}, {"up_to": 4096, "algorithm": "b", "blocks": 8},
    ]  # fmt: skip
    assert tune.fastest({1 << 24: {"a": 1.0}}, {}) == [{"up_to": None, "algorithm": "a"}]
    assert tune.fastest({}, {}) == [] and tune.fastest({1024: {}}, {}) == []


def test_a_rank_on_gpus_makes_its_device_the_current_one(monkeypatch):
    """Graphs capture a stream of the current device: what other devices do is not in them."""
    steps = []
    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(
        set_device=lambda device: steps.append(f"device {device}"), get_device_name=lambda device: "GPU"
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(symmpool, "Pool", lambda group, device: steps.append(f"pool {device}"))
    monkeypatch.setattr(symmpool, "Communicator", lambda pool, timeout: None)
    rank = tune.Tuner(None, tune.parser().parse_args(["--device", "cuda", "--out", "table.json"]))
    assert (steps, rank.device_name) == (["device cuda:1", "pool cuda:1"], "GPU")
