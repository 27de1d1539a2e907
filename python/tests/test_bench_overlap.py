"""`python -m symmpool bench overlap`, as far as it goes without a GPU."""

import os
import subprocess
import sys

import pytest
import torch
from ranks import values
from test_torch_distributed import begin

from symmpool.bench import cli, collectives, overlap, peers


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


def test_a_step_is_longer_than_beside_the_best_of_others_or_not():
    rows = [
        row({}, products=[30], ours=[33], **{"ours 2": [36]}, NCCL=[36], **{"NCCL window": [35, 35, 99]}),
        row({}, products=[30], ours=[40], NCCL=[]),
    ]
    lines = overlap.verdicts(rows, ["ours", "ours 2"], ["NCCL", "NCCL window"])
    assert lines == [
        "all_gather of 1 MiB: a step beside ours takes 33.00 us, beside NCCL window 35.00: not longer",
        "all_gather of 1 MiB: a step beside ours 2 takes 36.00 us, beside NCCL window 35.00: LONGER",
    ]
    assert rows[0].to_json()["not_longer"] == {"ours": True, "ours 2": False}
    assert rows[1].to_json()["not_longer"] == {}


def calls_of_a_group(group, folder):
    """Every operation on a group of the backend, on the CPU."""
    me, world = begin(group, folder, "gloo")
    ranks = peers.Ranks(torch, torch.device("cpu"), 60)
    found = []
    for in_windows in (False, True):
        side = overlap.OnBackend("ours", ranks, torch.float32, 64 * world, in_windows)
        for operation in collectives.OPERATIONS:
            case = side.case(operation, 64 * world)
            case.output.fill_(99)
            case.input.copy_(collectives.data(torch, case.input, me))
            case.call()
            right = collectives.expected(torch, operation, me, world, case)
            found.append(torch.equal(case.output, right) or (operation, in_windows))
        side.confirm()
    # The CPU's fallback backend serves sparse tensors.
    sparse = torch.zeros(1).to_sparse()
    torch.distributed.all_reduce(sparse, group=side.group)
    with pytest.raises(ValueError, match="did not serve: .*gloo"):
        side.confirm()
    side.close()
    torch.distributed.destroy_process_group()
    return found


def test_a_group_of_the_backend_is_a_contender_that_calls_no_other(tmp_path):
    for found in values(2, calls_of_a_group, str(tmp_path)):
        assert found == [True] * 10


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


def test_shares_have_columns_of_their_own():
    parse = cli.parser().parse_args
    assert parse(["overlap"]).concurrent == [1, 2]
    assert parse(["overlap", "--concurrent", "4,1,4"]).concurrent == [1, 4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so():
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "symmpool", "bench", "overlap"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "no CUDA device" in ended.stderr
