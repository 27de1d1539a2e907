"""`python -m symmpool bench hosts`."""

import json
import re
from pathlib import Path

import pytest
from test_torch import torchrun

from symmpool.bench import cli, collectives, hosts, scale


def placed(*arguments, world=4):
    return hosts.host_ranks(cli.parser().parse_args(["hosts", *arguments]), world)


def test_ranks_are_put_on_hosts(monkeypatch):
    assert placed("--pretend", "2") == [[0, 1], [2, 3]]
    assert placed("--pretend", "2", "--order", "turns") == [[0, 2], [1, 3]]
    assert placed("--pretend", "3+1") == [[0, 1, 2], [3]]
    assert placed("--pretend", "1+3", "--order", "turns") == [[0], [1, 2, 3]]
    for wrong, why in (("3", "do not divide"), ("2+1", "there are 4 ranks")):
        with pytest.raises(SystemExit, match=why):
            placed("--pretend", wrong)
    for wrong in ("0", "2+", "-1", "two"):
        with pytest.raises(SystemExit):
            placed(f"--pretend={wrong}")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("SYMMPOOL_HOST_ID", "")
    for rank, host in enumerate("0001"):
        monkeypatch.setenv("RANK", str(rank))
        hosts.pretend(cli.parser().parse_args(["hosts", "--pretend", "3+1"]))
        assert hosts.os.environ["SYMMPOOL_HOST_ID"] == f"pretended-{host}"


def row(operation, size, ours, gloo, phases=None):
    made = collectives.Row(operation, size, 4)
    made.rounds, made.phases = {"ours": ours, "gloo": gloo}, phases
    return made


def test_bars_are_compared_in_pairs_of_rounds():
    # The slow round is slow for both.
    even = row("all_reduce", 1 << 20, [1.0, 100.0, 1.0], [2.5, 150.0, 2.5], {"agreement": 1.0, "total": 20.0})
    found = hosts.bars([even], [[0, 1], [2, 3]])
    assert [(each["what"], each["measured"], each["met"]) for each in found] == [
        ("gloo / ours", 2.5, True),
        ("agreement / call", 0.05, False),
    ]
    uneven = row("all_reduce", 64 << 10, [1.0], [0.99])
    for layout in ([[0, 1, 2], [3]], [[0], [1], [2], [3]], [[0, 1, 2, 3]]):
        (only,) = hosts.bars([uneven, row("broadcast", 4096, [9.0], [1.0])], layout)
        assert (only["what"], only["met"]) == ("ours / gloo", True) and only["measured"] > 1


def test_everything_is_measured_and_right(tmp_path):
    report = tmp_path / "report.json"
    few = ["--pretend", "2", "--rounds", "1", "--calls", "2", "--sizes", "4K,96K", "--json", str(report)]
    status, output, errors = torchrun(4, *few, benchmark="hosts")
    assert status == 0, output + errors
    assert "missing" not in output and "gloo/ours ordinary" in output
    for heading in ("phases of ours", "median error", "bars"):
        assert heading in output
    whole = json.loads(report.read_text())
    assert whole["hosts"] == [[0, 1], [2, 3]] and len(whole["results"]) == 10
    for entry in whole["results"]:
        phases = entry["phases_us"]
        assert 0 < sum(phases[name] for name in hosts.PHASES) <= phases["total"] + 0.01, entry
    costs = whole["costs"]
    assert min(costs[name] for name in ("handshake", "step")) > 0, costs
    for entry, phases in zip(whole["results"], whole["predicted"], strict=True):
        total = sum(phases[name] for name in ("handshakes", "inside", "between")) * 1e6
        assert total / entry["figures"]["ours"]["us"] - 1 == pytest.approx(phases["off"], abs=1e-3)
    assert {each["bytes"] for each in whole["bars"]} == {96 << 10}


def test_uneven_hosts_are_measured(tmp_path):
    report = tmp_path / "report.json"
    few = ["--pretend", "2+1", "--rounds", "1", "--calls", "1", "--sizes", "96K", "--json", str(report)]
    status, output, errors = torchrun(3, *few, "--operations", "all_reduce", benchmark="hosts")
    assert status == 0, output + errors
    whole = json.loads(report.read_text())
    assert "costs" not in whole and "hosts of 2 and 1 ranks" in output
    assert [each["what"] for each in whole["bars"]] == ["ours / gloo", "agreement / call"]


#: Costs at which everything that can be counted is a whole number of seconds.
UNITS = {"handshake": 1.0, "byte": 0.0, "step": 100.0, "peer": 0.0, "alone": 0.0, "leaving": 0.0}


def test_small_calls_cost_one_step_and_large_ones_of_three_hosts_two():
    small = scale.predict("all_reduce", 4096, 2, 8, scale.Costs(**UNITS))
    assert (small.handshakes, small.between, small.bound) == (2, 100, "between")
    # The agreement, and a chunk's two steps.
    large = scale.predict("all_reduce", 1 << 20, 3, 8, scale.Costs(**UNITS))
    assert (large.handshakes, large.between) == (6, 300)
    assert scale.predict("all_reduce", 1 << 20, 2, 8, scale.Costs(**UNITS)).between == 200
    # Too much for the leaders of many hosts, and gathered whole.
    assert scale.predict("all_reduce", 4096, 1024, 8, scale.Costs(**UNITS)).between == 200


def test_bytes_that_leave_a_host_are_counted_once():
    costs = scale.Costs(handshake=0, byte=0, step=0, peer=0, alone=0, leaving=1.0)
    size = 64 << 20
    assert scale.predict("all_reduce", size, 2, 4, costs).between == size
    assert scale.predict("all_reduce", size, 4, 4, costs).between == 2 * size * 3 / 4
    assert scale.predict("all_gather", size, 4, 4, costs).between == size * 3 / 4
    # Every rank sends three quarters of its input to other hosts.
    assert scale.predict("all_to_all", size, 4, 4, costs).between == 4 * size * 3 / 4


def test_phases_beside_each_other_count_once_unless_they_share_processors():
    times = {"handshake": 0, "byte": 1.0, "step": 0, "peer": 0, "alone": 0, "leaving": 1.0}
    size = 64 << 20
    apart = scale.predict("all_reduce", size, 2, 4, scale.Costs(**times))
    shared = scale.predict("all_reduce", size, 2, 4, scale.Costs(**times, shares=True))
    assert apart.total < shared.total == shared.inside + shared.between
    assert max(apart.inside, apart.between) == max(shared.inside, shared.between)


@pytest.mark.parametrize("wrong", [("reduce", 1, 2, 1), ("all_reduce", 0, 2, 1), ("all_reduce", 1, 1, 8)])
def test_what_the_model_does_not_know_is_refused(wrong):
    with pytest.raises(ValueError):
        scale.predict(*wrong, scale.Costs(**UNITS))


def test_the_model_has_the_limits_of_the_engine():
    folder = Path(__file__).parents[2] / "collectives/src/spanning"
    if not folder.is_dir():
        pytest.skip("skipped: the engine's sources are not here")
    constants = {}
    for path in sorted(folder.glob("*.rs")):
        found = re.findall(r"^(?:pub\S* )?const (\w+): usize = (\d+)(?: << (\d+))?;", path.read_text(), re.M)
        constants |= {(path.stem, name): int(value) << int(shift or 0) for name, value, shift in found}
    message = constants["host_message", "HEAD"] + constants["host_message", "MIN_ROOM"]
    assert {
        "MAX_REDUCED": constants["ways", "MAX_REDUCED"],
        "MAX_MOVED": constants["ways", "MAX_MOVED"],
        "MAX_ROOM": constants["host_message", "MAX_ROOM"],
        "MAX_ROOM_IN_ALL": constants["host_message", "MAX_ROOM_IN_ALL"],
        "HEAD": message,
        "SMALL": constants["reductions", "SMALL_BYTES"],
        "PART": constants["staging", "PART_BYTES"],
        "DIRECT": constants["moves", "DIRECT_BYTES"],
    } == {name: value for name, value in vars(scale).items() if name.isupper() and name != "OPERATIONS"}
