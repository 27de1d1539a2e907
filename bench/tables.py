"""Builds the tables of docs/performance and README.md, and their pictures, from bench/results.

In the documents everything between `<!-- table: NAME -->` and `<!-- end -->` is replaced by the table that
the function of that name makes from its results: here, in tables_gpu.py for GPUs, in tables_scale.py for
several hosts, or in tables_summary.py. The pictures are the files in docs/pictures, made by charts.py and
tables_scale.py. With --check nothing is written, and the exit code says whether all of them are up to date.
"""

import re
import sys
import textwrap

import charts
import tables_gpu
import tables_scale
import tables_summary
from cells import RESULTS, ROOT, figure, load, score, size, table


def host_table(operation, results="host"):
    """Our time and the peers' times of one operation, a row for each number of ranks and each size."""
    entries = [entry for entry in load(results) if entry["op"] == operation]
    peers = sorted({peer for entry in entries for peer in entry["peers"]})
    head = ["ranks", "bytes", "symmpool us", *[f"{peer} us" for peer in peers], "memcpy us"]
    rows = []
    for entry in sorted(entries, key=lambda entry: (entry["ranks"], entry["bytes"])):
        best = min(entry["peers"].values(), default=None)
        times = [entry["peers"].get(peer) for peer in peers]
        rows.append(
            [
                entry["ranks"],
                size(entry["bytes"]),
                figure(entry["ours_us"]),
                *[figure(us) for us in [*times, entry.get("memcpy_us")]],
                f"{best / entry['ours_us']:.2f}" if best else "-",
            ]
        )
    return table([*head, "best contender / ours"], rows)


def all_reduce():
    return host_table("all_reduce")


def all_to_all():
    return host_table("all_to_all")


def all_reduce_shared_cores():
    return host_table("all_reduce", "host_shared_cores")


def all_to_all_shared_cores():
    return host_table("all_to_all", "host_shared_cores")


def all_reduce_busy_cores():
    return host_table("all_reduce", "host_busy_cores")


def all_to_all_busy_cores():
    return host_table("all_to_all", "host_busy_cores")


def all_to_all_v():
    """Our time and the best contender's for each matrix, a column for each size; empty if not measured."""
    if not (RESULTS / "host_matrices.json").exists():
        return ""
    entries = load("host_matrices")
    sizes = sorted({entry["bytes"] for entry in entries})
    rows = {}
    for entry in entries:
        rows.setdefault((entry["ranks"], entry["matrix"]), {})[entry["bytes"]] = entry

    def cell(entry):
        if entry is None or not entry["peers"]:
            return "-"
        name, best = min(entry["peers"].items(), key=lambda peer: peer[1])
        ours = entry["ours_us"]
        return f"{figure(ours)} / {figure(best)} ({name}): {best / ours:.2f}"

    head = ["ranks", "matrix", *map(size, sizes)]
    cells = [[*key, *[cell(row.get(n)) for n in sizes]] for key, row in rows.items()]
    ratios = [each.rsplit(" ", 1)[-1] for row in cells for each in row[2:]]
    return f"{table(head, cells)}\n\nBest contender / ours: {score(ratios)}."


def messages():
    """Our time and gloo's of point-to-point messages and of pipelines, a column for each number of ranks."""
    report = load("host_messages")
    rows = {}
    for entry in report["results"]:
        what = f"`{entry['what']}`" + (f", {size(entry['bytes'])}" if "bytes" in entry else "")
        rows.setdefault(what, {})[entry["ranks"]] = entry["us"]
    worlds = sorted({entry["ranks"] for entry in report["results"]})

    def cell(us):
        return f"{figure(us['symmpool'])} / {figure(us['gloo'])}: {us['gloo'] / us['symmpool']:.2f}"

    cells = [[what, *[cell(row[world]) for world in worlds]] for what, row in rows.items()]
    ratios = [each.rsplit(" ", 1)[-1] for row in cells for each in row[1:]]
    head = ["symmpool us / gloo us: ratio", *[f"{world} ranks" for world in worlds]]
    versions = report["versions"]
    where = f"{report['device']}, torch {versions['torch']}, {report['measured_at'][:10]}"
    return f"{where}:\n\n{table(head, cells)}\n\ngloo / ours: {score(ratios)}."


def first_calls():
    """Returns the table of a new group's first call on the backend and on gloo, in milliseconds."""
    report = load("host_first_calls")
    names = {"group_of_all": "a group of all ranks", "mesh": "the two groups of a mesh"}
    rows = []
    for entry in report["results"]:
        ours, gloo = entry["ms"]["symmpool"], entry["ms"]["gloo"]
        rows.append([names[entry["what"]], entry["ranks"], figure(ours), figure(gloo), f"{gloo / ours:.2f}"])
    versions = report["versions"]
    where = f"{report['device']}, torch {versions['torch']}, {report['measured_at'][:10]}"
    where += f", load {report['load']:.1f} before" + ", with priority over it" * report["has_priority"]
    head = ["what", "ranks", "symmpool ms", "gloo ms", "best contender / ours"]
    return f"{where}:\n\n{table(head, rows)}"


def packing():
    rows = {}
    for entry in load("packing")["results"]:
        rows.setdefault(entry["trace"], {})[entry["policy"]] = entry
    head = ["trace", "peak live", "contiguous", "segments", "per segment", "segments"]
    body = []
    for trace, entries in rows.items():
        cells = [trace, f"{entries['contiguous']['peak_live_bytes'] / 2**30:.2f} GiB"]
        for policy in ("contiguous", "per-segment"):
            entry = entries[policy]
            ratio = entry["peak_reserved_bytes"] / entry["peak_live_bytes"]
            cells += [f"{ratio:.3f}", entry["segments"]]
        body.append(cells)
    return table(head, body)


def lane():
    results = load("lane")["results"]
    rows = [[name, f"{ns:,.1f} ns"] for name, ns in results.items() if not name.startswith("replay")]
    return table(["criterion benchmark", "median"], rows)


def commit():
    report = load("commit")["results"]
    rows = [
        [entry["name"], f"{entry['commit_ms']:.2f} ms", f"{entry['alloc_ms']:.2f} ms"]
        for entry in report["scenarios"]
    ]
    rows.append(["nothing, requested", f"{report['empty_commit_ms']:.3f} ms", "-"])
    rows.append(["check that none is due", f"{report['due_check_ns']:.1f} ns", "-"])
    for entry in load("commit_simulated")["results"]["simulated"]:
        sent = entry["bytes_sent_total"] + entry["bytes_received_total"]
        trips = entry["round_trips_per_rank"]
        name = f"{entry['segments']} segments, {entry['ranks']:,} simulated ranks"
        name += f" ({sent:,} bytes, {trips} round trips a rank)"
        rows.append([name, f"{entry['commit_ms']:,.0f} ms", "-"])
    return table(["commit of", "time", "allocating it"], rows)


MAKERS = {
    maker.__name__: maker
    for maker in (
        all_reduce,
        all_to_all,
        all_reduce_shared_cores,
        all_to_all_shared_cores,
        all_reduce_busy_cores,
        all_to_all_busy_cores,
        first_calls,
        all_to_all_v,
        messages,
        packing,
        lane,
        commit,
    )
}
MAKERS |= tables_gpu.MAKERS | tables_scale.MAKERS | tables_summary.MAKERS
#: The documents that have tables.
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "docs/performance.md",
    ROOT / "docs/experts.md",
    ROOT / "docs/scale.md",
    *sorted((ROOT / "docs/performance").glob("*.md")),
)
MARKED = re.compile(r"^( *)(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL | re.MULTILINE)


def fill(text, makers=MAKERS):
    """The text with every marked table made anew."""

    def made(match):
        indent, begin, name, end = match.groups()
        if name not in makers:
            raise SystemExit(f"there is no table {name!r}; known are {sorted(makers)}")
        return indent + begin + textwrap.indent(f"{makers[name]()}\n{end}", indent)

    return MARKED.sub(made, text)


def made():
    """{file: its text as bench/results has it} of all documents with tables and of all pictures."""
    texts = {document: fill(document.read_text()) for document in DOCUMENTS}
    pictures = charts.PICTURES | tables_scale.PICTURES
    return texts | {charts.FOLDER / name: make() for name, make in pictures.items()}


def main(arguments):
    if arguments in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if arguments not in ([], ["--check"]):
        return __doc__
    texts = made()
    if arguments:
        old = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
        names = " and ".join(str(path.relative_to(ROOT)) for path in old)
        return f"not as bench/results has it: {names}; run make tables" if old else 0
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
