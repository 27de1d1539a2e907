"""`python -m symmpool bench training`, as far as it goes without a GPU."""

import json
import math

import pytest
from test_torch import torchrun

from symmpool.bench import cli
from symmpool.bench.training import command, rows, turns

TINY = ["--device", "cpu", "--model", "own", "--layers", "1", "--width", "32", "--hidden", "48"]
TINY += ["--heads", "4", "--shared-heads", "2", "--vocabulary", "64", "--length", "8"]
TINY += ["--steps", "2", "--warmup", "1"]


def round_of(rate, *ranks, peak=None):
    return {
        "tokens_a_second": rate,
        "numbers": list(ranks),
        "peak_bytes": peak,
        "reserved_bytes": None,
        "device_bytes": None,
        "calls": {},
    }


def test_a_row_has_medians_ratios_and_the_difference_of_losses():
    row = rows.Row("ddp", "NCCL")
    row.rounds = {
        "NCCL": [round_of(100, [2.0, 1.0], [2.0, 1.5]), round_of(90, [2.0, 1.0], [2.0, 1.5])],
        "ours": [
            round_of(120, [2.0, 1.0], [2.0, 1.5]),
            round_of(125, [2.0, 1.0], [1.6, 1.5], peak=3 << 20),
        ],
    }
    found = row.to_json()
    assert found["kind"] == "ddp" and found["figures"]["NCCL"]["ratio"] == 1
    ours = found["figures"]["ours"]
    assert ours["tokens_a_second"] == 122.5 and ours["rounds"] == [120, 125]
    assert ours["ratio"] == pytest.approx(122.5 / 95) and ours["numbers"] == [2.0, 1.0]
    assert ours["apart"] == pytest.approx(0.2) and found["figures"]["NCCL"]["apart"] == 0
    assert ours["peak_bytes"] == 3 << 20 and ours["device_bytes"] is None
    heading, lines = rows.cells([row], ["NCCL", "ours"], "NCCL")
    assert heading[3:7] == ["rounds", "of NCCL", "pairs", "loss difference"]
    assert lines[0] == ["ddp", "NCCL", "95", "100 90", "1.000", "1.000-1.000", "0", "-", "-", "-"]
    assert lines[1] == ["ddp", "ours", "122", "120 125", "1.289", "1.200-1.389", "2.0e-01", "3.00", "-", "-"]
    assert ours["pairs"] == pytest.approx([1.2, 125 / 90])


def test_a_loss_that_is_no_number_differs_from_all():
    assert rows.difference([[1.0, math.nan]], [[1.0, math.nan]]) == math.inf
    assert rows.difference([[0.0, -1.0]], [[0.0, -1.0]]) == 0


def test_a_contender_without_rounds_has_no_figures():
    row = rows.Row("tp", "NCCL")
    row.rounds, row.missing = {"ours": [round_of(10, [1.0])]}, {"NCCL": "why"}
    found = row.to_json()
    assert found["missing"] == {"NCCL": "why"} and set(found["figures"]) == {"ours"}
    assert found["figures"]["ours"]["ratio"] is None and found["figures"]["ours"]["apart"] is None
    assert rows.cells([row], ["NCCL", "ours"], "NCCL")[1][0][2:7] == ["-"] * 5


def test_a_kind_that_fails_in_one_round_has_no_figure():
    row = rows.Row("ddp", "NCCL")
    row.add("ours", round_of(10, [1.0]), None)
    row.add("ours", None, "rank 1: RuntimeError")
    row.add("ours", round_of(10, [1.0]), None)
    row.add("ours", None, "rank 0: ValueError")
    assert row.missing == {"ours": "rank 1: RuntimeError"} and row.rounds == {}


def test_what_a_turn_found_is_read_again_with_what_it_did_not_come_to(tmp_path):
    found, file = turns.Found({"world": 2}), tmp_path / "found.json"
    found.add("fsdp", {"numbers": [[1.0]]}, None)
    found.add("ddp", None, "rank 0: ValueError")
    found.write(file)
    again = turns.Found.read(file)
    assert again.facts == {"world": 2} and again.of("fsdp") == ({"numbers": [[1.0]]}, None)
    assert again.of("ddp") == (None, "rank 0: ValueError")
    assert again.of("tp") == (None, "its turn did not come to it")
    assert turns.Found.read(tmp_path / "none.json").facts == {}


def test_a_turn_whose_process_fails_says_so(capfd):
    found = turns.take(["training", "--steps", "0"], (0, "ours"), ["fsdp"])
    assert found.of("fsdp") == (None, "the process of its turn ended with status 2")
    assert "--steps" in capfd.readouterr().err


@pytest.mark.parametrize("argument", ["--kinds=pp", "--kinds=,", "--steps=0", "--dtype=i8", "--heads=-1"])
def test_options_that_make_no_sense_are_refused(argument, capsys):
    with pytest.raises(SystemExit) as error:
        cli.parser().parse_args(["training", argument])
    assert error.value.code == 2 and argument.partition("=")[0] in capsys.readouterr().err


def test_sizes_that_do_not_fit_are_refused():
    options = cli.parser().parse_args(["training", "--heads", "6"])
    with pytest.raises(ValueError, match="6 heads"):
        command.complete(options, on_cuda=True)
    options = cli.parser().parse_args(["training", "--length", "10"])
    command.complete(options, on_cuda=True)
    with pytest.raises(ValueError, match="--length 10 is no multiple of 4 ranks"):
        command.fit(options, 4)
    with pytest.raises(ValueError, match="there are NCCL, ours"):
        options.contenders = ["gloo"]
        command.contenders(options, on_cuda=True)


def test_the_peer_comes_first_and_each_has_its_backend():
    options = cli.parser().parse_args(["training"])
    peer, backends = command.contenders(options, on_cuda=True)
    assert peer == "NCCL" and list(backends) == ["NCCL", "ours"]
    assert backends == {"NCCL": "cuda:nccl,cpu:gloo", "ours": "cuda:symmpool,cpu:gloo"}


def test_contenders_take_turns_and_each_round_begins_with_another(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("RANK", "0")
    options = cli.parser().parse_args(["training", *TINY, "--kinds", "fsdp,ddp,tp_compiled", "--rounds", "3"])
    options.contenders, options.json = ["gloo", "ours", "ours ordinary"], tmp_path / "report.json"
    command.complete(options, on_cuda=False)
    taken = []

    def take(arguments, turn, kinds, threads):
        assert threads is None
        taken.append((*turn, kinds))
        found = turns.Found({"world": 2, "device": "cpu"})
        for kind in kinds:
            found.add(kind, round_of(100 + turn[0], [2.0], [2.0]), None)
        return found

    monkeypatch.setattr(turns, "take", take)
    monkeypatch.setattr(command, "report", lambda *_: None)
    assert command.run_turns(options, ["training"], on_cuda=False) == 0
    both, one = ["fsdp", "ddp"], ["fsdp"]
    kinds = {"gloo": both, "ours": both, "ours ordinary": one}
    names = list(kinds)
    orders = [names, names[1:] + names[:1], names[2:] + names[:2]]
    assert taken == [(number, name, kinds[name]) for number, order in enumerate(orders) for name in order]
    found = json.loads(options.json.read_text())
    assert found["command"] == ["python", "-m", "symmpool", "bench", "training"] and found["world"] == 2
    figures = found["results"][0]["figures"]
    assert {name: each["rounds"] for name, each in figures.items()} == dict.fromkeys(names, [100, 101, 102])


def test_contenders_alternate_with_each_number_of_threads(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    given = ["training", *TINY, "--kinds", "fsdp", "--rounds", "2", "--threads", "4,1"]
    options = cli.parser().parse_args(given)
    options.json = tmp_path / "report.json"
    command.complete(options, on_cuda=False)
    taken = []

    def take(arguments, turn, kinds, threads):
        taken.append((*turn, threads))
        found = turns.Found({"world": 2, "device": "cpu"})
        found.add("fsdp", round_of(100 * threads + turn[0], [2.0], [2.0]), None)
        return found

    monkeypatch.setattr(turns, "take", take)
    monkeypatch.setattr(command, "report", lambda *_: None)
    assert command.run_turns(options, ["training"], on_cuda=False) == 0
    first, second = ["gloo", "ours"], ["ours", "gloo"]
    assert taken == [
        (number, name, threads)
        for number, names in enumerate((first, second))
        for threads in (4, 1)
        for name in names
    ]
    found = json.loads(options.json.read_text())["results"]
    rounds = [(each["threads"], each["figures"]["ours"]["rounds"]) for each in found]
    assert rounds == [(4, [400, 401]), (1, [100, 101])]
    options.profile = tmp_path
    with pytest.raises(ValueError, match="several counts of --threads"):
        command.complete(options, on_cuda=False)


def test_turns_with_other_numbers_of_threads_meet_anew(tmp_path):
    report = tmp_path / "report.json"
    more = ["--kinds", "ddp", "--rounds", "1", "--json", str(report), "--threads", "2,1", "--each-step"]
    status, output, errors = torchrun(2, *TINY, *more, benchmark="training")
    assert status == 0, output + errors
    found = json.loads(report.read_text())["results"]
    assert [each["threads"] for each in found] == [2, 1]
    for each in found:
        assert each["missing"] == {} and len(each["figures"]["ours"]["pairs"]) == 1
        assert each["figures"]["ours"]["apart"] == 0


def test_every_kind_of_training_runs_with_each_library_and_has_the_same_losses(tmp_path):
    report, traces = tmp_path / "report.json", tmp_path / "traces"
    names = ["gloo", "ours", "ours ordinary"]
    more = ["--rounds", "1", "--json", str(report), "--profile", str(traces), "--contenders", ",".join(names)]
    more += ["--each-step", "--threads", "1"]
    status, output, errors = torchrun(2, *TINY, *more, benchmark="training")
    assert status == 0, output + errors
    found = json.loads(report.read_text())
    assert found["benchmark"] == "training" and found["contenders"] == names
    assert found["options"]["layers"] == 1 and found["world"] == 2
    # That of the run, and not of a turn.
    assert "--rounds" in found["command"] and not {"--turn", "--kinds"} & set(found["command"])
    kinds = {each["kind"]: each for each in found["results"]}
    assert list(kinds) == ["fsdp", "ddp", "tp", "tp_compiled", "decode", "decode_graph", "decode_compiled"]
    for kind in ("fsdp", "ddp", "tp"):
        figures = kinds[kind]["figures"]
        # Buffers of FSDP in torch's memory make no difference elsewhere.
        present = names if kind == "fsdp" else names[:2]
        missing = {} if kind == "fsdp" else {"ours ordinary": "differs from others in fsdp alone"}
        assert kinds[kind]["missing"] == missing and list(figures) == present
        for each in figures.values():
            # Two numbers have one sum, in whichever order.
            assert each["apart"] == 0 and len(each["rounds"]) == 1 and len(each["numbers"]) == 3
        # The compared programs have been through both libraries.
        assert figures["gloo"]["calls"] == {}
        assert {where for calls in figures["ours"]["calls"].values() for where in calls} == {"symmpool"}
        # Tensor parallelism computes what the others compute, of rank 0's tokens.
        first = figures["ours"]["numbers"][0]
        assert first == pytest.approx(kinds["fsdp"]["figures"]["gloo"]["numbers"][0], rel=1e-5)
        assert first == pytest.approx(math.log(64), rel=0.1)
    assert kinds["decode"]["missing"]["ours"] == "needs transformers"
    assert kinds["tp_compiled"]["missing"]["ours"] == "needs a GPU"
    assert "needs a GPU" in kinds["decode_graph"]["missing"]["ours"] or "needs" in output
    # Without a device there is nothing to sum up, and the traces are there.
    assert (traces / "tp_ours.json.gz").exists()
    assert "nothing that ran on a device" in (traces / "summary.txt").read_text()
