"""`python -m symmpool bench order`."""

import json

import pytest
from test_torch import torchrun

from symmpool.bench import cli, order, order_programs


def row(**rounds):
    found = order.Row("all_reduce", "windows", 1 << 20, 2)
    found.rounds = {name.replace("_", " "): each for name, each in rounds.items()}
    return found


def test_ratios_are_those_of_the_same_round_but_for_what_is_measured_last():
    found = row(fresh=[10, 20, 10], small_first=[11, 20, 14], messages=[30, 30, 30])
    assert found.ratio("small first", order.FRESH) == pytest.approx(1.1)
    assert found.ratio("messages", order.FRESH) == 3 and found.ratio("7 rest", order.FRESH) is None


def test_what_is_within_the_noise_costs_nothing():
    # 10% of a short call are less than 0.3 us, and 1 us of a long one is less than 3%.
    assert not row(fresh=[2.0], small_first=[2.2]).costs("small first")
    assert not row(fresh=[500.0], small_first=[501.0]).costs("small first")
    found = row(fresh=[20.0], small_first=[21.0])
    assert found.costs("small first") and order.shown(found, "small first") == "1.05!"
    assert order.shown(found, "fresh") == "20.00 us" and order.shown(found, "7 rest") == "-"


def test_tables_have_the_ratio_to_nccl_in_the_same_order():
    found = row(fresh=[20.0], small_first=[40.0])
    found.rounds |= {"NCCL, fresh": [30.0], "NCCL, small first": [30.0]}
    heading, (line,) = order.cells([found], ["fresh", "small first"], True)
    assert heading == ["operation", "memory", "size", "fresh, us", "NCCL/ours", "small first", "NCCL/ours"]
    assert line == ["all_reduce", "windows", "1 MiB", "20.00", "1.50", "2.00!", "0.75"]
    (said,) = order.worst([found, row(fresh=[1.0], small_first=[1.0])], ["fresh", "small first"])
    assert (
        said == "small first: at most 2.00 (all_reduce, windows, 1 MiB); more than the noise in 1 of 2 cells"
    )
    figures = found.to_json()["figures"]
    assert figures["small first"]["to_fresh"] == 2.0 and figures["NCCL, small first"]["to_fresh"] == 1.0


def test_calls_between_kernels_are_compared_with_those_beside_nobody():
    rounds = {order.FRESH: [10.0], order.KERNELS: [12.0], order.KERNELS_RESTING: [15.0]}
    found = row(**rounds)
    assert [order.shown(found, name) for name in rounds] == ["10.00 us", "1.20!", "1.25!"]
    assert "at most 1.25 " in order.worst([found], [order.KERNELS_RESTING])[0]
    assert found.to_json()["figures"][order.KERNELS_RESTING]["base"] == order.KERNELS


@pytest.mark.parametrize(
    "argument", ["--orders=none", "--memories=", "--operations=broadcast", "--seconds=0"]
)
def test_options_that_make_no_sense_are_refused(argument, capsys):
    with pytest.raises(SystemExit) as error:
        cli.parser().parse_args(["order", argument])
    assert error.value.code == 2 and argument.partition("=")[0] in capsys.readouterr().err


def test_each_order_can_be_chosen_by_its_name():
    for name in order.ORDERS:
        assert cli.parser().parse_args(["order", "--orders", name]).orders == [name]


def test_a_quick_run_has_few_sizes_and_rounds():
    options = cli.parser().parse_args(["order", "--quick"])
    order.prepare(options, "cuda")
    assert options.sizes == [4 << 10, 4 << 20, 64 << 20] and (options.rounds, options.replays) == (3, 5)
    options = cli.parser().parse_args(["order"])
    order.prepare(options, "cuda")
    assert options.sizes[0] == 4 << 10 and options.sizes[-1] == 256 << 20 and options.rounds == 5
    assert [order_programs.calls_for(size) for size in (4 << 10, 16 << 20, 256 << 20)] == [20, 8, 5]


def test_every_order_is_measured_and_progress_is_seen(tmp_path):
    report = tmp_path / "report.json"
    few = ["--rounds", "2", "--replays", "2", "--device", "cpu", "--sizes", "8K", "--dtype", "f32"]
    status, output, errors = torchrun(2, *few, "--json", str(report), benchmark="order")
    assert status == 0, output + errors
    found = json.loads(report.read_text())
    assert found["missing"] == {"NCCL": "it needs a GPU for each rank"}
    cells = [(each["operation"], each["memory"]) for each in found["results"]]
    assert cells == [(of, memory) for of in order.OPERATIONS for memory in order.MEMORIES]
    for each in found["results"]:
        assert set(each["figures"]) == set(order.ORDERS) and not each["missing"]
        for name, figure in each["figures"].items():
            assert len(figure["rounds_us"]) == 2, name
            if each["operation"] == "experts":
                continue
            ours, window = figure["explained"], each["memory"] == "windows"
            assert ours.startswith(each["operation"]) and window == ("between windows" in ours), ours
    # A line for each cell, and another one behind all of them for messages.
    lines = [line for line in errors.splitlines() if line.startswith("[")]
    assert len(lines) == 2 * len(cells) and "7 rest" in lines[0] and "messages" in lines[-1]
    assert "more than the noise in" in output


def test_no_cell_is_begun_after_the_time_is_over(tmp_path):
    few = [
        "--rounds",
        "1",
        "--replays",
        "1",
        "--device",
        "cpu",
        "--sizes",
        "8K,16K,32K,64K",
        "--dtype",
        "f32",
    ]
    few += ["--orders", "fresh,7 rest", "--seconds", "1"]
    status, output, errors = torchrun(2, *few, benchmark="order")
    assert status == 0, output + errors
    assert "cells were left out after 1 s" in output
