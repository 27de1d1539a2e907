"""Tests of the scripts that gather and show benchmark results."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import collect  # noqa: E402
import tables  # noqa: E402


def test_the_readme_shows_what_was_measured():
    text = (tables.ROOT / "README.md").read_text()
    assert tables.MARKED.search(text), "the README has tables"
    assert tables.fill(text) == text, "README.md does not match bench/results; run make tables"


def test_sizes_and_figures_read_well():
    assert [tables.size(n) for n in (512, 1024, 65536, 64 << 20)] == [
        "512 B",
        "1 KiB",
        "64 KiB",
        "64 MiB",
    ]
    assert [tables.figure(n) for n in (None, 0.15, 3.456, 52.04, 26022.4)] == [
        "-",
        "0.15",
        "3.46",
        "52",
        "26,022",
    ]


def test_only_what_is_between_the_marks_is_replaced():
    text = "a\n<!-- table: x -->\nold\n<!-- end -->\nb\n"
    filled = tables.fill(text, {"x": lambda: "new"})
    assert filled == "a\n<!-- table: x -->\nnew\n<!-- end -->\nb\n"
    with pytest.raises(SystemExit, match="unknown"):
        tables.fill(text.replace("x", "unknown"), {})


def test_replays_are_matched_with_their_traces():
    replays = [{"segments": n} for n in range(2 * len(collect.TRACES))]
    text = "\n".join(json.dumps(replay, indent=1) for replay in replays)
    entries = collect.packing(text)
    assert entries[1]["policy"] == "per-segment"
    assert entries[2]["trace"] == collect.TRACES[1].removesuffix(".csv.gz")
    with pytest.raises(SystemExit, match="1 replays"):
        collect.packing('{"segments": 1}')


def test_medians_are_read_from_criterion(tmp_path):
    folder = tmp_path / "steady/symmpool/new"
    folder.mkdir(parents=True)
    (folder / "benchmark.json").write_text('{"full_id": "steady/symmpool"}')
    (folder / "estimates.json").write_text('{"median": {"point_estimate": 61.234}}')
    assert collect.lane(tmp_path) == {"steady/symmpool": 61.23}
