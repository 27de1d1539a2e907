"""`python -m symmpool bench overlap`, as far as it goes without a GPU."""

import os
import subprocess
import sys

import pytest
import torch

from symmpool.bench import cli, overlap


def row(alone, **rounds):
    found = overlap.Row("all_gather", 1 << 20, 4)
    found.alone, found.rounds, found.products = alone, rounds, 3
    return found


def test_a_table_has_what_a_collective_costs_a_step():
    rows = [
        row({"ours": 7.0, "NCCL": 12.0}, products=[30, 20, 90], ours=[33], NCCL=[36, 35, 37]),
        row({"NCCL": 12.0}, products=[30], NCCL=[]),
        row({"NCCL": 12.0}, NCCL=[31]),
    ]
    heading, lines = overlap.cells(rows, ["ours", "NCCL"])
    assert heading == ["operation", "size", "products", "ours alone", "ours cost", "NCCL alone", "NCCL cost"]
    assert lines[0] == ["all_gather", "1 MiB", "30.00", "7.00", "3.00", "12.00", "6.00"]
    assert lines[1][2:] == ["30.00", "-", "-", "12.00", "-"]
    assert lines[2][2:] == ["-", "-", "-", "12.00", "-"]


def test_the_report_holds_both_times():
    found = row({"ours": 7.0}, products=[30], ours=[33, 35], NCCL=[]).to_json()
    assert found["products"] == 3 and found["operation"] == "all_gather"
    assert found["figures"] == {
        "products": {"us": 30, "alone_us": None, "rounds_us": [30]},
        "ours": {"us": 34, "alone_us": 7.0, "rounds_us": [33, 35]},
    }


@pytest.mark.parametrize(
    "argument",
    ["--concurrent=0", "--concurrent=17", "--concurrent=", "--times=0.5", "--order=0", "--dtype=i32"],
)
def test_options_that_make_no_sense_are_refused(argument, capsys):
    with pytest.raises(SystemExit) as error:
        cli.parser().parse_args(["overlap", argument])
    assert error.value.code == 2 and argument.partition("=")[0] in capsys.readouterr().err


def test_shares_are_told_apart():
    parse = cli.parser().parse_args
    assert parse(["overlap"]).concurrent == [1, 2]
    assert parse(["overlap", "--concurrent", "4,1,4"]).concurrent == [1, 4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so():
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "symmpool", "bench", "overlap"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "no CUDA device" in ended.stderr
