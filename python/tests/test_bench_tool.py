"""The parts of the benchmark that need neither torch nor a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from symmpool.bench import (
    alltoallv,
    cli,
    fused,
    matmuls,
    matrices,
    peers,
    plot,
    rounds,
    session,
    table,
    timing,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("4096", 4096), ("16K", 16 << 10), ("1.5m", 3 << 19), ("2GiB", 2 << 30), (" 8 KB ", 8192)],
)
def test_sizes_are_read(text, size):
    assert table.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "0", "-1", "1.0001K", "4T", "1e3", "4 4"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="size|bytes"):
        table.parse_size(text)


def test_sizes_between_two():
    assert table.sizes_between(1024, 70_000, 4) == [1024, 4096, 16384, 65536]
    assert table.sizes_between(5, 5, 2) == [5]
    assert table.sizes_between(1, 4, 1.01) == [1, 2, 3, 4]
    for low, high, factor in [(2, 1, 2), (1, 10, 1), (1, 10, 0.5)]:
        with pytest.raises(ValueError):
            table.sizes_between(low, high, factor)


def test_sizes_are_shown():
    shown = [table.show_size(size) for size in (1, 1000, 1024, 1536, 64 << 20, 5 << 28)]
    assert shown == ["1 B", "1000 B", "1 KiB", "1.50 KiB", "64 MiB", "1.25 GiB"]


def test_bandwidth_is_that_of_the_links():
    # 1 GB among 4 ranks in 4 ms: each sends and receives 1.5 GB.
    assert table.bus_bandwidth(10**9, 4, 4000) == pytest.approx(375)
    assert table.bus_bandwidth(10**9, 1, 4000) == 0


def row(size, **rounds):
    found = table.Row(size, 4)
    found.rounds = {name.replace("_", " "): times for name, times in rounds.items()}
    return found


def test_a_table_has_the_median_and_the_best_peer():
    rows = [
        row(1024, ours=[3, 2, 9], NCCL=[12, 12, 13], one_shot=[7, 6, 8]),
        row(1 << 20, ours=[20], NCCL=[10], one_shot=[]),
        row(1 << 21, ours=[], NCCL=[]),
    ]
    heading, lines = table.cells(rows, ["ours"], ["NCCL", "one shot"])
    assert heading[0] == "size" and heading[1:4] == ["ours", "NCCL", "one shot"]
    assert lines[0] == ["1 KiB", "3.00", "12.00", "7.00", "0.51", "one shot", "7.00", "2.33"]
    assert lines[1][-3:] == ["NCCL", "10.00", "0.50"] and lines[1][3] == "-"
    assert lines[2][1:] == ["-"] * 7
    text = table.format_table(heading, lines).splitlines()
    assert len(text) == 5 and set(text[1]) == {"-", " "}
    assert text[2].index("1 KiB") == len("2 MiB") - len("1 KiB")


def test_the_report_holds_every_round():
    found = row(1024, ours=[3, 2, 9], NCCL=[12, 12, 13], one_shot=[])
    found.eager["ours"] = (1.5, 4.0)
    found.missing["one shot"] = "why"
    report = json.loads(json.dumps(found.to_json()))
    assert report["bytes"] == 1024 and report["missing"] == {"one shot": "why"}
    assert report["figures"]["ours"]["rounds_us"] == [3, 2, 9]
    assert report["figures"]["ours"]["us"] == 3
    assert report["figures"]["ours"]["eager_host_us"] == 1.5
    assert set(report["figures"]) == {"ours", "NCCL"}


def test_eager_times_are_shown_in_pairs():
    found = row(1024, ours=[3])
    found.eager["ours"] = (1.5, 1234.5)
    assert table.eager_cells([found], ["ours", "NCCL"])[1] == [["1 KiB", "1.50 / 1,234.5", "-"]]


def test_large_calls_come_in_small_graphs():
    assert [timing.calls_for(size) for size in (1, 2 << 20, 16 << 20, 1 << 30)] == [100, 100, 16, 5]
    assert timing.graphs_for(2 << 20) == [1, 10, 20, 100]
    assert timing.graphs_for(16 << 20) == [1, 10, 16] and timing.graphs_for(1 << 30) == [1, 5]
    assert timing.graphs_for(1 << 30, [20, 7, 20]) == [7, 20]


def test_each_round_starts_with_another_contender():
    assert [timing.order(["a", "b", "c"], n)[0] for n in range(4)] == ["a", "b", "c", "a"]
    assert sorted(timing.order(["a", "b", "c"], 5)) == ["a", "b", "c"]
    assert timing.order([], 3) == []


def test_a_loop_is_timed_without_its_first_turn(monkeypatch):
    # Seconds at which the clock is read: the first turn is slow.
    ticks = iter([0, 9, 10, 10.001, 20, 20.003, 30, 30.002])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    calls = []
    assert timing.time_loop(lambda: calls.append(1), 10, 3) == pytest.approx(200)
    assert len(calls) == 40


class Event:
    """An event on a clock that replays advance."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def elapsed_time(self, other):
        return other.at - self.at


FAKE_TORCH = SimpleNamespace(cuda=SimpleNamespace(Event=Event, synchronize=lambda: None))


def test_replays_are_timed_without_the_one_where_ranks_meet():
    spans = iter([50.0, 2.0, 4.0, 3.0])

    def replay():
        Event.now += next(spans)

    # Milliseconds of ten calls: a median of 3 is 300 us a call.
    assert timing.Form("graph of 10", 10, replay).time(FAKE_TORCH, 3) == pytest.approx(300)


def test_small_graphs_are_replayed_often_between_two_events():
    replays = []

    def replay():
        replays.append(1)
        Event.now += 2.0

    assert timing.Form("graph of 1", 1, replay, 100).time(FAKE_TORCH, 3) == pytest.approx(2000)
    assert len(replays) == 400


#: Microseconds of a call in each form, similar to measured ones.
FORMS = {
    "NCCL": {"graph of 1": 12.0, "graph of 10": 10.0, "graph of 20": 9.7, "graph of 100": 20.0, "eager": 30},
    "ours": {"graph of 1": 4.0, "graph of 10": 2.4, "graph of 20": 2.2, "graph of 100": 2.1, "eager": 5.0},
}


class DeviceRanks:
    """One rank on a device whose calls take as long as FORMS says."""

    rank, world, on_cuda = 0, 1, True
    dist = SimpleNamespace()

    def __init__(self, torch):
        self.torch, self.met = torch, 0

    def gather(self, value):
        return [value]

    def insist(self, action):
        return action()

    def meet(self):
        self.met += 1


@pytest.fixture
def on_a_device(monkeypatch):
    """Measures a row of FORMS; returns it and the order of contenders after the trial."""

    def capture(torch, call, calls):
        return SimpleNamespace(replay=lambda: call(f"graph of {calls}", calls))

    monkeypatch.setattr(timing, "capture", capture)

    def measure(*arguments, size=1024, forms=FORMS):
        made = options(*arguments)
        ranks, timed, finished = DeviceRanks(FAKE_TORCH), [], []

        def call_of(name):
            def call(form="eager", calls=1):
                Event.now += forms[name][form] * calls / 1e3

            return call

        def begin(name):
            timed.append(name)

        running = {name: (name, timing.forms(ranks, call_of(name), size, made)) for name in forms}
        row = table.Row(size, 4)
        rounds.measure(ranks, made, running, row, begin, lambda what: finished.append(what))
        assert finished == ["forms", *(f"round {n + 1}" for n in range(made.rounds))]
        return row, timed[-made.rounds * len(forms) :]

    return measure


def test_every_contender_is_timed_in_its_fastest_form(on_a_device):
    row, order = on_a_device("--rounds", "3", "--eager")
    assert row.microseconds("NCCL") == pytest.approx(9.7) and row.microseconds("ours") == pytest.approx(2.1)
    assert row.forms == {"NCCL": "graph of 20", "ours": "graph of 100"}
    assert order == ["NCCL", "ours", "ours", "NCCL", "NCCL", "ours"]
    for name, times in FORMS.items():
        assert row.tried[name] == pytest.approx(times)
    # Times of the trial are no round's times.
    assert all(len(rounds) == 3 for rounds in row.rounds.values())


def test_calls_outside_of_graphs_are_a_form_where_that_is_said(on_a_device):
    quick = {"NCCL": {**FORMS["NCCL"], "eager": 1.0}}
    assert on_a_device(forms=quick)[0].forms == {"NCCL": "graph of 20"}
    assert on_a_device("--eager", forms=quick)[0].forms == {"NCCL": "eager"}


def test_forms_that_were_asked_for_are_tried_alone(on_a_device):
    assert on_a_device("--calls", "10,1")[0].forms == {"NCCL": "graph of 10", "ours": "graph of 10"}
    # There is nothing to try then.
    row, _ = on_a_device("--calls", "100")
    assert row.tried == {"NCCL": {}, "ours": {}} and row.forms["NCCL"] == "graph of 100"


def test_tables_and_reports_say_which_form_was_best(on_a_device):
    row, _ = on_a_device("--eager")
    heading, lines = table.cells([row], ["ours"], ["NCCL"])
    assert lines[0][1:3] == ["2.10 (100)", "9.70 (20)"] and lines[0][-2:] == ["9.70", "4.62"]
    found = json.loads(json.dumps(row.to_json()))["figures"]["NCCL"]
    assert found["form"] == "graph of 20" and found["us"] == pytest.approx(9.7)
    assert found["forms_us"] == pytest.approx(FORMS["NCCL"])
    exchange = alltoallv.Row("even", 1024, 4, 768, 355.0)
    exchange.rounds, exchange.forms, exchange.tried = row.rounds, row.forms, row.tried
    assert alltoallv.cells([exchange], ["ours"], ["NCCL"])[1][0][2:4] == ["2.10 (100)", "9.70 (20)"]
    assert exchange.to_json()["figures"]["NCCL"]["form"] == "graph of 20"


def test_sizes_that_were_left_out_are_those_of_the_device():
    options = cli.parser().parse_args(["fused", "--tokens", "3", "--gather", "8x16"])
    for module in (fused, matmuls):
        session.fill_in(options, module.USUAL["cpu"])
    assert (options.tokens, options.hidden, options.gather) == ([3], [1024], [(8, 16)])
    assert (options.rows, options.scatter) == ("64", [(128, 64)])
    for usual in (fused.USUAL, matmuls.USUAL):
        assert set(usual["cpu"]) == set(usual["cuda"]), "each option has a default on both"


def test_there_is_one_form_on_the_cpu():
    calls = []
    ranks = FakeRanks([1e-6])
    (form,) = timing.forms(ranks, lambda: calls.append(1), 1 << 20, options("--eager"))
    assert form.name == timing.LOOP and timing.short(form.name) == "" and form.calls == 100
    form.time(None, 1)
    assert len(calls) == 202, "two calls are tried first"


@pytest.mark.parametrize("took, calls, spans", [(0.01, 50, 3), (0.5, 1, 3), (60, 1, 1)])
def test_on_the_cpu_a_round_of_slow_calls_ends_soon(took, calls, spans):
    made = []
    (form,) = timing.forms(FakeRanks([took]), lambda: made.append(1), 1 << 20, options())
    assert (form.calls, form.most) == (calls, spans), "as the slowest rank needs"
    form.time(None, 9)
    assert len(made) == 2 + calls * (1 + spans), "one span is not counted"


class FakeRanks:
    """Two ranks. Values of the other one are given in advance."""

    rank, world, on_cuda = 0, 2, False

    def __init__(self, others):
        self.others = iter(others)
        self.synchronize = lambda: None

    def gather(self, value):
        return [value, next(self.others)]

    def insist(self, action):
        return action()

    attempt, attempt_each = peers.Ranks.attempt, peers.Ranks.attempt_each


def test_what_fails_on_one_rank_has_failed_on_all():
    def broken():
        raise RuntimeError("no such window")

    assert FakeRanks([None]).attempt(lambda: 7) == (7, None)
    value, why = FakeRanks([None]).attempt(broken)
    assert value is None and why == "on 1 of 2 ranks; rank 0: RuntimeError: no such window"
    value, why = FakeRanks(["ValueError: mine"]).attempt(lambda: 7)
    assert value is None and why == "on 1 of 2 ranks; rank 1: ValueError: mine"


def test_a_peer_that_cannot_be_set_up_is_missing_and_no_more(monkeypatch):
    class Good:
        def __init__(self, ranks, dtype, op, count, *more):
            self.more = more

    class Bad:
        def __init__(self, *_):
            raise OSError("no library")

    monkeypatch.setattr(peers, "Ours", Good)
    monkeypatch.setattr(peers, "peers_for", lambda on_cuda: [("bad", Bad), ("good", Good)])
    found, missing, _ = peers.set_up(FakeRanks([None] * 9), "f32", "sum", 10, ["auto", "one_shot"])
    assert list(found) == ["ours", "ours one_shot", "good"]
    assert missing == {"bad": "on 1 of 2 ranks; rank 0: OSError: no library"}
    found, missing, _ = peers.set_up(FakeRanks([None] * 9), "f32", "sum", 10, ["auto"], ["good"])
    assert list(found) == ["ours", "good"] and not missing
    found, missing, _ = peers.set_up(FakeRanks([None] * 9), "f32", "sum", 10, ["auto"], [])
    assert list(found) == ["ours"] and not missing


def test_secrets_are_not_reported(monkeypatch):
    monkeypatch.setenv("SYMMPOOL_SECRET", "a secret")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    found = peers.environment()
    assert found["NCCL_NVLS_ENABLE"] == "0"
    assert "a secret" not in found.values()


def test_reports_name_no_folders_of_the_machine(monkeypatch):
    monkeypatch.setenv("SYMMPOOL_CACHE_DIR", "/home/somebody/cache/")
    assert peers.environment()["SYMMPOOL_CACHE_DIR"] == "cache"
    given = ["--json", "/tmp/a/b.json", "--matrix=/tmp/m.json", "--sizes", "4K,1M", "x/"]
    shown = ["--json", "b.json", "--matrix=m.json", "--sizes", "4K,1M", "x"]
    assert [session.without_folders(each) for each in given] == shown


def test_peers_may_be_none():
    parse = cli.parser().parse_args
    for command in (["allreduce"], ["alltoallv"]):
        assert session.requested_peers(parse([*command, "--peers", "none"])) == []
        assert session.requested_peers(parse([*command, "--peers", "a, b"])) == ["a", "b"]
        assert session.requested_peers(parse(command)) is None


def options(*arguments):
    return cli.parser().parse_args(["allreduce", *arguments])


def test_options_are_understood():
    found = options("--sizes", "4K,1M", "--dtype", "f32", "--algorithm", "all", "--eager")
    assert found.sizes == [4096, 1 << 20] and found.eager and found.algorithm == "all"
    assert options("--max", "1M").max_size == options("--max-size", "1M").max_size == 1 << 20


SENSELESS = [
    *("--calls=0", "--calls=,", "--calls=10,x"),
    *("--sizes=4X", "--sizes=,", "--rounds=0", "--rounds=²", "--dtype=f8", "--algorithm=best"),
    *("--factor=1", "--factor=nan", "--factor=inf", "--factor=x"),
    *("--timeout=0", "--timeout=-1", "--timeout=nan", "--timeout=inf", "--timeout=1e30"),
]
SENSELESS_MATRICES = [
    *("--sizes=,", "--matrices=,", "--matrices=even,odd", "--timeout=inf", "--seed=x"),
    *("--imbalance=-1", "--imbalance=nan", "--imbalance=inf", "--imbalance=1e9"),
    *("--link=0", "--link=-1", "--link=nan"),
]


@pytest.mark.parametrize(
    ("command", "argument"),
    [
        *(("allreduce", argument) for argument in SENSELESS),
        *(("alltoallv", argument) for argument in SENSELESS_MATRICES),
    ],
)
def test_options_that_make_no_sense_are_refused(command, argument, capsys):
    with pytest.raises(SystemExit) as error:
        cli.parser().parse_args([command, argument])
    assert error.value.code == 2 and argument.partition("=")[0] in capsys.readouterr().err


def test_the_steepest_matrices_can_be_made():
    steepest = cli.parser().parse_args(["alltoallv", "--imbalance", "50"]).imbalance
    for kind in matrices.KINDS:
        assert sum(map(sum, matrices.make(kind, 4, steepest))) > 0


def test_a_picture_needs_matplotlib_and_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install"):
        plot.require(Path("x.png"))
    with pytest.raises(SystemExit, match="pip install"):
        cli.main(["allreduce", "--plot", "x.png"])


@pytest.mark.parametrize("command", ["allreduce", "alltoallv", "collectives", "experts", "overlap"])
def test_every_benchmark_draws_pictures(command):
    found = cli.parser().parse_args([command, "--plot", "x.png"])
    assert found.plot == Path("x.png")


def test_a_picture_says_what_was_measured_and_how_much_longer_the_best_peer_takes():
    facts = {
        "symmpool": "0.1.0",
        "measured_at": "2026-11-22T01:00:00+00:00",
        "world": 2,
        "devices": ["H200"] * 2,
    }
    facts |= {"torch": "2.11", "nccl": "2.28", "driver": "580"}
    said = plot.caption(facts)
    assert said.startswith("symmpool 0.1.0, 2 ranks on H200; torch 2.11, NCCL 2.28, driver 580; 2026-11-22;")
    assert session.devices(facts) == "2 x H200"
    names = ["ours", "ours ordinary", "ours two_shot", "NCCL"]
    assert [plot.label(name) for name in names] == [
        "symmpool", "symmpool ordinary", "symmpool two_shot", "NCCL"
    ]  # fmt: skip
    rows = [row(1024, ours=[2], NCCL=[9], one_shot=[6]), row(2048, ours=[4], NCCL=[]), row(4096, NCCL=[5])]
    assert plot.points(rows, "ours", plot.microseconds) == [(1024, 2), (2048, 4)]
    assert plot.ratios(rows, ["ours"], ["NCCL", "one shot"], plot.microseconds) == [(1024, 3.0)]
    assert list(plot.panels_by(rows, lambda each: each.size > 1024)) == [False, True]


def test_reports_go_to_places_that_can_be_written_to(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    for path, why in [
        ("/nonexistent/x.json", "no folder"),
        (str(tmp_path), "is a folder"),
        (str(locked / "x.json"), "cannot be written to"),
    ]:
        if os.geteuid() == 0 and why.startswith("cannot"):
            continue  # root writes anywhere
        for command in ("allreduce", "alltoallv"):
            with pytest.raises(SystemExit, match=why):
                cli.main([command, "--json", path])


def test_a_report_that_cannot_be_written_after_all_is_an_error_and_keeps_no_rank_waiting(capsys):
    left = []
    ranks = SimpleNamespace(
        rank=0,
        meet=lambda: left.append("met"),
        dist=SimpleNamespace(destroy_process_group=lambda: left.append("gone")),
    )
    ranks.attempt = lambda action: (action(), None)
    contenders = {"ours": SimpleNamespace(close=lambda: left.append("closed"))}

    def full(ours, others):
        raise OSError("the disk is full")

    assert session.end(ranks, contenders, peers.Pools(), [], full) == 1
    assert left == ["met", "closed", "gone"]
    assert "the disk is full" in capsys.readouterr().err
    assert session.end(ranks, contenders, peers.Pools(), [], lambda ours, others: None) == 0


def test_the_driver_is_found_where_there_is_one(monkeypatch):
    for text, version in [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159  Release", "580.159"),
        ("nothing", None),
    ]:
        monkeypatch.setattr(session.Path, "read_text", lambda self, text=text: text)
        assert session.driver_version() == version


def test_what_is_missing_is_said_before_anything_runs(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('none here')")
    done = subprocess.run(
        [sys.executable, "-m", "symmpool", "bench", "allreduce"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "needs torch" in done.stderr


def test_matrices_say_what_ranks_send():
    for kind in matrices.KINDS:
        weights = matrices.make(kind, 4)
        assert weights == matrices.make(kind, 4)  # on every rank alike
        counts = matrices.scale(weights, 64 << 10, 2, 8)
        sent = sum(map(sum, counts)) * 2 / 4
        assert 0.99 * (64 << 10) < sent <= 64 << 10, kind
    assert matrices.scale(matrices.make("even", 4), 64, 2) == [[8] * 4] * 4
    assert matrices.heaviest(matrices.make("one-hot", 4)) == 3
    assert matrices.heaviest([[9, 1], [2, 9]]) == 2
    assert matrices.scale([[0, 0], [0, 0]], 64, 2) == [[0, 0], [0, 0]]


def test_a_matrix_of_bytes_is_taken_as_it_is(tmp_path):
    path = tmp_path / "matrix"
    path.write_text("0 4096 100\n1 2 3\n0 0 0\n")
    parse = cli.parser().parse_args
    ((name, size, counts),) = alltoallv.plans(parse(["alltoallv", "--matrix", str(path)]), 3, 1, False)
    assert (name, size) == ("matrix", 1400)
    assert counts == [[0, 4096, 100], [1, 2, 3], [0, 0, 0]]
    ((_, _, counts),) = alltoallv.plans(parse(["alltoallv", "--matrix", str(path)]), 3, 2, True)
    assert counts == [[0, 2048, 50], [0, 1, 1], [0, 0, 0]]
    weights = parse(["alltoallv", "--matrix", str(path), "--sizes", "4202,8404"])
    planned = alltoallv.plans(weights, 3, 1, False)
    assert [sum(map(sum, counts)) for _, _, counts in planned] == [3 * 4202, 3 * 8404]


def test_a_popular_expert_makes_a_heavy_rank():
    flat, steep = (matrices.make("moe", 4, imbalance) for imbalance in (0.0, 2.0))
    assert matrices.heaviest(flat) < matrices.heaviest(steep)
    assert all(number <= 4096 for row in steep for number in row)


def test_matrices_are_read(tmp_path):
    path = tmp_path / "matrix"
    for text in ("[[1, 2], [3, 4.5]]", "1 2\n3, 4.5\n\n"):
        path.write_text(text)
        assert matrices.read(path, 2) == [[1, 2], [3, 4.5]]
    wrong = ["", "1 2", "1 2\n3", "1 2\n3 x", "1 2\n3 -1", "1 2\n3 nan", "[1, 2]", "null", '"1 2"']
    wrong += ['["12", "34"]', '[{"1": 2, "3": 4}, [1, 2]]', "[[1, 2], [3, null]]", "{}"]
    for text in wrong:
        path.write_text(text)
        with pytest.raises(ValueError, match="matrix"):
            matrices.read(path, 2)
    path.write_bytes(b"1 2\n3 \xff")
    for place in (path, tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match=f"{place}: no matrix"):
            matrices.read(place, 2)


def test_a_line_of_one_number_is_the_matrix_of_one_rank(tmp_path):
    path = tmp_path / "matrix"
    for text in ("4096", "4096.0\n", "[[4096]]"):
        path.write_text(text)
        assert matrices.read(path, 1) == [[4096]]


def test_a_table_of_exchanges_has_the_bound():
    row = alltoallv.Row("zipf", 1 << 20, 4, 355_000, 355.0)
    row.rounds = {"ours": [2, 4, 2], "NCCL": [8]}
    heading, lines = alltoallv.cells([row], ["ours"], ["NCCL"])
    assert lines == [["zipf", "1 MiB", "2.00", "8.00", "1.00", "0.50", "NCCL", "4.00"]]
    assert len(heading) == len(lines[0])
    report = json.loads(json.dumps(row.to_json()))
    assert report["bound_us"] == 1 and report["figures"]["ours"]["gb_s"] == pytest.approx(177.5)
