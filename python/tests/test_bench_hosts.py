"""`python -m symmpool bench hosts`."""

import json

import pytest
from test_torch import torchrun

from symmpool.bench import cli, hosts


def test_ranks_are_put_on_hosts(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    placed = {}
    for order in ("blocks", "turns"):
        options = cli.parser().parse_args(["hosts", "--pretend", "2", "--order", order])
        placed[order] = ""
        for rank in range(4):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("SYMMPOOL_HOST_ID", "")
            hosts.pretend(options)
            placed[order] += hosts.os.environ["SYMMPOOL_HOST_ID"][-1]
    assert placed == {"blocks": "0011", "turns": "0101"}
    with pytest.raises(SystemExit, match="do not divide"):
        hosts.pretend(cli.parser().parse_args(["hosts", "--pretend", "3"]))


def test_everything_is_measured_and_right(tmp_path):
    report = tmp_path / "report.json"
    few = ["--pretend", "2", "--rounds", "1", "--calls", "2", "--sizes", "4K,96K", "--json", str(report)]
    status, output, errors = torchrun(4, *few, benchmark="hosts")
    assert status == 0, output + errors
    assert "missing" not in output and "gloo/ours ordinary" in output
    whole = json.loads(report.read_text())
    assert whole["options"]["pretend"] == 2 and len(whole["results"]) == 10
