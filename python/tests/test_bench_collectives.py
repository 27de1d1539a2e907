"""`python -m symmpool bench collectives`."""

import json

import pytest
import torch
from test_torch import torchrun

from symmpool.bench import cli, collectives, peers


def row(operation, **rounds):
    found = collectives.Row(operation, 1 << 20, 4)
    found.rounds = rounds
    return found


def test_a_table_has_ratios_to_each_of_ours():
    rows = [
        row("all_gather", ours=[3, 2, 9], plain=[6], NCCL=[12]),
        row("broadcast", ours=[], plain=[5], NCCL=[10]),
    ]
    heading, lines = collectives.cells(rows, ["ours", "plain"], ["NCCL"])
    assert heading[-2:] == ["NCCL/ours", "NCCL/plain"]
    assert lines[0] == ["all_gather", "1 MiB", "3.00", "6.00", "12.00", "262.1", "4.00", "2.00"]
    assert lines[1][2:] == ["-", "5.00", "10.00", "-", "-", "2.00"]
    assert collectives.cells(rows, ["ours"], [])[0][-1] == "busbw GB/s"


@pytest.mark.parametrize("operation", collectives.OPERATIONS)
def test_what_is_expected_is_what_the_operation_means(operation):
    # The expected results of two ranks, by hand: inputs 0 1 2 3 and 1 2 3 4.
    whole, part = torch.empty(4), torch.empty(2)
    case = {
        "all_reduce": (whole, [1, 3, 5, 7]),
        "all_gather": (part, [0, 1, 1, 2]),
        "reduce_scatter": (whole, [5, 7]),
        "broadcast": (whole, [0, 1, 2, 3]),
        "all_to_all": (whole, [2, 3, 3, 4]),
    }[operation]
    found = collectives.expected(torch, operation, 1, 2, peers.Case(case[0], None, None))
    assert found.tolist() == case[1]


@pytest.mark.parametrize(
    "argument", ["--operations=gather", "--operations=,", "--sizes=0", "--dtype=f8", "--timeout=nan"]
)
def test_options_that_make_no_sense_are_refused(argument, capsys):
    with pytest.raises(SystemExit) as error:
        cli.parser().parse_args(["collectives", argument])
    assert error.value.code == 2 and argument.partition("=")[0] in capsys.readouterr().err


def test_everything_is_measured_and_right(tmp_path):
    report = tmp_path / "report.json"
    few = ["--rounds", "1", "--replays", "2", "--calls", "2", "--device", "cpu", "--sizes", "4K,96K"]
    few += ["--dtype", "f32", "--json", str(report)]
    status, output, errors = torchrun(2, *few, benchmark="collectives")
    assert status == 0, output + errors
    assert "missing" not in output and "gloo/ours ordinary" in output
    found = json.loads(report.read_text())
    assert [each["operation"] for each in found["results"]] == [
        each for each in collectives.OPERATIONS for _ in range(2)
    ]
    for each in found["results"]:
        assert set(each["figures"]) == {"ours", "ours ordinary", "gloo"} and not each["missing"]


def test_less_device_memory_and_fewer_sms_make_contenders_of_their_own(monkeypatch):
    made = []
    monkeypatch.setattr(collectives, "Ours", lambda *given, **how: made.append((given[0], given[5], how)))

    class Pools:
        get = staticmethod(lambda ranks: "pool")

    plans = collectives.plans_of_ours(None, torch.float32, 64, Pools(), [96 << 20], [44])
    for name, plan in plans.items():
        plan()
        assert made[-1][0] == name
    less, few = {"device_memory_bytes": 96 << 20}, {"sm_budget": 44}
    assert made == [
        ("ours", True, {}),
        ("ours 96 MiB", True, less),
        ("ours 44 SMs", True, few),
        ("ours ordinary", False, {}),
        ("ours ordinary 96 MiB", False, less),
        ("ours ordinary 44 SMs", False, few),
    ]
    for option, value in (("--device-memory", "96M"), ("--sm-budgets", "44")):
        few = ["--device", "cpu", "--sizes", "4K", option, value]
        status, output, errors = torchrun(1, *few, benchmark="collectives")
        assert status != 0 and f"{option}: communicators on the CPU" in output + errors


def test_wrong_results_are_counted_and_fail(monkeypatch):
    observed = []

    class Ranks:
        rank, world, on_cuda = 0, 2, False
        torch = torch
        gather = staticmethod(lambda value: [value] * 2)
        insist = staticmethod(lambda action: action())

    class Side:
        dtype = torch.float32

        def case(self, operation, count):
            x = torch.empty(count)
            return peers.Case(x, x, lambda: observed.append("called"))

    with pytest.raises(ValueError, match="16 wrong elements"):
        collectives.prepare(Ranks, None, Side(), collectives.Row("all_reduce", 32, 2))
    assert observed == ["called"]
