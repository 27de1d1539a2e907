"""Tests of the scripts that gather and show benchmark results."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import cells
import charts
import collect
import kernel_versions
import tables
import tables_gpu
import tables_scale
import tables_summary


@pytest.mark.parametrize("document", tables.DOCUMENTS, ids=lambda path: path.name)
def test_documents_show_what_was_measured(document):
    text = document.read_text()
    assert tables.MARKED.search(text), "it has tables"
    assert tables.fill(text) == text, "it does not match bench/results; run make tables"


def test_the_tables_script_names_documents_that_are_old(tmp_path, monkeypatch):
    one, other = tmp_path / "one.md", tmp_path / "other.md"
    monkeypatch.setattr(charts, "PICTURES", {})
    monkeypatch.setattr(tables_scale, "PICTURES", {})
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", (one, other))
    one.write_text("as it was")
    other.write_text("before\n<!-- table: packing -->\nold\n<!-- end -->\nafter")
    assert tables.main(["--check"]) == "not as bench/results has it: other.md; run make tables"
    assert "old" in other.read_text()
    assert tables.main([]) == 0 and tables.main(["--check"]) == 0
    said = other.read_text()
    assert "old" not in said and said.startswith("before\n") and said.endswith("\nafter")
    assert one.read_text() == "as it was"


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
    with pytest.raises(SystemExit, match="no estimates"):
        collect.main(["lane", str(tmp_path / "absent"), str(tmp_path / "lane.json")])
    assert not (tmp_path / "lane.json").exists()


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("-h", 0), ("--nonsense", 2)])
def test_whoever_asks_for_help_gets_no_measurements(argument, status, tmp_path):
    # Without programs to be found, so that nothing can be measured or written.
    run = Path(__file__).parent / "run"
    tools = {"PATH": str(tmp_path)}
    (tmp_path / "sed").symlink_to(shutil.which("sed"))
    bash = shutil.which("bash")
    done = subprocess.run([bash, run, argument], env=tools, capture_output=True, text=True)
    assert done.returncode == status and done.stdout.startswith("Measures on this machine")


def test_the_tables_script_says_what_it_does(capsys):
    assert tables.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("Builds the tables of docs/performance")
    assert "Builds" in tables.main(["--chekc"])


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Writes a report as `bench/record_gpu` does, where the tables look for them."""
    (tmp_path / "gpu").mkdir()
    monkeypatch.setattr(cells, "RESULTS", tmp_path)

    def write(name, world, device="h200", **report):
        facts = {"torch": "2.11", "nccl": "2.28", "driver": "580", "measured_at": "2026-11-22T01:00:00"}
        text = json.dumps({**facts, "world": world, **report})
        (tmp_path / f"gpu/{device}x{world}_{name}.json").write_text(text)

    return write


def in_form(name, us, form):
    return {name: {"us": us, "busbw_gb_s": 300.0, "form": form, "forms_us": {form: us, "graph of 1": 99.0}}}


def test_tables_say_in_which_form_a_time_was_measured(recorded):
    entry = in_form("ours", 2.0, "graph of 100") | in_form("NCCL", 9.7, "graph of 20")
    entry |= in_form("two-shot", 6.0, "eager")
    results = [{"bytes": 4096, "figures": entry}]
    names = ["ours", "NCCL", "two-shot"]
    recorded("allreduce", 2, contenders=names, results=results)
    text = tables_gpu.all_reduce(tables_gpu.ANY)
    assert "| 4 KiB | 2.00 (100) | 300 | 9.70 (20) | 6.00 (eager) | 3.00 |" in text
    assert tables_gpu.ONE_FORM not in text
    exchange = {"matrix": "even", "bytes": 4096, "bound_us": 1.0, "figures": entry}
    recorded("alltoallv", 2, contenders=names, results=[exchange])
    text = tables_gpu.in_short(tables_gpu.TWO)
    for operation in ("all-reduce", "all-to-all"):
        assert f"| {operation} | 4 KiB | 2.00 (100) | 6.00 (eager), two-shot | 3.00 |" in text
    assert "| even | 4 KiB | 2.00 (100) | 9.70 (20) |" in tables_gpu.all_to_all(tables_gpu.TWO)
    each = {"operation": "broadcast", "bytes": 4096}
    each["figures"] = in_form("ours", 2.0, "graph of 100") | in_form("ours ordinary", 3.0, "graph of 10")
    each["figures"] |= in_form("NCCL", 9.0, "graph of 20") | in_form("NCCL window", 8.0, "graph of 10")
    names = ["ours", "ours ordinary", "NCCL", "NCCL window"]
    recorded("collectives", 2, contenders=names, results=[each])
    line = "| broadcast | 4 KiB | 2.00 (100) | 3.00 (10) | 9.00 (20) | 8.00 (10) | 4.00 | 3.00 |"
    assert line in tables_gpu.collectives(tables_gpu.ANY)


def test_times_beside_peers_in_one_form_alone_are_marked(recorded):
    results = [{"bytes": 4096, "figures": figures(ours=2.0, NCCL=20.0)}]
    recorded("allreduce", 4, contenders=["ours", "NCCL"], results=results)
    head = tables_gpu.all_reduce(tables_gpu.ANY).partition("|")[0]
    assert head.startswith("4 x H200") and tables_gpu.ONE_FORM in head


def test_two_gpus_of_the_kind_that_was_measured_last_count(recorded):
    for device, us in (("h200", 2.0), ("h100", 3.0)):
        results = [{"bytes": 4096, "figures": in_form("ours", us, "graph of 10")}]
        recorded("allreduce", 2, device=device, contenders=["ours"], results=results)
        text = tables_gpu.all_reduce(tables_gpu.TWO)
        assert text.startswith(f"2 x {device.upper()}, ") and f"| {us:.2f} (10) |" in text


def figures(**times):
    return {name.replace("_", " "): {"us": us, "busbw_gb_s": 300.0} for name, us in times.items()}


def test_tables_of_gpus_are_of_four_where_that_is_recorded(recorded):
    head = "| bytes | symmpool us | busbw GB/s | NCCL | best contender / ours |"
    assert "Not measured yet: `bench/record_gpu --ranks 4" in tables_gpu.all_reduce(tables_gpu.ANY)
    for world, ours in ((2, 8.0), (4, 10.0)):
        results = [
            {"bytes": 1 << 20, "figures": figures(ours=ours, NCCL=20.0)},
            {"bytes": 5, "figures": figures(NCCL=3.0)},
            {"bytes": 4096, "figures": figures(ours=2.0)},
        ]
        recorded("allreduce", world, contenders=["ours", "NCCL"], results=results)
        text = tables_gpu.all_reduce(tables_gpu.ANY)
        began = f"{world} x H200, torch 2.11, NCCL 2.28, driver 580, 2026-11-22."
        assert text.startswith(f"{began}\n{tables_gpu.ONE_FORM}")
        assert (head in text) == (world == 2)
    assert "| 1 MiB | 10.00 | 9.3 | 300 | 20.00 | 2.00 |" in text
    # Nothing is made up where someone has no figure, or nobody else has.
    assert "| 5 B | - | - | - | 3.00 | - |" in text and "| 4 KiB | 2.00 | 2.5 | 300 | - | - |" in text
    assert "| 1 MiB | 8.00 | 300 |" in tables_gpu.all_reduce(tables_gpu.TWO)


def test_all_to_alls_have_bars_where_they_are_even(recorded):
    entries = [
        {"matrix": kind, "bytes": 1 << 20, "bound_us": 4.0, "figures": figures(ours=8.0, NCCL=16.0)}
        for kind in ("even", "zipf")
    ]
    recorded("alltoallv", 4, contenders=["ours", "NCCL"], results=entries)
    text = tables_gpu.all_to_all(tables_gpu.ANY)
    assert "| even | 1 MiB | 8.00 | 16.00 | 7 | 0.50 | 2.00 |" in text
    assert "| zipf | 1 MiB | 8.00 | 16.00 | - | 0.50 | 2.00 |" in text


def test_small_tables_are_there_where_they_are_recorded(recorded):
    assert not any(map(tables_gpu.more, tables_gpu.MORE))
    mib = [{"bytes": 1 << 20, "figures": figures(ours=8.16, ours_device=9.0, NCCL=20.0)}]
    recorded("allreduce", 2, contenders=["ours", "NCCL"], results=mib)
    recorded("allreduce_rust", 2, us=[{"bytes": 1 << 20, "by": {"auto": 8.0}}], eager_host_us=2.5)
    recorded("allreduce_scratch", 4, contenders=["ours"], options={"scratch": 768 << 20}, results=mib)
    recorded("device_splits", 2, results=mib)
    less = {"ours": 10.0, "ours 16 MiB": 15.0, "ours ordinary": 20.0}
    gathers = {"operation": "all_gather", "bytes": 1 << 20, "figures": figures(**less)}
    recorded("collectives_memory", 2, options={"device_memory": [16 << 20]}, results=[gathers])
    gathers = {**gathers, "figures": figures(**{"ours": 10.0, "ours 44 SMs": 12.5})}
    recorded("collectives_sm_budgets", 2, options={"sm_budgets": [44]}, results=[gathers])
    times = {"fresh": 2.0, "1 rests": 3.0, "NCCL, fresh": 5.0, "NCCL, 1 rests": 6.0}
    orders = figures(**times, kernels=4.0, resting=5.0)
    orders["resting"]["base"] = "kernels"
    ordered = {"operation": "all_reduce", "memory": "torch", "bytes": 4096, "figures": orders}
    recorded("order", 2, contenders=["fresh", "1 rests", "kernels", "resting"], results=[ordered])
    products = {"operation": "all_gather", "bytes": 1 << 20}
    products["figures"] = figures(products=90.0, ours=95.0, NCCL=97.5)
    recorded("overlap", 2, contenders=["ours", "ours 2", "NCCL"], results=[products])
    recorded("overlap_windows", 2, contenders=["ours", "ours 2", "NCCL"], results=[products])
    recorded("overlap_backend", 2, contenders=["ours", "NCCL"], results=[products])
    ours = {"rounds": [1100.0, 1150.0], "ratio": 1.125, "apart": 0.0}
    theirs = {"rounds": [1000.0], "ratio": 1.0, "apart": 1e-5}
    given = {"layers": 8, "model": "hf"}
    programs = [
        {"kind": "fsdp", "peer": "NCCL", "figures": {"ours": ours, "NCCL": theirs}},
        {"kind": "decode_graph", "peer": "NCCL", "figures": {"NCCL": theirs}},
    ]
    recorded("training", 2, options=given, results=programs)
    compiled = {"kind": "tp_compiled", "peer": "NCCL", "figures": {"NCCL": theirs, "ours fused": ours}}
    recorded("training_compiled", 2, options=given, results=[compiled])
    recorded("decoding_compiled", 2, options=given, results=[{**compiled, "kind": "decode_compiled"}])
    scopes = {"with pool": 3.5, "torch.cuda.use_mem_pool": 3.0}
    recorded("host", 2, bytes=4096, host_us={"symmpool.all_reduce": 4.0}, scope_us=scopes)
    milliseconds = {"ours: commit of 64 MiB": [3.0, 1.0, 2.0], "other": [7.0]}
    recorded("windows", 2, milliseconds=milliseconds, missing={"nccl_windows": "why"})
    scenario = {"name": "one segment of 64 MiB", "commit_ms": 1.5, "bar_ms": 2.0, "alloc_ms": 0.1}
    recorded("commit", 2, results={"scenarios": [scenario], "empty_commit_ms": 0.05})
    step = {"with": "NCCL", "mode": "eager", "tokens_a_second": 1234.5, "last_loss": 1.0, "apart": 0.0}
    recorded("tensor_parallel", 2, results=[step])
    rates = {"NCCL": 9000.0, "symmpool": 10000.4, "fused": 11500.0}
    made = {name: {"tokens_a_second": rate, "apart": 0.0} for name, rate in rates.items()}
    decoded = {"program": "decode", "tokens": 8, "mode": "compiled graph", "figures": made}
    # Where one of the contenders failed it has no figure.
    alone = {"program": "training", "tokens": 8192, "mode": "eager", "figures": {"NCCL": made["NCCL"]}}
    given = {"layers": 4, "hidden": 4096}
    recorded("tensor_parallel_fused", 2, contenders=list(rates), options=given, results=[decoded, alone])
    sent = {"case": "combine", "routing": "uniform", "tokens": 128, "figures": figures(ours=9.5, NCCL=25.0)}
    shape = {"hidden": 7168, "top_k": 8, "experts": 256}
    recorded("experts", 2, contenders=["ours", "NCCL"], options=shape, results=[sent])
    norm = {"hidden": 4096, "tokens": 8, "figures": figures(ours=3.95, NCCL=7.0)}
    recorded("norms", 2, contenders=["ours", "NCCL"], results=[norm])
    row = {"reserved_over_live": 1.05, "steps_a_second": 20.0, "rate_over_torch": 0.995}
    recorded("install", 1, same_losses=True, results={"symmpool": row})
    programs = {"with": "symmpool", "sizes": "any", "programs": 1000, "wrong_programs": 0, "wrong_sums": 0}
    recorded("wrong_sums", 2, random_programs=[programs])
    text = "\n\n".join(map(tables_gpu.more, tables_gpu.MORE))
    for line in (
        "| 1 MiB | 8.16 | 8.00 | 1.02 |",
        "| combine, bf16 | uniform | 128 | 9.50 (13) | 25.00 |",
        "| 4096 | 8 | 3.95 (3.4) | 7.00 |",
        "The largest all-reduces with 768 MiB of scratch; 4 x H200",
        "| 1 MiB | 8.16 | 9.00 | 0.84 | 1.5 |",
        "| all_gather | 1 MiB | 10.00 | 1.50 | 20.00 | - |",
        "| all_gather | 1 MiB | 10.00 | 1.25 | - | - |",
        "| all_reduce | torch | 4 KiB | 2.00 | 1.50 | 2.00 | 1.25 | 2.50 | 2.00 | - | - |",
        "| operation | bytes | memory | products us | symmpool us more | symmpool 2 us more | NCCL us more |",
        "| all_gather | 1 MiB | torch's | 90.00 | 5.00 | - | 7.50 |",
        "| all_gather | 1 MiB | windows | 90.00 | 5.00 | - | 7.50 |",
        "| all_gather | 1 MiB | 90.00 | 95.00 | 97.50 | 1.03 |",
        "Hugging Face's Llama of 8 layers",
        "| FSDP2 | 1,100 1,150 | 1,000 | 1.12 | 1.03 | 0 | 1.0e-05 |",
        "| ours fused | 1,100 1,150 | 1.12 | 1.08 | 0 |",
        "Decoding, tensor parallel, compiled and in a CUDA graph. Hugging Face's Llama of 8 layers",
        "| ours fused | 1,100 1,150 | 1.12 | 1.15 | 0 |",
        "| the same in a CUDA graph | - | 1,000 | - | 1.15 | - | 1.0e-05 |",
        "| `symmpool.all_reduce` | 4.00 | 5 |",
        "| all-reduce from Rust | 2.50 | 3 |",
        "| `with pool`, entered and left | 3.50 | 4.00 |",
        "| ours: commit of 64 MiB | 2.00 | 1.00 | 2 |",
        "| nccl_windows: not measured | - | - | - |",
        "| one segment of 64 MiB | 1.50 | 2 | 0.10 |",
        "| NCCL | eager | 1,234 | 1.000000 | 0 |",
        "`bench/programs/tensor_parallel_fused.py`, 4 layers of Llama 3 8B's shape, "
        "tokens a second; 2 x H200",
        "| decode | 8 | compiled graph | 9,000 | 10,000 | 11,500 | 1.15 | 1.1 | 0 |",
        "| training | 8,192 | eager | 9,000 | - | - | - | 1.08 | 0 |",
        "| `symmpool.install()` | 1.050 | 20.00 | 0.995 |",
        "the same losses (bars: at most 1.10, at least 0.99); 1 x H200",
        "| symmpool | any | 1,000 | 0 | 0 |",
    ):
        assert line in text, line


def test_the_summary_counts_as_tables_do_and_names_what_is_behind(recorded):
    times = {1024: 9.0, 65536: 6.0, 1 << 24: 19.7, 1 << 28: 30.0}
    entries = [
        {"operation": "broadcast", "bytes": count, "figures": figures(ours=20.0, NCCL=us, NCCL_window=99.0)}
        for count, us in times.items()
    ]
    recorded("collectives", 2, contenders=["ours", "NCCL", "NCCL window"], results=entries)
    host = [{"op": "all_reduce", "ranks": 2, "bytes": 1024, "ours_us": 1.0, "peers": {"gloo": 0.5}}]
    for name in ("host", "host_shared_cores", "host_busy_cores"):
        (cells.RESULTS / f"{name}.json").write_text(json.dumps(host))
    (cells.RESULTS / "host_messages.json").write_text(json.dumps({"results": []}))
    link = "[collectives in windows](performance/collectives.md)"
    row = f"| {link} | 2 x H200 | NCCL, its windows | 1 | 1 | 2 | 0.30, 0.98, 1.50 |"
    assert row in tables_summary.summary()
    behind = tables_summary.behind().splitlines()[2:]
    assert behind[0] == f"| {link} | 2 x H200 | broadcast, 64 KiB: 0.30; broadcast, 1 KiB: 0.45 |"
    assert "all-reduce, 2 ranks, 1 KiB: 0.50" in behind[1] and len(behind) == 4
    shown = [line for line in tables_summary.readme().splitlines() if line.startswith("| broadcast")]
    assert shown == ["| broadcast of 64 KiB, 16 MiB, 256 MiB | - | 0.30, 0.98, 1.50 | - | - |"]


def svg(text):
    """The picture's elements, by tag; an error where it is no XML."""
    return [(each.tag.rpartition("}")[2], each) for each in ElementTree.fromstring(text).iter()]


def words(text):
    return [each.text for tag, each in svg(text) if tag == "text"]


@pytest.mark.parametrize("name", [*charts.PICTURES, *tables_scale.PICTURES])
def test_pictures_show_what_was_measured(name):
    made = (charts.FOLDER / name).read_text()
    pictures = charts.PICTURES | tables_scale.PICTURES
    assert made == pictures[name](), "it does not match bench/results; run make tables"
    assert "prefers-color-scheme: dark" in made
    # A picture is loaded by itself: nothing else may be needed to show it.
    assert "http" not in made.replace("http://www.w3.org/2000/svg", "")
    assert any(f"pictures/{name})" in document.read_text() for document in tables.DOCUMENTS)


def test_a_picture_has_a_curve_for_each_contender_and_names_its_machine(recorded):
    entries = [
        {"bytes": 1024 << shift, "figures": figures(ours=2.0 + shift, NCCL=8.0 + shift)}
        for shift in range(11)
    ]
    # Who has no time at a size has no point there.
    del entries[-1]["figures"]["NCCL"]
    recorded("allreduce", 2, contenders=["ours", "NCCL"], results=entries)
    text = charts.picture("allreduce", "All-reduce")
    assert {"All-reduce, 2 x H200", "symmpool", "NCCL", "1 KiB", "4.00"} <= set(words(text))
    assert "2 x H200, torch 2.11, NCCL 2.28, driver 580, 2026-11-22:" in words(text)
    assert "in graphs of 100 calls, in which NCCL's small calls take up to twice as long" in words(text)
    marks = [each.get("class") for _, each in svg(text) if "mark" in each.get("class", "")]
    # One more of each in the legend.
    assert marks.count("mark ours") == 12 and marks.count("mark nccl") == 11
    inside = [each for tag, each in svg(text) if tag == "circle" and float(each.get("cx")) > charts.LEFT + 20]
    at = [float(each.get("cy")) for each in sorted(inside, key=lambda each: float(each.get("cx")))]
    assert at == sorted(at, reverse=True), "longer times lie higher"
    # The second machine has a panel of its own.
    recorded("allreduce", 4, contenders=["ours", "NCCL"], results=entries)
    assert "All-reduce, 4 x H200" in words(charts.picture("allreduce", "All-reduce"))


def test_a_table_counts_where_ours_is_ahead_equal_and_behind():
    rows = [[1, "1.03"], [2, "1.02"], [3, "0.98"], [4, "0.97"], [5, "-"], [6, "1,234.00"]]
    made = cells.table(["bytes", "best contender / ours"], rows)
    counted = "`best contender / ours`: ahead in 2 of 5 cells, equal (within 2%) in 2, behind in 1."
    assert made.endswith(f"\n\n{counted}")
    assert cells.table(["bytes", "bound / ours"], rows).endswith("1,234.00 |")


def test_a_table_in_a_list_is_indented_like_its_mark():
    text = "- one\n  <!-- table: two -->\n  old\n  <!-- end -->\n- three\n"
    made = tables.fill(text, {"two": lambda: "a\nb"})
    assert made == "- one\n  <!-- table: two -->\n  a\n  b\n  <!-- end -->\n- three\n"
    assert tables.fill(made, {"two": lambda: "a\nb"}) == made


def test_the_documents_ask_for_every_table():
    texts = [document.read_text() for document in tables.DOCUMENTS]
    shown = {found[3] for text in texts for found in tables.MARKED.finditer(text)}
    assert shown == set(tables.MAKERS)


def test_the_kernels_of_the_extension_are_those_of_the_sources():
    from symmpool import _symmpool

    assert _symmpool.built()[1] == kernel_versions.of_this_tree()


def test_a_table_says_whose_kernels_have_changed_since(tmp_path):
    for path, text in {
        "one/a.cu": '#include "two/b.cuh"\n',
        "two/b.cuh": "",
        "three/c.cu": "// nothing is included\n",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    before = kernel_versions.kernel_versions(tmp_path)
    (tmp_path / "two/b.cuh").write_text("int x;\n")
    after = kernel_versions.kernel_versions(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"one", "two"}

    now = {"all_reduce": "1", "all_to_all": "2", "broadcast": "3", "fused": "4"}
    report = {"benchmark": "collectives", "kernels": now | {"fused": "0"}}
    changed_since = kernel_versions.changed_since
    assert changed_since(report, now) == ""
    assert changed_since(report | {"benchmark": "fused"}, now) == "with older kernels of fused than today's"
    assert changed_since({"benchmark": "fused"}, now) == "with which kernels is not recorded"
    assert changed_since({"benchmark": "windows"}, now) == ""


def test_times_of_small_calls_beside_peers_are_those_of_their_fastest_form():
    found = 0
    for path in sorted((cells.RESULTS / "gpu").glob("*.json")):
        report = json.loads(path.read_text())
        if report.get("benchmark") not in ("allreduce", "alltoallv", "collectives", "experts", "fused"):
            continue
        if all(name.startswith("ours") for name in report["contenders"]):
            continue
        for entry in report["results"]:
            if entry.get("bytes", 0) < 16 << 20:
                found += 1
                missing = [name for name, each in entry["figures"].items() if "form" not in each]
                assert not missing, f"{path.name}, {entry}"
    assert found > 100
